"""DriftCorrection: its effect on replicas with different data, and refusals. test_outer_twins.py has it over all transports."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decent_dp import gossip
from decent_dp.rules import DriftCorrection
from decent_dp.sim import VirtualCluster
from decent_dp.topo import make_topology
from decent_dp.transport import run_replicas
from tests.helpers import some_in_the_fast_tests
from tests.test_law import matrix

N, LR = 8, 0.01
SLOW = pytest.mark.slow


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(16))


def pull(model: Any, direction: torch.Tensor) -> torch.Tensor:
    """The gradient is the batch."""
    return (model.at * direction).sum()


def train(rule: DriftCorrection | None, topology: str, directions: torch.Tensor, steps: int, **how: Any) -> VirtualCluster:
    cluster = VirtualCluster(
        Point(), lambda params: torch.optim.SGD(params, lr=LR), topology, N, loss_fn=pull, rule=rule, **how
    )
    for _ in range(steps):
        cluster.step(directions)
    return cluster


@pytest.fixture
def directions() -> torch.Tensor:
    return torch.randn(N, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "topology", ["complete", *(pytest.param(name, marks=SLOW) for name in ("ring", "base-2", "random-matching"))]
)
def test_a_constant_drift_is_cancelled_up_to_its_share(topology, directions):
    """The state is the share of the drift in the mean over a period, and replicas are that much closer together."""
    rule = DriftCorrection()
    plain, corrected = (train(one, topology, directions, 500) for one in (None, rule))
    assert corrected.consensus_distance() < 0.1 * plain.consensus_distance()
    if topology == "complete":
        drift = -LR * (directions - directions.mean(0))
        share = 0.2 / 0.21
        assert rule.fit(corrected.topology, lossy=False, partial=False).scale == pytest.approx(share)
        torch.testing.assert_close(corrected._exchange.states["at"]["drift"], share * drift, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"overlap": False}, {"compression": "int8"}])
def test_the_mean_moves_by_the_mean_of_the_steps(how, directions):
    cluster = train(DriftCorrection(), "ring", directions, 90, **how)
    torch.testing.assert_close(cluster.mean_model().at.detach(), -90 * LR * directions.mean(0), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_noise_of_single_steps_is_reduced_too():
    generator = torch.Generator().manual_seed(0)
    distances = []
    for rule in (None, DriftCorrection()):
        cluster = VirtualCluster(
            Point(), lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9), "base-2", N, loss_fn=pull, rule=rule
        )
        found = []
        for _ in range(400):
            cluster.step(torch.randn(N, 16, generator=generator))
            found.append(cluster.consensus_distance() ** 2)
        distances.append(np.mean(found[100:]) ** 0.5)
    assert distances[1] < 0.8 * distances[0]


# -- topologies in which it would oscillate ---------------------------------------------------------------------------------


def radius(rule: DriftCorrection, topology: Any) -> float:
    """The spectral radius of a period, for replicas without steps and without the mode in which all are equal."""
    n = topology.world_size
    away = np.eye(n) - 1 / n
    whole = np.eye(2 * n)
    for t in range(topology.period):
        pulled = matrix(topology.round(t), n) - np.eye(n)
        drift = np.block([-rule.gain * pulled, rule.decay * np.eye(n)])
        moved = np.block([np.eye(n) + pulled, np.zeros((n, n))]) - drift
        whole = np.block([[moved], [drift]]) @ whole
    outside = np.kron(np.eye(2), away)
    return float(np.abs(np.linalg.eigvals(outside @ whole @ outside)).max())


@pytest.mark.parametrize(
    ("name", "n", "gain"),
    some_in_the_fast_tests(["complete", "ring", "one-peer-exp", "base-2"], [4, 16], [0.1, 0.2, 0.3, 0.45])
    + [pytest.param(name, n, gain, marks=SLOW) for name in ("ring", "base-2") for n in (32, 100) for gain in (0.2, 0.45)],
)
def test_refused_where_corrections_would_grow(name, n, gain):
    if name == "one-peer-exp" and n == 100:
        return
    rule, topology = DriftCorrection(gain=gain), make_topology(name, local_world_size=1, world_size=n, rank=0)
    expected = radius(rule, topology)
    if abs(expected - 1) < 0.01:  # too slow to be seen in some hundred rounds
        return
    if expected < 1:
        assert rule.fit(topology, lossy=False, partial=False) == rule
    else:
        with pytest.raises(ValueError, match=r"oscillate there, and grow\. Use gain=0\.\d+\.") as caught:
            rule.fit(topology, lossy=False, partial=False)
        advised = float(re.search(r"gain=(0\.\d+)\.$", str(caught.value))[1])
        assert advised < gain
        assert radius(DriftCorrection(gain=advised), topology) < 1


@pytest.mark.parametrize("name", ["complete", "ring", "base-2", "random-matching", "hierarchical", "alternating-exp-ring"])
@pytest.mark.parametrize("n", [1, 2, 12, *(pytest.param(n, marks=SLOW) for n in (34, 100, 256))])
def test_without_a_gain_one_is_chosen(name, n):
    try:
        topology = make_topology(name, local_world_size=2 if n % 2 == 0 else 1, world_size=n, rank=0)
    except ValueError:
        return
    rule = DriftCorrection().fit(topology, lossy=False, partial=False)
    assert rule.gain in (0.1, 0.2)
    assert n > 1 or rule.gain == 0.2
    if topology.period is not None and n > 1:
        assert radius(rule, topology) < 1


@pytest.mark.slow
def test_every_part_of_a_composition_counts():
    for name in ("one-peer-exp:2000,complete", "complete:2000,one-peer-exp"):
        topology = make_topology(name, local_world_size=1, world_size=32, rank=0)
        with pytest.raises(ValueError, match="oscillate"):
            DriftCorrection(gain=0.45).fit(topology, lossy=False, partial=False)


def refusal(n: int, dtype: torch.dtype = torch.float32, **how: Any) -> str:
    """The error of ``gossip``, which must be the same on all n workers."""

    def run(transport: Any) -> str:
        model = Point().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(ValueError, match="DriftCorrection") as caught:
            gossip(model, optimizer, transport=transport, **how)
        return str(caught.value)

    (message,) = set(run_replicas(n, run))
    return message


@pytest.mark.parametrize(("topology", "mix_every"), [("ring", 4), ("ring:20,ring", 2)])
def test_rounds_without_a_mix_are_refused(topology, mix_every):
    """A correction for several steps moves a replica so far that its gradients pull it back, which looks like a drift."""
    assert "Use mix_every=1" in refusal(3, topology=topology, mix_every=mix_every, rule=DriftCorrection())


@pytest.mark.parametrize("how", [{"compression": "int8"}, {"compression": "bfloat16"}, {"dtype": torch.bfloat16}])
def test_rounded_means_of_groups_are_refused(how):
    """Their errors do not add up to zero over the replicas, and the corrections would add them up over the rounds."""
    assert "groups of 3 workers" in refusal(3, topology="complete", rule=DriftCorrection(), **how)


def test_low_rank_messages_are_refused():
    assert "in a few directions only" in refusal(2, topology="ring", rule=DriftCorrection(), compression="low-rank:1")


def test_all_workers_and_the_simulator_refuse_it():
    rule = DriftCorrection(gain=0.49)
    assert "5 replicas oscillate there" in refusal(5, topology="base-2", rule=rule)
    with pytest.raises(ValueError, match="5 replicas oscillate there"):
        VirtualCluster(Point(), lambda p: torch.optim.SGD(p, lr=LR), "base-2", 5, loss_fn=pull, rule=rule)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"gain": 0.0}, r"gain of DriftCorrection must be in \(0, 0.5\), got 0.0"),
        ({"gain": 0.5}, r"gain of DriftCorrection must be in \(0, 0.5\), got 0.5"),
        ({"decay": 1.0}, r"decay of DriftCorrection must be in \[0, 1\), got 1.0"),
        ({"decay": -0.1}, r"decay of DriftCorrection must be in \[0, 1\), got -0.1"),
    ],
)
def test_settings_out_of_range(how, message):
    with pytest.raises(ValueError, match=message):
        DriftCorrection(**how)
