"""Small checkpoints of two workers, written by one, with contents that follow from their rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decent_dp.checkpoint import folder
from decent_dp.checkpoint.files import Record, Shard, shard_name, write_shard
from decent_dp.serialization import encode, loaded

N = 2
WHOLE = {shard_name(rank) for rank in range(N)}


def tree_of(round_: int, rank: int, size: int = 50) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return {"round": round_, "rank": rank, "w": torch.randn(size, generator=generator), "step": torch.tensor(float(round_))}


def write(step: Path, round_: int, n: int = N) -> None:
    for rank in range(n):
        text, tensors = encode(tree_of(round_, rank))
        write_shard(step, Record(step.name, rank, n, round_, ["w"]), tensors, text)


def write_tree(step: Path, rank: int, n: int, tree: Any) -> Path:
    text, tensors = encode(tree)
    return write_shard(step, Record(step.name, rank, n, 7, []), tensors, text)


def craft(step: Path, rank: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Puts another tree into a shard, with checksums that fit."""
    with Shard(step / shard_name(rank), rank) as shard:
        tree, record = loaded(shard.tree()), shard.record
    text, tensors = encode(change(tree))
    write_shard(step, record, {key: tensor.contiguous() for key, tensor in tensors.items()}, text)


def save(path: Path, round_: int, run: str = "run", keep: int = 2, attempt: int = 0) -> str:
    """A whole save, as one worker would do it for all, in a run that has loaded from the folder."""
    name = folder.step_name(round_, attempt, round_, run, N)
    folder.make_folder(path)
    _, sight = folder.look(path)
    complete = folder.complete([sight])
    folder.claim(path, run, 0, may_take_over=True)
    for other in sight.steps.keys() - complete:
        folder.remove(path / other)
    write(folder.make_folder(path / name), round_)
    folder.write_latest(path, name, 0)
    folder.prune(path, name, {name, *complete}, keep, {name, *sight.steps})
    return name


def check(step: Path) -> int:
    """Checks that a checkpoint is complete, and has the content of its round."""
    for rank in range(N):
        with Shard(step / shard_name(rank), rank) as shard:
            shard.verify()
            own, due, round_ = loaded(shard.tree()), tree_of(shard.record.round, rank), shard.record.round
            assert torch.equal(own.pop("w"), due.pop("w"))
            assert own == due
    return round_


def newest(path: Path) -> str | None:
    """The name of the checkpoint that a load of one worker would choose."""
    root, sight = folder.look(path)
    chosen = folder.choose(root, [sight])
    return chosen[0] if chosen is not None else None


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def check_tidy(path: Path, keep: int = 2) -> None:
    names = folder.steps_in(path)
    assert 1 <= len(names) <= keep
    assert names_in(path) == {"latest", "run", *names}
    assert (path / "latest").read_text().split() == names[:1]
    for name in names:
        assert names_in(path / name) == WHOLE
