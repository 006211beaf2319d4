"""The mean of the replicas, checkpoints, random numbers, other numbers of workers, and stops."""

from __future__ import annotations

import copy
import importlib.util
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.case import GOSSIP, PAIR, THREADS, TRIO, SkipError, Worker, case
from benchmarks.gpu.situations import SCALED, Convolutions, adamw, images
from benchmarks.gpu.training import (
    FEATURES,
    OUTPUTS,
    SAMPLES,
    Library,
    Script,
    batch,
    compare,
    largest_difference,
    library,
    run_library,
)

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


# -- random numbers ------------------------------------------------------------------------------------------------------


class Noisy(torch.nn.Module):
    """Draws a mask on its device in each forward, and one by dropout.

    Attributes:
        masks: those of the forwards, on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(FEATURES, 32), torch.nn.Linear(32, OUTPUTS)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.first(x)), 0.2)
        mask = torch.rand_like(hidden) < 0.7
        self.masks.append((mask & (hidden != 0)).detach().cpu())
        out: Tensor = self.last(hidden * mask)
        return out


@case("random numbers of the device", PAIR, TRIO)
def random_numbers(worker: Worker) -> str:
    """A checkpoint has them: the masks after a load are those of the run without a stop. Workers draw different ones."""
    need_safetensors()
    from decent_dp.checkpoint import load, save

    if worker.cuda:
        torch.backends.cudnn.deterministic = True
    script = Script(make=Noisy, topology="base-2")
    run: Any = library(script, worker)
    before = state_of_device(worker)
    train(run, 0, 4)
    assert not torch.equal(before, state_of_device(worker)), "the model draws from another generator"
    save(run.replica, worker.folder / "checkpoints")
    train(run, 4, 8)
    due, masks = everything(run.model), run.model.masks
    run.replica.close()
    assert not torch.equal(masks[3], masks[4]), "two steps drew the same mask"
    gathered = worker.gather(masks)
    for rank, theirs in enumerate(gathered):
        assert rank == worker.rank or not all(map(torch.equal, theirs, masks)), f"worker {rank} drew the same masks"
    torch.rand(1000 + worker.rank, device=worker.device)
    again: Any = library(script, worker)
    load(again.replica, worker.folder / "checkpoints")
    train(again, 4, 8)
    assert all(map(torch.equal, again.model.masks, masks[4:])), "the masks after the load are others"
    worst = largest_difference(list(everything(again.model).values()), list(due.values()))
    again.replica.close()
    assert worst == 0.0, f"the resumed run differs by {worst:.2g}"
    return f"{len(masks[4:])} masks are equal, and differ between workers"


def state_of_device(worker: Worker) -> Tensor:
    return torch.cuda.get_rng_state(worker.device) if worker.cuda else torch.get_rng_state()


# -- other numbers of workers, moving averages, statistics, a stop -----------------------------------------------------------


@case("checkpoint: of two workers, for three", TRIO, timeout=120)
def resized(worker: Worker) -> str:
    """All start from the mean; or two from what they were, and the third from a copy."""
    need_safetensors()
    from decent_dp.checkpoint import load, save

    group = dist.new_group([0, 1])
    states: Any = None
    if worker.rank < 2:
        pair = Worker(worker.rank, 2, worker.driver, worker.device, worker.folder)
        run, _ = run_library(replace(IMAGES, options={"process_group": group}), pair)
        save(run.replica, worker.folder / "checkpoints")
        states = everything(run.model)  # what was in flight is mixed in
        run.replica.close()
    saved = worker.gather(states)[:2]
    mean = mean_of(saved)
    text = []
    for how in ("mean", "spread"):
        again = library(replace(IMAGES, topology="base-2"), worker)
        load(again.replica, worker.folder / "checkpoints", resize=how)
        found = everything(again.model)
        assert next(again.model.parameters()).device == worker.device
        if how == "mean":
            text.append(same(found, mean, 1e-6, "the mean"))
        else:
            # Each worker has one of the two, and each of the two is there.
            nearest = [number for number, state in enumerate(saved) if equal(found, state)]
            assert nearest, f"worker {worker.rank} starts from none of the two replicas"
            assert {number for own in worker.gather(nearest) for number in own} == {0, 1}
            text.append("spread exactly")
        train(again, 4, 8)
        assert all(bool(value.isfinite().all()) for value in everything(again.model).values())
        again.replica.close()
    return ", ".join(text)


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, b[name]) for name, value in a.items())


@case("a moving average, and BatchNorm's statistics", PAIR, THREADS)
def averages(worker: Worker) -> str:
    """``AveragedReplica`` by its formula in float64, the mean over workers, and ``calibrate`` by a forward of the mean."""
    from decent_dp.checkpoint import AveragedReplica, calibrate

    run: Any = library(IMAGES, worker)
    trained = [name for name, _ in run.model.named_parameters()]
    average = AveragedReplica(run.replica if worker.driver == "gossip" else run.forward, decay=0.7)
    due: dict[str, Tensor] = {}
    for t in range(6):
        run.step(t)
        average.update()
        now = {name: value.double() for name, value in everything(run.model).items() if name in trained}
        due = {name: 0.7 * due[name] + 0.3 * now[name] for name in trained} if due else now
    mean = mean_of(worker.gather(due))
    with average.averaged():
        found = everything(run.model)
        text = compare([found[name].double() for name in trained], [mean[name] for name in trained], 1e-5, "the formula")
    batches = [batch(t, worker.rank, worker.device, SAMPLES, 3, 8, 8) for t in range(3)]
    with run.replica.averaged():
        calibrate(run.replica if worker.driver == "gossip" else run.forward, batches)
        found = everything(run.model)
        statistics = [name for name, _ in run.model.named_buffers() if "running" in name]
        by_hand = copy.deepcopy(run.model)
        norm: Any = by_hand.layers[1]
        inputs = [by_hand.layers[0](x).detach().double().cpu() for x in batches]
    run.replica.close()
    assert statistics == ["layers.1.running_mean", "layers.1.running_var"]
    means = [torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0), torch.stack([x.var((0, 2, 3)) for x in inputs]).mean(0)]
    everybody = worker.gather(means)
    assert norm.momentum is not None
    due_statistics = [torch.stack([theirs[number] for theirs in everybody]).mean(0) for number in range(2)]
    text += "; " + compare([found[name].double() for name in statistics], due_statistics, 1e-4, "statistics by hand")
    return text


@case("a signal stops all workers after one round", PAIR, alone=True)
def preempted(worker: Worker) -> str:
    """SIGTERM to worker 1; all stop, save, and resume as the run that was not stopped."""
    need_safetensors()
    from decent_dp.checkpoint import Preemption, load, save

    run = library(IMAGES, worker)
    stopped = -1
    with Preemption(run.replica if worker.driver == "gossip" else run.forward) as stop:
        for t in range(60):
            run.step(t)
            time.sleep(0.02)
            if t == 3 and worker.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.due:
                stopped = t
                break
    assert stopped >= 3, "the signal stopped nobody"
    assert worker.gather(stopped) == [stopped] * worker.n, "workers stopped after different rounds"
    save(run.replica, worker.folder / "checkpoints", {"step": stopped + 1})
    if worker.cuda:
        torch.backends.cudnn.deterministic = True
    train(run, stopped + 1, stopped + 4)
    due = everything(run.model)
    run.replica.close()
    again = library(IMAGES, worker)
    assert load(again.replica, worker.folder / "checkpoints") == {"step": stopped + 1}
    train(again, stopped + 1, stopped + 4)
    worst = largest_difference(list(everything(again.model).values()), list(due.values()))
    again.replica.close()
    assert worst == 0.0, f"the resumed run differs by {worst:.2g}"
    return f"stopped after step {stopped}, and resumed exactly"
