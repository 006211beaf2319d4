"""All workers in one process, one thread per replica: for tests, and for a single worker."""

from __future__ import annotations

import itertools
import math
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError, WireError
from decent_dp.faults import Tolerate
from decent_dp.topo import Edge
from decent_dp.transport.agreement import PeerView
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.interface import ExchangeRequest, Handle, Transport
from decent_dp.transport.messages import Key
from decent_dp.transport.neighbours import Neighbours, PeerTable, Seen
from decent_dp.transport.votes import ExchangeId, Verdict

__all__ = ["InProcessTransport", "LocalHub", "run_replicas"]

T = TypeVar("T")


class LocalHub:
    """Shared by the threads of one process, which are its workers.

    Args:
        world_size: the number of workers.
        timeout: seconds that one waits for another.
    """

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._values: dict[Hashable, dict[int, Any]] = {}
        self._taken: dict[Hashable, int] = {}
        self._lost: set[int] = set()
        self._transports: Counter[int] = Counter()
        self._runs: dict[int, tuple[str, Store, list[_LocalPlane]]] = {}
        self.rounds: dict[tuple[str, int], int] = {}
        # Calls of the control planes, made one after the other by whichever thread is there.
        self._calls: deque[Callable[[], None]] = deque()
        self._calling = threading.Lock()

    def transport(self, rank: int) -> InProcessTransport:
        return InProcessTransport(rank, self)

    @property
    def lost(self) -> list[int]:
        with self._changed:
            return sorted(self._lost)

    def begin_run(self, rank: int) -> tuple[str, Store, list[_LocalPlane]]:
        """What the n-th transports of all workers share: a name, a store, and their control planes."""
        with self._changed:
            self._transports[rank] += 1
            if self._transports[rank] not in self._runs:
                planes: list[_LocalPlane] = []
                planes += [_LocalPlane(number, self, planes) for number in range(self.world_size)]
                self._runs[self._transports[rank]] = uuid.uuid4().hex, dist.HashStore(), planes  # type: ignore[attr-defined]
            return self._runs[self._transports[rank]]

    def lose(self, rank: int) -> None:
        """Marks worker ``rank`` as gone, and wakes those that wait for it. What it has said stays."""

        def gone() -> None:
            with self._changed:
                self._lost.add(rank)
                self._changed.notify_all()
                runs = list(self._runs.values())
            for plane in itertools.chain(*(planes for *_, planes in runs)):
                plane.agreements.departed(rank)
                plane.agreements.look(again=False)

        def leave() -> None:
            for *_, planes in list(self._runs.values()):
                planes[rank].agreements.leave()
            self.call(gone)  # after what it says

        self.call(leave)

    def call(self, command: Callable[[], None]) -> None:
        """Makes this call, and those that it adds, unless another thread makes calls at present, which makes it, too."""
        self._calls.append(command)
        while self._calls and self._calling.acquire(blocking=False):
            try:
                while self._calls:
                    self._calls.popleft()()
            finally:
                self._calling.release()

    def put(self, key: Hashable, rank: int, value: object) -> None:
        """Adds the value of ``rank`` under ``key``; None: it leaves the exchange out."""
        with self._changed:
            self._values.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def collect(self, key: Hashable, ranks: list[int], what: str) -> dict[int, Any]:
        """Waits until all ``ranks`` have added a value under ``key``; returns the values by rank."""
        with self._changed:
            found = self._values[key]

            def missing() -> list[int]:
                return [rank for rank in ranks if rank not in found]

            self._changed.wait_for(lambda: not missing() or any(r in self._lost for r in missing()), self.timeout)
            if absent := missing():
                if gone := self._lost.intersection(absent):
                    raise PeerLostError(f"worker {min(gone)} is gone; it was needed for {what}.")
                raise PeerTimeoutError(
                    f"worker {absent[0]} sent nothing for {what} within {self.timeout:g} s. It is slower than that, or it "
                    "has made fewer updates: uneven numbers of batches need join() around the loop."
                )
            if any(value is None for value in found.values()):
                del self._values[key]
                raise PeerLostError(f"another worker has left out {what}")
            result = dict(found)
            self._taken[key] = self._taken.get(key, 0) + 1
            if self._taken[key] == len(ranks):
                del self._values[key], self._taken[key]
            return result


class InProcessTransport(Transport):
    """A worker that is a thread, or the only worker there is.

    Args:
        rank: this worker's.
        hub: shared with the other workers; None for a single worker.
    """

    def __init__(self, rank: int = 0, hub: LocalHub | None = None) -> None:
        hub = hub or LocalHub(1)
        run_id, store, planes = hub.begin_run(rank)
        super().__init__(rank, hub.world_size, run_id, hub.timeout, store)
        self._hub = hub
        self.plane = planes[rank]
        self.control = self._collectives("start", 0)

    def _collectives(self, kind: str, channel: int) -> Collectives:
        ranks, node_of = range(self.world_size), ["here"] * self.world_size
        explain = partial(self.explain, None) if self.neighbours is None else None
        return Collectives(self.plane, ranks, node_of, self.timeout, kind=kind, channel=channel, explain=explain)

    def explain(self, error: Exception | None, ranks: Sequence[int], what: object) -> PeerError:
        return PeerLostError(f"worker {ranks[0]} is gone; it was needed for {what}.")

    def tolerate(self, faults: Tolerate) -> Neighbours:
        self.neighbours = _LocalNeighbours(self.rank, self._hub, self.run_id)
        self.table = self.neighbours.table
        self.control = self._collectives("call", 1)
        return self.neighbours

    def begin(self, bucket: int) -> None:
        self._hub.rounds.pop((self.run_id, self.rank), None)

    def announce(self, round_: int) -> None:
        self._hub.rounds[self.run_id, self.rank] = round_

    def newest_round(self) -> int:
        others = set(range(self.world_size)) - {self.rank, *self._hub.lost}
        return max((self._hub.rounds.get((self.run_id, rank), -1) for rank in others), default=-1)

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        ranks, exchange_id = tuple(sorted(edge.ranks)), request.exchange_id
        where = self.run_id, ranks, exchange_id
        hints: list[bytes] = []
        if request.compression.needs_hints:
            self._hub.put(("hint", where), self.rank, request.hint)
            try:
                found = self._hub.collect(("hint", where), edge.ranks, str(exchange_id))
                hints = [found[rank] for rank in ranks if rank != self.rank]
            except PeerLostError:
                if self.neighbours is None:
                    raise
                lost = Handle()
                lost.verdict = Verdict.NEITHER
                return lost
        for _ in request.encode(hints):
            pass
        # A copy, as a network would make it: the sender may write to its message while a slower member still reads.
        key, sent = ("exchange", where), request.sent.clone()
        _wait_until_written(sent)
        self._hub.put(key, self.rank, sent)

        def finish() -> None:
            try:
                found = self._hub.collect(key, edge.ranks, str(exchange_id))
            except PeerLostError:
                if self.neighbours is None:
                    raise
                handle.verdict = Verdict.NEITHER
                return
            if any(other.shape != request.sent.shape for other in found.values()):
                raise WireError(f"{exchange_id}: messages of {sorted({len(other) for other in found.values()})} bytes met")
            if len(ranks) == 2:
                request.received.copy_(next(found[rank] for rank in ranks if rank != self.rank))
            else:
                for number, chunk in enumerate(request.compression.chunks):  # as the roots would if all were on one node
                    messages = [found[rank][chunk.start : chunk.stop] for rank in ranks]
                    mean = request.received[chunk.start : chunk.stop]
                    request.reduce(number, messages, [1] * len(ranks), mean, 0)
            _wait_until_written(request.received)  # the memory of the copies may be reused by another stream

        handle = Handle(finish, sum(chunk.payload for chunk in request.compression.chunks) * (len(ranks) - 1))
        return handle


class _LocalNeighbours(Neighbours):
    """Threads end, and that is all that can happen to them."""

    def __init__(self, rank: int, hub: LocalHub, run_id: str) -> None:
        self.rank, self.hub, self.run_id = rank, hub, run_id
        self.table = _LocalTable(self)
        self.last = math.inf
        self._error: Exception | None = None

    def look(self) -> Seen:
        others = frozenset(range(self.hub.world_size)) - {self.rank}
        lost = others.intersection(self.hub.lost)
        return Seen(living=others - lost, silent=lost, lost=lost, ended=lost, left=lost)

    def fail(self, error: Exception) -> None:
        self._error = self._error or error

    def refuse_failed(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"this worker has failed: {type(self._error).__name__}: {self._error}") from self._error

    def reserve_until(self, seconds: float, least: int) -> int:
        last = self.hub.rounds.get((self.run_id, self.rank), -1) + least
        self.last = min(self.last, last)
        return last

    def stop_mixing_after(self, last: int | None) -> None:
        self.last = math.inf if last is None else last


class _LocalTable(PeerTable):
    def __init__(self, own: _LocalNeighbours) -> None:
        self._own = own

    def usable(self, edge: Edge, exchange_id: ExchangeId) -> bool:
        own, where = self._own, (self._own.run_id, tuple(sorted(edge.ranks)), exchange_id)
        for kind in ("hint", "exchange") if exchange_id.round > own.last else ():  # the other one may mix until a later one
            own.hub.put((kind, where), own.rank, None)
        return exchange_id.round <= own.last and not own.look().lost.intersection(edge.ranks)

    def living(self) -> list[int]:
        return sorted(self._own.look().living)


class _LocalPlane(ControlPlane):
    """The control plane of a worker that is a thread, and its links: all are connected, and notes arrive at once.

    Args:
        planes: of all workers, by rank.
    """

    def __init__(self, rank: int, hub: LocalHub, planes: list[_LocalPlane]) -> None:
        self._rank, self._hub, self._planes, self.call = rank, hub, planes, hub.call
        super().__init__(rank, hub.world_size, self)

    def view(self, peer: int) -> PeerView:
        return PeerView.LOST if peer in self._hub.lost else PeerView.LINKED

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        self.call(lambda: self._planes[peer].hear(self._rank, key, text))

    def want(self, peer: int) -> None:
        return

    def first_round(self, peer: int) -> int:
        return -1

    def missing(self, name: str) -> list[int]:
        for plane in self._planes:  # no thread asks the others once in a while
            self.call(partial(plane.agreements.look, again=True))
        return super().missing(name)


def _wait_until_written(tensor: Tensor) -> None:
    """Until what is queued on the current stream has been written: the streams of other threads do not wait for it."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def run_replicas(world_size: int, work: Callable[[InProcessTransport], T], timeout: float = 60.0) -> list[T]:
    """Runs ``work`` once per worker, each in a thread of its own, with transports that share a hub.

    Returns:
        The results by rank.

    Raises:
        BaseException: the error of the lowest rank that is not the consequence of another's.
    """
    hub = LocalHub(world_size, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            # A GPU has one thread for all backwards, and a backward of the wrapper waits for that of another replica.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = work(hub.transport(rank))
        except BaseException as error:
            errors[rank] = error
        finally:
            hub.lose(rank)  # those that wait for it learn of its end; its values stay

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for _, e in sorted(errors.items()) if not isinstance(e, PeerLostError)), errors[min(errors)])
    return [results[rank] for rank in range(world_size)]
