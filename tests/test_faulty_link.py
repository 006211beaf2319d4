"""The tools for faults, by themselves: what a link does to bytes, and where a worker is when it dies or freezes."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faulty_link import FaultyLinks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network stacks and signals as on Linux")
SECONDS = 20


@pytest.fixture
def links() -> Iterator[FaultyLinks]:
    with FaultyLinks(3) as made:
        yield made


class Pair:
    """Workers 1 and 0 as two sockets by rank; 1 has dialled."""

    def __init__(self, links: FaultyLinks) -> None:
        self.links = links
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(SECONDS)
        links.route(1, 0, *self.listener.getsockname())
        self.side = self.dial()

    def dial(self) -> dict[int, socket.socket]:
        dialled = self.knock()
        accepted, _ = self.listener.accept()
        accepted.settimeout(SECONDS)
        return {1: dialled, 0: accepted}

    def knock(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.links.remote.ports[1, 0][0]), SECONDS)

    def silent(self, rank: int, seconds: float = 0.1) -> bool:
        """Nothing comes to worker ``rank``, not even an end."""
        self.side[rank].settimeout(seconds)
        try:
            self.side[rank].recv(1)
        except TimeoutError:
            return True
        finally:
            self.side[rank].settimeout(SECONDS)
        return False


@pytest.fixture
def pair(links: FaultyLinks) -> Iterator[Pair]:
    made = Pair(links)
    yield made
    for stream in [made.listener, *made.side.values()]:
        stream.close()


def receive(stream: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count and (part := stream.recv(count - len(parts))):
        parts += part
    return parts


def send(stream: socket.socket, data: bytes) -> threading.Thread:
    """Sends in another thread, for as long as the other side takes it."""

    def work() -> None:
        with contextlib.suppress(OSError):
            stream.sendall(data)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_bytes_and_ends_pass_in_both_directions(pair):
    data = os.urandom(3_000_000)
    for source, target in ((0, 1), (1, 0)):
        send(pair.side[source], data)
        assert receive(pair.side[target], len(data)) == data
    pair.side[1].shutdown(socket.SHUT_WR)
    assert pair.side[0].recv(1) == b""
    pair.side[0].sendall(b"still here")
    pair.side[0].close()
    assert receive(pair.side[1], 100) == b"still here"


def test_throttle_is_of_one_direction(pair):
    pair.links.throttle(1, 0, 200_000)
    send(pair.side[1], bytes(1_000_000))
    began = time.monotonic()
    receive(pair.side[0], 60_000)
    assert 0.2 < time.monotonic() - began < 5
    send(pair.side[0], bytes(1_000_000))
    assert len(receive(pair.side[1], 1_000_000)) == 1_000_000
    pair.links.heal()
    assert len(receive(pair.side[0], 940_000)) == 940_000
    assert time.monotonic() - began < 4  # it would have taken five seconds


def test_a_blackhole_hides_bytes_ends_and_newcomers_until_it_heals(pair):
    pair.links.blackhole(1, 0)
    pair.side[1].sendall(b"into the dark")
    pair.side[1].shutdown(socket.SHUT_WR)
    pair.side[0].sendall(b"seen")
    assert receive(pair.side[1], 4) == b"seen"
    assert pair.silent(0)
    newcomer = pair.knock()
    pair.listener.settimeout(0.1)
    with pytest.raises(TimeoutError):
        pair.listener.accept()
    pair.listener.settimeout(SECONDS)
    pair.links.heal()
    assert receive(pair.side[0], 100) == b"into the dark"
    pair.listener.accept()[0].close()
    newcomer.close()


@pytest.mark.parametrize("how", ["cut", "refuse", "half-open"])
def test_a_connection_ends_for_both_or_for_one(pair, how):
    for gone, other in ((0, 1), (1, 0)):
        if how == "half-open":
            pair.links.half_open(gone, other)
            pair.side[other].sendall(b"hello?")
            assert pair.silent(other)
        else:
            pair.links.cut(1, 0, refuse=how == "refuse")
        for rank in (gone,) if how == "half-open" else (0, 1):
            with pytest.raises(ConnectionResetError):
                pair.side[rank].recv(1)
        if how == "refuse":
            with pytest.raises(ConnectionResetError), pair.knock() as newcomer:
                newcomer.recv(1)
            pair.links.heal()
        for stream in pair.side.values():
            stream.close()
        pair.side = pair.dial()  # a new one passes
        pair.side[0].sendall(b"again")
        assert receive(pair.side[1], 5) == b"again"


def test_flip(pair):
    pair.side[0].sendall(b"before")
    assert receive(pair.side[1], 6) == b"before"
    pair.links.flip(0, 1, 2, 4)
    pair.side[0].sendall(bytes(3))
    assert receive(pair.side[1], 3) == b"\0\0\1"
    pair.side[0].sendall(bytes(3))
    assert receive(pair.side[1], 3) == b"\1\0\0"


def test_memory_is_bounded(pair):
    """A target that reads nothing holds its source up."""
    thread = send(pair.side[1], bytes(50_000_000))
    thread.join(0.5)
    assert thread.is_alive()
    [connection] = pair.links._links[0, 1].connections
    assert all(len(stream.held) < 2**21 for stream in connection.values())
