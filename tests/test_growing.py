"""Workers that come in addition to those that began the run."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import decent_dp
from decent_dp.transport import run_replicas
from tests.helpers import assert_same, net, values
from tests.members import die, end, is_connected, make, survivors, the_store, train
from tests.workers import hear, say


def is_grown(replica: Any, size: int) -> bool:
    """Whether there are so many members, and this worker is one and connected to those that it needs."""
    return replica.roster.size == size and replica.roster.seat >= 0 and is_connected(replica)


def comes_and_goes(rank: int, n: int, began: int, leave: int, kind: str, path: str) -> Any:
    """The first ``began`` processes begin the run, and the last ``leave`` of them die. Then all other processes come."""
    os.environ.pop("RANK", None)  # the first rank that is free
    faults, size = decent_dp.Tolerate(dead_after=5.0, max_workers=n - leave), n - leave
    group = dist.new_group(range(began))
    if rank < began:
        model, optimizer, replica = make(rank, kind, process_group=group, faults=faults)
        train(model, optimizer, rank, lambda: replica.stats().rounds >= 10)
        if rank >= began - leave:
            say("come")
            die()
        if not leave:
            say("come")
    else:
        hear("come")
        model, optimizer, replica = make(rank, kind, seed=rank, transport=decent_dp.join(the_store()), faults=faults)
        with pytest.raises(RuntimeError, match=r"averaged was called in a process that joins a run, before its first step"):
            replica.averaged().__enter__()
    train(model, optimizer, rank, lambda: is_grown(replica, size))
    grown = replica.stats().rounds
    train(model, optimizer, rank, lambda: replica.stats().rounds >= grown + 100)
    saved = decent_dp.save(replica, path, wait=True)
    decent_dp.export(replica, f"{path}/mean.safetensors")
    roster, distance, stats = replica.roster, replica.consensus_distance(), replica.stats()
    own = values(model)
    with replica.averaged():
        mean = values(model)
    end(replica)
    return roster, own, mean, distance, saved.error, stats


@pytest.mark.parametrize(
    ("began", "leave", "come", "kind"),
    [
        pytest.param(3, 1, 2, "gossip", marks=pytest.mark.slow),
        pytest.param(1, 0, 2, "gossip", marks=pytest.mark.slow),
        pytest.param(4, 2, 4, "wrapper", marks=pytest.mark.slow),
        pytest.param(8, 4, 8, "gossip", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
def test_some_workers_leave_and_more_come(workers, tmp_path, began, leave, come, kind):
    outcomes = workers.outcomes(began + come, comes_and_goes, began, leave, kind, str(tmp_path))
    victims = range(began - leave, began)
    assert all(outcomes[rank].exitcode == -signal.SIGKILL for rank in victims)
    found = survivors([outcome for rank, outcome in enumerate(outcomes) if rank not in victims], -1)
    size = began - leave + come
    assert sorted(roster.seat for roster, *_ in found) == list(range(size))
    roster, own, mean, distance, error, stats = found[0]
    expected = [np.mean([values[name].double().numpy() for _, values, *_ in found], axis=0) for name in own]
    for other, _, others_mean, others_distance, error, others_stats in found:
        assert (other.members, other.size, error) == (roster.members, size, None)
        assert_same(others_mean, mean)
        assert others_distance == distance < 2.0  # of replicas that train on different data; seen up to 1.1
        assert others_stats.exchanges > 0
        assert abs(others_stats.rounds - stats.rounds) <= 3
    for one, exact in zip(mean.values(), expected, strict=True):
        np.testing.assert_allclose(one.numpy(), exact, rtol=1e-5, atol=1e-6)
    for name, value in load_file(tmp_path / "mean.safetensors").items():
        np.testing.assert_allclose(value.numpy(), mean[name].numpy(), rtol=1e-6)
    (step_folder,) = tmp_path.glob("step-*")
    assert len(list(step_folder.glob("*.safetensors"))) == size


@pytest.mark.slow
def test_a_rule_must_fit_the_numbers_that_deaths_leave():
    """OuterNesterov works with eight workers in base-2, and not with six or seven."""

    def work(transport: Any) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"^with 6 workers, which faults=Tolerate.*allows: OuterNesterov"):
            decent_dp.gossip(model, optimizer, rule=decent_dp.OuterNesterov(), faults=decent_dp.Tolerate(), transport=transport)
        return "refused"

    assert run_replicas(8, work) == ["refused"] * 8


def needs_a_name(rank: int, n: int) -> Any:
    topology = decent_dp.topo.make_topology("base-2", local_world_size=1, world_size=n, rank=rank)
    with pytest.raises(ValueError, match=r"max_workers=3\) with 2 workers needs a topology that can be rebuilt for more"):
        make(rank, topology=topology, faults=decent_dp.Tolerate(max_workers=3))


def test_a_topology_object_does_not_grow(workers):
    workers(2, needs_a_name)


def counts_replicas(rank: int, n: int) -> Any:
    """GossipAdamW takes the number of the members for its statistics."""
    model = net()
    optimizer = decent_dp.GossipAdamW(model.parameters(), lr=0.01)
    replica = decent_dp.gossip(model, optimizer, faults=decent_dp.Tolerate(dead_after=5.0))
    train(model, optimizer, rank, lambda: replica.stats().rounds >= 5)
    before = optimizer._replicas
    if rank == 2:
        die()
    train(model, optimizer, rank, lambda: replica.roster.size == 2 and replica.stats().rounds >= 20)
    train(model, optimizer, rank, lambda: optimizer._replicas != before)
    found = before, optimizer._replicas
    end(replica)
    return found


@pytest.mark.slow
def test_an_optimizer_with_statistics_knows_how_many_replicas_there_are(workers):
    assert survivors(workers.outcomes(3, counts_replicas), 2) == [(3, 2)] * 2
