"""Properties of devices: the place and amount of memory, and operations that CUDA itself refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import decent_dp
from benchmarks.gpu.case import BOTH, GOSSIP, PAIR, THREADS, SkipError, Worker, case, raised, warnings_of
from benchmarks.gpu.situations import adamw, check_script
from benchmarks.gpu.training import Script, batch, library, run_library

# Parameters of the model whose memory is counted: 16 layers of 4 MiB.
WIDTH, DEPTH = 1024, 16


@case("another default device", PAIR, THREADS)
def default_device(worker: Worker) -> str:
    """The library's own tensors are on the parameters' device, or on the CPU: none is on the default device, which
    has no values here."""
    text = []
    for compression in (None, "bfloat16", "int8"):
        run = library(Script(options={"compression": compression}), worker)
        torch.set_default_device("meta")
        try:
            for t in range(4):
                run.step(t)
            assert run.replica.consensus_distance() > 0
            with run.replica.averaged():
                pass
            run.replica.close()
        finally:
            torch.set_default_device(None)
        text.append(str(compression))
    return f"compression {', '.join(text)}"


@case("workers that share a GPU are told", PAIR)
def shared_gpu(worker: Worker) -> str:
    """Once, on the first of them: two processes on one GPU may be a mistake. Not on the CPU."""
    with warnings_of("decent_dp.replica.construction") as found:
        run, _ = run_library(Script(steps=2), worker)
        run.replica.close()
    due = worker.cuda and worker.rank == 0
    assert len(found) == due, f"the warnings were {found}"
    assert not found or "the models of workers 0, 1 are on one GPU" in found[0]
    return found[0] if found else "no warning on the CPU"


@case("a model on the CPU beside a GPU", PAIR)
def on_the_cpu(worker: Worker) -> str:
    """It uses no memory of the GPU."""
    if not worker.cuda:
        raise SkipError("there is no GPU")
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run, _ = run_library(Script(place=lambda model, _: model), worker)
    run.replica.close()
    peak = torch.cuda.max_memory_allocated()
    assert peak == before, f"{peak - before} bytes of the GPU were taken"
    return "0 bytes of the GPU"


@case("a model that is moved afterwards", PAIR)
def moved(worker: Worker) -> str:
    """An error that names the parameter, on every worker."""
    if not worker.cuda:
        raise SkipError("there is no other device")
    # Without momentum: the optimizer itself would refuse a state on another device.
    run = library(Script(place=lambda model, _: model, optimizer=partial(torch.optim.SGD, lr=0.1)), worker)
    run.step(0)
    run.model.to(worker.device)
    run.device = worker.device
    text = raised(RuntimeError, lambda: run.step(1), "weight", "bias")
    run.replica.close()
    return text


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def large_loss(model: Callable[[Tensor], Tensor], t: int, rank: int, like: Tensor) -> Tensor:
    return model(batch(t, rank, like.device, 4, WIDTH)).square().mean()


def check_memory(compression: str | None, copies: float, worker: Worker) -> str:
    """Memory beyond parameters, gradients and optimizer state (SGD has none): while an exchange is in flight, and at the peak
    of a round, which processes some blocks of values at once."""
    if not worker.cuda:
        raise SkipError("the CPU's memory is not counted by tensor")
    warm = torch.ones(8, 8, device=worker.device, requires_grad=True)
    torch.autograd.backward((warm @ warm).sum())  # the workspaces of matrix products are no memory of ours
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    script = Script(
        make=large,
        loss=large_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3, foreach=False),
        options={"compression": compression, "bucket_size_in_mb": 8},
        steps=4,
    )
    run = library(script, worker)
    for t in range(2):
        run.step(t)
    own = sum(param.nbytes for param in run.model.parameters())
    torch.cuda.reset_peak_memory_stats()
    run.step(2)
    torch.cuda.synchronize()
    for param in run.model.parameters():
        param.grad = None
    kept = (torch.cuda.memory_allocated() - base - own) / own
    peak = (torch.cuda.max_memory_allocated() - base - 2 * own) / own  # gradients aside
    run.replica.close()
    text = f"{kept:.2f} copies, {peak:.2f} at the peak beside gradients"
    assert kept <= copies + 0.15, f"{text}: more than {copies} copies"
    assert peak <= copies + 1.5, f"{text}: more than {copies + 1.5} at the peak"
    return text


for _compression, _copies in ((None, 2.0), ("bfloat16", 1.0), ("int8", 0.5)):
    case(f"memory beyond the parameters: {_compression}", PAIR)(partial(check_memory, _compression, _copies))


@case("a model of 64 MiB", PAIR, THREADS)
def large_model(worker: Worker) -> str:
    """Messages that take longer than a step's launch, in both directions at once."""
    if not worker.cuda:
        raise SkipError("it takes too long on a CPU")
    script = Script(make=large, loss=large_loss, optimizer=adamw(), options={"bucket_size_in_mb": 8}, steps=6)
    run, _ = run_library(script, worker)
    with run.replica.averaged():
        mean = [param.detach().cpu() for param in run.model.parameters()]
    run.replica.close()
    for theirs in worker.gather([float(tensor.double().sum()) for tensor in mean]):
        assert theirs == [float(tensor.double().sum()) for tensor in mean], "the means differ"
    return f"waited {run.replica.stats().waited_s:.2f} s in 6 rounds"


class Residual(nn.Module):
    """As many parameters, of which the first ones have gradients that are as large as the last ones'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return x


def residual_loss(model: Callable[[Tensor], Tensor], t: int, rank: int, like: Tensor) -> Tensor:
    return (model(batch(t, rank, like.device, 4, WIDTH)) - batch(t + 5000, rank, like.device, 4, WIDTH)).square().sum(1).mean()


def check_late_values(changes: dict[str, Any], worker: Worker) -> str:
    """The step is queued behind a long kernel, and the messages are many: what is sent is what the step has made of them."""
    if not worker.cuda:
        raise SkipError("there is nothing to queue behind")
    script = Script(
        make=Residual,
        loss=residual_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        options={"bucket_size_in_mb": 8},
        delay=True,
        steps=4,
        tolerance=1e-4,
    )
    return check_script(replace(script, **changes), worker)


LATE: dict[str, dict[str, Any]] = {"": {}, ", a side stream": {"streams": "training"}, ", no overlap": {"overlap": False}}
for _name, _changes in LATE.items():
    case(f"a long kernel, a model of 64 MiB{_name}", PAIR)(partial(check_late_values, _changes))


@case("two hundred steps, no synchronisation", PAIR)
def many_steps(worker: Worker) -> str:
    """Two hundred steps without a synchronisation by the script; the replicas stay near each other."""
    run, _ = run_library(replace(Script(), topology="complete", steps=200), worker)
    distance = run.replica.consensus_distance()
    size = sum(float(param.detach().square().sum()) for param in run.model.parameters()) ** 0.5
    run.replica.close()
    assert distance < size, f"distance {distance:.3g} of replicas of size {size:.3g}"
    return f"distance {distance:.3g}, size {size:.3g}"


@case("capture in a CUDA graph is refused", PAIR, drivers=BOTH, alone=True, optional=lambda: True)
def captured(worker: Worker) -> str:
    """A graph would replay one exchange for ever."""
    if not worker.cuda:
        raise SkipError("there are no CUDA graphs")
    run = library(Script(optimizer=adamw(capturable=True), steps=3), worker)
    run.step(0)
    inputs = run.like  # a captured graph must not copy from the CPU
    target = torch.ones(5, 6, device=inputs.device)

    def once() -> None:
        run.backward(run.forward(target).square().mean())
        if worker.driver == "gossip":
            run.update()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            once()

    torch.cuda.synchronize()
    return raised(RuntimeError, capture, "captur", "CUDA graph")


@case("gossip() of a scaler that it was not given", PAIR, drivers=GOSSIP)
def other_scaler(worker: Worker) -> str:
    """RuntimeError at the first step."""
    model = nn.Linear(6, 3).to(worker.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=worker.cuda)
    scaler = torch.amp.GradScaler(worker.device.type, init_scale=4.0)
    replica = decent_dp.gossip(model, optimizer, transport=worker.transport())
    scaler.scale(model(torch.ones(2, 6, device=worker.device)).sum()).backward()
    text = raised(RuntimeError, lambda: scaler.step(optimizer), "scaler")
    replica.close()
    return text
