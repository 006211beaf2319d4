"""A run with many seats in virtual time: the real protocol of members over a scripted network, and what it sends and computes.

The ``Agreements``, ``Epochs`` and ``Line`` of all workers run in one process; there are no tensors and no sockets. Workers are
connected as the library connects them: to their partners in the rounds of the present members (base-2), also to those of former
epochs, and a process that joins to all members.

A worker's computation is real: the seconds of its thread, as if it had read all messages itself. It takes no virtual time.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from torch._C._distributed_c10d import HashStore

from decent_dp.membership import epochs as epochs_module
from decent_dp.membership.epoch_store import Epoch
from decent_dp.membership.epoch_store import EpochStore as Line
from decent_dp.membership.epochs import Epochs
from decent_dp.topo import make_topology
from decent_dp.transport import agreement as agreement_module
from decent_dp.transport.agreement import Agreements, Decision, View
from decent_dp.transport.agreement import _unpack as unpack
from decent_dp.transport.messages import HEADER_BYTES, LARGEST_FRAME
from decent_dp.transport.sockets import SILENT

T = TypeVar("T")

# The id of the run.
RUN = "0" * 32

# Seconds: of a step; of a message's way; between looks and questions of an agreement (as ``ControlPlane``); until a lost
# member is missed (as ``Company``); until a machine that cannot be reached, or a process that was killed, counts as dead;
# until a process joins in its place.
STEP, DELAY, LOOK, ASK, SETTLE, DEAD_AFTER, REFUSED, RETURN = 0.5, (0.015, 0.025), 0.1, 0.5, 0.5, 10.0, 0.05, 15.0
CHURN = 0.01 / 60  # deaths per second and worker


class Immediate:
    """In place of a thread."""

    def __init__(self, name: str) -> None: ...

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(job())
        return future

    def close(self) -> None: ...


class CountedStore:
    """A store that counts operations, and the bytes of keys and texts that they move."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.operations, self.bytes = 0, 0

    def count(self, *texts: str) -> None:
        self.operations += 1
        self.bytes += sum(map(len, texts))

    def check(self, keys: list[str]) -> bool:
        self.count(*keys)
        return all(key in self.texts for key in keys)

    def get(self, key: str) -> bytes:
        self.count(key, self.texts[key])
        return self.texts[key].encode()

    def set(self, key: str, text: str) -> None:
        self.count(key, text)
        self.texts[key] = text

    def append(self, key: str, text: str) -> None:
        self.count(key, text)
        self.texts[key] = self.texts.get(key, "") + text

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        won = self.texts.setdefault(key, text) if not expected else self.texts[key]
        self.count(key, expected, text, won)
        return won.encode()

    def delete_key(self, key: str) -> bool:
        self.count(key)
        return self.texts.pop(key, None) is not None


class CountedLine(Line):
    """The line of epochs in such a store."""

    def __init__(self, store: Any, records: dict[str, str]) -> None:
        super().__init__(HashStore(), RUN, records)
        counted: Any = SimpleNamespace(run=lambda call: call(store))
        self._store = counted


class Connection:
    """Between two processes. ``broken``: when it was lost; ``lost``: when the peer counts as dead from then on."""

    def __init__(self) -> None:
        self.broken = self.lost = math.inf


class Worker:
    """A process that makes rounds; also its ``Neighbours`` and their ``Consensus``, as far as ``Epochs`` uses them."""

    def __init__(self, world: World, rank: int, incarnation: int = 0) -> None:
        self.world, self.rank, self.incarnation = world, rank, incarnation
        self.connections: dict[int, Connection] = {}
        self.known: dict[int, int] = {}  # the incarnations of those that have joined
        self.epoch = self.heard_epoch = 0
        self.alive, self.is_looking, self.ask_at = True, False, 0.0
        self.futures: dict[str, Future[Decision]] = {}
        self.texts: dict[str, set[str]] = {}
        self.missed: dict[int, float] = {}
        self.until: int | None = None  # it mixes with nobody after this round
        self.cpu = 0.0
        self.counted: int | None = None if incarnation else 0  # the epoch in which the world counts it
        self.agreements = Agreements(
            rank,
            world.n,
            self.view,
            self.send,
            lambda peer: world.at(0.06, lambda: world.connect(rank, peer)),
            self.hear_of,
            lambda name, decision: self.futures[name].set_result(decision),
            self.ratify,
            incarnation,
            lambda name: True,
            self.is_silent,
        )
        records = {
            "run": json.dumps({"node_of": [f"10.0.0.{k}/4026531840" for k in range(world.n)]}),
            f"address/{rank}": "x" * 60,
        }
        own: Any = self
        plan: Any = world.plan
        self.epochs = Epochs(rank, world.n, own, plan, CountedLine(world.store, records), incarnation)

    # -- Neighbours, and their Consensus

    @property
    def consensus(self) -> Any:
        return self

    def fail(self, error: Exception) -> None:
        raise error

    @property
    def round(self) -> int:
        return int(self.world.now / STEP)

    def govern(self, prefix: str, vote: Any, ratify: Any) -> None:
        self.vote, self.write = vote, ratify

    def promise(self, seconds: float, least: int) -> int:
        self.until = self.round + max(least, math.ceil(seconds / STEP))
        return self.until

    def confine(self, last: int | None) -> None:
        self.until = last

    def enter_epoch(self, number: int) -> None:
        """Tells the others with a heartbeat."""
        self.epoch = number
        for peer in self.connections:
            if self.view(peer) is View.LINKED:
                self.world.tell(self, peer, number)

    def newest_epoch(self) -> int:
        return self.heard_epoch

    def living(self) -> list[int]:
        return [peer for peer in self.connections if self.view(peer) is View.LINKED]

    def lost(self) -> list[int]:
        return [peer for peer in self.connections if self.view(peer) is View.LOST]

    def left(self) -> list[int]:
        return []

    def renew(self, rank: int, incarnation: int, start: int) -> None:
        if self.known.get(rank, 0) < incarnation:
            self.known[rank] = incarnation
            self.agreements.renew(rank, incarnation)
            self.connections[rank] = waiting = Connection()
            waiting.broken, waiting.lost = self.world.now, self.world.now + DEAD_AFTER
            self.world.at(0.06, lambda: self.world.connect(self.rank, rank))

    def propose(self, name: str, text: str) -> Future[Decision]:
        future = self.futures.setdefault(name, Future())
        self.world.at(0.0, lambda: self.run(lambda: self.agreements.propose(name, text)))
        return future

    def heard(self, name: str) -> frozenset[str]:
        return frozenset(self.texts.get(name, ()))

    # -- the transport

    def run(self, call: Callable[[], None]) -> None:
        """In the transport's thread."""
        if not self.alive:
            return
        self.world.timed(self, call)
        if self.agreements.waiting and not self.is_looking:
            self.is_looking, self.ask_at = True, self.world.now + ASK
            self.world.at(LOOK, self.look)

    def look(self) -> None:
        again, self.is_looking = self.world.now >= self.ask_at, False
        self.ask_at += ASK if again else 0.0
        ask_at = self.ask_at
        self.run(lambda: self.agreements.look(again=again))
        self.ask_at = ask_at

    def view(self, peer: int) -> View:
        connection = self.connections.get(peer)
        if connection is None:
            return View.UNKNOWN
        if self.world.now < connection.broken:
            return View.LINKED
        return View.PENDING if self.world.now < connection.lost else View.LOST

    def is_silent(self, peer: int) -> bool:
        connection = self.connections.get(peer)
        return connection is not None and self.world.now >= connection.broken + SILENT * DEAD_AFTER

    def send(self, peer: int, message: bytes) -> None:
        self.world.send(self, peer, message)

    def hear_of(self, name: str, text: str) -> None:
        self.texts.setdefault(name, set()).add(text)
        self.world.at(0.0, lambda: self.alive and self.vote(name))

    def ratify(self, name: str, decision: Decision) -> bool:
        def write() -> None:
            result = self.write(name, decision) if self.alive else None
            self.world.at(0.0 if result else 2.0, lambda: self.run(lambda: self.agreements.ratified(name, result)))

        self.world.at(0.08, write)  # two operations of the store
        return False

    # -- rounds

    def step(self) -> None:
        world, epochs = self.world, self.epochs
        if not self.alive:
            return
        world.steps += 1
        world.held += self.until is not None and self.round > self.until
        gone = {rank for rank in world.victims if self.view(rank) is View.LOST and rank in epochs.newest.members}
        self.missed = {rank: self.missed.get(rank, world.now) for rank in gone}
        wanted = any(world.now - since > SETTLE for since in self.missed.values())
        wanted |= epochs.offered(SETTLE)
        epoch = world.timed(self, lambda: epochs.look(self.round, wanted=wanted))
        if epoch is not None:
            world.adopted(self, epoch)
        world.at(STEP, self.step)


class Plan:
    """In place of an ``EpochTopology``; all workers share the topology of as many members."""

    def change(self, start: int, members: Any, since: int = 0) -> None: ...

    def longest_turn(self) -> int:
        return 1


@lru_cache(maxsize=8)
def partners(n: int) -> list[list[int]]:
    """The seats that each seat meets."""
    topology = make_topology("base-2", local_world_size=1, world_size=n, rank=0)
    found: list[set[int]] = [set() for _ in range(n)]
    for edge in itertools.chain.from_iterable(topology.round(t) for t in range(topology.period or 1)):
        for seat in edge.ranks:
            found[seat].update(edge.ranks)
    return [sorted(peers - {seat}) for seat, peers in enumerate(found)]


class World:
    """The network, the clock and what is counted.

    Attributes:
        victims: workers that have died and are not replaced, and when.
        common: the newest epoch that all living members know.
        steps, held: of all workers; and those in which a worker had to wait for an epoch, and would have mixed with nobody.
    """

    def __init__(self, n: int, seed: int = 0, notice: float = DEAD_AFTER) -> None:
        self.n, self.random, self.notice = n, random.Random(seed), notice
        self.now, self.events, self.order = 0.0, [], itertools.count()  # type: ignore[var-annotated]
        self.store, self.plan, self.unpack = CountedStore(), Plan(), Unpack()
        self.victims: dict[int, float] = {}
        self.incarnations = self.steps = self.held = 0
        self.notes, self.beats, self.note_bytes, self.largest, self.too_large = 0, 0, 0, 0, 0
        self.notes_of, self.bytes_of = Counter[str](), Counter[str]()  # by the name of the agreement
        self.epochs: dict[int, Epoch] = {}
        self.common = 0
        # Seconds from when a worker counts as dead to a common epoch without it; and those for which there is none yet.
        self.reached: list[float] = []
        self.missing: list[tuple[int, int, float]] = []
        self.seated: list[float] = []  # seconds from a process's request to its seat
        self.workers: list[Worker] = []
        self.workers = [Worker(self, rank) for rank in range(n)]
        self.at_epoch = Counter({0: n})
        for rank, peers in enumerate(partners(n)):
            for peer in peers:
                self.connect(rank, peer)
            self.at(self.random.uniform(0.0, STEP), self.workers[rank].step)

    # -- time and messages

    def at(self, delay: float, call: Callable[[], Any]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), call))

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, call = heapq.heappop(self.events)
            call()
        self.now = until

    def timed(self, worker: Worker, call: Callable[[], T]) -> T:
        """Calls it, and counts the seconds for a worker."""
        began = time.thread_time()
        result = call()
        worker.cpu += time.thread_time() - began + self.unpack.take()
        return result

    def send(self, worker: Worker, peer: int, message: bytes) -> None:
        self.notes += 1
        self.note_bytes += HEADER_BYTES + len(message)
        name = message[2 : message.index(b'"', 2)].decode()
        self.notes_of[name] += 1
        self.bytes_of[name] += HEADER_BYTES + len(message)
        self.largest = max(self.largest, len(message))
        self.too_large += len(message) > LARGEST_FRAME
        connection, other = worker.connections[peer], self.workers[peer]

        def arrives() -> None:
            if self.now < connection.broken:
                other.run(lambda: other.agreements.hear(worker.rank, message))

        self.at(self.random.uniform(*DELAY), arrives)

    def tell(self, worker: Worker, peer: int, number: int) -> None:
        self.beats += 1
        other = self.workers[peer]
        self.at(self.random.uniform(*DELAY), lambda: setattr(other, "heard_epoch", max(other.heard_epoch, number)))

    def connect(self, a: int, b: int) -> None:
        """Makes a connection, if both live and know each other's incarnation. To a dead worker none comes about."""
        one, other = self.workers[a], self.workers[b]
        know = one.known.get(b, 0) == other.incarnation and other.known.get(a, 0) == one.incarnation
        if not one.alive or one.view(b) is View.LINKED:
            return
        if other.alive and know:
            one.connections[b] = other.connections[a] = Connection()
            for worker, peer in ((one, b), (other, a)):
                self.tell(self.workers[peer], worker.rank, self.workers[peer].epoch)
                worker.run(lambda worker=worker, peer=peer: worker.agreements.reconnected(peer))  # type: ignore[misc]
        elif b not in one.connections:
            one.connections[b] = waiting = Connection()
            waiting.broken, waiting.lost = self.now, self.now + self.notice

    def figures(self) -> dict[str, int]:
        """What has been counted so far."""
        return {
            "epochs": self.common,
            "operations": self.store.operations,
            "store_bytes": self.store.bytes,
            "steps": self.steps,
            "held": self.held,
        }

    # -- churn

    def disturb(self, until: float) -> None:
        """Kills a worker, and the next ones at random times."""
        living = [worker.rank for worker in self.workers if worker.alive and worker.epochs.is_member]
        self.kill(self.random.choice(living))
        pause = self.random.expovariate(CHURN * self.n)
        if self.now + pause < until:
            self.at(pause, lambda: self.disturb(until))

    def kill(self, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.alive or not worker.epochs.is_member:
            return
        worker.alive = False
        self.victims[rank] = self.now
        self.missing.append((rank, worker.incarnation, self.now))
        for peer, connection in worker.connections.items():
            if connection.broken == math.inf and self.workers[peer].connections.get(rank) is connection:
                connection.broken, connection.lost = self.now + 0.02, self.now + 0.02 + self.notice
        self.move(worker, None)
        self.at(RETURN, lambda: self.come(rank))

    def come(self, rank: int) -> None:
        """A process asks a member for the place of a dead worker."""
        host = self.workers[self.random.randrange(self.n)]
        is_free = host.view(rank) is View.LOST or rank not in host.epochs.newest.members
        if not host.alive or not host.epochs.is_member or not is_free:
            self.at(0.5, lambda: self.come(rank))
            return
        self.incarnations += 1
        incarnation, asked = self.incarnations, self.now

        def wait(future: Future[Epoch]) -> None:
            if not host.alive:
                self.come(rank)
            elif not future.done():
                self.at(0.1, lambda: wait(future))
            elif future.exception() is None:
                self.seated.append(self.now - asked)
                self.enter(rank, incarnation, future.result())

        wait(host.epochs.offer(rank, incarnation))

    def enter(self, rank: int, incarnation: int, epoch: Epoch) -> None:
        worker = self.workers[rank] = Worker(self, rank, incarnation)
        worker.known = {other: number for other, number in epoch.incarnations.items() if other != rank}
        self.victims.pop(rank, None)
        worker.epochs.enter(epoch)
        self.move(worker, epoch.number)
        for peer in epoch.members:
            if peer != rank:
                self.connect(rank, peer)
        worker.step()

    # -- epochs

    def adopted(self, worker: Worker, epoch: Epoch) -> None:
        """A worker knows an epoch: it connects to its partners in it."""
        assert self.epochs.setdefault(epoch.number, epoch) == epoch, "two epochs of one number"
        self.move(worker, epoch.number)
        for seat in partners(len(epoch.members))[epoch.members.index(worker.rank)]:
            peer = epoch.members[seat]
            self.at(1.0, lambda peer=peer: self.connect(worker.rank, peer))  # type: ignore[misc]

    def move(self, worker: Worker, number: int | None) -> None:
        """A worker knows this epoch, or has died (None)."""
        if worker.counted is not None:
            self.at_epoch[worker.counted] -= 1
        worker.counted = number
        if number is not None:
            self.at_epoch[number] += 1
        while not self.at_epoch[self.common] and self.common < max(self.epochs, default=0):
            self.common += 1
            epoch = self.epochs[self.common]
            for rank, incarnation, died in list(self.missing):
                if rank not in epoch.members or epoch.incarnations.get(rank, 0) > incarnation:
                    self.missing.remove((rank, incarnation, died))
                    self.reached.append(self.now - died - self.notice)


class Unpack:
    """``_unpack``, once for the many workers that get the same message. Each of them is charged for it."""

    def __init__(self) -> None:
        self.found: OrderedDict[bytes, tuple[float, Any]] = OrderedDict()
        self.charged = 0.0

    def __call__(self, message: bytes, n: int, known: Any) -> Any:
        if message not in self.found:
            began = time.thread_time()
            found = unpack(message, n)
            self.found[message] = time.thread_time() - began, found
            if len(self.found) > 4096:
                self.found.popitem(last=False)
        else:
            seconds, found = self.found[message]
            self.charged += 0.0 if found[0] in known else seconds
        name, statements, decision, asker = found
        return name, dict(statements), decision, asker

    def take(self) -> float:
        charged, self.charged = self.charged, 0.0
        return charged


@contextlib.contextmanager
def world_of(n: int, **options: Any) -> Iterator[World]:
    """A world, whose clock is that of the epochs."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    with mock.patch.object(epochs_module, "Waiter", Immediate), mock.patch.object(epochs_module, "time", clock):
        world = World(n, **options)
        clock.monotonic = lambda: world.now
        with mock.patch.object(agreement_module, "_unpack", world.unpack):
            yield world
