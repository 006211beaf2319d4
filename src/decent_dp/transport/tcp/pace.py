"""How many bytes are worth one turn of the thread: the size of frames, of reads, and of what the kernel may hold."""

from __future__ import annotations

import math

__all__ = ["SMALLEST", "Pace"]

# Bytes of a piece: few enough for a grant not to wait long behind one on a slow link, enough to be worth a system call; and
# no more than a frame may have.
SMALLEST, _LARGEST = 2**16, 2**21
# Seconds of a link's time that a piece is worth: pieces are the smallest up to 250 Mbit/s.
_WORTH = 4e-3
# Seconds over which a rate is measured, without those between messages.
_INTERVAL = 0.05


class Pace:
    """The rate of the bytes in one direction of a connection, and the piece that suits it.

    With small pieces a fast link is limited by the turns of the thread: each one costs system calls, and the interpreter lock,
    which other threads may hold for 5 ms. So a piece is what the link moves in 4 ms, or in one turn of the thread.

    Attributes:
        rate: bytes per second; 0 before the first measurement.
        piece: bytes, a power of two.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.piece = SMALLEST
        self._from, self._bytes, self._last = 0.0, 0, -math.inf

    def begin(self, now: float) -> None:
        """Bytes are due from now on, on the monotonic clock."""
        self._from, self._bytes, self._last = now, 0, now

    def resume(self, now: float) -> None:
        """There is something to move, perhaps after a pause."""
        if now - self._last > _INTERVAL:
            self.begin(now)

    def count(self, amount: int, now: float, turn: float) -> bool:
        """Bytes have moved. ``turn``: seconds of one turn of the thread at present. Returns whether the piece has changed."""
        self._bytes += amount
        self._last = now
        if now - self._from < _INTERVAL:
            return False
        # Intervals in which there was nothing to move say little: an old rate is given up slowly.
        self.rate = max(self._bytes / (now - self._from), 0.9 * self.rate)
        self._from, self._bytes = now, 0
        worth = self.rate * max(_WORTH, turn)
        before, self.piece = self.piece, min(max(2 ** int(math.log2(max(worth, 1.0))), SMALLEST), _LARGEST)
        return self.piece != before
