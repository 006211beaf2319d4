"""Which member is asked for its state when connections break, members are stuck, or the network is gone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from decent_dp.errors import PeerLostError
from decent_dp.replica import state_receiver as receiver_module
from decent_dp.replica import transfer as transfer_module
from decent_dp.replica.host_copies import HostMemory
from decent_dp.replica.transfer import StateCopy, pack_message, unpack_message
from decent_dp.serialization import encode

CHUNK = 100
GONE = ConnectionError("it cannot be reached")
# Answers a request for the bytes from a place on of a copy; None: no answer comes; an error: it cannot be asked.
Answer: TypeAlias = Callable[[StateCopy, int], Any]


def give(copy: StateCopy, begin: int) -> bytes:
    return copy.chunk(begin)


def refuse(copy: StateCopy, begin: int) -> bytes:
    return pack_message({"refused": "no"})


def freeze(copy: StateCopy, begin: int) -> None:
    return None


def die(copy: StateCopy, begin: int) -> Exception:
    return GONE


def live(copy: StateCopy, begin: int) -> bytes:
    """It is in one step all the time."""
    return pack_message({"wait": "it is in a step"})


class Asked:
    """Members that are asked for their state, without processes.

    Each has a script: how it answers each visit, the last one for all further ones. A visit ends with the next one at
    another member, or when nothing more is asked for a while. Members but worker 1 are out of reach until it has been asked.

    Attributes:
        log: the ranks that were asked, and where the chunks begin that were asked for.
        members: their incarnations.
    """

    def __init__(self, **scripts: list[Answer]) -> None:
        self.scripts = {int(name[1:]): script for name, script in scripts.items()}
        self.members = dict.fromkeys(self.scripts, 0)
        self.copies = {rank: self.copy_of(rank) for rank in self.scripts}
        self.log: list[tuple[int, int]] = []
        self.neighbours = self
        self.donor: Any = None

    @staticmethod
    def copy_of(value: int) -> StateCopy:
        text, tensors = encode({"w": torch.full((100,), float(value))})
        return StateCopy(text, HostMemory().copy(tensors))

    def ask(self, rank: int, incarnation: int, raw: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self.members.get(rank) != incarnation or (rank != 1 and not self.log):
            future.set_exception(GONE)
            return future
        request, copy = unpack_message(raw)[0], self.copies[rank]
        begin = request["from"] if request["copy"] == copy.name else 0
        self.log.append((rank, begin))
        found = self.scripts[rank][0](copy, begin)
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        return future

    @property
    def visits(self) -> list[tuple[int, int]]:
        """The members that were asked one after the other, and where each of them began."""
        return [next(asked) for _, asked in itertools.groupby(self.log, key=lambda entry: entry[0])]

    def fetch(self, timeout: float = 60.0, **options: Any) -> tuple[int, float]:
        world = SimpleNamespace(timeout=timeout, rank=9)
        replica: Any = SimpleNamespace(model=torch.nn.Linear(100, 1), world=world)
        made = receiver_module.Donor

        def donor(ask: Any, stuck: float, most: float) -> Any:
            """The visit of the one before is over."""
            rank, _ = ask.args
            if self.donor is not None and len(self.scripts.get(self.donor, [])) > 1:
                del self.scripts[self.donor][0]
            self.donor = rank if rank in self.members and (rank == 1 or self.log) else None
            return made(ask, stuck, most)

        receiver_module.Donor = donor  # type: ignore[assignment, misc]
        try:
            rank, state = receiver_module._fetch_state(replica, self, lambda: dict(self.members), **options)  # type: ignore[arg-type]
        finally:
            receiver_module.Donor = made  # type: ignore[misc]
        assert len(set(state["w"].tolist())) == 1
        return rank, float(state["w"][0])


def until(end: int, then: Answer) -> Answer:
    """The bytes before ``end``, and then something else."""
    return lambda copy, begin: copy.chunk(begin) if begin < end else then(copy, begin)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(receiver_module, "_AGAIN", 0.01)
    monkeypatch.setattr(receiver_module, "_STUCK", 0.2)
    monkeypatch.setattr(transfer_module, "_CHUNK", CHUNK)
    monkeypatch.setattr(transfer_module, "_PAUSE", 0.01)


def test_the_member_that_has_given_a_part_is_asked_first_again():
    for _ in range(8):
        asked = Asked(m1=[until(200, freeze), give], m2=[die, give])
        assert asked.fetch() == (1, 1.0)


@pytest.mark.parametrize("end", [die, refuse, freeze, None])
def test_the_next_member_is_asked_when_nothing_more_comes(end):
    """Then nothing of the first one's state is used. None: it is no member any more."""
    asked = Asked(m1=[until(200, end or (lambda *_: (asked.members.pop(1) and None) or GONE)), give], m2=[give])
    if end is not None:
        del asked.scripts[1][1]
    assert asked.fetch() == (2, 2.0)
    assert asked.visits == [(1, 0), (2, 0)]


def test_a_worker_without_a_network_continues_where_it_stopped():
    """If no other member is in reach either."""
    asked = Asked(m1=[until(200, freeze), until(200, die), give], m2=[die], m3=[freeze])
    assert asked.fetch() == (1, 1.0)
    assert [visit for visit in asked.visits if visit[0] == 1] in ([(1, 0), (1, 200), (1, 200)], [(1, 0), (1, 200)])
    assert asked.log.count((1, 0)) == asked.log.count((1, 100)) == 1


@pytest.mark.parametrize("is_new", [True, False])
def test_another_process_or_one_that_has_forgotten_its_copy_begins_anew(is_new):
    asked, before = Asked(m1=[give]) if is_new else Asked(m1=[give], m2=[give]), Asked.copy_of(1)
    asked.copies[1] = before

    def forgets(copy: StateCopy, begin: int) -> Any:
        if copy is not before or begin < 200:
            return copy.chunk(begin)
        asked.copies[1] = asked.copy_of(5)
        if not is_new:
            return asked.copies[1].chunk(0)
        asked.members[1] = 5
        return GONE

    asked.scripts[1] = [forgets]
    assert asked.fetch() == (1, 5.0)


def test_the_parts_of_another_members_state_take_the_place_of_the_first_ones():
    asked = Asked(m1=[until(200, die), die], m2=[until(100, die), until(300, die), give])
    assert asked.fetch() == (2, 2.0)
    assert next(visit for visit in asked.visits if visit[0] == 2) == (2, 0)
    assert asked.log.count((2, 0)) == 1


def test_a_member_that_forgets_its_copies_is_not_asked_for_ever():
    asked = Asked(m1=[give])

    def forgets(copy: StateCopy, begin: int) -> Any:
        time.sleep(0.02)
        if begin >= 300:
            asked.copies[1] = asked.copy_of(5)
            return GONE
        return copy.chunk(begin)

    asked.scripts[1] = [forgets]
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="no worker has given its state to worker 9"):
        asked.fetch(timeout=1.0)
    assert 1 <= time.monotonic() - began < 8


def test_a_transfer_that_makes_progress_may_take_longer_than_questions(monkeypatch):
    monkeypatch.setattr(receiver_module, "_UNREACHED", 0.4)

    def slow(copy: StateCopy, begin: int) -> bytes:
        time.sleep(0.15)
        return copy.chunk(begin)

    began = time.monotonic()
    asked = Asked(m1=[until(200, die), die, lambda copy, begin: slow(copy, begin) if begin < 400 else GONE, die, slow])
    assert asked.fetch(timeout=0.5) == (1, 1.0)
    assert time.monotonic() - began > 0.6


def test_members_whose_steps_are_long_are_waited_for(monkeypatch):
    monkeypatch.setattr(receiver_module, "_UNREACHED", 0.4)
    asked = Asked(m1=[live, live, give])
    assert asked.fetch() == (1, 1.0)


def test_a_replica_that_heals_asks_each_member_once():
    asked = Asked(m1=[refuse], m2=[refuse])
    with pytest.raises(PeerLostError, match="worker 1: no"):
        asked.fetch(once=True)
    assert asked.log.count((1, 0)) == 1
