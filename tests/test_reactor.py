"""Links by themselves: threads of one process that are connected, and peers made by hand."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from decent_dp.errors import WireError
from decent_dp.transport.tcp import connection, protocol, reactor
from decent_dp.transport.tcp.connection import WINDOW, Receiving, Sending, configure
from decent_dp.transport.tcp.descriptors import own
from decent_dp.transport.tcp.greeting import Greeting, GreetingError, Identity, greet
from decent_dp.transport.tcp.protocol import DATA, GRANT, HEADER_SIZE, NOTE, OFFER, SMALL, VERSION, Key
from decent_dp.transport.tcp.reactor import Reactor

SECRET, RUN = b"open sesame seed", bytes(range(16))
SECONDS = 20


class HEADER:
    """Headers with all their fields but the epoch and the checksums."""

    size = HEADER_SIZE

    @staticmethod
    def pack(kind: int, version: int, length: int, round_: int, bucket: int, slot: int, *fields: int) -> bytes:
        made = protocol._FIELDS.pack(kind, version, length, 0, round_, bucket, slot, *fields, 0)
        return made + protocol._CHECKSUM.pack(zlib.crc32(made))

    @staticmethod
    def unpack(raw: bytes) -> tuple[int, ...]:
        kind, version, length, _, *rest, _ = protocol._FIELDS.unpack_from(raw)
        return kind, version, length, *rest


@pytest.fixture(autouse=True)
def _no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers by hand count frames."""
    monkeypatch.setattr(reactor, "_BEAT", 1e6)
    monkeypatch.setattr(Reactor.__init__, "__defaults__", (1e7,))


def listener(local: bool) -> socket.socket:
    made = socket.socket(socket.AF_UNIX if local else socket.AF_INET, socket.SOCK_STREAM)
    made.bind("" if local else ("127.0.0.1", 0))
    made.listen(1024)
    made.setblocking(False)
    return made


def reach(name: Any, buffer: int | None = None) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX if isinstance(name, bytes) else socket.AF_INET, socket.SOCK_STREAM)
    stream.settimeout(SECONDS)
    if buffer:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    try:
        stream.connect(name)
    except OSError:
        stream.close()
        raise
    return stream


def identity(rank: int) -> Identity:
    return Identity(RUN, rank, b"worker %d" % rank)


def make_reactor(
    rank: int,
    listeners: list[socket.socket],
    dial: Any = reach,
    local: frozenset[int] = frozenset(),
    timeout: float = SECONDS,
    n: int = 8,
) -> Reactor:
    return Reactor(identity(rank), SECRET, range(n), local, listeners, dial, timeout)


def connect_by_hand(name: Any, rank: int, buffer: int | None = None) -> socket.socket:
    """A connection of worker ``rank`` to worker 0."""
    stream = reach(name, buffer)
    try:
        greet(stream, identity(rank), SECRET, 0, SECONDS)
    except OSError:
        stream.close()
        raise
    return stream


def receive_exactly(stream: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = stream.recv(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


class Net:
    """Workers of one process: ``n`` of ``size``."""

    def __init__(self, n: int, *, near: bool = False, size: int = 8) -> None:
        listeners = [listener(near) for _ in range(n)]
        self.names = [made.getsockname() for made in listeners]
        others = [frozenset(set(range(n)) - {rank}) if near else frozenset() for rank in range(n)]
        self.links = [
            make_reactor(rank, [listeners[rank]], lambda peer, _=0: reach(self.names[peer]), others[rank], n=size)
            for rank in range(n)
        ]

    def connect(self) -> None:
        for rank, links in enumerate(self.links):
            for peer in range(rank):
                links.connect(peer)

    def close(self) -> None:
        closing = [threading.Thread(target=links.close) for links in self.links]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture(params=[False, True], ids=["tcp", "unix"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(3, near=request.param)
    made.connect()
    yield made
    made.close()


def send(links: Reactor, peer: int, key: Key, data: bytes, ready: int | None = None) -> tuple[Sending, Future[None]]:
    future: Future[None] = Future()
    sending = Sending(
        peer,
        key,
        memoryview(data),
        lambda: future.set_result(None),
        lambda error: future.set_exception(error),
        ready=len(data) if ready is None else ready,
    )
    links.send(sending)
    if ready is None:
        links.advance(sending, len(data))
    return sending, future


def receive(links: Reactor, peer: int, key: Key, size: int) -> Future[bytes]:
    future: Future[bytes] = Future()
    memory = bytearray(size)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    links.receive(Receiving(peer, key, memoryview(memory), lambda: future.set_result(bytes(memory)), fail))
    return future


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


# -- messages --------------------------------------------------------------------------------------------------------------


def test_messages_arrive_whatever_is_asked_for_first(net):
    sizes = [1, 0, 100, 300_000, 5_000_000, 7, 0]
    for first in ("send", "receive"):
        asked, sent = {}, []
        for what in (first, "receive" if first == "send" else "send"):
            for number, size in enumerate(sizes):
                for a in range(3):
                    for b in {0, 1, 2} - {a}:
                        key = (len(first), number, a)
                        if what == "send":
                            sent.append(send(net.links[a], b, key, content(100 * number + 10 * a + b, size))[1])
                        else:
                            asked[a, b, number] = receive(net.links[b], a, key, size)
            time.sleep(0.05)
        for (a, b, number), future in asked.items():
            assert future.result(SECONDS) == content(100 * number + 10 * a + b, sizes[number])
        for done in sent:
            assert done.result(SECONDS) is None


def test_only_what_is_ready_is_sent(net):
    data = bytearray(400_000)
    asked = receive(net.links[1], 0, (0, 0, 0), len(data))
    sending, sent = send(net.links[0], 1, (0, 0, 0), data, ready=0)  # type: ignore[arg-type]
    expected = content(1, len(data))
    for stop in (1, 1000, 200_000, 399_999, 400_000):
        time.sleep(0.02)
        assert not asked.done()
        data[:stop] = expected[:stop]
        net.links[0].advance(sending, stop)
    assert asked.result(SECONDS) == expected
    sent.result(SECONDS)


def test_notes(net):
    heard: Future[list[bytes]] = Future()
    net.links[0].send_note(2, (5, 1, 1), b"from 0")
    time.sleep(0.05)
    net.links[2].mailbox.when_noted([0, 1], (5, 1, 1), heard.set_result)
    net.links[0].send_note(2, (6, 1, 1), b"not this one")
    time.sleep(0.05)
    assert not heard.done()
    net.links[1].send_note(2, (5, 1, 1), b"")
    assert heard.result(SECONDS) == [b"from 0", b""]
    later: Future[list[bytes]] = Future()
    net.links[2].mailbox.when_noted([0], (6, 1, 1), later.set_result)  # is there
    assert later.result(SECONDS) == [b"not this one"]


def test_many_rounds_with_random_delays():
    """No wake-up is lost: every worker starts, asks and advances at times of its own."""
    for near in (False, True):
        net = Net(3, near=near)
        net.connect()
        errors: list[BaseException] = []

        def work(rank: int, links: Reactor, errors: list[BaseException]) -> None:
            draw = random.Random(rank)
            try:
                for round_ in range(120):
                    peers = sorted({0, 1, 2} - {rank})
                    size = 1 + 77 * round_ if round_ % 40 else 1_500_000
                    heard: Future[list[bytes]] = Future()
                    links.mailbox.when_noted(peers, (round_, 0, 1), heard.set_result)
                    waited = []
                    for peer in peers:
                        links.send_note(peer, (round_, 0, 1), b"%d" % rank)
                        if draw.random() < 0.3:
                            time.sleep(draw.random() * 0.003)
                        sending, sent = send(links, peer, (round_, 0, 0), content(rank, size), ready=0)
                        waited += [receive(links, peer, (round_, 0, 0), size), sent]
                        if draw.random() < 0.3:
                            links.advance(sending, size // 2)
                            time.sleep(draw.random() * 0.003)
                        links.advance(sending, size)
                    assert heard.result(SECONDS) == [b"%d" % peer for peer in peers]
                    for peer, future in zip(peers, waited[::2], strict=True):
                        assert future.result(SECONDS) == content(peer, size)
                    for future in waited:
                        future.result(SECONDS)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(*item, errors), daemon=True) for item in enumerate(net.links)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)
        net.close()


def test_commands_of_a_callback_are_executed(net):
    """Each message is sent when the one before it has been written, in the links' own thread."""
    count = 200
    asked = [receive(net.links[1], 0, (number, 0, 0), 100) for number in range(count)]
    time.sleep(0.1)

    def follow(number: int) -> None:
        if number < count:
            data = memoryview(content(number, 100))
            done = lambda: follow(number + 1)  # noqa: E731
            net.links[0].send(Sending(1, (number, 0, 0), data, done, lambda error: None, ready=100))
            net.links[0].call(lambda: None)

    follow(0)
    for number, future in enumerate(asked):
        assert future.result(SECONDS) == content(number, 100)


def test_leaving_at_once_loses_nothing(net):
    data = content(3, 20_000_000)
    asked = receive(net.links[1], 0, (0, 0, 0), len(data))
    _, sent = send(net.links[0], 1, (0, 0, 0), data)
    net.links[0].send_note(2, (0, 0, 1), b"good bye")
    sent.result(SECONDS)
    net.links[0].close()
    assert asked.result(SECONDS) == data
    heard: Future[list[bytes]] = Future()
    net.links[2].mailbox.when_noted([0], (0, 0, 1), heard.set_result)
    assert heard.result(SECONDS) == [b"good bye"]
    net.links[0].close()  # may be called again
    with pytest.raises(RuntimeError, match="closed"):
        net.links[0].send_note(1, (0, 0, 1), b"")


def test_a_message_to_who_has_left_fails(net):
    asked = receive(net.links[1], 0, (0, 0, 0), 10)
    _, sent = send(net.links[1], 0, (0, 0, 0), bytes(10))
    net.links[0].close()
    for future in (asked, sent):
        with pytest.raises(ConnectionError):
            future.result(SECONDS)
    # And what comes later fails at once; others go on.
    with pytest.raises(ConnectionError):
        receive(net.links[1], 0, (1, 0, 0), 10).result(SECONDS)
    other = receive(net.links[1], 2, (1, 0, 0), 10)
    send(net.links[2], 1, (1, 0, 0), bytes(10))
    assert other.result(SECONDS) == bytes(10)


# -- peers made by hand ----------------------------------------------------------------------------------------------------


class ByHand:
    """Worker 1 of two, frame by frame."""

    def __init__(self, *, near: bool = False, greets: bool = True, buffer: int | None = None) -> None:
        made = own(lambda: listener(False))
        self.name = made.getsockname()
        self.reactor = make_reactor(0, [made], local=frozenset({1} if near else ()))
        self.stream = reach(self.name, buffer)
        if greets:
            self.greet()

    def greet(self) -> None:
        greet(self.stream, identity(1), SECRET, 0, SECONDS)

    def frame(self, kind: int, key: Key, offset: int, size: int, body: bytes = b"", version: int = VERSION) -> None:
        self.stream.sendall(HEADER.pack(kind, version, len(body), *key, offset, size, 0) + body)

    def grant(self, key: Key, upto: int, size: int) -> None:
        self.frame(GRANT, key, upto, size)

    def read(self) -> tuple[int, Key, int, int, bytes]:
        kind, version, length, round_, bucket, slot, offset, size, _ = HEADER.unpack(receive_exactly(self.stream, HEADER.size))
        assert version == VERSION
        return kind, (round_, bucket, slot), offset, size, receive_exactly(self.stream, length)

    def quiet(self) -> bool:
        """Nothing comes for a while."""
        self.stream.settimeout(0.15)
        try:
            return not self.stream.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.stream.settimeout(SECONDS)


@pytest.fixture
def by_hand() -> Iterator[ByHand]:
    made = ByHand()
    yield made
    made.stream.close()
    made.reactor.close()


def test_what_is_announced_early_waits_while_later_rounds_go_on(by_hand):
    """A group asks for the parts of a round when it has memory for them, and perhaps after those of later rounds."""
    data = content(3, SMALL + 1)
    for round_ in (0, 1):
        by_hand.frame(OFFER, (round_, 0, 0), 0, len(data))
        by_hand.grant((round_, 0, 1), 4, 4)
    arrived = receive(by_hand.reactor, 1, (5, 0, 0), 4)  # the offers have been read when this has come
    assert by_hand.read()[:2] == (GRANT, (5, 0, 0))
    by_hand.frame(DATA, (5, 0, 0), 0, 4, b"past")
    assert arrived.result(SECONDS) == b"past"
    for round_ in (1, 0):
        waiting = receive(by_hand.reactor, 1, (round_, 0, 0), len(data))
        assert by_hand.read()[:2] == (GRANT, (round_, 0, 0))
        by_hand.frame(DATA, (round_, 0, 0), 0, len(data), data)
        assert waiting.result(SECONDS) == data
        send(by_hand.reactor, 1, (round_, 0, 1), b"sent")
        assert by_hand.read() == (DATA, (round_, 0, 1), 0, 4, b"sent")


def test_no_more_is_sent_than_was_asked_for(by_hand):
    data = content(1, 3000)
    _, sent = send(by_hand.reactor, 1, (0, 0, 0), data)
    assert by_hand.quiet()
    got = b""
    for upto in (1, 1000, 2999, 3000):
        by_hand.grant((0, 0, 0), upto, 3000)
        kind, key, offset, size, body = by_hand.read()
        assert (kind, key, offset, size) == (DATA, (0, 0, 0), len(got), 3000)
        got += body
        assert len(got) == upto
        assert by_hand.quiet()
    assert got == data
    sent.result(SECONDS)


@pytest.mark.parametrize("near", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_more_is_asked_for_than_the_window(near):
    by_hand = ByHand(near=near)
    sizes = [WINDOW * 12 + 12345, SMALL + 1, WINDOW // 2, WINDOW]
    window = WINDOW * (4 if near else 1)
    asked = [receive(by_hand.reactor, 1, (0, bucket, 0), size) for bucket, size in enumerate(sizes)]
    assert by_hand.quiet(), "nothing is asked for before it is offered"
    for bucket, size in enumerate(sizes):
        by_hand.frame(OFFER, (0, bucket, 0), 0, size)
    granted, given = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    while any(given[bucket] < size for bucket, size in enumerate(sizes)):
        if given == granted or not by_hand.quiet():
            kind, (_, bucket, _), upto, size, _ = by_hand.read()
            assert (kind, size) == (GRANT, sizes[bucket])
            assert granted[bucket] < upto <= size
            # In the order of need, and at least enough of it to be worth a frame.
            assert all(granted[earlier] == sizes[earlier] for earlier in range(bucket))
            assert upto == size or upto - granted[bucket] >= WINDOW // 4
            granted[bucket] = upto
            # A link of which nothing is known gets little; this one then turns out to be slow.
            assert sum(granted.values()) - sum(given.values()) <= (8 * WINDOW if any(given.values()) else window)
            continue
        bucket = next(b for b in range(4) if given[b] < granted[b])
        part = min(granted[bucket] - given[bucket], WINDOW)
        by_hand.frame(DATA, (0, bucket, 0), given[bucket], sizes[bucket], bytes([bucket]) * part)
        given[bucket] += part
    for bucket, (future, size) in enumerate(zip(asked, sizes, strict=True)):
        assert future.result(SECONDS) == bytes([bucket]) * size
    by_hand.stream.close()
    by_hand.reactor.close()


def test_a_message_that_is_late_does_not_keep_a_later_one(by_hand):
    """The link goes to what was offered; a small message is asked for at once."""
    late, there = (receive(by_hand.reactor, 1, (0, bucket, 0), 10 * WINDOW) for bucket in (0, 1))
    small = receive(by_hand.reactor, 1, (0, 2, 0), 100)
    assert by_hand.read()[:3] == (GRANT, (0, 2, 0), 100)
    by_hand.frame(OFFER, (0, 1, 0), 0, 10 * WINDOW)
    kind, key, upto, _, _ = by_hand.read()
    assert (kind, key) == (GRANT, (0, 1, 0))
    assert 0 < upto < 10 * WINDOW
    by_hand.frame(DATA, (0, 2, 0), 0, 100, bytes(100))
    assert small.result(SECONDS) == bytes(100)
    assert not late.done()
    assert not there.done()


@pytest.mark.parametrize("posted_late", [False, True])
def test_the_earliest_round_is_sent_first(posted_late):
    """An earlier message that becomes ready passes a later one whose frames wait for a slow wire, whenever it was posted."""
    by_hand = ByHand(buffer=4096)
    size = 4_000_000
    made = {
        bucket: send(by_hand.reactor, 1, (0, bucket, 0), bytes(size), ready=0)[0]
        for bucket in ((1, 0) if posted_late else (0, 1))
    }
    early, late = made[0], made[1]
    for bucket in range(2):
        by_hand.grant((0, bucket, 0), size, size)
    by_hand.reactor.advance(late, size)
    time.sleep(0.2)  # as much of it as the kernel takes
    by_hand.reactor.advance(early, size)
    time.sleep(0.05)
    seen = []
    while len(seen) < 2 or seen[-1][1] < size or sum(1 for _, stop in seen if stop == size) < 2:
        _, (_, bucket, _), offset, _, body = by_hand.read()
        seen.append((bucket, offset + len(body)))
    first = next(i for i, (bucket, _) in enumerate(seen) if bucket == 0)
    last = next(i for i, entry in enumerate(seen) if entry == (0, size))
    assert {bucket for bucket, _ in seen[first : last + 1]} == {0}, "once it is ready nothing else goes before its end"
    assert max(stop for bucket, stop in seen[:first] if bucket == 1) < size // 2
    by_hand.stream.close()
    by_hand.reactor.close()


def test_leaving_waits_for_a_slow_reader():
    """A connection that is closed while its peer still writes is broken off, and takes with it what has not arrived."""
    by_hand = ByHand(buffer=4096)
    size = 40_000  # what the kernel takes at once, and the reader's does not
    data = content(5, size)
    _, sent = send(by_hand.reactor, 1, (0, 0, 0), data)
    by_hand.grant((0, 0, 0), size, size)
    sent.result(SECONDS)
    leaving = threading.Thread(target=by_hand.reactor.close)
    leaving.start()
    time.sleep(0.2)
    with contextlib.suppress(ConnectionError):
        for _ in range(3):
            by_hand.frame(NOTE, (0, 0, 1), 0, 1, b"x")
            time.sleep(0.05)
    got = b""
    while len(got) < size:
        got += by_hand.read()[4]
    assert got == data
    leaving.join(SECONDS)
    assert not leaving.is_alive()
    by_hand.stream.close()


def test_a_grant_does_not_wait_for_data(by_hand):
    """Control frames pass messages that have not been written yet."""
    size = 6_000_000
    send(by_hand.reactor, 1, (0, 0, 0), bytes(size))
    by_hand.grant((0, 0, 0), size, size)
    time.sleep(0.1)
    receive(by_hand.reactor, 1, (1, 0, 0), 10)
    kinds, taken = [], 0
    while GRANT not in kinds:
        kind, _, _, _, body = by_hand.read()
        kinds.append(kind)
        taken += len(body)
    assert taken < size


BAD = {
    "unasked": lambda peer: peer.frame(DATA, (9, 9, 0), 0, 10, bytes(10)),
    "too early": lambda peer: peer.frame(DATA, (0, 0, 0), 5, 10, bytes(5)),
    "too much": lambda peer: peer.frame(DATA, (0, 0, 0), 0, 10, bytes(11)),
    "another size": lambda peer: peer.frame(DATA, (0, 0, 0), 0, 12, bytes(10)),
    "old version": lambda peer: peer.frame(DATA, (0, 0, 0), 0, 10, bytes(10), version=VERSION - 1),
    "unknown kind": lambda peer: peer.frame(77, (0, 0, 0), 0, 10, bytes(10)),
    "wrong grant": lambda peer: peer.grant((0, 0, 0), 20, 20),
}


@pytest.mark.parametrize("what", BAD)
def test_an_unexpected_message_is_refused_and_its_sender_named(by_hand, what):
    asked = receive(by_hand.reactor, 1, (0, 0, 0), 10)
    _, sent = send(by_hand.reactor, 1, (0, 0, 0), bytes(10), ready=0)
    assert by_hand.read()[:4] == (GRANT, (0, 0, 0), 10, 10)
    BAD[what](by_hand)
    for future in (asked, sent):
        with pytest.raises(WireError, match=r"worker 1 (sent|has)"):
            future.result(SECONDS)
    with pytest.raises((EOFError, ConnectionError)):
        by_hand.read()
    later = receive(by_hand.reactor, 1, (1, 0, 0), 10)
    with pytest.raises(WireError, match="worker 1"):
        later.result(SECONDS)


def test_a_grant_before_its_message_is_checked_too(by_hand):
    by_hand.grant((0, 0, 0), 20, 20)
    time.sleep(0.05)
    _, sent = send(by_hand.reactor, 1, (0, 0, 0), bytes(10))
    with pytest.raises(WireError, match="worker 1 has a message of 20 bytes where worker 0 has one of 10"):
        sent.result(SECONDS)


def test_a_peer_that_dies_in_the_middle_of_a_message(by_hand):
    asked = [receive(by_hand.reactor, 1, (0, bucket, 0), 1000) for bucket in range(2)]
    by_hand.frame(NOTE, (0, 0, 1), 0, 2, b"hi")
    by_hand.read()
    by_hand.stream.sendall(HEADER.pack(DATA, VERSION, 1000, 0, 0, 0, 0, 1000, 0) + bytes(300))
    time.sleep(0.05)
    began = time.monotonic()
    by_hand.stream.close()
    for future in asked:
        with pytest.raises(OSError):  # noqa: PT011
            future.result(SECONDS)
    assert time.monotonic() - began < SECONDS
    # Earlier messages are still there.
    heard: Future[list[bytes]] = Future()
    by_hand.reactor.mailbox.when_noted([1], (0, 0, 1), heard.set_result)
    assert heard.result(SECONDS) == [b"hi"]


def test_frames_in_crumbs(by_hand):
    asked = receive(by_hand.reactor, 1, (0, 0, 0), 50)
    data = content(1, 50)
    raw = b""
    for start, stop in ((0, 1), (1, 31), (31, 50)):
        raw += HEADER.pack(DATA, VERSION, stop - start, 0, 0, 0, start, 50, 0) + data[start:stop]
    by_hand.read()
    for i in range(0, len(raw), 3):
        by_hand.stream.sendall(raw[i : i + 3])
        if i % 30 == 0:
            time.sleep(0.001)
    assert asked.result(SECONDS) == data


def test_a_slow_peer_does_not_hold_up_another():
    """Workers on this node go past one beyond that takes nothing."""
    net = Net(2, near=True)
    made = listener(False)
    links = make_reactor(2, [made], lambda peer, _=0: reach(net.names[peer]), frozenset({0, 1}))
    links.connect(0)
    far = reach(made.getsockname(), 4096)
    greet(far, identity(3), SECRET, 2, SECONDS)
    send(links, 3, (0, 0, 0), bytes(8_000_000))
    far.sendall(HEADER.pack(GRANT, VERSION, 0, 0, 0, 0, 8_000_000, 8_000_000, 0))
    time.sleep(0.1)
    data = content(4, 3_000_000)
    asked = receive(net.links[0], 2, (0, 1, 0), len(data))
    send(links, 0, (0, 1, 0), data)
    assert asked.result(5) == data
    far.close()
    links.close()
    net.close()
    assert wait([asked]).done


def test_an_earlier_round_has_the_link_for_itself(monkeypatch):
    """A request of another peer for a later round waits while the link is full of an earlier one, and no longer."""
    size, in_flight = 1_000_000, {}
    monkeypatch.setattr(connection, "unacknowledged", lambda stream: in_flight.get(stream.getpeername(), 0))
    first = ByHand()
    second = connect_by_hand(first.name, 2)
    full = {first.stream.getsockname(): 2**16}

    def ask(peer: int, round_: int, upto: int) -> None:
        stream = {1: first.stream, 2: second}[peer]
        stream.sendall(HEADER.pack(GRANT, VERSION, 0, round_, 0, 0, upto, size, 0))

    def read(peer: int, count: int) -> int:
        """The round of a message of which exactly so many bytes come."""
        stream, rounds = {1: first.stream, 2: second}[peer], set()
        while count:
            _, _, length, round_, *_ = HEADER.unpack(receive_exactly(stream, HEADER.size))
            count -= len(receive_exactly(stream, length))
            rounds |= {round_} if length else set()
        (found,) = rounds
        return found

    def quiet() -> bool:
        time.sleep(0.1)
        second.setblocking(False)
        try:
            return not second.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            second.settimeout(SECONDS)

    for peer, round_ in ((1, 3), (2, 3), (2, 4)):
        send(first.reactor, peer, (round_, 0, 0), bytes(size))
    assert HEADER.unpack(receive_exactly(second, HEADER.size))[0] == OFFER
    assert HEADER.unpack(receive_exactly(second, HEADER.size))[0] == OFFER
    in_flight |= full
    ask(1, 3, size // 2)
    assert read(1, size // 2) == 3
    ask(2, 4, size // 2)
    assert quiet()
    ask(2, 3, size // 2)  # of the same round: both at once
    assert read(2, size // 2) == 3
    ask(1, 3, size // 2 + 1)
    assert read(1, 1) == 3
    assert quiet()
    in_flight.clear()  # the first peer asks for nothing: the link is free
    assert read(2, size // 2) == 4
    in_flight |= full
    ask(1, 3, size - 1)
    assert read(1, size // 2 - 2) == 3
    ask(2, 4, size)
    assert quiet()
    ask(1, 3, size)  # the end of it: no more will come, whatever is in flight
    assert read(2, size // 2) == 4
    second.close()
    first.stream.close()
    first.reactor.close()


# -- sockets ---------------------------------------------------------------------------------------------------------------


class Asked:
    """A TCP socket that notes the congestion control that is set, and permits some."""

    family = socket.AF_INET

    def __init__(self, permitted: tuple[bytes, ...]) -> None:
        self.algorithm, self._permitted = b"bbr", permitted

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if name == socket.TCP_CONGESTION:
            if value not in self._permitted:
                raise PermissionError("not in net.ipv4.tcp_allowed_congestion_control")
            self.algorithm = value


@pytest.mark.parametrize(
    ("wanted", "permitted", "then"),
    [
        (None, (b"reno", b"cubic"), b"bbr"),  # the administrator's choice is left alone
        ("", (b"reno", b"cubic"), b"bbr"),
        ("cubic", (b"reno", b"cubic"), b"cubic"),
        ("cubic, reno", (b"reno",), b"reno"),
        ("cubic", (b"reno",), b"bbr"),
    ],
)
def test_the_congestion_control_is_changed_on_request_alone(monkeypatch, caplog, wanted, permitted, then):
    monkeypatch.delenv("DECENT_DP_CONGESTION_CONTROL", raising=False)
    if wanted is not None:
        monkeypatch.setenv("DECENT_DP_CONGESTION_CONTROL", wanted)
    asked: Any = Asked(permitted)
    configure(asked)
    assert asked.algorithm == then
    assert ("the system permits none of these" in caplog.text) == (wanted == "cubic" and then == b"bbr")


def test_the_kernel_takes_the_option(monkeypatch):
    monkeypatch.setenv("DECENT_DP_CONGESTION_CONTROL", "reno")
    with contextlib.closing(socket.socket()) as stream:
        configure(stream)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


@pytest.mark.parametrize("ended", [False, True])
def test_a_connection_that_is_not_opened_is_closed(ended):
    """Because the greeting fails, or this worker's reactor has ended meanwhile."""
    made, dialled = listener(False), list[socket.socket]()
    peer = make_reactor(0, [made])

    def dial(rank: int, incarnation: int = 0) -> socket.socket:
        dialled.append(reach(made.getsockname()))
        if not ended:
            dialled[0].shutdown(socket.SHUT_WR)
        return dialled[0]

    reactor = make_reactor(1, [], dial)
    if ended:
        reactor.close()
    with pytest.raises(RuntimeError if ended else GreetingError, match="closed"):
        reactor.connect(0)
    assert dialled[0].fileno() == -1
    reactor.close()
    peer.close()


def test_without_descriptors_nobody_is_accepted_and_the_thread_sleeps(by_hand, monkeypatch, caplog):
    """At the limit of open files, which a test cannot reach without disturbing others: accept says so a few times."""
    real, calls = socket.socket.accept, list[float]()

    def accept(self: socket.socket) -> Any:
        calls.append(time.monotonic())
        if len(calls) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with contextlib.closing(connect_by_hand(by_hand.name, 2)) as second:
        asked = receive(by_hand.reactor, 2, (0, 0, 0), 10)
        assert receive_exactly(second, HEADER.size)[:2] == HEADER.pack(GRANT, 0, 0, 0, 0, 0, 0, 0, 0)[:2]
        second.sendall(HEADER.pack(DATA, VERSION, 10, 0, 0, 0, 0, 10, 0) + bytes(10))
        assert asked.result(SECONDS) == bytes(10)
    assert len(calls) in (4, 5)  # with that of worker 1
    assert calls[3] - calls[0] > 0.5
    assert caplog.text.count("Too many open files") == 1


@pytest.mark.parametrize("moment", ["accepted", "greeted", "connected"])
def test_a_forked_child_keeps_no_connection_alive(moment, monkeypatch):
    """As DataLoader workers are: they outlive a worker that is killed, and its peers must notice at once.

    The fork comes while the parent's other thread has just accepted the connection, or has read its hello, or later.
    """
    between = threading.Event()

    def slowed(call: Any) -> Any:
        def then_wait(*arguments: Any) -> Any:
            result = call(*arguments)
            between.set()
            time.sleep(0.3)
            return result

        return then_wait

    if moment == "accepted":
        monkeypatch.setattr(socket.socket, "accept", slowed(socket.socket.accept))
    if moment == "greeted":
        monkeypatch.setattr(Greeting, "verify", slowed(Greeting.verify))
    by_hand = ByHand(greets=False)
    greeting = threading.Thread(target=by_hand.greet)
    greeting.start()
    if moment == "connected":
        greeting.join(SECONDS)
    else:
        assert between.wait(SECONDS)
    is_there, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads
        child = os.fork()
    if child == 0:
        os.write(there, b"x")
        time.sleep(SECONDS)
        os._exit(0)
    try:
        assert os.read(is_there, 1) == b"x"
        greeting.join(SECONDS)
        # The parent's connection goes on.
        asked = receive(by_hand.reactor, 1, (0, 0, 0), 10)
        assert by_hand.read()[:4] == (GRANT, (0, 0, 0), 10, 10)
        by_hand.frame(DATA, (0, 0, 0), 0, 10, bytes(10))
        assert asked.result(SECONDS) == bytes(10)
        by_hand.reactor.close()
        by_hand.stream.settimeout(5)
        assert by_hand.stream.recv(1) == b""
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(by_hand.name)  # nor does the child listen
    finally:
        by_hand.stream.close()
        by_hand.reactor.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(is_there)
        os.close(there)
