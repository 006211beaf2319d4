"""Processes that take a dead worker's place: their state, their seat, and what goes wrong on the way."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

import decent_dp
from decent_dp.transport.base import server_of
from tests.helpers import assert_same, values
from tests.test_survivor_calls import die, survivors
from tests.test_tolerate import make, step
from tests.workers import _store, hear, say

N, VICTIM = 4, 2


def the_store() -> str:
    server = server_of(_store())
    assert server is not None
    return f"{server[0]}:{server[1]}"


def newcomer(rank: int = VICTIM, **options: Any) -> tuple[Any, Any, Any]:
    """A process that joins the workers of this launch."""
    return make(rank, transport=decent_dp.join(the_store(), rank=rank), seed=17, **options)


def train_until(model: Any, optimizer: Any, rank: int, done: Any, t: int = 0) -> int:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
        step(model, optimizer, t, rank)
        t += 1
    return t


def joins(rank: int, n: int, kind: str) -> Any:
    """Worker 2 of four dies, and another process takes its place."""
    group = dist.new_group(range(N))
    if rank == N:
        hear("dead")
        model, optimizer, replica = newcomer(kind=kind)
        rank, started = VICTIM, replica.stats().updates
    else:
        model, optimizer, replica = make(rank, kind=kind, process_group=group)
        started = 0
    rosters: list[Any] = []
    replica.on_roster(lambda old, new: rosters.append(new))
    t = train_until(model, optimizer, rank, lambda: replica.stats().updates >= 30)
    if n > N and dist.get_rank() == VICTIM:
        say("dead")
        die()
    t = train_until(
        model,
        optimizer,
        rank,
        lambda: replica.roster.epoch > 0 and len(replica.roster.members) == N and not replica.roster.holes,
        t,
    )
    train_until(model, optimizer, rank, lambda: replica.stats().rounds >= 400, t)
    found = replica.consensus_distance(), replica.roster, replica.stats(), started, rosters
    with replica.averaged():
        mean = values(model)
    replica.close()
    return found, mean


@pytest.mark.parametrize("kind", ["gossip", "wrapper"])
def test_a_process_takes_the_place_of_a_dead_worker(workers, kind):
    outcomes = workers.outcomes(N + 1, joins, kind)
    found = survivors(outcomes)
    for _, mean in found[1:]:
        assert_same(mean, found[0][1])
    for rank, ((distance, roster, stats, started, rosters), _) in zip((0, 1, 3, 2), found, strict=True):
        assert roster.members == (0, 1, 2, 3)
        assert roster.seat == rank
        assert distance < 1.0
        if rank == VICTIM:
            assert started >= 30
            assert stats.exchanges > 50
        assert rosters[-1].members == (0, 1, 2, 3)
