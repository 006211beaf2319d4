"""Epochs: rounds are planned anew for the workers that live; who was left out comes back; one line of epochs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import decent_dp
from decent_dp.errors import PeerLostError
from decent_dp.membership import Epoch, Epochs, EpochStore, joining
from decent_dp.membership import epochs as epochs_module
from decent_dp.membership.epoch_store import Promise
from decent_dp.topo import Edge, EveryTopology, Topology, make_topology
from decent_dp.topo.epoch_topology import EpochTopology
from decent_dp.topo.schedule import edges_of, meetings, spread, turn_of
from decent_dp.transport import InProcessTransport, Replicas
from decent_dp.transport.rendezvous import Rendezvous, RunRecord, _unbound, address_key
from tests.helpers import assert_same, values
from tests.test_survivor_calls import survivors
from tests.test_tolerate import DEAD_AFTER, make, step
from tests.workers import _store, hear, say

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
    topology.change(15, range(6))
    assert edges(topology, 15) == edges(plain, 0)
    assert edges(topology, 14) == {(1,), (4,), *map(tuple, ({0, 2}, {3, 5}))} or len(edges(topology, 14)) == 4


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
        assert (turn.mixes, turn.updates) == (same.mixes, same.updates)
    topology.change(12, [0, 1, 3])
    three = spread(Topology.every(ring_of(3), 3), 10, 20, 30)
    assert [turn_of(part, t).mixes for t in range(12, 24)] == [turn_of(three, t).mixes for t in range(12)]
    assert part.get_edge(20) == Edge([2], 1.0) or 2 not in part.get_edge(20).ranks


# -- processes -------------------------------------------------------------------------------------------------------------


def trains_on(rank: int, n: int, topology: str, dead: dict[int, int], steps: int, options: dict[str, Any]) -> Any:
    model, optimizer, replica = make(rank, topology=topology, **options)
    changes: list[Any] = []
    replica.on_roster(lambda old, new: changes.append((old, new, replica.stats().rounds)))
    exchanges, began = [], time.monotonic()
    for t in range(steps):
        if dead.get(rank) == t:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        step(model, optimizer, t, rank)
        exchanges.append(replica.stats().exchanges)
    seconds = time.monotonic() - began
    roster, stats = replica.roster, replica.stats()
    with replica.averaged():
        mean = values(model)
    own = values(model)
    replica.close()
    return roster, stats, changes, exchanges, mean, own, seconds


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
    outcomes = workers.outcomes(n, trains_on, topology, {1: 40, 4: 40}, steps, options)
    found = [outcome.value for rank, outcome in enumerate(outcomes) if rank not in (1, 4)]
    assert all(value is not None for value in found), [outcome.trace for outcome in outcomes]
    members = tuple(rank for rank in range(n) if rank not in (1, 4))
    for roster, stats, changes, exchanges, mean, _, seconds in found:
        assert roster.members == members
        assert roster.holes == ()
        assert roster.epoch >= 1
        assert stats.updates == steps
        assert [old.members for old, _, _ in changes][:1] == [tuple(range(n))]
        assert changes[-1][1].members == members
        if "mix_every" not in options and "compression" not in options:
            # No round is left out after it. With base-2, in place of one-peer-exp for six, each worker idles in some rounds.
            assert exchanges[-1] - exchanges[-60] >= (50 if topology == "ring" else 35)
        assert seconds < steps * 0.02 + 15
        assert_same(mean, found[0][4])
    seats = [roster.seat for roster, *_ in found]
    assert seats == list(range(len(members)))
    assert len({tuple(new.epoch for _, new, _ in changes) for _, _, changes, *_ in found}) == 1


def is_busy(rank: int, n: int) -> Any:
    """Worker 0 evaluates for eight seconds, while first worker 4 dies, and then worker 3. How many exchanges, and steps, the
    others make in the last three of them."""
    model, optimizer, replica = make(rank)
    began, counted, t = 0.0, [], 0
    while not began or time.monotonic() < began + 9.0:
        step(model, optimizer, t, rank)
        time.sleep(0.02)
        t += 1
        if t == 20:
            began = time.monotonic()
            if rank == 0:
                time.sleep(8.0)
        now = time.monotonic() - began if began else 0.0
        if (rank == 4 and now > 0.5) or (rank == 3 and now > 2.5):
            os.kill(os.getpid(), signal.SIGKILL)
        if (not counted and now > 5.0) or (len(counted) == 1 and now > 7.5):
            counted.append((replica.stats().exchanges, t))
    with replica.averaged():
        mean = values(model)
    replica.close()
    return counted, replica.roster.members, mean


@pytest.mark.slow
def test_a_worker_that_is_busy_keeps_nobody_from_mixing(workers):
    """The others plan their rounds anew, twice, while its training thread is elsewhere."""
    found = [outcome.value for outcome in workers.outcomes(5, is_busy)[:3]]
    for ((first, begun), (last, ended)), _, _ in found[1:]:
        assert last - first > 0.25 * (ended - begun)
    for _, members, mean in found:
        assert members == (0, 1, 2)
        assert_same(mean, found[0][2])


def leaves(rank: int, n: int) -> Any:
    """A SIGTERM to one worker alone, which leaves with a word."""
    model, optimizer, replica = make(rank, topology="ring")
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    longest = 0.0
    for t in range(150):
        if (rank, t) == (2, 40):
            os.kill(os.getpid(), signal.SIGTERM)
        if told.is_set():
            break
        time.sleep(0.02)
        began = time.monotonic()
        step(model, optimizer, t, rank)
        longest = max(longest, time.monotonic() - began) if t > 5 else 0.0
    found = replica.roster, replica.stats(), longest
    replica.close()
    return found


@pytest.mark.slow
def test_a_worker_that_leaves_with_a_word_delays_nobody(workers):
    found = workers(5, leaves)
    for rank, (roster, stats, longest) in enumerate(found):
        if rank != 2:
            assert (roster.members, stats.updates) == ((0, 1, 3, 4), 150)
            assert longest < 0.25 * DEAD_AFTER  # far less than a silent worker costs


def freezes(rank: int, n: int, steps: int) -> Any:
    model, optimizer, replica = make(rank, topology="ring", faults=decent_dp.Tolerate(dead_after=1.0))
    seen: list[tuple[int, ...]] = []
    for t in range(steps):
        if (rank, t) == (2, 60):
            freezer = os.fork()
            if freezer == 0:  # wakes its parent
                time.sleep(4)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(freezer, 0)
        time.sleep(0.02)
        step(model, optimizer, t, rank)
        members = replica.roster.members if replica.roster.seat >= 0 else ()
        if not seen or seen[-1] != members:
            seen.append(members)
        if rank != 2 and t == steps - 1:
            hear("back", 60)
        if rank == 2 and replica.roster.epoch >= 2 and members == tuple(range(n)) and t % 20 == 0:
            say("back")
    found = replica.roster, replica.stats(), seen
    replica.close()
    return found


@pytest.mark.slow
def test_a_worker_that_was_left_out_comes_back(workers):
    found = workers(4, freezes, 500, timeout=120)
    for rank, (roster, stats, seen) in enumerate(found):
        assert stats.updates == 500
        if rank != 2:
            assert (0, 1, 3) in seen
            assert seen[-1] == (0, 1, 2, 3) or roster.epoch >= 2
    everyone = (0, 1, 2, 3)
    assert found[2][2] in ([everyone, (), everyone], [everyone])  # on a busy machine it is back within one step


def serve(port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """``decent-dp roster``, and its port."""
    command = [sys.executable, "-m", "decent_dp", "roster", "--bind", f"127.0.0.1:{port}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said = [server.stdout.readline(), server.stdout.readline()]
    assert "TORCHELASTIC_USE_AGENT_STORE=True" in said[1]
    return server, int(said[1].split("MASTER_PORT=")[1].split()[0])


def stop(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.communicate()


def meet_at_a_server(rank: int, n: int) -> tuple[subprocess.Popen[str] | None, int]:
    """The workers' store is that of ``decent-dp roster``. Worker 0 gets the process, and all get its port."""
    shared, server = _store(), None
    if rank == 0:
        server, port = serve()
        shared.set("port", str(port))
    port = int(shared.get("port"))
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(n))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return server, port


def loses_the_store(rank: int, n: int, how: str) -> Any:
    server, port = meet_at_a_server(rank, n)
    model, optimizer, replica = make(rank, topology="ring")
    for t in range(300 if how == "comes back" else 150):
        if server is not None and t == 20:
            server.send_signal(signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
        if (rank, t) == (n - 1, 40):
            os.kill(os.getpid(), signal.SIGKILL)
        if server is not None and t == 100 and how == "comes back":
            stop(server)
            server, _ = serve(port)
        time.sleep(0.02)
        step(model, optimizer, t, rank)
    found = replica.roster, replica.stats()
    with replica.averaged():
        pass
    replica.close()
    if server is not None:
        stop(server)
    return found


@pytest.mark.parametrize("kind", ["gossip", "wrapper"])
def test_on_roster_needs_tolerance(kind):
    _, _, replica = make(0, kind, faults=None, transport=InProcessTransport())
    with pytest.raises(RuntimeError, match=r"on_roster needs faults=decent_dp.Tolerate\(...\)"):
        replica.on_roster(print)
    replica.close()


@pytest.mark.slow
def test_the_store_listens_on_its_address_only():
    server, port = serve()
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [fields[1] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")]
    server.terminate()
    server.communicate(timeout=10)
    assert server.returncode == 0
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs", "comes back"])
def test_without_a_store_changes_wait_and_training_goes_on(workers, how):
    for rank, (roster, stats) in enumerate(survivors(workers.outcomes(4, loses_the_store, how), 3)):
        assert stats.updates == (300 if how == "comes back" else 150)
        if how == "comes back":  # and empty: a majority has put the line of epochs back
            assert (roster.epoch, roster.members) == (1, (0, 1, 2))
        else:
            assert (roster.epoch, roster.members) == (0, (0, 1, 2, 3))
            assert 3 in roster.holes or rank == 1  # which is not its neighbour
        assert stats.exchanges > 60  # nobody has promised anything that would keep it from mixing


def has_a_new_store(rank: int, n: int) -> Any:
    """The store comes back empty while all workers live. Then half of them die, and the others are no majority.

    Worker 0 looks at the new store as a process that joins does: the seconds since it is there, epoch and number of addresses.
    """
    server, port = meet_at_a_server(rank, n)
    looks: list[tuple[float, int, int]] = []
    model, optimizer, replica = make(rank, faults=decent_dp.Tolerate(dead_after=1.5, min_workers=1))

    def train(epoch: int) -> Any:
        t, deadline = 0, time.monotonic() + 60
        while replica.roster.epoch < epoch or t < 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            step(model, optimizer, t, rank)
            t += 1
            if began is not None and (not looks or looks[-1][2] < n):
                with contextlib.suppress(PeerLostError):  # no run is registered yet
                    run = joining.look_at_run(f"127.0.0.1:{port}")
                    addresses = sum(map(bool, run.addresses(run.epoch.members).values()))
                    looks.append((time.monotonic() - began, run.epoch.number, addresses))
        return replica.roster.members

    began = None
    try:
        train(0)
        if server is not None:
            stop(server)
            server, _ = serve(port)
            began = time.monotonic()
        members = [train(1)]
        train(0)
        began = None
        if rank >= n // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        members.append(train(2))
        train(0)  # the others learn of it before the store ends
        replica.close()
    finally:
        if server is not None:
            stop(server)
    return members, looks


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 8])  # of eight, each worker is connected to three others: it hears no majority
def test_a_store_that_comes_back_empty_gets_the_newest_epoch_while_its_members_live(workers, n):
    outcomes = workers.outcomes(n, has_a_new_store)
    (members, looks), (others, _) = (outcome.value for outcome in outcomes[:2])
    assert [outcome.exitcode for outcome in outcomes] == [0] * (n // 2) + [-9] * (n // 2)
    assert members == others == [tuple(range(n)), tuple(range(n // 2))]
    # Whoever finds the run finds the members, too; and soon their addresses.
    assert {epoch for _, epoch, _ in looks} <= {0, 1}
    assert looks[0][0] < 8.0
    assert looks[-1][2] == n


@pytest.mark.slow
def test_the_address_of_a_process_that_joins_is_found_in_a_store_that_was_restarted():
    server, port = serve()
    try:
        store = dist.PrefixStore("decent_dp/run", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        rendezvous = Rendezvous(store, "run", RunRecord(b"", 2, 2, ("a", "b"), 0.0), 0, "a")
        with pytest.raises(RuntimeError, match="worker 1 has stored no address"):
            rendezvous.address_of(1, 5, 5.0)
        stop(server)
        server, _ = serve(port)
        address: dict[str, Any] = {"node": "b", "machine": "m", "pid": 1, "incarnation": 5, "rank": 1}
        address |= {"host": "10.0.0.1", "port": 1234, "bulk": 1235}
        address["mac"] = rendezvous._bind(_unbound(address))
        new = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        new.set(f"decent_dp/run/{address_key(1, 5)}", json.dumps(address))
        with pytest.raises(ConnectionError):
            rendezvous.address_of(1, 5, 5.0)  # this worker notices the loss of its connection
        assert rendezvous.address_of(1, 5, 5.0) == address
    finally:
        stop(server)


REPLICAS = Replicas(tuple((rank,) for rank in range(4)))
BEFORE = Epoch(1, 40, 7, (0, 1, 2), {2: 3}, "")
# What its members promise to know.
SINCE = 1, 40, 7, 3


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


class Alone:
    """Worker ``rank`` of four, at a store of its own; also its neighbours. ``now``: the clock."""

    def __init__(self, rank: int = 3, incarnation: int = 0) -> None:
        self.now, self.heard, self.confined, self.hears = 0.0, 0, list[int | None](), list[int]()
        self.is_lost, self.has_left, self.has_ended = list[int](), list[int](), list[int]()
        self.store = EpochStore(dist.HashStore(), "run", {})
        self.store.register()
        fake: Any = self
        topology = EpochTopology(ring_of, world_size=5, rank=rank, members=4)
        self.epochs = Epochs(rank, REPLICAS, fake, topology, self.store, incarnation)
        self.silent = self.lost = lambda: self.is_lost
        self.left, self.ended = (lambda: self.has_left), (lambda: self.has_ended)
        self.living, self.stop_mixing_after = (lambda: self.hears), self.confined.append
        self.newest_epoch, self.reserve_until = (lambda: self.heard), lambda seconds, least: 90
        self.enter_epoch = self.renew = self.fail = lambda *_: None

    def look(self, round_: int, *, wanted: bool = False) -> Epoch | None:
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
        decided = self.store.decide(Epoch.read(number, text), is_newest=True)
        assert decided is not None
        self.look_at_store()
        return decided


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(rank: int = 3, incarnation: int = 0) -> Alone:
        found = Alone(rank, incarnation)
        monkeypatch.setattr(epochs_module, "time", SimpleNamespace(monotonic=lambda: found.now))
        return found

    monkeypatch.setattr(epochs_module, "start_thread", lambda *_: True)
    return make


def test_who_is_gone_when_a_worker_promises_is_absent(alone):
    one = alone()
    one.is_lost, one.has_left = [2], [1]
    one.promise(0)
    assert one.look_at_store() == epochs_module._SETTLE  # the store may end with worker 1
    one.look_at_store(0.5)
    one.is_lost = []
    one.look_at_store(0.2)
    assert one.epochs.keeper.absent == {1, 2}
    assert one.store.promises(1)[3].absent == (1, 2)


def test_the_training_thread_comes_to_an_epoch_when_its_whole_replica_knows_it(alone):
    one = alone()
    one.others_decide(1, 80, 0, 1, 3)
    one.epochs.limit = 0
    assert (one.look(81), one.epochs.coming) == (None, 1)
    one.epochs.limit = 1
    assert one.look(82).members == (0, 1, 3)


def test_a_process_whose_replica_is_not_there_asks_for_no_epoch(alone):
    one = alone()
    one.epochs.replicas = Replicas(((0, 1), (2, 3)))
    one.epochs.keeper.offer(4, 7)
    one.now += 1.0
    assert not one.epochs.keeper._wants()
    one.epochs.keeper.offer(5, 8)
    one.now += 1.0
    assert one.epochs.keeper._wants()


def test_there_is_no_epoch_without_a_whole_replica(alone):
    """The other worker of this one's replica may be late, as all others are."""
    one = alone()
    one.epochs.replicas = Replicas(((0, 1), (2, 3)))
    one.look(5, wanted=True)
    one.look_at_store()
    one.promise(1)
    one.look_at_store(2 * epochs_module._FEW)
    assert one.store.read(1) is None
    one.promise(2)
    one.look_at_store()
    assert one.store.read(1).members == (2, 3)


def test_a_promise_is_made_once_also_if_its_call_fails(alone):
    """It may have been made: somebody may have read it."""
    one = alone()
    calls, promise = [], one.store.promise

    def fails(number: int, own: Promise) -> int | None:
        promise(number, own)
        calls.append(own)
        raise ConnectionError("a test")

    one.store.promise = fails
    one.look(5, wanted=True)
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
def test_how_long_promises_are_waited_for(alone, promised, ended, hears, absent, seconds):
    one = alone()
    one.has_ended, one.hears = ended, hears
    one.look(5, wanted=True)
    one.look_at_store()
    one.promise(*promised, absent=absent)
    one.look_at_store(max(0.0, seconds - 0.1))
    assert (one.store.read(1) is None) == (seconds > 0.0)
    one.look_at_store(0.1)
    found = one.store.read(1)
    assert found is not None
    assert found.members == tuple(sorted([*promised, 3]))
    assert one.look(6).members == found.members


@pytest.mark.parametrize(("proposer", "lost", "living", "turn"), [(1, [], [0, 1, 2], 3), (1, [1], [2, 0], 2), (1, [1], [], 0)])
def test_the_others_decide_one_after_the_other(alone, proposer, lost, living, turn):
    one = alone()
    one.is_lost, one.hears = lost, living
    one.promise(proposer, *{0, 1, 2} - {proposer})
    one.look_at_store(5.0)
    for _ in range(turn):
        assert one.store.read(1) is None
        one.look_at_store(epochs_module._TURN - 0.01)
        assert one.store.read(1) is None
        one.look_at_store(0.01)
    assert one.store.read(1).members == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("rank", "living", "asks"), [(0, [1, 2], True), (0, [1], False), (1, [2, 3], True), (1, [0, 2, 3], False)]
)
def test_the_lowest_of_a_majority_asks_for_an_epoch_if_the_store_has_lost_them(alone, rank, living, asks, caplog):
    one = alone(rank)
    one.hears = living
    one.epochs.keeper._begins = False
    one.store.ask(lambda store: store.delete_key("run/whole"))
    one.look_at_store()
    one.look_at_store(0.5)
    assert one.store.is_proposed(1) is asks
    if len(living) == 1:  # whoever else proposes one cannot bring it about, and would leave rounds out
        one.promise(1)
        one.look_at_store(0.5)
        assert rank not in one.store.promises(1)
        assert "the store has lost epochs, and most of epoch 0 are missing. Training continues" in caplog.text


def test_workers_that_hear_no_majority_learn_at_the_store_that_it_is_back(alone):
    """In most topologies a worker is connected to a few others."""
    one = alone(0)
    one.hears, one.epochs.keeper._begins = [1], False
    one.store.ask(lambda store: store.delete_key("run/whole"))
    one.look_at_store()
    one.look_at_store(0.5)
    one.store.come_back(1, 3)  # it knows a later epoch
    one.store.come_back(0, 2)
    one.is_lost = [2]  # and has died since
    one.look_at_store(0.5)
    assert not one.store.is_proposed(1)
    one.is_lost = []
    one.look_at_store(0.5)
    one.look_at_store(0.5)
    assert one.store.is_proposed(1)
    assert list(one.store.promises(1)) == [0]


def test_a_store_that_is_emptied_under_way_is_one_warning(alone, caplog):
    one = alone()
    one.look(5, wanted=True)
    one.look_at_store()
    one.store.ask(lambda store: store.delete_key("run/whole"))
    one.has_ended = [0, 1, 2]
    for _ in range(5):
        one.look_at_store(0.1)
    said = [line for line in caplog.messages if "the members cannot change" in line]
    assert said == [
        "the members cannot change, as the store has lost epochs, and most of epoch 0 are missing. Until then rounds are made "
        "without exchanges"
    ]
    one.promise(0, 1)
    one.look_at_store(0.1)
    assert one.look(6).members == (0, 1, 3)


def test_an_epoch_is_made_over_what_others_have_written_in_its_place(alone, caplog):
    """Once there was no epoch then: mixing ended without a word, and each replica trained on alone."""
    one = alone()
    one.store.ask(lambda store: store.set("run/epoch/1", "hello"))
    one.has_ended = [1, 2]
    one.look(5, wanted=True)
    one.look_at_store()
    one.promise(0)
    one.look_at_store()
    assert one.look(6).members == (0, 3)
    assert "something else under 'decent_dp/run/epoch/1'" in caplog.text


def test_a_worker_on_a_lost_branch_takes_the_one_of_the_store(alone):
    """All others that knew its epoch have died with the store, and the rest has made another one of that number."""
    one = alone()
    one.others_decide(1, 80, 0, 3)
    store = one.store.ask(lambda store: store)
    store.delete_key("run/epoch/1")
    other = one.store.decide(Epoch.read(1, one.epochs.decided.text.replace("[0, 3]", "[1, 3]")), is_newest=True)
    one.epochs.keeper._keep_at = 0.0  # as after a call that failed
    one.look_at_store()
    one.look(50)
    one.look(51)
    assert one.epochs.newest == other


def test_a_worker_whose_place_was_taken_promises_nothing_more(alone):
    one = alone()
    one.others_decide(1, 80, 0, 1, 2, 3, incarnations={"3": 5})
    assert one.epochs.replaced
    one.promise(0, number=2)
    one.look_at_store(1.0)
    assert list(one.store.promises(2)) == [0]


def test_a_worker_that_was_left_out_asks_to_be_a_member_where_another_one_hears_it(alone):
    one = alone()
    one.others_decide(1, 80, 0, 1)
    assert one.confined == [-1]
    one.look_at_store(1.0)
    assert not one.store.is_proposed(2)
    one.hears = [2]
    one.look_at_store(1.0)
    assert one.store.is_proposed(2)


def test_a_process_waits_for_its_seat_and_learns_of_it(alone):
    one = alone()
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


def test_a_load_takes_in_an_epoch_that_was_decided_meanwhile(alone):
    one = alone()
    one.others_decide(1, 1101, 0, 1, 3)
    epoch = one.epochs.restart()
    assert epoch is not None
    assert (epoch.number, one.epochs.newest.start, one.epochs.newest.members) == (1, 0, (0, 1, 3))
    assert one.epochs._topology._line.changes == ((0, (0, 1, 3)),)
    assert one.confined == [None]
    assert one.epochs.is_member


def one_that_has_missed_an_epoch(alone: Any) -> Alone:
    """Worker 3 of four has missed epoch 1, and epoch 2, from round 80 on, names it."""
    one: Alone = alone()
    one.others_decide(1, 10, 0, 1, 2)
    assert one.look(60) is None
    one.others_decide(2, 80, 0, 1, 2, 3)
    epoch = one.look(61)
    assert epoch is not None
    assert (epoch.number, epoch.start, one.epochs.is_member) == (2, 80, True)
    assert (one.confined, one.epochs.mixing_from) == ([-1], 80)
    return one


def test_a_worker_that_has_missed_an_epoch_mixes_again_when_the_next_one_begins(alone):
    """Until then the others make rounds that it does not know. If it met its partners of before, it would wait for nothing."""
    one = one_that_has_missed_an_epoch(alone)
    for round_ in (62, 79, 80, 81):
        one.look(round_)
    assert one.confined == [-1, None]


def test_a_load_ends_the_wait_for_an_epoch(alone):
    """Rounds are earlier ones then. A worker that waited for a round that is far ahead would mix with nobody until then."""
    one = one_that_has_missed_an_epoch(alone)
    one.epochs.restart()
    assert one.confined == [-1, None]


def test_a_promise_outlives_the_wait_for_an_epoch(alone):
    one = one_that_has_missed_an_epoch(alone)
    one.promise(0, number=3)
    one.look_at_store(1.0)
    one.look(80)
    assert one.confined == [-1, 90]


def test_the_membership_thread_ends_with_its_worker():
    """Also if nobody closes it."""
    before = set(threading.enumerate())  # others may still run, of tests before
    one = Alone()
    one.look(1)
    [thread] = [found for found in set(threading.enumerate()) - before if found.name == "decent_dp-membership"]
    del one.epochs
    thread.join(20)
    assert not thread.is_alive()
