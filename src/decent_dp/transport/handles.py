"""Waiting for an exchange, and what becomes of one that does not end in time, or not at all."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from decent_dp.errors import WireError
from decent_dp.transport.interface import Explain, Handle
from decent_dp.transport.messages import HINT, Key
from decent_dp.transport.votes import ExchangeId, PairExchange, Verdict
from decent_dp.transport.wire import Wire

__all__ = ["AllNeeded", "Policy", "WireHandle", "key_of"]

# Seconds between two looks at the peers of an exchange, in case that one is gone or silent.
_LOOK_AT_PEERS = 0.25


def key_of(exchange_id: ExchangeId, slot: int) -> Key:
    return exchange_id.round, exchange_id.bucket, slot


class WireHandle(Handle):
    """Waits for the verdicts of its pairs, or for the messages of a group. They are counted in the transport's thread.

    Args:
        others: the other members.

    Attributes:
        pair: the exchange with the other member, if there is one.
        started: when the exchange was, on the clock of the wire.
    """

    def __init__(self, exchange_id: ExchangeId, others: list[int], policy: Policy, wire: Wire, explain: Explain) -> None:
        super().__init__()
        self.exchange_id, self.others, self._explain = exchange_id, others, explain
        self._policy, self._wire = policy, wire
        self.pair: PairExchange | None = None
        self.started = wire.clock.now()
        self._left = 0
        self._done, self._read = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        # Whose connection has failed, or who does not mix; -1: this worker's own work has failed.
        self._error_peer = -1
        # Staged exchanges copy the received message to its device: from ``land``, in the transport's thread, until ``finish``.
        self.land: Callable[[], None] = lambda: None

    # -- in the transport's thread ------------------------------------------------------------------------------------

    def expect(self, parts: int) -> None:
        """Adds pairs or messages, before any of them is on its way."""
        self._left += parts

    def arrive(self) -> None:
        """One of the messages has come, or was sent; or both ends mix a pair."""
        self._left -= 1
        if self._left:
            return
        self._read.set()
        try:
            if not self.failed:
                self.land()
        except Exception as error:  # raised by the wait
            self.fail(-1, error)
        self._done.set()

    def settle(self, peer: int, verdict: Verdict) -> None:
        """The verdict of the pair with this peer is known."""
        if verdict is Verdict.BOTH:
            self.arrive()
            return
        self.verdict, self._error_peer = verdict, peer
        self._wire.hints.forget(key_of(self.exchange_id, HINT))
        self._read.set()
        self._done.set()

    def fail(self, peer: int, error: BaseException) -> None:
        """``peer``: whose connection has failed; -1: this worker's own work."""
        if self._error is None:
            self._error, self._error_peer = error, peer
        self._read.set()
        self._done.set()

    @property
    def failed(self) -> bool:
        return self._error is not None or self.verdict is Verdict.NEITHER

    # -- in the thread that waits -------------------------------------------------------------------------------------

    def mark_read(self) -> None:
        self._read.set()

    def wait_for_read(self) -> None:
        # A message that waits for a hint must hold the values of the start.
        self._wait_for(self._read)

    def wait(self) -> None:
        try:
            self._wait_for(self._done)
            self._raise()
            if self.verdict is Verdict.NEITHER:
                self._policy.end_without(self._error_peer, self.exchange_id)
            else:
                super().wait()
        finally:
            # Both calls refer to this handle, and to pinned memory. What comes later must not get into a later exchange.
            self.finish = self.land = lambda: None

    def last_progress(self) -> float:
        """When bytes last moved between this worker and one of the others: those are progress, however long a message is."""
        return max(self._wire.links.known(peer).lane.moved for peer in self.others)

    def missing(self) -> list[int]:
        """The workers that keep the exchange waiting, as far as this worker can know."""
        hint = key_of(self.exchange_id, HINT)
        without_hint = [peer for peer in self.others if self._wire.hints.lacks(peer, hint)]
        # Of the messages that are yet to come, or to go.
        slots: dict[int, list[int]] = {}
        for peer in self.others:
            lane = self._wire.links.known(peer).lane
            slots[peer] = [key[2] for key in (*list(lane.receivings), *list(lane.sendings)) if key[:2] == hint[:2]]
        behind = [peer for peer in self.others if any(slot % 2 == 0 for slot in slots[peer])]
        # A peer that has begun and sends no mean waits for another worker.
        rest = [peer for peer in self.others if not slots[peer]]
        return without_hint or behind or rest or self.others

    def _raise(self) -> None:
        error = self._error
        if isinstance(error, OSError) and self._error_peer >= 0:
            raise self._explain(error, [self._error_peer], self.exchange_id) from error
        if isinstance(error, WireError):
            raise WireError(str(error)) from error
        if error is not None:
            raise RuntimeError(f"{self.exchange_id}: the exchange failed: {error}") from error

    def _wait_for(self, event: threading.Event) -> None:
        began = self._wire.clock.now()
        while not event.is_set():
            left = self._policy.seconds_left(self, began, self._wire.clock.now())
            if left > 0:
                event.wait(min(left, _LOOK_AT_PEERS))
            else:
                self._policy.give_up(self)
        self._policy.waited(self, began)


class Policy(ABC):
    """How long exchanges are waited for, and what it means if they end without a result."""

    @abstractmethod
    def seconds_left(self, handle: WireHandle, began: float, now: float) -> float:
        """Seconds after which something is to be done if the exchange is still open. ``began``: when the wait did."""

    @abstractmethod
    def give_up(self, handle: WireHandle) -> None:
        """No seconds are left. What it does ends the exchange soon, or it raises."""

    @abstractmethod
    def end_without(self, peer: int, exchange_id: ExchangeId) -> None:
        """An exchange is over, or cannot begin, since ``peer`` does not take part."""

    def waited(self, handle: WireHandle, began: float) -> None:
        """The wait has ended that began then."""
        return


class AllNeeded(Policy):
    """Without ``faults=``: a worker that is gone is an error.

    Args:
        timeout: seconds without any progress after which a wait fails.
    """

    def __init__(self, wire: Wire, timeout: float, explain: Explain) -> None:
        self._wire, self._timeout, self._explain = wire, timeout, explain
        self._expired_at = 0.0

    def seconds_left(self, handle: WireHandle, began: float, now: float) -> float:
        if handle.started < self._expired_at:
            return 0.0  # a worker waits for the whole timeout once, not for each exchange in flight
        if any(map(self._wire.links.has_ended, handle.others)):
            return 0.0
        return max(began, handle.last_progress()) + self._timeout - now

    def give_up(self, handle: WireHandle) -> None:
        ended = [peer for peer in handle.others if self._wire.links.has_ended(peer)]
        missing = ended or handle.missing()
        if not ended:
            self._expired_at = self._wire.clock.now()
        if handle.pair is not None:
            self._wire.call(partial(self._wire.settlement.drop, handle.pair))
        for peer in missing:
            error = self._wire.why_lost(peer)
            if isinstance(error, ConnectionError):
                raise self._explain(error, [peer], handle.exchange_id) from error
        raise self._explain(TimeoutError(), missing, handle.exchange_id)

    def end_without(self, peer: int, exchange_id: ExchangeId) -> None:
        error = self._wire.why_lost(peer)
        if not isinstance(error, OSError):  # the peer sent what was not due
            raise WireError(str(error)) from error
        raise self._explain(error, [peer], exchange_id) from error
