"""The state of the connection to one peer, and of the link that connections share. Changed by the reactor's thread alone, but
for the breaks of late exchanges; other threads read single fields."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decent_dp.transport.link import Key, Link, LinkState, Message, Pair, Priority, Receiving, Sending
from decent_dp.transport.tcp.pace import Pace
from decent_dp.transport.tcp.protocol import HEADER_SIZE, Frame

__all__ = [
    "LOCAL",
    "WINDOW",
    "Connection",
    "LinkState",
    "Message",
    "Pair",
    "Receiving",
    "Sending",
    "SharedLink",
    "configure",
    "unacknowledged",
]

_log = logging.getLogger(__name__)

# Bytes that were granted and have not arrived: at least this, and from one peer alone twice what its link holds (its rate
# times the time in which a grant takes effect), at most ``_LARGEST_WINDOW``. With less, a link starves while the next grant
# waits behind the data of the other direction. With more, queues overflow, and two streams share a link for long at a change
# of rounds (docs/log.md, 2026-11-21, "why full links ran dry"). From the peers of a group a chunk of each, so that one that is
# busy with others does not keep the rest waiting, up to 3 MiB (2026-11-26, "'complete' over slow links").
WINDOW, _WINDOW_OF_MANY, _MANY = 2**19, 2**18, 12
_LARGEST_WINDOW = 2**25
# A link is full of messages while the kernel holds so many bytes of them.
_FULL = 2**16
# The address family of connections within a network stack.
LOCAL = getattr(socket, "AF_UNIX", None)
# Names of TCP congestion controls, separated by commas, of which the first that the system permits is used.
_CONGESTION_CONTROL = "DECENT_DP_CONGESTION_CONTROL"


@dataclass(eq=False)
class SharedLink:
    """The connections that share a physical link: all inside this node, or all to other nodes.

    Attributes:
        local: within a node, where nothing is scarce.
        sendings: those with something to send, a heap by priority.
        offered: receivings that were offered and not granted in full, a heap by priority.
        outstanding: bytes granted that have not arrived.
        busy: a connection in the middle of a DATA frame; no other data of this link may go before.
        waiting: the message of highest priority waits until the kernel has sent another peer's bytes.
    """

    local: bool
    sendings: list[tuple[Priority, Sending]] = field(default_factory=list)
    offered: list[tuple[Priority, Receiving]] = field(default_factory=list)
    outstanding: int = 0
    busy: Connection | None = None
    waiting: bool = False

    def must_wait(self, sending: Sending, connections: Iterable[Connection]) -> bool:
        """Whether a message has to wait because the link is full of messages to another peer in an earlier round.

        The peer of the later round may have granted it long ago, because it has nothing else to do. The kernel would give
        each half of the link, and the earlier exchange, for which both its members wait, would take twice as long. Messages of
        groups, which have steps, do not wait: one to another peer mostly uses a part of the link that is free.
        """
        others = (other for other in connections if other.link is self and other.peer != sending.peer)
        self.waiting = not (self.local or sending.step) and any(other.is_full_before(sending.key[0]) for other in others)
        return self.waiting


class Connection(Link):
    """The connection to one peer, with the frames in both directions.

    Attributes:
        write_failed: the peer reads nothing any more; what it had sent may still be read.
    """

    def __init__(self, peer: int, link: SharedLink, selector: selectors.BaseSelector) -> None:
        super().__init__(peer)
        self.link = link
        self._selector = selector
        self.socket: socket.socket | None = None
        # Bytes of dropped messages that were granted and will still come.
        self.unwanted: dict[Key, int] = {}
        # Whether bodies carry checksums: not within a machine.
        self.checked = True
        self.write_failed = False
        # Bytes granted that have not arrived, when the first of them were granted, and what the link to the peer can do: the
        # seconds from a grant to its first bytes.
        self.outstanding = 0
        self._granted_at: float | None = None
        self._latency = 0.0
        # What is worth a turn of the thread: of bytes that come, and of bytes that go.
        self.coming, self.going = Pace(), Pace()
        # Being written: frames that go before any data, and what is left of the frames at hand.
        self.control: deque[bytes] = deque()
        self.out: list[memoryview] = []
        self.current: tuple[Sending, int] | None = None
        self.early_grants: dict[Key, tuple[int, int]] = {}
        self._writing = False
        # Being read: the header, then the body.
        self.early_offers: set[Key] = set()
        self.header = bytearray(HEADER_SIZE)
        self.header_view = memoryview(self.header)
        self.frame: Frame | None = None
        self.body: memoryview | None = None
        self.filled = 0
        self._low_water = 1

    def has_begun(self, key: Key) -> bool:
        return key in self.early_offers or key in self.early_grants

    def silence(self, now: float) -> float:
        if self.state is LinkState.GONE:
            return math.inf
        return 0.0 if self.state is LinkState.NEW else now - self.heard

    # -- the socket ---------------------------------------------------------------------------------------------------

    def open(self, stream: socket.socket, dead_after: float | None) -> None:
        """Raises OSError if the peer is gone already; ``dead_after``: as of ``configure``."""
        stream.setblocking(False)
        self.socket = stream
        self.enter(LinkState.OPEN)
        self.heard, self.unheard = self.since, 0.0
        self.write_failed = self.refused = False
        self.checked = stream.family != LOCAL
        self.coming, self.going = Pace(), Pace()  # it may take another, slower route
        configure(stream, dead_after)
        self.hold_unsent()
        self._selector.register(stream, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Closes the socket, and forgets what was half written or half read."""
        self._writing, self._low_water = False, 1
        self.frame = self.body = None
        self.filled = 0
        if self.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.socket)
            self.socket.close()
            self.socket = None
        self.drop_output()

    def rewind(self) -> None:
        """Messages begin anew on the next connection. Nothing of them can be sent before that."""
        for receiving in self.receivings.values():
            receiving.received = receiving.granted = 0
        for sending in self.sendings.values():
            sending.written = sending.granted = 0
            sending.offered = False

    def drop_output(self) -> None:
        """Drops what is being written."""
        if self.link.busy is self:
            self.link.busy = None
        self.current, self.out = None, []
        self.control.clear()

    def watch_writing(self, writing: bool) -> None:
        if writing != self._writing and self.socket is not None:
            self._writing = writing
            self._selector.modify(self.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0), self)

    @property
    def has_output(self) -> bool:
        """There are frames that nobody writes: the kernel has not refused any."""
        return self.socket is not None and bool(self.out or self.control) and not self._writing

    def wait_for_bytes(self) -> None:
        """Bytes come packet by packet: the thread sleeps until half a piece of them, or the rest, are there."""
        left = 1 if self.body is None else min(len(self.body) - self.filled, self.coming.piece // 2)
        if self.socket is not None and left != self._low_water and self.socket.family != LOCAL:
            self._low_water = left
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, left)

    def hold_unsent(self) -> None:
        """Lets the kernel hold a piece that it has not sent."""
        if self.socket is not None and self.socket.family != LOCAL:
            _hold_unsent(self.socket, self.going.piece)

    def is_full_before(self, round_: int) -> bool:
        """Whether the kernel holds messages and there is more to come of rounds before this one."""
        # They are added round by round. Written ones are there until the peer has voted.
        earliest = next((key for key, sending in self.sendings.items() if sending.written < sending.size), None)
        before = earliest is not None and earliest[0] < round_
        return before and self.socket is not None and unacknowledged(self.socket) >= _FULL

    # -- flow control -------------------------------------------------------------------------------------------------

    def window(self, sources: int) -> int:
        """Bytes that may be granted on this connection's link and not have arrived; ``sources``: as of ``Receiving``."""
        if self.link.local:
            return 4 * WINDOW
        least = max(WINDOW, _WINDOW_OF_MANY * min(sources, _MANY), 4 * self.coming.piece)
        if self.link.outstanding > self.outstanding:
            return least
        return max(least, min(_LARGEST_WINDOW, int(2 * self.coming.rate * self._latency)))

    def count_granted(self, amount: int) -> None:
        if self.outstanding == 0:
            self._granted_at = time.monotonic()
            self.coming.begin(self._granted_at)
        self.link.outstanding += amount
        self.outstanding += amount

    def count_arrived(self, amount: int) -> None:
        self.link.outstanding -= amount
        self.outstanding -= amount

    def measure_latency(self, age: int) -> None:
        """Data have come. If they are the first after a grant, the peer needed ``age`` microseconds for them."""
        if self._granted_at is not None:
            latency = max(time.monotonic() - self._granted_at - 1e-6 * age, 0.0)
            self._latency = min(self._latency or math.inf, latency)
            self._granted_at = None


def configure(stream: socket.socket, dead_after: float | None = None) -> None:
    """Sets what suits messages in both directions at once over a link that they fill.

    Args:
        dead_after: seconds without an answer of the peer's kernel after which this one breaks the connection; None: as long
            as it likes.
    """
    if stream.family == LOCAL:
        return
    if dead_after is not None:
        with contextlib.suppress(OSError, AttributeError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * dead_after))
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                stream.setsockopt(socket.IPPROTO_TCP, option, max(1, int(dead_after / 4)))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wanted = [name.strip() for name in os.environ.get(_CONGESTION_CONTROL, "").split(",") if name.strip()]
    for name in wanted:
        with contextlib.suppress(OSError, AttributeError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return
    if wanted:
        _warn_of_congestion_control(",".join(wanted))


def _hold_unsent(stream: socket.socket, amount: int) -> None:
    """The kernel takes little that it cannot send, so that grants and the next message's frames do not wait behind it."""
    with contextlib.suppress(OSError, AttributeError):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, amount)


@functools.cache  # one warning per process, not per connection
def _warn_of_congestion_control(wanted: str) -> None:
    _log.warning(
        "%s=%s: the system permits none of these (net.ipv4.tcp_allowed_congestion_control), and its own is used",
        _CONGESTION_CONTROL,
        wanted,
    )


def unacknowledged(stream: socket.socket | None) -> int:
    """Bytes that were written to ``stream`` and have not arrived; 0 where the system cannot say."""
    try:
        import fcntl
        import termios

        answer = fcntl.ioctl(stream.fileno(), termios.TIOCOUTQ, bytes(4))  # type: ignore[union-attr]
        return int.from_bytes(answer, sys.byteorder)
    except (ImportError, AttributeError, OSError):
        return 0
