"""What a member does for a process that joins: it gives it its state, and a seat. Neither stops its training."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from decent_dp.compression import all_finite
from decent_dp.membership import Company
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.replica.staging import Staged, Staging
from decent_dp.replica.transfer import StateCopy, hear, say, send_state
from decent_dp.serialization import encode

__all__ = ["Host"]

_log = logging.getLogger(__name__)

# Seconds between two signs of life while a newcomer waits.
_PAUSE = 1.0
# Newcomers that are served at a time, and copies.
_MOST = 8
# How long a copy is kept after its connection has broken, in ``dead_after``: a newcomer without a network gives up after 30 s.
_KEPT = 3.0


@dataclass
class _Kept:
    """A copy, and the newest connection that it is sent over. ``until``: when it is dropped, if that one has broken."""

    copy: StateCopy
    stream: socket.socket
    until: float = math.inf


class Host(Listener):
    """Serves each newcomer in a thread of its own (``serve``), and takes snapshots between rounds.

    The copy that a newcomer gets is kept for a while if the connection breaks, and the rest of it is sent over another one.
    """

    def __init__(self, replica: Replica, company: Company) -> None:
        self._replica, self._company = replica, company
        # Those that wait for a snapshot: its tree, and the copies of its tensors.
        self._waiting: list[Future[tuple[str, Staged]]] = []
        self._lock = threading.Lock()
        self._guests = threading.BoundedSemaphore(_MOST)
        # Copies that are sent, and the newest one whose connection has broken, by name; changed under the lock.
        self._copies: dict[str, _Kept] = {}
        self._has_ended = False

    # -- in the training thread ---------------------------------------------------------------------------------------

    def reached_boundary(self) -> None:
        if not self._waiting and not self._copies:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._drop_old()
        if not waiting:
            return
        try:
            if not self._replica.engine.exchanges and len(self._company.members) > 1:
                raise RuntimeError("this worker has not mixed yet")
            # What is in flight, and what edges have learned, is between this worker and others.
            snapshot = {**take(self._replica), "exchange": None, "compression": {}, "grads": {}}
            state = {"first_bucket": self._replica.engine.first_bucket, "epoch": self._company.known, "snapshot": snapshot}
            text, tensors = encode(state, "")
            staged = Staging().copy(tensors)
        except Exception as error:  # training continues
            for future in waiting:
                future.set_exception(error)
        else:
            for future in waiting:
                future.set_result((text, staged))

    def closing(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._copies, self._has_ended = {}, True
        for future in waiting:
            future.set_exception(RuntimeError("this worker has ended"))

    # -- in the threads of newcomers ----------------------------------------------------------------------------------

    def serve(self, stream: socket.socket) -> None:
        """Called with the connection of a process of this run that is no member."""
        with stream, contextlib.suppress(OSError):
            stream.settimeout(self._company.faults.dead_after)
            try:
                request = hear(stream) or {}
                kept = self._copies.get(str(request.get("copy")))
                if kept is not None:  # its thread may still send into a connection that is broken
                    _break(kept.stream)
                with self._place():
                    if kept is not None:
                        self._give_state(stream, kept, request.get("from"))
                    elif request.get("want") == "state":
                        self._give_state(stream, _Kept(self._copy_for(stream), stream), 0)
                    else:
                        self._give_seat(stream, int(request["seat"]), int(request["incarnation"]))
            except (RuntimeError, LookupError, TypeError, ValueError, ConnectionError) as error:
                say(stream, {"refused": str(error)})

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for newcomers."""
        if not self._guests.acquire(timeout=_PAUSE):
            raise RuntimeError(f"it serves {_MOST} others at present")
        try:
            yield
        finally:
            self._guests.release()

    def _copy_for(self, stream: socket.socket) -> StateCopy:
        """A copy of the state, from the next boundary."""
        future: Future[tuple[str, Staged]] = Future()
        with self._lock:
            self._waiting.append(future)
        try:
            text, staged = _await(stream, future, self._refuse_paused)
        except (OSError, RuntimeError):
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(future)
            raise
        staged.wait()
        for key, tensor in staged.tensors.items():
            if tensor.is_floating_point() and ".parameters." in key and not all_finite(tensor):
                raise RuntimeError("the replica of this worker holds a NaN or an infinity")
        return StateCopy(text, staged.tensors)

    def _refuse_paused(self) -> None:
        """There is no boundary while this worker waits in a call of all, or for the state of another one."""
        if self._company.neighbours.is_paused:
            raise RuntimeError("it waits for others")

    def _give_state(self, stream: socket.socket, kept: _Kept, begin: Any) -> None:
        """Sends a copy from byte ``begin`` of its tensors on. It is kept until all of it has arrived, or for a while."""
        name, size = kept.copy.name, kept.copy.size
        if type(begin) is not int or not 0 <= begin <= size:
            raise ValueError(f"from must be an int from 0 to {size}, the bytes of the copy, got {begin!r}")
        with self._lock:
            if name not in self._copies and len(self._copies) >= _MOST:
                # Each place but this one has at most one connection that is alive.
                del self._copies[min(self._copies, key=lambda other: self._copies[other].until)]
            if not self._has_ended:
                self._copies[name] = kept
            kept.stream, kept.until = stream, math.inf
        seconds = 0.0
        try:
            send_state(stream, kept.copy, begin)
            hear(stream)  # it has all of it
        except OSError:
            seconds = _KEPT * self._company.faults.dead_after
            raise
        finally:
            with self._lock:
                if kept.stream is stream:
                    kept.until = time.monotonic() + seconds
                    # One at most is kept: processes that die in the transfer, and are started again, come for new ones.
                    self._copies = {
                        other.copy.name: other for other in self._copies.values() if other is kept or other.until == math.inf
                    }
                self._drop_old()

    def _drop_old(self) -> None:
        """Drops copies that nobody has asked for again. The caller has the lock."""
        now = time.monotonic()
        self._copies = {name: kept for name, kept in self._copies.items() if kept.until > now}

    def _give_seat(self, stream: socket.socket, rank: int, incarnation: int) -> None:
        company = self._company
        deadline = time.monotonic() + 2 * company.faults.dead_after
        while not company.is_free(rank, incarnation):  # its process may be frozen, or have ended just now
            if time.monotonic() > deadline:
                raise RuntimeError(f"worker {rank} lives")
            say(stream, None)
            time.sleep(_PAUSE / 4)
        try:
            epoch = _await(stream, company.offer(rank, incarnation))
        except BaseException:
            company.withdraw(rank, incarnation)
            raise
        _log.info("worker %d has joined, in epoch %d", rank, epoch.number)
        calls, bucket = self._replica.everyone.control.calls, self._replica.engine.first_bucket
        answer = {"calls": calls, "joins": company.joins, "first_bucket": bucket}
        say(stream, {"epoch": epoch.number, "text": epoch.text, **answer})


def _await(stream: socket.socket, future: Future[Any], check: Callable[[], None] = lambda: None) -> Any:
    """The result of ``future``. Meanwhile the newcomer gets signs of life; if it is gone, that raises OSError.

    Args:
        check: called before each of them; may raise.
    """
    while not futures.wait([future], 0.0).done:
        check()
        say(stream, None)
        futures.wait([future], _PAUSE)
    return future.result()


def _break(stream: socket.socket) -> None:
    """The thread that uses it gets an error."""
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
