"""Whether all workers have written their shards of one save.

A checkpoint is complete if its shards are there; nothing is decided here. The reports of the workers tell ``save`` when to
return and with which error, and when older checkpoints may be removed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from decent_dp.checkpoint.agreement import Gather
from decent_dp.errors import CheckpointError, OutOfStepError
from decent_dp.replica.consistency import error_of_worker, worker_counts

__all__ = ["Report", "is_quiet", "wait_for_reports"]


@dataclass(frozen=True)
class Report:
    """The result of a save on one worker.

    Attributes:
        round: of its replica.
        kind, text: of the error, if its shard was not written; else both are empty.
        name: of the checkpoint, if its shard was written.
    """

    round: int
    kind: str = ""
    text: str = ""
    name: str = ""

    @classmethod
    def of_error(cls, round_: int, error: BaseException) -> Report:
        return cls(round_, "CheckpointError" if isinstance(error, OSError) else type(error).__name__, str(error))


def is_quiet(error: Exception) -> bool:
    """Whether training continues without this checkpoint: its files could not be written."""
    return isinstance(error, (OSError, CheckpointError))


def wait_for_reports(gather: Gather, own: Report, name: str, timeout: float, workers: Collection[int]) -> Exception | None:
    """Sends the report of this worker, and waits for those of the others.

    Args:
        name: of the checkpoint, for errors.
        workers: the ranks of those that write its shards.

    Returns:
        Why the checkpoint is not complete; None if it is.

    Raises:
        PeerLostError, PeerTimeoutError, ConnectionError: as ``Gather.wait``.
    """
    gather.put(json.dumps(asdict(own)))
    texts = gather.wait(
        timeout,
        before=f"all shards of {name} were written",
        late=f"did not write a shard of {name} within {timeout:g} s: all workers must call save(...), at the same updates; or "
        "a disk is slow.",
    )
    reports = {rank: Report(**json.loads(text)) for rank, text in (texts or {}).items()}
    dead = sorted(set(workers) - reports.keys())
    if dead:
        return CheckpointError(f"worker {dead[0]} died before it had written its shard: earlier checkpoints are kept")
    return _failure(reports)


def _failure(reports: Mapping[int, Report]) -> Exception | None:
    for rank, report in reports.items():
        if report.kind:
            return error_of_worker(report.kind, report.text, f"worker {rank} could not write its shard")
    rounds = [report.round for report in reports.values()]
    if len(set(rounds)) > 1:
        counts = worker_counts(rounds, list(reports))
        return OutOfStepError(
            f"save needs all workers at the same update, and they have made different numbers ({counts}). "
            "Uneven numbers of batches need `with model.join():` around the loop, and save(...) after it."
        )
    first = min(reports)
    for rank, report in reports.items():
        if report.name != reports[first].name:
            return ValueError(
                f"the shards of the workers are of different checkpoints, {reports[first].name} of worker {first} and "
                f"{report.name} of worker {rank}: the workers have loaded from different folders. Load and save with the same "
                "path on all."
            )
    return None
