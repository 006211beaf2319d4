"""The exchanges of pairs that both ends mix, or neither (``votes``), over the messages of ``flow``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from decent_dp.errors import WireError
from decent_dp.transport.base import Verdict
from decent_dp.transport.link import Key, Link, LinkState, Pair
from decent_dp.transport.messages import ASK, DROP, GOT
from decent_dp.transport.votes import Vote

if TYPE_CHECKING:
    from decent_dp.transport.flow import Flow

__all__ = ["Settlement"]


class Settlement:
    """Opens exchanges, casts and hears votes, and ends exchanges when their verdict is known. Used by the transport's thread.

    Attributes:
        one_sided: exchanges that were dropped here, because the peer counts as dead, and that it may have mixed.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.one_sided = 0

    def open(self, pair: Pair) -> None:
        """Begins an exchange."""
        key, connection = pair.receiving.key, self._flow.connection(pair.receiving.peer)
        pair.opened = time.monotonic()
        connection.votes.open(pair.round, pair.bucket)
        connection.pairs[pair.bucket] = pair
        if connection.state is LinkState.GONE and not isinstance(connection.cause, WireError):
            connection.votes.vote_drop(pair.round, pair.bucket)
        if connection.votes.verdict(pair.round, pair.bucket) is not None:
            self._end(connection, pair)
            return
        if connection.has_begun(key):
            self.join(connection, key)
        pair.receiving.done = lambda: self.vote_if_complete(connection, pair.bucket)
        self._flow.add_receiving(pair.receiving)
        self._flow.add_sending(pair.sending)

    def join(self, connection: Link, key: Key) -> None:
        """A message shows that the peer is in this exchange."""
        pair = connection.pairs.get(key[1])
        if pair is not None and pair.round == key[0] and not pair.joined:
            pair.joined = time.monotonic()
            connection.paused = False

    def hear(self, connection: Link, vote: Vote) -> None:
        connection.votes.hear(vote)
        self._end_if_settled(connection, vote.bucket)

    def answer(self, connection: Link, round_: int, bucket: int) -> None:
        """The peer is in doubt, and sends no more of its message. Without the whole of it this worker drops the exchange."""
        if connection.votes.has_said_got(round_, bucket):
            self._say(connection, Vote(round_, bucket, got=True))
        else:
            self._drop(connection, round_, bucket)

    def abandon(self, peer: int, key: Key, *, late: bool) -> Verdict:
        """This worker waits no longer for an exchange.

        Args:
            late: it has taken much longer than usual, which changes how long the next ones are waited for.

        Returns:
            OPEN if this worker is in doubt: it has said GOT. Else the exchange has ended.
        """
        connection, (round_, bucket, _) = self._flow.connection(peer), key
        pair = connection.pairs.get(bucket)
        if pair is None or pair.round != round_:
            return Verdict.NEITHER  # it ended in the meantime, and its handle knows how
        if late:
            connection.give_up(pair)
        if connection.votes.in_doubt(bucket):
            self._flow.cancel(connection, pair.receiving, pair.sending)
            self._flow.recall(connection, pair.sending)
            if connection.state is LinkState.OPEN:
                self._flow.say(connection, ASK, key)
            return Verdict.OPEN
        self._drop(connection, round_, bucket)
        return Verdict.NEITHER

    def skip(self, peer: int, round_: int, bucket: int) -> None:
        """This worker leaves an exchange out that it has not opened, and all earlier ones of the bucket."""
        self._drop(self._flow.connection(peer), round_, bucket)

    def ask_for_life(self, connection: Link) -> None:
        if connection.state is LinkState.OPEN:
            self._flow.beat(connection, ask=True)

    def expire(self, connection: Link) -> None:
        """The peer counts as dead: all exchanges with it are dropped."""
        for bucket, pair in list(connection.pairs.items()):
            if connection.votes.in_doubt(bucket):
                # What a process that has ended has mixed went with it. One that sent what was not due may live.
                self.one_sided += connection.state is not LinkState.GONE or connection.cause is not None
                connection.votes.revoke(bucket)
            else:
                connection.votes.vote_drop(pair.round, bucket)
            self._end_if_settled(connection, bucket)

    def repeat(self, connection: Link) -> None:
        """Begins a connection, perhaps in place of a lost one."""
        connection.votes.forget()
        for vote in connection.votes.repeated():
            self._say(connection, vote)
        for bucket, pair in connection.pairs.items():
            if connection.votes.in_doubt(bucket) and pair.sending.key not in connection.sendings:  # it was abandoned
                self._flow.say(connection, ASK, pair.sending.key)

    def vote_if_complete(self, connection: Link, bucket: int) -> None:
        """A message of this exchange has come, or is coded."""
        pair = connection.pairs.get(bucket)
        if pair is not None and pair.complete and not connection.votes.in_doubt(bucket):
            self._say(connection, connection.votes.vote_got(pair.round, bucket))
            self._end_if_settled(connection, bucket)

    def _drop(self, connection: Link, round_: int, bucket: int) -> None:
        self._say(connection, connection.votes.vote_drop(round_, bucket))
        self._end_if_settled(connection, bucket)

    def _say(self, connection: Link, vote: Vote) -> None:
        if connection.state is LinkState.OPEN:  # else it is repeated when there is a connection again
            self._flow.say(connection, GOT if vote.got else DROP, (vote.round, vote.bucket, 0))

    def _end_if_settled(self, connection: Link, bucket: int) -> None:
        pair = connection.pairs.get(bucket)
        if pair is not None and connection.votes.verdict(pair.round, bucket) not in (None, Verdict.OPEN):
            self._end(connection, pair)

    def _end(self, connection: Link, pair: Pair) -> None:
        verdict = connection.votes.verdict(pair.round, pair.bucket)
        assert verdict is not None
        connection.votes.close(pair.round, pair.bucket)
        del connection.pairs[pair.bucket]
        connection.record(pair, verdict)
        self._flow.cancel(connection, pair.receiving, pair.sending)
        pair.settle(verdict)
