"""Epochs: rounds are planned anew for the workers that live; who was left out comes back; one line of epochs."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.many_seats import Look
from decent_dp.launch.local import store_on
from decent_dp.membership import Epoch, Epochs, EpochStore
from decent_dp.membership import epochs as epochs_module
from decent_dp.membership.epoch_store import Promise
from decent_dp.topo import Edge, EveryTopology, Topology, make_topology
from decent_dp.topo.epoch_topology import EpochTopology
from decent_dp.topo.schedule import edges_of, meetings, spread, turn_of
from decent_dp.transport import InProcessTransport, Replicas
from tests.helpers import assert_same, listening, values
from tests.members import die, make, step

# -- the topology ----------------------------------------------------------------------------------------------------------


def ring_of(n: int) -> Topology:
    return make_topology("ring", local_world_size=1, world_size=n, rank=0)


def edges(topology: Topology, t: int) -> set[tuple[int, ...]]:
    return {tuple(sorted(edge.ranks)) for edge in edges_of(topology, t)}


def test_rounds_are_those_of_the_members():
    topology = EpochTopology(ring_of, world_size=6, rank=2)
    plain = make_topology("ring", local_world_size=1, world_size=6, rank=2)
    assert topology.fingerprint() == plain.fingerprint()
    assert topology.period == plain.period
    assert [topology.get_edge(t) for t in range(5)] == [plain.get_edge(t) for t in range(5)]
    topology.change(7, [0, 2, 3, 5])
    four = ring_of(4)
    for t in range(7):
        assert edges(topology, t) == edges(plain, t)
    for t in range(7, 20):
        seats = [0, 2, 3, 5]
        assert edges(topology, t) == {(1,), (4,)} | {
            tuple(sorted(seats[seat] for seat in edge.ranks)) for edge in four.round(t - 7)
        }
        np.testing.assert_array_equal(topology.mixing_matrix(t).sum(1), 1.0)
    assert meetings(topology, 7 + four.period, [0, 2]) == meetings(four, four.period, [0, 1])
    assert meetings(topology, 30, [0, 1]) == 0
    assert topology.fingerprint() != plain.fingerprint()
    before = edges(topology, 14)
    topology.change(15, range(6))
    assert (edges(topology, 14), edges(topology, 15)) == (before, edges(plain, 0))


def test_after_a_load_rounds_are_those_of_the_newest_members():
    """Which older plans a worker still has depends on how far it was."""
    topologies = [EpochTopology(ring_of, world_size=4, rank=0) for _ in range(2)]
    for topology, now in zip(topologies, (0, 300), strict=True):
        topology.change(100, [0, 1, 3])
        topology.change(200, [0, 1, 2, 3], now=now)
        topology.restart()
    assert [edges(topologies[0], t) for t in range(9)] == [edges(topologies[1], t) for t in range(9)]
    assert [edges(topologies[0], t) for t in range(9)] == [edges(ring_of(4), t) for t in range(9)]


def test_what_is_made_from_it_changes_with_it():
    topology = EpochTopology(ring_of, world_size=4, rank=0)
    every = Topology.every(topology, 3)
    part = spread(every, 10, 20, 30)
    plain = Topology.every(ring_of(4), 3)
    assert every.fingerprint() == plain.fingerprint()
    own = spread(plain, 10, 20, 30)
    assert isinstance(own, EveryTopology)
    for t in range(12):
        turn, same = turn_of(part, t), turn_of(own, t)
        assert (turn.mixes, turn.stage.time) == (same.mixes, same.stage.time)
    topology.change(12, [0, 1, 3])
    three = spread(Topology.every(ring_of(3), 3), 10, 20, 30)
    assert [turn_of(part, t).mixes for t in range(12, 24)] == [turn_of(three, t).mixes for t in range(12)]
    assert part.get_edge(20) == Edge([2], 1.0) or 2 not in part.get_edge(20).ranks


# -- processes -------------------------------------------------------------------------------------------------------------


def trains_on(rank: int, n: int, topology: str, steps: int, options: dict[str, Any]) -> Any:
    """Workers 1 and 4 die at once."""
    model, optimizer, replica = make(rank, topology=topology, **options)
    changes: list[Any] = []
    replica.on_roster(lambda old, new: changes.append((old.members, new.members, new.epoch)))
    exchanges, began = [], time.monotonic()
    for t in range(steps):
        if rank in (1, 4) and t == 40:
            die()
        time.sleep(0.02)
        step(model, optimizer, t, rank)
        exchanges.append(replica.stats().exchanges)
    seconds, roster, updates = time.monotonic() - began, replica.roster, replica.stats().updates
    with replica.averaged():
        mean = values(model)
    replica.close()
    return roster, updates, changes, exchanges[-1] - exchanges[-60], mean, seconds


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("ring", {}),
        pytest.param("one-peer-exp", {}, marks=pytest.mark.slow),
        pytest.param("base-2", {"compression": "int8"}, marks=pytest.mark.slow),
        pytest.param("random-matching", {"mix_every": 2}, marks=pytest.mark.slow),
    ],
)
def test_rounds_are_planned_anew_after_deaths(workers, topology, options):
    """Two deaths at once cut a ring of six in parts."""
    n, steps = 8 if topology == "one-peer-exp" else 6, 200
    outcomes = workers.outcomes(n, trains_on, topology, steps, options)
    found = [outcome.value for rank, outcome in enumerate(outcomes) if rank not in (1, 4)]
    assert all(value is not None for value in found), [outcome.trace for outcome in outcomes]
    members = tuple(rank for rank in range(n) if rank not in (1, 4))
    for seat, (roster, updates, changes, exchanges, mean, seconds) in enumerate(found):
        assert (roster.seat, roster.members, roster.holes, updates) == (seat, members, (), steps)
        assert (changes[0][0], changes[-1][1]) == (tuple(range(n)), members)
        assert [epoch for *_, epoch in changes] == [epoch for *_, epoch in found[0][2]]
        if not options:
            # No round is left out after it. With base-2, in place of one-peer-exp for six, each worker idles in some rounds.
            assert exchanges >= (50 if topology == "ring" else 35)
        assert seconds < steps * 0.02 + 15
        assert_same(mean, found[0][4])


@pytest.mark.parametrize("kind", ["gossip", "wrapper"])
def test_on_roster_needs_tolerance(kind):
    _, _, replica = make(0, kind, faults=None, transport=InProcessTransport())
    with pytest.raises(RuntimeError, match=r"on_roster needs faults=decent_dp.Tolerate\(...\)"):
        replica.on_roster(print)
    replica.close()


def test_a_store_listens_on_its_address_only():
    before, store = listening(), store_on("127.0.0.1")
    assert listening() - before == {f"0100007F:{store.port:04X}"}


# -- what an epoch names ---------------------------------------------------------------------------------------------------

REPLICAS = Replicas(tuple((rank,) for rank in range(4)))
BEFORE = Epoch(1, 40, 7, (0, 1, 2), {2: 3}, "")


def promise_of(
    rank: int,
    until: int,
    *,
    incarnation: int = 0,
    absent: tuple[int, ...] = (),
    joining: Any = None,
    since: Any = (1, 40, 7, 3),
) -> Promise:
    return Promise(rank, incarnation, until, absent, joining or {}, since)


def test_an_epoch_counts_the_shares_of_data_before_it():
    """From the newest epoch that one of them knows: five workers since round 10, after 36 shares. A load has changed this."""
    before = Epoch(2, 500, 900, (0, 1, 2, 3, 4), {}, "")
    promises = [promise_of(rank, 20, since=(2, 10, 36, 5)) for rank in (0, 2)] + [promise_of(3, 23, since=(1, 4, 12, 4))]
    epoch = before.next({promise.rank: promise for promise in promises}, REPLICAS)
    assert (epoch.number, epoch.start, epoch.dealt, epoch.members) == (3, 24, 36 + 14 * 5, (0, 2, 3))
    assert Epoch.read(3, epoch.text) == epoch
    alone = before.next({3: promise_of(3, 23, since=(1, 4, 12, 4))}, REPLICAS)  # it knows the one before from the store
    assert (alone.start, alone.dealt) == (500, 900)


def test_who_promises_keeps_its_place_and_no_epoch_begins_before_the_last():
    promises = {0: promise_of(0, 20, joining={3: 9, 2: 8, 1: 2}), 1: promise_of(1, 22), 3: promise_of(3, 22, incarnation=4)}
    epoch = BEFORE.next(promises, REPLICAS)
    assert epoch.members == (0, 1, 2, 3)  # workers 1 and 3 live, whoever has asked for their places
    assert epoch.incarnations == {2: 8, 3: 4}
    assert (epoch.start, epoch.dealt) == (40, 7)


def test_of_several_processes_for_one_place_the_newest_gets_it():
    promises = {0: promise_of(0, 50, joining={2: 8}), 1: promise_of(1, 50, joining={2: 11, 4: 9})}
    assert BEFORE.next(promises, REPLICAS).incarnations == {2: 11, 4: 9}
    old = BEFORE.next({0: promise_of(0, 50, joining={2: 3})}, REPLICAS)  # it was a member, and is gone
    assert (old.members, old.incarnations) == ((0,), {2: 3})


@pytest.mark.parametrize(
    ("absent", "members"),
    [
        ({0: (2,), 1: (2,), 2: (0, 1)}, (0, 1)),  # nobody else hears it
        ({0: (2,), 1: (), 2: (0,)}, (0, 1, 2)),  # a cut link
        ({0: (1,), 1: (0,)}, (0, 1)),
        ({0: (1, 2), 1: (0, 2), 2: (0, 1)}, (0, 1, 2)),
        ({1: (0, 2)}, (1,)),
    ],
)
def test_whom_nobody_hears_is_left_out(absent, members):
    promises = {rank: promise_of(rank, 50, absent=ranks) for rank, ranks in absent.items()}
    assert BEFORE.next(promises, REPLICAS).members == members


def test_an_epoch_names_whole_replicas_only():
    pairs, before = Replicas(((0, 1), (2, 3), (4, 5))), Epoch(1, 40, 6, tuple(range(6)), {}, "")
    epoch = before.next({rank: promise_of(rank, 50, absent=(3,)) for rank in (0, 1, 2, 4, 5)}, pairs)
    assert (epoch.members, epoch.start, epoch.dealt) == ((0, 1, 4, 5), 51, 7 + 3 * 11)  # three seats in each of 11 rounds
    half = before.next({rank: promise_of(rank, 50, joining={2: 7}) for rank in (0, 1)}, pairs)
    assert (half.members, half.incarnations) == ((0, 1), {})
    # Worker 2, whose mate has ended, is about to end, and nobody hears it but the store.
    old = {2: promise_of(2, 20, absent=(0, 3)), **{rank: promise_of(rank, 50, joining={2: 7, 3: 8}) for rank in (0, 1)}}
    mixed = before.next(old, pairs)
    assert mixed is not None
    assert (mixed.members, mixed.incarnations) == ((0, 1), before.incarnations)
    joined = before.next({rank: promise_of(rank, 50, joining={2: 7, 3: 8, 6: 9, 7: 10}) for rank in (0, 1)}, pairs)
    assert (joined.members, joined.incarnations) == ((0, 1, 2, 3, 6, 7), {2: 7, 3: 8, 6: 9, 7: 10})
    assert pairs.whole((6, 7, 8, 0)) == (3,)


# -- one worker and a store ------------------------------------------------------------------------------------------------


class Alone:
    """Worker 3 of four, at a store of its own; also its neighbours. ``now``: the clock."""

    def __init__(self) -> None:
        self.now, self.heard, self.confined, self.hears = 0.0, 0, list[int | None](), list[int]()
        self.is_lost, self.has_left, self.has_ended = list[int](), list[int](), list[int]()
        self.store = EpochStore(dist.HashStore(), "run", {})
        self.store.register()
        fake: Any = self
        topology = EpochTopology(ring_of, world_size=5, rank=3, members=4)
        self.epochs = Epochs(3, REPLICAS, fake, topology, self.store)
        self.silent = self.lost = lambda: self.is_lost
        self.left, self.ended = (lambda: self.has_left), (lambda: self.has_ended)
        self.living, self.stop_mixing_after = (lambda: self.hears), self.confined.append
        self.newest_epoch, self.reserve_until = (lambda: self.heard), lambda seconds, least: 90
        self.enter_epoch = self.renew = self.fail = lambda *_: None

    def look(self) -> Look:
        return Look(self)

    def come_to(self, round_: int, *, wanted: bool = False) -> Epoch | None:
        return self.epochs.look(round_, wanted=wanted)

    def look_at_store(self, seconds: float = 0.0) -> float:
        self.now += seconds
        return self.epochs.keeper.look_at_store()

    def promise(self, *ranks: int, number: int = 1, until: int = 79, **other: Any) -> None:
        for rank in ranks:
            self.store.promise(number, promise_of(rank, until, since=(0, 0, 0, 4), **other))

    def others_decide(self, number: int, start: int, *members: int, **entries: Any) -> Epoch:
        text = json.dumps({"start": start, "dealt": 0, "members": members, "incarnations": {}, **entries})
        self.promise(members[0], number=number)
        decided = self.store.decide(Epoch.read(number, text))
        assert decided is not None
        self.look_at_store()
        return decided


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Alone()
    monkeypatch.setattr(epochs_module, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(epochs_module, "start_thread", lambda *_: True)
    return found


def test_who_is_gone_when_a_worker_promises_is_absent(one):
    one.is_lost, one.has_left = [2], [1]
    one.promise(0)
    assert one.look_at_store() == epochs_module._SETTLE  # the store may end with worker 1
    one.look_at_store(0.5)
    one.is_lost = []
    one.look_at_store(0.2)
    assert one.epochs.keeper.absent == {1, 2}
    assert one.store.promises(1)[3].absent == (1, 2)


def test_the_training_thread_comes_to_an_epoch_when_its_whole_replica_knows_it(one):
    one.others_decide(1, 80, 0, 1, 3)
    one.epochs.limit = 0
    assert (one.come_to(81), one.epochs.own.number) == (None, 1)
    one.epochs.limit = 1
    assert one.come_to(82).members == (0, 1, 3)


def test_a_process_whose_replica_is_not_there_asks_for_no_epoch(one):
    one.epochs.replicas = Replicas(((0, 1), (2, 3)))
    one.epochs.keeper.offer(4, 7)
    one.now += 1.0
    assert not one.epochs.keeper._wants()
    one.epochs.keeper.offer(5, 8)
    one.now += 1.0
    assert one.epochs.keeper._wants()


def test_there_is_no_epoch_without_a_whole_replica(one):
    """The other worker of this one's replica may be late, as all others are."""
    one.epochs.replicas = Replicas(((0, 1), (2, 3)))
    one.come_to(5, wanted=True)
    one.look_at_store()
    one.promise(1)
    one.look_at_store(2 * epochs_module._FEW)
    assert one.store.read(1) is None
    one.promise(2)
    one.look_at_store()
    assert one.store.read(1).members == (2, 3)


def test_a_promise_is_made_once_also_if_its_call_fails(one):
    """It may have been made: somebody may have read it."""
    calls, promise = [], one.store.promise

    def fails(number: int, own: Promise) -> int | None:
        promise(number, own)
        calls.append(own)
        raise ConnectionError("a test")

    one.store.promise = fails
    one.come_to(5, wanted=True)
    assert [one.look_at_store(), one.look_at_store(), one.look_at_store(2.0)] == [0.0, *[epochs_module._AGAIN] * 2]
    one.epochs.keeper.offer(4, 7)  # too late for this epoch
    one.reserve_until = lambda seconds, least: 200
    one.store.promise = lambda number, own: [calls.append(own), promise(number, own)][1]
    one.look_at_store(2.0)
    assert len(calls) == 4
    assert set(map(Promise.write, calls)) == {calls[0].write()}
    assert calls[0].until == one.epochs.promise.until == 90


@pytest.mark.parametrize(
    ("promised", "ended", "hears", "absent", "seconds"),
    [
        ([0, 1, 2], [], [0, 1, 2], (), 0.0),
        ([0, 1], [2], [0, 1], (), 0.0),
        ([0, 1], [], [0, 1], (2,), epochs_module._SILENT),
        ([0, 1], [], [0, 1, 2], (2,), epochs_module._HEARD),  # another one does not hear it
        ([0, 1], [], [0, 1], (), epochs_module._HEARD),  # this worker is not connected to it
        ([], [], [], (), epochs_module._FEW),
        ([], [0, 1, 2], [], (), 0.0),
    ],
)
def test_how_long_promises_are_waited_for(one, promised, ended, hears, absent, seconds):
    one.has_ended, one.hears = ended, hears
    one.come_to(5, wanted=True)
    one.look_at_store()
    one.promise(*promised, absent=absent)
    one.look_at_store(max(0.0, seconds - 0.1))
    assert (one.store.read(1) is None) == (seconds > 0.0)
    one.look_at_store(0.1)
    found = one.store.read(1)
    assert found is not None
    assert found.members == tuple(sorted([*promised, 3]))
    assert one.come_to(6).members == found.members


@pytest.mark.parametrize(("proposer", "lost", "living", "turn"), [(1, [], [0, 1, 2], 3), (1, [1], [2, 0], 2), (1, [1], [], 0)])
def test_the_others_decide_one_after_the_other(one, proposer, lost, living, turn):
    one.is_lost, one.hears = lost, living
    one.promise(proposer, *{0, 1, 2} - {proposer})
    one.look_at_store(5.0)
    for _ in range(turn):
        assert one.store.read(1) is None
        one.look_at_store(epochs_module._TURN - 0.01)
        assert one.store.read(1) is None
        one.look_at_store(0.01)
    assert one.store.read(1).members == (0, 1, 2, 3)


@pytest.mark.parametrize("promised", [False, True])
def test_nobody_changes_the_members_at_a_store_that_was_emptied_before_most_have_come_back(one, promised, caplog):
    """A promise that cannot come about would leave rounds out."""
    if promised:
        one.come_to(5, wanted=True)
        one.look_at_store()
    for key in ("whole", "epoch/1/proposal", "epoch/1/promises"):
        one.store.ask(lambda store, key=key: store.delete_key(f"run/{key}"))
    one.come_to(6, wanted=True)
    one.has_ended = [0, 1, 2]
    for _ in range(5):
        one.look_at_store(0.1)
    assert (one.epochs.promise is not None, list(one.store.promises(1))) == (promised, [])
    [said] = [line for line in caplog.messages if "the members cannot change" in line]
    assert "the store has lost epochs, and most of epoch 0 are missing" in said
    assert ("Training continues" in said) is not promised
    for rank in (0, 1):
        one.store.come_back(Epoch.first(4), rank, 0)
    one.promise(0, 1)
    one.look_at_store(0.5)
    one.look_at_store(2 * epochs_module._TURN)
    assert one.come_to(7).members == (0, 1, 3)


def test_promises_are_waited_for_again_after_the_store_was_lost(one):
    """Once the first worker that came to the new store made an epoch of itself alone."""
    one.hears = [0, 1, 2]
    one.come_to(5, wanted=True)
    one.look_at_store()
    for key in ("whole", "epoch/1/proposal", "epoch/1/promises"):
        one.store.ask(lambda store, key=key: store.delete_key(f"run/{key}"))
    for rank in (0, 1):
        one.store.come_back(Epoch.first(4), rank, 0)
    one.look_at_store(60.0)
    one.look_at_store(0.1)
    assert one.store.read(1) is None
    one.promise(0, 1, 2)
    one.look_at_store(0.1)
    assert one.store.read(1).members == (0, 1, 2, 3)


def test_a_worker_that_has_missed_the_newest_epoch_helps_to_bring_it_back(one):
    """Those that know it may be few."""
    one.store.ask(lambda store: store.delete_key("run/whole"))
    one.heard = 2
    one.look_at_store()
    newest = Epoch.read(2, json.dumps({"start": 9, "dealt": 0, "members": [1, 3], "incarnations": {}}))
    assert one.store.come_back(newest, 1, 2)
    one.look_at_store(0.1)
    assert one.come_to(5) == newest


def test_an_epoch_is_made_over_what_others_have_written_in_its_place(one, caplog):
    """Once there was no epoch then: mixing ended without a word, and each replica trained on alone."""
    one.store.ask(lambda store: store.set("run/epoch/1", "hello"))
    one.has_ended = [1, 2]
    one.come_to(5, wanted=True)
    one.look_at_store()
    one.promise(0)
    one.look_at_store()
    assert one.come_to(6).members == (0, 3)
    assert "something else under 'decent_dp/run/epoch/1'" in caplog.text


@pytest.mark.parametrize("looks", [0, 1])
def test_a_worker_on_a_lost_branch_takes_the_one_of_the_store(one, looks):
    """All others that knew its epoch have died with the store, and the rest has made another one of that number, perhaps after
    this worker has seen the empty store."""
    one.others_decide(1, 80, 0, 3)
    for key in ("whole", "epoch/1"):
        one.store.ask(lambda store, key=key: store.delete_key(f"run/{key}"))
    one.epochs.keeper._keep_at = 0.0  # as after a call that failed
    for _ in range(looks):
        one.look_at_store(1.0)
    for rank in (0, 1, 2):
        one.store.come_back(Epoch.first(4), rank, 0)
    other = one.store.decide(Epoch.read(1, one.epochs.decided.text.replace("[0, 3]", "[1, 3]")))
    one.look_at_store(0.1)
    one.come_to(50)
    one.come_to(51)
    assert one.epochs.newest == other


def test_a_worker_whose_place_was_taken_promises_nothing_more(one):
    one.others_decide(1, 80, 0, 1, 2, 3, incarnations={"3": 5})
    assert one.epochs.replaced
    one.promise(0, number=2)
    one.look_at_store(1.0)
    assert list(one.store.promises(2)) == [0]


def test_a_worker_that_was_left_out_asks_to_be_a_member_where_another_one_hears_it(one):
    one.others_decide(1, 80, 0, 1)
    assert one.confined == [-1]
    one.look_at_store(1.0)
    assert not one.store.is_proposed(2)
    one.hears = [2]
    one.look_at_store(1.0)
    assert one.store.is_proposed(2)


def test_a_process_waits_for_its_seat_and_learns_of_it(one):
    seat = one.epochs.keeper.offer(4, 7)
    with pytest.raises(ConnectionError, match="another process is worker 4"):
        one.epochs.keeper.offer(4, 6)
    one.look_at_store()
    assert not one.store.is_proposed(1)
    one.has_ended = [0, 1, 2]
    one.look_at_store(0.5)
    one.look_at_store(0.2)
    assert seat.result(0).members == (3, 4)
    assert seat.result(0).incarnations == {4: 7}
    assert one.epochs.is_seated(4, 7)
    assert one.epochs.keeper.offer(4, 7).result(0) == seat.result(0)


def test_a_load_takes_in_an_epoch_that_was_decided_meanwhile(one):
    one.others_decide(1, 1101, 0, 1, 3)
    epoch = one.epochs.restart()
    assert epoch is not None
    assert (epoch.number, one.epochs.newest.start, one.epochs.newest.members) == (1, 0, (0, 1, 3))
    assert one.epochs._topology._line.changes == ((0, (0, 1, 3)),)
    assert one.confined == [None]
    assert one.epochs.is_member


@pytest.fixture
def late(one: Any) -> Any:
    """It has missed epoch 1, and epoch 2, from round 80 on, names it."""
    one.others_decide(1, 10, 0, 1, 2)
    assert one.come_to(60) is None
    one.others_decide(2, 80, 0, 1, 2, 3)
    epoch = one.come_to(61)
    assert epoch is not None
    assert (epoch.number, epoch.start, one.epochs.is_member) == (2, 80, True)
    assert (one.confined, one.epochs.mixing_from) == ([-1], 80)
    return one


def test_a_worker_that_has_missed_an_epoch_mixes_again_when_the_next_one_begins(late):
    """Until then the others make rounds that it does not know. If it met its partners of before, it would wait for nothing."""
    for round_ in (62, 79, 80, 81):
        late.come_to(round_)
    assert late.confined == [-1, None]


def test_a_load_ends_the_wait_for_an_epoch(late):
    """Rounds are earlier ones then. A worker that waited for a round that is far ahead would mix with nobody until then."""
    late.epochs.restart()
    assert late.confined == [-1, None]


def test_a_promise_outlives_the_wait_for_an_epoch(late):
    late.promise(0, number=3)
    late.look_at_store(1.0)
    late.come_to(80)
    assert late.confined == [-1, 90]


def test_the_membership_thread_ends_with_its_worker():
    """Also if nobody closes it."""
    before = set(threading.enumerate())  # others may still run, of tests before
    one = Alone()
    one.come_to(1)
    [thread] = [found for found in set(threading.enumerate()) - before if found.name == "decent_dp-membership"]
    del one.epochs
    thread.join(20)
    assert not thread.is_alive()
