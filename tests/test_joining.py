"""Processes that take a dead worker's place: their state, their seat, and what goes wrong on the way. Replicas that heal."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import decent_dp
from decent_dp.checkpoint import saver as saver_module
from decent_dp.checkpoint.saver import Saver, _Root
from decent_dp.errors import DisagreementError
from decent_dp.replica import state_receiver as receiver_module
from decent_dp.replica import state_server as state_server_module
from decent_dp.replica import transfer as transfer_module
from decent_dp.replica.state_server import StateServer
from decent_dp.replica.transfer import PartialState, StateCopy, pack_message, unpack_message
from decent_dp.rules import MomentumTracking
from tests.helpers import assert_same, net, values
from tests.members import (
    DEAD_AFTER,
    PAUSE,
    VICTIM,
    N,
    begin,
    die,
    end,
    has_begun,
    is_whole,
    kill_one,
    make,
    step,
    survivors,
    the_store,
    train,
)
from tests.workers import _store, hear, say

# Seconds that a partner that is not in its exchange is waited for (0.4 * dead_after), less some.
WAIT = 0.4 * DEAD_AFTER - 0.3


# -- the place of a dead worker --------------------------------------------------------------------------------------------


def joins(rank: int, n: int, kind: str, path: str) -> Any:
    model, optimizer, replica, rank = begin(rank, kind)
    rosters: list[Any] = []
    replica.on_roster(lambda old, new: rosters.append((old, new)))
    updates, seat = replica.stats().updates, replica.roster.seat
    kill_one(model, optimizer, replica, rank)
    if rank == 0 and kind == "gossip":
        with torch.no_grad():
            next(iter(model.parameters())).add_(0)  # announced to autograd, and no other value
    # On a busy machine the new process becomes a member late.
    longest = train(
        model,
        optimizer,
        rank,
        lambda: is_whole(replica) and replica.stats().rounds >= max(150, replica.roster.start + 50),
    )
    assert longest < WAIT or dist.get_rank() >= N  # nobody waits for a process that joins, in rounds before its first one
    saved = decent_dp.save(replica, path, wait=True)
    distance, roster = replica.consensus_distance(), replica.roster
    with replica.averaged():
        mean = values(model)
    found = distance, roster, replica.stats(), updates, seat, rosters, mean, saved.error
    replica.close()
    return found


@pytest.mark.parametrize("kind", ["gossip", pytest.param("wrapper", marks=pytest.mark.slow)])
def test_a_process_takes_the_place_of_a_dead_worker(workers, tmp_path, kind):
    found = survivors(workers.outcomes(N + 1, joins, kind, str(tmp_path)))
    for rank, (distance, roster, stats, updates, seat, rosters, mean, error) in zip((0, 1, 3, 2), found, strict=True):
        assert_same(mean, found[0][-2])
        assert (roster.seat, roster.members, error) == (rank, (0, 1, 2, 3), None)
        assert distance == found[0][0] < 1.0
        assert rosters[-1][1].members == (0, 1, 2, 3)
        if rank == VICTIM:
            assert (updates >= 20, seat) == (True, -1)
            assert rosters[0][0].seat == -1
            assert abs(stats.updates - found[0][2].updates) < 60  # as if it had made the steps of its transfer
            assert stats.exchanges > 20
    (step_folder,) = tmp_path.glob("step-*")
    assert len(list(step_folder.glob("*.safetensors"))) == N


def momenta_of_all(replica: Any, optimizers: list[Any], rank: int) -> dict[int, np.ndarray]:
    """The tracked and the own momentum of each living worker, by rank. Called by all."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    names = next(name for name in ("exp_avg", "momentum_buffer") if name in states[0]), "own_momentum"

    def flat(name: str) -> list[float]:
        own: list[float] = torch.cat([state[name].flatten() for state in states]).tolist()
        return own

    replica.gather(0)  # all are in the same round
    return {own: np.array(momenta) for own, *momenta in replica.gather([rank, *map(flat, names)]).values()}


def assert_exact_mean(found: dict[int, np.ndarray], weights: list[float] | None = None) -> None:
    """The mean of the tracked momenta is that of the own ones, and mixing has changed them.

    A worker that has left rounds out, on a busy machine, has not made them fade in these: a hundredth each time.
    """
    shares = [1.0 if weights is None else weights[rank] for rank in found]
    tracked, own = np.average(list(found.values()), axis=0, weights=shares)
    apart = max(np.abs(one[0] - one[1]).max() for one in found.values())
    assert apart > 0.01
    np.testing.assert_allclose(tracked, own, rtol=0, atol=0.01 * apart)


def tracks(rank: int, n: int, kind: str) -> list[tuple[int, ...]]:
    model, optimizer, replica, rank = begin(rank, kind, when="out", rule=MomentumTracking())
    found = []

    def look() -> None:
        momenta = momenta_of_all(replica, [optimizer] if kind == "gossip" else model.optimizers, rank)
        assert_exact_mean(momenta)
        found.append(tuple(sorted(momenta)))

    if dist.get_rank() < N:
        kill_one(model, optimizer, replica, rank)
        train(model, optimizer, rank, lambda: has_begun(replica) and replica.stats().rounds >= replica.roster.start + 15)
        look()
        say("out")
    train(model, optimizer, rank, lambda: is_whole(replica) and replica.stats().rounds >= replica.roster.start + 15)
    look()
    end(replica)
    return found


@pytest.mark.parametrize("kind", ["gossip", pytest.param("wrapper", marks=pytest.mark.slow)])
def test_the_mean_of_the_tracked_momenta_is_exact_after_a_death_and_after_a_worker_has_joined(workers, kind):
    *members, joiner = survivors(workers.outcomes(N + 1, tracks, kind))
    assert members == [[(0, 1, 3), (0, 1, 2, 3)]] * 3
    assert joiner == [(0, 1, 2, 3)]


WEIGHTS = [1.0, 4.0, 2.5, 8.0]


class Told(decent_dp.GossipAdamW):
    """Notes what it is told."""

    def set_replicas(self, n: int, share: float | None = None) -> None:
        self.told = [*getattr(self, "told", []), (n, share)]
        super().set_replicas(n, share)


def joins_with_a_weight(rank: int, n: int) -> Any:
    group, refused = dist.new_group(range(N)), ""

    def start(seed: int, weight: float | None, **options: Any) -> tuple[Any, Any, Any]:
        model, given = net(seed), {} if weight is None else {"weight": weight}
        optimizer = Told(model.parameters(), lr=0.01, tracking=True)
        faults = decent_dp.Tolerate(dead_after=DEAD_AFTER)
        return model, optimizer, decent_dp.gossip(model, optimizer, faults=faults, **given, **options)

    if rank < N:
        model, optimizer, replica = start(rank, WEIGHTS[rank], process_group=group)
        kill_one(model, optimizer, replica, rank)
        train(model, optimizer, rank, lambda: len(replica.roster.members) == N - 1)
        say("out")
    else:
        hear("out")
        for wrong in (2.0, None):
            with pytest.raises(ValueError, match=r"worker 2 of this run has weight=2.5, and this process has") as caught:
                start(17, wrong, transport=decent_dp.join(the_store(), rank=VICTIM))
            refused = str(caught.value)
        rank = VICTIM
        model, optimizer, replica = start(17, WEIGHTS[VICTIM], transport=decent_dp.join(the_store(), rank=VICTIM))
    train(model, optimizer, rank, lambda: is_whole(replica) and replica.stats().rounds >= replica.roster.start + 50)
    assert_exact_mean(momenta_of_all(replica, [optimizer], rank), WEIGHTS)
    gathered = replica.gather([rank, next(model.parameters()).double().flatten().tolist()])
    with replica.averaged():
        mean = next(model.parameters()).double().flatten().tolist()
    end(replica)
    return gathered, mean, optimizer.told, refused


def test_weights_are_those_of_the_living(workers):
    found = survivors(workers.outcomes(N + 1, joins_with_a_weight))
    for rank, (gathered, mean, told, _) in zip((0, 1, 3, 2), found, strict=True):
        own = [values for _, values in sorted(gathered.values())]
        wanted = [sum(w * x for w, x in zip(WEIGHTS, column, strict=True)) / sum(WEIGHTS) for column in zip(*own, strict=True)]
        assert mean == pytest.approx(wanted, abs=1e-6)
        assert max(abs(a - b) for a, b in zip(own[0], own[1], strict=True)) > 1e-4
        assert told[-2:] == [(4, pytest.approx(WEIGHTS[rank] / sum(WEIGHTS))), (1, None)]
        if rank != VICTIM:
            living = sum(WEIGHTS) - WEIGHTS[VICTIM]
            assert told[:2] == [(4, pytest.approx(WEIGHTS[rank] / sum(WEIGHTS))), (3, pytest.approx(WEIGHTS[rank] / living))]
    assert "None" in found[-1][-1]


def stops_with_the_others(rank: int, n: int) -> Any:
    """The members are in their second ``Preemption`` when a process joins, which is in its first."""
    model, optimizer, replica, rank = begin(rank)
    with decent_dp.Preemption(replica, signals=()) if dist.get_rank() < N else contextlib.nullcontext():
        kill_one(model, optimizer, replica, rank)
    with decent_dp.Preemption(replica, signals=(), grace=15.0) as stop:

        def is_due() -> bool:
            if rank == 0 and is_whole(replica):
                stop.request()
            return stop.due

        train(model, optimizer, rank, is_due)
    rounds = replica.stats().rounds
    replica.close()
    return rounds


@pytest.mark.slow
def test_a_process_that_joins_stops_with_the_others(workers):
    assert len(set(survivors(workers.outcomes(N + 1, stops_with_the_others)))) == 1


def joins_in_a_save(rank: int, n: int, path: str) -> Any:
    """A process takes the place of a dead worker while a file of a save is written, which takes long."""
    model, optimizer, replica, rank = begin(rank, when="saving")
    if dist.get_rank() >= N:
        train(model, optimizer, rank, lambda: is_whole(replica))
        end(replica)
        return None
    kill_one(model, optimizer, replica, rank)
    train(model, optimizer, rank, lambda: replica.roster.epoch == 1)
    written, write = threading.Event(), saver_module.write_shard
    saver_module.write_shard = lambda *args: (rank == 3 and written.wait(60), write(*args))[1]  # type: ignore[assignment]
    saving = decent_dp.save(replica, path, wait=False)
    if rank == 0:
        say("saving")
    train(model, optimizer, rank, lambda: is_whole(replica))
    written.set()
    found = saving.wait(30)
    end(replica)
    return found is not None, str(saving.error)


def test_a_process_that_joins_in_a_save_has_no_part_in_it(workers, tmp_path):
    *found, _ = survivors(workers.outcomes(N + 1, joins_in_a_save, str(tmp_path)))
    assert found == [(True, "None")] * 3


# -- what goes wrong -------------------------------------------------------------------------------------------------------


def has_another_model(rank: int, n: int) -> Any:
    group = dist.new_group(range(N))
    if rank < N:
        model, optimizer, replica = make(rank, process_group=group)
        kill_one(model, optimizer, replica, rank)
        train(model, optimizer, rank, lambda: _store().check(["said/tried"]))
        found = is_whole(replica)
        end(replica)
        return found
    hear("dead")
    for change in ({"topology": "ring"}, {"faults": None}, {"compression": "bfloat16"}):
        with pytest.raises((DisagreementError, ValueError)) as caught:
            make(VICTIM, transport=decent_dp.join(the_store(), rank=VICTIM), **change)  # type: ignore[arg-type]
        assert next(iter(change)) in str(caught.value)
    model = nn.Linear(3, 3)
    with pytest.raises(DisagreementError, match="the models differ between workers"):
        decent_dp.gossip(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            faults=decent_dp.Tolerate(dead_after=2.0),
            transport=decent_dp.join(the_store(), rank=VICTIM),
        )
    say("tried")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decent_dp-transport")]


def test_a_process_with_another_model_or_other_settings_is_refused(workers):
    *members, threads = survivors(workers.outcomes(N + 1, has_another_model))
    assert members == [False] * 3
    assert threads == []


def has_an_old_checkpoint(rank: int, n: int, path: str) -> Any:
    """Neither a checkpoint nor the values of one get into a replica that has joined, before it trains."""
    model, optimizer, replica, rank = begin(rank)
    if dist.get_rank() < N:
        decent_dp.save(replica, path, wait=True)
        kill_one(model, optimizer, replica, rank)
    else:
        before = values(model)
        old = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        for call in (
            lambda: decent_dp.load(replica, path),
            lambda: model.load_state_dict(old),
            lambda: replica.load_state_dict(replica.state_dict()),
            lambda: decent_dp.save(replica, path),
        ):
            with pytest.raises(RuntimeError, match="joins a run, before its first step"):
                call()
        assert_same(values(model), before)
    train(model, optimizer, rank, lambda: is_whole(replica))
    decent_dp.load(replica, path, resize="spread")  # all together, it is a call like any other
    found = values(model)
    replica.close()
    return found


@pytest.mark.slow
def test_an_old_checkpoint_does_not_get_into_a_replica_that_joins(workers, tmp_path):
    found = survivors(workers.outcomes(N + 1, has_an_old_checkpoint, str(tmp_path)))
    assert len(found) == N


def connection_breaks(rank: int, n: int) -> Any:
    """The connection of the worker that gives its state breaks half-way, once."""
    transfer_module._CHUNK = 500
    given: list[tuple[str, int, int]] = []
    taken: list[Any] = []
    take, chunk, answer = state_server_module.take, StateCopy.chunk, StateServer.answer

    def breaks(server: Any, rank: int, incarnation: int, request: bytes) -> bytes:
        wire, place = server._replica.world._wire, unpack_message(request)[0].get("from", 0)
        if place > 4000 and _store().add("breaks", 1) == 1:
            wire.call(lambda: wire.connections.lose(wire.links.joiners[rank, incarnation], "cut"))
        return answer(server, rank, incarnation, request)

    def count(copy: Any, begin: int) -> bytes:
        given.append((copy.name, begin, copy.size))
        return chunk(copy, begin)

    def keep(replica: Any, **options: Any) -> Any:
        snapshot = take(replica, **options)
        taken.append({name: tensor.clone() for name, tensor in snapshot["parameters"].items()})
        return snapshot

    StateServer.answer, StateCopy.chunk = breaks, count  # type: ignore[method-assign]
    state_server_module.take = keep
    model, optimizer, replica, rank = begin(rank)
    found = values(model)
    if dist.get_rank() < N:
        kill_one(model, optimizer, replica, rank)
    train(model, optimizer, rank, lambda: is_whole(replica))
    end(replica)
    return found, given, taken


def test_a_transfer_continues_where_it_was_when_the_connection_breaks(workers):
    """At the same member, with the chunks that were on their way."""
    *members, (params, _, _) = survivors(workers.outcomes(N + 1, connection_breaks))
    ((given, taken),) = [(given, taken) for _, given, taken in members if given or taken]
    assert_same(params, taken[-1])
    begins = [begin for _, begin, _ in given]
    [size] = {size for *_, size in given}
    assert sorted(set(begins)) == [*range(0, size, 500), size]
    assert 1 <= len(begins) - len(set(begins)) <= 4


def joins_while_others_wait(rank: int, n: int) -> Any:
    """Worker 0 has run out of batches, and waits for the others. A process comes, which asks worker 0 for its seat."""
    if rank == N:
        receiver_module.random = SimpleNamespace(sample=lambda others, n: sorted(others, reverse=True), choice=max)  # type: ignore[assignment]
    model, optimizer, replica, rank = begin(rank)
    with replica.join():
        if rank == 0:
            train(model, optimizer, rank, lambda: replica.stats().rounds >= 20)
        elif dist.get_rank() < N:
            kill_one(model, optimizer, replica, rank)
        if rank != 0:  # until the new process takes part in calls
            train(model, optimizer, rank, lambda: is_whole(replica) and replica.stats().rounds > replica.roster.start + 10)
    with replica.averaged():
        mean = values(model)
    replica.close()
    return mean


@pytest.mark.slow
def test_a_process_joins_while_a_member_has_run_out_of_batches(workers):
    outcomes = workers.outcomes(N + 1, joins_while_others_wait)
    assert [outcome.exitcode for outcome in outcomes] == [0, 0, -9, 0, 0], outcomes
    for rank in (1, 3, N):
        assert_same(outcomes[rank].value, outcomes[0].value)


def joiner_dies(rank: int, n: int) -> Any:
    """The first process that comes dies in the middle of its transfer, the second when it asks for its seat."""
    if rank == N:
        PartialState.add = lambda *_: die()  # type: ignore[method-assign]
    if rank == N + 1:
        receiver_module._Joiner.enter = lambda self: _ask_and_die(self)  # type: ignore[method-assign]
    if rank == N + 2:
        hear("dead")
        time.sleep(4)
    model, optimizer, replica, rank = begin(rank)
    kill_one(model, optimizer, replica, rank)
    longest = train(model, optimizer, rank, lambda: is_whole(replica))
    begun = time.monotonic()
    train(model, optimizer, rank, lambda: time.monotonic() > begun + 1)
    with replica.averaged():
        mean = values(model)
    replica.close()
    return mean, longest


def _ask_and_die(joiner: Any) -> None:
    joiner._monitor.neighbours.ask(0, 0, pack_message({"want": "seat"})).result(20)
    time.sleep(0.3)
    die()


@pytest.mark.slow
def test_processes_that_die_while_they_join_stop_nobody(workers):
    outcomes = workers.outcomes(N + 3, joiner_dies)
    killed = [outcome.exitcode == -9 for outcome in outcomes]
    assert [outcome.trace for outcome in outcomes] == [""] * len(outcomes)
    assert killed == [False, False, True, False, True, True, False]
    for rank in (1, 3, N + 2):
        assert_same(outcomes[rank].value[0], outcomes[0].value[0])
    assert max(outcomes[rank].value[1] for rank in (0, 1, 3)) < WAIT


# -- replicas that are not finite ------------------------------------------------------------------------------------------


def heals(rank: int, n: int, kind: str, times: int, sick: tuple[int, ...], options: dict[str, Any]) -> Any:
    model, optimizer, replica = make(rank, kind, **options)
    inner = model.module if kind == "wrapper" else model
    seen = []
    for t in range(160):
        if rank in sick and t % 20 == 10 and t < 20 * times:
            with torch.no_grad():
                next(iter(inner.parameters())).fill_(float("nan"))
        time.sleep(PAUSE / 2)
        step(model, optimizer, t, rank)
        seen.append(all(bool(param.isfinite().all()) for param in inner.parameters()))
    states = [state for own in ([optimizer] if kind == "gossip" else model.optimizers) for state in own.state.values()]
    assert all(bool(value.isfinite().all()) for state in states for value in state.values())
    with replica.averaged():
        mean = values(inner)
    found = mean, seen, replica.stats()
    replica.close()
    return found


@pytest.mark.parametrize(
    ("kind", "times", "sick", "options"),
    [
        pytest.param("gossip", 2, (0, 1, 3), {}, marks=pytest.mark.slow),  # two of them ask each other
        pytest.param("gossip", 1, (1,), {"topology": "ring:5,base-2"}, marks=pytest.mark.slow),  # cannot be rebuilt
        pytest.param("gossip", 2, (1,), {"rule": MomentumTracking()}, marks=pytest.mark.slow),
        pytest.param("wrapper", 1, (1,), {"rule": MomentumTracking(), "compression": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_a_replica_that_is_not_finite_gets_the_values_of_a_member(workers, kind, times, sick, options):
    found = workers(N, heals, kind, times, sick, options)
    for rank, (mean, seen, stats) in enumerate(found):
        assert_same(mean, found[0][0])
        assert all(bool(value.isfinite().all()) for value in mean.values())
        assert all(seen) or rank in sick
        assert stats.updates == 160
    seen = found[1][1]
    assert times <= seen.count(False) <= 4 * times
    assert all(seen[100:])


def never_heals(rank: int, n: int) -> Any:
    """Its data make it infinite again and again."""
    model, optimizer, replica = make(rank)
    try:
        for t in range(300):
            time.sleep(PAUSE / 2)
            step(model, optimizer, t, rank)
            if rank == 1:
                with torch.no_grad():
                    next(iter(model.parameters())).fill_(float("inf"))
    except decent_dp.NonFiniteError as error:
        return str(error)
    finally:
        replica.close()
    return ""


@pytest.mark.slow
def test_a_replica_that_does_not_become_finite_ends_with_the_error(workers):
    found = workers(N, never_heals)
    assert "worker 1" in found[1]


def is_collected(rank: int, n: int) -> bool:
    model, optimizer, replica = make(rank, "wrapper")
    for t in range(5):
        step(model, optimizer, t, rank)
    found = weakref.ref(replica.replica)
    dist.barrier()
    del model, optimizer, replica
    gc.collect()
    return found() is None


def test_a_wrapper_that_nobody_uses_is_collected(workers):
    """The transport's thread, which lets processes in, does not keep it."""
    assert workers(2, is_collected) == [True, True]


def test_shards_of_a_save_after_a_process_has_joined_are_named_alike(tmp_path: Path):
    """``Saver.agree`` takes the numbers of loads and of saves from the others."""
    control = SimpleNamespace(gather=lambda own: [own, [None, 5], [3, 4]], calls=2)
    saver = Saver(SimpleNamespace(control=control, timeout=1.0))  # type: ignore[arg-type]
    saver.agree(tmp_path)
    assert saver._roots[os.path.realpath(tmp_path)] == _Root(3)
    assert saver._saves == 5
    control.calls = 7  # nobody is left that has saved
    saver.agree(tmp_path)
    assert saver._saves == 7
    saver.closing()
