"""Real workers that are stopped and go on with new wrappers and new connections, and that go back to an earlier update."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import OutOfStepError, PeerTimeoutError
from decent_dp.replica.snapshot import put_back, take
from decent_dp.transport import run_replicas
from tests.resuming import MANY, Job, assert_equal, dumb_copy, go_on, run_through, step_in_windows
from tests.test_compression_in_training import Bag
from tests.workers import hear, say, shorten

TOTAL = 7
CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("alternating-exp-ring", "int8", {"overlap": False}),
    ("one-peer-exp", "int8", MANY),
    ("complete", "int8", {**MANY, "grad_clip_norm": 0.3}),
    ("complete", None, {"param_as_bucket_view": False}),
    ("ring", "bfloat16", {"mix_every": 2}),
]


def case(n: int, topology: str, compression: str | None, how: dict[str, Any]) -> Job:
    topology = topology if n == 4 or topology in ("complete", "ring", "random-matching") else "base-2"
    return Job({"topology": topology, "compression": compression, "_local_world_size": 2, **how}, step=step_in_windows)


def stopped(rank: int, n: int) -> list[Any]:
    ends = []
    for stop, (topology, compression, how) in enumerate(CASES, 1):
        job = case(n, topology, compression, how)
        snapshots, losses, end = run_through(job, None, rank, TOTAL, [stop])
        where = f"{topology}, {compression}, {how}, stopped at {stop}"
        others, other = go_on(job, None, rank, range(stop, TOTAL), snapshots[stop], [stop])
        assert_equal(others, losses[stop:], where)
        assert_equal(other, end, where)
        ends.append(end)
    return ends


@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_stopped_and_gone_on(workers, n):
    """And processes are where threads are."""
    found = workers(n, stopped)
    for number, (topology, compression, how) in enumerate(CASES):
        job, stops = case(n, topology, compression, how), [number + 1]
        threads = run_replicas(n, lambda at, job=job, stops=stops: run_through(job, at, at.rank, TOTAL, stops)[2])
        if job.options["topology"] != "alternating-exp-ring":  # threads are of one node, and sum groups in another order
            assert_equal([ends[number] for ends in found], threads, f"{topology}, {compression}, {how}")


def step_drawn(model: Any, t: int, rank: int) -> float:
    draw = torch.Generator().manual_seed(1000 * rank + t)
    for param in model.module.parameters():
        param.grad = torch.randn(param.shape, generator=draw)
    model.update()
    return 0.0


def refused(rank: int, n: int) -> list[str]:
    job = Job({"topology": "ring", "compression": "int8"})
    snapshots, _, end = run_through(job, None, rank, TOTAL, [2, 4])
    model = job.wrap(3)
    errors = []
    for bad in (
        {**snapshots[2], "round": 7} if rank == 1 else snapshots[2],
        {**snapshots[2], "optimizer": "Adam"} if rank == 2 else snapshots[2],
        {"round": 3} if rank == 0 else snapshots[2],
    ):
        try:
            put_back(model.replica, bad)
        except (OutOfStepError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    put_back(model.replica, snapshots[4])
    job.train(model, range(4, TOTAL), rank)
    assert_equal(dumb_copy(take(model.replica)), end)
    model.close()
    return errors


def test_a_failed_load_on_one_worker_is_refused_on_all(workers):
    found = workers(3, refused)
    assert found[0] == found[1] == found[2]
    assert [text.partition(":")[0] for text in found[0]] == ["OutOfStepError", "ValueError", "ValueError"]
    assert "worker 2: the optimizer was Adam" in found[0][1]


def without_a_call(rank: int, n: int) -> int:
    """A save waits for the messages of its exchange, and for no call of the others."""
    model = DecentralizedDataParallel(Bag(0), partial(torch.optim.SGD, lr=0.1), topology="complete")
    step_drawn(model, 0, rank)
    step_drawn(model, 1, rank)
    control = model.replica.world.control
    if rank:
        control.gather(None)  # stays behind until worker 0 has its snapshot
    snapshot = take(model.replica)
    if not rank:
        control.gather(None)
    model.close()
    return int(snapshot["round"])


def test_a_save_waits_for_no_call_of_the_others(workers):
    assert workers(2, without_a_call) == [2, 2]


def alone(rank: int, n: int) -> str:
    """The other worker has not begun the round that this one saves after."""
    model = DecentralizedDataParallel(Bag(0), partial(torch.optim.SGD, lr=0.1), topology="complete")
    step_drawn(model, 0, rank)
    if rank:
        hear("the error")
        model.close()
        return ""
    shorten(model.replica.world, 1.0)
    step_drawn(model, 1, rank)
    try:
        take(model.replica)
    except PeerTimeoutError as error:
        say("the error")
        return str(error)
    return "no error"


def test_a_save_that_waits_for_a_silent_worker_ends_with_an_error(workers):
    error, _ = workers(2, alone)
    assert "worker 1" in error
