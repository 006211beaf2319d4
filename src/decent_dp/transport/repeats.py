"""Lines of the log about what happens again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Repeats"]

# Seconds without it after which something counts as new.
_CALM = 60.0


class Repeats:
    """Counts how often something happens, and says when that is worth a line in the log.

    It is at the ``first`` time, and then each time that the number has doubled. After a minute without it everything begins
    anew.

    Args:
        first: the number of times at which there is a first line.
        clock: in seconds.

    Attributes:
        times: so far. ``seconds``: from the first to the last.
    """

    def __init__(self, first: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._clock = first, clock
        self._began = self._last = clock()
        self.times, self._next = 0, first

    @property
    def seconds(self) -> float:
        return self._last - self._began

    def again(self) -> bool:
        """It has happened. Returns whether there is to be a line."""
        now = self._clock()
        if not self.times or now - self._last > _CALM:
            self._began, self.times, self._next = now, 0, self._first
        self._last = now
        self.times += 1
        if self.times < self._next:
            return False
        self._next *= 2
        return True
