"""The figures of docs/how-it-works.md and docs/watch.md: `make figures`.

The traces come from results of the network lab, and mixing from `decent_dp.topo`. The lengths in the timeline of one update are
made up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decent_dp.tools.plots import COLOURS
from decent_dp.topo import BaseTwoTopology, RingTopology

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "benchmarks" / "results" / "trace.json"
FIGURES = ROOT / "docs" / "figures"
BLACK, BLUE, RED, GREEN, PINK, SKY, ORANGE = COLOURS
PALE, GREY = "#dbe6f2", "#6f6f6f"
WIDTH = 5.0  # inches. A page of 360 pixels shows letters of 9 points with 9 pixels


def new_figure(height: float) -> Any:
    from matplotlib.figure import Figure

    # White behind the drawing, which pages with a dark theme show as a card.
    return Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")


# -- one update on a timeline -----------------------------------------------------------------------------------------------

COMPUTE, STEP, MIX = 2.4, 0.5, 0.5
EXCHANGE = 2.7  # of one copy; the all-reduce sends almost two, and starts before the end of the backward
ALL_REDUCE, HEAD_START = 2 * EXCHANGE, 1.0


def _block(axes: Any, row: float, start: float, length: float, colour: str, text: str = "", ink: str = "black") -> float:
    axes.broken_barh([(start, length)], (row - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=1)
    axes.text(start + length / 2, row, text, ha="center", va="center", fontsize=8, color=ink, linespacing=1.0)
    return start + length


def _finish(axes: Any, title: str, rows: Sequence[str], end: float) -> None:
    axes.set_title(title, loc="left", fontsize=9.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_update() -> Any:
    from matplotlib.patches import Patch

    figure = new_figure(3.3)
    above, below = figure.subplots(2, 1)
    end = 2 * (COMPUTE - HEAD_START + ALL_REDUCE + STEP)

    at = 0.0
    for t in range(2):
        sent = at + COMPUTE - HEAD_START
        _block(above, 0, at, COMPUTE, PALE, f"compute\n{t}")
        received = _block(above, 1, sent, ALL_REDUCE, GREY, f"all-reduce {t}", "white")
        at = _block(above, 0, received, STEP, ORANGE)
    _finish(above, "PyTorch DDP: the step waits for the all-reduce", ["worker", "network"], end)

    at = 0.0
    for t in range(4):
        at = _block(below, 0, at, COMPUTE, PALE, f"compute\n{t}")
        at = _block(below, 0, at, STEP, ORANGE)
        if t:
            at = _block(below, 0, at, MIX, GREEN)
            below.annotate("", (at - MIX / 2, 0.36), (at - MIX / 2 - 0.4, 0.64), arrowprops={"arrowstyle": "->", "lw": 0.8})
        _block(below, 1, at, EXCHANGE, BLUE, f"exchange {t}" if t < 3 else "", "white")
    _finish(below, "gossip(): an exchange has the whole next step to arrive", ["worker", "network"], end)
    below.set_xlabel("time →", fontsize=9)

    marks = {"forward and backward": PALE, "optimizer.step()": ORANGE, "mix": GREEN}
    handles = [Patch(facecolor=colour, label=name) for name, colour in marks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9, handlelength=1.2)
    return figure


# -- rounds -------------------------------------------------------------------------------------------------------------------


def draw_mixing(workers: int = 8, rounds: int = 8) -> Any:
    from matplotlib.patches import Arc

    base = BaseTwoTopology(world_size=workers)
    figure = new_figure(4.2)
    tops = figure.subplot_mosaic([["0", "1", "2"], ["base-2"] * 3, ["ring"] * 3], height_ratios=[1.1, 1.6, 1.6])
    for t in range(3):
        axes = tops[str(t)]
        for edge in base.round(t):
            left, right = edge.ranks
            arc = Arc(((left + right) / 2, 0), right - left, 0.75 * (right - left) + 0.6, theta2=180, color=BLUE, linewidth=1.4)
            axes.add_patch(arc)
        for rank in range(workers):
            axes.plot(rank, 0, "o", color=BLUE, markersize=4)
            axes.text(rank, -0.55, str(rank), ha="center", va="top", fontsize=8)
        axes.set_xlim(-0.7, workers - 0.3)
        axes.set_ylim(-1.6, 2.1)
        axes.set_title(f"round {t}", fontsize=9.5)
        axes.axis("off")
    for name, topology in {"base-2": base, "ring": RingTopology(world_size=workers)}.items():
        axes = tops[name]
        values = [np.arange(float(workers))]  # worker i starts with the value i
        for t in range(rounds):
            values.append(topology.mixing_matrix(t) @ values[-1])
        axes.axhline((workers - 1) / 2, color="#8c8c8c", linewidth=0.8, linestyle=(0, (4, 3)))
        for rank, line in enumerate(np.array(values).T):
            axes.plot(line, "-", marker="o", markersize=2.5, linewidth=1.2, color=COLOURS[rank % len(COLOURS)], clip_on=False)
        equal = [t for t, line in enumerate(values) if np.ptp(line) < 1e-12]
        words = f"all equal after {equal[0]} rounds" if equal else "closer and closer"
        axes.set_title(f"'{name}': {words}", loc="left", fontsize=9.5)
        axes.set_yticks([0, (workers - 1) / 2, workers - 1], ["0", "mean", str(workers - 1)], fontsize=9)
        axes.set_xticks(range(rounds + 1), range(rounds + 1), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    tops["base-2"].tick_params(labelbottom=False)
    tops["ring"].set_xlabel("rounds done", fontsize=9)
    return figure


# -- a trace --------------------------------------------------------------------------------------------------------------

TRACE_COLOURS = {
    "forward": PALE,
    "backward": "#b5cbe3",
    "step": ORANGE,
    "decent_dp.wait": RED,
    "decent_dp.mix": GREEN,
    "decent_dp.encode": PINK,
    "decent_dp.send": BLUE,
}
TRACE_ROWS = ("training", "encode", "send")
TRACE_TITLES = {
    "fast": "{:g} Mbit/s: training does not wait",
    "slow": "{:g} Mbit/s: training waits",
    "int8": '{:g} Mbit/s, compression="int8"',
}
LEAST_MS = 1.5  # below it a range would not be seen


def draw_trace(found: dict[str, Any]) -> Any:
    from matplotlib.patches import Patch

    figure = new_figure(5.0)
    end = max(entry[2] for link in found.values() for entry in link["ranges"])
    panels = figure.subplots(len(found), 1, sharex=True)
    for axes, (name, link) in zip(panels, found.items(), strict=True):
        for what, colour in TRACE_COLOURS.items():  # the step goes first: wait and mix are inside it
            kind = what.removeprefix("decent_dp.")
            row = TRACE_ROWS.index(kind) if kind in TRACE_ROWS else 0
            spans = [(begin, max(stop - begin, LEAST_MS)) for name, begin, stop in link["ranges"] if name == what]
            axes.broken_barh(spans, (row - 0.36, 0.72), facecolor=colour)
        _finish(axes, TRACE_TITLES[name].format(link["mbit_s"]), TRACE_ROWS, end)
    ticks = range(0, int(end) + 1, 500)
    panels[-1].set_xticks(ticks, ticks, fontsize=9)
    panels[-1].set_xlabel("ms", fontsize=9)
    handles = [Patch(facecolor=colour, label=name) for name, colour in TRACE_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8, handlelength=1.2)
    return figure


def main() -> None:
    import matplotlib

    FIGURES.mkdir(parents=True, exist_ok=True)
    # The same numbers give the same file; letters are drawn, so that a page needs no font.
    with matplotlib.rc_context({"svg.hashsalt": "decent_dp"}):
        trace = draw_trace(json.loads(TRACE.read_text(encoding="utf-8")))
        for name, figure in {"update": draw_update(), "mixing": draw_mixing(), "trace": trace}.items():
            figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
