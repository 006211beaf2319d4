"""The end of each step of each worker: a recursion over steps and buckets.

Between pairs and groups: at a bucket's turn its exchange of the previous step is waited for, then the bucket is mixed, stepped
and sent. A transfer begins when all its starters have, and when the one before it on each of its lanes has ended. It takes its
latency, and its bytes over the busiest of its links, which it shares with all transfers of its round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .describe import Cluster
from .traffic import Array, RoundTraffic, seconds_per_byte

__all__ = ["Array", "Timing", "all_reduce_steps", "exchange_steps"]


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

    factor: Array
    work: Array
    after: Array
    coding: Array
    copies: Array
    bytes: Array


class _Moves:
    """The transfers of a round, as arrays over transfers and workers."""

    def __init__(self, cluster: Cluster, made: RoundTraffic) -> None:
        self.starters, self.first_starter = _flat(each.starters for each in made.transfers)
        self.lanes, self.first_lane = _flat([2 * rank + kind for rank, kind in each.lanes] for each in made.transfers)
        self.lane_counts = [len(each.lanes) for each in made.transfers]
        self.latency = np.array([each.latency_s for each in made.transfers])
        self.per_byte = np.array(seconds_per_byte(cluster, made.transfers))
        self.begins = np.array([start is not None for start in made.starts])
        self.detours = np.array([start is not None and made.transfers[start].detour for start in made.starts])
        # The last place is for workers that wait for nothing.
        self.needs = np.array([len(made.transfers) if need is None else need for need in made.needs])


def _flat(parts: Iterable[Sequence[int]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The parts one after another, and where each begins."""
    parts = list(parts)
    sizes = np.array([len(part) for part in parts], np.intp)
    return np.array([one for part in parts for one in part], np.intp), np.cumsum(sizes) - sizes


def exchange_steps(cluster: Cluster, rounds: Sequence[RoundTraffic], timing: Timing) -> tuple[Array, Array]:
    """The end of each step of each worker in seconds, and how long the worker waited in it: of shape (steps, workers). The
    rounds are those of a period, and repeat."""
    moves = [_Moves(cluster, made) for made in rounds]
    ends, waited = np.zeros((2, *timing.factor.shape))
    n = ends.shape[1]
    now, lanes = np.zeros(n), np.zeros(2 * n)
    arrived = np.zeros((len(timing.work), n))
    for t, factor in enumerate(timing.factor):
        own = moves[t % len(moves)]
        for b, nbytes in enumerate(timing.bytes):
            now = now + factor * timing.work[b]
            late = np.maximum(arrived[b] - now, 0.0)
            waited[t] += late
            now += late + factor * (timing.after[b] + own.begins * timing.coding[b] + own.detours * timing.copies[b])
            if not len(own.latency):
                continue
            begun = np.maximum.reduceat(now[own.starters], own.first_starter) + own.latency
            free = np.maximum.reduceat(lanes[own.lanes], own.first_lane)
            ended = np.maximum(begun, free) + nbytes * own.per_byte
            lanes[own.lanes] = np.repeat(ended, own.lane_counts)
            arrived[b] = np.append(ended, 0.0)[own.needs]
        ends[t] = now
    return ends, waited


def all_reduce_steps(timing: Timing, groups: int, seconds: Array) -> tuple[Array, Array]:
    """As ``exchange_steps``, of DDP in each of equally large groups of neighbouring workers.

    A bucket is summed when all workers of the group have its gradients and the bucket before is done, in ``seconds`` of each
    bucket. Optimizers wait for all. Of the timing only ``work`` and ``after`` count.
    """
    factor = timing.factor.reshape(len(timing.factor), groups, -1)
    until, rest = np.cumsum(timing.work), np.cumsum(seconds[::-1])[::-1]
    # Buckets become ready one after another and are summed one after another: the slowest chain decides. Between the second
    # bucket and the last but one both grow by equal steps, so that it begins with one of those two, the first or the last.
    some = sorted({i % len(until) for i in (0, 1, -2, -1) if -len(until) <= i < len(until)})
    ends, waited = np.zeros((2, *factor.shape))
    now = np.zeros(factor.shape[1:])
    for t, own in enumerate(factor):
        ready = (now[..., None] + own[..., None] * until[some]).max(axis=1)
        done = (ready + rest[some]).max(axis=1)[:, None]
        waited[t] = done - (now + own * until[-1])
        now = done + own * timing.after.sum()
        ends[t] = now
    return ends.reshape(timing.factor.shape), waited.reshape(timing.factor.shape)
