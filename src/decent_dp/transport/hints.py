"""Hints of other workers, kept until this one is in their exchange."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from decent_dp.errors import WireError
from decent_dp.transport.messages import Key

__all__ = ["Hints"]

# Hints of a bucket that are kept for each peer, which may be ahead.
_HINTS = 4
# Bytes of all hints of a peer.
_HINT_BYTES = 2**26


class Hints:
    """Used by the transport's thread alone, but for ``lacks``."""

    def __init__(self) -> None:
        # By peer and bucket: the hints by key.
        self._hints: defaultdict[tuple[int, int], dict[Key, bytes]] = defaultdict(dict)
        self._bytes: Counter[int] = Counter()
        # Those for which an exchange waits: of whom, and what is called then.
        self._waiting: dict[Key, tuple[list[int], Callable[[list[bytes]], None]]] = {}

    def keep(self, peer: int, key: Key, hint: bytes) -> None:
        """A hint has come. Of many that nobody has asked for only the last ones are kept.

        Raises:
            WireError: the peer has sent too much.
        """
        hints = self._hints[peer, key[1]]
        if len(hints) >= _HINTS and key not in hints:
            self._bytes[peer] -= len(hints.pop(min(hints)))
        self._bytes[peer] += len(hint) - len(hints.get(key, b""))
        hints[key] = hint
        if self._bytes[peer] > _HINT_BYTES:
            raise WireError(f"worker {peer} has sent more than {_HINT_BYTES} bytes of hints that nobody has asked for")
        self._pass_on(key)

    def lacks(self, peer: int, key: Key) -> bool:
        """Whether an exchange waits for a hint of this peer. Any thread may ask."""
        return key in self._waiting and key not in self._hints.get((peer, key[1]), ())

    def when_there(self, peers: list[int], key: Key, then: Callable[[list[bytes]], None]) -> None:
        """Calls ``then`` with the hints of ``peers`` as soon as all are there."""
        self._waiting[key] = peers, then
        self._pass_on(key)

    def _pass_on(self, key: Key) -> None:
        if key in self._waiting and not any(self.lacks(peer, key) for peer in self._waiting[key][0]):
            peers, then = self._waiting.pop(key)
            hints = [self._hints[peer, key[1]].pop(key) for peer in peers]
            self._bytes.subtract(dict(zip(peers, map(len, hints), strict=True)))
            then(hints)

    def forget(self, key: Key) -> None:
        """No exchange waits for these hints any more."""
        self._waiting.pop(key, None)

    def drop(self, peer: int) -> None:
        """The hints of a peer are not used any more."""
        for of in [of for of in self._hints if of[0] == peer]:
            del self._hints[of]
        del self._bytes[peer]
