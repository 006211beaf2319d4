"""A missing, damaged or unreadable checkpoint is never taken for a fresh start; a misfit changes nothing."""

from __future__ import annotations

import copy
import errno
import os
import pickle
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
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from decent_dp.checkpoint import export, latest, load, read_parameters, save
from decent_dp.checkpoint.files import shard_name
from decent_dp.transport import InProcessTransport, run_replicas
from tests.checkpoint_cases import error_of, on
from tests.helpers import alone, assert_same, loss, net, values
from tests.small_checkpoints import craft

# -- nothing there, and nothing to be seen ---------------------------------------------------------------------------------


def test_nothing_there_is_a_fresh_start(tmp_path):
    model = alone(net())
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / ".nfs0001").write_text("")
    for path in (tmp_path / "nowhere" / "at" / "all", tmp_path / "empty", tmp_path / "logs"):
        assert load(model, path, missing_ok=True) is None
        assert latest(path) is None
    model.close()


def test_an_existing_path_that_is_no_checkpoint_is_an_error(tmp_path):
    model = alone(net())
    newest = save(model, tmp_path / "saved").path
    exported = export(model, tmp_path / "model.pt")
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    renamed, empty = tmp_path / "best", tmp_path / "step-00000009-0-9-abcdef-of-2"
    shutil.copytree(newest, renamed)
    (renamed / shard_name(0)).write_bytes(b"")
    empty.mkdir()
    for path in (exported, exported / "below", tmp_path / "link", renamed, empty):
        for look in (lambda path=path: load(model, path, missing_ok=True), lambda path=path: latest(path)):
            kind, text = error_of(look)
            assert kind == "CheckpointError", (path, text)
            assert str(path) in text
    _, text = error_of(lambda: read_parameters(exported))
    assert "model.load_state_dict(safetensors.torch.load_file(path)), or of torch.load(path, weights_only=True)" in text
    assert latest(newest) == newest
    model.close()


def test_a_first_save_that_was_killed_is_a_fresh_start(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        model = on(transport)
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


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("what", [shard_name(0), "saved"])
def test_an_unreadable_folder_is_no_fresh_start(tmp_path, monkeypatch, number, what):
    model, root = alone(net()), tmp_path / "saved"
    save(model, root, {"at": 2})
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
        model = on(transport)
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
        model = on(transport)
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
        model = on(transport, module=module, steps=3)
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
    torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)).load_state_dict(mean)
    for bad, kind in ((2, ValueError), (-1, ValueError), (0.5, TypeError)):
        with pytest.raises(kind, match="rank"):
            read_parameters(tmp_path, bad)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        read_parameters(tmp_path / "nowhere")


# -- what is damaged, or does not fit --------------------------------------------------------------------------------------


class Bomb:
    """Marks that it was executed."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def flipped(step: Path) -> None:
    raw = bytearray((step / shard_name(1)).read_bytes())
    raw[-20] ^= 1
    (step / shard_name(1)).write_bytes(raw)


def swapped(step: Path) -> None:
    for old, new in ((shard_name(1), "third"), (shard_name(0), shard_name(1)), ("third", shard_name(0))):
        (step / old).rename(step / new)


def mixed(step: Path) -> None:
    older = next(path for path in step.parent.glob("step-*") if path != step)
    shutil.copy(older / shard_name(1), step / shard_name(1))


def newer(step: Path) -> None:
    part = step / shard_name(1)
    tensors = load_file(part)
    with safe_open(part, "pt") as opened:
        save_file(tensors, part, {**opened.metadata(), "version": "99"})


def crafted(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Another tree that fits its checksums."""
    return lambda step: craft(step, 1, change)


def without(key: str) -> Callable[[Path], None]:
    return crafted(lambda tree: {k: v for k, v in tree.items() if k != key})


def with_random(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Other random states."""

    def changed(tree: dict[str, Any]) -> dict[str, Any]:
        states = copy.deepcopy(tree["random"])
        change(states)
        return {**tree, "random": states}

    return crafted(changed)


def behind_the_words(states: dict[str, Any]) -> None:
    """A draw would read there."""
    states["torch"][8:12] = torch.tensor([624], dtype=torch.int32).view(torch.uint8)  # left
    states["torch"][16:24] = torch.tensor([600]).view(torch.uint8)  # next


OTHER_GENERATOR = {**np.random.Generator(np.random.PCG64(1)).bit_generator.state, "has_gauss": 0, "gauss": 0.0}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (flipped, "sha256"),
    "missing": (lambda step: (step / shard_name(1)).unlink(), "missing"),
    "swapped": (swapped, "it is the shard of worker"),
    "of another checkpoint": (mixed, "not shards of one checkpoint"),
    "a pickle": (lambda step: (step / shard_name(1)).write_bytes(pickle.dumps(Bomb())), "header"),
    "newer": (newer, "newer decent_dp"),
    "a list": (crafted(lambda tree: [1]), "not the state of a worker"),
    "no snapshot": (without("snapshot"), "not the state of a worker"),
    "no state of the user": (without("state"), "not the state of a worker"),
    "no random states": (without("random"), "random states do not fit"),
    "random states of none": (with_random(dict.clear), "random states do not fit"),
    "half a random state": (with_random(lambda states: states.update(torch=states["torch"][:7])), "random states do not fit"),
    "another generator": (
        with_random(lambda states: states.update(numpy=OTHER_GENERATOR)),
        "random states do not fit.*MT19937",
    ),
    "Python's position behind the words": (
        with_random(lambda states: states["python"][1].__setitem__(-1, 5000)),
        "random states.*invalid state",
    ),
    "NumPy's position behind the words": (
        with_random(lambda states: states["numpy"]["state"].update(pos=1 << 20)),
        "random states do not fit.*(NumPy.*out of range|state position must be)",  # NumPy 2.5 checks it itself
    ),
    "torch's position behind the words": (with_random(behind_the_words), "random states do not fit.*torch.*out of range"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_refused_by_all_and_changes_nothing(tmp_path, monkeypatch, name):
    """Nobody falls back to an older checkpoint without a word, and nothing in a file is executed."""
    damage, pattern = DAMAGES[name]
    monkeypatch.setenv("BOMB", str(tmp_path / "executed"))

    def work(transport: InProcessTransport) -> Any:
        model = on(transport, steps=1)
        save(model, tmp_path / "saved", {"older": True})
        step = save(model, tmp_path / "saved").path
        transport.control.gather(None)
        if transport.rank == 0:
            damage(step)
        for parameter in model.module.parameters():
            parameter.data.fill_(5.0)
        draws = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
        transport.control.gather(None)
        kind, text = error_of(lambda: load(model, tmp_path / "saved"))
        transport.control.gather(None)
        untouched = all((value == 5.0).all() for value in values(model.module).values())
        assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == draws
        model.close()
        return kind, re.sub(r"^worker \d: ", "", text), untouched

    first, second = run_replicas(2, work)
    assert first == second
    assert (first[0], first[2]) == ("CheckpointError", True)
    assert re.search(rf"worker-000[01]\.safetensors.*{pattern}", first[1]), first[1]
    assert not (tmp_path / "executed").exists()


def test_another_model_or_optimizer_is_refused_with_the_folder(tmp_path):
    first = alone(net())
    loss(first, 0).backward()
    folder = save(first, tmp_path).path
    first.close()
    for other, text in (
        (alone(torch.nn.Linear(6, 3)), "is of another model: tensor 0 is parameter '0.weight' [12, 6]"),
        (alone(net(), partial(torch.optim.Adam, lr=0.1)), "does not fit this run: the optimizer was SGD"),
    ):
        loss(other, 0).backward()
        before = values(other.module)
        kind, found = error_of(lambda other=other: load(other, tmp_path))
        assert kind == "CheckpointError"
        assert found.startswith(str(folder))
        assert text in found, found
        assert_same(values(other.module), before)
        other.close()
