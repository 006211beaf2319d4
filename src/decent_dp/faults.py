"""What a run does when workers die, freeze or cannot be reached: the policy ``Tolerate``, and the times that follow from it."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from decent_dp._checks import check_choice, check_integer, check_number

__all__ = ["Roster", "Tolerate", "check_faults", "check_run", "default_dead_after", "most_workers"]

# Seconds without a sign of life after which a worker is an error, in runs without ``faults``.
_DEAD_AFTER = "DECENT_DP_DEAD_AFTER"
_POLICIES = ("follow", "train", "stop")
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Tolerate:
    """The run continues when workers die, freeze or cannot be reached.

    An edge with such a worker is a hole: its other end sits the round out, and nobody else waits. The mean over the other
    workers stays exact.

    Args:
        dead_after: seconds without a sign of life after which a worker counts as dead. After 0.3 of it its edges are holes.
        min_workers: training ends with an error on a worker that knows of fewer living ones, itself included.
        partition: what a worker does that is cut off: it has heard no other one for ``orphan_for`` seconds, and some may live.
            'follow' makes no more rounds until it hears one, for at most the process group's timeout. 'stop' ends with an
            error. 'train' continues alone.
        orphan_for: in seconds. A call of all workers (a mean, a save) with 'follow' waits at once.
        max_workers: how many workers there can be at a time, for processes that join in addition to those that began the run;
            None: as many as began it.
        run: the name of the run in its store, for ``join`` and ``decent-dp status`` where several runs use one store: up to 64
            letters and digits, '-', '_' and '.'. A living run of this name at the store is an error on all workers; one that
            is over is replaced. None: it is drawn.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    dead_after: float = 10.0
    min_workers: int = 2
    partition: str = "follow"
    orphan_for: float = 60.0
    max_workers: int | None = None
    run: str | None = None

    def __post_init__(self) -> None:
        check_number("dead_after", self.dead_after, "a number of seconds, at least 0.5", at_least=0.5)
        check_integer("min_workers", self.min_workers, 1, "workers")
        check_choice("partition", self.partition, _POLICIES)
        check_number("orphan_for", self.orphan_for, "a number of seconds, at least 0", at_least=0.0)
        if self.max_workers is not None:
            check_integer("max_workers", self.max_workers, 1, "workers")
        check_run(self.run)

    def signature(self) -> dict[str, Any]:
        """The settings, as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Roster:
    """The members, as far as this worker knows.

    Attributes:
        epoch: counted up when the members change.
        seat: this worker's position in the topology; -1 if it was left out and is not back yet.
        size: the number of positions.
        members: the ranks of the workers by seat; of sharded replicas, their numbers.
        holes: the seats whose exchanges with this worker are left out now, because they are gone or silent.
        start: its first round, which may be ahead.
        dealt: the shares of data that belong to all rounds before ``start``, one for each seat and round (``RosterSampler``).
    """

    epoch: int
    seat: int
    size: int
    members: tuple[int, ...]
    holes: tuple[int, ...]
    start: int = field(default=0, repr=False)
    dealt: int = field(default=0, repr=False)

    def dealt_before(self, round_: int) -> int:
        """The shares that belong to all rounds before ``round_``, as far as they depend on this roster."""
        return self.dealt + (round_ - self.start) * self.size


def check_faults(faults: object) -> Tolerate | None:
    """Returns ``faults``.

    Raises:
        TypeError: it is neither None nor a ``Tolerate``.
    """
    if faults is None or isinstance(faults, Tolerate):
        return faults
    raise TypeError(f"faults must be None or a decent_dp.Tolerate, such as Tolerate(dead_after=10.0), got {faults!r}")


def check_run(run: object) -> str | None:
    """Returns ``run``, the name of a run.

    Raises:
        TypeError, ValueError: it is neither None nor a name.
    """
    if run is None or (isinstance(run, str) and _RUN.fullmatch(run)):
        return run
    error = ValueError if isinstance(run, str) else TypeError
    raise error(f"run must be None or a name of up to 64 letters and digits, '-', '_' and '.', got {run!r}")


def most_workers(faults: object) -> int:
    """``max_workers`` of the argument ``faults``, which may be wrong; 0 if there is none."""
    most = faults.max_workers if isinstance(faults, Tolerate) else None
    return most or 0


def default_dead_after() -> float:
    """Returns the seconds of ``DECENT_DP_DEAD_AFTER``, or those of ``Tolerate``.

    Raises:
        ValueError: the variable is no number of at least 0.5.
    """
    text = os.environ.get(_DEAD_AFTER, "").strip()
    if not text:
        return Tolerate.dead_after
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    return check_number(f"the environment variable {_DEAD_AFTER}", seconds, "a number of seconds, at least 0.5", at_least=0.5)
