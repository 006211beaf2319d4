"""The exchanges of pairs that both ends mix, or neither (``votes``), over the messages of ``flow``."""

from __future__ import annotations

import time
from collections.abc import Callable

from decent_dp.transport.flow import Flow
from decent_dp.transport.messages import ASK, DROP, GOT, VOTE, Header, pack
from decent_dp.transport.peer_link import LinkState, PeerLink
from decent_dp.transport.peer_links import PeerLinks
from decent_dp.transport.transfers import PairExchange
from decent_dp.transport.votes import Vote

__all__ = ["Settlement"]


class Settlement:
    """Opens exchanges, casts and hears votes, and ends exchanges when their verdict is known. Used by the transport's thread.

    Args:
        lose: called with a link whose connection must be made anew, and why.

    Attributes:
        one_sided: exchanges that were dropped here while they were in doubt: the peer may have mixed them.
    """

    def __init__(self, flow: Flow, links: PeerLinks, lose: Callable[[PeerLink, str], None]) -> None:
        self._flow, self._links, self._lose = flow, links, lose
        self.one_sided = 0

    def open(self, pair: PairExchange) -> None:
        """Begins an exchange."""
        key, link = pair.receiving.key, self._links.to(pair.peer)
        pair.opened = time.monotonic()
        link.votes.open(pair.round, pair.bucket)
        link.pairs[pair.bucket] = pair
        if link.state is LinkState.GONE:
            link.votes.vote_drop(pair.round, pair.bucket)
        if link.votes.verdict(pair.round, pair.bucket) is not None:
            self._end_if_settled(link, pair.bucket)
            return
        if key in link.early:
            link.join(key)
        pair.receiving.done = lambda: self.vote_if_complete(pair)
        self._flow.add_receiving(pair.receiving)
        self._flow.add_sending(pair.sending)

    def send(self, pair: PairExchange, ready: int) -> None:
        """So many bytes of this worker's message are coded."""
        pair.sending.ready = ready
        self._flow.queue(pair.sending)
        self.vote_if_complete(pair)

    def vote_if_complete(self, pair: PairExchange) -> None:
        """The peer's message has come, or this worker's own one is coded."""
        link, bucket = self._links.to(pair.peer), pair.bucket
        if link.pairs.get(bucket) is pair and pair.complete and not link.votes.in_doubt(bucket):
            pair.voted = time.monotonic()
            self._say(link, link.votes.vote_got(pair.round, bucket))
            self._end_if_settled(link, bucket)

    def hear(self, link: PeerLink, header: Header) -> None:
        """A VOTE has come.

        Raises:
            WireError: it is of a bucket that cannot be.
        """
        round_, bucket, _ = header.key
        link.bound(bucket)
        if header.flags == ASK:
            # The peer is in doubt, and waits for this worker's vote. Without the whole message this worker drops the exchange.
            if link.votes.has_said_got(round_, bucket):
                self._say(link, Vote(round_, bucket, got=True))
            else:
                self._drop(link, round_, bucket)
            return
        vote = Vote(round_, bucket, got=header.flags == GOT)
        link.votes.hear(vote)
        pair = link.pairs.get(bucket)
        if pair is not None and pair.round == round_ and not (vote.got or link.votes.in_doubt(bucket)):
            self._drop(link, round_, bucket)  # also if the peer has said GOT before, and waits no longer
        self._end_if_settled(link, bucket)

    def abandon(self, pair: PairExchange, *, late: bool) -> None:
        """This worker waits no longer for an exchange. One that is in doubt does not end yet: the peer is asked.

        Args:
            late: it has taken much longer than usual, which changes how long the next ones are waited for.
        """
        link = self._links.to(pair.peer)
        if link.pairs.get(pair.bucket) is not pair:
            return  # it ended in the meantime
        if late:
            link.lateness.give_up(pair)
        if not link.votes.in_doubt(pair.bucket):
            self._drop(link, pair.round, pair.bucket)
        else:
            link.say(pack(VOTE, pair.sending.key, ASK))

    def drop(self, pair: PairExchange) -> None:
        """Ends an exchange, also one in doubt: the peer may have mixed that."""
        link = self._links.to(pair.peer)
        if link.pairs.get(pair.bucket) is not pair:
            return
        if link.votes.in_doubt(pair.bucket):
            # The message's memory is the caller's from now on, and the peer must not get what is written there next.
            if pair.sending.is_lent and link.state is LinkState.OPEN:
                self._lose(link, "a message was given up")
            self.one_sided += 1
            self._say(link, link.votes.revoke(pair.bucket))
            self._end_if_settled(link, pair.bucket)
        else:
            self._drop(link, pair.round, pair.bucket)

    def skip(self, peer: int, round_: int, bucket: int) -> None:
        """This worker leaves an exchange out that it has not opened, and all earlier ones of the bucket."""
        self._drop(self._links.to(peer), round_, bucket)

    def expire(self, link: PeerLink, *, may_live: bool) -> None:
        """The peer counts as dead: all exchanges with it are dropped. What a process that has ended has mixed went with it."""
        for bucket, pair in list(link.pairs.items()):
            if link.votes.in_doubt(bucket):
                self.one_sided += may_live
                link.votes.revoke(bucket)
            else:
                link.votes.vote_drop(pair.round, bucket)
            self._end_if_settled(link, bucket)

    def repeat(self, link: PeerLink) -> None:
        """Begins a connection, perhaps in place of a lost one."""
        link.votes.forget()
        for vote in link.votes.repeated():
            self._say(link, vote)

    def _drop(self, link: PeerLink, round_: int, bucket: int) -> None:
        self._say(link, link.votes.vote_drop(round_, bucket))
        self._end_if_settled(link, bucket)

    def _say(self, link: PeerLink, vote: Vote) -> None:
        # Without a connection nothing is sent: votes are repeated on the next one.
        link.say(pack(VOTE, (vote.round, vote.bucket, 0), GOT if vote.got else DROP))

    def _end_if_settled(self, link: PeerLink, bucket: int) -> None:
        pair = link.pairs.get(bucket)
        verdict = None if pair is None else link.votes.verdict(pair.round, bucket)
        if pair is None or verdict is None:
            return
        link.votes.close(pair.round, bucket)
        del link.pairs[bucket]
        link.lateness.record(pair, verdict)
        self._flow.cancel(link, pair.receiving, pair.sending)
        pair.settle(verdict)
