"""When an exchange is late: the times of those before it, and how long a peer that is not in it is waited for."""

from __future__ import annotations

import math
import statistics

from decent_dp.transport.votes import PairExchange, Verdict

__all__ = ["Lateness"]

# The part of each round's time for which a worker waits for peers that are not in their exchanges.
_SHARE = 0.1
# Exchanges of one bucket with one peer from which the usual time of one is known.
_TIMED = 8
# An exchange has taken much longer than usual if it took so many times as long: others may share its link, such as a process
# that joins.
_LONGER = 4
# The most meetings that are left out after it.
_LONGEST_BREAK = 64
# Seconds from which on exchanges are slow: a peer may be late because an earlier one still moves.
_SLOW = 0.5


class Lateness:
    """The exchanges with one peer. Changed by the transport's thread, but for the breaks, and read by the thread that waits.

    Attributes:
        patience: seconds for which this worker still waits for a living peer that is not in its exchange. Each round adds a
            tenth of a step: a slow peer costs its partners a tenth of their pace, and one that is late for once is waited for.
    """

    def __init__(self) -> None:
        self.patience, self._waited_in = math.inf, -1
        # By bucket: the seconds from when both were in an exchange until its end. Tuples, as two threads look at them: a deque
        # that grows while another thread copies it raises.
        self._times: dict[int, tuple[float, ...]] = {}
        self._break, self._left_out, self._late_round, self._resting = 0, 0, -1, -1

    def forget_rounds(self) -> None:
        """Rounds may be earlier ones from now on."""
        self._late_round = self._resting = self._waited_in = -1
        self._left_out = 0

    def expected_end(self, pair: PairExchange, began: float, step: float, *, paused: bool = False) -> float:
        """When an exchange is late, on the clock of its times; infinite for messages without a history.

        A peer that is in the exchange has the usual time of its messages: the median of their history, and beyond it six times
        the median deviation. One that is not is waited for as long as its ``patience`` lasts, from when on it has no excuse.

        Args:
            began: when this worker began to wait.
            step: the fewest seconds by which messages are late.
            paused: the peer makes no rounds at present.
        """
        if not pair.opened:  # the transport's thread has not opened it yet
            return math.inf
        if not pair.joined:
            return pair.opened if paused else self._inexcusable_since(pair, began) + self.patience
        times = self._times.get(pair.bucket, ())
        if len(times) < _TIMED:
            return math.inf  # the first messages take their time
        usual = statistics.median(times)
        deviation = 6 * statistics.median(abs(time - usual) for time in times)
        return pair.joined + max(usual + max(deviation, step), _LONGER * usual)

    def is_slow(self, bucket: int) -> bool:
        """Whether exchanges take long, or it is not known yet."""
        times = self._times.get(bucket, ())
        return len(times) < _TIMED or statistics.median(times) > _SLOW

    def _inexcusable_since(self, pair: PairExchange, began: float) -> float:
        """When this worker began to wait; where exchanges are slow, when the peer last said that an earlier one moves. That one
        may take no longer than one of this link, which depends on the place of its bucket."""
        if not (pair.busy and self.is_slow(pair.bucket)):
            return began
        longest = max((statistics.median(times) for times in self._times.values() if len(times) >= _TIMED), default=math.inf)
        return min(max(began, pair.busy), began + _LONGER * longest)

    def waited(self, pair: PairExchange, began: float, now: float, step: float, most: float) -> None:
        """This worker has waited for an exchange, until now.

        Args:
            began: when it began to wait.
            step: seconds of its rounds; each one adds to the patience, up to ``most``.
        """
        absent = max((pair.joined or now) - self._inexcusable_since(pair, began), 0.0)
        earned = _SHARE * step if pair.round > self._waited_in else 0.0
        self.patience, self._waited_in = min(max(self.patience - absent, 0.0) + earned, most), pair.round

    def record(self, pair: PairExchange, verdict: Verdict, now: float) -> None:
        """Keeps the time of an exchange that has ended now."""
        if verdict is not Verdict.BOTH or not pair.joined:
            return
        latest = self._times.get(pair.bucket, ())[1 - 4 * _TIMED :]
        self._times[pair.bucket] = (*latest, now - pair.joined)
        if pair.round > self._late_round:
            self._break = 0

    def give_up(self, pair: PairExchange) -> None:
        """An exchange was late. If it was its messages, the next meetings are left out, twice as many each time."""
        if pair.joined and pair.round > self._late_round:
            self._break = min(2 * self._break or 1, _LONGEST_BREAK)
            self._left_out, self._late_round = self._break, pair.round

    def on_break(self, round_: int) -> bool:
        """Whether the meeting in this round is left out. Called for rounds in their order."""
        if self._left_out and round_ > max(self._resting, self._late_round):
            self._left_out, self._resting = self._left_out - 1, round_
        return round_ == self._resting
