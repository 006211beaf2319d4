"""The checkpoints of one path: their names, which of them are complete, and what is removed.

    PATH/latest                        names of complete checkpoints, newest first, one a line; replaced in one rename
    PATH/step-00000500-3f2a9c/         a checkpoint: worker-0000.safetensors …, manifest.json
        unlisted                       there while ``latest`` does not name it yet, or is about to name it no more

A folder with the mark ``unlisted`` that ``latest`` does not name belongs to a save that was interrupted, or is to be
removed. One without it and without the name in ``latest`` is the user's own copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from decent_dp.checkpoint.files import MANIFEST, Manifest, read_text, sync_folder, write_manifest, write_text
from decent_dp.errors import CheckpointError

__all__ = [
    "LATEST",
    "commit",
    "complete",
    "discard",
    "folder_name",
    "is_checkpoint",
    "leftovers",
    "make_folder",
    "prune",
    "read_latest",
    "switch_latest",
]

logger = logging.getLogger(__name__)

LATEST = "latest"
_MARK = "unlisted"
_NAME = re.compile(r"step-[0-9]{8,}-[0-9a-f]{6}")


def folder_name(round_: int, run_id: str, ordinal: int) -> str:
    """The name of a checkpoint's folder: all workers come to the same without a word, and no other save has it.

    Args:
        round_: the round that comes next.
        run_id: of this run of the job; drawn anew at each start.
        ordinal: the how-manieth save of this run.
    """
    suffix = hashlib.sha256(f"{run_id}/{ordinal}".encode()).hexdigest()[:6]
    return f"step-{round_:08d}-{suffix}"


def make_folder(path: Path, name: str) -> Path:
    """The folder of a checkpoint, made if another worker has not yet. Durable when it returns.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    folder = path / _checked(name)
    _make(folder)
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, and a checkpoint must be a folder: remove it")
    return folder


def _make(folder: Path) -> None:
    if not folder.is_dir():
        _make(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder: give another path, or move it away")
    # Also when another worker made it: it may not have come to this yet.
    sync_folder(folder.parent)


# -- which there are -------------------------------------------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, whatever its name."""
    return (folder / MANIFEST).is_file()


def read_latest(path: Path) -> list[str]:
    """The names in ``latest``, newest first; [] when nothing has been saved.

    Raises:
        CheckpointError: the file is broken.
    """
    file = path / LATEST
    if not os.path.lexists(file):
        return []
    names = read_text(file, f"{path} holds no checkpoint").split("\n")
    wrong = [name for name in names[:-1] if not _NAME.fullmatch(name)]
    if wrong or names[-1] or len(names) < 2 or len(set(names)) < len(names):
        what = f"{wrong[0][:80]!r} is no name of a checkpoint" if wrong else "it is not a list of names, one a line"
        raise CheckpointError(
            f"{file} cannot be used: {what}. Remove the file, and load one of the folders beside it by its path."
        )
    return names[:-1]


def complete(path: Path) -> list[str]:
    """The names in ``latest`` whose folders are there with a manifest, newest first.

    Raises:
        CheckpointError: ``latest`` is broken.
    """
    return [name for name in read_latest(path) if _is_folder(path / name) and is_checkpoint(path / name)]


# -- the switch ------------------------------------------------------------------------------------------------------------


def commit(path: Path, name: str, manifest: Manifest, keep: int) -> list[str]:
    """Makes a checkpoint whose worker files are all durable the newest, and removes what is no longer kept.

    One worker of those that share a path does this, one save after another. When it is interrupted, ``latest`` names what it
    named or this one too; the next commit removes what is left over.

    Args:
        path: of the checkpoints.
        name: the folder in it.
        manifest: its manifest.
        keep: how many checkpoints to keep, at least 1.

    Returns:
        The names in ``latest`` now, newest first.

    Raises:
        OSError: it could not be written. ``latest`` is as it was then, unless only it could not be made durable.
        CheckpointError: ``latest`` is broken.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep!r}")
    folder = path / _checked(name)
    before = read_latest(path)
    names = [name, *(other for other in before if other != name)][:keep]
    try:
        _mark(folder)
        write_manifest(folder, manifest)
        for other in before:
            if other not in names and _is_folder(path / other):
                _mark(path / other)
        switch_latest(path, names)
    except OSError:
        if name not in read_latest(path):
            prune(path)
        raise
    for kept in names:
        with contextlib.suppress(OSError):
            os.unlink(path / kept / _MARK)
    prune(path)
    return names


def switch_latest(path: Path, names: Sequence[str]) -> None:
    """Replaces ``latest`` in one rename. Durable when it returns.

    Raises:
        OSError: it could not be written.
    """
    write_text(path / LATEST, "".join(f"{_checked(name)}\n" for name in names))


# -- what is removed -------------------------------------------------------------------------------------------------------


def prune(path: Path) -> list[str]:
    """Removes the folders that are marked and not named by ``latest``.

    What cannot be removed is logged, and tried again the next time.

    Returns:
        The names of those that are gone.

    Raises:
        CheckpointError: ``latest`` is broken.
    """
    named = set(read_latest(path))
    return _remove(path, [name for name in _folders(path) if name not in named and (path / name / _MARK).exists()])


def leftovers(path: Path) -> list[str]:
    """Folders of saves that never became complete: look before a run's first save, and :func:`discard` them after it.

    Raises:
        CheckpointError: ``latest`` is broken.
    """
    named = set(read_latest(path))
    return [name for name in _folders(path) if name not in named and not is_checkpoint(path / name)]


def discard(path: Path, names: Iterable[str]) -> list[str]:
    """Removes these folders where ``latest`` does not name them and they have no manifest. What cannot be removed is logged.

    Returns:
        The names of those that are gone.

    Raises:
        CheckpointError: ``latest`` is broken.
    """
    there = set(leftovers(path))
    return _remove(path, [name for name in names if name in there])


def _remove(path: Path, names: Iterable[str]) -> list[str]:
    gone = []
    for name in names:
        try:
            _remove_folder(path / name)
            gone.append(name)
        except FileNotFoundError:
            gone.append(name)  # somebody else has
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path / name, error.strerror or error)
    return gone


def _remove_folder(folder: Path) -> None:
    """Removes a folder of plain files: first the manifest, so that it is incomplete at once, and last the mark."""
    _unlink(folder / MANIFEST)
    sync_folder(folder)
    for entry in _entries(folder):
        if entry.name != _MARK and not entry.is_dir(follow_symlinks=False):
            _unlink(Path(entry.path))
    if any(entry.name != _MARK for entry in _entries(folder)):
        raise OSError("something in it is in use, or no file")
    _unlink(folder / _MARK)
    os.rmdir(folder)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _unlink(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)


def _mark(folder: Path) -> None:
    with open(folder / _MARK, "wb"):
        pass
    sync_folder(folder)


def _folders(path: Path) -> list[str]:
    entries = _entries(path) if path.is_dir() else []
    return sorted(e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False))


def _is_folder(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(folder).st_mode)
    except OSError:
        return False


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a checkpoint's folder: use folder_name")
    return name
