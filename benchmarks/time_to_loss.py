"""Time to the same loss at any bandwidth: ``make bench-time-to-loss`` (hours on two cores; finished runs are kept).

    python -m benchmarks.time_to_loss train      # loss curves: 8 real workers without limits on their links
    python -m benchmarks.time_to_loss times      # step times over slow links (Linux, root, iproute2)
    python -m benchmarks.time_to_loss whole      # training over slow links from beginning to end, as a check of the two
    python -m benchmarks.time_to_loss report     # JSON and plot under docs/results/, tables of the pages

Eight workers train a character transformer of a million parameters. Every contender trains with several numbers of steps and
rates. Its time to a loss is the fewest steps with which its final loss is as low, times the time of a step in the lab. Ours at
each bandwidth is what the planner chooses. Finished runs are kept in benchmarks/results/time-to-loss.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.lab import INTERFACE, PORT, Lab, launcher_variables, missing
from benchmarks.loss_worker import FULL_STEPS, PUBLISHED, Run, make_model
from benchmarks.net import PUBLISHED_PATH, install_published
from benchmarks.report import machine
from benchmarks.workbench import markdown
from decent_dp.tools.planner import Cluster, Job, Link, Recipe, plan, recipe

ROOT = Path(__file__).resolve().parents[1]
RESULTS, KEPT = ROOT / "docs" / "results", ROOT / "benchmarks" / "results" / "time-to-loss.jsonl"
N, STEPS, SEED = 8, 500, 0
RATES = (1, 5, 20, 60, 200, None)
# The lab's clock: four workers share a core here. With links of a quarter of the bandwidth, four times the computation, and
# times divided by four, each has as much of a processor as if it had a core (Gupta et al., "To infinity and beyond:
# time-warped network emulation", NSDI 2006). Where steps wait for the network for seconds, the processor does not matter.
DILATION = 4
# The same loss: DDP's final one and one per cent.
TOLERANCE = 1.01
# What links without a limit are to the planner: Mbit/s that `decent-dp doctor` finds in the lab, 1870, on its clock.
UNLIMITED = DILATION * 1870.0
# Milliseconds of the optimizer in a step of one worker.
OPTIMIZER_MS = 2.0


@dataclass(frozen=True)
class Setup:
    """A model and its computation while step times are measured.

    Attributes:
        width: of the character transformer.
        emulated_ms: of forward and backward.
    """

    name: str
    width: int
    emulated_ms: float

    @functools.cached_property
    def params(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in make_model(Run("alone", 0, width=self.width)).parameters())


# 30 ms are what forward and backward of this model take on one core of the machine of the committed results.
MAIN = Setup("1.0 million parameters, 30 ms", 128, 30.0)
# As long for each parameter as in the lab's other set-ups (benchmarks/setups.py).
SLOW = Setup("1.0 million parameters, 150 ms", 128, 150.0)
LARGE = Setup("10 million parameters, 300 ms", 408, 300.0)
LARGEST = Setup("100 million parameters, 3 s", 1296, 3000.0)
# Other set-ups have the loss curves of the first.
OTHERS: dict[Setup, Sequence[float | None]] = {SLOW: (5, 60), LARGE: (60, 200), LARGEST: (200,)}


def ours(compression: str, h: int = 1, topology: str = "base-2") -> str:
    return f"ours/{topology}/{compression}/{h}"


# Contender: numbers of steps, and rates.
CONTENDERS: dict[str, tuple[Sequence[int], Sequence[float]]] = {
    "ddp": ((STEPS,), (2e-3, 4e-3, 8e-3, 16e-3)),
    "ddp/fp16": ((STEPS,), (8e-3,)),
    "powersgd/1": ((850,), (4e-3,)),
    "powersgd/4": ((500, 850), (2e-3, 4e-3)),
    "post-local/8": ((650, 850), (4e-3, 8e-3)),
    "post-local/32": ((850,), (4e-3,)),
    "diloco/8": ((850,), (1e-3, 2e-3, 4e-3)),
    "diloco/32": ((850,), (1e-3,)),
    PUBLISHED: ((550, 650, 850), (8e-3,)),
    ours("none"): ((500, 600), (8e-3,)),
    ours("int8"): ((500, 600), (8e-3, 16e-3)),
    ours("int8", 2): ((600,), (4e-3,)),
    ours("int8", 4): ((650, 850), (4e-3,)),
    ours("int8", 16): ((850,), (4e-3,)),
    ours("low-rank:64,int8", 2): ((650,), (4e-3,)),
    ours("low-rank:32,int8", 2): ((700, 850), (4e-3,)),
    ours("low-rank:16,int8"): ((650, 850), (4e-3,)),
    ours("low-rank:16,int8", 4): ((850, 1100, 1300), (2e-3, 4e-3)),
    ours("low-rank:4,int8"): ((850,), (4e-3,)),
    ours("low-rank:4,int8", 8): ((1500,), (4e-3,)),
    ours("low-rank:64,int8", 16): ((1100,), (4e-3,)),
}
# Of the other set-ups.
MAIN_CONTENDERS = ("ddp", "powersgd/4", "post-local/8")
# Trained from beginning to end in the lab, over these links.
WHOLE_RATES = (60, 200)
PLANNED = "ours, as planned"


@functools.cache
def chosen(setup: Setup, rate: float | None) -> Recipe:
    """What the planner says, from the model and the links alone."""
    link = Link(50e-6, (rate or UNLIMITED) * 1e6 / 8)
    cluster = Cluster(N, 1, link, link)
    job = Job.of_step(setup.params, setup.emulated_ms + OPTIMIZER_MS, optimizer_ms=OPTIMIZER_MS, width=setup.width)
    return recipe(cluster, job, plan(cluster, job))


def planned(setup: Setup, rate: float | None) -> str:
    """The contender that the planner chooses."""
    choice = chosen(setup, rate).prediction.choice
    if not choice.decentralized:
        return "ddp"
    # 8 workers have the same rounds under both names.
    topology = str(choice.topology_name).replace("one-peer-exp", "base-2")
    return ours(choice.compression or "none", choice.mix_every, topology)


def is_ours(contender: str) -> bool:
    return contender.startswith("ours")


# Contenders whose steps take about as long as their computation, also over slow links.
_SHORT_MESSAGES = ("sparseloco", "demo", "streaming", "alone")


def steps_between(contender: str) -> int:
    """Steps from one exchange to the next."""
    kind, *options = contender.split("/")
    if is_ours(contender):
        return int(options[2])
    every = ("post-local", "diloco", "muloco", "sparseloco", "noloco", "factored", "streaming", "snoo")
    return int(options[0]) if kind in every else 1


# Of the plot: Okabe and Ito's colours.
STYLES = {
    "ddp": ("#000000", "PyTorch DDP"),
    "powersgd/4": ("#CC79A7", "DDP with PowerSGD, rank 4"),
    "diloco/8": ("#E69F00", "DiLoCo, every 8 steps"),
    "post-local/8": ("#56B4E9", "post-local SGD, every 8 steps"),
    PUBLISHED: ("#999999", "decent_dp 0.2.3"),
    PLANNED: ("#D55E00", "decent_dp, as the planner chooses"),
}


class Kept:
    """Finished runs, one JSON object per line of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found: dict[str, dict[str, Any]] = {}
        for line in map(json.loads, lines):
            self._found[line["key"]] = line["result"]

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def add(self, key: str, result: dict[str, Any]) -> None:
        self._found[key] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "result": result}) + "\n")


def key_of(run: Run, rate: float | str | None = None) -> str:
    """Of a finished run; the clock is not part of it."""
    given = asdict(run)
    del given["dilation"]
    return json.dumps([given, rate])


# -- runs ----------------------------------------------------------------------------------------------------------------


def workers_of(contender: str) -> int:
    return 1 if contender == "alone" else N


def environ(contender: str, rank: int, address: str, port: int, interface: str) -> dict[str, str]:
    published = contender == PUBLISHED
    if published:
        install_published()
    library = PUBLISHED_PATH if published else ROOT / "src"
    variables = launcher_variables(rank, workers_of(contender), address, port, interface=interface, library=library)
    return {**os.environ, **variables}


def _text(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


@contextmanager
def command(runs: Sequence[Run]) -> Iterator[tuple[list[str], Path]]:
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as folder:
        given = json.dumps([asdict(run) for run in runs])
        yield [sys.executable, "-m", "benchmarks.loss_worker", "--worker", given, "--out", folder], Path(folder)


def run_here(run: Run) -> dict[str, Any]:
    """The result of rank 0 of workers on this machine, over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with command([run]) as (words, out):
        workers = []
        for rank in range(workers_of(run.contender)):
            with (out / f"{rank}.log").open("wb") as log:
                env = environ(run.contender, rank, "127.0.0.1", port, "lo")
                workers.append(subprocess.Popen(words, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = _codes(workers)
        finally:
            for worker in workers:
                worker.kill()
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            raise SystemExit(f"{run} failed:\n{_text(out / f'{failed}.log')}")
        result: dict[str, Any] = json.loads((out / "0.json").read_text())[0]
        return result


def _codes(workers: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes when all have ended, or as soon as one has failed."""
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes):
            return codes
        time.sleep(0.2)


def run_in_lab(rate: float | None, runs: Sequence[Run], seconds: float) -> list[list[dict[str, Any]]]:
    """For each run the results of all workers, one per node of a lab. All runs must be of one package, and of all workers."""
    with Lab(N, rate) as lab, command(runs) as (words, out):
        for rank in range(N):
            with (out / f"{rank}.log").open("wb") as log:
                lab.start(rank, words, environ(runs[0].contender, rank, lab.address(0), PORT, INTERFACE), log, cwd=ROOT)
        try:
            failed = lab.wait(seconds)
        finally:
            lab.stop()
        if failed is not None:
            raise SystemExit(f"{runs} failed on rank {failed[0]}:\n{_text(out / f'{failed[0]}.log')}")
        by_rank = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
        return [list(results) for results in zip(*by_rank, strict=True)]


def train_all(kept: Kept, only: Sequence[str]) -> None:
    for contender, (numbers, rates) in CONTENDERS.items():
        for run in (Run(contender, steps, lr, SEED) for steps in numbers for lr in rates):
            if key_of(run) in kept or (only and contender not in only):
                continue
            result = run_here(run)
            kept.add(key_of(run), result)
            print(f"{contender}, {run.steps} steps at {run.lr:g}: {result['curve'][-1][1]:.4f}", flush=True)


def timed_run(setup: Setup, contender: str, rate: float | None) -> Run:
    """A run that measures the time of a step, with the clock and the number of steps that fit the contender."""
    kind = contender.partition("/")[0]
    h = steps_between(contender)
    # Seconds of a whole message: where they are many, few steps are enough, and the processor does not matter. PowerSGD
    # begins with some.
    seconds = 0.0 if rate is None else 32e-6 * setup.params / rate
    if is_ours(contender):
        dilation, steps = DILATION, 3 * h * (1 if setup.emulated_ms > 1000 else max(1, round(6 / h)))  # whole periods
    elif seconds < (16 if kind == "powersgd" else 1) or kind in _SHORT_MESSAGES:
        dilation, steps = DILATION, 12
    else:
        dilation, steps = 1, 2 * FULL_STEPS if kind == "powersgd" else 3 if seconds < 10 else 1
    return Run(contender, h * -(-steps // h), emulated_ms=setup.emulated_ms, timed=True, width=setup.width, dilation=dilation)


def _is_timed(setup: Setup, contender: str, rate: float | None) -> bool:
    """Whether a contender is worth the time: of ours the one that is planned, and those forms of others that fit the link."""
    kind, *options = contender.split("/")
    if contender == "alone":
        return False
    if is_ours(contender):
        return contender == planned(setup, rate) or (contender == ours("none") and rate is None)
    if setup is not MAIN:
        # Eight workers of the largest model fill the machine's memory with DDP alone.
        return contender == "ddp" or (setup is not LARGEST and contender in MAIN_CONTENDERS)
    least = {"post-local": "32", "diloco": "32", "powersgd": "1"}.get(kind)
    return least is None or options[0] != least or (rate is not None and rate < 60)


def time_all(kept: Kept, only: Sequence[str], rates: Sequence[float | None]) -> None:
    alone = timed_run(MAIN, "alone", None)
    if key_of(alone, None) not in kept and (not only or "alone" in only) and None in rates:
        result = run_here(alone)
        kept.add(key_of(alone, None), {**result, "dilation": alone.dilation})
        print(f"alone: {result['ms']:.1f} ms per step, {result['busy_ms']:.1f} busy", flush=True)
    todo: dict[tuple[float | None, int, bool], list[tuple[str, Run]]] = {}
    for setup, rate in [(MAIN, rate) for rate in RATES] + [(other, rate) for other, found in OTHERS.items() for rate in found]:
        own = planned(setup, rate)
        names = dict.fromkeys([*CONTENDERS, own] if setup is MAIN else [*MAIN_CONTENDERS, own])
        for name in names:
            run = timed_run(setup, name, rate)
            if (
                key_of(run, rate) in kept
                or rate not in rates
                or (only and name not in only)
                or not _is_timed(setup, name, rate)
            ):
                continue
            todo.setdefault((rate, run.dilation, name == PUBLISHED), []).append((key_of(run, rate), run))
    for (rate, dilation, _), group in todo.items():
        found = run_in_lab(None if rate is None else rate / dilation, [run for _, run in group], 3600)
        for (key, run), results in zip(group, found, strict=True):
            means = {name: fmean(result[name] for result in results) for name in ("ms", "busy_ms", "bytes")}
            kept.add(key, {**means, "dilation": dilation})
            ms, busy = means["ms"], means["busy_ms"]
            print(f"{rate} Mbit/s, {run.contender}, width {run.width}: {ms:.1f} ms per step, {busy:.1f} busy", flush=True)


def whole_runs(rate: float | None) -> dict[str, tuple[Run, Run]]:
    """Runs from beginning to end in the lab, and those that time their steps: with real computation."""
    found = {}
    for name, steps, lr in (("ddp", STEPS, 8e-3), (planned(MAIN, rate), 850, 4e-3)):
        timed = replace(timed_run(MAIN, name, rate), emulated_ms=None, dilation=1)
        found[name] = Run(name, steps, lr, SEED), replace(timed, steps=max(timed.steps, 12))
    return found


def train_whole(kept: Kept) -> None:
    for rate in WHOLE_RATES:
        for name, runs in whole_runs(rate).items():
            keys = [key_of(run, f"whole {rate}") for run in runs]
            todo = [(key, run) for key, run in zip(keys, runs, strict=True) if key not in kept]
            if not todo:
                continue
            for (key, run), results in zip(todo, run_in_lab(rate, [run for _, run in todo], 3600), strict=True):
                kept.add(key, {"ms": fmean(result["ms"] for result in results)} if run.timed else results[0])
            print(f"{rate} Mbit/s, {name}: {kept[keys[0]]['seconds']:.0f} s, {kept[keys[1]]['ms']:.0f} ms per step", flush=True)


# -- the report ------------------------------------------------------------------------------------------------------------


def final(kept: Kept, run: Run) -> float:
    """The training loss of the mean model after the last step."""
    return float(kept[key_of(run)]["curve"][-1][1])


def best_runs(kept: Kept, contender: str) -> dict[int, Run]:
    """By number of steps: the run with the lowest final loss over rates."""
    numbers, rates = CONTENDERS[contender]
    found = {}
    for steps in numbers:
        runs = [run for lr in rates for run in [Run(contender, steps, lr, SEED)] if key_of(run) in kept]
        if runs:
            found[steps] = min(runs, key=functools.partial(final, kept))
    return found


def steps_to(finals: Mapping[int, float], loss: float) -> float | None:
    """The fewest steps with which the final loss is at most ``loss``, interpolated between numbers in their logarithm."""
    last: tuple[int, float] | None = None
    for steps, reached in sorted(finals.items()):
        if reached <= loss:
            if last is None:
                return float(steps)
            part = (last[1] - loss) / (last[1] - reached)
            return math.exp(math.log(last[0]) + part * (math.log(steps) - math.log(last[0])))
        last = steps, reached
    return None


def ms_of(kept: Kept, setup: Setup, contender: str, rate: float | None) -> float | None:
    """The time of a step in the lab; None where it was not measured. A worker alone needs no link."""
    rate = None if contender == "alone" else rate
    key = key_of(timed_run(setup, contender, rate), rate)
    return float(kept[key]["ms"]) if key in kept else None


def bytes_of(kept: Kept, contender: str) -> float | None:
    """The bytes that a worker of the first set-up sends per step, from its lab of the fastest links; None: not measured."""
    if contender == "alone":
        return 0.0
    keys = [key_of(timed_run(MAIN, contender, rate), rate) for rate in reversed(RATES)]
    return next((float(kept[key]["bytes"]) for key in keys if key in kept and "bytes" in kept[key]), None)


def elapsed(contender: str, step: float, steps: float, ms: Mapping[str, float]) -> float:
    """The seconds until a step of a run of so many ``steps``, from the times of a step of the contenders."""
    # Steps with whole gradients at the beginning.
    first = FULL_STEPS if contender.startswith("powersgd") else 0.1 * steps if contender.startswith("post-local") else 0.0
    whole = min(step, first)
    return (whole * ms["ddp"] + (step - whole) * ms[contender]) / 1e3


def compose(kept: Kept) -> dict[str, Any]:
    """The results: for each contender and set-up the time to the target in units of DDP's."""
    ddp = best_runs(kept, "ddp")
    target = TOLERANCE * min(final(kept, run) for run in ddp.values())
    rows = {}
    for contender in CONTENDERS:
        runs = best_runs(kept, contender)
        if not runs:
            continue
        finals = {number: final(kept, run) for number, run in runs.items()}
        reached = [number for number, loss in sorted(finals.items()) if loss <= target]
        shown = runs[reached[0] if reached else max(runs)]
        rows[contender] = {
            "final": finals,
            "lr": {number: run.lr for number, run in runs.items()},
            # Of those that do not reach the target: the most that were tried.
            "steps": steps_to(finals, target) or max(finals),
            "reaches": bool(reached),
            "workers": workers_of(contender),
            "bytes": bytes_of(kept, contender),
            "curve": kept[key_of(shown)]["curve"],
        }
    return {
        "workers": N,
        "target": target,
        "machine": machine(),
        "contenders": rows,
        "setups": [_setup(kept, setup, rows) for setup in (MAIN, *OTHERS)],
        "whole": _whole(kept),
    }


def _setup(kept: Kept, setup: Setup, rows: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for rate in RATES if setup is MAIN else OTHERS[setup]:
        ms = {name: own for name in rows for own in [ms_of(kept, setup, name, rate)] if own is not None}
        times = {name: elapsed(name, rows[name]["steps"], rows[name]["steps"], ms) for name in ms if "ddp" in ms}
        advice = chosen(setup, rate)
        found[str(rate)] = {
            "planned": planned(setup, rate),
            "predicted": {"steps": advice.steps, "to_ddp": advice.to_ddp},
            "ms": ms,
            "to_ddp": {name: own / times["ddp"] for name, own in times.items()},
        }
    return {"name": setup.name, "emulated_ms": setup.emulated_ms, "rates": found}


def _whole(kept: Kept) -> list[dict[str, Any]]:
    """Training from beginning to end, beside the product of steps and their time."""
    found = []
    for rate in WHOLE_RATES:
        for name, (trained, timed) in whole_runs(rate).items():
            keys = [key_of(run, f"whole {rate}") for run in (trained, timed)]
            if all(key in kept for key in keys):
                product, curve = trained.steps * kept[keys[1]]["ms"] / 1e3, kept[keys[0]]["curve"]
                row = {"rate": rate, "contender": name, "steps": trained.steps, "loss": curve[-1][1]}
                found.append(row | {"seconds": kept[keys[0]]["seconds"], "product": product})
    return found


def shown(contender: str) -> str:
    """A contender's name in tables."""
    if not is_ours(contender):
        return {PUBLISHED: "decent_dp 0.2.3", "ddp": "PyTorch DDP"}.get(contender, contender.replace("/", ", "))
    options = contender.split("/")[1:]
    every = f", `mix_every={options[2]}`" if options[2] != "1" else ""
    compression = "`None`" if options[1] == "none" else f"`'{options[1]}'`"
    return f"{compression}{every}"


def _ratio(value: float, reaches: bool = True) -> str:
    return f"{'' if reaches else '> '}{value:.3f}" if value < 0.1 else f"{'' if reaches else '> '}{value:.2f}"


def _mbit(rate: str) -> str:
    return "no limit" if rate == "None" else f"{rate} Mbit/s"


def table(results: Mapping[str, Any]) -> str:
    """Steps and times to the target in units of DDP's; what does not reach it takes longer than it was tried."""
    rates, rows = results["setups"][0]["rates"], results["contenders"]
    lines = []
    for name, row in rows.items():
        cells = [_ratio(found["to_ddp"][name], row["reaches"]) if name in found["to_ddp"] else "" for found in rates.values()]
        more = "" if row["reaches"] else "> "
        steps, sent, ddp = row["steps"] / STEPS, row["bytes"], rows["ddp"]["bytes"]
        computed = f"{more}{steps * row['workers'] / N:.2f}"
        share = "" if sent is None or ddp is None else _ratio(steps * _sent(name, row, sent, ddp), row["reaches"])
        lines.append([shown(name), f"{more}{steps:.2f}", computed, share, *cells, f"{min(row['final'].values()):.3f}"])
    chosen = [
        _ratio(found["to_ddp"][found["planned"]]) if found["planned"] in found["to_ddp"] else "" for found in rates.values()
    ]
    lines.append(["**what the planner chooses**", "", "", "", *(f"**{cell}**" if cell else "" for cell in chosen), ""])
    return markdown(["", "steps", "computation", "bytes", *map(_mbit, rates), "final loss"], lines)


def _sent(contender: str, row: Mapping[str, Any], sent: float, ddp: float) -> float:
    """Bytes per step in units of DDP's, its first steps with whole gradients among them."""
    steps = float(row["steps"])
    return elapsed(contender, steps, steps, {"ddp": 1.0, contender: sent / ddp}) / steps * 1e3


def headline(results: Mapping[str, Any]) -> str:
    """The table of the README: the contenders of the plot."""
    rates, rows = results["setups"][0]["rates"], results["contenders"]
    lines = []
    for style, (_, label) in STYLES.items():
        cells = []
        for found in rates.values():
            name = found["planned"] if style == PLANNED else style
            known = name in found["to_ddp"] and name in rows
            cells.append(_ratio(found["to_ddp"][name], rows[name]["reaches"]) if known else "")
        lines.append([label, *cells])
    return markdown(["time to DDP's loss, DDP = 1", *map(_mbit, rates)], lines)


def table_of_choices(results: Mapping[str, Any], setups: slice) -> str:
    """What the planner chooses, and DDP's strongest rival, in each set-up."""
    lines = []
    for setup in results["setups"][setups]:
        for rate, found in setup["rates"].items():
            own, ratios, row = found["planned"], found["to_ddp"], results["contenders"].get(found["planned"])
            if own not in ratios or row is None:
                continue
            others = {name: ratio for name, ratio in ratios.items() if not is_ours(name) and name != own}
            reached = {name for name in others if results["contenders"][name]["reaches"]}
            rival = min(reached or others, key=others.__getitem__)
            lines.append(
                [
                    *([setup["name"]] if setups.start else []),
                    _mbit(rate),
                    shown(own),
                    f"{found['predicted']['steps']:.2f}",
                    f"{row['steps'] / STEPS:.2f}",
                    _ratio(found["predicted"]["to_ddp"]),
                    _ratio(ratios[own], row["reaches"]),
                    f"{shown(rival)}: {_ratio(others[rival], results['contenders'][rival]['reaches'])}",
                ]
            )
    heads = ["link", "chosen", "steps, predicted", "measured", "time, predicted", "measured", "the fastest other one"]
    return markdown([*(["model"] if setups.start else []), *heads], lines, words=2 + bool(setups.start))


def table_of_whole(results: Mapping[str, Any]) -> str:
    lines = [
        [f"{row['rate']} Mbit/s", shown(row["contender"]), str(row["steps"]), f"{row['seconds']:.0f}", f"{row['product']:.0f}"]
        for row in results["whole"]
    ]
    return markdown(["link", "", "steps", "seconds in the lab", "steps × ms per step"], lines, words=2)


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page, by the marks between which they stand."""
    found = {
        "contenders": table(results),
        "choices": table_of_choices(results, slice(0, 1)),
        "larger": table_of_choices(results, slice(1, None)),
    }
    return found | ({"whole": table_of_whole(results)} if results["whole"] else {})


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Loss against hours, a panel for each bandwidth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained", facecolor="white")
    rates = results["setups"][0]["rates"]
    for axes, (rate, found) in zip(figure.subplots(2, 3, sharey=True).flat, rates.items(), strict=True):
        for style, (colour, label) in STYLES.items():
            name = found["planned"] if style == PLANNED else style
            row = results["contenders"].get(name)
            if row is None or name not in found["ms"]:
                continue
            steps, losses = zip(*row["curve"], strict=True)
            hours = [elapsed(name, step, steps[-1], found["ms"]) / 3600 for step in steps]
            wide = style == PLANNED
            axes.plot(
                hours,
                losses,
                "--" if wide and name == "ddp" else "-",
                color=colour,
                linewidth=2.6 if wide else 1.5,
                label=label,
            )
        axes.axhline(results["target"], color="0.6", linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.set_title(_mbit(rate), fontsize=11)
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("hours")
    for axes in figure.axes[::3]:
        axes.set_ylabel("training loss of the mean model")
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def fill(page: Path, mark: str, text: str) -> None:
    """Puts a table between two marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark}: begin")
    comment, close, _ = rest.partition("-->\n")
    end = f"<!-- {mark}: end -->"
    page.write_text(f"{before}{begin}{comment}{close}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def report(kept: Kept, out: Path) -> None:
    """Writes time-to-loss.json and .png; with the committed results also the tables of the pages."""
    results = compose(kept)
    out.mkdir(parents=True, exist_ok=True)
    (out / "time-to-loss.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, out / "time-to-loss.png")
    made = tables(results)
    print("\n".join([headline(results), *made.values()]))
    if out == RESULTS:
        fill(ROOT / "README.md", "time-to-loss", headline(results))
        for mark, text in made.items():
            fill(ROOT / "docs" / "lab" / "time-to-loss.md", mark, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_loss", description="Time to the same loss.")
    parser.add_argument("what", choices=["train", "times", "whole", "report"], nargs="+")
    parser.add_argument("--only", nargs="+", default=[], help="contenders")
    parser.add_argument("--rates", nargs="+", type=lambda text: None if text == "none" else float(text), default=list(RATES))
    parser.add_argument("--kept", type=Path, default=KEPT, help="a file of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    options = parser.parse_args()
    kept = Kept(options.kept)
    if "train" in options.what:
        train_all(kept, options.only)
    if {"times", "whole"} & set(options.what):
        lacking = missing()
        if lacking:
            raise SystemExit(lacking)
        # Through all ``finally``s, so that no namespace is left.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if "times" in options.what:
        time_all(kept, options.only, options.rates)
    if "whole" in options.what:
        train_whole(kept)
    if "report" in options.what:
        report(kept, options.out)


if __name__ == "__main__":
    main()
