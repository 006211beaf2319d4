"""What other threads share with the transport's thread: a queue of calls, and a clock."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from decent_dp.errors import PeerLostError
from decent_dp.transport.sockets import SILENT
from decent_dp.transport.waiter import start_thread

__all__ = ["Clock", "Commands"]

T = TypeVar("T")

# Seconds between two heartbeats, at most.
_BEAT = 1.0


class Clock:
    """The monotonic clock, which stands still while this process, or the transport's thread, is stopped: nobody could be heard,
    so no peer is silent or late for that. It never goes back.

    Attributes:
        interval: seconds between two heartbeats, and the most between two looks.
    """

    def __init__(self, dead_after: float) -> None:
        self.interval, self._hole = min(_BEAT, dead_after / 10), SILENT * dead_after
        # When the thread last looked, on the monotonic clock, and the seconds of all stops before. One tuple, as it is read
        # by other threads.
        self._state = time.monotonic(), 0.0
        self._woke = -math.inf

    def now(self) -> float:
        looked, stopped = self._state
        return min(time.monotonic(), looked + self.interval) - stopped

    def look(self) -> None:
        """The thread goes on: called before it reads what has come meanwhile."""
        now, (looked, stopped) = time.monotonic(), self._state
        late = now - looked - self.interval
        if late > self.interval:
            stopped += late
        if late > self._hole:
            self._woke = now - stopped
        self._state = now, stopped  # last: who has seen it sees that this process was stopped

    def woke(self) -> float:
        """When this process last went on after a stop in which it became a hole; -inf for never."""
        is_stopped = time.monotonic() - self._state[0] - self.interval > self._hole
        return self.now() if is_stopped else self._woke


class Commands:
    """A queue of calls. A byte in a pipe wakes the thread, which polls ``wakeup``.

    Attributes:
        thread: makes the calls; set before the first of them.
        closing: what fails in other threads does not matter any more.
        ended: nothing is called any more.
        error: what has ended the thread. ``failed_in``: the name of the thread in which it was raised.
    """

    thread: threading.Thread

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self.closing = self.ended = False
        self.error: BaseException | None = None
        self.failed_in = ""
        self.wakeup, self._waker = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._waker, False)
        self._woken = False

    def __bool__(self) -> bool:
        return bool(self._waiting)

    # -- called by any thread -----------------------------------------------------------------------------------------

    def call(self, command: Callable[[], None]) -> None:
        """Has the thread run ``command``.

        Raises:
            RuntimeError: the thread has ended.
        """
        with self._lock:  # also for the pipe, which is closed after the end
            if self.ended:
                raise self.is_over() from self.error
            self._waiting.append(command)
            if not self._woken and threading.current_thread() is not self.thread:
                self._woken = True
                with contextlib.suppress(BlockingIOError):
                    os.write(self._waker, b"!")

    def run_there(self, command: Callable[[], None]) -> None:
        """As ``call``, and waits until it has run. An error of it ends this worker, and is raised here, too."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                command()
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(None)

        self.call(run)
        future.result()

    def look_up(self, find: Callable[[], T], then: Callable[[T], None], name: str) -> bool:
        """Has a thread of its own call ``find``, which may block, and this one ``then`` with what it returns. Returns whether
        there is a thread for it. An error of ``find`` ends this worker."""

        def run() -> None:
            found = find()
            with contextlib.suppress(RuntimeError):  # the transport was closed in the meantime
                self.call(lambda: then(found))

        return start_thread(run, name, self.fail)

    def fail(self, error: Exception) -> None:
        """``Neighbours.fail``."""
        name = threading.current_thread().name

        def end() -> None:
            self.failed_in = self.failed_in or name
            raise error

        if not self.closing:
            with contextlib.suppress(RuntimeError):  # it has ended
                self.call(end)

    def refuse_failed(self) -> None:
        """``Neighbours.refuse_failed``."""
        if self.error is not None:
            raise self.is_over() from self.error

    def is_over(self) -> RuntimeError:
        if self.error is None:
            return RuntimeError("the transport was closed")
        if isinstance(self.error, PeerLostError):  # nothing has failed here
            return PeerLostError(str(self.error))
        what = f"{type(self.error).__name__}: {self.error}"
        return RuntimeError(f"the transport of this worker has failed: {what} (in the thread {self.failed_in})")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def awake(self) -> None:
        """Empties the pipe. A command that comes after that wakes the thread again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        self._woken = False

    def run(self) -> None:
        """Runs the calls that are there now, not those that they add: a long encoding lets messages move in between."""
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()

    def end(self, fail_all: Callable[[], None]) -> None:
        """Runs the remaining calls and ignores their errors; ``fail_all`` fails the messages that they add, so that their
        waiters wake. Nothing is called any more."""
        while not self.ended:
            while self._waiting:
                with contextlib.suppress(Exception):
                    self._waiting.popleft()()
            fail_all()
            with self._lock:
                self.ended = not self._waiting

    def end_in_child(self) -> None:
        """In a forked process, which has no such thread."""
        self._lock = threading.Lock()  # another thread of the parent may have locked it
        self.ended = True

    def close(self) -> None:
        os.close(self.wakeup)
        os.close(self._waker)
