"""Calls that other threads queue for the transport's thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from decent_dp.errors import PeerLostError
from decent_dp.transport.waiter import start_thread

__all__ = ["Commands"]

T = TypeVar("T")


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

    def run_last(self) -> None:
        """Runs the remaining calls and ignores their errors, so that the messages that they add fail and their waiters wake."""
        while self._waiting:
            with contextlib.suppress(Exception):
                self._waiting.popleft()()

    def end(self) -> None:
        """Nothing is called any more, unless something was added in the meantime."""
        with self._lock:
            self.ended = not self._waiting

    def end_in_child(self) -> None:
        """In a forked process, which has no such thread."""
        self._lock = threading.Lock()  # another thread of the parent may have locked it
        self.ended = True

    def close(self) -> None:
        os.close(self.wakeup)
        os.close(self._waker)
