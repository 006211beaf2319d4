"""What a fault costs the others: the figures of ``benchmarks.faults`` from what workers have seen, and one scenario."""

from __future__ import annotations

import pytest

from benchmarks import what_if
from benchmarks.scenarios import Scenario, Seen, figures, say

AT = 100.0


def steps(*ends: float) -> list[tuple[float, float]]:
    """One after the other, from a second before the fault."""
    return list(zip((AT - 1, *ends), ends, strict=False))


def test_figures_are_those_of_the_others():
    scenario = Scenario({}, seconds=10.0, ends=4.0)
    without, all_four = (0, 1, 2), (0, 1, 2, 3)
    seen = {
        0: Seen(steps(99.0, 101.5, 102.0), rosters=[(106.0, without), (108.0, all_four)], lost=1),
        1: Seen(
            steps(99.5, 100.5),
            holes=[(99.2, frozenset({3})), (99.4, frozenset()), (103.0, frozenset({3}))],
            rosters=[(106.5, without), (107.0, all_four)],
            mixed=[(99.0, 3, 98.9), (104.1, 3, 103.9), (108.5, 3, 108.0), (105.0, 2, 104.9)],
            left_out=3,
        ),
        # In its last step it may wait for one that has ended.
        2: Seen(steps(109.6, 120.0), holes=[(102.0, frozenset({1}))], rosters=[(106.0, without), (107.5, all_four)]),
        3: Seen(steps(105.0), lost=7, sick=[101.0], marks={"healed": 104.5}),
    }
    found = figures(scenario, AT, seen)
    assert found["hole"] == pytest.approx(3.0)
    assert found["planned"] == pytest.approx(6.5)
    assert found["planned_later"] == pytest.approx(2.5)
    assert found["returns"] == pytest.approx(4.0)
    assert found["mixed"] == pytest.approx(4.5)
    assert found["longest"] == pytest.approx(10.6)
    assert found["healed"] == pytest.approx(0.5)
    assert (found["lost"], found["left_out"], found["skipped"], found["sick"]) == (1, 3, 60, 0)
    seen[0].rosters.pop(0)
    assert figures(scenario, AT, seen)["planned"] is None


def test_a_new_process_is_in_when_it_mixes_with_one_that_was_there():
    scenario = Scenario({}, victims=(2, 3))
    others = {rank: Seen() for rank in (0, 1)}
    new = {4: Seen(mixed=[(102.0, 5, 101.9), (104.0, 1, 103.9)], marks={"joins": 101.0}), 5: Seen(marks={"joins": 101.0})}
    assert figures(scenario, AT, {**others, 4: new[4]})["joined"] == pytest.approx(3.0)
    assert figures(scenario, AT, {**others, **new})["joined"] is None


def test_seconds_are_said_with_two_digits():
    assert say({"a": 0.0234, "b": 3, "c": 2.98, "d": None, "e": 11.57, "f": 0.996}) == {
        "a": "0.02 s",
        "b": "3",
        "c": "3.0 s",
        "d": "never",
        "e": "11.6 s",
        "f": "1.0 s",
    }


# The largest figures on a busy machine, in seconds; steps that are lost: none.
LIMITS: dict[str, dict[str, float]] = {
    "kill": {"hole": 1.0, "longest": 1.5, "planned": 5.0},
    "freeze": {"hole": 5.0, "longest": 5.0, "planned": 16.0, "mixed": 6.0},
    "wakes in time": {"longest": 5.0, "mixed": 3.0},
    "short freeze": {"longest": 4.0, "left_out": 0},
    "nan": {"longest": 1.5, "healed": 3.0, "sick": 0},
    "close": {"longest": 1.5, "planned": 5.0},
    "suspended": {"left_out": 2},
    "too few": {"error": 3.0},
    "alone": {"longest": 5.0, "mixed": 6.0},
    "cut": {"longest": 1.5, "mixed": 2.0},
    "half-open": {"longest": 3.0, "mixed": 4.0},
    "one way": {"hole": 5.0, "longest": 5.0},
    "damage": {"longest": 1.5, "mixed": 2.0},
    "slow link": {"longest": 2.0},
    "halves": {"hole": 5.0, "longest": 5.0, "mixed": 5.0},
    "average": {"returned": 3.0},
    "save": {"returned": 5.0, "failed": 5.0, "longest": 1.5},
    "preemption": {"stopped": 3.0},
    "building": {"built": 5.0},
    "new process": {"joined": 6.0, "longest": 1.5},
    "donor": {"joined": 8.0, "longest": 1.5},
    "replaced": {"error": 3.0},
    "two leave": {"joined": 8.0, "longest": 1.5},
    "misfit": {"refused": 3.0, "longest": 1.5},
    "store": {"longest": 1.5, "planned_later": 5.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_fault_costs_the_others_no_step_and_hardly_a_wait(workers, name):
    found = what_if.run(workers, name)
    assert found["lost"] == 0
    for figure, limit in LIMITS[name].items():
        assert found[figure] is not None, (figure, found)
        assert found[figure] <= limit, (figure, found)
