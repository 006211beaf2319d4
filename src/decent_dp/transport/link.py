"""What a worker knows of one peer: its votes, its exchanges and its rounds, whatever wire connects them. Changed by the
transport's thread alone, but for the breaks of late exchanges; other threads read single fields."""

from __future__ import annotations

import enum
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from decent_dp.transport.base import Verdict
from decent_dp.transport.repeats import Repeats
from decent_dp.transport.votes import Votes

__all__ = ["Key", "Link", "LinkState", "Message", "Pair", "Priority", "Receiving", "Sending"]

# Losses of one connection, each within a minute of the one before, from which on they are worth a warning.
_OFTEN = 4
# The part of each round's time for which a worker waits for peers that are not in their exchanges.
_SHARE = 0.1
# Exchanges of one bucket with one peer from which the usual time of one is known, and the most meetings that are left out
# after an exchange has taken much longer: four times as long, as others may share its link, such as a process that joins.
_TIMED, _LONGEST_BREAK, _LONGER = 8, 64, 4
# Seconds from which on exchanges are slow: a peer may be late because an earlier one still moves.
_SLOW = 0.5

# (round, bucket, slot): what a message is. Slots number the messages of one exchange.
Key: TypeAlias = tuple[int, int, int]
# The order in which messages are needed: by round, bucket and step of the exchange, then by when they were added.
Priority: TypeAlias = tuple[int, int, int, int]


@dataclass(eq=False)
class Message:
    """A message in one direction. ``done`` and ``failed`` are called in the transport's thread.

    Attributes:
        step: its place in the order of the messages of its exchange.
    """

    peer: int
    key: Key
    memory: memoryview
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    step: int = 0
    granted: int = 0
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
    granted_at: float = 0.0
    written: int = 0
    arrived: int = 0
    lent: bool = False
    queued: bool = False
    offered: bool = False

    @property
    def sendable(self) -> bool:
        return min(self.ready, self.granted) > self.written


@dataclass(eq=False)
class Receiving(Message):
    """A message that is expected.

    Attributes:
        sources: the number of peers whose messages of the same exchange share its link.
        offered: the peer is known to have it, or to be in the exchange.
    """

    sources: int = 1
    received: int = 0
    offered: bool = False


class LinkState(enum.Enum):
    """The life of the connection to one peer."""

    NEW = "there has been none yet"  # OPEN when one is made; GONE if no process listens there
    OPEN = "bytes can move"  # BROKEN or GONE when it is lost
    BROKEN = "it was lost, and one of both makes it again"  # OPEN; GONE if no process listens there
    GONE = "the peer has left, or its process has ended, or it sent what was not due"


@dataclass(eq=False)
class Pair:
    """An exchange of two workers that both mix, or neither.

    Attributes:
        settle: called once with BOTH or NEITHER, in the transport's thread.
        opened, joined: when this end was in this exchange, and both were; 0 until then.
        busy: when the peer, which was not in it yet, last said that bytes of an earlier one move; 0: it has not.
    """

    receiving: Receiving
    sending: Sending
    settle: Callable[[Verdict], None]
    opened: float = 0.0
    joined: float = 0.0
    busy: float = 0.0

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


class Link(ABC):
    """What is known of one peer.

    Attributes:
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
        votes, pairs: where faults are tolerated: of the exchanges with the peer, and the open ones by bucket.
        hints: by bucket: the last one sent, and its key, to be sent again on a new connection.
        refused: nobody listens at the peer's address, since the connection was lost.
        lost: why it was, until it is made again. ``losses``: how often.
        patience: seconds for which this worker still waits for a living peer that is not in its exchange. Each round adds a
            tenth of a step: a slow peer costs its partners a tenth of their pace, and one that is late for once is waited for.
    """

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.uid, self.incarnation = b"", 0
        self.state, self.since = LinkState.NEW, time.monotonic()
        self.heard = self.moved = self.told = self.busy = 0.0
        self.paused = self.left = self.refused = False
        self.epoch = 0
        self.round = self.start = -1
        self.votes = Votes()
        self.pairs: dict[int, Pair] = {}
        self.hints: dict[int, tuple[Key, bytes]] = {}
        self.closed: str | None = None
        self.cause: BaseException | None = None
        self.lost: str | None = None
        self.losses = Repeats(_OFTEN)
        self.patience, self._waited_in = math.inf, -1
        # By bucket: the seconds from when both were in an exchange until its end. Tuples, as two threads look at them: a deque
        # that grows while another thread copies it raises.
        self._times: dict[int, tuple[float, ...]] = {}
        self._break, self._left_out, self._late_round, self._resting = 0, 0, -1, -1
        self.sendings: dict[Key, Sending] = {}
        self.receivings: dict[Key, Receiving] = {}

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

    @abstractmethod
    def has_begun(self, key: Key) -> bool:
        """Whether the peer is known to be in the exchange of a message."""

    def forget_rounds(self) -> None:
        """Rounds may be earlier ones from now on."""
        self.round = self.start = self._late_round = self._resting = self._waited_in = -1
        self._left_out = 0
        self.hints.clear()

    # -- exchanges that take much longer than usual ---------------------------------------------------------------------

    def expected_end(self, pair: Pair, began: float, step: float) -> float:
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

    def _inexcusable_since(self, pair: Pair, began: float) -> float:
        """When this worker began to wait; where exchanges are slow, when the peer last said that an earlier one moves. That one
        may take no longer than one of this link, which depends on the place of its bucket."""
        if not (pair.busy and self.is_slow(pair.bucket)):
            return began
        longest = max((statistics.median(times) for times in self._times.values() if len(times) >= _TIMED), default=math.inf)
        return min(max(began, pair.busy), began + _LONGER * longest)

    def waited(self, pair: Pair, began: float, step: float, most: float) -> None:
        """This worker has waited for an exchange.

        Args:
            began: when it began to wait.
            step: seconds of its rounds; each one adds to the patience, up to ``most``.
        """
        absent = max((pair.joined or time.monotonic()) - self._inexcusable_since(pair, began), 0.0)
        earned = _SHARE * step if pair.round > self._waited_in else 0.0
        self.patience, self._waited_in = min(max(self.patience - absent, 0.0) + earned, most), pair.round

    def record(self, pair: Pair, verdict: Verdict) -> None:
        """Keeps the time of an exchange that has ended."""
        if verdict is not Verdict.BOTH or not pair.joined:
            return
        latest = self._times.get(pair.bucket, ())[1 - 4 * _TIMED :]
        self._times[pair.bucket] = (*latest, time.monotonic() - pair.joined)
        if pair.round > self._late_round:
            self._break = 0

    def give_up(self, pair: Pair) -> None:
        """An exchange was late. If it was its messages, the next meetings are left out, twice as many each time."""
        if pair.joined and pair.round > self._late_round:
            self._break = min(2 * self._break or 1, _LONGEST_BREAK)
            self._left_out, self._late_round = self._break, pair.round

    def on_break(self, round_: int) -> bool:
        """Whether the meeting in this round is left out. Called for rounds in their order."""
        if self._left_out and round_ > max(self._resting, self._late_round):
            self._left_out, self._resting = self._left_out - 1, round_
        return round_ == self._resting
