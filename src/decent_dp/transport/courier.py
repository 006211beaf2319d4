"""Blocks of bytes between the workers of a collective, in order, over connections that may break."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from decent_dp.transport.messages import ACK, BLOCKS, Key

__all__ = ["Courier", "channel_of"]

# Blocks that are sent before the first of them is acknowledged.
_WINDOW = 2
# Bits of a collective's number that count within a channel.
_CHANNEL = 56
# Seconds between two calls of ``check`` of a call that waits.
_CHECK = 0.05


def channel_of(key: Key) -> int:
    return key[0] >> _CHANNEL


class Courier:
    """Sends blocks as notes, which are acknowledged when they have come, and sent again when a connection was made again.

    Collectives are numbered. What belongs to an earlier one than the present is dropped, and what belongs to the next one waits
    for it.

    Args:
        send: sends a note to a worker; any thread may call it.
        channel: of collectives of other members, or of another time, which have numbers of their own.
    """

    def __init__(self, send: Callable[[int, Key, bytes], None], channel: int = 0) -> None:
        self._send, self._base = send, channel << _CHANNEL
        self._changed = threading.Condition()
        self._number = -1
        # By worker: blocks that were sent and not acknowledged, by their number; and how many were sent.
        self._out: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        self._sent: defaultdict[int, int] = defaultdict(int)
        # By worker: blocks that have come and nobody has taken, and how many have come.
        self._in: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._came: defaultdict[int, int] = defaultdict(int)
        # By worker: the blocks of the next collective.
        self._early: defaultdict[int, dict[Key, bytes]] = defaultdict(dict)

    # -- in the thread that makes the collective ----------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Begins a collective, and drops what is left of those before."""
        with self._changed:
            self._number = self._base + number
            for queue in (self._out, self._sent, self._in, self._came):
                queue.clear()
            early = [(peer, key, block) for peer, blocks in self._early.items() for key, block in sorted(blocks.items())]
            self._early.clear()
            for peer, key, block in early:  # before any that come now
                self.hear(peer, key, block)

    def put(self, peer: int, block: bytes, check: Callable[[int], None]) -> None:
        """Sends a block, as soon as few others are in flight to this worker. ``check`` is called with it, and may raise."""
        with self._changed:
            while len(self._out[peer]) >= _WINDOW:
                check(peer)
                self._changed.wait(_CHECK)
            key = (self._number, BLOCKS, self._sent[peer])
            self._out[peer][self._sent[peer]] = block
            self._sent[peer] += 1
        self._send(peer, key, block)

    def get(self, peer: int, check: Callable[[int], None]) -> bytes:
        """The next block of a worker."""
        with self._changed:
            while not self._in[peer]:
                check(peer)
                self._changed.wait(_CHECK)
            return self._in[peer].popleft()

    # -- in the transport's thread --------------------------------------------------------------------------------------

    def hear(self, peer: int, key: Key, block: bytes) -> None:
        """A block has come, perhaps again, or an acknowledgement."""
        number, kind, count = key
        with self._changed:
            if number > self._number and kind == BLOCKS:
                early = self._early[peer]
                early[key] = block
                while len(early) > _WINDOW:  # no more than that are in flight; others are of one that was given up
                    del early[min(early)]
            if number != self._number:
                return
            self._changed.notify_all()
            if kind == ACK:
                for sent in [sent for sent in self._out[peer] if sent < count]:
                    del self._out[peer][sent]
                return
            if count == self._came[peer]:
                self._came[peer] += 1
                self._in[peer].append(block)
            came = self._came[peer]
        self._send(peer, (number, ACK, came), b"")

    def reconnected(self, peer: int) -> None:
        """What was in flight to a worker may be lost."""
        with self._changed:
            again = [((self._number, BLOCKS, count), block) for count, block in self._out[peer].items()]
            if self._came[peer]:
                again.append(((self._number, ACK, self._came[peer]), b""))
        for key, block in again:
            self._send(peer, key, block)
