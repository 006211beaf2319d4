"""How the exchange of a bucket ends, and rounds that are left out because a replica is not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from decent_dp.engine.bucket import Bucket, InFlight
from decent_dp.errors import NonFiniteError, PeerError

__all__ = ["ARRIVED", "NONFINITE_ROUNDS", "SAT_OUT", "NonFinite", "Outcome"]

_log = logging.getLogger(__name__)

# Training stops after a worker has sat out so many rounds in a row because of non-finite values.
NONFINITE_ROUNDS = 10


@dataclass(frozen=True)
class Outcome:
    """The end of a bucket's exchange: the message was mixed in, this worker sat the round out, or a peer was lost."""

    kind: Literal["arrived", "sat out", "lost"]
    error: PeerError | NonFiniteError | None = None

    def raise_if_failed(self) -> None:
        """Raises the error that ends the run, if there is one."""
        if self.error is not None:
            raise self.error


ARRIVED = Outcome("arrived")
SAT_OUT = Outcome("sat out")


class NonFinite:
    """Counts the rounds that a worker sits out because a replica of its edge has non-finite values, and warns of them.

    Args:
        rank_in_all: returns the global rank of a member of an edge, for messages.

    Attributes:
        rounds: the number of such rounds.
    """

    def __init__(self, rank_in_all: Callable[[int], int]) -> None:
        self._rank_in_all = rank_in_all
        self.rounds = 0
        self._in_a_row = 0
        # The last finished exchange: its round, its members, and whether this worker sat it out.
        self._round, self._sat_out = -1, False
        self._members: Sequence[int] = ()
        # Workers named in a warning, until they are finite again, and workers that were non-finite in the current sequence.
        self._warned: set[int] = set()
        self._nonfinite_workers: set[int] = set()

    def record(self, in_flight: InFlight, ranks: Collection[int], bucket: Bucket, message: Tensor) -> Outcome | None:
        """Records the end of one bucket's exchange.

        Args:
            ranks: the members of the edge with non-finite values, as far as the messages name them.
            message: a message with non-finite values, if there are any.

        Returns:
            The outcome if there are non-finite values; None if the exchange can be mixed in.
        """
        number = in_flight.round.number
        if number != self._round:
            if not self._sat_out:
                self._warned.difference_update(self._members)
                self._in_a_row = 0
                self._nonfinite_workers.clear()
            self._round, self._members, self._sat_out = number, in_flight.edge.ranks, False
        if not ranks:
            return None
        if not self._sat_out:
            self._sat_out = True
            self.rounds += 1
            self._in_a_row += 1
        self._nonfinite_workers.update(ranks)
        where = f"parameter '{bucket.first_nonfinite(message)}' in round {number}"
        for rank in sorted(set(ranks) - self._warned):
            self._warned.add(rank)
            _log.warning(
                "the replica of worker %d holds a NaN or an infinity (%s). Its exchanges are left out on both sides, so that "
                "no other replica gets it, until it is finite again; after %d such rounds in a row training stops.",
                self._rank_in_all(rank),
                where,
                NONFINITE_ROUNDS,
            )
        if self._in_a_row < NONFINITE_ROUNDS:
            return SAT_OUT
        who = " and ".join(f"worker {self._rank_in_all(rank)}" for rank in sorted(self._nonfinite_workers))
        error = NonFiniteError(
            f"in each of the last {NONFINITE_ROUNDS} rounds a replica held a NaN or an infinity, that of {who} (now {where}): "
            "a loss or a gradient was not finite there. Try a lower learning rate, gradient clipping, or a GradScaler in "
            "float16, and start the workers again from the last checkpoint."
        )
        return Outcome("sat out", error)
