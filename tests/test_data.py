"""Data dealt by position: every sample once per epoch, whoever leaves and comes."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import decent_dp
from decent_dp import data as data_module
from decent_dp.faults import Roster
from decent_dp.transport import InProcessTransport, Replicas, run_replicas
from tests.members import die, end, make, step, survivors, the_store
from tests.test_growing import is_grown
from tests.workers import hear, say

SIZE, BATCH = 103, 5  # 20 batches, and three samples that an epoch leaves out


def order(seed: int, epoch: int, size: int = SIZE) -> list[list[int]]:
    """The batches of an epoch."""
    permutation = np.random.default_rng([seed, epoch]).permutation(size)
    return [permutation[i * BATCH : (i + 1) * BATCH].tolist() for i in range(size // BATCH)]


# -- workers that stay -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gossip", "wrapper"])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_each_batch_of_an_epoch_goes_to_one_worker(kind, n):
    def work(transport: Any) -> Any:
        model, optimizer, replica = make(transport.rank, kind, transport=transport, faults=None)
        sampler = decent_dp.RosterSampler(SIZE, replica, BATCH, seed=4)
        passes = []
        for _ in range(3):
            passes.append((sampler.epoch, []))
            for batch in sampler:
                passes[-1][1].append(batch)
                step(model, optimizer, replica.stats().rounds, transport.rank)
        replica.close()
        return passes

    found = run_replicas(n, work)
    for p in range(3):
        assert {passes[p][0] for passes in found} == {p}
        assert len({len(passes[p][1]) for passes in found}) == 1
    # In each round the workers get the next batches, of which some may be of the next epoch.
    dealt = [batch for p in range(3) for batches in zip(*(passes[p][1] for passes in found), strict=True) for batch in batches]
    expected = [batch for epoch in range(4) for batch in order(4, epoch)]
    assert dealt == expected[: len(dealt)]
    assert len(dealt) >= 3 * (SIZE // BATCH)


@pytest.mark.parametrize("workers_of_loader", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_fetches_ahead(workers_of_loader):
    model, optimizer, replica = make(0, transport=InProcessTransport(), faults=None)
    ahead = 2 * workers_of_loader
    sampler = decent_dp.RosterSampler(TensorDataset(torch.arange(SIZE)), replica, BATCH, shuffle=False, ahead=ahead)
    options = {"num_workers": workers_of_loader} | ({"prefetch_factor": 2} if workers_of_loader else {})
    loader = DataLoader(TensorDataset(torch.arange(SIZE)), batch_sampler=sampler, **options)
    assert len(loader) == SIZE // BATCH
    for leave_at in (7, None):  # a loop that is left, with batches fetched, and one that goes on from there
        began = replica.stats().rounds
        for t, (batch,) in enumerate(loader):
            assert batch.tolist() == list(range((began + t) * BATCH, (began + t + 1) * BATCH))
            step(model, optimizer, t, 0)
            if t + 1 == leave_at:
                break
    assert replica.stats().rounds == SIZE // BATCH
    replica.close()


def test_another_number_of_workers_continues():
    def begin(transport: Any, state: Any, rounds: int) -> Any:
        model, optimizer, replica = make(transport.rank, transport=transport, faults=None)
        sampler = decent_dp.RosterSampler(SIZE, replica, BATCH)
        if state is not None:
            sampler.load_state_dict(json.loads(state))
        batches = []
        for _, batch in zip(range(rounds), sampler, strict=False):
            batches.append(batch)
            step(model, optimizer, 0, transport.rank)
        state = json.dumps(sampler.state_dict())
        replica.close()
        return batches, state

    first = run_replicas(4, lambda transport: begin(transport, None, 3))
    state = first[0][1]
    second = run_replicas(2, lambda transport: begin(transport, state, 100))
    dealt = [batch for found in (first, second) for row in zip(*(own for own, _ in found), strict=True) for batch in row]
    assert dealt == order(0, 0)
    assert json.loads(state) == {"dealt": 12}


def test_arguments_are_checked():
    model, _, replica = make(0, transport=InProcessTransport(), faults=None)
    with pytest.raises(ValueError, match="batch_size must be at most the length of the data, 3, got 4"):
        decent_dp.RosterSampler(3, replica, 4)
    with pytest.raises(ValueError, match="ahead must be"):
        decent_dp.RosterSampler(3, replica, 1, ahead=-1)
    with pytest.raises(TypeError, match=r"RosterSampler takes .* got a Sequential"):
        decent_dp.RosterSampler(3, model, 1)
    replica.close()


# -- workers that leave and come, by a script ------------------------------------------------------------------------------


@dataclass
class Scripted:
    """A replica whose rosters are given: (when it is known, first round, members)."""

    rank: int
    n: int
    script: Sequence[tuple[int, int, tuple[int, ...]]]
    engine: Any = field(default_factory=lambda: SimpleNamespace(round=0))
    monitor: Any = field(default_factory=lambda: SimpleNamespace(knows=lambda round_: True))

    @property
    def world(self) -> Any:
        return SimpleNamespace(rank=self.rank, world_size=self.n)

    @property
    def agreed(self) -> Any:
        return SimpleNamespace(peers=self.world, replicas=Replicas(tuple((rank,) for rank in range(self.n))))

    model = None

    @property
    def roster(self) -> Roster:
        members, start, dealt, epoch = tuple(range(self.n)), 0, 0, 0
        for known_at, first, others in self.script:
            if known_at <= self.engine.round:
                dealt, start, members, epoch = dealt + (first - start) * len(members), first, others, epoch + 1
        seat = members.index(self.rank) if self.rank in members else -1
        return Roster(epoch, seat, len(members), members, (), start, dealt)


SCRIPT = [(10, 14, (0, 1, 3)), (21, 22, (0, 1, 3, 4, 5)), (40, 43, (0, 1, 4, 5))]


@pytest.mark.parametrize("ahead", [0, 1, 6])
def test_nothing_is_dealt_twice_where_members_change(monkeypatch, ahead):
    """Worker 2 dies after round 8, 4 and 5 come, and 3 dies after round 37."""
    monkeypatch.setattr(data_module, "replica_of", lambda replica, what: replica)
    lives = {0: (0, 70), 1: (0, 70), 2: (0, 9), 3: (0, 38), 4: (22, 70), 5: (22, 70)}
    dealt: list[list[int]] = []
    for rank, (first, last) in lives.items():
        replica: Any = Scripted(rank, 4, SCRIPT)
        replica.engine.round = first
        sampler = decent_dp.RosterSampler(SIZE, replica, BATCH, seed=1, ahead=ahead)
        seat = data_module.RosterSampler._batch
        shares: list[int] = []
        monkeypatch.setattr(data_module.RosterSampler, "_batch", lambda self, share, to=shares: to.append(share) or [share])
        for _ in range(100):
            used = 0
            batches = iter(sampler)
            # As a loader: it fetches ``ahead`` batches first.
            fetched = [batch for _, batch in zip(range(ahead), batches, strict=False)]
            while replica.engine.round < last:
                batch = next(batches, None)
                if batch is not None:
                    fetched.append(batch)
                if not fetched:
                    break
                used += fetched.pop(0) is not None
                replica.engine.round += 1
            if replica.engine.round >= last:
                break
        monkeypatch.setattr(data_module.RosterSampler, "_batch", seat)
        # Those that were fetched and never used are not dealt.
        dealt.append(shares[: len(shares) - len(fetched)] if ahead else shares)
    counted = Counter(share for shares in dealt for share in shares)
    assert max(counted.values()) == 1
    lost = set(range(max(counted))) - set(counted)
    # Of worker 2 the rounds 9 to 13, of worker 3 those from 38 to 42, and what was fetched before the change was known.
    before = {share for share in lost if share < 14 * 4 + ahead * 4}
    assert len(before) == 5 + ahead


# -- workers that leave and come -------------------------------------------------------------------------------------------


def deals(rank: int, n: int, path: str, size: int) -> Any:
    """Of three workers the last one dies, and two come. Each keeps the batches of its seat, and where its epochs begin."""
    os.environ.pop("RANK", None)
    faults = decent_dp.Tolerate(dead_after=5.0, max_workers=4)
    group = dist.new_group(range(3))
    if rank < 3:
        model, optimizer, replica = make(rank, process_group=group, faults=faults)
    else:
        hear("come")
        model, optimizer, replica = make(rank, seed=rank, transport=decent_dp.join(the_store()), faults=faults)
    sampler = decent_dp.RosterSampler(size, replica, BATCH)
    grown, begins = 0, []
    with open(f"{path}/{rank}", "w", buffering=1) as file:
        while not grown or replica.stats().rounds < grown + 60:
            begins.append((sampler.epoch, replica.stats().rounds))
            for batch in sampler:
                if replica.roster.seat >= 0:
                    print(json.dumps(batch), file=file)
                time.sleep(0.02)
                step(model, optimizer, 0, rank)
                if rank == 2 and replica.stats().rounds >= 20:
                    say("come")
                    die()
                grown = grown or (replica.stats().rounds if is_grown(replica, 4) else 0)
                if grown and replica.stats().rounds >= grown + 60:
                    break
    dealt = sampler.state_dict()["dealt"] - replica.roster.size * replica.stats().rounds
    end(replica)
    return dealt, begins


@pytest.mark.slow
@pytest.mark.parametrize("size", [100_000, 600])
def test_nothing_is_dealt_twice(workers, tmp_path, size):
    found = survivors(workers.outcomes(5, deals, str(tmp_path), size), 2)
    assert len({dealt for dealt, _ in found}) == 1  # all know the same position of the same round
    batches = Counter(tuple(json.loads(line)) for file in Path(tmp_path).iterdir() for line in file.read_text().splitlines())
    shares = {tuple(batch): share for share, batch in enumerate(b for epoch in range(40) for b in order(0, epoch, size))}
    dealt = Counter(shares[batch] for batch in batches.elements())
    assert max(dealt.values()) == 1
    # What is missing was the dead worker's, or that of rounds in which a worker was late.
    assert len(dealt) > 0.6 * max(dealt)
    # Epochs begin in one round for all, but for a worker's first one, and where it was late.
    rounds: dict[int, set[int]] = {}
    for _, begins in found:
        for epoch, round_ in begins[1:]:
            rounds.setdefault(epoch, set()).add(round_)
    assert all(max(begun) - min(begun) <= 3 for begun in rounds.values())
    assert (len(rounds) > 1) == (size == 600)
