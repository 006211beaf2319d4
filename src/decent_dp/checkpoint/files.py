"""The files of one checkpoint: a worker's tensors, and the manifest that says what belongs together.

Every file is written under another name, made durable (fsync), renamed, and its folder made durable: what has its final name is
whole, whenever the process or the machine dies. Nothing is locked and nothing is linked, so network file systems do.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decent_dp.checkpoint.tree import RESERVED, Stored, decode, parse
from decent_dp.errors import CheckpointError

try:
    import safetensors
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as _error:
    raise ImportError("checkpoints keep tensors with safetensors: pip install 'decent-dp[checkpoint]'") from _error

__all__ = [
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "FileInfo",
    "Manifest",
    "Reader",
    "check_present",
    "open_worker",
    "read_manifest",
    "read_text",
    "sync_folder",
    "verify",
    "worker_name",
    "write_manifest",
    "write_text",
    "write_worker",
]

FORMAT = "decent_dp-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

_TREE = RESERVED[1]
_BLOCK = 1 << 20

if tuple(int(n) for n in re.findall(r"\d+", safetensors.__version__)[:2]) < (0, 8):
    # Older ones hold Python's lock while they write, so that the training stands still, and copy all tensors first.
    raise ImportError(
        f"checkpoints need safetensors 0.8 or newer, and {safetensors.__version__} is installed: "
        "pip install --upgrade 'decent-dp[checkpoint]'"
    )


def worker_name(rank: int) -> str:
    """The name of a worker's file."""
    return f"worker-{rank:04d}.safetensors"


# -- the manifest ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileInfo:
    """A file as it was when it was written.

    Attributes:
        name: without a folder.
        bytes: its size.
        sha256: of its bytes, as 64 hexadecimal digits.
    """

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"worker-[0-9]{4,}\.safetensors", self.name):
            raise ValueError(f"{self.name!r} is not the name of a worker's file")
        if type(self.bytes) is not int or self.bytes < 0:
            raise ValueError(f"the size of {self.name} must be a number of bytes, got {self.bytes!r}")
        if not isinstance(self.sha256, str) or not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"the sha256 of {self.name} must be 64 hexadecimal digits, got {self.sha256!r}")


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("decent-dp")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {"decent_dp": own, "torch": str(torch.__version__)}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Manifest:
    """What makes files a checkpoint.

    Attributes:
        round: the round that comes next; the same on all workers.
        world_size: how many workers saved it.
        files: one a worker, in the order of their ranks.
        signature: what the run must look like that loads it; any JSON.
        saved_with: versions of decent_dp and torch.
        saved_at: the time, in UTC (ISO 8601).
    """

    round: int
    world_size: int
    files: tuple[FileInfo, ...]
    signature: Any
    saved_with: Mapping[str, str] = field(default_factory=_versions)
    saved_at: str = field(default_factory=_now)

    def __post_init__(self) -> None:
        if type(self.round) is not int or self.round < 0:
            raise ValueError(f"'round' must be a number, at least 0, got {self.round!r}")
        if type(self.world_size) is not int or self.world_size < 1:
            raise ValueError(f"'world_size' must be a number, at least 1, got {self.world_size!r}")
        if len(self.files) != self.world_size:
            raise ValueError(f"'files' must be one a worker, and there are {len(self.files)} of {self.world_size} workers")
        for rank, info in enumerate(self.files):
            if info.name != worker_name(rank):
                raise ValueError(f"'files' must be one a worker, by rank: {worker_name(rank)} was due, got {info.name}")
        versions = self.saved_with
        if not isinstance(versions, Mapping) or not all(isinstance(v, str) for pair in versions.items() for v in pair):
            raise ValueError(f"'saved_with' must be names and versions, got {versions!r}")
        if not isinstance(self.saved_at, str):
            raise ValueError(f"'saved_at' must be a time, got {self.saved_at!r}")

    def to_json(self) -> str:
        """The text of the file.

        Raises:
            TypeError: the signature is not JSON.
            ValueError: it holds infinities or nan.
        """
        own = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(own, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest of a text.

        Raises:
            ValueError: it is not one; says why.
        """
        try:
            own = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON ({error})") from error
        if not isinstance(own, dict) or own.get("format") != FORMAT:
            raise ValueError(f"it is no manifest of a checkpoint ('format' is not '{FORMAT}')")
        version = own.get("version")
        if type(version) is int and version > VERSION:
            raise ValueError(f"it was written by a newer decent_dp (format {version}, this one reads {VERSION}): upgrade it")
        if type(version) is not int or version != VERSION:
            raise ValueError(f"'version' must be {VERSION}, got {version!r}")
        due = {"format", "version", *cls.__dataclass_fields__}
        if own.keys() != due:
            raise ValueError(f"its keys are {sorted(own)}, and must be {sorted(due)}")
        files = own["files"]
        if not isinstance(files, list) or not all(
            isinstance(info, dict) and info.keys() == FileInfo.__dataclass_fields__.keys() for info in files
        ):
            raise ValueError("'files' must be a list of name, bytes and sha256")
        rest = {key: own[key] for key in cls.__dataclass_fields__ if key != "files"}
        return cls(files=tuple(FileInfo(**info) for info in files), **rest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Completes a checkpoint. Durable when it returns.

    Raises:
        OSError: it could not be written; there is none then.
    """
    write_text(folder / MANIFEST, manifest.to_json())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        CheckpointError: there is none, it is broken, or it was written by a newer version; names the file.
    """
    file = folder / MANIFEST
    text = read_text(file)
    if text is None:
        raise CheckpointError(f"{folder} is no complete checkpoint: {file} is missing")
    try:
        return Manifest.from_json(text)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be used: {error}") from error


# -- a worker's file -------------------------------------------------------------------------------------------------------


def write_worker(folder: Path, rank: int, tensors: Mapping[str, Tensor], text: str) -> FileInfo:
    """Writes a worker's file into a folder that exists. Durable when it returns; takes no second copy of CPU tensors.

    May be called beside other workers', and beside the training: Python's lock is released for all that takes time.

    Args:
        folder: of the checkpoint.
        rank: the worker.
        tensors: of the tree, contiguous and not overlapping, and not changed before this returns; as :mod:`staging` has them.
        text: the tree they belong to, as :func:`tree.encode` gives it.

    Raises:
        OSError: it could not be written (a full disk, no folder, no permission); names the file. Nothing is left of it then.
    """
    name = worker_name(rank)
    taken = [key for key in RESERVED if key in tensors]
    if taken:
        raise ValueError(f"no tensor may have the key {taken[0]!r}")
    # A tensor and not metadata: a file's header is limited.
    tree = torch.from_numpy(np.frombuffer(text.encode("ascii"), np.uint8).copy())
    temporary = folder / f"{name}.tmp"
    try:
        with _fresh(temporary) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        _save(dict(tensors) | {_TREE: tree}, temporary)
        os.chmod(temporary, mode)
        _sync(temporary)
        info = FileInfo(name, *_measure(temporary))
        os.replace(temporary, folder / name)
    except BaseException:
        _forget(temporary)
        raise
    sync_folder(folder)
    return info


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": FORMAT, "version": str(VERSION)})
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(file)) from error


class Reader:
    """A worker's file, open for reading. Also a context manager that closes it.

    Tensors are read when they are asked for, each time anew.

    Attributes:
        file: its path.
        rank: the worker that wrote it.
        text: the JSON text of the tree, see :func:`tree.parse`.
    """

    def __init__(self, file: Path, rank: int) -> None:
        self.file = file
        self.rank = rank
        # Not mapped into memory: a page of a file that is gone would end the process.
        self._opened = self._read("its header is broken", lambda: safe_open(file, "pt", backend="pread"))
        self._keys = frozenset(self._opened.keys())
        if _TREE not in self._keys:
            self.close()
            raise CheckpointError(f"{file} cannot be used: it holds no tree")
        try:
            self.text = self.tensor(_TREE).numpy().tobytes().decode("ascii")
        except (UnicodeDecodeError, TypeError) as error:
            self.close()
            raise CheckpointError(f"{file} cannot be used: its tree is no text") from error

    def tensor(self, key: str) -> Tensor:
        """A tensor, on the CPU, in memory of its own.

        Raises:
            CheckpointError: there is none, or it cannot be read; names the file.
        """
        if key not in self._keys:
            raise CheckpointError(f"{self.file} cannot be used: it holds no tensor '{key}'")
        tensor: Tensor = self._read(f"tensor '{key}' cannot be read", lambda: self._opened.get_tensor(key))
        return tensor

    def tree(self) -> Any:
        """What was saved, with all tensors.

        Raises:
            CheckpointError: the file does not hold what its tree says; names it.
        """
        return self._named(lambda: decode(self.text, self.tensor))

    def outline(self) -> Any:
        """What was saved, with a :class:`tree.Stored` in the place of each tensor and array.

        Raises:
            CheckpointError: the tree is malformed; names the file.
        """
        return self._named(lambda: parse(self.text))

    def load(self, stored: Stored) -> Any:
        """A tensor or an array of the outline.

        Raises:
            CheckpointError: the file does not hold it; names the file.
        """
        return self._named(lambda: stored.load(self.tensor))

    def close(self) -> None:
        """Closes the file."""
        self._opened.__exit__(None, None, None)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _named(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except CheckpointError as error:
            if str(self.file) in str(error):
                raise
            raise CheckpointError(f"{self.file} cannot be used: {error}") from error

    def _read(self, what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except OSError as error:
            raise _unreadable(self.file, error) from error
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.file} cannot be used: {what} ({error})") from error


def open_worker(folder: Path, rank: int, manifest: Manifest | None = None) -> Reader:
    """Opens a worker's file, once its size and checksum are those of the manifest.

    Args:
        folder: of the checkpoint.
        rank: the worker that wrote the file.
        manifest: of the folder; None reads it.

    Raises:
        CheckpointError: the file is missing, cut off, changed, no plain file, or its header is broken; names it.
        ValueError: the checkpoint has no such worker.
    """
    manifest = read_manifest(folder) if manifest is None else manifest
    verify(folder, manifest, [rank])
    return Reader(folder / worker_name(rank), rank)


def verify(folder: Path, manifest: Manifest, ranks: Iterable[int]) -> None:
    """Compares size and sha256 of these workers' files with the manifest; reads them whole.

    Raises:
        CheckpointError: one is missing, cut off, changed or no plain file; names the first.
        ValueError: the checkpoint has no such worker.
    """
    for rank in ranks:
        if not 0 <= rank < manifest.world_size:
            raise ValueError(f"{folder} was saved by {manifest.world_size} workers and has none of rank {rank}")
        info = manifest.files[rank]
        file = folder / info.name
        try:
            size, sha256 = _measure(file, info.bytes)
        except OSError as error:
            raise _unreadable(file, error) from error
        _check_size(file, size, info)
        if sha256 != info.sha256:
            raise CheckpointError(f"{file} cannot be used: its sha256 is not the one it was written with: it was changed")


def check_present(folder: Path, info: FileInfo) -> None:
    """Looks whether a worker's file is there with its size, without reading it.

    Raises:
        CheckpointError: it is missing, cut off or no plain file; names it.
    """
    file = folder / info.name
    try:
        size = _plain_size(file)
    except OSError as error:
        raise _unreadable(file, error) from error
    _check_size(file, size, info)


def _check_size(file: Path, size: int, info: FileInfo) -> None:
    if size != info.bytes:
        cause = "it was cut off" if size < info.bytes else "something was added"
        raise CheckpointError(f"{file} cannot be used: it has {size} bytes and was written with {info.bytes}: {cause}")


# -- plain files -----------------------------------------------------------------------------------------------------------


def write_text(file: Path, text: str) -> None:
    """Replaces a small file in one rename. Durable when it returns.

    Raises:
        OSError: it could not be written. The file is as it was then, unless only its folder could not be made durable.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        with _fresh(temporary) as out:
            out.write(text.encode())
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except BaseException:
        _forget(temporary)
        raise
    sync_folder(file.parent)


def read_text(file: Path) -> str | None:
    """The text of a small file, which must be a plain one; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or be looked for; names it.
    """
    try:
        with open(_open(file), "rb") as opened:
            return opened.read().decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} cannot be used: it is no text") from error


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where its file system can and the folder may be read."""
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


def _fresh(file: Path) -> Any:
    """A new file, also where a killed process left one."""
    _forget(file)
    return open(file, "xb")


def _forget(file: Path) -> None:
    try:
        os.unlink(file)
    except OSError:
        return


def _open(file: Path) -> int:
    """Opens a plain file. A link, or a pipe that would block, is refused."""
    _plain_size(file)
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _plain_size(file: Path) -> int:
    found = os.lstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(file))
    return found.st_size


def _measure(file: Path, due: int | None = None) -> tuple[int, str]:
    """Size and sha256; the latter is empty when the size is not the due one."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with open(_open(file), "rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if due is not None and size != due:
            return size, ""
        while got := opened.readinto(block):
            digest.update(block[:got])
    return size, digest.hexdigest()


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointError(f"{file} is missing")
    return CheckpointError(f"{file} cannot be used: {error.strerror or error}")
