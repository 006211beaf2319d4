"""When an exchange is late: the times that a worker keeps of a link (``decent_dp.transport.link``)."""

from __future__ import annotations

import math

import pytest

from decent_dp.transport.base import Verdict
from decent_dp.transport.channels import Network, WireLink
from decent_dp.transport.link import Pair, Receiving, Sending

USUAL, STEP = 2.0, 0.3


def new_pair(round_: int, *, opened: float = 100.0, joined: float = 0.0) -> Pair:
    receiving, sending = (of(1, (round_, 0, 0), memoryview(bytes(8)), int, print) for of in (Receiving, Sending))
    return Pair(receiving, sending, print, opened, joined)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> WireLink:
    """Eight exchanges have taken two seconds each."""
    link = WireLink(1, Network(local=False))
    for round_ in range(8):
        monkeypatch.setattr("time.monotonic", lambda round_=round_: 10.0 * round_ + 10.0 + USUAL)
        link.record(new_pair(round_, joined=10.0 * round_ + 10.0), Verdict.BOTH)
    monkeypatch.setattr("time.monotonic", lambda: 101.0)
    link.patience = 0.5
    return link


def test_messages_are_late_after_four_times_their_usual_time(link):
    assert link.expected_end(new_pair(8, joined=100.0), 100.5, STEP) == 100.0 + 4 * USUAL
    assert link.expected_end(new_pair(8, joined=100.0), 100.5, 60.0) == 100.0 + USUAL + 60.0
    assert WireLink(2, link.network).expected_end(new_pair(8, joined=100.0), 100.5, STEP) == math.inf


def test_a_peer_that_still_moves_an_earlier_exchange_is_not_late_yet(link):
    pair = new_pair(8)
    assert link.expected_end(pair, 100.2, STEP) == 100.2 + 0.5
    link.busy = 100.9
    assert link.expected_end(pair, 100.2, STEP) == 100.9 + 0.5
    # What it was busy for costs no patience: of 0.8 s until it came only 0.1 s are its own, and a step earns 0.03.
    pair.joined = 101.0
    link.waited(pair, 100.2, STEP, 4.0)
    assert link.patience == pytest.approx(0.5 - 0.1 + 0.03)


def test_a_stop_of_this_process_makes_no_peer_silent_or_late(link):
    pair = link.pairs[0] = new_pair(8, joined=100.0)
    waits = link.pairs[1] = new_pair(8)
    link.heard = link.moved = 100.0
    link.was_stopped(12.0)
    assert link.expected_end(pair, 112.5, STEP) == 112.0 + 4 * USUAL
    assert (waits.opened, waits.joined) == (112.0, 0.0)  # the peer is still to come
    assert (link.heard, link.moved) == (112.0, 112.0)


@pytest.mark.parametrize(("times", "slow"), [(0.1, False), (2.0, True)])
def test_exchanges_are_slow_from_half_a_second_on(monkeypatch, times, slow):
    link = WireLink(1, Network(local=False))
    assert link.is_slow(0)  # as nothing is known
    monkeypatch.setattr("time.monotonic", lambda: 10.0 + times)
    for round_ in range(8):
        link.record(new_pair(round_, joined=10.0), Verdict.BOTH)
    assert link.is_slow(0) == slow
