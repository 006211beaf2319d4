from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from decent_dp.plots import TrainingRow, plot_training


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
