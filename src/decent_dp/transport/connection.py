"""What the links know of one peer: what goes to it, what comes from it, and the frames in between.

A frame is a header and a body. Data frames carry a part of a message, offers say that there is one, grants ask for a part of
it, notes carry a few bytes that nobody asked for, and a hello says who is there.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from decent_dp.errors import WireError

__all__ = [
    "DATA",
    "GRANT",
    "HEADER",
    "HELLO",
    "LOCAL",
    "LOOK",
    "NOTE",
    "OFFER",
    "VERSION",
    "WINDOW",
    "Connection",
    "Key",
    "Lane",
    "Receiving",
    "Sending",
    "check_size",
    "greet",
    "round_trip_us",
    "tune",
    "unacknowledged",
]

# Bytes asked for and not there yet: this, and from one peer alone twice what the link to it holds (its rate times the time
# in which a grant takes effect), at most ``_MOST``. With less, a link starves while the next grant for it waits behind the
# data of the other direction; with more, queues overflow, and two streams share a link for long at a change of rounds.
WINDOW = 2**19
_MOST = 2**25
# Seconds over which a rate is taken.
_SPELL = 0.05
# Bytes that the kernel holds of a connection and has not sent.
_UNSENT = 2**16
# A link is full of messages while so many bytes of them are with the kernel; seconds between two looks, as no event tells.
_FULL = _UNSENT
LOOK = 0.005
# The family of connections within a network stack.
LOCAL = getattr(socket, "AF_UNIX", None)
# Below this first round trip two workers are at one site. (A busy machine takes some milliseconds to answer.)
_SAME_SITE_US = 30_000
# (round, bucket, slot): what a message is. Slots number the messages of one exchange.
Key: TypeAlias = tuple[int, int, int]
# What is needed first: by what it is, then by when it was added.
Turn: TypeAlias = tuple[Key, int]

# kind, version, length of what follows, round, bucket, slot, offset in the message, length of the message, and, of the first
# data after a grant, the microseconds since the grant came.
HEADER = struct.Struct("<HHIqIIQQI")
VERSION = 3
DATA, OFFER, GRANT, NOTE, HELLO = range(1, 6)


@dataclass(eq=False)
class Sending:
    """A message on its way out. ``ready`` may grow while it is being written; ``done`` is called in the links' thread."""

    peer: int
    key: Key
    data: memoryview
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    ready: int = 0
    granted: int = 0
    granted_at: float = 0.0
    written: int = 0
    order: int = -1
    queued: bool = False
    offered: bool = False

    @property
    def turn(self) -> Turn:
        return self.key, self.order

    @property
    def sendable(self) -> bool:
        return min(self.ready, self.granted) > self.written


@dataclass(eq=False)
class Receiving:
    """A message that is due. ``into`` gives its memory when its first bytes are asked for."""

    peer: int
    key: Key
    size: int
    into: Callable[[], memoryview]
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    granted: int = 0
    received: int = 0
    order: int = -1
    memory: memoryview | None = None

    @property
    def turn(self) -> Turn:
        return self.key, self.order


@dataclass(eq=False)
class Lane:
    """What shares a wire: its sendings in the order of need, and the receivings that were offered and still have to be
    asked for.

    Attributes:
        near: within a node, where nothing is scarce.
        outstanding: bytes asked for and not there yet.
        busy: a connection in the middle of a frame of data; nothing else of this lane may go before.
        held: the message whose turn it is waits for another's bytes to arrive.
    """

    near: bool
    heap: list[tuple[Turn, Sending]] = field(default_factory=list)
    due: list[tuple[Turn, Receiving]] = field(default_factory=list)
    outstanding: int = 0
    busy: Connection | None = None
    held: bool = False

    def holds(self, sending: Sending, connections: Iterable[Connection]) -> bool:
        """Whether a message has to wait, as the link is full of what goes to another peer in an earlier round.

        The peer of the later round may have asked long ago, as it has nothing else to do. The kernel would give either half of
        the link, and the earlier exchange, for which both its members wait, would take twice as long.
        """
        others = (other for other in connections if other.lane is self and other.peer != sending.peer)
        self.held = not self.near and any(other.is_full_before(sending.key[0]) for other in others)
        return self.held


class Connection:
    """One peer: what goes to it, what comes from it. Used by the links' thread alone."""

    def __init__(self, peer: int, lane: Lane) -> None:
        self.peer, self.lane = peer, lane
        self.socket: socket.socket | None = None
        # Asked for and not there yet, in bytes; when (the first of) it was asked for; and what the link to the peer can do:
        # bytes a second, and seconds from a grant to its first bytes.
        self.outstanding = 0
        self.asked: float | None = None
        self.latency = 0.0
        self.rate = 0.0
        self.spell = 0.0
        self.came = 0
        self.moved = 0.0  # when a part of a message last came or went
        self.low_water = 1  # bytes that have to be there before the socket counts as readable
        self.lost: str | None = None
        self.cause: BaseException | None = None
        self.mute = False  # the peer takes nothing any more; what it has sent may still be read
        self.writing = False  # registered for it
        # Frames that go before any data, and what is left of the one being written.
        self.control: deque[bytes] = deque()
        self.out: list[memoryview] = []
        self.current: tuple[Sending, int] | None = None
        self.sendings: dict[Key, Sending] = {}
        self.receivings: dict[Key, Receiving] = {}
        self.early_grants: dict[Key, tuple[int, int]] = {}
        self.early_offers: set[Key] = set()
        # What is being read.
        self.header = bytearray(HEADER.size)
        self.have = 0
        self.frame: tuple[int, Key, int] | None = None
        self.body: memoryview | None = None
        self.filled = 0

    def is_full_before(self, round_: int) -> bool:
        """The kernel holds messages, and there is more to come of rounds before this one."""
        earliest = next(iter(self.sendings), None)  # they are added round by round
        before = earliest is not None and earliest[0] < round_
        return before and self.socket is not None and unacknowledged(self.socket) >= _FULL

    def window(self) -> int:
        """Bytes that may be asked for on this connection's lane and not be there yet."""
        if self.lane.near:
            return 4 * WINDOW
        if self.lane.outstanding > self.outstanding:
            return WINDOW
        return max(WINDOW, min(_MOST, int(2 * self.rate * self.latency)))

    def answered(self, age: int) -> None:
        """Data have come; if they are the first after a grant, the peer took ``age`` microseconds for them."""
        if self.asked is not None:
            latency = max(time.monotonic() - self.asked - 1e-6 * age, 0.0)
            self.latency = min(self.latency or math.inf, latency)
            self.asked = None

    def measure(self, count: int) -> None:
        """Bytes of messages have come that were asked for."""
        now = time.monotonic()
        self.came += count
        if now - self.spell >= _SPELL:
            # Spells in which the peer had nothing to send say little: an old rate is given up slowly.
            self.rate = max(self.came / (now - self.spell), 0.9 * self.rate)
            self.spell, self.came = now, 0


def greet(stream: socket.socket, rank: int, token: bytes) -> None:
    """The first frame of whoever has connected; where it cannot be sent the stream is closed."""
    try:
        stream.sendall(HEADER.pack(HELLO, VERSION, len(token), rank, 0, 0, 0, 0, 0) + token)
    except OSError:
        stream.close()
        raise


def check_size(rank: int, peer: int, key: Key, theirs: int, ours: int) -> None:
    """Raises WireError when a message of ``peer`` has another size than the one that is due."""
    if theirs != ours:
        raise WireError(
            f"round {key[0]}, bucket {key[1]}: worker {peer} has a message of {theirs} bytes where worker {rank} has one of "
            f"{ours}. The workers run different versions or have got out of step; start them together from one installation."
        )


def tune(stream: socket.socket) -> None:
    """Sets what suits messages both ways at once over a link that they fill."""
    if stream.family == LOCAL:
        return
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        # BBR paces by the shortest round trip that it has seen. Within a site that is some microseconds, and tens of
        # milliseconds once acknowledgements wait behind the data of the other direction: for seconds it then sends at a tenth
        # of the rate. Far peers, and losses, are what it was made for: there it stays.
        now = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        if now == b"bbr" and round_trip_us(stream) < _SAME_SITE_US:
            for better in (b"cubic", b"reno"):
                with contextlib.suppress(OSError):
                    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, better)
                    break


def round_trip_us(stream: socket.socket) -> int:
    """The smoothed round trip of a connection, in microseconds, as Linux measures it from the handshake on."""
    info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, 68)[0])  # tcpi_rtt


def unacknowledged(stream: socket.socket | None) -> int:
    """Bytes that were written to ``stream`` and have not arrived; 0 where the system does not tell."""
    try:
        import fcntl
        import termios

        answer = fcntl.ioctl(stream.fileno(), termios.TIOCOUTQ, bytes(4))  # type: ignore[union-attr]
        return int.from_bytes(answer, sys.byteorder)
    except (ImportError, AttributeError, OSError):
        return 0
