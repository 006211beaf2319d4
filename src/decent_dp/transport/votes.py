"""Both or neither: the two ends of an edge agree whether an exchange is mixed, over connections that may break.

Each end votes once per exchange: GOT when the other's message is whole, or DROP. It is mixed where both have said GOT. A
worker that has not voted may drop an exchange alone, as the other cannot mix without its GOT. A worker that has said GOT is
in doubt until it has heard the other's vote. This is two-phase commit with both ends as coordinators. One that waits no longer
drops what is in doubt, and counts it: the other end may have mixed it.

Exchanges of one bucket with one peer follow each other, and none is opened while the one before is in doubt. So few numbers
per bucket are enough to answer for all exchanges of the past, however often a connection breaks: the last round with a GOT,
and the round up to which all others are dropped. After a connection is made again each end repeats them, the GOTs first, as a
DROP covers all earlier rounds that have none.

``tests/test_settlement.py`` runs two ends over a scripted network.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from decent_dp.transport.transfers import Receiving, Sending

__all__ = ["ExchangeId", "PairExchange", "Verdict", "Votes"]


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


@dataclass
class Votes:
    """The exchanges with one peer, and the votes on them. Changed by ``Settlement``.

    Attributes:
        pairs: those without a verdict, by bucket.
        got, peer_got: by bucket: the last round with this end's GOT, and with the peer's.
        dropped, peer_dropped: by bucket: the round up to which this end drops, and the peer does.
    """

    pairs: dict[int, PairExchange] = field(default_factory=dict)
    got: dict[int, int] = field(default_factory=dict)
    peer_got: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    peer_dropped: dict[int, int] = field(default_factory=dict)

    def has_dropped(self, round_: int, bucket: int) -> bool:
        """Whether the peer leaves this exchange out."""
        return self.peer_dropped.get(bucket, -1) >= round_ and self.peer_got.get(bucket, -1) != round_

    def verdict(self, pair: PairExchange) -> Verdict | None:
        """Of an open exchange. None: it is not known yet."""
        round_, bucket = pair.round, pair.bucket
        if self.dropped.get(bucket, -1) >= round_ > self.got.get(bucket, -1) or self.has_dropped(round_, bucket):
            return Verdict.NEITHER
        return Verdict.BOTH if pair.voted and self.peer_got.get(bucket) == round_ else None
