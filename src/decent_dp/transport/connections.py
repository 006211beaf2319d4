"""Links that begin, break and end, and what becomes of the messages, exchanges and requests over them."""

from __future__ import annotations

import logging
import math

from decent_dp.errors import WireError
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.flow import Flow, Hints
from decent_dp.transport.messages import BYE, Header, pack
from decent_dp.transport.pace import Pace
from decent_dp.transport.peer_links import LinkState, PeerLink, PeerLinks
from decent_dp.transport.requests import Requests
from decent_dp.transport.settlement import Settlement
from decent_dp.transport.sockets import SILENT, Channel, Sockets

__all__ = ["LINGER", "Connections"]

_log = logging.getLogger(__name__)

# Seconds that closing may take until the others have what was sent.
LINGER = 10.0
# Flag of a BYE: the answer to one.
_ANSWER = 1


class Connections:
    """Used by the transport's thread alone.

    Args:
        rank: this worker's.

    Attributes:
        flow, hints, settlement: of the messages and exchanges over the links.
        lingering: connections that stay open for a while though their link is over, and until when.
        leaving: this worker has said BYE.
        made_again: connections in place of lost ones.
        replaced: another process is this worker by now.
    """

    def __init__(self, rank: int, links: PeerLinks, sockets: Sockets, control_plane: ControlPlane, requests: Requests) -> None:
        self.links, self._sockets, self.control_plane, self.requests = links, sockets, control_plane, requests
        self.flow, self.hints = Flow(rank, links, self.fail), Hints(links)
        self.settlement = Settlement(self.flow, links, self.lose)
        self.lingering: dict[Channel, float] = {}
        self.leaving = self.replaced = False
        self.made_again = 0

    def open(self, link: PeerLink, uid: bytes, *channels: Channel, joins: bool = False) -> None:
        """Uses connections, for control and bulk, to a process of the peer, which has proven who it is.

        Args:
            joins: it, or this one, is no member for the other one yet.
        """
        was_joining = link.state is LinkState.JOINING
        self.made_again += bool(link.uid) and not was_joining
        for channel in channels:
            channel.link = link
            self._sockets.use(channel)
        link.channels, link.uid, link.why = channels, uid, None
        link.enter(LinkState.JOINING if joins else LinkState.OPEN)
        link.heard = link.since
        if not was_joining:
            self.requests.ask_again(link)
        if joins:
            return
        link.lane.pace = Pace()  # it may take another, slower route
        self.settlement.repeat(link)
        for key, hint in list(link.lane.hints.values()):
            self.hints.send(link.peer, key, hint)
        self.flow.resume(link)
        if self.leaving:
            self.say_bye()
        self.links.beat(link)  # says in which round and epoch this worker is
        self.control_plane.reconnected(link.peer)

    def let_join(self, peer: int, incarnation: int, uid: bytes, *channels: Channel) -> None:
        """A process that is no member has connected."""
        if (before := self.links.joiners.get((peer, incarnation))) is not None:
            self.lose(before, "replaced by the peer")
        link = self.links.joiners[peer, incarnation] = self.links.new(peer, incarnation)
        self.open(link, uid, *channels, joins=True)

    def renew(self, peer: int, incarnation: int, start: int) -> None:
        """Another process is this peer now, from round ``start`` on. It counts as one that was connected just now; if it has
        joined over a connection to this worker, that is the member's from now on."""
        if self.links.known(peer).incarnation >= incarnation:
            return
        self.links.expected.add(peer)
        self.give_up(self.links.to(peer), "another process has taken its place")
        link = self.links.by_rank[peer] = self.links.new(peer, incarnation)
        link.start = start
        link.enter(LinkState.BROKEN)
        link.heard = link.since
        self.control_plane.agreements.renew(peer, incarnation)
        joiner = self.links.joiners.pop((peer, incarnation), None)
        if joiner is not None and joiner.channels:
            self.open(link, joiner.uid, *joiner.channels)

    # -- the end ------------------------------------------------------------------------------------------------------

    def say_bye(self) -> None:
        self.leaving = True
        self.control_plane.agreements.leave()
        for link in self.links.by_rank.values():
            link.say(pack(BYE))

    def hear_bye(self, link: PeerLink, channel: Channel, header: Header) -> None:
        """The peer leaves, or has heard that this worker does."""
        link.says.left = True
        if header.flags == _ANSWER:
            return
        self.control_plane.agreements.departed(link.peer)
        channel.send(pack(BYE, flags=_ANSWER))
        for left in link.channels:
            self.lingering[left] = self.links.clock.now() + LINGER
        self.give_up(link, "the peer has left")

    def lose(self, link: PeerLink, reason: str, error: ConnectionError | None = None) -> None:
        """The connection was lost. It is made again, and pairs go on; the messages of groups fail."""
        if not link.is_connected:
            return
        self._let_go(link)
        link.enter(LinkState.BROKEN)
        self.links.joiners = {of: joiner for of, joiner in self.links.joiners.items() if joiner is not link}
        link.why = error or ConnectionError(reason)
        self.flow.fail_groups(link, link.why)
        # Its heartbeats have come until then, whatever its interpreter did.
        link.heard = max(link.heard, link.since - SILENT * self.links.dead_after)
        if link.losses.again():
            _log.warning(
                "the connection to worker %d has broken %d times within %.0f s, the last time as follows: %s. It is made "
                "again, and what was on its way is sent again. See what damages or cuts it: a cable, a firewall, a tunnel",
                link.peer,
                link.losses.times,
                math.ceil(link.losses.seconds),
                reason,
            )

    def give_up(self, link: PeerLink, reason: str, *, may_live: bool = False) -> None:
        """The peer has left, or no process listens at its address any more. ``may_live``: or something else has happened."""
        self._let_go(link)
        link.why = link.why or ConnectionError(reason)
        link.enter(LinkState.GONE)
        self.expire(link, may_live=may_live)

    def fail(self, link: PeerLink, error: BaseException) -> None:
        """Closes the connections for good: the peer has sent what was not due, or this worker has ended."""
        if not isinstance(link.why, WireError):
            link.why = error
        if isinstance(error, WireError):
            _log.warning("the connection to worker %d was closed for good: %s", link.peer, error)
        else:
            for pair in link.votes.pairs.values():
                pair.receiving.failed(error)
        self.give_up(link, str(error), may_live=True)

    def expire(self, link: PeerLink, *, may_live: bool = True) -> None:
        """The peer counts as dead, though it may come back."""
        self.flow.fail_groups(link, link.why_lost)
        self.settlement.expire(link, may_live=may_live)
        self.requests.fail(link)

    def _let_go(self, link: PeerLink) -> None:
        """Closes the connections."""
        for channel in link.channels:
            if channel not in self.lingering:
                self._sockets.hang_up(channel)
        link.channels = ()
        self.flow.release(link)
