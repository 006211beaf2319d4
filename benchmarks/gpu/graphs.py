"""CUDA graphs and ``torch.compile``."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.case import GOSSIP, PAIR, SkipError, Worker, case, raised
from benchmarks.gpu.situations import PLAIN, SCALED, adamw, check_script
from benchmarks.gpu.training import FEATURES, SAMPLES, SGD, Local, Script, compare, library, mlp, run_twin, values
from decent_dp.optim import AccumAdamW, GossipAdamW


def need_compiler(worker: Worker) -> None:
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        raise SkipError("there is no C compiler")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if worker.cuda and not (importlib.util.find_spec("triton") and headers.exists()):
        raise SkipError("there is no Triton, or Python was installed without its headers")


# -- compiled ----------------------------------------------------------------------------------------------------------

COMPILED = {
    "": replace(PLAIN, compiled=True, tolerance=1e-4),
    ", autocast bfloat16": replace(PLAIN, compiled=True, autocast=torch.bfloat16, tolerance=2e-2),
    ", GradScaler, overflow": replace(SCALED, compiled=True, tolerance=5e-3),
    ", accumulation": replace(PLAIN, compiled=True, backwards=3, steps=5, tolerance=1e-4),
}


def check_compiled(script: Script, worker: Worker) -> str:
    need_compiler(worker)
    torch.compiler.reset()
    if not worker.cuda and script != COMPILED[""]:
        script = replace(script, backend="aot_eager")  # inductor needs half a minute for each
    return check_script(script, worker)


for _name, _script in COMPILED.items():
    case(f"torch.compile of the model{_name}", PAIR, timeout=170)(partial(check_compiled, _script))


@case("torch.compile, reduce-overhead", PAIR, timeout=170, alone=True)
def graph_trees(worker: Worker) -> str:
    """CUDA graphs that torch makes itself: a replay has to see the values that were mixed in."""
    if not worker.cuda:
        raise SkipError("there are no CUDA graphs")
    return check_compiled(replace(PLAIN, compiled=True, mode="reduce-overhead", steps=12, tolerance=1e-4), worker)


@case("torch.compile of optimizer.step", PAIR, drivers=GOSSIP, timeout=170)
def compiled_step(worker: Worker) -> str:
    """The step is compiled, and the exchange after it is not."""
    need_compiler(worker)
    torch.compiler.reset()
    script = replace(PLAIN, tolerance=1e-4)
    run = library(script, worker)
    began = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    step = torch.compile(run.optimizer.step, backend="inductor" if worker.cuda else "aot_eager")
    for t in range(8):
        run.optimizer.zero_grad()
        run.backward(run.loss(t))
        step()
    rounds, found = run.replica.stats().rounds, values(run.model)
    run.replica.close()
    assert rounds == 8, f"{rounds} rounds, not 8"
    return compare(found, values(run_twin(script, worker.n, worker.device, began)[worker.rank]), script.tolerance, "the twin")


# -- captured by the user ----------------------------------------------------------------------------------------------


def graphed(model: nn.Module, device: torch.device) -> nn.Module:
    """Forward and backward as CUDA graphs, for batches of one size; nothing to capture on the CPU."""
    model.to(device)
    if device.type == "cuda":
        torch.cuda.make_graphed_callables(model, (torch.randn(SAMPLES, FEATURES, device=device),))
    return model


def check_graphed(changes: dict[str, Any], worker: Worker) -> str:
    """The graphs read parameters where they were at the capture; the twin has none."""
    options = {"param_as_bucket_view": False} if worker.driver == "wrapper" else {}
    script = replace(PLAIN, place=graphed, options=options, steps=10, **changes)
    run = library(script, worker)
    began = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    for t in range(10):
        if t == script.reload:
            run.model.load_state_dict(began)
        run.step(t)
    rounds, found = run.replica.stats().rounds, values(run.model)
    run.replica.close()
    assert rounds == 10, f"{rounds} rounds, not 10"
    plain = replace(script, place=lambda model, device: model.to(device))
    return compare(found, values(run_twin(plain, worker.n, worker.device, began)[worker.rank]), script.tolerance, "the twin")


GRAPHED: dict[str, dict[str, Any]] = {
    "": {},
    ", no overlap": {"overlap": False},
    ", AdamW fused": {"optimizer": adamw(fused=True)},
    ", a load in the middle, clipping": {"reload": 4, "clip": 0.2},
}
for _name, _changes in GRAPHED.items():
    case(f"make_graphed_callables before the call{_name}", PAIR, alone=True)(partial(check_graphed, _changes))


@case("make_graphed_callables and views of buckets", PAIR, drivers=("wrapper",), alone=True)
def graphed_views(worker: Worker) -> str:
    """The wrapper moves parameters, and the graphs would read their old places: refused."""
    if not worker.cuda:
        raise SkipError("there are no CUDA graphs")
    return raised(ValueError, lambda: library(replace(PLAIN, place=graphed), worker), "param_as_bucket_view=False")


# -- optimizers on the device --------------------------------------------------------------------------------------------


def by_hand(make: Callable[[Any], torch.optim.Optimizer], worker: Worker) -> str:
    """Plain steps of one replica on the device and on the CPU, from the same values."""
    found = []
    torch.manual_seed(3)
    first = mlp().state_dict()
    for device in (worker.device, torch.device("cpu")):
        local = Local(Script(optimizer=make), device, 0, first)
        for t in range(12):
            local.step(t)
        found.append([value.cpu() for value in values(local.model)])
    return compare(found[0], found[1], 2e-5, "the CPU's steps")


_SINGLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": SGD,
    "AccumAdamW": partial(AccumAdamW, lr=0.01, eps=1e-4, accum_iter=2),
    "GossipAdamW": partial(GossipAdamW, lr=0.01, eps=1e-4),
}


@case("optimizers as on the CPU", ("threads", 1), drivers=GOSSIP)
def optimizers(worker: Worker) -> str:
    texts = []
    for name, make in _SINGLE.items():
        texts.append(f"{name} {by_hand(make, worker)}")
    return "; ".join(texts)
