"""The exchanges of pairs that both ends mix, or neither (``votes``), over the messages of ``flow``."""

from __future__ import annotations

from collections.abc import Callable

from decent_dp.transport.flow import Flow
from decent_dp.transport.messages import ASK, DROP, GOT, VOTE, Header, check_ahead, pack
from decent_dp.transport.peer_links import LinkState, PeerLink, PeerLinks
from decent_dp.transport.votes import PairExchange, Vote

__all__ = ["Settlement"]


class Settlement:
    """Opens exchanges, casts and hears votes, and ends exchanges when their verdict is known. Used by the transport's thread.

    Args:
        lose: called with a link whose connection must be made anew, and why.

    Attributes:
        one_sided: exchanges that were dropped here while they were in doubt: the peer may have mixed them.
    """

    def __init__(self, flow: Flow, links: PeerLinks, lose: Callable[[PeerLink, str], None]) -> None:
        self._flow, self._links, self._lose, self._now = flow, links, lose, links.clock.now
        self.one_sided = 0

    def open(self, pair: PairExchange) -> None:
        """Begins an exchange."""
        key, link = pair.receiving.key, self._links.to(pair.peer)
        pair.opened = self._now()
        link.votes.open(pair)
        if link.state is LinkState.GONE:
            link.votes.vote_drop(pair.round, pair.bucket)
        if self._end_if_settled(link, pair.bucket):
            return
        if key in link.lane.early:
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
        link = self._links.to(pair.peer)
        if link.votes.pairs.get(pair.bucket) is pair and pair.complete and not pair.voted:
            self._say(link, link.votes.vote_got(pair, self._now()))

    def hear(self, link: PeerLink, header: Header) -> None:
        """A VOTE has come.

        Raises:
            WireError: it is of a bucket that cannot be.
        """
        round_, bucket, _ = header.key
        check_ahead(link.peer, bucket)
        if header.flags == ASK:
            # The peer is in doubt, and waits for this worker's vote. Without the whole message this worker drops the exchange.
            has_got = link.votes.has_said_got(round_, bucket)
            self._say(link, Vote(round_, bucket, True) if has_got else link.votes.vote_drop(round_, bucket))
            return
        vote = Vote(round_, bucket, got=header.flags == GOT)
        link.votes.hear(vote)
        pair = link.votes.pairs.get(bucket)
        if pair is not None and pair.round == round_ and not (vote.got or pair.voted):
            self.skip(link.peer, round_, bucket)  # also if the peer has said GOT before, and waits no longer
        self._end_if_settled(link, bucket)

    def abandon(self, pair: PairExchange, *, late: bool) -> None:
        """This worker waits no longer for an exchange. One that is in doubt does not end yet: the peer is asked.

        Args:
            late: it has taken much longer than usual, which changes how long the next ones are waited for.
        """
        link = self._links.to(pair.peer)
        if link.votes.pairs.get(pair.bucket) is not pair:
            return  # it ended in the meantime
        if late:
            link.lateness.give_up(pair)
        if pair.voted:
            link.say(pack(VOTE, pair.sending.key, ASK))
        else:
            self.skip(pair.peer, pair.round, pair.bucket)

    def drop(self, pair: PairExchange) -> None:
        """Ends an exchange, also one in doubt: the peer may have mixed that."""
        link = self._links.to(pair.peer)
        if link.votes.pairs.get(pair.bucket) is not pair:
            return
        if not pair.voted:
            self.skip(pair.peer, pair.round, pair.bucket)
            return
        # The message's memory is the caller's from now on, and the peer must not get what is written there next.
        if pair.sending.is_lent and link.state is LinkState.OPEN:
            self._lose(link, "a message was given up")
        self.one_sided += 1
        self._say(link, link.votes.revoke(pair))

    def skip(self, peer: int, round_: int, bucket: int) -> None:
        """This worker leaves an exchange out, opened or not, and all earlier ones of the bucket that have no GOT."""
        link = self._links.to(peer)
        self._say(link, link.votes.vote_drop(round_, bucket))

    def expire(self, link: PeerLink, *, may_live: bool) -> None:
        """The peer counts as dead: all exchanges with it are dropped. What a process that has ended has mixed went with it."""
        for pair in list(link.votes.pairs.values()):
            if pair.voted:
                self.one_sided += may_live
                link.votes.revoke(pair)
            else:
                link.votes.vote_drop(pair.round, pair.bucket)
            self._end_if_settled(link, pair.bucket)

    def repeat(self, link: PeerLink) -> None:
        """Begins a connection, perhaps in place of a lost one."""
        link.votes.forget()
        for vote in link.votes.repeated():
            link.say(_packed(vote))

    def _say(self, link: PeerLink, vote: Vote) -> None:
        link.say(_packed(vote))  # without a connection it is not sent: votes are repeated on the next one
        self._end_if_settled(link, vote.bucket)

    def _end_if_settled(self, link: PeerLink, bucket: int) -> bool:
        pair = link.votes.pairs.get(bucket)
        verdict = None if pair is None else link.votes.verdict(pair)
        if pair is None or verdict is None:
            return False
        del link.votes.pairs[bucket]
        link.lateness.record(pair, verdict, self._now())
        self._flow.cancel(link, pair.receiving, pair.sending)
        pair.settle(verdict)
        return True


def _packed(vote: Vote) -> bytes:
    return pack(VOTE, (vote.round, vote.bucket, 0), GOT if vote.got else DROP)
