"""What any topology does in an update, and in its course, also one that is made of others.

Functions rather than methods, since a user's subclass chooses the names of its attributes freely.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from decent_dp._checks import check_integer

from .abstract import Stage, Topology
from .edges import Edge

__all__ = [
    "check_pairs",
    "edges_ahead",
    "edges_of",
    "largest_group",
    "longest_turn",
    "meetings",
    "pull_of",
    "seated",
    "share_of",
    "spread",
    "stages_of",
    "title_of",
    "turn_of",
    "weigh",
    "weights_of",
]

# Rounds of a topology without a period that are looked at for a property of all.
_SEEN_ROUNDS = 256


def title_of(topology: Topology) -> str:
    """The name in prints and in the workers' comparison: the class and its settings."""
    return topology._title()


class Turn(NamedTuple):
    """What a topology does in one update: the stage in use, its round (of the next mix, if this is none), and if it mixes."""

    stage: Stage
    round: int
    mixes: bool


def turn_of(topology: Topology, t: int) -> Turn:
    """What a topology does in update ``t`` ≥ 0."""
    t = check_integer("round", t, 0)
    stages = topology._stages()
    stage = next((stage for stage in reversed(stages) if stage.start <= t), stages[0])
    own = max(t - stage.start, 0)
    return Turn(stage, own // stage.every, (own + 1 - stage.offset) % stage.every == 0)


def edges_of(topology: Topology, t: int) -> list[Edge]:
    """The edges of round ``t`` ≥ 0, checked."""
    return topology._checked(t)


def stages_of(topology: Topology) -> tuple[Stage, ...]:
    """The topologies that a topology goes through, one after another; by itself if it is not made of others."""
    return topology._stages()


def seated(whole: Topology, edges: list[Edge], members: Sequence[int] | None) -> list[Edge]:
    """Edges of seats as edges of the workers in them, ``members``; all other workers are idle. None: they are the same."""
    if members is None or len(members) == whole._world_size:
        return edges
    mixing = [Edge([members[seat] for seat in edge.ranks], edge.weight) for edge in edges]
    return mixing + [Edge([rank], 1.0) for rank in range(whole._world_size) if rank not in members]


def edges_ahead(topology: Topology, limit: int) -> list[Edge]:
    """This rank's edges in the first ``limit`` rounds of each stage's period, to connect before the first round.

    As many on every worker. Empty for a topology without a period.
    """
    return [
        next(edge for edge in seated(topology, stage.topology._checked(t), stage.members) if topology._rank in edge.ranks)
        for stage in stages_of(topology)
        for t in range(min(stage.topology.period or 0, limit))
    ]


def meetings(topology: Topology, t: int, ranks: Sequence[int]) -> int:
    """In how many rounds before ``t`` these workers are an edge; of a topology without a period, ``t``.

    In a composition since the beginning of its part.
    """
    stage, at, _ = turn_of(topology, t)
    if stage.members is not None:
        if not set(ranks) <= set(stage.members):
            return 0
        ranks = [stage.members.index(rank) for rank in ranks]
    period = stage.topology.period
    if period is None:
        return at
    periods, at = divmod(at, period)
    rounds = stage.topology._rounds_of_edges.get(tuple(sorted(ranks)), [])
    return periods * len(rounds) + bisect_left(rounds, at)


def longest_turn(topology: Topology) -> int:
    """The most updates from one mix to the next, in any stage."""
    return max(stage.every for stage in stages_of(topology))


def largest_group(topology: Topology) -> int:
    """The number of workers in the largest edge; of a topology without a period, in its first 256 rounds."""
    stages = [stage.topology for stage in stages_of(topology)]
    return max(len(edge.ranks) for one in stages for t in range(one.period or _SEEN_ROUNDS) for edge in one._checked(t))


def check_pairs(
    topology: Topology, who: str, why: str = "where one that is gone costs its partner one edge and nobody else waits"
) -> None:
    """Refuses a topology with groups.

    Args:
        who: the feature that needs pairs, for the message. ``why``: the reason.

    Raises:
        ValueError: an edge has more than two workers.
    """
    if (largest := largest_group(topology)) > 2:
        raise ValueError(
            f"{who} needs a topology of pairs, {why}, and {topology!r} mixes groups of {largest}: use 'base-2', "
            "'one-peer-exp', 'ring' or 'random-matching'"
        )


def spread(topology: Topology, start: int, stop: int, total: int) -> Topology:
    """The topology for bytes ``start`` to ``stop`` of the parameters' ``total``.

    With ``every(h)`` each such part has a turn of its own in the ``h`` updates, as long as its share of the bytes.
    """

    def own_turn(stage: Stage) -> Stage:
        first, last = stage.every * start // total, stage.every * stop // total
        offset = min(first, stage.every - 1)  # the last part may be empty
        return replace(stage, offset=offset, time=max(1, last - offset))

    return topology._restaged(own_turn)


# -- replicas that do not count alike ---------------------------------------------------------------------------------------


def weigh(topology: Topology, weights: Sequence[float]) -> Topology:
    """The topology for replicas of these weights a: mixing keeps their weighted mean Σ a x / Σ a.

    Raises:
        ValueError: an edge has more than two workers.
    """
    check_pairs(topology, "weight", "as the messages of a larger group become a plain mean on their way")
    made = copy.copy(topology)
    made._replica_weights = tuple(weights)
    return made


def weights_of(topology: Topology) -> tuple[float, ...] | None:
    """The weights of the replicas; None if they are equal."""
    return topology._replica_weights


def pull_of(topology: Topology, edge: Edge, rank: int) -> float:
    """The factor of what ``rank`` takes on a pair because of the weights, 2 a_j/(a_i + a_j); 1 if they are equal.

    So an edge of weight 1/2 makes both ends (a_i x_i + a_j x_j)/(a_i + a_j). Any edge reduces their difference as far as
    one of equal weights, and keeps a_i x_i + a_j x_j, as a_i times the factor is the same at both ends.
    """
    weights = topology._replica_weights
    if weights is None or len(edge.ranks) == 1:
        return 1.0
    (other,) = set(edge.ranks) - {rank}
    return 2 * weights[other] / (weights[rank] + weights[other])


def share_of(topology: Topology, rank: int, members: Iterable[int]) -> float | None:
    """The share of ``rank`` in the weight of ``members``; None for equal weights."""
    weights = topology._replica_weights
    return None if weights is None else weights[rank] / sum(weights[member] for member in members)
