"""Agreements and collectives over the connections to other workers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from decent_dp.errors import WireError
from decent_dp.transport.agreement import NO_ROUND, Agreements, PeerView
from decent_dp.transport.courier import Courier, channel_of
from decent_dp.transport.messages import AGREEMENT, Key

__all__ = ["ControlPlane"]

# Seconds between two looks at the other workers while an agreement is open, and between two questions to those that miss.
_LOOK = 0.1
_ASK = 0.5


class ControlPlane:
    """Moves the notes of ``agreements`` and of a ``Courier`` for each channel.

    Args:
        call: runs a function in the transport's thread.
        send_note: to a worker; in the transport's thread.
        view, connect, first_round: as of ``Agreements``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        call: Callable[[Callable[[], None]], None],
        send_note: Callable[[int, Key, bytes], None],
        view: Callable[[int], PeerView],
        connect: Callable[[int], None],
        first_round: Callable[[int], int] = lambda peer: -1,
        incarnation: int = 0,
    ) -> None:
        self._call, self._send_note, self.view, self._connect = call, send_note, view, connect
        self._couriers: dict[int, Courier] = {}
        self.agreements = Agreements(
            rank,
            world_size,
            view,
            lambda peer, message: send_note(peer, (0, AGREEMENT, 0), message),
            connect,
            self._concluded,
            first_round,
            incarnation,
        )
        self._lock = threading.Lock()
        self._futures: dict[str, list[Future[Mapping[int, str]]]] = {}
        self._look_at = self._ask_at = math.inf

    # -- called by any thread -----------------------------------------------------------------------------------------

    def agree(
        self, name: str, text: str, *, round_: int = NO_ROUND, among: Sequence[int] | None = None, asks: bool = False
    ) -> Future[Mapping[int, str]]:
        """Contributes to an agreement of the living workers. The result is their texts, by rank (``Agreements.propose``)."""
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
        self._call(lambda: self._send_note(peer, key, block))

    def missing(self, name: str) -> list[int]:
        """``Agreements.missing``."""
        return self.agreements.missing(name)

    def connect(self, peer: int) -> None:
        """A connection is needed."""
        self._call(lambda: self._connect(peer))

    # -- in the transport's thread --------------------------------------------------------------------------------------

    def hear(self, peer: int, key: Key, text: bytes) -> None:
        """A note has come.

        Raises:
            WireError: it is none of those that are sent here.
        """
        if key[1] != AGREEMENT:
            self.courier(channel_of(key)).hear(peer, key, text)
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

    def close(self, cause: BaseException | None = None) -> None:
        """Nothing is decided any more. ``cause``: why, if it is not the end of the run."""
        with self._lock:
            waiting, self._futures = self._futures, {}
        for future in (future for futures in waiting.values() for future in futures):
            error = RuntimeError("the transport was closed" if cause is None else f"the transport has failed: {cause}")
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
