"""Shards: never a broken one, whatever happens and whenever; and every broken one is named."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decent_dp.checkpoint import files, folder
from decent_dp.checkpoint.files import FORMAT, VERSION, Record, Shard, replace_file, shard_name, write_shard
from decent_dp.errors import CheckpointError
from decent_dp.replica.host_copies import HostMemory
from decent_dp.serialization import encode, loaded
from tests.small_checkpoints import names_in, save

ANY = Record("any", 0, 1, 3, [])

# -- what is written -------------------------------------------------------------------------------------------------------


def test_a_shard_comes_back_as_written(tmp_path):
    tree = {"a": torch.randn(3, 4).T, "b": [torch.tensor(1.5), {"c": "text"}], "d": torch.zeros(0, 2, dtype=torch.bfloat16)}
    text, tensors = encode(tree)
    record = Record("step", 3, 4, 7, [["parameter", "a"]], [[0, 1], [2, 3]])
    file = write_shard(tmp_path, record, HostMemory().copy(tensors).tensors, text)
    assert names_in(tmp_path) == {"worker-0003.safetensors"}
    with Shard(file, 3) as shard:
        shard.verify()
        assert shard.record == Record(**{**vars(record), "sha256": shard.record.sha256})
        assert shard.record.workers == [[0, 1], [2, 3]]
        back = loaded(shard.tree())
        assert torch.equal(shard["b.0"], torch.tensor(1.5))
        assert torch.equal(shard.tree()["a"].load(), tree["a"])
    assert torch.equal(back["a"], tree["a"])
    assert back["b"] == tree["b"]
    assert back["d"].dtype == torch.bfloat16
    # Anybody can read it.
    assert torch.equal(load_file(file)["a"], tree["a"])


def test_anything_may_be_as_long_as_it_is(tmp_path):
    tree = {"list": list(range(300_000)), **{f"t{i}": torch.tensor(i) for i in range(3000)}}
    with Shard(write_shard(tmp_path, ANY, *reversed(encode(tree))), 0) as shard:
        assert loaded(shard.tree()) == tree


def test_files_may_be_read_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == {0o640}


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
    tensors = {f"t{i}": torch.ones(1 << 20) for i in range(32)}  # 128 MiB
    before = _peak()
    file = write_shard(folder, ANY, tensors, "{}")
    written = _peak() - before
    with Shard(file, 0) as shard:
        shard.verify()
        for key in tensors:
            shard[key]
    return written, _peak() - before


def test_neither_writing_nor_reading_takes_a_second_copy(tmp_path):
    written, read = _in_child(_memory_of_a_save, tmp_path)
    assert written < 40, f"{written} MiB more for 128 MiB"
    assert read < 60, f"{read} MiB more for 128 MiB"


# -- no room ---------------------------------------------------------------------------------------------------------------


def _with_little_room(path: Path) -> list[str]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    said = []
    for write_it in (
        lambda: write_shard(folder.make_folder(path / "step"), ANY, {"w": torch.ones(100_000)}, "{}"),
        lambda: write_shard(path / "step", Record("any", 1, 2, 3, []), {"w": torch.ones(10)}, "{}"),
        lambda: replace_file(path / "latest", lambda file: file.write_text("x" * 200_000)),
    ):
        try:
            write_it()
            said.append("fine")
        except OSError as error:
            said.append(f"{errno.errorcode[error.errno or 0]} {Path(error.filename or '').name} {error.strerror}")
    return said


def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path):
    name = save(tmp_path, 0)
    big, small, text = _in_child(_with_little_room, tmp_path)
    assert "worker-0000.safetensors.tmp" in big
    assert os.strerror(errno.EFBIG) in big
    assert small == "fine"
    assert text.startswith("EFBIG")
    assert names_in(tmp_path / "step") == {"worker-0001.safetensors"}
    assert (tmp_path / "latest").read_text() == f"{name}\n"
    assert names_in(tmp_path) == {"latest", "run", "step", name}


def test_a_folder_that_is_gone_or_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_shard(tmp_path / "nowhere", ANY, {}, "{}")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        folder.make_folder(tmp_path / "file" / "step")


# -- broken files ----------------------------------------------------------------------------------------------------------


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of a tensor: the header would fail in other ways
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


def test_every_bit_counts(tmp_path):
    file = tmp_path / save(tmp_path, 5) / shard_name(0)
    content, draw = file.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(content[:8], "little")
    for at in (0, 8, len(content) - 1, *range(8, header, 7), header - 1, *(draw.randrange(len(content)) for _ in range(50))):
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(CheckpointError), Shard(file, 0) as shard:
            shard.verify()
    file.write_bytes(content)
    with Shard(file, 0) as shard:
        shard.verify()


def _entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _with_header(file: Path, change: Callable[[dict[str, Any], int], None], more: int = 0, text: str = "") -> None:
    """Changes a file's header. ``more``: bytes that come after its data, as a hole. ``text``: comes before the header's end."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    change(header, len(data))
    written = (json.dumps(header)[:-1] + text + "}").encode()
    written += b" " * (-len(written) % 8)
    file.write_bytes(struct.pack("<Q", len(written)) + written + data)
    os.truncate(file, 8 + len(written) + len(data) + more)


def _header(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


def _with(dtype: str, shape: list[Any], begin: int, end: int) -> Callable[[Path], object]:
    """An entry of the header that no save writes; its offsets count from the end of the data."""
    return lambda file: _with_header(
        file, lambda header, last: header.update(x=_entry(dtype, shape, last + begin, last + end)), more=8
    )


def _before_the_last(file: Path) -> None:
    _with_header(file, lambda header, _: header.update(x=_entry("U8", [8], 0, 8)), 8)


def _twice(file: Path) -> None:
    _with_header(file, lambda *_: None, 8, ',"w":{"dtype":"U8","shape":[8],"data_offsets":[33,41]}')


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "is missing"),
    "cut": (_cut, "it was cut off"),
    "empty": (lambda file: os.truncate(file, 0), "it was cut off"),
    "longer": (_grow, "its header is broken"),
    "a bit": (_flip, "was changed"),
    "a link": (_link, "it is not a plain file"),
    "a folder": (_folder, "it is not a plain file"),
    "a pipe": (_pipe, "it is not a plain file"),
    "of safetensors": (lambda file: save_file(load_file(file), file), "it is not a shard of a checkpoint"),
    "zeros": (_header(b"\0" * 8), "cannot be used"),
    "ones": (_header(b"\xff" * 100), "cannot be used"),
    "a long header": (_header((10**6).to_bytes(8, "little") + b"{}"), "cannot be used"),
    "no entries": (_header((2).to_bytes(8, "little") + b"{}"), "cannot be used"),
    "no JSON": (_header((6).to_bytes(8, "little") + b'{"a":}'), "cannot be used"),
    "many levels": (_header((5000).to_bytes(8, "little") + b"[" * 5000), "cannot be used"),
    "a shape whose product overflows": (_with("F32", [2**62, 2**62], 0, 8), "cannot be used"),
    "more bytes than the file": (_with("U8", [10**9], 0, 10**9), "cannot be used"),
    "fewer bytes than the shape": (_with("F32", [10**9], 0, 8), "cannot be used"),
    "a negative size": (_with("U8", [-8], 0, 8), "cannot be used"),
    "a negative offset": (_with("U8", [8], -(10**6), 0), "cannot be used"),
    "an offset before the last": (_before_the_last, "cannot be used"),
    "an unknown dtype": (_with("F99", [1], 0, 8), "cannot be used"),
    "a dtype of half bytes": (_with("F4", [16], 0, 8), "cannot be used"),
    "no numbers": (_with("U8", ["8"], 0, 8), "cannot be used"),
    "many dimensions": (_with("U8", [1] * 10**5 + [8], 0, 8), "cannot be used"),
    "a tensor twice": (_twice, "cannot be used"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(tmp_path, name):
    break_it, cause = BROKEN[name]
    file = tmp_path / save(tmp_path, 5) / shard_name(1)
    break_it(file)
    with pytest.raises(CheckpointError) as caught, Shard(file, 1) as shard:
        shard.verify()
    assert str(file) in str(caught.value)
    assert cause in str(caught.value)


def _written(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A shard whose checksums fit."""
    content = {"__tree__": torch.tensor(list(b"{}"), dtype=torch.uint8), **tensors}
    own = {**vars(Record("any", 0, 1, 3, [], sha256=files._digest(content, content))), **changes}
    text = json.dumps({key: value for key, value in own.items() if value != "left out"})
    found = {"format": FORMAT, "version": str(VERSION), "record": text, "sha256": files._sha256(text.encode())}
    save_file(content, path / shard_name(0), found)
    return path / shard_name(0)


def test_a_tree_that_does_not_fit(tmp_path):
    for text, cause in [
        ("{", "malformed"),
        ('{"!tensor":"q"}', "it has no tensor 'q'"),
        ('{"!array":["w","<i4",[7]]}', "does not fit"),
        ("\xff", "malformed"),
    ]:
        tree = torch.tensor(list(text.encode("latin-1")), dtype=torch.uint8)
        with Shard(_written(tmp_path, {"__tree__": tree, "w": torch.ones(1)}), 0) as shard:
            shard.verify()
            with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used") as caught:
                loaded(shard.tree())
        assert cause in str(caught.value)
        assert str(caught.value).count("worker-0000") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 1},
        {"rank": -1},
        {"rank": True},
        {"rank": "0"},
        {"world_size": 0},
        {"world_size": 1.0},
        {"round": -1},
        {"round": None},
        {"step": 3},
        {"model": None},
        {"sha256": 5},
        {"replicas": [[0], [1]]},
        {"replicas": [["0"]]},
        {"replicas": 3},
        {"more": 1},
        {"round": "left out"},
    ],
    ids=str,
)
def test_a_record_that_is_malformed(tmp_path, changes):
    with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used"):
        Shard(_written(tmp_path, {}, **changes), 0)


def test_a_file_that_goes_while_it_is_read(tmp_path):
    tensors = {"a": torch.ones(100_000), "b": torch.ones(100_000)}
    file = write_shard(tmp_path, ANY, tensors, "{}")
    with Shard(file, 0) as shard:
        file.unlink()
        assert torch.equal(shard["a"], tensors["a"])  # it stays until it is closed
    file = write_shard(tmp_path, ANY, tensors, "{}")
    with Shard(file, 0) as shard:
        os.truncate(file, 1000)
        with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used: tensor 'b' cannot be read"):
            shard["b"]
