"""Figures from rows of numbers. Needs matplotlib, which is imported when a figure is made: ``pip install -e '.[plots]'``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from decent_dp.topo import Edge

__all__ = ["PredictionRow", "TrainingRow", "plot_predictions", "plot_simulation", "plot_topology", "plot_training"]


class TrainingRow(TypedDict):
    """One step of one run.

    ``panel`` groups the runs of one pair of axes (by optimizer, say), and ``run`` is the name of the run. ``loss`` is the mean
    over workers; ``consensus_distance`` is None at steps where it was not measured.
    """

    panel: str
    run: str
    step: int
    loss: float
    consensus_distance: float | None


# Okabe and Ito's colours, which colour-blind readers can distinguish, without the pale yellow. The first is for the baseline.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
# Dashes show runs that lie on each other. Offset and dashes, in points.
_DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def _new_figure(width: float, height: float) -> Figure:
    """A figure without a window or global state, so that it needs no display and no ``plt.close``."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; in the clone: pip install -e '.[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _written(figure: Figure, path: str | Path | None, title: str = "") -> Figure:
    if title:
        figure.suptitle(title, fontsize=12)
    if path is not None:
        # Without the version of matplotlib, the same numbers give the same file.
        options: dict[str, Any] = {"metadata": {"Software": None}} if Path(path).suffix.lower() == ".png" else {}
        figure.savefig(path, dpi=130, **options)
    return figure


def plot_training(
    rows: Sequence[TrainingRow],
    path: str | Path | None = None,
    *,
    title: str = "",
    window: int = 1,
    marks: Sequence[int] = (),
) -> Figure:
    """Training loss and consensus distance against steps, both on a log scale: a row of two axes for each panel.

    Args:
        rows: in any order. Values that a log scale cannot show (0, not finite) are left out, and so are runs without any, as
            DDP's consensus distance.
        path: the file of the figure, if it is to be written; the suffix is the format ('.png').
        title: above the figure.
        window: each point of a loss curve is the mean of this many rows; the last window may be shorter.
        marks: steps after which something happened to the runs: thin upright lines.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows, or ``window`` is less than 1.
    """
    if not rows:
        raise ValueError("there are no rows to plot")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    runs = list(dict.fromkeys(row["run"] for row in rows))
    figure = _new_figure(10, 1.3 + 2.9 * len(panels))
    axes = figure.subplots(len(panels), 2, sharex=True, squeeze=False)
    for (left, right), panel in zip(axes, panels, strict=True):
        for index, run in enumerate(runs):
            own = sorted((row for row in rows if (row["panel"], row["run"]) == (panel, run)), key=lambda row: row["step"])
            style = {**_style(index), "linewidth": 1.6}
            _draw(left, _means([(row["step"], row["loss"]) for row in own], window), style)
            distances = [(row["step"], row["consensus_distance"]) for row in own]
            _draw(right, distances, style)
        _finish(left, panel, "training loss, mean over workers")
        _finish(right, panel, "consensus distance")
        for axis in (left, right):
            for mark in marks:
                axis.axvline(mark + 0.5, color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    _add_legend(figure, {run: _style(index) for index, run in enumerate(runs)})
    return _written(figure, path, title)


def _means(points: Sequence[tuple[int, float]], window: int) -> list[tuple[float, float]]:
    """The mean step and the mean value of each window."""
    parts = [points[start : start + window] for start in range(0, len(points), window)]
    return [(sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]


def _draw(axis: Any, points: Sequence[tuple[float, float | None]], style: dict[str, Any]) -> None:
    shown = [(step, value) for step, value in points if value is not None and 0 < value < float("inf")]
    if shown:
        axis.plot([step for step, _ in shown], [value for _, value in shown], **style)


def _finish(axis: Any, panel: str, what: str) -> None:
    # A log scale needs data.
    if axis.lines:
        axis.set_yscale("log")
    else:
        axis.text(0.5, 0.5, "nothing to show", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_yticks([])
    axis.set_title(f"{what} ({panel})" if panel else what, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)


def _style(index: int, colour: int = 0) -> dict[str, Any]:
    """The style of a run; with ``colour=1`` none has the colour of the baseline."""
    return {"color": _COLOURS[(index + colour) % len(_COLOURS)], "linestyle": _DASHES[index % len(_DASHES)]}


def _add_legend(figure: Figure, styles: Mapping[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=2, label=name, **style) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, handlelength=3)


# -- simulations -----------------------------------------------------------------------------------------------------------


def plot_simulation(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path | None = None, *, title: str = ""
) -> Figure:
    """Training loss, test accuracy and consensus distance of simulated runs, against steps.

    Args:
        runs: the rows of each run, by its name: 'step', 'loss' (mean over workers), 'consensus_distance', 'accuracy' (of the
            mean model, from 0 to 1) and 'worst_accuracy' (of the worst replica, drawn thin). Losses and distances that a
            log scale cannot show (0, None, not finite: the run diverged) are left out.
        path, title: as of :func:`plot_training`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows.
    """
    if not runs or not all(runs.values()):
        raise ValueError("there are no rows to plot")
    figure = _new_figure(12, 4.0)
    loss, accuracy, distance = figure.subplots(1, 3)
    for index, rows in enumerate(runs.values()):
        style = _style(index, 1)
        steps = [row["step"] for row in rows]
        marker = {"marker": "o", "markersize": 3} if len(rows) <= 40 else {}
        _draw(loss, [(row["step"], row["loss"]) for row in rows], {**style, **marker, "linewidth": 1.6})
        _draw(distance, [(row["step"], row["consensus_distance"]) for row in rows], {**style, **marker, "linewidth": 1.6})
        accuracy.plot(steps, [100 * row["accuracy"] for row in rows], linewidth=1.8, **style, **marker)
        accuracy.plot(steps, [100 * row["worst_accuracy"] for row in rows], linewidth=0.9, alpha=0.8, **style)
    _finish(loss, "", "training loss, mean over workers")
    low, high = loss.get_ylim()
    if high < 10 * low:
        loss.set_yscale("linear")  # a log scale would have no round number to show
    _finish(accuracy, "", "test accuracy, %: mean model, worst replica (thin)")
    accuracy.set_yscale("linear")
    _finish(distance, "", "consensus distance")
    for axis in (loss, accuracy, distance):
        axis.set_xlabel("step")
    if len(runs) > 1:
        _add_legend(figure, {name: _style(index, 1) for index, name in enumerate(runs)})
    return _written(figure, path, title)


# -- topologies ------------------------------------------------------------------------------------------------------------

_PANELS, _PANEL_COLUMNS = 12, 4
_INSIDE, _BETWEEN, _IDLE = "#0072B2", "#D55E00", "#999999"


def plot_topology(
    rounds: Sequence[Sequence[Edge]],
    errors: Mapping[str, Sequence[float]],
    path: str | Path | None = None,
    *,
    title: str = "",
    local_world_size: int = 1,
    epsilon: float | None = None,
) -> Figure:
    """The rounds of a topology as networks, and the decay of the consensus error below them.

    Workers are on a circle, by rank, clockwise from the top; an arc is a node. A line is a pair, as wide as the weight with
    which each takes the other's value; a surface is a group; a hollow worker is idle.

    Args:
        rounds: the edges of each round; the first 12 are drawn. None: the curves alone.
        errors: the consensus error after 0, 1, … rounds, relative to the start, by the name of the curve. At an exact mean (in
            float64 about 1e-16) a dotted line leads to a mark at the lower border.
        path, title: as of :func:`plot_training`.
        local_world_size: workers per node.
        epsilon: an error to mark with a line.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    if not errors or not all(errors.values()):
        raise ValueError("there are no consensus errors to plot")
    shown = rounds[:_PANELS]
    columns = min(_PANEL_COLUMNS, len(shown)) if len(shown) != 6 else 3
    rows = math.ceil(len(shown) / columns) if shown else 0
    width = max(7.5, 2.9 * columns)
    panel = width / columns if shown else 0.0
    figure = _new_figure(width, 0.9 + rows * (panel + 0.1) + 3.1)
    if rows:
        halves: Any = figure.subfigures(2, 1, height_ratios=[rows * (panel + 0.1) + 0.4, 3.1])
        upper, lower = halves
        axes = upper.subplots(rows, columns, squeeze=False).flat
        for t, axis in enumerate(axes):
            axis.set_axis_off()
            if t < len(shown):
                _draw_round(axis, shown[t], local_world_size)
                axis.set_title(f"round {t}", fontsize=9, pad=2)
        _add_key(upper, shown, local_world_size, len(rounds))
    else:
        lower = figure
    _draw_errors(lower.subplots(), errors, epsilon)
    return _written(figure, path, title)


def _draw_round(axis: Any, edges: Sequence[Edge], local: int) -> None:
    from matplotlib.patches import Polygon

    n = sum(len(edge.ranks) for edge in edges)
    places = [(math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)]
    groups = sorted((sorted(edge.ranks) for edge in edges if len(edge.ranks) > 2), key=lambda ranks: ranks[0])
    for index, ranks in enumerate(groups):
        colour = _COLOURS[1 + index % (len(_COLOURS) - 1)]
        corners = [places[rank] for rank in ranks]
        if ranks[-1] - ranks[0] == len(ranks) - 1 and 2 * len(ranks) <= n:
            # Neighbours: a band, as the surface between their chords is too thin.
            corners += [(0.82 * x, 0.82 * y) for x, y in reversed(corners)]
        axis.add_patch(Polygon(corners, closed=True, facecolor=(colour, 0.22), edgecolor=colour, linewidth=1.2, zorder=1))
    for edge in edges:
        if len(edge.ranks) == 2:
            _draw_pair(axis, places, edge, local)
    _draw_workers(axis, places, edges, local)
    axis.set_xlim(-1.42, 1.42)
    axis.set_ylim(-1.42, 1.42)
    axis.set_aspect("equal")


def _draw_pair(axis: Any, places: Sequence[tuple[float, float]], edge: Edge, local: int) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    (x0, y0), (x1, y1) = (places[rank] for rank in edge.ranks)
    # Bent towards the middle: chords of neighbours would lie on the circle.
    bend = 0.75 - 0.15 * math.hypot(x1 - x0, y1 - y0) if len(places) > 2 else 1.0
    control = (bend * (x0 + x1) / 2, bend * (y0 + y1) / 2)
    inside = local > 1 and edge.ranks[0] // local == edge.ranks[1] // local
    taken = 1 - edge.weight
    scale = 5.0 if len(places) <= 16 else 3.6 if len(places) <= 40 else 2.2  # points for a weight of 1
    curve = Curve([(x0, y0), control, (x1, y1)], [Curve.MOVETO, Curve.CURVE3, Curve.CURVE3])
    colour = _INSIDE if inside or local == 1 else _BETWEEN
    axis.add_patch(PathPatch(curve, fill=False, edgecolor=colour, linewidth=max(0.4, taken * scale), alpha=0.9, zorder=2))


def _draw_workers(axis: Any, places: Sequence[tuple[float, float]], edges: Sequence[Edge], local: int) -> None:
    from matplotlib.patches import Arc

    n = len(places)
    idle = {edge.ranks[0] for edge in edges if len(edge.ranks) == 1}
    area = max(8.0, min(46.0, 1100 / n))
    for filled in (True, False):
        own = [places[i] for i in range(n) if (i not in idle) == filled]
        if own:
            axis.scatter(
                *zip(*own, strict=True),
                s=area,
                facecolor="0.15" if filled else "white",
                edgecolor="0.15" if filled else _IDLE,
                linewidth=1.0,
                zorder=3,
            )
    if 1 < local < n:
        for node, first in enumerate(range(0, n, local)):
            last = min(first + local, n) - 1
            # matplotlib's angles go counterclockwise from the right.
            start, stop = (90 - 360 * (rank + shift) / n for rank, shift in ((last, 0.32), (first, -0.32)))
            colour = "0.35" if node % 2 else "0.65"
            axis.add_patch(Arc((0, 0), 2.66, 2.66, theta1=start, theta2=stop, color=colour, linewidth=3.2, zorder=1))
    every = 1 if n <= 32 else math.ceil(n / 16)
    radius = 1.17 if n <= 32 else 1.18
    for i in range(0, n, every):
        x, y = places[i]
        axis.text(radius * x, radius * y, str(i), fontsize=6.5 if n <= 32 else 5.5, color="0.35", ha="center", va="center")


def _add_key(figure: Any, rounds: Sequence[Sequence[Edge]], local: int, total: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    edges = [edge for edges in rounds for edge in edges]
    pairs = [edge for edge in edges if len(edge.ranks) == 2]
    inside = [local > 1 and edge.ranks[0] // local == edge.ranks[1] // local for edge in pairs]
    wide = ", as wide as its weight" if len({edge.weight for edge in pairs}) > 1 else ""
    handles: list[Any] = []
    if pairs and local == 1:
        handles.append(Line2D([], [], color=_INSIDE, linewidth=2, label=f"a pair{wide}"))
    elif pairs:
        if any(inside):
            handles.append(Line2D([], [], color=_INSIDE, linewidth=2, label=f"a pair inside a node{wide}"))
        if not all(inside):
            handles.append(Line2D([], [], color=_BETWEEN, linewidth=2, label=f"a pair between nodes{wide}"))
    if any(len(edge.ranks) > 2 for edge in edges):
        handles.append(Patch(facecolor=(_COLOURS[1], 0.22), edgecolor=_COLOURS[1], label="a group"))
    if any(len(edge.ranks) == 1 for edge in edges):
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": _IDLE, "markersize": 5}
        handles.append(Line2D([], [], marker="o", linestyle="", label="idle", **hollow))
    if local > 1:
        handles.append(Line2D([], [], color="0.5", linewidth=3.2, label=f"a node ({local} workers)"))
    if total > len(rounds):
        handles.append(Line2D([], [], linestyle="", label=f"{total - len(rounds)} more rounds are not drawn"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def _draw_errors(axis: Any, errors: Mapping[str, Sequence[float]], epsilon: float | None) -> None:
    # Below it is the rounding of float64, or an exact mean.
    floor = min(1e-3, epsilon or 1.0) * 1e-3
    longest = 0
    for index, (name, values) in enumerate(errors.items()):
        reached = next((t for t, value in enumerate(values) if value < floor), None)
        shown = values[:reached]
        colour = _COLOURS[(index + 1) % len(_COLOURS)]
        style = _style(index, 1)
        marker = "o" if len(shown) <= 40 else None
        axis.plot(range(len(shown)), shown, linewidth=1.6, marker=marker, markersize=3.2, label=name, **style)
        longest = max(longest, len(shown) - (reached is None))
        if reached is not None:
            # Dotted, as the error did not decay along this line.
            start = max(reached - 1, 0)
            axis.plot([start, reached], [max(values[start], floor), floor], color=colour, linestyle=":", linewidth=1.0)
            axis.plot([reached], [floor], marker="v", markersize=8, color=colour, clip_on=False, zorder=4)
    axis.set_yscale("log")
    axis.set_ylim(floor, 1.6)
    axis.set_xlim(0, max(longest, 1) * 1.03)
    axis.set_xlabel("round")
    if len(errors) > 1 and longest > 40:
        # Linear to 10, so that fast topologies are not squeezed to the left, then logarithmic.
        axis.set_xscale("symlog", linthresh=10, linscale=1.5)
        axis.set_xticks([t for t in (0, 2, 4, 6, 8, 10, 20, 50, 100, 200, 400) if t <= longest])
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.set_xlabel("round (log beyond 10)")
    else:
        axis.xaxis.get_major_locator().set_params(integer=True)
    if epsilon is not None:
        axis.axhline(epsilon, color="0.6", linewidth=1, linestyle=(0, (4, 3)))
        axis.annotate(
            f"{epsilon:g}",
            (1, epsilon),
            (3, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color="0.4",
        )
    mark = f" (▼ below {floor:g})" if any(min(values) < floor for values in errors.values()) else ""
    axis.set_title(f"consensus error, relative to the start{mark}", loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
    if len(errors) > 1:
        axis.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.06, 0.5))


class PredictionRow(TypedDict):
    """A measured and a predicted step.

    ``panel`` groups the rows of one pair of axes, and ``run`` those of one colour. ``fitted``: a constant was fitted to this
    step.
    """

    panel: str
    run: str
    measured_ms: float
    predicted_ms: float
    fitted: bool


def plot_predictions(
    rows: Sequence[PredictionRow], path: str | Path | None = None, *, bounds: Mapping[str, float] | None = None
) -> Figure:
    """Relative errors of predictions against the measured step, one pair of axes per panel; fitted steps are hollow.

    Args:
        rows: in any order; measured steps must be above 0.
        path: as of :func:`plot_training`.
        bounds: by panel, the relative error up to which the background is shaded, such as 0.15.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("there are no rows to plot")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    figure = _new_figure(5.5 * len(panels), 4.2)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        own = [row for row in rows if row["panel"] == panel]
        if bounds and panel in bounds:
            axis.axhspan(-100 * bounds[panel], 100 * bounds[panel], color="0.94", zorder=0)
        axis.axhline(0, color="0.6", linewidth=0.8, zorder=1)
        for index, run in enumerate(dict.fromkeys(row["run"] for row in own)):
            colour = _COLOURS[index % len(_COLOURS)]
            for fitted in (False, True):
                points = [row for row in own if row["run"] == run and row["fitted"] is fitted]
                axis.plot(
                    [row["measured_ms"] for row in points],
                    [100 * (row["predicted_ms"] / row["measured_ms"] - 1) for row in points],
                    "o",
                    color=colour,
                    markerfacecolor="white" if fitted else colour,
                    label=None if fitted else run,
                )
        if any(row["fitted"] for row in own):
            axis.plot([], [], "o", color="0.4", markerfacecolor="white", label="fitted")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.xaxis.set_minor_formatter("{x:.0f}")
        axis.tick_params(axis="x", which="both", labelsize=8)
        axis.set_title(panel, loc="left", fontsize=10)
        axis.set_xlabel("measured step, ms")
        axis.set_ylabel("predicted against measured, %")
        axis.spines[["top", "right"]].set_visible(False)
        # Below the axes: its dots look like points.
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    return _written(figure, path)
