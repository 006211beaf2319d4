"""What a member does for a process that joins: it gives it its state, and a seat. Neither stops its training."""

from __future__ import annotations

import logging
import threading
import time
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from decent_dp.compression import all_finite
from decent_dp.membership import Epoch, MembershipMonitor
from decent_dp.replica.host_copies import HostMemory, Staged
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.replica.transfer import StateCopy, pack_message, unpack_message
from decent_dp.serialization import encode

__all__ = ["StateServer"]

_log = logging.getLogger(__name__)

# Copies of the state that are kept at a time, each of them as large as the state. When there are no more, the newest is given.
_MOST_COPIES = 2
# Seconds for which a copy is new enough for others.
_FRESH = 60.0
# How long a copy is kept for one that asks no more, in ``dead_after``: a joiner without a network gives up after 30 s.
_KEPT = 3.0
# Seconds for which training waits for the memory of a copy: that of a small one is there by then.
_SOON = 0.02
# Seconds after which one that has wanted a seat, and asks no more, has ended.
_ENDED = 3.0

# The rank and the incarnation of a process that asks.
Asker: TypeAlias = tuple[int, int]
# What tells each process that wants a seat together with others the epoch, by process.
Seats: TypeAlias = dict[Asker, Future[Epoch]]


@dataclass
class _Kept:
    """A copy of the state.

    Attributes:
        taken: when; ``first_bucket``: of the engine then, which another one has after a load.
        asked: when each that has not got all of it has asked last.
        is_finite: None: it is not known yet.
    """

    copy: StateCopy
    staged: Staged
    taken: float
    first_bucket: int
    asked: dict[Asker, float]
    is_finite: bool | None = None


class StateServer(Listener):
    """Answers the requests of joiners, and of members that heal, in one thread (``answer``); takes copies between rounds.

    A request may be repeated. A copy is kept until all that have begun it have all of it, or ask no more.
    """

    def __init__(self, replica: Replica, monitor: MembershipMonitor) -> None:
        self._replica, self._monitor = replica, monitor
        # All are changed under the lock: when those that want a copy have asked last, memory for it, and why they get none;
        # copies by name; the seats that are wanted, and when they were last asked for.
        self._wanting: dict[Asker, float] = {}
        self._memory: Future[HostMemory] | None = None
        self._refusals: dict[Asker, str] = {}
        self._copies: dict[str, _Kept] = {}
        self._seats: dict[Asker, tuple[Seats, float]] = {}
        self._lock = threading.Lock()
        # Makes memory while training goes on: the system provides new memory slower than it copies.
        self._maker = ThreadPoolExecutor(1, "decent_dp-memory")
        self._has_ended = False

    # -- in the training thread ---------------------------------------------------------------------------------------

    def reached_boundary(self) -> None:
        if not (self._wanting or self._copies or self._seats):
            return
        with self._lock:
            self._drop_old()
        if not self._wanting or (self._memory is not None and not self._memory.done()):
            return
        kept, refusal = None, ""
        try:
            kept = self._take()
        except Exception as error:  # training continues
            refusal = str(error)
        with self._lock:
            if kept is not None:
                self._copies[kept.copy.name], kept.asked = kept, self._wanting
            if kept is not None or refusal:
                self._refusals = dict.fromkeys(self._wanting, refusal) if refusal else {}
                self._wanting, self._memory = {}, None

    def _take(self) -> _Kept | None:
        """None: the memory for it is made first, which takes a while."""
        if not self._replica.engine.counts.exchanges and len(self._monitor.members) > 1:
            raise RuntimeError("this worker has not mixed yet")
        # What is in flight, and what edges have learned, is between this worker and others.
        snapshot = {**take(self._replica, settled=False), "compression": {}, "grads": {}}
        bucket, epochs = self._replica.engine.first_bucket, self._monitor.epochs
        known = None if epochs is None else epochs.known
        text, tensors = encode({"first_bucket": bucket, "epoch": known, "snapshot": snapshot})
        if self._memory is None:
            self._memory = self._maker.submit(HostMemory.reserved, *HostMemory.needed(tensors))
            if not futures.wait([self._memory], _SOON).done:
                return None
        staged = self._memory.result().copy(tensors)
        return _Kept(StateCopy(text, staged), staged, time.monotonic(), bucket, {})

    def closing(self) -> None:
        with self._lock:
            self._wanting, self._copies, self._has_ended = {}, {}, True
        self._maker.shutdown()  # a thread in torch must not come back while the process exits

    # -- in the thread that answers -----------------------------------------------------------------------------------

    def answer(self, rank: int, incarnation: int, request: bytes) -> bytes:
        """The answer to a process of this run: a chunk of the state, or a seat."""
        try:
            head, _ = unpack_message(request)
            if head["want"] == "state":
                return self._give_chunk((rank, incarnation), str(head["copy"]), head["from"])
            return self._give_seat((rank, incarnation), head["for"])
        except (RuntimeError, LookupError, TypeError, ValueError, ConnectionError) as error:
            return pack_message({"refused": str(error)})

    def _give_chunk(self, asker: Asker, name: str, begin: Any) -> bytes:
        """The bytes from ``begin`` on of the copy ``name``; or the first ones of another copy."""
        now = time.monotonic()
        with self._lock:
            self._drop_old()
            if refusal := self._refusals.pop(asker, ""):
                raise RuntimeError(refusal)
            kept = self._find(name)
            if kept is None:
                if self._has_ended:
                    raise RuntimeError("this worker has ended")
                if self._monitor.neighbours.is_paused:  # there is no boundary in a call of all, or while it heals
                    raise RuntimeError("it waits for others")
                self._wanting[asker] = now
                makes_memory = self._memory is not None and not self._memory.done()
                return pack_message({"wait": "it is in a step", "copies": makes_memory})
            kept.asked[asker] = now
        self._check(kept)
        size = kept.copy.size
        if kept.copy.name != name:
            begin = 0
        elif type(begin) is not int or not 0 <= begin <= size:
            raise ValueError(f"from must be an int from 0 to {size}, the bytes of the copy, got {begin!r}")
        if begin == size:  # it has all of it
            with self._lock:
                kept.asked.pop(asker, None)
                self._drop_old()
        return kept.copy.chunk(begin)

    def _check(self, kept: _Kept) -> None:
        """Waits until the copy is on the CPU. Raises RuntimeError if it is not finite."""
        if kept.is_finite is None:
            kept.staged.wait()
            kept.is_finite = all(
                all_finite(tensor)
                for key, tensor in kept.staged.tensors.items()
                if tensor.is_floating_point() and ".parameters." in key
            )
        if not kept.is_finite:
            with self._lock:
                self._copies.pop(kept.copy.name, None)
            raise RuntimeError("the replica of this worker holds a NaN or an infinity")

    def _find(self, name: str) -> _Kept | None:
        """The copy of this name, or the newest, if that is fresh or there may be no more. The caller has the lock."""
        if name in self._copies:
            return self._copies[name]
        bucket = self._replica.engine.first_bucket
        copies = [kept for kept in self._copies.values() if kept.first_bucket == bucket]
        newest = max(copies, key=lambda kept: kept.taken, default=None)
        is_fresh = newest is not None and time.monotonic() < newest.taken + _FRESH
        return newest if is_fresh or len(copies) >= _MOST_COPIES else None

    def _drop_old(self) -> None:
        """Drops what nobody asks for any more. The caller has the lock."""
        now, seconds = time.monotonic(), _KEPT * self._monitor.faults.dead_after
        self._copies = {
            name: kept for name, kept in self._copies.items() if any(now - at < seconds for at in kept.asked.values())
        }
        for asker in [asker for asker, (_, at) in self._seats.items() if now - at > _ENDED]:
            seats, _ = self._seats.pop(asker)
            if self._monitor.epochs is not None:
                for seat in seats:
                    self._monitor.epochs.keeper.withdraw(*seat)

    def _give_seat(self, asker: Asker, wanted: Any) -> bytes:
        """``wanted``: ranks and incarnations of all processes of the asker's replica, which become members together."""
        monitor, replicas = self._monitor, self._replica.agreed.replicas
        processes: list[Asker] = [(rank, incarnation) for rank, incarnation in wanted]
        own = replicas.workers_of(replicas.place_of(asker[0])[0])
        is_whole = sorted(rank for rank, _ in processes) == sorted(own)
        if asker not in processes or not is_whole or not all(type(number) is int for _, number in processes):
            raise ValueError(
                f"worker {asker[0]} wants seats for {str(wanted)[:200]}, and its replica is the workers {list(own)}"
            )
        for rank, incarnation in processes:
            if not monitor.is_free(rank, incarnation):  # its process may be frozen, or have ended just now
                return pack_message({"wait": f"worker {rank} lives"})
        assert monitor.epochs is not None
        with self._lock:
            seats, _ = self._seats.get(asker, ({}, 0.0))
            self._seats[asker] = seats, time.monotonic()  # first: what is offered is withdrawn if another offer fails
            for process in processes:
                seats[process] = seats.get(process) or monitor.epochs.keeper.offer(*process)
            if not all(future.done() for future in seats.values()):
                return pack_message({"wait": "the members agree on an epoch"})
            del self._seats[asker]
        epoch = max((future.result() for future in seats.values()), key=lambda epoch: epoch.number)
        _log.info("workers %s have joined, in epoch %d", sorted(own), epoch.number)
        replica = self._replica
        counts = {"calls": replica.world.control.calls, "joins": replica.cadence.joins, "contexts": replica.cadence.contexts}
        answer = {"epoch": epoch.number, "text": epoch.text, "first_bucket": replica.engine.first_bucket}
        return pack_message(answer | counts)
