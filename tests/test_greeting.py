"""Who gets a connection: proofs, refusals, and strangers that hold on to sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import os
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.errors import PeerLostError
from decent_dp.transport.communicators import Notes, Rendezvous, peer_error
from decent_dp.transport.tcp import acceptor
from decent_dp.transport.tcp.greeting import Greeting, GreetingError, Identity, greet
from decent_dp.transport.tcp.protocol import BEAT, DATA, GRANT, NOTE, VERSION
from tests.test_reactor import (
    HEADER,
    RUN,
    SECONDS,
    SECRET,
    ByHand,
    _no_heartbeats,  # noqa: F401
    by_hand,  # noqa: F401
    connect_by_hand,
    identity,
    listener,
    make_reactor,
    reach,
    receive,
    receive_exactly,
)

CHALLENGE, HELLO, ANSWER = 26, 68, 241
OTHER_RUN = bytes(range(1, 17))


def hello(
    challenge: bytes,
    rank: int = 2,
    *,
    to: int = 0,
    run: bytes = RUN,
    secret: bytes = SECRET,
    version: int = VERSION,
    label: bytes = b"decent_dp hello ",
) -> bytes:
    """Written down once more, from the description of the protocol."""
    who = identity(rank)
    said = struct.pack("<H16sII8sQ16s16s", version, run, rank, to, who.uid, 0, challenge[10:], bytes(16))
    return struct.pack("<I8sQ16s", rank, who.uid, 0, bytes(16)) + hmac.digest(secret, label + said, "sha256")


def flip(message: bytes, at: int) -> bytes:
    return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


def still_works(by_hand: ByHand, round_: int = 0) -> None:
    asked = receive(by_hand.reactor, 1, (round_, 0, 0), 4)
    kind = by_hand.read()[0]
    assert (by_hand.read()[0] if kind == BEAT else kind) == GRANT  # a new connection may begin with a heartbeat
    by_hand.frame(DATA, (round_, 0, 0), 0, 4, b"fine")
    assert asked.result(SECONDS) == b"fine"


def is_closed(stream: socket.socket) -> bool:
    """Without a word. Waits for it."""
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:  # what it had sent was not read
        return True


# -- proofs, without a reactor ---------------------------------------------------------------------------------------------


def test_each_end_learns_who_the_other_is():
    dialer, mine = Identity(RUN, 3, b"three...", 7), Identity(RUN, 1, b"one.....", 8)
    ends = socket.socketpair()
    greeting, found = Greeting(mine, SECRET), []
    thread = threading.Thread(target=lambda: found.append(greet(ends[0], dialer, SECRET, 1, SECONDS)))
    with ends[0], ends[1]:
        thread.start()
        ends[1].sendall(greeting.challenge)
        while greeting.missing:
            greeting.feed(ends[1].recv(1))
        assert greeting.verify() == dialer
        ends[1].sendall(greeting.answer(None) + b"frames follow")
        thread.join(SECONDS)
        assert found == [mine]
        assert ends[0].recv(100) == b"frames follow"


def test_every_bit_of_a_hello_counts():
    greeting = Greeting(identity(0), SECRET)
    assert len(greeting.challenge) == CHALLENGE
    good = hello(greeting.challenge)

    def verify(message: bytes) -> Identity | None:
        greeting._seen = message
        return greeting.verify()

    assert len(good) == HELLO == greeting.missing
    assert verify(good) == identity(2)
    assert [at for at in range(HELLO) if verify(flip(good, at)) is not None] == []


def test_an_identity_has_a_run_and_a_uid_of_fixed_length():
    with pytest.raises(ValueError, match="run_id and uid have 3 and 8 bytes, and must have 16 and 8"):
        Identity(b"run", 0, bytes(8))


class Answers:
    """A listener whose only connection is answered by ``serve``, in a thread."""

    def __init__(self, serve: Callable[[socket.socket], object]) -> None:
        self._listener = listener(False)
        self._listener.settimeout(SECONDS)
        self.name = self._listener.getsockname()

        def accept() -> None:
            with self._listener, contextlib.suppress(OSError, EOFError):
                stream, _ = self._listener.accept()
                with stream:
                    stream.settimeout(SECONDS)
                    serve(stream)

        self.thread = threading.Thread(target=accept, daemon=True)
        self.thread.start()

    def greet(self, timeout: float = SECONDS) -> Identity:
        with contextlib.closing(reach(self.name)) as stream:
            return greet(stream, identity(1), SECRET, 0, timeout)


def impostor(make_answer: Callable[[bytes, bytes], bytes]) -> Callable[[socket.socket], None]:
    """Answers a hello with what is made of the challenge and the hello."""

    def serve(stream: socket.socket) -> None:
        challenge = Greeting(identity(0), SECRET).challenge
        stream.sendall(challenge)
        stream.sendall(make_answer(challenge, receive_exactly(stream, HELLO)))
        stream.recv(1)

    return serve


def true_answer(challenge: bytes, said: bytes, secret: bytes = SECRET, rank: int = 0) -> bytes:
    greeting = Greeting(identity(rank), secret)
    greeting._nonce = challenge[10:]
    greeting.feed(said)
    greeting.verify()
    return greeting.answer(None)


def answer_proof(label: bytes, challenge: bytes, said: bytes) -> bytes:
    who = identity(1)
    transcript = struct.pack("<H16sII8sQ16s16s", VERSION, RUN, 1, 0, who.uid, 0, challenge[10:], said[20:36])
    return hmac.digest(SECRET, label + transcript + WELCOME, "sha256")


WELCOME = struct.pack("<B8sQ192s", 1, b"worker 0", 0, b"")
IMPOSTORS = {
    "another secret": lambda challenge, said: true_answer(challenge, said, b"another secret.."),
    "another rank": lambda challenge, said: true_answer(challenge, said, rank=2),
    "the dialer's own proof": lambda challenge, said: WELCOME + said[-32:],
    "the dialer's label": lambda challenge, said: WELCOME + answer_proof(b"decent_dp hello ", challenge, said),
    "no proof": lambda challenge, said: WELCOME + bytes(32),
    "another welcome": lambda challenge, said: flip(true_answer(challenge, said), 3),
    "a refusal made of a welcome": lambda challenge, said: b"\x02" + true_answer(challenge, said)[1:],
}


@pytest.mark.parametrize("how", IMPOSTORS)
def test_who_cannot_prove_to_be_the_peer_is_not_believed(how):
    for true in (true_answer, lambda challenge, said: WELCOME + answer_proof(b"decent_dp answer", challenge, said)):
        assert Answers(impostor(true)).greet() == identity(0)
    with pytest.raises(GreetingError, match="worker 0 does not know the secret of this run"):
        Answers(impostor(IMPOSTORS[how])).greet()


def test_a_recorded_answer_is_worth_nothing_later():
    record = []

    def answer(challenge: bytes, said: bytes) -> bytes:
        record.append((challenge, true_answer(challenge, said)))
        return record[-1][1]

    def replay(stream: socket.socket) -> None:
        challenge, answer = record[0]
        stream.sendall(challenge)
        receive_exactly(stream, HELLO)
        stream.sendall(answer)

    Answers(impostor(answer)).greet()
    with pytest.raises(GreetingError, match="does not know the secret"):
        Answers(replay).greet()


OTHERS: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "closes": (lambda stream: None, "worker 0 closed the connection instead of greeting"),
    "closes later": (lambda stream: stream.sendall(bytes(9)), "worker 0 closed the connection"),
    "is no worker": (lambda stream: stream.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3"), "another program than worker 0"),
    "another version": (
        lambda stream: stream.sendall(struct.pack("<8sH16s", b"decentdp", VERSION + 1, bytes(16))),
        f"worker 0 speaks version {VERSION + 1} of the protocol, and worker 1 version {VERSION}. Start all",
    ),
}


@pytest.mark.parametrize("how", OTHERS)
def test_who_does_not_greet_is_named_and_what_to_do(how):
    serve, text = OTHERS[how]
    with pytest.raises(GreetingError, match=text):
        Answers(serve).greet()


def test_the_time_is_for_all_of_a_greeting():
    """However slowly it comes."""

    def crumbs(stream: socket.socket) -> None:
        for byte in Greeting(identity(0), SECRET).challenge:
            stream.sendall(bytes([byte]))
            time.sleep(0.1)

    for serve in (crumbs, lambda stream: stream.recv(1)):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="worker 0 has not answered the greeting in time"):
            Answers(serve).greet(0.5)
        assert time.monotonic() - began < 2


def test_a_long_reason_is_cut():
    greeting = Greeting(identity(0), SECRET)
    greeting.feed(hello(greeting.challenge))
    greeting.verify()
    assert len(greeting.answer("ä" * 1000)) == len(greeting.answer(None)) == ANSWER

    def refuse(challenge: bytes, said: bytes) -> bytes:
        greeting._nonce, greeting._seen = challenge[10:], said
        greeting.verify()
        return greeting.answer("ä" * 1000)

    with pytest.raises(GreetingError) as caught:
        Answers(impostor(refuse)).greet()
    assert str(caught.value) == f"worker 0 refused the connection of worker 1: {'ä' * 96}."


# -- strangers at a reactor ------------------------------------------------------------------------------------------------

STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "another secret": lambda challenge: hello(challenge, secret=b"another secret.."),
    "no secret": lambda challenge: hello(challenge, secret=b""),
    "another run": lambda challenge: hello(challenge, run=OTHER_RUN),
    "for another worker": lambda challenge: hello(challenge, to=1),
    "another version": lambda challenge: hello(challenge, version=VERSION - 1),
    "the acceptor's label": lambda challenge: hello(challenge, label=b"decent_dp answer"),
    "another epoch": lambda challenge: flip(hello(challenge), 12),
    "another uid": lambda challenge: flip(hello(challenge), 4),
    "the rank of another": lambda challenge: flip(hello(challenge), 0),
    "garbage": lambda challenge: random.Random(1).randbytes(HELLO),
    "oversized": lambda challenge: random.Random(2).randbytes(10**5),
    "the challenge": lambda challenge: (challenge * 3)[:HELLO],
}


@pytest.mark.parametrize("how", STRANGERS)
def test_a_stranger_gets_no_word_and_disturbs_nobody(by_hand, how):
    with contextlib.closing(reach(by_hand.name)) as stranger:
        stranger.sendall(STRANGERS[how](receive_exactly(stranger, CHALLENGE)))
        assert is_closed(stranger)
        still_works(by_hand)
    assert by_hand.reactor.lost() == []


@pytest.mark.parametrize("count", [0, 1, HELLO - 1])
def test_a_stranger_that_goes_or_stays_disturbs_nobody(by_hand, count):
    for goes in (True, False):
        with contextlib.closing(reach(by_hand.name)) as stranger:
            stranger.sendall(hello(receive_exactly(stranger, CHALLENGE))[:count])
            if goes:
                stranger.shutdown(socket.SHUT_WR)
                assert is_closed(stranger)
            still_works(by_hand, round_=int(goes))


def test_a_recorded_hello_is_worth_nothing_later(by_hand):
    with contextlib.closing(reach(by_hand.name)) as first, contextlib.closing(reach(by_hand.name)) as second:
        said = hello(receive_exactly(first, CHALLENGE))
        first.sendall(said)
        assert len(receive_exactly(first, ANSWER)) == ANSWER
        first.close()
        receive_exactly(second, CHALLENGE)
        second.sendall(said)
        assert is_closed(second)


def test_a_hello_in_crumbs_with_a_frame_behind_it():
    by_hand = ByHand(greets=False)
    asked = receive(by_hand.reactor, 1, (0, 0, 0), 4)
    said = hello(receive_exactly(by_hand.stream, CHALLENGE), 1)
    for byte in said[:-3]:
        by_hand.stream.sendall(bytes([byte]))
        time.sleep(0.001)
    by_hand.stream.sendall(said[-3:] + HEADER.pack(NOTE, VERSION, 2, 0, 0, 1, 0, 2, 0) + b"hi")
    receive_exactly(by_hand.stream, ANSWER)
    heard: Future[list[bytes]] = Future()
    by_hand.reactor.mailbox.when_noted([1], (0, 0, 1), heard.set_result)
    assert heard.result(SECONDS) == [b"hi"]
    assert by_hand.read()[0] == GRANT
    by_hand.frame(DATA, (0, 0, 0), 0, 4, b"fine")
    assert asked.result(SECONDS) == b"fine"
    by_hand.stream.close()
    by_hand.reactor.close()


REFUSED = {9: "rank 9 is not expected", 2: "rank 2 must not connect to rank 2", 1: "rank 1 must not connect to rank 2"}


@pytest.mark.parametrize("rank", REFUSED)
def test_a_worker_that_should_not_connect_is_told_so(rank):
    made = listener(False)
    reactor = make_reactor(2, [made])
    with contextlib.closing(reach(made.getsockname())) as stream:
        with pytest.raises(GreetingError, match=f"worker 2 refused the connection of worker {rank}: {REFUSED[rank]}"):
            greet(stream, identity(rank), SECRET, 2, SECONDS)
        assert is_closed(stream)
    reactor.close()


def test_a_second_connection_of_a_rank_is_refused_and_the_first_goes_on(by_hand):
    """And the thread sleeps: it does not watch a socket that nobody reads."""
    still_works(by_hand)
    watched, selects = len(by_hand.reactor._selector.get_map()), []
    select = by_hand.reactor._selector.select
    by_hand.reactor._selector.select = lambda timeout: selects.append(timeout) or select(timeout)
    for _ in range(3):
        with pytest.raises(GreetingError, match="worker 0 refused the connection of worker 1: rank 1 is connected already"):
            connect_by_hand(by_hand.name, 1)
    still_works(by_hand, round_=1)
    assert len(by_hand.reactor._selector.get_map()) == watched
    time.sleep(0.1)
    selects.clear()
    busy = time.process_time()
    time.sleep(0.5)
    assert len(selects) < 5
    assert time.process_time() - busy < 0.2


def test_a_worker_that_was_lost_is_refused(by_hand):
    """What was in flight has failed, and its run ends."""
    asked = receive(by_hand.reactor, 1, (0, 0, 0), 10)
    by_hand.stream.close()
    with pytest.raises(ConnectionError):
        asked.result(SECONDS)
    assert by_hand.reactor.lost() == [1]
    with pytest.raises(GreetingError, match="worker 1 is gone for worker 0"):
        connect_by_hand(by_hand.name, 1)


def unreachable(peer: int, incarnation: int = 0) -> socket.socket:
    raise TimeoutError


def test_where_faults_are_tolerated_the_same_process_may_connect_again(by_hand):
    """Also before this end has seen that the old connection is lost; another process may not."""
    by_hand.reactor._dial = unreachable
    by_hand.reactor.tolerate(100.0)
    old, by_hand.stream = by_hand.stream, connect_by_hand(by_hand.name, 1)
    while old.recv(10_000):  # a heartbeat, and then the end
        pass
    still_works(by_hand)
    by_hand.stream.close()
    time.sleep(0.05)
    other = dataclasses.replace(identity(1), uid=b"restart!")
    with (
        contextlib.closing(reach(by_hand.name)) as stream,
        pytest.raises(GreetingError, match="another process has been worker 1"),
    ):
        greet(stream, other, SECRET, 0, SECONDS)
    by_hand.stream = connect_by_hand(by_hand.name, 1)
    still_works(by_hand)
    old.close()


# -- strangers in numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crumbs", *(pytest.param(how, marks=pytest.mark.slow) for how in ("half", "nothing"))])
def test_strangers_that_never_greet_are_dropped_and_only_so_many_are_accepted(monkeypatch, how):
    monkeypatch.setattr(acceptor, "_GREETING_SECONDS", 0.5)
    monkeypatch.setattr(acceptor, "_WITHOUT_GREETING", 3)
    made, real = listener(False), socket.socket.accept
    accepted: list[float] = []

    def accept(self: socket.socket) -> Any:
        accepted.append(time.monotonic())
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    ended = threading.Event()

    def drip(stranger: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.05):
                stranger.sendall(b"x")

    with contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        strangers = [stack.enter_context(contextlib.closing(reach(made.getsockname()))) for _ in range(7)]
        for stranger in strangers:
            stranger.sendall(bytes(20) if how == "half" else b"")
            if how == "crumbs":
                threading.Thread(target=drip, args=(stranger,), daemon=True).start()
        worker = stack.enter_context(contextlib.closing(reach(made.getsockname())))
        own = make_reactor(0, [made])
        stack.callback(own.close)
        assert greet(worker, identity(1), SECRET, 0, SECONDS) == identity(0)
        for stranger in strangers:
            receive_exactly(stranger, CHALLENGE)
            assert is_closed(stranger)
    assert len(accepted) == 8
    # The fourth and the seventh had to wait until those before them were dropped.
    assert accepted[3] - accepted[2] > 0.3
    assert accepted[6] - accepted[5] > 0.3


def test_a_hundred_strangers_keep_a_worker_waiting_for_a_moment(by_hand):
    """They keep their places for a second, as others wait: two rounds of 64 at most are before the worker."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(contextlib.closing(reach(by_hand.name)))
        began = time.monotonic()
        stack.enter_context(contextlib.closing(connect_by_hand(by_hand.name, 2)))
        assert 0.5 < time.monotonic() - began < 4
        still_works(by_hand)


def test_who_takes_most_places_loses_them_first(monkeypatch):
    """A worker at another address than the strangers may be slow."""
    monkeypatch.setattr(acceptor, "_SHARE_SECONDS", 0.1)
    monkeypatch.setattr(acceptor, "_WITHOUT_GREETING", 4)
    by_hand = ByHand()
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(socket.socket())
        worker.bind(("127.0.0.2", 0))
        worker.settimeout(SECONDS)
        worker.connect(by_hand.name)
        said = hello(receive_exactly(worker, CHALLENGE))
        for _ in range(12):
            stranger = stack.enter_context(contextlib.closing(reach(by_hand.name)))
            receive_exactly(stranger, CHALLENGE)
        worker.sendall(said)
        assert len(receive_exactly(worker, ANSWER)) == ANSWER
    by_hand.stream.close()
    by_hand.reactor.close()


def test_at_a_local_socket_users_are_told_apart(monkeypatch):
    if not hasattr(socket, "SO_PEERCRED"):
        pytest.skip("Linux has such sockets")
    one, other = socket.socketpair()
    with one, other:
        assert acceptor._source_of(one) == b"%d" % os.getuid()


def test_of_an_ipv6_address_the_network_counts():
    class Stream:
        family = socket.AF_INET6

        def __init__(self, host: str) -> None:
            self._host = host

        def getpeername(self) -> tuple[str, int]:
            return self._host, 1

    def source(host: str) -> bytes:
        stream: Any = Stream(host)
        return acceptor._source_of(stream)

    assert source("fd00::1:2:3:4") == source("fd00::ffff:2%eth0")
    assert source("fd00:0:0:1::1") != source("fd00:0:0:2::1")


def test_hostile_streams_leave_nothing_behind(by_hand):
    draw = random.Random(3)

    def attack(count: int) -> None:
        for _ in range(count):
            with contextlib.closing(reach(by_hand.name)) as stranger, contextlib.suppress(OSError):
                challenge = receive_exactly(stranger, CHALLENGE)
                stranger.sendall(
                    draw.choice([hello(challenge, secret=b"guess"), b"\xff" * 2**14, bytes(1), b"GET / HTTP/1.1\r\n"])
                )
                stranger.shutdown(socket.SHUT_WR)
                is_closed(stranger)

    attack(20)
    files, watched = len(os.listdir("/proc/self/fd")), len(by_hand.reactor._selector.get_map())
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        attack(200)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000
    assert (len(os.listdir("/proc/self/fd")), len(by_hand.reactor._selector.get_map())) == (files, watched)
    assert by_hand.reactor._acceptor._newcomers == {}
    still_works(by_hand)


# -- what is said ----------------------------------------------------------------------------------------------------------


def test_strangers_are_reported_once_and_nothing_tells_the_secret(by_hand, caplog):
    caplog.set_level(logging.DEBUG)
    said = []
    for count in (0, 9, HELLO, HELLO):
        with contextlib.closing(reach(by_hand.name)) as stranger:
            receive_exactly(stranger, CHALLENGE)
            stranger.sendall(bytes(count))
            stranger.shutdown(socket.SHUT_WR)
            assert is_closed(stranger)
        # One that goes without a greeting may be a worker that ended, or a look whether anybody listens.
        assert caplog.text.count("a connection was closed because it did not greet") == int(count == HELLO)
    for serve in (impostor(IMPOSTORS["no proof"]), *(serve for serve, _ in OTHERS.values())):
        with pytest.raises(GreetingError) as caught:
            Answers(serve).greet()
        said.append(str(caught.value))
    with pytest.raises(GreetingError) as caught:
        connect_by_hand(by_hand.name, 1)
    said.append(str(caught.value))
    nobody: Any = None
    said.append(repr(Rendezvous(nobody, 0, 2, timedelta(0), False, ("a", "b"), SECRET, RUN.hex(), "a", 2)))
    said.append(repr(identity(1)))
    assert caplog.text.count("a connection was closed because it did not greet") == 1
    assert "a connection of worker 1 was refused: rank 1 is connected already" in caplog.text
    for text in [*said, caplog.text]:
        assert SECRET.decode() not in text
        assert SECRET.hex() not in text


def test_users_see_which_worker_is_not_connected_and_why():
    store = dist.HashStore()
    error = GreetingError(
        "worker 3 refused the connection of worker 4: rank 4 is connected already, and no rank may run twice."
    )
    found = peer_error(error, [3], "round 0, bucket 1", Notes(store, 4), timedelta(seconds=5))
    assert isinstance(found, PeerLostError)
    assert str(found) == f"worker 3 is not connected, and round 0, bucket 1 needs it: {error}"
