"""The protocol of members with many seats: a short form of ``make bench-membership``, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import many_seats, membership
from decent_dp.membership import Epoch

ROOT = Path(__file__).parents[1]


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


def test_the_page_shows_the_committed_table():
    result = json.loads(membership.RESULT.read_text())
    text = membership.RESULT.with_suffix(".md").read_text()
    assert membership.table(result) == text
    assert text in (ROOT / "docs" / "lab" / "membership.md").read_text()
    for row in result["killed"] + result["unreachable"]:
        assert row["not_reached"] == 0 or row["notice"] == many_seats.DEAD_AFTER
