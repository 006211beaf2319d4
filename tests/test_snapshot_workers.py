"""Real workers that are stopped and go on with new wrappers and new connections, and that go back to an earlier update."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decent_dp.compression import COMPRESSIONS
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import OutOfStepError, PeerTimeoutError
from decent_dp.replica.snapshot import put_back, take
from decent_dp.transport import run_replicas
from tests.resuming import JOBS, MANY, Job, assert_equal, dumb_copy, go_on, run_through, step_in_windows
from tests.test_compression_in_training import Bag
from tests.workers import hear, say, shorten

TOTAL = 7
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("alternating-exp-ring", compression, {"overlap": overlap}) for compression in COMPRESSIONS for overlap in (True, False)),
    *(("one-peer-exp", compression, MANY) for compression in COMPRESSIONS),
    ("complete", "int8", {**MANY, "grad_clip_norm": 0.3}),
    ("complete", None, {"param_as_bucket_view": False}),
    ("random-matching", "int8", {}),
    ("ring", "bfloat16", {"mix_every": 2}),
]


SOME_CASES = [CASES[i] for i in (4, 6, 9, 11, 12)]


def case(n: int, topology: str, compression: str | None, how: dict[str, Any]) -> Job:
    topology = topology if n == 4 or topology in ("complete", "ring", "random-matching") else "base-2"
    return Job({"topology": topology, "compression": compression, "_local_world_size": 2, **how}, step=step_in_windows)


def stops_of(cases: list[Any], number: int) -> list[int]:
    return [(number + 1) % 3, 3 + number % 4] if cases == CASES else [1 + number]


def stopped(rank: int, n: int, cases: list[Any]) -> list[Any]:
    ends = []
    for number, (topology, compression, how) in enumerate(cases):
        job = case(n, topology, compression, how)
        stops = stops_of(cases, number)
        snapshots, losses, end = run_through(job, None, rank, TOTAL, stops)
        for stop in stops:
            where = f"{topology}, {compression}, {how}, stopped at {stop}"
            others, other = go_on(job, None, rank, range(stop, TOTAL), snapshots[stop], stops)
            assert_equal(others, losses[stop:], where)
            assert_equal(other, end, where)
        ends.append(end)
    return ends


@pytest.mark.parametrize(
    ("n", "cases"),
    [(3, SOME_CASES), *(pytest.param(n, CASES, marks=pytest.mark.slow) for n in (3, 4))],
    ids=["3-some", "3", "4"],
)
def test_stopped_and_gone_on(workers, n, cases):
    """And processes are where threads are."""
    found = workers(n, stopped, cases)
    for number, (topology, compression, how) in enumerate(cases):
        job = case(n, topology, compression, how)
        stops = stops_of(cases, number)
        threads = run_replicas(n, lambda at, job=job, stops=stops: run_through(job, at, at.rank, TOTAL, stops)[2])
        if job.options["topology"] != "alternating-exp-ring":  # threads are of one node, and sum groups in another order
            assert_equal([ends[number] for ends in found], threads, f"{topology}, {compression}, {how}")


def step_drawn(model: Any, t: int, rank: int) -> float:
    draw = torch.Generator().manual_seed(1000 * rank + t)
    for param in model.module.parameters():
        param.grad = torch.randn(param.shape, generator=draw)
    model.update()
    return 0.0


def large(compression: str | None, **how: Any) -> Job:
    """Parameters of more than one run, also in buckets of other sizes."""
    options = {"topology": "one-peer-exp", "compression": compression, **how}
    return Job(options, model=Bag, optim_fn=partial(torch.optim.SGD, lr=0.01, momentum=0.9), step=step_drawn)


def in_other_buckets(rank: int, n: int) -> bool:
    for compression in COMPRESSIONS:
        job = large(compression)
        snapshots, _, end = run_through(job, None, rank, 6, [3])
        for how in ({}, MANY, {"param_as_bucket_view": False}, {"bucket_size_in_mb": 1e-3}):
            _, other = go_on(job, None, rank, range(3, 6), snapshots[3], **how)
            assert_equal(other, end, f"{compression} {how}")
        # In groups a piece may have another root, whose sums are made in another order.
        job = replace(job, options={**job.options, "topology": "complete"})
        snapshots, _, end = run_through(job, None, rank, 6, [3])
        _, other = go_on(job, None, rank, range(3, 6), snapshots[3], **MANY)
        for name, value in end["parameters"].items():
            tolerance = {None: 1e-6, "bfloat16": 0.05, "int8": 0.05}[compression]
            torch.testing.assert_close(other["parameters"][name], value, rtol=0, atol=tolerance)
    return True


@pytest.mark.slow
def test_in_other_buckets(workers):
    assert workers(4, in_other_buckets) == [True] * 4


def back(rank: int, n: int) -> bool:
    """To an earlier update, in the same wrapper, after other data and replicas that are further apart."""
    for compression, topology in (("int8", "complete"), ("int8", "one-peer-exp"), (None, "one-peer-exp")):
        job = replace(JOBS["momentum"], options={**JOBS["momentum"].options, "topology": topology, "compression": compression})
        snapshots, losses, end = run_through(job, None, rank, TOTAL, [1, 4])
        model = job.wrap(3)
        for stop in (4, 1, 4):
            for t in range(4 if stop == 4 else 3):
                for param in model.module.parameters():
                    param.grad = torch.full_like(param, 5.0 * rank + t)
                model.update()
            put_back(model.replica, snapshots[stop])
            found = job.train(model, range(stop, 4), rank)
            take(model.replica)
            assert_equal([*found, *job.train(model, range(4, TOTAL), rank)], losses[stop:])
            assert_equal(dumb_copy(take(model.replica)), end)
        model.close()
    return True


@pytest.mark.slow
def test_back_to_an_earlier_update(workers):
    assert workers(4, back) == [True] * 4


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
    control = model.replica.peers.control
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
    shorten(model.replica.peers, 1.0)
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
