"""The pace of a link or a network: bytes that are requested and have not come, and how fast they come."""

from __future__ import annotations

import math

__all__ = ["Pace"]

# Bytes that are wanted and have not arrived. With less, a link starves while the next request waits behind the data of the
# other direction. With more, queues overflow, and two streams share a link for long at a change of rounds (docs/lab/log.md,
# 2026-11-21, "why full links ran dry").
_USUAL = 2**19
# They are no more than a link moves in so many seconds: a request waits in the queue of the other direction, and its bytes in
# this one's.
_USUAL_SECONDS = 0.25
# At least what it moves in so many seconds.
_LEAST_SECONDS = 0.05
# From one peer alone twice what the way holds, its rate times the time in which a request takes effect, up to so many seconds
# of it: heartbeats and votes wait behind them.
_MOST_SECONDS = 0.5
# Bytes that are wanted ahead at least.
_LEAST = 2**16
# Bytes that are wanted ahead of a peer whose rate is not known.
_UNKNOWN = 2**17
# Seconds over which a rate is measured, without those between messages;
_INTERVAL = 0.05
# or bytes: fast links bring a window in less.
_ENOUGH = 2**21


class Pace:
    """The bytes that one peer sends, or all over one network.

    Attributes:
        due: bytes that are wanted and have not come, of messages that are offered.
        rate: bytes per second, while bytes are due; 0 before the first measurement.
        latency: the fewest seconds from a request, where nothing was due, to its first bytes.
    """

    def __init__(self) -> None:
        self.due, self.rate, self.latency = 0, 0.0, 0.0
        # When the last request was made where nothing was due.
        self._asked: float | None = None
        self._from, self._paused, self._bytes = 0.0, 0.0, 0

    @property
    def window(self) -> int:
        """Bytes that are wanted ahead."""
        if not self.rate:
            return _UNKNOWN
        return int(max(_LEAST, min(_USUAL, _USUAL_SECONDS * self.rate), _LEAST_SECONDS * self.rate))

    @property
    def window_alone(self) -> int:
        """Those that are wanted ahead of one peer, from which alone bytes are due."""
        return int(self.rate * min(2 * self.latency, _MOST_SECONDS))

    def want(self, amount: int, now: float, *, asks: bool = False) -> None:
        """Bytes are wanted; negative: have come, or are wanted no more. ``asks``: the request goes out now."""
        was_due = self.due > 0
        self.due += amount
        if was_due and not self.due:
            self._paused = now
        elif self.due and not was_due:
            self._from += now - self._paused
            self._asked = now if asks else self._asked

    def came(self, amount: int, now: float) -> None:
        """Bytes have come that were wanted."""
        self._bytes += amount
        seconds = now - self._from
        if seconds >= _INTERVAL or (self._bytes >= _ENOUGH and seconds > 0):
            # Intervals in which there was little to move say little: an old rate is given up slowly.
            self.rate = max(self._bytes / seconds, 0.9 * self.rate)
            self._from, self._paused, self._bytes = now, now, 0
        if self._asked is not None:
            self.latency = min(self.latency or math.inf, now - self._asked)
            self._asked = None
        self.want(-amount, now)
