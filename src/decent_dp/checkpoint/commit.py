"""How workers that wait for nobody find out whether a checkpoint is complete.

Each save has a few pages in the store. Every worker hands in a record of what it has written. Whoever hands in the last one
puts all of them on one page, unless somebody has given up before: a count decides between the two, so that there is one
outcome. When all have been handed in, the first worker of each folder completes the checkpoint there, and the last of these
posts the verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decent_dp import errors
from decent_dp.errors import CheckpointError, OutOfStepError, PeerError, PeerLostError, PeerTimeoutError
from decent_dp.replica.consistency import worker_counts
from decent_dp.transport.base import Transport, read_text, store_errors

__all__ = ["Pages", "Record", "UndecidedError", "check_records", "first_workers", "is_quiet"]

# Seconds between two looks at the store: short at first, as others are often just about to post.
_FIRST_LOOK, _LAST_LOOK = 0.002, 0.05
# Seconds to wait for a page that must be there any moment.
_ANY_MOMENT = 5.0
_FINE = "fine"


@dataclass(frozen=True)
class Record:
    """What one worker has written.

    Attributes:
        round: of its replica.
        folder: a name of the folder on its disk: workers with the same one see the same files.
        name, bytes, sha256: of its file.
        kind, text: of the error, where it could not be written; else both are empty.
    """

    round: int
    folder: str = ""
    name: str = ""
    bytes: int = 0
    sha256: str = ""
    kind: str = ""
    text: str = ""

    @classmethod
    def of_error(cls, round_: int, error: BaseException) -> Record:
        return cls(round_, kind="OSError" if isinstance(error, OSError) else type(error).__name__, text=_in_words(error))


def is_quiet(error: Exception) -> bool:
    """Whether training goes on without this checkpoint: its files could not be written."""
    return isinstance(error, (OSError, CheckpointError)) and not isinstance(error, ConnectionError)


class UndecidedError(PeerTimeoutError):
    """No word has come of how it ended, so it may have ended in any way."""


class Pages:
    """The pages of one save.

    Args:
        transport: whose store they are in.
        number: of this save, counted from 0.
        name: of the checkpoint, for errors.
    """

    def __init__(self, transport: Transport, number: int, name: str) -> None:
        self._transport = transport
        self._name, self._where = name, f"checkpoint/{number}"
        self._posted: list[str] = []

    def hand_in(self, record: Record) -> None:
        """Says what this worker has written, or why not."""
        self._post(f"worker/{self._transport.rank}", asdict(record))
        if self._count("workers") == self._transport.world_size and self._decide():
            self._gather()

    def records(self) -> list[Record]:
        """What all have handed in, by rank.

        Raises:
            PeerLostError: a worker is gone that has not handed in anything; on all workers, as the next.
            PeerTimeoutError: one has not within the timeout.
            UndecidedError: nobody has said which of these it is.
            ConnectionError: the store does not answer.
        """
        everybody = range(self._transport.world_size)

        def settle(absent: list[int], gone: list[int]) -> None:
            if not self._decide():
                return  # somebody else has, and posts the outcome
            if absent:
                error = self._cause(absent, gone, "a part", "save(...) is to be called by all workers, at the same updates")
                self._post("records", {"kind": type(error).__name__, "text": str(error)})
            else:
                self._gather()

        found = self._await("records", "worker", everybody, settle)
        if isinstance(found, dict):
            raise getattr(errors, found["kind"])(found["text"])
        return [Record(**record) for record in found]

    def completed(self, first: Sequence[int], error: Exception | None) -> None:
        """Says that this worker, one of the ``first`` of a folder each, has completed the checkpoint there, or why not."""
        self._post(f"first/{self._transport.rank}", _FINE if error is None else _in_words(error))
        if self._count("first") == len(first):
            self._conclude(first)

    def verdict(self, first: Sequence[int]) -> dict[int, str]:
        """What went wrong with whom of the ``first``; empty when the checkpoint is complete.

        Raises:
            PeerLostError, PeerTimeoutError: a first worker is gone or late; its folder may yet be complete.
            UndecidedError, ConnectionError: as for ``records``.
        """

        def settle(absent: list[int], gone: list[int]) -> None:
            if absent:
                raise self._cause(absent, gone, "the completion", "its disk may be slow")
            self._conclude(first)  # whoever posts it posts the same

        found: dict[str, str] = self._await("verdict", "first", first, settle)
        return {int(rank): text for rank, text in found.items()}

    def clear(self) -> None:
        """Empties the pages that this worker has posted. All must have handed in their records of a later save."""
        for page in self._posted:
            with store_errors():
                self._transport.store.set(page, "")

    def _gather(self) -> None:
        self._post("records", [self._read(f"worker/{rank}") for rank in range(self._transport.world_size)])

    def _conclude(self, first: Sequence[int]) -> None:
        said = {rank: self._read(f"first/{rank}") for rank in first}
        self._post("verdict", {rank: text for rank, text in said.items() if text != _FINE})

    def _decide(self) -> bool:
        """Whether it is this worker's to say whether all have come."""
        return self._count("decided") == 1

    def _await(self, page: str, kind: str, ranks: Iterable[int], settle: Callable[[list[int], list[int]], None]) -> Any:
        """What is on ``page``, which whoever posts the last of the pages ``kind`` of ``ranks`` should post.

        When somebody is gone or late, ``settle`` is called once, with those whose page is missing and those of them that are
        gone.
        """
        pause, deadline, settled = _FIRST_LOOK, time.monotonic() + self._transport.timeout, False
        while (found := self._read(page)) is None:
            late, lost = time.monotonic() > deadline, self._transport.lost()
            if late and settled:
                raise UndecidedError(
                    f"it is not known whether {self._name} has become complete: the worker that was to say so is gone, or "
                    f"slower than {self._transport.timeout:g} s. `latest` names it if it has."
                )
            if (late or lost) and not settled:
                absent = [rank for rank in ranks if self._read(f"{kind}/{rank}") is None]
                gone = [rank for rank in absent if rank in lost]
                # None absent: whoever was to post the page is about to, or has gone before it could.
                if late or gone or not absent:
                    settled, deadline = True, time.monotonic() + _ANY_MOMENT
                    settle(absent, gone)
                    continue
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        return found

    def _cause(self, absent: Sequence[int], gone: Sequence[int], part: str, advice: str) -> PeerError:
        ranks = gone or absent
        who = f"worker{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
        if gone:
            return PeerLostError(f"lost {who} before {part} of {self._name} was there.")
        seconds = f"{self._transport.timeout:g} s"
        return PeerTimeoutError(f"{part} of {self._name} did not come from {who} within {seconds}: {advice}.")

    def _post(self, page: str, content: Any) -> None:
        key = f"{self._where}/{page}"
        with store_errors():
            self._transport.store.set(key, json.dumps(content))
        self._posted.append(key)

    def _read(self, page: str) -> Any:
        with store_errors():
            text = read_text(self._transport.store, f"{self._where}/{page}")
        return json.loads(text) if text else None

    def _count(self, page: str) -> int:
        with store_errors():
            return int(self._transport.store.add(f"{self._where}/{page}", 1))


def check_records(records: Sequence[Record]) -> Exception | None:
    """Why the parts of all workers make no checkpoint; None when they do."""
    for rank, record in enumerate(records):
        if record.kind:
            kind = CheckpointError if record.kind in ("OSError", "CheckpointError") else RuntimeError
            return kind(f"worker {rank} could not write its part: {record.text}")
    rounds = [record.round for record in records]
    if len(set(rounds)) > 1:
        return OutOfStepError(
            f"save needs all workers at the same update, and they have made different numbers ({worker_counts(rounds)}). "
            "Uneven numbers of batches need `with model.join():` around the loop, and save(...) after it."
        )
    return None


def first_workers(records: Sequence[Record]) -> list[int]:
    """The first worker of each folder, which completes the checkpoint there."""
    first: dict[str, int] = {}
    for rank, record in enumerate(records):
        first.setdefault(record.folder, rank)
    return list(first.values())


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, (OSError, CheckpointError)) else f"{type(error).__name__}: {error}"
