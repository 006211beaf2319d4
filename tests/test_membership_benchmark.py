"""The protocol of members with many seats: a short form of ``make bench-membership``."""

from __future__ import annotations

import pytest

from benchmarks import many_seats, membership
from decent_dp.membership import Epoch


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
