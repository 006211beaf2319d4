"""The training curves of several runs, as examples.compare draws them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from decent_dp.tools.plots import COLOURS, draw_curve, finish_curves, new_figure, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Dashes show runs that lie on each other. Offset and dashes, in points.
_DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


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
    figure = new_figure(10, 1.3 + 2.9 * len(panels))
    axes = figure.subplots(len(panels), 2, sharex=True, squeeze=False)
    for (left, right), panel in zip(axes, panels, strict=True):
        of = f" ({panel})" if panel else ""
        for index, run in enumerate(runs):
            own = sorted((row for row in rows if (row["panel"], row["run"]) == (panel, run)), key=lambda row: row["step"])
            style = {**_style(index), "linewidth": 1.6}
            draw_curve(left, _means([(row["step"], row["loss"]) for row in own], window), style)
            distances = [(row["step"], row["consensus_distance"]) for row in own]
            draw_curve(right, distances, style)
        finish_curves(left, f"training loss, mean over workers{of}")
        finish_curves(right, f"consensus distance{of}")
        for axis in (left, right):
            for mark in marks:
                axis.axvline(mark + 0.5, color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linewidth=2, label=run, **_style(index)) for index, run in enumerate(runs)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, handlelength=3)
    return written(figure, path, title)


def _means(points: Sequence[tuple[int, float]], window: int) -> list[tuple[float, float]]:
    """The mean step and the mean value of each window."""
    parts = [points[start : start + window] for start in range(0, len(points), window)]
    return [(sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": _DASHES[index % len(_DASHES)]}
