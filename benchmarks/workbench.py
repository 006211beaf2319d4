"""Measures the documents' numbers about topologies: ``python -m benchmarks.workbench``, or ``make workbench``; ten minutes.

Six experiments, each written as NAME.json, NAME.md and NAME.png under docs/results/:

* ``topologies``: the mixing of the rounds of each topology, from its matrices;
* ``uneven-data``: digits on 16 simulated workers, with the classes dealt out evenly and unevenly;
* ``workers``: digits on 6 to 192 simulated workers, with the same number of samples per step in all;
* ``step-times``: the planner's predictions for 8 to 64 workers on two clusters;
* ``many-workers``: digits on 16 to 1,024 simulated workers, by message, with the same number of samples per step in all (no
  plot);
* ``nodes``: the planner's predictions for 4 nodes of 8 GPUs by the bandwidth between them (no plot).

    python -m benchmarks.workbench workers --seeds 0        # one of them, quicker
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.report import machine
from decent_dp.tools.analysis import analyse, consensus_error
from decent_dp.tools.planner import Choice, Cluster, Job, Link, default_replica, left_out, more_steps, predict
from decent_dp.tools.sim import Simulation, run
from decent_dp.topo import make_topology
from decent_dp.topo.registry import names_that_fit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"

# Workers and workers per node.
SIZES = [(16, 4), (24, 4)]
EPSILON = 1e-3
# Of the plot: an error at rounding level is drawn as FLOOR.
ROUNDS_SHOWN, FLOOR = 40, 1e-8

UNEVEN = Simulation(n=16, local_world_size=4, steps=500, batch=32, eval_every=500)
RATES = {"momentum": 0.1, "gossip-adamw": 5e-3, "adamw": 5e-3}
ALPHAS = (None, 1.0, 0.1)
COMPOSED = ("complete:100,ring",)
EVERY = 4

WORKERS = (6, 12, 24, 48, 96, 192)
SAMPLES_PER_STEP = 768
SCALED = ("complete", "ring", "random-matching", "base-2")

# Many replicas with the same messages and rules, at the same number of samples per step.
MANY, SAMPLES_OF_MANY = (16, 64, 256, 1024), 1024
MESSAGES: dict[str, tuple[str | None, int]] = {
    "float32": (None, 1),
    "'int8'": ("int8", 1),
    "'2bit'": ("2bit", 1),
    "'1bit'": ("1bit", 1),
    "'1bit', `mix_every=4`": ("1bit", 4),
    "'low-rank:4,int8'": ("low-rank:4,int8", 1),
}

# The planner's: a job, and clusters with their workers per node and links between nodes.
JOB = Job.of_step(65e6, 60.0, jitter=0.02)
INTRA = Link.of_gbit(200, 5)
CLUSTERS = [("4 per node, 25 Gbit/s", 4, Link.of_gbit(25, 20)), ("1 per node, 1 Gbit/s", 1, Link.of_gbit(1, 50))]
PLANNED = (8, 16, 24, 32, 48, 64)
TIMED = ("ddp", "complete", "ring", "base-2", "alternating-exp-ring", "hierarchical")

# Four nodes of 8 GPUs with NVLink 3. The step of 7 billion parameters is that of 16,384 tokens on an H100: torchtitan's
# docs/performance.md has 6,667 tokens per second with 8.03 billion parameters, FSDP over 8 GPUs and torch.compile.
NODES, PER_NODE, NVLINK = 4, 8, Link.of_gbit(2400, 5)
BETWEEN = (10, 25, 100, 200, 400)
JOBS = {"350 M": Job.of_step(350e6, 400.0), "7 B, sharded inside nodes": Job.of_step(7e9, 2140.0, sharded=True)}
OVER_NODES = {
    f"gossip(){words}": Choice("decent_dp", "base-2", compression, replica="node")
    for words, compression in (("", None), (", bfloat16", "bfloat16"), (", int8", "int8"))
}
# Many steps, so that a queue that grows slowly is full. A step is as fast as another within a hundredth.
NODE_STEPS, AS_FAST = 200, 1.01
LIMITS = ("as_fast_from", "as_good_from")

# Okabe and Ito's colours; the same for a name in every figure.
STYLES: dict[str, tuple[str, Any]] = {
    "ddp": ("#000000", "-"),
    "complete": ("#E69F00", "-"),
    "ring": ("#0072B2", "-"),
    "one-peer-exp": ("#D55E00", (0, (5, 2))),
    "alternating-exp-ring": ("#009E73", "-"),
    "base-2": ("#CC79A7", (0, (1.5, 1.5))),
    "random-matching": ("#56B4E9", (0, (6, 2, 1.5, 2))),
    "hierarchical": ("#8C564B", (0, (8, 3))),
}


# -- files ---------------------------------------------------------------------------------------------------------------


def write(out: Path, name: str, lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], table: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rounded = [{key: _rounded(value) for key, value in line.items()} for line in lines]
    document = {**settings, "machine": machine(), "lines": rounded}
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / f"{name}.md").write_text(table)
    print(f"\n{name}\n\n{table}", flush=True)


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns are words, and the others numbers."""
    rule = ["---"] * words + ["---:"] * (len(headings) - words)
    return "".join(f"| {' | '.join(row)} |\n" for row in [headings, rule, *rows])


def write_lines(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    label: str,
    *,
    powers: bool = True,
    logarithmic: Sequence[str] = (),
) -> None:
    """A row of panels; each with one line of points (x, y) per name.

    Args:
        label: of the x axes.
        powers: x is logarithmic, with a tick at every point.
        logarithmic: panels in which y is.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels), 4.0), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, points in lines.items():
            x, y = zip(*points, strict=True)
            colour, dashes = STYLES[name]  # dashes, because both of two equal lines must be visible
            style = {"color": colour, "linestyle": dashes, "linewidth": 1.8}
            axes.plot(x, y, marker="o" if powers else None, markersize=4, label=name, **style)
        if powers:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in lines.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        if title in logarithmic:
            axes.set_yscale("log")
        elif min(y for points in lines.values() for _, y in points) > 1:  # times, not shares: from zero
            axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(label)
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    entries = {text: handle for axes in figure.axes for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(7, len(entries)), frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


# -- the experiments -----------------------------------------------------------------------------------------------------


def topologies(out: Path, seeds: Sequence[int]) -> None:
    """The mixing of the rounds, without training."""
    lines: list[dict[str, Any]] = []
    decays: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for n, local in SIZES:
        panel = f"consensus error, {n} workers, {local} per node (none left: {FLOOR:g})"
        decays[panel] = {}
        for name in names_that_fit(n, local):
            topology = make_topology(name, local_world_size=local, world_size=n, rank=0)
            found = analyse(topology, epsilon=EPSILON)
            lines.append(
                {
                    "workers": n,
                    "local_world_size": local,
                    "topology": name,
                    "period": found.period,
                    "exact": found.exact,
                    "rate": found.rate,
                    "rounds_to_epsilon": found.rounds_to_epsilon,
                    "degree": found.degree,
                    "sent_by_worker": found.sent_by_worker,
                    "sent_by_node": found.sent_by_node,
                    "fan_in": found.fan_in,
                }
            )
            errors = consensus_error(topology, ROUNDS_SHOWN)
            decays[panel][name] = [(t, max(float(error), FLOOR)) for t, error in enumerate(errors)]
    headings = ["workers", "topology", "rounds per period", "exact?", f"rounds to {EPSILON:g}", "peers"]
    headings += ["copies sent per worker and step", "copies sent per node and step", "most into a node in a round"]
    rows = [
        [
            f"{line['workers']}, {line['local_world_size']} per node",
            line["topology"],
            str(line["period"] or "none"),
            "yes" if line["exact"] else "no",
            str(line["rounds_to_epsilon"]),
            str(line["degree"]),
            *(f"{line[key]:.2f}" for key in ("sent_by_worker", "sent_by_node", "fan_in")),
        ]
        for line in lines
    ]
    write(out, "topologies", lines, {"epsilon": EPSILON}, markdown(headings, rows, words=2))
    write_lines(out / "topologies.png", decays, "rounds", powers=False, logarithmic=list(decays))


def simulated(settings: Simulation, seeds: Sequence[int]) -> dict[str, Any]:
    """Means over seeds of the last row of a run."""
    results = [run(replace(settings, seed=seed)) for seed in seeds]
    last = [result.last for result in results]
    return {
        "loss": fmean(row.loss for row in last),
        "accuracy": fmean(row.accuracy for row in last),
        "worst_accuracy": fmean(row.worst_accuracy for row in last),
        "consensus_distance": fmean(row.consensus_distance for row in last),
        "bytes_per_worker_and_step": fmean(row.bytes_sent for row in last) / settings.n / settings.steps,
        "seconds": fmean(result.seconds for result in results),
    }


def one_worker(settings: Simulation) -> Simulation:
    """The result of PyTorch DDP with the same number of workers: one model, all samples of a step in one batch."""
    return replace(settings, n=1, local_world_size=1, batch=settings.n * settings.batch, topology="complete", alpha=None)


def uneven_data(out: Path, seeds: Sequence[int]) -> None:
    """Accuracy by topology, by optimizer (GossipAdamW with ``MomentumTracking`` if every step mixes) and by unevenness."""
    contenders = {"all samples in one batch": one_worker(UNEVEN)}
    for name in [*names_that_fit(UNEVEN.n, UNEVEN.local_world_size), *COMPOSED]:
        contenders[name] = replace(UNEVEN, topology=name)
    contenders[f"complete, mix_every={EVERY}"] = replace(UNEVEN, topology="complete", mix_every=EVERY)
    lines: list[dict[str, Any]] = []
    for name, settings in contenders.items():
        for (optimizer, lr), alpha in itertools.product(RATES.items(), ALPHAS if settings.n > 1 else (None,)):
            print(f"{name}, {optimizer}, alpha {alpha}", flush=True)
            tracks = optimizer == "gossip-adamw" and settings.n > 1 and settings.mix_every == 1
            found = simulated(replace(settings, optimizer=optimizer, lr=lr, alpha=alpha, momentum_tracking=tracks), seeds)
            lines.append({"contender": name, "optimizer": optimizer, "alpha": alpha, **found})
    columns = list(itertools.product(RATES, ALPHAS))
    headings = ["contender", "kB sent per worker and step"]
    headings += [f"{optimizer}, {'even' if alpha is None else f'α = {alpha:g}'}" for optimizer, alpha in columns]
    rows = []
    for name in contenders:
        own = {(line["optimizer"], line["alpha"]): line for line in lines if line["contender"] == name}
        cells = [
            f"{100 * own[key]['accuracy']:.1f} / {100 * own[key]['worst_accuracy']:.1f}" if key in own else ""
            for key in columns
        ]
        untracked = (line for line in own.values() if line["optimizer"] != "gossip-adamw")  # with tracking it is twice as much
        rows.append([name, f"{lines_bytes(untracked) / 1e3:.1f}", *cells])
    settings_json = {"simulation": asdict(UNEVEN), "rates": RATES, "seeds": list(seeds)}
    write(out, "uneven-data", lines, settings_json, markdown(headings, rows))


def lines_bytes(lines: Iterable[Mapping[str, Any]]) -> float:
    """Bytes sent per worker and step: the same in all runs of a contender."""
    return fmean(float(line["bytes_per_worker_and_step"]) for line in lines)


def workers(out: Path, seeds: Sequence[int]) -> None:
    """Accuracy and distance by the number of workers, at the same number of samples per step."""
    lines: list[dict[str, Any]] = []
    base = Simulation(steps=500, eval_every=500, alpha=0.1, optimizer="momentum", lr=RATES["momentum"])
    for name, n in itertools.product(SCALED, WORKERS):
        print(f"{name}, {n} workers", flush=True)
        settings = replace(base, n=n, batch=SAMPLES_PER_STEP // n, topology=name)
        lines.append({"topology": name, "workers": n, **simulated(settings, seeds)})
    headings = ["topology", *(f"{n} workers" for n in WORKERS)]

    def row(name: str, key: str, form: str) -> list[str]:
        return [format(line[key], form) for line in lines if line["topology"] == name]

    parts = [("accuracy of the mean model", "accuracy", ".1%"), ("accuracy of the worst replica", "worst_accuracy", ".1%")]
    parts += [("consensus distance", "consensus_distance", ".1e")]
    rows = [[f"{name}: {words}", *row(name, key, form)] for words, key, form in parts for name in SCALED]
    settings_json = {"simulation": asdict(base), "samples_per_step": SAMPLES_PER_STEP, "seeds": list(seeds)}
    write(out, "workers", lines, settings_json, markdown(headings, rows))

    def points(key: str) -> dict[str, list[tuple[float, float]]]:
        return {name: [(line["workers"], line[key]) for line in lines if line["topology"] == name] for name in SCALED}

    panels = {words: points(key) for words, key, _ in parts}
    write_lines(out / "workers.png", panels, "workers", logarithmic=("consensus distance",))


def many_workers(out: Path, seeds: Sequence[int]) -> None:
    """Loss and accuracy of 16 to 1,024 replicas over 'base-2', by message, beside all samples in one batch."""
    base = Simulation(steps=300, eval_every=50, optimizer="gossip-adamw", topology="base-2")
    lines: list[dict[str, Any]] = []
    for name, (compression, h) in MESSAGES.items():
        for n in MANY:
            settings = replace(base, n=n, batch=SAMPLES_OF_MANY // n, compression=compression, mix_every=h)
            lines.append({"messages": name, "workers": n, **simulated(settings, seeds)})
            print(name, n, lines[-1], flush=True)
    settings = replace(one_worker(replace(base, n=16, batch=SAMPLES_OF_MANY // 16)), optimizer="adamw")
    lines.append({"messages": "all samples in one batch", "workers": 1, **simulated(settings, seeds)})
    rows = []
    for name in MESSAGES:
        own = [line for line in lines if line["messages"] == name]
        cells = [f"{line['loss']:.3f}, {100 * line['accuracy']:.1f} %" for line in own]
        rows.append([name, f"{own[0]['bytes_per_worker_and_step'] / 1e3:.1f}", *cells])
    one = f"{lines[-1]['loss']:.3f}, {100 * lines[-1]['accuracy']:.1f} %"
    rows.append([lines[-1]["messages"], "", *[one] * len(MANY)])
    headings = ["messages", "kB per worker and step", *(f"{n:,} workers" for n in MANY)]
    settings_json = {"simulation": asdict(base), "samples_per_step": SAMPLES_OF_MANY, "seeds": list(seeds)}
    write(out, "many-workers", lines, settings_json, markdown(headings, rows))


def step_times(out: Path, seeds: Sequence[int]) -> None:
    """Predicted steps by the number of workers, for a job whose workers compute equally long for any number of them."""
    lines: list[dict[str, Any]] = []
    for (cluster, local, inter), n in itertools.product(CLUSTERS, PLANNED):
        links = Cluster(n, local, inter, INTRA, backend="nccl" if local > 1 else "gloo")
        for name in TIMED:
            if name != "ddp" and name in left_out(links):
                continue
            choice = Choice("ddp")
            if name != "ddp":
                choice = Choice("decent_dp", name, replica=default_replica(links, name))
            found = [predict(links, JOB, choice, seed=seed) for seed in seeds]
            lines.append(
                {"cluster": cluster, "workers": n, "contender": name, "step_ms": fmean(each.step_ms for each in found)}
            )
    rows = []
    for (cluster, _, _), name in itertools.product(CLUSTERS, TIMED):
        own = {line["workers"]: line for line in lines if (line["cluster"], line["contender"]) == (cluster, name)}
        rows.append([cluster, name, *(f"{own[n]['step_ms']:.0f}" if n in own else "" for n in PLANNED)])
    headings = ["cluster", "contender", *(f"{n} workers" for n in PLANNED)]
    job = {"params": JOB.params, "forward_ms": JOB.forward_ms, "backward_ms": JOB.backward_ms, "jitter": JOB.jitter}
    write(out, "step-times", lines, {"job": job, "seeds": list(seeds)}, markdown(headings, rows, words=2))
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        panel = panels.setdefault(f"ms per step, {line['cluster']}", {})
        panel.setdefault(line["contender"], []).append((line["workers"], line["step_ms"]))
    write_lines(out / "step-times.png", panels, "workers")


def nodes(out: Path, seeds: Sequence[int]) -> None:
    """Predicted steps by the bandwidth between nodes, and that from which on PyTorch's own are as good."""

    def step_ms(job: Job, choice: Choice, gbit: float) -> float:
        links = Cluster(NODES * PER_NODE, PER_NODE, Link.of_gbit(gbit, 20), NVLINK, backend="nccl")
        return predict(links, job, choice, steps=NODE_STEPS, seed=seeds[0]).step_ms

    def best_ms(job: Job, gbit: float) -> float:
        return min(step_ms(job, Choice(kind), gbit) for kind in (("hsdp", "fsdp") if job.sharded else ("ddp",)))

    def as_good_from(job: Job, choice: Choice, steps: float) -> float:
        """Gbit/s from which on PyTorch's own take at most the time of so many times their steps with ``choice``."""
        low, high = 1.0, 1e5
        while high > 1.005 * low:
            middle = (low * high) ** 0.5
            good = best_ms(job, middle) <= steps * step_ms(job, choice, middle)
            low, high = (low, middle) if good else (middle, high)
        return high

    lines: list[dict[str, Any]] = []
    for name, job in JOBS.items():
        own = {kind.upper(): Choice(kind) for kind in (("hsdp", "fsdp") if job.sharded else ("ddp",))}
        for contender, choice in {**own, **OVER_NODES}.items():
            line: dict[str, Any] = {"model": name, "contender": contender}
            line["step_ms"] = {gbit: round(step_ms(job, choice, gbit), 1) for gbit in BETWEEN}
            if choice.decentralized:
                line["as_fast_from"] = as_good_from(job, choice, AS_FAST)
                line["as_good_from"] = as_good_from(job, choice, more_steps(choice, job))
            lines.append(line)
    headings = ["model", "contender", *(f"{gbit} Gbit/s" for gbit in BETWEEN)]
    headings += ["PyTorch's step as fast from", "the same loss as early from"]
    rows = []
    for line in lines:
        limits = [f"{line[key]:.2g}" if line[key] < 100 else f"{round(line[key], -1):.0f}" for key in LIMITS if key in line]
        numbers = [f"{line['step_ms'][gbit]:,.0f}" for gbit in BETWEEN] + [f"{limit} Gbit/s" for limit in limits]
        rows.append([line["model"], line["contender"], *numbers, *[""] * (len(LIMITS) - len(limits))])
    write(out, "nodes", lines, {"seeds": list(seeds[:1])}, markdown(headings, rows, words=2))


EXPERIMENTS = {
    "topologies": topologies,
    "uneven-data": uneven_data,
    "workers": workers,
    "step-times": step_times,
    "nodes": nodes,
    "many-workers": many_workers,
}


def run_experiments(description: str, experiments: Mapping[str, Callable[[Path, Sequence[int]], None]]) -> None:
    """Runs those that the command line names, or all."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("experiments", nargs="*", metavar="NAME", help=f"{', '.join(experiments)}; none: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    unknown = [name for name in args.experiments if name not in experiments]
    if unknown:
        parser.error(f"unknown experiment {unknown[0]!r}: one of {', '.join(experiments)}")
    torch.set_num_threads(1)  # small tensors: a second thread waits for the first
    for name in args.experiments or experiments:
        experiments[name](args.out, args.seeds)


def main() -> None:
    run_experiments("Makes the tables and plots about topologies.", EXPERIMENTS)


if __name__ == "__main__":
    main()
