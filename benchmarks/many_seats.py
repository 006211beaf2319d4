"""A run with many seats in virtual time: the real protocol of members at one store, and what it asks and computes.

The ``Epochs`` and ``EpochStore`` of all workers run in one process; there are no tensors and no sockets. Workers hear those
that they meet in the rounds of the present members (base-2).

A worker's computation is real: the seconds of its thread. It takes no virtual time, nor do calls of the store.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from torch._C._distributed_c10d import HashStore

from decent_dp.membership import epochs as epochs_module
from decent_dp.membership.epoch_store import Epoch, EpochStore
from decent_dp.membership.epochs import Epochs
from decent_dp.topo import make_topology
from decent_dp.transport import Replicas
from decent_dp.transport.sockets import SILENT

T = TypeVar("T")

# The id of the run.
RUN = "0" * 32

STEP = 0.5  # seconds of a step
SETTLE = 0.5  # seconds until a lost member is missed, as of ``MembershipMonitor``
DEAD_AFTER = 10.0  # seconds until a machine that cannot be reached counts as dead
REFUSED = 0.05  # and until a process does that was killed: its connections are refused
RETURN = 15.0  # seconds until a process joins in its place
CHURN = 0.01 / 60  # deaths per second and worker


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


class Look:
    """``Seen``, of which each part is found out when it is read. It is a method of ``worker``."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return self._worker.newest_epoch() if name == "epoch" else frozenset(getattr(self._worker, name)())


class Worker:
    """A process that makes rounds; also its ``Neighbours``, as far as ``Epochs`` uses them."""

    def __init__(self, world: World, rank: int, incarnation: int = 0) -> None:
        self.world, self.rank, self.incarnation = world, rank, incarnation
        self.epoch, self.alive = 0, True
        self.peers: set[int] = set()
        self.missed: dict[int, float] = {}
        self.until: int | None = None  # it mixes with nobody after this round
        self.cpu = 0.0
        self.counted: int | None = None if incarnation else 0  # the epoch in which the world counts it
        node_of = [f"10.0.0.{k}/4026531840" for k in range(world.n)]
        records = {"run": json.dumps({"node_of": node_of}), f"address/{rank}": "x" * 60}
        store = EpochStore(HashStore(), RUN, records)
        counted: Any = SimpleNamespace(run=lambda call: call(world.store))
        store._store = counted
        own: Any = self
        plan: Any = Plan()
        self.epochs = Epochs(rank, Replicas(tuple((seat,) for seat in range(world.n))), own, plan, store, incarnation)

    # -- Neighbours

    def fail(self, error: Exception) -> None:
        raise error

    @property
    def round(self) -> int:
        return int(self.world.now / STEP)

    def reserve_until(self, seconds: float, least: int) -> int:
        self.until = self.round + max(least, math.ceil(seconds / STEP))
        return self.until

    def stop_mixing_after(self, last: int | None) -> None:
        self.until = last

    def enter_epoch(self, number: int) -> None:
        self.epoch = number

    def look(self) -> Look:
        return Look(self)

    def newest_epoch(self) -> int:
        return max((self.world.workers[peer].epoch for peer in self.living()), default=0)

    def living(self) -> list[int]:
        return [peer for peer in self.peers if peer not in self.world.victims]

    def lost(self) -> list[int]:
        now, notice = self.world.now, self.world.notice
        return [peer for peer, died in self.world.victims.items() if peer in self.peers and now - died >= notice]

    def silent(self) -> list[int]:
        now, notice = self.world.now, min(self.world.notice, SILENT * DEAD_AFTER)
        return [peer for peer, died in self.world.victims.items() if peer in self.peers and now - died >= notice]

    def ended(self) -> list[int]:
        return self.lost() if self.world.notice < DEAD_AFTER else []

    def left(self) -> list[int]:
        return []

    def renew(self, rank: int, incarnation: int, start: int) -> None: ...

    # -- what it does

    def look_at_store(self) -> None:
        if self.alive:
            wait = self.world.timed(self, self.epochs.keeper.look_at_store)
            self.world.at(wait, self.look_at_store)

    def step(self) -> None:
        world, epochs = self.world, self.epochs
        if not self.alive:
            return
        world.steps += 1
        world.held += self.until is not None and self.round > self.until
        members = set(epochs.newest.members)
        self.missed = {rank: self.missed.get(rank, world.now) for rank in self.lost() if rank in members}
        wanted = any(world.now - since > SETTLE for since in self.missed.values())
        epoch = world.timed(self, lambda: epochs.look(self.round, wanted=wanted))
        if epoch is not None:
            world.adopted(self, epoch)
        world.at(STEP, self.step)


class Plan:
    """In place of an ``EpochTopology``."""

    def change(self, start: int, members: Any, now: int = 0) -> None: ...


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
    """The clock, the store and what is counted.

    Attributes:
        victims: workers that have died and are not replaced, and when.
        common: the newest epoch that all living members know.
        steps, held: of all workers; and those in which a worker had to wait for an epoch, and would have mixed with nobody.
    """

    def __init__(self, n: int, seed: int = 0, notice: float = DEAD_AFTER) -> None:
        self.n, self.random, self.notice = n, random.Random(seed), notice
        self.now, self.order = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.store = CountedStore()
        self.victims: dict[int, float] = {}
        self.incarnations = self.steps = self.held = 0
        self.epochs: dict[int, Epoch] = {}
        self.common = 0
        # Seconds from when a worker counts as dead to a common epoch without it; and those for which there is none yet.
        self.reached: list[float] = []
        self.missing: list[tuple[int, int, float]] = []
        self.seated: list[float] = []  # seconds from a process's request to its seat
        self.workers = [Worker(self, rank) for rank in range(n)]
        self.at_epoch = Counter({0: n})
        for worker, peers in zip(self.workers, partners(n), strict=True):
            worker.peers = set(peers)
            self.begin(worker)

    def begin(self, worker: Worker) -> None:
        self.at(self.random.uniform(0.0, STEP), worker.step)
        self.at(self.random.uniform(0.0, STEP), worker.look_at_store)

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
        worker.cpu += time.thread_time() - began
        return result

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
        worker.alive = False
        self.victims[rank] = self.now
        self.missing.append((rank, worker.incarnation, self.now))
        self.move(worker, None)
        self.at(RETURN, lambda: self.come(rank))

    def come(self, rank: int) -> None:
        """A process asks a member for the place of a dead worker."""
        host = self.workers[self.random.randrange(self.n)]
        is_free = rank in host.lost() or rank not in host.epochs.newest.members
        if not host.alive or not host.epochs.is_member or not is_free:
            self.at(0.5, lambda: self.come(rank))
            return
        self.incarnations += 1
        incarnation, asked = self.incarnations, self.now

        def wait(future: Any) -> None:
            if not host.alive:
                self.come(rank)
            elif not future.done():
                self.at(0.1, lambda: wait(future))
            elif future.exception() is None:
                self.seated.append(self.now - asked)
                self.enter(rank, incarnation, future.result())

        wait(host.epochs.keeper.offer(rank, incarnation))

    def enter(self, rank: int, incarnation: int, epoch: Epoch) -> None:
        worker = self.workers[rank] = Worker(self, rank, incarnation)
        self.victims.pop(rank, None)
        worker.epochs.enter(epoch)
        self.adopted(worker, epoch)
        self.begin(worker)

    # -- epochs

    def adopted(self, worker: Worker, epoch: Epoch) -> None:
        """A worker knows an epoch: it hears its partners in it."""
        assert self.epochs.setdefault(epoch.number, epoch) == epoch, "two epochs of one number"
        seats = partners(len(epoch.members))[epoch.members.index(worker.rank)]
        worker.peers = {epoch.members[seat] for seat in seats}
        self.move(worker, epoch.number)

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


@contextlib.contextmanager
def world_of(n: int, **options: Any) -> Iterator[World]:
    """A world, whose clock is that of the epochs."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    no_thread = mock.patch.object(epochs_module, "start_thread", return_value=True)
    with no_thread, mock.patch.object(epochs_module, "time", clock):
        world = World(n, **options)
        clock.monotonic = lambda: world.now
        yield world
