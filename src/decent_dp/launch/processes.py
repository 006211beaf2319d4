"""Workers of this machine: when one fails, the others go on, and it alone starts again; or all end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from decent_dp.launch import script
from decent_dp.launch.local import store_on, worker_variables

__all__ = ["Ending", "Failure", "run_workers"]

# Seconds between two looks, and for the cause to be heard of after a worker that has lost another one.
_POLL, _CAUSE = 0.05, 2.0
# What a worker says when another one has gone: the exceptions of decent_dp, and the words of gloo.
_PEER_GONE = re.compile(r"(decent_dp\.errors\.)?Peer(Lost|Timeout)?Error\b|.*\b(closed|reset) by peer\b", re.DOTALL)


@dataclass(frozen=True)
class Failure:
    """The end of a worker that failed.

    Attributes:
        code: its exit code, negative for a signal.
        message: the last line of its traceback; '' if it ended without an exception.
        time: when it failed, by this machine's clock.
        trace: its traceback, if known.
        was_ended: by the launcher, before it had failed.
    """

    rank: int
    code: int
    message: str
    time: float
    trace: str = ""
    was_ended: bool = False

    @property
    def follows_another(self) -> bool:
        """Whether the worker failed because another one did, or was ended by the launcher."""
        return self.was_ended or self.code == -signal.SIGTERM or _PEER_GONE.match(self.message) is not None

    def __str__(self) -> str:
        if self.message:
            return f"failed: {self.message}"
        if self.code < 0:
            try:
                name = signal.Signals(-self.code).name
            except ValueError:
                name = f"signal {-self.code}"
            return f"was killed by {name}{' (is the memory full?)' if name == 'SIGKILL' else ''}"
        return f"ended with exit code {self.code}" if self.code else "ended before it had a result (exit code 0)"


def cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that came first. The loss of a peer comes before no other failure."""
    return min(failures, key=lambda failure: (failure.follows_another, failure.time))


@dataclass(frozen=True)
class Ending:
    """How a run has ended.

    Attributes:
        finished: the ranks of the workers that ended well.
        first: the failure that came first, if none has, or if a failure ended all.
        signal: that ended the run; else 0.
        begun: whether there was a run that could go on, at the first failure.
    """

    finished: tuple[int, ...]
    first: Failure | None = None
    signal: int = 0
    begun: bool = True


def run_workers(
    nproc: int,
    command: Sequence[str],
    *,
    look: Callable[[str], Mapping[int, int] | None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    max_restarts: int = 0,
    attempt: int = 0,
    signals: Sequence[int] = (),
    end_s: float = 30.0,
    results: Path | None = None,
) -> Ending:
    """Runs a script on workers of this machine until all have ended.

    Args:
        command: as of ``script.main``, from the script on.
        look: returns the incarnations of the members of the run at the store HOST:PORT, by rank; None if no run is there that
            can go on without a worker. Then the first failure ends all.
        say: called with a line for each failure after which the others go on.
        max_restarts: how often each worker is started again; with its number of restarts in TORCHELASTIC_RESTART_COUNT.
        attempt: how often all workers were started before; a worker's number of restarts begins with it.
        signals: that end the run, and are handed on to the workers.
        end_s: seconds for the workers to end in after a signal.
        results: the folder in which each worker leaves a file with its rank for a name: without it none has ended well.
    """
    store = store_on()
    with tempfile.TemporaryDirectory(prefix="decent-dp-") as notes, _noted(signals) as heard:
        workers: list[_Worker] = []
        begun, deadline = True, float("inf")
        try:
            for rank in range(nproc):
                worker = _Worker(rank, Path(notes) / str(rank), results, worker_variables(rank, nproc, store.port))
                worker.start(command, attempt, max_restarts)
                workers.append(worker)
            while not heard and time.monotonic() < deadline and not all(worker.is_over for worker in workers):
                for worker in workers:
                    failure = worker.poll()
                    if failure is None:
                        continue
                    members = look(f"127.0.0.1:{store.port}") if begun else None
                    if members is None:
                        begun = False
                        # A worker that has lost another is not the cause, which is heard of in a moment.
                        deadline = min(deadline, time.monotonic() + (_CAUSE if failure.follows_another else 0.0))
                    else:
                        going_on, others = _who_goes_on(workers, members)
                        if others and worker.restarts < max_restarts:
                            worker.start(command, attempt, max_restarts, members.get(worker.rank, 0))
                            going_on += f", and it starts again (restart {worker.restarts} of {max_restarts})"
                        say(f"worker {worker.rank} of {nproc} {failure}; {going_on}")
                time.sleep(_POLL)
        finally:
            _end(workers, heard[0] if heard else signal.SIGTERM, end_s)
            del store  # a traceback that a notebook keeps would keep its server
        finished = tuple(worker.rank for worker in workers if worker.has_finished)
        # Of all: the worker that raised an error may end later than one that has lost it.
        for worker in workers:
            worker.poll()
        failures = [failure for worker in workers for failure in worker.failures]
    return Ending(finished, None if finished and begun else cause(failures), heard[0] if heard else 0, begun)


class _Worker:
    """One rank: its process, which may be a new one after a failure."""

    def __init__(self, rank: int, note: Path, results: Path | None, variables: Mapping[str, str]) -> None:
        self.rank, self.restarts = rank, -1
        # Of its processes, each of which has one at most.
        self.failures: list[Failure] = []
        # When the launcher has ended it, by this machine's clock.
        self.ended = math.inf
        # The incarnation that the run knew when the present process was started.
        self._former = 0
        self._note, self._result = note, None if results is None else results / str(rank)
        own = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(note)}
        self._environ = {**os.environ, **variables, **own}  # as other libraries know it of torchrun

    def start(self, command: Sequence[str], attempt: int, max_restarts: int, former: int = 0) -> None:
        """Starts the process, or another one in its place."""
        self.restarts += 1
        self._former = former
        self._note.unlink(missing_ok=True)
        line = [sys.executable, script.__file__, str(attempt + self.restarts), str(max_restarts), *command]
        # A session of its own: Ctrl-C reaches it once, from the launcher. It is also its process group.
        stdin = None if self._result is None else subprocess.DEVNULL  # a worker of spawn is no program of its own
        self.process = subprocess.Popen(line, env=self._environ, stdin=stdin, start_new_session=True)

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def has_finished(self) -> bool:
        return self.code == 0 and (self._result is None or self._result.exists())

    @property
    def is_over(self) -> bool:
        """Whether it has ended well, or its failure is known."""
        return self.has_finished or len(self.failures) > self.restarts

    def takes_part(self, members: Mapping[int, int]) -> bool:
        """Whether it runs, and need not join first."""
        return self.code is None and (self.restarts == 0 or members.get(self.rank, 0) > self._former)

    def poll(self) -> Failure | None:
        """A failure that is new. What the process had started does not outlive it."""
        if self.code is None or self.is_over:
            return None
        self.kill()
        message, trace, when = "", "", time.time()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have written another note
            found = json.loads(self._note.read_text(encoding="utf-8")).get("message")
            extra = found.get("extraInfo", {})
            message, trace, when = found.get("message", ""), extra.get("py_callstack", ""), extra.get("time", when)
        self.failures.append(Failure(self.rank, self.code, message, when, trace, when > self.ended))
        return self.failures[-1]

    def kill(self) -> None:
        """Kills the process, and what it has started. Called soon after its end, or others may have its number."""
        # The second one is macOS's, for processes that have ended.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _who_goes_on(workers: Sequence[_Worker], members: Mapping[int, int]) -> tuple[str, bool]:
    """After a failure: in words, and whether there are others that the worker could join."""
    running = sum(other.takes_part(members) for other in workers)
    if any(other.has_finished for other in workers):
        return "others have finished", False
    if running == 0:
        return "none is left that it could join", False
    return f"the other {running} go on" if running > 1 else "the other one goes on", True


def _end(workers: Sequence[_Worker], number: int, seconds: float) -> None:
    """Ends the workers that still run, with what they have started."""
    running = [worker for worker in workers if worker.code is None]
    for worker in running:
        worker.ended = time.time()
        worker.process.send_signal(number)
    deadline = time.monotonic() + seconds
    for worker in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if -number != worker.process.wait(max(0.0, deadline - time.monotonic())) < 0:
                worker.ended = math.inf  # it was about to end by a signal of its own
        worker.kill()
        worker.process.wait()


@contextlib.contextmanager
def _noted(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Inside, these signals are noted. One that is ignored (nohup) stays so."""
    heard: list[int] = []
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
