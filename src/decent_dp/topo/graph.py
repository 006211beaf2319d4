"""Topologies from graphs: the links of a graph in rounds of pairs."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .base import FINGERPRINT_ROUNDS, Topology, _worker_if_any
from .colouring import colour_edges, connected_parts
from .edges import Edge, PairRounds, Pairs, _few

__all__ = ["GraphTopology"]


class GraphTopology(Topology):
    """The neighbours of an undirected graph mix in pairs, weight 1/2: what :meth:`Topology.from_graph` returns.

    Every link of the graph comes up once a period. The rounds are an edge colouring of the graph: with d the largest degree,
    d rounds where the graph is bipartite and at most d + 1 otherwise. They are the same on all workers, in whatever order
    nodes and links were put into the graph. Attributes, such as weights of links, are not looked at.

    Args:
        graph: a ``networkx.Graph``, or what has its ``nodes``, ``edges``, ``is_directed()`` and ``is_multigraph()``; its
            nodes are the workers 0 to n - 1.
        local_world_size: workers a node (of the cluster, not of the graph).
        world_size: number of workers. Not given: that of the process group, or where there is none the graph's.
        rank: this worker. Not given: that of the process group if it has so many workers, or 0.
        allow_disconnected: take a graph in which some workers never hear of each other.

    Raises:
        TypeError: ``graph`` is no graph, or is directed, or has several links between two nodes.
        ValueError: its nodes are not 0 to n - 1, or not the workers that there are; a node is linked to itself; it is
            empty, or disconnected.
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
        here = _worker_if_any()
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
        parts = connected_parts(n, self._links)
        if len(parts) > 1 and not allow_disconnected:
            raise ValueError(
                f"the graph is disconnected: its {len(parts)} parts are of {_few(len(part) for part in parts)} workers, and "
                f"workers {parts[0][0]} and {parts[1][0]}, for example, never hear of each other; add edges, or pass "
                "allow_disconnected=True"
            )

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [list(edges) for edges in GraphTopology._own_rounds(self)]

    def _own_rounds(self) -> PairRounds:
        rounds: list[Pairs] = [np.array(links, np.int64) for links in colour_edges(self._world_size, self._links)]
        rounds = rounds or [np.zeros((0, 2), np.int64)]
        return PairRounds(self._world_size, len(rounds), rounds.__getitem__)

    def fingerprint(self) -> dict[str, str | int]:
        # With the links: those of later rounds are in no round that is looked at.
        return self._fingerprint(FINGERPRINT_ROUNDS, f" links {sorted(self._links)}")

    def __repr__(self) -> str:
        sizes = f"{self._local_world_size}, world_size={self._world_size}, rank={self._rank}"
        return f"{type(self).__name__}(<{len(self._links)} links>, {sizes})"


def _read(graph: Any) -> tuple[int, list[tuple[int, int]]]:
    """The number of nodes and the links, smaller end first, of a graph that can be a topology."""
    if not all(hasattr(graph, name) for name in ("nodes", "edges", "is_directed", "is_multigraph")):
        raise TypeError(f"from_graph takes a networkx graph, got {graph!r}")
    if graph.is_directed():
        raise TypeError("the graph is directed, and mixing goes both ways: pass graph.to_undirected()")
    if graph.is_multigraph():
        raise TypeError("the graph may have several edges between two nodes: pass networkx.Graph(graph), which has one")
    nodes = [_as_rank(node) for node in graph.nodes]
    n = len(nodes)
    if not n:
        raise ValueError("the graph is empty: it needs a node for each worker")
    wrong = [node for node, rank in zip(graph.nodes, nodes, strict=True) if rank is None or not 0 <= rank < n]
    if wrong or len(set(nodes)) != n:
        raise ValueError(
            f"the graph's {n} nodes must be the workers 0 to {n - 1}, got {wrong[0] if wrong else nodes!r}: "
            "networkx.convert_node_labels_to_integers(graph) numbers them"
        )
    links = {(min(u, v), max(u, v)) for u, v in ((operator.index(u), operator.index(v)) for u, v in graph.edges)}
    for u, v in sorted(links):
        if u == v:
            raise ValueError(
                f"the graph links node {u} to itself: remove such edges, "
                "graph.remove_edges_from(list(networkx.selfloop_edges(graph)))"
            )
    return n, list(links)


def _as_rank(node: object) -> int | None:
    if isinstance(node, bool):
        return None
    try:
        return operator.index(node)  # type: ignore[arg-type]
    except TypeError:
        return None
