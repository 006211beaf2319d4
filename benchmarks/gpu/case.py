"""A case: a function that runs on each worker, and its tools."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from decent_dp.transport import InProcessTransport
from decent_dp.transport.in_process import LocalHub

How: TypeAlias = Literal["processes", "threads"]
Place: TypeAlias = tuple[How, int]

# Where cases run: how the workers are made, and how many there are.
ALONE: Place = ("threads", 1)
THREADS: Place = ("threads", 2)
TRIO_THREADS: Place = ("threads", 3)
PAIR: Place = ("processes", 2)
TRIO: Place = ("processes", 3)
SINGLE: Place = ("processes", 1)
QUARTET: Place = ("processes", 4)

# The drivers that cases are run with.
GOSSIP: Sequence[str] = ("gossip",)
BOTH: Sequence[str] = ("gossip", "wrapper")

# Seconds for which one worker of a case waits for another.
PATIENCE = 40.0


class SkipError(Exception):
    """A case cannot be run here; the message says why. Raised on all workers."""


class Meeting:
    """Exchange of values and transports between the threads of one case.

    Args:
        n: how many threads there are.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._barrier = threading.Barrier(n, timeout=PATIENCE)
        self._slots: list[Any] = [None] * n
        self._hubs: list[LocalHub] = []
        self._lock = threading.Lock()

    def gather(self, rank: int, value: object) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def transport(self, rank: int, number: int) -> InProcessTransport:
        """Returns the transport of the ``number``-th replica that the threads make together."""
        with self._lock:
            while len(self._hubs) <= number:
                self._hubs.append(LocalHub(self._n, PATIENCE))
        return self._hubs[number].transport(rank)

    def abort(self, rank: int) -> None:
        """Records that worker ``rank`` has failed: no worker waits for it any more."""
        self._barrier.abort()
        with self._lock:
            for hub in self._hubs:
                hub.lose(rank)


class Worker:
    """The tools of a case on one worker.

    Args:
        meeting: where threads meet; None for processes.
        folder: empty at the start of the case, the same on all workers.

    Attributes:
        driver: 'wrapper' or 'gossip'.
        device: where models and data belong.
        figures: measurements, for the JSON; those of worker 0 are kept.
    """

    def __init__(
        self, rank: int, n: int, driver: str, device: torch.device, folder: Path, meeting: Meeting | None = None
    ) -> None:
        self.rank, self.n, self.driver, self.device, self.folder = rank, n, driver, device, folder
        self.figures: dict[str, Any] = {}
        self._meeting = meeting
        self._replicas = 0

    @property
    def threads(self) -> bool:
        return self._meeting is not None

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def transport(self) -> InProcessTransport | None:
        """Returns the transport for a new replica; None for that of the process group."""
        if self._meeting is None:
            return None
        self._replicas += 1
        return self._meeting.transport(self.rank, self._replicas - 1)

    def gather(self, value: object) -> list[Any]:
        """Returns the values of all workers, by rank. Called by all; tensors must be on the CPU."""
        if self._meeting is not None:
            return self._meeting.gather(self.rank, value)
        found: list[Any] = [None] * self.n
        dist.all_gather_object(found, value)
        return found


def raised(kind: type[Exception], call: Callable[[], object], *words: str) -> str:
    """Returns the first line of the error of this kind that ``call`` must raise, with one of ``words`` in it."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
    if not any(word in text for word in words):
        raise AssertionError(f"the {kind.__name__} says nothing of {' or '.join(words)}: {text}")
    return text.partition("\n")[0]


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The texts of the warnings of this logger and those below it, which workers do not print otherwise."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, listener = logging.getLogger(name), Listener(logging.WARNING)
    before = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]


Body: TypeAlias = Callable[[Worker], str | None]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        body: returns a remark for the row; raises if something is wrong.
        timeout: seconds after which its workers are ended.
        alone: the workers may be unusable after it: those of the next case are new.
        optional: a failure is reported and not counted; asked for when the case has failed.
        quiet: it measures time, or the memory of the whole device, and runs when no other case does.
        dies: the rank whose process ends itself; None if none does.
    """

    name: str
    body: Body
    driver: str
    how: How
    n: int
    timeout: float = 90.0
    alone: bool = False
    optional: Callable[[], bool] = lambda: False
    quiet: bool = False
    dies: int | None = None

    @property
    def key(self) -> str:
        return f"{self.name} [{self.driver}, {self.n} {self.how}]"

    @property
    def processes(self) -> int:
        return self.n if self.how == "processes" else 1


# All cases, by key.
CASES: dict[str, Case] = {}


def case(
    name: str,
    *places: Place,
    drivers: Sequence[str] = BOTH,
    timeout: float = 90.0,
    alone: bool = False,
    optional: Callable[[], bool] = lambda: False,
    quiet: bool = False,
    dies: int | None = None,
) -> Callable[[Body], Body]:
    """Registers a function as a case, once for each driver and place."""

    def register(body: Body) -> Body:
        for how, n in places:
            for driver in drivers:
                made = Case(name, body, driver, how, n, timeout, alone, optional, quiet, dies)
                assert made.key not in CASES, f"two cases are called {made.key}"
                CASES[made.key] = made
        return body

    return register
