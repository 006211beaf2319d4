"""Agreements and collectives over the connections to other workers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from decent_dp.errors import PeerLostError, WireError
from decent_dp.transport.agreement import NO_ROUND, Agreements, View
from decent_dp.transport.courier import Courier, Couriers
from decent_dp.transport.link import Key
from decent_dp.transport.messages import AGREEMENT

__all__ = ["ControlPlane"]

# Seconds between two looks at the other workers while an agreement is open, and between two questions to those that miss.
_LOOK = 0.1
_ASK = 0.5


class ControlPlane:
    """Moves the notes of ``Agreements`` and of a ``Courier``.

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
        view: Callable[[int], View],
        connect: Callable[[int], None],
        first_round: Callable[[int], int] = lambda peer: -1,
        incarnation: int = 0,
    ) -> None:
        self._call, self.view, self._connect = call, view, connect
        self._couriers = Couriers(lambda peer, key, block: call(lambda: send_note(peer, key, block)))
        self._agreements = Agreements(
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
            self._agreements.propose(name, text, round_=round_, among=among, asks=asks)
            self._look_soon()

        self._call(propose)
        return future

    def courier(self, channel: int) -> Courier:
        """``Couriers.of``."""
        return self._couriers.of(channel)

    def heard(self, name: str) -> list[str]:
        """``Agreements.heard``."""
        return self._agreements.heard(name)

    def is_asked(self, name: str) -> bool:
        """``Agreements.is_asked``."""
        return self._agreements.is_asked(name)

    def missing(self, name: str) -> list[int]:
        """The workers that an agreement waits for, as far as this one knows."""
        return self._agreements.missing(name)

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
            self._couriers.hear(peer, key, text)
            return
        try:
            self._agreements.hear(peer, text)
        except ValueError as error:
            raise WireError(f"worker {peer} sent {error}") from error
        self._look_soon()

    def renew(self, peer: int, incarnation: int) -> None:
        """Another process is this worker now."""
        self._agreements.renew(peer, incarnation)

    def reconnected(self, peer: int) -> None:
        """A connection was made, perhaps in place of a lost one."""
        self._couriers.reconnected(peer)
        self._agreements.reconnected(peer)

    def leave(self) -> None:
        """``Agreements.leave``."""
        self._agreements.leave()

    def departed(self, peer: int) -> None:
        """``Agreements.departed``."""
        self._agreements.departed(peer)

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
            self._agreements.look(again=again)
            self._look_at = now + _LOOK if self._agreements.waiting else math.inf
            self._ask_at = now + _ASK if again else self._ask_at
        return self._look_at

    def _look_soon(self) -> None:
        if self._agreements.waiting and self._look_at == math.inf:
            now = time.monotonic()
            self._look_at, self._ask_at = now + _LOOK, now + _ASK

    def _concluded(self, name: str, texts: Mapping[int, str]) -> None:
        with self._lock:
            futures = self._futures.pop(name, [])
        for future in futures:
            future.set_result(texts)
