"""GASLoC with workers as threads: against NumPy in float64, written from the formula of the paper."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.rules import GASLoC, Gossip, OuterNesterov
from decent_dp.rules.growth import grows
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import make_topology
from decent_dp.topo.schedule import stages_of
from decent_dp.transport import run_replicas
from tests.helpers import some_in_the_fast_tests
from tests.test_law import Linear, SgdTwin, data, gradient, matrix
from tests.test_mix_every import mix_of, parts

N, STEPS = 4, 13


def start() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(5, 3))


def published(topology: str, rule: GASLoC, h: int) -> np.ndarray:
    """θ <- θ + η g - Λ(θ + η g) + γ (θ + η g - θ_last - η g_last), with g the movement in h local steps; without overlap.

    Rows with turns of their own are optimized apart from each other.
    """
    made = make_topology(topology, local_world_size=1, world_size=N, rank=0)
    inner = SgdTwin(N)
    x, theta = np.stack([start()] * N), np.stack([start()] * N)
    last = theta.copy()
    for t in range(STEPS):
        x = np.stack([inner(i, t, x[i], gradient(x[i], i, t)) for i in range(N)])
        for part in parts(h):
            mix = mix_of(t, h, part.offset)
            if mix is None:
                continue
            rows = slice(None), part.rows
            laplacian = np.eye(N) - matrix(made.round(mix), N)
            p = theta[rows] + rule.lr * (x[rows] - theta[rows])
            theta[rows] = p - np.einsum("ij,jkl->ikl", laplacian, p) + rule.momentum * (p - last[rows])
            last[rows], x[rows] = p, theta[rows]
    return x


def train(transport: Any, topology: str, rule: Any, h: int, **options: Any) -> np.ndarray:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    how: dict[str, Any] = {"topology": topology, "rule": rule, "mix_every": h, "transport": transport, **options}
    model = DecentralizedDataParallel(Linear(), sgd, **how)
    for t in range(STEPS):
        a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
        (model(a) - b).square().mean().backward()
    model.close()
    return torch.cat([param.detach() for param in model.module.parameters()]).numpy()


RULES = [("one-peer-exp", GASLoC()), ("ring", GASLoC(0.6, 0.2)), ("complete", GASLoC(1, 0))]


@pytest.mark.parametrize(("of", "h"), some_in_the_fast_tests(range(len(RULES)), [1, 3]))
def test_it_is_the_published_method(of, h):
    topology, rule = RULES[of]
    want = published(topology, rule, h)
    found = run_replicas(N, lambda at: train(at, topology, rule, h, overlap=False, bucket_size_in_mb=1e-6 if h == 1 else 25))
    np.testing.assert_allclose(np.stack(found), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("overlap", [pytest.param(True, marks=pytest.mark.slow), False])
def test_without_momentum_it_is_plain_gossip(overlap):
    found = [
        np.stack(run_replicas(N, lambda at, rule=rule: train(at, "one-peer-exp", rule, 2, overlap=overlap)))
        for rule in (GASLoC(lr=1, momentum=0), Gossip())
    ]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


def test_steps_during_an_exchange_are_kept():
    """With overlap the mean of the replicas moves by all steps: those of zero size move nothing."""
    rule = GASLoC(1.0, 0.4)

    def still(transport: Any) -> np.ndarray:
        model = DecentralizedDataParallel(
            Linear(), partial(torch.optim.SGD, lr=0.0), topology="ring", rule=rule, mix_every=2, transport=transport
        )
        with torch.no_grad():
            for param in model.module.parameters():
                param += 0.1 * (transport.rank - 1.5)  # the mean stays
        for t in range(40):
            a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
            (model(a) - b).square().mean().backward()
        model.close()
        return torch.cat([param.detach() for param in model.module.parameters()]).numpy()

    found = np.stack(run_replicas(N, still))
    np.testing.assert_allclose(found.mean(0), start(), rtol=0, atol=1e-12)
    assert np.abs(found - start()).max() < 1e-2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"lr": 0}, ValueError, "lr of GASLoC must be a positive number, got 0"),
        ({"lr": "1"}, TypeError, "lr of GASLoC must be a positive number, got '1'"),
        ({"momentum": 1.0}, ValueError, r"momentum of GASLoC must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, ValueError, r"momentum of GASLoC must be in \[0, 1\), got -0.1"),
    ],
)
def test_wrong_settings_are_named(arguments, kind, message):
    with pytest.raises(kind, match=message):
        GASLoC(**arguments)


# -- rules that would drive replicas apart ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "topology", "n", "works"),
    [
        (OuterNesterov(), "base-2", 8, None),
        pytest.param(OuterNesterov(), "base-2", 5, "0.7", marks=pytest.mark.slow),
        pytest.param(OuterNesterov(), "base-2", 6, "0.7", marks=pytest.mark.slow),
        pytest.param(OuterNesterov(), "base-2", 16, "0.7", marks=pytest.mark.slow),
        (OuterNesterov(), "complete", 6, None),
        (GASLoC(1.0, 0.9), "base-2", 8, "0.7"),
        pytest.param(GASLoC(1.0, 0.9), "random-matching", 6, "0.7", marks=pytest.mark.slow),
        pytest.param(GASLoC(), "ring:9,base-2", 16, None, marks=pytest.mark.slow),
        (GASLoC(1.0, 0.9), "complete:9,base-2", 16, "0.5"),
    ],
)
@pytest.mark.parametrize("h", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_momentum_that_drives_replicas_apart_is_refused(rule, topology, n, works, h):
    """Against the spectral radius of a period; without a period, against the distance of simulated replicas."""
    made = make_topology(topology, local_world_size=1, world_size=n, rank=0).every(h)
    if works is None:
        assert rule.fit(made, lossy=False, partial=False) == rule
    else:
        with pytest.raises(ValueError, match=f"drives {n} replicas apart. Use momentum={works}, or topology='complete'"):
            rule.fit(made, lossy=False, partial=False)
    if h > 1:
        return

    assert diverges(rule, topology, n) == (works is not None)
    if works is not None:
        assert not diverges(replace(rule, momentum=float(works)), topology, n)


def diverges(rule: Any, topology: str, n: int) -> bool:
    last = stages_of(make_topology(topology, local_world_size=1, world_size=n, rank=0))[-1].topology
    if last.period is None:
        return distance(rule, topology, n) > 1000
    one, period = np.eye(n), np.eye(2 * n)
    for t in range(last.period):
        w, mu = last.mixing_matrix(t), rule.momentum
        if isinstance(rule, GASLoC):  # of anchors and last proposals
            mix = np.block([[w + mu * one, -mu * one], [one, 0 * one]])
        else:  # of anchors and momenta
            mix = np.block([[one - rule.lr * (1 + mu) * (one - w), -rule.lr * mu**2 * one], [one - w, mu * one]])
        period = mix @ period
    apart = np.kron(np.eye(2), one - 1 / n)
    return bool(np.abs(np.linalg.eigvals(apart @ period @ apart)).max() > 1)


def distance(rule: Any, topology: str, n: int) -> float:
    """Of simulated replicas that follow noise, whatever the rule refuses."""

    class Unfitted(type(rule)):
        def fit(self, topology: Any, **_: Any) -> Any:
            return self

    cluster = VirtualCluster(
        nn.Linear(2, 2, bias=False),
        partial(torch.optim.SGD, lr=1.0),
        topology,
        n,
        loss_fn=lambda model, x: (model.weight * x).sum(),
        rule=Unfitted(rule.lr, rule.momentum),
    )
    for t in range(400):
        cluster.step(torch.randn(n, 2, 2, generator=torch.Generator().manual_seed(t)))
    return cluster.consensus_distance()


@pytest.mark.parametrize("rule", [OuterNesterov(momentum=0.1), GASLoC(momentum=0.1)])
def test_momentum_with_low_rank_messages_is_refused(rule):
    made = make_topology("ring", local_world_size=1, world_size=4, rank=0)
    with pytest.raises(ValueError, match="Use momentum=0, or compression=None"):
        rule.fit(made, lossy=False, partial=True)
    assert replace(rule, momentum=0.0).fit(made, lossy=False, partial=True).momentum == 0


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (1.5, 0.0), (2.5, 0.0), (2.5, 0.5), (100.0, 0.0)])
def test_a_rate_that_drives_replicas_apart_is_refused(lr, momentum, n):
    """The distance of two that mix is multiplied by 1 - lr."""
    rule, ring = OuterNesterov(lr, momentum), make_topology("ring", local_world_size=1, world_size=n, rank=0)
    assert diverges(rule, "ring", n) == (lr > 2)
    if lr < 2:
        assert rule.fit(ring, lossy=False, partial=False) == rule
        return
    with pytest.raises(ValueError, match=rf"drives {n} of them apart, whatever the momentum is\. Use lr=1 or less"):
        rule.fit(ring, lossy=False, partial=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e60])
def test_replicas_that_are_no_numbers_are_driven_apart(value):
    class Breaking(Gossip):
        def apply(self, values: Any, state: Any, difference: Any, round: Any) -> None:
            values[0] = value

    assert grows(Breaking(), make_topology("ring", local_world_size=1, world_size=4, rank=0))
