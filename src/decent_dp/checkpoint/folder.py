"""The checkpoints in one folder: which exist, which are complete, which run saves there, and which are removed.

    PATH/step-00000500-0-7-3f2a9c-of-8/  a checkpoint: before round 500, attempt 0, save 7, a run, of 8 workers
        worker-0000.safetensors ...      one shard per worker
    PATH/latest                          the name of the newest complete checkpoint. A hint: see below
    PATH/run                             the run that saves here

**A checkpoint is complete if the shards of all its workers are there.** Each worker writes its own by one rename, and nothing
else is needed. ``load`` decides it from the names that all workers see. Checkpoints are ordered by attempt and save: each load
begins a new attempt, which may go back to an earlier round.

One worker per disk, the lowest rank with a shard of the newest checkpoint there, writes ``latest`` and removes old checkpoints,
after all workers have reported that their shards of the newest are written. ``latest`` helps people, and tells an interrupted
first save from a checkpoint that was lost.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decent_dp.checkpoint.files import OLDER, Shard, now, read_small, replace_file, shard_name, sync_folder
from decent_dp.errors import CheckpointError

_log = logging.getLogger(__name__)

# The files beside the checkpoints.
_LATEST, _RUN = "latest", "run"
_NAME = re.compile(r"step-[0-9]{8,18}-([0-9]{1,9})-([0-9]{1,9})-[0-9a-f]{6}-of-([1-9][0-9]{0,5})")
# Before format 3 the number of workers was not in the name.
_OLD_NAME = re.compile(r"step-[0-9]{8,18}(-[0-9]{1,9}-[0-9]{1,9}-[0-9a-f]{6})?")
_SHARD = re.compile(r"worker-([0-9]{4,9})\.safetensors")
# The files that a save makes in a checkpoint's folder, safetensors' temporary files, and those that NFS keeps while in use.
_OURS = re.compile(rf"{_SHARD.pattern}(\.tmp)?|\.tmp\w+|\.nfs\w+")


def folder_of(path: Any) -> Path:
    """The user's ``path``, absolute. Raises TypeError or ValueError if it is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the folder for checkpoints, got {path!r}")
    if not os.fspath(path):
        raise ValueError("path must be the folder for checkpoints, got ''; the folder that the process is in is '.'")
    return Path(path).absolute()


def step_name(round_: int, attempt: int, number: int, run_id: str, world_size: int) -> str:
    """The name of a checkpoint's folder. All workers of a run make the same one, and no other run does."""
    return f"step-{round_:08d}-{attempt}-{number}-{hashlib.sha256(run_id.encode()).hexdigest()[:6]}-of-{world_size}"


def _order(name: str) -> tuple[int, int]:
    """The attempt and the number of the save; of a folder with a name of the user's, less than all others."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def make_folder(folder: Path) -> Path:
    """Makes a folder and those above it, if another worker has not. Durable when it returns."""
    if not folder.is_dir():
        if not folder.parent.is_dir():
            make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder: give another path, or move it away")
    # Also if another worker made it, as that worker may not have reached this line.
    sync_folder(folder.parent)
    return folder


# -- which exist -----------------------------------------------------------------------------------------------------------


def steps_in(root: Path) -> list[str]:
    """The names of checkpoints, complete or not, newest first."""
    return sorted(_folders(root, _NAME), key=_order, reverse=True)


def _folders(root: Path, pattern: re.Pattern[str]) -> list[str]:
    return [entry.name for entry in _scan(root) if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]


def ranks_in(folder: Path) -> list[int]:
    """The ranks whose shards are in a checkpoint's folder, sorted; of a folder that is gone none."""
    return sorted(int(match[1]) for entry in _scan(folder) if (match := _SHARD.fullmatch(entry.name)))


def is_step(path: Path) -> bool:
    """Whether a folder is one checkpoint, complete or not, rather than a folder of checkpoints."""
    return path.is_dir() if _NAME.fullmatch(path.name) else any(_SHARD.fullmatch(entry.name) for entry in _scan(path))


def _scan(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


@dataclass
class Sight:
    """One worker's view of a folder, in types of JSON.

    Attributes:
        only: the name of the checkpoint that was asked for, if the path was that of one.
        steps: by name of each checkpoint, newest first: how many workers saved it, and the ranks whose shards are there.
        latest: the name in the file ``latest``, '' if that is broken; None if there is no such file: none was complete here.
    """

    only: str | None = None
    steps: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    latest: str | None = None


def look(path: Path) -> tuple[Path, Sight]:
    """The folder of checkpoints, and what is in it; ``path`` may also be one checkpoint in it.

    Raises:
        CheckpointError: it cannot be read, is not a folder, or is of an older format: workers must not start from scratch then.
    """
    sight, root = Sight(), path
    try:
        try:
            os.lstat(path)
        except FileNotFoundError:  # else it may be a broken link, or unknown
            return path, sight
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise CheckpointError(
                f"{path} cannot be read: it is not a folder of checkpoints. A file that export() wrote is read by "
                "model.load_state_dict(safetensors.torch.load_file(path)), or of torch.load(path, weights_only=True)."
            )
        if is_step(path):
            root, sight.only = path.parent, path.name
            sight.steps[path.name] = _look_at(path)
        # `latest` comes first: it then never names a step that is written, or removed, after the steps were listed.
        sight.latest = _read_latest(root)
        sight.steps.update({name: _look_at(root / name) for name in steps_in(root)})
        if not sight.steps and (old := _folders(root, _OLD_NAME)):
            raise CheckpointError(f"{root / max(old)} {OLDER}")
        return root, sight
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _look_at(folder: Path) -> tuple[int, list[int]]:
    """How many workers saved a checkpoint, and the ranks whose shards are there."""
    ranks = ranks_in(folder)
    if (match := _NAME.fullmatch(folder.name)) is not None:
        return int(match[3]), ranks
    number = ranks[0] if ranks else 0  # a copy that the user has given another name
    with Shard(folder / shard_name(number), number) as shard:
        return shard.record.world_size, ranks


def _read_latest(root: Path) -> str | None:
    """See ``Sight``. A broken file does not matter, as the shards decide."""
    try:
        content = read_small(root / _LATEST)
    except OSError:
        return ""
    text = (content or b"").decode("ascii", "replace").strip()
    return None if content is None else text if _NAME.fullmatch(text) else ""


# -- which are complete ----------------------------------------------------------------------------------------------------


def complete(sights: Sequence[Sight]) -> list[str]:
    """The names of the checkpoints that are complete, newest first, by what all workers see."""
    return [name for name in _names(sights) if _missing_rank(name, sights) is None]


def attempt_of(sights: Sequence[Sight]) -> int:
    """The number of the attempt that begins with a load, which is after all others."""
    return max((_order(name)[0] + 1 for name in _names(sights)), default=0)


def _missing_rank(name: str, sights: Sequence[Sight]) -> int | None:
    """The first worker whose shard of a checkpoint is seen by no worker; None if it is complete."""
    seen = [sight.steps[name] for sight in sights if name in sight.steps]
    there = {rank for _, ranks in seen for rank in ranks}
    return next((rank for rank in range(max(n for n, _ in seen)) if rank not in there), None)


def choose(root: Path, sights: Sequence[Sight]) -> tuple[str, int] | None:
    """The checkpoint to load, and how many workers saved it; None if none has ever been complete.

    Raises:
        CheckpointError: it is not the newest that should be there, or only some workers see it.
    """
    asked = {sight.only for sight in sights} - {None}
    names = [name for name in _names(sights) if not asked or name in asked]
    passed: list[str] = []
    was_there = any(sight.latest is not None for sight in sights)
    for name in names:
        missing = _missing_rank(name, sights)
        blind = [rank for rank, sight in enumerate(sights) if name not in sight.steps or not sight.steps[name][1]]
        if missing is None and not blind:
            if passed:
                _log.warning("%s", "; ".join(passed))
            return name, sights[0].steps[name][0]
        if missing is not None:
            passed.append(f"{root / name} is incomplete: {shard_name(missing)} is missing")
            # A checkpoint that `latest` names was complete. If a worker has lost its folder, an older one may do.
            is_last = any(sight.latest == name for sight in sights) and all(name in sight.steps for sight in sights)
        else:
            passed.append(f"{root / name} is not seen by {_workers(blind)}")
            is_last, was_there = all(not sights[rank].steps for rank in blind), True
        if asked or is_last:
            was_there = True
            break
    if not was_there:
        if passed:
            _log.warning("%s", "; ".join(passed))
        return None
    if empty := [rank for rank, sight in enumerate(sights) if not sight.steps]:
        passed.append(f"{_workers(empty)} found none there")
    if not names:
        named = next((sight.latest for sight in sights if sight.latest), "one")
        passed.append(f"the file '{_LATEST}' names {named}, which was removed, or is on another disk")
    raise CheckpointError(
        f"no checkpoint in {root} can be loaded, and no worker starts from scratch while others resume: {'; '.join(passed)}. "
        "Give all workers their files, or the path of another checkpoint; or, for a fresh start, another folder."
    )


def _names(sights: Sequence[Sight]) -> list[str]:
    return sorted({name for sight in sights for name in sight.steps}, key=_order, reverse=True)


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# -- the run that saves here --------------------------------------------------------------------------------------------


def claim(root: Path, run_id: str, rank: int, *, may_take_over: bool) -> None:
    """Makes sure that this run is the one that saves in ``root``, and writes its name there.

    Raises:
        ValueError: another run saves there, and this one did not load from it (``may_take_over``).
        OSError: that file cannot be read or written.
    """
    own = hashlib.sha256(run_id.encode()).hexdigest()[:12]
    others = steps_in(root)  # before the file is read: a worker of this run writes it before its first shard
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(read_small(root / _RUN) or b"{}")
    found = found if isinstance(found, dict) else {}
    if found.get("run") == own:
        return
    if not may_take_over and others:
        whose = f"run {found.get('run')}, since {found.get('since')}, on {found.get('host')}" if found else "another run"
        raise ValueError(
            f"{root} has the checkpoints of {whose}: two runs in one folder would remove each other's. To continue that run, "
            "call load(model, path, missing_ok=True) before the first save; else give this one a folder of its own. Each "
            "wrapper of a script needs a folder of its own, too. (If this run has saved here before, the other one has loaded "
            "from the folder since, and continues it.)"
        )
    text = json.dumps({"run": own, "since": now(), "host": socket.gethostname()})
    replace_file(root / _RUN, lambda file: file.write_text(text), f"-{rank}")


# -- which are removed -----------------------------------------------------------------------------------------------------


def write_latest(root: Path, name: str, rank: int) -> None:
    """Writes ``name`` into ``latest``, unless a newer one is there: another worker may have removed this one by then."""
    if _order(_read_latest(root) or "") < _order(name):
        replace_file(root / _LATEST, lambda file: file.write_text(f"{name}\n"), f"-{rank}")


def prune(root: Path, newest: str, complete: Collection[str], keep: int, known: Collection[str]) -> None:
    """Removes old checkpoints.

    Args:
        newest: a complete checkpoint; only older ones are removed.
        complete: the complete ones; the last ``keep`` of them stay.
        known: the ones that may be removed.
    """
    older = [name for name in steps_in(root) if name in known and _order(name) < _order(newest)]
    stay = [name for name in older if name in complete][: keep - 1]
    for name in older:
        if name not in stay:
            remove(root / name)


def remove(folder: Path) -> None:
    """Removes a checkpoint. Files of the user's stay; what cannot be removed is logged."""
    removed = False
    try:
        for entry in list(_scan(folder)):
            if _OURS.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
                    removed = True
        os.rmdir(folder)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            _log.warning("the old checkpoint %s could not be removed: %s", folder, error.strerror or error)
        elif removed:
            _log.warning("%s is not a checkpoint any more, and stays: it has files that no save made", folder)


def remove_shard(folder: Path, rank: int) -> None:
    """Removes a worker's own shard of a checkpoint that never becomes complete, and the folder with the last one."""
    with contextlib.suppress(OSError):
        os.unlink(folder / shard_name(rank))
    with contextlib.suppress(OSError):
        os.rmdir(folder)
