"""save: the training thread copies its replica's state, and other threads make a checkpoint of it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from decent_dp._checks import check_integer
from decent_dp.checkpoint import folder
from decent_dp.checkpoint.completion import Completion, Report, is_quiet
from decent_dp.checkpoint.files import Record, shard_name, write_shard
from decent_dp.checkpoint.random_states import random_states
from decent_dp.checkpoint.serialization import encode
from decent_dp.checkpoint.staging import Staged, Staging
from decent_dp.checkpoint.trained import Trained, replica_of
from decent_dp.compression import all_finite
from decent_dp.errors import CheckpointError, PeerLostError, PeerTimeoutError
from decent_dp.replica.consistency import model_signature
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.transport.base import Transport
from decent_dp.transport.waiter import Waiter

__all__ = ["Saver", "Saving", "save", "saver_of"]

_log = logging.getLogger(__name__)

# Seconds that a worker which exits waits for the others' shards; if an error ends it, for everything.
_AT_EXIT, _AT_ERROR = 30.0, 2.0
# Seconds for which a worker looks for the others' shards if the store is gone.
_WITHOUT_STORE = 5.0
# Seconds beyond the timeout after which no report of another worker will come.
_MARGIN = 10.0
# Seconds between two looks at whether a save is over.
_LOOK = 0.1
_STORE = "Where no launcher keeps the store worker 0 does."
_SAVERS: WeakKeyDictionary[Replica, Saver] = WeakKeyDictionary()
_LOCK = threading.Lock()


def save(
    model: Trained,
    path: str | os.PathLike[str],
    state: Mapping[str, Any] | None = None,
    *,
    keep: int = 3,
    wait: bool = True,
) -> Saving:
    """Saves everything that training needs to resume exactly, as the newest checkpoint in the folder ``path``.

    Called by all workers at the same update, between two iterations or before the first. A pending update is made first. This
    thread copies the replica's state in memory: parameters, buffers, optimizer states, gradients of an open window, and what
    this worker has sent for the exchange in flight. Other threads write it, one file per worker. The checkpoint is complete
    when the files of all workers are there; until then the one before is the newest. A second save waits until this worker's
    file of the first is written, and for no other worker.

    Without a shared disk each worker passes its own ``path``. One run saves in a folder, and each wrapper of a process, such as
    the two of a GAN, needs a folder of its own. A run that called ``load`` on the folder continues it.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned; not inside a backward. Inside ``model.averaged()`` the
            replica's own values are saved.
        path: the folder for checkpoints, of this wrapper alone; made if it is missing.
        state: what ``load`` returns to this worker: the epoch, a sampler's position, with ``decent_dp.gossip`` the state dicts
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
        PeerLostError, PeerTimeoutError: not all workers have come to this save; names those that have not.
    """
    replica = replica_of(model, "save")
    saving = saver_of(replica).save(replica, path, keep, {} if state is None else state)
    if wait:
        saving.wait()
    return saving


def saver_of(replica: Replica) -> Saver:
    """The one saver of this replica."""
    saver = _SAVERS.get(replica)
    if saver is None:
        with _LOCK:
            saver = _SAVERS[replica] = Saver(replica.everyone)
        replica.listeners.append(saver)
        # Before the replica's own, which closes the connections.
        Finalize(replica, _close_at_exit, args=(saver,), exitpriority=110)
    return saver


class Saving:
    """A save in flight.

    Attributes:
        path: the folder of the checkpoint.
    """

    def __init__(self, path: Path, others: _Others) -> None:
        self.path = path
        self._over, self._lock = threading.Event(), threading.Lock()
        self._error: Exception | None = None
        self._raised = False
        self._others, self._is_written = others, False

    def __repr__(self) -> str:
        state = "in flight" if not self.done else "complete" if self._error is None else f"failed: {self._error}"
        return f"Saving({str(self.path)!r}, {state})"

    @property
    def done(self) -> bool:
        """It is complete, or has failed."""
        if self.waits_for_others and self._others.are_silent():
            self.finish(
                PeerTimeoutError(
                    f"it is not known whether {self.path} is complete: this worker's shard was written, and for "
                    f"{self._others.limit:g} s neither the others nor the store that they share have answered."
                )
            )
        return self._over.is_set()

    @property
    def waits_for_others(self) -> bool:
        """This worker's shard is written, and the others' reports are missing."""
        return self._is_written and self._others.are_waited_for

    @property
    def error(self) -> Exception | None:
        """Why it has failed; None while it is in flight and when it is complete."""
        return self._error

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
        if not self.wait_over(timeout):
            return None
        self.raise_error(again=True)
        return None if self._error is not None else self.path

    def wait_over(self, timeout: float | None = None) -> bool:
        """Waits until it is complete or has failed; False if it is neither after ``timeout``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
            if left <= 0:
                return False
            self._over.wait(left)
        return True

    def written(self) -> None:
        """This worker has written its shard, or failed to."""
        self._is_written = True

    def finish(self, error: Exception | None) -> None:
        """The first call counts."""
        with self._lock:
            if not self._over.is_set():
                self._error = error
                self._over.set()

    def raise_error(self, *, again: bool = False) -> None:
        """Raises an error that is not only about files; once, unless ``again``."""
        if self._error is not None and not is_quiet(self._error) and (again or not self._raised):
            self._raised = True
            raise self._error


class _Others:
    """Since when one of this worker's threads waits for reports of the others.

    That thread gives up after the timeout. If it still waits later, a call of the store hangs.
    """

    def __init__(self, timeout: float) -> None:
        self.limit = timeout + _MARGIN
        self._since: float | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @property
    def are_waited_for(self) -> bool:
        return self._since is not None

    def are_silent(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() - since > self.limit


@dataclass
class _Root:
    """A folder for checkpoints, as this run knows it.

    Attributes:
        attempt: the number of loads in it, of this run and those before.
        may_take_over: this run has loaded from it.
        complete: checkpoints that are known to be complete.
        abandoned: checkpoints that earlier runs have left incomplete, and the ranks whose shards this worker saw at the load.
        known: the names of checkpoints that this run has made, or judged at a load. Only these are ever removed: another
            run may still write, a disk may come back, and a load looks at the newest ones only.
    """

    attempt: int = 0
    may_take_over: bool = False
    complete: set[str] = field(default_factory=set)
    abandoned: dict[str, list[int]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Job:
    """One save on its way through the threads.

    Attributes:
        number: of this save of its replica, from 0.
        trained: names of the parameters that train, with the keys of their tensors.
    """

    saving: Saving
    number: int
    path: Path
    root: _Root
    keep: int
    record: Record
    trained: dict[str, str]


class Saver(Listener):
    """Saves one replica, to which it has no reference: the staging memory and the threads.

    One thread writes this worker's shards. Another waits for the other workers, so that a slow one does not delay writing.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._staging = Staging()
        self._memory_is_free = threading.Event()
        self._memory_is_free.set()
        self._writer, self._finisher = Waiter("decent_dp-checkpoint-writer"), Waiter("decent_dp-checkpoint-finisher")
        self._saves = 0
        self._in_flight: deque[Saving] = deque()
        self._others = _Others(transport.timeout)
        self._roots: dict[str, _Root] = {}
        self._signature: tuple[Any, list[Any]] = (None, [])
        # Of the save before, which is cleared from the store when all have reported for the next.
        self._last: Completion | None = None

    # -- in the training thread ---------------------------------------------------------------------------------------

    def closing(self) -> None:
        self.close()

    def save(self, replica: Replica, path: str | os.PathLike[str], keep: int, state: Mapping[str, Any]) -> Saving:
        """Copies the state of ``replica`` and submits it to the threads."""
        replica.refuse_closed()
        replica.refuse_in_join("save")
        number, self._saves = self._saves, self._saves + 1
        round_ = replica.engine.round
        try:
            self._raise_earlier()
            keep = check_integer("keep", keep, 1, "checkpoints")
            job, text, tensors = self._describe(replica, number, _checked_path(path), keep, _checked_state(state))
            round_ = job.record.round
            staged = self._stage(tensors)
        except Exception as error:
            # The others must not wait for a shard that will not come, and their next save is this worker's next.
            refused, report = Saving(Path(os.devnull), self._others), Report.of_error(round_, error)
            self._in_flight.append(refused)
            # By way of the writer, so that it does not overtake the saves before it.
            self._writer.submit(lambda: self._submit(refused, lambda: self._refuse(refused, number, report)))
            raise
        self._in_flight.append(job.saving)
        self._writer.submit(lambda: self._write(job, staged, text))
        return job.saving

    def drain(self) -> None:
        """Waits until no save is in flight."""
        for saving in list(self._in_flight):
            saving.wait_over()

    def loaded(self, path: Path, sights: Sequence[folder.Sight]) -> None:
        """All workers have loaded from the folder ``path``, in which they see ``sights``."""
        complete = set(folder.complete(sights))
        # A checkpoint that `latest` names was complete: its missing shards may be on a disk that comes back.
        lost = {sight.hint for sight in sights if sight.hint is not None} - complete
        incomplete = set(folder.incomplete(sights)) - lost
        abandoned = {name: folder.ranks_in(path / name) for name in incomplete}
        self._roots[os.path.realpath(path)] = _Root(folder.attempt_of(sights), True, complete, abandoned, complete | incomplete)

    def close(self, at_error: bool = False) -> None:
        """Ends the threads when their jobs are done.

        Waits for this worker's own disk up to the timeout, and for the others up to half a minute, or the timeout if that is
        less. ``at_error``: if an error ends the interpreter, two seconds for all of it.
        """
        seconds = min(self._transport.timeout, _AT_ERROR if at_error else _AT_EXIT)
        others, own = seconds, (seconds if at_error else self._transport.timeout)
        for saving in list(self._in_flight):
            while others > 0 and own > 0 and not saving.wait_over(min(_LOOK, others, own)):
                own -= _LOOK
                others -= _LOOK if at_error or saving.waits_for_others else 0.0
            if not saving.done:
                file, hangs = saving.path / shard_name(self._transport.rank), not saving.waits_for_others
                what = f"{file} was not written: the disk hangs, or is slow" if hangs else f"{saving.path} was not complete"
                saving.finish(PeerTimeoutError(f"{what}, {self._transport.timeout if hangs else seconds:g} s after close()."))
                _log.warning("%s", saving.error)
        self._writer.close()
        self._finisher.close()
        if self._memory_is_free.is_set():
            self._staging = Staging()

    def _describe(
        self, replica: Replica, number: int, path: Path, keep: int, state: Mapping[str, Any]
    ) -> tuple[_Job, str, dict[str, Tensor]]:
        snapshot = take(replica)
        random = random_states(replica.model)  # after it: a pending update may draw
        text, tensors = encode({"snapshot": snapshot, "random": random, "state": dict(state)}, "")
        root = self._roots.setdefault(os.path.realpath(path), _Root())
        n = self._transport.world_size
        name = folder.step_name(snapshot["round"], root.attempt, number, self._transport.run_id, n)
        root.known.add(name)
        replicas = [list(workers) for workers in replica.replicas.workers] if replica.replicas.shards > 1 else None
        model = self._signature_of(replica.model)
        record = Record(name, self._transport.rank, self._transport.world_size, snapshot["round"], model, replicas)
        keys = {id(tensor): key for key, tensor in tensors.items()}
        trained = {name: keys[id(snapshot["parameters"][name])] for name in replica.parameters.names}
        return _Job(Saving(path / name, self._others), number, path, root, keep, record, trained), text, tensors

    def _signature_of(self, model: nn.Module) -> list[Any]:
        """As ``model_signature``, which is not made anew for every save."""
        own = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
        if own != self._signature[0]:
            self._signature = own, model_signature(model)
        return self._signature[1]

    def _stage(self, tensors: dict[str, Tensor]) -> Staged:
        if not self._memory_is_free.is_set():
            began = time.monotonic()
            self._memory_is_free.wait()
            _log.info("save waited %.3f s for the save before it to be written", time.monotonic() - began)
        staged = self._staging.copy(tensors)
        self._memory_is_free.clear()
        return staged

    def _raise_earlier(self) -> None:
        """Raises the errors of saves that were not waited for."""
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft().raise_error()

    # -- in the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, job: _Job, staged: Staged, text: str) -> None:
        error: Exception | None = None
        try:
            staged.wait()
            for name, key in job.trained.items():
                # With `keep`, such checkpoints would remove those that training can be resumed from.
                if not all_finite(staged.tensors[key]):
                    raise CheckpointError(f"parameter '{name}' holds a NaN or an infinity: earlier checkpoints are kept")
            self._claim(job)
            write_shard(folder.make_folder(job.saving.path), job.record, staged.tensors, text)
        except Exception as caught:
            error = caught
        finally:
            del staged
            self._memory_is_free.set()
        self._submit(job.saving, lambda: self._finish(job, error))

    def _submit(self, saving: Saving, finish: Callable[[], None]) -> None:
        self._finisher.submit(finish)
        saving.written()

    def _claim(self, job: _Job) -> None:
        folder.make_folder(job.path)
        folder.claim(job.path, self._transport.run_id, self._transport.rank, may_take_over=job.root.may_take_over)
        if not job.root.may_take_over:
            return
        job.root.may_take_over = False
        # What killed runs have left. A folder with a new shard belongs to a run that still writes into it.
        abandoned = job.root.abandoned.items()
        folder.remove(job.path, [name for name, ranks in abandoned if folder.ranks_in(job.path / name) == ranks])
        newest = next((name for name in folder.steps_in(job.path) if name in job.root.complete), None)
        if newest is not None:
            folder.prune(job.path, newest, job.root.complete, job.keep, job.root.known)

    # -- in the finisher's thread -------------------------------------------------------------------------------------

    def _refuse(self, saving: Saving, number: int, report: Report) -> None:
        with contextlib.suppress(Exception):  # it is raised in the training thread
            self._wait_for_others(number, f"save number {number}", report)
        saving.finish(None)

    def _finish(self, job: _Job, own: Exception | None) -> None:
        round_, path = job.record.round, job.saving.path
        try:
            report = Report(round_, name=path.name) if own is None else Report.of_error(round_, own)
            error = self._wait_for_others(job.number, path.name, report)
            if error is not None:
                # It never becomes complete. After a PeerError it may have.
                folder.remove_shard(path, self._transport.rank)
        except ConnectionError as gone:  # the store is, as worker 0 may be
            error = None if self._is_complete_on_disk(job) else PeerLostError(f"{path.name}: {gone}. {_STORE}")
        except Exception as failure:
            error = failure
        if own is not None and (error is None or is_quiet(error) or not is_quiet(own)):
            error = own
        if error is None:
            self._completed(job)
            _log.info("%s is complete", path)
        elif not is_quiet(error):
            _log.error("%s is not complete: %s", path, error)
        else:
            level = logging.WARNING if own is None else logging.ERROR
            _log.log(level, "%s is not complete, and training goes on without it: %s", path, error)
        job.saving.finish(error)

    def _wait_for_others(self, number: int, name: str, report: Report) -> Exception | None:
        with self._others.waiting():
            completion = Completion(self._transport, number, name)
            failure = completion.wait(report)
            last, self._last = self._last, completion
            if last is not None:
                last.clear()
        return failure

    def _is_complete_on_disk(self, job: _Job) -> bool:
        """Without a store: whether the shards of all workers are there, or will be in a few seconds."""
        deadline = time.monotonic() + min(self._transport.timeout, _WITHOUT_STORE)
        while True:
            with contextlib.suppress(OSError):
                if len(folder.ranks_in(job.saving.path)) == job.record.world_size:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def _completed(self, job: _Job) -> None:
        """Nothing that fails here makes the checkpoint less complete."""
        name, rank = job.saving.path.name, self._transport.rank
        job.root.complete.add(name)
        try:
            if folder.ranks_in(job.saving.path)[:1] != [rank]:
                return
            with (
                contextlib.ExitStack() as steps
            ):  # from the last to the first, whatever fails: a full disk needs the second one
                steps.callback(folder.prune, job.path, name, job.root.complete, job.keep, job.root.known)
                steps.callback(folder.write_latest, job.path, name, rank)
        except OSError as error:
            _log.warning("%s is complete, and what follows has failed: %s", job.saving.path, error)


def _checked_path(path: Any) -> Path:
    root = folder.folder_of(path)
    with contextlib.suppress(OSError):  # the writer finds it too, and there it does not end the training
        if folder.is_step(root):
            raise ValueError(f"{root} is one checkpoint: pass the folder for checkpoints, {root.parent}, to save")
    return root


def _checked_state(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict, such as {{'epoch': epoch}}, got a {type(state).__name__}")
    return state


def _close_at_exit(saver: Saver) -> None:
    """The interpreter exits, or the wrapper was dropped."""
    if threading.current_thread().name.startswith("decent_dp-"):
        # The garbage collector runs in any thread, and these would wait for themselves.
        threading.Thread(target=saver.close, name="closing").start()
        return
    # An interactive session goes on after an error, and keeps `last_value`.
    saver.close(at_error=getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"))
