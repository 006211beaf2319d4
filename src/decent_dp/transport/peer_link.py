"""The link to a peer: what is known of it, its messages and exchanges, and its two connections."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq

from decent_dp.errors import WireError
from decent_dp.transport.hello import BULK, CONTROL
from decent_dp.transport.lateness import Lateness
from decent_dp.transport.messages import STATE, Header, Key, pack
from decent_dp.transport.pace import Pace
from decent_dp.transport.sockets import Socket
from decent_dp.transport.transfers import PairExchange, Priority, Receiving, Sending
from decent_dp.transport.votes import Votes
from decent_dp.transport.waiter import Repeats

__all__ = ["Channel", "LinkState", "Network", "PeerLink"]

# STARTs of exchanges to come that are kept of one peer.
_MOST_AHEAD = 2**16
# Losses of one connection, each within a minute of the one before, from which on they are worth a warning.
_OFTEN = 4
# From the peers of a group a chunk of each is wanted, so that one that is busy with others does not keep the rest waiting
# (docs/lab/log.md, 2026-11-26, "'complete' over slow links").
_OF_MANY = 2**18
# Of so many peers at most: 3 MiB.
_MANY = 12
# pyzmq copies frames below this, and all of a control connection; the memory of others is lent to libzmq.
_COPIED = 2**16
# Plain numbers: zmq's flags take longer to combine than a frame to send.
_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
# A link is full of messages to a peer while so many bytes have not arrived there,
_FULL = 2**16
# and some did within so many seconds.
_RECENTLY = 0.5


class LinkState(enum.Enum):
    """The life of the connection to one peer."""

    NEW = "there has been none yet"  # OPEN or JOINING when one is made; GONE if no process listens there
    JOINING = "one end is no member for the other yet: requests and answers alone"  # OPEN when it is; BROKEN when lost
    OPEN = "bytes can move"  # BROKEN or GONE when it is lost
    BROKEN = "it was lost, and one of both makes it again"  # OPEN or JOINING; GONE if no process listens there
    GONE = "the peer has left, or its process has ended, or it sent what was not due"


@dataclass(eq=False)
class Network:
    """The links inside this node, or all to other nodes.

    Attributes:
        local: within a node, where nothing is scarce.
        sendings: those with something to send, a heap by priority.
        wanted: receivings that are offered and not wanted in full, sorted by priority.
        waiting: the message of highest priority waits until another peer has its bytes.
    """

    local: bool
    sendings: list[tuple[Priority, Sending]] = field(default_factory=list)
    wanted: list[tuple[Priority, Receiving]] = field(default_factory=list)
    pace: Pace = field(default_factory=Pace)
    waiting: bool = False

    def space(self, receiving: Receiving, link: PeerLink) -> int:
        """Bytes of a message that are to be wanted now; 0 if it is too early to ask for more."""
        left = receiving.size - receiving.granted
        if self.local:
            return left
        window = self.pace.window
        if receiving.sources > 1:
            window = max(window, _OF_MANY * min(receiving.sources, _MANY))
        if self.pace.due == link.pace.due:
            window = max(window, link.pace.window_alone)
        space = window - self.pace.due
        return min(left, space) if space >= min(left, window // 4) else 0

    def must_wait(self, sending: Sending, links: Iterable[PeerLink]) -> bool:
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
    link: PeerLink | None = None

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


class PeerLink:
    """What is known of one peer: its votes, its exchanges, its rounds, and its two connections while it is open. Changed by the
    transport's thread alone, but for ``lateness``; other threads read single fields.

    Attributes:
        network: of all links that share this one's way.
        channels: the control and the bulk connection while the state is OPEN or JOINING; else none.
        uid: of the peer's process; empty before the first connection. ``incarnation``: see ``Identity``.
        state: of its life; ``since``: when it began, on the monotonic clock.
        why: it is broken or gone, or could not be made; None: the peer has closed it.
        refused: nobody listens at the peer's address, since the connection was lost.
        losses: how often it was lost.
        moved: when a part of a message last came or went, on the monotonic clock.
        heard: when anything last came.
        told: when the last BEAT came; ``busy``: the last one with which the peer said that bytes of its exchanges move.
        paused: the peer makes no rounds at present; ``left``: nor any more.
        round: the latest round in which the peer is known to be; ``epoch``: the newest that it is known to know.
        start: the first round of a peer that has joined.
        votes, pairs: of the exchanges with the peer, and the open ones by bucket.
        early: STARTs of exchanges in which this worker is not yet.
        hints: by bucket: the last one sent, and its key, to be sent again on a new connection.
        questions: requests that the peer has not answered, by number, and their answers to come.
    """

    def __init__(self, peer: int, network: Network) -> None:
        self.peer, self.network = peer, network
        self.channels: tuple[Channel, ...] = ()
        self.uid, self.incarnation = b"", 0
        self.state, self.since = LinkState.NEW, time.monotonic()
        self.why: BaseException | None = None
        self.refused, self.losses = False, Repeats(_OFTEN)
        self.heard = self.moved = self.told = self.busy = 0.0
        self.paused = self.left = False
        self.epoch, self.round, self.start = 0, -1, -1
        self.votes = Votes()
        self.pairs: dict[int, PairExchange] = {}
        self.sendings: dict[Key, Sending] = {}
        self.receivings: dict[Key, Receiving] = {}
        self.early: dict[Key, Header] = {}
        self.hints: dict[int, tuple[Key, bytes]] = {}
        self.questions: dict[int, tuple[bytes, Future[bytes]]] = {}
        self.pace, self.lateness = Pace(), Lateness()

    @property
    def is_connected(self) -> bool:
        return self.state in (LinkState.OPEN, LinkState.JOINING)

    @property
    def why_lost(self) -> BaseException:
        return self.why or ConnectionError("closed by the peer")

    def enter(self, state: LinkState) -> None:
        self.state, self.since = state, time.monotonic()

    def say(self, header: bytes, body: bytes = b"") -> None:
        """Sends a message over the control connection to a member. Without one it is lost: what matters is repeated."""
        if self.state is LinkState.OPEN and self.channels:
            self.channels[CONTROL].send(header, body)

    def silence(self, now: float) -> float:
        """Seconds without a sign of life; infinite for a peer that is gone. libzmq's heartbeats keep a link open."""
        if self.state is LinkState.GONE:
            return math.inf
        return now - self.heard if self.state is LinkState.BROKEN else 0.0

    def was_stopped(self, seconds: float) -> None:
        """This process was, or its transport's thread, and could hear nobody: no peer is silent or late for that."""
        now = time.monotonic()

        def later(than: float) -> float:
            return min(than + seconds, now) if than else 0.0

        self.since, self.heard, self.moved = later(self.since), later(self.heard), later(self.moved)
        self.told, self.busy = later(self.told), later(self.busy)
        for pair in self.pairs.values():
            pair.opened, pair.joined, pair.busy = later(pair.opened), later(pair.joined), later(pair.busy)
            pair.voted = later(pair.voted)

    def forget_rounds(self) -> None:
        """Rounds may be earlier ones from now on."""
        self.round = self.start = -1
        self.lateness.forget_rounds()
        self.hints.clear()

    def join(self, key: Key) -> None:
        """A message shows that the peer is in this exchange."""
        pair = self.pairs.get(key[1])
        if pair is not None and pair.round == key[0] and not pair.joined:
            pair.joined = time.monotonic()
            self.paused = False

    def bound(self, ahead: int) -> None:
        """Raises WireError if the peer has announced so many messages, or one of such a bucket, that memory may run out."""
        if ahead >= _MOST_AHEAD:
            raise WireError(f"worker {self.peer} has announced {ahead} messages ahead, or one of bucket {ahead}: too many")

    def want(self, amount: int, *, asks: bool = False) -> None:
        """``Pace.want``, for this link and its network."""
        now = time.monotonic()
        self.network.pace.want(amount, now)
        self.pace.want(amount, now, asks=asks)

    def ask_again(self) -> None:
        """Sends the requests that are not answered over a new connection."""
        for number, (request, answer) in self.questions.items():
            if not answer.done():
                self.channels[BULK].send(pack(STATE, (number, 0, 0)), request)

    def fail_questions(self) -> None:
        """The peer cannot be asked any more, or at all."""
        questions, self.questions = self.questions, {}
        for _, answer in questions.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"worker {self.peer} cannot be asked: {self.why_lost}"))

    def came(self, amount: int) -> None:
        """``Pace.came``, for this link and its network."""
        self.network.pace.came(amount, self.moved)
        self.pace.came(amount, self.moved)

    def is_full_before(self, round_: int) -> bool:
        """Whether messages of rounds before this one are on their way and there is more of them to come."""
        if time.monotonic() - self.moved > _RECENTLY:
            return False
        before = [sending for sending in self.sendings.values() if sending.key[0] < round_]
        on_the_way = sum(sending.written - sending.arrived for sending in before)
        return on_the_way > _FULL and any(sending.written < sending.size for sending in before)
