"""A node as a replica, under frameworks: they say which backwards end a window, and gradients are averaged in those alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decent_dp.transport import NodeGroup
from tests.framework_cases import as_launched, copies

NODE = {"replica": "node", "local_world_size": 2}
ACCUMULATE = 2


def counted() -> list[int]:
    """Grows with each sum over the workers of a node: one per backward, since the model has one bucket of gradients."""
    sums: list[int] = []
    sum_ = NodeGroup.sum_

    def count(group: NodeGroup, tensor: Tensor) -> Any:
        sums.append(1)
        return sum_(group, tensor)

    NodeGroup.sum_ = count  # type: ignore[method-assign]
    return sums


def lightning(rank: int, n: int, folder: Path) -> Any:
    as_launched(rank, n)
    from tests import lightning_cases as cases

    sums, module = counted(), cases.Module()
    strategy = cases.GossipStrategy(**NODE)
    run = cases.fitted(rank, n, module, strategy=strategy, accumulate_grad_batches=ACCUMULATE, max_epochs=1)
    return len(sums), run.rounds, run.params


def fabric(rank: int, n: int, folder: Path) -> Any:
    as_launched(rank, n)
    from tests import lightning_cases as cases

    sums = counted()
    fabric, model, optimizer = cases.fabric_parts(rank, n, strategy=cases.GossipFabricStrategy(**NODE))
    for number, batch in enumerate(fabric.setup_dataloaders(cases.loader())):
        with fabric.no_backward_sync(model, enabled=number % ACCUMULATE == 0):
            fabric.backward(model(**batch)["loss"] / ACCUMULATE)
        if number % ACCUMULATE:
            optimizer.step()
            optimizer.zero_grad()
    replica = fabric.strategy.replica
    found = len(sums), replica.stats().rounds, copies(model.module)
    replica.close()
    return found


def transformers(rank: int, n: int, folder: Path) -> Any:
    as_launched(rank, n)
    from decent_dp.integrations.transformers import attach
    from tests.test_transformers import Model, trainer_of

    sums, model = counted(), Model(seed=rank)
    trainer = trainer_of(folder, model, gradient_accumulation_steps=ACCUMULATE, max_steps=4)
    callback = attach(trainer, **NODE)
    trainer.train()
    assert "no_sync" not in vars(trainer.accelerator)
    return len(sums), callback.replica.stats().rounds, copies(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "needs", "steps"), [(lightning, "lightning", 4), (fabric, "lightning", 4), (transformers, "transformers", 4)]
)
def test_gradients_are_averaged_once_in_a_window(workers, tmp_path, train, needs, steps):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    found = workers(2, train, tmp_path)
    for sums, rounds, params in found:
        assert (sums, rounds) == (steps, steps)
        assert all(map(torch.equal, params, found[0][-1]))
