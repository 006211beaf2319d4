"""The least time of a step over given links, from the bytes of a topology's rounds alone. Needs no torch.

It assumes that all workers begin each round together. If nodes take turns (in a round of 'alternating-exp-ring' half of
them send nothing to others), those with nothing to send are in the next round already, and the mean can be below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

__all__ = ["busiest_link", "step_limit"]


def busiest_link(edges: Sequence[Sequence[int]], local: int, payload: float) -> float:
    """Bytes of one round over the busiest link in its busier direction.

    A pair's members send each other ``payload`` bytes. A larger group needs 2 (k - 1)/k copies, in each direction, at each of
    the k nodes that it has members in: one, where they are two, and none within a node. Source: Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    Args:
        edges: the round: the ranks of each group that mixes.
        local: workers per node; ranks ``[0, local)`` are the first node, and so on.
        payload: a worker's parameters on the wire, in bytes.
    """
    crossing: defaultdict[int, float] = defaultdict(float)
    for ranks in edges:
        nodes = {rank // local for rank in ranks}
        for node in nodes:
            crossing[node] += 2 * (len(nodes) - 1) / len(nodes)  # one for two nodes, as of a pair
    return payload * max(crossing.values(), default=0)


def step_limit(
    rounds: Sequence[Sequence[Sequence[int]]], local: int, payload: float, rate: float | None, compute_ms: float
) -> float:
    """Milliseconds per step: the mean over a period of the longer of the two, compute or the busiest link.

    Args:
        rounds: the groups of each round.
        local: workers per node.
        payload: a worker's parameters on the wire, in bytes.
        rate: of a link in one direction, in Mbit/s; None for links that do not limit.
        compute_ms: a step without exchange.
    """
    if rate is None:
        return compute_ms
    return fmean(max(compute_ms, busiest_link(edges, local, payload) * 8 / (rate * 1e3)) for edges in rounds)
