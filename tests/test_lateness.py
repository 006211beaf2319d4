"""When an exchange is late: the times that a worker keeps of a link (``decent_dp.transport.lateness``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.transport.commands import Clock
from decent_dp.transport.lateness import Lateness
from decent_dp.transport.liveness import HolesAllowed, WireNeighbours
from decent_dp.transport.messages import BEAT, MOVES, Header, unpack
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_links import LinkState, PeerLink, PeerLinks
from decent_dp.transport.router import Router
from decent_dp.transport.transfers import Receiving, Sending
from decent_dp.transport.votes import PairExchange, Verdict
from tests.wires import make_links

USUAL, STEP = 2.0, 0.3


def new_pair(round_: int, *, opened: float = 100.0, joined: float = 0.0) -> PairExchange:
    receiving, sending = (of(1, (round_, 0, 0), memoryview(bytes(8)), int, print) for of in (Receiving, Sending))
    return PairExchange(receiving, sending, print, opened, joined)


@pytest.fixture
def at() -> SimpleNamespace:
    """The clock of the links."""
    return SimpleNamespace(now=101.0)


@pytest.fixture
def links(at: SimpleNamespace) -> PeerLinks:
    return make_links(now=lambda: at.now)


@pytest.fixture
def link(links: PeerLinks) -> PeerLink:
    """Eight exchanges have taken two seconds each."""
    link = links.to(1)
    for round_ in range(8):
        link.lateness.record(new_pair(round_, joined=10.0 * round_ + 10.0), Verdict.BOTH, 10.0 * round_ + 10.0 + USUAL)
    link.lateness.patience = 0.5
    return link


def test_messages_are_late_after_four_times_their_usual_time(link):
    assert link.lateness.expected_end(new_pair(8, joined=100.0), 100.5, STEP) == 100.0 + 4 * USUAL
    assert link.lateness.expected_end(new_pair(8, joined=100.0), 100.5, 60.0) == 100.0 + USUAL + 60.0
    assert Lateness().expected_end(new_pair(8, joined=100.0), 100.5, STEP) == math.inf


def policy_of(links: PeerLinks, **parts: Any) -> HolesAllowed:
    wire: Any = SimpleNamespace(links=links, clock=links.clock, **parts)
    return HolesAllowed(wire, WireNeighbours(wire, 0, 10.0), 60.0)


@pytest.fixture
def hear_beat(links: PeerLinks, link: PeerLink) -> Callable[[], None]:
    return lambda: links.hear_beat(link, Header(BEAT, MOVES, 0, (0, 0, 0), 0, 0, 0))


def test_a_peer_that_still_moves_an_earlier_exchange_is_not_late_yet(link, hear_beat):
    pair = link.votes.pairs[0] = new_pair(8)
    assert link.lateness.expected_end(pair, 100.2, STEP) == 100.2 + 0.5
    hear_beat()
    assert link.lateness.expected_end(pair, 100.2, STEP) == 101.0 + 0.5
    # An earlier exchange takes no longer than one of this link may.
    assert link.lateness.expected_end(pair, 80.0, STEP) == 80.0 + 4 * USUAL + 0.5


def test_what_it_moves_costs_no_patience_and_its_computation_does(link, at, hear_beat):
    """What it says once it is in the exchange, whose own bytes move then, excuses nothing."""
    pair = link.votes.pairs[0] = new_pair(8)
    hear_beat()
    pair.joined = 101.1
    at.now = 102.0
    hear_beat()
    link.lateness.waited(pair, 100.2, 102.0, STEP, 4.0)
    assert link.lateness.patience == pytest.approx(0.5 - 0.1 + 0.03)


@pytest.mark.parametrize("joined", [0.0, 100.0])
def test_who_does_not_answer_is_waited_for_no_longer_than_the_silent(link, links, at, monkeypatch, joined):
    """Its connection lives, as libzmq answers by itself, and its interpreter does nothing. In the exchange it is waited for,
    as giving up bytes on their way would cost the connection."""
    asked, at.now = [], 100.0
    monkeypatch.setattr(links, "beat", lambda of, ask: asked.append(of))
    policy = policy_of(links, call=lambda command: command())
    pair, end = new_pair(8, joined=joined), 100.0 + (4 * USUAL if joined else 0.5)
    link.enter(LinkState.OPEN)
    link.heard = 0.0 if joined else end + 0.05  # another message says nothing about an earlier exchange
    assert (policy.expected_end(pair, 100.0), asked) == (end, [])
    for at.now in (end + 0.1, end + 2.9):
        assert policy.expected_end(pair, 100.0) > at.now
    assert asked == [link] * 2
    at.now = end + 3.1
    assert policy.expected_end(pair, 100.0) == (pytest.approx(at.now + 0.05) if joined else end)


def test_the_clock_stands_still_while_this_process_is_stopped(monkeypatch):
    """So no peer is silent or late for that. It never goes back: once the latency of a connection became negative for good."""
    monkeypatch.setattr(time, "monotonic", lambda: now)
    now = 100.0
    clock = Clock(10.0)
    for now in (100.5, 101.5, 103.4):  # late by less than a heartbeat
        assert clock.now() == min(now, 102.5)
        clock.look()
        assert clock.now() == now
    now = 116.0
    assert clock.now() == clock.woke() == 104.4, "nothing was heard since then"
    clock.look()
    assert clock.now() == clock.woke() == pytest.approx(104.4)
    now = 117.0
    assert clock.now() == pytest.approx(105.4)


@pytest.mark.parametrize(("joined", "moved", "flags"), [(100.5, 100.9, MOVES), (0.0, 100.9, 0), (100.5, 99.0, 0)])
def test_a_heartbeat_says_that_bytes_move_of_an_exchange_in_which_both_are(link, links, joined, moved, flags):
    sent: list[bytes] = []
    link.votes.pairs[0], link.lane.moved = new_pair(8, joined=joined), moved
    link.state, link.say = LinkState.OPEN, sent.append  # type: ignore[method-assign, assignment]
    links.beat(link)
    assert unpack(sent[0], 1).flags == flags


@pytest.mark.parametrize(("busy", "lost"), [(90.0, 1), (100.0, 0)])
def test_wanted_bytes_may_wait_for_an_earlier_exchange_of_their_sender(link, links, busy, lost):
    """Without that excuse a connection that brings nothing for ``dead_after`` is made anew."""
    losses: list[str] = []
    router: Any = SimpleNamespace(_links=links, _connections=SimpleNamespace(lose=lambda _, reason: losses.append(reason)))
    link.state, link.lane.pace.due, link.since, link.lane.moved, link.says.busy = LinkState.OPEN, 1, 80.0, 90.0, busy
    Router.judge(router, link, 101.0)
    assert losses == []  # messages of groups alone have no such excuse, and wait for their timeout
    link.votes.pairs[0] = new_pair(8)
    Router.judge(router, link, 101.0)
    assert len(losses) == lost


@pytest.mark.parametrize(("times", "slow"), [(0.1, False), (2.0, True)])
def test_exchanges_are_slow_from_half_a_second_on(times, slow):
    lateness = Lateness()
    assert lateness.is_slow(0)  # as nothing is known
    for round_ in range(8):
        lateness.record(new_pair(round_, joined=10.0), Verdict.BOTH, 10.0 + times)
    assert lateness.is_slow(0) == slow


def test_a_doubt_does_not_end_while_bytes_move(link, links):
    """The peer's message is whole, and this worker's own is on its way over a slower direction."""
    policy, pair = policy_of(links), new_pair(8, joined=100.0)
    link.lane.moved = 100.0
    assert policy._end_of_doubt(pair) == math.inf
    pair.voted = 101.0
    assert policy._end_of_doubt(pair) == 104.0
    link.lane.moved = 110.0
    assert policy._end_of_doubt(pair) == 113.0
    links.has_ended = lambda _: True  # type: ignore[method-assign]  # nobody will vote
    assert policy._end_of_doubt(pair) == 101.0


@pytest.mark.parametrize(("voted", "called"), [(0.0, "abandon"), (96.9, "drop")])
def test_what_is_given_up_is_asked_for_and_what_is_in_doubt_for_too_long_is_dropped(link, links, at, voted, called):
    calls: list[str] = []
    settlement = SimpleNamespace(drop=lambda _: calls.append("drop"), abandon=lambda _, late: calls.append("abandon"))
    policy = policy_of(links, settlement=settlement, commands=SimpleNamespace(run_there=lambda command: command()))
    at.now, link.lane.moved, pair = 100.0, 90.0, new_pair(8, joined=96.0)
    pair.voted = voted
    policy.give_up(SimpleNamespace(pair=pair))  # type: ignore[arg-type]
    assert calls == [called]


def test_who_refuses_to_be_dialled_may_get_through_itself(link, links):
    """A firewall may refuse in one direction. Only after a second without a connection has the process ended."""
    link.state, link.why = LinkState.BROKEN, UnreachableError("there", "refused", is_refused=True)
    for since, has_ended in ((100.5, False), (99.5, True)):
        link.since = since
        assert links.has_ended(1) == has_ended
    assert not links.has_ended(2)
