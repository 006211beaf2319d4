"""Makes the ZeroMQ sockets of a worker: all options are set here, before a socket is bound or connected, as libzmq ignores them
later.

No socket connects again by itself, because libzmq loses what was queued without a word. None has a mark for messages, as it
counts messages and no bytes; the receivers' windows bound the memory (``flow``). Monitors are read by the transport's thread:
one that nobody reads would stop its socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import zmq
from zmq.utils import z85

from decent_dp.transport.messages import CONTROL, HEADER_BYTES, LARGEST_FRAME

__all__ = ["SILENT", "Channel", "Curve", "Event", "Socket", "Sockets", "rest_of"]

# zmq's sockets are generic in the type of what they receive.
ZmqSocket: TypeAlias = Any

# Seconds that libzmq may take to hand a few small messages to the kernel.
_FLUSHED = 0.2
# Seconds that it may take to see that a connection was shut down (usually less than a millisecond).
_ENDED = 2.0
# Seconds between two looks whether it has.
_LOOK = 0.0005
# Milliseconds, for days: a socket is closed once its connection has ended. At -1, or with IMMEDIATE, libzmq would at once drop
# what has come over it and was not read yet.
_NEVER = 2**29
# Seconds that a connection may take to speak ZeroMQ, and to prove its key.
_HANDSHAKE = 3.0
# Sockets of a worker: a partner needs two, and each has a monitor, which takes two.
_MOST_SOCKETS = 2**16 - 1
# The part of ``dead_after`` after which the edges of a silent worker are holes: so long takes a heartbeat that is not answered.
SILENT = 0.3
_EVERY = 0.05
# The first frame of a monitor's message: the kind of the event, and its value.
_EVENT = struct.Struct("=Hi")
# libzmq counts the milliseconds of a heartbeat in 31 bits.
_LONGEST_HEARTBEAT = 2e6
# pyzmq copies frames below this, and all of a control connection; the memory of others is lent to libzmq.
_COPIED = 2**16
# Plain numbers: zmq's flags take longer to combine than a frame to send.
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# Not HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 forgets the error while it reports a frame that was changed on its way. The
# connection stays and is read no more; if the peer then ends it, the next heartbeat aborts the process.
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True)
class Curve:
    """The keys of a worker, of 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> Curve:
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))


class Event(NamedTuple):
    """What happened to a connection of a socket: one of zmq's EVENT_ constants, and the descriptor, where the kind has one."""

    kind: int
    descriptor: int

    @property
    def is_end(self) -> bool:
        return self.kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, zmq.EVENT_HANDSHAKE_FAILED_AUTH)


@dataclass(eq=False)
class Channel:
    """One connection of ZeroMQ.

    Attributes:
        plane: CONTROL or BULK.
        routing_id: at a socket that listens; empty at one that dials.
        descriptor: of the connection, at a socket that listens; -1: it has ended.
        link: the ``PeerLink`` that uses it, from when it is open on.
    """

    socket: Socket
    plane: int
    routing_id: bytes = b""
    descriptor: int = -1
    link: Any = None

    def lends(self, body: memoryview | bytes) -> bool:
        """Whether libzmq sends ``body`` from where it is. What is short is copied first, which costs less."""
        return len(body) >= _COPIED and self.plane != CONTROL

    def send(self, header: bytes, body: memoryview | bytes = b"") -> None:
        """Nothing is sent, without an error, on a connection that is lost: its end is told otherwise."""
        stream = self.socket.zmq
        if stream.closed:
            return
        try:
            if self.routing_id:
                stream.send(self.routing_id, _MORE)
            if not len(body):
                stream.send(header, _NOW)
            else:
                stream.send(header, _MORE)
                stream.send(body, _NOW, copy=not self.lends(body))
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise


class Socket:
    """A socket and its monitor.

    Attributes:
        is_router: it listens, and each message begins with the routing id of the connection.
        curve: the keys with which it encrypts; None: it does not.
        password: of connections over the network that are not encrypted; empty: of local ones. (libzmq 4.3.5 gives a
            connection a name before it has heard its own, and aborts the process if another one has it. It waits with that
            until a key or a password has been accepted.)
        authenticates: the authenticator says who may connect.
        endpoint: of a listener, with its port.
        channels: its open connections, by routing id. Who has seen one may connect to another listener with it.
    """

    def __init__(self, context: zmq.Context[Any], kind: int, curve: Curve | None, password: bytes) -> None:
        self.is_router, self.curve = kind == zmq.ROUTER, curve
        self.endpoint = ""
        self.channels: dict[bytes, Channel] = {}
        self.zmq: ZmqSocket = context.socket(kind)
        self.zmq.set(zmq.MAXMSGSIZE, LARGEST_FRAME + HEADER_BYTES)
        self.zmq.set(zmq.HANDSHAKE_IVL, int(1000 * _HANDSHAKE))
        self.zmq.set(zmq.RECONNECT_IVL, _NEVER)
        if self.is_router and hasattr(os, "getuid"):
            self.zmq.set(zmq.IPC_FILTER_UID, os.getuid())  # of local sockets: for this user's processes only
        if self.is_router:
            self.zmq.set(zmq.ROUTER_MANDATORY, 1)
            self.zmq.set(zmq.BACKLOG, 1024)
        if curve is not None:
            self.zmq.set(zmq.CURVE_PUBLICKEY, curve.public)
            self.zmq.set(zmq.CURVE_SECRETKEY, curve.secret)
            if self.is_router:
                self.zmq.set(zmq.CURVE_SERVER, 1)
        elif password and self.is_router:
            self.zmq.set(zmq.PLAIN_SERVER, 1)
        elif password:
            self.zmq.set(zmq.PLAIN_USERNAME, b"worker")
            self.zmq.set(zmq.PLAIN_PASSWORD, password)
        self.authenticates = self.is_router and bool(curve or password)
        if self.authenticates:
            self.zmq.set(zmq.ZAP_DOMAIN, b"decent_dp")
        try:
            self.monitor: ZmqSocket = self.zmq.get_monitor_socket(_EVENTS)
        except zmq.ZMQError:
            self.zmq.close()  # else the end waits for it
            raise
        # By descriptor: the inode, which tells whether it is the same connection still.
        self._connections: dict[int, int] = {}
        self._listening: dict[int, int] = {}
        _OPEN.add(self)

    @property
    def is_open_to_others(self) -> bool:
        """Whether others may see what passes, and connect: it is not of this machine alone, and does not encrypt."""
        return self.curve is None and self.endpoint.startswith("tcp://") and "//127." not in self.endpoint

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = Event(*_EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0]))
                found.append(event)
                if event.kind in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED, zmq.EVENT_LISTENING):
                    of = self._listening if event.kind == zmq.EVENT_LISTENING else self._connections
                    of[event.descriptor] = _inode_of(event.descriptor)
                elif event.kind == zmq.EVENT_DISCONNECTED:
                    self._connections.pop(event.descriptor, None)
        return found

    def hang_up(self, descriptor: int) -> None:
        """Ends a connection, which libzmq cannot do for one that was accepted. Nothing that waits is sent any more."""
        inode, own = self._connections.get(descriptor, 0), descriptor
        with contextlib.suppress(OSError):  # where none is left, that which libzmq may close meanwhile
            own = os.dup(descriptor)
        try:
            if inode and _inode_of(own) == inode:
                connection = socket.socket(fileno=own)
                with contextlib.suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
                connection.detach()
        finally:
            if own != descriptor:
                os.close(own)

    def hang_up_all(self) -> bool:
        """Returns whether libzmq has connections still."""
        self.events()
        for descriptor in self._connections:
            self.hang_up(descriptor)
        return bool(self._connections)

    def close(self) -> None:
        self.zmq.disable_monitor()  # before its socket is closed: else that hangs
        self.monitor.close()
        self.zmq.close()
        _OPEN.discard(self)

    def close_in_child(self) -> None:
        for descriptor, inode in (self._connections | self._listening).items():
            if _inode_of(descriptor) == inode != 0:
                os.close(descriptor)


class Sockets:
    """All sockets of a worker. Once they are made, one thread uses them.

    Args:
        dead_after: seconds without a sign of life after which a peer is dead. Each end of a connection sends heartbeats of its
            own, and cuts it when the edges of a silent worker are holes: an end that only asks the other one for them
            (HEARTBEAT_TTL) stops its timer at any other message, and misses a peer that freezes before its next heartbeat.
        password: for connections over the network that are not encrypted; empty: they need none.

    Attributes:
        authenticator: the socket at which libzmq asks whether somebody may connect (ZAP, RFC 27); None: all sockets are local.
        polled: by zmq's sockets, monitors among them: the socket.
    """

    def __init__(self, dead_after: float, password: bytes, *, io_threads: int = 1) -> None:
        self.dead_after, self.password = dead_after, password
        most = min(dead_after, _LONGEST_HEARTBEAT)
        self._every, self._answered = most * _EVERY, most * (SILENT - _EVERY)
        self._context = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):  # of all sockets, the monitors too
            self._context.setsockopt(option, 0)
        self._made: list[Socket] = []
        self.authenticator: ZmqSocket = None
        self._poller = zmq.Poller()
        self.polled: dict[ZmqSocket, Socket] = {}

    def listen(self, endpoint: str, curve: Curve | None = None, *, beats: bool = True) -> Socket:
        """A socket that is bound there; a port may be ``*``.

        Args:
            beats: there are heartbeats.

        Raises:
            OSError: the address is in use, or is none of this machine.
        """
        made = self._make(zmq.ROUTER, endpoint, curve, beats=beats)
        if made.authenticates and self.authenticator is None:  # before anybody can connect, who would be refused
            self.authenticator = self._context.socket(zmq.ROUTER)
            self.authenticator.bind("inproc://zeromq.zap.01")
        try:
            made.zmq.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(made)
            raise OSError(error.errno, f"{error.strerror}: {endpoint}") from None
        made.endpoint = made.zmq.get(zmq.LAST_ENDPOINT).decode()
        made.events()  # notes the descriptor
        return made

    def dial(self, endpoint: str, routing_id: bytes, curve: Curve | None, server: bytes, *, beats: bool = True) -> Socket:
        """A socket that connects to a listener. The first event of its monitor says whether it has.

        Args:
            server: the public key of the listener.
            beats: there are heartbeats.

        Raises:
            OSError: there are too many sockets, or it is no address.
        """
        made = self._make(zmq.DEALER, endpoint, curve, beats=beats)
        try:
            made.zmq.set(zmq.ROUTING_ID, routing_id)
            if curve is not None:
                made.zmq.set(zmq.CURVE_SERVERKEY, server)
            made.zmq.connect(endpoint)
        except zmq.ZMQError as error:
            self.close(made)
            raise OSError(error.errno, f"{error.strerror}: {endpoint}") from None
        return made

    def _make(self, kind: int, endpoint: str, curve: Curve | None, *, beats: bool) -> Socket:
        try:
            made = Socket(self._context, kind, curve, self.password if endpoint.startswith("tcp:") else b"")
        except zmq.ZMQError as error:  # no descriptor is left
            raise OSError(error.errno, f"{error.strerror}: {endpoint}") from None
        made.zmq.set(zmq.IPV6, "[" in endpoint)
        if beats:
            made.zmq.set(zmq.HEARTBEAT_IVL, int(1000 * self._every))
            made.zmq.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * self._answered))
        else:  # a router between two networks forgets a connection that carries nothing for long
            for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 30), (zmq.TCP_KEEPALIVE_INTVL, 10)):
                made.zmq.set(option, value)
        self._made.append(made)
        return made

    # -- what is polled -----------------------------------------------------------------------------------------------

    def wait(self, milliseconds: int) -> list[Any]:
        return [source for source, _ in self._poller.poll(milliseconds)]

    def add(self, source: Any) -> None:
        """Polls a descriptor, or a socket without a monitor."""
        self._poller.register(source, zmq.POLLIN)

    def watch(self, made: Socket) -> None:
        for stream in (made.zmq, made.monitor):
            self.polled[stream] = made
            self.add(stream)

    def pause(self, made: Socket) -> None:
        """Its messages wait."""
        self._poller.unregister(made.zmq)

    def reads(self, made: Socket) -> bool:
        """Whether its messages are to be read."""
        return made.zmq in self._poller

    def use(self, channel: Channel) -> None:
        """A connection is open."""
        channel.socket.channels[channel.routing_id] = channel
        if not (channel.routing_id or self.reads(channel.socket)):
            self.add(channel.socket.zmq)

    # -- the end ------------------------------------------------------------------------------------------------------

    def hang_up(self, channel: Channel) -> None:
        if not channel.routing_id:
            self.close(channel.socket)
        elif channel.socket.channels.get(channel.routing_id) is channel:
            del channel.socket.channels[channel.routing_id]
            if channel.descriptor >= 0:
                channel.socket.hang_up(channel.descriptor)

    def close_all(self, *, flush: bool = False) -> None:
        """``flush``: others wait for what was sent last. libzmq does not say when the kernel has it."""
        if flush:
            time.sleep(_FLUSHED)
        self.close(*self._made)
        if self.authenticator is not None:
            self.authenticator.close()
        self._context.term()

    def close(self, *closing: Socket) -> None:
        """Ends the connections first: at one that the peer ends once its socket is closed, a heartbeat aborts the process."""
        closing = tuple(made for made in closing if made in self._made)
        for stream in [stream for stream, made in self.polled.items() if made in closing]:
            del self.polled[stream]
            if stream in self._poller:
                self._poller.unregister(stream)
        until = time.monotonic() + _ENDED
        while sum(made.hang_up_all() for made in closing) and time.monotonic() < until:
            time.sleep(_LOOK)
        for made in closing:
            self._made.remove(made)
            made.close()


def rest_of(stream: ZmqSocket) -> bytes:
    """The second frame of a message; what follows it is dropped."""
    body = b""
    if stream.get(zmq.RCVMORE):
        body = stream.recv(zmq.NOBLOCK)
    while stream.get(zmq.RCVMORE):
        stream.recv(zmq.NOBLOCK)
    return body


def _inode_of(descriptor: int) -> int:
    """The inode of a connection; 0: the descriptor is closed, or a file of the user's by now."""
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0
    return 0


# A child process, such as a worker of a DataLoader, may outlive its parent. While it holds a copy of a connection, the other
# end does not notice that the parent has died.
_OPEN: weakref.WeakSet[Socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for of in list(_OPEN):
        of.close_in_child()
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
