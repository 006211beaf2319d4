"""Gossip of where replicas will be, with workers as threads: against NumPy in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import decent_dp
from decent_dp.rules import Anticipation, DriftCorrection
from decent_dp.sim import VirtualCluster
from decent_dp.topo import SwitchTopology, make_topology
from decent_dp.transport import run_replicas
from tests.test_law import Linear, SgdTwin, data, gradient, matrix

N, STEPS = 4, 9


def twin(topology: str, steps: float) -> np.ndarray:
    """x <- x + s; what was sent an update ago is mixed in; x + steps·s is sent."""
    made = make_topology(topology, local_world_size=1, world_size=N, rank=0)
    inner = SgdTwin(N)
    x = np.stack([np.random.default_rng(7).normal(size=(5, 3))] * N)
    sent: Any = None
    for t in range(STEPS):
        stepped = np.stack([inner(i, t, x[i], gradient(x[i], i, t)) for i in range(N)])
        s = stepped - x
        x = stepped
        if sent is not None:
            w = matrix(made.round(t - 1), N) - np.eye(N)
            # Before the mix a replica has moved by its step; the next proposal counts that step alone.
            x = x + np.einsum("ij,jkl->ikl", w, sent)
        sent = x + steps * s
    return x


def train(transport: Any, topology: str, rule: Anticipation) -> np.ndarray:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = decent_dp.gossip(model, optimizer, topology=topology, rule=rule, transport=transport)
    for t in range(STEPS):
        a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
        optimizer.zero_grad()
        (model(a) - b).square().mean().backward()
        optimizer.step()
    replica.close()
    return torch.cat([param.detach() for param in model.parameters()]).numpy()


@pytest.mark.parametrize(("topology", "steps"), [("one-peer-exp", 1.0), ("ring", 0.4), ("complete", 1.0)])
def test_it_is_the_formula(topology, steps):
    found = run_replicas(N, lambda at: train(at, topology, Anticipation(steps)))
    np.testing.assert_allclose(np.stack(found), twin(topology, steps), rtol=0, atol=1e-12)


def distance(rule: Anticipation | None) -> float:
    """The mean distance of eight replicas that follow noisy gradients with momentum."""
    cluster = VirtualCluster(
        nn.Linear(8, 8, bias=False),
        partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        "base-2",
        8,
        loss_fn=lambda model, x: (model(x) - x).square().mean(),
        rule=rule,
    )
    found = []
    for t in range(150):
        cluster.step(torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(t)))
        found.append(cluster.consensus_distance())
    return float(np.mean(found[20:]))


def test_replicas_are_closer_together():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, ahead = distance(None), distance(Anticipation())
    assert ahead < 0.85 * plain


@pytest.mark.parametrize("topology", ["ring", "complete:4,ring"])
def test_updates_without_a_mix_are_refused_on_all_workers(topology):
    def work(at: Any) -> str:
        model = Linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how: dict[str, Any] = {"topology": topology, "mix_every": 2, "rule": Anticipation(), "transport": at}
        with pytest.raises(ValueError, match="Use mix_every=1, or another rule") as error:
            decent_dp.gossip(model, optimizer, **how)
        return str(error.value)

    assert len(set(run_replicas(2, work))) == 1


@pytest.mark.parametrize("rule", [Anticipation(), DriftCorrection()])
def test_a_part_that_mixes_rarely_is_refused_wherever_it_stands(rule):
    """Replicas were 3e5 apart in such a composition."""
    ring = make_topology("ring", local_world_size=1, world_size=4, rank=0)
    for parts in ([(ring.every(8), 1000), ring], [(ring, 1000), (ring.every(8), 10), ring], [(ring, 1000), ring.every(2)]):
        with pytest.raises(ValueError, match="Use mix_every=1, or another rule"):
            rule.fit(SwitchTopology(*parts), lossy=False, partial=False)
    rule.fit(SwitchTopology((ring, 1000), ring), lossy=False, partial=False)


@pytest.mark.parametrize(
    ("steps", "kind"), [(0.0, ValueError), (2.0, ValueError), (-1.0, ValueError), ("1", TypeError), (None, TypeError)]
)
def test_wrong_settings_are_named(steps, kind):
    with pytest.raises(kind, match=r"steps of Anticipation must be in \(0, 2\), got"):
        Anticipation(steps)
