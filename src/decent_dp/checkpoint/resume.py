"""load: all workers choose the same checkpoint, check that it is complete and fits, and resume from it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from decent_dp._checks import check_integer
from decent_dp.checkpoint import folder
from decent_dp.checkpoint.files import Record, Shard, shard_name
from decent_dp.checkpoint.folder import Sight
from decent_dp.checkpoint.random_states import check_random_states, set_random_states
from decent_dp.checkpoint.resize import combined, mean_tensors, sources, state_of_worker
from decent_dp.checkpoint.saver import Trained, replica_of, saver_of
from decent_dp.errors import CheckpointError
from decent_dp.replica.consistency import call_on_all, model_signature
from decent_dp.replica.replica import Replica
from decent_dp.replica.shards import mesh_of
from decent_dp.replica.snapshot import begin_load, put_back
from decent_dp.serialization import MALFORMED, loaded
from decent_dp.transport import Collectives

__all__ = ["latest", "load", "read_parameters"]

_log = logging.getLogger(__name__)


def load(
    model: Trained, path: str | os.PathLike[str], *, resize: str | None = None, missing_ok: bool = False
) -> dict[str, Any] | None:
    """Resumes from the newest complete checkpoint in ``path``. Called by all workers, at any time between updates.

    A run that is stopped and resumed equals the one that continued after the save, bit for bit on CPUs: replicas, optimizers,
    schedulers, scaler, gradients of an open window and random states (of Python, NumPy and torch) are as they were after it.
    What a checkpoint of format 3 has in flight is dropped. Nothing in the files is executed. On any error the model is as it
    was. Schedulers are the wrapper's: with ``decent_dp.gossip`` the user passes their state dicts to ``save``. A run that loads
    from a folder may save in it.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned, of the model that was saved. The bucket size may differ, and
            so may topology, compression and ``overlap``; with ``resize``, also whether a node is a replica, and of how many
            workers.
        path: the folder that was given to ``save``, or that of one checkpoint in it.
        resize: for another number of workers than was saved. 'mean': all start from the mean of replicas and optimizer states,
            also if the number is the same. 'spread': replicas are distributed. Fewer workers start from means of groups, more
            from copies, and the same number resumes exactly. Means and copies have no random states.
        missing_ok: return None if no worker finds a checkpoint, so that a first start and a restart are the same line. A
            checkpoint that was complete once and cannot be read is an error all the same.

    Returns:
        The ``state`` that was given to ``save``, this worker's own. Resized: floating-point tensors as the replicas, and the
        rest from the first worker of those whose mean it is.

    Raises:
        FileNotFoundError: no worker sees a checkpoint, and not ``missing_ok``.
        CheckpointError: some workers see one and others do not; a file is missing, broken or cannot be read; it is of another
            model, another optimizer or another format; names the worker, the file and the cause.
        ValueError: it was saved by another number of workers, and ``resize`` is not given; the path is ''.
        RuntimeError: it was called inside a backward or ``join``, or after ``close``. All of these on all workers.
    """
    replica = replica_of(model, "load")
    if replica.life.closed:
        raise RuntimeError(f"{replica.KIND.what} was closed: load before close(), into one that is to train.")
    replica.life.refuse_in_join("load", "before")
    replica.apply_pending()  # first, because the others may be waiting for its exchange
    saver = saver_of(replica)
    saver.drain()
    replica.parameters.locate()  # a gathered parameter becomes the shard that is loaded
    transport = replica.world
    control, rank, n = transport.control, transport.rank, transport.world_size
    replica.meet("load")
    begin_load(replica)

    def look() -> tuple[Path, Sight]:
        if resize is not None:
            sources(n, rank, n, resize)  # checks it
        return folder.look(folder.folder_of(path))

    root, own = call_on_all(control, look)
    sights = [Sight(**message) for message in control.gather(asdict(own))]
    chosen = call_on_all(control, lambda: folder.choose(root, sights))
    if chosen is None:
        saver.loaded(root, sights)
        if missing_ok:
            return None
        raise FileNotFoundError(f"no worker sees a complete checkpoint in {path}: pass another path, or save one first.")
    step = root / chosen[0]
    with contextlib.ExitStack() as opened:
        shards, same = call_on_all(control, lambda: _open(step, rank, replica, resize, opened))
        _verify(control, step, shards, chosen[1])
        tree = call_on_all(control, lambda: _resumed(shards[0], replica) if same else combined(shards))
        if len(shards[0].record.workers[0]) != replica.agreed.replicas.shards:
            tree["snapshot"]["rule"]["state"] = {}  # that of other shares: it starts anew
    try:
        put_back(replica, {**tree["snapshot"], "combined": not same})
    except MALFORMED as error:
        # A value of another kind than was saved raises any of them. Those of this library, and of memory, mean something else.
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and type(error).__module__ != "builtins"):
            raise
        raise CheckpointError(f"{step} does not fit this run: {error}") from error
    if same:
        set_random_states(tree["random"], replica.model)
    saver.loaded(root, sights)
    _log.info("resumed from %s, round %d", step, tree["snapshot"]["round"])
    state: dict[str, Any] = tree["state"]
    return state


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The folder of the newest complete checkpoint in ``path``, as this worker sees it; None if there is none.

    On a disk that has the files of some workers only, it is the one that the file ``latest`` names.

    Raises:
        CheckpointError: the folder cannot be read, or is one checkpoint that is incomplete; names the file and the cause.
    """
    return _latest(*folder.look(folder.folder_of(path)))


def _latest(root: Path, sight: Sight) -> Path | None:
    if sight.only is not None:
        folder.choose(root, [sight])  # raises if it is incomplete
        return root / sight.only
    complete = folder.complete([sight])
    return next((root / name for name in sight.steps if name in complete or name == sight.latest), None)


def read_parameters(path: str | os.PathLike[str], rank: int | None = None, *, buffers: bool = False) -> dict[str, Tensor]:
    """The parameters in a checkpoint's files, without a run and without a process group.

    ::

        model.load_state_dict(read_parameters("checkpoints", buffers=True), strict=False)

    Args:
        path: the folder that was given to ``save`` (the newest complete checkpoint is read), or that of one checkpoint in it.
        rank: of the worker whose replica is read, from its own file alone, or that of its node's first worker; None for the
            mean of all replicas.
        buffers: the model's buffers too, also those that its state dict leaves out. In the mean, floating-point ones are
            averaged, integers are averaged and rounded, and bools are those of worker 0.

    Returns:
        The tensors by name, on the CPU. A tied parameter has the first of its names only.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        CheckpointError: a file is missing or broken.
        ValueError: it was saved by no worker of this rank, or by sharded replicas, of which no worker has a whole one.
    """
    where = folder.folder_of(path)
    root, sight = folder.look(where)
    if rank is None:
        chosen = folder.choose(root, [sight])
        step = root / chosen[0] if chosen is not None else None
    else:
        check_integer("rank", rank, 0)
        step = where if sight.only is not None else _latest(root, sight)
    if step is None:
        raise FileNotFoundError(f"there is no complete checkpoint in {where}")
    n = sight.steps[step.name][0]
    if rank is not None and rank >= n:
        raise ValueError(f"{step} was saved by {n} workers and has none of rank {rank}")
    with contextlib.ExitStack() as opened:
        shards = [opened.enter_context(Shard(step / shard_name(r), r)) for r in (range(n) if rank is None else [rank])]
        _check_alike(step, n, [(0, _seen(shard)) for shard in shards])
        if any("placed as" in _describe(entry) for entry in shards[0].record.model):
            raise ValueError(f"{step} was saved by sharded replicas: load it into a run, and use export() there.")
        firsts = [min(own) for own in shards[0].record.workers]
        if rank is None:
            shards = [shards[first] for first in firsts]
        elif rank not in firsts:  # its node's first worker has the parameters
            first = next(min(own) for own in shards[0].record.workers if rank in own)
            shards = [opened.enter_context(Shard(step / shard_name(first), first))]
        for shard in shards:
            shard.verify()
        return mean_tensors(shards, ["parameters", "buffers"] if buffers else ["parameters"])


def _open(
    step: Path, rank: int, replica: Replica, resize: str | None, opened: contextlib.ExitStack
) -> tuple[list[Shard], bool]:
    """Opens the shards that this worker starts from; whether it resumes exactly, from the shard of its own rank."""
    there = folder.ranks_in(step)

    def open_one(number: int) -> Shard:
        file = step / shard_name(number)
        if number not in there:
            others = f" This disk has the shards of the workers {', '.join(map(str, there))}." if there else ""
            raise CheckpointError(
                f"{file} is missing.{others} On disks that are not shared, start the workers where they were, with the same "
                "ranks, or copy the files of all workers to all disks."
            )
        shard = opened.enter_context(Shard(file, number))
        _check_record(step, shard.record, replica, resize)
        return shard

    # Any record tells how the checkpoint was saved. The own shard is the only one that a disk may have.
    first = open_one(rank if rank in there or not there else there[0])
    workers, here = first.record.workers, replica.agreed.replicas
    number, position = here.place_of(rank)
    now, shares = len(here.workers), len(workers[0])
    same = len(workers) == now and shares == here.shards and resize != "mean"
    taken = [number] if same or resize is None else sources(len(workers), number, now, resize)
    # A worker takes the part that it has, of one replica or of several. In a node of another size there is no such part, but
    # the first worker's shard has all that is needed.
    ranks = [workers[i][position % shares] for i in taken]
    return [first if saver == first.record.rank else open_one(saver) for saver in ranks], same


def _check_record(step: Path, record: Record, replica: Replica, resize: str | None) -> None:
    """Checks that the checkpoint is for this run."""
    own = model_signature(replica.model, replica.parameters.names_by_id)
    pairs = zip_longest(map(_describe, record.model), map(_describe, own), fillvalue="none")
    for i, (theirs, ours) in enumerate(pairs):
        if theirs != ours:
            hint = " To shard it otherwise, start from the model that export() wrote." if "placed as" in theirs + ours else ""
            raise CheckpointError(
                f"{step} is of another model: tensor {i} is {theirs} there and {ours} here. Build the model that was "
                f"saved.{hint}"
            )
    workers, here = record.workers, replica.agreed.replicas
    if len(workers[0]) != here.shards and mesh_of(replica.model) is not None:
        raise CheckpointError(
            f"{step} was saved by replicas of {len(workers[0])} workers each, and here they have {here.shards}: shard the "
            "model as it was, or start from the model that export() wrote."
        )
    sizes = (len(workers), len(workers[0])), (len(here.workers), here.shards)
    if sizes[0] != sizes[1] and resize is None:
        there, now = (f"{n} workers" if own == 1 else f"{n} replicas of {own} workers" for n, own in sizes)
        hint = "" if len(workers[0]) > 1 or here.shards == 1 else " To resume exactly, pass replica='worker' to gossip()."
        raise ValueError(
            f"{step} was saved by {there} and this run has {now}: pass resize='spread' (or 'mean') to load().{hint}"
        )


def _verify(control: Collectives, step: Path, shards: Sequence[Shard], saved: int) -> None:
    """Checks the shards that this worker reads, and that all workers read those of one checkpoint."""
    gathered = control.gather([_seen(shard) for shard in shards])
    _check_alike(step, saved, [(rank, seen) for rank, own in zip(control.ranks, gathered, strict=True) for seen in own])

    def verify() -> None:
        for shard in shards:
            shard.verify()

    call_on_all(control, verify)


def _seen(shard: Shard) -> list[Any]:
    return [shard.record.rank, shard.record.step, shard.record.world_size, shard.record.sha256]


def _check_alike(step: Path, n: int, seen: Sequence[tuple[int, list[Any]]]) -> None:
    """Raises CheckpointError if workers read shards of different checkpoints, or different ones of one worker.

    Args:
        n: the number of workers that saved it.
        seen: a worker that reads a shard, and what ``_seen`` returned of it.
    """
    first: dict[int, tuple[int, list[Any]]] = {}
    one, name, *_ = seen[0][1]
    for reader, own in seen:
        number, its_name, its_n, _ = own
        before, theirs = first.setdefault(number, (reader, own))
        if own != theirs:
            raise CheckpointError(
                f"workers {before} and {reader} see different files {shard_name(number)} in {step}: copy the same "
                "checkpoint to all of them."
            )
        if its_name != name or its_n != n:
            why = f"it is of {its_name}, and {shard_name(one)} of {name}: they are not shards of one checkpoint"
            why = why if its_name != name else f"{its_n} workers saved it, not {n}"
            raise CheckpointError(f"{step / shard_name(number)} cannot be used: {why}")


def _resumed(shard: Shard, replica: Replica) -> dict[str, Any]:
    tree: dict[str, Any] = loaded(state_of_worker(shard))
    check_random_states(tree.get("random"), replica.model, shard.file)
    return tree


def _describe(entry: Any) -> str:
    """One of ``model_signature`` without its strides: values are the same in any."""
    if not isinstance(entry, (list, tuple)) or len(entry) != 6:
        return repr(entry)
    kind, name, shape, dtype, _, trained = entry
    return f"{kind} '{name}' {shape} {str(dtype).removeprefix('torch.')} ({trained})"
