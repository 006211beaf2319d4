"""Agreements and collectives over the connections to other workers, where faults are tolerated."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from decent_dp.errors import WireError
from decent_dp.transport.agreement import Agreements, Consensus, Decision, View
from decent_dp.transport.courier import Courier
from decent_dp.transport.link import Key
from decent_dp.transport.messages import AGREEMENT

__all__ = ["ControlPlane"]

# Seconds between two looks at the other workers while an agreement is open, and between two questions to those that miss.
_LOOK, _ASK = 0.1, 0.5
# The beginning of the names of agreements in calls of all workers.
CALL = "call/"


class ControlPlane(Consensus):
    """Moves the notes of ``Agreements`` and of a ``Courier``.

    Args:
        call: runs a function in the transport's thread.
        send_note: to a worker; in the transport's thread.
        view, connect: as of ``Agreements``.
        some_are_to_come: whether the first round of a connected worker is a later one.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        call: Callable[[Callable[[], None]], None],
        send_note: Callable[[int, Key, bytes], None],
        view: Callable[[int], View],
        connect: Callable[[int], None],
        incarnation: int = 0,
        some_are_to_come: Callable[[], bool] = lambda: False,
    ) -> None:
        self._some_are_to_come = some_are_to_come
        self._call, self.view = call, view
        self.courier = Courier(lambda peer, key, block: call(lambda: send_note(peer, key, block)))
        self._agreements = Agreements(
            rank,
            world_size,
            view,
            lambda peer, message: send_note(peer, (0, AGREEMENT, 0), message),
            connect,
            self._opened,
            self._decided,
            incarnation,
        )
        self._lock = threading.Lock()
        self._futures: dict[str, list[Future[Decision]]] = {}
        # The texts of others in agreements without a decision, by name.
        self._heard: dict[str, set[str]] = {}
        self._look_at = self._ask_at = math.inf
        # Called with the name of an agreement in a call, and another worker's text. Returns this one's, if it stays out of it.
        self.stand_in: Callable[[str, str], str | None] = lambda name, text: None

    def expand(self, world_size: int) -> None:
        """``Agreements.expand``."""
        self._call(lambda: self._agreements.expand(world_size))

    # -- called by any thread -----------------------------------------------------------------------------------------

    def propose(self, name: str, text: str) -> Future[Decision]:
        future: Future[Decision] = Future()

        def propose() -> None:
            with self._lock:
                self._futures.setdefault(name, []).append(future)
            self._agreements.propose(name, text)
            if name.startswith(CALL) and self._some_are_to_come():
                self._agreements.ask(name)  # they answer only when they are asked
            self._look_soon()

        self._call(propose)
        return future

    def heard(self, name: str) -> frozenset[str]:
        with self._lock:
            return frozenset(self._heard.get(name, ()))

    def missing(self, name: str) -> list[int]:
        future: Future[list[int]] = Future()
        self._call(lambda: future.set_result(self._agreements.missing(name)))
        return future.result()

    def stand_in_again(self) -> None:
        """``stand_in`` answers otherwise now."""
        with self._lock:
            heard = [(name, text) for name, texts in self._heard.items() if name.startswith(CALL) for text in texts]
        for name, text in heard:
            self._call(lambda name=name, text=text: self._stand_in(name, text))  # type: ignore[misc]

    # -- in the transport's thread --------------------------------------------------------------------------------------

    def hear(self, peer: int, key: Key, text: bytes) -> None:
        """A note has come.

        Raises:
            WireError: it is none of those that are sent here.
        """
        if key[1] != AGREEMENT:
            self.courier.hear(peer, key, text)
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
        self.courier.reconnected(peer)
        self._agreements.reconnected(peer)

    def close(self, cause: BaseException | None = None) -> None:
        """Nothing is decided any more. ``cause``: why, if it is not the end of the run."""
        with self._lock:
            waiting, self._futures = self._futures, {}
        for future in (future for futures in waiting.values() for future in futures):
            error = RuntimeError("the transport was closed" if cause is None else f"the transport has failed: {cause}")
            error.__cause__ = cause
            future.set_exception(error)

    def _look_soon(self) -> None:
        if self._agreements.waiting and self._look_at == math.inf:
            now = time.monotonic()
            self._look_at, self._ask_at = now + _LOOK, now + _ASK

    def look(self) -> float:
        """Looks at the other workers if it is time. Returns when to look again, on the monotonic clock."""
        now = time.monotonic()
        if now >= self._look_at:
            again = now >= self._ask_at
            self._agreements.look(again=again)
            waiting = self._agreements.waiting
            self._look_at = now + _LOOK if waiting else math.inf
            self._ask_at = now + _ASK if again else self._ask_at
        return self._look_at

    def _opened(self, name: str, text: str) -> None:
        with self._lock:
            self._heard.setdefault(name, set()).add(text)
        if name.startswith(CALL):
            self._call(lambda: self._stand_in(name, text))

    def _stand_in(self, name: str, text: str) -> None:
        own = None
        with contextlib.suppress(ValueError):  # it is nothing that a worker says
            own = self.stand_in(name, text)
        if own is not None:
            self._agreements.propose(name, own)
            self._look_soon()

    def _decided(self, name: str, decision: Decision) -> None:
        with self._lock:
            self._heard.pop(name, None)
            futures = self._futures.pop(name, [])
        for future in futures:
            future.set_result(decision)
