"""The protocol of epochs in virtual time: deaths, frozen workers, processes that come in the place of dead ones, cuts that
heal, calls of the store that are slow or lost, a store that dies and comes back empty.

The real ``Epochs`` and ``EpochStore`` of all workers run over one store. Time passes in ticks, of one round each. What must
hold: who is named in an epoch has mixed in no round of it by an earlier one, both ends of an edge have planned its round for
the same members, there is one text of each number, and when all is whole again, so is the newest epoch, with no promise left.

Schedules are drawn at random, or they are searched: with three workers, all orders of events up to a bound. Then, within a
tick, the calls of the store are made in all orders. Before each of these one worker may die, in the middle of a look; a call,
or its answer, may be lost; or it is slow: its worker trains on, and it is made when the others have long gone on without it.
Such a schedule is a list of choices. It is run from the beginning; then all other choices at its new points are tried. A run
ends where it comes to a state that was seen before, so that two orders of calls to the same end count as one. At first one
worker, ``wanting``, wants an epoch, and worker 1 is a round ahead. The searches are complete, but try no two disturbances.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.many_seats import CountedStore, Look
from decent_dp.membership import Epoch, Epochs, EpochStore
from decent_dp.membership import epochs as epochs_module
from decent_dp.topo import make_topology
from decent_dp.topo.epoch_topology import EpochTopology
from decent_dp.topo.schedule import turn_of
from decent_dp.transport import Replicas

# Seconds of virtual time: of a tick; until a member is missed; until one counts as dead; of the disturbances; the end.
STEP, SETTLE, DEAD_AFTER, CALM, END = 0.1, 0.5, 3.0, 12.0, 90.0
# Of a search: workers; ticks in which disturbances begin, of a run, and of a slow call.
N, WITHIN, LAST, SLOW = 3, 9, 44, 12
RUN = "0" * 32


class EndError(BaseException):
    """A membership thread is not needed any more."""


class Thread:
    """The membership thread of a worker. It stops before each call of the store, until the model makes the call."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs, self._own, self._model = epochs, threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self.call: Callable[[Any], Any] | None = None
        self.wait, self._answer = 0.0, (None, None)
        # What it has been answered in this look: where it is, and what it knows.
        self.heard: list[str] = []
        self._error: BaseException | None = None

    def go(self) -> None:
        """Begins a look, up to its first call or its end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self.heard = []
        self._resume()

    def answer(self, result: Any, error: BaseException | None = None) -> None:
        """Continues after a call, up to the next one or the end."""
        self.heard.append(repr(result if error is None else error))
        self._answer, self.call = (result, error), None
        self._resume()

    def stop(self) -> None:
        if self._thread is not None:
            self._answer, self._epochs = (None, EndError()), None  # type: ignore[assignment]
            self._own.release()
            self._thread.join()

    def _resume(self) -> None:
        self._own.release()
        self._model.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._own.acquire()
        try:
            while self._epochs is not None:
                self.wait = self._epochs.keeper.look_at_store()
                self._model.release()
                self._own.acquire()
        except EndError:
            return
        except BaseException as error:
            self._error = error
            self._model.release()

    def run(self, call: Callable[[Any], Any], limit: float | None = None) -> Any:
        """In place of ``StoreClient``."""
        self.call = call
        self._model.release()
        self._own.acquire()
        result, error = self._answer
        if error is not None:
            raise error
        return result


class Store(CountedStore):
    """``decided``: called with the number and the text of an epoch that is written."""

    def __init__(self, decided: Callable[[int, str], None]) -> None:
        super().__init__()
        self.decided, self.was_emptied = decided, False

    def compare_set(self, key: str, expected: Any, text: str) -> bytes:
        before = self.texts.get(key)
        won = super().compare_set(key, expected, text)
        _, _, number = key.rpartition("/epoch/")
        if number.isdecimal() and self.texts[key] != before:
            self.decided(int(number), text)
        return won

    def lose(self) -> None:
        self.texts.clear()
        self.was_emptied = True


class Worker:
    """A worker that makes rounds; also its ``Neighbours``, as far as epochs use them."""

    def __init__(self, world: World, rank: int, incarnation: int = 0) -> None:
        self.world, self.rank, self.incarnation = world, rank, incarnation
        # By rank: the incarnation of the process that this one takes for that worker, and since when.
        self.known: dict[int, tuple[int, float]] = {}
        self.round, self.last, self.epoch = 0, math.inf, 0
        self.missed: dict[int, float] = {}
        self.vouched: set[int] = set()
        self.mixed = -1  # the last round in which it has mixed
        self.topology = EpochTopology(world.make_topology, world_size=world.n, rank=rank)
        store, neighbours = EpochStore(dist.HashStore(), RUN, {f"address/{rank}": "x"}), self
        replicas = Replicas(tuple((rank,) for rank in range(world.n)))
        self.epochs = Epochs(rank, replicas, neighbours, self.topology, store, incarnation)  # type: ignore[arg-type]
        self.thread: Any = Thread(self.epochs)
        store._store = self.thread

    # -- Neighbours

    def fail(self, error: Exception) -> None:
        raise error

    def reserve_until(self, seconds: float, least: int) -> int:
        last = self.round + max(least, math.ceil(seconds / STEP))
        self.last = min(self.last, last)
        return last

    def stop_mixing_after(self, last: int | None) -> None:
        self.last = math.inf if last is None else last

    def enter_epoch(self, number: int) -> None:
        self.epoch = max(self.epoch, number)

    def look(self) -> Look:
        return Look(self)

    def newest_epoch(self) -> int:
        return max((self.world.workers[rank].epoch for rank in self.living()), default=0)

    def living(self) -> list[int]:
        return [rank for rank in self._others() if self.world.silence(self, rank) == 0.0]

    def lost(self) -> list[int]:
        return [rank for rank in self._others() if self.world.silence(self, rank) >= DEAD_AFTER]

    def silent(self) -> list[int]:
        return [rank for rank in self._others() if self.world.silence(self, rank) >= 0.3 * DEAD_AFTER]

    def ended(self) -> list[int]:
        return [rank for rank in self._others() if self.world.silence(self, rank) == math.inf]

    def left(self) -> list[int]:
        return []

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world.n) if rank != self.rank]

    def renew(self, rank: int, incarnation: int, start: int) -> None:
        if self.known.get(rank, (0, 0.0))[0] < incarnation:
            self.known[rank] = incarnation, self.world.now

    # -- rounds

    @property
    def is_running(self) -> bool:
        return self.rank not in self.world.dead and self.world.workers[self.rank] is self and not self.epochs.replaced

    def step(self) -> None:
        """A round of the training thread."""
        ahead = [self.world.workers[rank].round for rank in self.living()]
        self.round = max([self.round + 1, *(other - 1 for other in ahead)])  # who was alone for long goes on with the others
        gone = set(self.lost())
        self.vouched &= gone  # as ``MembershipMonitor``
        missed = gone & set(self.epochs.newest.members) - self.vouched
        self.missed = {rank: self.missed.get(rank, self.world.now) for rank in missed}
        is_missed = any(self.world.now - since > SETTLE for since in self.missed.values()) and bool(self.living())
        epoch = self.epochs.look(self.round, wanted=is_missed)
        if epoch is not None:
            self.vouched = set(self.epochs.keeper.absent.intersection(epoch.members))
        if self.round <= self.last:
            self.world.note(self)


class World:
    """Virtual time, the connections and the store.

    Attributes:
        dead: by rank: when it has died, and when the others notice.
        frozen: those whose processes are stopped. away: those that cannot reach the store. cut: by edge, since when.
        loses: how often of a hundred the answer of a call is lost, or the call.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n, self.random, self.now = n, random.Random(seed), 0.0
        self.ticks = 0
        self._events: list[tuple[int, int, Callable[[], Any]]] = []
        self._order = itertools.count()
        # By rank: the tick of the next look, and that of its call, or of the answer of one that was made.
        self.look_at, self.due = [0] * n, [0] * n
        self.answers: dict[int, tuple[Any, Exception | None]] = {}
        self.store = Store(self.decided)
        self.dead: dict[int, float] = {}
        self.frozen: dict[int, float] = {}
        self.away: set[int] = set()
        self.cut: dict[frozenset[int], float] = {}
        self.loses, self.slow, self.incarnations = 0, 0, 0
        self.line: dict[int, Epoch] = {}
        # By round, and by those who mix in it: their plan, and their edge.
        self.planned: dict[int, dict[int, tuple[Any, list[int]]]] = {}
        self._topologies: dict[int, Any] = {}
        self.workers: list[Worker] = []
        self.workers = [Worker(self, rank) for rank in range(n)]

    def make_topology(self, n: int) -> Any:
        if n not in self._topologies:
            self._topologies[n] = make_topology("ring", local_world_size=1, world_size=n, rank=0)
        return self._topologies[n]

    def at(self, delay: float, call: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (self.ticks + max(1, round(delay / STEP)), next(self._order), call))

    def run(self, until: float) -> None:
        while self.now < until:
            self.tick()
            while ready := [worker for worker in self.calling() if self.due[worker.rank] <= self.ticks]:
                self.go_on(self.random.choice(ready))

    def close(self) -> None:
        for worker in self.workers:
            worker.thread.stop()

    # -- what workers do

    def awake(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_running and worker.rank not in self.frozen]

    def calling(self) -> list[Worker]:
        return [worker for worker in self.awake() if worker.thread.call is not None]

    def tick(self) -> None:
        """Each worker makes a round, if it is not late, and begins to look at the store if it is time."""
        self.ticks += 1
        self.now = self.ticks * STEP
        while self._events and self._events[0][0] <= self.ticks:
            heapq.heappop(self._events)[2]()
        for worker in self.awake():
            if self.is_in_time(worker):
                worker.step()
            if worker.epochs.keeper._wake.is_set():
                worker.epochs.keeper._wake.clear()
                self.look_at[worker.rank] = self.ticks
        for worker in self.awake():
            self.begin_look(worker)

    def is_in_time(self, worker: Worker) -> bool:
        return self.random.random() < 0.8

    def begin_look(self, worker: Worker) -> None:
        while worker.thread.call is None and self.look_at[worker.rank] <= self.ticks:
            worker.thread.go()
            self.end_look(worker)

    def end_look(self, worker: Worker) -> None:
        if worker.thread.call is None:
            self.look_at[worker.rank] = self.ticks + round(worker.thread.wait / STEP)

    def go_on(self, worker: Worker) -> None:
        """A call takes some time until it is made, and again until its answer is there."""
        rank = worker.rank
        if rank in self.answers:
            self.answer(worker, *self.answers.pop(rank))
        elif rank in self.away or self.random.randrange(100) < self.loses:
            self.answers[rank] = None, ConnectionError("lost")
        else:
            is_lost = self.random.randrange(100) < self.loses
            self.answers[rank] = worker.thread.call(self.store), ConnectionError("lost answer") if is_lost else None
        self.due[rank] = self.ticks + self.random.choice([0, 0, self.slow])

    def answer(self, worker: Worker, result: Any, error: Exception | None) -> None:
        worker.thread.answer(result, error)
        self.end_look(worker)
        self.begin_look(worker)

    # -- what it sees of others

    def silence(self, worker: Worker, peer: int) -> float:
        """Seconds since this worker has heard a peer; infinite if it is known to have ended."""
        other = self.workers[peer] if self.workers else worker
        known, since = worker.known.get(peer, (0, 0.0))
        if peer in self.dead and known == other.incarnation:
            return self.now - self.dead[peer]
        if known != other.incarnation or worker.incarnation != other.known.get(worker.rank, (0, 0.0))[0]:
            return max(self.now - since, 0.01)  # it does not know this process yet
        cut = self.cut.get(frozenset((worker.rank, peer)), self.now)
        return max(self.now - cut, self.now - self.frozen.get(peer, self.now))

    # -- what happens to them

    def kill(self, rank: int, *, noticed: bool = True) -> None:
        """``noticed``: its connections are refused at once. Else its machine is gone."""
        if rank not in self.dead:
            self.frozen.pop(rank, None)
            self.dead[rank] = -math.inf if noticed else self.now
            self.answers.pop(rank, None)
            self.workers[rank].thread.stop()

    def freeze(self, rank: int, seconds: float) -> None:
        if rank not in {*self.dead, *self.frozen}:
            self.frozen[rank] = self.now
            self.at(seconds, lambda: self.frozen.pop(rank, None))

    def come(self, rank: int) -> None:
        """A process asks a living member for the place of a dead worker."""
        hosts = [other for other in range(self.n) if other not in {*self.dead, *self.frozen}]
        hosts = [other for other in hosts if self.workers[other].epochs.is_member]
        if rank in self.dead and hosts:
            self.incarnations += 1
            self.ask(rank, self.incarnations, self.workers[self.random.choice(hosts)])

    def ask(self, rank: int, incarnation: int, host: Worker) -> None:
        if not host.is_running or rank not in self.dead:
            return
        if rank not in host.lost() and rank in host.epochs.newest.members:
            self.at(0.25, lambda: self.ask(rank, incarnation, host))
            return
        try:
            future = host.epochs.keeper.offer(rank, incarnation)
        except ConnectionError:
            return
        self.wait(rank, incarnation, future)

    def wait(self, rank: int, incarnation: int, future: Any) -> None:
        if not future.done():
            self.at(0.05, lambda: self.wait(rank, incarnation, future))
        elif future.exception() is None and future.result().incarnations.get(rank) == incarnation and rank in self.dead:
            self.at(self.random.uniform(0.0, 0.3), lambda: self.enter(rank, incarnation, future.result()))

    def enter(self, rank: int, incarnation: int, epoch: Epoch) -> None:
        if rank not in self.dead:
            return
        del self.dead[rank]
        worker = self.workers[rank] = Worker(self, rank, incarnation)
        worker.known = {other: (number, self.now) for other, number in epoch.incarnations.items() if other != rank}
        worker.epochs.enter(epoch)
        worker.round = epoch.start - 1
        self.look_at[rank] = self.due[rank] = self.ticks

    # -- what must hold

    def decided(self, number: int, text: str) -> None:
        """An epoch is written to the store."""
        epoch = Epoch.read(number, text)
        before = self.line.get(number, epoch)
        assert before.text == text or self.store.was_emptied, f"two epochs {number}: {before} and {epoch}"
        if number in self.line and before.text == text:  # it is put back
            return
        self.line[number] = epoch
        for worker in self.workers:
            named = worker.rank in epoch.members and epoch.incarnations.get(worker.rank, 0) == worker.incarnation
            if named and worker.rank not in self.dead:
                assert worker.mixed < epoch.start, f"worker {worker.rank} has mixed in round {worker.mixed} of {epoch}"

    def note(self, worker: Worker) -> None:
        """This worker mixes in its round as its topology says."""
        assert worker.epochs.is_member, f"worker {worker.rank} knows that it was left out, and mixes"
        turn = turn_of(worker.topology, worker.round)
        plan = (worker.round - turn.round, turn.stage.members)
        assert worker.rank in (turn.stage.members or ())
        newest = worker.epochs.newest
        worker.mixed = worker.round
        for number, epoch in self.line.items():
            if number > newest.number and epoch.incarnations.get(worker.rank, 0) == worker.incarnation:
                is_early = worker.rank not in epoch.members or worker.round < epoch.start
                assert is_early or self.store.was_emptied, f"worker {worker.rank} mixes in round {worker.round} of {epoch}"
        mine, others = worker.topology.get_edge(worker.round).ranks, self.planned.setdefault(worker.round, {})
        for rank, (other_plan, theirs) in others.items():
            meet = rank in mine and worker.rank in theirs
            assert not meet or other_plan == plan, f"round {worker.round}: {plan} of {worker.rank}, {other_plan} of {rank}"
        others[worker.rank] = plan, mine

    def check_end(self) -> None:
        """All that live are members of one epoch, and mix."""
        living = [rank for rank in range(self.n) if rank not in self.dead]
        found = {rank: self.workers[rank] for rank in living}
        ends = {(worker.epochs.newest.number, worker.epochs.newest.members, worker.last) for worker in found.values()}
        assert len(ends) == 1, f"{ends}, living {living}"
        [(_, members, last)] = ends
        assert (members, last) == (tuple(living), math.inf), f"{ends}, living {living}"


def disturb(world: World, rng: random.Random, *, comes: bool) -> None:
    n = world.n
    world.slow = rng.choice([0, 1, 5])

    def strike(delay: float, call: Callable[[], Any]) -> None:
        world.at(delay, lambda: len(world.dead) < n - 2 and call())

    for _ in range(rng.choice([0, 1, 1, 2, n - 2])):
        victim, noticed = rng.randrange(n), rng.random() < 0.7
        strike(rng.uniform(0.5, CALM), lambda victim=victim, noticed=noticed: world.kill(victim, noticed=noticed))
    for _ in range(rng.choice([0, 0, 1, 2])):
        victim, seconds = rng.randrange(n), rng.choice([0.5, 2.0, 5.0, 9.0])
        strike(rng.uniform(0.5, CALM), lambda victim=victim, seconds=seconds: world.freeze(victim, seconds))
    for _ in range(rng.choice([0, 1, 2, n]) if comes else 0):
        place = rng.randrange(n)
        world.at(rng.uniform(2.0, CALM + 10.0), lambda place=place: world.come(place))
    for _ in range(rng.choice([0, 0, 1, 2])):  # the network falls into parts, and heals
        side = set(rng.sample(range(n), rng.randint(1, n - 1)))
        between = [frozenset((a, b)) for a in side for b in range(n) if b not in side]
        away = rng.choice([side, set(range(n)) - side, set()])
        start, length = rng.uniform(0.5, CALM / 2), rng.uniform(0.5, 8.0)

        def cut(between: Any = between, away: set[int] = away) -> None:
            for edge in between:
                world.cut.setdefault(edge, world.now)
            world.away |= away

        def heal(between: Any = between) -> None:
            for edge in between:
                world.cut.pop(edge, None)
            world.away.clear()

        world.at(start, cut)
        world.at(start + length, heal)
    if rng.random() < 0.4:
        start, length, empty = rng.uniform(0.5, CALM), rng.uniform(0.5, 8.0), rng.random() < 0.5
        world.at(start, lambda: world.away.update(range(n)))
        world.at(start + length, world.away.clear)
        if empty:
            world.at(start + length / 2, world.store.lose)
    if rng.random() < 0.3:
        world.at(rng.uniform(0.5, CALM), lambda: setattr(world, "loses", rng.choice([5, 30])))
        world.at(CALM + 5.0, lambda: setattr(world, "loses", 0))


@contextlib.contextmanager
def running(world: World) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs_module, "time", SimpleNamespace(monotonic=lambda: world.now))
        try:
            yield
        finally:
            world.close()


def schedule(seed: int, *, comes: bool = False) -> None:
    """``comes``: also processes that take the place of dead ones."""
    rng = random.Random(seed)
    world = World(rng.randint(3, 6), seed)
    with running(world):
        try:
            disturb(world, rng, comes=comes)
            world.run(END)
            if f"{RUN}/whole" in world.store.texts or not world.store.was_emptied:  # else the store has lost the epochs
                world.check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.fixture(autouse=True)
def _without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs_module, "start_thread", lambda *_: True)


@pytest.mark.parametrize("comes", [False, True])
def test_random_schedules(comes):
    for seed in range(20):
        schedule(seed, comes=comes)


@pytest.mark.slow
@pytest.mark.parametrize("comes", [False, True])
@pytest.mark.parametrize("seeds", [range(20, 500), range(500, 1000), range(1000, 1500)])
def test_many_random_schedules(comes, seeds):
    for seed in seeds:
        schedule(seed, comes=comes)


# -- all orders ------------------------------------------------------------------------------------------------------------


class SeenError(Exception):
    """The run has come to a state from which all orders are tried already."""


class Orders(World):
    """Three workers whose calls are made in the order of a list of choices.

    Args:
        choices: those at the first points; afterwards always the first one.
        seen: digests of states, of all runs.
        wanting: the worker that wants an epoch at first.
        deaths, losses, slow: how many workers may die, and calls may be lost or slow.
    """

    def __init__(
        self, choices: list[int], seen: set[int], *, wanting: int = 0, deaths: int = 0, losses: int = 0, slow: int = 0
    ) -> None:
        super().__init__(N)
        self.choices, self.seen, self.given = choices, seen, len(choices)
        self.left = {"deaths": deaths, "losses": losses, "slow": slow}
        self.points: list[int] = []  # at each point: the number of choices
        for worker in self.workers:
            worker.round = worker.rank % 2  # one is a round ahead
            worker.epochs.keeper._keep_at = 1e9  # it is looked at after an error
            look = worker.epochs.look

            def wants(round_: int, *, wanted: bool, own: Worker = worker, look: Any = look) -> Any:
                return look(round_, wanted=wanted or (own.rank == wanting and own.epochs.decided.number == 0))  # type: ignore[union-attr]

            worker.epochs.look = wants  # type: ignore[method-assign]
        self.store.texts[f"{RUN}/whole"] = "1"

    def choose(self, count: int) -> int:
        place = len(self.points)
        self.points.append(count)
        if place < self.given:
            return self.choices[place]
        self.choices.append(0)
        return 0

    # -- what may happen next

    def is_in_time(self, worker: Worker) -> bool:
        return True

    def call(self, worker: Worker, how: str = "") -> None:
        """Makes a call. ``how``: it is "lost", or its "answer" is; or it is "slow"."""
        if how == "slow":
            self.left["slow"] -= 1
            self.due[worker.rank] = self.ticks + SLOW
            return
        self.left["losses"] -= bool(how)
        result = None if how == "lost" else worker.thread.call(self.store)
        self.answer(worker, result, ConnectionError(how) if how else None)

    def writes(self, worker: Worker) -> bool:
        """Whether its call would change the store."""
        copy = Store(lambda number, text: None)
        copy.texts = dict(self.store.texts)
        worker.thread.call(copy)
        return copy.texts != self.store.texts

    def is_over(self) -> bool:
        """Whether nothing can happen any more."""
        idle = all(w.epochs.promise is None and w.last == math.inf and not w.epochs._new for w in self.awake())
        return self.ticks > WITHIN and idle and len({w.epochs.decided.number for w in self.awake()}) == 1  # type: ignore[union-attr]

    def die(self, worker: Worker) -> None:
        self.left["deaths"] -= 1
        self.kill(worker.rank)

    def actions(self) -> Iterator[Callable[[], None]]:
        calling = [worker for worker in self.calling() if self.due[worker.rank] <= self.ticks]
        is_free = self.ticks <= WITHIN
        # The order of calls that only read does not matter, as long as nobody writes.
        for worker in calling if any(map(self.writes, calling)) else calling[:1]:
            yield lambda worker=worker: self.call(worker)  # type: ignore[misc]
        if not calling:
            yield self.tick
        for worker in calling if is_free else ():
            if self.left["losses"]:
                yield lambda worker=worker: self.call(worker, "lost")  # type: ignore[misc]
                yield lambda worker=worker: self.call(worker, "answer")  # type: ignore[misc]
            if self.left["slow"]:
                yield lambda worker=worker: self.call(worker, "slow")  # type: ignore[misc]
        if is_free and self.left["deaths"]:
            for worker in self.awake():
                yield lambda worker=worker: self.die(worker)  # type: ignore[misc]

    # -- the search

    def search(self) -> None:
        """Runs to the end, or to a state that was seen before."""
        while self.ticks < LAST:
            if self.is_over() and set(self.workers[self.awake()[0].rank].epochs.newest.members).isdisjoint(self.dead):
                break
            actions = list(self.actions())
            if len(actions) == 1:
                actions[0]()
                continue
            if len(self.points) >= self.given:
                digest = self.digest()
                if digest in self.seen:
                    raise SeenError
                self.seen.add(digest)
            actions[self.choose(len(actions))]()
        self.check_end()

    def digest(self) -> int:
        """Of all that the future depends on, and of the rounds that were made."""
        state: list[Any] = [self.ticks, sorted(self.left.items()), sorted(self.dead), sorted(self.store.texts.items())]
        state += [[plans for at, plans in sorted(self.planned.items()) if at >= min(w.round for w in self.workers) - 2]]
        state += [self.look_at, self.due, sorted(self.line)]
        for worker in self.awake():
            epochs, keeper, thread = worker.epochs, worker.epochs.keeper, worker.thread
            state += [
                worker.round,
                worker.last,
                worker.epoch,
                worker.mixed,
                sorted(worker.missed.items()),
                sorted(worker.vouched),
            ]
            state += [epochs.decided, epochs.newest, epochs.own, epochs._new, epochs.promise, keeper._told]
            state += [keeper._wanted, keeper._heard, keeper._is_away, keeper._keep_at > 0]
            state += [epochs.mixing_from]
            state += [thread.call is None, thread.heard]
        return hash(repr(state))


def explore(**bounds: int) -> tuple[int, int]:
    """Runs schedules until none is left. Returns how many runs, and how many states."""
    seen: set[int] = set()
    waiting: list[list[int]] = [[]]
    runs = 0
    while waiting:
        choices = waiting.pop()
        given, runs = len(choices), runs + 1
        world = run(choices, seen, **bounds)
        for place in range(given, len(world.points)):
            waiting += [[*world.choices[:place], other] for other in range(1, world.points[place])]
    return runs, len(seen)


def run(choices: list[int], seen: set[int], **bounds: int) -> Orders:
    world = Orders(choices, seen, **bounds)
    with running(world):
        try:
            world.search()
        except SeenError:
            pass
        except Exception as error:
            raise AssertionError(f"choices {world.choices} of {bounds}: {error!r}") from error
    return world


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short delays."""
    for name, seconds in {
        "_AHEAD": 0.1,
        "_LOOK": 0.2,
        "_SOON": 0.1,
        "_SILENT": 0.2,
        "_HEARD": 0.4,
        "_FEW": 0.6,
        "_TURN": 0.3,
        "_AGAIN": 0.2,
    }.items():
        monkeypatch.setattr(epochs_module, name, seconds)
    monkeypatch.setattr(sys.modules[__name__], "SETTLE", 0.15)


def test_all_orders_of_calls(short: None) -> None:
    _, states = explore()
    assert states > 40


@pytest.mark.slow
@pytest.mark.parametrize("wanting", [0, 1])
@pytest.mark.parametrize("bounds", [{"deaths": 1}, {"losses": 1}, {"slow": 1}])
def test_all_orders_with_a_disturbance(bounds: dict[str, int], wanting: int, short: None) -> None:
    _, states = explore(wanting=wanting, **bounds)
    assert states > 500


def test_a_schedule_is_repeated_by_its_choices(short: None) -> None:
    """And two orders that lead to one state are one."""
    seen: set[int] = set()
    world = run([], seen)
    again = run(list(world.choices), set())
    assert again.points == world.points
    assert again.digest() == world.digest()
    assert run([], seen).points == []
