"""Measures what a slow worker costs the others: ``python -m benchmarks.unequal``, or ``make bench-unequal``.

Eight workers of this machine over local sockets, with 50 ms of emulated computation per step; the last one takes longer, by a
factor, or one drawn anew for each step (log-normal, sigma 0.5, all workers). After a warm-up each run is measured for so many
seconds, with ``faults=Tolerate()`` and without, in turns:

- pace: steps per second of the other seven, relative to those of the same run without a slow worker and without ``faults``;
- mixed: the part of the slow worker's steps in which it mixed an exchange;
- loss: of the mean model on a least-squares problem with noisy gradients, after the same time, relative to waiting.

Writes ``benchmarks/results/unequal.json`` and ``unequal.md``.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import decent_dp

N, PACE, WARM_UP, SECONDS = 8, 0.05, 16.0, 16.0
DIMENSION, NOISE, LR = 400, 1.0, 0.05
# Topology, factor of the last worker, sigma of the log-normal factor of all.
CASES = (("base-2", 1.0, 0.0), ("base-2", 2.0, 0.0), ("base-2", 5.0, 0.0), ("ring", 5.0, 0.0), ("base-2", 1.0, 0.5))
RESULT = Path(__file__).parent / "results" / "unequal.json"


def work(rank: int, folder: str, case: tuple[str, float, float], tolerates: bool, queue: Any, over: Any) -> None:
    torch.set_num_threads(1)
    store: Any = dist.FileStore(f"{folder}/store", N)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N, timeout=timedelta(seconds=120))
    topology, factor, sigma = case
    chosen = np.random.default_rng(rank)
    model = nn.Linear(DIMENSION, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    faults = decent_dp.Tolerate() if tolerates else None
    replica = decent_dp.gossip(model, optimizer, topology=topology, faults=faults)

    def step() -> None:
        time.sleep(PACE * (factor if rank == N - 1 else 1.0) * float(np.exp(sigma * chosen.standard_normal())))
        noise = torch.from_numpy(chosen.standard_normal((1, DIMENSION))).float()
        model.weight.grad = model.weight.detach() - 1.0 + NOISE * noise  # of |w - 1|^2 / 2
        optimizer.step()

    begun = time.monotonic()
    while time.monotonic() < begun + WARM_UP:
        step()
    begun, steps, before = time.monotonic(), 0, replica.stats().exchanges
    nn.init.zeros_(model.weight)
    while time.monotonic() < begun + SECONDS:
        step()
        steps += 1
    seconds = time.monotonic() - begun
    mixed = (replica.stats().exchanges - before) / steps
    queue.put((rank, steps / seconds, mixed, model.weight.detach().numpy()[0].copy()))
    while not over.is_set():  # others may still measure
        step()


def measure(case: tuple[str, float, float], tolerates: bool) -> dict[str, float]:
    context = multiprocessing.get_context("forkserver")
    queue, over = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=work, args=(rank, folder, case, tolerates, queue, over)) for rank in range(N)]
        for worker in workers:
            worker.start()
        found = sorted((queue.get(timeout=200) for _ in workers), key=lambda entry: entry[0])
        over.set()
        for worker in workers:  # they wait for each other now
            worker.kill()
            worker.join()
    mean = np.mean([weights for *_, weights in found], 0)
    return {
        "steps_per_s": statistics.fmean(rate for _, rate, _, _ in found[:-1]),
        "mixed": found[-1][2],
        "loss": float(((mean - 1.0) ** 2).sum() / 2),
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    for case in CASES:
        topology, factor, sigma = case
        waiting, tolerant = measure(case, tolerates=False), measure(case, tolerates=True)
        if factor == 1.0 and sigma == 0.0:
            alone = waiting
        what = "all workers, log-normal, sigma 0.5" if sigma else f"one of eight, {factor:g} times slower"
        if factor == 1.0 and not sigma:
            what = "none"
        rows.append(
            {
                "slow": what,
                "topology": topology,
                "pace_waiting": waiting["steps_per_s"] / alone["steps_per_s"],
                "pace": tolerant["steps_per_s"] / alone["steps_per_s"],
                "mixed": tolerant["mixed"],
                "loss": tolerant["loss"] / waiting["loss"],
            }
        )
        print(rows[-1], flush=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["| slow | topology | pace of the others, waiting | with `Tolerate()` | slow one mixes in | loss of the mean |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        figures = f"{row['pace_waiting']:.2f} | {row['pace']:.2f} | {row['mixed']:.2f} of its steps | {row['loss']:.2f}"
        lines.append(f"| {row['slow']} | {row['topology']} | {figures} |")
    RESULT.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
