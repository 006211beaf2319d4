"""The links to all peers, and what workers tell each other of their rounds and epochs in heartbeats."""

from __future__ import annotations

import time

from decent_dp.transport.messages import ASKS, BEAT, MOVES, PAUSES, Header, Key, pack
from decent_dp.transport.peer_link import LinkState, Network, PeerLink

__all__ = ["PeerLinks"]

# Seconds after a part of a message for which it counts as moving.
_MOVING = 1.0


class PeerLinks:
    """Changed by the transport's thread alone, but for ``round``, ``paused`` and ``epoch``.

    Args:
        local: the workers that share this one's network stack.

    Attributes:
        by_rank: the links to members. ``joiners``: to processes that are none yet, by rank and incarnation.
        networks: the links inside this node, and those to others. Each has its own order of messages and its own window.
        round: the one in which this worker is; -1 before the first. ``first_bucket``: of those in use.
        paused: this worker makes no rounds at present.
        epoch: the number of the newest one that this worker knows.
    """

    def __init__(self, local: frozenset[int]) -> None:
        self._local = local
        self.networks = {is_local: Network(is_local) for is_local in (True, False)}
        self.by_rank: dict[int, PeerLink] = {}
        self.joiners: dict[tuple[int, int], PeerLink] = {}
        self.round, self.first_bucket, self.paused, self.epoch = -1, 0, False, 0

    def to(self, peer: int) -> PeerLink:
        """The link to a peer; for the transport's thread."""
        if peer not in self.by_rank:
            self.by_rank[peer] = self.new(peer)
        return self.by_rank[peer]

    def known(self, peer: int) -> PeerLink:
        """The link to a peer, or one of which nothing is known: for other threads, which do not change it."""
        return self.by_rank.get(peer) or self.new(peer)

    def new(self, peer: int, incarnation: int = 0) -> PeerLink:
        link = PeerLink(peer, self.networks[peer in self._local])
        link.incarnation = incarnation
        return link

    def begin(self, bucket: int) -> None:
        """Rounds count from now on for buckets from this number on."""
        self.first_bucket, self.round = bucket, -1
        for link in self.by_rank.values():
            link.forget_rounds()

    def beat(self, link: PeerLink, *, ask: bool = False) -> None:
        """Says how many rounds this worker has begun, and in which epoch it is; ``ask``: and asks for it."""
        if link.state is not LinkState.OPEN:
            return
        flags = (ASKS if ask else 0) | (PAUSES if self.paused else 0) | (MOVES if self._moves() else 0)
        link.say(pack(BEAT, (self.round + 1, self.first_bucket, 0), flags, epoch=self.epoch))

    def _moves(self) -> bool:
        """Whether bytes of an exchange move in which both ends are. Who only waits for such a worker is not excused: so nobody
        waits in a circle."""
        since = time.monotonic() - _MOVING
        return any(pair.joined for link in self.by_rank.values() if link.moved > since for pair in link.pairs.values())

    def beat_all(self) -> None:
        for link in self.by_rank.values():
            self.beat(link)

    def hear_beat(self, link: PeerLink, header: Header) -> None:
        begun, first_bucket, _ = header.key
        self.hear_round(link, (begun - 1, first_bucket, 0))
        link.paused = bool(header.flags & PAUSES)
        link.epoch = max(link.epoch, header.epoch)
        link.told = time.monotonic()
        if header.flags & MOVES:
            link.busy = link.told
            for pair in link.pairs.values():
                pair.busy = pair.busy if pair.joined else link.told
        if header.flags & ASKS:
            self.beat(link)

    def hear_round(self, link: PeerLink, key: Key) -> None:
        """A peer is in this round. What is of earlier buckets belongs to a state that was replaced."""
        if key[1] >= self.first_bucket:
            link.round = max(link.round, key[0])
