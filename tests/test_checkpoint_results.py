"""Costs of checkpoints and effects of a resize: the committed results equal those of the command and of the page."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks import checkpoint
from decent_dp.tools.plots import plot_training

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lab" / "checkpoint.md"
COST = ROOT / "benchmarks" / "results" / "checkpoint.json"
RESIZE = ROOT / "docs" / "results" / "resize.json"


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


def test_the_committed_costs_keep_the_promise() -> None:
    results = committed(COST)
    assert results["parameters"] > 100e6
    assert results["workers"] == 2
    assert results["repeat"] >= 5
    assert list(results["wires"]) == ["float32", "int8"]
    for wire, line in results["wires"].items():
        # The training thread is held up by no more than one copy of the replica in memory.
        assert line["save_s"] <= line["copy_new_s"], wire
        payload = 4 * results["parameters"]
        assert line["parameters_bytes"] == payload
        assert line["optimizer_bytes"] == pytest.approx(2 * payload, rel=1e-3)


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


def losses(rows: list[dict[str, Any]], run: str) -> list[float]:
    return [row["loss"] for row in sorted(rows, key=lambda row: row["step"]) if row["run"] == run]


def test_the_page_describes_a_resize_as_measured() -> None:
    results = committed(RESIZE)
    phase, rows = results["phase"], results["rows"]
    assert {row["run"] for row in rows} == set(checkpoint.PLANS)
    whole = losses(rows, "8 workers throughout")
    assert len(whole) == 3 * phase
    for how in ("'mean'", "'spread'"):
        own = losses(rows, f"8, 5, 8: {how}")
        assert own[:phase] == whole[:phase]
        for change in (phase, 2 * phase):
            assert fmean(own[change : change + 10]) < 1.15 * fmean(own[change - 10 : change]), how
        assert fmean(own[-20:]) == pytest.approx(fmean(whole[-20:]), rel=0.1)
    alone = losses(rows, "8, 5, 8: replica 0 alone")
    for change in (phase, 2 * phase):
        assert fmean(alone[change : change + 10]) > 1.4 * fmean(alone[change - 10 : change])
    assert RESIZE.with_suffix(".png").is_file()


@pytest.mark.slow
def test_a_resize_runs_as_committed() -> None:
    kept = {(row["run"], row["step"]): row for row in committed(RESIZE)["rows"]}
    made = checkpoint.resize(phase=2, seeds=committed(RESIZE)["seeds"])
    assert len(made) == len(checkpoint.PLANS) * 6
    for row in made:
        if row["step"] <= 2 or row["run"] == "8 workers throughout":
            was = kept[row["run"], row["step"]]
            assert row["loss"] == pytest.approx(was["loss"], rel=1e-3)
            distance = was["consensus_distance"]
            assert row["consensus_distance"] == (None if distance is None else pytest.approx(distance, rel=1e-2))


def test_marks_are_drawn_behind_the_curves() -> None:
    rows: Any = [{"panel": "", "run": "a", "step": t, "loss": 1 / t, "consensus_distance": 1.0} for t in range(1, 9)]
    for axis in plot_training(rows, marks=(2, 5)).axes:
        curve, *marks = axis.lines
        assert len(curve.get_xdata()) == 8
        assert [list(mark.get_xdata()) for mark in marks] == [[2.5, 2.5], [5.5, 5.5]]
