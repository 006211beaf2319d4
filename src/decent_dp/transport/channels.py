"""The control and bulk connection to a peer, and its receive window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import zmq

from decent_dp.transport.hello import CONTROL
from decent_dp.transport.link import Key, Link, Priority, Receiving, Sending
from decent_dp.transport.messages import Header
from decent_dp.transport.sockets import Socket

__all__ = ["SMALL", "Channel", "Network", "Rate", "WireLink"]

# Messages of at most so many bytes are wanted as a whole at once: waiting would take longer than the message.
SMALL = 2**14
# Bytes that are wanted and have not arrived: so many, but no more than a link moves in a quarter of a second, as a request
# waits in the queue of the other direction, and its bytes in this one's; at least what it moves in 50 ms; and from one peer
# alone twice what the way holds, its rate times the time in which a request takes effect, up to half a second of it, as
# heartbeats and votes wait behind them. With less, a link starves while the next request waits behind the data of the other
# direction. With more, queues overflow, and two streams share a link for long at a change of rounds (docs/log.md, 2026-11-21,
# "why full links ran dry").
_USUAL, _USUAL_SECONDS, _LEAST_SECONDS, _MOST_SECONDS = 2**19, 0.25, 0.05, 0.5
# Bytes that are wanted ahead at least, and of a peer whose rate is not known.
_LEAST, _UNKNOWN = 2**16, 2**17
# From the peers of a group a chunk of each, so that one that is busy with others does not keep the rest waiting, up to 3 MiB
# (docs/log.md, 2026-11-26, "'complete' over slow links").
_OF_MANY, _MANY = 2**18, 12
# pyzmq copies frames below this, and all of a control connection; the memory of others is lent to libzmq.
_COPIED = 2**16
# Plain numbers: zmq's flags take longer to combine than a frame to send.
_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# A link is full of messages to a peer while so many bytes have not arrived there, and some did within so many seconds.
_FULL, _RECENTLY = 2**16, 0.5
# Seconds over which a rate is measured, without those between messages; or bytes: fast links bring a window in less.
_INTERVAL, _ENOUGH = 0.05, 2**21


class Rate:
    """Bytes per second, while bytes are due; 0 before the first measurement.

    Attributes:
        window: bytes that are wanted ahead.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._from, self._paused, self._bytes = 0.0, 0.0, 0

    @property
    def window(self) -> int:
        if not self.value:
            return _UNKNOWN
        return int(max(_LEAST, min(_USUAL, _USUAL_SECONDS * self.value), _LEAST_SECONDS * self.value))

    def pause(self, now: float) -> None:
        """No bytes are due."""
        self._paused = now

    def resume(self, now: float) -> None:
        """Bytes are due from now on."""
        self._from += now - self._paused

    def count(self, amount: int, now: float) -> None:
        self._bytes += amount
        seconds = now - self._from
        if seconds >= _INTERVAL or (self._bytes >= _ENOUGH and seconds > 0):
            # Intervals in which there was little to move say little: an old rate is given up slowly.
            self.value = max(self._bytes / seconds, 0.9 * self.value)
            self._from, self._paused, self._bytes = now, now, 0


@dataclass(eq=False)
class Network:
    """The links inside this node, or all to other nodes.

    Attributes:
        local: within a node, where nothing is scarce.
        sendings: those with something to send, a heap by priority.
        wanted: receivings that are offered and not wanted in full, sorted by priority.
        outstanding: bytes that are wanted and have not arrived, of those that are offered.
        waiting: the message of highest priority waits until another peer has its bytes.
    """

    local: bool
    sendings: list[tuple[Priority, Sending]] = field(default_factory=list)
    wanted: list[tuple[Priority, Receiving]] = field(default_factory=list)
    outstanding: int = 0
    coming: Rate = field(default_factory=Rate)
    waiting: bool = False

    def space(self, receiving: Receiving, link: WireLink) -> int:
        """Bytes of a message that are to be wanted now; 0 if it is too early to ask for more."""
        left = receiving.size - receiving.granted
        if self.local:
            return left
        window = self.coming.window
        if receiving.sources > 1:
            window = max(window, _OF_MANY * min(receiving.sources, _MANY))
        if self.outstanding == link.outstanding:
            window = max(window, int(link.coming.value * min(2 * link.latency, _MOST_SECONDS)))
        space = window - self.outstanding
        return min(left, space) if space >= min(left, window // 4) else 0

    def must_wait(self, sending: Sending, links: Iterable[WireLink]) -> bool:
        """Whether a message has to wait because the link is full of messages to another peer in an earlier round.

        The peer of the later round may have wanted it long ago, because it has nothing else to do. The kernel would give each
        half of the link, and the earlier exchange, for which both its members wait, would take twice as long. Messages of
        groups, which have steps, do not wait: one to another peer mostly uses a part of the link that is free.
        """
        others = (other for other in links if other.network is self and other.peer != sending.peer)
        self.waiting = not (self.local or sending.step) and any(other.is_full_before(sending.key[0]) for other in others)
        return self.waiting


@dataclass(eq=False)
class Channel:
    """One connection of ZeroMQ.

    Attributes:
        plane: of ``hello``.
        routing_id: at a socket that listens; empty at one that dials.
        descriptor: of the connection, at a socket that listens.
        link: whose it is, once it is open.
    """

    socket: Socket
    plane: int
    routing_id: bytes = b""
    descriptor: int = -1
    link: WireLink | None = None

    @property
    def route(self) -> tuple[Socket, bytes]:
        """The listener and the routing id. Who has seen a routing id may connect to another listener with it."""
        return self.socket, self.routing_id

    @property
    def accepted(self) -> tuple[Socket, int]:
        """The listener and the descriptor."""
        return self.socket, self.descriptor

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


class WireLink(Link):
    """The link to one peer, with its two connections while it is open."""

    def __init__(self, peer: int, network: Network) -> None:
        super().__init__(peer)
        self.network = network
        self.control: Channel | None = None
        self.bulk: Channel | None = None
        self.outstanding = 0
        self.coming = Rate()
        # The fewest seconds from a request, where nothing was due, to its first bytes; and when the last such request was made.
        self.latency = 0.0
        self.asked: float | None = None
        # STARTs of exchanges in which this worker is not yet.
        self.early: dict[Key, Header] = {}

    def has_begun(self, key: Key) -> bool:
        return key in self.early

    def measure(self, amount: int) -> None:
        """Bytes have come that were wanted."""
        for rate in (self.coming, self.network.coming):
            rate.count(amount, self.moved)
        if self.asked is not None:
            self.latency = min(self.latency or math.inf, self.moved - self.asked)
            self.asked = None

    def count_wanted(self, amount: int, *, asks: bool = False) -> None:
        """Bytes were wanted; negative: have come, or are wanted no more. ``asks``: the request goes out now."""
        now = time.monotonic()
        for of in (self.network, self):
            was_due = of.outstanding > 0
            of.outstanding += amount
            if was_due and not of.outstanding:
                of.coming.pause(now)
            elif of.outstanding and not was_due:
                of.coming.resume(now)
                self.asked = now if of is self and asks else self.asked

    def is_full_before(self, round_: int) -> bool:
        """Whether messages of rounds before this one are on their way and there is more of them to come."""
        if time.monotonic() - self.moved > _RECENTLY:
            return False
        before = [sending for sending in self.sendings.values() if sending.key[0] < round_]
        on_the_way = sum(sending.written - sending.arrived for sending in before)
        return on_the_way > _FULL and any(sending.written < sending.size for sending in before)
