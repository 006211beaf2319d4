"""Costs of checkpoints and effects of a resize: the committed results equal those of the command and of the page."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint
from examples.curves import plot_training
from tests.helpers import ROOT

PAGE = ROOT / "docs" / "lab" / "checkpoint.md"
COST = ROOT / "benchmarks" / "results" / "checkpoint.json"


def committed(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_the_page_shows_the_committed_costs() -> None:
    results = committed(COST)
    table = COST.with_suffix(".md").read_text(encoding="utf-8")
    assert table == checkpoint.make_markdown(results["wires"])
    shown = PAGE.read_text(encoding="utf-8").partition("<!-- cost: begin -->\n")[2].partition("<!-- cost: end -->")[0]
    assert shown == table
    assert str(ROOT) not in COST.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_costs_of_a_small_model(tmp_path: Path) -> None:
    options = Namespace(folder=str(tmp_path), repeat=2, layers=3, width=64)
    found = checkpoint.launch("int8", options)
    assert len(found) == 2
    line = checkpoint.summary(found)
    assert {key for key in checkpoint.COLUMNS if not line[key] > 0 and key != "delay_s"} == set()
    assert line["parameters_bytes"] == 4 * 3 * 64 * 64
    assert line["bytes"] > line["parameters_bytes"] + line["optimizer_bytes"]
    assert line["complete_s"] >= line["save_s"]
    assert list(tmp_path.iterdir()) == []


def test_marks_are_drawn_behind_the_curves() -> None:
    rows: Any = [{"panel": "", "run": "a", "step": t, "loss": 1 / t, "consensus_distance": 1.0} for t in range(1, 9)]
    for axis in plot_training(rows, marks=(2, 5)).axes:
        curve, *marks = axis.lines
        assert len(curve.get_xdata()) == 8
        assert [list(mark.get_xdata()) for mark in marks] == [[2.5, 2.5], [5.5, 5.5]]
