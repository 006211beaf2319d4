"""load: all workers choose the same checkpoint, look whether it is whole and theirs, and go on from it."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decent_dp.checkpoint import index
from decent_dp.checkpoint.files import Manifest, open_worker, read_manifest
from decent_dp.checkpoint.owner import Trained, replica_of
from decent_dp.checkpoint.resize import combined, sources
from decent_dp.checkpoint.saver import saver_of
from decent_dp.checkpoint.state import check_random_states, first_difference, set_random_states
from decent_dp.errors import CheckpointError
from decent_dp.replica.consistency import call_on_all, model_signature
from decent_dp.replica.replica import Replica
from decent_dp.replica.snapshot import put_back

__all__ = ["latest", "load"]

_log = logging.getLogger(__name__)


def load(
    model: Trained, path: str | os.PathLike[str], *, resize: str | None = None, missing_ok: bool = False
) -> dict[str, Any] | None:
    """Goes on from the newest checkpoint in ``path`` that all workers see. Called by all workers, at any time between updates.

    A run that is stopped and resumed equals the one that was not, bit for bit on CPUs: replicas, optimizers, schedulers,
    scaler, gradients of an open window, exchanges under way and random states (of Python, NumPy and torch) are as they were
    when it was saved. Nothing in the files is executed. On any error the model is as it was. Schedulers are the wrapper's:
    those of ``decent_dp.gossip`` are the user's own, who saves their state dicts as extras.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned, of the model that was saved; bucket size may be another,
            and so may topology, wire and ``overlap`` (the exchange under way is then dropped, which leaves the mean over
            workers as it is).
        path: the folder that was given to ``save``, or that of one checkpoint in it.
        resize: for another number of workers than was saved. 'mean': all start from the mean of replicas and optimizer states,
            also where the number is the same. 'spread': replicas are dealt out; fewer workers start from means of groups, more
            from copies, and as many go on exactly. Means and copies have no random states and no exchange under way.
        missing_ok: return None when no worker finds anything there, so that a first start and a restart are the same line.
            What is there and cannot be read, or is no checkpoint and should be one, is an error all the same.

    Returns:
        The extras that were given to ``save``, this worker's own. Resized: floating-point tensors as the replicas, and all
        else from the first worker of those whose mean it is.

    Raises:
        FileNotFoundError: no worker sees a checkpoint, and not ``missing_ok``.
        CheckpointError: some workers see one and others do not; a file is missing, broken or cannot be read; it is of another
            model, another optimizer or a newer version; names the worker, the file and the cause.
        ValueError: it was saved by another number of workers, and ``resize`` is not given; the path is ''.
        RuntimeError: this is no moment to load. All of these on all workers.
    """
    replica = replica_of(model, "load")
    if replica.closed:
        raise RuntimeError(f"{replica.WHAT} was closed: load before close(), into one that is to train.")
    replica.refuse_in_join("load", "before")
    replica.apply_pending()  # what is due first: the others may be waiting for its exchange
    saver_of(replica).drain()
    replica.parameters.locate()  # also a gathered parameter is looked at as the shard that is loaded
    transport = replica.everyone
    control, rank, n = transport.control, transport.rank, transport.world_size

    def look() -> tuple[Path, list[str]]:
        if resize is not None:
            sources(n, rank, n, resize)  # looks at it
        return _seen(index.folder_of(path))

    root, own = call_on_all(control, look)
    seen: list[list[str]] = control.gather(own)
    if not any(seen):
        if missing_ok:
            return None
        raise FileNotFoundError(f"no worker sees a checkpoint in {path}: another path, or nothing has been saved there.")
    folder = root / call_on_all(control, lambda: _choose(root, seen))
    manifest, replicas = call_on_all(control, lambda: _checked(folder, replica, resize))
    if len({json.dumps(found) for found in control.gather([info.sha256 for info in manifest.files])}) > 1:
        raise CheckpointError(f"the workers see different files in {folder}: copy the same checkpoint to all of them.")
    # A worker takes the part that it has, of one replica or of several.
    number, position = replica.replicas.place_of(rank)
    now = len(replica.replicas.workers)
    same = len(replicas) == now and resize != "mean"
    chosen = [number] if same or resize is None else sources(len(replicas), number, now, resize)
    ranks = [replicas[i][position] for i in chosen]
    tree = call_on_all(control, lambda: _read(folder, manifest, ranks, replica if same else None))
    try:
        put_back(replica, tree["snapshot"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder} does not fit this run: {error}") from error
    if same:
        set_random_states(tree["random"], replica.model)
    _log.info("went on from %s, round %d", folder, manifest.round)
    extra: dict[str, Any] = tree["extra"]
    return extra


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in ``path``, as this worker sees it; None when there is none.

    Raises:
        CheckpointError: it cannot be told; names the file and the cause.
    """
    root, names = _seen(index.folder_of(path))
    return root / names[0] if names else None


def _seen(path: Path) -> tuple[Path, list[str]]:
    """The folder of checkpoints, and the names of those in it that this worker may load, newest first.

    Raises:
        CheckpointError: what is there cannot be read, or should be a checkpoint and is none: others must not start anew.
    """
    try:
        if not index.exists(path):
            return path, []
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(path))
        if index.is_checkpoint(path) or index.is_unfinished(path):
            read_manifest(path)
            return path.parent, [path.name]
        return path, index.complete(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _choose(root: Path, seen: Sequence[Sequence[str]]) -> str:
    """The newest that all workers see.

    Raises:
        CheckpointError: there is none; says who sees what.
    """
    none = [rank for rank, names in enumerate(seen) if not names]
    if none:
        other = next(rank for rank, names in enumerate(seen) if names)
        raise CheckpointError(
            f"{_workers(none)} no checkpoint in {root}, and worker {other} sees {seen[other][0]}: no worker starts from "
            "scratch while others resume. Give all workers their files, or the same path; or, for a fresh start, another one."
        )
    common = [name for name in seen[0] if all(name in names for names in seen)]
    if not common:
        sight = ", ".join(f"worker {rank}: {', '.join(names)}" for rank, names in enumerate(seen))
        raise CheckpointError(f"no checkpoint in {root} is seen by all workers ({sight}): give all workers their files.")
    newer = sorted({names[0] for names in seen} - {common[0]})
    if newer:
        _log.warning("%s in %s is not seen by all workers: going on from %s", ", ".join(newer), root, common[0])
    return common[0]


def _checked(folder: Path, replica: Replica, resize: str | None) -> tuple[Manifest, Sequence[Sequence[int]]]:
    """The manifest, if it is for this run, and the workers of each replica that was saved."""
    manifest = read_manifest(folder)
    saved = manifest.signature.get("model") if isinstance(manifest.signature, dict) else None
    different = first_difference(saved, model_signature(replica.model))
    if different is not None:
        hint = ""
        if "placed as" in different:
            hint = " To shard it otherwise, start from the model that export() wrote."
        raise CheckpointError(f"{folder} is of another model: {different}. Build the model that was saved.{hint}")
    saved_by, here = _replicas_of(folder, manifest), replica.replicas
    if len(saved_by[0]) != here.shards:
        raise CheckpointError(
            f"{folder} was saved by replicas of {len(saved_by[0])} workers each, and here they have {here.shards}: shard the "
            "model as it was, or start from the model that export() wrote."
        )
    if len(saved_by) != len(here.workers) and resize is None:
        of_shards = "" if here.shards == 1 else f"replicas of {here.shards} "
        raise ValueError(
            f"{folder} was saved by {len(saved_by)} {of_shards}workers and this run has {len(here.workers)}: pass "
            "resize='mean' or resize='spread'."
        )
    return manifest, saved_by


def _replicas_of(folder: Path, manifest: Manifest) -> Sequence[Sequence[int]]:
    """The workers of each replica that was saved; each is one worker where the manifest does not say."""
    workers, n = manifest.signature.get("replicas"), manifest.world_size
    if workers is None:
        return [[rank] for rank in range(n)]
    if (
        isinstance(workers, list)
        and all(isinstance(own, list) and len(own) == len(workers[0]) for own in workers)
        and all(type(rank) is int for own in workers for rank in own)
        and sorted(rank for own in workers for rank in own) == list(range(n))
    ):
        return workers
    raise CheckpointError(f"{folder} cannot be used: its manifest says that {n} workers are replicas {str(workers)[:80]}")


def _read(folder: Path, manifest: Manifest, ranks: Sequence[int], going_on: Replica | None) -> Any:
    """What these workers saved, or what is made of it for one worker; it fits ``going_on``, whose random states it has."""
    with contextlib.ExitStack() as opened:
        readers = [opened.enter_context(open_worker(folder, rank, manifest)) for rank in ranks]
        tree = readers[0].tree() if going_on is not None else combined(readers)
    file = readers[0].file
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("snapshot", "extra")):
        raise CheckpointError(f"{file} cannot be used: its tree is not the state of a worker")
    if going_on is not None:
        try:
            check_random_states(tree.get("random"), going_on.model)
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be used: {error}") from error
    return tree


def _workers(ranks: Sequence[int]) -> str:
    return f"worker {ranks[0]} sees" if len(ranks) == 1 else f"workers {', '.join(str(rank) for rank in ranks)} see"
