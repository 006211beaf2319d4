"""Calls of all workers if one dies in them: means, saves, exports, join(), pre-emption, construction; or if the store dies."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import decent_dp
from decent_dp.checkpoint import saver as saver_module
from decent_dp.errors import CheckpointError
from decent_dp.replica.replica import Replica
from decent_dp.transport import ProcessGroupTransport
from decent_dp.transport.control_plane import ControlPlane, Courier
from tests.helpers import assert_same, values
from tests.members import VICTIM, N, die, die_in, is_of, make, step, stop, survivors
from tests.workers import _store

LIVING = [0, 1, 3]


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for t in steps:
        step(model, optimizer, t, rank)


# -- means -----------------------------------------------------------------------------------------------------------------

IN_MEAN: dict[str, Callable[[], None]] = {
    "before it": lambda: die_in(Replica, "begin_collective"),
    "after all have come": lambda: die_in(Replica, "begin_collective", after=True),
    "in the mean": lambda: die_in(Courier, "put"),
}


def averages(rank: int, n: int, kind: str, where: str, victim: int) -> Any:
    model, optimizer, replica = make(rank, kind)
    train(model, optimizer, rank, range(8))
    own = values(getattr(model, "module", model))  # finishes the round
    if rank == victim:
        IN_MEAN[where]()
    began = time.monotonic()
    with replica.averaged():
        mean = values(getattr(model, "module", model))
    seconds = time.monotonic() - began
    assert_same(getattr(model, "module", model), own)
    distance = replica.consensus_distance()
    train(model, optimizer, rank, range(8, 12))
    replica.close()
    return own, mean, distance, seconds


@pytest.mark.parametrize(
    ("kind", "victim", "where"),
    [
        ("gossip", 0, "in the mean"),
        *(
            pytest.param(kind, victim, where, marks=pytest.mark.slow)
            for kind, victim in (("gossip", 0), ("gossip", 2), ("wrapper", 3))
            for where in IN_MEAN
        ),
    ],
)
def test_a_death_in_a_mean(workers, kind, where, victim):
    found = survivors(workers.outcomes(N, averages, kind, where, victim), victim)
    for name in found[0][0]:
        expected = torch.stack([own[name].double() for own, *_ in found]).mean(0)
        for _, mean, _, _ in found:
            torch.testing.assert_close(mean[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert len({distance for _, _, distance, _ in found}) == 1
    assert max(seconds for *_, seconds in found) < 3.0


# -- saves -----------------------------------------------------------------------------------------------------------------

IN_SAVE: dict[str, Callable[[], None]] = {
    "before it": lambda: die_in(Replica, "begin_collective"),
    "after all have come": lambda: die_in(Replica, "begin_collective", after=True),
    "before the file": lambda: die_in(saver_module, "write_shard"),
    "after the file": lambda: die_in(saver_module, "write_shard", after=True),
    "after its report": lambda: die_in(ControlPlane, "agree", after=True, when=is_of("checkpoint")),
}


def saves(rank: int, n: int, path: str, where: str) -> Any:
    model, optimizer, replica = make(rank)
    train(model, optimizer, rank, range(4))
    first = decent_dp.save(replica, path)
    train(model, optimizer, rank, range(4, 8))
    if rank == VICTIM:
        IN_SAVE[where]()
    second = decent_dp.save(replica, path)
    train(model, optimizer, rank, range(8, 12))
    third = decent_dp.save(replica, path, state={"rank": rank})
    own = values(model)
    replica.close()
    return [str(saving.error) if saving.error else "" for saving in (first, second, third)], own


def loads(rank: int, n: int, path: str) -> Any:
    model, _, replica = make(rank, seed=1)
    state = decent_dp.load(replica, path, resize="spread")
    found = values(model)
    replica.close()
    return state, found


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=() if where == "before the file" else pytest.mark.slow) for where in IN_SAVE]
)
def test_a_death_in_a_save(workers, tmp_path, where):
    found = survivors(workers.outcomes(N, saves, str(tmp_path), where))
    errors = {tuple(error) for error, _ in found}
    assert len(errors) == 1, errors
    first, second, third = errors.pop()
    assert first == third == ""
    if where == "before the file":
        assert "worker 2 died before it had written its shard" in second
    if where in ("before it", "after all have come"):  # it is one of those that live
        assert second == ""
    resumed = workers(3, loads, str(tmp_path))
    assert [state["rank"] for state, _ in resumed] == LIVING
    for (_, own), (_, loaded) in zip(found, resumed, strict=True):
        assert_same(own, loaded)
    assert len(workers(4, loads, str(tmp_path))) == 4


def has_no_room(rank: int, n: int, path: str) -> Any:
    """The disk of one worker is full in the second save of three."""
    model, optimizer, replica = make(rank)
    write, errors = saver_module.write_shard, []
    for turn in range(3):
        train(model, optimizer, rank, range(4 * turn, 4 * turn + 4))
        if rank == VICTIM and turn == 1:
            saver_module.write_shard = full
        errors.append(decent_dp.save(replica, path, wait=True).error)
        saver_module.write_shard = write
    before = replica.stats().rounds
    replica.close()
    return [str(error) if error else "" for error in errors], before


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_on_one_worker(workers, tmp_path):
    """All know of it, training continues, and so do saves when there is room again."""
    for rank, ((first, second, third), rounds) in enumerate(workers(N, has_no_room, str(tmp_path))):
        assert first == third == ""
        assert "No space left on device" in second
        assert rank == VICTIM or "worker 2" in second
        assert rounds >= 12
    assert len(list(tmp_path.glob("step-*"))) >= 1


def loads_with_a_damaged_file(rank: int, n: int, path: str) -> Any:
    """The file of a worker that lives, and whose rank is no position among those that do."""
    model, optimizer, replica = make(rank)
    train(model, optimizer, rank, range(4))
    decent_dp.save(replica, path)
    if rank == 1:
        die()
    train(model, optimizer, rank, range(4, 20))
    if rank == 3:
        shard = max(Path(path).glob("step-*/*0003*"))
        raw = bytearray(shard.read_bytes())
        raw[-3] ^= 1
        shard.write_bytes(raw)
    with replica.averaged():
        pass
    with pytest.raises(CheckpointError) as caught:
        decent_dp.load(replica, path)
    replica.close()
    return str(caught.value)


def test_a_load_after_a_death_verifies_all_files(workers, tmp_path):
    for message in survivors(workers.outcomes(N, loads_with_a_damaged_file, str(tmp_path)), 1):
        assert "0003" in message


# -- exports ---------------------------------------------------------------------------------------------------------------


def exports(rank: int, n: int, path: str) -> Any:
    from decent_dp.checkpoint import exporting

    model, optimizer, replica = make(rank)
    train(model, optimizer, rank, range(6))
    own = values(model)
    torch.save(own, f"{path}.{rank}")
    if rank == 0:
        die_in(exporting, "_write")
    decent_dp.export(replica, path)
    replica.close()
    return own


def test_another_worker_writes_if_the_first_dies(workers, tmp_path):
    path = tmp_path / "model.safetensors"
    survivors(workers.outcomes(N, exports, str(path)), 0)
    own = [torch.load(f"{path}.{rank}", weights_only=True) for rank in range(N)]
    for name, written in load_file(path).items():
        # The mean was taken before the writer died, and is that of four.
        torch.testing.assert_close(written, torch.stack([one[name] for one in own]).mean(0))


# -- uneven inputs ---------------------------------------------------------------------------------------------------------


def runs_out(rank: int, n: int, kind: str, victim: int) -> Any:
    model, optimizer, replica = make(rank, kind)
    steps = [4, 9, 15, 30][rank]
    began = time.monotonic()
    with replica.join():
        for t in range(steps):
            if (rank, t) == (victim, 8):
                die()
            time.sleep(0.01)
            step(model, optimizer, t, rank)
    seconds, stats = time.monotonic() - began, replica.stats()
    with replica.averaged():
        mean = values(getattr(model, "module", model))
    replica.close()
    return stats, mean, seconds


@pytest.mark.parametrize(
    ("kind", "victim"),
    [("wrapper", 1), *(pytest.param(k, v, marks=pytest.mark.slow) for k in ("gossip", "wrapper") for v in (-1, 1, 3))],
)
def test_workers_that_run_out_go_on_mixing_until_all_have(workers, kind, victim):
    found = survivors(workers.outcomes(N, runs_out, kind, victim), victim)
    ranks = [rank for rank in range(N) if rank != victim]
    assert [stats.updates for stats, *_ in found] == [[4, 9, 15, 30][rank] for rank in ranks]
    first = found[0][0]
    last = max(stats.updates for stats, *_ in found)
    assert last - 5 <= first.rounds <= last + 5  # it has gone on with the others, and has not run ahead
    assert first.exchanges > 4 + (last - 4) // 4
    for _, mean, seconds in found:
        assert seconds < 6
        assert_same(mean, found[0][1])


# -- pre-emption -----------------------------------------------------------------------------------------------------------


def is_preempted(rank: int, n: int, path: str, where: str) -> Any:
    model, optimizer, replica = make(rank)
    if rank == VICTIM and where == "before its vote":
        die_in(ControlPlane, "agree", when=is_of("preemption"))
    if rank == VICTIM and where == "after its vote":
        die_in(ControlPlane, "agree", after=True, when=is_of("preemption"))
    with decent_dp.Preemption(replica, grace=10.0) as stop:
        for t in range(2000):
            if (rank, t) == (VICTIM, 5) and where == "earlier":
                die()
            if (rank, t) == (1, 20):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)
            step(model, optimizer, t, rank)
            if stop.due:
                break
    error = decent_dp.save(replica, path).error
    rounds = replica.stats().rounds
    replica.close()
    return rounds, str(error) if error else ""


@pytest.mark.parametrize(
    "where", ["before its vote", *(pytest.param(w, marks=pytest.mark.slow) for w in ("never", "earlier", "after its vote"))]
)
def test_all_that_live_stop_after_the_same_round(workers, tmp_path, where):
    found = survivors(workers.outcomes(N, is_preempted, str(tmp_path), where), -1 if where == "never" else VICTIM)
    assert len(set(found)) == 1, found
    rounds, error = found[0]
    assert 20 < rounds < 1500
    assert error == ""


# -- construction ----------------------------------------------------------------------------------------------------------


def constructs(rank: int, n: int, where: str) -> Any:
    from decent_dp.replica import construction

    if rank == VICTIM:
        if where == "process group":
            die()
        if where == "arguments":
            die_in(construction, "call_on_all")
        if where == "tolerate":
            die_in(ProcessGroupTransport, "tolerate")
        if where == "connections":
            die_in(ProcessGroupTransport, "prepare")
    began = time.monotonic()
    try:
        model, optimizer, replica = make(rank)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    train(model, optimizer, rank, range(10))
    with replica.averaged():
        pass
    updates = replica.stats().updates
    replica.close()
    return "", updates, time.monotonic() - began


@pytest.mark.parametrize(
    "where", ["arguments", "tolerate", *(pytest.param(w, marks=pytest.mark.slow) for w in ("process group", "connections"))]
)
def test_a_death_in_the_construction(workers, where):
    found = survivors(workers.outcomes(N, constructs, where))
    for kind, what, seconds in found:
        assert seconds < 15
        if where in ("tolerate", "connections"):
            assert (kind, what) == ("", 10)
        else:
            assert kind in ("PeerLostError", "RuntimeError", "DistBackendError"), (kind, what)


def starts_late(rank: int, n: int) -> Any:
    """The wrapper agrees on its buckets in the first update."""
    model, _, replica = make(rank, "wrapper")
    if rank == VICTIM:
        die()
    train(model, None, rank, range(6))
    with replica.averaged():
        mean = values(model.module)
    replica.close()
    return mean


def test_a_death_before_the_buckets_are_agreed_on(workers):
    means = survivors(workers.outcomes(N, starts_late))
    for mean in means:
        assert_same(mean, means[0])


# -- the store -------------------------------------------------------------------------------------------------------------


def loses_the_store(rank: int, n: int, path: str) -> Any:
    """The last worker keeps the store, as worker 0 does without a launcher; and dies."""
    shared = _store()
    server: Any = None
    if rank == n - 1:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("port", str(server.port))
    port = int(shared.get("port"))
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    model, optimizer, replica = make(rank)
    train(model, optimizer, rank, range(6))
    if rank == n - 1:
        die()
    train(model, optimizer, rank, range(6, 20))
    with replica.averaged():
        mean = values(model)
    error = decent_dp.save(replica, path).error
    decent_dp.export(replica, f"{path}/model.pt")
    updates = replica.stats().updates
    replica.close()
    return updates, mean, str(error) if error else ""


def test_training_and_calls_go_on_without_the_store(workers, tmp_path):
    found = survivors(workers.outcomes(N, loses_the_store, str(tmp_path)), N - 1)
    for updates, mean, error in found:
        assert (updates, error) == (20, "")
        assert_same(mean, found[0][1])
    assert Path(tmp_path, "model.pt").exists()


def wakes_in_a_mean(rank: int, n: int) -> Any:
    """One is stopped in the mean for so long that the others go on without it, and they make the next call when it is back."""
    model, optimizer, replica = make(rank, faults=decent_dp.Tolerate(dead_after=1.0))
    train(model, optimizer, rank, range(8))
    if rank == VICTIM:
        get = Courier.get

        def wakes(*args: Any) -> bytes:
            Courier.get = get  # type: ignore[method-assign]
            stop(4.0)
            return get(*args)

        Courier.get = wakes  # type: ignore[method-assign]
    began = time.monotonic()
    with replica.averaged():
        pass
    while time.monotonic() < began + 5.0:
        step(model, optimizer, 0, rank)
        time.sleep(0.02)
    began = time.monotonic()
    replica.consensus_distance()
    replica.close()
    return time.monotonic() - began


@pytest.mark.slow
def test_a_worker_that_wakes_in_a_mean_of_before_is_told_and_holds_up_nobody(workers):
    outcomes = workers.outcomes(N, wakes_in_a_mean)
    assert "the others took worker 2 for gone" in outcomes[VICTIM].message
    assert max(outcome.value for rank, outcome in enumerate(outcomes) if rank != VICTIM) < 5.0
