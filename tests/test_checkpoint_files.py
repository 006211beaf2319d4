"""The files of checkpoints: never a broken one, whatever happens and whenever; and every broken one is named."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import resource
import stat
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decent_dp.checkpoint import files, index
from decent_dp.checkpoint.files import (
    MANIFEST,
    FileInfo,
    Manifest,
    Reader,
    open_worker,
    read_manifest,
    verify,
    worker_name,
    write_manifest,
    write_worker,
)
from decent_dp.checkpoint.staging import Staging
from decent_dp.checkpoint.tree import encode
from decent_dp.errors import CheckpointError
from tests.small_checkpoints import names_in, save

# -- a worker's file -------------------------------------------------------------------------------------------------------


def test_what_is_written_comes_back(tmp_path):
    tree = {
        "a": torch.randn(3, 4).T,
        "b": [torch.tensor(1.5), {"c": "text\ud800"}],
        "d": torch.zeros(0, 2, dtype=torch.bfloat16),
    }
    text, tensors = encode(tree, "")
    info = write_worker(tmp_path, 3, Staging().copy(tensors).tensors, text)
    content = (tmp_path / "worker-0003.safetensors").read_bytes()
    assert info == FileInfo("worker-0003.safetensors", len(content), hashlib.sha256(content).hexdigest())
    assert names_in(tmp_path) == {info.name}
    manifest = Manifest(0, 4, tuple(FileInfo(worker_name(r), info.bytes, info.sha256) for r in range(4)), None)
    with open_worker(tmp_path, 3, manifest) as reader:
        back = reader.tree()
        assert (reader.rank, reader.file, reader.text) == (3, tmp_path / info.name, text)
        assert torch.equal(reader.tensor("b.0"), torch.tensor(1.5))
        assert torch.equal(reader.load(reader.outline()["a"]), tree["a"])
    assert torch.equal(back["a"], tree["a"])
    assert back["b"] == tree["b"]
    assert back["d"].dtype == torch.bfloat16
    # Anybody can read it.
    assert torch.equal(load_file(tmp_path / info.name)["a"], tree["a"])


def test_anything_may_be_as_long_as_it_is(tmp_path):
    tree = {"list": list(range(300_000)), **{f"t{i}": torch.tensor(i) for i in range(3000)}}
    info = write_worker(tmp_path, 0, *reversed(encode(tree, "")))
    with open_worker(tmp_path, 0, Manifest(0, 1, (info,), None)) as reader:
        assert reader.tree() == tree


def test_files_may_be_read_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == {0o640}


def test_keys_that_a_file_needs_are_refused(tmp_path):
    for key in ("__tree__", "__metadata__"):
        with pytest.raises(ValueError, match=key):
            write_worker(tmp_path, 0, {key: torch.ones(1)}, "{}")
    assert names_in(tmp_path) == set()


def _in_child(body: Callable[..., Any], *args: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, body, args), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60), "the child says nothing"
    value = ours.recv()
    process.join(20)
    return value


def _run(pipe: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(body(*args))


def _peak() -> int:
    return (
        int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1])
        // 1024
    )


def _memory_of_a_save(folder: Path) -> tuple[int, int]:
    tensors = {f"t{i}": torch.ones(1 << 20) for i in range(64)}  # 256 MiB
    before = _peak()
    info = write_worker(folder, 0, tensors, "{}")
    written = _peak() - before
    verify(folder, Manifest(0, 1, (info,), None), [0])
    with Reader(folder / info.name, 0) as reader:
        for key in tensors:
            reader.tensor(key)
    return written, _peak() - before


def test_neither_writing_nor_reading_takes_a_second_copy(tmp_path):
    written, read = _in_child(_memory_of_a_save, tmp_path)
    assert written < 40, f"{written} MiB more for 256 MiB"
    assert read < 60, f"{read} MiB more for 256 MiB"


def test_other_threads_go_on_while_a_file_is_written(tmp_path):
    tensors = {"w": torch.ones(1 << 25)}  # 128 MiB
    longest, going, last = 0.0, True, time.perf_counter()

    def tick() -> None:
        nonlocal longest, last
        while going:
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    write_worker(tmp_path, 0, tensors, "{}")
    took, going = time.perf_counter() - began, False
    thread.join()
    assert longest < max(0.6 * took, 0.1), f"stood still for {longest:.3f} of {took:.3f} s"


@pytest.mark.parametrize("found", [None, "0.7.9", "0.4.3"])
def test_a_missing_or_old_safetensors_is_named(monkeypatch, found):
    if found is None:
        monkeypatch.setitem(sys.modules, "safetensors", None)
    else:
        monkeypatch.setattr(safetensors, "__version__", found)
    spec = importlib.util.spec_from_file_location("files_again", files.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "files_again", module)
    with pytest.raises(ImportError, match=r"pip install .*'decent-dp\[checkpoint\]'") as caught:
        spec.loader.exec_module(module)
    assert found is None or found in str(caught.value)


# -- no room ---------------------------------------------------------------------------------------------------------------


def _with_little_room(path: Path) -> list[str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    said = []
    for write_it in (
        lambda: write_worker(index.make_folder(path, "step-00000001-aaaaaa"), 0, {"w": torch.ones(100_000)}, "{}"),
        lambda: write_worker(path / "step-00000001-aaaaaa", 1, {"w": torch.ones(10)}, "{}"),
        lambda: files.write_text(path / "latest", "x" * 200_000),
    ):
        try:
            write_it()
            said.append("fine")
        except OSError as error:
            said.append(f"{errno.errorcode[error.errno or 0]} {Path(error.filename or '').name} {error.strerror}")
    return said


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path):
    save(tmp_path, 0)
    before = (tmp_path / "latest").read_text()
    big, small, text = _in_child(_with_little_room, tmp_path)
    assert big == f"EFBIG worker-0000.safetensors.tmp {os.strerror(errno.EFBIG)}"
    assert small == "fine"
    assert text.startswith("EFBIG")
    assert names_in(tmp_path / "step-00000001-aaaaaa") == {"worker-0001.safetensors"}
    assert (tmp_path / "latest").read_text() == before
    assert index.leftovers(tmp_path) == ["step-00000001-aaaaaa"]
    index.discard(tmp_path, index.leftovers(tmp_path))
    assert names_in(tmp_path) == {"latest", *index.read_latest(tmp_path)}


@pytest.mark.parametrize(("text", "number"), [("I/O error: No space left (os error 28)", errno.ENOSPC), ("odd", errno.EIO)])
def test_errors_of_safetensors_become_oserrors(tmp_path, monkeypatch, text, number):
    def full(*args: Any, **kwargs: Any) -> None:
        raise safetensors.SafetensorError(text)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match=r"worker-0000\.safetensors") as caught:
        write_worker(tmp_path, 0, {}, "{}")
    assert caught.value.errno == number
    assert names_in(tmp_path) == set()


def test_a_folder_that_is_gone_or_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_worker(tmp_path / "nowhere", 0, {}, "{}")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is no folder"):
        index.make_folder(tmp_path / "file", "step-00000001-aaaaaa")
    (tmp_path / "step-00000001-aaaaaa").symlink_to(tmp_path)
    with pytest.raises(FileExistsError, match="is a link"):
        index.make_folder(tmp_path, "step-00000001-aaaaaa")


# -- broken files ----------------------------------------------------------------------------------------------------------


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[random.Random(3).randrange(len(content))] ^= 1
    file.write_bytes(content)


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("break_it", "cause"),
    [
        (Path.unlink, "is missing"),
        (_cut, "it was cut off"),
        (lambda file: os.truncate(file, 0), "it was cut off"),
        (_grow, "something was added"),
        (_flip, "it was changed"),
        (_link, "it is no plain file"),
        (_folder, "it is no plain file"),
        (_pipe, "it is no plain file"),
    ],
)
@pytest.mark.timeout(20)
def test_a_broken_file_is_named(tmp_path, break_it, cause):
    folder = tmp_path / save(tmp_path, 5)
    break_it(folder / worker_name(1))
    for look in (lambda: verify(folder, read_manifest(folder), [0, 1]), lambda: open_worker(folder, 1)):
        with pytest.raises(CheckpointError) as caught:
            look()
        assert str(folder / worker_name(1)) in str(caught.value)
        assert cause in str(caught.value)
    verify(folder, read_manifest(folder), [0])
    with pytest.raises(ValueError, match="saved by 2 workers and has none of rank 2"):
        open_worker(folder, 2)


def test_every_bit_counts(tmp_path):
    folder = tmp_path / save(tmp_path, 5)
    file, manifest = folder / worker_name(0), read_manifest(folder)
    content, draw = file.read_bytes(), random.Random(1)
    for at in (0, 8, len(content) - 1, *(draw.randrange(len(content)) for _ in range(50))):
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="it was changed"):
            open_worker(folder, 0, manifest)


HEADERS = [
    b"",
    b"\0" * 8,
    b"\xff" * 100,
    (10**6).to_bytes(8, "little") + b"{}",
    (2).to_bytes(8, "little") + b"{}",
    (6).to_bytes(8, "little") + b'{"a":}',
    (62).to_bytes(8, "little") + b'{"__tree__":{"dtype":"U8","shape":[9],"data_offsets":[0,900]}}',
    (5000).to_bytes(8, "little") + b"[" * 5000,
]


@pytest.mark.parametrize("content", HEADERS, ids=range(len(HEADERS)))
def test_a_broken_header_is_named(tmp_path, content):
    """With a manifest that knows of nothing."""
    (tmp_path / worker_name(0)).write_bytes(content)
    info = FileInfo(worker_name(0), len(content), hashlib.sha256(content).hexdigest())
    with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used"):
        open_worker(tmp_path, 0, Manifest(0, 1, (info,), None))


def _reader_of(folder: Path, tensors: dict[str, Tensor]) -> Reader:
    save_file(tensors, folder / worker_name(0))
    return Reader(folder / worker_name(0), 0)


def _as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def test_a_file_that_is_no_workers(tmp_path):
    with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used: it holds no tree"):
        _reader_of(tmp_path, {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used: its tree is no text"):
        _reader_of(tmp_path, {"__tree__": torch.tensor([200], dtype=torch.uint8)})
    for text, cause in [
        ("{", "malformed"),
        ('{"!tensor":"q"}', "it holds no tensor 'q'"),
        ('{"!array":["w","<i4",[7]]}', "do not fit"),
    ]:
        with (
            _reader_of(tmp_path, {"__tree__": _as_bytes(text), "w": torch.ones(1)}) as reader,
            pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used") as caught,
        ):
            reader.tree()
        assert cause in str(caught.value)
        assert str(caught.value).count("worker-0000") == 1


def test_a_file_that_goes_while_it_is_read(tmp_path):
    tensors = {"a": torch.ones(100_000), "b": torch.ones(100_000)}
    info = write_worker(tmp_path, 0, tensors, "{}")
    with open_worker(tmp_path, 0, Manifest(0, 1, (info,), None)) as reader:
        (tmp_path / info.name).unlink()
        assert torch.equal(reader.tensor("a"), tensors["a"])  # it stays until it is closed
    info = write_worker(tmp_path, 0, tensors, "{}")
    with open_worker(tmp_path, 0, Manifest(0, 1, (info,), None)) as reader:
        os.truncate(tmp_path / info.name, 1000)
        with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used: tensor 'b' cannot be read"):
            reader.tensor("b")


# -- the manifest ----------------------------------------------------------------------------------------------------------


def test_the_manifest(tmp_path):
    info = FileInfo("worker-0000.safetensors", 12, "ab" * 32)
    manifest = Manifest(7, 1, (info,), {"names": ["w"], "x": [1, 2.5, None]})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    own = json.loads((tmp_path / MANIFEST).read_text())
    assert own == {
        "format": "decent_dp-checkpoint",
        "version": 1,
        "round": 7,
        "world_size": 1,
        "files": [{"name": "worker-0000.safetensors", "bytes": 12, "sha256": "ab" * 32}],
        "signature": {"names": ["w"], "x": [1, 2.5, None]},
        "saved_with": {"decent_dp": metadata.version("decent-dp"), "torch": torch.__version__},
        "saved_at": manifest.saved_at,
    }
    assert abs(time.time() - time.mktime(time.strptime(own["saved_at"][:19], "%Y-%m-%dT%H:%M:%S")) + time.timezone) < 5
    with pytest.raises(TypeError):
        write_manifest(tmp_path, Manifest(7, 1, (info,), {"x": object()}))
    assert read_manifest(tmp_path) == manifest
    assert names_in(tmp_path) == {MANIFEST}


FILE = {"name": "worker-0000.safetensors", "bytes": 12, "sha256": "ab" * 32}
GOOD = {
    "format": "decent_dp-checkpoint",
    "version": 1,
    "round": 7,
    "world_size": 1,
    "files": [FILE],
    "signature": None,
    "saved_with": {"torch": "2"},
    "saved_at": "now",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "it is no JSON"),
        (b"{", "it is no JSON"),
        (b"\xff\xfe", "it is no text"),
        (b"[" * 100_000, "it is no JSON"),
        (b"[]", "it is no manifest"),
        ({**GOOD, "format": "other"}, "it is no manifest"),
        ({**GOOD, "version": 2}, "it was written by a newer decent_dp (format 2, this one reads 1)"),
        ({"format": "decent_dp-checkpoint", "version": 3, "parts": []}, "it was written by a newer decent_dp (format 3"),
        ({**GOOD, "version": 0}, "'version' must be 1"),
        ({**GOOD, "version": "2"}, "'version' must be 1"),
        ({**GOOD, "version": True}, "'version' must be 1"),
        ({k: v for k, v in GOOD.items() if k != "round"}, "its keys are"),
        ({**GOOD, "more": 1}, "its keys are"),
        ({**GOOD, "round": -1}, "'round' must be"),
        ({**GOOD, "round": 1.0}, "'round' must be"),
        ({**GOOD, "round": True}, "'round' must be"),
        ({**GOOD, "world_size": 0, "files": []}, "'world_size' must be"),
        ({**GOOD, "world_size": 2}, "'files' must be one a worker"),
        ({**GOOD, "files": [FILE, FILE]}, "'files' must be one a worker, and there are 2 of 1 workers"),
        ({**GOOD, "world_size": 10**15}, "'files' must be one a worker, and there are 1 of 1000000000000000 workers"),
        (
            {**GOOD, "world_size": 2, "files": [FILE, {**FILE, "name": "worker-0002.safetensors"}]},
            "worker-0001.safetensors was due, got worker-0002.safetensors",
        ),
        ({**GOOD, "files": [{**FILE, "name": "worker-0001.safetensors"}]}, "'files' must be one a worker"),
        ({**GOOD, "files": {}}, "'files' must be a list"),
        ({**GOOD, "files": [3]}, "'files' must be a list"),
        ({**GOOD, "files": [{"name": "x"}]}, "'files' must be a list"),
        ({**GOOD, "files": [{**FILE, "name": "../worker-0000.safetensors"}]}, "is not the name of a worker's file"),
        ({**GOOD, "files": [{**FILE, "name": "/etc/passwd"}]}, "is not the name of a worker's file"),
        ({**GOOD, "files": [{**FILE, "name": "worker-0000.safetensors\n"}]}, "is not the name of a worker's file"),
        ({**GOOD, "files": [{**FILE, "name": 3}]}, "is not the name of a worker's file"),
        ({**GOOD, "files": [{**FILE, "bytes": -1}]}, "must be a number of bytes"),
        ({**GOOD, "files": [{**FILE, "bytes": "12"}]}, "must be a number of bytes"),
        ({**GOOD, "files": [{**FILE, "sha256": "AB" * 32}]}, "64 hexadecimal digits"),
        ({**GOOD, "files": [{**FILE, "sha256": None}]}, "64 hexadecimal digits"),
        ({**GOOD, "saved_with": 3}, "'saved_with' must be"),
        ({**GOOD, "saved_with": {"a": 1}}, "'saved_with' must be"),
        ({**GOOD, "saved_at": 3}, "'saved_at' must be"),
    ],
)
def test_a_broken_manifest_is_named(tmp_path, content, cause):
    (tmp_path / MANIFEST).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be used") as caught:
        read_manifest(tmp_path)
    assert cause in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_manifest_that_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint: .*manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "real").write_text(json.dumps(GOOD))
    (tmp_path / MANIFEST).symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="it is no plain file"):
        read_manifest(tmp_path)
