"""The links to all peers: what is known of each, its messages and exchanges, and its two connections."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from decent_dp.transport.agreement import PeerView
from decent_dp.transport.commands import Clock
from decent_dp.transport.lateness import Lateness
from decent_dp.transport.messages import ASKS, BEAT, CONTROL, MOVES, PAUSES, Header, Key, pack
from decent_dp.transport.pace import Pace
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.sockets import SILENT, Channel
from decent_dp.transport.transfers import Priority, Receiving, Sending
from decent_dp.transport.votes import Votes
from decent_dp.transport.waiter import Repeats

__all__ = ["Lane", "LinkState", "Network", "PeerLink", "PeerLinks", "Progress"]

# Losses of one connection, each within a minute of the one before, from which on they are worth a warning.
_OFTEN = 4
# From the peers of a group a chunk of each is wanted, so that one that is busy with others does not keep the rest waiting
# (docs/lab/log.md, 2026-11-26, "'complete' over slow links").
_OF_MANY = 2**18
# Of so many peers at most: 3 MiB.
_MANY = 12
# A link is full of messages to a peer while so many bytes have not arrived there,
_FULL = 2**16
# and some did within so many seconds.
_RECENTLY = 0.5
# Seconds after a part of a message for which it counts as moving.
_MOVING = 1.0
# Seconds for which an exchange waits for a lost connection to be made again.
_MENDED = 0.25
# Seconds after the loss of a connection in which the peer dials, if it lives, though it refuses to be dialled.
_GETS_THROUGH = 1.0


class LinkState(enum.Enum):
    """The life of the connection to one peer."""

    NEW = "there has been none yet"  # OPEN or JOINING when one is made; GONE if no process listens there
    JOINING = "one end is no member for the other yet: requests and answers alone"  # OPEN when it is; BROKEN when lost
    OPEN = "bytes can move"  # BROKEN or GONE when it is lost
    BROKEN = "it was lost, and one of both makes it again"  # OPEN or JOINING; GONE if no process listens there
    GONE = "the peer has left, or its process has ended, or it sent what was not due"


@dataclass(eq=False)
class Network:
    """The links inside this node, or all to other nodes: each has its own order of messages and its own window.

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

    def space(self, receiving: Receiving, pace: Pace) -> int:
        """Bytes of a message that are to be wanted now; 0 if it is too early to ask for more. ``pace``: of its link."""
        left = receiving.size - receiving.granted
        if self.local:
            return left
        window = self.pace.window
        if receiving.sources > 1:
            window = max(window, _OF_MANY * min(receiving.sources, _MANY))
        if self.pace.due == pace.due:
            window = max(window, pace.window_alone)
        space = window - self.pace.due
        return min(left, space) if space >= min(left, window // 4) else 0


@dataclass(eq=False)
class Lane:
    """The messages of exchanges with one peer.

    Attributes:
        early: STARTs of exchanges in which this worker is not yet.
        hints: by bucket: the last one sent, and its key, to be sent again on a new connection.
        heard: by bucket: the hints that have come and are not used yet, by key; ``heard_bytes``: of all of them.
        moved: when a part of a message last came or went, on the clock of the links.
    """

    network: Network
    pace: Pace = field(default_factory=Pace)
    sendings: dict[Key, Sending] = field(default_factory=dict)
    receivings: dict[Key, Receiving] = field(default_factory=dict)
    early: dict[Key, Header] = field(default_factory=dict)
    hints: dict[int, tuple[Key, bytes]] = field(default_factory=dict)
    heard: defaultdict[int, dict[Key, bytes]] = field(default_factory=lambda: defaultdict(dict))
    heard_bytes: int = 0
    moved: float = 0.0

    def want(self, amount: int, now: float, *, asks: bool = False) -> None:
        """``Pace.want``, for this link and its network."""
        self.network.pace.want(amount, now)
        self.pace.want(amount, now, asks=asks)

    def came(self, amount: int) -> None:
        """``Pace.came``, for this link and its network."""
        self.network.pace.came(amount, self.moved)
        self.pace.came(amount, self.moved)

    def is_full_before(self, round_: int, now: float) -> bool:
        """Whether messages of rounds before this one are on their way and there is more of them to come."""
        if now - self.moved > _RECENTLY:
            return False
        before = [sending for sending in self.sendings.values() if sending.key[0] < round_]
        on_the_way = sum(sending.written - sending.arrived for sending in before)
        return on_the_way > _FULL and any(sending.written < sending.size for sending in before)


@dataclass
class Progress:
    """What a peer has said of itself, in heartbeats above all.

    Attributes:
        round: the latest one in which it is known to be; ``epoch``: the newest that it is known to know.
        paused: it makes no rounds at present; ``left``: nor any more.
        told: when its last BEAT came; ``busy``: the last one that said that bytes of its exchanges move.
    """

    round: int = -1
    epoch: int = 0
    paused: bool = False
    left: bool = False
    told: float = 0.0
    busy: float = 0.0


class PeerLink:
    """What is known of one peer's process, and its two connections while there are any. Changed by the transport's thread
    alone, but for the breaks of ``lateness``; other threads read single fields.

    Attributes:
        uid: of the process; empty before the first connection. ``incarnation``: see ``Identity``.
        start: the first round of a process that has joined; -1: it began the run.
        channels: the control and the bulk connection while the state is OPEN or JOINING; else none.
        state: of its life; ``since``: when it began.
        why: it is broken or gone, or could not be made; None: the peer has closed it.
        losses: how often it was lost.
        heard: when anything last came.
    """

    def __init__(self, peer: int, incarnation: int, network: Network, clock: Clock) -> None:
        self.peer, self.incarnation, self.uid, self.start = peer, incarnation, b"", -1
        self.clock = clock
        self.channels: tuple[Channel, ...] = ()
        self.state, self.since, self.heard = LinkState.NEW, clock.now(), 0.0
        self.why: BaseException | None = None
        self.losses = Repeats(_OFTEN)
        self.says, self.lane, self.votes, self.lateness = Progress(), Lane(network), Votes(), Lateness()

    @property
    def is_connected(self) -> bool:
        return self.state in (LinkState.OPEN, LinkState.JOINING)

    @property
    def why_lost(self) -> BaseException:
        return self.why or ConnectionError("closed by the peer")

    @property
    def refused(self) -> bool:
        """Whether nobody listens at the peer's address, since the connection was lost."""
        return self.state is LinkState.BROKEN and isinstance(self.why, UnreachableError) and self.why.is_refused

    def enter(self, state: LinkState) -> None:
        self.state, self.since = state, self.clock.now()

    def say(self, header: bytes, body: bytes = b"") -> None:
        """Sends a message over the control connection to a member. Without one it is lost: what matters is repeated."""
        if self.state is LinkState.OPEN and self.channels:
            self.channels[CONTROL].send(header, body)

    def silence(self, now: float) -> float:
        """Seconds without a sign of life; infinite for a peer that is gone. libzmq's heartbeats keep a link open."""
        if self.state is LinkState.GONE:
            return math.inf
        return now - self.heard if self.state is LinkState.BROKEN else 0.0

    def join(self, key: Key) -> None:
        """A message shows that the peer is in this exchange."""
        pair = self.votes.pairs.get(key[1])
        if pair is not None and pair.round == key[0] and not pair.joined:
            pair.joined = self.clock.now()
            self.says.paused = False


class PeerLinks:
    """Changed by the transport's thread alone, but for ``round``, ``paused`` and ``epoch``.

    Args:
        local: the workers that share this one's network stack.

    Attributes:
        by_rank: the links to members. ``joiners``: to processes that are none yet, by rank and incarnation.
        expected: the ranks of members, and of those that will be.
        needed: the members to which a connection is needed, and not sought yet.
        networks: the links inside this node, and those to others.
        round: the one in which this worker is; -1 before the first. ``first_bucket``: of those in use.
        paused: this worker makes no rounds at present.
        epoch: the number of the newest one that this worker knows.
    """

    def __init__(self, local: frozenset[int], expected: Iterable[int], dead_after: float, clock: Clock) -> None:
        self._local, self.dead_after, self.clock = local, dead_after, clock
        self.networks = {is_local: Network(is_local) for is_local in (True, False)}
        self.by_rank: dict[int, PeerLink] = {}
        self.joiners: dict[tuple[int, int], PeerLink] = {}
        self.expected, self.needed = set(expected), set[int]()
        self.round, self.first_bucket, self.paused, self.epoch = -1, 0, False, 0

    def to(self, peer: int) -> PeerLink:
        """The link to a peer; for the transport's thread."""
        if peer not in self.by_rank:
            self.by_rank[peer] = self.new(peer)
        return self.by_rank[peer]

    def known(self, peer: int) -> PeerLink:
        """The link to a peer, or one of which nothing is known: for other threads, which do not change it."""
        return self.by_rank.get(peer) or self.new(peer)

    def new(self, peer: int, incarnation: int = 0) -> PeerLink:
        return PeerLink(peer, incarnation, self.networks[peer in self._local], self.clock)

    # -- what other threads conclude ------------------------------------------------------------------------------------

    def view(self, peer: int) -> PeerView:
        """What the control plane is to know of a peer."""
        link = self.known(peer)
        if link.state is LinkState.NEW:
            return PeerView.UNKNOWN
        if link.silence(self.clock.now()) >= self.dead_after:
            return PeerView.LOST
        return PeerView.LINKED if link.state is LinkState.OPEN else PeerView.PENDING

    def has_ended(self, peer: int) -> bool:
        """Whether the connection is lost, and nobody listens at the address of this worker any more."""
        link = self.known(peer)
        # The peer may get through itself, if it needs this worker, too, by now.
        return link.refused and self.clock.now() - link.since > _GETS_THROUGH

    def patience(self, peer: int, since: float) -> float:
        """Seconds for which an exchange may still wait for a sign of life. If none are left, its edge is a hole.

        Args:
            since: when the exchange was started; it counts for a peer that has never been connected.
        """
        link, now = self.known(peer), self.clock.now()
        if link.state is LinkState.NEW:
            return since + self.dead_after - now
        lively = SILENT * self.dead_after - link.silence(now)
        if link.state is LinkState.BROKEN:
            return 0.0 if link.refused else min(lively, link.since + _MENDED - now)
        return lively

    # -- rounds, and heartbeats that tell them --------------------------------------------------------------------------

    def begin(self, bucket: int) -> None:
        """Rounds count from now on for buckets from this number on, and may be earlier ones."""
        self.first_bucket, self.round = bucket, -1
        for link in self.by_rank.values():
            link.says.round = link.start = -1
            link.lateness.forget_rounds()
            link.lane.hints.clear()

    def beat(self, link: PeerLink, *, ask: bool = False) -> None:
        """Says how many rounds this worker has begun, and in which epoch it is; ``ask``: and asks for it."""
        flags = (ASKS if ask else 0) | (PAUSES if self.paused else 0) | (MOVES if self._moves() else 0)
        link.say(pack(BEAT, (self.round + 1, self.first_bucket, 0), flags, epoch=self.epoch))

    def _moves(self) -> bool:
        """Whether bytes of an exchange move in which both ends are. Who only waits for such a worker is not excused: so nobody
        waits in a circle."""
        since = self.clock.now() - _MOVING
        moving = [link for link in self.by_rank.values() if link.lane.moved > since]
        return any(pair.joined for link in moving for pair in link.votes.pairs.values())

    def beat_all(self) -> None:
        for link in self.by_rank.values():
            self.beat(link)

    def hear_beat(self, link: PeerLink, header: Header) -> None:
        begun, first_bucket, _ = header.key
        self.hear_round(link, (begun - 1, first_bucket, 0))
        says = link.says
        says.paused, says.epoch, says.told = bool(header.flags & PAUSES), max(says.epoch, header.epoch), self.clock.now()
        if header.flags & MOVES:
            says.busy = says.told
            for pair in link.votes.pairs.values():
                pair.busy = pair.busy if pair.joined else says.told
        if header.flags & ASKS:
            self.beat(link)

    def hear_round(self, link: PeerLink, key: Key) -> None:
        """A peer is in this round. What is of earlier buckets belongs to a state that was replaced."""
        if key[1] >= self.first_bucket:
            link.says.round = max(link.says.round, key[0])
