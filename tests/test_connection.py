"""What a connection bounds, sets and remembers: the kernel's timeouts, frames ahead, late peers and notes."""

from __future__ import annotations

import selectors
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.engine import Engine
from decent_dp.errors import WireError
from decent_dp.transport.base import Verdict
from decent_dp.transport.liveness import WireNeighbours
from decent_dp.transport.tcp import framing as framing_module
from decent_dp.transport.tcp.connection import Connection, Pair, Receiving, Sending, SharedLink, configure
from decent_dp.transport.tcp.protocol import BEAT, DATA, HEADER_SIZE, LARGEST_DATA, NOTE, OFFER, pack, unpack
from tests.test_liveness import connect_by_hand, refused, wait_for
from tests.test_reactor import ByHand, _no_heartbeats, by_hand, receive_exactly  # noqa: F401

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="options of Linux")


@pytest.mark.parametrize("dead_after", [None, 8.0])
def test_the_kernel_breaks_connections_only_where_faults_are_tolerated(dead_after):
    with socket.socket() as stream:
        configure(stream, dead_after)
        timeout = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        keepalive = stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert (timeout, bool(keepalive)) == ((8000, True) if dead_after else (0, False))
        if dead_after:
            # The first probe and three without an answer end before it.
            idle = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            between = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert idle + 3 * between <= dead_after


def test_a_body_that_is_too_large_is_refused_before_memory_is_taken():
    assert unpack(pack(DATA, (0, 0, 0), LARGEST_DATA), 1).length == LARGEST_DATA
    with pytest.raises(WireError, match=f"a body of {LARGEST_DATA + 1} bytes, where {LARGEST_DATA} are allowed"):
        unpack(pack(DATA, (0, 0, 0), LARGEST_DATA + 1), 1)


def test_a_peer_that_offers_too_much_ahead_is_lost(by_hand, monkeypatch):
    monkeypatch.setattr(framing_module, "_MOST_AHEAD", 8)
    for round_ in range(8):
        by_hand.frame(OFFER, (round_, 0, 0), 0, 10**6)
    time.sleep(0.1)
    assert by_hand.reactor.lost() == []
    by_hand.frame(OFFER, (9, 0, 0), 0, 10**6)
    wait_for(lambda: by_hand.reactor.lost() == [1])
    cause = by_hand.reactor._framing.connection(1).cause
    assert "announced 8 messages ahead" in str(cause)


def test_the_memory_of_a_frame_that_never_ends_is_let_go(by_hand):
    by_hand.stream.sendall(pack(NOTE, (0, 0, 1), 500_000, size=500_000) + bytes(1000))
    connection = by_hand.reactor._framing.connection(1)
    wait_for(lambda: connection.body is not None)
    by_hand.stream.close()
    wait_for(lambda: by_hand.reactor.lost() == [1])
    assert connection.body is None


def test_the_last_two_notes_of_a_bucket_are_sent_again(monkeypatch):
    peer = ByHand()
    peer.reactor._dial = refused
    peer.reactor.tolerate(10.0)
    for round_ in range(4):
        peer.reactor.send_note(1, (round_, 5, 1), b"note %d" % round_)
    wait_for(lambda: len(peer.reactor._framing.connection(1).notes.get(5, ())) == 2)
    peer.stream.close()
    peer.stream = connect_by_hand(peer.name, 1)
    found = []
    while len(found) < 2:
        kind, key, _, _, body = peer.read()
        if kind == NOTE:
            found.append((key, body))
    assert found == [((2, 5, 1), b"note 2"), ((3, 5, 1), b"note 3")]
    peer.stream.close()
    peer.reactor.close()


# -- late peers ------------------------------------------------------------------------------------------------------------


def make_connection() -> Connection:
    return Connection(1, SharedLink(False), selectors.DefaultSelector())


def make_pair(round_: int, *, opened: float = 0.0, joined: float = 0.0) -> Pair:
    nothing: Any = lambda *_: None  # noqa: E731
    memory = memoryview(bytearray(8))
    key = (round_, 0, 0)
    pair = Pair(Receiving(1, key, memory, nothing, nothing), Sending(1, key, memory, nothing, nothing), nothing)
    pair.opened, pair.joined = opened, joined
    return pair


def test_a_slow_peer_costs_a_tenth_of_the_time_and_one_that_is_late_once_is_waited_for():
    connection, step, most = make_connection(), 1.0, 4.0
    connection.patience = most
    now = time.monotonic()
    absent = make_pair(0, opened=now - 1)
    assert connection.expected_end(absent, now, 0.25) == pytest.approx(now + 4.0)
    # It has been waited for as long as patience lasted, and then a tenth of each step.
    connection.waited(absent, time.monotonic() - 4.0, step, most)
    assert connection.patience == pytest.approx(0.1, abs=0.01)
    spent = 0.0
    for round_ in range(1, 101):
        began = time.monotonic()
        wait = connection.expected_end(make_pair(round_, opened=began), began, 0.25) - began
        spent += wait
        connection.waited(make_pair(round_, opened=began), began - wait, step, most)
    assert spent == pytest.approx(10.0, rel=0.05)
    # Many buckets of one round earn once. One that comes in time costs nothing, and patience comes back.
    before = connection.patience
    for _ in range(5):
        connection.waited(make_pair(101, opened=1.0, joined=1.0), time.monotonic(), step, most)
    assert connection.patience == pytest.approx(before + 0.1)
    for round_ in range(102, 400):
        connection.waited(make_pair(round_, opened=1.0, joined=1.0), time.monotonic(), step, most)
    assert connection.patience == most


def test_a_peer_of_a_newer_epoch_is_not_waited_for():
    """It may make rounds without this worker, which would wait as long as for a late one, and learn of the epoch afterwards."""
    connection, now = make_connection(), time.monotonic()
    framing: Any = SimpleNamespace(connections={1: connection}, epoch=2)
    neighbours = WireNeighbours(SimpleNamespace(now=time.monotonic), framing, 0, 10.0)  # type: ignore[arg-type]
    pair = make_pair(5, opened=now - 1)
    assert neighbours.expected_end(pair, now) == pytest.approx(now + 4.0, abs=0.1)
    connection.epoch = 3
    assert neighbours.expected_end(pair, now) == now - 1
    pair.joined = now - 0.5
    assert neighbours.expected_end(pair, now) > now  # it is in the exchange


def test_a_new_connection_begins_with_the_round_and_the_epoch():
    peer = ByHand()
    peer.reactor._dial = refused
    peer.reactor.tolerate(10.0).enter_epoch(7)
    peer.reactor._framing.round = 40
    wait_for(lambda: peer.reactor.interval == 1.0 and not peer.reactor._commands)
    peer.reactor._next_beat = time.monotonic() + 60
    peer.stream.close()
    peer.stream = connect_by_hand(peer.name, 1)
    peer.stream.settimeout(5)
    frame = unpack(receive_exactly(peer.stream, HEADER_SIZE), 0)
    assert (frame.kind, frame.epoch, frame.key[0]) == (BEAT, 7, 40)
    peer.stream.close()
    peer.reactor.close()


def test_after_late_messages_meetings_are_left_out_twice_as_many_each_time():
    connection, left_out = make_connection(), []
    round_ = 0
    for _ in range(4):
        connection.give_up(make_pair(round_, opened=1.0, joined=2.0))
        count = 0
        round_ += 1
        while connection.on_break(round_):
            count, round_ = count + 1, round_ + 1
        left_out.append(count)
    assert left_out == [1, 2, 4, 8]
    connection.record(make_pair(round_, opened=1.0, joined=2.0), Verdict.BOTH)
    connection.give_up(make_pair(round_ + 1, opened=1.0, joined=2.0))
    assert [connection.on_break(round_ + 2), connection.on_break(round_ + 3)] == [True, False]


def test_an_exchange_is_complete_with_both_messages():
    pair = make_pair(0)
    pair.receiving.received = 8
    assert not pair.complete  # this worker could not decode the other's message without its own
    pair.sending.ready = 8
    assert pair.complete
    pair.receiving.received = 7
    assert not pair.complete


# -- a worker that is behind -----------------------------------------------------------------------------------------------


class Others:
    """What a worker knows of the others. Of four workers in a ring, worker 0 meets 1 in even rounds and 3 in odd ones."""

    def __init__(self, rounds: dict[int, int], dropped: set[tuple[int, int]]) -> None:
        self.rounds, self.dropped, self.skipped = rounds, dropped, list[tuple[int, int]]()

    def living(self) -> list[int]:
        return [1, 2, 3]

    def round_of(self, rank: int) -> int:
        return self.rounds.get(rank, -1)

    def has_dropped(self, others: list[int], exchange_id: Any) -> bool:
        return any((rank, exchange_id.round) in self.dropped for rank in others)

    def skip(self, edge: Any, exchange_id: Any) -> None:
        self.skipped.append((max(set(edge.ranks) - {0}), exchange_id.round))


@pytest.mark.parametrize(
    ("rounds", "dropped", "goes_to"),
    [
        ({}, set(), 10),
        ({1: 11, 3: 11}, set(), 10),  # in its partner's last round its exchange may still arrive
        ({1: 40, 3: 39}, set(), 40),
        ({1: 39, 3: 43}, set(), 43),
        ({1: 39, 3: 43}, {(1, 38), (3, 39)}, 43),
        ({1: 11, 3: 11}, {(1, 10)}, 11),  # the partner has not waited, and the next one is there
        ({1: 11, 3: 12}, {(1, 10), (3, 11)}, 12),
        ({1: 10, 3: 10}, {(1, 10)}, 10),  # nobody is ahead: one round is left out
    ],
)
def test_who_is_behind_goes_on_in_the_round_of_the_others(rounds, dropped, goes_to):
    from decent_dp.compression import Lossless
    from decent_dp.rules import Gossip
    from decent_dp.topo import make_topology

    others: Any = Others(rounds, dropped)
    topology = make_topology("ring", local_world_size=1, world_size=4, rank=0)
    transport: Any = SimpleNamespace(rank=0)
    engine = Engine(transport, topology, Gossip(), Lossless, others)
    bucket: Any = SimpleNamespace(topology=topology, number=0)
    engine.buckets, engine.round = [bucket], 10
    engine.catch_up()
    assert engine.round == goes_to
    assert engine.holes == goes_to - 10
    assert {rank for rank, _ in others.skipped} <= {1, 3}
    assert max((round_ for _, round_ in others.skipped), default=9) == goes_to - 1


def test_a_new_connection_measures_its_pace_anew():
    """It may take another, slower route, on which large frames would hold up everything behind them."""
    connection, (here, there) = make_connection(), socket.socketpair()
    old = connection.coming, connection.going
    connection.open(here, None)
    assert connection.coming is not old[0]
    assert connection.going is not old[1]
    connection.close()
    there.close()


@pytest.mark.parametrize(("sources", "window"), [(1, 2**19), (7, 7 * 2**18), (40, 12 * 2**18)])
def test_a_group_may_have_a_chunk_of_each_peer_in_flight(sources, window):
    link = SharedLink(local=False)
    one, other = (Connection(peer, link, selectors.DefaultSelector()) for peer in (1, 2))
    other.count_granted(1)
    assert one.window(sources) == window
    other.count_arrived(1)
    assert link.outstanding == other.outstanding == 0


def test_messages_of_groups_do_not_wait_for_earlier_rounds(monkeypatch):
    link = SharedLink(local=False)
    connections = [Connection(peer, link, selectors.DefaultSelector()) for peer in (1, 2)]
    monkeypatch.setattr(Connection, "is_full_before", lambda self, round_: True)
    for step, waits in ((0, True), (3, False)):
        sending = Sending(1, (5, 0, 2), memoryview(b"x"), lambda: None, lambda error: None, step)
        assert link.must_wait(sending, connections) == waits
        assert link.waiting == waits
