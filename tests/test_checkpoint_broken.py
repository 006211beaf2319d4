"""A broken checkpoint is refused by all workers, with the file and the cause; nothing is executed, and nothing is changed."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from decent_dp.checkpoint import latest, load, save
from decent_dp.ddp import DecentralizedDataParallel
from tests.checkpoint_cases import AT, STEPS, error_of, make, run, state
from tests.helpers import SGD, alone, assert_same, values

# -- what is broken ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_it_was(folder: Path) -> Iterator[None]:
    copy = folder.with_name(folder.name + "-copy")
    shutil.copytree(folder, copy)
    try:
        yield
    finally:
        shutil.rmtree(folder)
        copy.rename(folder)


def harms(newest: Path) -> dict[str, tuple[Callable[[], Any], str, str]]:
    """A damage to a checkpoint, with the error and its text."""
    part, other = newest / "worker-0001.safetensors", newest / "worker-0000.safetensors"

    def flip() -> None:
        raw = bytearray(part.read_bytes())
        raw[-20] ^= 1
        part.write_bytes(raw)

    def swapped() -> None:
        part.rename(newest / "third")
        other.rename(part)
        (newest / "third").rename(other)

    def mixed() -> None:
        older = next(path for path in newest.parent.glob("step-*") if path != newest)
        shutil.copy(older / part.name, part)

    def newer() -> None:
        tensors = load_file(part)
        with safe_open(part, "pt") as opened:
            save_file(tensors, part, {**opened.metadata(), "version": "99"})

    return {
        "flipped": (flip, "CheckpointError", "worker-0001.*sha256"),
        "missing": (part.unlink, "CheckpointError", "worker-0001.*missing"),
        "swapped": (swapped, "CheckpointError", "worker-000[01].*it is the shard of worker [01]"),
        "of another checkpoint": (mixed, "CheckpointError", "worker-0001.*not shards of one checkpoint"),
        "a pickle": (lambda: part.write_bytes(pickle.dumps(Bomb())), "CheckpointError", "worker-0001.*header"),
        "newer": (newer, "CheckpointError", "worker-0001.*newer decent_dp"),
    }


class Bomb:
    """Marks that it was executed."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def broken(rank: int, n: int, path: str) -> Any:
    root = Path(path)
    os.environ["BOMB"] = str(root.parent / "executed")
    model = make("int8")
    run(model, "int8", rank, 0, AT)
    save(model, root, {"older": True})  # nobody falls back to it without a word
    save(model, root, {"n": n})
    run(model, "int8", rank, AT, AT + 2)
    newest = latest(root)
    assert newest is not None
    found = {}
    for name, (harm, _, _) in harms(newest).items():
        model.replica.world.control.gather(None)
        with contextlib.ExitStack() as undone:
            if rank == 0:
                undone.enter_context(as_it_was(root))
                harm()
            model.replica.world.control.gather(None)
            before, draws = values(model.module), (random.getstate(), torch.get_rng_state())
            found[name] = error_of(lambda: load(model, root))
            assert all(torch.equal(before[k], v) for k, v in values(model.module).items()), name
            assert random.getstate() == draws[0]
            assert torch.equal(torch.get_rng_state(), draws[1])
            model.replica.world.control.gather(None)
    # After all of that, the exchange under way is still the one that it was.
    run(model, "int8", rank, AT + 2, STEPS)
    found["after"] = state(model)
    twin = make("int8")
    run(twin, "int8", rank, 0, STEPS)
    found["twin"] = {k: v for k, v in state(twin).items() if k.startswith(("parameter", "state"))}

    other = DecentralizedDataParallel(nn.Linear(6, 3), SGD, topology="ring")
    found["another model"] = error_of(lambda: load(other, root))
    for wrapper in (model, twin, other):
        wrapper.close()
    return found


def test_broken_files_are_refused_on_all_workers(workers, tmp_path):
    results = workers(2, broken, str(tmp_path / "saved"))
    for name, (_, kind, pattern) in harms(tmp_path / "any").items():
        texts = {found[name] for found in results}
        assert {found[name][0] for found in results} == {kind}, (name, texts)
        for found in results:
            assert re.search(pattern, found[name][1]), (name, texts)
        assert len({text.removeprefix("worker 1: ") for _, text in texts}) == 1, (name, texts)
    for found in results:
        kind, text = found["another model"]
        assert kind == "CheckpointError"
        assert "another model" in text
        assert "'0.weight' [16, 6]" in text
    assert not (tmp_path / "executed").exists()


def test_another_optimizer_is_refused_with_the_folder(tmp_path):
    def make_one(optim_fn: Any) -> DecentralizedDataParallel:
        torch.manual_seed(0)
        model = alone(nn.Linear(4, 2), optim_fn)
        model(torch.ones(3, 4)).sum().backward()
        return model

    first = make_one(SGD)
    folder = save(first, tmp_path).path
    first.close()
    other = make_one(partial(torch.optim.Adam, lr=0.1))
    before = values(other.module)
    kind, text = error_of(lambda: load(other, tmp_path))
    assert kind == "CheckpointError"
    assert text.startswith(f"{folder} does not fit this run: the optimizer was SGD")
    assert_same(values(other.module), before)
    other.close()
