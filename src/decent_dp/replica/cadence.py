"""Calls of all workers every so many rounds: in the same rounds on all of them."""

from __future__ import annotations

__all__ = ["Cadence"]


class Cadence:
    """Tells in which rounds calls are due, from the rounds that this worker has made and left out.

    Workers that count their own steps drift apart when one of them leaves rounds out. The number of the round is common to all.
    A worker that has left rounds out has also left out the calls of all workers in them.

    Attributes:
        made: the number of rounds that this worker has made. ``joins``: how often all workers have left ``join``.
        contexts: how many ``Preemption`` contexts have begun; those of one number, of all workers, belong together.
    """

    def __init__(self) -> None:
        self.made = self.joins = self.contexts = 0
        # Of the last rounds that followed each other: the first, and the one after the last. And rounds left out before them.
        self._first = self._end = self._left_out = 0
        # The round that the others had begun when this worker went on in it.
        self._passed = -1
        # The round of the last question, and of the one before it in another round; by who asks.
        self._asked: dict[object, tuple[int, int]] = {}

    def add(self, round_: int) -> None:
        """This worker has made a round."""
        if round_ != self._end:
            self._left_out += max(0, round_ - self._end)
            self._first = round_
        self.made, self._end = self.made + 1, round_ + 1

    def fall_behind(self, round_: int) -> None:
        """This worker goes on in a round that the others have begun."""
        self._passed = round_

    def is_behind(self, round_: int) -> bool:
        """Whether the others have made the calls before round ``round_``, the next one, without this worker."""
        return round_ == self._passed

    def left_out(self, round_: int) -> int:
        """The number of rounds before ``round_``, the next one, that this worker has left out, or that a load has skipped."""
        return self._left_out + max(0, round_ - self._end)

    def is_due(self, every: int, round_: int, asker: object = None) -> bool:
        """Whether a multiple of ``every`` was reached since the last question of ``asker`` in another round.

        Args:
            round_: the next one.
        """
        last, before = self._asked.get(asker, (-1, -1))
        if last != round_:
            last, before = round_, last if last < round_ else -1
            self._asked[asker] = last, before
        if self.is_behind(round_):
            return False
        # A round that was neither made nor begun by the others was reached with them, in a call or by a load.
        first = self._first if round_ == self._end else round_ - 1
        return round_ // every > max(first, before if before >= 0 else round_ - 1) // every
