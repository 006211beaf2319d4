"""How a group takes its mean: for each chunk of the message a tree of its own, with traffic between nodes kept small.

A chunk is summed inside each node by one worker, its leader; the leaders' sums go to one of them, the root; the mean comes
back the same way. So a node sends and receives each chunk once as a leaf of the tree. Leaders and roots take turns by the
chunk: over all chunks k nodes send and receive 2 (k - 1)/k copies each, as the best all-reduce does, and two nodes one copy
in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Place", "find_place", "group_by_node"]


@dataclass(frozen=True)
class Place:
    """A worker's place in the tree of one chunk.

    Attributes:
        parent: whom its (part's) sum goes to; None for the root.
        children: whose come to it, each with the number of workers it stands for; the mean goes back to them.
        part: 0 for the root, else from 1: which node's sum this worker makes.
    """

    parent: int | None
    children: tuple[tuple[int, int], ...]
    part: int


def group_by_node(ranks: Sequence[int], node_of: Sequence[str]) -> list[list[int]]:
    """Sorted ranks, dealt out to their nodes, in the order of the nodes' first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(node_of[rank], []).append(rank)
    return list(nodes.values())


def find_place(nodes: Sequence[Sequence[int]], chunk: int, rank: int) -> Place:
    """The place of ``rank`` in the tree of ``chunk``; ``nodes`` as of ``group_by_node``."""
    lanes = min(len(node) for node in nodes)
    leaders = [node[chunk % lanes] for node in nodes]
    chosen = chunk // lanes % len(nodes)
    root = leaders[chosen]
    mine = next(i for i, node in enumerate(nodes) if rank in node)
    if rank != leaders[mine]:
        return Place(leaders[mine], (), 0)
    local = tuple((other, 1) for other in nodes[mine] if other != rank)
    if rank != root:
        return Place(root, local, 1 + mine)
    others = tuple((leader, len(node)) for leader, node in zip(leaders, nodes, strict=True) if leader != root)
    return Place(None, local + others, 0)
