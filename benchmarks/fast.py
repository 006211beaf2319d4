"""Measures exchanges over fast links: ``python -m benchmarks.fast``, or ``make bench-fast``. Needs Linux, root, iproute2.

    python -m benchmarks.fast                          # two and four nodes; no limit, 10, 5 and 1 Gbit/s (10 minutes)
    python -m benchmarks.fast --setup 2x1 2x1-10000    # some, beside the committed results of the others

Nodes are network namespaces (``lab.py``), with one worker each (``fast_worker.py``). All contenders move 100 MB of float32
values per worker and direction, in rotating order within one process per worker, over TCP with the same congestion control.
Figures are medians over the turns; ratios are to gloo's pair in the same turn. Writes ``fast.json``, its tables and its plot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.lab import Lab, LabError, missing, shape
from benchmarks.report import machine
from benchmarks.setups import Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "fast.json"
SETUPS = ["2x1", "2x1-10000", "2x1-5000", "2x1-1000", "4x1", "4x1-10000", "4x1-5000", "4x1-1000"]
# Of two nodes, and of four, which share the processors of this machine, and at 1 Gbit/s.
TURNS, FEWER_TURNS = 6, 3
MEGABYTES = 100  # of float32 values that each worker sends and receives (``fast_worker``)
START_S, TURN_S = 60.0, 40.0
BASE = "gloo pair"

Turns = Sequence[Sequence[Mapping[str, float]]]  # of one contender, by rank


def run_setup(name: str, turns: int, contenders: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The results of all workers of a set-up, by rank: for each contender what ``fast_worker.measure`` found, by turn.

    Raises:
        RuntimeError: a worker failed; with the end of its log.
    """
    setup = Setup.parse(name)
    with Lab(setup.nodes, setup.rate) as lab, tempfile.TemporaryDirectory(prefix="ddplab-") as folder:
        out = Path(folder)
        command = [sys.executable, "-m", "benchmarks.fast_worker", "--turns", str(turns), "--out", folder]
        command += ["--contenders", *contenders] if contenders else []
        command += ["--spin"] if setup.rate is None else []
        lab.run(command, out, START_S + TURN_S * (turns + 2))
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(setup.nodes)]


# -- lines ------------------------------------------------------------------------------------------------------------


def make_lines(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line per contender: medians over the turns of the means over workers.

    Keys: ``ms`` per exchange or step; ``mb_per_s`` of float32 values in each direction; ``to_gloo`` its ratio to that of
    gloo's pair; ``busy`` processor seconds per GB of the process, ``busy_to_gloo`` their ratio; ``thread``, ``encode``, ``mix``
    those of the transport thread without coding, of encoding, and of mixing in the training thread; ``spin_ms`` and
    ``spin_to_gloo`` beside a thread of pure Python, ``held`` the share of the time for which that one waited for the
    interpreter lock, ``longest_ms`` its longest stop of any kind. Absent where they were not measured.
    """
    lines = []
    for name in results[0]:
        own, base = [result[name] for result in results], [result[BASE] for result in results]
        line: dict[str, Any] = {
            "contender": name,
            "ms": 1e3 * _middle(own, "seconds"),
            "mb_per_s": MEGABYTES / _middle(own, "seconds"),
            "to_gloo": _ratio(base, own, "seconds"),
            "busy": _middle(own, "busy") * 1e3 / MEGABYTES,
            "busy_to_gloo": _ratio(own, base, "busy"),
        }
        for key in ("thread", "encode", "mix"):
            if key in own[0][0]:
                line[key] = _middle(own, key) * 1e3 / MEGABYTES
        if any("held" in turn for turn in own[0]):
            line["spin_ms"] = 1e3 * _middle(own, "spin seconds")
            line["spin_to_gloo"] = _ratio(base, own, "spin seconds")
            line["held"], line["longest_ms"] = _middle(own, "held"), _middle(own, "longest")
        lines.append({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()})
    return lines


def _by_turn(own: Turns, key: str) -> list[float]:
    """The mean over workers, by turn; only turns that measured it."""
    return [fmean(turn[key] for turn in turns) for turns in zip(*own, strict=True) if key in turns[0]]


def _middle(own: Turns, key: str) -> float:
    return median(_by_turn(own, key))


def _ratio(above: Turns, below: Turns, key: str) -> float:
    return median(a / b for a, b in zip(_by_turn(above, key), _by_turn(below, key), strict=True))


COLUMNS: dict[str, tuple[str, str]] = {
    "contender": ("contender", ""),
    "ms": ("ms", ".0f"),
    "mb_per_s": ("MB/s", ".0f"),
    "to_gloo": ("vs gloo pair", ".2f"),
    "busy": ("CPU s per GB", ".2f"),
    "busy_to_gloo": ("CPU vs gloo pair", ".2f"),
    "thread": ("transport thread", ".2f"),
    "encode": ("encode", ".2f"),
    "mix": ("mix", ".2f"),
    "spin_ms": ("ms with a busy thread", ".0f"),
    "held": ("lock wait", ".1%"),
}


def make_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The table of one set-up, in Markdown."""
    shown = [key for key in COLUMNS if any(key in line for line in lines)]
    rows = [[COLUMNS[key][0] for key in shown], ["---", *["---:"] * (len(shown) - 1)]]
    for line in lines:
        rows.append([format(line[key], COLUMNS[key][1]) if key in line else "" for key in shown])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


PASSES = {
    "copy": "copy of the values into the message",
    "finite": "whether all of them are finite",
    "mix": "mix",
}


def make_passes(passes: Mapping[str, float]) -> str:
    """The table of the passes over the values, in Markdown."""
    rows = [f"| {words} | {passes[name]:.2f} |\n" for name, words in PASSES.items()]
    return "| pass | CPU s per GB |\n| --- | ---: |\n" + "".join(rows)


def make_markdown(result: Mapping[str, Any]) -> str:
    """All tables."""
    return make_passes(result["passes"]) + "\n" + make_tables(result)


def make_tables(result: Mapping[str, Any]) -> str:
    """The tables of all set-ups, with their words."""
    return "\n".join(f"{setup['words']}:\n\n{make_table(setup['lines'])}" for setup in result["setups"])


# The contenders of the plot, with their styles.
DRAWN = {
    "gloo pair": (0, "--"),
    "pair float32": (1, "-"),
    "pair float32, encrypted": (1, ":"),
    "pair bfloat16": (2, "-"),
    "pair int8": (3, "-"),
    "DDP step": (4, "--"),
}


def draw(result: Mapping[str, Any], path: Path) -> Figure:
    """The throughput of each contender over each link, a panel for each number of nodes."""
    from decent_dp.tools.plots import COLOURS, new_figure, written

    figure = new_figure(10.4, 4.0)
    numbers = sorted({Setup.parse(setup["setup"]).nodes for setup in result["setups"]})
    for axes, nodes in zip(figure.subplots(1, len(numbers), squeeze=False)[0], numbers, strict=True):
        setups = [(Setup.parse(setup["setup"]), setup["lines"]) for setup in result["setups"]]
        setups = sorted((one for one in setups if one[0].nodes == nodes), key=lambda one: one[0].rate or 1e9)
        for name, (colour, dashes) in DRAWN.items():
            # The name of an automatic one ends with the way that it has found.
            of_links = [[line for line in lines if line["contender"].partition(" (")[0] == name] for _, lines in setups]
            values = [line[0]["mb_per_s"] for line in of_links if line]
            axes.plot(range(len(values)), values, color=COLOURS[colour], linestyle=dashes, marker="o", markersize=4, label=name)
        labels = ["no limit" if setup.rate is None else f"{setup.rate / 1e3:g} Gbit/s" for setup, _ in setups]
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yscale("log")
        axes.set_title(f"MB/s per worker and direction, {nodes} nodes", loc="left", fontsize=10)
        axes.grid(True, color="0.9", linewidth=0.6)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(DRAWN), frameon=False)
    return written(figure, path)


def _words(setup: Setup) -> str:
    limit = "no limit" if setup.rate is None else f"{setup.rate / 1e3:g} Gbit/s per link"
    return f"{setup.nodes} nodes, {limit}"


def measure(name: str) -> dict[str, Any]:
    """One set-up's part of the result file."""
    setup, load = Setup.parse(name), os.getloadavg()[0]
    turns = FEWER_TURNS if setup.nodes > 2 or (setup.rate or 1e9) <= 1000 else TURNS
    return {
        "setup": name,
        "words": _words(setup),
        "link": None if setup.rate is None else " ".join(["tbf", *shape(setup.rate)]),
        "turns": turns,
        "load_before": round(load, 2),  # of the last minute: a busy machine gives other numbers
        "lines": make_lines(run_setup(name, turns)),
    }


def write(found: Mapping[str, Mapping[str, Any]], passes: Mapping[str, float]) -> None:
    """Writes all files, with the set-ups in their order."""
    head = {"machine": machine(), "megabytes": MEGABYTES, "passes": passes}
    order = [*SETUPS, *found]
    result = {**head, "setups": sorted(found.values(), key=lambda setup: order.index(setup["setup"]))}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(make_markdown(result))
    draw(result, RESULT.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fast", description="Measures exchanges over fast links.")
    parser.add_argument("--setup", nargs="+", default=SETUPS, metavar="NAME", help="NODESx1[-MBIT], two or four nodes")
    names = parser.parse_args(argv).setup
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    from benchmarks import fast_worker  # it needs torch

    kept = json.loads(RESULT.read_text())["setups"] if RESULT.exists() and names != SETUPS else []
    found = {setup["setup"]: setup for setup in kept}
    passes = fast_worker.passes()
    print(make_passes(passes), flush=True)
    try:
        for name in names:
            found[name] = measure(name)
            print(f"{found[name]['words']}:\n\n{make_table(found[name]['lines'])}", flush=True)
            write(found, passes)
    except (LabError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except (RuntimeError, TimeoutError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
