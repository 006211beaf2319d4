"""What a worker knows of the others, and tells them, where faults are tolerated."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from decent_dp.topo import Edge
from decent_dp.transport.votes import ExchangeId

__all__ = ["Neighbours", "PeerTable", "Seen"]


class PeerTable:
    """What an engine asks of the other workers; no call waits for one. Without ``faults=`` each is needed: none is left out."""

    def usable(self, edge: Edge, exchange_id: ExchangeId) -> bool:
        """Whether this exchange can be started: the other worker gives signs of life, and has not left it out."""
        return True

    def round_of(self, rank: int) -> int:
        """The latest round in which a worker is known to be; -1 if nothing is known."""
        return -1

    def living(self) -> list[int]:
        """The workers that are connected and give signs of life."""
        return []

    def has_dropped(self, others: Sequence[int], exchange_id: ExchangeId) -> bool:
        """Whether one of these workers leaves this exchange out."""
        return False

    def skip(self, edge: Edge, exchange_id: ExchangeId) -> None:
        """Tells the other worker that this one leaves an exchange out, and all earlier ones of its bucket that are open."""
        return


@dataclass(frozen=True)
class Seen:
    """The other workers that this one has been connected to, at a moment.

    Attributes:
        living: those that are connected and give signs of life.
        silent: those whose edges are holes.
        lost: those of them that are gone, or have been silent for ``dead_after``.
        ended: those of the lost ones whose processes are known to have ended. The others may live, behind a broken network.
        left: those of the lost ones that have said that they leave.
        epoch: the largest number of an epoch that one of the living knows.
        is_awake: False after a stop of this process that was long enough for its edges to become holes, until the others are
            heard.
        is_replaced: another process is known to be this worker now.
    """

    living: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    epoch: int = 0
    is_awake: bool = True
    is_replaced: bool = False


class Neighbours(ABC):
    """The workers that this one is connected to. Any thread may use it.

    Without more, the others can neither be late nor come back: threads of one process only end.

    Attributes:
        table: what an engine asks of them.
    """

    table: PeerTable

    @abstractmethod
    def look(self) -> Seen:
        """What is known of them now."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Something has failed in a thread of this worker, and nobody expects it: the worker can go on no more. For the others
        it is gone, and ``refuse_failed`` raises from now on."""

    @abstractmethod
    def refuse_failed(self) -> None:
        """Raises RuntimeError, from the first error, after ``fail`` or an error in the transport's own thread."""

    def paused(self) -> AbstractContextManager[None]:
        """Context manager in which this worker makes no rounds: none of its exchanges is to be waited for. It does not nest."""
        return contextlib.nullcontext()

    @property
    def is_paused(self) -> bool:
        """Whether it is in ``paused()``."""
        return False

    @abstractmethod
    def reserve_until(self, seconds: float, least: int) -> int:
        """Returns a round, after which this worker starts no exchange until ``stop_mixing_after(None)``.

        Args:
            seconds, least: how far it is ahead of the present round: as many rounds as take so long, or so many.
        """

    @abstractmethod
    def stop_mixing_after(self, last: int | None) -> None:
        """Exchanges of later rounds than this are left out; None: no longer."""

    def enter_epoch(self, number: int) -> None:
        """This worker knows an epoch; the others learn of it."""
        return

    def renew(self, rank: int, incarnation: int, start: int) -> None:
        """Another process is this worker now; nothing, if it is this incarnation already.

        Args:
            start: its first round. In rounds before nobody meets it.
        """
        return

    def serve(self, answer: Callable[[int, int, bytes], bytes]) -> None:
        """Requests of other workers are answered from now on, and processes that want to join may connect.

        Args:
            answer: called with the rank and the incarnation of a process that has proved that it knows the run's secret, and
                its request; in a thread of its own, one for all. An error is logged, and the answer is empty.
        """
        return

    def ask(self, rank: int, incarnation: int, request: bytes) -> Future[bytes]:
        """The answer of another worker, which is the process of this incarnation, to a request of at most 1 MiB.

        The request is repeated if the connection breaks, so there may be no answer for long. The future has a ConnectionError
        if the worker cannot be asked.
        """
        future: Future[bytes] = Future()
        future.set_exception(ConnectionError("workers of this kind give each other nothing but exchanges"))
        return future
