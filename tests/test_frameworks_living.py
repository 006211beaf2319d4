"""A worker is killed in the middle of training: in the Trainer of transformers, and in Lightning, the others go on."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import decent_dp
from decent_dp.checkpoint import save, saver
from decent_dp.integrations._survivors import SurvivorCollectives, save_again
from decent_dp.transport.control_plane import Courier
from tests.framework_cases import Model, Points, as_launched, copies, quiet_frameworks
from tests.helpers import error_of
from tests.members import die, die_in, make, survivors

# Found rather than imported: the imports take seconds, which only the workers need to spend.
_MISSING = [name for name in ("transformers", "accelerate", "lightning") if importlib.util.find_spec(name) is None]
needs_frameworks = pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}")

N, FAULTS = 4, {"dead_after": 3.0}


def loss_of(params: list[torch.Tensor], dataset: Points) -> float:
    """Of a model with these parameters, on the whole dataset."""
    model = Model()
    with torch.no_grad():
        for param, value in zip(model.parameters(), params, strict=True):
            param.copy_(value)
        return float(model(dataset.x, dataset.y)["loss"])


# -- the collectives -------------------------------------------------------------------------------------------------------


def collectives(rank: int, n: int, folder: Path) -> Any:
    """Worker 0 dies in a save."""
    *_, replica = make(rank)
    seen: list[tuple[int, ...]] = []
    living = SurvivorCollectives(rank, replica, regrouped=lambda: seen.append(living.ranks))
    whole = torch.arange(1e5) + rank
    value = {"path": Path("a"), "part": whole[3:5], 1: (nn.Parameter(whole[:1]), rank, None, whole[1].expand(3))}
    for r, one in enumerate(living.gather_objects(value)):
        assert one == {"path": Path("a"), "part": one["part"], 1: (torch.tensor([r]), r, None, one[1][3])}
        assert (one["part"].tolist(), one[1][3].tolist()) == ([3 + r, 4 + r], [1 + r] * 3)
    assert living.gather({"rank": rank}) == [{"rank": r} for r in range(n)]
    gathered = living.gather_tensors([torch.tensor(rank)] * rank)
    assert [[int(tensor) for tensor in own] for own in gathered] == [[r] * r for r in range(n)]
    assert living.broadcast(value, 0)["part"].tolist() == [3, 4]
    assert [living.broadcast(rank, r) for r in range(n)] == list(range(n))
    assert seen == [(0, 1, 2)] * 7
    if rank == 0:
        die_in(saver, "write_shard")
    save_again(replica, partial(save, replica, folder, keep=1))
    found = [living.broadcast(rank, 0), living.broadcast(rank, 2)]
    for operation in ("mean", "sum", "max", "min", "product", dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        found.append(living.reduce_(torch.tensor([2.0 * rank]), operation).item())
    found.append(living.reduce_(torch.tensor(3 * rank), "mean").item())
    assert (living.ranks, living.position) == ((1, 2), (rank - 1, 2))
    assert seen[-1] == (1, 2)
    errors = [
        error_of(lambda: living.reduce_(torch.zeros(1), "band")),
        error_of(lambda: living.gather_objects(rank - 1 and Points(1))),
    ]
    replica.close()
    return found, errors


def test_collectives_and_saves_are_those_of_the_living_workers(workers, tmp_path):
    outcomes = workers.outcomes(3, collectives, tmp_path)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    for found, errors in survivors(outcomes, 0):
        assert found == [1, 2, 3.0, 6.0, 4.0, 2.0, 8.0, 3.0, 6.0, 4]
        assert "with faults= there is no reduction 'band': choose one of ['avg', 'max', 'min', 'product'" in errors[0]
        assert "with faults= collectives carry tensors, arrays, numbers, texts, paths, and lists, tuples and dicts" in errors[1]


def broadcasts(rank: int, n: int) -> Any:
    """Worker 1 dies when it is to send the others its value, which they wait for."""
    *_, replica = make(rank)
    living = SurvivorCollectives(rank, replica)
    living.barrier()
    if rank == 1:
        die_in(Courier, "put")
    found = living.broadcast({"from": rank, "x": torch.full((3,), rank)}, 1)
    replica.close()
    return found["from"], found["x"].tolist(), living.ranks


def test_of_a_source_that_is_gone_the_first_takes_the_place(workers):
    assert survivors(workers.outcomes(3, broadcasts), 1) == [(0, [0] * 3, (0, 2))] * 2


# -- the Trainer of transformers -------------------------------------------------------------------------------------------


def transformers_trains(rank: int, n: int, folder: Path, victim: int, where: str) -> Any:
    """Logs, evaluates and saves at every second step; ``victim`` (-1: nobody) dies after step 3, or in the save of step 4."""
    as_launched(rank, n)
    from transformers import TrainerCallback

    from decent_dp.integrations.transformers import attach
    from tests.test_transformers import trainer_of

    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (rank, state.global_step) == (victim, 3):
                if where == "save":
                    die_in(trainer, "_save")
                elif where == "evaluation":
                    die_in(trainer, "prediction_step", after=True)
                else:
                    die()

    every = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(folder, callbacks=[Die()], max_steps=8 if victim >= 0 else 10, **every)
    attach(trainer, faults=decent_dp.Tolerate(**FAULTS))
    trainer.train(resume_from_checkpoint=victim < 0)
    history = [
        {key: entry[key] for key in ("step", "loss", "eval_loss") if key in entry} for entry in trainer.state.log_history
    ]
    # After it each worker is on its own, and has the mean.
    found = SimpleNamespace(params=copies(trainer.model), history=history, alone=trainer.evaluate()["eval_loss"])
    found.writes = trainer.state.is_world_process_zero
    return found


# -- Lightning -------------------------------------------------------------------------------------------------------------


def lightning_trains(rank: int, n: int, folder: Path, victim: int, where: str) -> Any:
    """Logs, validates and saves; ``victim`` (-1: nobody) dies after step 5, or in the save of step 6."""
    quiet_frameworks()
    from tests import lightning_cases as cases

    strategy = cases.GossipStrategy(faults=decent_dp.Tolerate(**FAULTS))
    module = cases.Metered(log=True)

    def act(trainer: Any) -> None:
        if where == "save":
            die_in(strategy.checkpoint_io, "save_checkpoint")
        elif where == "evaluation":
            die_in(module, "validation_step", after=True)
        elif where == "epoch":
            die_in(module, "on_train_epoch_end")
        else:
            die()

    saves = cases.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1, save_last=True)
    trainer = cases.trainer(
        *(rank, n),
        strategy=strategy,
        callbacks=[cases.Interrupt(victim, 5, act), saves],
        enable_checkpointing=True,
        max_epochs=3 if victim >= 0 else 4,
        reload_dataloaders_every_n_epochs=1,
    )
    loaders = cases.loader(), cases.loader(60, shuffle=False)
    trainer.fit(module, *loaders, ckpt_path=str(folder / "last.ckpt") if victim < 0 else None)
    history = [float(trainer.callback_metrics[name]) for name in ("epoch_mean", "val_loss", "metric")]
    found = SimpleNamespace(params=copies(module.model), history=history, validated=module.validated[-1])
    found.alone = [
        call(module, cases.loader(60, shuffle=False), verbose=False)[0][name]
        for call in (trainer.validate, trainer.test)
        for name in ("val_loss", "metric")
    ]
    found.left = module.metric.dist_sync_fn
    return found


def fabric_trains(rank: int, n: int, folder: Path) -> Any:
    """Worker 0 dies after the second step; the others reduce, save, and close."""
    quiet_frameworks()
    from tests import lightning_cases as cases

    strategy = cases.GossipFabricStrategy(faults=decent_dp.Tolerate(**FAULTS))
    fabric, model, optimizer = cases.fabric_parts(rank, n, strategy=strategy)
    for number, batch in enumerate(fabric.setup_dataloaders(cases.loader())):
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        if (rank, number) == (0, 1):
            die()
    found = SimpleNamespace(total=float(fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum")))
    found.gathered = fabric.all_gather(torch.tensor([rank])).flatten().tolist()
    fabric.barrier()
    fabric.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": 1})
    fabric.strategy.replica.average_()
    found.params = copies(model.module)
    fabric.strategy.replica.close()
    found.alone = fabric.all_gather(torch.tensor([rank])).flatten().tolist()  # as after a fit
    found.error = error_of(lambda: fabric.setup(Model(), torch.optim.SGD(model.parameters(), lr=0.1)))
    return found


# -- what both promise -----------------------------------------------------------------------------------------------------


def assert_same_training(found: list[Any]) -> None:
    for other in found:
        assert other.history == found[0].history
        for a, b in zip(other.params, found[0].params, strict=True):
            assert torch.equal(a, b)


WHERE = [(2, "step"), (0, "step"), (0, "save"), (2, "save"), (1, "evaluation")]


@needs_frameworks
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "where"), WHERE)
def test_the_trainer_of_transformers_continues(workers, tmp_path, victim, where):
    found = survivors(workers.outcomes(N, transformers_trains, tmp_path, victim, where), victim)
    assert_same_training(found)
    losses = {entry["step"]: entry["eval_loss"] for entry in found[0].history if "eval_loss" in entry}
    assert sorted(losses) == [2, 4, 6, 8]
    expected = pytest.approx(loss_of(found[0].params, Points(32, seed=1)), rel=1e-5)
    assert losses[8] == expected  # the mean, on the whole set
    assert [other.alone for other in found] == [expected] * (N - 1)
    assert [other.writes for other in found] == [True, False, False]
    for step in (4, 6, 8):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert (checkpoint / "model.safetensors").is_file()
        assert (checkpoint / "trainer_state.json").is_file()
        assert len(list(checkpoint.glob("decent_dp/*/*.safetensors"))) == N - 1
    resumed = workers(N - 1, transformers_trains, tmp_path, -1, "")
    assert_same_training(resumed)
    assert resumed[0].history[:8] == found[0].history[:8]  # two entries for each of four steps


@needs_frameworks
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "where"), [*WHERE, (0, "epoch")])
def test_lightning_continues(workers, tmp_path, victim, where):
    found = survivors(workers.outcomes(N, lightning_trains, tmp_path, victim, where), victim)
    assert_same_training(found)
    assert found[0].history[1:] == [pytest.approx(loss_of(found[0].validated, Points(60)), rel=1e-5)] * 2
    expected = pytest.approx(loss_of(found[0].params, Points(60)), rel=1e-5)
    assert [other.alone for other in found] == [[expected] * 4] * (N - 1)
    assert [other.left for other in found] == [None] * (N - 1)
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) >= 2
    for path in files:
        if where in ("step", "save") or path.name == "last.ckpt":
            assert torch.load(path, weights_only=False)["decent_dp"]["workers"] == N - 1
            assert len(list(tmp_path.glob(f"{path.name}.decent_dp/*/lightning-*.ckpt"))) == N - 1
    resumed = workers(N - 1, lightning_trains, tmp_path, -1, "")
    assert_same_training(resumed)


@needs_frameworks
@pytest.mark.slow
def test_fabric_continues(workers, tmp_path):
    found = survivors(workers.outcomes(N, fabric_trains, tmp_path), 0)
    for rank, one in zip((1, 2, 3), found, strict=True):
        assert (one.total, one.gathered, one.alone) == (6.0, [1, 2, 3], [rank])
        assert one.error.startswith("RuntimeError: workers have died in an earlier training")
        assert all(torch.equal(a, b) for a, b in zip(one.params, found[0].params, strict=True))
    saved = torch.load(tmp_path / "fabric.ckpt")
    assert saved["decent_dp"]["workers"] == N - 1
    for a, b in zip(saved["model"].values(), found[0].params, strict=True):
        torch.testing.assert_close(a, b)
