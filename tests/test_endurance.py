"""Training under faults: a short form of ``make endurance``."""

from __future__ import annotations

import pytest

from benchmarks import endurance


def test_the_schedule_is_a_function_of_its_seed_and_ends_in_time():
    found = endurance.make_schedule(32, 1800, 125, seed=3)
    assert found == endurance.make_schedule(32, 1800, 125, seed=3) != endurance.make_schedule(32, 1800, 125, seed=4)
    assert 40 < len(found) < 85
    assert all(fault.at + fault.frozen < 1800 - endurance.CALM for fault in found)
    assert {bool(fault.frozen) for fault in found} == {True, False}


@pytest.mark.slow
def test_workers_survive_a_storm_of_faults(tmp_path):
    n, seconds = 8, 80.0
    schedule = endurance.make_schedule(n, seconds, 1200, seed=5)
    found = endurance.run(n, seconds, schedule, tmp_path)
    seen = endurance.figures(n, seconds, found, endurance.read(tmp_path, found))
    logs = "".join(file.read_text()[-2000:] for file in tmp_path.glob("*.log"))
    assert (seen["hangs"], seen["errors"]) == (0, []), logs
    assert seen["kills"] >= 5
    assert seen["freezes"] >= 2
    assert seen["at_the_end"] >= n - 1
    assert seen["means"] == 1
    assert seen["participation"] > 0.3
