"""Both or neither: the two ends of an edge agree whether an exchange is mixed, over connections that may break.

Each end votes once per exchange: GOT when the other's message is whole, or DROP. It is mixed where both have said GOT. A
worker that has not voted may drop an exchange alone, as the other cannot mix without its GOT. A worker that has said GOT is
in doubt until it has heard the other's vote. This is two-phase commit with both ends as coordinators. One that waits no longer
drops what is in doubt, and counts it: the other end may have mixed it.

Exchanges of one bucket with one peer follow each other, and none is opened while the one before is in doubt. So few numbers
per bucket are enough to answer for all exchanges of the past, however often a connection breaks: the last round with a GOT,
and the round up to which all others are dropped. After a connection is made again each end repeats them, the GOTs first, as a
DROP covers all earlier rounds that have none.

The class has no sockets and no clock. ``tests/test_settlement.py`` runs two ends over a scripted network.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decent_dp.transport.transfers import Receiving, Sending

__all__ = ["ExchangeId", "PairExchange", "Verdict", "Vote", "Votes"]


@dataclass(frozen=True)
class ExchangeId:
    """Identifies an exchange; both ends check it."""

    round: int
    bucket: int

    def __str__(self) -> str:
        return f"round {self.round}, bucket {self.bucket}"


class Verdict(enum.Enum):
    """What becomes of an exchange."""

    BOTH = "all members mix it"
    NEITHER = "no member mixes it: one is gone or silent, or leaves it out"


@dataclass(eq=False)
class PairExchange:
    """An exchange of two workers that both mix, or neither.

    Attributes:
        settle: called once with BOTH or NEITHER, in the transport's thread.
        opened, joined, voted: when this end was in this exchange, both were, and this end said GOT; 0 until then. One with
            a vote is in doubt.
        busy: when the peer, which was not in it yet, last said that bytes of an earlier one move; 0: it has not.
        abandoned: this end waits for nothing but the verdict.
    """

    receiving: Receiving
    sending: Sending
    settle: Callable[[Verdict], None]
    opened: float = 0.0
    joined: float = 0.0
    voted: float = 0.0
    busy: float = 0.0
    abandoned: bool = False

    @property
    def complete(self) -> bool:
        """Whether the peer's message has come and this worker's own one is coded: without both the peer's cannot be decoded."""
        return self.receiving.received == self.receiving.size and self.sending.ready == self.sending.size

    @property
    def peer(self) -> int:
        return self.receiving.peer

    @property
    def round(self) -> int:
        return self.receiving.key[0]

    @property
    def bucket(self) -> int:
        return self.receiving.key[1]


@dataclass(frozen=True)
class Vote:
    """A vote, as it is sent. A DROP covers all rounds up to its own that have no GOT."""

    round: int
    bucket: int
    got: bool


class Votes:
    """The exchanges of this worker with one peer.

    Attributes:
        pairs: those without a verdict, by bucket.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, PairExchange] = {}
        # By bucket: the last round with this end's GOT, and with the peer's.
        self._got: dict[int, int] = {}
        self._peer_got: dict[int, int] = {}
        # By bucket: the round up to which this end drops, and the peer does.
        self._dropped: dict[int, int] = {}
        self._peer_dropped: dict[int, int] = {}

    def in_doubt(self, bucket: int) -> bool:
        return bucket in self.pairs and self.pairs[bucket].voted > 0

    def has_said_got(self, round_: int, bucket: int) -> bool:
        return self._got.get(bucket) == round_

    def has_dropped(self, round_: int, bucket: int) -> bool:
        """Whether the peer leaves this exchange out."""
        return self._peer_dropped.get(bucket, -1) >= round_ and self._peer_got.get(bucket, -1) != round_

    def open(self, pair: PairExchange) -> None:
        """This end begins an exchange. The one before is settled."""
        assert pair.bucket not in self.pairs, "the exchange before it is settled"
        self.pairs[pair.bucket] = pair

    def verdict(self, pair: PairExchange) -> Verdict | None:
        """Of an open exchange. None: it is not known yet."""
        round_, bucket = pair.round, pair.bucket
        if self._dropped.get(bucket, -1) >= round_ > self._got.get(bucket, -1) or self.has_dropped(round_, bucket):
            return Verdict.NEITHER
        if not pair.voted:
            return None
        return Verdict.BOTH if self._peer_got.get(bucket) == round_ else None

    def vote_got(self, pair: PairExchange, now: float) -> Vote:
        """The peer's message is whole."""
        pair.voted = now
        self._got[pair.bucket] = pair.round
        return Vote(pair.round, pair.bucket, True)

    def vote_drop(self, round_: int, bucket: int) -> Vote:
        """This end leaves an exchange out, and all earlier ones that have no GOT. It may not have been opened."""
        self._dropped[bucket] = max(round_, self._dropped.get(bucket, -1))
        return Vote(round_, bucket, False)

    def revoke(self, pair: PairExchange) -> Vote:
        """This end drops what is in doubt. A GOT that the peer has heard cannot be taken back."""
        self._got.pop(pair.bucket, None)
        pair.voted = 0.0
        return self.vote_drop(pair.round, pair.bucket)

    def hear(self, vote: Vote) -> None:
        """A vote of the peer came, perhaps again."""
        kept = self._peer_got if vote.got else self._peer_dropped
        kept[vote.bucket] = max(vote.round, kept.get(vote.bucket, -1))

    def forget(self) -> None:
        """The connection was lost: the peer repeats its GOTs on the next one, but for those that it has revoked."""
        self._peer_got.clear()

    def repeated(self) -> Iterable[Vote]:
        """All that a new connection must begin with."""
        yield from (Vote(round_, bucket, True) for bucket, round_ in self._got.items())
        yield from (Vote(round_, bucket, False) for bucket, round_ in self._dropped.items())
