"""Threads beside the training thread, and how often what happens in them is worth a line in the log."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["Repeats", "Waiter", "start_thread", "telling"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds without it after which something counts as new.
_CALM = 60.0


class Repeats:
    """Counts how often something happens, and says when that is worth a line in the log.

    It is at the ``first`` time, and then each time that the number has doubled. After a minute without it everything begins
    anew.

    Attributes:
        times: so far. ``seconds``: from the first to the last.
    """

    def __init__(self, first: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._clock = first, clock
        self._began = self._last = clock()
        self.times, self.seconds, self._next = 0, 0.0, first

    def again(self) -> bool:
        """It has happened. Returns whether there is to be a line."""
        now = self._clock()
        if not self.times or now - self._last > _CALM:
            self._began, self.times, self._next = now, 0, self._first
        self._last, self.seconds = now, now - self._began
        self.times += 1
        is_due = self.times >= self._next
        self._next *= 2 if is_due else 1
        return is_due


# By the name of a thread.
_NOT_STARTED: defaultdict[str, Repeats] = defaultdict(Repeats)


def telling(target: Callable[[], object], failed: Callable[[Exception], None]) -> Callable[[], None]:
    """A call of ``target`` for another thread, where nobody else sees what it raises: ``failed`` is called with it."""

    def call() -> None:
        try:
            target()
        except Exception as error:
            failed(error)

    return call


def start_thread(target: Callable[[], None], name: str, failed: Callable[[Exception], None]) -> bool:
    """Starts a daemon thread. Returns whether that was possible: a system limits their number. ``failed``: of ``telling``."""
    try:
        threading.Thread(target=telling(target, failed), name=name, daemon=True).start()
    except RuntimeError as error:
        if _NOT_STARTED[name].again():
            _log.warning("the thread %s cannot be started: %s (%d times by now)", name, error, _NOT_STARTED[name].times)
        return False
    return True


class Waiter:
    """Runs jobs one after another, in the order in which they were submitted.

    The thread starts with the first job and is a daemon, so that an interpreter that exits does not wait for a silent peer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Starts the thread; else the first job does. When the interpreter exits, Python 3.12 starts none any more."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """The result is the job's, or its error. A job of which nobody reads it is to be ``telling``."""
        if self._closed:
            raise RuntimeError(f"{self._name} was closed")
        self.start()
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def run(self, job: Callable[[], T], limit: float) -> T:
        """The result of a job. Raises ConnectionError if it is not there within ``limit`` seconds."""
        future = self.submit(job)
        if not wait([future], limit).done:
            raise ConnectionError("the store does not answer, and does not fail")
        return future.result()

    def close(self, wait: float = 0.0) -> None:
        """Ends the thread after the jobs that were submitted, for which it waits up to ``wait`` seconds.

        A thread that comes back from a call in C++ while the interpreter exits is ended there, which aborts the process.
        """
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if wait and self._thread is not threading.current_thread():
                self._thread.join(wait)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            # The job refers to tensors: do not keep them until the next one comes.
            del item, job, future
