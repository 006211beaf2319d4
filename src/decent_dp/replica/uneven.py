"""Uneven numbers of batches: who has run out makes rounds with those that still train, and all end after the same one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future

from decent_dp.engine import Engine
from decent_dp.errors import PeerTimeoutError
from decent_dp.replica.consistency import texts_of
from decent_dp.transport import Transport

__all__ = ["finish_together"]

# Seconds between two looks at the others, where there is no round to be made.
_PAUSE = 0.01
_WHAT = "the end of join()"


class _LastRound:
    """The agreement on the number of rounds: when all have come each worker votes for those that it has begun, and begins no
    other one before it knows the largest vote."""

    def __init__(self, transport: Transport, engine: Engine, number: int) -> None:
        self._transport, self._engine, self._number = transport, engine, number
        self._begun = engine.round
        self._lock = threading.Lock()
        self._vote: int | None = None
        self.votes: Future[Mapping[int, str]] = Future()

    def begins(self) -> bool:
        """Whether this worker begins a round now."""
        round_, newest = self._engine.round, self._transport.newest_round()
        with self._lock:
            # A round that nobody else has begun would be of no use to anybody.
            begins = newest >= round_ if self._vote is None else round_ < self._vote
            if begins:
                self._begun = max(self._begun, round_ + 1)
        return begins

    def cast(self, here: Future[Mapping[int, str]]) -> None:
        """Called in another thread: the training thread may be in a round, and others wait for the vote."""
        if here.exception() is None:
            with self._lock:
                self._vote = self._begun
            try:
                self.votes = self._transport.plane.agree(f"joined/{self._number}", str(self._vote))
            except Exception as error:  # the transport was closed
                self.votes.set_exception(error)


def finish_together(
    transport: Transport, engine: Engine, number: int, mix_only: Callable[[], None], between: Callable[[], None]
) -> None:
    """Makes rounds with those that still train, until all have come here.

    Args:
        number: of this call, the same on all workers.
        mix_only: makes a round.
        between: called where no round is to be made.

    Raises:
        PeerLostError: a worker is gone, and faults are not tolerated; or the others have taken this one for gone.
        PeerTimeoutError: a worker has not come, and no round was made, within the timeout.
    """
    name, last = f"join/{number}", _LastRound(transport, engine, number)
    here = transport.plane.agree(name, "")
    here.add_done_callback(last.cast)
    deadline = time.monotonic() + transport.timeout
    while not last.votes.done():
        if here.done():
            texts_of(transport, here, _WHAT)
        if last.begins():
            mix_only()
            deadline = time.monotonic() + transport.timeout
        elif time.monotonic() > deadline:
            missing = transport.plane.missing(f"joined/{number}" if here.done() else name)
            names = ", ".join(f"worker {rank}" for rank in missing) or "one of the workers"
            raise PeerTimeoutError(
                f"{names} not in join(), and no worker has made a round within the process group's timeout of "
                f"{transport.timeout:g} s: join() goes around the loop on every worker."
            )
        else:
            futures.wait([last.votes], _PAUSE)
            between()
    end = max(map(int, texts_of(transport, last.votes, _WHAT).values()))
    while engine.round < end:
        mix_only()
