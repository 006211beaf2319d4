"""Checkpoints and exports where a node is a replica: one copy per node, and any number of workers resumes from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decent_dp
from decent_dp.checkpoint import AveragedReplica, export, latest, load, read_parameters, save
from decent_dp.rules import OuterNesterov
from decent_dp.transport import run_replicas
from tests.resuming import assert_equal, dumb_copy
from tests.sharded_cases import ADAMW, Case, Unsharded, step, values, zero_grad
from tests.test_node_replicas import OfNode

RUNS = {
    "adamw": Case({"topology": "one-peer-exp", "bucket_size_in_mb": 1e-4}, ADAMW),
    "int8": Case({"compression": "int8"}),
    "outer": Case({"rule": OuterNesterov(momentum=0.6), "mix_every": 2}, ADAMW),
}


def state(run: OfNode) -> Any:
    own = {"model": values(run.model), "gossip": run.gossip.state_dict()}
    return dumb_copy({**own, "optimizer": run.optimizers[0].state_dict()})


def resumed(case: Case, rank: int, path: Path) -> None:
    """A run that is stopped in a window equals the one without a stop."""
    run = OfNode(case, 2)
    for t in range(3):
        step(run, t)
    zero_grad(run)
    with run.gossip.no_sync():
        run.loss(3).backward()
    save(run.gossip, path, {"epoch": rank})
    finish(run)
    wanted = state(run)
    run.gossip.close()
    again = OfNode(case, 2, seed=7)
    step(again, 0)
    assert load(again.gossip, path) == {"epoch": rank}
    finish(again)
    assert_equal(state(again), wanted, "resumed")
    again.gossip.close()


def finish(run: OfNode) -> None:
    run.loss(103).backward()
    run.optimizers[0].step()
    for t in (4, 5):
        step(run, t)


def four(rank: int, n: int, folder: str, names: list[str]) -> Any:
    path = Path(folder)
    for name in names:
        resumed(RUNS[name], rank, path / name)
    run = OfNode(Case({"topology": "complete"}, ADAMW), 2)
    ema = AveragedReplica(run.gossip, decay=0.5)
    for t in range(4):
        step(run, t)
        ema.update()
    save(run.gossip, path / "two by two")
    own = values(run.model)
    export(run.gossip, path / "mean.pt")
    with ema.averaged():
        export(run.gossip, path / "ema.pt")
    run.gossip.close()
    plain = OfNode(Case({"topology": "complete"}, ADAMW), 1)
    step(plain, 0)
    save(plain.gossip, path / "workers")
    return own, values(plain.model)


def resized(rank: int, n: int, path: Path, shards: int) -> dict[str, dict[str, Tensor]]:
    """The parameters after a load into nodes of so many workers, and a first moment."""
    found = {}
    for name in ("two by two", "workers", "outer"):
        for how in ("mean", "spread", None):
            options = RUNS["outer"].options if name == "outer" else {"topology": "complete"}
            run = OfNode(Case(options, ADAMW), shards)
            try:
                load(run.gossip, path / name, resize=how)
            except ValueError as error:
                assert how is None
                found[name] = str(error)
            else:
                moment = run.optimizers[0].state[run.model.first.weight]["exp_avg"]
                found[f"{name}, {how}"] = {**values(run.model), "moment": moment.clone()}
                step(run, 7)
            run.gossip.close()
    return found


def six(rank: int, n: int, folder: str, sizes: list[int]) -> Any:
    return [resized(rank, n, Path(folder), shards) for shards in sizes]


def of_one_worker_each(transport: Any, path: Path) -> dict[str, Tensor]:
    run = Unsharded(Case({"topology": "complete"}, ADAMW), transport, 2)
    ema = AveragedReplica(run.gossip, decay=0.5)
    for t in range(4):
        step(run, t)
        ema.update()
    run.gossip.flush()  # as a save does
    export(run.gossip, path / "wanted mean.pt")
    with ema.averaged():
        export(run.gossip, path / "wanted ema.pt")
    own = values(run.model)
    run.gossip.close()
    return own


@pytest.mark.parametrize(
    ("names", "sizes"), [(["outer"], [3]), pytest.param(list(RUNS), [2, 3, 1], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_saved_resumed_exported_and_resized(workers, tmp_path, names, sizes):
    outcomes = workers(4, four, str(tmp_path), names)
    wanted = run_replicas(2, partial(of_one_worker_each, path=tmp_path))
    for name in ("mean", "ema"):
        ours, theirs = (torch.load(tmp_path / f"{file}.pt", weights_only=True) for file in (name, f"wanted {name}"))
        assert_close_to(ours, theirs)
    nodes, plain = [outcomes[0][0], outcomes[2][0]], [one for _, one in outcomes]
    for rank in range(4):
        assert_close_to(outcomes[rank][0], wanted[rank // 2])
        # Buffers are those of each replica's first worker, all the same here.
        assert_close_to(read_parameters(tmp_path / "two by two", rank, buffers=True), nodes[rank // 2])
    assert_close_to(read_parameters(tmp_path / "two by two"), mean_of(nodes))

    found = workers(6, six, str(tmp_path), sizes)
    for rank in range(6):
        for shards, own in zip(sizes, found[rank], strict=True):
            number, count = rank // shards, 6 // shards
            for name, saved in (("two by two", nodes), ("workers", plain)):
                assert_close_to(own[f"{name}, mean"], mean_of(saved))
                n = len(saved)
                parts = [j for j in range(n) if j * count // n == number] if count < n else [number * n // count]
                assert_close_to(own[f"{name}, spread"], mean_of([saved[j] for j in parts]))
            assert "workers and this run has" in own["workers"]
            for key, value in own.items():  # one and the same on all workers of a node
                if not isinstance(value, str):
                    assert_equal(value, found[rank - rank % shards][sizes.index(shards)][key])


def mean_of(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(one[name].double() for one in found).float() / len(found) for name in found[0]}


def assert_close_to(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if name != "moment":
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6, msg=name)


def large(rank: int, n: int, folder: str) -> None:
    model = nn.Linear(300, 400)
    model.codes = nn.Parameter(torch.ones(3, dtype=torch.int16), requires_grad=False)  # gloo does not know it
    optimizer = ADAMW(model.parameters())
    gossip = decent_dp.gossip(model, optimizer, local_world_size=2)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    save(gossip, folder)
    assert load(gossip, folder) == {}


def test_a_node_saves_one_copy(workers, tmp_path):
    workers(4, large, str(tmp_path))
    step = latest(tmp_path)
    sizes = [file.stat().st_size for file in sorted(step.glob("*.safetensors"))]
    one = 4 * 4 * 300 * 400  # values, gradients, two moments
    assert len(sizes) == 4
    assert all(one < size < 1.05 * one for size in sizes[::2])
    assert all(size < 0.05 * one for size in sizes[1::2])
