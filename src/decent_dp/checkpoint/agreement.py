"""Agreement of all workers, for threads: collectives would interfere with those of the training."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport.agreement import Consensus, Decision
from decent_dp.transport.base import Transport
from decent_dp.transport.store import store_errors

__all__ = ["Gather", "LinkGather", "StoreGather", "make_gather"]

# Seconds between two polls: short at first, as the others are often about to answer.
_FIRST_POLL, _LAST_POLL = 0.002, 0.05
# The first letter of a text in an agreement.
_ASKS, _TELLS = "?", "."


class Gather(ABC):
    """Gathers one text of every worker; where faults are tolerated, of every worker that lives."""

    @abstractmethod
    def put(self, text: str, *, asks: bool = False) -> None:
        """Contributes the text of this worker. ``asks``: the others are to contribute theirs.

        Raises:
            ConnectionError: the store does not answer.
        """

    @abstractmethod
    def asked(self) -> bool:
        """Whether another worker asks.

        Raises:
            ConnectionError: the store does not answer.
        """

    @abstractmethod
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
            PeerLostError: a worker is gone and has not contributed, and faults are not tolerated; or the others have gone on
                without this one.
            PeerTimeoutError: a worker has not contributed within the timeout.
            ConnectionError: the store does not answer.
        """

    @abstractmethod
    def clear(self) -> None:
        """Deletes what this worker has stored. To be called when no worker waits any more."""


def make_gather(transport: Transport, name: str) -> Gather:
    """A gather of the workers of ``transport``, for this name alone."""
    neighbours = transport.neighbours
    return StoreGather(transport, name) if neighbours is None else LinkGather(neighbours.consensus, transport.rank, name)


class LinkGather(Gather):
    """An agreement of the workers that live, over their connections."""

    def __init__(self, consensus: Consensus, rank: int, name: str) -> None:
        self._consensus, self._rank, self._name = consensus, rank, name
        self._decision: Future[Decision] = Future()

    def put(self, text: str, *, asks: bool = False) -> None:
        self._decision = self._consensus.propose(self._name, f"{_ASKS if asks else _TELLS}{text}")

    def asked(self) -> bool:
        return any(text.startswith(_ASKS) for text in self._consensus.heard(self._name))

    def wait(
        self, timeout: float, before: str, late: str, cancelled: threading.Event | None = None
    ) -> Mapping[int, str] | None:
        cancelled, deadline = cancelled or threading.Event(), time.monotonic() + timeout
        while not self._decision.done():
            if cancelled.is_set():
                return None
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"{_workers(self._consensus.missing(self._name))} {late}")
            futures.wait([self._decision], _LAST_POLL)
        texts = self._decision.result().texts
        if self._rank not in texts:
            raise PeerLostError(f"the others took worker {self._rank} for gone, and have gone on without it: before {before}.")
        return {rank: text[1:] for rank, text in texts.items()}

    def clear(self) -> None:
        return


class StoreGather(Gather):
    """Through the store.

    It polls, because ``Store.wait`` blocks all other calls of the same client.

    Args:
        name: of its keys in the store, for this gather alone.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport, self._store = transport, transport.store
        self._keys, self._count = [f"{name}/{rank}" for rank in range(transport.world_size)], f"{name}/count"
        self._request = f"{name}/request"

    def put(self, text: str, *, asks: bool = False) -> None:
        with store_errors():
            if asks:
                self._store.set(self._request, "")
            self._store.set(self._keys[self._transport.rank], text)
            self._store.add(self._count, 1)

    def asked(self) -> bool:
        with store_errors():
            return self._store.check([self._request])

    def wait(
        self, timeout: float, before: str, late: str, cancelled: threading.Event | None = None
    ) -> Mapping[int, str] | None:
        cancelled, pause, deadline = cancelled or threading.Event(), _FIRST_POLL, time.monotonic() + timeout
        while not cancelled.wait(pause):
            pause = min(2 * pause, _LAST_POLL)
            is_late, lost = time.monotonic() > deadline, self._transport.lost()
            with store_errors():
                if not (is_late or lost or int(self._store.get(self._count)) == len(self._keys)):
                    continue
                # The count may be too low: a worker may have died between the two calls in `put`.
                if self._store.check(self._keys):
                    return dict(enumerate(text.decode() for text in self._store.multi_get(self._keys)))
                asked = range(len(self._keys)) if is_late else lost
                absent = [rank for rank in asked if not self._store.check([self._keys[rank]])]
            if gone := [rank for rank in absent if rank in lost]:
                raise PeerLostError(f"lost {_workers(gone)} before {before}.")
            if absent:
                raise PeerTimeoutError(f"{_workers(absent)} {late}")
        return None

    def clear(self) -> None:
        with store_errors():
            self._store.delete_key(self._keys[self._transport.rank])
            if self._transport.rank == 0:
                self._store.delete_key(self._count)


def _workers(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
