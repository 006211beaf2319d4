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
from typing import Any

from decent_dp.checkpoint.files import (
    MANIFEST,
    FileInfo,
    Manifest,
    check_present,
    read_text,
    sync_folder,
    write_manifest,
    write_text,
)
from decent_dp.errors import CheckpointError

__all__ = [
    "LATEST",
    "commit",
    "complete",
    "discard",
    "exists",
    "folder_name",
    "folder_of",
    "is_checkpoint",
    "is_unfinished",
    "leftovers",
    "make_folder",
    "make_path",
    "prune",
    "read_latest",
    "switch_latest",
]

logger = logging.getLogger(__name__)

LATEST = "latest"
_MARK = "unlisted"
_NAME = re.compile(r"step-[0-9]{8,}-[0-9a-f]{6}")
# What a save makes in a checkpoint's folder, with what safetensors writes into, and what NFS keeps of a file in use.
_PART = re.compile(r"worker-[0-9]{4,}\.safetensors(\.tmp)?")
_OURS = re.compile(rf"{_PART.pattern}|manifest\.json(\.tmp)?|{_MARK}|\.tmp\w+|\.nfs\w+")


def folder_of(path: Any) -> Path:
    """The user's ``path``, if it may be one.

    Raises:
        TypeError, ValueError: it may not.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the folder for checkpoints, got {path!r}")
    if not os.fspath(path):
        raise ValueError("path must be the folder for checkpoints, got ''; the folder that the process is in is '.'")
    return Path(path).absolute()


def folder_name(round_: int, run_id: str, ordinal: int) -> str:
    """The name of a checkpoint's folder: all workers come to the same without a word, and no other save has it.

    Args:
        round_: the round that comes next.
        run_id: of this run of the job; drawn anew at each start.
        ordinal: number of the save in this run, from 0.
    """
    suffix = hashlib.sha256(f"{run_id}/{ordinal}".encode()).hexdigest()[:6]
    return f"step-{round_:08d}-{suffix}"


def make_folder(path: Path, name: str) -> Path:
    """The folder of a checkpoint, made if another worker has not yet. Durable when it returns.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    folder = path / _checked(name)
    make_path(folder)
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, and a checkpoint must be a folder: remove it")
    return folder


def make_path(folder: Path) -> None:
    """Makes a folder and those above it. Durable when it returns; OSError when it cannot be made."""
    if not folder.is_dir():
        make_path(folder.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder: give another path, or move it away")
    # Also when another worker made it: it may not have come to this yet.
    sync_folder(folder.parent)


# -- which there are -------------------------------------------------------------------------------------------------------


def exists(path: Path) -> bool:
    """Whether there is something, if only a link to nothing.

    Raises:
        OSError: it cannot be told, which is not the same as "no".
    """
    return _mode(path) is not None


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, whatever its name.

    Raises:
        OSError: it cannot be told.
    """
    return exists(folder / MANIFEST)


def is_unfinished(folder: Path) -> bool:
    """Whether a folder without a manifest should have one, by its name or by the files in it.

    Raises:
        OSError: it cannot be told.
    """
    names = {entry.name for entry in _entries(folder)}
    return LATEST not in names and (_NAME.fullmatch(folder.name) is not None or any(map(_PART.fullmatch, names)))


def read_latest(path: Path) -> list[str]:
    """The names in ``latest``, newest first; [] when nothing has been saved.

    Raises:
        CheckpointError: the file is broken, or cannot be read or looked for.
    """
    file = path / LATEST
    text = read_text(file)
    if text is None:
        return []
    names = text.split("\n")
    wrong = [name for name in names[:-1] if not _NAME.fullmatch(name)]
    if wrong or names[-1] or len(names) < 2 or len(set(names)) < len(names):
        what = f"{wrong[0][:80]!r} is no name of a checkpoint" if wrong else "it is not a list of names, one a line"
        raise CheckpointError(
            f"{file} cannot be used: {what}. Remove the file, and load one of the folders beside it by its path."
        )
    return names[:-1]


def complete(path: Path) -> list[str]:
    """The names in ``latest`` whose folders are there, newest first. One that is gone altogether is logged.

    Raises:
        CheckpointError: ``latest`` is broken, or what it names is there and has no manifest.
        OSError: it cannot be told.
    """
    names = read_latest(path)
    there = [name for name in names if exists(path / name)]
    broken = [name for name in there if not (_is_folder(path / name) and is_checkpoint(path / name))]
    if there == names and not broken:
        return names
    # Another process may have removed one since; then it was taken off the list before.
    still = read_latest(path)
    for name in names:
        if name in still and name in broken:
            others = ", ".join(str(path / other) for other in there if other not in broken) or "none"
            raise CheckpointError(
                f"{path / name / MANIFEST} is missing, and {path / LATEST} names that checkpoint. Load another one by its "
                f"path (whole: {others}), or remove the folder."
            )
        if name in still and name not in there:
            logger.warning("%s names %s, which is gone", path / LATEST, name)
    return [name for name in there if name not in broken]


# -- the switch ------------------------------------------------------------------------------------------------------------


def commit(path: Path, name: str, manifest: Manifest, keep: int, here: Sequence[FileInfo] | None = None) -> list[str]:
    """Makes a checkpoint whose worker files are all durable the newest, and removes what is no longer kept.

    One worker of those that share a path does this, one save after another. When it is interrupted, ``latest`` names what it
    named or this one too; the next commit removes what is left over.

    Args:
        path: of the checkpoints.
        name: the folder in it.
        manifest: its manifest.
        keep: how many checkpoints to keep, at least 1.
        here: those of its files that are to be in this folder, the others being on other disks; None: all.

    Returns:
        The names in ``latest`` now, newest first.

    Raises:
        OSError: it could not be written. ``latest`` is as it was then, unless only it could not be made durable.
        CheckpointError: ``latest`` is broken, or a file is not there with its size.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep!r}")
    folder = path / _checked(name)
    before = [other for other in read_latest(path) if other != name and exists(path / other)]
    names = [name, *before][:keep]
    try:
        _mark(folder)
        for info in manifest.files if here is None else here:
            check_present(folder, info)
        write_manifest(folder, manifest)
        for other in before:
            if other not in names and _is_folder(path / other):
                _mark(path / other)
        switch_latest(path, names)
    except (OSError, CheckpointError):
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
    return _remove(path, [name for name in _folders(path) if name not in named and exists(path / name / _MARK)])


def leftovers(path: Path) -> list[str]:
    """Folders of saves that never became complete: look before a run's first save, and :func:`discard` them after it.

    Raises:
        CheckpointError: ``latest`` is broken.
    """
    named = set(read_latest(path))
    return [name for name in _folders(path) if name not in named and _is_leftover(path / name)]


def _is_leftover(folder: Path) -> bool:
    try:
        names = {entry.name for entry in _entries(folder)}
    except OSError:
        return False  # somebody else has just removed it, or it cannot be told
    return MANIFEST not in names and (not names or any(map(_OURS.fullmatch, names)))


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
            if _remove_folder(path / name):
                gone.append(name)
            else:
                logger.warning("%s is no checkpoint any more, and stays: there are files in it that no save made", path / name)
        except FileNotFoundError:
            gone.append(name)  # somebody else has
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path / name, error.strerror or error)
    return gone


def _remove_folder(folder: Path) -> bool:
    """Removes what saves have made: first the manifest, so that it is incomplete at once, and last the mark.

    Returns:
        Whether the folder is gone, too; else something in it is the user's.
    """
    _unlink(folder / MANIFEST)
    sync_folder(folder)
    for entry in _entries(folder):
        if entry.name != _MARK and _is_ours(entry):
            _unlink(Path(entry.path))
    left = [entry for entry in _entries(folder) if entry.name != _MARK]
    if any(map(_is_ours, left)):
        raise OSError("something in it is in use")
    _unlink(folder / _MARK)
    if not left:
        os.rmdir(folder)
    return not left


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return _OURS.fullmatch(entry.name) is not None and not entry.is_dir(follow_symlinks=False)


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
    try:
        entries = _entries(path)
    except FileNotFoundError:
        return []
    return sorted(e.name for e in entries if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False))


def _is_folder(folder: Path) -> bool:
    return stat.S_ISDIR(_mode(folder) or 0)


def _mode(path: Path) -> int | None:
    """Of what is there, which is not followed if it is a link; None where there is nothing."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a checkpoint's folder: use folder_name")
    return name
