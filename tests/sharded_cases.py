"""Sharded replicas for tests, and the unsharded ones that they must be equal to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decent_dp

# torch 2.6's fully_shard does not run on CPUs.
CPUS_CAN_SHARD = hasattr(torch.cpu.Stream, "record_event")
needs_shards = pytest.mark.skipif(not CPUS_CAN_SHARD, reason="this torch cannot shard a model on CPUs")
# Workers that are threads share the random numbers.
_ONE_AT_A_TIME = threading.Lock()
SGD = partial(torch.optim.SGD, lr=0.02, momentum=0.8)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Odd(nn.Module):
    """Sizes that two and three do not divide, and parameters that are smaller than that: some shards of them are empty."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with _ONE_AT_A_TIME:
            torch.manual_seed(seed)
            self.first, self.norm, self.out = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 1)
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.randn(1))
            self.still = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.norm(torch.tanh(self.first(x)))) * self.scale[0] + self.scale[1] + self.shift
        return result


@cache  # its groups take a while
def mesh_of(replicas: int, shards: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))


def shard(model: nn.Module, mesh: Any, **options: Any) -> Any:
    """FSDP2 of the model and of its first layer."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(next(model.children()), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def inputs(t: int, replica: int) -> tuple[Tensor, Tensor]:
    """The batch of a replica, for all of its shards."""
    generator = torch.Generator().manual_seed(1000 * replica + t)
    return torch.randn(6, 6, generator=generator), torch.randn(6, 1, generator=generator)


def whole(value: Tensor) -> Tensor:
    """A DTensor's values on all workers of the replica, or a tensor's."""
    value = value.detach()
    return value.full_tensor() if type(value).__name__ == "DTensor" else value.clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class Case:
    """How replicas train. ``tolerance``: of the comparison with unsharded ones."""

    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] = SGD
    fsdp: dict[str, Any] = field(default_factory=dict)
    bf16: bool = False
    scaled: bool = False
    clip: float = 0.0
    window: int = 1
    tolerance: float = 1e-6
    steps: int = 20


def made(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizers = case.optimizer(list(model.parameters()))
    return optimizers if isinstance(optimizers, list) else [optimizers]


def scaler_of(case: Case) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if case.scaled else None


class Sharded:
    """One worker's part of a replica."""

    def __init__(self, case: Case, mesh: Any, seed: int = 0) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        self.case, self.mesh = case, mesh
        self.replica, self.position = mesh.get_coordinate()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {**case.fsdp, **({"mp_policy": policy} if case.bf16 else {})}
        self.model = shard(Odd(seed), mesh["shard"], **options)
        self.optimizers, self.scaler = made(case, self.model), scaler_of(case)
        self.gossip = decent_dp.gossip(self.model, self.optimizers, scaler=self.scaler, **case.options)

    def loss(self, t: int) -> Tensor:
        x, y = (part.chunk(self.mesh["shard"].size())[self.position] for part in inputs(t, self.replica))
        result: Tensor = (self.model(x).float() - y).square().mean()
        return result

    def gradients(self, t: int, scale: float = 1.0) -> None:
        for i in range(self.case.window):
            last = i == self.case.window - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            (scale * self.loss(100 * i + t) / self.case.window).backward()

    def move(self) -> None:
        self.model.double().float()

    def looked_at(self, t: int) -> float:
        """The loss of the whole batch, for the present model: FSDP keeps the root's gathered parameters after it."""
        with torch.no_grad():
            own = self.loss(t)
            torch.distributed.all_reduce(own, group=self.mesh["shard"].get_group())
        return float(own) / int(self.mesh["shard"].size())


class Unsharded:
    """A replica of one worker, fed the whole batch part by part, with gradients averaged as FSDP does."""

    def __init__(self, case: Case, transport: Any, shards: int, seed: int = 0) -> None:
        self.case, self.shards, self.replica = case, shards, transport.rank
        self.model = Odd(seed)
        self.optimizers, self.scaler = made(case, self.model), scaler_of(case)
        self.gossip = decent_dp.gossip(self.model, self.optimizers, scaler=self.scaler, transport=transport, **case.options)

    def losses(self, t: int) -> list[Tensor]:
        found = []
        for x, y in zip(*(part.chunk(self.shards) for part in inputs(t, self.replica)), strict=True):
            if self.case.bf16:
                narrow = {name: param.bfloat16() for name, param in self.model.named_parameters()}
                out = torch.func.functional_call(self.model, narrow, x.bfloat16()).float()
            else:
                out = self.model(x)
            found.append((out - y).square().mean())
        return found

    def gradients(self, t: int, scale: float = 1.0) -> None:
        for i in range(self.case.window):
            for loss in self.losses(100 * i + t):
                (scale * loss / self.case.window).backward()
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad /= self.shards

    def move(self) -> None:
        self.model.double().float()

    def looked_at(self, t: int) -> float:
        with torch.no_grad():
            return float(sum(self.losses(t))) / self.shards


def zero_grad(run: Any) -> None:
    # The model's own would look for gradients at gathered parameters.
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def step(run: Any, t: int) -> None:
    zero_grad(run)
    run.gradients(t)
    if run.case.clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), run.case.clip)
    for optimizer in run.optimizers:
        optimizer.step()


def train(run: Any) -> dict[str, Any]:
    """A run that is read and edited between steps, and its results."""
    seen = []
    for t in range(run.case.steps):
        step(run, t)
        if t == 4:
            seen.append(run.looked_at(t))  # gathered copies stay, and the next step makes them stale
        if t == 6:
            seen.append(run.looked_at(t))
            with run.gossip.averaged():
                seen += [run.gossip.consensus_distance(), run.looked_at(t)]
            seen += [run.looked_at(t), run.gossip.consensus_distance()]
        if t == 9:
            run.gossip.flush()
        if t == 10:
            run.move()  # the same values, in other memory
        if t == 11:
            run.looked_at(t)
            with torch.no_grad():
                for module in run.model.modules():
                    if hasattr(module, "reshard"):
                        module.reshard()
                run.model.first.weight.mul_(0.5)  # an edit in place
        if t == 13:
            run.looked_at(t)
            run.gossip.average_()
            seen += [run.looked_at(t), run.gossip.consensus_distance()]
    return ended(run, seen)


def ended(run: Any, seen: list[float]) -> dict[str, Any]:
    distance, stats = run.gossip.consensus_distance(), run.gossip.stats()
    own = values(run.model)
    with run.gossip.averaged():
        mean = values(run.model)
    run.gossip.close()
    return {"seen": seen, "distance": distance, "own": own, "mean": mean, "counts": (stats.updates, stats.rounds)}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float, where: str) -> None:
    assert found["counts"] == wanted["counts"], where
    for key in ("own", "mean"):
        assert found[key].keys() == wanted[key].keys(), where
        for name, value in wanted[key].items():
            torch.testing.assert_close(
                found[key][name], value, rtol=tolerance, atol=tolerance, msg=lambda m, at=f"{where}: {key} {name}": f"{at}: {m}"
            )
    for one, other in zip([*found["seen"], found["distance"]], [*wanted["seen"], wanted["distance"]], strict=True):
        assert abs(one - other) < 3 * tolerance, (where, found["seen"], wanted["seen"])
