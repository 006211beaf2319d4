"""Faults for real workers: links that fail while the test runs, and workers that die or freeze at a chosen point of a round.

``FaultyLinks`` is a TCP proxy in a thread of the test, with a port for each pair of workers. Workers reach each other through
it once they have called ``connect_through``, and ``inject`` makes them do something at (rank, round, where). No root is needed.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import os
import selectors
import signal
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

# Bytes that one direction of a connection holds; more wait in the sender's kernel.
_HELD = 2**20
# Bytes that the kernel holds for the proxy, and bytes of one read: little, so that a slow link is felt by its sender.
_KERNEL = 2**14
# Seconds between two writes on a link with a rate.
_TICK = 0.01
# Half-open connections that are kept open.
_ORPHANS = 64
_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: close() sends RST

# -- links -----------------------------------------------------------------------------------------------------------------


class Links(ABC):
    """What a test, or a worker, can do to the links. Workers are named by rank, and so are the two directions of a link.

    A setting belongs to the link and outlives its connections. Each call takes ``after``: the seconds until it takes effect.
    """

    @abstractmethod
    def ask(self, verb: str, *args: Any, after: float = 0.0) -> None:
        """Has the proxy call one of the methods below, and returns when it has, or will ``after`` so many seconds."""

    def throttle(self, source: int, target: int, rate: float, after: float = 0.0) -> None:
        """From ``source`` to ``target`` go at most ``rate`` bytes per second."""
        self.ask("change", source, target, {"rate": rate}, after=after)

    def blackhole(self, source: int, target: int, after: float = 0.0) -> None:
        """Nothing gets from ``source`` to ``target``, not even the end of a connection; nobody is told."""
        self.ask("change", source, target, {"holds": True}, after=after)

    def flip(self, source: int, target: int, start: int, stop: int, after: float = 0.0) -> None:
        """Flips a bit in each of the bytes ``start`` to ``stop`` that ``source`` sends to ``target`` from now on."""
        self.ask("change", source, target, {"flips": [start, stop]}, after=after)

    def cut(self, a: int, b: int, refuse: bool = False, after: float = 0.0) -> None:
        """Resets the connection on both sides. ``refuse``: resets new ones, too, until ``heal``."""
        self.ask("cut", a, b, refuse, after=after)

    def half_open(self, gone: int, unaware: int, after: float = 0.0) -> None:
        """Resets the side of ``gone``; the connection of ``unaware`` stays open, and nothing comes or goes on it any more."""
        self.ask("half_open", gone, unaware, after=after)

    def partition(self, some: Iterable[int], others: Iterable[int], after: float = 0.0) -> None:
        """Nothing gets from one part of the workers to the other."""
        self.ask("partition", list(some), list(others), after=after)

    def heal(self, after: float = 0.0) -> None:
        """All links pass everything again, what was held included."""
        self.ask("heal", after=after)

    def wake(self, pid: int, after: float = 0.0) -> None:
        """Continues a process that is stopped."""
        self.ask("wake", pid, after=after)

    def route(self, dialer: int, listener: int, host: str, *ports: int) -> None:
        """Connections of this pair go to ``host`` and ``ports`` from now on."""
        self.ask("route", dialer, listener, host, *ports)


@dataclass(frozen=True)
class RemoteLinks(Links):
    """The links, for a worker: another process.

    Attributes:
        control: the proxy's port for calls.
        ports: its ports for each pair of workers, the one that dials first: for control and for bulk.
    """

    control: int
    ports: dict[tuple[int, int], tuple[int, ...]]

    def ask(self, verb: str, *args: Any, after: float = 0.0) -> None:
        with socket.create_connection(("127.0.0.1", self.control), 10) as stream:
            stream.sendall(json.dumps([verb, args, after]).encode() + b"\n")
            answer = stream.makefile().readline()
        if answer != "done\n":
            raise RuntimeError(f"the proxy cannot {verb}{args}: {answer}")


@dataclass(eq=False)
class _Way:
    """One direction of a link: its settings, and the bytes that ``flips`` counts."""

    rate: float = math.inf
    holds: bool = False
    flips: Sequence[int] = (0, 0)
    count: int = 0

    def spoil(self, data: bytes) -> bytes:
        start, stop = (min(max(end - self.count, 0), len(data)) for end in self.flips)
        self.count += len(data)
        return data[:start] + bytes(byte ^ 1 for byte in data[start:stop]) + data[stop:]


@dataclass(eq=False)
class _Stream:
    """One direction of one connection, and what was read and not yet written."""

    way: _Way
    source: socket.socket
    target: socket.socket
    held: bytearray = field(default_factory=bytearray)
    free_at: float = 0.0
    ended: bool = False
    closed: bool = False

    @property
    def reads(self) -> bool:
        return not (self.way.holds or self.ended) and len(self.held) < min(_HELD, max(1.0, self.way.rate * 5 * _TICK))

    def writes_at(self) -> float:
        """When the next byte, or the end, may be written."""
        return math.inf if self.way.holds or self.closed or not (self.held or self.ended) else self.free_at

    def read(self) -> None:
        data = self.source.recv(_KERNEL)
        self.held += self.way.spoil(data)
        self.ended = not data

    def write(self) -> None:
        if not self.held:
            self.closed = True
            self.target.shutdown(socket.SHUT_WR)
            return
        count = self.target.send(self.held[: int(max(1.0, min(len(self.held), self.way.rate * _TICK)))])
        del self.held[:count]
        self.free_at = max(self.free_at, time.monotonic() - _TICK) + count / self.way.rate


@dataclass(eq=False)
class _Link:
    """The link of two workers. Sockets and ways are by rank: a worker's side, and its sending. Listeners and targets are by the
    rank that dials and the plane."""

    ranks: tuple[int, int]
    listeners: dict[tuple[int, int], socket.socket]
    ways: dict[int, _Way]
    targets: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    refuses: bool = False
    connections: list[dict[int, _Stream]] = field(default_factory=list)

    @property
    def accepts(self) -> bool:
        return not any(way.holds for way in self.ways.values())


class FaultyLinks(Links):
    """A proxy between ``n`` workers; a context manager. Its thread alone touches the sockets.

    A pair whose listener is gone, or that refuses, sees its connections accepted and reset, as behind a load balancer.

    Attributes:
        carried: pairs whose connections have come this way. Workers that found another one would not see any fault.
    """

    def __init__(self, n: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._control = self._listen()
        self._links = {
            (a, b): _Link(
                (a, b), {(rank, plane): self._listen() for rank in (a, b) for plane in (0, 1)}, {a: _Way(), b: _Way()}
            )
            for a, b in itertools.combinations(range(n), 2)
        }
        ports = {
            (dialer, sum(link.ranks) - dialer): tuple(link.listeners[dialer, plane].getsockname()[1] for plane in (0, 1))
            for link in self._links.values()
            for dialer in link.ranks
        }
        self.remote = RemoteLinks(self._control.getsockname()[1], ports)
        self.carried = set[tuple[int, int]]()
        self._timers: list[tuple[float, int, str, Sequence[Any]]] = []
        self._numbers = itertools.count()
        self._orphans: deque[socket.socket] = deque(maxlen=_ORPHANS)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="faulty links", daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultyLinks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.ask("close")
            self._thread.join(10)
        assert not self._thread.is_alive()

    def ask(self, verb: str, *args: Any, after: float = 0.0) -> None:
        self.remote.ask(verb, *args, after=after)

    @staticmethod
    def _listen() -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL)  # those that it accepts have it, too
        made.bind(("127.0.0.1", 0))
        made.listen(64)
        made.setblocking(False)
        return made

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._watch()):
                for event, call in key.data.items():
                    if events & event:
                        call()
            while self._timers and self._timers[0][0] <= time.monotonic():
                _, _, verb, args = heapq.heappop(self._timers)
                getattr(self, f"_{verb}")(*args)
        for _, _, verb, args in self._timers:
            if verb == "wake":  # nobody stays frozen
                self._wake(*args)
        for link in self._links.values():
            self._cut(*link.ranks, True)
            for listener in link.listeners.values():
                listener.close()
        for stream in [self._control, *self._orphans]:
            stream.close()
        self._selector.close()

    def _watch(self) -> float | None:
        """Registers what may be read and written now; returns the seconds until that changes by itself."""
        now = time.monotonic()
        wanted: dict[socket.socket, dict[int, Callable[[], None]]] = {}
        times = [entry[0] for entry in self._timers[:1]]
        wanted[self._control] = {selectors.EVENT_READ: self._obey}
        for link in self._links.values():
            if link.accepts:
                for door, listener in link.listeners.items():
                    wanted[listener] = {selectors.EVENT_READ: partial(self._accept, link, *door)}
            for connection in link.connections:
                for rank, stream in connection.items():
                    move = partial(self._move, link, connection, rank)
                    if stream.reads:
                        wanted.setdefault(stream.source, {})[selectors.EVENT_READ] = partial(move, _Stream.read)
                    at = stream.writes_at()
                    if at <= now:
                        wanted.setdefault(stream.target, {})[selectors.EVENT_WRITE] = partial(move, _Stream.write)
                    else:
                        times.append(at)
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in wanted:
                self._selector.unregister(key.fileobj)
        for sock, calls in wanted.items():
            known = sock in self._selector.get_map()
            (self._selector.modify if known else self._selector.register)(sock, sum(calls), calls)
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(soonest - now, 0.0)

    def _obey(self) -> None:
        with contextlib.suppress(OSError), self._control.accept()[0] as stream:
            stream.settimeout(10)
            verb, args, after = json.loads(stream.makefile().readline())
            answer = "done"
            try:
                if after:
                    heapq.heappush(self._timers, (time.monotonic() + after, next(self._numbers), verb, args))
                else:
                    getattr(self, f"_{verb}")(*args)
            except Exception as error:
                answer = repr(error)
            stream.sendall(answer.encode() + b"\n")

    def _accept(self, link: _Link, rank: int, plane: int) -> None:
        other = sum(link.ranks) - rank
        with contextlib.suppress(BlockingIOError):
            dialer = link.listeners[rank, plane].accept()[0]
            listener = socket.socket()
            try:
                if link.refuses or (rank, plane) not in link.targets:
                    raise ConnectionRefusedError
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL)
                listener.settimeout(1)
                listener.connect(link.targets[rank, plane])
            except OSError:
                _reset(dialer)
                listener.close()
                return
            for stream in (dialer, listener):
                stream.setblocking(False)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sides = {other: _Stream(link.ways[other], listener, dialer), rank: _Stream(link.ways[rank], dialer, listener)}
            link.connections.append(sides)
            self.carried.add(link.ranks)

    def _move(self, link: _Link, connection: dict[int, _Stream], rank: int, move: Callable[[_Stream], None]) -> None:
        if connection not in link.connections:  # ended by an event before this one
            return
        stream, (low, high) = connection[rank], link.ranks
        try:
            move(stream)
        except BlockingIOError:
            return
        except OSError:
            broken = rank if move is _Stream.read else low + high - rank
            self._end(link, connection, [broken] if link.ways[broken].holds else [low, high])
            return
        if all(stream.closed for stream in connection.values()):
            self._end(link, connection, [low, high])

    def _end(self, link: _Link, connection: dict[int, _Stream], sides: Sequence[int]) -> None:
        """Ends the proxy's part in a connection: resets these workers' sides, and leaves the others' open."""
        link.connections.remove(connection)
        for rank, stream in connection.items():
            if rank in sides:
                _reset(stream.source)
            else:
                if len(self._orphans) == _ORPHANS:
                    self._orphans[0].close()
                self._orphans.append(stream.source)

    def _change(self, source: int, target: int, settings: dict[str, Any]) -> None:
        way = self._link(source, target).ways[source]
        for name, value in settings.items():
            setattr(way, name, value)
        way.count = 0

    def _cut(self, a: int, b: int, refuse: bool) -> None:
        link = self._link(a, b)
        link.refuses = refuse
        for connection in list(link.connections):
            self._end(link, connection, [a, b])

    def _half_open(self, gone: int, unaware: int) -> None:
        link = self._link(gone, unaware)
        for connection in list(link.connections):
            self._end(link, connection, [gone])

    def _partition(self, some: Sequence[int], others: Sequence[int]) -> None:
        for a, b in itertools.product(some, others):
            self._change(a, b, {"holds": True})
            self._change(b, a, {"holds": True})

    def _heal(self) -> None:
        for link in self._links.values():
            link.refuses = False
            for way in link.ways.values():
                vars(way).update(vars(_Way()))

    def _wake(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _route(self, dialer: int, listener: int, host: str, *ports: int) -> None:
        for plane, port in enumerate(ports):
            self._link(dialer, listener).targets[dialer, plane] = (host, port)

    def _close(self) -> None:
        self._closing = True

    def _link(self, a: int, b: int) -> _Link:
        return self._links[min(a, b), max(a, b)]


def _reset(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    stream.close()


# -- workers ---------------------------------------------------------------------------------------------------------------


def connect_through(links: RemoteLinks, rank: int) -> None:
    """In a worker, before it connects: its exchanges go over TCP and through the proxy, as if it was alone on its host."""
    from decent_dp.transport import process_group, rendezvous
    from decent_dp.transport.addresses import probe
    from decent_dp.transport.dialling import Target

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous.network_stack = lambda: f"host of worker {rank}"

    def find_proxy(rendezvous: Any, peer: int, seconds: float, incarnation: int, answers: float) -> Target:
        address = rendezvous.address_of(peer, incarnation, seconds)
        if rank < peer:  # sees whether anybody listens, which the proxy hides
            probe(address, rendezvous.node, min(seconds, answers)).close()
        links.route(rank, peer, address["host"], address["port"], address["bulk"])
        control, bulk = (f"tcp://127.0.0.1:{port}" for port in links.ports[rank, peer])
        return Target(control, bulk, bytes.fromhex(address["key"]), f"{address['host']} port {address['port']}")

    process_group.find = find_proxy


# Points of a round. "mid message": ``Fault.sent`` bytes of its message were handed to libzmq, and more are to come.
Where: TypeAlias = Literal["before start", "after start", "before finish", "mid message", "mixed"]
WHERES: tuple[Where, ...] = ("before start", "after start", "before finish", "mid message", "mixed")
# Bytes of a frame where a message is to be interrupted.
_SMALL_FRAME = 128


@dataclass(frozen=True)
class Fault:
    """Worker ``rank`` calls ``action(worker)`` once, at a point of a round. Actions can be pickled: ``die``, ``freeze(...)``,
    ``ask(...)``, and the test's own.

    Attributes:
        sent: bytes of the message that are out, with "mid message". The transport's thread then runs the action.
    """

    rank: int
    round: int
    where: Where
    action: Callable[[Any], None]
    sent: int = 256


def inject(worker: Any, faults: Iterable[Fault]) -> None:
    """In a worker: makes the faults of its rank happen.

    Args:
        worker: has ``rank`` and ``links``, and whatever else the actions use.
    """
    from decent_dp.engine import Bucket, Engine
    from decent_dp.transport import flow

    mine = [fault for fault in faults if fault.rank == worker.rank]

    def reach(where: Where, round_: int, sent: float = math.inf) -> None:
        for fault in list(mine):
            if (fault.where, fault.round) == (where, round_) and sent >= fault.sent:
                mine.remove(fault)
                fault.action(worker)

    def before_finish(engine: Any, bucket: Any, *_: Any) -> None:
        if bucket.in_flight is not None:
            reach("before finish", bucket.in_flight.round.number)

    def after_frame(_: Any, __: Any, sending: Any) -> None:
        reach("mid message", sending.key[0], sending.written)

    around(Engine, "start", before=lambda engine, *_: reach("before start", engine.round))
    around(Engine, "start", after=lambda engine, *_: reach("after start", engine.round))
    around(Engine, "finish", before=before_finish)
    around(Bucket, "mix", after=lambda _, in_flight, *__: reach("mixed", in_flight.round.number))
    if any(fault.where == "mid message" for fault in mine):
        flow.LARGEST_FRAME = _SMALL_FRAME
        around(flow.Flow, "_send_frame", after=after_frame)


def around(
    owner: Any, name: str, *, before: Callable[..., None] = lambda *_: None, after: Callable[..., None] = lambda *_: None
) -> None:
    """Calls ``before`` and ``after`` with the arguments of each call of a method, for as long as this process lives."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = inner(*args, **kwargs)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def die(worker: Any) -> None:
    """An action."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(seconds: float) -> Callable[[Any], None]:
    """An action: the process stops, and the proxy continues it after so many seconds."""
    return partial(_freeze, seconds=seconds)


def ask(verb: str, *args: Any, after: float = 0.0) -> Callable[[Any], None]:
    """An action: a method of ``Links``."""
    return partial(_ask, verb=verb, args=args, after=after)


def _freeze(worker: Any, seconds: float) -> None:
    worker.links.wake(os.getpid(), after=seconds)
    os.kill(os.getpid(), signal.SIGSTOP)


def _ask(worker: Any, verb: str, args: Sequence[Any], after: float) -> None:
    getattr(worker.links, verb)(*args, after=after)
