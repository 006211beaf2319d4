"""Time to the same loss at any bandwidth: ``make bench-time-to-loss`` (hours on two cores; finished runs are kept).

    python -m benchmarks.time_to_loss train      # loss curves: 8 real workers without limits on their links
    python -m benchmarks.time_to_loss times      # step times over slow links (Linux, root, iproute2)
    python -m benchmarks.time_to_loss report     # table, JSON and plot under docs/results/

Eight workers train a character transformer of a million parameters. Every contender trains with several numbers of steps and
rates. Its time to a loss is the fewest steps with which its final loss is as low, times the time of a step in the lab. Finished
runs are in runs/time-to-loss.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.lab import INTERFACE, Lab, missing
from benchmarks.loss_worker import FULL_STEPS, PUBLISHED, Run
from benchmarks.net import PUBLISHED_PATH, install_published
from benchmarks.report import machine
from benchmarks.workbench import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS, KEPT = ROOT / "docs" / "results", ROOT / "runs" / "time-to-loss.jsonl"
N, STEPS, SEED = 8, 500, 0
# Forward and backward of a step, emulated while step times are measured: what they take on one core of two such machines.
EMULATED_MS = 30.0
RATES = (1, 5, 20, 60, 200, None)
# The lab's clock: four workers share a core here. With links of a quarter of the bandwidth, four times the computation, and
# times divided by four, each has as much of a processor as if it had a core (Gupta et al., "To infinity and beyond:
# time-warped network emulation", NSDI 2006). Not where a step takes more than so many times the processor's time for it.
DILATION, NETWORK_BOUND = 4, 50
# Numbers of steps for contenders that learn less per step.
MORE = (500, 650, 850, 1100)
PORT = 29500
# The same loss: DDP's final one and one per cent.
TOLERANCE = 1.01


def ours(compression: str, h: int = 1, topology: str = "base-2") -> str:
    return f"ours/{topology}/{compression}/{h}"


# Contender: numbers of steps, and rates.
CONTENDERS: dict[str, tuple[Sequence[int], Sequence[float]]] = {
    "ddp": ((STEPS,), (2e-3, 4e-3, 8e-3)),
    "ddp/fp16": ((STEPS,), (4e-3,)),
    "powersgd/1": ((500, 850), (2e-3, 4e-3)),
    "powersgd/4": ((500, 850), (2e-3, 4e-3)),
    "post-local/8": ((500, 850), (2e-3, 4e-3)),
    "post-local/32": ((500, 850), (2e-3, 4e-3)),
    "diloco/8": ((500, 850), (1e-3, 2e-3, 4e-3)),
    "diloco/32": ((500, 850), (1e-3, 2e-3, 4e-3)),
    PUBLISHED: ((500, 850), (2e-3, 4e-3, 8e-3)),
    "alone": ((500, 1100, 2200), (2e-3, 4e-3)),
    ours("none", topology="sync complete"): ((STEPS,), (4e-3,)),
    ours("none"): ((500, 600), (2e-3, 4e-3, 8e-3)),
    ours("int8"): ((500, 600), (4e-3,)),
    ours("low-rank:32,int8"): ((500, 650), (2e-3, 4e-3)),
    ours("low-rank:16,int8"): ((500, 650, 850), (2e-3, 4e-3)),
    ours("low-rank:8,int8"): ((500, 850, 1100), (2e-3, 4e-3)),
    ours("low-rank:4,int8"): ((500, 850, 1100), (2e-3, 4e-3)),
    ours("low-rank:8,int8", 4): ((500, 1100, 1500), (1e-3, 2e-3)),
}


# Of the plot: Okabe and Ito's colours.
STYLES = {
    "ddp": ("#000000", "PyTorch DDP"),
    "powersgd/4": ("#CC79A7", "DDP, PowerSGD rank 4"),
    "diloco/8": ("#E69F00", "DiLoCo, 8 steps"),
    "post-local/8": ("#F0E442", "post-local SGD, 8 steps"),
    PUBLISHED: ("#56B4E9", "decent_dp 0.2.3"),
    ours("int8"): ("#0072B2", "int8"),
    ours("low-rank:16,int8"): ("#009E73", "low-rank:16,int8"),
    ours("low-rank:4,int8"): ("#D55E00", "low-rank:4,int8"),
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
    return json.dumps([asdict(run), rate])


# -- runs ----------------------------------------------------------------------------------------------------------------


def environ(run: Run, rank: int, address: str, port: int, interface: str) -> dict[str, str]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(N),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "DECENT_DP_CONGESTION_CONTROL": "cubic,reno",
        "PYTHONPATH": str(PUBLISHED_PATH if run.contender == PUBLISHED else ROOT / "src"),
    }
    if run.contender == PUBLISHED:
        install_published()
    return env


@contextmanager
def command(run: Run) -> Iterator[tuple[list[str], Path]]:
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as folder:
        yield (
            [sys.executable, "-m", "benchmarks.loss_worker", "--worker", json.dumps(asdict(run)), "--out", folder],
            Path(folder),
        )


def run_here(run: Run) -> dict[str, Any]:
    """The result of rank 0 of workers on this machine, over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with command(run) as (words, out):
        workers = []
        for rank in range(N):
            with (out / f"{rank}.log").open("wb") as log:
                env = environ(run, rank, "127.0.0.1", port, "lo")
                workers.append(subprocess.Popen(words, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [worker.wait(3600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            raise SystemExit(f"{run} failed:\n{(out / f'{codes.index(max(codes, key=abs))}.log').read_text()[-3000:]}")
        result: dict[str, Any] = json.loads((out / "0.json").read_text())
        return result


def run_in_lab(lab: Lab, run: Run, seconds: float) -> list[dict[str, Any]]:
    """The results that the workers of a lab wrote, one worker per node."""
    with command(run) as (words, out):
        for rank in range(N):
            with (out / f"{rank}.log").open("wb") as log:
                lab.start(rank, words, environ(run, rank, lab.address(0), PORT, INTERFACE), log, cwd=ROOT)
        try:
            failed = lab.wait(seconds)
        finally:
            lab.stop()
        if failed is not None:
            raise SystemExit(f"{run} failed on rank {failed[0]}:\n{(out / f'{failed[0]}.log').read_text()[-3000:]}")
        return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def train_all(kept: Kept, only: Sequence[str]) -> None:
    for contender, (numbers, rates) in CONTENDERS.items():
        for run in (Run(contender, steps, lr, SEED) for steps in numbers for lr in rates):
            if key_of(run) in kept or (only and contender not in only):
                continue
            result = run_here(run)
            kept.add(key_of(run), result)
            print(f"{contender}, {run.steps} steps at {run.lr:g}: {result['curve'][-1][1]:.4f}", flush=True)


def timed_steps(contender: str, rate: float | None) -> int:
    """Steps that are timed, after as many to warm up."""
    steps = 12 if rate is None or rate > 20 else 6 if rate > 5 else 3
    h = int(contender.rpartition("/")[2]) if contender.startswith(("post-local", "diloco", "ours")) else 1
    if contender.startswith("ours"):
        # Whole periods of three rounds.
        return h * 3 * max(1, (12 if "low-rank" in contender or rate is None or rate >= 20 else 3) // 3)
    return max(steps, h)


def time_all(kept: Kept, only: Sequence[str], rates: Sequence[float | None]) -> None:
    for rate in rates:
        todo = {
            contender: run
            for contender in CONTENDERS
            if (not only or contender in only) and contender != "alone"
            for run in [Run(contender, timed_steps(contender, rate), emulated_ms=EMULATED_MS, timed=True)]
            if key_of(run, rate) not in kept
        }
        if not todo:
            continue
        for dilation in (1, DILATION):
            with Lab(N, None if rate is None else rate / dilation, None) as lab:
                for contender, run in list(todo.items()):
                    results = run_in_lab(lab, replace(run, dilation=dilation), 1800)
                    found = {name: fmean(result[name] for result in results) for name in ("ms", "busy_ms")}
                    print(f"{rate} Mbit/s, {contender}: {found['ms']:.0f} ms per step, {found['busy_ms']:.0f} busy", flush=True)
                    if dilation == DILATION or found["ms"] > NETWORK_BOUND * found["busy_ms"]:
                        kept.add(key_of(run, rate), {**found, "dilation": dilation})
                        del todo[contender]


# -- the report ------------------------------------------------------------------------------------------------------------


def losses(kept: Kept, contender: str) -> dict[int, tuple[float, Run]]:
    """By number of steps: the lowest final loss over rates, and its run."""
    numbers, rates = CONTENDERS[contender]
    found: dict[int, tuple[float, Run]] = {}
    for steps in numbers:
        runs = [run for lr in rates for run in [Run(contender, steps, lr, SEED)] if key_of(run) in kept]
        if runs:
            best = min(runs, key=lambda run: kept[key_of(run)]["curve"][-1][1])
            found[steps] = kept[key_of(best)]["curve"][-1][1], best
    return found


def steps_to(found: Mapping[int, tuple[float, Run]], loss: float) -> float | None:
    """The fewest steps with which the final loss is at most ``loss``, interpolated between numbers in their logarithm."""
    last: tuple[int, float] | None = None
    for steps, (final, _) in sorted(found.items()):
        if final <= loss:
            if last is None:
                return float(steps)
            part = (last[1] - loss) / (last[1] - final)
            return math.exp(math.log(last[0]) + part * (math.log(steps) - math.log(last[0])))
        last = steps, final
    return None


def seconds_of(kept: Kept, contender: str, steps: float, rate: float | None) -> float | None:
    """The seconds of so many steps, from the times of steps in the lab."""

    def ms(name: str) -> float | None:
        if name == "alone":
            return EMULATED_MS
        key = key_of(Run(name, timed_steps(name, rate), emulated_ms=EMULATED_MS, timed=True), rate)
        return kept[key]["ms"] if key in kept else None

    own, whole = ms(contender), ms("ddp")
    if own is None or whole is None:
        return None
    # Steps with whole gradients at the beginning.
    first = FULL_STEPS if contender.startswith("powersgd") else 0.1 * steps if contender.startswith("post-local") else 0.0
    return ((steps - first) * own + first * whole) / 1e3


def compose(kept: Kept) -> list[dict[str, Any]]:
    """A row for each contender: its final losses, its steps to the target, and its time to it over DDP's at every bandwidth."""
    target = TOLERANCE * min(loss for loss, _ in losses(kept, "ddp").values())
    rows = []
    for contender in CONTENDERS:
        found = losses(kept, contender)
        if not found:
            continue
        steps = steps_to(found, target)
        # The shortest of its runs that reaches the target, or the longest.
        reached = [run for _, (loss, run) in sorted(found.items()) if loss <= target]
        best = reached[0] if reached else found[max(found)][1]
        ratios, ms = {}, {}
        for rate in RATES:
            ddp = seconds_of(kept, "ddp", STEPS, rate)
            own = seconds_of(kept, contender, steps or math.nan, rate)
            ratios[str(rate)] = None if ddp is None or own is None or steps is None else own / ddp
            whole = seconds_of(kept, contender, best.steps, rate)
            ms[str(rate)] = None if whole is None else 1e3 * whole / best.steps
        rows.append(
            {
                "contender": contender,
                "losses": {str(number): loss for number, (loss, _) in sorted(found.items())},
                "steps": steps,
                "lr": best.lr,
                "to_ddp": ratios,
                "ms": ms,
                "curve": kept[key_of(best)]["curve"],
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Steps and times to DDP's final loss, in units of DDP's; the loss of those that do not reach it."""
    headings = ["contender", "steps", *(f"{rate} Mbit/s" if rate else "no limit" for rate in RATES), "final loss"]
    lines = []
    for row in rows:
        ratios = [row["to_ddp"][str(rate)] for rate in RATES]
        steps = "-" if row["steps"] is None else f"{row['steps'] / STEPS:.2f}"
        cells = ["-" if ratio is None else f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}" for ratio in ratios]
        final = min(row["losses"].values())
        lines.append([row["contender"], steps, *cells, f"{final:.3f}"])
    return markdown(headings, lines, words=1)


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss against seconds, a panel for each bandwidth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    for axes, rate in zip(figure.subplots(2, 3, sharey=True).flat, RATES, strict=True):
        for row in rows:
            ms = row["ms"][str(rate)]
            if ms is None or row["contender"] not in STYLES:
                continue
            colour, name = STYLES[row["contender"]]
            x, y = zip(*[(step * ms / 1e3, loss) for step, loss in row["curve"]], strict=True)
            axes.plot(x, y, color=colour, linewidth=1.8, label=name)
        axes.set_xscale("log")
        axes.set_title(f"{rate} Mbit/s" if rate else "no limit", fontsize=11)
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("seconds")
    for axes in figure.axes[::3]:
        axes.set_ylabel("training loss of the mean model")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def report(kept: Kept, out: Path) -> None:
    """Writes time-to-loss.json, .md and .png."""
    rows = compose(kept)
    out.mkdir(parents=True, exist_ok=True)
    document = {"workers": N, "steps": STEPS, "emulated_ms": EMULATED_MS, "machine": machine(), "rows": rows}
    (out / "time-to-loss.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "time-to-loss.md").write_text(table(rows))
    plot(rows, out / "time-to-loss.png")
    print(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_loss", description="Time to the same loss.")
    parser.add_argument("what", choices=["train", "times", "report"], nargs="+")
    parser.add_argument("--only", nargs="+", default=[], help="contenders")
    parser.add_argument("--rates", nargs="+", type=lambda text: None if text == "none" else float(text), default=list(RATES))
    parser.add_argument("--kept", type=Path, default=KEPT, help="a file of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    options = parser.parse_args()
    kept = Kept(options.kept)
    if "train" in options.what:
        train_all(kept, options.only)
    if "times" in options.what:
        lacking = missing()
        if lacking:
            raise SystemExit(lacking)
        # Through all ``finally``s, so that no namespace is left.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        time_all(kept, options.only, options.rates)
    if "report" in options.what:
        report(kept, options.out)


if __name__ == "__main__":
    main()
