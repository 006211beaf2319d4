"""The benchmarks of faults: their checks see what is wrong, and short forms run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks import endurance, kills, lab, many_seats, membership, what_if
from benchmarks.scenarios import Scenario, Seen, figures, say
from decent_dp.membership import Epoch

# -- what each fault costs -------------------------------------------------------------------------------------------------

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
    "late once": {"longest": 5.0, "left_out": 0},
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


# -- a thousand kills ------------------------------------------------------------------------------------------------------


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


# -- a storm ---------------------------------------------------------------------------------------------------------------


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


# -- many seats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notice", [many_seats.REFUSED, many_seats.DEAD_AFTER])
def test_workers_under_churn_come_to_one_line_and_all_is_counted(monkeypatch, notice):
    operations: list[str] = []

    def listening(name):
        call = getattr(many_seats.CountedStore, name)

        def listen(store, *arguments):
            operations.append(name)
            return call(store, *arguments)

        return listen

    for name in ("check", "get", "set", "compare_set", "append", "delete_key"):
        monkeypatch.setattr(many_seats.CountedStore, name, listening(name))
    monkeypatch.setattr(many_seats, "CHURN", 0.2 / 60)
    with many_seats.world_of(16, seed=1, notice=notice) as world:
        world.run(membership.BEGIN)
        world.disturb(until=120.0)
        world.run(200.0)
        assert world.incarnations >= 3
        assert world.missing == []
        assert all(worker.epochs.newest == world.epochs[world.common] for worker in world.workers)
        assert world.epochs[world.common].members == tuple(range(16))
        assert world.common == max(world.epochs) >= 4
        for number, epoch in world.epochs.items():
            assert epoch == Epoch.read(number, world.store.texts[f"{many_seats.RUN}/epoch/{number}"])
    assert world.store.operations == len(operations)


def test_a_projection_follows_a_power():
    rows = [{"seats": n, **dict.fromkeys(membership._GROWING, n**1.5)} for n in (10, 100, 400)]
    assert membership.project(rows, 1600)["operations_per_epoch"] == pytest.approx(1600**1.5)
