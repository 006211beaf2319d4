"""Trains a small network on handwritten digits, decentralized. Copy this file as a start.

    torchrun --nproc-per-node 4 examples/digits.py
    python examples/digits.py                          # one worker
    torchrun --nproc-per-node 4 --max-restarts 3 examples/digits.py --checkpoint runs/digits   # resumes after a stop

``--method ddp`` trains the same with PyTorch DDP, to compare, and ``--method wrapper`` with decent_dp's wrapper, which makes
the optimizers itself and steps them inside the backward. The code for these two only is marked "DDP" and "wrapper".
Needs scikit-learn, which brings the data along; in the clone of the repository: pip install -e '.[demo]'
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import decent_dp
from decent_dp import checkpoint
from decent_dp.optim import GossipAdamW, lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.utils import initialize_dist

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError:
    raise SystemExit("The digits need scikit-learn; in the clone of the repository: pip install -e '.[demo]'") from None

# GossipAdamW is AdamW with DDP.
OPTIMIZERS = {"gossip-adamw": GossipAdamW, "adamw": optim_fn_adamw, "accum-adamw": optim_fn_accum_adamw}
WARM_UP_STEPS = 10  # also excluded from the time of a step


@dataclass(frozen=True)
class Config:
    method: str = "gossip"  # or "wrapper", or "ddp"
    topology: str = "base-2"
    compression: str | None = None
    optimizer: str = "gossip-adamw"
    epochs: int = 30
    batch_size: int = 32  # of each worker
    lr: float = 2e-3
    seed: int = 0
    local_world_size: int | None = None  # workers per node; None: from the launcher
    save: str | None = None  # where the mean model goes
    checkpoint: str | None = None  # folder of checkpoints; a run that finds one there resumes it
    checkpoint_every: int = 50  # steps


@cache
def load_data() -> tuple[TensorDataset, Tensor, Tensor]:
    """1437 images to train on, and 360 images and labels to validate with: the same on every worker and for every seed."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=360, stratify=labels, random_state=0)
    x, x_val = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    y, y_val = (torch.tensor(part) for part in split[2:])
    return TensorDataset(x, y), x_val, y_val


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


class Trainee:
    """A model in training: call ``step`` after the backward; ``replica`` mixes with the neighbours."""

    def __init__(self, model: nn.Module, config: Config, steps: int) -> None:
        named = list(model.named_parameters())
        warm_up = {"t_warmup": WARM_UP_STEPS, "t_max": max(1, steps - WARM_UP_STEPS)}
        optim_fn = partial(OPTIMIZERS[config.optimizer], lr=config.lr, weight_decay=0.1)
        self.model: Any = model
        self.optimizer = self.scheduler = None
        if config.method == "wrapper":  # it makes one optimizer for each bucket, with its scheduler
            scheduler_fn = partial(lr_scheduler_fn_cosine_with_warmup, **warm_up)
            self.model = self.replica = decent_dp.DecentralizedDataParallel(
                model,
                optim_fn,
                scheduler_fn,
                topology=config.topology,
                compression=config.compression,
                _local_world_size=config.local_world_size,
            )
            return
        if config.method == "ddp":
            self.model, self.replica = DistributedDataParallel(model), Equal(model)  # DDP: its replicas are equal
        self.optimizer = optim_fn(named)
        self.scheduler = lr_scheduler_fn_cosine_with_warmup(self.optimizer, **warm_up)
        if config.method == "gossip":
            # The one line: from now on a mix with the neighbours follows each step of the optimizer.
            self.replica = decent_dp.gossip(
                model,
                self.optimizer,
                topology=config.topology,
                compression=config.compression,
                local_world_size=config.local_world_size,
            )

    def step(self) -> None:
        if self.optimizer is not None:  # the wrapper has stepped already
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """The extras of a checkpoint, besides model and optimizer."""
        return {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}

    def load(self, extra: dict[str, Any]) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(extra.pop("scheduler"))


def progress(line: str, *, stays: bool = True) -> None:
    """Writes a line on worker 0; one that does not stay is for terminals, and the next line takes its place."""
    if dist.get_rank() == 0 and (stays or sys.stdout.isatty()):
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        print(f"{clear}{line}", end="\n" if stays else "", flush=True)


def train(config: Config, report: Callable[..., None] = lambda line, stays: None) -> dict[str, Any] | None:
    """Trains one model. Called by all workers; returns the same result on all of them, None if a signal has stopped it."""
    dataset, x_val, y_val = load_data()
    # Every worker sees its own share of the images: a different one each epoch (set_epoch, below).
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True, seed=config.seed, drop_last=True)
    # Its own generator: the loader's draws neither depend on the model's random numbers nor change them.
    draws = torch.Generator()
    loader = DataLoader(dataset, batch_size=config.batch_size, sampler=sampler, drop_last=True, generator=draws)
    trainee = Trainee(make_model(config.seed), config, steps=config.epochs * len(loader))
    model, replica = trainee.model, trainee.replica
    criterion = nn.CrossEntropyLoss()

    # A checkpoint has this beside the model: the position of this worker, and its measurements.
    # Samples of all workers rather than batches, so that a run with another number of workers resumes at the same place.
    at: dict[str, Any] = {"epoch": 0, "samples": 0, "losses": [], "history": []}
    if config.checkpoint:
        found = checkpoint.load(replica, config.checkpoint, resize="spread", missing_ok=True)
        if found:
            trainee.load(found)
            at = found

    seconds: list[float] = []
    # A SIGTERM to any worker: all stop after the same update.
    with checkpoint.Preemption(replica) if config.checkpoint else contextlib.nullcontext() as stop:
        for epoch in range(at["epoch"], config.epochs):
            sampler.set_epoch(epoch)
            draws.manual_seed(epoch)  # so that an epoch is the same if it begins again after a restart
            for batch, (images, labels) in enumerate(loader, start=1):
                samples = batch * config.batch_size * sampler.num_replicas
                if samples <= at["samples"]:
                    continue  # it was trained with before the run was stopped
                began = time.perf_counter()
                loss = criterion(model(images), labels)
                loss.backward()
                trainee.step()
                seconds.append(time.perf_counter() - began)
                at["losses"].append(loss.detach())
                at["samples"] = samples
                if stop and stop.due:
                    saving = checkpoint.save(replica, config.checkpoint, {**trainee.state(), **at})
                    replica.close()
                    if saving.error is not None:
                        raise SystemExit(f"stopped, and nothing could be saved: {saving.error}")  # with exit code 1
                    return None
                if stop and (epoch * len(loader) + batch) % config.checkpoint_every == 0:
                    # A copy, which is written while training continues.
                    checkpoint.save(replica, config.checkpoint, {**trainee.state(), **at}, wait=False)

            # The mean of a metric over workers: one all-reduce per epoch is enough for all its steps.
            losses = mean_over_workers(torch.stack(at["losses"])).tolist()
            distance = replica.consensus_distance()
            first = epoch * len(loader) + 1
            history = [{"step": first + i, "loss": value, "consensus_distance": None} for i, value in enumerate(losses)]
            history[-1]["consensus_distance"] = distance
            at = {"epoch": epoch + 1, "samples": 0, "losses": [], "history": at["history"] + history}
            line = (
                f"epoch {epoch + 1:3d}: loss {statistics.fmean(losses):.4f}, replicas are {distance:.2e} away from their mean"
            )
            report(line, stays=(epoch + 1) % 5 == 0 or epoch + 1 == config.epochs)

    # Of the steps since the start, or the restart; without those that warm up, if there are others.
    timed = seconds[WARM_UP_STEPS:] or seconds or [0.0]
    # Replicas differ: their mean is the result, and is saved. One replica is evaluated to show the difference.
    worst = -max_over_workers(-accuracy(model, x_val, y_val))
    with replica.averaged():
        of_mean = accuracy(model, x_val, y_val)
        with torch.no_grad():
            loss_of_mean = float(criterion(model(x_val), y_val))
        if config.save and dist.get_rank() == 0:
            Path(config.save).parent.mkdir(parents=True, exist_ok=True)
            torch.save(getattr(model, "module", model).state_dict(), config.save)  # plain keys: it loads into make_model(...)
    result = {
        "config": asdict(config),
        "workers": dist.get_world_size(),
        "steps": config.epochs * len(loader),
        "accuracy": of_mean,
        "worst_accuracy": worst,
        "validation_loss": loss_of_mean,
        "consensus_distance": replica.consensus_distance(),
        "bytes_per_step": bytes_per_step(replica, len(seconds)),
        "ms_per_step": 1e3 * float(mean_over_workers(torch.tensor(statistics.median(timed)))),
        "history": at["history"],
    }
    replica.close()
    return result


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(right)


def mean_over_workers(values: Tensor) -> Tensor:
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def max_over_workers(value: float) -> float:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def bytes_per_step(replica: Any, steps: int) -> float:
    """Bytes sent per worker and step, on average over workers: as counted, or, for DDP, by a ring all-reduce."""
    if isinstance(replica, Equal):
        n = dist.get_world_size()
        return 2 * (n - 1) / n * sum(p.numel() * p.element_size() for p in replica.model.parameters())
    return float(mean_over_workers(torch.tensor(replica.stats().bytes_sent / max(1, steps))))


@dataclass
class Equal:
    """With DDP, replicas are equal, so each of them is the mean."""

    model: nn.Module

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def consensus_distance(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


def leave() -> None:
    gc.collect()  # DDP is in a reference cycle, and would keep the threads of its process group alive at exit
    dist.destroy_process_group()


def main() -> None:
    default = Config()
    parser = argparse.ArgumentParser(description="Decentralized training on handwritten digits.")
    parser.add_argument("--method", choices=["gossip", "wrapper", "ddp"], default=default.method)
    parser.add_argument("--topology", default=default.topology, help="a name: complete, base-2, hierarchical, ...")
    parser.add_argument("--compression", choices=("bfloat16", "int8"), help="of the sent parameters")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default=default.optimizer)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="of each worker")
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--seed", type=int, default=default.seed, help="of the weights and of the order of the images")
    parser.add_argument("--local-world-size", type=int, help="workers per node, for alternating-exp-ring; else the launcher's")
    parser.add_argument("--save", metavar="FILE", help="where the mean model's state dict goes")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of the checkpoints, from which the run resumes")
    parser.add_argument("--checkpoint-every", type=int, default=default.checkpoint_every, metavar="STEPS")
    parser.add_argument("--out", metavar="FILE", help="where the results go, as JSON")
    options = vars(parser.parse_args())
    out = options.pop("out")
    if options["method"] == "ddp" and options["checkpoint"]:
        parser.error("--checkpoint is for decent_dp: with DDP save the model and the optimizer of one worker yourself")

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the model is small, and trains on the CPU
    torch.set_num_threads(1)  # workers share this machine's cores
    rank, world_size = initialize_dist()
    result = train(Config(**options), progress)
    if result is None:
        progress("stopped: start it again to resume")
        leave()
        return  # with exit code 0: torchrun has nothing to restart
    progress(
        f"{world_size} workers, {result['steps']} steps of {result['ms_per_step']:.2f} ms, "
        f"{result['bytes_per_step'] / 1e3:.1f} kB sent per worker and step"
    )
    progress(
        f"validation accuracy of the mean model {result['accuracy']:.2%}, of the worst replica {result['worst_accuracy']:.2%}"
    )
    if out and rank == 0:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    main()
