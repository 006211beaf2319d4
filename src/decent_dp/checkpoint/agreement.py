"""Agreement of all workers through the store, for threads: collectives would interfere with those of the training."""

from __future__ import annotations

import threading
import time

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport.base import Transport, store_errors

__all__ = ["StoreGather"]

# Seconds between two polls: short at first, as the others are often about to answer.
_FIRST_POLL, _LAST_POLL = 0.002, 0.05


class StoreGather:
    """Gathers one text of every worker.

    It polls, because ``Store.wait`` blocks all other calls of the same client.

    Args:
        name: of its keys in the store, for this gather alone.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport, self._store = transport, transport.store
        self._keys, self._count = [f"{name}/{rank}" for rank in range(transport.world_size)], f"{name}/count"

    def put(self, text: str) -> None:
        """Contributes the text of this worker.

        Raises:
            ConnectionError: the store does not answer.
        """
        with store_errors():
            self._store.set(self._keys[self._transport.rank], text)
            self._store.add(self._count, 1)

    def wait(self, timeout: float, before: str, late: str, cancelled: threading.Event | None = None) -> list[str] | None:
        """Waits until all workers have contributed; this one has.

        Args:
            timeout: in seconds.
            before: the event that a lost worker prevents, for the error.
            late: a worker's failure to contribute in time, as the predicate of a sentence, for the error.
            cancelled: ends the wait.

        Returns:
            The texts, by rank; None if the wait was cancelled.

        Raises:
            PeerLostError: a worker is gone and has not contributed.
            PeerTimeoutError: a worker has not contributed within the timeout.
            ConnectionError: the store does not answer.
        """
        cancelled, pause, deadline = cancelled or threading.Event(), _FIRST_POLL, time.monotonic() + timeout
        while not cancelled.wait(pause):
            pause = min(2 * pause, _LAST_POLL)
            is_late, lost = time.monotonic() > deadline, self._transport.lost()
            with store_errors():
                if not (is_late or lost or int(self._store.get(self._count)) == len(self._keys)):
                    continue
                # The count may be too low: a worker may have died between the two calls in `put`.
                if self._store.check(self._keys):
                    return [text.decode() for text in self._store.multi_get(self._keys)]
                asked = range(len(self._keys)) if is_late else lost
                absent = [rank for rank in asked if not self._store.check([self._keys[rank]])]
            if gone := [rank for rank in absent if rank in lost]:
                raise PeerLostError(f"lost {_workers(gone)} before {before}.")
            if absent:
                raise PeerTimeoutError(f"{_workers(absent)} {late}")
        return None

    def clear(self) -> None:
        """Deletes what this worker has stored. To be called when no worker waits any more."""
        with store_errors():
            self._store.delete_key(self._keys[self._transport.rank])
            if self._transport.rank == 0:
                self._store.delete_key(self._count)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
