"""One training job, made twice: by a real worker under the wrapper, and by the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Edge, Topology

STEPS = 5


class Conv(nn.Module):
    """A convolution and BatchNorm, whose buffers differ from worker to worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.norm(self.first(x.unflatten(1, (1, 4, 4)))).relu()).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.before, self.after = nn.Linear(4, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x.unflatten(1, (4, 4)))
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.out(self.after(x).mean(1))


class Branching(nn.Module):
    """A branch is chosen by the data, so that workers may use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if float(x.sum()) > 0 else y


class Unused(nn.Module):
    """Tied, frozen and never used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.never = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.out = nn.Linear(16, 16)
        self.out.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.first(x).tanh()))[:, :3]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)),
    "conv": Conv,
    "attention": Attention,
    "branching": Branching,
    "unused": Unused,
    # More than one block in one of the parameters.
    "wide": lambda: nn.Sequential(nn.Linear(16, 4200), nn.Tanh(), nn.Linear(4200, 3)),
    "channels-last": lambda: Conv().to(memory_format=torch.channels_last),
}

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": partial(optim_fn_adamw, lr=0.01),
    "accum-adamw": partial(optim_fn_accum_adamw, lr=0.01, accum_iter=2),
}


class Varying(Topology):
    """Idle workers, groups of three and weights that differ in one round; for 4 workers or more."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        idle = [Edge([i], 1.0) for i in range(4, self._world_size)]
        return [
            [Edge([1, 0], 0.75), Edge([2, 3], 0.4), *idle],
            [Edge([3, 1, 2], 0.6), Edge([0], 1.0), *idle],
            [Edge([0, 3], 0.0), Edge([1, 2], 1.0), *idle],
        ]


class Unrepeated(Topology):
    """Rounds without a period."""

    def round(self, t: int) -> list[Edge]:
        order = np.random.default_rng([5, t]).permutation(self._world_size).tolist()
        pairs = [Edge(order[i : i + 2], 0.5) for i in range(0, len(order) - 1, 2)]
        return pairs + [Edge(order[-1:], 1.0)] * (len(order) % 2)


def make_topology(name: str, n: int, rank: int) -> Any:
    """The argument ``topology=``."""
    if name == "varying":
        return Varying(1, world_size=n, rank=rank)
    if name == "unrepeated":
        return Unrepeated(1, world_size=n, rank=rank)
    if name == "graph":
        import networkx

        graph = networkx.random_regular_graph(3, n, seed=2) if n % 2 == 0 else networkx.path_graph(n)
        return Topology.from_graph(graph, world_size=n, rank=rank)
    return name


@dataclass(frozen=True)
class Case:
    """Attributes: ``inf``: (worker, step) whose loss is infinite; ``options`` are of both sides."""

    topology: str
    model: str
    optimizer: str
    dtype: str = "float64"
    local: int = 1
    inf: tuple[int, int] | None = None
    scaled: bool = False
    scheduled: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def tolerance(self) -> float:
        if self.dtype == "float32":
            return 1e-5
        adaptive = "adamw" in self.optimizer or self.options.get("compression") is not None
        return 1e-9 if adaptive else 1e-12

    def make_model(self) -> nn.Module:
        torch.manual_seed(11)
        return MODELS[self.model]().to(getattr(torch, self.dtype))

    def batch(self, t: int, rank: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng([rank, t])
        x, y = rng.normal(size=(6, 16)), rng.integers(0, 3, 6)
        if self.inf == (rank, t):
            x[0, 0] = np.inf
        return torch.from_numpy(x).to(getattr(torch, self.dtype)), torch.from_numpy(y)

    def both(self) -> dict[str, Any]:
        """The arguments of both sides."""
        schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_max=4, t_warmup=2) if self.scheduled else None
        scaler = torch.GradScaler("cpu", init_scale=64.0, growth_interval=2) if self.scaled else None
        return {"lr_scheduler_fn": schedule, "scaler": scaler, **self.options}


def snapshot(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def train_really(rank: int, n: int, case: Case) -> tuple[list[dict[str, np.ndarray]], float, int]:
    """A worker's parameters and buffers after each step, the consensus distance and the bytes that it sent."""
    inner, both, topology = case.make_model(), case.both(), make_topology(case.topology, n, rank)
    model = DecentralizedDataParallel(
        inner, OPTIMIZERS[case.optimizer], topology=topology, _local_world_size=case.local, **both
    )
    found = []
    for t in range(STEPS):
        x, y = case.batch(t, rank)
        loss = nn.functional.cross_entropy(model(x), y)
        (both["scaler"].scale(loss) if case.scaled else loss).backward()
        found.append(snapshot({**dict(inner.named_parameters()), **dict(inner.named_buffers())}))
    distance, sent = model.consensus_distance(), model.stats().bytes_sent
    model.close()
    return found, distance, sent


def simulate(n: int, case: Case, **how: Any) -> tuple[VirtualCluster, list[dict[str, np.ndarray]]]:
    """The cluster, and all replicas' parameters and buffers after each step, (n, ...)."""
    cluster = VirtualCluster(
        case.make_model(),
        OPTIMIZERS[case.optimizer],
        make_topology(case.topology, n, 0),
        n,
        local_world_size=case.local,
        **{**case.both(), **how},
    )
    found = []
    for t in range(STEPS):
        batches = [case.batch(t, rank) for rank in range(n)]
        cluster.step(*(torch.stack(column) for column in zip(*batches, strict=True)))
        found.append(snapshot({**cluster.parameters, **cluster.buffers}))
    return cluster, found


def compare(case: Case, n: int, real: list[Any], **how: Any) -> VirtualCluster:
    """Compares the simulator with the results of ``train_really`` on each worker."""
    cluster, found = simulate(n, case, **how)
    frozen = {name for name, param in case.make_model().named_parameters() if not param.requires_grad}
    for rank, (steps, distance, _) in enumerate(real):
        for t, values in enumerate(steps):
            assert values.keys() - frozen == found[t].keys()
            for name in found[t]:
                np.testing.assert_allclose(
                    found[t][name][rank],
                    values[name],
                    rtol=0,
                    atol=case.tolerance(),
                    err_msg=f"{case}, {n} workers: worker {rank}, step {t}, {name}",
                )
        assert abs(cluster.consensus_distance() - distance) <= 10 * case.tolerance() + 1e-7 * (case.dtype == "float32")
    # Replicas must differ where they are compared, or the mixing would not be.
    assert n == 1 or cluster.consensus_distance() > 1e-6 or not case.options.get("overlap", True), case
    return cluster
