"""Figures of topologies, and what figures have in common. Needs matplotlib, imported when a figure is made (extra [plots])."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decent_dp._checks import install_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from decent_dp.topo import Edge

__all__ = [
    "COLOURS",
    "draw_curve",
    "figure_class",
    "finish_curves",
    "new_figure",
    "plot_topology",
    "written",
]


# Okabe and Ito's colours, which colour-blind readers can distinguish, without the pale yellow. The first is for the baseline.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


def figure_class() -> type[Figure]:
    """matplotlib's; raises ImportError with the install line."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib; {install_hint('plots')}") from error
    return Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure without a window or global state, so that it needs no display and no ``plt.close``."""
    return figure_class()(figsize=(width, height), layout="constrained")


def written(figure: Figure, path: str | Path | None, title: str = "") -> Figure:
    """The figure, with its title, and written to ``path`` if given."""
    if title:
        figure.suptitle(title, fontsize=12)
    if path is not None:
        # Without the version of matplotlib, the same numbers give the same file.
        options: dict[str, Any] = {"metadata": {"Software": None}} if Path(path).suffix.lower() == ".png" else {}
        figure.savefig(path, dpi=130, **options)
    return figure


def draw_curve(axis: Any, points: Sequence[tuple[float, float | None]], style: dict[str, Any]) -> None:
    """Draws the points that a log scale can show."""
    shown = [(step, value) for step, value in points if value is not None and 0 < value < float("inf")]
    if shown:
        axis.plot([step for step, _ in shown], [value for _, value in shown], **style)


def finish_curves(axis: Any, title: str) -> None:
    """The title, and a log scale for what was drawn."""
    # A log scale needs data.
    if axis.lines:
        axis.set_yscale("log")
    else:
        axis.text(0.5, 0.5, "nothing to show", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_yticks([])
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)


# -- topologies ------------------------------------------------------------------------------------------------------------

_PANELS, _PANEL_COLUMNS = 12, 4


def plot_topology(
    rounds: Sequence[Sequence[Edge]],
    errors: Sequence[float],
    path: str | Path | None = None,
    *,
    title: str = "",
    local_world_size: int = 1,
    epsilon: float = 1e-3,
) -> Figure:
    """The rounds of a topology as networks, and the decay of the consensus error below them.

    Workers are on a circle, by rank, clockwise from the top; their shade changes from node to node. A line is a pair, as wide
    as the weight with which each takes the other's value. A surface is a group. A hollow worker is idle.

    Args:
        rounds: the edges of each round; the first 12 are drawn.
        errors: the consensus error after 0, 1, … rounds, relative to the start.
        path: the file of the figure, if it is to be written; the suffix is the format ('.png').
        title: above the figure.
        local_world_size: workers per node.
        epsilon: an error to mark with a line; the curve ends at a thousandth of it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    if not rounds or not errors:
        raise ValueError("there are no rounds to plot")
    shown = rounds[:_PANELS]
    columns = min(_PANEL_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    width = max(7.5, 2.9 * columns)
    upper_height = rows * (width / columns + 0.1) + 0.4
    figure = new_figure(width, upper_height + 3.1)
    parts: Any = figure.subfigures(2, 1, height_ratios=[upper_height, 3.1])
    axes = list(parts[0].subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.set_axis_off()
    for t, (axis, edges) in enumerate(zip(axes, shown, strict=False)):
        _draw_round(axis, edges, local_world_size)
        axis.set_title(f"round {t}", fontsize=9, pad=2)
    key = "line: a pair" + (" (orange: between nodes)" if local_world_size > 1 else "")
    more = f"; {len(rounds) - _PANELS} more rounds are not drawn" if len(rounds) > _PANELS else ""
    parts[0].supxlabel(f"{key}; surface: a group; hollow: idle{more}", fontsize=8.5)
    axis = parts[1].subplots()
    # An exact mean, whose error is zero or rounding, leads out of the axes.
    draw_curve(
        axis,
        [(t, max(error, 1e-9 * epsilon)) for t, error in enumerate(errors)],
        {"color": COLOURS[1], "marker": "o", "markersize": 3},
    )
    axis.axhline(epsilon, color="0.6", linewidth=1, linestyle=(0, (4, 3)))
    finish_curves(axis, "consensus error, relative to the start")
    axis.set_ylim(1e-3 * epsilon, 1.6)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("round")
    return written(figure, path, title)


def _draw_round(axis: Any, edges: Sequence[Edge], local: int) -> None:
    from matplotlib.patches import Polygon

    n = sum(len(edge.ranks) for edge in edges)
    places = [(math.sin(2 * math.pi * i / n), math.cos(2 * math.pi * i / n)) for i in range(n)]
    groups = sorted((sorted(edge.ranks) for edge in edges if len(edge.ranks) > 2), key=lambda ranks: ranks[0])
    for index, ranks in enumerate(groups):
        colour = COLOURS[1 + index % (len(COLOURS) - 1)]
        corners = [places[rank] for rank in ranks]
        if ranks[-1] - ranks[0] == len(ranks) - 1 and 2 * len(ranks) <= n:
            # Neighbours: a band, as the surface between their chords is too thin.
            corners += [(0.82 * x, 0.82 * y) for x, y in reversed(corners)]
        axis.add_patch(Polygon(corners, closed=True, facecolor=(colour, 0.22), edgecolor=colour, linewidth=1.2))
    for edge in edges:
        if len(edge.ranks) == 2:
            ends = [places[rank] for rank in edge.ranks]
            between = local > 1 and edge.ranks[0] // local != edge.ranks[1] // local
            axis.plot(*zip(*ends, strict=True), color=COLOURS[2 if between else 1], linewidth=max(0.4, 5 * (1 - edge.weight)))
    idle = {edge.ranks[0] for edge in edges if len(edge.ranks) == 1}
    shades = ["white" if i in idle else "0.15" if i // local % 2 == 0 else "0.55" for i in range(n)]
    axis.scatter(*zip(*places, strict=True), s=max(8.0, min(46.0, 1100 / n)), facecolor=shades, edgecolor="0.15", zorder=3)
    for i in range(0, n, 1 if n <= 32 else math.ceil(n / 16)):
        x, y = places[i]
        axis.text(1.17 * x, 1.17 * y, str(i), fontsize=6.5, color="0.35", ha="center", va="center")
    axis.set(xlim=(-1.42, 1.42), ylim=(-1.42, 1.42), aspect="equal")
