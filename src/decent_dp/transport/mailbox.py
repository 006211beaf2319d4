"""Hints of other workers, kept until this one is in their exchange."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

from decent_dp.errors import WireError
from decent_dp.transport.link import Key

__all__ = ["Mailbox"]

# Hints of a bucket that are kept for each peer, which may be ahead.
_HINTS = 4
# Bytes of all hints of a peer.
_HINT_BYTES = 2**26


class Mailbox:
    """Used by any thread.

    Args:
        call: runs a function in the transport's thread.
    """

    def __init__(self, call: Callable[[Callable[[], None]], None]) -> None:
        self._call = call
        # By peer, and bucket and slot: the texts by key.
        self._hints: defaultdict[tuple[int, tuple[int, int]], dict[Key, bytes]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()
        self._waiting: dict[tuple[int, Key], Callable[[], None]] = {}
        self._lock = threading.Lock()

    def keep(self, peer: int, key: Key, text: bytes) -> None:
        """A hint has come. Of many that nobody has asked for only the last ones are kept.

        Raises:
            WireError: the peer has sent too much.
        """
        with self._lock:
            hints = self._hints[peer, key[1:]]
            if len(hints) >= _HINTS and key not in hints:
                self._bytes[peer] -= len(hints.pop(min(hints)))
            self._bytes[peer] += len(text) - len(hints.get(key, b""))
            hints[key] = text
            if self._bytes[peer] > _HINT_BYTES:
                raise WireError(f"worker {peer} has sent more than {_HINT_BYTES} bytes of hints that nobody has asked for")
            self._waiting.pop((peer, key), lambda: None)()

    def waits_for(self, peer: int, key: Key) -> bool:
        return (peer, key) in self._waiting

    def when_hinted(self, peers: list[int], key: Key, then: Callable[[list[bytes]], None]) -> None:
        """Calls ``then`` with the hints of ``peers``: at once if all are there, else in the transport's thread."""

        def missing() -> list[int]:  # under the lock
            return [peer for peer in peers if key not in self._hints[peer, key[1:]]]

        def take() -> list[bytes] | None:
            return None if missing() else [self._take(peer, key) for peer in peers]

        def arrived() -> None:
            found = take()
            if found is not None:
                self._call(lambda: then(found))

        with self._lock:
            found = take()
            if found is None:
                self._waiting.update(((peer, key), arrived) for peer in missing())
        if found is not None:
            then(found)

    def _take(self, peer: int, key: Key) -> bytes:
        text = self._hints[peer, key[1:]].pop(key)
        self._bytes[peer] -= len(text)
        return text

    def drop(self, peer: int) -> None:
        """The hints of a peer are not used any more."""
        with self._lock:
            for of in [of for of in self._hints if of[0] == peer]:
                del self._hints[of]
            del self._bytes[peer]

    def forget(self, peer: int, key: Key) -> None:
        """Nobody waits for this hint any more."""
        with self._lock:
            self._waiting.pop((peer, key), None)
