"""The mean of the replicas, and checkpoints."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.case import GOSSIP, PAIR, THREADS, TRIO, SkipError, Worker, case
from benchmarks.gpu.situations import SCALED, Convolutions, adamw, images
from benchmarks.gpu.training import Library, Script, compare, largest_difference, library, run_library

IMAGES = Script(make=Convolutions, loss=images, optimizer=adamw(), steps=4)


def everything(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean in float64; tensors that are not floating point come from worker 0."""
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(first.dtype)
        if first.is_floating_point()
        else first
        for name, first in states[0].items()
    }


def same(found: Mapping[str, Tensor], due: Mapping[str, Tensor], tolerance: float, what: str) -> str:
    assert list(found) == list(due), f"names {list(found)} and {list(due)}"
    return compare(list(found.values()), list(due.values()), tolerance, what)


@case("averaged, consensus_distance, with buffers", PAIR, THREADS, TRIO)
def means(worker: Worker) -> str:
    """In the middle of a run, with an exchange in flight; the values are restored exactly."""
    options = {} if worker.driver == "gossip" else {"sync_buffer_in_global_avg": True}
    run, _ = run_library(replace(IMAGES, topology="base-2", options=options), worker)
    replica, own = run.replica, everything(run.model)
    states = worker.gather(own)
    mean = mean_of(states)
    trained = [name for name, _ in run.model.named_parameters()]
    squares = [sum(float((state[name].double() - mean[name].double()).square().sum()) for name in trained) for state in states]
    due = (sum(squares) / len(squares)) ** 0.5
    distance = replica.consensus_distance()
    assert abs(distance - due) <= 1e-4 * due + 1e-7, f"consensus_distance {distance:.6g}, and {due:.6g} by hand"
    assert due > 0, "the replicas do not differ"
    with replica.averaged():
        text = same(everything(run.model), mean, 1e-6, "the mean")
    assert largest_difference(list(everything(run.model).values()), list(own.values())) == 0.0, "averaged() changed a replica"
    run.step(4)
    if worker.driver == "wrapper":
        own = everything(run.model)
        mean = mean_of(worker.gather(own))
        replica.global_avg()
        same(everything(run.model), mean, 1e-6, "the mean")
        replica.revert_global_avg()
        assert largest_difference(list(everything(run.model).values()), list(own.values())) == 0.0, "revert is not exact"
        replica.global_avg(will_revert=False)
    else:
        replica.average_()
    assert replica.consensus_distance() <= 1e-6
    run.step(5)
    assert replica.consensus_distance() > 1e-6
    replica.close()
    return f"{text}, distance {distance:.3g}"


def train(run: Library, first: int, last: int) -> None:
    for t in range(first, last):
        run.step(t)


def need_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise SkipError("safetensors is not installed")


@case("checkpoint: an exact resume", PAIR, THREADS, TRIO)
def checkpoint(worker: Worker) -> str:
    """With an exchange in flight; equals the run without a stop, bit for bit."""
    need_safetensors()
    from decent_dp.checkpoint import load, save

    if worker.cuda:
        torch.backends.cudnn.deterministic = True
    for number, script in enumerate((replace(IMAGES, topology="base-2"), int8(), replace(SCALED, overflows=[(1, 2)]))):
        run = library(script, worker)
        train(run, 0, 4)
        folder = worker.folder / f"checkpoints{number}"
        save(run.replica, folder, {"batch": 4})
        train(run, 4, 8)
        due, rounds = everything(run.model), run.replica.stats().rounds
        run.replica.close()
        again = library(script, worker)
        found = load(again.replica, folder)
        assert found == {"batch": 4}, f"the extras were {found}"
        assert next(again.model.parameters()).device == worker.device
        train(again, 4, 8)
        assert again.replica.stats().rounds == rounds
        worst = largest_difference(list(everything(again.model).values()), list(due.values()))
        again.replica.close()
        assert worst == 0.0, f"script {number}: the resumed run differs by {worst:.2g}"
    return "equal: AdamW, int8, GradScaler"


def int8() -> Script:
    return Script(options={"compression": "int8"})


@case("checkpoint: export of the mean", PAIR, TRIO)
def export(worker: Worker) -> str:
    need_safetensors()
    from safetensors.torch import load_file

    from decent_dp.checkpoint import export

    run, _ = run_library(replace(IMAGES, topology="base-2"), worker)
    states = worker.gather(everything(run.model))
    text = []
    for name in ("mean.safetensors", "mean.pt"):
        path = export(run.replica if worker.driver == "gossip" else run.forward, worker.folder / name)
        found: Any = (
            load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True, map_location="cpu")
        )
        due = mean_of(states)
        text.append(same({key: found[key] for key in due}, due, 1e-6, f"the mean in {name}"))
    run.replica.close()
    return ", ".join(text)


@case("state dicts: an exact resume", PAIR, THREADS, drivers=GOSSIP)
def state_dicts(worker: Worker) -> str:
    """The state dicts of the model, the optimizer and the Gossip, through a file."""
    for number, script in enumerate((replace(IMAGES, overlap=True), int8())):
        if worker.cuda:
            torch.backends.cudnn.deterministic = True
        run = library(script, worker)
        train(run, 0, 4)
        file = worker.folder / f"{number}-{worker.rank}.pt"
        saved = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "gossip": run.replica.state_dict()}
        torch.save(saved, file)
        train(run, 4, 8)
        due = everything(run.model)
        run.replica.close()
        again = library(script, worker)
        saved = torch.load(file, weights_only=True)
        again.model.load_state_dict(saved["model"])
        again.optimizer.load_state_dict(saved["optimizer"])
        again.replica.load_state_dict(saved["gossip"])
        train(again, 4, 8)
        worst = largest_difference(list(everything(again.model).values()), list(due.values()))
        again.replica.close()
        assert worst == 0.0, f"script {number}: the resumed run differs by {worst:.2g}"
    return "equal: AdamW, int8"


@case("optim_state_dict resumes", PAIR, drivers=("wrapper",))
def optim_state_dict(worker: Worker) -> str:
    """Loaded before the first update of a new wrapper, without overlap, so that nothing is in flight."""
    script = replace(IMAGES, overlap=False)
    run = library(script, worker)
    train(run, 0, 4)
    model, optim = everything(run.model), copy.deepcopy(run.replica.optim_state_dict())
    train(run, 4, 8)
    due = everything(run.model)
    run.replica.close()
    again = library(script, worker)
    again.replica.load_state_dict(model)
    again.replica.load_optim_state_dict(optim)
    train(again, 4, 8)
    text = same(everything(again.model), due, 1e-5, "the resumed run")
    again.replica.close()
    return text
