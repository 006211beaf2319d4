"""Do nodes as replicas learn as well as workers as replicas? ``python -m benchmarks.node_learning``, or ``make node-learning``.

Eight workers with the tasks, batches and schedules of ``benchmarks.learning``: each one a replica; two, or four, of a node one
replica; and DDP. Replicas are simulated: a node is one that sees the batches of its workers
(``tests/test_node_replicas.py`` compares that with processes). The rates are those of DDP in ``docs/results/learning.md``.

Writes ``docs/results/node-learning.json`` and ``node-learning.md``.
"""

from __future__ import annotations

import json
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.characters import loss_fn
from benchmarks.learning import Run, optim_fn, schedule
from benchmarks.learning_tasks import make_task
from benchmarks.report import machine
from decent_dp.tools.sim import VirtualCluster

RESULT = Path(__file__).resolve().parents[1] / "docs" / "results" / "node-learning.json"
WORKERS, STEPS = 8, 500
SEEDS = {"digits": (0, 1, 2), "characters": (0,)}  # a run with characters takes minutes
TASKS = {"digits": 5e-3, "characters": 5e-3}
OPTIMIZERS = ("AdamW", "GossipAdamW")
# Workers of a replica; all of them is DDP.
SIZES = {"worker": 1, "node of 2": 2, "node of 4": 4, "DDP": WORKERS}


def train(task_name: str, optimizer: str, size: int, seed: int) -> tuple[float, float]:
    """The loss of the mean model on training data, and on others."""
    torch.set_num_threads(1)
    lr, replicas = TASKS[task_name], WORKERS // size
    contender = "DDP" if replicas == 1 else optimizer
    run = Run(task_name, WORKERS, contender, lr, seed)
    task = make_task(task_name, WORKERS, None, seed)
    torch.manual_seed(seed)
    made = optim_fn(contender, lr, replicas)
    cluster = VirtualCluster(task.model(), made, "base-2", replicas, loss_fn=loss_fn, lr_scheduler_fn=schedule(task, run))
    for t in range(STEPS):
        cluster.step(*(torch.unflatten(part, 0, (replicas, size)).flatten(1, 2) for part in task.batch(t)))
    trained, other, _ = task.evaluate(cluster.mean_model())
    return trained, other


def job(arguments: tuple[str, str, int, int]) -> tuple[tuple[str, str, int, int], tuple[float, float]]:
    return arguments, train(*arguments)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| task | optimizer | replicas | loss on training data | on other data |", "|---|---|---|---:|---:|"]
    for row in rows:
        cells = [row["task"], row["optimizer"], row["replicas"], f"{row['trained']:.4f}", f"{row['other']:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    jobs = [(t, o, s, seed) for t in TASKS for o in OPTIMIZERS for s in SIZES.values() for seed in SEEDS[t]]
    with get_context("spawn").Pool(2) as pool:
        found = dict(pool.imap_unordered(job, jobs))
    rows = []
    for task in TASKS:
        for optimizer in OPTIMIZERS:
            for name, size in SIZES.items():
                pairs = [found[task, optimizer, size, seed] for seed in SEEDS[task]]
                trained, other = (fmean(values) for values in zip(*pairs, strict=True))
                rows.append({"task": task, "optimizer": optimizer, "replicas": name, "trained": trained, "other": other})
    result = {"machine": machine(), "workers": WORKERS, "steps": STEPS, "seeds": SEEDS, "rates": TASKS, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
