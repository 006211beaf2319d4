"""Flow control: the order in which bytes are requested and sent.

The order of messages on a link decides when a bucket can be mixed. So a receiver wants bytes of the earliest exchange first
(``messages``), and a sender hands no more to libzmq than is wanted, the earliest exchange first. What is wanted and has not
arrived is bounded by time, from what peers were seen to send (``pace``). So an earlier round can overtake, and the queue at a
slow link stays short. Inside a node whole messages are wanted at once, as each turn of this thread may wait for the
interpreter.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable

from decent_dp.errors import WireError
from decent_dp.transport.messages import (
    BULK,
    CONTROL,
    DATA,
    LARGEST_FRAME,
    OFFERS,
    START,
    WHOLE,
    Header,
    Key,
    check_ahead,
    check_size,
    pack,
)
from decent_dp.transport.peer_links import LinkState, Network, PeerLink, PeerLinks
from decent_dp.transport.streams import profiled
from decent_dp.transport.transfers import SMALL, Message, Receiving, Sending

__all__ = ["Flow", "Hints"]

# A frame is never sent in part. It has an eighth of the bytes that are wanted or, as each frame costs processor time, what the
# network brings in so many seconds, up to half of what is wanted
_FRAME_SECONDS = 0.005
# and so many bytes;
_FRAME_UP_TO = 2**17
# and at least so many.
_SMALLEST_FRAME = 2**14
# Frames that are handed to libzmq before the thread looks for what has come.
_FRAMES = 16
# Hints of a bucket that are kept for each peer, which may be ahead.
_HINTS = 4
# Bytes of all hints of a peer.
_HINT_BYTES = 2**26


class Flow:
    """The messages of exchanges over the links of one worker. Used by the transport's thread alone.

    Args:
        rank: this worker's.
        fail: called with a link that is to be closed for good, and the error.

    Attributes:
        dropped: messages that came and were not asked for.
    """

    def __init__(self, rank: int, links: PeerLinks, fail: Callable[[PeerLink, BaseException], None]) -> None:
        self._rank, self._links, self._fail, self._now = rank, links, fail, links.clock.now
        self._order = itertools.count()
        self.dropped = 0

    def go_on(self) -> bool:
        """Asks for what may come, and sends what may go, now. Returns whether there is more to send."""
        networks = self._links.networks.values()
        for network in networks:
            self._want_more(network)
        more = False
        for network in networks:
            left = _FRAMES
            while left and self._send_next(network):
                left -= 1
            more |= not left
        return more

    # -- links that begin and break ------------------------------------------------------------------------------------

    def resume(self, link: PeerLink) -> None:
        """There is a connection, perhaps in place of a lost one: messages go on where they were."""
        for receiving in list(link.lane.receivings.values()):
            self._begin(link, receiving)
        for sending in list(link.lane.sendings.values()):
            if sending.is_mutual and sending.key not in link.lane.receivings:  # the peer may not know that this one is in it
                link.say(pack(START, sending.key, OFFERS, sending.size, sending.size, sending.size))
            self.queue(sending)

    def release(self, link: PeerLink) -> None:
        """The connection is lost. What has arrived of messages is kept for the next one."""
        for receiving in link.lane.receivings.values():
            self._want_nothing(link, receiving)
            receiving.granted, receiving.offered = receiving.received, False
        for sending in link.lane.sendings.values():
            sending.granted, sending.offered, sending.lent = 0, False, False
        link.lane.early.clear()

    def fail_groups(self, link: PeerLink, error: BaseException) -> None:
        """The messages of groups fail: they do not wait for another connection."""
        for messages in (link.lane.receivings, link.lane.sendings):
            for message in [message for message in messages.values() if not message.is_mutual]:
                del messages[message.key]
                # A peer that has ended needs nothing more, and libzmq reads no memory for it. It may have had all of it.
                if isinstance(message, Sending) and message.written == message.size and isinstance(error, OSError):
                    message.done()
                else:
                    message.failed(error)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _admit(self, message: Message) -> PeerLink | None:
        """The link of a new message; None if the message is done, or has failed, already."""
        link = self._links.to(message.peer)
        if message.size == 0:
            message.done()
        elif link.state is LinkState.GONE:
            message.failed(link.why_lost)
        else:
            message.order = next(self._order)
            return link
        return None

    def add_receiving(self, receiving: Receiving) -> None:
        link = self._admit(receiving)
        if link is None:
            return
        link.lane.receivings[receiving.key] = receiving
        self._forget_before(link, receiving.key)
        early = link.lane.early.get(receiving.key)
        if early is not None and early.flags & OFFERS:
            receiving.offered = True
            if not receiving.is_mutual:
                del link.lane.early[receiving.key]
        if link.state is LinkState.OPEN:
            self._begin(link, receiving)

    def _begin(self, link: PeerLink, receiving: Receiving) -> None:
        """Asks for a message, or for the rest of it on a new connection."""
        if receiving.size <= SMALL or link.lane.network.local:
            self._want(link, receiving, receiving.size)
            return
        if receiving.offered:
            bisect.insort(link.lane.network.wanted, (receiving.priority, receiving))
            self._want_more(link.lane.network)
        if receiving.is_mutual and receiving.granted == receiving.received:
            # It says that this worker is in the exchange. Of the first message the peer may send the beginning once it is, too.
            is_first = not link.lane.network.pace.due and not any(r.granted > r.received for r in link.lane.receivings.values())
            ahead = link.lane.network.pace.window
            upto = min(receiving.size, receiving.received + ahead) if is_first and not receiving.offered else receiving.granted
            self._want(link, receiving, upto)

    def _want(self, link: PeerLink, receiving: Receiving, upto: int) -> None:
        if receiving.offered and receiving.size > SMALL:
            link.lane.want(upto - receiving.granted, self._now(), asks=True)
        receiving.granted = upto
        self._start(link, receiving)

    def _start(self, link: PeerLink, receiving: Receiving) -> None:
        flags = OFFERS if receiving.is_mutual else 0
        link.say(pack(START, receiving.key, flags, receiving.received, receiving.granted, receiving.size))

    def _want_more(self, network: Network) -> None:
        i = 0
        while i < len(network.wanted):
            receiving = network.wanted[i][1]
            link = self._links.by_rank[receiving.peer]
            space = network.space(receiving, link.lane.pace)
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
                    link.lane.want(receiving.granted - receiving.received, self._now())
                if receiving.granted < receiving.size:
                    bisect.insort(link.lane.network.wanted, (receiving.priority, receiving))

    def memory_for(self, link: PeerLink, header: Header) -> memoryview | None:
        """Where the body of a DATA message goes; None: it is not wanted any more.

        Raises:
            WireError: the peer has got out of step.
        """
        receiving = link.lane.receivings.get(header.key)
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
        receiving, length = link.lane.receivings[header.key], header.second
        self._links.hear_round(link, header.key)
        link.join(header.key)
        self._offered(link, receiving)
        receiving.received += length
        link.lane.moved = self._now()
        if receiving.size > SMALL:
            link.lane.came(length)
        if receiving.received == receiving.size:
            del link.lane.receivings[receiving.key]
            if not (receiving.is_mutual or _is_light(link, receiving)):
                self._start(link, receiving)  # the sender may use its memory again
            receiving.done()

    # -- sending ------------------------------------------------------------------------------------------------------

    def add_sending(self, sending: Sending) -> None:
        link = self._admit(sending)
        if link is None:
            return
        link.lane.sendings[sending.key] = sending
        self._forget_before(link, sending.key)
        early = link.lane.early.pop(sending.key, None)
        if early is not None:
            try:
                self._wanted(link, sending, early)
            except WireError as error:
                self._fail(link, error)
        self.queue(sending)

    def queue(self, sending: Sending) -> None:
        """Queues a message of which there is something to send, and offers it, once, if its key is of one direction alone."""
        link = self._links.to(sending.peer)
        if link.lane.sendings.get(sending.key) is not sending:
            return  # not added yet, or cancelled
        if not sending.offered and sending.ready > 0 and link.state is LinkState.OPEN:
            sending.offered = True
            if sending.size > SMALL and not (link.lane.network.local or sending.is_mutual):
                link.say(pack(START, sending.key, OFFERS, size=sending.size))
        if sending.sendable and not sending.queued:
            sending.queued = True
            heapq.heappush(link.lane.network.sendings, (sending.priority, sending))

    def _wanted(self, link: PeerLink, sending: Sending, header: Header) -> None:
        had, upto = header.first, header.second
        check_size(self._rank, link.peer, sending.key, header.size, sending.size)
        if not had <= upto <= sending.size:
            raise WireError(f"worker {link.peer} wants bytes {had} to {upto} of a message of {sending.size}")
        if not sending.granted:
            sending.written = had  # the rest of it, on a new connection
        if had > sending.arrived:
            link.lane.moved = self._now()
        sending.arrived, sending.granted = max(sending.arrived, had), max(sending.granted, upto)
        if had == sending.size and not sending.is_mutual:
            del link.lane.sendings[sending.key]
            sending.done()
        else:
            self.queue(sending)

    def _send_next(self, network: Network) -> bool:
        """Sends a frame of the message of highest priority. Returns whether there was one."""
        network.waiting = False
        while network.sendings:
            sending = network.sendings[0][1]
            link = self._links.by_rank[sending.peer]
            # It has not failed with an earlier connection.
            if sending.sendable and link.lane.sendings.get(sending.key) is sending and link.state is LinkState.OPEN:
                if self._must_wait(network, sending):
                    network.waiting = True
                    return False
                self._send_frame(link, sending)
                return True
            heapq.heappop(network.sendings)
            sending.queued = False
        return False

    def _must_wait(self, network: Network, sending: Sending) -> bool:
        """Whether a message has to wait because the link is full of messages to another peer in an earlier round.

        The peer of the later round may have wanted it long ago, because it has nothing else to do. The kernel would give each
        half of the link, and the earlier exchange, for which both its members wait, would take twice as long. Messages of
        groups, which have steps, do not wait: one to another peer mostly uses a part of the link that is free.
        """
        if network.local or sending.step:
            return False
        lanes = (link.lane for link in self._links.by_rank.values() if link.peer != sending.peer)
        return any(lane.network is network and lane.is_full_before(sending.key[0], self._now()) for lane in lanes)

    def _send_frame(self, link: PeerLink, sending: Sending) -> None:
        frame, channel = LARGEST_FRAME, link.channels[CONTROL if _is_light(link, sending) else BULK]
        if not link.lane.network.local:
            wanted = sending.granted - sending.arrived
            cheap = min(int(_FRAME_SECONDS * link.lane.network.pace.rate), _FRAME_UP_TO, wanted // 2)
            frame = min(max(wanted // 8, cheap, _SMALLEST_FRAME), frame)
        begin, end = sending.written, min(sending.ready, sending.granted, sending.written + frame)
        header, body = pack(DATA, sending.key, 0, begin, end - begin, sending.size), sending.memory[begin:end]
        sending.lent = sending.lent or channel.lends(body)
        with profiled("decent_dp.send"):
            channel.send(header, body)
        sending.written = end
        if end > sending.sent:  # what is sent again over a new connection is no progress
            sending.sent, link.lane.moved = end, self._now()
        if end == sending.size and not sending.is_mutual and _is_light(link, sending):
            del link.lane.sendings[sending.key]
            sending.done()

    def cancel(self, link: PeerLink, receiving: Receiving, sending: Sending) -> None:
        """From now on the memory of these messages is the caller's: what is on the way is dropped when it comes."""
        if link.lane.receivings.get(receiving.key) is receiving:
            del link.lane.receivings[receiving.key]
            self._want_nothing(link, receiving)
        if link.lane.sendings.get(sending.key) is sending:
            del link.lane.sendings[sending.key]
            sending.ready = sending.written  # it is not sendable any more

    def _want_nothing(self, link: PeerLink, receiving: Receiving) -> None:
        if receiving.offered and receiving.size > SMALL:
            link.lane.want(receiving.received - receiving.granted, self._now())
        link.lane.network.wanted = [entry for entry in link.lane.network.wanted if entry[1] is not receiving]

    # -- control ------------------------------------------------------------------------------------------------------

    def hear_start(self, link: PeerLink, header: Header) -> None:
        """A START has come: an offer, or a request.

        Raises:
            WireError: the peer has got out of step.
        """
        key, is_offer = header.key, bool(header.flags & OFFERS)
        link.join(key)
        receiving = link.lane.receivings.get(key) if is_offer else None
        sending = link.lane.sendings.get(key) if key[2] == WHOLE or not is_offer else None
        if receiving is not None:
            self._offered(link, receiving)
        if sending is not None:
            self._wanted(link, sending, header)
        if (sending if key[2] == WHOLE or not is_offer else receiving) is None:
            check_ahead(link.peer, len(link.lane.early))
            link.lane.early[key] = header

    def _forget_before(self, link: PeerLink, key: Key) -> None:
        """Forgets STARTs of earlier rounds of a bucket, which both ends have passed: some may never be used.

        Those of groups are used, perhaps after those of later rounds, as groups wait for memory.
        """
        if len(link.lane.early) >= 2 and key[2] == WHOLE:
            for early in [early for early in link.lane.early if early[1:] == key[1:] and early[0] < key[0]]:
                del link.lane.early[early]


class Hints:
    """What the others need to encode for an exchange. Hints are kept until this worker is in it, too.

    Used by the transport's thread alone, but for ``lacks``.
    """

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        # Those for which an exchange waits: of whom, and what is called then.
        self._waiting: dict[Key, tuple[list[int], Callable[[list[bytes]], None]]] = {}

    def send(self, peer: int, key: Key, hint: bytes) -> None:
        """It is sent again on a new connection, and lost without an error if the peer is gone."""
        link = self._links.to(peer)
        if link.state is not LinkState.GONE:
            link.lane.hints[key[1]] = key, hint
        link.say(pack(START, key), hint)

    def hear(self, link: PeerLink, key: Key, hint: bytes) -> None:
        """A hint has come. Of many that nobody has asked for only the last ones are kept.

        Raises:
            WireError: the peer has sent too much.
        """
        check_ahead(link.peer, key[1])
        lane, hints = link.lane, link.lane.heard[key[1]]
        if len(hints) >= _HINTS and key not in hints:
            lane.heard_bytes -= len(hints.pop(min(hints)))
        lane.heard_bytes += len(hint) - len(hints.get(key, b""))
        hints[key] = hint
        if lane.heard_bytes > _HINT_BYTES:
            raise WireError(f"worker {link.peer} has sent more than {_HINT_BYTES} bytes of hints that nobody has asked for")
        self._pass_on(key)

    def lacks(self, peer: int, key: Key) -> bool:
        """Whether an exchange waits for a hint of this peer. Any thread may ask."""
        return key in self._waiting and key not in self._links.known(peer).lane.heard.get(key[1], ())

    def when_there(self, peers: list[int], key: Key, then: Callable[[list[bytes]], None]) -> None:
        """Calls ``then`` with the hints of ``peers`` as soon as all are there."""
        self._waiting[key] = peers, then
        self._pass_on(key)

    def _pass_on(self, key: Key) -> None:
        if key in self._waiting and not any(self.lacks(peer, key) for peer in self._waiting[key][0]):
            peers, then = self._waiting.pop(key)
            hints = []
            for lane in (self._links.to(peer).lane for peer in peers):
                hints.append(lane.heard[key[1]].pop(key))
                lane.heard_bytes -= len(hints[-1])
            then(hints)

    def forget(self, key: Key) -> None:
        """No exchange waits for these hints any more."""
        self._waiting.pop(key, None)


def _is_light(link: PeerLink, message: Message) -> bool:
    """Whether a message travels over the control connection, where it delays nothing: inside a node, if a frame could hold it.

    pyzmq has a copy of it once it is sent, and it arrives before a BYE. So nobody says that it has arrived.
    """
    return link.lane.network.local and message.size <= LARGEST_FRAME
