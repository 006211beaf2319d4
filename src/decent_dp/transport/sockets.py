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
import threading
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import zmq
from zmq.utils import z85

from decent_dp.transport.messages import HEADER_BYTES, LARGEST_FRAME

__all__ = ["SILENT", "Curve", "Event", "Socket", "Sockets", "shut_down"]

# The oldest with ``recv_into``. An installation may have been changed after this package's.
_OLDEST = (26, 4)
if zmq.pyzmq_version_info()[:2] < _OLDEST:
    raise ImportError(f"decent_dp needs pyzmq 26.4 or newer, and {zmq.__version__} is installed: pip install --upgrade pyzmq")

# zmq's sockets are generic in the type of what they receive.
ZmqSocket: TypeAlias = Any

# Seconds for which a worker that ends waits until the kernel has what was sent.
_LINGER = 0.2
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
# libzmq's limit of the time that a heartbeat may take, in seconds.
_LONGEST_HEARTBEAT = 60.0
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_LISTENING
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
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


@dataclass(frozen=True)
class Event:
    """What happened to a connection of a socket.

    Attributes:
        kind: one of zmq's EVENT_ constants.
        descriptor: of the connection, for those kinds that have one.
        inode: of a connection that begins; it tells whether the descriptor is still that connection's. 0 if it has ended.
    """

    kind: int
    descriptor: int
    inode: int = 0

    @property
    def is_end(self) -> bool:
        failed = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        return self.kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED, *failed)


class Socket:
    """A socket and its monitor.

    Attributes:
        is_router: it listens, and each message begins with the routing id of the connection.
        curve: the keys with which it encrypts; None: it does not.
        endpoint: of a listener, with its port.
    """

    def __init__(self, context: zmq.Context[Any], kind: int, curve: Curve | None) -> None:
        self.is_router, self.curve = kind == zmq.ROUTER, curve
        self.endpoint = ""
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
                self.zmq.set(zmq.ZAP_DOMAIN, b"decent_dp")
        self.monitor: ZmqSocket = self.zmq.get_monitor_socket(_EVENTS)

    @property
    def is_guarded(self) -> bool:
        """Whether libzmq lets only those send who have a key, or are processes of this user."""
        return self.curve is not None or self.endpoint.startswith("ipc://")

    @property
    def is_open_to_others(self) -> bool:
        """Whether others may see what passes, and connect: it is not of this machine alone, and does not encrypt."""
        return self.curve is None and self.endpoint.startswith("tcp://") and "//127." not in self.endpoint

    def events(self) -> list[Event]:
        """What has happened since the last call. Descriptors are noted, for child processes that must not keep them."""
        found = []
        with contextlib.suppress(zmq.Again):
            while True:
                kind, descriptor = _EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                begins = kind in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED, zmq.EVENT_LISTENING)
                found.append(Event(kind, descriptor, _note(self, descriptor) if begins else 0))
                if found[-1].is_end:
                    _NOTED.pop((self, descriptor), None)
        return found

    def close(self) -> None:
        self.zmq.disable_monitor()  # before its socket is closed: else that hangs
        self.monitor.close()
        self.zmq.close()
        with _LOCK:
            for noted in [noted for noted in _NOTED if noted[0] is self]:
                del _NOTED[noted]


class Sockets:
    """All sockets of a worker. Once they are made, one thread uses them.

    Args:
        dead_after: seconds without a sign of life after which a peer is dead. Each end of a connection sends heartbeats of its
            own and cuts it in time: an end that only asks the other one for them (HEARTBEAT_TTL) stops its timer at any other
            message, and misses a peer that freezes before its next heartbeat.
        breaks: the connection is cut before, when the edges of a silent worker are holes.

    Attributes:
        authenticator: the socket at which libzmq asks whether a key may connect (ZAP, RFC 27); None: no listener encrypts.
    """

    def __init__(self, dead_after: float, *, breaks: bool, io_threads: int = 1) -> None:
        most = min(dead_after, _LONGEST_HEARTBEAT)
        self._every, self._answered = most * _EVERY, most * ((SILENT if breaks else 1.0) - _EVERY)
        self._context = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        for option in (zmq.LINGER, zmq.RCVHWM, zmq.SNDHWM):  # of all sockets, the monitors too
            self._context.setsockopt(option, 0)
        self._made: list[Socket] = []
        self.authenticator: ZmqSocket = None

    def listen(self, endpoint: str, curve: Curve | None = None, *, beats: bool = True) -> Socket:
        """A socket that is bound there; a port may be ``*``.

        Args:
            beats: there are heartbeats.

        Raises:
            OSError: the address is in use, or is none of this machine.
        """
        if curve is not None and self.authenticator is None:  # before anybody can connect, who would be refused
            self.authenticator = self._context.socket(zmq.ROUTER)
            self.authenticator.bind("inproc://zeromq.zap.01")
        made = self._make(zmq.ROUTER, curve, beats=beats)
        made.zmq.set(zmq.IPV6, "[" in endpoint)
        try:
            made.zmq.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(made)
            raise OSError(error.errno, f"{error.strerror}: {endpoint}") from None
        made.endpoint = made.zmq.get(zmq.LAST_ENDPOINT).decode()
        made.events()
        return made

    def dial(self, endpoint: str, routing_id: bytes, curve: Curve | None, server: bytes, *, beats: bool = True) -> Socket:
        """A socket that connects to a listener. The first event of its monitor says whether it has.

        Args:
            server: the public key of the listener.
            beats: there are heartbeats.
        """
        made = self._make(zmq.DEALER, curve, beats=beats)
        made.zmq.set(zmq.IPV6, "[" in endpoint)
        made.zmq.set(zmq.ROUTING_ID, routing_id)
        if curve is not None:
            made.zmq.set(zmq.CURVE_SERVERKEY, server)
        made.zmq.connect(endpoint)
        return made

    def _make(self, kind: int, curve: Curve | None, *, beats: bool) -> Socket:
        made = Socket(self._context, kind, curve)
        if beats:
            made.zmq.set(zmq.HEARTBEAT_IVL, int(1000 * self._every))
            made.zmq.set(zmq.HEARTBEAT_TIMEOUT, int(1000 * self._answered))
        else:  # a router between two networks forgets a connection that carries nothing for long
            for option, value in ((zmq.TCP_KEEPALIVE, 1), (zmq.TCP_KEEPALIVE_IDLE, 30), (zmq.TCP_KEEPALIVE_INTVL, 10)):
                made.zmq.set(option, value)
        self._made.append(made)
        return made

    def close(self, made: Socket) -> None:
        self._made.remove(made)
        made.close()

    def close_all(self) -> None:
        for made in self._made:
            made.zmq.set(zmq.LINGER, int(1000 * _LINGER))
            made.close()
        self._made.clear()
        if self.authenticator is not None:
            self.authenticator.close()
        self._context.term()


def shut_down(descriptor: int, inode: int) -> None:
    """Ends a connection of a listener, which libzmq cannot end by itself."""
    with contextlib.suppress(OSError):
        copy = os.dup(descriptor)
        if not _inode_of(copy) == inode > 0:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            connection.shutdown(socket.SHUT_RDWR)


# A child process, such as a worker of a DataLoader, may outlive its parent. While it holds a copy of a connection, the other
# end does not notice that the parent has died. By socket and descriptor: the inode, which tells whether it is the same
# connection still.
_NOTED: dict[tuple[Socket, int], int] = {}
_LOCK = threading.Lock()


def _inode_of(descriptor: int) -> int:
    """The inode of a connection; 0: the descriptor is closed, or a file of the user's by now."""
    with contextlib.suppress(OSError):
        found = os.fstat(descriptor)
        return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0
    return 0


def _note(of: Socket, descriptor: int) -> int:
    inode = _inode_of(descriptor)
    if inode:
        with _LOCK:
            _NOTED[of, descriptor] = inode
    return inode


def _close_in_child() -> None:
    for (_, descriptor), inode in _NOTED.items():
        if _inode_of(descriptor) == inode:
            os.close(descriptor)
    _NOTED.clear()
    _LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_close_in_child)
