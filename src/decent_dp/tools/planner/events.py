"""The simulation: workers compute, and transfers share links as fluids.

There are two kinds of events: a transfer can begin (all its starters have), and a transfer has ended. Between two events every
flow has a constant rate: it has an equal share of each of its links, and the smallest share counts. A worker has one transfer
between nodes, and one inside, at a time, the earliest first: so messages are sent in the order in which they are needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from .traffic import RoundTraffic, Transfer

__all__ = ["Timeline", "Timing", "simulate", "simulate_all_reduce"]

_INFINITY = float("inf")
# The largest array of buckets and workers.
_AT_ONCE = 10**7


@dataclass(frozen=True)
class Timing:
    """The seconds of computation, and the bytes, of every bucket.

    Attributes:
        factor: (steps, workers), by which a worker's seconds in a step are multiplied.
        work: until the bucket's gradients are there, since those of the bucket before. The first includes the forward.
        after: the optimizer's step.
        coding: coding and decoding, for workers that begin a transfer.
        copies: copies to the CPU and back, for workers that begin a transfer with a detour.
        bytes: of the bucket's message.
    """

    factor: npt.NDArray[np.float64]
    work: Sequence[float]
    after: Sequence[float]
    coding: Sequence[float]
    copies: Sequence[float]
    bytes: Sequence[float]

    @cached_property
    def _sending(self) -> tuple[list[float], list[float]]:
        coded = [a + b for a, b in zip(self.after, self.coding, strict=True)]
        return coded, [a + b for a, b in zip(coded, self.copies, strict=True)]

    def after_and_sending(self, detour: bool) -> Sequence[float]:
        """``after``, coding and copies of each bucket."""
        return self._sending[detour]


@dataclass(frozen=True)
class Timeline:
    """The end of each step of each worker in seconds, of shape (steps, workers), and how long it waited in the step."""

    ends: npt.NDArray[np.float64]
    waited: npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class _FluidTransfer:
    """The transfer of one bucket: not begun, then queued, then in flight, then ended."""

    transfer: Transfer
    order: tuple[int, int, int]
    missing: int  # of its starters
    ready: float = 0.0
    moving: bool = False
    ended: float | None = None
    left: float = 1.0
    rate: float = 0.0
    at: float = 0.0
    version: int = 0
    stamp: int = 0
    waiting: list[int] = field(default_factory=list)


# A worker yields the flow that it waits for, and is sent the time at which that ended.
_Worker = Generator[_FluidTransfer, float, None]


class _Events:
    def __init__(
        self, rounds: Sequence[RoundTraffic], timing: Timing, capacity: Sequence[float], per_flow: Sequence[float]
    ) -> None:
        self._rounds, self._timing = rounds, timing
        self._capacity, self._per_flow = capacity, per_flow
        steps, workers = timing.factor.shape
        self._steps, self._buckets = steps, len(timing.work)
        self.ends = np.zeros((steps, workers))
        self.waited = np.zeros((steps, workers))
        self._flows: dict[tuple[int, int, int], _FluidTransfer] = {}
        self._events: list[tuple[float, int, int, _FluidTransfer, int]] = []
        self._count = 0
        self._busy: set[tuple[int, int]] = set()
        self._queued: dict[tuple[int, int], list[_FluidTransfer]] = {}
        self._on_link: list[list[_FluidTransfer]] = [[] for _ in capacity]
        # The rate of a flow on each link now; and a number per change, so that a flow on several links is updated once.
        self._share_of = list(per_flow)
        self._stamp = 0
        self._workers = [self._work(rank) for rank in range(workers)]
        self._running = workers

    def run(self) -> None:
        for rank in range(len(self._workers)):
            self._resume(rank, None)
        while self._events:
            time, _, kind, flow, version = heapq.heappop(self._events)
            if kind == 0:
                self._enqueue(flow, time)
            elif flow.version == version:
                self._end(flow, time)
        # No deadlock: the workers that wait for the earliest open transfer have begun it.
        assert self._running == 0

    # -- workers ------------------------------------------------------------------------------------------------------

    def _work(self, rank: int) -> _Worker:
        timing, buckets = self._timing, range(self._buckets)
        factors = timing.factor[:, rank].tolist()
        now, before = 0.0, [None] * self._buckets  # type: float, list[_FluidTransfer | None]
        for t in range(self._steps):
            factor, own = factors[t], self._rounds[t % len(self._rounds)]
            start, need = own.starts[rank], own.needs[rank]
            after = timing.after if start is None else timing.after_and_sending(own.transfers[start].detour)
            lost = 0.0
            for b in buckets:
                now += factor * timing.work[b]
                flow = before[b]
                if flow is not None:
                    ended = flow.ended if flow.ended is not None else (yield flow)
                    if ended > now:
                        lost += ended - now
                        now = ended
                now += factor * after[b]
                if start is not None:
                    self._begin(self._flow(t, b, start), now)
                before[b] = None if need is None else self._flow(t, b, need)
            self.ends[t, rank], self.waited[t, rank] = now, lost

    def _resume(self, rank: int, time: float | None) -> None:
        worker = self._workers[rank]
        try:
            flow = next(worker) if time is None else worker.send(time)
        except StopIteration:
            self._running -= 1
            return
        flow.waiting.append(rank)

    # -- flows --------------------------------------------------------------------------------------------------------

    def _flow(self, t: int, bucket: int, number: int) -> _FluidTransfer:
        key = (t, bucket, number)
        flow = self._flows.get(key)
        if flow is None:
            transfer = self._rounds[t % len(self._rounds)].transfers[number]
            flow = self._flows[key] = _FluidTransfer(transfer, key, len(transfer.starters))
        return flow

    def _begin(self, flow: _FluidTransfer, time: float) -> None:
        flow.missing -= 1
        flow.ready = max(flow.ready, time)
        if not flow.missing:
            self._push(flow.ready + flow.transfer.latency_s, 0, flow)

    def _push(self, time: float, kind: int, flow: _FluidTransfer) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, kind, flow, flow.version))

    def _enqueue(self, flow: _FluidTransfer, time: float) -> None:
        if self._busy.isdisjoint(flow.transfer.lanes):
            self._move(flow, time)
        else:
            for lane in flow.transfer.lanes:
                self._queued.setdefault(lane, []).append(flow)

    def _move(self, flow: _FluidTransfer, time: float) -> None:
        flow.moving, flow.at = True, time
        self._busy.update(flow.transfer.lanes)
        for link, _ in flow.transfer.loads:
            self._on_link[link].append(flow)
        self._share(flow, time)

    def _end(self, flow: _FluidTransfer, time: float) -> None:
        flow.ended = time
        for link, _ in flow.transfer.loads:
            self._on_link[link].remove(flow)
        self._busy.difference_update(flow.transfer.lanes)
        self._share(flow, time)
        waiting: list[_FluidTransfer] = []
        for lane in flow.transfer.lanes:
            queue = self._queued.get(lane)
            if queue:
                queue[:] = [other for other in queue if not other.moving]
                waiting += queue
        for other in sorted(waiting, key=attrgetter("order")):
            if not other.moving and self._busy.isdisjoint(other.transfer.lanes):
                self._move(other, time)
        for rank in flow.waiting:
            self._resume(rank, time)

    def _share(self, changed: _FluidTransfer, time: float) -> None:
        """Sets the rates of all flows on the links of ``changed``, which has begun or ended."""
        if not changed.transfer.loads:
            if changed.ended is None:
                self._push(time, 1, changed)
            return
        capacity, per_flow, on_link = self._capacity, self._per_flow, self._on_link
        for link, _ in changed.transfer.loads:
            self._share_of[link] = min(per_flow[link], capacity[link] / (len(on_link[link]) or 1))
        self._stamp += 1
        for link, _ in changed.transfer.loads:
            for flow in on_link[link]:
                if flow.stamp != self._stamp:
                    flow.stamp = self._stamp
                    self._set_rate(flow, time)

    def _set_rate(self, flow: _FluidTransfer, time: float) -> None:
        share_of = self._share_of
        transfer = flow.transfer
        rate = min([share_of[link] / copies for link, copies in transfer.loads])
        rate = min(rate, transfer.most) / self._timing.bytes[flow.order[1]]
        if rate == flow.rate:
            return
        if time > flow.at:
            # time > at avoids 0 * inf: a flow without a limit ends at once.
            flow.left = max(0.0, flow.left - (time - flow.at) * flow.rate)
        flow.at, flow.rate = time, rate
        flow.version += 1
        self._push(time + (flow.left / rate if rate < _INFINITY else 0.0), 1, flow)


def simulate(rounds: Sequence[RoundTraffic], timing: Timing, capacity: Sequence[float], per_flow: Sequence[float]) -> Timeline:
    """Simulates all steps. A bucket's transfer is waited for in the next step.

    Args:
        rounds: of a period; they repeat.
        timing: the computation.
        capacity: bytes per second of every link.
        per_flow: bytes per second that one flow can have of every link.
    """
    simulation = _Events(rounds, timing, capacity, per_flow)
    simulation.run()
    return Timeline(simulation.ends, simulation.waited)


def simulate_all_reduce(timing: Timing, duration: Callable[[float], float]) -> Timeline:
    """The steps of DDP, a recursion over the buckets.

    A bucket is summed when all workers have its gradients and the previous bucket is done. Optimizers wait for all buckets.

    Args:
        timing: the computation; ``coding`` and ``copies`` are not used.
        duration: seconds of the all-reduce of a number of bytes.
    """
    steps, workers = timing.factor.shape
    ends, waited = np.zeros((steps, workers)), np.zeros((steps, workers))
    now = np.zeros(workers)
    seconds = np.array([duration(size) for size in timing.bytes])
    until, after = np.cumsum(timing.work), float(np.sum(timing.after))
    # The end is that of the slowest chain: some bucket becomes ready, then it and all later ones are summed one after another.
    rest = np.cumsum(seconds[::-1])[::-1]
    some = max(1, _AT_ONCE // workers)
    for t in range(steps):
        factor = timing.factor[t]
        done = 0.0
        for first in range(0, len(until), some):
            part = slice(first, first + some)
            ready = (now[:, None] + factor[:, None] * until[part]).max(axis=0)
            done = max(done, float((ready + rest[part]).max()))
        own = now + factor * until[-1]
        waited[t] = np.maximum(done - own, 0.0)
        now = np.maximum(done, own) + factor * after
        ends[t] = now
    return Timeline(ends, waited)
