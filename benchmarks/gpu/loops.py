"""Loops, models and mistakes of ordinary scripts, as scripts that plain PyTorch runs too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.case import BOTH, GOSSIP, PAIR, THREADS, TRIO, Place, SkipError, Worker, case, raised
from benchmarks.gpu.keeping import everything
from benchmarks.gpu.situations import PLAIN, check_script
from benchmarks.gpu.training import (
    FEATURES,
    OUTPUTS,
    SAMPLES,
    Script,
    batch,
    compare,
    library,
    mlp,
    run_twin,
    square_error,
    values,
)
from decent_dp import errors

Model = Callable[[Tensor], Tensor]


def inputs(t: int, rank: int, like: Tensor) -> Tensor:
    return batch(t, rank, like.device, SAMPLES, FEATURES)


# -- losses --------------------------------------------------------------------------------------------------------------


def two_forwards(model: Model, t: int, rank: int, like: Tensor) -> Tensor:
    """And a third one without gradients before them."""
    with torch.no_grad():
        model(inputs(t, rank, like))
    return square_error(model, t, rank, like) + 0.5 * square_error(model, t + 900, rank, like)


def a_batch_is_skipped(model: Model, t: int, rank: int, like: Tensor) -> Tensor:
    """Batch 3 has a forward and no backward, on all workers."""
    if t == 3:
        square_error(model, t, rank, like)
    return square_error(model, t + (t >= 3), rank, like)


def evaluated_by_one(model: Model, t: int, rank: int, like: Tensor) -> Tensor:
    if rank == 0:
        with torch.no_grad():
            square_error(model, t + 700, rank, like)
    return square_error(model, t, rank, like)


def gradient_penalty(model: Model, t: int, rank: int, like: Tensor) -> Tensor:
    """A backward through a backward."""
    x = inputs(t, rank, like).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return square_error(model, t, rank, like) + 0.1 * gradient.square().sum(1).mean()


def gradients_apart(model: Model, t: int, rank: int, like: Tensor) -> Tensor:
    """``torch.autograd.grad``, which is no update."""
    torch.autograd.grad(square_error(model, t + 300, rank, like), [like])
    return square_error(model, t, rank, like)


def adversarial(model: Model, t: int, rank: int, like: Tensor) -> Tensor:
    """An input that was changed along its own gradient."""
    x = inputs(t, rank, like).requires_grad_()
    target = batch(t + 5000, rank, like.device, SAMPLES, OUTPUTS)
    (gradient,) = torch.autograd.grad((model(x) - target).square().mean(), x)
    return (model((x + 0.01 * gradient).detach()) - target).square().mean()


# -- models --------------------------------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """An empty parameter, a scalar, and a matrix that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(FEATURES, OUTPUTS), nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(OUTPUTS, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return self.scale * out @ self.turned.t() @ self.turned * 0.2 + self.empty.sum()


def with_hooks(model: nn.Module, device: torch.device) -> nn.Module:
    """Hooks of the user's own, which change a gradient, and look at one when it has been accumulated."""
    model.to(device)
    params: list[Any] = list(model.parameters())

    def halve(param: Any) -> None:
        param.grad.mul_(0.5)

    params[0].register_hook(lambda gradient: 2 * gradient)
    params[1].register_post_accumulate_grad_hook(halve)
    return model


def from_a_vector(model: nn.Module) -> None:
    """Puts other tensors in the place of the parameters' data."""
    with torch.no_grad():
        params = list(model.parameters())
        torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(params) * 0.95, params)


SCRIPTS: dict[str, tuple[Script, tuple[Place, ...]]] = {
    "several forwards before a backward": (replace(PLAIN, loss=two_forwards), (THREADS,)),
    "a forward without a backward": (replace(PLAIN, loss=a_batch_is_skipped), (THREADS,)),
    "an evaluation by one worker": (replace(PLAIN, loss=evaluated_by_one), ()),
    "double backward": (replace(PLAIN, loss=gradient_penalty), (THREADS,)),
    "torch.autograd.grad is no update": (replace(PLAIN, loss=gradients_apart), ()),
    "adversarial examples": (replace(PLAIN, loss=adversarial), ()),
    "one step": (replace(PLAIN, steps=1), (THREADS,)),
    "empty, scalar and transposed parameters": (replace(PLAIN, make=Shapes, steps=5, tolerance=1e-4), (THREADS,)),
    "hooks of the user's own": (replace(PLAIN, place=with_hooks), ()),
    "vector_to_parameters after each step": (replace(PLAIN, edit=from_a_vector), ()),
}
for _name, (_script, _places) in SCRIPTS.items():
    case(_name, PAIR, *_places)(partial(check_script, _script))


@case("zero_grad in three places", PAIR, THREADS)
def zero_grad(worker: Worker) -> str:
    """Before the forward, between forward and backward, after the step."""
    texts = []
    for place in range(3):
        run: Any = library(PLAIN, worker)
        began = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
        for t in range(8):
            if place == 0:
                run.model.zero_grad()
            loss = run.loss(t)
            if place == 1:
                run.model.zero_grad()
            run.backward(loss)
            if worker.driver == "gossip":
                run.update()
            if place == 2:
                run.model.zero_grad()
        rounds, found = run.replica.stats().rounds, values(run.model)
        run.replica.close()
        assert rounds == 8, f"{rounds} rounds, not 8"
        twin = run_twin(PLAIN, worker.n, worker.device, began)[worker.rank]
        texts.append(compare(found, values(twin), PLAIN.tolerance, "the twin"))
    return "; ".join(texts)


@case("evaluation before the first step", PAIR, THREADS)
def before_the_first(worker: Worker) -> str:
    run: Any = library(PLAIN, worker)
    own = everything(run.model)
    with run.replica.averaged():
        assert all(torch.equal(value, own[name]) for name, value in everything(run.model).items())
    assert run.replica.consensus_distance() == 0.0
    run.step(0)
    assert run.replica.stats().rounds == 1
    run.replica.close()
    return "the initial values"


@case("a backward that raises", PAIR, drivers=GOSSIP)
def raising(worker: Worker) -> str:
    """Half-way, and is caught: without a step there is no round, and the run goes on as if the batch had been skipped."""

    class StopError(Exception):
        pass

    def fails(_: Tensor) -> None:
        raise StopError

    run: Any = library(PLAIN, worker)
    began = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    for t in range(8):
        if t == 3:
            run.optimizer.zero_grad()
            hook = next(run.model.parameters()).register_hook(fails)
            with contextlib.suppress(StopError):
                run.backward(run.loss(900))
                raise AssertionError("the backward did not raise")
            hook.remove()
        run.step(t)
    rounds, found = run.replica.stats().rounds, values(run.model)
    run.replica.close()
    assert rounds == 8, f"{rounds} rounds, not 8"
    return compare(found, values(run_twin(PLAIN, worker.n, worker.device, began)[worker.rank]), PLAIN.tolerance, "the twin")


@case("a group of some workers", TRIO)
def some(worker: Worker) -> str:
    """Workers 0 and 2, beside a group that the script makes before and one after."""
    before = dist.new_group([0, 1])
    group = dist.new_group([0, 2])
    text = "not a member"
    if worker.rank != 1:
        member = Worker([0, 2].index(worker.rank), 2, worker.driver, worker.device, worker.folder)
        text = check_script(replace(PLAIN, options={"process_group": group}), member)
    after = dist.new_group([1, 2])
    total = torch.ones(1, device="cpu")
    for other, ranks in ((before, (0, 1)), (after, (1, 2))):
        if worker.rank in ranks:
            dist.all_reduce(total, group=other)
    return text


# -- mistakes --------------------------------------------------------------------------------------------------------------


@case("models that differ", PAIR, THREADS)
def differ(worker: Worker) -> str:
    """In a shape, a dtype, a name or a layer: all workers raise the same error."""
    changed: dict[str, Callable[[], nn.Module]] = {
        "shape": lambda: nn.Sequential(nn.Linear(FEATURES, 17), nn.Tanh(), nn.Linear(17, OUTPUTS)),
        "dtype": lambda: mlp().double(),
        "layer": lambda: nn.Sequential(*mlp().children(), nn.Linear(OUTPUTS, OUTPUTS)),
    }
    texts = []
    for make in changed.values():
        script = replace(PLAIN, make=make) if worker.rank else PLAIN
        texts.append(raised(errors.DisagreementError, partial(library, script, worker), "worker 1"))
    assert worker.gather(texts) == [texts] * worker.n, "workers raise different errors"
    return texts[0]


@case("uneven numbers of steps without join", PAIR, drivers=BOTH, alone=True)
def out_of_step(worker: Worker) -> str:
    run: Any = library(PLAIN, worker)
    for t in range(4 + worker.rank):
        run.step(t)
    text = raised(errors.OutOfStepError, lambda: run.replica.averaged().__enter__(), "worker")
    with contextlib.suppress(errors.PeerError):  # the last exchange of worker 1, which worker 0 does not make
        run.replica.close()
    return text


@case("a layer that trains later", PAIR, drivers=("wrapper",))
def unfrozen(worker: Worker) -> str:
    """Unfrozen after construction: an error that names it."""
    model = mlp()
    first: Any = model
    first[0].requires_grad_(False)
    run: Any = library(replace(PLAIN, make=lambda: model), worker)
    run.step(0)
    first[0].requires_grad_(True)
    text = raised(RuntimeError, lambda: run.step(1), "0.weight")
    run.replica.close()
    return text


@case("SyncBatchNorm", PAIR)
def synchronised(worker: Worker) -> str:
    """It trains on GPUs only; its statistics are those of all workers."""
    if not worker.cuda:
        raise SkipError("SyncBatchNorm trains on GPUs only")

    def make() -> nn.Module:
        layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, OUTPUTS))
        found: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(layers)  # type: ignore[no-untyped-call]
        return found

    try:
        probe = make().to(worker.device)
        torch.autograd.backward(probe(inputs(0, worker.rank, next(probe.parameters()))).sum())
        torch.cuda.synchronize(worker.device)
    except RuntimeError as error:
        raise SkipError(f"torch's own SyncBatchNorm fails here: {str(error).partition(chr(10))[0]}") from None
    run: Any = library(replace(PLAIN, make=make), worker)
    for t in range(5):
        run.step(t)
    rounds = run.replica.stats().rounds
    statistics = [buffer.detach().cpu() for name, buffer in run.model.named_buffers() if "running" in name]
    found = values(run.model)
    run.replica.close()
    assert rounds == 5, f"{rounds} rounds, not 5"
    assert all(bool(value.isfinite().all()) for value in found)
    for theirs in worker.gather(statistics):
        compare(statistics, theirs, 1e-6, "statistics of workers")
    return "one set of statistics"
