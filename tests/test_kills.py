"""A thousand kills: that its checks see what is wrong, a short form, and the committed result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import kills


def written(order: int, calls: range) -> list[dict[str, Any]]:
    """What workers of a run without a fault write: replicas that are apart until the addition, and equal after it."""
    size = len(kills.addition(0, 0))
    own = [np.random.default_rng(rank).standard_normal(size) for rank in range(kills.N)]
    before = np.mean(own, 0)
    after = before + np.mean([kills.addition(rank, order + 1) for rank in range(kills.N)], 0, np.float64)
    lines: list[dict[str, Any]] = []
    for call in calls:
        is_first = call == calls[0]
        for rank in range(kills.N):
            x, mean = (own[rank], before) if is_first else (after, after)
            lines.append({"rank": rank, "pid": rank, "call": call, "own": x.tolist()})
            said = {"ranks": list(range(kills.N)), "mean": mean.tolist(), "order": order if is_first else order + 1}
            lines.append({"rank": rank, "pid": rank, "call": call, **said})
    return lines


def test_a_wrong_mean_is_seen():
    lines = written(kills.REST, range(5, 8))
    assert kills.check_calls(lines)[:3] == (3, 3 * kills.N, [])
    assert kills.check_runs(lines)[:2] == (1, [])
    (line,) = (line for line in lines if "mean" in line and (line["call"], line["rank"]) == (6, 3))
    line["mean"][2] += 1e-3
    wrong = kills.check_calls(lines)[2]
    assert len(wrong) == 2
    assert wrong[0].startswith("call 6, worker 3: an error of")
    assert wrong[1] == "call 6: 2 different means"


def test_a_mean_of_others_than_those_that_took_part_is_seen():
    lines = written(kills.REST, range(5, 6))
    for line in lines:
        if "mean" in line:
            line["ranks"] = [0, 1, 2]
    assert len(kills.check_calls(lines)[2]) == kills.N


@pytest.mark.parametrize("what", ["the mean", "the replica"])
def test_a_difference_that_only_one_end_has_mixed_is_seen(what):
    lines = written(kills.REST, range(5, 8))
    for line in lines:
        key = "own" if what == "the replica" else "mean"
        if key in line and (line["call"], line["rank"]) == (7, 3):
            line[key][0] += 1e-3
    (wrong,) = kills.check_runs(lines)[1]
    assert wrong.startswith(f"check 0: {what} of worker 3 has an error of")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_at_random_times(tmp_path):
    found = kills.run(50, 5, str(tmp_path))
    assert found["kills"] == 50
    assert found["checks"] == 2
    assert not [*found["hangs"], *found["errors"], *found["wrong_results_of_calls"], *found["wrong_checks"]]
    assert found["joined"] > 25


def test_the_committed_run_keeps_its_promises():
    found = json.loads(kills.RESULT.read_text())
    table = kills.RESULT.with_suffix(".md").read_text()
    assert kills.table(found) == table
    assert table in (Path(__file__).parents[1] / "docs" / "lab" / "faults.md").read_text()
    assert found["kills"] >= 1000
    assert not [*found["hangs"], *found["errors"], *found["wrong_results_of_calls"], *found["wrong_checks"]]
    assert found["largest_error"] < kills.EXACT
