"""Flow control: the order in which bytes are requested and sent, and the dispatch of received messages.

The order of messages on a link decides when a bucket can be mixed. So a receiver wants bytes of the earliest exchange first
(``messages``), and a sender hands no more to libzmq than is wanted, the earliest exchange first. What is wanted and has not
arrived is bounded by time, from what peers were seen to send (``peer_link.Network``). So an earlier round can overtake, and the
queue at a slow link stays short. Inside a node whole messages are wanted at once, as each turn of this thread may wait for the
interpreter.

Connections inside a node and connections to other nodes do not share a link: each kind has its own order and window.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import logging
import math
import time

from decent_dp.errors import WireError
from decent_dp.transport import peer_link
from decent_dp.transport.messages import (
    ASK,
    ASKS,
    BEAT,
    BLOCK,
    BLOCKS,
    CALL,
    DATA,
    GOT,
    HINT,
    LARGEST_FRAME,
    MOVES,
    OFFERS,
    PAUSES,
    START,
    VOTE,
    Header,
    Key,
    check_size,
    pack,
)
from decent_dp.transport.peer_link import SMALL, Channel, LinkState, Message, Network, PeerLink, Rate, Receiving, Sending
from decent_dp.transport.settlement import Settlement
from decent_dp.transport.sockets import SILENT
from decent_dp.transport.streams import profiled
from decent_dp.transport.votes import Vote

__all__ = ["Flow"]

_log = logging.getLogger(__name__)

# A frame is never sent in part. It has an eighth of the bytes that are wanted or, as each frame costs processor time, what the
# network brings in so many seconds, up to half of what is wanted
_FRAME_SECONDS = 0.005
# and so many bytes;
_FRAME_UP_TO = 2**17
# and at least so many.
_SMALLEST_FRAME = 2**14
# Frames that are handed to libzmq before the thread looks for what has come.
_FRAMES = 16
# Seconds after a part of a message for which it counts as moving.
_MOVING = 1.0
# STARTs of exchanges to come that are kept of one peer.
_MOST_AHEAD = 2**16


class Flow:
    """What moves over the links of one worker. Used by the transport's thread alone.

    Args:
        rank: this worker's.
        local: the workers that share this one's network stack.
        listener: learns of what is not for exchanges.

    Attributes:
        dead_after: seconds without a sign of life after which a peer is dead.
        round: the one in which this worker is; -1 before the first. ``first_bucket``: of those in use.
        paused: this worker makes no rounds at present.
        epoch: the number of the newest one that this worker knows.
        reconnects: connections that were made in place of lost ones.
        replaced: another process is this worker by now.
        dropped: messages that came and were not asked for.
        settlement: of the exchanges with verdicts.
        joiners: links of processes that are no members yet, by rank and incarnation.
    """

    def __init__(
        self,
        rank: int,
        local: frozenset[int],
        listener: peer_link.FlowListener,
        dead_after: float = 10.0,
    ) -> None:
        self._rank, self._local = rank, local
        self._listener = listener
        self._networks = {local: Network(local) for local in (True, False)}
        self._order = itertools.count()
        self.links: dict[int, PeerLink] = {}
        self.joiners: dict[tuple[int, int], PeerLink] = {}
        self.dead_after = dead_after
        self.round, self.first_bucket, self.paused, self.epoch = -1, 0, False, 0
        self.reconnects = self.dropped = 0
        self.replaced = False
        self.settlement = Settlement(self)

    def link(self, peer: int) -> PeerLink:
        if peer not in self.links:
            self.links[peer] = PeerLink(peer, self._networks[peer in self._local])
        return self.links[peer]

    def open(self, link: PeerLink, uid: bytes, control: Channel, bulk: Channel) -> None:
        """Uses connections to a process of the peer, which has proven who it is."""
        self.reconnects += bool(link.uid) and link.state is not LinkState.JOINING
        self._use(link, LinkState.OPEN, uid, control, bulk)
        link.control, link.bulk, link.joining = control, bulk, None
        link.coming, link.latency = Rate(), 0.0  # it may take another, slower route
        self.settlement.repeat(link)
        for key, hint in link.hints.values():
            control.send(pack(START, key), hint)
        for receiving in list(link.receivings.values()):
            self._begin(link, receiving)
        for sending in list(link.sendings.values()):
            if _is_mutual(sending.key) and sending.key not in link.receivings:  # the peer may not know that this one is in it
                control.send(pack(START, sending.key, OFFERS, sending.size, sending.size, sending.size))
            self.queue(sending)
        self._listener.connected(link.peer)

    def open_joining(self, link: PeerLink, uid: bytes, control: Channel, bulk: Channel) -> None:
        """Uses connections between two processes of which one is no member for the other yet."""
        self.reconnects += bool(link.uid)
        link.joining = control, bulk
        self._use(link, LinkState.JOINING, uid, control, bulk)

    def _use(self, link: PeerLink, state: LinkState, uid: bytes, control: Channel, bulk: Channel) -> None:
        control.link = bulk.link = link
        was_joining = link.state is LinkState.JOINING
        link.enter(state)
        link.heard, link.refused, link.lost, link.uid = link.since, False, None, uid
        if not was_joining:
            link.ask_again(bulk)

    def let_join(self, peer: int, incarnation: int, uid: bytes, control: Channel, bulk: Channel) -> None:
        """A process that is no member has connected."""
        if (before := self.joiners.get((peer, incarnation))) is not None:
            self.lose(before, "replaced by the peer")
        link = self.joiners[peer, incarnation] = PeerLink(peer, self._networks[peer in self._local])
        link.incarnation = incarnation
        self.open_joining(link, uid, control, bulk)

    def renew(self, peer: int, incarnation: int, start: int) -> None:
        """Another process is this peer now, from round ``start`` on. It counts as one that was connected just now."""
        self.give_up(self.link(peer), "another process has taken its place")
        link = PeerLink(peer, self._networks[peer in self._local])
        link.incarnation, link.start = incarnation, start
        link.enter(LinkState.BROKEN)
        link.heard = link.since
        self.links[peer] = link

    def take_joiner(self, peer: int) -> None:
        """The connection with which this process has joined becomes that of the member, if there is one."""
        joiner = self.joiners.pop((peer, self.links[peer].incarnation), None)
        if joiner is not None and joiner.joining is not None:
            self.open(self.links[peer], joiner.uid, *joiner.joining)

    @property
    def waiting(self) -> bool:
        """A message waits for others to arrive; if their peer stops, no event tells it."""
        return self._networks[False].waiting

    def go_on(self) -> bool:
        """Asks for what may come, and sends what may go, now. Returns whether there is more to send."""
        for network in self._networks.values():
            self._want_more(network)
        more = False
        for network in self._networks.values():
            left = _FRAMES
            while left and self._send_next(network):
                left -= 1
            more |= not left
        return more

    def _admit(self, message: Message) -> PeerLink | None:
        """The link of a new message; None if the message is done, or has failed, already."""
        link = self.link(message.peer)
        if message.size == 0:
            message.done()
        elif link.closed is not None:
            message.failed(link.cause or ConnectionError(link.closed))
        else:
            message.order = next(self._order)
            return link
        return None

    # -- receiving ----------------------------------------------------------------------------------------------------

    def add_receiving(self, receiving: Receiving) -> None:
        link = self._admit(receiving)
        if link is None:
            return
        link.receivings[receiving.key] = receiving
        self._forget_before(link, receiving.key)
        early = link.early.get(receiving.key)
        if early is not None and early.flags & OFFERS:
            receiving.offered = True
            if not _is_mutual(receiving.key):
                del link.early[receiving.key]
        if link.state is LinkState.OPEN:
            self._begin(link, receiving)

    def _begin(self, link: PeerLink, receiving: Receiving) -> None:
        """Asks for a message, or for the rest of it on a new connection."""
        if receiving.size <= SMALL or link.network.local:
            self._want(link, receiving, receiving.size)
            return
        if receiving.offered:
            bisect.insort(link.network.wanted, (receiving.priority, receiving))
            self._want_more(link.network)
        if _is_mutual(receiving.key) and receiving.granted == receiving.received:
            # It says that this worker is in the exchange. Of the first message the peer may send the beginning once it is, too.
            is_first = not link.network.outstanding and not any(r.granted > r.received for r in link.receivings.values())
            ahead = link.network.coming.window
            upto = min(receiving.size, receiving.received + ahead) if is_first and not receiving.offered else receiving.granted
            self._want(link, receiving, upto)

    def _want(self, link: PeerLink, receiving: Receiving, upto: int) -> None:
        if receiving.offered and receiving.size > SMALL:
            link.count_wanted(upto - receiving.granted, asks=True)
        receiving.granted = upto
        self._start(link, receiving)

    def _start(self, link: PeerLink, receiving: Receiving) -> None:
        if link.control is not None:
            flags = OFFERS if _is_mutual(receiving.key) else 0
            link.control.send(pack(START, receiving.key, flags, receiving.received, receiving.granted, receiving.size))

    def _want_more(self, network: Network) -> None:
        i = 0
        while i < len(network.wanted):
            receiving = network.wanted[i][1]
            link = self.links[receiving.peer]
            space = network.space(receiving, link)
            if not space:
                return
            self._want(link, receiving, receiving.granted + space)
            if receiving.granted == receiving.size:
                del network.wanted[i]
            else:
                i += 1

    def _offered(self, link: PeerLink, receiving: Receiving) -> None:
        """The peer has the message, or is in the exchange."""
        if not receiving.offered:
            receiving.offered = True
            if receiving.size > SMALL:
                if receiving.granted > receiving.received:
                    link.count_wanted(receiving.granted - receiving.received)
                if receiving.granted < receiving.size:
                    bisect.insort(link.network.wanted, (receiving.priority, receiving))

    def memory_for(self, link: PeerLink, header: Header) -> memoryview | None:
        """Where the body of a DATA message goes; None: it is not wanted any more.

        Raises:
            WireError: the peer has got out of step.
        """
        receiving = link.receivings.get(header.key)
        if receiving is None:
            self.dropped += 1
            return None
        check_size(self._rank, link.peer, header.key, header.size, receiving.size)
        begin, end = header.first, header.first + header.second
        if end <= receiving.received:
            self.dropped += 1
            return None
        if begin != receiving.received or end > receiving.granted:
            raise WireError(
                f"worker {link.peer} sent bytes {begin} to {end} of round {header.key[0]}, bucket {header.key[1]} (slot "
                f"{header.key[2]}), which were not due. The workers have got out of step; start them together from one "
                "installation."
            )
        return receiving.memory[begin:end]

    def arrived(self, link: PeerLink, header: Header) -> None:
        """A part of a message was written to its memory."""
        receiving, length = link.receivings[header.key], header.second
        self._hear_round(link, header)
        self.settlement.join(link, header.key)
        self._offered(link, receiving)
        receiving.received += length
        link.moved = time.monotonic()
        if receiving.size > SMALL:
            link.measure(length)
            link.count_wanted(-length)
        if receiving.received == receiving.size:
            del link.receivings[receiving.key]
            if not (_is_mutual(receiving.key) or _is_light(link, receiving)):
                self._start(link, receiving)  # the sender may use its memory again
            receiving.done()

    # -- sending ------------------------------------------------------------------------------------------------------

    def add_sending(self, sending: Sending) -> None:
        link = self._admit(sending)
        if link is None:
            return
        link.sendings[sending.key] = sending
        self._forget_before(link, sending.key)
        early = link.early.pop(sending.key, None)
        if early is not None:
            try:
                self._wanted(link, sending, early)
            except WireError as error:
                self.fail(link, error)
        self.queue(sending)

    def queue(self, sending: Sending) -> None:
        """Queues a message of which there is something to send, and offers it, once, if its key is of one direction alone."""
        link = self.link(sending.peer)
        if link.sendings.get(sending.key) is not sending:
            return  # not added yet, or cancelled
        if not sending.offered and sending.ready > 0 and link.control is not None:
            sending.offered = True
            if sending.size > SMALL and not (link.network.local or _is_mutual(sending.key)):
                link.control.send(pack(START, sending.key, OFFERS, size=sending.size))
        if sending.ready == sending.size:
            self.settlement.vote_if_complete(link, sending.key[1])
        if sending.sendable and not sending.queued:
            sending.queued = True
            heapq.heappush(link.network.sendings, (sending.priority, sending))

    def _wanted(self, link: PeerLink, sending: Sending, header: Header) -> None:
        had, upto = header.first, header.second
        check_size(self._rank, link.peer, sending.key, header.size, sending.size)
        if not had <= upto <= sending.size:
            raise WireError(f"worker {link.peer} wants bytes {had} to {upto} of a message of {sending.size}")
        if not sending.granted:
            sending.written = had  # the rest of it, on a new connection
        if had > sending.arrived:
            link.moved = time.monotonic()
        sending.arrived, sending.granted = max(sending.arrived, had), max(sending.granted, upto)
        if had == sending.size and not _is_mutual(sending.key):
            del link.sendings[sending.key]
            sending.done()
        else:
            self.queue(sending)

    def _send_next(self, network: Network) -> bool:
        """Sends a frame of the message of highest priority. Returns whether there was one."""
        network.waiting = False
        while network.sendings:
            sending = network.sendings[0][1]
            link = self.links[sending.peer]
            # It has not failed with an earlier connection.
            channel = link.control if _is_light(link, sending) else link.bulk
            if sending.sendable and link.sendings.get(sending.key) is sending and channel is not None:
                if network.must_wait(sending, self.links.values()):
                    return False
                self._send_frame(link, channel, sending)
                return True
            heapq.heappop(network.sendings)
            sending.queued = False
        return False

    def _send_frame(self, link: PeerLink, channel: Channel, sending: Sending) -> None:
        frame = LARGEST_FRAME
        if not link.network.local:
            wanted = sending.granted - sending.arrived
            cheap = min(int(_FRAME_SECONDS * link.network.coming.value), _FRAME_UP_TO, wanted // 2)
            frame = min(max(wanted // 8, cheap, _SMALLEST_FRAME), frame)
        begin, end = sending.written, min(sending.ready, sending.granted, sending.written + frame)
        header, body = pack(DATA, sending.key, 0, begin, end - begin, sending.size), sending.memory[begin:end]
        sending.lent = sending.lent or channel.lends(body)
        with profiled("decent_dp.send"):
            channel.send(header, body)
        sending.written = end
        link.moved = time.monotonic()
        if end == sending.size and not _is_mutual(sending.key) and _is_light(link, sending):
            del link.sendings[sending.key]
            sending.done()

    def recall(self, link: PeerLink, sending: Sending) -> None:
        """The memory of a message in doubt is the caller's from now on. libzmq may still read it, and the peer must not get
        what is written there next: the connection is made anew."""
        if sending.lent and sending.written > sending.arrived and link.state is LinkState.OPEN:
            self.lose(link, "a message was given up")

    def cancel(self, link: PeerLink, receiving: Receiving, sending: Sending) -> None:
        """From now on the memory of these messages is the caller's: what is on the way is dropped when it comes."""
        if link.receivings.get(receiving.key) is receiving:
            del link.receivings[receiving.key]
            self._want_nothing(link, receiving)
        if link.sendings.get(sending.key) is sending:
            del link.sendings[sending.key]
            sending.ready = sending.written  # it is not sendable any more

    def _want_nothing(self, link: PeerLink, receiving: Receiving) -> None:
        if receiving.offered and receiving.size > SMALL:
            link.count_wanted(receiving.received - receiving.granted)
        link.network.wanted = [entry for entry in link.network.wanted if entry[1] is not receiving]

    # -- control ------------------------------------------------------------------------------------------------------

    def hear(self, link: PeerLink, header: Header, body: bytes) -> None:
        """A message came over the control connection, or a BLOCK over the other.

        Raises:
            WireError: the peer has got out of step.
        """
        kind, key = header.kind, header.key
        if kind in (CALL, BLOCK):
            self._listener.hear_note(link.peer, key, body)
            return
        if kind == BEAT:
            self._hear_beat(link, header)
            return
        self._hear_round(link, header)
        if kind == START and key[2] == HINT:
            _bound(link, key[1])
            self._listener.keep_hint(link.peer, key, body)
        elif kind == START:
            self.settlement.join(link, key)
            self._hear_start(link, header)
        elif kind == VOTE and header.flags == ASK:
            self.settlement.answer(link, key[0], key[1])
        elif kind == VOTE:
            _bound(link, key[1])
            self.settlement.hear(link, Vote(key[0], key[1], header.flags == GOT))

    def _hear_beat(self, link: PeerLink, header: Header) -> None:
        begun, first_bucket, _ = header.key
        if first_bucket >= self.first_bucket:
            link.round = max(link.round, begun - 1)
        link.paused = bool(header.flags & PAUSES)
        link.epoch = max(link.epoch, header.epoch)
        link.told = time.monotonic()
        if header.flags & MOVES:
            link.busy = link.told
            for pair in link.pairs.values():
                pair.busy = pair.busy if pair.joined else link.told
        if header.flags & ASKS:
            self.beat(link)

    def _hear_start(self, link: PeerLink, header: Header) -> None:
        key, is_offer = header.key, bool(header.flags & OFFERS)
        receiving = link.receivings.get(key) if is_offer else None
        sending = link.sendings.get(key) if _is_mutual(key) or not is_offer else None
        if receiving is not None:
            self._offered(link, receiving)
        if sending is not None:
            self._wanted(link, sending, header)
        if (sending if _is_mutual(key) or not is_offer else receiving) is None:
            _bound(link, len(link.early))
            link.early[key] = header

    def _hear_round(self, link: PeerLink, header: Header) -> None:
        # What is of earlier buckets belongs to a state that was replaced.
        if header.key[1] >= self.first_bucket:
            link.round = max(link.round, header.key[0])

    def _forget_before(self, link: PeerLink, key: Key) -> None:
        """Forgets STARTs of earlier rounds of a bucket, which both ends have passed: some may never be used.

        Those of groups are used, perhaps after those of later rounds, as groups wait for memory.
        """
        if len(link.early) >= 2 and _is_mutual(key):
            for early in [early for early in link.early if early[1:] == key[1:] and early[0] < key[0]]:
                del link.early[early]

    def send_hint(self, peer: int, key: Key, hint: bytes) -> None:
        """Sends what the peer needs to encode for an exchange. It is lost without an error if the peer is gone."""
        link = self.link(peer)
        if link.state is not LinkState.GONE:
            link.hints[key[1]] = key, hint
        if link.control is not None:
            link.control.send(pack(START, key), hint)

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        """Sends a few bytes of the control plane."""
        link = self.link(peer)
        channel = link.bulk if key[1] == BLOCKS else link.control
        if channel is not None:
            channel.send(pack(BLOCK if key[1] == BLOCKS else CALL, key), text)

    def say(self, link: PeerLink, word: int, key: Key) -> None:
        """Sends a vote, or asks for one. Without a connection nothing is sent: votes are repeated on the next one."""
        if link.control is not None:
            link.control.send(pack(VOTE, key, word))

    def begin(self, bucket: int) -> None:
        """Rounds count from now on for buckets from this number on."""
        self.first_bucket, self.round = bucket, -1
        for link in self.links.values():
            link.forget_rounds()

    def beat(self, link: PeerLink, *, ask: bool = False) -> None:
        """Says how many rounds this worker has begun, and in which epoch it is; ``ask``: and asks for it."""
        if link.control is not None:
            flags = (ASKS if ask else 0) | (PAUSES if self.paused else 0) | (MOVES if self._moves() else 0)
            link.control.send(pack(BEAT, (self.round + 1, self.first_bucket, 0), flags, epoch=self.epoch))

    def _moves(self) -> bool:
        """Whether bytes of an exchange move in which both ends are. Who only waits for such a worker is not excused: so nobody
        waits in a circle."""
        since = time.monotonic() - _MOVING
        return any(pair.joined for link in self.links.values() if link.moved > since for pair in link.pairs.values())

    def beat_all(self) -> None:
        for link in self.links.values():
            self.beat(link)

    # -- closing ------------------------------------------------------------------------------------------------------

    def lose(self, link: PeerLink, reason: str, error: ConnectionError | None = None) -> None:
        """The connection was lost. It is made again, and pairs go on; the messages of groups fail."""
        if link.is_connected:
            self._let_go(link)
            link.enter(LinkState.BROKEN)
            self.joiners = {of: joiner for of, joiner in self.joiners.items() if joiner is not link}
            link.lost = error or ConnectionError(reason)
            self._fail_messages(link, link.lost)
            # Its heartbeats have come until then, whatever its interpreter did.
            link.heard = max(link.heard, link.since - SILENT * self.dead_after)
            if link.losses.again():
                _log.warning(
                    "the connection to worker %d has broken %d times within %.0f s, the last time as follows: %s. It is made "
                    "again, and what was on its way is sent again. See what damages or cuts it: a cable, a firewall, a tunnel",
                    link.peer,
                    link.losses.times,
                    math.ceil(link.losses.seconds),
                    reason,
                )

    def give_up(self, link: PeerLink, reason: str) -> None:
        """The peer has left, or no process listens at its address any more."""
        self._let_go(link)
        link.closed = link.closed or reason
        link.enter(LinkState.GONE)
        self.expire(link)

    def _let_go(self, link: PeerLink) -> None:
        """Closes the connections. What has arrived of messages is kept for the next ones."""
        self._listener.hang_up(link)
        link.control = link.bulk = link.joining = None
        for receiving in link.receivings.values():
            self._want_nothing(link, receiving)
            receiving.granted, receiving.offered = receiving.received, False
        for sending in link.sendings.values():
            sending.granted, sending.offered, sending.lent = 0, False, False
        link.early.clear()

    def fail(self, link: PeerLink, error: BaseException) -> None:
        """Closes the connections for good: the peer has sent what was not due, or this worker has ended."""
        link.cause = link.cause or error
        if isinstance(error, WireError):
            _log.warning("the connection to worker %d was closed for good: %s", link.peer, error)
        else:
            for pair in link.pairs.values():
                pair.receiving.failed(error)
        self.give_up(link, str(error))

    def expire(self, link: PeerLink) -> None:
        """The peer counts as dead, though it may come back."""
        self._fail_messages(link, link.why_lost)
        self.settlement.expire(link)
        link.fail_questions()

    def _fail_messages(self, link: PeerLink, error: BaseException) -> None:
        for messages in (link.receivings, link.sendings):
            for message in [message for message in messages.values() if not _is_mutual(message.key)]:
                del messages[message.key]
                # A peer that has ended needs nothing more, and libzmq reads no memory for it. It may have had all of it.
                if isinstance(message, Sending) and message.written == message.size and isinstance(error, OSError):
                    message.done()
                else:
                    message.failed(error)


def _is_mutual(key: Key) -> bool:
    """Whether it is the key of two messages, one in each direction."""
    return key[2] == 0


def _is_light(link: PeerLink, message: Message) -> bool:
    """Whether a message travels over the control connection, where it delays nothing: inside a node, if a frame could hold it.

    pyzmq has a copy of it once it is sent, and it arrives before a BYE. So nobody says that it has arrived.
    """
    return link.network.local and message.size <= LARGEST_FRAME


def _bound(link: PeerLink, ahead: int) -> None:
    if ahead >= _MOST_AHEAD:
        raise WireError(f"worker {link.peer} has announced {ahead} messages ahead, or one of bucket {ahead}: too many")
