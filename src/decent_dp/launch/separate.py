"""Workers of this machine that outlive each other: when one fails, the others go on, and it alone starts again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from decent_dp.launch import script
from decent_dp.launch.local import Failure, cause, store_on, worker_variables

__all__ = ["Outcome", "run_separately"]

# Seconds between two looks, and for the workers to end in after a signal.
_POLL, _END = 0.1, 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Outcome:
    """How a run has ended.

    Attributes:
        finished: the ranks of the workers that ended well.
        first: the failure that came first, if none has; of those that were not started again.
        signal: that the launcher got, if it ended the run; else 0.
    """

    finished: tuple[int, ...]
    first: Failure | None = None
    signal: int = 0


def run_separately(
    nproc: int,
    command: Sequence[str],
    max_restarts: int,
    has_begun: Callable[[str], bool],
    say: Callable[[str], None],
) -> Outcome:
    """Runs a script on workers of this machine until all have ended.

    Args:
        command: as of ``script.main``, from the script on.
        max_restarts: how often each worker is started again; with its number of restarts in TORCHELASTIC_RESTART_COUNT.
        has_begun: whether the run at the store HOST:PORT can go on without a worker. The first failure before that ends all.
        say: called with a line for each failure.
    """
    store = store_on()
    with tempfile.TemporaryDirectory(prefix="decent-dp-") as notes, _Signals() as signals:
        workers = [_Worker(rank, nproc, store.port, Path(notes), command, max_restarts) for rank in range(nproc)]
        try:
            while not signals.number and any(worker.runs for worker in workers):
                for worker in workers:
                    failure = worker.poll()
                    if failure is not None:
                        if not has_begun(f"127.0.0.1:{store.port}"):
                            return Outcome((), cause(_failures(workers)))
                        say(f"worker {worker.rank} of {nproc} {failure}; {_next(worker, workers)}")
                time.sleep(_POLL)
        finally:
            _end(workers, signals.number or signal.SIGTERM)
    finished = tuple(worker.rank for worker in workers if worker.code == 0)
    return Outcome(finished, None if finished else cause(_failures(workers)), signals.number)


class _Worker:
    """One rank: its process, which may be a new one after a failure."""

    def __init__(self, rank: int, nproc: int, port: int, notes: Path, command: Sequence[str], max_restarts: int) -> None:
        self.rank, self.restarts, self.max_restarts = rank, 0, max_restarts
        self.failure: Failure | None = None
        self._note = notes / str(rank)
        self._command = command
        self._environ = {**os.environ, **worker_variables(rank, nproc, port), "TORCHELASTIC_ERROR_FILE": str(self._note)}
        self.start()

    def start(self) -> None:
        self.failure = None
        self._note.unlink(missing_ok=True)
        line = [sys.executable, script.__file__, str(self.restarts), str(self.max_restarts), *self._command]
        # A session of its own: Ctrl-C reaches it once, from the launcher.
        self.process = subprocess.Popen(line, env=self._environ, start_new_session=True)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def runs(self) -> bool:
        return self.code is None

    def poll(self) -> Failure | None:
        """A failure that is new."""
        if self.failure is not None or not self.code:
            return None
        message, when = "", time.time()
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._note.read_text(encoding="utf-8"))["message"]
            message, when = found["message"], found["extraInfo"]["time"]
        self.failure = Failure(self.rank, self.code, message, when)
        return self.failure


def _failures(workers: Sequence[_Worker]) -> list[Failure]:
    for worker in workers:
        worker.poll()
    return [worker.failure for worker in workers if worker.failure is not None]


def _next(worker: _Worker, workers: Sequence[_Worker]) -> str:
    """What follows a failure: starts the worker again if that is possible."""
    running = sum(other.runs for other in workers)
    if any(other.code == 0 for other in workers):
        return "others have finished"
    if running == 0:
        return "none is left that it could join"
    going_on = f"the other {running} go on" if running > 1 else "the other one goes on"
    if worker.restarts == worker.max_restarts:
        return going_on
    worker.restarts += 1
    worker.start()
    return f"{going_on}, and it starts again (restart {worker.restarts} of {worker.max_restarts})"


def _end(workers: Sequence[_Worker], number: int) -> None:
    """Ends the workers that still run, and waits for all."""
    for worker in workers:
        if worker.runs:
            worker.process.send_signal(number)
    deadline = time.monotonic() + _END
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


class _Signals:
    """Inside, a signal that would end the launcher is noted."""

    def __enter__(self) -> _Signals:
        self.number = 0
        self._before = [(number, signal.signal(number, self._note)) for number in _SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
