"""Rows in, figure out. Needs matplotlib, which is imported when a figure is made: ``pip install -e '.[plots]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TrainingRow", "plot_training"]


class TrainingRow(TypedDict):
    """What was seen after one step of one run.

    ``panel`` groups runs that are looked at together (the optimizer, say) and ``run`` names one. ``loss`` is the training
    loss, the mean over workers; ``consensus_distance`` is None at steps where it was not measured.
    """

    panel: str
    run: str
    step: int
    loss: float
    consensus_distance: float | None


# Okabe and Ito's colours, which colour-blind readers can tell apart, but for the pale yellow. The first is for the baseline.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
# Runs that lie on each other are still seen. Offset and dashes, in points.
_DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def plot_training(rows: Sequence[TrainingRow], path: str | Path | None = None, *, title: str = "", window: int = 1) -> Figure:
    """Training loss and consensus distance against steps, both on a log scale: a row of two axes for each panel.

    Args:
        rows: in any order. Values that a log scale cannot show (0, not finite) are left out, and so is the line of a run that
            has none: DDP has no consensus distance.
        path: where the figure is written; the ending says the format ('.png'). None: it is only returned.
        title: above the figure.
        window: each point of a loss curve is the mean of this many rows in a row, and the last ones make a shorter window.

    Returns:
        The figure. It belongs to no window and to no global state, so it needs no display and no ``plt.close``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows, or ``window`` is less than 1.
    """
    if not rows:
        raise ValueError("there are no rows to plot")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; in the clone: pip install -e '.[plots]'") from error

    panels = list(dict.fromkeys(row["panel"] for row in rows))
    runs = list(dict.fromkeys(row["run"] for row in rows))
    figure = Figure(figsize=(10, 1.3 + 2.9 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, sharex=True, squeeze=False)
    for (left, right), panel in zip(axes, panels, strict=True):
        for index, run in enumerate(runs):
            own = sorted((row for row in rows if (row["panel"], row["run"]) == (panel, run)), key=lambda row: row["step"])
            style = {"color": _COLOURS[index % len(_COLOURS)], "linestyle": _DASHES[index % len(_DASHES)], "linewidth": 1.6}
            _draw(left, _means([(row["step"], row["loss"]) for row in own], window), style)
            distances = [(row["step"], row["consensus_distance"]) for row in own]
            _draw(right, [(step, value) for step, value in distances if value is not None], style)
        _finish(left, panel, "training loss, mean over workers")
        _finish(right, panel, "consensus distance")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    _add_legend(figure, runs)
    if title:
        figure.suptitle(title, fontsize=12)
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _means(points: Sequence[tuple[int, float]], window: int) -> list[tuple[float, float]]:
    """The mean step and the mean value of each window."""
    parts = [points[start : start + window] for start in range(0, len(points), window)]
    return [(sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]


def _draw(axis: Any, points: Sequence[tuple[float, float]], style: dict[str, Any]) -> None:
    shown = [(step, value) for step, value in points if 0 < value < float("inf")]
    if shown:
        axis.plot([step for step, _ in shown], [value for _, value in shown], **style)


def _finish(axis: Any, panel: str, what: str) -> None:
    # An axis without a line would be given a log scale from nowhere.
    if axis.lines:
        axis.set_yscale("log")
    else:
        axis.text(0.5, 0.5, "nothing to show", transform=axis.transAxes, ha="center", va="center", color="0.5")
        axis.set_yticks([])
    axis.set_title(f"{what} ({panel})" if panel else what, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)


def _add_legend(figure: Any, runs: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_COLOURS[i % len(_COLOURS)], linestyle=_DASHES[i % len(_DASHES)], linewidth=2, label=run)
        for i, run in enumerate(runs)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(runs)), frameon=False, handlelength=3)
