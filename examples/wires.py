"""Compares compressions (float32, bfloat16, int8) on 4 workers of this machine: ``make wires``.

    python -m examples.wires --seeds 0          # a first look
    python -m examples.wires                    # three seeds, about six minutes on two cores: the numbers of the documents

Trains ``digits.py`` and ``characters.py`` with each compression. Prints a table of final losses, in which the distance to
float32 stands beside the noise of the seeds, and writes it as wires.json and wires.md, with a plot as wires.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from rich.table import Table

from examples.compare import empty_table, make_console, make_markdown, run_workers

BASELINE = "float32"
# Pairs alone, and groups of four and pairs in turns.
TOPOLOGIES = ["one-peer-exp", "alternating-exp-ring"]
# Measures of a run, in words, with the format of their numbers.
MEASURES = {
    "training_loss": ("training\nloss", "{:.4f}"),
    "validation_loss": ("validation\nloss", "{:.4f}"),
    "accuracy": ("validation\naccuracy", "{:.2%}"),
    "bytes_per_step": ("bytes\nper step", "{:.0f}"),
}
NOISY = ["training_loss", "validation_loss", "accuracy"]


class Cell(TypedDict):
    """A measure of runs that differ only in their seed.

    ``deviation`` is the standard deviation over seeds, None for a single one. ``difference`` is this wire's mean less
    float32's.
    """

    mean: float
    deviation: float | None
    smallest: float
    largest: float
    by_seed: list[float]
    difference: float


class Line(TypedDict):
    """A measure with each compression. ``noise`` is float32's standard deviation over the seeds; None for a single seed."""

    job: str
    topology: str
    measure: str
    noise: float | None
    wires: dict[str, Cell]


# -- from events to results -------------------------------------------------------------------------------------------


def make_cell(values: list[float], baseline: list[float]) -> Cell:
    mean = statistics.fmean(values)
    return Cell(
        mean=mean,
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        smallest=min(values),
        largest=max(values),
        by_seed=values,
        difference=mean - statistics.fmean(baseline),
    )


def make_lines(events: Iterable[dict[str, Any]]) -> list[Line]:
    """The table, in the order in which jobs were trained."""
    trained: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    for event in events:
        if event["event"] == "trained":
            wires = trained.setdefault((event["job"], event["topology"]), {})
            wires.setdefault(event["wire"], []).append(event["result"])
    lines = []
    for (job, topology), wires in trained.items():
        for measure in MEASURES:
            values = {wire: [result[measure] for result in results if measure in result] for wire, results in wires.items()}
            if values[BASELINE]:
                by_wire = {wire: make_cell(own, values[BASELINE]) for wire, own in values.items()}
                noise = by_wire[BASELINE]["deviation"]
                lines.append(Line(job=job, topology=topology, measure=measure, noise=noise, wires=by_wire))
    return lines


def headings(lines: list[Line]) -> list[str]:
    wires = list(lines[0]["wires"])
    return ["job", "measure", *wires, *(f"{wire}\n- {BASELINE}" for wire in wires if wire != BASELINE)]


def cells(line: Line) -> list[str]:
    """Means with standard deviations, then distances to float32; compare them with the deviation of float32 itself."""
    name, form = MEASURES[line["measure"]]
    row = [f"{line['job']},\n{line['topology']}", name]
    for cell in line["wires"].values():
        spread = line["measure"] in NOISY and cell["deviation"] is not None
        row.append(form.format(cell["mean"]) + (f"\n± {form.format(cell['deviation'])}" if spread else ""))
    for wire, cell in line["wires"].items():
        if wire != BASELINE and line["measure"] in NOISY:
            row.append(form.replace(":", ":+").format(cell["difference"]))
        elif wire != BASELINE:
            row.append(f"× {cell['mean'] / line['wires'][BASELINE]['mean']:.2f}")
    return row


def make_table(lines: list[Line]) -> Table:
    table = empty_table(headings(lines))
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and (before["job"], before["topology"]) != (line["job"], line["topology"]):
            table.add_section()
        table.add_row(*cells(line))
    return table


def verdict(lines: list[Line]) -> list[str]:
    """The distance of each compression to float32, in units of the noise of float32's seeds."""
    noisy = [line for line in lines if line["measure"] in NOISY]
    if any(line["noise"] is None for line in noisy):
        return ["One seed says nothing about noise: take more."]

    said = []
    for wire in lines[0]["wires"]:
        if wire == BASELINE:
            continue
        inside = [line for line in noisy if abs(line["wires"][wire]["difference"]) <= line["noise"]]
        text = f"{wire}: {len(inside)} of {len(noisy)} means are within a standard deviation of {BASELINE}'s seeds."
        outside = [line for line in noisy if line not in inside]
        said.append(text + "".join(f" Not {describe_difference(line, wire)}." for line in outside))
    return said


def describe_difference(line: Line, wire: str) -> str:
    form = MEASURES[line["measure"]][1]
    difference, noise = (form.format(abs(value)) for value in (line["wires"][wire]["difference"], line["noise"]))
    worse = (line["wires"][wire]["difference"] > 0) == (line["measure"] != "accuracy")
    return (
        f"{line['job']}, {line['topology']}, {line['measure'].replace('_', ' ')}: "
        f"{difference} {'worse' if worse else 'better'}, beside a deviation of {noise}"
    )


def plot(lines: list[Line], path: Path, title: str) -> None:
    """Final losses: a dot per seed and a line at their mean; the band is the range of float32's seeds."""
    from matplotlib.figure import Figure

    runs = list(dict.fromkeys((line["job"], line["topology"]) for line in lines))
    measures = ["training_loss", "validation_loss"]
    figure = Figure(figsize=(2.9 * len(runs) + 0.6, 5.6), layout="constrained")
    axes = figure.subplots(len(measures), len(runs), squeeze=False)
    for line in lines:
        if line["measure"] in measures:
            axis = axes[measures.index(line["measure"])][runs.index((line["job"], line["topology"]))]
            _draw(axis, line["wires"])
            axis.set_title(f"{line['job']}, {line['topology']}", loc="left", fontsize=9)
    for measure, first in zip(measures, axes[:, 0], strict=True):
        first.set_ylabel(f"{measure.replace('_', ' ')} at the end")
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=130)


def _draw(axis: Any, wires: dict[str, Cell]) -> None:
    axis.axhspan(wires[BASELINE]["smallest"], wires[BASELINE]["largest"], color="0.92")
    for x, cell in enumerate(wires.values()):
        axis.plot([x] * len(cell["by_seed"]), cell["by_seed"], "o", color="#0072B2", markersize=5, alpha=0.8)
        axis.plot([x - 0.25, x + 0.25], [cell["mean"]] * 2, color="black", linewidth=1.4)
    axis.set_xticks(range(len(wires)), list(wires), fontsize=9)
    axis.set_xlim(-0.5, len(wires) - 0.5)
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.tick_params(axis="y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def write_results(events: list[dict[str, Any]], out: Path) -> list[Line]:
    """Writes all files, and returns the table's lines."""
    plan = {key: value for key, value in events[0].items() if key not in ("event", "runs")}
    lines = make_lines(events)
    out.mkdir(parents=True, exist_ok=True)
    (out / "wires.json").write_text(json.dumps({**plan, "table": lines, "verdict": verdict(lines)}, indent=1) + "\n")
    (out / "wires.md").write_text(make_markdown(headings(lines), map(cells, lines)))
    plot(lines, out / "wires.png", f"Compression: final losses on {plan['workers']} workers")
    return lines


def describe(event: dict[str, Any]) -> str:
    return (
        f"trained {event['job']}, {event['topology']}, {event['wire']}, seed {event['seed']}: "
        f"validation loss {event['result']['validation_loss']:.4f}, {event['seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=4, help="processes; alternating-exp-ring takes them as nodes of 2")
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=TOPOLOGIES)
    parser.add_argument("--epochs", type=int, default=25, help="of the digits")
    parser.add_argument("--steps", type=int, default=300, help="of the characters")
    parser.add_argument("--out", type=Path, default=Path("runs/wires"), help="a folder")
    options = parser.parse_args()

    console, began = make_console(), time.monotonic()
    module = ["examples.wire_runs", "--epochs", str(options.epochs), "--steps", str(options.steps)]
    module += ["--seeds", *map(str, options.seeds), "--topologies", *options.topologies]
    print(f"Training on {options.workers} workers: digits and characters, with each wire.", flush=True)
    events = run_workers(options.workers, module, console, describe)
    lines = write_results(events, options.out)

    print()
    console.print(make_table(lines))
    print()
    print(f"Means over seeds {options.seeds} with their standard deviations; losses are of the last tenth of the training")
    print("and, on validation data, of the mean model at the end; in nats (per character). Bytes: sent per worker, as counted.")
    print(f"Machine: {events[0]['machine']}, torch {events[0]['torch']}.")
    print(*verdict(lines), sep="\n")
    print(f"Plot and table: {options.out}/wires.png, wires.json, wires.md ({time.monotonic() - began:.0f} s in all)")


if __name__ == "__main__":
    main()
