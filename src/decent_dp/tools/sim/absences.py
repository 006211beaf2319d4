"""Replicas that are away, and pairs that do not reach each other."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from decent_dp.topo import Edge
from decent_dp.topo.holes import with_holes

__all__ = ["RANKS_TYPE", "Faults"]

RANKS_TYPE: TypeAlias = "int | Iterable[int]"


class Faults:
    """Who of n replicas is away, and which pairs are cut; nobody and none at first.

    Attributes:
        away: replicas that take no part.
        cut: pairs (a, b), a < b, of replicas that do not reach each other.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self.away: set[int] = set()
        self.cut: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.away or self.cut)

    @property
    def present(self) -> list[int]:
        """The replicas that take part."""
        return [i for i in range(self._n) if i not in self.away]

    @property
    def rows(self) -> list[int] | None:
        """The same; None for all, so that stacked tensors need not be copied."""
        return self.present if self.away else None

    def ranks(self, which: RANKS_TYPE) -> list[int]:
        """One replica or several, as a list. Raises IndexError for one that is none."""
        ranks = [operator.index(i) for i in (which if isinstance(which, Iterable) else [which])]
        for i in ranks:
            if not 0 <= i < self._n:
                raise IndexError(f"replica {i} is out of range: the replicas are 0 to {self._n - 1}")
        return ranks

    def pairs(self, a: RANKS_TYPE, b: RANKS_TYPE) -> set[tuple[int, int]]:
        """All pairs of one of ``a`` and one of ``b``. Raises as ``ranks``, and ValueError for one that is in both."""
        own, others = self.ranks(a), self.ranks(b)
        if both := set(own) & set(others):
            raise ValueError(f"replica {min(both)} is on both sides of the cut: give two sides without a common replica")
        return {(min(pair), max(pair)) for pair in itertools.product(own, others)}

    def is_hole(self, edge: Edge) -> bool:
        """Whether the members of an edge do not all reach each other now."""
        if len(edge.ranks) == 1 or not self:
            return False
        if len(edge.ranks) > 2:  # of a topology without a period not all rounds were seen
            raise ValueError(
                f"a replica is away or cut off, which needs a topology of pairs, and a round has the edge {edge.ranks}"
            )
        a, b = sorted(edge.ranks)
        return a in self.away or b in self.away or (a, b) in self.cut

    def edges(self, edges: list[Edge]) -> list[Edge]:
        """A round of those who take part."""
        if not self:
            return edges
        return [edge for edge in with_holes(edges, self.is_hole) if edge.ranks[0] not in self.away]

    @contextmanager
    def standing_still(self, *stacked: MutableMapping[Any, Any]) -> Iterator[None]:
        """Restores the rows of those who are away, in all tensors (n, ...) of these mappings, after all rows were computed."""
        rows = sorted(self.away)
        kept = [
            (tensors, key, value.detach()[rows])
            for tensors in (stacked if rows else ())
            for key, value in tensors.items()
            if isinstance(value, Tensor) and value.ndim > 0
        ]
        yield
        with torch.no_grad():
            for tensors, key, values in kept:
                tensors[key].detach()[rows] = values

    def of_present(self, values: Tensor) -> Tensor:
        """Values (n,) with NaN for those who are away."""
        if not self.away:
            return values
        marked = values.clone()
        marked[sorted(self.away)] = torch.nan
        return marked
