"""When an exchange is late: the times that a worker keeps of a link (``decent_dp.transport.peer_link``)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.transport.lateness import Lateness
from decent_dp.transport.liveness import HolesAllowed, WireNeighbours
from decent_dp.transport.messages import BEAT, MOVES, Header, unpack
from decent_dp.transport.peer_link import LinkState, PeerLink
from decent_dp.transport.peer_links import PeerLinks
from decent_dp.transport.transfers import PairExchange, Receiving, Sending
from decent_dp.transport.votes import Verdict
from decent_dp.transport.wire import Wire

USUAL, STEP = 2.0, 0.3


def new_pair(round_: int, *, opened: float = 100.0, joined: float = 0.0) -> PairExchange:
    receiving, sending = (of(1, (round_, 0, 0), memoryview(bytes(8)), int, print) for of in (Receiving, Sending))
    return PairExchange(receiving, sending, print, opened, joined)


@pytest.fixture
def links() -> PeerLinks:
    return PeerLinks(frozenset())


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, links: PeerLinks) -> PeerLink:
    """Eight exchanges have taken two seconds each."""
    link = links.to(1)
    for round_ in range(8):
        monkeypatch.setattr("time.monotonic", lambda round_=round_: 10.0 * round_ + 10.0 + USUAL)
        link.lateness.record(new_pair(round_, joined=10.0 * round_ + 10.0), Verdict.BOTH)
    monkeypatch.setattr("time.monotonic", lambda: 101.0)
    link.lateness.patience = 0.5
    return link


def test_messages_are_late_after_four_times_their_usual_time(link):
    assert link.lateness.expected_end(new_pair(8, joined=100.0), 100.5, STEP) == 100.0 + 4 * USUAL
    assert link.lateness.expected_end(new_pair(8, joined=100.0), 100.5, 60.0) == 100.0 + USUAL + 60.0
    assert Lateness().expected_end(new_pair(8, joined=100.0), 100.5, STEP) == math.inf


def policy_of(wire: Any) -> HolesAllowed:
    return HolesAllowed(wire, WireNeighbours(wire, 0, 10.0), 60.0)


def hear_beat(link: PeerLink, flags: int = MOVES) -> None:
    PeerLinks(frozenset()).hear_beat(link, Header(BEAT, flags, 0, (0, 0, 0), 0, 0, 0))


def test_a_peer_that_still_moves_an_earlier_exchange_is_not_late_yet(link):
    pair = link.pairs[0] = new_pair(8)
    assert link.lateness.expected_end(pair, 100.2, STEP) == 100.2 + 0.5
    hear_beat(link)
    assert link.lateness.expected_end(pair, 100.2, STEP) == 101.0 + 0.5
    # An earlier exchange takes no longer than one of this link may.
    assert link.lateness.expected_end(pair, 80.0, STEP) == 80.0 + 4 * USUAL + 0.5


def test_what_it_moves_costs_no_patience_and_its_computation_does(link, monkeypatch):
    """What it says once it is in the exchange, whose own bytes move then, excuses nothing."""
    pair = link.pairs[0] = new_pair(8)
    hear_beat(link)
    pair.joined = 101.1
    monkeypatch.setattr("time.monotonic", lambda: 102.0)
    hear_beat(link)
    link.lateness.waited(pair, 100.2, STEP, 4.0)
    assert link.lateness.patience == pytest.approx(0.5 - 0.1 + 0.03)


@pytest.mark.parametrize("joined", [0.0, 100.0])
def test_who_does_not_answer_is_waited_for_no_longer_than_the_silent(link, links, monkeypatch, joined):
    """Its connection lives, as libzmq answers by itself, and its interpreter does nothing. In the exchange it is waited for,
    as giving up bytes on their way would cost the connection."""
    asked, now = [], 100.0
    monkeypatch.setattr(links, "beat", lambda of, ask: asked.append(of))
    policy = policy_of(SimpleNamespace(call=lambda command: command(), now=lambda: now, links=links))
    pair, end = new_pair(8, joined=joined), 100.0 + (4 * USUAL if joined else 0.5)
    link.enter(LinkState.OPEN)
    link.heard = 0.0 if joined else end + 0.05  # another message says nothing about an earlier exchange
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert (policy.expected_end(pair, 100.0), asked) == (end, [])
    for now in (end + 0.1, end + 2.9):
        assert policy.expected_end(pair, 100.0) > now
    assert asked == [link] * 2
    now = end + 3.1
    assert policy.expected_end(pair, 100.0) == (pytest.approx(now + 0.05) if joined else end)


def test_a_stop_of_this_process_makes_no_peer_silent_or_late(link, monkeypatch):
    pair = link.pairs[0] = new_pair(8, joined=100.0)
    waits = link.pairs[1] = new_pair(8)
    link.heard = link.moved = link.busy = 100.0
    link.told = 112.9  # was read since
    monkeypatch.setattr("time.monotonic", lambda: 113.0)
    link.was_stopped(12.0)
    assert link.lateness.expected_end(pair, 112.5, STEP) == 112.0 + 4 * USUAL
    assert (waits.opened, waits.joined) == (112.0, 0.0)  # the peer is still to come
    assert (link.heard, link.moved, link.busy, link.told) == (112.0, 112.0, 112.0, 113.0)


@pytest.mark.parametrize(("joined", "moved", "flags"), [(100.5, 100.9, MOVES), (0.0, 100.9, 0), (100.5, 99.0, 0)])
def test_a_heartbeat_says_that_bytes_move_of_an_exchange_in_which_both_are(link, links, joined, moved, flags):
    sent: list[bytes] = []
    link.pairs[0], link.moved = new_pair(8, joined=joined), moved
    link.state, link.say = LinkState.OPEN, sent.append  # type: ignore[method-assign, assignment]
    links.beat(link)
    assert unpack(sent[0], 1).flags == flags


@pytest.mark.parametrize(("busy", "lost"), [(90.0, 1), (100.0, 0)])
def test_wanted_bytes_may_wait_for_an_earlier_exchange_of_their_sender(link, busy, lost):
    """Without that excuse a connection that brings nothing for ``dead_after`` is made anew."""
    losses: list[str] = []
    wire = SimpleNamespace(_dead_after=10.0, connections=SimpleNamespace(lose=lambda of, reason: losses.append(reason)))
    link.state, link.pace.due, link.since, link.moved, link.busy = LinkState.OPEN, 1, 80.0, 90.0, busy
    Wire._judge(wire, link, 101.0)  # type: ignore[arg-type]
    assert losses == []  # messages of groups alone have no such excuse, and wait for their timeout
    link.pairs[0] = new_pair(8)
    Wire._judge(wire, link, 101.0)  # type: ignore[arg-type]
    assert len(losses) == lost


@pytest.mark.parametrize(("times", "slow"), [(0.1, False), (2.0, True)])
def test_exchanges_are_slow_from_half_a_second_on(monkeypatch, times, slow):
    lateness = Lateness()
    assert lateness.is_slow(0)  # as nothing is known
    monkeypatch.setattr("time.monotonic", lambda: 10.0 + times)
    for round_ in range(8):
        lateness.record(new_pair(round_, joined=10.0), Verdict.BOTH)
    assert lateness.is_slow(0) == slow


def test_a_doubt_does_not_end_while_bytes_move(link, links):
    """The peer's message is whole, and this worker's own is on its way over a slower direction."""
    link.moved, ended = 100.0, False
    policy, pair = policy_of(SimpleNamespace(links=links, has_ended=lambda _: ended)), new_pair(8, joined=100.0)
    assert policy._end_of_doubt(pair) == math.inf
    pair.voted = 101.0
    assert policy._end_of_doubt(pair) == 104.0
    link.moved = 110.0
    assert policy._end_of_doubt(pair) == 113.0
    ended = True  # nobody will vote
    assert policy._end_of_doubt(pair) == 101.0


@pytest.mark.parametrize(("voted", "called"), [(0.0, "abandon"), (96.9, "drop")])
def test_what_is_given_up_is_asked_for_and_what_is_in_doubt_for_too_long_is_dropped(link, links, voted, called):
    calls: list[str] = []
    settlement = SimpleNamespace(drop=lambda _: calls.append("drop"), abandon=lambda _, late: calls.append("abandon"))
    wire: Any = SimpleNamespace(
        links=links,
        settlement=settlement,
        commands=SimpleNamespace(run_there=lambda command: command()),
        now=lambda: 100.0,
        patience=lambda *_: 0.0,
        has_ended=lambda _: False,
    )
    link.moved, pair = 90.0, new_pair(8, joined=96.0)
    pair.voted = voted
    policy_of(wire).give_up(SimpleNamespace(pairs=[pair]))  # type: ignore[arg-type]
    assert calls == [called]


def test_who_refuses_to_be_dialled_may_get_through_itself(link, links):
    """A firewall may refuse in one direction. Only after a second without a connection has the process ended."""
    wire: Any = SimpleNamespace(links=links)
    link.refused, link.since = True, 100.5
    assert not Wire.has_ended(wire, 1)
    link.since = 99.5
    assert Wire.has_ended(wire, 1)
    assert not Wire.has_ended(wire, 2)
