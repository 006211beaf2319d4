"""Rounds that a worker leaves out: the others have gone on without it, or it has joined them."""

from __future__ import annotations

from collections.abc import Sequence

from decent_dp.engine.engine import Engine
from decent_dp.topo import Edge, schedule
from decent_dp.transport import ExchangeId

__all__ = ["enter", "go_to", "round_of_others"]

# Rounds that are left out one by one, at most; of earlier ones only the number is kept.
_MOST_MISSED = 1000


def go_to(engine: Engine, target: int) -> None:
    """Leaves out all rounds before ``target``: the others have gone on without this worker, which was silent or too late.

    Called before a round's first bucket. What is in flight is finished when its bucket's turn comes.
    """
    missed: dict[tuple[int, int], tuple[Edge, ExchangeId]] = {}
    first, before = max(engine.round, target - _MOST_MISSED), engine.counts.holes
    for round_ in range(first, target):
        for bucket in engine.buckets:
            if schedule.turn_of(bucket.topology, round_).mixes:
                edge = bucket.topology.get_edge(round_)
                for other in set(edge.ranks) - {engine._peers.rank}:
                    engine.counts.holes += 1
                    missed[other, bucket.number] = edge, ExchangeId(round_, bucket.number)
    if first > engine.round:
        engine.counts.holes += (engine.counts.holes - before) * (first - engine.round) // _MOST_MISSED
    for edge, exchange_id in missed.values():  # the last one of each bucket and worker stands for those before
        engine._peers.skip(edge, exchange_id)
    engine.round = max(engine.round, target)


def enter(engine: Engine, round_: int, members: Sequence[int]) -> None:
    """The process joins ``members``. Its first round may be later than that of its epoch: it leaves out those before."""
    for bucket in engine.buckets:  # the last one stands for those before
        engine._peers.skip(Edge(sorted(members), 1.0), ExchangeId(round_ - 1, bucket.number))
    engine.round = round_


def round_of_others(engine: Engine) -> int:
    """The first round from the present one on that the other worker of no bucket's edge has passed, or leaves out."""
    peers, round_ = engine._peers, engine.round
    newest = max(map(peers.round_of, peers.living()), default=-1)
    while newest > round_:
        passed = round_
        for bucket in engine.buckets:
            if schedule.turn_of(bucket.topology, round_).mixes:
                others = [rank for rank in bucket.topology.get_edge(round_).ranks if rank != engine._peers.rank]
                theirs = max(map(peers.round_of, others), default=-1)
                # As long as the exchange has time to arrive, the other worker can be ahead; later it waits for this one.
                if theirs > round_ + schedule.turn_of(bucket.topology, round_).stage.time:
                    passed = max(passed, theirs)
                elif peers.has_dropped(others, ExchangeId(round_, bucket.number)):
                    passed = max(passed, round_ + 1)
        if passed == round_:
            break
        round_ = passed
    return round_
