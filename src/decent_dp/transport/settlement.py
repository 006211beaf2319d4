"""The exchanges of pairs that both ends mix, or neither (``votes``), over the messages of ``flow``."""

from __future__ import annotations

from collections.abc import Callable

from decent_dp.transport.flow import Flow
from decent_dp.transport.messages import ASK, DROP, GOT, VOTE, Header, check_ahead, pack
from decent_dp.transport.peer_links import LinkState, PeerLink, PeerLinks
from decent_dp.transport.votes import PairExchange

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
        """Begins an exchange. The one of the bucket before it is settled."""
        key, link = pair.receiving.key, self._links.to(pair.peer)
        assert pair.bucket not in link.votes.pairs, "the exchange before it is settled"
        pair.opened = self._now()
        link.votes.pairs[pair.bucket] = pair
        if link.state is LinkState.GONE:
            self._drop(link, pair.round, pair.bucket)
        elif not self._end_if_settled(link, pair.bucket):
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
            pair.voted = self._now()
            link.votes.got[pair.bucket] = pair.round
            self._say(link, pair.round, pair.bucket, GOT)

    def hear(self, link: PeerLink, header: Header) -> None:
        """A VOTE has come, perhaps again.

        Raises:
            WireError: it is of a bucket that cannot be.
        """
        round_, bucket, _ = header.key
        check_ahead(link.peer, bucket)
        if header.flags == ASK:
            # The peer is in doubt, and waits for this worker's vote. Without the whole message this worker drops the exchange.
            if link.votes.got.get(bucket) == round_:
                self._say(link, round_, bucket, GOT)
            else:
                self._drop(link, round_, bucket)
            return
        votes = link.votes.peer_got if header.flags == GOT else link.votes.peer_dropped
        votes[bucket] = max(round_, votes.get(bucket, -1))
        pair = link.votes.pairs.get(bucket)
        if pair is not None and pair.round == round_ and not (header.flags == GOT or pair.voted):
            self._drop(link, round_, bucket)  # also if the peer has said GOT before, and waits no longer
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
            self._drop(link, pair.round, pair.bucket)

    def drop(self, pair: PairExchange) -> None:
        """Ends an exchange, also one in doubt: the peer may have mixed that."""
        link = self._links.to(pair.peer)
        if link.votes.pairs.get(pair.bucket) is pair:
            # The message's memory is the caller's from now on, and the peer must not get what is written there next.
            if pair.voted and pair.sending.is_lent and link.state is LinkState.OPEN:
                self._lose(link, "a message was given up")
            self._end(link, pair, may_live=True)

    def skip(self, peer: int, round_: int, bucket: int) -> None:
        """This worker leaves an exchange out that it has not opened, and all earlier ones of its bucket that have no GOT."""
        self._drop(self._links.to(peer), round_, bucket)

    def expire(self, link: PeerLink, *, may_live: bool) -> None:
        """The peer counts as dead: all exchanges with it are dropped. What a process that has ended has mixed went with it."""
        for pair in list(link.votes.pairs.values()):
            self._end(link, pair, may_live=may_live)

    def repeat(self, link: PeerLink) -> None:
        """Begins a connection, perhaps in place of a lost one. The peer repeats its votes, but for GOTs that it has revoked."""
        link.votes.peer_got.clear()
        link.votes.peer_dropped.clear()  # else a DROP of a later round would count before the GOT
        for word, votes in ((GOT, link.votes.got), (DROP, link.votes.dropped)):
            for bucket, round_ in votes.items():
                link.say(pack(VOTE, (round_, bucket, 0), word))

    def _end(self, link: PeerLink, pair: PairExchange, *, may_live: bool) -> None:
        """Drops an exchange, also one in doubt. A GOT that the peer has heard cannot be taken back."""
        if pair.voted:
            self.one_sided += may_live
            link.votes.got.pop(pair.bucket, None)
            pair.voted = 0.0
        self._drop(link, pair.round, pair.bucket)

    def _drop(self, link: PeerLink, round_: int, bucket: int) -> None:
        link.votes.dropped[bucket] = max(round_, link.votes.dropped.get(bucket, -1))
        self._say(link, round_, bucket, DROP)

    def _say(self, link: PeerLink, round_: int, bucket: int, word: int) -> None:
        # Without a connection it is not sent: votes are repeated on the next one.
        link.say(pack(VOTE, (round_, bucket, 0), word))
        self._end_if_settled(link, bucket)

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
