"""Compares PyTorch DDP, ``gossip()`` on five topologies and the wrapper, on 4 workers of this machine: ``make demo`` runs it.

    python -m examples.compare --optimizers GossipAdamW           # one seed, about a minute on two cores: make demo
    python -m examples.compare --seeds 0 1 2 --out runs/accuracy  # the numbers of the documents: make accuracy

Prints a table, and writes it as digits.json and digits.md, every step as digits_rows.json and a plot as digits.png.
The training itself is in ``digits.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

try:
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:
    needs = "The comparison needs rich and scikit-learn; in the clone of the repository: pip install -e '.[demo]'"
    raise SystemExit(needs) from None

from examples.curves import TrainingRow, plot_training

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "PyTorch DDP"
# The promises in docs/lab/demo.md.
MAX_ACCURACY_GAP, MAX_TIME_RATIO = 0.015, 1.05
# Times are judged if other programs took at most this part of the machine's CPU time. An idle machine uses less. One
# busy process is more than this on fewer than ten cores; with more cores it does not slow four workers.
MAX_OTHERS = 0.1


class Line(TypedDict):
    """A contender in the table.

    Accuracies and the distance are means over seeds. The time is the median over rounds, and so is its ratio to DDP's time
    with the same optimizer in the same round.
    """

    contender: str
    optimizer: str
    accuracy: float
    worst_accuracy: float
    consensus_distance: float
    bytes_per_step: float
    ms_per_step: float
    ratio_to_ddp: float
    accuracy_by_seed: list[float]
    ms_by_round: list[float]


# -- how busy the machine is ------------------------------------------------------------------------------------------


class CpuTime(NamedTuple):
    """Seconds since the machine started, over all its cores, and since this process started.

    Attributes:
        whole: those that passed.
        used: of these, those in which a core worked, or was taken away by the host of a virtual machine.
        own: used by this process and by its children that have ended.
    """

    whole: float
    used: float
    own: float


def cpu_time(stat: Path = Path("/proc/stat")) -> CpuTime | None:
    """Now; None where the system does not say."""
    try:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    except (OSError, ValueError):
        return None
    used = user + nice + system + irq + softirq + steal
    tick = os.sysconf("SC_CLK_TCK")
    return CpuTime((used + idle + iowait) / tick, used / tick, sum(os.times()[:4]))


def share_of_others(before: CpuTime | None, after: CpuTime | None) -> float | None:
    """The part of the machine's CPU time between two moments that other programs took; None if that is not known."""
    if before is None or after is None or after.whole <= before.whole:
        return None
    others = (after.used - before.used) - (after.own - before.own)
    return max(0.0, others / (after.whole - before.whole))


# -- from events to results -------------------------------------------------------------------------------------------


def make_lines(events: Iterable[dict[str, Any]]) -> list[Line]:
    """The table, in the order in which contenders were trained."""
    trained: dict[tuple[str, str], list[dict[str, Any]]] = {}
    times: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event["event"] == "trained":
            trained.setdefault((event["name"], event["optimizer"]), []).append(event["result"])
        elif event["event"] == "timed":
            times.setdefault((event["name"], event["optimizer"]), []).append(event["ms"])

    def mean(results: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(result[key] for result in results)

    return [
        Line(
            contender=name,
            optimizer=optimizer,
            accuracy=mean(results, "accuracy"),
            worst_accuracy=mean(results, "worst_accuracy"),
            consensus_distance=mean(results, "consensus_distance"),
            bytes_per_step=mean(results, "bytes_per_step"),
            ms_per_step=statistics.median(times[name, optimizer]),
            ratio_to_ddp=statistics.median(
                own / base for own, base in zip(times[name, optimizer], times[BASELINE, optimizer], strict=True)
            ),
            accuracy_by_seed=[result["accuracy"] for result in results],
            ms_by_round=times[name, optimizer],
        )
        for (name, optimizer), results in trained.items()
    ]


def make_rows(events: Iterable[dict[str, Any]]) -> list[TrainingRow]:
    """Every step of every run of the first seed."""
    trained = [event for event in events if event["event"] == "trained"]
    return [
        TrainingRow(panel=event["optimizer"], run=event["name"], **step)
        for event in trained
        if event["seed"] == trained[0]["seed"]
        for step in event["result"]["history"]
    ]


HEADINGS = [
    "contender",
    "optimizer",
    "accuracy\nof mean\nmodel",
    "of worst\nreplica",
    "consensus\ndistance",
    "kB sent\nper step",
    "ms\nper step",
    "vs\nDDP",
]


def cells(line: Line) -> list[str]:
    return [
        line["contender"],
        line["optimizer"],
        f"{line['accuracy']:.2%}",
        f"{line['worst_accuracy']:.2%}",
        f"{line['consensus_distance']:.1e}" if line["consensus_distance"] else "0",
        f"{line['bytes_per_step'] / 1e3:.0f}",
        f"{line['ms_per_step']:.2f}",
        f"{line['ratio_to_ddp']:.2f}",
    ]


def empty_table(headings: list[str]) -> Table:
    """Two columns of words, then columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def make_table(lines: list[Line]) -> Table:
    table = empty_table(HEADINGS)
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and before["optimizer"] != line["optimizer"]:
            table.add_section()
        table.add_row(*cells(line), style="bold" if line["contender"] == BASELINE else None)
    return table


def make_markdown(headings: list[str], rows: Iterable[Sequence[str]]) -> str:
    """Two columns of words, then columns of numbers; lines of a cell become one."""
    marks = ["---", "---", *["---:"] * (len(headings) - 2)]
    return "".join("| " + " | ".join(row).replace("\n", " ") + " |\n" for row in [headings, marks, *rows])


def verdict(lines: list[Line], others: float | None) -> list[str]:
    """Whether the table keeps the two promises, as text.

    Args:
        lines: the table.
        others: the part of the machine's CPU time that other programs took during the run; None if that is not known.
    """
    baseline = {line["optimizer"]: line for line in lines if line["contender"] == BASELINE}
    ours = [line for line in lines if line["contender"] != BASELINE]

    def gap(line: Line) -> float:
        return baseline[line["optimizer"]]["accuracy"] - line["accuracy"]

    lowest, slowest = max(ours, key=gap), max(ours, key=lambda line: line["ratio_to_ddp"])
    points = 100 * gap(lowest)
    if others is not None and others > MAX_OTHERS:
        judged = f"Not judged: other programs took {others:.0%} of this machine's CPU time during the run."
    elif slowest["ratio_to_ddp"] <= MAX_TIME_RATIO:
        judged = "Kept."
    else:
        judged = "NOT KEPT: is the machine busy with something else?" if others is None else "NOT KEPT."
    where = f"at the lowest {abs(points):.2f} points {'below' if points > 0 else 'above'} DDP ({name_of(lowest)})"
    return [
        f"Accuracy: {where}; promised: at most {100 * MAX_ACCURACY_GAP:.1f} below. "
        f"{'Kept.' if gap(lowest) <= MAX_ACCURACY_GAP else 'NOT KEPT.'}",
        f"Time: at the slowest {slowest['ratio_to_ddp']:.2f} of DDP's ({name_of(slowest)}); "
        f"promised: at most {MAX_TIME_RATIO}. {judged}",
    ]


def name_of(line: Line) -> str:
    return f"{line['contender']}, {line['optimizer']}"


def write_results(events: list[dict[str, Any]], out: Path) -> list[Line]:
    """Writes all files, and returns the table's lines."""
    plan = {key: value for key, value in events[0].items() if key not in ("event", "runs")}
    lines, rows = make_lines(events), make_rows(events)
    out.mkdir(parents=True, exist_ok=True)
    (out / "digits.json").write_text(json.dumps({**plan, "table": lines}, indent=1) + "\n")
    (out / "digits.md").write_text(make_markdown(HEADINGS, map(cells, lines)))
    (out / "digits_rows.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    # A window of one epoch, because the loss of single batches is noise.
    measured = [row["step"] for row in rows if row["consensus_distance"] is not None]
    plot_training(rows, out / "digits.png", title=f"Digits on {plan['workers']} workers", window=min(measured, default=1))
    return lines


# -- the workers ------------------------------------------------------------------------------------------------------


@contextmanager
def workers(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Runs a command that starts workers, and always ends them.

    Their stderr is shown after they have ended by themselves.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        # In a session of their own: a Ctrl-C then reaches only us, and we end the workers in order.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            ended = process.poll() is not None
            if not ended:
                process.terminate()  # torchrun ends its workers, then itself
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            assert process.stdout is not None
            process.stdout.close()
            if ended:
                said.seek(0)
                sys.stderr.write(said.read())


def read_events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("{"):
            yield json.loads(text)
        else:
            print(text, end="", file=sys.stderr)  # output of a worker
    if process.wait() != 0:
        raise SystemExit(f"The workers failed with exit code {process.returncode}: their output is above.")


def describe(event: dict[str, Any]) -> str:
    who = f"{event['name']}, {event['optimizer']}"
    if event["event"] == "trained":
        return f"trained {who}, seed {event['seed']}: {event['result']['accuracy']:.2%}"
    return f"timed {who}, round {event['round'] + 1}: {event['ms']:.2f} ms per step"


def follow(
    process: subprocess.Popen[str], console: Console, describe: Callable[[dict[str, Any]], str] = describe
) -> list[dict[str, Any]]:
    """All events, with a progress bar on a terminal and one line per event elsewhere."""
    events = []
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting the workers", total=None)
        for event in read_events(process):
            events.append(event)
            if event["event"] == "plan":
                progress.update(task, total=event["runs"], description="training")
                continue
            progress.update(task, advance=1, description=describe(event))
            if not console.is_terminal:
                print(describe(event), flush=True)
    return events


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=110)  # a file has no width, so the table must not be cut


def run_workers(
    count: int, module: list[str], console: Console, describe: Callable[[dict[str, Any]], str] = describe
) -> list[dict[str, Any]]:
    """Runs a module with its arguments on so many workers; returns all events, when it has ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are ended then, too
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", *module]
    try:
        with workers(command) as process:
            return follow(process, console, describe)
    except KeyboardInterrupt:
        raise SystemExit("Stopped; nothing was written.") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--optimizers", nargs="+", default=["GossipAdamW", "AdamW"])
    parser.add_argument("--workers", type=int, default=4, help="processes; alternating-exp-ring takes them as nodes of 2")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5, help="in which all contenders are timed in turns")
    parser.add_argument("--steps", type=int, default=50, help="timed steps per round, for each contender")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="a folder")
    options = parser.parse_args()

    console, began = make_console(), time.monotonic()
    module = ["examples.contenders", "--epochs", str(options.epochs), "--rounds", str(options.rounds)]
    module += ["--steps", str(options.steps), "--seeds", *map(str, options.seeds)]
    module += ["--optimizers", *options.optimizers]
    what = "PyTorch DDP, gossip() on five topologies, and the wrapper"
    print(f"Training on {options.workers} workers: {what}.", flush=True)
    print("On two cores this takes about a minute per seed and optimizer.", flush=True)
    before = cpu_time()
    events = run_workers(options.workers, module, console)
    others = share_of_others(before, cpu_time())
    lines = write_results(events, options.out)

    plan = events[0]
    steps = next(event["result"]["steps"] for event in events if event["event"] == "trained")
    print()
    console.print(make_table(lines))
    print()
    print(
        f"{steps} steps each, seeds {options.seeds}; times are medians of {options.rounds} interleaved rounds of "
        f"{options.steps} steps."
    )
    print("vs DDP: the median of the ratios within a round, not the ratio of the medians; see docs/lab/demo.md.")
    print("kB sent: per worker, as counted; for DDP, the bytes of a ring all-reduce.")
    print(f"Machine: {plan['machine']}, torch {plan['torch']}.")
    print(*verdict(lines, others), sep="\n")
    print(
        f"Plot, rows and table: {options.out}/digits.png, digits_rows.json, digits.json "
        f"({time.monotonic() - began:.0f} s in all)"
    )


if __name__ == "__main__":
    main()
