"""Waiting for an exchange: until its messages are there, or, where faults are tolerated, for its verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from decent_dp.errors import WireError
from decent_dp.transport.base import ExchangeId, ExchangeRequest, Explain, Handle, Verdict
from decent_dp.transport.link import Key, Pair
from decent_dp.transport.liveness import WireNeighbours
from decent_dp.transport.messages import HINT
from decent_dp.transport.wire import Wire

__all__ = ["DOWN", "UP", "WHOLE", "SettledHandle", "Timeout", "WireHandle", "key_of"]

# Slots of an exchange: the only message of a pair, the hint (HINT), and the messages of a group, for each chunk one up the tree
# and one down. Messages with an even slot need these two workers only; a mean, which goes down, needs others, too.
WHOLE, UP, DOWN = 0, 2, 3

# Seconds between two looks at the peer of an exchange, in case that it is gone or silent.
_LOOK_AT_PEERS = 0.25


def key_of(exchange_id: ExchangeId, slot: int) -> Key:
    return exchange_id.round, exchange_id.bucket, slot


@dataclass
class Timeout:
    """Seconds without any progress after which a wait fails, and when a wait last failed so."""

    seconds: float
    expired_at: float = 0.0


class WireHandle(Handle):
    """Waits for the messages of one exchange, which are counted down in the transport's thread.

    Args:
        others: the other members.
    """

    def __init__(self, request: ExchangeRequest, others: list[int], timeout: Timeout, wire: Wire, explain: Explain) -> None:
        self._exchange_id, self._others, self._explain = request.exchange_id, others, explain
        self._timeout, self._wire = timeout, wire
        self._started = time.monotonic()
        self._messages_left = 0
        self._done, self._read = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._error_peer = -1
        # Staged exchanges copy the received message to its device: from ``land``, in the transport's thread, until ``finish``.
        self.land: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = lambda: None

    def expect(self, messages: int) -> None:
        """Adds messages, before any of them is on its way."""
        self._messages_left += messages

    def arrive(self) -> None:
        """One of the messages has come, or was sent."""
        self._messages_left -= 1
        if not self._messages_left:
            self._complete()

    def _complete(self) -> None:
        try:
            if self._error is None:
                self.land()
        except Exception as error:  # raised by the wait
            self.fail(-1, error)
        self._done.set()

    def fail(self, peer: int, error: BaseException) -> None:
        """``peer``: whose connection has failed; -1: this worker's own work."""
        if self._error is None:
            self._error, self._error_peer = error, peer
        self._read.set()
        self._done.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def mark_read(self) -> None:
        self._read.set()

    def wait_for_read(self) -> None:
        # A message that waits for a hint must hold the values of the start.
        self._wait_for(self._read)

    def wait(self) -> None:
        try:
            self._wait_for(self._done)
            self._raise()
        except BaseException:
            self._forget()  # what comes later must not get into the messages of a later exchange
            raise
        self._finish()

    def _raise(self) -> None:
        error = self._error
        if isinstance(error, OSError) and self._error_peer >= 0:
            raise self._explain(error, [self._error_peer], self._exchange_id) from error
        if isinstance(error, WireError):
            raise WireError(str(error)) from error
        if error is not None:
            raise RuntimeError(f"{self._exchange_id}: the exchange failed: {error}") from error

    def _finish(self) -> None:
        finish = self.finish
        self._forget()
        finish()

    def _forget(self) -> None:
        """Nothing is copied to the device any more. Both calls refer to this handle, and to pinned memory."""
        self.finish = self.land = lambda: None

    def _wait_for(self, event: threading.Event) -> None:
        began = time.monotonic()
        while not event.is_set():
            # Bytes that move are progress, however large the message is.
            last = max(began, *(self._wire.last_progress(peer) for peer in self._others))
            left = last + self._timeout.seconds - time.monotonic()
            if self._started < self._timeout.expired_at:
                left = 0.0  # a worker waits for the whole timeout once, not for each exchange in flight
            if not event.wait(max(left, 0.0)) and left <= 0:
                self._timeout.expired_at = time.monotonic()
                raise self._explain(TimeoutError(), self._missing(), self._exchange_id)

    def _missing(self) -> list[int]:
        """The workers that keep the exchange waiting, as far as this worker can know."""
        hint = key_of(self._exchange_id, HINT)
        without_hint = [peer for peer in self._others if self._wire.mailbox.waits_for(peer, hint)]
        slots = {peer: self._wire.open_slots(peer, hint[:2]) for peer in self._others}
        behind = [peer for peer in self._others if any(slot % 2 == 0 for slot in slots[peer])]
        # A peer that has begun and sends no mean waits for another worker.
        rest = [peer for peer in self._others if not slots[peer]]
        return without_hint or behind or rest or self._others


class SettledHandle(WireHandle):
    """Waits for the verdict of an exchange of two, where faults are tolerated."""

    def __init__(
        self,
        request: ExchangeRequest,
        others: list[int],
        timeout: Timeout,
        wire: Wire,
        explain: Explain,
        neighbours: WireNeighbours,
    ) -> None:
        super().__init__(request, others, timeout, wire, explain)
        self.neighbours = neighbours
        [self._peer], self._key = others, key_of(request.exchange_id, WHOLE)
        self.pair: Pair | None = None
        self._settled: Verdict | None = None
        self._in_doubt = False

    def settle(self, verdict: Verdict) -> None:
        self._settled = verdict
        self._wire.mailbox.forget(self._peer, key_of(self._exchange_id, HINT))
        self._read.set()
        if verdict is Verdict.NEITHER:
            self._done.set()
        else:
            self._complete()

    @property
    def failed(self) -> bool:
        return self._error is not None or self._settled is not None or self._in_doubt

    @property
    def verdict(self) -> Verdict:  # type: ignore[override]
        return self._settled or Verdict.OPEN

    def wait(self) -> None:
        self._wait_for(self._done)
        self._raise()
        if self._settled is Verdict.NEITHER:
            self._forget()
        else:
            self._finish()

    def _wait_for(self, event: threading.Event) -> None:
        assert self.pair is not None
        # As if the clock stood still while this process was stopped.
        offset = self._wire.now() - self._wire.stopped
        while not (event.is_set() or self._in_doubt):
            now = self._wire.now()  # first: the thread changes it last
            began = min(offset + self._wire.stopped, now)
            lively = self.neighbours.patience(self._peer, began)
            in_time = self.neighbours.expected_end(self.pair, began) - now
            active = max(began, self._wire.last_progress(self._peer)) + self._timeout.seconds - now
            left = min(lively, in_time, active)
            if left > 0:
                event.wait(min(left, _LOOK_AT_PEERS))
            elif self.neighbours.abandon(self._peer, self._key, late=lively > 0 and in_time <= 0) is Verdict.OPEN:
                self._in_doubt = True
        self.neighbours.waited(self.pair, offset + self._wire.stopped)
