"""Rounds as arrays, applied to the values of all workers as sums over groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, cycle, islice, repeat

import numpy as np
import numpy.typing as npt

from .base import Topology
from .compose import EveryTopology, SwitchTopology
from .edges import Edge, Pairs

__all__ = ["Array", "Round", "all_rounds", "apply", "too_long"]

Array = npt.NDArray[np.float64]
_Numbers = npt.NDArray[np.int64]

# Workers times rounds of a period that are held.
_MOST_HELD = 2**24


class Round:
    """The edges of a round in which somebody mixes.

    Attributes:
        n: number of workers.
        order: those who mix, edge by edge.
        sizes: of the edges.
    """

    def __init__(self, n: int, order: _Numbers, sizes: _Numbers, own: Array, peer: Array) -> None:
        self.n, self.order, self.sizes = n, order, sizes
        self._pairs = bool((sizes == 2).all())
        # Of the average of each edge nothing but its members is needed.
        self._halves = self._pairs and bool((own == 0.5).all())
        if self._pairs:
            self._a, self._b = order[::2].copy(), order[1::2].copy()
        if not self._halves:
            self._own, self._peer = own[:, None], peer[:, None]

    @classmethod
    def of_pairs(cls, n: int, pairs: Pairs) -> Round:
        """Of pairs that average."""
        halves = np.full(len(pairs), 0.5)
        return cls(n, pairs.reshape(-1), np.full(len(pairs), 2), halves, halves)

    @classmethod
    def of_edges(cls, n: int, edges: Iterable[Edge]) -> Round:
        """Of any edges, those who are alone left out."""
        edges = [edge for edge in edges if len(edge.ranks) > 1]
        sizes = np.fromiter((len(edge.ranks) for edge in edges), np.int64, len(edges))
        order = np.fromiter(chain.from_iterable(edge.ranks for edge in edges), np.int64, int(sizes.sum()))
        own = np.fromiter((edge.weight for edge in edges), np.float64, len(edges))
        peer = np.fromiter((edge.peer_weight for edge in edges), np.float64, len(edges))
        return cls(n, order, sizes, own, peer)

    @property
    def is_idle(self) -> bool:
        """Nobody mixes."""
        return not len(self.order)

    @property
    def pairs(self) -> tuple[_Numbers, _Numbers] | None:
        """The one and the other worker of each edge, if all are pairs."""
        return (self._a, self._b) if self._pairs else None

    @property
    def starts(self) -> _Numbers:
        """Where the edges start in ``order``."""
        return np.cumsum(self.sizes) - self.sizes

    @property
    def group(self) -> _Numbers:
        """The number of the edge, for each of ``order``."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def mix(self, x: Array) -> None:
        """Values of all workers, of shape (n, m), become the mixing matrix times them."""
        if self.is_idle:
            return
        if self._halves:
            mean = x.take(self._a, axis=0)  # much faster than x[...]
            mean += x.take(self._b, axis=0)
            mean *= 0.5
            x[self._a], x[self._b] = mean, mean
        elif self._pairs:
            a, b = x.take(self._a, axis=0), x.take(self._b, axis=0)
            x[self._a], x[self._b] = self._own * a + self._peer * b, self._own * b + self._peer * a
        else:
            own, group = x.take(self.order, axis=0), self.group
            sums = np.add.reduceat(own, self.starts, axis=0)
            x[self.order] = (self._own - self._peer)[group] * own + (self._peer * sums)[group]


def apply(rounds: Sequence[Round], x: Array, *, transposed: bool = False) -> Array:
    """The product of the rounds, W_{T-1} ... W_0, or its transpose, times ``x``. Each round's matrix is symmetric."""
    x = x.copy()
    for round_ in reversed(rounds) if transposed else rounds:
        round_.mix(x)
    return x


def too_long(topology: Topology) -> bool:
    """Whether a period is more than is held; so is one without end."""
    return topology.period is None or topology.period * topology._world_size > _MOST_HELD


def all_rounds(topology: Topology) -> Iterator[Round]:
    """The rounds, one after another, without end. Those of a period, and idle ones, are made once."""
    n = topology._world_size
    if type(topology) is EveryTopology:
        idle = Round.of_edges(n, [])
        for round_ in all_rounds(topology._inner):
            yield from repeat(idle, topology._h - 1)
            yield round_
    elif type(topology) is SwitchTopology:
        for part, length in zip(topology._parts, topology._lengths, strict=False):
            yield from islice(all_rounds(part), length)
        yield from all_rounds(topology._parts[-1])
    elif too_long(topology):
        yield from (_make(topology, t) for t in count())
    else:
        made = []
        for t in range(topology.period or 0):
            made.append(_make(topology, t))
            yield made[-1]
        yield from cycle(made)


def _make(topology: Topology, t: int) -> Round:
    pairs = topology._pairs(t)
    if pairs is not None:
        return Round.of_pairs(topology._world_size, pairs)
    return Round.of_edges(topology._world_size, topology._checked(t))
