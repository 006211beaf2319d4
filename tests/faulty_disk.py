"""A disk that fails, or a process that dies, at any operation of a save."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decent_dp.checkpoint import files
from decent_dp.checkpoint import folder as checkpoint_folder


class Died(BaseException):
    """The process is gone: nothing that it would still do is done."""


class FaultyDisk:
    """Counts the operations below a folder, and fails at one of them.

    What is not made durable is kept in mind, so that a power failure can take it away: the bytes of files, and what happened
    to the names in a folder (made, renamed, removed).

    Args:
        root: the folder.
        spare: another one, for what is to come back.
        at: the number of the operation that fails, from 1; 0: none.
        dies: whether the process dies there (half of what it writes is written); else the operation raises "disk full".
    """

    def __init__(self, root: Path, spare: Path, at: int, dies: bool) -> None:
        self._root, self._spare, self._at, self._dies = root, spare, at, dies
        self.operations: list[str] = []
        self._dead = False
        self._unsafe_bytes: set[int] = set()
        self._unsafe_names: list[tuple[Path, Callable[[], None]]] = []
        self._on = True

    # -- what a save does ----------------------------------------------------------------------------------------------

    def _step(self, name: str, path: Any, before: Callable[[], None] | None = None) -> None:
        self.operations.append(f"{name} {Path(path).name}")
        if self._dead or len(self.operations) == self._at:
            self._dead = self._dies
            if before is not None:
                before()
            if self._dies:
                raise Died
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _changed(self, path: Path, undo: Callable[[], None]) -> None:
        self._unsafe_names.append((path.parent, undo))

    def _put_aside(self, path: Path) -> Path | None:
        if not path.exists():
            return None
        aside = self._spare / str(len(self.operations))
        os.link(path, aside)
        return aside

    @contextmanager
    def installed(self) -> Iterator[None]:
        real_open, real_save = open, files.save_file
        real = {
            name: getattr(os, name)
            for name in ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "chmod", "scandir", "lstat")
        }

        def replace(source: Any, target: Any) -> None:
            self._step("replace", target)
            source, target = Path(source), Path(target)
            aside = self._put_aside(target)
            real["replace"](source, target)

            def undo() -> None:
                real["replace"](target, source)
                if aside is not None:
                    real["replace"](aside, target)

            self._changed(target, undo)

        def unlink(path: Any) -> None:
            self._step("unlink", path)
            aside = self._put_aside(Path(path))
            real["unlink"](path)
            assert aside is not None
            self._changed(Path(path), lambda: real["replace"](aside, path))

        def mkdir(path: Any) -> None:
            self._step("mkdir", path)
            real["mkdir"](path)
            self._changed(Path(path), lambda: shutil.rmtree(path))

        def rmdir(path: Any) -> None:
            self._step("rmdir", path)
            real["rmdir"](path)
            self._changed(Path(path), lambda: real["mkdir"](path))

        def fsync(descriptor: int) -> None:
            status = os.fstat(descriptor)
            folders = [
                folder for folder, _ in self._unsafe_names if folder.exists() and os.path.samestat(os.stat(folder), status)
            ]
            self._step("fsync", folders[0] if folders else str(status.st_ino))
            self._unsafe_bytes.discard(status.st_ino)
            self._unsafe_names = [(folder, undo) for folder, undo in self._unsafe_names if folder not in folders]

        def opened(path: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return real_open(path, mode, *args, **kwargs)
            self._step(f"open {mode}", path)
            new = not os.path.exists(path)
            file = real_open(path, mode, *args, **kwargs)
            if new:
                self._changed(Path(path), lambda: os.path.exists(path) and real["unlink"](path))
            self._unsafe_bytes.add(os.fstat(file.fileno()).st_ino)
            return _Written(
                file, lambda data: self._step("write", path, lambda: file.write(data[: len(data) // 2]) and file.flush())
            )

        def save_file(tensors: Any, path: Any, metadata: Any) -> None:
            def half() -> None:
                real_save(tensors, path, metadata)
                os.truncate(path, os.path.getsize(path) // 2)
                if self._dies:
                    shutil.copy(path, Path(path).with_name(".tmpQ4x7Zb"))  # safetensors' own name for what it writes
                else:
                    real["unlink"](path)

            self._step("save_file", path, half)
            real_save(tensors, path, metadata)
            self._unsafe_bytes.add(os.stat(path).st_ino)

        def counted(name: str) -> Callable[..., Any]:
            def call(path: Any, *args: Any) -> Any:
                if not isinstance(path, int) and Path(path).is_relative_to(self._root):
                    self._step(name, path)
                return real[name](path, *args)

            return call

        own = {"replace": replace, "unlink": unlink, "mkdir": mkdir, "rmdir": rmdir, "fsync": fsync}
        with pytest.MonkeyPatch.context() as patch:
            for name in real:
                patch.setattr(os, name, own.get(name) or counted(name))
            patch.setattr(files, "save_file", save_file)
            for module in (files, checkpoint_folder):
                patch.setattr(module, "open", opened, raising=False)
            yield

    # -- what is left --------------------------------------------------------------------------------------------------

    def lose_power(self, names: str, written: bool) -> None:
        """Takes away what was not made durable.

        Args:
            names: what happened to names is lost: 'none', 'all', or 'inside' (of the checkpoints' folders only).
            written: whether what was written into files is lost.
        """
        for folder, undo in reversed(self._unsafe_names):
            if (names == "all" or (names == "inside" and folder != self._root)) and folder.exists():
                undo()
        if written:
            for path in self._root.rglob("*"):
                if path.is_file() and path.stat().st_ino in self._unsafe_bytes:
                    os.truncate(path, 0)


class _Written:
    """A file of which each write is an operation."""

    def __init__(self, file: Any, step: Callable[[bytes], None]) -> None:
        self._file, self._step = file, step

    def write(self, data: bytes) -> None:
        self._step(data)
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        number: int = self._file.fileno()
        return number

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()
