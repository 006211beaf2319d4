"""Sharded replicas where faults are tolerated: a replica lives, dies and joins as a whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decent_dp
from decent_dp.transport.collectives import Collectives
from tests.helpers import assert_same
from tests.sharded_cases import Odd, inputs, needs_shards, shard, values
from tests.test_joining import the_store
from tests.test_survivor_calls import die_in
from tests.test_tolerate import DEAD_AFTER
from tests.workers import _store, hear, say

pytestmark = needs_shards

# Three replicas of two workers each; workers 2 and 3 are the second one, and two more processes take their place.
REPLICAS, SHARDS = 3, 2
N = REPLICAS * SHARDS
VICTIMS = (2, 3)
PAUSE = 0.02


class Part:
    """One worker's part of a replica. The processes after the first ``N`` join."""

    def __init__(self, rank: int, n: int, **options: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        names = ("replica", "shard")
        meshes = [DeviceMesh("cpu", torch.arange(N).view(REPLICAS, SHARDS), mesh_dim_names=names)]
        if n > N:
            meshes.append(DeviceMesh("cpu", torch.arange(N, n).view(1, SHARDS), mesh_dim_names=names))
        group = dist.new_group(range(N))
        self.rank, self.joins = rank, rank >= N
        mesh = meshes[self.joins]
        self.position = rank % SHARDS
        options = {"faults": decent_dp.Tolerate(dead_after=DEAD_AFTER), **options}
        if self.joins:
            hear("dead")
            self.rank = VICTIMS[self.position]
            options["transport"] = decent_dp.join(the_store(), rank=self.rank)
        else:
            options["process_group"] = group
        self.number = self.rank // SHARDS
        self.model: nn.Module = shard(Odd(0 if rank < N else 17), mesh["shard"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.8)
        self.gossip = decent_dp.gossip(self.model, self.optimizer, **options)
        self.rosters: list[tuple[int, int]] = []
        self.gossip.on_roster(lambda old, new: self.rosters.append((self.steps, new.epoch)))
        self.steps = 0

    def step(self, factor: float = 1.0) -> None:
        x, y = (part.chunk(SHARDS)[self.position] for part in inputs(self.steps, self.number))
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(x) - y).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        self.steps += 1

    def train(self, done: Callable[[], bool]) -> float:
        """Steps until ``done``, which all workers of a replica are to find after the same step. Returns the seconds of the
        longest one."""
        longest, deadline = 0.0, time.monotonic() + 90
        while not done():
            assert time.monotonic() < deadline
            time.sleep(PAUSE)
            began = time.monotonic()
            self.step()
            longest = max(longest, time.monotonic() - began)
        return longest

    def end(self) -> dict[str, Tensor]:
        with self.gossip.averaged():
            mean = values(self.model)
        self.gossip.close()
        return mean


def loses_some(rank: int, n: int, how: str, path: str) -> Any:
    """Workers of the second replica are lost: one is killed, or both, or one is stopped for good."""
    part = Part(rank, n)
    if not part.joins:
        part.train(lambda: part.gossip.stats().rounds >= 20)
    if rank == VICTIMS[1] or (rank == VICTIMS[0] and how == "node"):
        _store().set("pid", str(os.getpid()))
        if how != "freeze":
            say("dead")
        os.kill(os.getpid(), signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
    if rank == VICTIMS[0] and how == "freeze":
        os.dup2(os.open(f"{path}/stderr", os.O_CREAT | os.O_WRONLY), 2)

    def is_without() -> bool:
        return part.gossip.roster.epoch > 0

    if how == "freeze" and not part.joins:
        part.train(is_without)
        say("dead")
    longest = part.train(lambda: is_whole(part))
    if how == "freeze" and rank == 0:
        os.kill(int(_store().get("pid")), signal.SIGCONT)
    folder = f"{path}/checkpoints"
    saved = decent_dp.save(part.gossip, folder, wait=True)
    before = values(part.model)
    part.train(lambda: part.gossip.stats().rounds >= part.gossip.roster.start + 40)
    assert decent_dp.load(part.gossip, folder) is not None
    assert_same(values(part.model), before)
    distance, stats = part.gossip.consensus_distance(), part.gossip.stats()
    return part.gossip.gather(part.steps), part.gossip.roster, part.rosters, longest, saved.error, distance, stats, part.end()


def is_whole(part: Part) -> bool:
    """Whether all three replicas mix again. Rounds are the same on all workers of a replica, and so are its rosters."""
    roster = part.gossip.roster
    return roster.epoch > 1 and roster.size == REPLICAS and part.gossip.stats().rounds >= roster.start + 30


@pytest.mark.parametrize("how", ["kill", *(pytest.param(how, marks=pytest.mark.slow) for how in ("node", "freeze"))])
def test_a_replica_that_loses_a_worker_ends_and_joins_again(workers, tmp_path, how):
    outcomes = workers.outcomes(N + SHARDS, loses_some, how, str(tmp_path))
    if how == "freeze":  # its other worker waits in a collective that cannot be left
        assert outcomes[2].exitcode == 1
        assert "PeerLostError: worker 3 has ended, or cannot be heard" in (tmp_path / "stderr").read_text()
        assert (outcomes[3].error, "worker 2 has ended" in outcomes[3].message) == ("PeerLostError", True), outcomes[3]
    else:
        assert outcomes[3].exitcode == -signal.SIGKILL
    if how == "kill":
        assert (outcomes[2].error, "worker 3 has ended" in outcomes[2].message) == ("PeerLostError", True), outcomes[2]
    living = [0, 1, 4, 5, 6, 7]
    assert [outcomes[i].trace for i in living] == [""] * 6
    found = {VICTIMS[i - N] if i >= N else i: outcomes[i].value for i in living}
    for rank, (steps, roster, rosters, longest, error, distance, stats, mean) in found.items():
        assert sorted(map(int, steps)) == list(range(N))
        assert (roster.seat, roster.members, error) == (rank // SHARDS, (0, 1, 2), None)
        assert_same(mean, found[0][-1])
        assert distance == found[0][5] < 1.0
        # The workers of a replica come to a roster after the same step.
        assert rosters == found[rank ^ 1][2]
        assert stats.exchanges > 20
        if rank not in VICTIMS:
            assert longest < 0.4 * DEAD_AFTER + 1


def is_late_and_spoilt(rank: int, n: int) -> Any:
    """A worker of the second replica is late for a while, and later its replica has a loss that is not finite."""
    part = Part(rank, n)
    seen, spoilt = [], False
    while part.gossip.stats().rounds < 160:
        time.sleep(3.0 if (rank, part.steps) == (VICTIMS[1], 20) else PAUSE)
        rounds = part.gossip.stats().rounds
        spoils = part.number == 1 and rounds >= 100 and not spoilt
        spoilt |= spoils
        part.step(float("nan") if spoils else 1.0)
        seen.append((part.gossip.stats().rounds, part.gossip.due(10)))
    distance = part.gossip.consensus_distance()
    return seen, distance, part.gossip.stats(), part.end()


@pytest.mark.slow
def test_a_replica_that_was_late_goes_on_and_heals_as_a_whole(workers):
    found = workers(N, is_late_and_spoilt)
    for rank, (seen, distance, stats, mean) in enumerate(found):
        assert seen == found[rank ^ 1][0]
        assert distance == found[0][1] < 1.0
        assert_same(mean, found[0][-1])
        assert stats.nonfinite > 0 or rank not in VICTIMS
    assert found[2][2].updates < found[0][2].updates


def dies_in_a_mean(rank: int, n: int) -> Any:
    part = Part(rank, n)
    with torch.no_grad():
        for param in part.model.parameters():
            param.fill_(part.number + 1.0)
    if rank == VICTIMS[1]:
        die_in(Collectives, "_sum_up")
    with part.gossip.averaged():
        mean = values(part.model)
    distance = part.gossip.consensus_distance()
    part.gossip.close()
    return mean, distance


def test_a_death_in_a_mean_leaves_out_all_parts_of_its_replica(workers):
    outcomes = workers.outcomes(N, dies_in_a_mean)
    assert outcomes[3].exitcode == -signal.SIGKILL
    assert outcomes[2].error == "PeerLostError", outcomes[2]
    for rank in (0, 1, 4, 5):
        assert outcomes[rank].error == "", outcomes[rank].trace
        mean, distance = outcomes[rank].value
        names = [name for name, _ in Odd().named_parameters() if name != "still"]
        assert all(torch.equal(mean[name], torch.full_like(mean[name], 2.0)) for name in names), mean
        assert distance == pytest.approx(sum(mean[name].numel() for name in names) ** 0.5)
