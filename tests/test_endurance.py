"""Training under faults: a short form of ``make endurance``, and the committed results."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import endurance, lab


def test_the_schedule_is_a_function_of_its_seed_and_ends_in_time():
    found = endurance.make_schedule(32, 1800, 125, seed=3, sites=8)
    assert found == endurance.make_schedule(32, 1800, 125, seed=3, sites=8) != endurance.make_schedule(32, 1800, 125, 4, 8)
    assert 40 < len(found) < 85
    assert all(fault.at + fault.seconds < 1800 - endurance.CALM for fault in found)
    assert {fault.what for fault in found} == {"kill", "freeze", "part", "slow"}
    assert {fault.what for fault in endurance.make_schedule(32, 1800, 125, seed=3)} == {"kill", "freeze"}
    parted = [fault for fault in found if fault.what == "part"]
    assert all(a.at + a.seconds <= b.at for a, b in pairwise(parted))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sites", [0, 4])
def test_workers_survive_a_storm_of_faults(tmp_path, sites):
    if sites and (lacking := lab.missing()):
        pytest.skip(lacking)
    n, seconds = 8, 100.0
    schedule = endurance.make_schedule(n, seconds, 1000, seed=5, sites=sites)
    run = endurance.endure(n, seconds, schedule, tmp_path, sites, pace=0.5)["with"]
    seen = endurance.figures(run, endurance.read(run))
    logs = "".join(file.read_text()[-2000:] for file in (tmp_path / "with").glob("*.log"))
    assert (seen["hangs"], seen["errors"]) == (0, []), logs
    assert set(seen["faults"]) == {fault.what for fault in schedule}
    assert seen["at_the_end"] >= n - 1
    assert seen["means"] == 1
    assert seen["participation"] > 0.3


@pytest.mark.slow
def test_the_demonstration_ends_with_all_workers(capsys):
    endurance.demo()
    shown = capsys.readouterr().out
    assert "members 3 " in shown, shown
    assert "At the end all 4 workers had the same mean: True." in shown, shown


def test_the_committed_run_keeps_its_promises():
    result = json.loads(endurance.RESULT.read_text())
    calm, stormy = result["without"], result["with"]
    table = endurance.RESULT.with_suffix(".md").read_text()
    assert endurance.table(result) == table
    assert table in (Path(__file__).parents[1] / "docs" / "lab" / "faults.md").read_text()
    assert result["schedule"] == [asdict(fault) for fault in endurance.make_schedule(32, 1800, 125, result["seed"], 8)]
    assert (stormy["hangs"], stormy["errors"], stormy["means"]) == (0, [], 1)
    assert stormy["at_the_end"] == result["workers"]
    assert stormy["steps"] > 0.98 * calm["steps"]
    assert stormy["participation"] > 0.95
    assert abs(stormy["loss"] / calm["loss"] - 1) < 0.006
