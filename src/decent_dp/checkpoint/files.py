"""The shard of one worker in a checkpoint, and the atomic write of all files.

A shard is a safetensors file. The metadata in its header has a record, as JSON, and the SHA-256 of the record. The record says
to which checkpoint and which worker the shard belongs, and has the SHA-256 of all tensors. So a changed bit is detected, and so
is a shard of another worker or checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decent_dp import __version__
from decent_dp._checks import check_integer
from decent_dp.errors import CheckpointError
from decent_dp.serialization import MALFORMED, RESERVED, parse, read_json

__all__ = ["OLDER", "Record", "Shard", "now", "read_small", "replace_file", "shard_name", "sync_folder", "write_shard"]

FORMAT = "decent_dp-checkpoint"
VERSION = 4
# In format 3 a shard also had the exchange in flight.
_READABLE = ("3", str(VERSION))
OLDER = (
    f"was written by an older decent_dp, and this one reads formats {' and '.join(_READABLE)} only: load it with the version "
    "that saved it, and start from the model that export() writes there"
)

# The bytes that are read of a small file. The package's own are shorter.
_SMALL = 4096

_TREE = RESERVED[1]


def shard_name(rank: int) -> str:
    return f"worker-{rank:04d}.safetensors"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """The checkpoint and the worker that a shard belongs to.

    Attributes:
        step: the name of the checkpoint, the same in all its shards.
        rank: of the worker that saved it.
        world_size: how many workers saved the checkpoint.
        round: the round that comes next.
        model: ``model_signature`` of the model that was saved.
        replicas: the ranks of each replica; None if each is one worker.
        sha256: of all tensors, as 64 hexadecimal digits.
        saved_with, saved_at: the versions of decent_dp and torch, and the time in UTC (ISO 8601).
    """

    step: str
    rank: int
    world_size: int
    round: int
    model: list[Any]
    replicas: list[list[int]] | None = None
    sha256: str = ""
    saved_with: Mapping[str, str] = field(default_factory=lambda: {"decent_dp": __version__, "torch": str(torch.__version__)})
    saved_at: str = field(default_factory=now)

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 0)
        check_integer("world_size", self.world_size, self.rank + 1)
        check_integer("round", self.round, 0)
        if not isinstance(self.model, list) or not all(isinstance(text, str) for text in (self.step, self.sha256)):
            raise TypeError("it has an entry of another type")
        if self.replicas is not None:
            ranks = [rank for own in self.replicas for rank in own]
            alike = len({len(own) for own in self.replicas}) == 1 and all(type(rank) is int for rank in ranks)
            if not alike or sorted(ranks) != list(range(self.world_size)):
                raise ValueError(f"{self.world_size} workers cannot be the replicas {str(self.replicas)[:80]}")

    def to_metadata(self) -> dict[str, str]:
        text = json.dumps(asdict(self))
        return {"format": FORMAT, "version": str(VERSION), "record": text, "sha256": _sha256(text.encode())}

    @classmethod
    def from_metadata(cls, found: Mapping[str, str]) -> Record:
        """Raises ValueError or TypeError if it is not a record; says why."""
        if found.get("format") != FORMAT:
            raise ValueError("it is not a shard of a checkpoint")
        version = found.get("version", "")[:20]
        if version.isdecimal() and int(version) > VERSION:
            raise ValueError(f"it was written by a newer decent_dp (format {version}, this one reads {VERSION}): upgrade it")
        if version not in _READABLE:
            raise ValueError(f"it {OLDER}")
        text = found.get("record", "")
        if _sha256(text.encode()) != found.get("sha256"):
            raise ValueError("its record was changed: the sha256 differs")
        return cls(**read_json(text))

    @property
    def workers(self) -> list[list[int]]:
        """The ranks of each replica."""
        return self.replicas or [[rank] for rank in range(self.world_size)]


def write_shard(folder: Path, record: Record, tensors: Mapping[str, Tensor], text: str) -> Path:
    """Writes a shard into a folder that exists. Durable when it returns; takes no second copy of CPU tensors.

    Python's lock is released for all that takes time. ``tensors`` are those of the tree ``text``, as `Staging` copies them:
    they are contiguous, do not overlap, and do not change before this returns.

    Raises:
        OSError: it could not be written (a full disk, no folder, no permission); names the file. Nothing is left of it then.
    """
    # A tensor rather than metadata, because safetensors limits the length of a header.
    tree = torch.from_numpy(np.frombuffer(text.encode("ascii"), np.uint8).copy())
    content = {**tensors, _TREE: tree}
    own = replace(record, sha256=_digest(content, content)).to_metadata()
    file = folder / shard_name(record.rank)
    replace_file(file, lambda temporary: _save(content, temporary, own))
    return file


def _digest(keys: Iterable[str], tensors: Mapping[str, Tensor] | Shard) -> str:
    digest = hashlib.sha256()
    for key in sorted(keys):
        tensor = tensors[key]
        digest.update(f"{key}\0{tensor.dtype}{list(tensor.shape)}\0".encode())
        raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(raw)
    return digest.hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _save(tensors: dict[str, Tensor], file: Path, own: dict[str, str]) -> None:
    try:
        save_file(tensors, file, metadata=own)
    except SafetensorError as error:  # a full disk
        raise OSError(errno.EIO, str(error), str(file)) from error


class Shard(contextlib.AbstractContextManager["Shard"]):
    """A shard that is open for reading, until its context ends. Tensors are read when they are asked for.

    Args:
        rank: the worker that it must be of.

    Raises:
        CheckpointError: it is missing, cut off, not a plain file or not a shard, or of another worker; names it.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self.file = file
        self._read("it cannot be looked at", lambda: _open_plain(file).close())
        # Not mapped into memory: a page of a file that another process removes would end this one.
        self._opened = self._read("its header is broken, or it was cut off", lambda: safe_open(file, "pt", backend="pread"))
        try:
            self._keys = frozenset(self._opened.keys())
            self.record = self._record(rank)
        except BaseException:
            self.__exit__()
            raise

    def _record(self, rank: int) -> Record:
        try:
            record = Record.from_metadata(self._opened.metadata() or {})
        except MALFORMED as error:
            raise self._error(error) from error
        if record.rank != rank:
            raise self._error(f"it is the shard of worker {record.rank}, renamed")
        if _TREE not in self._keys:
            raise self._error("it has no tree")
        return record

    def verify(self) -> None:
        """Reads all tensors, one at a time. Raises CheckpointError if one was changed since it was written."""
        if _digest(self._keys, self) != self.record.sha256:
            raise self._error("it was changed: the sha256 of its tensors differs")

    def __getitem__(self, key: str) -> Tensor:
        """A tensor, on the CPU, in memory of its own. Raises CheckpointError if there is none, or it cannot be read."""
        if key not in self._keys:
            raise self._error(f"it has no tensor '{key}'")
        tensor: Tensor = self._read(f"tensor '{key}' cannot be read", lambda: self._opened.get_tensor(key))
        return tensor

    def tree(self) -> Any:
        """Returns the saved tree, with a `Stored` in place of each tensor and array, for `loaded`.

        Raises:
            CheckpointError: the tree is malformed; when it is loaded: its tensors do not fit it. Names the file.
        """
        text = self[_TREE].numpy().tobytes().decode("ascii", "replace")
        return parse(text, self.__getitem__, f"{self.file} cannot be used: ")

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)

    def _read(self, what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except CheckpointError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{self.file} is missing") from error
        except OSError as error:
            raise self._error(error.strerror or error) from error
        except (SafetensorError, *MALFORMED) as error:
            raise self._error(f"{what} ({error})") from error

    def _error(self, why: object) -> CheckpointError:
        return CheckpointError(f"{self.file} cannot be used: {why}")


# -- plain files -----------------------------------------------------------------------------------------------------------


def replace_file(file: Path, write: Callable[[Path], object], by: str = "") -> None:
    """Replaces a file by one rename, so that a reader sees the old or the new content. Durable when it returns.

    Args:
        write: writes a file to the path that it is given.
        by: a word in the temporary name, for a file that several workers write.

    Raises:
        OSError: it could not be written. The file is as it was then, unless only its folder could not be made durable.
    """
    temporary = file.with_name(f"{file.name}{by}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed
            os.unlink(temporary)
        with open(temporary, "xb") as made:
            mode = stat.S_IMODE(os.fstat(made.fileno()).st_mode)
        write(temporary)
        os.chmod(temporary, mode)  # safetensors makes a file of its own, which others may not read
        _sync(temporary)
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(file.parent)


def read_small(file: Path) -> bytes | None:
    """The first 4 KiB of a plain file; None if there is no file. Raises OSError if it cannot be read."""
    try:
        with _open_plain(file) as opened:
            return opened.read(_SMALL)
    except FileNotFoundError:
        return None


def _open_plain(file: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError if it is not a plain file: a link, or a pipe that would block."""
    if not stat.S_ISREG(os.lstat(file).st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(file))
    return open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # another one may have its name by now


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, if its file system can and the folder may be read."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def _sync(file: Path) -> None:
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
