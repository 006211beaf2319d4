"""From measurements to lines, and lines as a table, JSON and a chart."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypedDict

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.setups import PARAMETERS, PUBLISHED, Contender
from decent_dp.compression.lattice import load_numba

__all__ = [
    "Line",
    "Run",
    "machine",
    "make_console",
    "make_lines",
    "make_markdown",
    "make_run",
    "print_table",
    "write_chart",
    "write_json",
]


class Run(TypedDict):
    """One contender in one run; times in ms per step, bytes per step and node, peak memory in bytes for each worker."""

    mean: float
    median: float
    worst: float
    worst_round: float
    busy: float
    sent: float
    memory: list[int]


class Line(TypedDict):
    """A contender in the table; medians over its runs, except for the worst step.

    Attributes:
        mean_ms: time of all timed steps / their number, the mean over workers.
        median_ms: over all steps of all workers.
        worst_ms: the longest step of any worker in any run. A worker that sits out a round waits for two in the next.
        worst_round_ms: the longest time in any run between the ends of two steps of the slowest worker.
        busy_ms: processor time per step of one worker, all its threads together; other programs disturb it little.
        bytes_per_step: sent by a node, by the counters of its link, with headers.
        memory: peak above that of 'alone', of the worker where it is most, in units of the parameters' bytes.
        limit_ms: the mean over rounds of the longer of the two, compute or the busiest link (see `limits`).
        to_alone, to_ddp, to_published, to_limit: mean_ms divided by that of the other.
        published: the contender that ``to_published`` is about: the same topology where it ran, else the fastest.
        error: why there are no numbers.
    """

    contender: str
    mean_ms: float | None
    median_ms: float | None
    worst_ms: float | None
    worst_round_ms: float | None
    busy_ms: float | None
    bytes_per_step: float | None
    memory: float | None
    limit_ms: float | None
    to_alone: float | None
    to_ddp: float | None
    to_published: float | None
    to_limit: float | None
    published: str | None
    error: str | None


def make_run(results: Sequence[Mapping[str, Any]], local: int) -> Run:
    """Merges the workers' results, in the order of their ranks; ``local`` of them share a node."""
    every = [ms for result in results for ms in result["ms"]]
    done = [max(ends) for ends in zip(*(result["at"] for result in results), strict=True)]
    return Run(
        mean=fmean(fmean(result["ms"]) for result in results),
        median=median(every),
        worst=max(every),
        worst_round=max(end - start for start, end in itertools.pairwise(done)),
        busy=fmean(result["busy"] / len(result["ms"]) for result in results),
        # The workers of a node read the same counter, so the first one is enough.
        sent=fmean(result["bytes"] / len(result["ms"]) for result in results[::local]),
        memory=[result["memory"] for result in results],
    )


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def make_lines(
    runs: Mapping[Contender, Sequence[Run]], limits: Mapping[Contender, float], errors: Mapping[Contender, str]
) -> list[Line]:
    """A line for each contender, in the order of ``runs``; a contender without runs has an error."""
    means = {contender: median(run["mean"] for run in own) for contender, own in runs.items() if own}
    alone = runs.get(Contender("alone"), [])
    published = {contender: mean for contender, mean in means.items() if contender.kind == PUBLISHED}
    fastest = min(published, key=published.__getitem__, default=None)

    def middle(own: Sequence[Run], key: str) -> float | None:
        return median(run[key] for run in own) if own else None  # type: ignore[literal-required]

    lines = []
    for contender, own in runs.items():
        mean = means.get(contender)
        same = Contender(PUBLISHED, contender.topology)
        rival = same if same in published else fastest
        extra = [
            max(here - there for here, there in zip(run["memory"], base["memory"], strict=True)) / (4 * PARAMETERS)
            for run, base in zip(own, alone, strict=False)
        ]
        lines.append(
            Line(
                contender=contender.name,
                mean_ms=mean,
                median_ms=middle(own, "median"),
                worst_ms=max((run["worst"] for run in own), default=None),
                worst_round_ms=max((run["worst_round"] for run in own), default=None),
                busy_ms=middle(own, "busy"),
                bytes_per_step=middle(own, "sent"),
                memory=median(extra) if extra else None,
                limit_ms=limits.get(contender),
                to_alone=_ratio(mean, means.get(Contender("alone"))),
                to_ddp=_ratio(mean, means.get(Contender("ddp"))),
                to_published=_ratio(mean, means[rival] if rival else None),
                to_limit=_ratio(mean, limits.get(contender)),
                published=rival.name if rival else None,
                error=errors.get(contender),
            )
        )
    return lines


# -- the table --------------------------------------------------------------------------------------------------------

WIDTH = 132  # columns
HEADINGS = [
    "contender",
    "mean\nms",
    "median\nms",
    "worst\nms",
    "worst\nround",
    "processor\nms",
    "MB per step\nand node",
    "memory\nx params",
    "limit\nms",
    "vs\nalone",
    "vs\nDDP",
    "vs\n0.2.3",
    "vs\nlimit",
]


def _cells(line: Line) -> list[str]:
    if line["mean_ms"] is None:
        return [line["contender"], "failed"]

    return [
        line["contender"],
        *(_shown(line[key], ".0f") for key in ("mean_ms", "median_ms", "worst_ms", "worst_round_ms", "busy_ms")),
        _shown(line["bytes_per_step"], ".2f", 1e6),
        _shown(line["memory"], ".2f"),
        _shown(line["limit_ms"], ".0f"),
        *(_shown(line[key], ".3f") for key in ("to_alone", "to_ddp", "to_published", "to_limit")),
    ]


def _shown(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else format(value / unit, form)


def make_console(**options: Any) -> Console:
    """Wide enough for the table (a narrow terminal breaks its lines), and with names as they are: ':ring:' is a picture."""
    return Console(**{"width": max(WIDTH, Console().width), "emoji": False, "markup": False, "highlight": False, **options})


def print_table(console: Console, title: str, lines: Sequence[Line]) -> None:
    """The table, and below it the failures with their causes."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", collapse_padding=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*_cells(line))
    console.print(table)
    console.print("vs 0.2.3: against the same topology of that package where it was run, else against its fastest.")
    for line in lines:
        if line["error"] is not None:
            console.print(f"{line['contender']} failed: {line['error']}", soft_wrap=True)


def make_markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of the documents: the columns that users compare."""
    headings = ["contender", "mean ms", "worst ms", "MB per step and node", "memory, x params", "limit ms"]
    headings += ["vs DDP", "vs 0.2.3", "vs limit"]
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for line in lines:
        rows.append(
            [
                line["contender"],
                *(_shown(line[key], ".0f") for key in ("mean_ms", "worst_ms")),
                _shown(line["bytes_per_step"], ".2f", 1e6),
                _shown(line["memory"], ".2f"),
                _shown(line["limit_ms"], ".0f"),
                *(_shown(line[key], ".2f") for key in ("to_ddp", "to_published", "to_limit")),
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


# -- files ------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The properties of the machine that the numbers depend on, without names."""
    try:
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        model = None
    return {
        "cores": os.cpu_count(),
        "processor": model[1] if model else platform.machine(),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        **({} if load_numba() is None else {"numba": version("numba")}),
    }


def write_json(path: Path, lines: Sequence[Line], settings: Mapping[str, Any]) -> None:
    """The lines with the machine and the settings that they were measured with; beside it, as .md, the documents' table."""
    rounded = [{key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()} for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**settings, "machine": machine(), "lines": rounded}, indent=2) + "\n")
    path.with_suffix(".md").write_text(make_markdown(rounded))


def write_chart(path: Path, title: str, lines: Sequence[Line]) -> None:
    """A bar chart: the mean and the worst step of each contender, and a line across its bars at its limit."""
    from matplotlib.figure import Figure

    shown = [line for line in lines if line["mean_ms"] is not None]
    figure = Figure(figsize=(9, 1.4 + 0.5 * len(shown)), layout="constrained")
    axes = figure.subplots()
    labels = {"mean": "mean step", "worst": "worst step", "limit": "limit"}  # each in the legend once
    for place, line in enumerate(shown):
        mean, worst, limit = line["mean_ms"] or 0.0, line["worst_ms"] or 0.0, line["limit_ms"]
        axes.barh(place - 0.16, mean, 0.32, color="#3b6fb6", label=labels.pop("mean", None))
        axes.barh(place + 0.16, worst, 0.32, color="#b9c9e0", label=labels.pop("worst", None))
        axes.text(mean, place - 0.16, f" {mean:.0f}", va="center", fontsize=8)
        if limit is not None:
            axes.plot([limit] * 2, [place - 0.36, place + 0.36], color="#c23b22", label=labels.pop("limit", None))
    axes.set_yticks(range(len(shown)), [line["contender"] for line in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No time and no version in the file: the same numbers give the same file.
    figure.savefig(path, dpi=120, metadata={"Software": None})
