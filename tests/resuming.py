"""Runs that are stopped and resumed, and the same runs without a stop, for tests of saved state."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import AccumAdamW
from decent_dp.replica.snapshot import put_back, take
from decent_dp.transport import InProcessTransport
from tests.helpers import SGD, loss, net

_ONE_AT_A_TIME = threading.Lock()
ADAMW = partial(torch.optim.AdamW, lr=0.02)


def dumb_copy(value: Any) -> Any:
    """A copy that shares no memory and has only shape, dtype and bytes, as a file would."""
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        indices, numbers = dumb_copy(value._indices()), dumb_copy(value._values())
        whole = value.is_coalesced() or None
        return torch.sparse_coo_tensor(indices, numbers, value.shape, is_coalesced=whole, check_invariants=True)
    if isinstance(value, Tensor):
        assert value.layout == torch.strided, "no file can contain this"
        raw = bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else b""
        flat = torch.frombuffer(bytearray(raw), dtype=value.dtype) if raw else torch.empty(0, dtype=value.dtype)
        return flat.reshape(value.shape)
    if isinstance(value, dict):
        return {key: dumb_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(dumb_copy(item) for item in value)
    assert value is None or isinstance(value, (bool, int, float, str, bytes)), f"no file can contain {value!r}"
    return value


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Every bit of two nested values is the same; NaN equals NaN."""
    assert type(a) is type(b), (where, a, b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), (where, a.dtype, b.dtype, a.shape, b.shape)
        if a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced(), where
            assert_equal((a._indices(), a._values()), (b._indices(), b._values()), where)
            return
        one, other = (t.detach().contiguous().reshape(-1) for t in (a, b))
        if a.is_floating_point():
            one, other = (t.masked_fill(t.isnan(), math.nan) for t in (one, other))
        same = not a.numel() or torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert same, (where, (one.double() - other.double()).abs().nan_to_num(math.inf).max())
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (where, sorted(a.keys() ^ b.keys()))
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_equal(one, other, f"{where}/{i}")
    else:
        assert a == b or (a != a and b != b), (where, a, b)


# -- jobs ------------------------------------------------------------------------------------------------------------------


def step_plain(model: Any, t: int, rank: int) -> float:
    value = loss(model, t, rank)
    value.backward()
    return float(value.detach())


@dataclass(frozen=True)
class Job:
    """A worker's job: a model, the wrapper's options, and one iteration."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[int], nn.Module] = net
    optim_fn: Any = SGD
    step: Callable[[Any, int, int], float] = step_plain
    scaled: bool = False

    def wrap(self, seed: int, transport: Any = None, **options: Any) -> DecentralizedDataParallel:
        how = {**self.options, **options}
        if self.scaled:
            how["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        with _ONE_AT_A_TIME:  # workers that are threads share the random numbers
            model = self.model(seed)
        return DecentralizedDataParallel(model, self.optim_fn, transport=transport, **how)

    def train(self, model: DecentralizedDataParallel, steps: Iterable[int], rank: int) -> list[Any]:
        """Of each iteration: its loss, and the learning rates after it."""
        return [(self.step(model, t, rank), rates(model)) for t in steps]


def rates(model: DecentralizedDataParallel) -> list[list[float]]:
    """Those of the optimizers' first groups, of their second ones, …: whatever the buckets are, and empty groups too."""
    found: list[set[float]] = []
    for optimizer, scheduler in zip(model.optimizers, model._lr_schedulers, strict=True):
        for i, group in enumerate(optimizer.param_groups):
            found += [set()] * (i >= len(found))
            last = scheduler.get_last_lr() if scheduler is not None else []
            found[i] |= {float(group["lr"]), *map(float, last[i : i + 1])}
    return [sorted(own) for own in found]


def run_through(
    job: Job, transport: Any, rank: int, total: int, stops: Iterable[int] = (), **options: Any
) -> tuple[dict[int, Any], list[Any], Any]:
    """A run without a stop: copies of its snapshots before the iterations ``stops``, its losses, and its end."""
    model = job.wrap(0, transport, **options)
    snapshots, losses = {}, []
    for t in range(total):
        if t in stops:
            snapshots[t] = dumb_copy(take(model.replica))
        losses += job.train(model, [t], rank)
    end = dumb_copy(take(model.replica))
    model.close()
    return snapshots, losses, end


def go_on(
    job: Job, transport: Any, rank: int, steps: Iterable[int], snapshot: Any, stops: Iterable[int] = (), **options: Any
) -> tuple[list[Any], Any]:
    """Another worker, with other weights, that resumes from a snapshot: its losses and its end. It saves before ``stops``."""
    model = job.wrap(100 + rank, transport, **options)
    put_back(model.replica, snapshot)
    assert_equal(dumb_copy(take(model.replica)), snapshot, "just restored")
    losses = []
    for t in steps:
        if t in stops:
            take(model.replica)
        losses += job.train(model, [t], rank)
    end = dumb_copy(take(model.replica))
    model.close()
    return losses, end


PAIRS = Job({"topology": "one-peer-exp"})


def trained(job: Job, steps: int, transport: Any = None, **options: Any) -> DecentralizedDataParallel:
    model = job.wrap(0, transport or InProcessTransport(), **options)
    job.train(model, range(steps), 0 if transport is None else transport.rank)
    return model


# -- models and iterations of many kinds -----------------------------------------------------------------------------------


class Counted(nn.Module):
    """Scales by the number of its calls, which is only in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * (1.0 + 0.1 * (self.calls % 3))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        if state["calls"] < 0:
            raise ValueError("calls below zero")
        self.calls = state["calls"]


class Zoo(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.wide = nn.Linear(8, 8).double()
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.frozen.requires_grad_(True).weight
        self.frozen.bias.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(3, 8).t())
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.seldom = nn.Linear(8, 3)
        self.never = nn.Parameter(torch.randn(4))
        self.counted = Counted()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        x = torch.tanh(self.norm(self.conv(x.reshape(-1, 2, 3, 1).expand(-1, 2, 3, 3)))).flatten(1)[:, :8]
        x = self.counted(self.tied(self.frozen(x)))
        x = self.narrow(x.bfloat16()).float() + self.wide(x.double()).float()
        out = x @ self.turned * self.scale + self.empty.sum() + 0.01 * self.phase.abs()
        return out + self.seldom(x) if int(self.seen) % 3 == 0 else out


class Wide(torch.optim.Optimizer):
    """Keeps its state in more digits than its parameters."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__([param for _, param in params], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["parts"] = [torch.zeros_like(param, dtype=torch.float64), 0]
                    state["parts"][0].mul_(0.9).add_(param.grad.double())
                    state["parts"][1] += 1
                    param.sub_((group["lr"] * state["parts"][0]).to(param.dtype))


class Hooked(torch.optim.SGD):
    """Reads the others' values before each mix, and moves by them."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def pre_average_hook(self, edge: Any, weight: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["far"] = 0.5 * state.get("far", torch.zeros_like(param)) + param.comm_buffer
                param.comm_buffer.add_(state["far"], alpha=0.01)


class Embedded(nn.Module):
    """Gradients that are sparse."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.table((x.abs() * 4).long().clamp(max=8)).mean(1))
        return result


class Reentrant(nn.Module):
    """Gradients that come from backwards inside the backward, some twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = net(seed)
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        once: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        twice: Tensor = checkpoint(self.inner, x * 2, use_reentrant=True)
        return once + twice + self.inner(x)


class Branches(nn.Module):
    """Gradients come in the order in which the branches are taken."""

    def __init__(self, seed: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        parts = {i: torch.tanh(self.branches[i](x)) for i in self.order}
        return torch.stack([parts[i] for i in range(4)]).sum(0)


def step_clamped(model: Any, t: int, rank: int) -> float:
    value = step_plain(model, t, rank)
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.3, 0.3)
    return value


def step_scaled(model: Any, t: int, rank: int) -> float:
    scaler = model.replica.scaler
    value = loss(model, t, rank)
    scaler.scale(value * (float("inf") if t == 3 else 1.0)).backward()
    return float(value.detach()) + scaler.get_scale()


def step_in_windows(model: Any, t: int, rank: int) -> float:
    """The loop that scripts use."""
    model.set_accumulate_grad(t % 3 != 2)
    return step_plain(model, t, rank)


def step_in_windows_scaled(model: Any, t: int, rank: int) -> float:
    model.set_accumulate_grad(t % 2 == 0)
    return step_scaled(model, t, rank)


def step_pending(model: Any, t: int, rank: int) -> float:
    """The loop of the pages."""
    if t % 3 == 0:
        model.set_accumulate_grad(True)
    value = step_plain(model, t, rank)
    if t % 3 == 2:
        model.set_accumulate_grad(False)
    return value


def step_no_sync(model: Any, t: int, rank: int) -> float:
    """The loop of DDP scripts."""
    with model.no_sync() if t % 3 != 2 else contextlib.nullcontext():
        return step_plain(model, t, rank)


def step_with_factor(model: Any, t: int, rank: int) -> float:
    """Replicas mix less from the start, and for a while not at all."""
    if t in (0, 3, 4):
        model.set_adaptive_factor((0.5, 0.0, 0.75)[(0, 3, 4).index(t)])
    return step_plain(model, t, rank)


def cosine(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 6)], [3]
    )


MANY = {"bucket_size_in_mb": 1e-6}
JOBS: dict[str, Job] = {
    "momentum": Job({"lr_scheduler_fn": cosine, **MANY}),
    "clip": Job({"grad_clip_norm": 0.3, **MANY}, optim_fn=ADAMW),
    "scaler": Job(MANY, scaled=True, step=step_scaled),
    "accum-adamw": Job({}, optim_fn=partial(AccumAdamW, lr=0.02, accum_iter=3)),
    "mix-every": Job({"mix_every": 2}),
    "windows": Job(MANY, step=step_in_windows, optim_fn=ADAMW),
    "pending": Job({}, step=step_pending, optim_fn=partial(AccumAdamW, lr=0.02, accum_iter=2)),
    "no_sync": Job({}, step=step_no_sync),
    "scaled windows": Job({"lr_scheduler_fn": cosine}, scaled=True, step=step_in_windows_scaled),
    "clamped": Job({}, step=step_clamped),
    "factor": Job({}, step=step_with_factor),
    "separate": Job({"param_as_bucket_view": False}),
    "zoo": Job({"sync_buffer_in_global_avg": True}, model=Zoo, optim_fn=Wide),
    "zoo, clipped": Job({"grad_clip_norm": 0.5, **MANY}, model=Zoo, optim_fn=ADAMW, step=step_in_windows),
    "hooked": Job({}, optim_fn=Hooked),
    "sparse": Job(MANY, model=Embedded, optim_fn=partial(torch.optim.SGD, lr=0.1), step=step_in_windows),
    "sparse momentum": Job({}, model=Embedded, optim_fn=SGD),
    "reentrant": Job(MANY, model=Reentrant),
}
