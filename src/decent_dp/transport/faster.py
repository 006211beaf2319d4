"""Whether gloo is faster than the library's own connections: measured, with one answer on all workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from decent_dp.compression import FlatTensor, Lossless
from decent_dp.topo import Edge
from decent_dp.transport.base import Control, ExchangeId, ExchangeRequest, Handle

__all__ = ["Comparison", "compare"]

Start: TypeAlias = Callable[[Edge, ExchangeRequest], Handle]

# Float32 values of a message: of the first ones, and at most of those that are compared.
_PROBE, _COMPARED = 2**18, 2**22
# Seconds that a first one takes over a link of about 1 Gbit/s. Pairs keep slower links full over the own connections.
_SLOW = 0.02
# Seconds that a message may take, and how many are compared. The fastest counts: what delays one is something else.
_LONGEST, _TURNS = 3.0, 3


@dataclass(frozen=True)
class Comparison:
    """Seconds of an exchange of ``nbytes`` bytes, the mean over the workers; ``gloo`` is NaN where it is not measured."""

    nbytes: int
    own: float
    gloo: float

    @property
    def gloo_is_faster(self) -> bool:
        return self.gloo < self.own

    def __str__(self) -> str:
        size = f"{self.nbytes / 2**20:.3g} MiB"
        if math.isnan(self.gloo):
            return f"own connections ({size} in {1e3 * self.own:.3g} ms: the links are the limit)"
        times = f"{size} in {1e3 * self.gloo:.3g} ms over gloo, in {1e3 * self.own:.3g} ms over own connections"
        return f"{'gloo' if self.gloo_is_faster else 'own connections'} ({times})"


def compare(control: Control, rank: int, edges: Sequence[Edge], own: Start, gloo: Start, *, groups: bool) -> Comparison | None:
    """Exchanges along one of this worker's ``edges``, both ways in turns. Called by all workers together.

    Args:
        edges: this worker's, by round; as many on all workers.
        own, gloo: start an exchange.
        groups: compare edges of more than two workers, else those of two.

    Returns:
        The same on all workers; None if no worker has such an edge.
    """
    fits = [len(edge.ranks) > 2 if groups else len(edge.ranks) == 2 for edge in edges]
    counts = [sum(column) for column in zip(*control.gather(fits), strict=True)]
    if not any(counts):
        return None
    chosen = counts.index(max(counts))  # the round in which most workers have such an edge
    edge = edges[chosen] if fits[chosen] else None
    rounds = iter(range(-4 * _TURNS, 0))  # before the first one of the run

    def timed(start: Start, numel: int) -> float:
        round_ = next(rounds)
        if edge is None:
            return 0.0
        values = torch.zeros(numel, device="cpu")
        compression = Lossless([FlatTensor(0, numel)], values.dtype, values.device)
        sent, received = (torch.zeros(compression.nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
        request = ExchangeRequest(compression, [values], sent, received, b"", rank, ExchangeId(round_, int(groups)))
        compression.begin(tuple(sorted(edge.ranks)), rank, round_)
        began = time.perf_counter()
        start(edge, request).wait()
        return time.perf_counter() - began

    # The first exchange of each kind connects.
    for start in (own, gloo):
        timed(start, _PROBE)
    slowest = max(control.gather(timed(own, _PROBE)))
    if slowest > _SLOW and not groups:
        return Comparison(4 * _PROBE, slowest, math.nan)
    numel = int(min(_COMPARED, _PROBE * max(1.0, _LONGEST / slowest)))
    times = [[timed(start, numel) for start in (own, gloo)] for _ in range(_TURNS)]
    found = control.gather([min(column) for column in zip(*times, strict=True)])
    return Comparison(4 * numel, *(sum(column) / counts[chosen] for column in zip(*found, strict=True)))
