"""Situations of ordinary scripts, each compared with the plain loop that simulates all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import decent_dp
from benchmarks.gpu.case import ALONE, BOTH, GOSSIP, PAIR, THREADS, TRIO, TRIO_THREADS, Place, SkipError, Worker, case, raised
from benchmarks.gpu.training import (
    FEATURES,
    OUTPUTS,
    SAMPLES,
    SGD,
    Script,
    batch,
    compare,
    exact_square_error,
    largest_difference,
    library,
    mlp,
    run_library,
    run_twin,
    square_error,
    values,
)
from decent_dp import errors

# -- models ------------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """With BatchNorm, so with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out.mean((2, 3))


def images(model: Callable[[Tensor], Tensor], t: int, rank: int, like: Tensor) -> Tensor:
    x = batch(t, rank, like.device, SAMPLES, 3, 8, 8).to(memory_format=torch.channels_last)
    return (model(x) - batch(t + 5000, rank, like.device, SAMPLES, 4)).square().mean()


class Mixed(nn.Module):
    """Layers of several dtypes or devices; inputs are converted for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, OUTPUTS)])

    def forward(self, x: Tensor) -> Tensor:
        device = x.device
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(layer(x.to(layer.weight.device, layer.weight.dtype)))
        return x.to(device)


def of_three_dtypes() -> nn.Module:
    model = Mixed()
    model.layers[1].to(torch.bfloat16)
    model.layers[2].to(torch.float64)
    return model


def on_two_devices(model: nn.Module, device: torch.device) -> nn.Module:
    """The first and the last layer on ``device``, the one between them on the CPU."""
    assert isinstance(model, Mixed)
    model.layers[0].to(device)
    model.layers[2].to(device)
    return model


class OnTwoStreams(nn.Module):
    """Two branches, one of them on its own stream."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.top = nn.Linear(FEATURES, 64), nn.Linear(FEATURES, 64), nn.Linear(64, OUTPUTS)
        self.stream: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x)
        if not x.is_cuda:
            return self._on_top(left, self.right(x))
        if self.stream is None:
            self.stream = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        main = torch.cuda.current_stream(x.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            right = self.right(x)
        main.wait_stream(self.stream)
        x.record_stream(self.stream)
        right.record_stream(main)
        return self._on_top(left, right)

    def _on_top(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.top(torch.tanh(left + right))
        return out


class Partly(nn.Module):
    """A frozen layer, a scalar that is never used, and a layer that only some batches of some workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.always = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, OUTPUTS)
        self.sometimes, self.never = nn.Linear(FEATURES, OUTPUTS), nn.Parameter(torch.tensor(2.0))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        x = self.frozen(x)
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if uses else out


def partly(model: Callable[..., Tensor], t: int, rank: int, like: Tensor) -> Tensor:
    x, y = (batch(number, rank, like.device, SAMPLES, size) for number, size in ((t, FEATURES), (t + 5000, OUTPUTS)))
    return (model(x, (t + rank) % 3 == 1) - y).square().mean()


class Tied(nn.Module):
    """One weight used twice, and activations that are computed again."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.twice = nn.Linear(FEATURES, 8), nn.Linear(8, 8)
        self.again, self.last = nn.Linear(8, 8), nn.Linear(8, OUTPUTS)
        self.again.weight = self.twice.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(lambda x: torch.tanh(self.again(torch.tanh(self.twice(x)))), x, use_reentrant=self.reentrant)
        out: Tensor = self.last(x)
        return out


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.words((x[:, 0].abs() * 7).long() % 20))
        return out


def channels_last(model: nn.Module, device: torch.device) -> nn.Module:
    placed: Any = model
    placed.to(device, memory_format=torch.channels_last)
    return model


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.3, 0.3)


def adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    """Without decay, which would make the step depend on whether the driver mixes before or after it."""
    return partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0, eps=1e-4, **options)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


# -- scripts -----------------------------------------------------------------------------------------------------------

PLAIN = Script()
DOUBLE = Script(make=lambda: mlp().double(), loss=exact_square_error, tolerance=1e-11)
SCALED = Script(scaled=True, autocast=torch.float16, overflows=[(1, 4)], tolerance=3e-3)
MANY = {"bucket_size_in_mb": 1e-4}

# Names of the rows: the script, and where it runs besides PAIR.
SCRIPTS: dict[str, tuple[Script, tuple[Place, ...]]] = {
    "float32, complete": (PLAIN, (THREADS,)),
    "float32, complete, no overlap": (replace(PLAIN, overlap=False), (THREADS,)),
    "float64 twin": (DOUBLE, (THREADS,)),
    "float64 twin, no overlap": (replace(DOUBLE, overlap=False), ()),
    "many buckets": (replace(DOUBLE, options=MANY), ()),
    "training on a side stream": (replace(PLAIN, streams="training"), (THREADS,)),
    "side stream, no overlap": (replace(PLAIN, streams="training", overlap=False), ()),
    "forward on another stream": (replace(PLAIN, streams="forward"), (THREADS,)),
    "layers on two streams": (replace(PLAIN, make=OnTwoStreams, options=MANY, steps=30, tolerance=1e-4), ()),
    "a long kernel before the step": (replace(PLAIN, delay=True, steps=4), (THREADS,)),
    "a long kernel, no overlap": (replace(PLAIN, delay=True, steps=4, overlap=False), ()),
    "autocast bfloat16": (replace(PLAIN, autocast=torch.bfloat16, tolerance=1e-2), (THREADS,)),
    "autocast float16, GradScaler, overflow": (SCALED, (THREADS,)),
    "GradScaler, overflow, no overlap": (replace(SCALED, overlap=False), ()),
    "GradScaler and clipping": (replace(SCALED, clip=0.5), ()),
    "GradScaler and accumulation": (replace(SCALED, backwards=3, steps=5, overflows=[(1, 7)]), ()),
    "GradScaler, accumulation, the last updates": (
        replace(SCALED, backwards=3, steps=5, overflows=[(0, 4)], accumulation="last"),
        (),
    ),
    "GradScaler and fused AdamW": (replace(SCALED, optimizer=adamw(fused=True)), ()),
    "AdamW foreach": (replace(PLAIN, optimizer=adamw(foreach=True)), ()),
    "AdamW fused": (replace(PLAIN, optimizer=adamw(fused=True)), ()),
    "accumulation, no_sync": (replace(PLAIN, backwards=3, steps=5), ()),
    "accumulation, the last backward updates": (replace(PLAIN, backwards=3, steps=5, accumulation="last"), ()),
    "accumulation, a pending window": (replace(PLAIN, backwards=3, steps=5, accumulation="window"), ()),
    "clipping over all gradients": (replace(PLAIN, clip=0.2, options=MANY), ()),
    "a scheduler": (replace(PLAIN, schedule=decaying), ()),
    "channels_last, BatchNorm": (
        Script(
            make=Convolutions,
            place=channels_last,
            loss=images,
            tolerance=2e-4,
        ),
        (),
    ),
    "float32, bfloat16 and float64 in one model": (replace(PLAIN, make=of_three_dtypes, tolerance=3e-2), ()),
    "layers on the CPU and on the device": (replace(PLAIN, make=Mixed, place=on_two_devices), ()),
    "frozen and unused parameters": (replace(PLAIN, make=Partly, loss=partly), (THREADS,)),
    "tied weights, activation checkpointing": (replace(PLAIN, make=Tied), ()),
    "reentrant activation checkpointing": (replace(PLAIN, make=partial(Tied, True)), ()),
    "sparse gradients": (replace(PLAIN, make=Words, optimizer=partial(torch.optim.SGD, lr=0.1)), ()),
    "load_state_dict in the middle": (replace(PLAIN, reload=4), ()),
    "edits in place": (replace(PLAIN, edit=clamp), (THREADS,)),
    "join with uneven batches": (replace(PLAIN, steps=(6, 9)), (THREADS,)),
    "join with an empty worker": (replace(PLAIN, steps=(5, 0)), ()),
}


def check_script(script: Script, worker: Worker) -> str:
    """The replica equals the twin, on every worker, after the same steps."""
    run, began = run_library(script, worker)
    rounds = run.replica.stats().rounds
    due = script.steps if isinstance(script.steps, int) else max(script.steps)
    assert rounds == due, f"{rounds} rounds, not {due}"
    found = values(run.model)
    run.replica.close()
    twin = run_twin(script, worker.n, worker.device, began)[worker.rank]
    text = compare(found, values(twin), script.tolerance, "the twin")
    first = [began[name] for name, param in run.model.named_parameters() if param.requires_grad]
    moved = largest_difference(found, first)
    assert moved > 1e-3, f"training has moved the parameters by {moved:.2g} only"
    return text


def _register() -> None:
    for name, (script, places) in SCRIPTS.items():
        case(name, PAIR, *places)(partial(check_script, script))
    for topology in ("base-2", "complete", "ring"):
        for overlap in (True, False):
            script = replace(DOUBLE, topology=topology, overlap=overlap, steps=9, tolerance=1e-10)
            name = f"float64 twin, {topology}{'' if overlap else ', no overlap'}"
            case(name, TRIO, *([TRIO_THREADS] if overlap else []))(partial(check_script, script))
    case("join with uneven batches, base-2", TRIO)(partial(check_script, replace(PLAIN, topology="base-2", steps=(4, 7, 0))))


_register()


@case("AdamW capturable", PAIR)
def capturable(worker: Worker) -> str:
    if not worker.cuda:
        raise SkipError("capturable optimizers are for CUDA tensors")
    return check_script(replace(PLAIN, optimizer=adamw(capturable=True)), worker)


# -- one worker --------------------------------------------------------------------------------------------------------

ALONE_SCRIPTS = {
    "SGD": replace(PLAIN, optimizer=SGD),
    "AdamW": replace(PLAIN, optimizer=partial(torch.optim.AdamW, lr=0.01)),
    "AdamW fused": replace(PLAIN, optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True)),
    "GradScaler": replace(SCALED, overflows=[(0, 4)]),
    "clipping": replace(PLAIN, clip=0.2),
    "accumulation": replace(PLAIN, backwards=3),
    "convolutions": replace(PLAIN, make=Convolutions, loss=images),
}


@case("one worker is plain PyTorch, bit for bit", ALONE)
def alone(worker: Worker) -> str:
    for name, script in ALONE_SCRIPTS.items():
        if worker.cuda and name == "convolutions":
            torch.backends.cudnn.deterministic = True
        # A view of a block may lie where a kernel of another order of sums is chosen.
        options = {"param_as_bucket_view": False} if worker.driver == "wrapper" else {}
        run, began = run_library(replace(script, options=options), worker)
        found = values(run.model)
        run.replica.close()
        twin = run_twin(script, 1, worker.device, began)[0]
        worst = largest_difference(found, values(twin))
        assert worst == 0.0, f"{name}: differs from plain PyTorch by {worst:.2g}"
    return f"equal: {', '.join(ALONE_SCRIPTS)}"


@case("AccumAdamW is its formula", ALONE, drivers=GOSSIP)
def accum_adamw(worker: Worker) -> str:
    """The formula in float64, for windows of two steps."""
    lr, (b1, b2), eps, decay, s = 0.01, (0.9, 0.99), 1e-8, 0.1, 2
    torch.manual_seed(0)
    x = torch.randn(300, 7, dtype=torch.float64)
    param = nn.Parameter(x.to(worker.device, copy=True))
    optimizer = decent_dp.AccumAdamW([param], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, accum_iter=s)
    m0, v0, a = (torch.zeros_like(x) for _ in range(3))
    for step in range(1, 8):
        g = batch(step, 0, torch.device("cpu"), 300, 7).double()
        param.grad = g.to(worker.device)
        optimizer.step()
        k = -(-step // s)
        x = x * (1 - lr * decay)
        a = a + g / s
        m, v = b1 * m0 + (1 - b1) * g, b2 * v0 + (1 - b2) * g * g
        x = x - lr / (1 - b1**k) * m / (v.sqrt() / (1 - b2**k) ** 0.5 + eps)
        if step % s == 0:
            m0, v0, a = b1 * m0 + (1 - b1) * a, b2 * v0 + (1 - b2) * a * a, torch.zeros_like(a)
    return compare([param.detach().cpu()], [x], 1e-12, "the formula")


# -- several workers, in another way -----------------------------------------------------------------------------------


@case("initial values are those of worker 0", PAIR, THREADS, TRIO)
def initial_values(worker: Worker) -> str:
    """Also buffers and frozen parameters, for any seed of each worker."""
    model = Convolutions().to(worker.device)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(worker.rank)
    model.layers[0].weight.requires_grad_(False)
    run, _ = run_library(Script(make=lambda: model, place=lambda model, device: model, loss=images, steps=0), worker)
    mine = {name: tensor.cpu() for name, tensor in run.model.state_dict().items()}
    run.replica.close()
    for rank, theirs in enumerate(worker.gather(mine)):
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), f"'{name}' differs from worker {rank}'s"
    return f"{len(mine)} tensors"


@case("NaN in one replica is not seen by the other", PAIR, TRIO)
def not_a_number(worker: Worker) -> str:
    """The others mix among themselves; a finite replica equals the twin, in which an edge with a NaN sits out."""
    script = replace(PLAIN, not_a_number=[(1, 3)], steps=7, topology="base-2" if worker.n > 2 else "complete")
    run, began = run_library(script, worker)
    found, rounds = values(run.model), run.replica.stats().rounds
    run.replica.close()
    assert rounds == script.steps
    finite = [all(bool(value.isfinite().all()) for value in found)]
    everybody = worker.gather(finite[0])
    assert everybody == [rank != 1 for rank in range(worker.n)], f"finite replicas: {everybody}"
    if worker.rank == 1:
        return "this replica has the NaN"
    twin = run_twin(script, worker.n, worker.device, began)[worker.rank]
    return compare(found, values(twin), script.tolerance, "the twin")


@case("a worker that stops", PAIR, drivers=BOTH, alone=True)
def stops(worker: Worker) -> str:
    """Worker 1 raises in its fourth forward and exits; worker 0 soon gets an error that names it."""

    def loss(model: Callable[[Tensor], Tensor], t: int, rank: int, like: Tensor) -> Tensor:
        if (rank, t) == (1, 3):
            raise ValueError("a bad sample")
        return square_error(model, t, rank, like)

    run = library(replace(PLAIN, loss=loss), worker)

    def train() -> None:
        for t in range(8):
            run.step(t)

    if worker.rank == 1:
        text = raised(ValueError, train, "a bad sample")
        run.replica.close()
        return text
    text = raised(errors.PeerLostError, train, "worker 1")
    return f"PeerLostError in round {run.replica.stats().rounds}: {text}"
