"""The law of mixing, computed independently: NumPy in float64, PyTorch DDP, and the threads of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.topo import Edge, Topology
from decent_dp.transport import run_replicas
from tests.helpers import some_and_all

TOPOLOGIES = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"]


class Varying(Topology):
    """Idle workers, a group of three, weights other than 1/2 and weights that vary by round."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [
            [Edge([0, 1], 0.75), Edge([2], 1.0), Edge([3], 1.0)],
            [Edge([1, 2, 3], 0.5), Edge([0], 1.0)],
            [Edge([0, 3], 0.3), Edge([1, 2], 0.6)],
        ]


# -- the NumPy twin: linear least squares, momentum SGD or AdamW, x in float64 -------------------------------------------


def matrix(edges: list[Edge], n: int) -> np.ndarray:
    """The mixing matrix of a round, from the definition of an edge."""
    w = np.zeros((n, n))
    for edge in edges:
        for i in edge.ranks:
            for j in edge.ranks:
                w[i, j] = edge.weight if i == j else (1 - edge.weight) / (len(edge.ranks) - 1)
    return w


def data(rank: int, t: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rank, t])
    return rng.normal(size=(6, 5)), rng.normal(size=(6, 3))


def gradient(x: np.ndarray, rank: int, t: int) -> np.ndarray:
    """Of mean((A X - B)²) over the entries, X being 5 × 3."""
    a, b = data(rank, t)
    return 2 * a.T @ (a @ x - b) / b.size


class SgdTwin:
    def __init__(self, n: int) -> None:
        self.v: list[Any] = [None] * n

    def __call__(self, i: int, t: int, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.v[i] = g if self.v[i] is None else 0.9 * self.v[i] + g
        return x - 0.1 * self.v[i]


class AdamWTwin:
    def __init__(self, n: int) -> None:
        self.m, self.v = [0.0] * n, [0.0] * n

    def __call__(self, i: int, t: int, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.m[i] = 0.9 * self.m[i] + 0.1 * g
        self.v[i] = 0.99 * self.v[i] + 0.01 * g * g
        x = x * (1 - 0.05 * 0.1)
        m, v = self.m[i] / (1 - 0.9 ** (t + 1)), self.v[i] / (1 - 0.99 ** (t + 1))
        return x - 0.05 * m / (np.sqrt(v) + 1e-8)


def twin(topology: Topology, n: int, steps: int, step: Any, overlap: bool, factor: float) -> list[np.ndarray]:
    start = np.random.default_rng(7).normal(size=(5, 3))
    x = [start.copy() for _ in range(n)]
    sent: list[np.ndarray] = []
    for t in range(steps):
        g = [gradient(x[i], i, t) for i in range(n)]
        if overlap and t > 0:
            w = matrix(topology.round(t - 1), n)
            x = [x[i] + factor * sum(w[i, j] * (sent[j] - sent[i]) for j in range(n)) for i in range(n)]
        x = [step(i, t, x[i], g[i]) for i in range(n)]
        sent = [xi.copy() for xi in x]
        if not overlap:
            w = matrix(topology.round(t), n)
            x = [x[i] + factor * sum(w[i, j] * (sent[j] - sent[i]) for j in range(n)) for i in range(n)]
    return x


# -- the same with the library -------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """X as two parameters, so that there can be several buckets."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.from_numpy(np.random.default_rng(7).normal(size=(5, 3)))
        self.upper, self.lower = nn.Parameter(x[:2].clone()), nn.Parameter(x[2:].clone())

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a @ torch.cat([self.upper, self.lower])


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), SgdTwin),
    "adamw": (partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1), AdamWTwin),
}


def train(rank: int, steps: int, factor: float = 1.0, **options: Any) -> np.ndarray:
    model = DecentralizedDataParallel(Linear(), **options)
    model.set_adaptive_factor(factor)
    for t in range(steps):
        a, b = (torch.from_numpy(array) for array in data(rank, t))
        (model(a) - b).square().mean().backward()
    assert model.stats().updates == model.stats().rounds == steps
    values = torch.cat([p.detach().clone() for p in model.module.parameters()]).numpy()
    model.close()
    return values


CASES = [
    (name, optimizer, overlap, factor)
    for name in [*TOPOLOGIES, "varying"]
    for optimizer in OPTIMIZERS
    for overlap in (True, False)
    for factor in (1.0, 0.4)
]


def options_of(case: tuple[str, str, bool, float], i: int) -> dict[str, Any]:
    name, optimizer, overlap, factor = case
    return {
        "optim_fn": OPTIMIZERS[optimizer][0],
        "topology": name,
        "_local_world_size": 2 if name == "alternating-exp-ring" else 1,
        "overlap": overlap,
        "factor": factor,
        "param_as_bucket_view": i % 2 == 0,
        "bucket_size_in_mb": 25 if i % 3 else 1e-6,
    }


def train_each(rank: int, n: int, cases: list[tuple[str, str, bool, float]]) -> list[np.ndarray]:
    from decent_dp.topo import TopologyReg

    TopologyReg.registry["varying"] = Varying
    return [train(rank, 4, **options_of(case, i)) for i, case in enumerate(cases)]


@some_and_all(CASES)
def test_four_steps_on_four_workers_equal_numpy(workers, cases):
    results = workers(4, train_each, cases)
    for i, (name, optimizer, overlap, factor) in enumerate(cases):
        local = options_of(cases[i], i)["_local_world_size"]
        kind = {"varying": Varying}.get(name)
        if kind is None:
            from decent_dp.topo import TopologyReg

            kind = TopologyReg.registry[name]
        topology = kind(local, world_size=4, rank=0)
        want, alone = (twin(topology, 4, 4, OPTIMIZERS[optimizer][1](4), overlap, rate) for rate in (factor, 0.0))
        assert not np.allclose(want, alone, atol=1e-6), "mixing must matter, or the comparison would prove nothing"
        for rank in range(4):
            np.testing.assert_allclose(results[rank][i], want[rank], rtol=0, atol=1e-13, err_msg=f"{cases[i]} worker {rank}")


@pytest.mark.parametrize("n", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_in_process_equals_gloo(workers, n):
    names = ["complete", "ring"]
    gloo = workers(n, several, names)
    threads = run_replicas(n, lambda transport: several(transport.rank, n, names, transport))
    for rank in range(n):
        for got, want in zip(threads[rank], gloo[rank], strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)


def several(rank: int, n: int, names: list[str], transport: Any = None) -> list[np.ndarray]:
    return [
        train(rank, 5, topology=name, overlap=overlap, transport=transport, optim_fn=OPTIMIZERS["adamw"][0])
        for name in names
        for overlap in (True, False)
    ]


# -- PyTorch DDP ---------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def twenty_steps_beside_ddp(rank: int, n: int) -> float:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
    theirs = DistributedDataParallel(mlp())
    optimizer = sgd(theirs.parameters())
    ours = DecentralizedDataParallel(mlp(), sgd, topology="complete", overlap=False, bucket_size_in_mb=0.002)
    torch.manual_seed(rank)
    worst = 0.0
    for _ in range(20):
        x, y = torch.randn(8, 10), torch.randn(8, 4)
        optimizer.zero_grad()
        loss = (theirs(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        other = (ours(x) - y).square().mean()
        other.backward()
        worst = max(worst, abs(float(loss.detach() - other.detach())))
        for a, b in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
            worst = max(worst, float((a.detach() - b.detach()).abs().max()))
    ours.close()
    return worst


def test_complete_synchronous_sgd_equals_pytorch_ddp(workers):
    assert max(workers(3, twenty_steps_beside_ddp)) <= 1e-6
