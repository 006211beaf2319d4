"""Topologies from graphs: the links of a graph in rounds of pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

from .abstract import Topology, _current_worker
from .edges import PairRounds, _few

__all__ = ["GraphTopology", "colour_edges"]

_Link = tuple[int, int]


class GraphTopology(Topology):
    """The neighbours of an undirected graph mix in pairs, weight 1/2: what `Topology.from_graph` returns.

    Every link of the graph comes up once per period. The rounds are an edge colouring of the graph: d rounds for a bipartite
    graph and at most d + 1 otherwise, where d is the largest degree. They are the same on all workers, in whatever order
    nodes and links were added to the graph. Attributes, such as weights of links, are ignored.

    Args:
        graph: a ``networkx.Graph``, or an object with its ``nodes``, ``edges``, ``is_directed()`` and ``is_multigraph()``.
            Its nodes are the workers 0 to n - 1.
        local_world_size: workers per node (of the cluster, not of the graph).
        world_size: number of workers. Default: that of the process group, or the graph's if there is no process group.
        rank: this worker. Default: that of the process group if it has as many workers, else 0.
        allow_disconnected: accept a graph in which some workers never exchange anything, not even through others.

    Raises:
        TypeError: ``graph`` is no graph, or is directed, or has several links between two nodes.
        ValueError: the nodes are not 0 to n - 1, or not the workers of the process group; a node is linked to itself; the
            graph is empty, or disconnected.
    """

    def __init__(
        self,
        graph: Any,
        local_world_size: int = 1,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        allow_disconnected: bool = False,
    ) -> None:
        n, self._links = _read(graph)
        here = _current_worker()
        if world_size is None:
            world_size = n if here is None else here[0]
        if here is not None and rank is None and here[0] == world_size:
            rank = here[1]
        super().__init__(local_world_size, world_size=world_size, rank=rank)
        if n != self._world_size:
            raise ValueError(
                f"the graph has {n} node{'s' * (n > 1)}, but world_size={self._world_size}: its nodes must be the workers "
                f"0 to {self._world_size - 1}"
            )
        parts, _ = _parts(n, self._links)
        if len(parts) > 1 and not allow_disconnected:
            raise ValueError(
                f"the graph is disconnected: its {len(parts)} parts are of {_few(len(part) for part in parts)} workers, and "
                f"workers {parts[0][0]} and {parts[1][0]}, for example, never hear of each other; add edges, or pass "
                "allow_disconnected=True"
            )

    def _get_topo_edges(self) -> PairRounds:
        rounds = colour_edges(self._world_size, self._links) or [[]]
        return PairRounds(self._world_size, len(rounds), rounds.__getitem__)

    def fingerprint(self) -> dict[str, str | int]:
        # With the links: rounds after the first 64 are not in the fingerprint.
        return self._fingerprint(f" links {sorted(self._links)}")

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(<{len(self._links)} links>, ", 1)


def _read(graph: Any) -> tuple[int, list[tuple[int, int]]]:
    """The number of nodes and the links, smaller end first."""
    if not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed", "is_multigraph")):
        raise TypeError(f"from_graph takes a networkx graph, got {graph!r}")
    if graph.is_directed():
        raise TypeError("the graph is directed, and mixing goes both ways: pass graph.to_undirected()")
    if graph.is_multigraph():
        raise TypeError("the graph may have several edges between two nodes: pass networkx.Graph(graph), which has one")
    nodes = list(graph.nodes)
    n = len(nodes)
    if not n:
        raise ValueError("the graph is empty: it needs a node for each worker")
    wrong = [node for node in nodes if isinstance(node, bool) or not isinstance(node, Integral) or not 0 <= int(node) < n]
    if wrong or len(set(nodes)) != n:
        raise ValueError(
            f"the graph's {n} nodes must be the workers 0 to {n - 1}, got {wrong[0] if wrong else nodes!r}: "
            "networkx.convert_node_labels_to_integers(graph) numbers them"
        )
    links = {(min(u, v), max(u, v)) for u, v in ((int(u), int(v)) for u, v in graph.edges)}
    for u, v in sorted(links):
        if u == v:
            raise ValueError(
                f"the graph links node {u} to itself: remove such edges, "
                "graph.remove_edges_from(list(networkx.selfloop_edges(graph)))"
            )
    return n, list(links)


def _parts(n: int, links: Sequence[_Link]) -> tuple[list[list[int]], bool]:
    """The connected parts of the graph, in the order of their first vertices; and whether the graph is bipartite."""
    neighbours: list[list[int]] = [[] for _ in range(n)]
    for u, v in links:
        neighbours[u].append(v)
        neighbours[v].append(u)
    side: dict[int, int] = {}
    parts: list[list[int]] = []
    for first in range(n):
        if first not in side:
            side[first], part = 0, [first]
            for vertex in part:
                for other in neighbours[vertex]:
                    if other not in side:
                        side[other] = 1 - side[vertex]
                        part.append(other)
            parts.append(sorted(part))
    return parts, all(side[u] != side[v] for u, v in links)


def colour_edges(n: int, links: Sequence[_Link]) -> list[list[_Link]]:
    """The links, in one list per colour; no two links of a list have an end in common.

    With d the largest degree: d colours for a bipartite graph (König), else at most d + 1 (Misra and Gries, "A constructive
    proof of Vizing's theorem", Information Processing Letters 41, 1992). The order of ``links`` does not matter.

    networkx colours vertices only. Its greedy colourings of the line graph need up to two colours more on regular graphs, and
    may change with its version, so that workers would disagree (docs/lab/log.md).
    """
    bipartite = _parts(n, links)[1]
    degrees = Counter(vertex for link in links for vertex in link)
    largest = max(degrees.values(), default=0)
    done = _Colouring(n)
    for u, v in sorted((min(link), max(link)) for link in links):
        if bipartite:
            colour, other = done.free(u), done.free(v)
            if colour in done.at[v]:
                # The path from v in these two colours does not end in u: it would close an odd cycle.
                done.swap(v, colour, other)
        else:
            v, colour = done.shift_fan(u, v, largest)
        done.paint(u, v, colour)
    colours = sorted({colour for at in done.at for colour in at})
    return [[(u, at[c]) for u, at in enumerate(done.at) if c in at and u < at[c]] for c in colours]


class _Colouring:
    """The coloured links so far: ``at[u][colour]`` is the neighbour of u along the link of that colour."""

    def __init__(self, n: int) -> None:
        self.at: list[dict[int, int]] = [{} for _ in range(n)]
        self._taken = [0] * n  # the colours at each vertex, as bits

    def free(self, *vertices: int) -> int:
        """The first colour that no link at these vertices has."""
        taken = 0
        for vertex in vertices:
            taken |= self._taken[vertex]
        return (~taken & taken + 1).bit_length() - 1

    def paint(self, u: int, v: int, colour: int) -> None:
        for one, other in ((u, v), (v, u)):
            self.at[one][colour] = other
            self._taken[one] |= 1 << colour

    def wipe(self, u: int, v: int, colour: int) -> None:
        for vertex in (u, v):
            del self.at[vertex][colour]
            self._taken[vertex] ^= 1 << colour

    def swap(self, start: int, first: int, second: int) -> None:
        """Swaps two colours along the path from ``start`` whose links have the colours ``first``, ``second``, ``first``, …"""
        path = []
        u, colour, other = start, first, second
        while (v := self.at[u].get(colour)) is not None:
            path.append((u, v, colour, other))
            u, colour, other = v, other, colour
        for u, v, colour, _ in path:
            self.wipe(u, v, colour)
        for u, v, _, other in path:
            self.paint(u, v, other)

    def shift_fan(self, u: int, v: int, largest: int) -> tuple[int, int]:
        """Recolours links at u so that one from u can get a colour up to ``largest``: returns its other end and the colour."""
        # A fan: each link from u after the first has a colour that is free at the vertex before it.
        fan = [v]
        while (colour := self.free(u, fan[-1])) > largest:
            at = self.at[fan[-1]]
            further = next((w for free, w in sorted(self.at[u].items()) if free not in at and w not in fan), None)
            if further is None:
                break
            fan.append(further)
        if colour > largest:
            own, colour = self.free(u), self.free(fan[-1])
            # The swap makes `colour` free at u. Up to the first vertex where it is free too, the links still are a fan.
            self.swap(u, colour, own)
            fan = fan[: next(i for i, w in enumerate(fan) if colour not in self.at[w]) + 1]
        # Each link of the fan gets the colour of the one after it; the last is left without one.
        colour_to = {w: c for c, w in self.at[u].items()}
        for w in fan[1:]:
            self.wipe(u, w, colour_to[w])
        for w, after in pairwise(fan):
            self.paint(u, w, colour_to[after])
        return fan[-1], colour
