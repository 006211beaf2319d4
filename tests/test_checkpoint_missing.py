"""A missing, broken or unreadable checkpoint is never taken for a fresh start, and a misfit changes nothing."""

from __future__ import annotations

import copy
import errno
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp.checkpoint import export, latest, load, read_parameters, save
from decent_dp.checkpoint.files import shard_name
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport import InProcessTransport, run_replicas
from tests.checkpoint_cases import error_of
from tests.helpers import SGD, alone, assert_same, loss, net, values
from tests.small_checkpoints import craft

# -- nothing there, and nothing to be seen -------------------------------------------------------------------------------


def test_nothing_there_is_a_fresh_start(tmp_path):
    model = alone(net())
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / ".nfs0001").write_text("")
    for path in (tmp_path / "nowhere" / "at" / "all", tmp_path / "empty", tmp_path / "logs"):
        assert load(model, path, missing_ok=True) is None
        assert latest(path) is None
    model.close()


def broken_paths(root: Path, newest: Path) -> dict[str, Path]:
    """Paths at which there is something, and no checkpoint."""
    (root / "file").write_text("x")
    (root / "link").symlink_to(root / "not mounted")
    renamed = root / "best"
    shutil.copytree(newest, renamed)
    (renamed / shard_name(0)).write_bytes(b"")
    empty = root / "step-00000009-0-9-abcdef-of-2"
    empty.mkdir()
    return {
        "a file": root / "file",
        "below a file": root / "file" / "below",
        "a link to nothing": root / "link",
        "a checkpoint under another name, with a broken shard": renamed,
        "a checkpoint without its shards": empty,
    }


def test_an_existing_path_that_is_no_checkpoint_is_an_error(tmp_path):
    model = alone(net())
    newest = save(model, tmp_path / "saved").path
    for name, path in broken_paths(tmp_path, newest).items():
        for look in (lambda path=path: load(model, path, missing_ok=True), lambda path=path: latest(path)):
            kind, text = error_of(look)
            assert kind == "CheckpointError", (name, text)
            assert str(path) in text, name
    assert latest(newest) == newest
    model.close()


@pytest.mark.parametrize("path", ["model.safetensors", "model.pt"])
def test_a_file_of_another_kind_says_what_reads_it(tmp_path, path):
    model = alone(net())
    export(model, tmp_path / path)
    for look in (lambda: load(model, tmp_path / path, missing_ok=True), lambda: read_parameters(tmp_path / path)):
        kind, text = error_of(look)
        assert kind == "CheckpointError"
        assert f"{tmp_path / path} cannot be read: it is not a folder of checkpoints" in text
        assert "model.load_state_dict(safetensors.torch.load_file(path)), or of torch.load(path, weights_only=True)" in text
    model.close()


def test_a_first_save_that_was_killed_is_a_fresh_start(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        path = save(model, tmp_path).path
        transport.control.gather(None)
        if transport.rank == 0:  # as it was before the second shard was written
            (path / shard_name(1)).unlink()
            (tmp_path / "latest").unlink()
        transport.control.gather(None)
        found = error_of(lambda: load(model, tmp_path)), load(model, tmp_path, missing_ok=True)
        newest = save(model, tmp_path, {"at": 1}).path
        transport.control.gather(None)
        names = sorted(p.name for p in tmp_path.iterdir())
        model.close()
        return found, names == ["latest", "run", newest.name]

    for ((kind, text), nothing), tidy in run_replicas(2, work):
        assert kind == "FileNotFoundError"
        assert "no worker sees a complete checkpoint" in text
        assert nothing is None
        assert tidy


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("what", [shard_name(0), "saved"])
def test_an_unreadable_folder_is_no_fresh_start(tmp_path, monkeypatch, number, what):
    model, root = alone(net()), tmp_path / "saved"
    for t in range(3):
        loss(model, t).backward()
        save(model, root, {"at": t})
    real = os.lstat

    def lstat(path: Any) -> Any:
        if Path(path).name == what:
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lstat)
        kind, text = error_of(lambda: load(model, root, missing_ok=True))
        assert kind == "CheckpointError"
        assert os.strerror(number) in text
        assert what in text
    assert load(model, root) == {"at": 2}
    model.close()


def test_disks_that_were_renumbered_are_named(tmp_path):
    """Every shard is there, and no worker finds its own."""

    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        save(model, tmp_path / f"disk{transport.rank}")
        transport.control.gather(None)
        other = tmp_path / f"disk{1 - transport.rank}"
        found = [error_of(partial(load, model, other, resize=how)) for how in (None, "mean")]
        model.close()
        return found

    first, second = run_replicas(2, work)
    assert first == second
    for kind, text in first:
        assert kind == "CheckpointError"
        assert "worker 0: " in text
        assert "worker-0000.safetensors is missing. This disk has the shards of the workers 1." in text
        assert "start the workers where they were, with the same ranks" in text


def test_copies_of_a_shard_that_differ_are_named(tmp_path):
    """Each worker's disk has all shards, and not the same ones."""

    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        path = save(model, tmp_path / "disk0").path
        transport.control.gather(None)
        if transport.rank == 0:
            shutil.copytree(tmp_path / "disk0", tmp_path / "disk1")
            craft(tmp_path / "disk1" / path.name, 0, lambda tree: {**tree, "state": {"other": 1}})
        transport.control.gather(None)
        found = error_of(lambda: load(model, tmp_path / f"disk{transport.rank}", resize="mean"))
        model.close()
        return found

    for kind, text in run_replicas(2, work):
        assert kind == "CheckpointError"
        assert "workers 0 and 1 see different files worker-0000.safetensors in " in text


def test_parameters_are_read_without_a_run(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        torch.manual_seed(transport.rank)
        module = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))
        model = DecentralizedDataParallel(module, SGD, topology="ring", transport=transport)
        for t in range(3):
            loss(model, t, transport.rank).backward()
        save(model, tmp_path)
        found = values(model.module), module[1].running_mean.clone()
        model.close()
        return found

    (first, one), (second, other) = run_replicas(2, work)
    for rank, own in enumerate((first, second)):
        assert_same(read_parameters(tmp_path, rank), own)
    mean = read_parameters(str(latest(tmp_path)), buffers=True)
    for name, value in first.items():
        torch.testing.assert_close(mean[name], (value + second[name]) / 2, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(mean["1.running_mean"], (one + other) / 2)
    fresh = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3))
    fresh.load_state_dict(mean)
    for bad, kind in ((2, ValueError), (-1, ValueError), (0.5, TypeError)):
        with pytest.raises(kind, match="rank"):
            read_parameters(tmp_path, bad)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        read_parameters(tmp_path / "nowhere")


@pytest.mark.parametrize("call", [save, load, lambda _, path: latest(path)])
def test_no_path_is_no_path(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a save would go that takes '' for the current folder
    model = alone(net())
    with pytest.raises(ValueError, match="path must be the folder for checkpoints, got ''"):
        call(model, "")
    with pytest.raises(TypeError, match="path must be the folder for checkpoints, got 3"):
        call(model, 3)
    model.close()


# -- what does not fit -----------------------------------------------------------------------------------------------------


def other_generator() -> dict[str, Any]:
    state = np.random.Generator(np.random.PCG64(1)).bit_generator.state
    return {**state, "has_gauss": 0, "gauss": 0.0}


def without(tree: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in tree.items() if k != key}


def moved(tree: dict[str, Any], which: str) -> dict[str, Any]:
    """A random state whose position is behind its words: a draw would read there."""
    states = copy.deepcopy(tree["random"])
    if which == "python":
        states["python"][1][-1] = 5000
    elif which == "numpy":
        states["numpy"]["state"]["pos"] = 1 << 20
    else:
        states["torch"][8:12] = torch.tensor([624], dtype=torch.int32).view(torch.uint8)  # left
        states["torch"][16:24] = torch.tensor([600]).view(torch.uint8)  # next
    return {**tree, "random": states}


# Contents of a part that fit its checksum, with their errors.
TREES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda tree: [1], "not the state of a worker"),
    "no snapshot": (lambda tree: without(tree, "snapshot"), "not the state of a worker"),
    "no state of the user": (lambda tree: without(tree, "state"), "not the state of a worker"),
    "no random states": (lambda tree: without(tree, "random"), "random states do not fit"),
    "random states of none": (lambda tree: {**tree, "random": {}}, "random states do not fit"),
    "another generator": (
        lambda tree: {**tree, "random": {**tree["random"], "numpy": other_generator()}},
        "random states do not fit.*MT19937",
    ),
    "a position of Python behind the words": (
        lambda tree: moved(tree, "python"),
        "random states.*invalid state",
    ),
    "a position of NumPy behind the words": (
        lambda tree: moved(tree, "numpy"),
        "random states do not fit.*(NumPy.*out of range|state position must be)",  # NumPy 2.5 checks it itself
    ),
    "a position of torch behind the words": (
        lambda tree: moved(tree, "torch"),
        "random states do not fit.*torch.*out of range",
    ),
    "half a state": (
        lambda tree: {**tree, "random": {**tree["random"], "torch": tree["random"]["torch"][:7]}},
        "random states do not fit",
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_a_part_that_does_not_fit_is_refused_by_all_and_changes_nothing(tmp_path, name):
    change, pattern = TREES[name]

    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        loss(model, 0, transport.rank).backward()
        folder = save(model, tmp_path).path
        transport.control.gather(None)
        if transport.rank == 1:
            craft(folder, 1, change)
        for parameter in model.module.parameters():
            parameter.data.fill_(5.0)
        transport.control.gather(None)
        kind, text = error_of(lambda: load(model, tmp_path))
        transport.control.gather(None)
        untouched = all((value == 5.0).all() for value in values(model.module).values())
        model.close()
        return kind, text.removeprefix("worker 1: "), untouched

    before = random.getstate(), str(np.random.get_state())
    first, second = run_replicas(2, work)
    assert first == second
    assert first[0] == "CheckpointError"
    assert first[2]
    assert re.search(rf"worker-0001\.safetensors cannot be used: .*{pattern}", first[1]), first[1]
    assert (random.getstate(), str(np.random.get_state())) == before
