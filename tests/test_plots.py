from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex

from decent_dp.plots import TrainingRow, plot_simulation, plot_topology, plot_training
from decent_dp.topo import Edge


def rows(*runs: str, panel: str = "AdamW", distance: float | None = 0.1, n: int = 12) -> list[TrainingRow]:
    return [
        TrainingRow(panel=panel, run=run, step=t + 1, loss=1.0 / (t + 1), consensus_distance=distance if t % 4 == 3 else None)
        for run in runs
        for t in range(n)
    ]


def test_writes_a_real_png(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    plot_training(rows("ring", "complete") + rows("ring", panel="SGD"), path, title="two panels", window=4)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 600
    assert "matplotlib.pyplot" not in sys.modules  # no display, no global state


def test_draws_what_the_rows_say() -> None:
    figure = plot_training(rows("ring", "complete")[::-1], window=5)
    left, right = figure.axes
    first = left.lines[0]
    assert [len(line.get_xdata()) for line in left.lines] == [3, 3]  # windows of 5, 5 and 2
    assert list(first.get_xdata()) == pytest.approx([3, 8, 11.5])
    assert first.get_ydata()[0] == pytest.approx(sum(1 / t for t in range(1, 6)) / 5)
    assert list(right.lines[0].get_xdata()) == [4, 8, 12]
    assert left.get_yscale() == right.get_yscale() == "log"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["complete", "ring"]


def test_what_a_log_scale_cannot_show_is_left_out(tmp_path: Path) -> None:
    some = [*rows("ddp", distance=0.0), *rows("ring")]
    some[0]["loss"] = float("nan")
    some[1]["loss"] = float("inf")
    figure = plot_training(some, tmp_path / "a.png")
    assert len(figure.axes[0].lines) == 2
    assert len(figure.axes[0].lines[0].get_xdata()) == 10
    assert len(figure.axes[1].lines) == 1
    figure = plot_training(rows("ddp", distance=None), tmp_path / "b.png")  # nothing in the right axes
    assert not figure.axes[1].lines


def test_refuses_what_it_cannot_plot() -> None:
    with pytest.raises(ValueError, match="no rows"):
        plot_training([])
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        plot_training(rows("ring"), window=0)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
        plot_training(rows("ring"))
    with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
        plot_topology([], {"a": [1.0]})
    with pytest.raises(ImportError, match=r"pip install -e '\.\[plots\]'"):
        plot_simulation({"a": [{"step": 1}]})


# -- topologies ------------------------------------------------------------------------------------------------------------


def drawn(axis: Any, kind: str) -> list[Any]:
    return [patch for patch in axis.patches if type(patch).__name__ == kind]


def test_a_topology_is_drawn_as_it_is(tmp_path: Path) -> None:
    rounds = [
        [Edge([0, 4], 0.5), Edge([1, 2], 0.75), Edge([3], 1.0), Edge([5], 1.0)],
        [Edge([0, 1, 2, 3], 0.25), Edge([4, 5], 0.5)],
        [Edge([5, 0, 3], 1 / 3), Edge([1], 1.0), Edge([2], 1.0), Edge([4], 1.0)],
    ]
    path = tmp_path / "rounds.png"
    figure = plot_topology(rounds, {"mine": [1.0, 0.5, 1e-17]}, path, title="six", local_world_size=2, epsilon=1e-2)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    panels = [axis for axis in figure.get_axes() if axis.get_title().startswith("round")]
    curve = next(axis for axis in figure.get_axes() if axis.lines)
    assert [axis.get_title() for axis in panels] == ["round 0", "round 1", "round 2"]

    def place(rank: int) -> tuple[float, float]:
        return math.sin(math.pi * rank / 3), math.cos(math.pi * rank / 3)

    pairs = drawn(panels[0], "PathPatch")
    ends = [[tuple(patch.get_path().vertices[i]) for i in (0, -1)] for patch in pairs]
    assert ends == [[pytest.approx(place(0)), pytest.approx(place(4))], [pytest.approx(place(1)), pytest.approx(place(2))]]
    assert pairs[0].get_linewidth() == pytest.approx(2 * pairs[1].get_linewidth())  # it takes twice as much of the other
    assert drawn(panels[0], "Polygon") == []
    # A group's surface has its members for corners, in order along the circle.
    [group] = drawn(panels[1], "Polygon")
    assert [tuple(corner) for corner in group.get_xy()[:4]] == [pytest.approx(place(rank)) for rank in range(4)]
    [group] = drawn(panels[2], "Polygon")
    assert [tuple(corner) for corner in group.get_xy()[:3]] == [pytest.approx(place(rank)) for rank in (0, 3, 5)]
    # An idle worker is hollow.
    filled, hollow = panels[0].collections
    assert [tuple(at) for at in hollow.get_offsets()] == [pytest.approx(place(3)), pytest.approx(place(5))]
    assert len(filled.get_offsets()) == 4
    assert [len(drawn(axis, "Arc")) for axis in panels] == [3, 3, 3]  # three nodes of two
    # 0 and 4 are on two nodes, and so are 1 and 2; 4 and 5 share one: each has the colour that the key says.
    [key] = [legend for part in figure.subfigs for legend in part.legends]
    colours = {text.get_text(): line.get_color() for text, line in zip(key.get_texts(), key.get_lines(), strict=False)}
    inside = next(colour for text, colour in colours.items() if "inside a node" in text)
    between = next(colour for text, colour in colours.items() if "between nodes" in text)
    assert inside != between
    assert [to_hex(patch.get_edgecolor()) for patch in pairs] == [between.lower()] * 2
    assert [to_hex(patch.get_edgecolor()) for patch in drawn(panels[1], "PathPatch")] == [inside.lower()]

    assert curve.get_yscale() == "log"
    decay, drop, mark = curve.lines[:3]
    assert list(decay.get_ydata()) == pytest.approx([1.0, 0.5])
    # The exact mean, below what is shown: no decay crosses epsilon between two rounds.
    assert [list(drop.get_xdata()), list(drop.get_ydata())] == [[1, 2], pytest.approx([0.5, 1e-6])]
    assert (decay.get_linestyle(), drop.get_linestyle(), mark.get_marker()) == ("-", ":", "v")
    assert "below 1e-06" in curve.get_title(loc="left")
    assert curve.get_xlabel() == "round"


def test_only_the_first_rounds_are_drawn() -> None:
    rounds = [[Edge([0, 1], 0.5), Edge([2], 1.0)]] * 20
    figure = plot_topology(rounds, {"long": [1.0, 0.9]})
    assert sum(axis.get_title().startswith("round") for axis in figure.get_axes()) == 12
    texts = [text.get_text() for part in figure.subfigs for legend in part.legends for text in legend.get_texts()]
    assert "8 more rounds are not drawn" in texts
    assert "idle" in texts


def test_curves_alone() -> None:
    figure = plot_topology([], {"a": [0.5**t for t in range(100)], "b": [1.0, 0.0]}, epsilon=1e-3)
    [axis] = figure.get_axes()
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]
    assert len(axis.lines[0].get_xdata()) == 20  # to the last value above 1e-6, as 0.5^20 is below
    assert axis.get_xlabel() == "round"
    assert list(axis.get_xlim()) == pytest.approx([0, 20 * 1.03])
    slow, fast = [0.99**t for t in range(200)], [1.0, 0.0]
    [axis] = plot_topology([], {"slow": slow, "fast": fast}, epsilon=1e-3).get_axes()
    assert (axis.get_xscale(), axis.get_xlabel()) == ("symlog", "round (log beyond 10)")
    [axis] = plot_topology([], {"slow": slow}, epsilon=1e-3).get_axes()
    assert (axis.get_xscale(), axis.get_xlabel()) == ("linear", "round")
    [axis] = plot_topology([], {"alone": [0.0]}).get_axes()
    assert [text.get_marker() for text in axis.lines] == ["o", "None", "v"]
    with pytest.raises(ValueError, match="no consensus errors"):
        plot_topology([], {})


# -- simulations -----------------------------------------------------------------------------------------------------------


def test_a_simulation_is_drawn_as_it_went(tmp_path: Path) -> None:
    some = [
        {"step": t, "loss": 2.0 / t, "consensus_distance": 0.1 * t, "accuracy": 0.1 * t, "worst_accuracy": 0.05 * t}
        for t in range(1, 6)
    ]
    path = tmp_path / "run.png"
    figure = plot_simulation({"ring": some, "base-2": some[:3]}, path, title="digits")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    loss, accuracy, distance = figure.axes
    assert list(loss.lines[0].get_ydata()) == pytest.approx([2, 1, 2 / 3, 0.5, 0.4])
    assert list(accuracy.lines[0].get_ydata()) == pytest.approx([10, 20, 30, 40, 50])
    assert list(accuracy.lines[1].get_ydata()) == pytest.approx([5, 10, 15, 20, 25])
    assert list(distance.lines[1].get_xdata()) == [1, 2, 3]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ring", "base-2"]
    with pytest.raises(ValueError, match="no rows"):
        plot_simulation({"ring": []})


def test_a_simulation_that_diverged(tmp_path: Path) -> None:
    good = {"step": 1, "loss": 2.0, "consensus_distance": 0.1, "accuracy": 0.5, "worst_accuracy": 0.4}
    bad = {**good, "step": 2, "loss": None, "consensus_distance": None}
    figure = plot_simulation({"ring": [good, bad]}, tmp_path / "a.png")
    assert [len(axis.lines[0].get_xdata()) for axis in figure.axes] == [1, 2, 1]
    figure = plot_simulation({"ring": [bad]}, tmp_path / "b.png")
    assert [len(axis.lines) for axis in figure.axes] == [0, 2, 0]
