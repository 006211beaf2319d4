"""The benchmark of shapes: its limits, its table and its committed result."""

from __future__ import annotations

import json

import pytest

from benchmarks import shapes
from benchmarks.shapes import GRID, RESULT, Shape, make_table
from decent_dp.topo import make_topology


def test_the_limit_is_that_of_the_bytes_and_their_headers():
    # A million parameters are 32 Mbit, and 66 of the 1,514 bytes of a frame are headers.
    assert Shape(2, 1, 32).limit == pytest.approx(1514 / 1448)
    assert Shape(12, 10, 100).limit == pytest.approx(3.2 * 1514 / 1448)


@pytest.mark.parametrize("shape", GRID, ids=str)
def test_steps_are_whole_periods(shape):
    period = make_topology("base-2", local_world_size=1, world_size=shape.workers, rank=0).period
    assert shape.steps % period == 0
    assert shape.steps >= max(3, 2 * period if period > 1 else 3)


def test_the_committed_result_keeps_the_promise():
    result = json.loads(RESULT.read_text())
    assert [(row["workers"], row["millions"], row["rate"]) for row in result["rows"]] == [
        (shape.workers, shape.millions, shape.rate) for shape in GRID
    ]
    # The aim is 1.06. Steps of 34 ms, and six workers and more, miss it (docs/lab/log.md, 2026-11-28, "the wire over ZeroMQ").
    assert [row["to_limit"] <= 1.10 for row in result["rows"]].count(False) <= 6
    assert all(row["to_limit"] <= 1.20 for row in result["rows"])
    assert RESULT.with_suffix(".md").read_text() == make_table(result["rows"])
    page = (shapes.ROOT / "docs" / "lab" / "slow-links.md").read_text()
    assert make_table(result["rows"]) in page
