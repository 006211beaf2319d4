"""Whether all workers have written their shards of one save, from reports in the store that they share.

Nothing is decided here: a checkpoint is complete if its shards are there. The reports tell ``save`` when to return and with
which error, and when older checkpoints may be removed. Any worker may compute the result, as it follows from the reports.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from decent_dp.errors import CheckpointError, OutOfStepError, PeerError, PeerLostError, PeerTimeoutError
from decent_dp.replica.consistency import error_of_worker, worker_counts
from decent_dp.transport.base import Transport, read_text, store_errors

__all__ = ["Completion", "Report", "is_quiet"]

# Seconds between two looks at the store: short at first, as others are often about to report.
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.05


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


class Completion:
    """The reports of one save.

    Args:
        number: of this save of its replica, from 0.
        name: of the checkpoint, for errors.
    """

    def __init__(self, transport: Transport, number: int, name: str) -> None:
        self._transport, self._store = transport, transport.store
        self._name, self._where = name, f"checkpoint/{number}"

    def wait(self, report: Report) -> Exception | None:
        """Reports, and waits for the reports of the others.

        Returns:
            Why the checkpoint is not complete; None if it is.

        Raises:
            PeerLostError, PeerTimeoutError: a worker has not reported and is gone, or has not within the timeout.
            ConnectionError: the store does not answer.
        """
        with store_errors():
            self._report(report)
            found = self._reports()
        if isinstance(found, PeerError):  # raised here, as it is a RuntimeError like those of the store
            raise found
        return _failure(found)

    def _report(self, report: Report) -> None:
        rank, n = self._transport.rank, self._transport.world_size
        self._store.set(f"{self._where}/{rank}", json.dumps(asdict(report)))
        if self._store.add(f"{self._where}/count", 1) == n:
            self._gather()

    def _reports(self) -> list[Report] | PeerError:
        n, pause, deadline = self._transport.world_size, _FIRST_LOOK, time.monotonic() + self._transport.timeout
        while not (text := read_text(self._store, f"{self._where}/all")):
            late, lost = time.monotonic() > deadline, self._transport.lost()
            if late or lost:
                absent = [other for other in range(n) if not self._store.check([f"{self._where}/{other}"])]
                gone = [other for other in absent if other in lost]
                if not absent:
                    self._gather()  # whoever reported last died before it could
                elif late or gone:
                    return self._cause(absent, gone)
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        return [Report(**own) for own in json.loads(text)]

    def clear(self) -> None:
        """Empties what this worker has set, once all have reported for a later save."""
        with store_errors():
            for key in (
                f"{self._where}/{self._transport.rank}",
                *([f"{self._where}/all"] if self._transport.rank == 0 else []),
            ):
                self._store.set(key, "")

    def _gather(self) -> None:
        reports = [json.loads(self._store.get(f"{self._where}/{rank}")) for rank in range(self._transport.world_size)]
        self._store.set(f"{self._where}/all", json.dumps(reports))

    def _cause(self, absent: list[int], gone: list[int]) -> PeerError:
        ranks = gone or absent
        workers = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
        if gone:
            return PeerLostError(f"lost {workers} before the shard of {self._name} was written there.")
        return PeerTimeoutError(
            f"{workers} did not write a shard of {self._name} within {self._transport.timeout:g} s: all workers must call "
            "save(...), at the same updates; or a disk is slow."
        )


def _failure(reports: list[Report]) -> Exception | None:
    for rank, report in enumerate(reports):
        if report.kind:
            return error_of_worker(report.kind, report.text, f"worker {rank} could not write its shard")
    rounds = [report.round for report in reports]
    if len(set(rounds)) > 1:
        return OutOfStepError(
            f"save needs all workers at the same update, and they have made different numbers ({worker_counts(rounds)}). "
            "Uneven numbers of batches need `with model.join():` around the loop, and save(...) after it."
        )
    for rank, report in enumerate(reports):
        if report.name != reports[0].name:
            return ValueError(
                f"the shards of the workers are of different checkpoints, {reports[0].name} of worker 0 and {report.name} of "
                f"worker {rank}: the workers have loaded from different folders. Load and save with the same path on all."
            )
    return None
