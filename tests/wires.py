"""Workers of one process, each with its own sockets and thread: ``Net``."""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import zmq

from decent_dp.transport.addresses import probe
from decent_dp.transport.commands import Clock
from decent_dp.transport.connections import Connections
from decent_dp.transport.dialling import Target
from decent_dp.transport.hello import Credentials, Identity, password
from decent_dp.transport.listening import Doorman
from decent_dp.transport.messages import DATA, HEADER_BYTES, OFFERS, START, Header, Key, unpack
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_links import PeerLinks
from decent_dp.transport.sockets import Channel, Curve, Sockets
from decent_dp.transport.transfers import Receiving, Sending
from decent_dp.transport.wire import Wire

SECONDS = 20.0
RUN, SECRET = b"run of the tests", b"secret of the run"
# What somebody has who has listened where nothing is encrypted.
HEARD: dict[str, Any] = {"plain_username": b"worker", "plain_password": password(SECRET)}


def identity(rank: int) -> Identity:
    return Identity(RUN, rank, b"worker %d" % rank)


class Net:
    """``n`` workers of a run of ``size``.

    Args:
        near: they are on one node.
        encrypts: as between nodes.
        dead_after: of connections.
        joins: the incarnations of those that join the run, by rank.
    """

    def __init__(
        self,
        n: int,
        *,
        near: bool = False,
        encrypts: bool = False,
        size: int = 8,
        dead_after: float = 10.0,
        joins: Mapping[int, int] = types.MappingProxyType({}),
    ) -> None:
        curves = [Curve.create() for _ in range(n)]
        self.targets: list[Target] = []
        self._addresses: list[dict[str, Any]] = []
        self.wires: list[Wire] = []
        # By rank: what is raised when it is looked up.
        self.unreachable: dict[int, Exception] = {}
        made = []
        for rank in range(n):
            sockets = Sockets(dead_after, password(SECRET))
            name = f"decent_dp-test-{secrets.token_hex(8)}"
            at = f"ipc://@{name}{{}}" if near else "tcp://127.0.0.1:*"
            curve = curves[rank] if encrypts else None
            listeners = [sockets.listen(at.format(plane), curve, beats=not plane) for plane in ("", "-bulk")]
            endpoints = [listener.endpoint for listener in listeners]
            here = {"local": name} if near else {"host": "127.0.0.1", "port": int(endpoints[0].rpartition(":")[2])}
            self._addresses.append({"node": "here", **here})
            self.targets.append(Target(*endpoints, curve.public if curve else b"", "" if near else endpoints[0]))
            made.append((sockets, listeners))
        for rank, (sockets, listeners) in enumerate(made):
            local = frozenset(set(range(n)) - {rank}) if near else frozenset()
            keys = {curve.public for curve in curves}
            self.wires.append(
                Wire(
                    Credentials(
                        replace(identity(rank), incarnation=joins.get(rank, 0)),
                        SECRET,
                        curves[rank],
                        keys,
                        lambda key: False,
                    ),
                    range(size),
                    local,
                    sockets,
                    listeners,
                    self.find,
                    SECONDS,
                )
            )

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, rank: int, incarnation: int) -> Target:
        if rank in self.unreachable:
            raise self.unreachable[rank]
        probe(self._addresses[rank], "here", 5.0).close()
        return self.targets[rank]

    def connect(self) -> None:
        for wire in self.wires:
            for peer in range(len(self.wires)):
                if peer != wire.control_plane.rank:
                    wire.connect(peer)
        for rank, wire in enumerate(self.wires):
            assert all(wire.is_connected(peer) for peer in range(len(self.wires)) if peer != rank)

    def freeze(self, rank: int, seconds: float) -> None:
        """Nobody reaches this worker, and it nobody, for a time, as if it had been stopped."""
        before = dict(self.unreachable)
        self.unreachable.update(dict.fromkeys(range(len(self.wires)), UnreachableError("there", "timed out")))
        for wire in self.wires:
            peers = [peer for peer in wire.links.by_rank if rank in (peer, wire.control_plane.rank)]
            for peer in peers:
                wire.call(lambda wire=wire, peer=peer: wire.connections.lose(wire.links.to(peer), "frozen by the test"))

        def thaw() -> None:
            self.unreachable.clear()
            self.unreachable.update(before)

        threading.Timer(seconds, thaw).start()

    def close(self) -> None:
        closing = [threading.Thread(target=wire.close) for wire in self.wires]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(SECONDS)
            assert not thread.is_alive()


@contextlib.contextmanager
def stranger(endpoint: str, **options: Any) -> Iterator[Any]:
    """A socket of ZeroMQ that is none of a worker's and connects there, with these options."""
    context: Any = zmq.Context()
    stream = context.socket(zmq.DEALER)
    for name, value in {"linger": 0, "rcvtimeo": 1000, "sndtimeo": 1000, **options}.items():
        setattr(stream, name, value)
    stream.connect(endpoint)
    try:
        yield stream
    finally:
        context.destroy(0)


def make_links(local: Collection[int] = (), now: Callable[[], float] | None = None) -> PeerLinks:
    """Of a worker without sockets and threads. ``now``: its clock."""
    clock: Any = Clock(1e6) if now is None else SimpleNamespace(now=now)
    return PeerLinks(frozenset(local), range(8), 10.0, clock)


def make_connections(rank: int, links: PeerLinks, hang_up: Callable[[Any], None] = id) -> Connections:
    return Connections(rank, links, Mock(hang_up=hang_up), Mock(), Mock())


class Unwired:
    """Worker 0 without sockets and threads, and what it sends to each of its peers.

    Attributes:
        lent: how many bodies were sent without a copy.
        hung_up: connections that were closed.
    """

    def __init__(self, peers: int = 1, *, near: bool = False) -> None:
        self.hung_up: list[Channel] = []
        self.links = make_links(range(1, peers + 1) if near else ())
        self.connections = make_connections(0, self.links, self.hung_up.append)
        self.flow = self.connections.flow
        self.sent: dict[int, list[bytes]] = {peer: [] for peer in range(1, peers + 1)}
        self.lent = 0
        for peer in self.sent:
            self.open(peer)
        self.link = self.links.to(1)

    def open(self, peer: int = 1) -> None:
        def send(part: Any, *_: Any, copy: bool = True) -> None:
            self.sent[peer].append(bytes(part))
            self.lent += not copy

        socket: Any = SimpleNamespace(zmq=SimpleNamespace(closed=False, send=send))
        self.connections.open(self.links.to(peer), b"uid", *(Channel(socket, plane) for plane in (0, 1)))

    def headers(self, kind: int, peer: int = 1) -> list[Header]:
        """Of the messages that were sent since the last look."""
        found = [unpack(part, peer) for part in self.sent[peer] if len(part) == HEADER_BYTES]
        self.sent[peer].clear()
        return [header for header in found if header.kind == kind]

    def post(self, key: Key, size: int, peer: int = 1) -> Sending:
        sending = message(Sending, key, size, peer, ready=size)
        self.flow.add_sending(sending)
        return sending

    def expect(self, key: Key, size: int) -> Receiving:
        receiving = message(Receiving, key, size)
        self.flow.add_receiving(receiving)
        return receiving

    def start(self, key: Key, had: int, wanted: int, size: int, peer: int = 1, *, offers: bool = True) -> None:
        """A START has come."""
        header = Header(START, OFFERS if offers else 0, 0, key, had, wanted, size)
        self.flow.hear_start(self.links.to(peer), header)
        self.flow.go_on()

    def data(self, key: Key, begin: int, length: int, size: int) -> bool:
        """A part of a message has come. Returns whether it was wanted."""
        header = Header(DATA, 0, 0, key, begin, length, size)
        wanted = self.flow.memory_for(self.link, header) is not None
        if wanted:
            self.flow.arrived(self.link, header)
        return wanted


def message(kind: Any, key: Key, size: int, peer: int = 1, **settings: Any) -> Any:
    def failed(error: BaseException) -> None:
        raise error

    return kind(peer, key, memoryview(bytearray(size)), lambda: None, failed, **settings)


def make_doorman(read_events: Callable[[Any], None] = lambda _: None) -> Doorman:
    """Of worker 0, that lets in whoever knows the secret."""
    credentials = Credentials(identity(0), SECRET, Curve.create(), set(), lambda _: False)
    nobody: Any = None
    return Doorman(credentials, nobody, nobody, lambda _: "", read_events)


def send(wire: Wire, peer: int, key: Key, data: bytes, ready: int | None = None) -> tuple[Sending, Future[None]]:
    future: Future[None] = Future()
    length = len(data) if ready is None else ready
    sending = Sending(
        peer, key, memoryview(data), lambda: future.set_result(None), lambda error: future.set_exception(error), ready=length
    )
    wire.call(lambda: wire.flow.add_sending(sending))
    return sending, future


def receive(wire: Wire, peer: int, key: Key, size: int) -> Future[bytes]:
    future: Future[bytes] = Future()
    memory = bytearray(size)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    receiving = Receiving(peer, key, memoryview(memory), lambda: future.set_result(bytes(memory)), fail)
    wire.call(lambda: wire.flow.add_receiving(receiving))
    return future


def content(seed: Any, size: int) -> bytes:
    return random.Random(seed).randbytes(size)
