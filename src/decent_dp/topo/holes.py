"""Holes: the edges that are idle for a round because an end of them is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decent_dp._checks import check_integer

from .abstract import Topology
from .edges import Edge
from .schedule import check_pairs

__all__ = ["WithoutTopology", "with_holes", "without"]


def with_holes(edges: Iterable[Edge], is_hole: Callable[[Edge], bool]) -> list[Edge]:
    """A round in which the members of each edge that is a hole sit out."""
    return [part for edge in edges for part in ([Edge([rank], 1.0) for rank in edge.ranks] if is_hole(edge) else [edge])]


class WithoutTopology(Topology):
    """A topology of pairs after some of its workers are gone: the result of `without`.

    Args:
        inner: the topology of all workers.
        gone: ranks in it.

    Attributes:
        survivors: their ranks in ``inner``; here they are 0, 1, ... in this order.
    """

    def __init__(self, inner: Topology, gone: Iterable[int]) -> None:
        if not isinstance(inner, Topology):
            raise TypeError(f"without takes a Topology, got {inner!r}")
        n = inner._world_size
        self._gone = {check_integer("without: a rank", rank, 0) for rank in gone}
        if self._gone and max(self._gone) >= n:
            raise ValueError(f"without: rank {max(self._gone)} is out of range; the ranks of the {n} workers are 0 to {n - 1}")
        if len(self._gone) == n:
            raise ValueError(f"without: all {n} workers are gone; leave one at least")
        check_pairs(inner, "without")
        self.survivors = [rank for rank in range(n) if rank not in self._gone]
        self._inner, self._place = inner, {rank: place for place, rank in enumerate(self.survivors)}
        super().__init__(1, world_size=len(self.survivors), rank=0)

    @property
    def period(self) -> int | None:
        return self._inner.period

    def round(self, t: int) -> list[Edge]:
        edges = with_holes(self._inner._checked(t), lambda edge: not self._gone.isdisjoint(edge.ranks))
        place = self._place
        return [Edge([place[rank] for rank in edge.ranks], edge.weight) for edge in edges if edge.ranks[0] in place]

    def _title(self) -> str:
        gone = ", ".join(map(str, sorted(self._gone)))
        return f"{self._inner._title()} without {gone}" if gone else self._inner._title()

    def __repr__(self) -> str:
        return f"without({self._inner!r}, {sorted(self._gone)})"


def without(topology: Topology, gone: Iterable[int]) -> WithoutTopology:
    """A topology of pairs as its survivors see it when these workers are gone, for `analyse` and `consensus_error`.

    Each edge of a worker that is gone is a hole: its partner sits that round out, and all others mix as before. So the mean
    over the survivors never moves. ``analyse(...).rate`` says how fast they come together, and is 1.0 if they are cut in parts.

    Raises:
        TypeError, ValueError: a rank is no worker, nobody is left, or the topology mixes groups.
    """
    return WithoutTopology(topology, gone)
