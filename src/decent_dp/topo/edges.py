"""Edges, the checks of a round, and rounds that are made when they are looked up."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

__all__ = ["Edge", "EdgeOfHook", "PairRounds", "Pairs"]

Pairs = Iterable[tuple[int, int]]

_SHOWN_EDGES, _SHOWN_RANKS = 16, 16


@dataclass
class Edge:
    """A group of workers that mix in one round.

    Each member keeps ``weight`` of its own value and takes `peer_weight` of each other member's. One rank alone,
    with weight 1, is idle. The topology checks the values, as it can name the round.

    Args:
        ranks: the members, as ranks of the process group; each at most once, in any order.
        weight: the weight of a member's own value, in [0, 1]. ``1 / len(ranks)`` averages the group.
        group: a process group of these workers, for the user's own collectives; the library makes and uses none. Ignored in
            comparisons.
    """

    ranks: list[int]
    weight: float
    group: Any = field(default=None, compare=False, repr=False)

    @property
    def peer_weight(self) -> float:
        """The weight of each other member's value: ``(1 - weight) / (len(ranks) - 1)``; 0.0 for one rank alone."""
        return (1.0 - self.weight) / (len(self.ranks) - 1) if len(self.ranks) > 1 else 0.0


class EdgeOfHook(Edge):
    """An edge for a ``pre_average_hook``, whose ``group`` is looked up when it is read.

    Args:
        find: returns the process group of its workers, or None. (None would mean all workers to ``torch.distributed``: a
            collective over the edge would silently be one over all.)
    """

    def __init__(self, ranks: list[int], weight: float, find: Callable[[], Any]) -> None:
        self.ranks, self.weight, self._find = ranks, weight, find

    @property
    def group(self) -> Any:
        """The process group of these workers.

        Raises:
            RuntimeError: there is none.
        """
        found = self._find()
        if found is None:
            raise RuntimeError(
                f"the edge ({_few(self.ranks)}) has no process group: none are made with faults=, with a process_group of your "
                "own, for a topology without a period (or beyond its 64th round), and between workers that are threads. Use "
                "comm_buffer, the values of the others, or give the edge a group in a topology of your own: Edge(ranks, "
                "weight, group)."
            )
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edge) and (self.ranks, self.weight) == (other.ranks, other.weight)

    __hash__ = None  # type: ignore[assignment]  # as of any Edge, which can be changed


def _few(ranks: Iterable[int]) -> str:
    """Ranks in words, the first few of them when they are many."""
    ranks = list(ranks)
    words = " ".join(map(str, ranks[:_SHOWN_RANKS]))
    return words if len(ranks) <= _SHOWN_RANKS else f"{words} … ({len(ranks)} in all)"


def _words(edges: list[Edge]) -> str:
    """Edges in words, the first few of them when they are many: ``(0 1) 0.5  (2) idle``."""
    words = [
        f"({_few(edge.ranks)}) " + ("idle" if len(edge.ranks) == 1 else f"{edge.weight:.4g}") for edge in edges[:_SHOWN_EDGES]
    ]
    return "  ".join(words + [f"… ({len(edges)} edges in all)"] * (len(edges) > _SHOWN_EDGES))


def _checked_edge(edge: Any, where: str) -> Edge:
    """The edge in its normal form: a list of ints and a float."""
    if not isinstance(edge, Edge):
        raise ValueError(f"{where} holds {edge!r}, which is no Edge: write Edge(ranks=[...], weight=...)")
    try:
        ranks = [operator.index(rank) for rank in edge.ranks]
    except TypeError:
        raise ValueError(f"{where}: the ranks of an edge must be a list of integers, got {edge.ranks!r}") from None
    if not ranks:
        raise ValueError(f"{where}: an edge needs at least one rank, got {edge}; leave it out")
    weight: Any = edge.weight
    if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 <= float(weight) <= 1:  # nan is not
        raise ValueError(
            f"{where}, edge ({_few(ranks)}): weight must be a number in [0, 1], got {weight!r}; "
            f"1 / len(ranks) = {1 / len(ranks):.6g} averages the group"
        )
    if len(ranks) == 1 and weight != 1:
        raise ValueError(
            f"{where}: rank {ranks[0]} is alone in its edge with weight {weight!r}; "
            "no other rank gives the rest, so use weight=1 for an idle rank"
        )
    return Edge(ranks, float(weight), edge.group)


def _checked_round(edges: object, world_size: int, where: str) -> list[Edge]:
    """The round in its normal form.

    Raises:
        ValueError: it is no partition of ``range(world_size)`` into valid edges; the message starts with ``where``.
    """
    if isinstance(edges, Edge) or not isinstance(edges, Iterable):
        raise ValueError(f"{where} is {edges!r}, not a list of edges: a round is written [Edge(...), Edge(...), ...]")
    checked = [_checked_edge(edge, where) for edge in edges]
    seen: dict[int, Edge] = {}
    for edge in checked:
        for rank in edge.ranks:
            if not 0 <= rank < world_size:
                raise ValueError(
                    f"{where}, edge ({_few(edge.ranks)}): rank {rank} is out of range; "
                    f"the ranks of the {world_size} workers are 0 to {world_size - 1}"
                )
            if rank in seen:
                raise ValueError(
                    f"{where}: rank {rank} appears twice, in edge ({_few(seen[rank].ranks)}) "
                    f"and in edge ({_few(edge.ranks)}); each rank belongs to exactly one edge of a round"
                )
            seen[rank] = edge
    if len(seen) < world_size:
        missing = [rank for rank in range(world_size) if rank not in seen]
        raise ValueError(
            f"{where}: missing from all edges: rank {_few(missing)}; each rank belongs to exactly one edge of a round, "
            f"and Edge([{missing[0]}], 1.0) leaves rank {missing[0]} idle"
        )
    return checked


class PairRounds(Sequence[list[Edge]]):
    """The rounds of a period in which pairs average (weight 1/2) and all others are idle, each made when it is looked up.

    So an odd ring of n workers, which has n rounds, does not hold n x n edges.

    Args:
        n: number of workers.
        period: number of rounds.
        pairs_of: the pairs of round t, 0 <= t < period; no worker twice.
        idle_first: the idle edges of a round come before the pairs.
    """

    def __init__(self, n: int, period: int, pairs_of: Callable[[int], Pairs], *, idle_first: bool = False) -> None:
        self._n, self._period, self._pairs_of, self._idle_first = n, period, pairs_of, idle_first

    def __len__(self) -> int:
        return self._period

    def __getitem__(self, t: Any) -> Any:  # of a slice, a list of rounds
        if isinstance(t, slice):
            return [self[i] for i in range(*t.indices(self._period))]
        t = range(self._period)[t]
        pairs = [sorted(pair) for pair in self._pairs_of(t)]
        busy = {rank for pair in pairs for rank in pair}
        idle = [Edge([rank], 1.0) for rank in range(self._n) if rank not in busy]
        mixing = [Edge(pair, 0.5) for pair in pairs]
        return idle + mixing if self._idle_first else mixing + idle
