from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from decent_dp.tools.plots import plot_topology
from decent_dp.topo import Edge
from examples.curves import TrainingRow, plot_training


def rows(*runs: str, panel: str = "AdamW", distance: float | None = 0.1, n: int = 12) -> list[TrainingRow]:
    return [
        TrainingRow(panel=panel, run=run, step=t + 1, loss=1.0 / (t + 1), consensus_distance=distance if t % 4 == 3 else None)
        for run in runs
        for t in range(n)
    ]


def test_writes_a_real_png(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    some = rows("ring", "complete") + rows("ring", panel="SGD", distance=None)
    some[0]["loss"], some[1]["loss"] = float("nan"), float("inf")
    figure = plot_training(some, path, title="two panels")
    # What a log scale cannot show is left out, and so are runs without anything to show.
    assert [len(axis.lines) for axis in figure.axes] == [2, 2, 1, 0]
    assert len(figure.axes[0].lines[0].get_xdata()) == 10
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
        plot_topology([[Edge([0], 1.0)]], [1.0])


# -- topologies ------------------------------------------------------------------------------------------------------------


def test_a_topology_is_drawn_as_it_is(tmp_path: Path) -> None:
    rounds = [
        [Edge([0, 4], 0.5), Edge([1, 2], 0.75), Edge([3], 1.0), Edge([5], 1.0)],
        [Edge([0, 1, 2, 3], 0.25), Edge([4, 5], 0.5)],
        [Edge([5, 0, 3], 1 / 3), Edge([1], 1.0), Edge([2], 1.0), Edge([4], 1.0)],
    ]
    path = tmp_path / "rounds.png"
    figure = plot_topology(rounds, [1.0, 0.5, 1e-17], path, title="six", local_world_size=2, epsilon=1e-2)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    panels = [axis for axis in figure.get_axes() if axis.get_title().startswith("round")]
    [curve] = [axis for axis in figure.get_axes() if axis.get_xlabel() == "round"]
    assert [axis.get_title() for axis in panels] == ["round 0", "round 1", "round 2"]

    def place(rank: int) -> Any:
        return pytest.approx((math.sin(math.pi * rank / 3), math.cos(math.pi * rank / 3)))

    def ends(line: Any) -> list[Any]:
        return list(zip(line.get_xdata(), line.get_ydata(), strict=True))

    pairs = panels[0].lines
    assert [ends(pair) for pair in pairs] == [[place(0), place(4)], [place(1), place(2)]]
    assert pairs[0].get_linewidth() == pytest.approx(2 * pairs[1].get_linewidth())  # it takes twice as much of the other
    assert not panels[0].patches
    # 0 and 4 are on two nodes, and so are 1 and 2; 4 and 5 share one.
    assert pairs[0].get_color() == pairs[1].get_color() != panels[1].lines[0].get_color()
    # A group's surface has its members for corners, in order along the circle.
    for axis, members in ((panels[1], range(4)), (panels[2], (0, 3, 5))):
        [group] = axis.patches
        assert [tuple(corner) for corner in group.get_xy()[: len(members)]] == [place(rank) for rank in members]
    # An idle worker is hollow.
    [workers] = panels[0].collections
    white = [min(colour) == 1.0 for colour in workers.get_facecolor()]
    assert [tuple(at) for at in workers.get_offsets()] == [place(rank) for rank in range(6)]
    assert white == [False, False, False, True, False, True]

    assert curve.get_yscale() == "log"
    assert list(curve.lines[0].get_ydata()) == pytest.approx([1.0, 0.5, 1e-11])
    assert curve.get_ylim() == pytest.approx((1e-5, 1.6))


def test_only_the_first_rounds_are_drawn() -> None:
    rounds = [[Edge([0, 1], 0.5), Edge([2], 1.0)]] * 20
    figure = plot_topology(rounds, [1.0, 0.9])
    assert sum(axis.get_title().startswith("round") for axis in figure.get_axes()) == 12
    assert "8 more rounds are not drawn" in figure.subfigs[0].get_supxlabel()
    with pytest.raises(ValueError, match="no rounds"):
        plot_topology([], [])
