"""Workers of one process, each with its own sockets and thread: ``Net``."""

from __future__ import annotations

import random
import secrets
import threading
import time
import types
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from decent_dp.transport.addresses import probe
from decent_dp.transport.dialling import Target
from decent_dp.transport.hello import Credentials, Identity, password
from decent_dp.transport.listening import Doorman
from decent_dp.transport.messages import Key
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_link import Receiving, Sending
from decent_dp.transport.sockets import Curve, Sockets
from decent_dp.transport.wire import Wire

SECONDS = 20.0
RUN, SECRET = b"run of the tests", b"secret of the run"


def identity(rank: int) -> Identity:
    return Identity(RUN, rank, b"worker %d" % rank)


class Net:
    """``n`` workers of a run of ``size``.

    Args:
        near: they are on one node.
        encrypts: as between nodes.
        dead_after: of connections.
        joins: the incarnations of those that join the run, by rank.
        strangers: those that do not know the secret of the run.
    """

    def __init__(
        self,
        n: int,
        *,
        near: bool = False,
        encrypts: bool = False,
        size: int = 8,
        dead_after: float = 10.0,
        timeout: float = SECONDS,
        joins: Mapping[int, int] = types.MappingProxyType({}),
        strangers: Collection[int] = (),
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
                        b"another" if rank in strangers else SECRET,
                        curves[rank],
                        keys,
                        lambda key: False,
                    ),
                    range(size),
                    local,
                    sockets,
                    listeners,
                    self.find,
                    timeout,
                )
            )

    def find(self, rank: int, incarnation: int) -> Target:
        if rank in self.unreachable:
            raise self.unreachable[rank]
        probe(self._addresses[rank], "here", 5.0).close()
        return self.targets[rank]

    def connect(self) -> None:
        for wire in self.wires:
            for peer in range(len(self.wires)):
                if peer != wire._identity.rank:
                    wire.connect(peer)
        for rank, wire in enumerate(self.wires):
            assert all(wire.is_connected(peer) for peer in range(len(self.wires)) if peer != rank)

    def freeze(self, rank: int, seconds: float) -> None:
        """Nobody reaches this worker, and it nobody, for a time, as if it had been stopped."""
        before = dict(self.unreachable)
        self.unreachable.update(dict.fromkeys(range(len(self.wires)), UnreachableError("there", "timed out")))
        for wire in self.wires:
            peers = [peer for peer in wire.flow.links if rank in (peer, wire._identity.rank)]
            for peer in peers:
                wire.call(lambda flow=wire.flow, peer=peer: flow.lose(flow.link(peer), "frozen by the test"))

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


def make_doorman(read_events: Callable[[Any], None] = lambda _: None) -> Doorman:
    """Of worker 0, that lets in whoever knows the secret."""
    credentials = Credentials(identity(0), SECRET, Curve.create(), set(), lambda _: False)
    nobody: Any = None
    host = SimpleNamespace(admit=lambda _: None, let_in=lambda *_: None, read_events=read_events)
    return Doorman(credentials, nobody, nobody, host)


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


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
