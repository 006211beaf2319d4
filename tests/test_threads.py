"""Errors that nobody expects, in the threads beside the training: each becomes the worker's error, or, where training does not
need the thread, a warning."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import decent_dp
from decent_dp.checkpoint import saver as saver_module
from decent_dp.logging import publisher as publisher_module
from decent_dp.transport import InProcessTransport, process_group, run_replicas
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.waiter import Waiter, start_thread, telling
from tests.helpers import Heard, alone, loss, net, wait_for
from tests.members import make, step
from tests.workers import has_said, hear, say


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug of ours")


def train(make_step: Callable[[int], None], steps: int) -> None:
    for t in range(steps):
        make_step(t)
        time.sleep(0.01)


def test_what_a_thread_raises_is_told():
    told: list[Exception] = []
    done = threading.Event()
    waiter = Waiter("test")
    waiter.submit(telling(fail, told.append)).result(20)
    assert start_thread(fail, "test", lambda error: [told.append(error), done.set()])  # type: ignore[func-returns-value]
    assert done.wait(20)
    waiter.close()
    assert [type(error) for error in told] == [ZeroDivisionError] * 2


# -- where faults are tolerated --------------------------------------------------------------------------------------------


def break_connections(replica: Any) -> None:
    wire = replica.world._wire
    wire.call(lambda: [wire.connections.lose(link, "a test") for link in wire.links.by_rank.values()])


def break_dial(replica: Any) -> None:
    process_group.find = fail
    break_connections(replica)


# The thread, the workers on which something in it is broken, and what. Worker 2 leaves, so that the others want an epoch.
# Of two workers the second one dials.
FATAL: list[tuple[str, set[int], Callable[[Any], None]]] = [
    ("decent_dp-membership", {0}, lambda replica: setattr(replica.monitor.epochs.keeper._store, "is_proposed", fail)),
    ("decent_dp-membership", {0, 1}, lambda replica: setattr(replica.monitor.epochs.keeper._store, "decide", fail)),
    ("decent_dp-membership", {0}, lambda replica: setattr(replica.monitor.epochs.keeper, "_seat", fail)),
    ("decent_dp-dial", {1}, break_dial),
]


def fails_beside_the_training(rank: int, n: int) -> Any:
    """In each case: the error of this worker, and what has caused it; None if it has gone on."""
    found: list[Any] = []
    for number, (_, victims, break_it) in enumerate(FATAL):
        faults = decent_dp.Tolerate(dead_after=2.0, min_workers=1)
        model, optimizer, replica = make(rank, topology="ring", faults=faults)
        for t in range(5):
            step(model, optimizer, t, rank)
        if rank in victims:
            break_it(replica)
        error: BaseException | None = None
        t, deadline = 5, time.monotonic() + 40
        while rank != 2 and not has_said(f"{number} is over"):
            assert time.monotonic() < deadline, number
            time.sleep(0.01)
            try:
                step(model, optimizer, t, rank)
            except Exception as raised:
                error = raised
                say(f"{number} is over")
            t += 1
        message, cause = str(error), error
        while cause is not None and cause.__cause__ is not None:
            cause = cause.__cause__
        found.append(None if error is None else (message, repr(cause)))
        with contextlib.suppress(RuntimeError):
            replica.close()
        dist.barrier()
    return found


def test_an_error_beside_the_training_ends_the_worker(workers):
    for (thread, victims, _), errors in zip(FATAL, zip(*workers(3, fails_beside_the_training), strict=True), strict=True):
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        assert failed, thread
        assert failed.keys() <= victims, failed
        for message, cause in failed.values():
            assert cause == "ZeroDivisionError('a bug of ours')", message
            assert message == "a bug of ours" or message.endswith(f"ZeroDivisionError: a bug of ours (in the thread {thread})")


def test_an_error_in_a_decision_ends_a_worker_that_is_a_thread():
    def body(transport: InProcessTransport) -> str:
        model, optimizer, replica = make(0, transport=transport, topology="ring")
        if transport.rank == 0:
            replica.monitor.epochs.keeper._seat = fail
        if transport.rank == 2:
            return ""
        try:
            train(lambda t: step(model, optimizer, t, transport.rank), 200)
        except RuntimeError as error:
            return f"{error}, from {error.__cause__!r}"
        return ""

    found = run_replicas(3, body)
    assert found == [
        "this worker has failed: ZeroDivisionError: a bug of ours, from ZeroDivisionError('a bug of ours')",
        "",
        "",
    ]


def test_a_round_that_one_thread_leaves_out_is_left_out_by_both():
    """Each promises a round, and the other one may mix until a later round."""

    def body(transport: InProcessTransport) -> int:
        model, optimizer, replica = make(0, transport=transport, topology="ring", compression="low-rank:1")
        assert transport.neighbours is not None
        for t in range(20):
            last = 9 if transport.rank else 5
            transport.neighbours.stop_mixing_after(last if t < 10 else None)
            step(model, optimizer, t, transport.rank)
        both.wait(20)  # an end makes a hole of a round
        return replica.stats().holes

    both = threading.Barrier(2)
    began = time.monotonic()
    assert run_replicas(2, body, timeout=20.0) == [4, 4]
    assert time.monotonic() - began < 15


def has_joiners(rank: int, n: int) -> Any:
    log = Heard(logging.INFO)
    model, optimizer, replica = make(rank)
    neighbours = replica.monitor.neighbours
    if rank == 0:
        neighbours.serve(fail)
        say("broken")
    else:
        hear("broken")
        for _ in range(3):
            assert neighbours.ask(0, 0, b"").result(20) == b""
        say("asked")
    t = 0
    while not has_said("asked") or t < 10:
        step(model, optimizer, t, rank)
        t += 1
    replica.close()
    return [line for _, line in log.lines if "a request" in line]


def test_an_error_about_a_request_is_a_warning(workers):
    told, nothing = workers(2, has_joiners)
    assert nothing == []
    assert [line.endswith(f"({times} times by now)") for line, times in zip(told, (1, 2), strict=True)] == [True, True], told


# -- the others ------------------------------------------------------------------------------------------------------------


def test_a_status_that_fails_is_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(publisher_module._Publisher, "_count", fail)
    model = alone(net())
    decent_dp.logging.publish(model)
    for t in range(3):
        loss(model, t).backward()
    said = wait_for(lambda: [r for r in caplog.records if r.levelno >= logging.WARNING])
    model.close()
    assert [record.getMessage() for record in said] == ["the status of this worker cannot be published: a bug of ours"]
    assert said[0].exc_info is not None


@pytest.mark.parametrize("where", ["after it is complete", "on the way to the others"])
def test_a_save_whose_thread_fails_does_not_hang(monkeypatch, tmp_path, where, caplog):
    if where == "after it is complete":
        monkeypatch.setattr(saver_module.folder, "write_latest", fail)
    else:
        agree = ControlPlane.agree

        def fails(plane: ControlPlane, name: str, *args: Any, **options: Any) -> Any:
            return (fail if name.startswith("checkpoint") else agree)(plane, name, *args, **options)

        monkeypatch.setattr(ControlPlane, "agree", fails)
    model = alone(net())
    loss(model, 0).backward()
    saving = decent_dp.checkpoint.save(model, tmp_path, wait=False)
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        saving.wait(20)
    assert "is not complete" in caplog.text
    model.close()
