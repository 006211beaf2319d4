"""Hints: what the others need to encode for an exchange. They are kept until this worker is in it, too."""

from __future__ import annotations

from collections.abc import Callable

from decent_dp.errors import WireError
from decent_dp.transport.messages import START, Key, check_ahead, pack
from decent_dp.transport.peer_links import LinkState, PeerLink, PeerLinks

__all__ = ["Hints"]

# Hints of a bucket that are kept for each peer, which may be ahead.
_HINTS = 4
# Bytes of all hints of a peer.
_HINT_BYTES = 2**26


class Hints:
    """Used by the transport's thread alone, but for ``lacks``."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        # Those for which an exchange waits: of whom, and what is called then.
        self._waiting: dict[Key, tuple[list[int], Callable[[list[bytes]], None]]] = {}

    def send(self, peer: int, key: Key, hint: bytes) -> None:
        """It is sent again on a new connection, and lost without an error if the peer is gone."""
        link = self._links.to(peer)
        if link.state is not LinkState.GONE:
            link.lane.hints[key[1]] = key, hint
        link.say(pack(START, key), hint)

    def hear(self, link: PeerLink, key: Key, hint: bytes) -> None:
        """A hint has come. Of many that nobody has asked for only the last ones are kept.

        Raises:
            WireError: the peer has sent too much.
        """
        check_ahead(link.peer, key[1])
        lane, hints = link.lane, link.lane.heard[key[1]]
        if len(hints) >= _HINTS and key not in hints:
            lane.heard_bytes -= len(hints.pop(min(hints)))
        lane.heard_bytes += len(hint) - len(hints.get(key, b""))
        hints[key] = hint
        if lane.heard_bytes > _HINT_BYTES:
            raise WireError(f"worker {link.peer} has sent more than {_HINT_BYTES} bytes of hints that nobody has asked for")
        self._pass_on(key)

    def lacks(self, peer: int, key: Key) -> bool:
        """Whether an exchange waits for a hint of this peer. Any thread may ask."""
        return key in self._waiting and key not in self._links.known(peer).lane.heard.get(key[1], ())

    def when_there(self, peers: list[int], key: Key, then: Callable[[list[bytes]], None]) -> None:
        """Calls ``then`` with the hints of ``peers`` as soon as all are there."""
        self._waiting[key] = peers, then
        self._pass_on(key)

    def _pass_on(self, key: Key) -> None:
        if key in self._waiting and not any(self.lacks(peer, key) for peer in self._waiting[key][0]):
            peers, then = self._waiting.pop(key)
            hints = []
            for lane in (self._links.to(peer).lane for peer in peers):
                hints.append(lane.heard[key[1]].pop(key))
                lane.heard_bytes -= len(hints[-1])
            then(hints)

    def forget(self, key: Key) -> None:
        """No exchange waits for these hints any more."""
        self._waiting.pop(key, None)
