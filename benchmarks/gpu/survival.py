"""Workers that die and processes that join, and the data of a run whose workers change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.data import DataLoader, TensorDataset

import decent_dp
from benchmarks.gpu.case import GOSSIP, PAIR, QUARTET, SkipError, Worker, case
from benchmarks.gpu.keeping import everything, mean_of, same
from benchmarks.gpu.training import FEATURES, OUTPUTS, SAMPLES, Script, batch, library, mlp
from decent_dp.transport.store import server_of

VICTIM = 3
DEAD_AFTER = 2.0
TOLERANT = Script(topology="random-matching", optimizer=partial(torch.optim.SGD, lr=0.05))
FAULTS = {"faults": decent_dp.Tolerate(dead_after=DEAD_AFTER, max_workers=4)}


def told(folder: Path, name: str, rank: int, value: object) -> None:
    """Leaves a value in a file, for ``heard``: the workers' own group cannot do without the one that is gone."""
    temporary = folder / f"{name} {rank} new"
    torch.save(value, temporary)
    temporary.rename(folder / f"{name} {rank}")


def heard(folder: Path, name: str, ranks: range | list[int], seconds: float = 30.0) -> list[Any]:
    deadline = time.monotonic() + seconds
    paths = [folder / f"{name} {rank}" for rank in ranks]
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for '{name}' of {list(ranks)}"
        time.sleep(0.01)
    return [torch.load(path, weights_only=True) for path in paths]


def train_until(run: Any, first: int, done: Callable[[], bool], seconds: float = 40.0) -> int:
    """Steps until ``done``; the next step."""
    deadline, t = time.monotonic() + seconds, first
    while not done():
        assert time.monotonic() < deadline, f"not done after {t} steps, {seconds:g} s: {run.replica.roster}"
        time.sleep(0.02)
        run.step(t)
        t += 1
    return t


def train_to_one_round(run: Any, first: int, folder: Path, ranks: list[int]) -> int:
    """All of ``ranks`` stop after the same round, some rounds after the last of them has come here; that round.

    They may come after different ones, and none may stop before the others, which wait for it.
    """
    told(folder, "came", dist.get_rank(), run.replica.stats().rounds)
    t = train_until(run, first, lambda: all((folder / f"came {rank}").exists() for rank in ranks))
    last = max(heard(folder, "came", ranks)) + 40
    assert run.replica.stats().rounds <= last, f"{run.replica.stats().rounds} rounds, and all stop after {last}"
    train_until(run, t, lambda: run.replica.stats().rounds >= last)
    return int(last)


@case("faults: a worker is killed", QUARTET, timeout=120, alone=True, dies=VICTIM)
def killed(worker: Worker) -> str:
    """The others go on without it, and their mean is that of three."""
    run: Any = library(replace(TOLERANT, options=FAULTS), worker)
    for t in range(5):
        run.step(t)
        time.sleep(0.02)
    if worker.rank == VICTIM:
        os._exit(9)
    others = [rank for rank in range(worker.n) if rank != VICTIM]
    began = time.monotonic()
    t = train_until(run, 5, lambda: len(run.replica.roster.members) == 3)
    seconds = time.monotonic() - began
    last = train_to_one_round(run, t, worker.folder, others)
    states = everything(run.model)
    told(worker.folder, "state", worker.rank, states)
    with run.replica.averaged():
        found = everything(run.model)
    told(worker.folder, "mean", worker.rank, found)
    text = same(found, mean_of(heard(worker.folder, "state", others)), 1e-6, "the mean of three")
    heard(worker.folder, "mean", others)  # none leaves before
    run.replica.close()
    return f"left out after {seconds:.1f} s, {last} rounds; {text}"


# Alone, because all cases have one store, where a process looks for the run that began last.
@case("faults: a process joins", QUARTET, timeout=120, alone=True, quiet=True)
def joins(worker: Worker) -> str:
    """Three train; a fourth comes, with the values of one of them, and is a member."""
    group = dist.new_group(range(3))
    torch.manual_seed(50 + worker.rank)
    if worker.rank == VICTIM:
        heard(worker.folder, "trains", range(3))
        server = server_of(_get_default_store())
        assert server is not None
        transport = decent_dp.join(f"{server[0]}:{server[1]}", rank=VICTIM)
        options: dict[str, Any] = {**FAULTS, "transport": transport}
    else:
        options = {**FAULTS, "process_group": group}
    script = replace(TOLERANT, options=options)
    run: Any = newcomer(script, worker) if worker.rank == VICTIM else library(script, worker)
    t = 0
    if worker.rank != VICTIM:
        for t in range(5):
            run.step(t)
        told(worker.folder, "trains", worker.rank, t)
    t = train_until(run, t + 1, lambda: len(run.replica.roster.members) == 4)
    last = train_to_one_round(run, t, worker.folder, list(range(4)))
    states = everything(run.model)
    told(worker.folder, "state", worker.rank, states)
    with run.replica.averaged():
        found = everything(run.model)
    assert next(run.model.parameters()).device.type == worker.device.type
    text = same(found, mean_of(heard(worker.folder, "state", range(4))), 1e-6, "the mean of four")
    told(worker.folder, "mean", worker.rank, 0)
    heard(worker.folder, "mean", range(4))  # none leaves before
    run.replica.close()
    return f"a member, {last} rounds; {text}"


def newcomer(script: Script, worker: Worker) -> Any:
    """``library`` with the transport of the script's options."""
    transport = script.options["transport"]
    joined: Any = Worker(worker.rank, worker.n, worker.driver, worker.device, worker.folder)
    joined.transport = lambda: transport
    return library(replace(script, options={k: v for k, v in script.options.items() if k != "transport"}), joined)


# -- data and curves -----------------------------------------------------------------------------------------------------


@case("RosterSampler and pinned batches", PAIR, drivers=GOSSIP)
def dealt(worker: Worker) -> str:
    """Each sample goes to one worker once per epoch, from pinned memory, while exchanges are in flight."""
    x, y = batch(1, 0, torch.device("cpu"), 48, FEATURES), batch(2, 0, torch.device("cpu"), 48, OUTPUTS)
    model = mlp().to(worker.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    replica = decent_dp.gossip(model, optimizer, topology="complete")
    sampler = decent_dp.RosterSampler(48, replica, 4)
    loader: Any = DataLoader(TensorDataset(torch.arange(48), x, y), batch_sampler=sampler, pin_memory=worker.cuda)
    losses, seen = [], []
    for _ in range(3):
        of_epoch: list[int] = []
        for numbers, inputs, targets in loader:
            of_epoch += numbers.tolist()
            assert inputs.is_pinned() == worker.cuda
            inputs, targets = (part.to(worker.device, non_blocking=True) for part in (inputs, targets))
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        seen.append(of_epoch)
    rounds = replica.stats().rounds
    replica.close()
    assert rounds == len(losses) == 18, f"{rounds} rounds, and {len(losses)} losses"
    everybody = worker.gather(seen)
    for epoch in range(3):
        found = sorted(number for theirs in everybody for number in theirs[epoch])
        assert found == list(range(48)), f"epoch {epoch} had the samples {found}"
    assert bool(torch.stack(losses).isfinite().all())
    assert len(set(map(tuple, seen))) == 3, "the epochs have one order"
    return f"48 samples, 3 epochs of {len(losses) // 3} rounds"


@case("Recorder", PAIR)
def recorded(worker: Worker) -> str:
    """Losses that are tensors of the device, written as the mean over workers."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise SkipError(f"tensorboard is not installed ({error})") from None
    from decent_dp.logging import Recorder

    run: Any = library(Script(), worker)
    board = Recorder(run.replica if worker.driver == "gossip" else run.forward, worker.folder / "board", every=4)
    losses = []
    for t in range(8):
        loss = (run.forward(batch(t, worker.rank, worker.device, SAMPLES, FEATURES))).square().mean()
        if worker.driver == "gossip":
            run.optimizer.zero_grad()
        run.backward(loss)
        if worker.driver == "gossip":
            run.update()
        board.log(loss.detach())
        losses.append(float(loss.detach()))
    board.flush()
    run.replica.close()
    everybody = worker.gather(losses)
    if worker.rank:
        return "written by worker 0"
    events = EventAccumulator(str(worker.folder / "board"))
    events.Reload()
    found = [event.value for event in events.Scalars("loss/mean")]
    due = [sum(sum(theirs[at : at + 4]) for theirs in everybody) / 8 for at in (0, 4)]
    assert len(found) == 2, f"{len(found)} points"
    assert max(abs(a - b) for a, b in zip(found, due, strict=True)) < 1e-5, f"the points are {found}, and {due} by hand"
    return "the mean losses of two workers"
