"""save: the training thread copies its replica's state, and a thread of each save writes the checkpoint.

A checkpoint is complete if the shards of all its workers are there; nothing is decided here. The reports of the workers tell
``save`` when to return and with which error, and when older checkpoints may be removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias

from decent_dp._checks import check_bool, check_integer
from decent_dp.checkpoint import folder
from decent_dp.checkpoint.files import Record, write_shard
from decent_dp.checkpoint.random_states import random_states
from decent_dp.compression import all_finite
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError, OutOfStepError, PeerTimeoutError
from decent_dp.replica.consistency import error_of_worker, model_signature, wait_for_all, worker_counts
from decent_dp.replica.host_copies import HostMemory, Staged
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.serialization import encode
from decent_dp.transport.interface import Transport

__all__ = ["Saver", "Saving", "Trained", "replica_of", "save", "saver_of"]

_log = logging.getLogger(__name__)

# The argument ``model`` of this package's functions: the wrapper, or the result of ``decent_dp.gossip``.
Trained: TypeAlias = DecentralizedDataParallel | Replica

# Seconds that a worker which ends waits for the others, which may live on without having called save(...); and if an error ends
# it, for its own disk, too.
_AT_EXIT, _AT_ERROR = 30.0, 2.0
_LOCK = threading.Lock()


def replica_of(model: Any, what: str) -> Replica:
    """The replica of a wrapper or a ``Gossip``; raises TypeError for anything else, in the name of ``what``."""
    if isinstance(model, DecentralizedDataParallel):
        return model.replica
    if not isinstance(model, Replica):
        raise TypeError(
            f"{what} takes the DecentralizedDataParallel that wraps the model, or what decent_dp.gossip() returned, got a "
            f"{type(model).__name__}"
        )
    return model


def save(
    model: Trained,
    path: str | os.PathLike[str],
    state: Mapping[str, Any] | None = None,
    *,
    keep: int = 3,
    wait: bool = True,
) -> Saving:
    """Saves everything that training needs to resume exactly, as the newest checkpoint in the folder ``path``.

    Called by all workers at the same update, between two iterations or before the first. A pending update is made first, and
    the exchange in flight is finished and mixed in, as by ``flush()``, so that the run which continues equals the one that
    resumes. This thread copies the replica's state in memory: parameters, buffers, optimizer states, gradients of an open
    window. Other threads write it, one file per worker. The checkpoint is complete when the files of all workers are there;
    until then the one before is the newest. A second save waits until the first is complete, or has failed.

    Where faults are tolerated, all workers that live call it, and it is a checkpoint of as many workers. If one dies before its
    file is written, the checkpoint does not become complete (``error`` says so), and training continues.

    Without a shared disk each worker passes its own ``path``. One run saves in a folder, and each wrapper of a process, such as
    the two of a GAN, needs a folder of its own. A run that called ``load`` on the folder continues it.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned; not inside a backward. Inside ``model.averaged()`` the
            replica's own values are saved.
        path: the folder for checkpoints, of this wrapper alone; made if it is missing.
        state: returned to this worker by ``load``: the epoch, a sampler's position, with ``decent_dp.gossip`` the state dicts
            of schedulers, ... A dict of dicts, lists, tuples, None, bool, int, float, str, bytes, tensors and arrays.
        keep: the number of complete checkpoints that stay, at least 1; older ones are removed when a new one is complete.
        wait: return when the checkpoint is complete. False: return after the copy; errors are then raised by the next
            ``save``, or by ``wait()`` of what is returned.

    Returns:
        The save in flight. If a file could not be written (a full disk), or a parameter that trains holds a NaN or an infinity,
        earlier checkpoints stay and training continues: its ``error`` says so on all workers, and so does the log.

    Raises:
        TypeError, ValueError: an argument is wrong, or something in ``state`` cannot be saved; names it. Or another run saves
            in this folder.
        RuntimeError: it was called inside a backward or ``join``, or the wrapper was closed.
        OutOfStepError: the workers have saved at different updates.
        PeerLostError, PeerTimeoutError: a worker that this one exchanges with is gone or silent, or not all workers have made
            this save; names it, or those that have not.
    """
    replica = replica_of(model, "save")
    if replica.meet("save"):
        saver_of(replica).agree(path)
        replica.mates.wait_for_whole_replicas()
    saving = saver_of(replica).save(replica, path, {} if state is None else state, keep, wait)
    if wait:
        saving.wait()
    return saving


def saver_of(replica: Replica) -> Saver:
    """The one saver of this replica."""
    with _LOCK:
        saver = next((listener for listener in replica.listeners if isinstance(listener, Saver)), None)
        if saver is None:
            saver = Saver(replica.world)
            replica.listeners.append(saver)
            # Before the replica's own, which closes the connections.
            Finalize(replica, _close_at_exit, args=(saver,), exitpriority=110)
    return saver


class Saving:
    """A save in flight.

    Attributes:
        path: the folder of the checkpoint.
    """

    def __init__(self, path: Path, number: int, round_: int, workers: Sequence[int]) -> None:
        self.path = path
        # Of this save of its replica, from 0; of the replica; the ranks of those that write its shards.
        self._number, self._round, self._workers = number, round_, workers
        # This worker has written its shard, or could not. Of the save, the result is the error, or None.
        self._written = threading.Event()
        self._over: futures.Future[Exception | None] = futures.Future()
        self._is_complete = self._raised = False

    def __repr__(self) -> str:
        state = "in flight" if not self.done else "complete" if self.error is None else f"failed: {self.error}"
        return f"Saving({str(self.path)!r}, {state})"

    @property
    def done(self) -> bool:
        """It is complete, or has failed."""
        return self._over.done()

    @property
    def error(self) -> Exception | None:
        """Why it has failed; None while it is in flight and when it is complete."""
        return self._over.result() if self.done else None

    def wait(self, timeout: float | None = None) -> Path | None:
        """Waits until it is complete.

        Args:
            timeout: in seconds. With or without one, other workers are waited for as long as the process group waits; this
                worker's own disk is waited for without a limit.

        Returns:
            The checkpoint's folder; None if it is not complete after ``timeout``, or a file could not be written (``error``).

        Raises:
            ValueError, OutOfStepError, PeerLostError, PeerTimeoutError: as ``save``.
        """
        futures.wait([self._over], timeout)
        if self.error is not None and not _is_quiet(self.error):
            self._raised = True
            raise self.error
        return self.path if self.done and self.error is None else None

    def _finish(self, error: Exception | None) -> None:
        """The first call counts: ``Saver.closing`` may give up."""
        with contextlib.suppress(futures.InvalidStateError):
            self._over.set_result(error)


@dataclass
class _Root:
    """A folder for checkpoints, as this run knows it.

    Attributes:
        attempt: the number of loads in it, of this run and those before.
        may_take_over: this run has loaded from it.
        complete: checkpoints that are known to be complete.
        known: the names of checkpoints that this run has made, or judged at a load. Only these are ever removed: another
            run may still write, and a disk may come back.
    """

    attempt: int = 0
    may_take_over: bool = False
    complete: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _UnwrittenShard:
    """What this worker writes: copies of the tensors, and the tree they belong to.

    Attributes:
        trained: names of the parameters that train, with the keys of their tensors.
    """

    root: _Root
    keep: int
    record: Record
    trained: dict[str, str]
    text: str
    staged: Staged


class Saver(Listener):
    """Saves one replica, to which it has no reference: the memory of its copies, and the saves in flight."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory = HostMemory()
        self._saves = 0
        self._in_flight: list[Saving] = []
        self._roots: dict[str, _Root] = {}

    # -- in the training thread ---------------------------------------------------------------------------------------

    def agree(self, path: str | os.PathLike[str]) -> None:
        """Where faults are tolerated: a worker that has joined learns how checkpoints are named."""
        key = os.path.realpath(path) if isinstance(path, (str, os.PathLike)) else ""
        root, control = self._roots.get(key), self._transport.control
        found = control.gather([None if root is None else root.attempt, self._saves])
        if root is None and key:
            self._roots[key] = _Root(max((attempt for attempt, _ in found if attempt is not None), default=0))
        self._saves = max(control.calls, *(saves for _, saves in found))  # calls: if all that have saved are gone

    def save(self, replica: Replica, path: str | os.PathLike[str], state: Mapping[str, Any], keep: int, wait: bool) -> Saving:
        """Copies the state of ``replica`` and starts the thread of this save. ``wait`` is only checked."""
        replica.life.refuse_closed()
        replica.life.refuse_in_join("save")
        number = self._saves
        self._saves += 1
        where = Path(f"save number {number}")
        shard: _UnwrittenShard | BaseException
        try:
            keep, _ = check_integer("keep", keep, 1, "checkpoints"), check_bool("wait", wait)
            root = folder.folder_of(path)
            with contextlib.suppress(OSError):  # the thread finds it too, and there it does not end the training
                if folder.is_step(root):
                    raise ValueError(f"{root} is one checkpoint: pass the folder for checkpoints, {root.parent}, to save")
            if not isinstance(state, Mapping):
                raise TypeError(f"state must be a dict, such as {{'epoch': epoch}}, got a {type(state).__name__}")
            self._wait_for_earlier()
            shard = self._copy(replica, root, number, dict(state), keep)
            where = root / shard.record.step
        except BaseException as error:  # also a KeyboardInterrupt while it waits for an earlier save
            # The others must not wait for a shard that will not come, and their next save is this worker's next.
            shard = error
            raise
        finally:
            saving = Saving(where, number, replica.engine.round, replica.world.control.ranks)
            threading.Thread(target=self._run, args=(saving, shard), name="decent_dp-checkpoint", daemon=True).start()
            self._in_flight.append(saving)
        return saving

    def _copy(self, replica: Replica, path: Path, number: int, state: dict[str, Any], keep: int) -> _UnwrittenShard:
        snapshot = take(replica)
        random = random_states(replica.model)  # after it: a pending update may draw
        text, tensors = encode({"snapshot": snapshot, "random": random, "state": state})
        root = self._roots.setdefault(os.path.realpath(path), _Root())
        ranks, replicas, round_ = replica.world.control.ranks, replica.agreed.replicas, snapshot["round"]
        step = folder.step_name(round_, root.attempt, number, self._transport.run_id, len(ranks))
        root.known.add(step)
        groups = None
        if replicas.shards > 1:
            groups = [list(map(ranks.index, replicas.workers_of(whole))) for whole in replicas.whole(ranks)]
        rank = ranks.index(self._transport.rank)
        model = model_signature(replica.model, replica.parameters.names_by_id)
        record = Record(step, rank, len(ranks), round_, model, groups)
        keys = {id(tensor): key for key, tensor in tensors.items()}
        saved = snapshot["parameters"]
        trained = {name: keys[id(saved[name])] for name in replica.parameters.names if name in saved}
        return _UnwrittenShard(root, keep, record, trained, text, self._memory.copy(tensors))

    def drain(self) -> None:
        """Waits until no save is in flight."""
        futures.wait([saving._over for saving in self._in_flight])

    def loaded(self, path: Path, sights: Sequence[folder.Sight]) -> None:
        """All workers have loaded from the folder ``path``, in which they see ``sights``."""
        complete = set(folder.complete(sights))
        # A checkpoint that `latest` names was complete: its missing shards may be on a disk that comes back.
        lost = {sight.latest for sight in sights} - complete
        known = {name for sight in sights for name in sight.steps} - lost
        self._roots[os.path.realpath(path)] = _Root(folder.attempt_of(sights), True, complete, known)

    def closing(self, at_error: bool = False) -> None:
        """Waits for this worker's own disk up to the timeout, and then for the others up to half a minute. ``at_error``: two
        seconds for each, as an error ends the interpreter."""
        own = _AT_ERROR if at_error else self._transport.timeout
        others = min(own, _AT_EXIT)
        written = [saving for saving in self._in_flight if saving._written.wait(own)]
        futures.wait([saving._over for saving in written], others)
        for saving in self._in_flight:
            if not saving.done:
                limit = others if saving in written else own
                late = PeerTimeoutError(
                    f"{saving.path} was not complete {limit:g} s after close(): this worker's disk hangs, or is slow, or not "
                    "all workers have called save(...)."
                )
                saving._finish(None if saving._is_complete else late)  # older ones may still be being removed
                if saving.error is not None:
                    _log.warning("%s", saving.error)
        self._memory = HostMemory()

    def _wait_for_earlier(self) -> None:
        """There is memory for one copy. Raises the errors of saves that were not waited for."""
        self.drain()
        while self._in_flight:
            saving = self._in_flight.pop(0)
            if not saving._raised:
                saving.wait()

    # -- in the thread of a save --------------------------------------------------------------------------------------

    def _run(self, saving: Saving, shard: _UnwrittenShard | BaseException) -> None:
        """Writes a shard, or tells the others why this worker refuses the save."""
        own = shard if isinstance(shard, BaseException) else self._write(saving.path, shard)
        saving._written.set()
        error: Exception | None = None
        try:
            self._wait_for_reports(saving, own)
            if not isinstance(shard, BaseException):
                self._completed(saving, shard)
        except Exception as failure:
            error = failure
            if isinstance(own, Exception) and (_is_quiet(failure) or not _is_quiet(own)):
                error = own
        if isinstance(shard, BaseException):
            error = None  # the training thread has raised it
        elif error is not None:
            quiet = _is_quiet(error)
            level = logging.WARNING if quiet and own is None else logging.ERROR
            goes_on = ", and training goes on without it" if quiet else ""
            _log.log(level, "%s is not complete%s: %s", saving.path, goes_on, error)
        saving._finish(error)

    def _write(self, path: Path, shard: _UnwrittenShard) -> Exception | None:
        """Writes this worker's shard; returns why it could not."""
        root, run, rank = shard.root, self._transport.run_id, self._transport.rank
        try:
            shard.staged.wait()
            for name, key in shard.trained.items():
                # With `keep`, such checkpoints would remove those that training can be resumed from.
                if not all_finite(shard.staged.tensors[key]):
                    raise CheckpointError(f"parameter '{name}' holds a NaN or an infinity: earlier checkpoints are kept")
            folder.claim(folder.make_folder(path.parent), run, rank, may_take_over=root.may_take_over)
            root.may_take_over = False
            write_shard(folder.make_folder(path), shard.record, shard.staged.tensors, shard.text)
        except Exception as error:
            return error
        return None

    def _wait_for_reports(self, saving: Saving, own: BaseException | None) -> None:
        """Reports to all workers, and raises why the checkpoint is not complete. ``own``: this worker's error."""
        path, timeout = saving.path, self._transport.timeout
        kind = "" if own is None else "CheckpointError" if isinstance(own, OSError) else type(own).__name__
        report = json.dumps([saving._round, path.name, kind, "" if own is None else str(own)[:2000]])
        name, what = f"checkpoint/{saving._number}", f"the save {path.name}"
        late = (
            f"did not write a shard of {path.name} within {timeout:g} s: all workers must call save(...), at the same updates; "
            "or a disk is slow."
        )
        agreed = self._transport.plane.agree(name, report, round_=saving._round)
        error = _failure(wait_for_all(self._transport, name, agreed, timeout, what, late), saving._workers)
        if error is not None:
            if path.is_absolute():  # a refused save has no folder
                # It never becomes complete. After a PeerError it may have.
                folder.remove_shard(path, saving._workers.index(self._transport.rank))
            raise error

    def _completed(self, saving: Saving, shard: _UnwrittenShard) -> None:
        path, root, rank = saving.path, shard.root, shard.record.rank
        _log.info("%s is complete", path)
        saving._is_complete = True
        root.complete.add(path.name)
        # The first worker of each folder. An error makes the checkpoint no less complete, and a full disk needs the second.
        latest = partial(folder.write_latest, path.parent, path.name, rank)
        for step in (latest, partial(folder.prune, path.parent, path.name, root.complete, shard.keep, root.known)):
            try:
                if folder.ranks_in(path)[:1] == [rank]:
                    step()
            except OSError as error:
                _log.warning("%s is complete, and what follows has failed: %s", path, error)


def _is_quiet(error: BaseException) -> bool:
    """Whether training continues without this checkpoint: its files could not be written."""
    return isinstance(error, (OSError, CheckpointError))


def _failure(texts: Mapping[int, str], workers: Collection[int]) -> Exception | None:
    """Why the checkpoint of these workers is not complete, by their reports: round, name, and of an error its kind and text."""
    reports = {rank: json.loads(text) for rank, text in texts.items()}
    if dead := sorted(set(workers) - reports.keys()):
        return CheckpointError(f"worker {dead[0]} died before it had written its shard: earlier checkpoints are kept")
    for rank, (_, _, kind, text) in reports.items():
        if kind:
            return error_of_worker(kind, text, f"worker {rank} could not write its shard")
    rounds = [report[0] for report in reports.values()]
    if len(set(rounds)) > 1:
        counts = worker_counts(rounds, list(reports))
        return OutOfStepError(
            f"save needs all workers at the same update, and they have made different numbers ({counts}). "
            "Uneven numbers of batches need join() around the loop, and save(...) after it."
        )
    first = min(reports)
    for rank, (_, name, _, _) in reports.items():
        if name != reports[first][1]:
            return ValueError(
                f"the shards of the workers are of different checkpoints, {reports[first][1]} of worker {first} and {name} of "
                f"worker {rank}: the workers have loaded from different folders. Load and save with the same path on all."
            )
    return None


def _close_at_exit(saver: Saver) -> None:
    """The interpreter exits, or the wrapper was dropped."""
    if threading.current_thread().name.startswith("decent_dp-"):
        # The garbage collector runs in any thread, and these would wait for themselves.
        threading.Thread(target=saver.closing, name="closing").start()
        return
    # An interactive session goes on after an error, and keeps `last_value`.
    saver.closing(at_error=getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"))
