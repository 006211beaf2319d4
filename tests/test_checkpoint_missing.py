"""What is gone, broken or cannot be looked at is never taken for a fresh start, and what does not fit changes nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decent_dp.checkpoint import index, latest, load, save
from decent_dp.checkpoint.files import MANIFEST, open_worker, worker_name, write_worker
from decent_dp.checkpoint.tree import encode
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError
from decent_dp.transport import InProcessTransport, run_replicas
from tests import small_checkpoints as small
from tests.checkpoint_cases import error_of
from tests.helpers import SGD, alone, loss, net, values
from tests.small_checkpoints import check, check_tidy

pytestmark = pytest.mark.timeout(60)

# -- the list --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_listed_folder_without_a_manifest_is_named(tmp_path, rank):
    names = [small.save(tmp_path, 2), small.save(tmp_path, 3)][::-1]
    (tmp_path / names[rank] / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"{names[rank]}/manifest\.json is missing.*whole: \S*{names[1 - rank]}\)"):
        index.complete(tmp_path)
    shutil.rmtree(tmp_path / names[rank])
    assert index.complete(tmp_path) == [names[1 - rank]]


def test_what_another_process_takes_off_the_list_meanwhile_is_not_missed(tmp_path, monkeypatch, caplog):
    old, new = small.save(tmp_path, 1), small.save(tmp_path, 2)
    for harm in (lambda: (tmp_path / old / MANIFEST).unlink(), lambda: shutil.rmtree(tmp_path / old)):
        index.switch_latest(tmp_path, [new, old])
        found = [index.read_latest(tmp_path)]
        index.switch_latest(tmp_path, [new])
        harm()
        real = index.read_latest
        with monkeypatch.context() as patch:
            patch.setattr(index, "read_latest", lambda path, found=found, real=real: found.pop() if found else real(path))
            assert index.complete(tmp_path) == [new]
    assert caplog.text == ""


def test_what_cannot_be_looked_at_is_not_taken_for_missing(tmp_path, monkeypatch):
    old, new = small.save(tmp_path, 1), small.save(tmp_path, 2)
    real = os.lstat
    for stale in ("latest", old, MANIFEST):

        def lstat(path: Any, stale: str = stale) -> Any:
            if Path(path).name == stale:
                raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return real(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", lstat)
            with pytest.raises((OSError, CheckpointError), match="Stale file handle"):
                index.complete(tmp_path)
            if stale != MANIFEST:
                with pytest.raises((OSError, CheckpointError), match="Stale file handle"):
                    small.save(tmp_path, 3)
        assert index.read_latest(tmp_path) == index.complete(tmp_path) == [new, old], stale
        assert [check(tmp_path / name) for name in (new, old)] == [2, 1]
    small.save(tmp_path, 4)
    check_tidy(tmp_path)


@pytest.mark.parametrize("harm", ["gone", "cut", "link"])
def test_no_switch_to_a_checkpoint_whose_files_are_not_there(tmp_path, harm):
    old, name = small.save(tmp_path, 1, keep=1), index.folder_name(2, "run", 2)
    manifest = small.write(index.make_folder(tmp_path, name), 2)
    part = tmp_path / name / worker_name(1)
    if harm == "cut":
        os.truncate(part, 10)
    else:
        part.rename(tmp_path / "elsewhere")
    if harm == "link":
        part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=worker_name(1)):
        index.commit(tmp_path, name, manifest, 1)
    assert index.read_latest(tmp_path) == [old]
    assert check(tmp_path / old) == 1
    assert not (tmp_path / name).exists()
    # Where it is on another disk nobody can look.
    manifest = small.write(index.make_folder(tmp_path, name), 2)
    part.unlink()
    assert index.commit(tmp_path, name, manifest, 1, manifest.files[:1]) == [name]


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
    (renamed / MANIFEST).unlink()
    empty = root / "step-00000009-abcdef"
    empty.mkdir()
    return {
        "a file": root / "file",
        "below a file": root / "file" / "below",
        "a link to nothing": root / "link",
        "a checkpoint under another name, without its manifest": renamed,
        "a checkpoint without its manifest": empty,
    }


def test_what_is_there_and_is_no_checkpoint_is_an_error(tmp_path):
    model = alone(net())
    newest = save(model, tmp_path / "saved").path
    for name, path in broken_paths(tmp_path, newest).items():
        for look in (lambda path=path: load(model, path, missing_ok=True), lambda path=path: latest(path)):
            kind, text = error_of(look)
            assert kind == "CheckpointError", (name, text)
            assert str(path) in text, name
    assert latest(newest) == newest
    model.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("what", ["latest", MANIFEST, "saved"])
def test_what_cannot_be_read_is_no_fresh_start(tmp_path, monkeypatch, number, what):
    model, root = alone(net()), tmp_path / "saved"
    for t in range(3):
        loss(model, t).backward()
        save(model, root, at=t)
    names, real = (root / "latest").read_text(), os.lstat

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
        if what == "latest":
            failed = save(model, root, at="alone")
            assert isinstance(failed.error, CheckpointError)
    assert (root / "latest").read_text() == names
    assert load(model, root) == {"at": 2}
    model.close()


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


# What a part may hold that its checksum fits, and what is said of it.
TREES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda tree: [1], "not the state of a worker"),
    "no snapshot": (lambda tree: without(tree, "snapshot"), "not the state of a worker"),
    "no extras": (lambda tree: without(tree, "extra"), "not the state of a worker"),
    "no random states": (lambda tree: without(tree, "random"), "random states do not fit"),
    "random states of none": (lambda tree: {**tree, "random": {}}, "random states do not fit"),
    "another generator": (
        lambda tree: {**tree, "random": {**tree["random"], "numpy": other_generator()}},
        "random states do not fit.*MT19937",
    ),
    "half a state": (
        lambda tree: {**tree, "random": {**tree["random"], "torch": tree["random"]["torch"][:7]}},
        "random states do not fit",
    ),
}


def craft(folder: Path, rank: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another tree in a worker's file, with a manifest that fits."""
    with open_worker(folder, rank) as reader:
        tree = reader.tree()
    text, tensors = encode(change(tree), "")
    info = write_worker(folder, rank, tensors, text)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][rank] = vars(info)
    (folder / MANIFEST).write_text(json.dumps(manifest))


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
    first, second = run_replicas(2, work, 10)
    assert first == second
    assert first[0] == "CheckpointError"
    assert first[2]
    assert re.search(rf"worker-0001\.safetensors cannot be used: .*{pattern}", first[1]), first[1]
    assert (random.getstate(), str(np.random.get_state())) == before
