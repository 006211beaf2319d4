"""A worker is killed in the middle of training: in the Trainer of transformers, and in Lightning, the others continue."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import decent_dp
from tests.framework_cases import as_launched, copies, quiet_frameworks
from tests.test_survivor_calls import die

FAULTS = {"dead_after": 3.0}


def lightning_goes_on(rank: int, n: int, folder: str, victim: int, what: list[str]) -> Any:
    quiet_frameworks()
    from tests import lightning_cases as cases

    module = cases.Module(log="log" in what)
    callbacks: list[Any] = [cases.Interrupt(victim, 5, lambda _: die())]
    if "save" in what:
        callbacks.append(cases.ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1))
    loaders = (cases.loader(), cases.loader(shuffle=False)) if "validate" in what else (cases.loader(),)
    strategy = cases.GossipStrategy(faults=decent_dp.Tolerate(**FAULTS))
    cases.fitted(rank, n, module, *loaders, strategy=strategy, callbacks=callbacks, max_epochs=3,
                 enable_checkpointing="save" in what)
    return copies(module)


def trainer_goes_on(rank: int, n: int, folder: Path, victim: int, what: list[str]) -> Any:
    as_launched(rank, n)
    from transformers import TrainerCallback

    from decent_dp.integrations.transformers import attach
    from tests.test_transformers import trainer_of

    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (rank, state.global_step) == (victim, 3):
                die()

    options: dict[str, Any] = {"logging_steps": 2 if "log" in what else 500}
    if "save" in what:
        options |= {"save_strategy": "steps", "save_steps": 4}
    if "validate" in what:
        options |= {"eval_strategy": "steps", "eval_steps": 4}
    trainer = trainer_of(folder, callbacks=[Die()], max_steps=8, **options)
    attach(trainer, faults=decent_dp.Tolerate(**FAULTS))
    trainer.train()
    return copies(trainer.model)
