"""What a member does for a process that joins: it gives it its state, and a seat. Neither stops its training."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from decent_dp.compression import all_finite
from decent_dp.membership import MembershipMonitor
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.replica.staging import Staged, Staging
from decent_dp.replica.transfer import StateCopy, hear, say, send_state
from decent_dp.serialization import encode
from decent_dp.transport.neighbours import Stream

__all__ = ["Host"]

_log = logging.getLogger(__name__)

# Seconds between two signs of life while a newcomer waits.
_PAUSE = 1.0
# Newcomers that are served at a time.
_MOST_GUESTS = 8
# Copies of the state that are kept at a time, each of them as large as the state. Who comes within so many seconds, or when
# there are no more, gets an older one.
_MOST_COPIES, _FRESH = 2, 60.0
# How long a copy is kept after a connection has broken, in ``dead_after``: a newcomer without a network gives up after 30 s.
_KEPT = 3.0


@dataclass
class _Kept:
    """A copy of the state.

    Attributes:
        taken: when; ``first_bucket``: of the engine then, which another one has after a load.
        users: the connections that it is sent over; ``until``: when it is dropped, if there are none.
    """

    copy: StateCopy
    staged: Staged
    taken: float
    first_bucket: int
    users: int = 0
    until: float = 0.0


class Host(Listener):
    """Serves each newcomer in a thread of its own (``serve``), and takes snapshots between rounds.

    The copy that a newcomer gets is kept for a while if the connection breaks, and the rest of it is sent over another one.
    """

    def __init__(self, replica: Replica, monitor: MembershipMonitor) -> None:
        self._replica, self._monitor = replica, monitor
        # What newcomers wait for, if any do: a copy from the next boundary.
        self._wanted: Future[_Kept] | None = None
        # By name; changed under the lock.
        self._copies: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._guests = threading.BoundedSemaphore(_MOST_GUESTS)
        self._has_ended = False

    # -- in the training thread ---------------------------------------------------------------------------------------

    def reached_boundary(self) -> None:
        if self._wanted is None and not self._copies:
            return
        with self._lock:
            wanted, self._wanted = self._wanted, None
            self._drop_old()
        if wanted is None:
            return
        try:
            if not self._replica.engine.exchanges and len(self._monitor.members) > 1:
                raise RuntimeError("this worker has not mixed yet")
            # What is in flight, and what edges have learned, is between this worker and others.
            snapshot = {**take(self._replica, settled=False), "compression": {}, "grads": {}}
            bucket, epochs = self._replica.engine.first_bucket, self._monitor.epochs
            known = None if epochs is None else epochs.known
            state = {"first_bucket": bucket, "epoch": known, "snapshot": snapshot}
            text, tensors = encode(state)
            staged = Staging().copy(tensors)
            kept = _Kept(StateCopy(text, staged.tensors), staged, time.monotonic(), bucket)
        except Exception as error:  # training continues
            wanted.set_exception(error)
        else:
            wanted.set_result(kept)

    def closing(self) -> None:
        with self._lock:
            wanted, self._wanted = self._wanted, None
            self._copies, self._has_ended = {}, True
        if wanted is not None:
            wanted.set_exception(RuntimeError("this worker has ended"))

    # -- in the threads of newcomers ----------------------------------------------------------------------------------

    def serve(self, stream: Stream) -> None:
        """Called with the connection of a process of this run that is no member."""
        with stream, contextlib.suppress(OSError):
            stream.settimeout(self._monitor.faults.dead_after)
            try:
                request = hear(stream) or {}
                with self._place():
                    if request.get("want") == "state":
                        self._give_state(stream, str(request.get("copy")), request.get("from"))
                    else:
                        self._give_seat(stream, int(request["seat"]), int(request["incarnation"]))
            except (RuntimeError, LookupError, TypeError, ValueError, ConnectionError) as error:
                say(stream, {"refused": str(error)})

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for newcomers."""
        if not self._guests.acquire(timeout=_PAUSE):
            raise RuntimeError(f"it serves {_MOST_GUESTS} others at present")
        try:
            yield
        finally:
            self._guests.release()

    def _copy_for(self, stream: Stream, name: str) -> _Kept:
        """The copy of this name, or a fresh one; for one more user."""
        with self._lock:
            self._drop_old()
            if (found := self._find(name)) is not None:
                found.users += 1
                return found
            if self._has_ended:
                raise RuntimeError("this worker has ended")
            wanted = self._wanted = self._wanted or Future()
        kept: _Kept = _await(stream, wanted, self._refuse_paused)
        kept.staged.wait()
        for key, tensor in kept.staged.tensors.items():
            if tensor.is_floating_point() and ".parameters." in key and not all_finite(tensor):
                raise RuntimeError("the replica of this worker holds a NaN or an infinity")
        with self._lock:
            if not self._has_ended:
                self._copies[kept.copy.name] = kept
            kept.users += 1
        return kept

    def _find(self, name: str) -> _Kept | None:
        """The copy of this name, or the newest, if that is fresh or there may be no more. The caller has the lock."""
        if name in self._copies:
            return self._copies[name]
        bucket = self._replica.engine.first_bucket
        copies = [kept for kept in self._copies.values() if kept.first_bucket == bucket]
        newest = max(copies, key=lambda kept: kept.taken, default=None)
        is_fresh = newest is not None and time.monotonic() < newest.taken + _FRESH
        return newest if is_fresh or len(copies) >= _MOST_COPIES else None

    def _refuse_paused(self) -> None:
        """There is no boundary while this worker waits in a call of all, or for the state of another one."""
        if self._monitor.neighbours.is_paused:
            raise RuntimeError("it waits for others")

    def _give_state(self, stream: Stream, name: str, begin: Any) -> None:
        """Sends the copy ``name`` from byte ``begin`` of its tensors on; or all of another one."""
        kept, seconds = self._copy_for(stream, name), 0.0
        size = kept.copy.size
        try:
            if kept.copy.name != name:
                begin = 0
            elif type(begin) is not int or not 0 <= begin <= size:
                raise ValueError(f"from must be an int from 0 to {size}, the bytes of the copy, got {begin!r}")
            send_state(stream, kept.copy, begin)
            hear(stream)  # it has all of it
        except OSError:
            seconds = _KEPT * self._monitor.faults.dead_after
            raise
        finally:
            with self._lock:
                kept.users -= 1
                kept.until = max(kept.until, time.monotonic() + seconds)
                self._drop_old()

    def _drop_old(self) -> None:
        """Drops copies that nobody has asked for again. The caller has the lock."""
        now = time.monotonic()
        self._copies = {name: kept for name, kept in self._copies.items() if kept.users or kept.until > now}

    def _give_seat(self, stream: Stream, rank: int, incarnation: int) -> None:
        monitor = self._monitor
        deadline = time.monotonic() + 2 * monitor.faults.dead_after
        while not monitor.is_free(rank, incarnation):  # its process may be frozen, or have ended just now
            if time.monotonic() > deadline:
                raise RuntimeError(f"worker {rank} lives")
            say(stream, None)
            time.sleep(_PAUSE / 4)
        epochs = monitor.epochs
        assert epochs is not None
        try:
            epoch = _await(stream, epochs.offer(rank, incarnation))
        except BaseException:
            epochs.withdraw(rank, incarnation)
            raise
        _log.info("worker %d has joined, in epoch %d", rank, epoch.number)
        calls, bucket = self._replica.everyone.control.calls, self._replica.engine.first_bucket
        answer = {"calls": calls, "joins": self._replica.joins, "first_bucket": bucket}
        say(stream, {"epoch": epoch.number, "text": epoch.text, **answer})


def _await(stream: Stream, future: Future[Any], check: Callable[[], None] = lambda: None) -> Any:
    """The result of ``future``. Meanwhile the newcomer gets signs of life; if it is gone, that raises OSError.

    Args:
        check: called before each of them; may raise.
    """
    while not futures.wait([future], 0.0).done:
        check()
        say(stream, None)
        futures.wait([future], _PAUSE)
    return future.result()
