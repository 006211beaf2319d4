"""What a worker does alone where faults are tolerated: the end of ``join()``, and several collectives by the same workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.faults import Tolerate
from decent_dp.membership import Epoch, MembershipMonitor
from decent_dp.membership import monitor as monitor_module
from decent_dp.replica.consistency import among_the_same, broadcast_object
from decent_dp.replica.uneven import _LastRound, finish_together
from decent_dp.transport import Replicas, Seen

REPLICAS = Replicas(((0,), (1,)))


def make_monitor() -> MembershipMonitor:
    neighbours: Any = SimpleNamespace(look=lambda: Seen(frozenset([1])), refuse_failed=lambda: None)
    transport: Any = SimpleNamespace(rank=0, world_size=2, timeout=0.3, rank_in_all=lambda rank: rank)
    return MembershipMonitor(transport, neighbours, Tolerate(), REPLICAS, None)


class Transport:
    """Worker 0 of two, as ``finish_together`` sees it: what the agreements end with, and the newest round of the other one."""

    rank, world_size, timeout, neighbours = 0, 2, 0.3, None

    def __init__(self, rounds: Callable[[], int] = lambda: 0) -> None:
        self.newest_round = rounds
        self.agreed: dict[str, Future[Mapping[int, str]]] = defaultdict(Future)
        self.said: dict[str, str] = {}
        self.plane = self

    def agree(self, name: str, text: str) -> Future[Mapping[int, str]]:
        self.said[name] = text
        return self.agreed[name]

    def missing(self, name: str) -> list[int]:
        return [1]


def test_who_has_run_out_makes_rounds_with_the_others_and_not_ahead_of_them():
    engine: Any = SimpleNamespace(round=3)
    newest, seen = iter([2, 3, 3, 4, 5, 5]), [2]

    def round_of() -> int:
        seen.append(next(newest, 5))
        return seen[-1]

    transport: Any = Transport(round_of)

    def mix_only() -> None:
        assert seen[-1] >= engine.round, "nobody else has begun this round"
        if engine.round == 5:  # in which all come here: it counts
            transport.agreed["join/7"].set_result({0: "", 1: ""})
            transport.agreed["joined/7"].set_result({0: "6", 1: "6"})
        engine.round += 1

    finish_together(transport, engine, 7, mix_only, lambda: None)
    assert (engine.round, transport.said["joined/7"]) == (6, "6")


def test_all_leave_join_after_the_same_round():
    """Another worker is in a later one when all have come."""
    engine: Any = SimpleNamespace(round=3)
    transport: Any = Transport(lambda: 2)
    transport.agreed["join/0"].set_result({0: "", 1: ""})
    transport.agreed["joined/0"].set_result({0: "3", 1: "5"})
    finish_together(transport, engine, 0, lambda: setattr(engine, "round", engine.round + 1), lambda: None)
    assert (engine.round, transport.said["joined/0"]) == (5, "3")


@pytest.mark.parametrize("absent", [{2}, set()])
def test_a_worker_that_only_this_one_has_lost_is_missed_until_others_vouch_for_it(absent):
    """An epoch that names it says that others reach it. Else this worker would want one epoch after the other. But if it was
    there when this worker promised that epoch, it may be gone for all since then."""
    monitor, asked = make_monitor(), []
    members = (0, 1, 2)
    epoch = Epoch(1, 5, 0, members, {}, "")
    given: Any = iter([None, epoch, None, None, None, None])

    def look(round_: int, *, wanted: bool) -> Any:
        asked.append(wanted)
        return next(given)

    monitor.epochs = SimpleNamespace(  # type: ignore[assignment]
        newest=epoch, is_member=True, replaced=False, look=look, keeper=SimpleNamespace(absent=frozenset(absent))
    )
    neighbours: Any = monitor.neighbours
    here, gone = Seen(frozenset([1])), Seen(frozenset([1]), frozenset([2]), frozenset([2]))
    neighbours.look = lambda: gone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor_module, "_SETTLE", -1.0)
        for round_ in range(4):
            monitor.look(round_)
        assert asked == [True, True, not absent, not absent]  # after the second it is named
        neighbours.look = lambda: here
        monitor.look(4)  # it is back,
        neighbours.look = lambda: gone
        monitor.look(5)  # and gone again
    assert asked[4:] == [False, True]


def test_the_rounds_of_others_are_asked_for_without_a_lock():
    """Threads of one process have a lock of their own for them, under which they learn the result."""
    transport: Any = Transport()
    last = _LastRound(transport, SimpleNamespace(round=3), 0)  # type: ignore[arg-type]
    held: list[bool] = []

    def newest_round() -> int:
        held.append(last._lock.locked())
        return 3

    transport.newest_round = newest_round
    assert last.begins()
    assert held == [False]


def test_join_waits_for_nobody_without_end():
    engine: Any = SimpleNamespace(round=3)
    transport: Any = Transport(lambda: 2)
    with pytest.raises(PeerTimeoutError, match=r"worker 1 not in join\(\), and no worker has made a round"):
        finish_together(transport, engine, 0, lambda: None, lambda: None)


def test_who_was_left_out_of_join_is_told():
    transport: Any = Transport(lambda: 9)
    transport.agreed["join/0"].set_result({1: ""})
    with pytest.raises(PeerLostError, match=r"took worker 0 for gone, and agreed on the end of join\(\)"):
        finish_together(transport, SimpleNamespace(round=3), 0, lambda: None, lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dies", [False, True])
def test_an_object_is_that_of_one_worker_if_the_first_dies(dies):
    """Worker 1 of three, and the first one dies in the gather."""

    def gather(message: Any) -> list[Any]:
        found = {0: {"of": 0} if 0 in control.ranks else None, 1: message, 2: None}
        control.ranks = (1, 2) if dies else control.ranks
        return [found[rank] for rank in control.ranks]

    control: Any = SimpleNamespace(ranks=(0, 1, 2), gather=gather)
    assert broadcast_object(control, 1, {"of": 1}) == {"of": int(dies)}


def test_several_collectives_are_repeated_until_the_same_workers_make_all():
    control: Any = SimpleNamespace(ranks=(0, 1, 2, 3))
    seen = []

    def call() -> int:
        seen.append(control.ranks)
        control.ranks = control.ranks[: max(2, len(control.ranks) - 1)]
        return len(control.ranks)

    assert among_the_same(control, call) == 2
    assert seen == [(0, 1, 2, 3), (0, 1, 2), (0, 1)]
