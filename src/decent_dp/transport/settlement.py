"""The exchanges of pairs that both ends mix, or neither (``votes``), over the messages of ``flow``."""

from __future__ import annotations

import time
from typing import Protocol

from decent_dp.transport.messages import ASK, DROP, GOT, Key
from decent_dp.transport.peer_link import LinkState, PairExchange, PeerLink, Receiving, Sending
from decent_dp.transport.votes import Vote

__all__ = ["Settlement"]


class Messages(Protocol):
    """The part of a ``Flow`` that moves what is settled here."""

    def link(self, peer: int) -> PeerLink: ...

    def add_receiving(self, receiving: Receiving) -> None: ...

    def add_sending(self, sending: Sending) -> None: ...

    def cancel(self, link: PeerLink, receiving: Receiving, sending: Sending) -> None: ...

    def recall(self, link: PeerLink, sending: Sending) -> None: ...

    def say(self, link: PeerLink, word: int, key: Key) -> None: ...


class Settlement:
    """Opens exchanges, casts and hears votes, and ends exchanges when their verdict is known. Used by the transport's thread.

    Attributes:
        one_sided: exchanges that were dropped here while they were in doubt: the peer may have mixed them.
    """

    def __init__(self, flow: Messages) -> None:
        self._flow = flow
        self.one_sided = 0

    def open(self, pair: PairExchange) -> None:
        """Begins an exchange."""
        key, link = pair.receiving.key, self._flow.link(pair.receiving.peer)
        pair.opened = time.monotonic()
        link.votes.open(pair.round, pair.bucket)
        link.pairs[pair.bucket] = pair
        if link.state is LinkState.GONE:
            link.votes.vote_drop(pair.round, pair.bucket)
        if link.votes.verdict(pair.round, pair.bucket) is not None:
            self._end(link, pair)
            return
        if key in link.early:
            self.join(link, key)
        pair.receiving.done = lambda: self.vote_if_complete(link, pair.bucket)
        self._flow.add_receiving(pair.receiving)
        self._flow.add_sending(pair.sending)

    def join(self, link: PeerLink, key: Key) -> None:
        """A message shows that the peer is in this exchange."""
        pair = link.pairs.get(key[1])
        if pair is not None and pair.round == key[0] and not pair.joined:
            pair.joined = time.monotonic()
            link.paused = False

    def hear(self, link: PeerLink, vote: Vote) -> None:
        link.votes.hear(vote)
        pair = link.pairs.get(vote.bucket)
        if pair is not None and pair.round == vote.round and not (vote.got or link.votes.in_doubt(vote.bucket)):
            self._drop(link, vote.round, vote.bucket)  # also if the peer has said GOT before, and waits no longer
        self._end_if_settled(link, vote.bucket)

    def answer(self, link: PeerLink, round_: int, bucket: int) -> None:
        """The peer is in doubt, and waits for this worker's vote. Without the whole message this worker drops the exchange."""
        if link.votes.has_said_got(round_, bucket):
            self._say(link, Vote(round_, bucket, got=True))
        else:
            self._drop(link, round_, bucket)

    def abandon(self, pair: PairExchange, *, late: bool) -> None:
        """This worker waits no longer for an exchange. One that is in doubt does not end yet: the peer is asked.

        Args:
            late: it has taken much longer than usual, which changes how long the next ones are waited for.
        """
        link = self._flow.link(pair.receiving.peer)
        if link.pairs.get(pair.bucket) is not pair:
            return  # it ended in the meantime
        if late:
            link.give_up(pair)
        if not link.votes.in_doubt(pair.bucket):
            self._drop(link, pair.round, pair.bucket)
        else:
            self._flow.say(link, ASK, pair.sending.key)

    def drop(self, pair: PairExchange) -> None:
        """Ends an exchange, also one in doubt: the peer may have mixed that."""
        link = self._flow.link(pair.receiving.peer)
        if link.pairs.get(pair.bucket) is not pair:
            return
        if link.votes.in_doubt(pair.bucket):
            self._flow.recall(link, pair.sending)
            self.one_sided += 1
            self._say(link, link.votes.revoke(pair.bucket))
            self._end_if_settled(link, pair.bucket)
        else:
            self._drop(link, pair.round, pair.bucket)

    def skip(self, peer: int, round_: int, bucket: int) -> None:
        """This worker leaves an exchange out that it has not opened, and all earlier ones of the bucket."""
        self._drop(self._flow.link(peer), round_, bucket)

    def expire(self, link: PeerLink) -> None:
        """The peer counts as dead: all exchanges with it are dropped."""
        for bucket, pair in list(link.pairs.items()):
            if link.votes.in_doubt(bucket):
                # What a process that has ended has mixed went with it. One that sent what was not due may live.
                self.one_sided += link.state is not LinkState.GONE or link.cause is not None
                link.votes.revoke(bucket)
            else:
                link.votes.vote_drop(pair.round, bucket)
            self._end_if_settled(link, bucket)

    def repeat(self, link: PeerLink) -> None:
        """Begins a connection, perhaps in place of a lost one."""
        link.votes.forget()
        for vote in link.votes.repeated():
            self._say(link, vote)

    def vote_if_complete(self, link: PeerLink, bucket: int) -> None:
        """A message of this exchange has come, or is coded."""
        pair = link.pairs.get(bucket)
        if pair is not None and pair.complete and not link.votes.in_doubt(bucket):
            pair.voted = time.monotonic()
            self._say(link, link.votes.vote_got(pair.round, bucket))
            self._end_if_settled(link, bucket)

    def _drop(self, link: PeerLink, round_: int, bucket: int) -> None:
        self._say(link, link.votes.vote_drop(round_, bucket))
        self._end_if_settled(link, bucket)

    def _say(self, link: PeerLink, vote: Vote) -> None:
        self._flow.say(link, GOT if vote.got else DROP, (vote.round, vote.bucket, 0))

    def _end_if_settled(self, link: PeerLink, bucket: int) -> None:
        pair = link.pairs.get(bucket)
        if pair is not None and link.votes.verdict(pair.round, bucket) is not None:
            self._end(link, pair)

    def _end(self, link: PeerLink, pair: PairExchange) -> None:
        verdict = link.votes.verdict(pair.round, pair.bucket)
        assert verdict is not None
        link.votes.close(pair.round, pair.bucket)
        del link.pairs[pair.bucket]
        link.record(pair, verdict)
        self._flow.cancel(link, pair.receiving, pair.sending)
        pair.settle(verdict)
