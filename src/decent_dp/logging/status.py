"""The status of a worker: what it says of itself once per second, and where.

Each worker writes a file in a private folder of its machine and user, and an entry in the store of the process group. The file
serves a look from the same machine, and needs no address; the store serves all others. Nothing new listens.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType

from decent_dp.transport.store import connect_store, read_text

__all__ = ["BEAT", "SILENT", "FolderEntries", "Status", "StoreEntries", "open_folder"]

# Seconds between two statuses of a worker, and after which one that has come no more counts as silent.
BEAT, SILENT = 1.0, 5.0
# Seconds after which a file is of a worker that is gone: if its process is gone, and in any case.
_STALE, _OLD = 10.0, 3600.0
# Runs in a store that are looked at, from the newest.
_RUNS = 20


@dataclass(frozen=True)
class Status:
    """What one worker says of itself, and of its run.

    Attributes:
        run: its id.
        name: the script and the model.
        store: 'host:port' of the store; '' if there is none that others can reach.
        began: when it began to publish, in seconds by the clock of its machine.
        beat: counts its statuses. Clocks of machines differ, so that the reader measures the time between two of them.
        idle_s: seconds since its last round.
        step_ms, waited_ms, mbit_s: over the last rounds; None before the second round.
        distance: the last ``consensus_distance()``; None if there was none.
    """

    run: str
    name: str
    world_size: int
    store: str
    rank: int
    host: str
    pid: int
    began: float
    beat: int
    round: int
    idle_s: float
    step_ms: float | None
    waited_ms: float | None
    mbit_s: float | None
    distance: float | None

    @classmethod
    def from_json(cls, text: str) -> Status | None:
        """Returns None if ``text`` is something else."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            found = cls(**json.loads(text))
            if all(isinstance(getattr(found, field.name), _TYPES[str(field.type)]) for field in fields(cls)):
                return found
        return None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


# The annotations are strings here.
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, NoneType),
}


# -- on this machine -------------------------------------------------------------------------------------------------------


def open_folder() -> Path:
    """Returns the folder of this user's statuses on this machine, which is made if it is missing.

    Raises:
        PermissionError: others could write there.
        OSError: it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f"decent_dp-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is to be a folder of this user alone (mode 700), and is not: remove it.")
    return path


class PlaceOfStatuses(ABC):
    """Where workers leave their statuses."""

    @abstractmethod
    def runs(self) -> Sequence[Status]:
        """Returns one status of each run, from the oldest run to the newest."""

    @abstractmethod
    def _text(self, run: str, rank: int) -> str: ...

    def statuses(self, run: Status) -> dict[int, Status]:
        """Returns the statuses of a run by rank."""
        texts = (self._text(run.run, rank) for rank in range(run.world_size))
        return {rank: found for rank, text in enumerate(texts) if (found := Status.from_json(text)) is not None}


class FolderEntries(PlaceOfStatuses):
    """The statuses of the workers on this machine, as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, status: Status) -> None:
        path = self._path(status.run, status.rank)
        beside = path.with_suffix(".new")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(status.to_json())
        os.replace(beside, path)

    def remove(self, run: str, rank: int) -> None:
        self._path(run, rank).unlink(missing_ok=True)

    def runs(self) -> Sequence[Status]:
        """As the base class; also removes the files of workers that are gone."""
        found: dict[str, Status] = {}
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # it has just been removed
                age = time.time() - path.stat().st_mtime
                status = Status.from_json(path.read_text(encoding="utf-8", errors="replace"))
                if age > _OLD or (age > _STALE and (status is None or not _exists(status.pid))):
                    path.unlink()
                elif status is not None and path.suffix == ".json":
                    found[status.run] = min(found.get(status.run, status), status, key=lambda status: status.began)
        return sorted(found.values(), key=lambda status: status.began)

    def _text(self, run: str, rank: int) -> str:
        with contextlib.suppress(OSError):
            return self._path(run, rank).read_text(encoding="utf-8", errors="replace")
        return ""

    def _path(self, run: str, rank: int) -> Path:
        return self._folder / f"{run}-{rank}.json"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


# -- in the store ----------------------------------------------------------------------------------------------------------


class StoreEntries(PlaceOfStatuses):
    """The statuses of all workers, in the store of their process group, through a connection of its own.

    Any call raises RuntimeError if the server is gone, and hangs if it is stopped.
    """

    def __init__(self, address: str, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._store = connect_store(host.strip("[]"), int(port), "decent_dp-status", seconds)

    def announce(self, run: Status) -> None:
        """Makes the run of this worker known; called by one worker."""
        self._store.set(f"run/{self._store.add('runs', 1)}", run.to_json())

    def write(self, status: Status) -> None:
        self._store.set(f"status/{status.run}/{status.rank}", status.to_json())

    def remove(self, run: str, rank: int) -> None:
        # Not deleted: a reader that has found it there would wait for it.
        self._store.set(f"status/{run}/{rank}", "")

    def runs(self) -> Sequence[Status]:
        last = self._store.add("runs", 0)
        numbers = range(max(1, last - _RUNS + 1), last + 1)
        runs = [Status.from_json(read_text(self._store, f"run/{number}") or "") for number in numbers]
        return [run for run in runs if run is not None and any(self._text(run.run, rank) for rank in range(run.world_size))]

    def _text(self, run: str, rank: int) -> str:
        return read_text(self._store, f"status/{run}/{rank}") or ""
