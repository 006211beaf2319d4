"""Colours for the edges of a graph, so that edges of one colour have no end in common: each colour is a round of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["colour_edges", "connected_parts"]

_Link = tuple[int, int]


def colour_edges(n: int, links: Sequence[_Link]) -> list[list[_Link]]:
    """The links, in as many lists as there are colours; no two links of a list have an end in common.

    With d the largest degree: d colours for a bipartite graph (König), else at most d + 1 (Misra and Gries, "A constructive
    proof of Vizing's theorem", Information Processing Letters 41, 1992), or fewer where taking the first free colour, link by
    link, needs fewer. The same for the same set of links, in whatever order they come.

    Args:
        n: number of vertices 0 to n - 1.
        links: pairs of different vertices, each at most once.
    """
    links = sorted((min(link), max(link)) for link in links)
    if _is_bipartite(n, links):
        return _colour_bipartite(n, links).rounds()
    greedy = _Colouring(n)
    for u, v in links:
        greedy.paint(u, v, greedy.free(u, v))
    first = greedy.rounds()
    if len(first) == max(len(others) for others in _neighbours(n, links)):
        return first
    return _colour_any(n, links).rounds()


def connected_parts(n: int, links: Sequence[_Link]) -> list[list[int]]:
    """The vertices 0 to n - 1 in their connected parts, in the order of the parts' first vertices."""
    near = _neighbours(n, links)
    parts: list[list[int]] = []
    seen = [False] * n
    for first in range(n):
        if seen[first]:
            continue
        part, seen[first] = [first], True
        for vertex in part:
            for other in near[vertex]:
                if not seen[other]:
                    seen[other] = True
                    part.append(other)
        parts.append(sorted(part))
    return parts


def _neighbours(n: int, links: Sequence[_Link]) -> list[list[int]]:
    near: list[list[int]] = [[] for _ in range(n)]
    for u, v in links:
        near[u].append(v)
        near[v].append(u)
    return near


def _is_bipartite(n: int, links: Sequence[_Link]) -> bool:
    near = _neighbours(n, links)
    side: list[int | None] = [None] * n
    for part in connected_parts(n, links):
        side[part[0]] = 0
        reached = [part[0]]
        for vertex in reached:
            for other in near[vertex]:
                if side[other] is None:
                    side[other] = 1 - (side[vertex] or 0)
                    reached.append(other)
    return all(side[u] != side[v] for u, v in links)


class _Colouring:
    """Which colour (from 0) leads from each vertex to which neighbour, so far."""

    def __init__(self, n: int) -> None:
        self.at: list[dict[int, int]] = [{} for _ in range(n)]
        self._taken = [0] * n  # the colours at each vertex, as bits

    def free(self, u: int, v: int | None = None) -> int:
        """The first colour that is neither at u nor at v."""
        taken = self._taken[u] if v is None else self._taken[u] | self._taken[v]
        return (~taken & taken + 1).bit_length() - 1

    def paint(self, u: int, v: int, colour: int) -> None:
        self.at[u][colour], self.at[v][colour] = v, u
        self._taken[u] |= 1 << colour
        self._taken[v] |= 1 << colour

    def wipe(self, u: int, v: int, colour: int) -> None:
        del self.at[u][colour], self.at[v][colour]
        self._taken[u] ^= 1 << colour
        self._taken[v] ^= 1 << colour

    def swap(self, start: int, first: int, second: int) -> None:
        """Swaps two colours along the path from ``start`` whose links have the colour ``first``, ``second``, ``first``, …"""
        path: list[tuple[int, int, int, int]] = []
        u, colour, other = start, first, second
        while (v := self.at[u].get(colour)) is not None:
            path.append((u, v, colour, other))
            u, colour, other = v, other, colour
        for u, v, colour, _ in path:
            self.wipe(u, v, colour)
        for u, v, _, other in path:
            self.paint(u, v, other)

    def rounds(self) -> list[list[_Link]]:
        """The links of each colour that is in use, in the order of the colours."""
        colours = sorted({colour for at in self.at for colour in at})
        return [[(u, at[c]) for u, at in enumerate(self.at) if c in at and u < at[c]] for c in colours]


def _colour_bipartite(n: int, links: Sequence[_Link]) -> _Colouring:
    """With as many colours as the largest degree."""
    done = _Colouring(n)
    for u, v in links:
        at_u, at_v = done.free(u), done.free(v)
        if at_u in done.at[v]:
            # The path from v with these two colours ends elsewhere than in u: in u it would close an odd cycle.
            done.swap(v, at_u, at_v)
        done.paint(u, v, at_u)
    return done


def _colour_any(n: int, links: Sequence[_Link]) -> _Colouring:
    """With at most one colour more than the largest degree."""
    done = _Colouring(n)
    largest = max(len(others) for others in _neighbours(n, links))
    for u, v in links:
        # A fan: each link from u after the first has a colour that is free at the vertex before it.
        fan, in_fan = [v], {v}
        while (colour := done.free(u, fan[-1])) > largest:
            at = done.at[fan[-1]]
            further = next((w for free, w in sorted(done.at[u].items()) if free not in at and w not in in_fan), None)
            if further is None:
                break
            fan.append(further)
            in_fan.add(further)
        if colour > largest:
            ours, colour = done.free(u), done.free(fan[-1])
            # After the swap `colour` is free at u. Up to the first vertex where it is free too the links still are a fan.
            done.swap(u, colour, ours)
            end = next(i for i, w in enumerate(fan) if colour not in done.at[w])
            fan = fan[: end + 1]
        _rotate(done, u, fan)
        done.paint(u, fan[-1], colour)
    return done


def _rotate(done: _Colouring, u: int, fan: list[int]) -> None:
    """Each link of the fan gets the colour of the one after it; the last is left without one."""
    colour_to = {w: colour for colour, w in done.at[u].items()}
    for w in fan[1:]:
        done.wipe(u, w, colour_to[w])
    for w, after in pairwise(fan):
        done.paint(u, w, colour_to[after])
