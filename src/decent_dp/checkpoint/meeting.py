"""Which workers see the same folder: those that find the same file in it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path

from decent_dp.checkpoint import index

__all__ = ["meet_in", "part_from"]

# What os.link says where there are no links; any other error is one of the folder's.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL, errno.EACCES)
_LENGTH = 32
# Seconds until a file that another worker has just made holds its word.
_ANY_MOMENT = 5.0


def meet_in(root: Path, run_id: str) -> str:
    """A word that workers of the run ``run_id`` share if and only if they see the same folder as ``root``.

    The first of them also removes what a stopped run has left there unfinished: no other can have begun a checkpoint yet.

    Raises:
        OSError: the folder cannot be made or written to.
        CheckpointError: its list of checkpoints is broken.
    """
    index.make_path(root)
    unfinished = index.leftovers(root)
    word, place = secrets.token_hex(_LENGTH // 2), _place(root, run_id)
    own = place.with_name(f"{place.name}-{word}")
    try:
        own.write_text(word)
        try:
            os.link(own, place)  # there with its word, and once
        except OSError as error:
            if error.errno in _NO_LINKS:
                _write_once(place, word)
            elif not isinstance(error, FileExistsError):
                raise
    except FileExistsError:
        pass
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    found = _read(place)
    if found == word:
        index.discard(root, unfinished)
        _forget_others(root, place)
    return found


def part_from(root: Path, run_id: str) -> None:
    """Removes the file; all workers must have met."""
    with contextlib.suppress(OSError):
        _place(root, run_id).unlink()


def _place(root: Path, run_id: str) -> Path:
    return root / f".folder-{run_id[:12]}"


def _write_once(place: Path, word: str) -> None:
    place.touch(exist_ok=False)
    try:
        place.write_text(word)
    except BaseException:
        place.unlink(missing_ok=True)  # without its word it would stop every later save
        raise


def _read(place: Path) -> str:
    deadline = time.monotonic() + _ANY_MOMENT
    while len(word := place.read_text()) < _LENGTH:
        if time.monotonic() > deadline:
            raise OSError(errno.EIO, "it holds nothing: remove it", str(place))
        time.sleep(0.01)
    return word


def _forget_others(root: Path, place: Path) -> None:
    """Files of runs that were stopped before their first checkpoint."""
    for other in root.glob(".folder-*"):
        if not other.name.startswith(place.name):
            with contextlib.suppress(OSError):
                other.unlink()
