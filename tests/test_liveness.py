"""Signs of life: heartbeats, silence, what is kept for a peer, and connections that are made again, with peers made by hand."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from decent_dp.errors import PeerLostError, WireError
from decent_dp.faults import default_dead_after
from decent_dp.topo import Edge
from decent_dp.transport import mailbox as mailbox_module
from decent_dp.transport.base import ExchangeId, Verdict
from decent_dp.transport.communicators import SilentError, peer_error
from decent_dp.transport.mailbox import Mailbox
from decent_dp.transport.tcp.connection import LinkState, Pair, Receiving, Sending
from decent_dp.transport.tcp.protocol import BEAT, DATA, DROP, GRANT, NOTE, VERSION, pack, unpack
from decent_dp.transport.tcp.reactor import Reactor
from tests.test_reactor import (
    HEADER,
    SECONDS,
    SECRET,
    ByHand,
    connect_by_hand,
    identity,
    listener,
    receive,
    receive_exactly,
)

DEAD_AFTER = 1.0


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ByHand]:
    monkeypatch.setattr(Reactor.__init__, "__defaults__", (DEAD_AFTER,))
    made = ByHand()
    made.reactor._dial = unreachable
    yield made
    made.stream.close()
    made.reactor.close()


def kinds(stream: socket.socket, seconds: float) -> list[int]:
    """The kinds of the frames without bodies that come in this time."""
    found, until = [], time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        stream.settimeout(left)
        with contextlib.suppress(TimeoutError):
            found.append(unpack(receive_exactly(stream, HEADER.size), 0).kind)
    stream.settimeout(SECONDS)
    return found


def test_a_worker_gives_signs_of_life(peer):
    assert kinds(peer.stream, 0.55).count(BEAT) >= 4  # ten times in dead_after


def test_a_worker_with_much_to_read_gives_signs_of_life(peer):
    """Two hundred messages that take 10 ms each, as those of agreements do on a busy machine."""
    framing = peer.reactor._framing
    framing._on_note = lambda *_: time.sleep(0.01)
    peer.stream.sendall(pack(NOTE, (0, 0, 1)) * 200)
    assert kinds(peer.stream, 1.5).count(BEAT) >= 8


def test_a_silent_worker_that_is_waited_for_is_an_error(peer):
    began = time.monotonic()
    asked = receive(peer.reactor, 1, (0, 0, 0), 10)
    with pytest.raises(SilentError) as caught:
        asked.result(SECONDS)
    assert DEAD_AFTER * 0.9 < time.monotonic() - began < DEAD_AFTER + 1
    error = peer_error(caught.value, [1], "round 0", _NoNotes(), _timeout())
    assert isinstance(error, PeerLostError)
    assert str(error).startswith("worker 1 gave no sign of life (silent for 1 s), and round 0 needs it")
    assert "DECENT_DP_DEAD_AFTER" in str(error)


class _NoNotes:
    def read(self, ranks: Any) -> str:
        return ""


def _timeout() -> Any:
    from datetime import timedelta

    return timedelta(seconds=60)


def test_any_byte_is_a_sign_of_life(peer):
    """Also those of a message that comes slowly, which a low-water mark hides from the selector."""
    size = 400
    asked = receive(peer.reactor, 1, (0, 0, 0), size)
    raw = HEADER.pack(3 - 2, VERSION, size, 0, 0, 0, 0, size, 0) + bytes(size)
    began = time.monotonic()
    for place in range(0, len(raw), 30):
        peer.stream.sendall(raw[place : place + 30])
        time.sleep(0.15)
    assert asked.result(SECONDS) == bytes(size)
    assert time.monotonic() - began > 2 * DEAD_AFTER


def test_a_silent_worker_that_nobody_waits_for_is_no_error(peer):
    time.sleep(1.5 * DEAD_AFTER)
    assert peer.reactor.lost() == []
    peer.frame(BEAT, (0, 0, 0), 0, 0)  # it is heard again before somebody waits for it
    time.sleep(0.1)
    asked = receive(peer.reactor, 1, (0, 0, 0), 4)
    while unpack(receive_exactly(peer.stream, HEADER.size), 0).kind != GRANT:
        pass
    peer.frame(1, (0, 0, 0), 0, 4, b"fine")
    assert asked.result(SECONDS) == b"fine"


@pytest.mark.parametrize(("text", "seconds"), [("", 10.0), ("60", 60.0), (" 0.5 ", 0.5)])
def test_the_environment_sets_the_time(monkeypatch, text, seconds):
    monkeypatch.setenv("DECENT_DP_DEAD_AFTER", text)
    assert default_dead_after() == seconds


@pytest.mark.parametrize("text", ["soon", "0.1", "-1", "inf", "nan"])
def test_a_wrong_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("DECENT_DP_DEAD_AFTER", text)
    with pytest.raises(ValueError, match="the environment variable DECENT_DP_DEAD_AFTER must be a number of seconds"):
        default_dead_after()


# -- where faults are tolerated --------------------------------------------------------------------------------------------


def unreachable(rank: int, incarnation: int = 0) -> socket.socket:
    raise TimeoutError


def refused(rank: int, incarnation: int = 0) -> socket.socket:
    raise ConnectionRefusedError


EDGE, EXCHANGE = Edge([0, 1], 0.5), ExchangeId(3, 0)


def state_of(peer: ByHand) -> LinkState:
    return peer.reactor._framing.connection(1).state


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_silent_worker_is_a_hole_and_then_lost_and_then_back(peer):
    known = peer.reactor.tolerate(DEAD_AFTER)
    peer.frame(BEAT, (7, 0, 0), 0, 0)
    wait_for(lambda: known.round_of(1) == 7)
    assert known.available(EDGE, EXCHANGE)
    assert (known.silent(), known.lost(), known.living()) == ([], [], [1])
    time.sleep(0.5 * DEAD_AFTER)
    assert not known.available(EDGE, EXCHANGE)
    assert (known.silent(), known.lost(), known.living()) == ([1], [], [])
    wait_for(lambda: known.lost() == [1])
    wait_for(lambda: state_of(peer) is LinkState.BROKEN)
    time.sleep(0.1)
    assert known.silent() == [1]
    peer.stream.close()
    peer.stream = connect_by_hand(peer.name, 1)
    wait_for(lambda: known.living() == [1])
    assert known.lost() == []


@pytest.mark.parametrize("near", [True, False])
def test_a_process_that_has_ended_is_a_hole_at_once(monkeypatch, near):
    """Within a machine it is gone. Elsewhere a firewall may answer in its place, and it may come back."""
    monkeypatch.setattr(Reactor.__init__, "__defaults__", (20.0,))
    peer = ByHand(near=near)
    peer.reactor._dial = refused
    known = peer.reactor.tolerate(20.0)
    wait_for(lambda: known.living() == [1])
    peer.stream.close()
    wait_for(lambda: known.silent() == [1], 0.2)
    if near:
        wait_for(lambda: state_of(peer) is LinkState.GONE, 1.0)
        assert (known.lost(), known.left()) == ([1], [])
    else:
        time.sleep(0.1)
        assert state_of(peer) is LinkState.BROKEN
        peer.stream = connect_by_hand(peer.name, 1)
        wait_for(lambda: known.living() == [1])
        peer.stream.close()
    peer.reactor.close()


@pytest.mark.parametrize("listens", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_process_that_has_ended_elsewhere_counts_as_dead_sooner(monkeypatch, listens):
    """After 0.3 of ``dead_after``, if nobody listens at its address."""
    monkeypatch.setattr(Reactor.__init__, "__defaults__", (3.0,))
    peer = ByHand(near=False)
    peer.reactor._dial = unreachable if listens else refused
    known = peer.reactor.tolerate(3.0)
    wait_for(lambda: known.living() == [1])
    peer.stream.close()
    began = time.monotonic()
    time.sleep(0.5)
    assert (known.silent(), known.lost()) == ([1], [])
    wait_for(lambda: known.lost() == [1])
    assert listens == (time.monotonic() - began > 2.0)
    peer.reactor.close()


def test_a_peer_that_does_not_hear_this_worker_is_a_hole(peer):
    known = peer.reactor.tolerate(10.0)
    peer.stream.sendall(HEADER.pack(BEAT, VERSION, 0, 1, 0, 0, 0, 0, 5000))  # for five seconds
    wait_for(lambda: known.silent() == [1])
    peer.stream.sendall(HEADER.pack(BEAT, VERSION, 0, 1, 0, 0, 0, 0, 10))
    wait_for(lambda: known.silent() == [])


def test_what_a_peer_leaves_out_is_not_started(peer):
    known = peer.reactor.tolerate(10.0)
    peer.frame(DROP, (3, 0, 0), 0, 0)
    wait_for(lambda: not known.available(EDGE, EXCHANGE))
    assert known.available(EDGE, ExchangeId(4, 0))
    assert known.available(EDGE, ExchangeId(3, 1))


def test_a_peer_that_sends_what_was_not_due_costs_its_edge_and_no_more(peer):
    known = peer.reactor.tolerate(10.0)
    verdicts: list[Verdict] = []
    errors: list[BaseException] = []
    key, data = (0, 0, 0), memoryview(bytearray(40_000))
    sending = Sending(1, key, data, lambda: None, errors.append, ready=len(data))
    known.open(Pair(Receiving(1, key, data, lambda: None, errors.append), sending, verdicts.append))
    wait_for(lambda: bool(peer.reactor._framing.connection(1).pairs))
    peer.frame(DATA, (5, 0, 0), 0, 10, b"x" * 10)
    wait_for(lambda: verdicts == [Verdict.NEITHER])
    assert (errors, known.lost()) == ([], [1])


def test_a_worker_that_is_late_is_asked_and_answers(peer):
    peer.reactor.tolerate(50.0)
    peer.stream.sendall(HEADER.pack(BEAT, VERSION, 0, 1, 0, 0, 0, 1, 0))
    assert BEAT in kinds(peer.stream, 0.3)  # heartbeats are a second apart


@pytest.mark.parametrize("refusals", [0, 2])
def test_the_worker_of_higher_rank_connects_again(monkeypatch, refusals):
    """To the same process, not to another one at its address; also if the system refuses a thread at first."""
    monkeypatch.setattr(Reactor.__init__, "__defaults__", (20.0,))
    refused, start = [], threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name == "decent_dp-dial" and len(refused) < refusals:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    names = [listener(False), listener(False)]
    ends: list[Reactor] = []

    def dial(rank: int, incarnation: int = 0) -> socket.socket:
        return socket.create_connection(names[rank].getsockname(), SECONDS)

    for rank in (0, 1):
        ends.append(Reactor(identity(rank), SECRET, range(2), frozenset(), [names[rank]], dial, SECONDS))
    try:
        for end in ends:
            end.tolerate(20.0)
        ends[1].connect(0)
        first = ends[0]._framing.connection(1)
        wait_for(lambda: first.state is LinkState.OPEN)
        for _ in range(3):
            ends[0].call(lambda: ends[0]._framing.lose(first, "cut by the test"))
            wait_for(lambda: first.state is LinkState.OPEN and first.since > 0)
        other = ends[1]._framing.connection(0)
        wait_for(lambda: other.state is LinkState.OPEN)
        assert len(refused) == refusals
    finally:
        closing = [threading.Thread(target=end.close) for end in ends]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(SECONDS)


# -- notes -----------------------------------------------------------------------------------------------------------------


def test_old_notes_go_and_too_many_are_refused(monkeypatch):
    box = Mailbox(lambda call: call())
    for round_ in range(10):
        box.keep(1, (round_, 0, 1), b"note")
    heard: list[list[bytes]] = []
    box.when_noted([1], (9, 0, 1), heard.append)
    box.when_noted([1], (2, 0, 1), heard.append)  # was dropped: it is waited for
    assert heard == [[b"note"]]
    assert box.waits_for(1, (2, 0, 1))
    box.forget(1, (2, 0, 1))
    assert not box.waits_for(1, (2, 0, 1))
    monkeypatch.setattr(mailbox_module, "_NOTE_BYTES", 1000)
    for bucket in range(250):
        box.keep(2, (0, bucket, 1), b"note")
    with pytest.raises(WireError, match="worker 2 has sent more than 1000 bytes of notes"):
        box.keep(2, (0, 250, 1), b"note")
