"""The link to a peer: its messages and exchanges, what is known of it, its two connections, and their receive window."""

from __future__ import annotations

import enum
import math
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import zmq

from decent_dp.transport.hello import CONTROL
from decent_dp.transport.messages import STATE, Header, Key, pack
from decent_dp.transport.repeats import Repeats
from decent_dp.transport.sockets import Socket
from decent_dp.transport.votes import Verdict, Votes

__all__ = [
    "SMALL",
    "Channel",
    "FlowListener",
    "LinkState",
    "Message",
    "Network",
    "PairExchange",
    "PeerLink",
    "Priority",
    "Rate",
    "Receiving",
    "Sending",
]

# Losses of one connection, each within a minute of the one before, from which on they are worth a warning.
_OFTEN = 4
# The part of each round's time for which a worker waits for peers that are not in their exchanges.
_SHARE = 0.1
# Exchanges of one bucket with one peer from which the usual time of one is known.
_TIMED = 8
# An exchange has taken much longer than usual if it took so many times as long: others may share its link, such as a process
# that joins.
_LONGER = 4
# The most meetings that are left out after it.
_LONGEST_BREAK = 64
# Seconds from which on exchanges are slow: a peer may be late because an earlier one still moves.
_SLOW = 0.5

# Messages of at most so many bytes are wanted as a whole at once: waiting would take longer than the message.
SMALL = 2**14
# Bytes that are wanted and have not arrived. With less, a link starves while the next request waits behind the data of the
# other direction. With more, queues overflow, and two streams share a link for long at a change of rounds (docs/lab/log.md,
# 2026-11-21, "why full links ran dry").
_USUAL = 2**19
# They are no more than a link moves in so many seconds: a request waits in the queue of the other direction, and its bytes in
# this one's.
_USUAL_SECONDS = 0.25
# At least what it moves in so many seconds.
_LEAST_SECONDS = 0.05
# From one peer alone twice what the way holds, its rate times the time in which a request takes effect, up to so many seconds
# of it: heartbeats and votes wait behind them.
_MOST_SECONDS = 0.5
# Bytes that are wanted ahead at least.
_LEAST = 2**16
# Bytes that are wanted ahead of a peer whose rate is not known.
_UNKNOWN = 2**17
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
# Seconds over which a rate is measured, without those between messages;
_INTERVAL = 0.05
# or bytes: fast links bring a window in less.
_ENOUGH = 2**21
# The order in which messages are needed: by round, bucket and step of the exchange, then by when they were added.
Priority: TypeAlias = tuple[int, int, int, int]


@dataclass(eq=False)
class Message:
    """A message in one direction. ``done`` and ``failed`` are called in the transport's thread.

    Attributes:
        step: its place in the order of the messages of its exchange.
        offered: of one that is received: the peer is known to have it, or to be in the exchange; of one that is sent: the peer
            was told.
    """

    peer: int
    key: Key
    memory: memoryview
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    step: int = 0
    granted: int = 0
    offered: bool = False
    order: int = -1
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.memory)

    @property
    def priority(self) -> Priority:
        return *self.key[:2], self.step, self.order


@dataclass(eq=False)
class Sending(Message):
    """A message on its way out.

    Attributes:
        ready: its first bytes that are final; may grow while it is being written.
        arrived: bytes that the peer says it has.
        lent: some of it was sent without a copy, over this connection.
    """

    ready: int = 0
    written: int = 0
    arrived: int = 0
    lent: bool = False
    queued: bool = False

    @property
    def sendable(self) -> bool:
        return min(self.ready, self.granted) > self.written


@dataclass(eq=False)
class Receiving(Message):
    """A message that is expected.

    Attributes:
        sources: the number of peers whose messages of the same exchange share its link.
    """

    sources: int = 1
    received: int = 0


class LinkState(enum.Enum):
    """The life of the connection to one peer."""

    NEW = "there has been none yet"  # OPEN or JOINING when one is made; GONE if no process listens there
    JOINING = "one end is no member for the other yet: requests and answers alone"  # OPEN when it is; BROKEN when lost
    OPEN = "bytes can move"  # BROKEN or GONE when it is lost
    BROKEN = "it was lost, and one of both makes it again"  # OPEN or JOINING; GONE if no process listens there
    GONE = "the peer has left, or its process has ended, or it sent what was not due"


@dataclass(eq=False)
class PairExchange:
    """An exchange of two workers that both mix, or neither.

    Attributes:
        settle: called once with BOTH or NEITHER, in the transport's thread.
        opened, joined, voted: when this end was in this exchange, both were, and this end said GOT; 0 until then.
        busy: when the peer, which was not in it yet, last said that bytes of an earlier one move; 0: it has not.
        abandoned: this end waits for nothing but the verdict.
    """

    receiving: Receiving
    sending: Sending
    settle: Callable[[Verdict], None]
    opened: float = 0.0
    joined: float = 0.0
    voted: float = 0.0
    busy: float = 0.0
    abandoned: bool = False

    @property
    def complete(self) -> bool:
        """Whether the peer's message has come and this worker's own one is coded: without both the peer's cannot be decoded."""
        return self.receiving.received == self.receiving.size and self.sending.ready == self.sending.size

    @property
    def round(self) -> int:
        return self.receiving.key[0]

    @property
    def bucket(self) -> int:
        return self.receiving.key[1]


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

    def space(self, receiving: Receiving, link: PeerLink) -> int:
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
    transport's thread alone, but for the breaks of late exchanges; other threads read single fields.

    Attributes:
        network: of all links that share this one's way.
        outstanding: bytes that are wanted and have not come.
        latency: the fewest seconds from a request, where nothing was due, to its first bytes; ``asked``: when the last such
            request was made.
        early: STARTs of exchanges in which this worker is not yet.
        uid: of the peer's process; empty before the first connection. ``incarnation``: see ``Identity``.
        state: of its life; ``since``: when it began, on the monotonic clock.
        closed: why the peer is gone; None while it is not.
        cause: the error with which it was closed.
        moved: when a part of a message last came or went, on the monotonic clock.
        heard: when anything last came.
        paused: the peer makes no rounds at present; ``left``: nor any more.
        told: when the last BEAT came from it, on the monotonic clock; ``busy``: the last one with which it said that bytes of
            its exchanges move.
        round: the latest round in which the peer is known to be; ``epoch``: the newest that it is known to know.
        start: the first round of a peer that has joined.
        joining: the control and bulk connection while the state is JOINING; ``control`` and ``bulk`` are None then.
        questions: requests that the peer has not answered, by number, and their answers to come.
        votes, pairs: of the exchanges with the peer, and the open ones by bucket.
        hints: by bucket: the last one sent, and its key, to be sent again on a new connection.
        refused: nobody listens at the peer's address, since the connection was lost.
        lost: why it was, until it is made again. ``losses``: how often.
        patience: seconds for which this worker still waits for a living peer that is not in its exchange. Each round adds a
            tenth of a step: a slow peer costs its partners a tenth of their pace, and one that is late for once is waited for.
    """

    def __init__(self, peer: int, network: Network) -> None:
        self.peer, self.network = peer, network
        self.control: Channel | None = None
        self.bulk: Channel | None = None
        self.joining: tuple[Channel, Channel] | None = None
        self.questions: dict[int, tuple[bytes, Future[bytes]]] = {}
        self.outstanding, self.coming = 0, Rate()
        self.latency = 0.0
        self.asked: float | None = None
        self.early: dict[Key, Header] = {}
        self.uid, self.incarnation = b"", 0
        self.state, self.since = LinkState.NEW, time.monotonic()
        self.heard = self.moved = self.told = self.busy = 0.0
        self.paused = self.left = self.refused = False
        self.epoch = 0
        self.round = self.start = -1
        self.votes = Votes()
        self.pairs: dict[int, PairExchange] = {}
        self.hints: dict[int, tuple[Key, bytes]] = {}
        self.closed: str | None = None
        self.cause: BaseException | None = None
        self.lost: OSError | None = None
        self.losses = Repeats(_OFTEN)
        self.patience, self._waited_in = math.inf, -1
        # By bucket: the seconds from when both were in an exchange until its end. Tuples, as two threads look at them: a deque
        # that grows while another thread copies it raises.
        self._times: dict[int, tuple[float, ...]] = {}
        self._break, self._left_out, self._late_round, self._resting = 0, 0, -1, -1
        self.sendings: dict[Key, Sending] = {}
        self.receivings: dict[Key, Receiving] = {}

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Its control and bulk connection; empty while there are none."""
        if self.control is not None and self.bulk is not None:
            return self.control, self.bulk
        return self.joining or ()

    @property
    def is_connected(self) -> bool:
        return self.state in (LinkState.OPEN, LinkState.JOINING)

    @property
    def why_lost(self) -> BaseException:
        return self.cause or self.lost or ConnectionError(self.closed or "closed by the peer")

    def enter(self, state: LinkState) -> None:
        self.state, self.since = state, time.monotonic()

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
        self.round = self.start = self._late_round = self._resting = self._waited_in = -1
        self._left_out = 0
        self.hints.clear()

    # -- requests ---------------------------------------------------------------------------------------------------------

    def ask_again(self, bulk: Channel) -> None:
        """Sends what is not answered over a new connection."""
        for number, (request, answer) in self.questions.items():
            if not answer.done():
                bulk.send(pack(STATE, (number, 0, 0)), request)

    def fail_questions(self) -> None:
        """The peer cannot be asked any more, or at all."""
        questions, self.questions = self.questions, {}
        for _, answer in questions.values():
            if not answer.done():
                answer.set_exception(ConnectionError(f"worker {self.peer} cannot be asked: {self.why_lost}"))

    # -- the pace of messages ---------------------------------------------------------------------------------------------

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

    # -- exchanges that take much longer than usual ---------------------------------------------------------------------

    def expected_end(self, pair: PairExchange, began: float, step: float) -> float:
        """When an exchange is late, on the monotonic clock; infinite for messages without a history.

        A peer that is in the exchange has the usual time of its messages: the median of their history, and beyond it six times
        the median deviation. One that is not is waited for as long as its ``patience`` lasts, from when on it has no excuse.

        Args:
            began: when this worker began to wait.
            step: the fewest seconds by which messages are late.
        """
        if not pair.opened:  # the transport's thread has not opened it yet
            return math.inf
        if not pair.joined:
            return pair.opened if self.paused else self._inexcusable_since(pair, began) + self.patience
        times = self._times.get(pair.bucket, ())
        if len(times) < _TIMED:
            return math.inf  # the first messages take their time
        usual = statistics.median(times)
        deviation = 6 * statistics.median(abs(time - usual) for time in times)
        return pair.joined + max(usual + max(deviation, step), _LONGER * usual)

    def is_slow(self, bucket: int) -> bool:
        """Whether exchanges take long, or it is not known yet."""
        times = self._times.get(bucket, ())
        return len(times) < _TIMED or statistics.median(times) > _SLOW

    def _inexcusable_since(self, pair: PairExchange, began: float) -> float:
        """When this worker began to wait; where exchanges are slow, when the peer last said that an earlier one moves. That one
        may take no longer than one of this link, which depends on the place of its bucket."""
        if not (pair.busy and self.is_slow(pair.bucket)):
            return began
        longest = max((statistics.median(times) for times in self._times.values() if len(times) >= _TIMED), default=math.inf)
        return min(max(began, pair.busy), began + _LONGER * longest)

    def waited(self, pair: PairExchange, began: float, step: float, most: float) -> None:
        """This worker has waited for an exchange.

        Args:
            began: when it began to wait.
            step: seconds of its rounds; each one adds to the patience, up to ``most``.
        """
        absent = max((pair.joined or time.monotonic()) - self._inexcusable_since(pair, began), 0.0)
        earned = _SHARE * step if pair.round > self._waited_in else 0.0
        self.patience, self._waited_in = min(max(self.patience - absent, 0.0) + earned, most), pair.round

    def record(self, pair: PairExchange, verdict: Verdict) -> None:
        """Keeps the time of an exchange that has ended."""
        if verdict is not Verdict.BOTH or not pair.joined:
            return
        latest = self._times.get(pair.bucket, ())[1 - 4 * _TIMED :]
        self._times[pair.bucket] = (*latest, time.monotonic() - pair.joined)
        if pair.round > self._late_round:
            self._break = 0

    def give_up(self, pair: PairExchange) -> None:
        """An exchange was late. If it was its messages, the next meetings are left out, twice as many each time."""
        if pair.joined and pair.round > self._late_round:
            self._break = min(2 * self._break or 1, _LONGEST_BREAK)
            self._left_out, self._late_round = self._break, pair.round

    def on_break(self, round_: int) -> bool:
        """Whether the meeting in this round is left out. Called for rounds in their order."""
        if self._left_out and round_ > max(self._resting, self._late_round):
            self._left_out, self._resting = self._left_out - 1, round_
        return round_ == self._resting


class FlowListener(Protocol):
    """Called in the transport's thread."""

    def hear_note(self, peer: int, key: Key, text: bytes, /) -> None:
        """A CALL or a BLOCK has come."""

    def keep_hint(self, peer: int, key: Key, hint: bytes, /) -> None:
        """A hint has come."""

    def connected(self, peer: int, /) -> None:
        """There is a connection, perhaps in place of a lost one."""

    def hang_up(self, link: PeerLink, /) -> None:
        """The connections of a link are to be closed."""
