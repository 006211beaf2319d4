"""How a group takes its mean: for each chunk of the message a tree of its own, with traffic between nodes kept small.

A chunk is summed inside each node by one worker, its leader; the leaders' sums go to one of them, the root; the mean comes
back the same way. So a node sends and receives each chunk once as a leaf of the tree. Leaders and roots take turns by the
chunk: over all chunks k nodes send and receive 2 (k - 1)/k copies each, as the best all-reduce does, and two nodes one copy
in each direction.

As many chunks as there are nodes, each with its root on another one, move together. In step d of the 2 (k - 1) that they take
between nodes, each root receives the sum of the node d places after its own; then, in step d, each sends the mean there. So
each node sends to one other and receives from one other in each step, and all links are full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Branch", "Place", "find_place", "group_by_node"]


@dataclass(frozen=True)
class Branch:
    """The link between a worker and its parent, or a child, in the tree of one chunk.

    Attributes:
        rank: the other worker's.
        size: the number of workers that the child stands for.
        up, down: the step of the exchange in which the child's sum moves, and the mean.
    """

    rank: int
    size: int
    up: int
    down: int


@dataclass(frozen=True)
class Place:
    """A worker's place in the tree of one chunk.

    Attributes:
        parent: whom its (part's) sum goes to; None for the root.
        children: whose come to it, in the order of their steps; the mean goes back to them.
        part: 0 for the root, else from 1: which node's sum this worker makes.
    """

    parent: Branch | None
    children: tuple[Branch, ...]
    part: int


def group_by_node(ranks: Sequence[int], node_of: Sequence[str]) -> list[list[int]]:
    """Sorted ranks, dealt out to their nodes, in the order of the nodes' first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(node_of[rank], []).append(rank)
    return list(nodes.values())


def find_place(nodes: Sequence[Sequence[int]], chunk: int, rank: int) -> Place:
    """The place of ``rank`` in the tree of ``chunk``; ``nodes`` as of ``group_by_node``."""
    k, lanes = len(nodes), min(len(node) for node in nodes)
    leaders = [node[chunk % lanes] for node in nodes]
    turn, chosen = divmod(chunk // lanes, k)
    mine = next(i for i, node in enumerate(nodes) if rank in node)

    def branch(other: int, size: int, distance: int = 0) -> Branch:
        return Branch(other, size, 2 * k * turn + distance, 2 * k * turn + k + distance)

    if rank != leaders[mine]:
        return Place(branch(leaders[mine], 1), (), 0)
    local = tuple(branch(other, 1) for other in nodes[mine] if other != rank)
    if mine != chosen:
        parent = branch(leaders[chosen], len(nodes[mine]), (mine - chosen) % k)
        return Place(parent, local, 1 + mine)
    others = tuple(branch(leaders[i], len(nodes[i]), (i - chosen) % k) for i in ((chosen + d) % k for d in range(1, k)))
    return Place(None, local + others, 0)
