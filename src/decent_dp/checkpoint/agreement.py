"""Agreement of all workers on a save or a stop, in threads beside the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport.base import Transport

__all__ = ["Gather", "make_gather"]

# Seconds between two looks whether a wait was cancelled.
_LOOK = 0.05


class Gather:
    """Gathers one text of every worker; where faults are tolerated, of every worker that lives."""

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport, self._name = transport, name
        self._result: Future[Mapping[int, str]] = Future()

    def put(self, text: str, *, asks: bool = False, before: str = "") -> None:
        """Contributes the text of this worker. ``asks``: the others are to contribute theirs."""
        self._result = self._transport.agree(self._name, text, before, asks=asks)

    def asked(self) -> bool:
        """Whether another worker asks."""
        return self._transport.is_asked(self._name)

    def wait(
        self, timeout: float, before: str, late: str, cancelled: threading.Event | None = None
    ) -> Mapping[int, str] | None:
        """Waits until all workers have contributed; this one has.

        Args:
            timeout: in seconds.
            before: the event that a lost worker prevents, for the error.
            late: a worker's failure to contribute in time, as the predicate of a sentence, for the error.
            cancelled: ends the wait.

        Returns:
            The texts, by rank; None if the wait was cancelled.

        Raises:
            PeerLostError: a worker is gone, and faults are not tolerated; or the others have gone on without this one.
            PeerTimeoutError: a worker has not contributed within the timeout.
        """
        cancelled, deadline = cancelled or threading.Event(), time.monotonic() + timeout
        while not (cancelled.is_set() or self._result.done()):
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"{_workers(self._transport.missing(self._name))} {late}")
            futures.wait([self._result], _LOOK)
        if cancelled.is_set():
            return None
        texts, rank = self._result.result(), self._transport.rank
        if rank not in texts:
            raise PeerLostError(f"the others took worker {rank} for gone, and have gone on without it: before {before}.")
        return texts

    def clear(self) -> None:
        return


def make_gather(transport: Transport, name: str) -> Gather:
    """A gather of the workers of ``transport``, for this name alone."""
    return Gather(transport, name)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) != 1 else ''} {', '.join(str(rank) for rank in ranks)}"
