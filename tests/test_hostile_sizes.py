"""Checkpoints and messages of hostile size: one error on all workers, soon and in little memory; and large honest ones load."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import resource
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import decent_dp
from decent_dp import serialization
from decent_dp.checkpoint import latest, load, read_parameters, save
from decent_dp.checkpoint.files import Record, Shard, shard_name, write_shard
from decent_dp.errors import CheckpointError
from decent_dp.replica import state_receiver
from decent_dp.replica.transfer import PartialState, unpack_message
from decent_dp.serialization import decode, encode, loaded
from tests.checkpoint_cases import error_of, make, noisy_net, run
from tests.helpers import loss, values
from tests.small_checkpoints import craft

MIB = 2**20
# Hashes of integers are the integers modulo this prime.
PRIME = 2**61 - 1
# All of the cases of `test_a_load_of_hostile_size` are loaded in so much memory more than the run needs.
ROOM = 384 * MIB
# Seconds of this process, on a machine of which others use a part. Before there were bounds, some cases took minutes.
SOON = 10.0


# -- files -----------------------------------------------------------------------------------------------------------------


def put(path: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    """A change of a tree."""
    *way, last = path.split("/")

    def change(tree: dict[str, Any]) -> Any:
        inner = tree
        for key in way:
            inner = inner[key]
        inner[last] = value
        return tree

    return change


def retold(step: Path, body: str, **more: Tensor) -> None:
    """The user's state of worker 1 has ``x``, with this JSON, and these tensors; the checksums fit."""
    with Shard(step / shard_name(1), 1) as shard:
        tree, record = loaded(shard.tree()), shard.record
    text, tensors = encode({**tree, "state": {**tree["state"], "x": "MARK", **more}})
    assert text.count('"MARK"') == 1
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    write_shard(step, record, contiguous, text.replace('"MARK"', body))


def reheaded(file: Path, change: Callable[[dict[str, Any], int], None], more: int = 0, text: str = "") -> None:
    """Changes a file's header. ``more``: bytes that come after its data, as a hole. ``text``: comes before the header's end."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    change(header, len(data))
    written = (json.dumps(header)[:-1] + text + "}").encode()
    written += b" " * (-len(written) % 8)
    file.write_bytes(struct.pack("<Q", len(written)) + written + data)
    os.truncate(file, 8 + len(written) + len(data) + more)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def hole(file: Path, size: int, *, tree: bool = False) -> None:
    """A tensor of ``size`` bytes of which none is on the disk; ``tree``: it has the place of the tree."""

    def change(header: dict[str, Any], end: int) -> None:
        if tree:
            header["old"] = header.pop("__tree__")
        header["__tree__" if tree else "more"] = entry("U8", [size], end, end + size)

    reheaded(file, change, size)


def many_tensors(file: Path, n: int) -> None:
    def text() -> Iterator[str]:
        end = file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")
        for i in range(n):
            yield f',"x{i}":{{"dtype":"U8","shape":[0],"data_offsets":[{end},{end}]}}'

    reheaded(file, lambda header, end: None, text="".join(text()))


def many_steps(root: Path) -> None:
    for i in range(4200):
        (root / f"step-{90 + i:08d}-7-{i}-abcdef-of-2").mkdir()


def long_record(step: Path) -> None:
    with Shard(step / shard_name(1), 1) as shard:
        (text, tensors), record = encode(loaded(shard.tree())), shard.record
    record = replace(record, model=[["parameter", "x" * 10**6, [], "", [], ""], *record.model])
    write_shard(step, record, {key: tensor.contiguous() for key, tensor in tensors.items()}, text)


def harms(step: Path) -> dict[str, tuple[Callable[[], Any], str]]:
    """What is done to the files of worker 1, and the cause in the error."""
    file = step / shard_name(1)
    keys = {f"k{i}": i for i in range(200_000)}
    three = torch.zeros(3)

    def crafted(path: str, value: Any) -> Callable[[], None]:
        return lambda: craft(step, 1, put(path, value))

    return {
        "a header": (lambda: many_tensors(file, 600_000), "worker-0001.*header has [0-9]+ bytes"),
        "tensors in the header": (lambda: many_tensors(file, 80_000), "worker-0001.*has 800[0-9]+ tensors, too many"),
        "a tensor of 1 TB": (lambda: hole(file, 10**12), "worker-0001.*on the disk"),
        "a tensor of 1 GB": (lambda: hole(file, 10**9), "worker-0001.*on the disk"),
        "a tree of 1 GB": (lambda: hole(file, 10**9, tree=True), "worker-0001.*on the disk"),
        "empty folders": (lambda: many_steps(step.parent), "no checkpoint in .* can be loaded.*and 61 more"),
        "a record": (lambda: long_record(step), "another model.*xxx \\.\\.\\. xxx"),
        "lists": (lambda: retold(step, f"[{'[],' * 2_000_000}0]"), "worker-0001.*too many values"),
        "one hash": (
            lambda: retold(step, '{"!dict":[' + ",".join(f"[{k * PRIME},0]" for k in range(60_000)) + "]}"),
            "worker-0001.*many of its keys have one hash",
        ),
        "one tensor often": (
            lambda: retold(step, "[" + ",".join(['{"!tensor":"state.big"}'] * 1000) + "]", big=torch.zeros(MIB)),
            "worker-0001.*same tensors too often",
        ),
        "names of tensors": (
            lambda: retold(step, "[" + ",".join(['{"!tensor":"state.n"}'] * 100_000) + "]"),
            "worker-0001.*same tensors too often",
        ),
        "levels": (lambda: retold(step, "[" * 10**6 + "]" * 10**6), "worker-0001.*too many"),
        "keys of the tree": (lambda: craft(step, 1, lambda tree: {**tree, **keys}), "worker-0001.*not the state of a worker"),
        "keys of the parameters": (crafted("snapshot/parameters", keys), "'0.weight' is not in the snapshot"),
        "a name": (crafted("snapshot/driver", "x" * 10**6), "saved by xxx"),
        "a round": (crafted("snapshot/round", 10**400), "'round' is 1000"),
        "words": (crafted("random/python", [3, np.full(12 * MIB, 1000, np.uint16), None]), "worker-0001.*random states"),
        # Plain data is wanted at these places.
        "a tensor for the compression": (crafted("snapshot/compression", three), "'compression' is tensor"),
        "a tensor for an entry": (crafted("snapshot/compression/0.weight", three), "does not fit this run"),
        "a tensor for the order": (crafted("snapshot/order", three), "does not fit this run"),
        "a tensor for the round": (crafted("snapshot/round", three), "'round' is tensor"),
    }


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """An allocation of more than ``ROOM`` fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def hostile(rank: int, n: int, path: str) -> Any:
    root = Path(path)
    model = make("int8")
    control = model.replica.peers.control
    run(model, "int8", rank, 0, 3)
    save(model, root, {"n": torch.zeros(())})
    step, found = latest(root), {}
    assert step is not None
    good = (step / shard_name(1)).read_bytes()
    for name, (harm, _) in harms(step).items():
        if rank == 0:
            harm()
        control.gather(None)
        before, began = values(model.module), time.process_time()
        with little_memory():
            kind, text = error_of(lambda: load(model, root))
        took = time.process_time() - began
        assert all(torch.equal(before[key], value) for key, value in values(model.module).items()), name
        control.gather(None)
        found[name] = kind, text, took
        if rank == 0:
            (step / shard_name(1)).write_bytes(good)
            for other in root.glob("step-*-7-*"):
                other.rmdir()
    control.gather(None)
    resumed = load(model, root)
    model.close()
    assert resumed is not None
    return found


@pytest.mark.slow
def test_a_load_of_hostile_size(workers, tmp_path):
    results = workers(2, hostile, str(tmp_path / "saved"), timeout=180)
    for name, (_, pattern) in harms(tmp_path).items():
        assert {found[name][0] for found in results} == {"CheckpointError"}, (name, results[0][name])
        assert len({found[name][1].removeprefix("worker 1: ") for found in results}) == 1, name
        for _, text, took in (found[name] for found in results):
            assert re.search(pattern, text, re.DOTALL), (name, text)
            assert len(text) < 2200, name
            assert took < SOON, (name, took)


# -- values of another kind ------------------------------------------------------------------------------------------------


def places(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the dicts, lists and values of a tree are; of a list the first two."""
    for key, inner in (
        tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, (list, tuple)) else ()
    ):
        yield (*way, key)
        yield from places(inner, (*way, key))


def with_another(tree: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    made = {key: with_another(inner, way[1:], value) if key == way[0] else inner for key, inner in members}
    return made if isinstance(tree, dict) else type(tree)(made.values())


OTHERS: list[Any] = [torch.zeros(3), {"a": 1}, [1, {"b": 2}], 10**400]


def replaced(rank: int, n: int, path: str, kind: str, resize: str | None, every: int) -> Any:
    """Each place of the snapshot of worker 0 has a value of another kind. Returns the errors, and whether the model changed."""
    root, found = Path(path), []
    if kind == "gossip":
        module = noisy_net(0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model: Any = decent_dp.gossip(module, optimizer, topology="ring", compression="int8")
        for t in range(3):
            optimizer.zero_grad()
            loss(module, t, rank).backward()
            optimizer.step()
        control = model.world.control
    else:
        model = make(kind)
        run(model, kind, rank, 0, 4)
        module, control = model.module, model.replica.world.control
    save(model, root, {"a": [1, torch.zeros(2)]})
    step = latest(root)
    assert step is not None
    file = step / shard_name(0)
    good = file.read_bytes()
    with Shard(file, 0) as shard:
        tree = loaded(shard.tree())
    parts = {key: tree[key] for key in ("snapshot", "random")}
    cases = [(way, other) for way in places(parts) for other in OTHERS]
    for way, other in [case for i, case in enumerate(cases) if i % every == 0 or (len(case[0]) == 2 and case[1] is OTHERS[0])]:
        control.gather(None)
        if rank == 0:
            craft(step, 0, lambda tree, way=way, other=other: with_another(tree, way, other))  # type: ignore[misc]
        control.gather(None)
        before = values(module)
        kind_of_error, text = error_of(lambda: load(model, root, resize=resize))
        same = not kind_of_error or all(torch.equal(before[key], value) for key, value in values(module).items())
        found.append((way, kind_of_error, text.removeprefix("worker 0: "), same))
        control.gather(None)
        if rank == 0:
            file.write_bytes(good)
    model.close()
    return found


@pytest.mark.parametrize(
    ("kind", "resize", "every"),
    [
        ("gossip", "mean", 83),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in itertools.product(("gossip", "int8"), (None, "mean"))),
    ],
)
def test_a_value_of_another_kind_loads_or_is_refused_by_all(workers, tmp_path, kind, resize, every):
    first, second = workers(2, replaced, str(tmp_path / "saved"), kind, resize, every, timeout=600 if every == 1 else 90)
    assert first == second
    assert {(kind, same) for _, kind, _, same in first} == {("", True), ("CheckpointError", True)}


# -- headers ---------------------------------------------------------------------------------------------------------------

HEADERS: dict[str, Callable[[dict[str, Any], int], None]] = {
    "a shape whose product overflows": lambda header, end: header.update(x=entry("F32", [2**62, 2**62], end, end + 8)),
    "more bytes than the file": lambda header, end: header.update(x=entry("U8", [10**9], end, end + 10**9)),
    "fewer bytes than the shape": lambda header, end: header.update(x=entry("F32", [10**9], end, end + 8)),
    "a negative size": lambda header, end: header.update(x=entry("U8", [-8], end, end + 8)),
    "a negative offset": lambda header, end: header.update(x=entry("U8", [8], -8, 0)),
    "an offset before the last": lambda header, end: header.update(x=entry("U8", [8], 0, 8)),
    "an unknown dtype": lambda header, end: header.update(x=entry("F99", [1], end, end + 8)),
    "a dtype of half bytes": lambda header, end: header.update(x=entry("F4", [16], end, end + 8)),
    "no numbers": lambda header, end: header.update(x=entry("U8", ["8"], end, end + 8)),  # type: ignore[list-item]
    "many dimensions": lambda header, end: header.update(x=entry("U8", [1] * 10**5 + [8], end, end + 8)),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_header_that_no_save_writes(tmp_path, change):
    file = write_shard(tmp_path, Record("any", 0, 1, 3, []), {"a": torch.ones(3)}, '{"a":{"!tensor":"a"}}')
    reheaded(file, change, 8)
    with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used"), Shard(file, 0) as shard:
        shard.verify()


def test_a_tensor_that_is_twice_in_the_header(tmp_path):
    file = write_shard(tmp_path, Record("any", 0, 1, 3, []), {"a": torch.ones(3)}, '{"a":{"!tensor":"a"}}')
    reheaded(file, lambda header, end: None, 8, ',"a":{"dtype":"U8","shape":[8],"data_offsets":[33,41]}')
    with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used"), Shard(file, 0) as shard:
        shard.verify()


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    file = write_shard(tmp_path, Record("any", 0, 1, 3, []), {"a": torch.ones(30_000)}, '{"a":{"!tensor":"a"}}')
    with Shard(file, 0) as shard:
        os.truncate(file, 1000)
        for read in (shard.verify, lambda: loaded(shard.tree())):
            with pytest.raises(CheckpointError, match=r"worker-0000\.safetensors cannot be used"):
                read()


def test_a_tensor_that_does_not_fit_into_memory(tmp_path):
    file = write_shard(tmp_path, Record("any", 0, 1, 3, []), {"a": torch.ones(3)}, '{"a":{"!tensor":"a"}}')
    hole(file, 2 * ROOM)
    with (
        Shard(file, 0, [2 * ROOM]) as shard,
        little_memory(),
        pytest.raises(CheckpointError, match="tensor 'more' cannot be read"),
    ):
        shard.verify()


def test_a_record_with_a_long_name(tmp_path):
    with pytest.raises(TypeError, match="a name that is too long"):
        Record("x" * 256, 0, 1, 3, [])


def test_a_sparse_tensor_becomes_dense_in_the_shape_of_another_only(tmp_path):
    """In means: here it would have 8 TB."""
    root = tmp_path / "step-00000007-0-0-abcdef-of-2"
    root.mkdir()
    huge = torch.sparse_coo_tensor([[1]], [2.0], (2**40,), check_invariants=True)
    for rank, bias in enumerate([huge, torch.ones(3)]):
        snapshot = {"parameters": {"bias": bias}, "buffers": {}, "optim": {}, "grads": {}}
        text, tensors = encode({"snapshot": snapshot, "random": None, "state": {}})
        write_shard(root, Record(root.name, rank, 2, 7, []), tensors, text)
    with pytest.raises(CheckpointError, match="parameter 'bias' has another shape or dtype"):
        read_parameters(root)


# -- what save refuses, and what is large and loads ------------------------------------------------------------------------


def test_a_state_that_no_load_would_read_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(serialization, "_MOST_VALUES", 400)
    for made in (lambda n: [1.5] * n, lambda n: dict.fromkeys(map(str, range(n)), 0), lambda n: [[]] * n, lambda n: [()] * n):
        kinds = []
        for n in range(0, 500, 5):
            kinds += [error_of(lambda made=made, n=n: decode(*encode(made(n))))]  # type: ignore[arg-type, misc]
        assert sorted(set(kinds)) == [
            ("", ""),
            ("ValueError", "the state has too many values to be read again: keep numbers in tensors or arrays"),
        ]
    tensors = dict.fromkeys(map(str, range(66_000)), torch.zeros(()))
    with pytest.raises(ValueError, match=r"at most 65536 tensors, got 66001: stack those"):
        write_shard(tmp_path, Record("any", 0, 1, 3, []), tensors, "{}")


def test_large_dicts_of_integers_load():
    draw = random.Random(1)
    for keys in (
        range(50_000),
        range(-20_000, 20_000),
        [k << 43 for k in range(87_381)],  # the most tries of all multiples of powers of two: the table is full
        [k * 10**9 for k in range(20_000)],
        [1_700_000_000_000 + k for k in range(20_000)],
        [(a << 32) | b for a in range(200) for b in range(200)],
        [draw.getrandbits(64) for _ in range(50_000)],
        [k * PRIME for k in range(32)],
    ):
        tree = dict.fromkeys(keys, 0)
        text, tensors = encode(tree)
        assert decode(text, tensors.__getitem__) == tree


# -- messages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"[" * 10**6, "too many"),
        (b'{"a":' * 50_000, "too many levels"),
        (b"[" + b"[]," * 340_000 + b"0]", "no dict"),
        (b'{"a":' + b"1" * 10_000 + b"}", "4300"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":"\xff"}', "no JSON"),
    ],
    ids=["levels of lists", "levels of dicts", "lists", "digits", "twice", "no text"],
)
def test_a_message_of_hostile_size(message, cause):
    with pytest.raises(ConnectionError, match=cause):
        unpack_message(message + b"\n")


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        ([["a", "uint8", [10**12]]], "1000000000000 bytes, and 67108864 are allowed"),
        ([["a", "float32", [2**14, 2**10]], ["b", "uint8", [1]]], "67108865 bytes"),
        ([["a", "uint8", [-1]]], "negative"),
        ([["a", "float32", [2**62, 2**62]]], "no state can begin"),
        ([["a", "float99", [1]]], "no dtype 'float99'"),
        ([["a", "uint8", [2.5]]], "no state can begin"),
        ([["a"]], "no state can begin"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_state_of_hostile_size(tensors, cause):
    header = json.dumps({"tree": "null", "tensors": tensors}).encode()
    partial = PartialState(state_receiver._LEAST)
    partial.begin("c", len(header) + 10**6, len(header))
    with pytest.raises(ConnectionError, match=cause):
        partial.add(memoryview(header))
    assert (partial.name, partial.filled) == (None, 0)


@pytest.mark.parametrize(("size", "header"), [(10, 11), (2**40, 2**31), (10, 0), (10, -1)], ids=lambda value: str(value))
def test_a_header_of_hostile_size(size, header):
    with pytest.raises(ConnectionError, match="no state can begin with a header of"):
        PartialState().begin("c", size, header)


def test_a_state_with_more_bytes_than_it_announced():
    header = json.dumps({"tree": "null", "tensors": [["a", "uint8", [3]]]}).encode()
    partial = PartialState()
    partial.begin("c", len(header) + 3, len(header))
    with pytest.raises(ConnectionError, match="more than the"):
        partial.add(memoryview(header + bytes(4)))


def test_a_state_whose_tensors_are_not_as_large_as_it():
    header = json.dumps({"tree": "null", "tensors": [["a", "uint8", [3]]]}).encode()
    partial = PartialState()
    partial.begin("c", len(header) + 4, len(header))
    with pytest.raises(ConnectionError, match="its tensors have 3 bytes, and 4 are to come"):
        partial.add(memoryview(header))
