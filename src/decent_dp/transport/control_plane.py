"""Agreements, and blocks of bytes for collectives, over connections to other workers that may break."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from decent_dp.errors import PeerLostError, WireError
from decent_dp.transport.agreement import NO_ROUND, Agreements, Links
from decent_dp.transport.messages import ACK, AGREEMENT, BLOCKS, Key

__all__ = ["ControlPlane", "Courier"]

# Blocks that are sent before the first of them is acknowledged.
_WINDOW = 2
# Bits of a collective's number that count within a channel.
_CHANNEL = 56
# Seconds between two calls of ``check`` of a call that waits.
_CHECK = 0.05
# Seconds between two looks at the other workers while an agreement is open.
_LOOK = 0.1
# Seconds between two questions to those that miss in it.
_ASK = 0.5


class ControlPlane:
    """Moves the notes of ``agreements`` and of a ``Courier`` for each channel.

    Args:
        rank, incarnation: of this process.
        links: to the other workers.

    Attributes:
        coming: the name of the agreement that ends the collective in which this worker is, and who takes part; None: in none.
    """

    coming: tuple[str, tuple[int, ...]] | None = None

    def __init__(self, rank: int, world_size: int, links: Links, incarnation: int = 0) -> None:
        self.rank, self.incarnation = rank, incarnation
        self._links, self._call, self.view = links, links.call, links.view
        self._couriers: dict[int, Courier] = {}
        self.agreements = Agreements(rank, world_size, links, self._concluded, incarnation)
        self._lock = threading.Lock()
        self._futures: dict[str, list[Future[Mapping[int, str]]]] = {}
        self._look_at = self._ask_at = math.inf

    # -- called by any thread -----------------------------------------------------------------------------------------

    def agree(
        self, name: str, text: str, *, round_: int = NO_ROUND, among: Sequence[int] | None = None, asks: bool = False
    ) -> Future[Mapping[int, str]]:
        """Contributes to an agreement: each worker contributes a text, and all get the same texts.

        Args:
            name: a kind, a slash, and a number that grows; the same on all workers.
            asks: the others are to learn of it at once (``is_asked``).
            round_: processes whose first round is not before this one take no part.
            among: those that take part, this worker among them, with ``Transport.tolerate``; None: all.

        Returns:
            The texts by rank, in ascending order, of all that live; without this worker's if the others have taken it for gone.
        """
        future: Future[Mapping[int, str]] = Future()

        def propose() -> None:
            with self._lock:
                self._futures.setdefault(name, []).append(future)
            self.agreements.propose(name, text, round_=round_, among=among, asks=asks)
            self._look_soon()

        self._call(propose)
        return future

    def courier(self, channel: int) -> Courier:
        return self._couriers.setdefault(channel, Courier(self._send_block, channel))

    def _send_block(self, peer: int, key: Key, block: bytes) -> None:
        self._call(lambda: self._links.send_note(peer, key, block))

    def missing(self, name: str) -> list[int]:
        """``Agreements.missing``."""
        return self.agreements.missing(name)

    def is_asked(self, name: str) -> bool:
        """Whether another worker wants all to contribute to an agreement at once."""
        return self.agreements.is_asked(name)

    def connect(self, peer: int) -> None:
        """A connection is needed."""
        self._call(lambda: self._links.want(peer))

    # -- in the transport's thread --------------------------------------------------------------------------------------

    def hear(self, peer: int, key: Key, text: bytes) -> None:
        """A note has come.

        Raises:
            WireError: it is none of those that are sent here.
        """
        if key[1] != AGREEMENT:
            self.courier(key[0] >> _CHANNEL).hear(peer, key, text)
            return
        try:
            self.agreements.hear(peer, text)
        except ValueError as error:
            raise WireError(f"worker {peer} sent {error}") from error
        self._look_soon()

    def reconnected(self, peer: int) -> None:
        """A connection was made, perhaps in place of a lost one."""
        for courier in list(self._couriers.values()):
            courier.reconnected(peer)
        self.agreements.reconnected(peer)
        if (coming := self.coming) is not None and peer in coming[1]:
            self.agreements.ask(peer, *coming)  # it may have gone on without this worker

    def close(self, cause: BaseException | None = None) -> None:
        """Nothing is decided any more. ``cause``: why, if it is not the end of the run."""
        with self._lock:
            waiting, self._futures = self._futures, {}
        for future in (future for futures in waiting.values() for future in futures):
            error = RuntimeError("the transport was closed" if cause is None else f"the transport has failed: {cause}")
            if isinstance(cause, PeerLostError):
                error = PeerLostError(str(cause))
            error.__cause__ = cause
            future.set_exception(error)

    def look(self) -> float:
        """Looks at the other workers if it is time. Returns when to look again, on the monotonic clock."""
        now = time.monotonic()
        if now >= self._look_at:
            again = now >= self._ask_at
            self.agreements.look(again=again)
            self._look_at = now + _LOOK if self.agreements.waiting else math.inf
            self._ask_at = now + _ASK if again else self._ask_at
        return self._look_at

    def _look_soon(self) -> None:
        if self.agreements.waiting and self._look_at == math.inf:
            now = time.monotonic()
            self._look_at, self._ask_at = now + _LOOK, now + _ASK

    def _concluded(self, name: str, texts: Mapping[int, str]) -> None:
        with self._lock:
            futures = self._futures.pop(name, [])
        for future in futures:
            future.set_result(texts)


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
