"""Small checkpoints of two workers, written by one, whose content follows from their round."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from decent_dp.checkpoint import index
from decent_dp.checkpoint.files import MANIFEST, Manifest, open_worker, read_manifest, verify, worker_name, write_worker
from decent_dp.checkpoint.tree import encode
from decent_dp.errors import CheckpointError

N = 2
WHOLE = {MANIFEST, *(worker_name(rank) for rank in range(N))}


def tree_of(round_: int, rank: int, size: int = 50) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return {"round": round_, "rank": rank, "w": torch.randn(size, generator=generator), "step": torch.tensor(float(round_))}


def write(folder: Path, round_: int, n: int = N) -> Manifest:
    infos = [
        write_worker(folder, rank, tensors, text) for rank in range(n) for text, tensors in [encode(tree_of(round_, rank), "")]
    ]
    return Manifest(round_, n, tuple(infos), {"model": ["w"]})


def save(path: Path, round_: int, run: str = "run", keep: int = 2) -> str:
    """A whole save, as one worker would do it for all; what is not complete is removed when it fails."""
    name = index.folder_name(round_, run, round_)
    try:
        index.commit(path, name, write(index.make_folder(path, name), round_), keep)
    except (OSError, CheckpointError):
        with suppress(OSError, CheckpointError):
            index.discard(path, [name])
        raise
    return name


def check(folder: Path) -> int:
    """A checkpoint is whole, and holds what was saved at its round."""
    manifest = read_manifest(folder)
    verify(folder, manifest, range(manifest.world_size))
    for rank in range(manifest.world_size):
        with open_worker(folder, rank, manifest) as reader:
            own, due = reader.tree(), tree_of(manifest.round, rank)
            assert torch.equal(own.pop("w"), due.pop("w"))
            assert own == due
    return manifest.round


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def start_and_save(path: Path, round_: int, run: str, keep: int = 2) -> str:
    """The first save of a run, which also removes what others have left over."""
    before = index.leftovers(path)
    name = save(path, round_, run, keep)
    index.discard(path, before)
    return name


def check_tidy(path: Path) -> None:
    names = index.read_latest(path)
    assert names_in(path) == {"latest", *names}
    for name in names:
        assert names_in(path / name) == WHOLE
