"""Workers of this machine: when one fails, the others go on, and it alone starts again; or all end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from decent_dp.launch import script
from decent_dp.launch.local import Failure, cause, store_on, worker_variables

__all__ = ["Ending", "run_separately"]

# Seconds between two looks, and for the workers to end in after a signal.
_POLL, _END = 0.1, 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Ending:
    """How a run has ended.

    Attributes:
        finished: the ranks of the workers that ended well.
        first: the failure that came first, if none has.
        signal: that the launcher got, if it ended the run; else 0.
        begun: whether there was a run that could go on, at the first failure.
    """

    finished: tuple[int, ...]
    first: Failure | None = None
    signal: int = 0
    begun: bool = True


def run_separately(
    nproc: int,
    command: Sequence[str],
    max_restarts: int,
    look: Callable[[str], Mapping[int, int] | None],
    say: Callable[[str], None],
    attempt: int = 0,
) -> Ending:
    """Runs a script on workers of this machine until all have ended.

    Args:
        command: as of ``script.main``, from the script on.
        max_restarts: how often each worker is started again; with its number of restarts in TORCHELASTIC_RESTART_COUNT.
        look: returns the incarnations of the members of the run at the store HOST:PORT, by rank; None if no run is there that
            can go on without a worker. Then the first failure ends all.
        say: called with a line for each failure.
        attempt: how often all workers were started before; a worker's number of restarts begins with it.
    """
    store = store_on()
    with tempfile.TemporaryDirectory(prefix="decent-dp-") as notes, _Signals() as signals:
        workers: list[_Supervised] = []
        begun = True
        try:
            for rank in range(nproc):
                workers.append(_Supervised(rank, nproc, store.port, Path(notes), command, max_restarts, attempt))
            while begun and not signals.number and not all(worker.is_over for worker in workers):
                for worker in workers:
                    failure = worker.poll()
                    if failure is not None:
                        members = look(f"127.0.0.1:{store.port}")
                        if members is None:
                            begun = False
                            break
                        say(f"worker {worker.rank} of {nproc} {failure}; {_carry_on(worker, workers, members)}")
                time.sleep(_POLL)
        finally:
            _end(workers, signals.number or signal.SIGTERM)
        finished = tuple(worker.rank for worker in workers if worker.code == 0)
        # Of all: the worker that raised an error may end later than one that has lost it.
        for worker in workers:
            worker.poll()
        first = None if finished and begun else cause([failure for worker in workers for failure in worker.failures])
    return Ending(finished, first, signals.number, begun)


class _Supervised:
    """One rank: its process, which may be a new one after a failure."""

    def __init__(
        self, rank: int, nproc: int, port: int, notes: Path, command: Sequence[str], max_restarts: int, attempt: int
    ) -> None:
        self.rank, self.restarts, self.max_restarts, self._attempt = rank, 0, max_restarts, attempt
        # Of its processes, each of which has one at most.
        self.failures: list[Failure] = []
        # The incarnation that the run knew when the present process was started.
        self._former = 0
        self._note, self._command = notes / str(rank), command
        own = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(self._note)}
        self._environ = {**os.environ, **worker_variables(rank, nproc, port), **own}  # as other libraries know it of torchrun
        self._start()

    def start_again(self, members: Mapping[int, int]) -> None:
        self.restarts += 1
        self._former = members.get(self.rank, 0)
        self._start()

    def _start(self) -> None:
        self._note.unlink(missing_ok=True)
        restarts = str(self._attempt + self.restarts)
        line = [sys.executable, script.__file__, restarts, str(self.max_restarts), *self._command]
        # A session of its own: Ctrl-C reaches it once, from the launcher. It is also its process group.
        self.process = subprocess.Popen(line, env=self._environ, start_new_session=True)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def is_over(self) -> bool:
        """Whether it has ended well, or its failure is known."""
        return self.code == 0 or len(self.failures) > self.restarts

    def takes_part(self, members: Mapping[int, int]) -> bool:
        """Whether it runs, and need not join first."""
        return self.code is None and (self.restarts == 0 or members.get(self.rank, 0) > self._former)

    def poll(self) -> Failure | None:
        """A failure that is new. What the process had started does not outlive it."""
        if self.is_over or not self.code:
            return None
        self.kill()
        message, when = "", time.time()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have written another note
            found = json.loads(self._note.read_text(encoding="utf-8")).get("message")
            message, when = found.get("message", ""), found.get("extraInfo", {}).get("time", when)
        self.failures.append(Failure(self.rank, self.code, message, when))
        return self.failures[-1]

    def kill(self) -> None:
        """Kills the process, and what it has started. Called soon after its end, or others may have its number."""
        # The second one is macOS's, for processes that have ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _carry_on(worker: _Supervised, workers: Sequence[_Supervised], members: Mapping[int, int]) -> str:
    """After a failure: starts the worker again, if it can join others. Returns what happens."""
    running = sum(other.takes_part(members) for other in workers)
    if any(other.code == 0 for other in workers):
        return "others have finished"
    if running == 0:
        return "none is left that it could join"
    going_on = f"the other {running} go on" if running > 1 else "the other one goes on"
    if worker.restarts == worker.max_restarts:
        return going_on
    worker.start_again(members)
    return f"{going_on}, and it starts again (restart {worker.restarts} of {worker.max_restarts})"


def _end(workers: Sequence[_Supervised], number: int) -> None:
    """Ends the workers that still run, with what they have started."""
    running = [worker for worker in workers if worker.code is None]
    for worker in running:
        worker.process.send_signal(number)
    deadline = time.monotonic() + _END
    for worker in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        worker.kill()
        worker.process.wait()


class _Signals:
    """Inside, a signal that would end the launcher is noted. One that is ignored (nohup) stays so."""

    def __enter__(self) -> _Signals:
        self.number = 0
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = [(number, signal.signal(number, self._note)) for number in heard]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.number = self.number or number
