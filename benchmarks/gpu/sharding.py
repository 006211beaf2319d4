"""Replicas that ``fully_shard`` (FSDP2) spreads over workers, which share the GPU, against replicas that are not sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.case import GOSSIP, PAIR, QUARTET, SINGLE, SkipError, Worker, case
from benchmarks.gpu.keeping import need_safetensors
from benchmarks.gpu.situations import adamw
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
    run_twin,
)

STEPS = 6


class Layers(nn.Module):
    """Sizes that two does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 7), nn.LayerNorm(7), nn.Linear(7, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(torch.tanh(self.first(x))))
        return out


@functools.cache  # the groups of a mesh take a while
def mesh_of(device: str, replicas: int, shards: int, nccl: bool) -> Any:
    """Workers by (replica, shard). With ``nccl`` each replica is of one worker, whose group is NCCL's."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    names = ("replica", "shard")
    if not nccl:
        return init_device_mesh(device, (replicas, shards), mesh_dim_names=names)
    assert shards == 1
    rank = dist.get_rank()
    outer = dist.new_group(range(replicas), backend="gloo")
    inner = [dist.new_group([other], backend="nccl") for other in range(replicas)][rank]
    ranks = torch.arange(replicas, device="cpu").view(replicas, 1)
    return DeviceMesh.from_group([outer, inner], device, mesh=ranks, mesh_dim_names=names)


def shard(mesh: Any, options: dict[str, Any], model: nn.Module, device: torch.device) -> nn.Module:
    """FSDP2 of the model and of its first layer, over the inner dimension."""
    from torch.distributed.fsdp import fully_shard

    model = model.to(device)
    layers: Any = model
    fully_shard(layers.first, mesh=mesh["shard"], **options)
    fully_shard(model, mesh=mesh["shard"], **options)
    return model


def try_torch(mesh: Any, options: dict[str, Any], device: torch.device, clips: bool) -> str:
    """What goes wrong in a step of torch's own with these shards; empty if nothing does."""
    try:
        model = shard(mesh, options, Layers(), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.autograd.backward(model(torch.ones(2, FEATURES, device=device)).sum())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _, value in whole(model).items():
            assert bool(value.isfinite().all())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def find_mesh(worker: Worker, replicas: int, shards: int, options: dict[str, Any], clips: bool = False) -> tuple[Any, str]:
    """A mesh with which torch's own step works on all workers, and the backend of its inner groups.

    Raises:
        SkipError: there is none; with torch's error.
    """
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError as error:
        raise SkipError(f"this torch has no fully_shard ({error})") from None
    if not worker.cuda and not hasattr(torch.cpu.Stream, "record_event"):
        raise SkipError("this torch cannot shard a model on CPUs")
    if worker.cuda and shards > 1:
        # Seen with torch 2.11: exit code -11. A crash cannot be tried first.
        raise SkipError("gloo's reduce-scatter of CUDA tensors ends the process, and NCCL refuses two workers on one GPU")
    reasons = []
    for nccl in (False, True):
        if nccl and not (worker.cuda and shards == 1 and dist.is_nccl_available()):
            continue
        try:
            mesh, reason = mesh_of(worker.device.type, replicas, shards, nccl), ""
        except Exception as error:
            mesh, reason = None, f"{type(error).__name__}: {error}"
        reason = reason or try_torch(mesh, options, worker.device, clips)
        name = "nccl" if nccl else "gloo"
        if not (reason := next((text for text in worker.gather(reason) if text), "")):
            return mesh, name
        reasons.append(f"{name}: {reason}")
    raise SkipError(f"torch's own step fails here ({'; '.join(reasons)})")


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of whole parameters, on the CPU. Called by all workers of a replica."""
    found = {}
    for name, param in model.named_parameters():
        value: Any = param.detach()
        if type(value).__name__ == "DTensor":
            # Gathered where FSDP itself gathers: shards may wait on the CPU for a group that has no operations there.
            value = value.full_tensor()
        found[name] = value.to("cpu", copy=True)
    return found


def loss_of(device: torch.device, shards: int) -> Callable[[Any, int, int, Tensor], Tensor]:
    """Of the batches of a whole replica: worker ``p`` of its ``shards`` workers sees batch ``shards * t + p`` at step t."""

    def loss(model: Callable[[Tensor], Tensor], t: int, rank: int, _: Tensor) -> Tensor:
        replica, place = divmod(rank, shards)
        x = batch(shards * t + place, replica, device, SAMPLES, FEATURES)
        return (model(x) - batch(shards * t + place + 5000, replica, device, SAMPLES, OUTPUTS)).square().mean()

    return loss


def whole_loss(device: torch.device) -> Callable[[Any, int, int, Tensor], Tensor]:
    return loss_of(device, 1)


def train(run: Library, first: int, last: int) -> None:
    for t in range(first, last):
        run.step(t)


def check_shards(replicas: int, shards: int, changes: dict[str, Any], fsdp: dict[str, Any], worker: Worker) -> str:
    """R replicas of S workers equal R whole ones, each with the batches of S workers, and ``averaged`` is their mean."""
    mesh, backend = find_mesh(worker, replicas, shards, fsdp, "clip" in changes)
    script = replace(
        Script(make=Layers, steps=STEPS), loss=loss_of(worker.device, shards), place=partial(shard, mesh, fsdp), **changes
    )
    run = library(script, worker)
    began = whole(run.model)
    train(run, 0, STEPS)
    rounds = run.replica.stats().rounds
    assert rounds == STEPS, f"{rounds} rounds, not {STEPS}"
    found, distance = whole(run.model), run.replica.consensus_distance()
    with run.replica.averaged():
        mean = whole(run.model)
        with torch.no_grad():
            own = float(run.loss(0))
    again = whole(run.model)
    run.replica.close()
    assert all(torch.equal(again[name], value) for name, value in found.items()), "averaged() changed a replica"
    whole_script = replace(
        script, loss=whole_loss(worker.device), place=lambda model, device: model.to(device), backwards=shards
    )
    twins = run_twin(whole_script, replicas, worker.device, began)
    states = [{name: param.detach().cpu() for name, param in twin.named_parameters()} for twin in twins]
    text = compare(list(found.values()), list(states[worker.rank // shards].values()), script.tolerance, "whole replicas")
    means = {name: torch.stack([state[name].double() for state in states]).mean(0).float() for name in states[0]}
    compare(list(mean.values()), list(means.values()), script.tolerance, "their mean")
    squares = [sum(float((state[name].double() - means[name]).square().sum()) for name in means) for state in states]
    due = (sum(squares) / replicas) ** 0.5
    assert abs(distance - due) <= 1e-3 * due + 1e-6, f"consensus_distance {distance:.6g}, and {due:.6g} by hand"
    twin = twins[0]
    with torch.no_grad():
        for name, param in twin.named_parameters():
            param.copy_(means[name])
        expected = float(script.loss(twin, 0, worker.rank, next(twin.parameters())))
    assert abs(own - expected) < 1e-3, f"the mean has the loss {own:.6g} in a forward of shards, and {expected:.6g} whole"
    moved = largest_difference(list(found.values()), list(began.values()))
    assert moved > 1e-3, f"training has moved the parameters by {moved:.2g} only"
    return f"{text} (groups: {backend})"


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no overlap, AdamW, clipping": {"overlap": False, "optimizer": adamw(), "clip": 0.3},
}
for _name, _changes in CHANGES.items():
    case(f"FSDP2, 2 replicas x 1: {_name}", PAIR, drivers=GOSSIP, alone=True)(partial(check_shards, 2, 1, _changes, {}))
    case(f"FSDP2, 2 replicas x 2: {_name}", QUARTET, drivers=GOSSIP, alone=True)(partial(check_shards, 2, 2, _changes, {}))


@case("FSDP2: reshard_after_forward=False", QUARTET, drivers=GOSSIP, alone=True)
def kept_gathered(worker: Worker) -> str:
    return check_shards(2, 2, {}, {"reshard_after_forward": False}, worker)


@case("FSDP2: CPUOffloadPolicy", PAIR, drivers=GOSSIP, alone=True)
def offloaded(worker: Worker) -> str:
    """Shards, optimizer and exchanges are on the CPU, and the computation on the device."""
    if not worker.cuda:
        raise SkipError("there is nothing to offload from")
    from torch.distributed.fsdp import CPUOffloadPolicy

    return check_shards(2, 1, {}, {"offload_policy": CPUOffloadPolicy()}, worker)


@case("FSDP2: one replica of one worker", SINGLE, drivers=GOSSIP, alone=True)
def single(worker: Worker) -> str:
    """A mesh of size 1 in a process group of NCCL, where there is one."""
    nccl = worker.cuda and dist.is_nccl_available()
    store = dist.FileStore(str(worker.folder / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh_of.cache_clear()
        return check_shards(1, 1, {}, {}, worker)
    finally:
        mesh_of.cache_clear()
        dist.destroy_process_group()


@case("FSDP2: checkpoint, an exact resume", PAIR, QUARTET, drivers=GOSSIP, alone=True)
def resumes(worker: Worker) -> str:
    """Equals the run without a stop, bit for bit; ``export`` writes the whole mean."""
    need_safetensors()
    from decent_dp.checkpoint import export, load, save

    shards = worker.n // 2
    mesh, _ = find_mesh(worker, 2, shards, {})
    if worker.cuda:
        torch.backends.cudnn.deterministic = True
    script = Script(
        make=Layers, loss=loss_of(worker.device, shards), place=partial(shard, mesh, {}), optimizer=adamw(), steps=2 * STEPS
    )
    run = library(script, worker)
    train(run, 0, STEPS)
    save(run.replica, worker.folder / "checkpoints", {"step": STEPS})
    train(run, STEPS, 2 * STEPS)
    due = whole(run.model)
    path = export(run.replica, worker.folder / "mean.pt")
    with run.replica.averaged():
        mean = whole(run.model)
    run.replica.close()
    exported: Any = torch.load(path, weights_only=True, map_location="cpu")
    compare([exported[name] for name in mean], list(mean.values()), 1e-6, "export")
    again = library(script, worker)
    assert load(again.replica, worker.folder / "checkpoints") == {"step": STEPS}
    train(again, STEPS, 2 * STEPS)
    worst = largest_difference(list(whole(again.model).values()), list(due.values()))
    again.replica.close()
    assert worst == 0.0, f"the resumed run differs by {worst:.2g}"
    return "equal, and export is the mean"
