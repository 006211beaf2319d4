"""Which member is asked for its state when connections break, members are stuck, or the network is gone."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decent_dp.errors import PeerLostError
from decent_dp.replica import newcomer as newcomer_module
from decent_dp.replica import transfer as transfer_module
from decent_dp.replica.transfer import StateCopy, hear, say, send_state
from decent_dp.serialization import encode
from tests.test_transfer import Cut, header_of, over_wire


class Asked:
    """Members that are asked for their state, without processes.

    Each has a script, an entry per visit, of which the last one is for all further ones: None (out of reach), or a function
    that is called with the stream and the request, and maybe sends ``copies[rank]``.

    Members but worker 1 are out of reach until it has been asked.

    Attributes:
        outage: visits after the first one in which nobody is in reach.
        log: the ranks that were asked, and the bytes of tensors that were asked for.
        members: their incarnations.
    """

    def __init__(self, **scripts: list[Any]) -> None:
        self.scripts = {int(name[1:]): script for name, script in scripts.items()}
        self.members = dict.fromkeys(self.scripts, 0)
        self.copies = {rank: self.copy_of(rank) for rank in self.scripts}
        self.log: list[tuple[int, int]] = []
        self.neighbours, self.outage = self, 0

    @staticmethod
    def copy_of(value: int) -> StateCopy:
        return StateCopy(*encode({"w": torch.full((100,), float(value))}))

    def visit(self, rank: int, incarnation: int) -> socket.socket:
        if self.log and self.outage > 0:
            self.outage -= 1
            raise TimeoutError("there is no network")
        script = self.scripts[rank]
        if self.members.get(rank) != incarnation or (rank != 1 and not self.log):
            raise ConnectionError("it cannot be reached")
        entry = script.pop(0) if len(script) > 1 else script[0]
        if entry is None:
            raise ConnectionError("it cannot be reached")

        def serve(stream: socket.socket) -> None:
            try:
                request = hear(stream)
            except OSError:  # it has only looked whether this worker can be reached
                script.insert(0, entry)
                return
            self.log.append((rank, request["from"] if request["copy"] == self.copies[rank].name else 0))
            entry(stream, self.copies[rank], self.log[-1][1])

        return over_wire(serve)

    @property
    def questions(self) -> list[tuple[int, int]]:
        """The log. A question that is repeated is there once: how often depends on the random order of members."""
        return [question for question, _ in itertools.groupby(self.log)]

    def ask(self, **options: Any) -> tuple[int, float]:
        everyone = SimpleNamespace(timeout=60.0, rank=9)
        replica: Any = SimpleNamespace(model=torch.nn.Linear(100, 1), everyone=everyone)
        rank, state = newcomer_module._fetch_state(replica, self, lambda: dict(self.members), **options)  # type: ignore[arg-type]
        assert len(set(state["w"].tolist())) == 1
        return rank, float(state["w"][0])


def part(size: int) -> Callable[..., None]:
    """So many bytes of the tensors, and the connection breaks."""

    def send(stream: Any, copy: StateCopy, begin: int) -> None:
        send_state(Cut(stream, header_of(copy) + size), copy, begin)  # type: ignore[arg-type]

    return send


def freeze(size: int) -> Callable[..., None]:
    """So many bytes of the tensors, and nothing happens any more."""

    def send(stream: Any, copy: StateCopy, begin: int) -> None:
        with contextlib.suppress(ConnectionError):
            send_state(Cut(SimpleNamespace(sendall=stream.sendall, shutdown=id), header_of(copy) + size), copy, begin)  # type: ignore[arg-type]
        stream.recv(1)

    return send


def refuse(stream: Any, copy: StateCopy, begin: int) -> None:
    say(stream, {"refused": "no"})


def forget(size: int, *, pause: float = 0.0) -> Callable[..., None]:
    """A part of a copy that it does not know any more when it is asked again."""

    def send(stream: Any, copy: StateCopy, begin: int) -> None:
        paced = SimpleNamespace(sendall=lambda raw: (time.sleep(pause * (len(raw) == 20)), stream.sendall(raw)))
        paced.shutdown = stream.shutdown
        part(size)(paced, Asked.copy_of(1), 0)

    return send


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(newcomer_module, "_AGAIN", 0.01)
    monkeypatch.setattr(newcomer_module, "_STUCK", 0.6)


def test_a_member_whose_connection_breaks_is_asked_again_at_once(short):
    asked = Asked(m1=[part(100), part(100), part(50), send_state], m2=[send_state], m3=[send_state])
    assert asked.ask() == (1, 1.0)
    assert asked.log == [(1, 0), (1, 100), (1, 200), (1, 250)]


@pytest.mark.parametrize("end", [part(0), refuse, None])
def test_the_next_member_is_asked_when_nothing_more_comes(short, end):
    """Then nothing of the first one's state is used. The first one is asked once more when the next one has been reached."""
    asked = Asked(m1=[part(100), end], m2=[send_state])
    assert asked.ask() == (2, 2.0)
    assert asked.questions == [(1, 0), *([(1, 100)] if end is not None else []), (2, 0)]


@pytest.mark.parametrize("outage", range(0, 9, 2))
def test_a_worker_without_a_network_continues_where_it_stopped(short, outage):
    """Whichever member it reaches first."""
    asked = Asked(m1=[freeze(150), send_state], m2=[send_state], m3=[send_state])
    asked.outage = outage
    assert asked.ask() == (1, 1.0)
    assert asked.log == [(1, 0), (1, 150)]


def test_a_member_that_is_stuck_is_asked_once_more_before_another_one_begins(short):
    asked = Asked(m1=[freeze(150), freeze(0)], m2=[send_state])
    assert asked.ask() == (2, 2.0)
    assert asked.questions == [(1, 0), (1, 150), (2, 0)]


def test_a_member_that_is_stuck_is_not_asked_again_at_once(short):
    asked = Asked(m1=[freeze(150), freeze(50), freeze(50), freeze(0)], m2=[send_state])
    assert asked.ask() == (2, 2.0)
    assert (1, 250) not in asked.log


def test_a_member_that_forgets_its_copy_is_not_asked_again_at_once(short):
    asked = Asked(m1=[forget(size) for size in range(20, 300, 20)], m2=[send_state])
    assert asked.ask() == (2, 2.0)
    assert len(asked.log) <= 6


@pytest.mark.parametrize("change", [{}, {1: 5}])
def test_a_member_that_is_gone_is_not_asked_to_continue(short, change):
    """It has died; or another process has its place, and another copy."""

    def dies(stream: Any, copy: StateCopy, begin: int) -> None:
        asked.members.pop(1)
        asked.members |= change
        asked.copies[1] = asked.copy_of(5)
        part(100)(stream, copy, begin)

    asked = Asked(m1=[dies, send_state], m2=[send_state])
    found = asked.ask()
    assert found in ((2, 2.0), (1, 5.0) if change else ())
    assert asked.log == [(1, 0), (found[0], 0)]


def test_a_member_that_does_not_know_its_copy_any_more_begins_anew(short):
    def another(stream: Any, copy: StateCopy, begin: int) -> None:
        send_state(stream, Asked.copy_of(5))

    asked = Asked(m1=[part(100), another], m2=[send_state])
    assert asked.ask() == (1, 5.0)
    assert asked.log == [(1, 0), (1, 100)]


def test_the_parts_of_another_members_state_take_the_place_of_the_first_ones(short):
    asked = Asked(m1=[part(100), None], m2=[part(60), part(60), send_state])
    assert asked.ask() == (2, 2.0)
    assert asked.log == [(1, 0), (2, 0), (2, 60), (2, 120)]


def test_a_member_that_forgets_its_copies_is_not_asked_for_ever(short, monkeypatch):
    monkeypatch.setattr(newcomer_module, "_LONGEST", 1.0)
    monkeypatch.setattr(transfer_module, "_PART", 20)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="no worker has given its state to worker 9"):
        Asked(m1=[forget(100, pause=0.05)], m2=[part(0)]).ask()
    assert 1 <= time.monotonic() - began < 5


def test_a_transfer_that_makes_progress_may_take_longer_than_questions(short, monkeypatch):
    monkeypatch.setattr(newcomer_module, "_LONGEST", 0.5)
    monkeypatch.setattr(newcomer_module, "_UNREACHED", 0.3)
    monkeypatch.setattr(transfer_module, "_PART", 20)

    def slow(stream: Any, copy: StateCopy, begin: int) -> None:
        paced = SimpleNamespace(sendall=lambda raw: (time.sleep(0.1 * (len(raw) == 20)), stream.sendall(raw)))
        paced.shutdown = stream.shutdown
        part(80)(paced, copy, begin)

    began = time.monotonic()
    # Out of reach after each part: the question after it is of another round.
    asked = Asked(m1=[slow, None, slow, None, slow, None, send_state])
    assert asked.ask() == (1, 1.0)
    assert asked.log == [(1, 0), (1, 80), (1, 160), (1, 240)]
    assert time.monotonic() - began > 1.2


def lives(stream: Any, copy: StateCopy, begin: int) -> None:
    """It says so, and is in one step all the time."""
    with contextlib.suppress(OSError):
        while True:
            say(stream, None)
            time.sleep(0.02)


def test_members_whose_steps_are_long_are_waited_for(short, monkeypatch):
    monkeypatch.setattr(newcomer_module, "_LONGEST", 0.5)
    monkeypatch.setattr(newcomer_module, "_UNREACHED", 0.3)
    asked = Asked(m1=[lives, lives, send_state])
    assert asked.ask() == (1, 1.0)
    assert asked.log == [(1, 0)] * 3


def test_a_replica_that_heals_asks_each_member_once(short):
    asked = Asked(m1=[refuse])
    with pytest.raises(PeerLostError, match="worker 1: no"):
        asked.ask(once=True)
    assert asked.log == [(1, 0)]
    asked = Asked(m1=[part(100), part(100), send_state])
    assert asked.ask(once=True) == (1, 1.0)
    assert asked.log == [(1, 0), (1, 100), (1, 200)]
