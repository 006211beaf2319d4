"""A signal to any worker stops all of them after the same round."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decent_dp import gossip
from decent_dp.checkpoint import Preemption, latest, load, save
from decent_dp.checkpoint.preempt import _StopRequest, _StopVote
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport import InProcessTransport, run_replicas
from tests.checkpoint_cases import error_of, on
from tests.helpers import ROOT, SGD, alone, broken_store, loss, net, silent_store, values, wait_for


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    """After a stop the handlers that only take note stay."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def tell(pid: int | None = None) -> None:
    os.kill(os.getpid() if pid is None else pid, signal.SIGTERM)


def train(stop: Preemption, model: DecentralizedDataParallel, steps: int = 1000) -> None:
    """One worker, until it is due."""
    for t in range(steps):
        loss(model, t).backward()
        if stop.due:
            break
        time.sleep(0.005)


def wrapped(n: int, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(net(), SGD, topology="complete" if n == 1 else "ring", **options)


def digest(model: DecentralizedDataParallel) -> float:
    return sum(float(value.double().sum()) for value in values(model.module).values())


# -- real workers ----------------------------------------------------------------------------------------------------------


def train_until_due(model: Any, rank: int, told: dict[int, list[int]], steps: int = 400, each: int = 1) -> tuple[bool, int]:
    """Trains until ``due``; the workers named in ``told`` get their signal at those of their steps. What came of it."""
    pace = 0.001 * (1 + 2 * rank)
    with Preemption(model, grace=20.0) as stop:
        for t in range(steps):
            for _ in range(told.get(rank, []).count(t)):
                tell()
            time.sleep(pace)
            with model.no_sync() if (t + 1) % each else contextlib.nullcontext():
                loss(model, t, rank).backward()
            if stop.due:
                break
        return stop.due, model.stats().rounds


def everything_that_stops(rank: int, n: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    last = n - 1
    handler = signal.getsignal(signal.SIGTERM)

    def case(name: str, *args: Any, **options: Any) -> DecentralizedDataParallel:
        model = wrapped(n)
        found[name] = train_until_due(model, rank, *args, **options)
        return model

    case("nobody", {}, steps=10).close()
    found["handlers are back"] = signal.getsignal(signal.SIGTERM) is handler
    model = case("one", {last: [7]})
    tell()  # when all have been told to stop, this ends nobody any more
    save(model, f"{path}/one", {"rank": rank})
    model.close()
    case("all at once", {r: [5] for r in range(n)}).close()
    case("twice", {0: [4, 4, 5]}).close()
    case("before the first update", {0: [0]}).close()
    case("in a window of three", {last: [10]}, each=3).close()

    model = wrapped(n)
    with Preemption(model) as stop:
        for t in range(3):
            loss(model, t, rank).backward()
        if rank == 0:
            tell()
        with model.averaged(), torch.no_grad():
            time.sleep(0.5)
        first = stop.due
        loss(model, 3, rank).backward()
        found["in an evaluation"] = (first, stop.due, model.stats().rounds)
    model.close()

    return found


def test_all_stop_after_one_round(workers, tmp_path):
    first, second = workers(2, everything_that_stops, str(tmp_path))
    assert first == second
    for name, earliest in (("one", 8), ("all at once", 6), ("twice", 5), ("before the first update", 1)):
        due, round_ = first[name]
        assert due, name
        assert earliest <= round_ < 400, (name, round_)
    assert first["in a window of three"][0]
    assert first["nobody"] == (False, 10)
    assert first["in an evaluation"] == (False, True, 4)
    assert first["handlers are back"] is True
    folder = latest(tmp_path / "one")
    assert folder is not None
    assert folder.name.startswith(f"step-{first['one'][1]:08d}-")


def uneven(rank: int, n: int, path: str) -> Any:
    """Worker 0 has run out when the signal comes."""
    model = wrapped(n)
    with Preemption(model) as stop:
        with model.join():
            for t in range(5 if rank == 0 else 400):
                loss(model, t, rank).backward()
                time.sleep(0.002)
                if rank == n - 1 and t == 30:
                    tell()
                if stop.due:
                    break
        due = stop.due
        saving = save(model, path)
    found = due, model.stats().rounds, model.stats().updates, saving.path.name
    model.close()
    return found


def test_a_worker_that_has_run_out_of_batches_takes_part(workers, tmp_path):
    (due, rounds, few, name), (other_due, other_rounds, many, other_name) = workers(2, uneven, str(tmp_path))
    assert due
    assert other_due
    assert 31 <= rounds == other_rounds == many < 400
    assert few == 5
    assert name == other_name


def until_told(rank: int, n: int, folder: str) -> Any:
    model = wrapped(n)
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    with Preemption(model) as stop:
        for t in range(100_000):
            loss(model, t, rank).backward()
            if stop.due:
                break
    tell()  # of the next node, where it comes later
    save(model, f"{folder}/saved", {"t": t})
    tell()
    return model.stats().rounds, digest(model)


def test_a_signal_from_outside(workers, tmp_path):
    """As a launcher sends it: in whatever the worker does just then. Exit codes are 0, and what is saved is loaded."""
    files = [tmp_path / f"pid{rank}" for rank in range(2)]

    def send() -> None:
        wait_for(lambda: all(file.exists() and file.read_text() for file in files), 60)
        time.sleep(0.3)
        for file in files:
            tell(int(file.read_text()))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    results = workers(2, until_told, str(tmp_path))
    sender.join(10)
    assert len({rounds for rounds, _ in results}) == 1
    found = run_replicas(2, partial(resumed, path=str(tmp_path / "saved")))
    assert found == [(*result, result[0] - 1) for result in results]


def resumed(transport: InProcessTransport, path: str) -> Any:
    model = wrapped(transport.world_size, transport=transport)
    extra = load(model, path)
    assert extra is not None
    return model.stats().rounds, digest(model), extra["t"]


def with_a_peer_that_is_killed(rank: int, n: int) -> Any:
    model = wrapped(n)
    for t in range(2 + rank):
        loss(model, t, rank).backward()
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        with Preemption(model, grace=60.0):
            tell()
            time.sleep(0.5)
            for t in range(2, 50):
                loss(model, t, rank).backward()
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - began, model.stats().rounds
    return None


def test_a_peer_that_is_killed_is_named(workers):
    outcome = workers.outcomes(2, with_a_peer_that_is_killed)[0]
    assert outcome.error == "", outcome.trace
    kind, text, seconds, rounds = outcome.value
    assert kind == "PeerLostError"
    assert "worker 1" in text
    assert seconds < 45
    assert rounds == 3  # the one that was voted for


def test_a_peer_that_does_not_vote_is_named():
    has_failed = threading.Event()

    def work(transport: InProcessTransport) -> Any:
        model = on(transport, steps=2, mix_every=1000)
        if transport.rank == 1:
            return has_failed.wait(60)
        with Preemption(model, signals=(), grace=0.5) as stop:
            stop.request()
            found = error_of(lambda: train(stop, model))
        has_failed.set()
        return found

    kind, text = run_replicas(2, work)[0]
    assert kind == "PeerTimeoutError"
    assert "worker 1 did not vote for a stop round within the grace period of 0.5 s" in text


def leaves_first(rank: int, n: int) -> Any:
    """One worker has finished its loop, closes, and is gone before the other one is told."""
    found = []
    for leaver, inside in ((1, False), (1, True), (0, False)):
        model = wrapped(n)
        with Preemption(model, grace=20) as stop:
            for t in range(3):
                loss(model, t, rank).backward()
            if rank != leaver:
                time.sleep(0.3)
                tell()
                time.sleep(0.5)
                assert stop._vote is not None
                found.append((stop.due, stop._vote.stop_round))
            elif inside:
                model.close()
        model.close()
    return found


def test_a_peer_that_has_finished_is_not_waited_for(workers):
    # It has voted for a round that the other one cannot make alone: it is agreed on, and not reached.
    first, second = workers(2, leaves_first)
    assert [*first, *second] == [(False, 4)] * 3


# -- one worker ------------------------------------------------------------------------------------------------------------


LATE_SIGNALS = """
import os, signal, sys
from decent_dp.checkpoint import Preemption, save
from tests.helpers import alone, loss, net
from tests.test_preemption import tell, train


class AtTheVeryEnd:
    def __del__(self, tell=tell, say=os.write):
        tell()  # the interpreter is being taken down: modules are gone, and Python's handlers
        say(1, b"and left")


model, the_end = alone(net()), AtTheVeryEnd()
with Preemption(model, signals=(signal.SIGTERM, signal.SIGUSR1)) as stop:
    tell()
    train(stop, model)
assert stop.due
tell()
os.kill(os.getpid(), signal.SIGUSR1)
save(model, sys.argv[1])
tell()
os.write(1, b"saved ")
"""


@pytest.mark.slow
def test_no_later_signal_ends_a_worker_that_must_stop(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LATE_SIGNALS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, "saved and left"), done.stderr
    assert latest(tmp_path) is not None


def test_handlers_are_given_back_where_no_stop_was_reached():
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    model = alone(net())
    with Preemption(model) as stop:
        loss(model, 0).backward()
    tell()
    assert heard == [signal.SIGTERM]
    with Preemption(model) as stop:
        tell()
        train(stop, model)
    assert stop.due
    tell()
    assert heard == [signal.SIGTERM]
    model.close()


def test_after_the_context_due_is_what_it_was():
    """The round that was agreed on is made outside, later: nobody is to stop for it, and the next context does."""
    model = alone(net())
    with Preemption(model) as stop:
        loss(model, 0).backward()
        tell()
        vote = stop._vote
        assert vote is not None
        wait_for(lambda: vote.stop_round == 2)
    for t in range(2):
        assert not stop.due
        loss(model, t).backward()
    assert not stop.due
    with Preemption(model) as stop:
        train(stop, model)
    assert stop.due
    loss(model, 0).backward()
    assert stop.due
    model.close()


def asked_in_the_last_round(has_made_all: threading.Event, transport: Any) -> Any:
    """Worker 1 gets a signal, and votes for the last round; worker 0 has made it, and leaves the loop."""
    model = DecentralizedDataParallel(net(), SGD, topology="complete", transport=transport)
    found = []
    for t in range(2):
        with Preemption(model, signals=(), grace=10) as stop:
            for _ in range(30 if t else 3):
                if (transport.rank, t, model.stats().rounds) == (1, 0, 2):
                    assert has_made_all.wait(60)
                    stop._request.pending = True
                    time.sleep(0.15)
                loss(model, t, transport.rank).backward()
                if t == 1:
                    time.sleep(0.1)
                if stop.due:
                    break
            if transport.rank == 0:
                has_made_all.set()
        found.append((stop.due, model.stats().rounds))
    model.close()
    return found


def test_all_come_to_the_same_where_somebody_is_asked_in_the_last_round():
    first, second = run_replicas(2, partial(asked_in_the_last_round, threading.Event()))
    assert first == second
    assert first[0] == (False, 3)
    assert first[1][0]


def test_one_signal_stops_two_replicas():
    """As for a generator and a discriminator, each in a context of its own; one has the user's own optimizer."""
    old = signal.getsignal(signal.SIGTERM)
    generator, critic = alone(net()), net(1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    discriminator = gossip(critic, optimizer, transport=InProcessTransport())

    def discriminate(t: int) -> None:
        loss(critic, t).backward()
        optimizer.step()

    with Preemption(generator) as outer, Preemption(discriminator) as inner:
        tell()
        for t in range(1000):
            loss(generator, t).backward()
            discriminate(t)
            if outer.due and inner.due:
                break
            time.sleep(0.005)
    assert (outer.due, inner.due) == (True, True)
    tell()
    signal.signal(signal.SIGTERM, old)
    # Only the inner one has reached its round: the process is to go all the same.
    with Preemption(generator) as outer:
        with Preemption(discriminator) as inner:
            tell()
            for t in range(1000):
                discriminate(t)
                if inner.due:
                    break
                time.sleep(0.005)
        tell()
    assert (outer.due, inner.due) == (False, True)
    assert signal.getsignal(signal.SIGTERM) not in (old, signal.SIG_DFL)
    tell()
    generator.close()
    discriminator.close()


def test_signals_inside_the_handler_do_no_harm():
    """Two kinds of signals whose handlers interrupt each other."""
    model = alone(net())
    with Preemption(model, signals=(signal.SIGTERM, signal.SIGUSR1)) as stop:
        for _ in range(500):
            os.kill(os.getpid(), signal.SIGUSR1)
            tell()
        train(stop, model)
    assert stop.due
    model.close()


def test_a_forked_process_still_ends_by_the_signal():
    """Pools and data loaders end their processes with SIGTERM. What else a group of processes is sent does not end them."""
    model = alone(net())
    is_there, there = os.pipe()
    with Preemption(model, signals=(signal.SIGTERM, signal.SIGUSR1)) as stop:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads
            child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.write(there, b"x")
            time.sleep(30)
            os._exit(0)
        os.close(there)
        assert os.read(is_there, 1) == b"x"
        tell(child)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        loss(model, 0).backward()
        time.sleep(0.3)
        loss(model, 1).backward()
        assert not stop.due
    model.close()
    os.close(is_there)


@pytest.mark.parametrize("in_place", [silent_store, broken_store])
def test_a_stop_needs_no_store(in_place):
    model = alone(net())
    store = model.replica.world.store
    model.replica.world.store = in_place(store)
    with Preemption(model, signals=(), grace=60.0) as stop:
        loss(model, 0).backward()
        stop.request()
        train(stop, model)
    assert stop.due
    with Preemption(model):
        loss(model, 0).backward()
    model.replica.world.store = store
    model.close()


def test_a_transport_that_has_failed_ends_the_training(monkeypatch):
    model = alone(net())
    with Preemption(model) as stop:
        loss(model, 0).backward()

        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the transport has failed: a mistake")

        monkeypatch.setattr(model.replica.world.plane, "agree", fails)
        tell()
        with pytest.raises(RuntimeError, match="a mistake"):
            train(stop, model)
    assert not stop.due
    model.close()


def test_a_loop_that_never_asks_goes_on_and_says_so(caplog):
    model = alone(net())
    with caplog.at_level(logging.WARNING), Preemption(model, grace=0.3):
        tell()
        for t in range(200):
            loss(model, t).backward()
            time.sleep(0.005)
    assert "worker 0 was asked to stop: all workers stop after the same round" in caplog.text
    assert "was agreed on: read .due" in caplog.text
    assert model.stats().rounds == 200
    model.close()


def test_wrong_arguments_and_places():
    model = alone(net())
    for wrong, kind, text in (
        (lambda: Preemption(model.module), TypeError, "Sequential"),
        (lambda: Preemption(model, signals=signal.SIGTERM), TypeError, "sequence"),
        (lambda: Preemption(model, signals=(signal.SIGKILL,)), ValueError, "SIGKILL"),
        (lambda: Preemption(model, signals=(12345,)), ValueError, "12345"),
        (lambda: Preemption(model, grace=0), ValueError, "grace"),
        (lambda: Preemption(model, grace=float("nan")), ValueError, "grace"),
    ):
        with pytest.raises(kind, match=text):
            wrong()
    with Preemption(model), pytest.raises(RuntimeError, match="inside Preemption"), Preemption(model):
        raise AssertionError
    with model.join(), pytest.raises(RuntimeError, match=r"inside join\(\)"), Preemption(model):
        raise AssertionError
    assert Preemption(model)._grace == 15.0
    caught: list[str] = []

    def enter() -> None:
        with Preemption(model, signals=()) as stop:  # only follows
            loss(model, 0).backward()
            assert not stop.due
        try:
            with Preemption(model):
                raise AssertionError
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert len(caught) == 1
    assert "main thread" in caught[0]
    with Preemption(model):
        loss(model, 1).backward()
    model.close()
    with pytest.raises(RuntimeError, match="closed"), Preemption(model):
        raise AssertionError


def test_the_wrapper_is_not_kept_and_no_thread_stays():
    before = set(threading.enumerate())
    model = alone(net())
    stop = Preemption(model)
    with stop:
        loss(model, 0).backward()
    model.close()
    gone = weakref.ref(model)
    del model, stop
    gc.collect()
    assert gone() is None
    assert set(threading.enumerate()) <= before


def test_a_process_that_joins_votes_when_it_is_a_member():
    """In the context in which the others are then: a signal before that waits."""
    names: list[str] = []
    votes: Future[dict[int, str]] = Future()

    def agree(name: str, *_: Any, **__: Any) -> Future[dict[int, str]]:
        names.append(name)
        return votes

    replica: Any = SimpleNamespace(
        world=SimpleNamespace(rank=2, plane=SimpleNamespace(agree=agree, is_asked=lambda name: False)),
        engine=SimpleNamespace(round=7),
        cadence=SimpleNamespace(contexts=1),
        life=SimpleNamespace(before_first_round=lambda: None),
    )
    vote = _StopVote(replica, _StopRequest(pending=True), 1.0)
    time.sleep(0.2)
    assert names == []
    replica.cadence.contexts, replica.life.before_first_round = 4, None
    vote._thread.join(5)
    assert names == ["preemption/4"]
    vote.leave()
    assert len(names) == 1
