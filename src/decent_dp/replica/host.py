"""What a member does for a process that joins: it gives it its state, and a seat. Neither stops its training."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from decent_dp.compression import all_finite
from decent_dp.membership import Company
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.replica.staging import Staged, Staging
from decent_dp.replica.transfer import hear, say, send_state
from decent_dp.serialization import encode

__all__ = ["Host"]

_log = logging.getLogger(__name__)

# Seconds between two signs of life while a newcomer waits.
_PAUSE = 1.0
# Newcomers that are served at a time.
_MOST = 8


class Host(Listener):
    """Serves each newcomer in a thread of its own (``serve``), and takes snapshots between rounds.

    Attributes:
        is_away: this worker asks others itself, and makes no rounds until they answer.
    """

    def __init__(self, replica: Replica, company: Company) -> None:
        self._replica, self._company = replica, company
        # Those that wait for a snapshot: its tree, and the copies of its tensors.
        self._waiting: list[Future[tuple[str, Staged]]] = []
        self._lock, self.is_away = threading.Lock(), False
        self._guests = threading.BoundedSemaphore(_MOST)

    # -- in the training thread ---------------------------------------------------------------------------------------

    def reached_boundary(self) -> None:
        if not self._waiting:
            return
        with self._lock:
            waiting, self._waiting = self._waiting, []
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
        for future in waiting:
            future.set_exception(RuntimeError("this worker has ended"))

    # -- in the threads of newcomers ----------------------------------------------------------------------------------

    def serve(self, stream: socket.socket) -> None:
        """Called with the connection of a process of this run that is no member."""
        with stream, contextlib.suppress(OSError):
            stream.settimeout(self._company.faults.dead_after)
            if not self._guests.acquire(blocking=False):
                say(stream, {"refused": f"it serves {_MOST} others at present"})
                return
            try:
                request = hear(stream)
                if self.is_away:
                    raise RuntimeError("it waits for the state of another worker")
                if request == {"want": "state"}:
                    self._give_state(stream)
                else:
                    self._give_seat(stream, int(request["seat"]), int(request["incarnation"]))
            except (RuntimeError, LookupError, TypeError, ValueError, ConnectionError) as error:
                say(stream, {"refused": str(error)})
            finally:
                self._guests.release()

    def _give_state(self, stream: socket.socket) -> None:
        future: Future[tuple[str, Staged]] = Future()
        with self._lock:
            self._waiting.append(future)
        try:
            text, staged = _await(stream, future)
        except OSError:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(future)
            raise
        staged.wait()
        for key, tensor in staged.tensors.items():
            if tensor.is_floating_point() and ".parameters." in key and not all_finite(tensor):
                raise RuntimeError("the replica of this worker holds a NaN or an infinity")
        send_state(stream, text, staged.tensors)

    def _give_seat(self, stream: socket.socket, rank: int, incarnation: int) -> None:
        company = self._company
        deadline = time.monotonic() + 2 * company.faults.dead_after
        while not company.is_free(rank):  # its process may be frozen, or have ended just now
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
        calls = self._replica.everyone.control.calls
        say(stream, {"epoch": epoch.number, "text": epoch.text, "calls": calls, "joins": company.joins})


def _await(stream: socket.socket, future: Future[Any]) -> Any:
    """The result of ``future``. Meanwhile the newcomer gets signs of life; if it is gone, that raises OSError."""
    while not futures.wait([future], _PAUSE).done:
        say(stream, None)
    return future.result()
