"""Whether gloo is faster than the library's own connections: measured, with one answer on all workers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from decent_dp.compression import Compression
from decent_dp.topo import Edge
from decent_dp.transport.base import Control, ExchangeId, ExchangeRequest, Handle

__all__ = ["Comparison", "compare"]

Start: TypeAlias = Callable[[Edge, ExchangeRequest], Handle]

# Bytes of the first messages, and the most of those that are compared.
_PROBE, _COMPARED = 2**20, 2**24
# Seconds that a first one takes over a link of 0.4 Gbit/s: pairs keep slower ones full over the own connections. And those
# above which the comparison would take minutes.
_SLOW, _TOO_SLOW = 0.02, 1.0
# Seconds that a message may take, and how many are made. The fastest counts: what delays one is something else.
_LONGEST, _TURNS = 3.0, 3
# The part of the time of the own connections that gloo may take at most. They carry checksums and notice a frozen worker in
# ten seconds, so a tie is theirs.
_WORTH_IT = 0.95


@dataclass(frozen=True)
class Comparison:
    """Seconds of an exchange of ``nbytes`` bytes, the mean over the workers; ``gloo`` is NaN where it is not measured."""

    nbytes: int
    own: float
    gloo: float

    @property
    def gloo_is_faster(self) -> bool:
        return self.gloo < _WORTH_IT * self.own

    def __str__(self) -> str:
        size = f"{self.nbytes / 2**20:.3g} MiB"
        if math.isnan(self.gloo):
            return f"own connections ({size} in {1e3 * self.own:.3g} ms: the links are the limit)"
        times = f"{size} in {1e3 * self.gloo:.3g} ms over gloo, in {1e3 * self.own:.3g} ms over own connections"
        return f"{'gloo' if self.gloo_is_faster else 'own connections'} ({times})"


def compare(
    control: Control,
    rank: int,
    edges: Sequence[Edge | None],
    own: Start,
    gloo: Start,
    make: Callable[[int], Compression],
    *,
    group: bool,
) -> Comparison | None:
    """Exchanges along one of this worker's ``edges``, both ways in turns. Called by all workers together.

    Args:
        edges: this worker's, by round; as many on all workers. None where it has no edge of the kind that is compared.
        own, gloo: start an exchange.
        make: returns the compression for so many values.
        group: edges have more than two members.

    Returns:
        The same on all workers; None if no worker has such an edge.
    """
    counts = [sum(column) for column in zip(*control.gather([edge is not None for edge in edges]), strict=True)]
    if not any(counts):
        return None
    chosen = counts.index(max(counts))  # the round in which most workers have such an edge
    edge = edges[chosen]
    rounds = itertools.count(-8 * _TURNS)  # before the first one of the run

    value = (make(2048).nbytes - make(1024).nbytes) / 1024  # the bytes of one

    def timed(start: Start, nbytes: float) -> float:
        round_ = next(rounds)
        if edge is None:
            return 0.0
        compression = make(int(nbytes / value))
        values = torch.zeros(int(nbytes / value), dtype=compression.dtype, device="cpu")
        sent, received = (torch.zeros(compression.nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        request = ExchangeRequest(compression, [values], sent, received, b"", rank, ExchangeId(round_, 0))
        compression.begin(tuple(sorted(edge.ranks)), rank, round_)
        began = time.perf_counter()
        start(edge, request).wait()
        return time.perf_counter() - began

    def slowest(turns: int) -> float:
        return float(max(control.gather(min(timed(own, _PROBE) for _ in range(turns)))))

    limit = _TOO_SLOW if group else _SLOW
    # The first exchange of each way connects, and on a very slow link one is enough.
    first = slowest(1)
    probe = first if first > 2 * _TOO_SLOW else slowest(_TURNS)
    if probe > limit:
        return Comparison(_PROBE, probe, math.nan)
    timed(gloo, _PROBE)
    nbytes = int(min(_COMPARED, _PROBE * max(1.0, _LONGEST / probe)))
    times = [[timed(start, nbytes) for start in (own, gloo)] for _ in range(_TURNS)]
    found = control.gather([min(column) for column in zip(*times, strict=True)])
    return Comparison(nbytes, *(sum(column) / counts[chosen] for column in zip(*found, strict=True)))
