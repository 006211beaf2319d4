"""Started by ``compare.py`` under torchrun: trains every contender of ``digits.py``, then times them in turns.

Rank 0 writes events to stdout, one JSON object per line: first the plan, then one for each run that is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from decent_dp.utils import initialize_dist
from examples.digits import WARM_UP_STEPS, Config, Trainee, leave, load_data, make_model, max_over_workers, train

OPTIMIZERS = {"GossipAdamW": "gossip-adamw", "AdamW": "adamw"}


@dataclass(frozen=True)
class Contender:
    name: str
    optimizer: str
    config: Config


def contenders(epochs: int, optimizers: list[str]) -> list[Contender]:
    """PyTorch DDP, then ``gossip()`` with each topology, and the wrapper once, with each optimizer: all else is the same."""
    methods = {
        "PyTorch DDP": Config(method="ddp"),
        "base-2": Config(topology="base-2"),
        "base-2, wrapper": Config(method="wrapper", topology="base-2"),
        "complete": Config(topology="complete"),
        "ring": Config(topology="ring"),
        "one-peer-exp": Config(topology="one-peer-exp"),
        "alternating-exp-ring": Config(topology="alternating-exp-ring", local_world_size=2),
    }
    return [
        Contender(name, optimizer, replace(config, optimizer=OPTIMIZERS[optimizer], epochs=epochs))
        for optimizer in optimizers
        for name, config in methods.items()
    ]


def measure_step(config: Config, steps: int) -> float:
    """Milliseconds per step of the slowest worker: forward, loss, backward, update and waiting for the others.

    The clock runs over all steps without a stop, so that nothing can be done between two measurements. Batches are in
    memory before it starts.
    """
    dataset, _, _ = load_data()
    loader = DataLoader(dataset, batch_size=config.batch_size, shuffle=True, drop_last=True)
    batches = cycle(list(islice(loader, 8)))
    trainee = Trainee(make_model(config.seed), config, steps=WARM_UP_STEPS + steps)
    criterion = nn.CrossEntropyLoss()

    def run(steps: int) -> None:
        for images, labels in islice(batches, steps):
            criterion(trainee.model(images), labels).backward()
            trainee.step()

    run(WARM_UP_STEPS)
    dist.barrier()
    began = time.perf_counter()
    run(steps)
    seconds = max_over_workers(time.perf_counter() - began)
    trainee.replica.close()
    return 1e3 * seconds / steps


def events(seeds: list[int], optimizers: list[str], epochs: int, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yields all events in order. Called by all workers."""
    field = contenders(epochs, optimizers)
    yield {
        "event": "plan",
        "runs": len(field) * (len(seeds) + rounds),
        "machine": machine(),
        "torch": torch.__version__,
        "workers": dist.get_world_size(),
        "settings": {
            "epochs": epochs,
            "batch_size": Config.batch_size,
            "lr": Config.lr,
            "seeds": seeds,
            "timing_rounds": rounds,
            "timed_steps": steps,
        },
    }
    for seed in seeds:
        for contender in field:
            result = train(replace(contender.config, seed=seed))
            yield {"event": "trained", "name": contender.name, "optimizer": contender.optimizer, "seed": seed, "result": result}
    for turn in range(rounds):
        # All contenders in each round, every second time in reverse: other load on the machine slows all of them alike.
        for contender in field if turn % 2 == 0 else field[::-1]:
            ms = measure_step(contender.config, steps)
            yield {"event": "timed", "name": contender.name, "optimizer": contender.optimizer, "round": turn, "ms": ms}


def machine() -> str:
    """A description of this machine."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    cores = 0
    if info.exists():
        fields = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line]
        cores = sum(key.strip() == "processor" for key, _ in fields)
        name = next((value.strip() for key, value in fields if key.strip() == "model name"), name)
    return f"{cores or 'unknown'} cores of {name}, {platform.system()}, all workers on this one machine"


def write_events(make: Callable[[], Iterator[dict[str, Any]]]) -> None:
    """Joins the other workers, makes all events with them and writes them from rank 0."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the models are small, and train on the CPU
    torch.set_num_threads(1)
    rank, _ = initialize_dist()
    for event in make():
        if rank == 0:
            print(json.dumps(event), flush=True)
    leave()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--epochs", type=int, default=Config().epochs)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    write_events(lambda: events(options.seeds, options.optimizers, options.epochs, options.rounds, options.steps))


if __name__ == "__main__":
    main()
