"""Checkpoints and exports of sharded replicas."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import decent_dp
from decent_dp.checkpoint import AveragedReplica, calibrate, export, load, save
from decent_dp.replica.snapshot import settle, take
from decent_dp.rules import OuterNesterov
from decent_dp.transport import run_replicas
from tests.resuming import assert_equal, dumb_copy
from tests.sharded_cases import (
    ADAMW,
    SGD,
    Case,
    Odd,
    Sharded,
    Unsharded,
    mesh_of,
    needs_shards,
    shard,
    step,
    values,
    whole,
    zero_grad,
)

pytestmark = needs_shards


class Keeping(torch.optim.Optimizer):
    """Keeps DTensors in containers, beside tensors and what is none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                state.setdefault("last", deque(maxlen=2)).append(param.grad.clone())
                state["seen"], state["name"] = state.get("seen", torch.zeros(2)) + 1, "kept"
                state["pair"] = {"sums": [sum(state["last"])]}
                param.sub_(0.01 * state["pair"]["sums"][0])


RUNS = {
    "adamw": Case({"topology": "one-peer-exp", "bucket_size_in_mb": 1e-4}, ADAMW),
    "int8": Case({"compression": "int8", "topology": "complete"}, SGD),
    "outer": Case({"rule": OuterNesterov(momentum=0.6), "mix_every": 2}, ADAMW, fsdp={"reshard_after_forward": False}),
    "keeping": Case({"overlap": False}, Keeping),
}


def state(run: Sharded) -> Any:
    return dumb_copy(listed(take(run.gossip)))


def listed(value: Any) -> Any:
    if isinstance(value, (list, deque)):
        return [listed(item) for item in value]
    return {key: listed(item) for key, item in value.items()} if isinstance(value, dict) else value


def resumed(case: Case, mesh: Any, path: Path) -> None:
    """A run that is stopped in a window, and while it is looked at, equals the one without a stop."""
    run = Sharded(case, mesh)
    for t in range(3):
        step(run, t)
    zero_grad(run)
    run.gradients(3)  # of a window that is still open
    run.looked_at(3)
    with run.gossip.averaged():
        run.looked_at(3)
        save(run.gossip, path, {"epoch": mesh.get_rank()})
    run.optimizers[0].step()
    for t in (4, 5):
        step(run, t)
    settle(run.gossip)  # as the other run, which saves by hand
    step(run, 6)
    wanted = state(run)
    run.gossip.close()

    again = Sharded(case, mesh, seed=7)
    step(again, 0)
    again.looked_at(0)
    assert load(again.gossip, path) == {"epoch": mesh.get_rank()}
    again.optimizers[0].step()
    for t in (4, 5):
        step(again, t)
    # By hand: each worker's own.
    kept = dumb_copy(
        {
            "model": {name: local(value) for name, value in again.model.state_dict().items()},
            "gossip": again.gossip.state_dict(),
        }
    )
    optim = copy.deepcopy(again.optimizers[0].state_dict())
    step(again, 6)
    assert_equal(state(again), wanted, "resumed")

    with torch.no_grad():
        for name, value in again.model.state_dict().items():
            local(value).copy_(kept["model"][name])
    if case.optimizer is not Keeping:  # torch's optimizers do not load deques of tensors
        again.optimizers[0].load_state_dict(optim)
        again.gossip.load_state_dict(kept["gossip"])
        step(again, 6)
        assert_equal(state(again), wanted, "resumed by hand")
    again.gossip.close()


def local(value: Tensor) -> Tensor:
    return value.to_local() if type(value).__name__ == "DTensor" else value


def exported(mesh: Any, folder: Path) -> dict[str, Tensor]:
    run = Sharded(Case({"topology": "complete"}, ADAMW), mesh)
    ema = AveragedReplica(run.gossip, decay=0.5)
    for t in range(4):
        step(run, t)
        ema.update()
        run.looked_at(t)
    before = values(run.model)
    run.looked_at(4)
    export(run.gossip, folder / "mean.safetensors")
    export(run.gossip, folder / "mean.pt")
    assert_equal(values(run.model), before)
    with run.gossip.averaged():
        run.looked_at(4)
        export(run.gossip, folder / "inside.pt")
        mean = values(run.model)
    with ema.averaged():
        run.looked_at(4)
        export(run.gossip, folder / "ema.pt")
    assert_equal(values(run.model), before)
    save(run.gossip, folder / "two by two")
    for policy in (False, True):  # with a policy, they are kept in another place
        window = Sharded(Case(bf16=policy), mesh)
        window.model.set_requires_gradient_sync(False)
        window.loss(0).backward()
        with pytest.raises(RuntimeError, match="save was called in a window whose gradients FSDP has not reduced yet"):
            take(window.gossip)
        with pytest.raises(RuntimeError, match="load was called in a window whose gradients FSDP has not reduced yet"):
            load(window.gossip, folder / "two by two")
        with pytest.raises(RuntimeError, match="load_state_dict was called in a window"):
            window.gossip.load_state_dict({})
        window.model.set_requires_gradient_sync(True)
        window.loss(1).backward()
        take(window.gossip)
        from torch.distributed.tensor import DTensor, Partial

        # As sequence parallelism leaves it: each worker has a summand.
        weight = window.model.first.weight
        summand = torch.ones(weight.shape)
        weight.grad = DTensor.from_local(summand, weight.device_mesh, [Partial()])
        with pytest.raises(RuntimeError, match=r"save was called while the gradient of 'first.weight' is placed as Partial"):
            take(window.gossip)
        window.gossip.close()
    run.gossip.close()
    return mean


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.first(x))
        return result


def batches(replica: int, position: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * replica + position)
    return [torch.randn(4, 6, generator=generator) for _ in range(2)]


def calibrated(mesh: Any, folder: Path) -> dict[str, Tensor]:
    """BatchNorm's statistics are of the batches of all workers."""
    model = shard(Normed(), mesh["shard"])
    gossip = decent_dp.gossip(model, SGD(model.parameters()))
    loader = batches(*mesh.get_coordinate())
    export(gossip, folder / "normed.pt", loader=loader)
    model.train()
    calibrate(gossip, loader)
    found = values(model)
    gossip.close()
    return found


def errors(mesh: Any, folder: Path, n: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Checkpoints of another form, and of shards on other workers."""
    from torch.distributed.device_mesh import init_device_mesh

    found = {}
    plain = Odd()
    replica = decent_dp.gossip(plain, ADAMW(plain.parameters()))
    save(replica, folder / "plain")

    def refused(name: str, model: Any, path: str, **options: Any) -> None:
        before = values(model.model)
        try:
            load(model, folder / path, **options)
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        assert_equal(values(model.model), before)

    refused("plain from shards", replica, "two by two")
    refused("plain from shards, resized", replica, "two by two", resize="mean")
    replica.close()
    sharded = Sharded(Case({}, ADAMW), mesh)
    refused("shards from plain", sharded.gossip, "plain", resize="spread")
    sharded.gossip.close()
    one = Sharded(Case({}, ADAMW), mesh_of(1, n))
    refused("one replica", one.gossip, "two by two", resize="mean")
    one.gossip.close()
    # The same shards on other workers: they take the files of their places.
    crossing = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replica"))
    moved = Sharded(Case({"topology": "complete"}, ADAMW), MeshView(crossing))
    assert load(moved.gossip, folder / "two by two") == {}
    there = values(moved.model)
    moved.gossip.close()
    return found, there


class MeshView:
    """A mesh whose dimensions are the other way round."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def get_coordinate(self) -> list[int]:
        return list(reversed(self._mesh.get_coordinate()))

    def __getitem__(self, name: str) -> Any:
        return self._mesh[name]


def four(rank: int, n: int, folder: str) -> Any:
    mesh, path = mesh_of(2, 2), Path(folder)
    for name, case in RUNS.items():
        resumed(case, mesh, path / name)
    mean = exported(mesh, path)
    own = Sharded(Case({"topology": "complete"}, ADAMW), mesh)
    load(own.gossip, path / "two by two")
    at = values(own.model)
    own.gossip.close()
    return mean, at, *errors(mesh, path, n), calibrated(mesh, path)


def six(rank: int, n: int, folder: str) -> Any:
    """Three replicas from two; and two of three shards each, which cannot be."""
    path = Path(folder)
    found = {}
    for how in ("mean", "spread"):
        run = Sharded(Case({"topology": "complete"}, ADAMW), mesh_of(3, 2))
        load(run.gossip, path / "two by two", resize=how)
        found[how] = values(run.model)
        moment = run.optimizers[0].state[run.model.first.weight]["exp_avg"]
        found[f"{how}, moment"] = whole(moment)
        step(run, 4)
        run.gossip.close()
    for mesh, name in ((mesh_of(3, 2), "unasked"), (mesh_of(2, 3), "other shards")):
        run = Sharded(Case({}, ADAMW), mesh)
        try:
            load(run.gossip, path / "two by two", resize=None if name == "unasked" else "spread")
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        run.gossip.close()
    return found


def some(rank: int, n: int, folder: str) -> dict[str, Tensor]:
    mesh, path = mesh_of(2, 2), Path(folder)
    resumed(RUNS["outer"], mesh, path / "outer")
    return exported(mesh, path)


def test_saved_resumed_and_exported(workers, tmp_path):
    for mean in workers(4, some, str(tmp_path)):
        assert_close_to(torch.load(tmp_path / "inside.pt", weights_only=True), mean, 0.0)


@pytest.mark.slow
def test_saved_exported_and_resized(workers, tmp_path):
    outcomes = workers(4, four, str(tmp_path))
    mean, _, found, *_ = outcomes[0]
    replicas = [outcomes[0][1], outcomes[2][1]]

    def unsharded(transport: Any, path: Path) -> None:
        run = Unsharded(Case({"topology": "complete"}, ADAMW), transport, 2)
        ema = AveragedReplica(run.gossip, decay=0.5)
        for t in range(4):
            step(run, t)
            ema.update()
        export(run.gossip, path / "wanted.pt")
        with ema.averaged():
            export(run.gossip, path / "wanted ema.pt")
        run.gossip.close()

    run_replicas(2, partial(unsharded, path=tmp_path))
    from safetensors.torch import load_file

    model = Odd(3)
    for name, wanted in {"mean": "wanted", "inside": "wanted", "ema": "wanted ema"}.items():
        ours, theirs = (torch.load(tmp_path / f"{file}.pt", weights_only=True) for file in (name, wanted))
        assert {type(value) for value in ours.values()} == {Tensor}
        assert list(ours) == list(theirs) == list(model.state_dict())
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-6, atol=1e-6)
        model.load_state_dict(ours)
    assert_equal(load_file(tmp_path / "mean.safetensors"), dict(torch.load(tmp_path / "mean.pt", weights_only=True)))
    assert_close_to(torch.load(tmp_path / "inside.pt", weights_only=True), mean, 0.0)

    whole_model = Normed()
    torch.optim.swa_utils.update_bn([x for replica in (0, 1) for at in (0, 1) for x in batches(replica, at)], whole_model)
    wanted_norm = values(whole_model)
    for rank, (_, _, errors_there, moved, normed) in enumerate(outcomes):
        assert errors_there == found
        assert_close_to(moved, replicas[rank % 2], 0.0)
        assert_close_to(normed, wanted_norm, 1e-6)
    assert_close_to(torch.load(tmp_path / "normed.pt", weights_only=True), wanted_norm, 1e-6)
    for name in ("plain from shards", "plain from shards, resized", "shards from plain", "one replica"):
        assert found[name].startswith("CheckpointError: "), (name, found[name])
        assert "start from the model that export() wrote" in found[name], (name, found[name])

    resized = workers(6, six, str(tmp_path))
    for rank, there in enumerate(resized):
        assert_close_to(there["mean"], mean, 1e-6)
        assert_close_to(there["spread"], replicas[rank // 2 * 2 // 3], 0.0)
        assert there["mean, moment"].abs().max() > 0
        now = "was saved by 2 replicas of 2 workers and this run has 3 replicas of 2 workers: pass resize='spread' (or 'mean')"
        assert now in there["unasked"]
        assert there["other shards"].startswith("CheckpointError: ")
        assert "on the workers [0, 1] of each replica) there and" in there["other shards"]


def assert_close_to(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
