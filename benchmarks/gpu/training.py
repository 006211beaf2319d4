"""A small training script in data: run by the library on each worker, and by a plain loop that simulates all workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import decent_dp
from benchmarks.gpu.case import Worker
from decent_dp.topo import Topology, make_topology

MakeOptimizer: TypeAlias = Callable[[Any], Optimizer]

# Momentum, so that a missing or doubled step shows in all later ones. No decay, because the two drivers mix on different
# sides of the step, which is the same as long as the step only depends on gradients.
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

FEATURES, OUTPUTS, SAMPLES = 6, 3, 5


def mlp() -> nn.Module:
    """Two layers, their activations between them."""
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))


def batch(t: int, rank: int, device: torch.device, *shape: int) -> Tensor:
    """Numbers for batch ``t`` of a worker: the same on any device."""
    generator = torch.Generator().manual_seed(7919 * rank + t)
    return torch.randn(shape, generator=generator, device="cpu").to(device)


def square_error(model: Callable[[Tensor], Tensor], t: int, rank: int, like: Tensor) -> Tensor:
    """The distance of the model's output to an unlearnable target."""
    x = batch(t, rank, like.device, SAMPLES, FEATURES).to(like.dtype)
    return (model(x) - batch(t + 5000, rank, like.device, SAMPLES, OUTPUTS)).float().square().mean()


def exact_square_error(model: Callable[[Tensor], Tensor], t: int, rank: int, like: Tensor) -> Tensor:
    """The same distance in the model's own dtype."""
    x = batch(t, rank, like.device, SAMPLES, FEATURES).to(like.dtype)
    return (model(x) - batch(t + 5000, rank, like.device, SAMPLES, OUTPUTS).to(like.dtype)).square().mean()


@dataclass(frozen=True)
class Script:
    """A user's script.

    Attributes:
        make: the model; ``place`` puts it on a device.
        loss: of (the model or its wrapper, batch number, rank, a parameter).
        topology, overlap: of gossip() or the wrapper; ``options``: the others of both.
        accumulation: how gradients of ``backwards`` batches become one update: 'no_sync', 'last' or 'window'; of no meaning for
            gossip() and plain PyTorch, where one step follows them.
        clip: the norm over all gradients; 0 is off.
        scaled: with a GradScaler, under an autocast to float16 if ``autocast`` says so.
        overflows: (rank, batch) whose loss is infinite; not_a_number: whose loss is NaN.
        edit: a change of the model after each step.
        steps: batches of a worker, by rank if they are uneven.
        streams: on CUDA: 'training' is on a side stream, or only the 'forward' is, or its 'layers' are on two.
        delay: on CUDA: a long kernel is queued before the step.
        compiled: the forward is compiled, by ``backend`` in the mode ``mode``.
        reload: before this batch the model gets values that are the same on all workers.
        tolerance: of the largest difference to the twin.
    """

    make: Callable[[], nn.Module] = mlp
    place: Callable[[nn.Module, torch.device], nn.Module] = lambda model, device: model.to(device)
    loss: Callable[[Any, int, int, Tensor], Tensor] = square_error
    optimizer: MakeOptimizer = SGD
    schedule: Callable[[Optimizer], Any] | None = None
    topology: str = "complete"
    overlap: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    backwards: int = 1
    accumulation: str = "no_sync"
    clip: float = 0.0
    scaled: bool = False
    autocast: torch.dtype | None = None
    overflows: Sequence[tuple[int, int]] = ()
    not_a_number: Sequence[tuple[int, int]] = ()
    edit: Callable[[nn.Module], None] | None = None
    steps: int | tuple[int, ...] = 8
    streams: str = ""
    delay: bool = False
    compiled: bool = False
    mode: str | None = None
    backend: str = "inductor"
    reload: int | None = None
    tolerance: float = 2e-5

    def steps_of(self, rank: int) -> int:
        return self.steps if isinstance(self.steps, int) else self.steps[rank]


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters that train."""
    return [param.detach().clone() for param in model.parameters() if param.requires_grad]


class Local:
    """Plain PyTorch on one worker.

    Args:
        rank: whose batches it sees.
    """

    def __init__(self, script: Script, device: torch.device, rank: int, state: Mapping[str, Tensor] | None = None) -> None:
        self.script, self.device, self.rank = script, device, rank
        self.model = script.place(script.make(), device)
        if state is not None:
            self.model.load_state_dict(state)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=3) if script.scaled else None
        self.forward: Any = self.model
        self.prepare()

    def prepare(self) -> None:
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = self.script.optimizer(trained)
        self.schedulers = [self.script.schedule(self.optimizer)] if self.script.schedule else []

    @property
    def like(self) -> Tensor:
        return next(self.model.parameters())

    def loss(self, number: int) -> Tensor:
        script = self.script
        scope: Any = contextlib.nullcontext()
        if script.autocast is not None:
            scope = torch.autocast(self.device.type, dtype=script.autocast)
        with scope:
            loss = script.loss(self.forward, number, self.rank, self.like) / script.backwards
        if (self.rank, number) in script.overflows:
            loss = loss * float("inf")
        if (self.rank, number) in script.not_a_number:
            loss = loss * float("nan")
        return loss

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def numbers(self, t: int) -> range:
        """The losses of the batches of step ``t``."""
        return range(t * self.script.backwards, (t + 1) * self.script.backwards)

    def step(self, t: int) -> None:
        """Forward, backward and update, as a user writes them."""
        self.optimizer.zero_grad()
        for number in self.numbers(t):
            self.backward(self.loss(number))
        self.update()

    def update(self) -> None:
        params = [param for param in self.model.parameters() if param.requires_grad]
        if self.script.clip:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(params, self.script.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()


class _WithStreams(Local):
    """On CUDA, with the streams and the delay that the script asks for."""

    _side: Any = None

    def _sleep(self) -> None:
        if self.script.delay and self.device.type == "cuda":
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]

    def loss(self, number: int) -> Tensor:
        if self.script.streams != "forward" or self.device.type != "cuda":
            return super().loss(number)
        main, side = torch.cuda.current_stream(self.device), self._stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss = super().loss(number)
        main.wait_stream(side)
        loss.record_stream(main)
        return loss

    def _stream(self) -> Any:
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The context around the whole loop."""
        if self.script.streams != "training" or self.device.type != "cuda":
            yield
            return
        main, side = torch.cuda.current_stream(self.device), self._stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            yield
        main.wait_stream(side)


class _Gossiping(_WithStreams):
    def __init__(self, script: Script, worker: Worker) -> None:
        self.worker = worker
        super().__init__(script, worker.device, worker.rank)

    def prepare(self) -> None:
        super().prepare()
        script = self.script
        self.replica: Any = decent_dp.gossip(
            self.model,
            self.optimizer,
            topology=script.topology,
            overlap=script.overlap,
            scaler=self.scaler,
            transport=self.worker.transport(),
            **script.options,
        )
        if script.compiled:
            self.forward = torch.compile(self.model, mode=script.mode, backend=script.backend)

    def update(self) -> None:
        self._sleep()
        super().update()


class _Wrapped(_WithStreams):
    def __init__(self, script: Script, worker: Worker) -> None:
        self.worker = worker
        super().__init__(script, worker.device, worker.rank)

    def prepare(self) -> None:
        script = self.script
        options = dict(script.options)
        self.replica: Any = decent_dp.DecentralizedDataParallel(
            self.model,
            lambda named: script.optimizer([param for _, param in named]),
            script.schedule,
            topology=script.topology,
            overlap=script.overlap,
            scaler=self.scaler,
            grad_clip_norm=script.clip,
            transport=self.worker.transport(),
            **options,
        )
        self.forward = (
            torch.compile(self.replica, mode=script.mode, backend=script.backend) if script.compiled else self.replica
        )

    def step(self, t: int) -> None:
        numbers, replica = list(self.numbers(t)), self.replica
        if len(numbers) == 1:
            loss = self.loss(numbers[0])
            self._sleep()
            self.backward(loss)
        elif self.script.accumulation == "no_sync":
            with replica.no_sync():
                for number in numbers[:-1]:
                    self.backward(self.loss(number))
            self.backward(self.loss(numbers[-1]))
        elif self.script.accumulation == "last":
            for number in numbers:
                replica.set_accumulate_grad(number != numbers[-1])
                self.backward(self.loss(number))
        else:
            replica.set_accumulate_grad(True)
            for number in numbers:
                self.backward(self.loss(number))
            replica.set_accumulate_grad(False)
            replica.state_dict()  # observing the parameters makes the update


Library: TypeAlias = "_Gossiping | _Wrapped"


def library(script: Script, worker: Worker) -> Library:
    """The script with the worker's driver."""
    return _Gossiping(script, worker) if worker.driver == "gossip" else _Wrapped(script, worker)


def run_library(
    script: Script, worker: Worker, after_step: Callable[[int], None] | None = None
) -> tuple[Any, dict[str, Tensor]]:
    """Trains; returns the trained run, which is still open, and the initial state dict."""
    run = library(script, worker)
    began = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    with run.training(), contextlib.ExitStack() as scopes:
        if not isinstance(script.steps, int):
            scopes.enter_context(run.replica.join())
        for t in range(script.steps_of(worker.rank)):
            if t == script.reload:
                run.model.load_state_dict(began)
            run.step(t)
            if script.edit is not None:
                script.edit(run.model)
            if after_step is not None:
                after_step(t)
    return run, began


@torch.no_grad()
def mix(targets: Sequence[Sequence[Tensor]], sent: Sequence[Sequence[Tensor]], topology: Topology, t: int) -> None:
    """x_i <- x_i + Σ_j w_ij (q_j - q_i), in float64; an edge whose members are not all finite sits out the round."""
    for edge in topology.round(t):
        if not all(bool(q.isfinite().all()) for rank in edge.ranks for q in sent[rank]):
            continue
        for i in edge.ranks:
            for number, x in enumerate(targets[i]):
                total = torch.zeros_like(x, dtype=torch.float64)
                for j in edge.ranks:
                    if j != i:
                        share = (1 - edge.weight) / (len(edge.ranks) - 1)
                        total += share * (sent[j][number].double() - sent[i][number].double())
                x.copy_((x.double() + total).to(x.dtype))


def topology_of(script: Script, n: int) -> Topology:
    return make_topology(script.topology, local_world_size=1, world_size=n, rank=0)


def run_twin(script: Script, n: int, device: torch.device, began: Mapping[str, Tensor]) -> list[nn.Module]:
    """All replicas of the script after its last round: plain PyTorch on each, and the law of mixing between them."""
    topology = topology_of(script, n)
    locals_ = [Local(script, device, rank, began) for rank in range(n)]
    trained = [[param for param in local.model.parameters() if param.requires_grad] for local in locals_]
    sent: list[list[Tensor]] | None = None
    for t in range(max(script.steps_of(rank) for rank in range(n))):
        for rank, local in enumerate(locals_):
            if t == script.reload:
                local.model.load_state_dict(began)
                sent = None
            if t < script.steps_of(rank):
                local.step(t)
        if sent is not None:
            mix(trained, sent, topology, t - 1)
        sent = [values(local.model) for local in locals_]
        if not script.overlap:
            mix(trained, sent, topology, t)
            sent = None
        for rank, local in enumerate(locals_):
            if script.edit is not None and t < script.steps_of(rank):
                script.edit(local.model)
    return [local.model for local in locals_]


@torch.no_grad()
def largest_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Between tensors of equal shapes and dtypes; infinite where one of them is not finite."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape, f"shapes {tuple(x.shape)} and {tuple(y.shape)}"
        assert x.dtype == y.dtype, f"dtypes {x.dtype} and {y.dtype}"
        difference = float((x.double().cpu() - y.double().cpu()).abs().max()) if x.numel() else 0.0
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def compare(a: Sequence[Tensor], b: Sequence[Tensor], tolerance: float, what: str) -> str:
    """Describes the difference; raises AssertionError if it is more than ``tolerance``."""
    worst = largest_difference(a, b)
    assert worst <= tolerance, f"{what} differ by {worst:.2g}, more than {tolerance:.2g}"
    return f"{worst:.1e} from {what}"
