"""What workers that die cost the others: ``python -m benchmarks.holes``, or ``make holes``; a minute and a half.

Two experiments, each written as NAME.json and NAME.md under docs/results/, and the second with a plot:

* ``holes``: how fast the survivors still come together, from the matrices of the rounds;
* ``holes-learning``: digits on 16 simulated workers of which some die after a third of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.workbench import markdown, run_experiments, write
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup
from decent_dp.tools.analysis import analyse, without
from decent_dp.tools.sim import Batches, Simulation, VirtualCluster, digits, dirichlet_split
from decent_dp.tools.sim.experiment import HIDDEN, OPTIMIZERS, make_model
from decent_dp.topo import make_topology

# All sets of this many dead are looked at, or so many random ones; of rounds that do not repeat, which take longer, a tenth.
ROUNDS = [("base-2", n) for n in (8, 12, 16, 24, 32)] + [("one-peer-exp", 16), ("ring", 16), ("random-matching", 16)]
DEAD, MOST_SETS = (0, 1, 2, 4), 500

LEARNING = Simulation(n=16, steps=300, batch=16, optimizer="momentum", lr=0.1)
TOPOLOGIES = ("base-2", "ring")
ALPHAS = (None, 0.1)
MEASURED = 15  # steps from one point of the plot to the next

COLOURS = ("#000000", "#0072B2", "#E69F00", "#D55E00")


def sets_of(n: int, k: int, most: int) -> Iterator[Sequence[int]]:
    """All sets of k of n workers, or ``most`` random ones, always the same."""
    if math.comb(n, k) <= most:
        return itertools.combinations(range(n), k)
    rng = np.random.default_rng([n, k])
    return (rng.choice(n, k, replace=False).tolist() for _ in range(most))


def holes(out: Path, seeds: Sequence[int]) -> None:
    """The factor by which a round shrinks the survivors' disagreement in the long run."""
    lines: list[dict[str, Any]] = []
    for (name, n), k in itertools.product(ROUNDS, DEAD):
        topology = make_topology(name, local_world_size=1, world_size=n, rank=0)
        most = MOST_SETS // 10 if topology.period is None else MOST_SETS
        rates = [analyse(without(topology, dead), limit=1).rate for dead in sets_of(n, k, most)]
        cut = sum(rate == 1 for rate in rates)
        lines.append(
            {
                "topology": name,
                "workers": n,
                "dead": k,
                "sets": len(rates),
                "cut": cut / len(rates),
                "mean": fmean(rates),
                "worst": max(rates),
            }
        )
    headings = ["topology", "workers", *("none dead" if k == 0 else f"{k} dead" for k in DEAD)]
    rows = []
    for name, n in ROUNDS:
        own = [line for line in lines if (line["topology"], line["workers"]) == (name, n)]
        rows.append([name, str(n), *map(_cell, own)])
    write(out, "holes", lines, {"sets_at_most": MOST_SETS}, markdown(headings, rows))


def _cell(line: dict[str, Any]) -> str:
    if line["worst"] < 1e-3:
        return "exact"
    worst = "" if line["worst"] - line["mean"] < 0.005 else f", worst {line['worst']:.2f}"
    cut = f" ({line['cut']:.0%} cut)" if line["cut"] else ""
    return f"{line['mean']:.2f}{worst}{cut}"


# -- learning --------------------------------------------------------------------------------------------------------------


def train(topology: str, alpha: float | None, dead: int, seed: int) -> list[dict[str, Any]]:
    """The state of the survivors every few steps, of a run in which workers drawn by the seed die after a third."""
    s, data = LEARNING, digits()
    factory, _ = OPTIMIZERS[s.optimizer]
    warm_up = math.ceil(0.05 * s.steps)
    schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_warmup=warm_up, t_max=s.steps - warm_up)
    model = make_model([data.x.shape[1], *HIDDEN, data.classes], seed)
    cluster = VirtualCluster(model, partial(factory, lr=s.lr), topology, s.n, lr_scheduler_fn=schedule)
    batches = Batches(dirichlet_split(data.y.numpy(), s.n, alpha, seed), s.batch, seed)
    found = []
    for t in range(s.steps):
        if t == s.steps // 3:
            cluster.kill(np.random.default_rng(seed).permutation(s.n)[:dead].tolist())
        chosen = batches(t)
        cluster.step(data.x[chosen], data.y[chosen])
        if (t + 1) % MEASURED == 0:
            with torch.no_grad():
                outputs = cluster.mean_model()(data.x_test)
            loss = float(torch.nn.functional.cross_entropy(outputs, data.y_test))
            accuracy = float((outputs.argmax(-1) == data.y_test).float().mean())
            distance = cluster.consensus_distance()
            found.append({"step": t + 1, "loss": loss, "accuracy": accuracy, "consensus_distance": distance})
    return found


def learning(out: Path, seeds: Sequence[int]) -> None:
    """Digits with dead workers: accuracy and loss of the survivors' mean on the test data, and their distance."""
    lines: list[dict[str, Any]] = []
    for topology, alpha, dead in itertools.product(TOPOLOGIES, ALPHAS, DEAD):
        print(f"{topology}, alpha {alpha}, {dead} dead", flush=True)
        runs = [train(topology, alpha, dead, seed) for seed in seeds]
        curve = [{key: fmean(row[key] for row in rows) for key in rows[0]} for rows in zip(*runs, strict=True)]
        distances = [float(f"{row['consensus_distance']:.4g}") for row in curve]
        last = {key: value for key, value in curve[-1].items() if key != "step"}
        lines.append({"topology": topology, "alpha": alpha, "dead": dead, **last, "distances": distances})
    headings = ["topology, data", "dead", "accuracy", "test loss", "consensus distance"]
    rows = [
        [
            f"{line['topology']}, {'even' if line['alpha'] is None else 'uneven'}",
            str(line["dead"]),
            f"{line['accuracy']:.1%}",
            f"{line['loss']:.3f}",
            f"{line['consensus_distance']:.1e}",
        ]
        for line in lines
    ]
    used = ("n", "steps", "batch", "lr", "optimizer")
    settings = {key: value for key, value in asdict(LEARNING).items() if key in used}
    settings |= {"dead_from": LEARNING.steps // 3, "measured_every": MEASURED, "seeds": list(seeds)}
    write(out, "holes-learning", lines, settings, markdown(headings, rows))
    plot(out / "holes-learning.png", lines)


def plot(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """The consensus distance by steps, a panel per topology, a line per number of dead, on even data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    for axes, topology in zip(figure.subplots(1, len(TOPOLOGIES), sharey=True), TOPOLOGIES, strict=True):
        for line in lines:
            if (line["topology"], line["alpha"]) == (topology, ALPHAS[0]):
                steps = [MEASURED * (k + 1) for k in range(len(line["distances"]))]
                label = f"{line['dead'] or 'none'} dead"
                axes.plot(steps, line["distances"], color=COLOURS[DEAD.index(line["dead"])], linewidth=1.8, label=label)
        axes.axvline(LEARNING.steps // 3, color="0.6", linewidth=1, linestyle=":")
        axes.set_yscale("log")
        axes.set_title(f"consensus distance of the survivors: {topology}, even data", loc="left", fontsize=10)
        axes.set_xlabel("steps")
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(DEAD), frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


EXPERIMENTS = {"holes": holes, "holes-learning": learning}


def main() -> None:
    run_experiments("Makes the tables and the plot about workers that die.", EXPERIMENTS)


if __name__ == "__main__":
    main()
