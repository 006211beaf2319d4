"""save: the training thread copies its replica's state, and other threads make a checkpoint of it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from decent_dp.checkpoint import index
from decent_dp.checkpoint.commit import Pages, Record, UndecidedError, check_records, first_workers, is_quiet
from decent_dp.checkpoint.files import FileInfo, Manifest, write_worker
from decent_dp.checkpoint.meeting import meet_in, part_from
from decent_dp.checkpoint.owner import Trained, replica_of
from decent_dp.checkpoint.staging import Staged, Staging
from decent_dp.checkpoint.state import random_states
from decent_dp.checkpoint.tree import encode
from decent_dp.compression import all_finite
from decent_dp.errors import CheckpointError, PeerLostError, PeerTimeoutError
from decent_dp.replica.consistency import model_signature
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.snapshot import take
from decent_dp.transport.base import Transport
from decent_dp.transport.waiter import Waiter

__all__ = ["Saver", "Saving", "save", "saver_of"]

_log = logging.getLogger(__name__)

# Seconds that a worker which goes waits for the others' part in its checkpoints; when an error ends it, for everything.
_AT_EXIT, _AT_ERROR = 30.0, 2.0
# Seconds in which a checkpoint that only waits for its folder's first worker is completed.
_ANY_MOMENT = 5.0
# Seconds beyond the timeout after which no word of the others will come: whoever can speak has given up by then.
_MARGIN = 10.0
# Seconds between two looks at whether that is so.
_LOOK = 0.1
_SAVERS: WeakKeyDictionary[Replica, Saver] = WeakKeyDictionary()
_ADMITTING = threading.Lock()


def save(model: Trained, path: str | os.PathLike[str], *, keep: int = 3, wait: bool = True, **extra: Any) -> Saving:
    """Saves everything that training needs to go on exactly, as the newest checkpoint in the folder ``path``.

    Called by all workers at the same update, between two iterations or before the first. An owed update is made first. What
    this thread does is one copy of the replica's state in memory: parameters, buffers, optimizer states, gradients of an open
    window, and what this worker has put on the wire for the exchange under way. Other threads write it, one file a worker, and
    name it in ``path/latest`` when all files are durable; until then the checkpoint before it is the newest. No worker waits
    for another in this: a second save while the first is being written waits for this worker's own writing only.

    Workers without a shared disk get a whole set of names, and their own file, each in their own ``path``. One run at a time
    saves in a folder: what a stopped one has left there unfinished is removed at the first save. Several wrappers of one
    process, such as the two of a GAN, save in a folder each.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned; not inside a backward. Inside ``model.averaged()`` the
            replica's own values are saved.
        path: the folder for checkpoints, of this wrapper alone; made when it is missing.
        keep: so many complete ones stay, at least 1; older ones are removed when a new one is complete.
        wait: return when the checkpoint is complete. False: return after the copy; errors then come at the next ``save``, or
            at ``wait()`` of what is returned.
        **extra: what ``load`` returns to this worker: the epoch, a sampler's position, with ``decent_dp.gossip`` the state
            dicts of schedulers, … Anything of dicts, lists, tuples,
            None, bool, int, float, str, bytes, tensors and arrays.

    Returns:
        The checkpoint under way. Where a file could not be written (a full disk), or a parameter that trains holds a NaN or
        an infinity, the checkpoints before it stay and the training goes on: its ``error`` says so on all workers, and so does
        the log.

    Raises:
        TypeError, ValueError: an argument is wrong, or an extra cannot be saved; names it.
        RuntimeError: this is no moment to save, or the wrapper was closed.
        OutOfStepError: the workers have saved at different updates.
        PeerLostError, PeerTimeoutError: not all workers have come to this save; names who has not.
    """
    replica = replica_of(model, "save")
    saving = saver_of(replica).save(replica, path, keep, extra)
    if wait:
        saving.wait()
    return saving


def saver_of(replica: Replica) -> Saver:
    """The one saver of this replica."""
    saver = _SAVERS.get(replica)
    if saver is None:
        with _ADMITTING:
            saver = _SAVERS[replica] = Saver(replica.everyone)
        replica.listeners.append(saver)
        # Before the replica's own, which gives the connections back.
        Finalize(replica, _leave, args=(saver,), exitpriority=110)
    return saver


class Saving:
    """A checkpoint under way.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: Path, others: _Others) -> None:
        self.path = path
        self._over, self._lock = threading.Event(), threading.Lock()
        self._error: Exception | None = None
        self._heard = False
        self._others, self._is_written = others, False

    def __repr__(self) -> str:
        state = "under way" if not self.done else "complete" if self._error is None else f"failed: {self._error}"
        return f"Saving({str(self.path)!r}, {state})"

    @property
    def done(self) -> bool:
        """It is complete, or has failed."""
        if self.waits_for_others and self._others.are_silent():
            self.finish(
                PeerTimeoutError(
                    f"it is not known whether {self.path} has become complete: this worker's part was written, and for "
                    f"{self._others.limit:g} s neither the others nor the store that they share have answered."
                )
            )
        return self._over.is_set()

    @property
    def waits_for_others(self) -> bool:
        """This worker's part is written, and what happens now is not its own doing."""
        return self._is_written and self._others.are_waited_for

    @property
    def error(self) -> Exception | None:
        """Why it has failed; None while it is under way and when it is complete."""
        return self._error

    def wait(self, timeout: float | None = None) -> Path | None:
        """Waits until it is complete.

        Args:
            timeout: in seconds. With or without one the wait ends some seconds after other workers have been waited for as long
                as the process group waits; for this worker's own disk there is no limit.

        Returns:
            The checkpoint's folder; None when it is not complete after ``timeout``, or a file could not be written (``error``).

        Raises:
            OutOfStepError, PeerLostError, PeerTimeoutError: as ``save``.
        """
        if not self.wait_over(timeout):
            return None
        self.raise_if_it_matters(again=True)
        return None if self._error is not None else self.path

    def wait_over(self, timeout: float | None = None) -> bool:
        """Waits until it is complete or has failed; False when it is neither after ``timeout``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
            if left <= 0:
                return False
            self._over.wait(left)
        return True

    def has_been_written(self) -> None:
        """This worker has done its part, or failed in it."""
        self._is_written = True

    def finish(self, error: Exception | None) -> None:
        """It is over. The first call counts."""
        with self._lock:
            if not self._over.is_set():
                self._error = error
                self._over.set()

    def raise_if_it_matters(self, *, again: bool = False) -> None:
        """Raises an error that is not only about files; once, unless ``again``."""
        if self._error is not None and not is_quiet(self._error) and (again or not self._heard):
            self._heard = True
            raise self._error


class _Others:
    """Since when one of this worker's threads has been waiting for a word of the others.

    Whoever waits for them gives up after the timeout. That the silence lasts longer means that not even the store answers, so
    that the thread cannot know.
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


@dataclass(frozen=True)
class _Job:
    """One save on its way through the threads.

    Attributes:
        number: of this save of its wrapper, from 0.
        root, name: of the checkpoint's folder.
        signature: for the manifest: of the model; and the workers of each replica, where they are several.
        trained: of the parameters that train, the names and the keys of their tensors.
    """

    saving: Saving
    number: int
    root: Path
    name: str
    keep: int
    round: int
    signature: dict[str, Any]
    trained: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.root / self.name


class Saver(Listener):
    """Saves one wrapper, which it does not hold: the staging memory, the threads, and what they know.

    One thread writes this worker's files. Another settles with the other workers, so that a slow one does not hold writing up.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._staging = Staging()
        self._memory_is_free = threading.Event()
        self._memory_is_free.set()
        self._writer, self._committer = Waiter("decent_dp-checkpoint-writer"), Waiter("decent_dp-checkpoint-committer")
        self._saves = 0
        self._under_way: deque[Saving] = deque()
        self._others = _Others(transport.timeout)
        self._is_closed = False
        # The folders that it saves in, with their true names; and those where it has met the other workers.
        self._roots: dict[Path, str] = {}
        self._places: dict[Path, str] = {}
        self._signature: tuple[Any, list[Any]] = (None, [])
        # Of the save before, which is cleared from the store when all have come to the next.
        self._last_pages: Pages | None = None

    # -- in the training thread ---------------------------------------------------------------------------------------

    def closing(self) -> None:
        self.close()

    def save(self, replica: Replica, path: str | os.PathLike[str], keep: int, extra: dict[str, Any]) -> Saving:
        """Copies the state of ``replica`` and hands it to the threads."""
        replica.refuse_closed()
        replica.refuse_in_join("save")
        number, self._saves = self._saves, self._saves + 1
        round_ = replica.engine.round
        try:
            self._raise_unheard()
            root = _checked_path(path)
            self._admit(root)
            job, text, tensors = self._describe(replica, number, root, _checked_keep(keep), extra)
            round_ = job.round
            staged = self._stage(tensors)
        except Exception as error:
            # The others must not wait for what will not come, and their next save is this worker's next.
            refused, record = Saving(Path(os.devnull), self._others), Record.of_error(round_, error)
            self._under_way.append(refused)
            # By way of the writer, so that it does not overtake the saves before it.
            self._writer.submit(lambda: self._hand_over(refused, lambda: self._refuse(refused, number, record)))
            raise
        self._under_way.append(job.saving)
        self._writer.submit(lambda: self._write(job, staged, text))
        return job.saving

    def drain(self) -> None:
        """Waits until no save is under way."""
        for saving in list(self._under_way):
            saving.wait_over()

    def close(self, at_error: bool = False) -> None:
        """Ends the threads when what they have is done.

        Waits for this worker's own disk, however slow, and for the others up to half a minute, or the timeout if that is less.
        ``at_error``: when an error ends the interpreter, two seconds for all of it.
        """
        self._is_closed = True
        seconds = left = min(self._transport.timeout, _AT_ERROR if at_error else _AT_EXIT)
        for saving in list(self._under_way):
            while left > 0 and not saving.wait_over(min(_LOOK, left)):
                left -= _LOOK if at_error or saving.waits_for_others else 0.0
            if not saving.done:
                saving.finish(PeerTimeoutError(f"{saving.path} was not complete {seconds:g} s after its worker was to leave."))
                _log.warning("%s", saving.error)
        self._writer.close()
        self._committer.close()
        if self._memory_is_free.is_set():
            self._staging = Staging()

    def _describe(
        self, replica: Replica, number: int, root: Path, keep: int, extra: dict[str, Any]
    ) -> tuple[_Job, str, dict[str, Tensor]]:
        snapshot = take(replica)
        random = random_states(replica.model)  # after it: an owed update may draw
        text, tensors = encode({"snapshot": snapshot, "random": random, "extra": extra}, "")
        round_ = snapshot["round"]
        name = index.folder_name(round_, self._transport.run_id, number)
        saving = Saving(root / name, self._others)
        signature = {"model": self._signature_of(replica.model)}
        if replica.replicas.shards > 1:
            signature["replicas"] = [list(workers) for workers in replica.replicas.workers]
        keys = {id(tensor): key for key, tensor in tensors.items()}
        trained = {name: keys[id(snapshot["parameters"][name])] for name in replica.parameters.names}
        return _Job(saving, number, root, name, keep, round_, signature, trained), text, tensors

    def _signature_of(self, model: nn.Module) -> list[Any]:
        """As ``model_signature``, which is not made anew for every save."""
        own = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*model.parameters(), *model.buffers())]
        if own != self._signature[0]:
            self._signature = own, model_signature(model)
        return self._signature[1]

    def _admit(self, root: Path) -> None:
        """Before the first save in a folder: no other wrapper of this process may save there.

        Raises:
            ValueError: one does.
        """
        if root in self._roots:
            return
        name = os.path.realpath(root)
        for last in (False, True):
            with _ADMITTING:
                if not any(saver._saves_in(name) for saver in _SAVERS.values() if self._is_beside(saver)):
                    self._roots[root] = name
                    return
            if not last:
                gc.collect()  # it may have been dropped
        raise ValueError(
            f"another wrapper of this process saves in {root}, and each would take the other's checkpoints for its own: give "
            "each wrapper its own folder, or close() the one that is no longer used"
        )

    def _saves_in(self, name: str) -> bool:
        return not self._is_closed and name in self._roots.values()

    def _is_beside(self, other: Saver) -> bool:
        """Whether it is of another wrapper of the same worker. Other workers may be threads of this process."""
        return other is not self and other._transport.rank == self._transport.rank

    def _stage(self, tensors: dict[str, Tensor]) -> Staged:
        if not self._memory_is_free.is_set():
            began = time.monotonic()
            self._memory_is_free.wait()
            _log.info("save waited %.3f s for the save before it to be written", time.monotonic() - began)
        staged = self._staging.copy(tensors)
        self._memory_is_free.clear()
        return staged

    def _raise_unheard(self) -> None:
        """Of saves that nobody has waited for."""
        while self._under_way and self._under_way[0].done:
            self._under_way.popleft().raise_if_it_matters()

    # -- in the writer's thread ---------------------------------------------------------------------------------------

    def _write(self, job: _Job, staged: Staged, text: str) -> None:
        error: Exception | None = None
        try:
            staged.wait()
            for name, key in job.trained.items():
                # With `keep`, such checkpoints would remove those that training can be resumed from.
                if not all_finite(staged.tensors[key]):
                    raise CheckpointError(f"parameter '{name}' holds a NaN or an infinity: earlier checkpoints are kept")
            place = self._place(job.root)
            info = write_worker(index.make_folder(job.root, job.name), self._transport.rank, staged.tensors, text)
            record = Record(job.round, place, info.name, info.bytes, info.sha256)
        except Exception as caught:
            error, record = caught, Record.of_error(job.round, caught)
        finally:
            del staged
            self._memory_is_free.set()
        self._hand_over(job.saving, lambda: self._commit(job, record, error))

    def _hand_over(self, saving: Saving, settle: Callable[[], None]) -> None:
        self._committer.submit(settle)
        saving.has_been_written()

    def _place(self, root: Path) -> str:
        """A name for this worker's ``root``, the same on all workers that see the same folder there."""
        if root not in self._places:
            self._places[root] = meet_in(root, self._transport.run_id)
        return self._places[root]

    # -- in the committer's thread ------------------------------------------------------------------------------------

    def _refuse(self, saving: Saving, number: int, record: Record) -> None:
        with contextlib.suppress(Exception):  # it is raised in the training thread
            self._hand_in(number, f"save number {number}", record)
        saving.finish(None)

    def _commit(self, job: _Job, record: Record, own: Exception | None) -> None:
        try:
            error = self._settle(job, record)
        except Exception as failure:
            error = failure
        if own is not None and (error is None or is_quiet(error)):
            error = own
        if error is None:
            _log.info("%s is complete", job.folder)
        elif not is_quiet(error):
            _log.error("%s is not complete: %s", job.folder, error)
        else:
            level = logging.WARNING if own is None else logging.ERROR
            _log.log(level, "%s is not complete, and training goes on without it: %s", job.folder, error)
        job.saving.finish(error)

    def _settle(self, job: _Job, record: Record) -> Exception | None:
        """Finds out whether the checkpoint is complete, and does this worker's part in it. None: it is."""
        try:
            pages, records = self._hand_in(job.number, job.name, record)
            error = check_records(records)
            if error is None:
                return self._complete(job, pages, records)
        except ConnectionError as unreachable:
            return self._look_on_disk(job, unreachable)
        except UndecidedError as unknown:
            return unknown  # it may still be completed: what it is not, the next run removes
        except (PeerLostError, PeerTimeoutError) as absent:
            error = absent
        with contextlib.suppress(OSError, CheckpointError):
            index.discard(job.root, [job.name])
        return error

    def _hand_in(self, number: int, name: str, record: Record) -> tuple[Pages, list[Record]]:
        with self._others.waiting():
            pages = Pages(self._transport, number, name)
            pages.hand_in(record)
            records = pages.records()
            last, self._last_pages = self._last_pages, pages
            if last is not None:
                last.clear()
        return pages, records

    def _complete(self, job: _Job, pages: Pages, records: Sequence[Record]) -> Exception | None:
        """The switch, in each folder by its first worker; the oldest checkpoint stays until all have switched."""
        first, place = first_workers(records), records[self._transport.rank].folder
        switching, several = self._transport.rank in first, len(first) > 1
        parts = tuple(FileInfo(record.name, record.bytes, record.sha256) for record in records)
        here = [part for part, record in zip(parts, records, strict=True) if record.folder == place]
        manifest = Manifest(job.round, len(records), parts, job.signature)
        if switching:
            error = self._switch(job, manifest, job.keep + several, here)
            with self._others.waiting():
                pages.completed(first, error)
            part_from(job.root, self._transport.run_id)  # all have found it
        try:
            with self._others.waiting():
                failed = pages.verdict(first)
        except (PeerLostError, PeerTimeoutError) as absent:
            return absent  # it may still be completed: nothing is removed
        if failed:
            rank, text = next(iter(failed.items()))
            return CheckpointError(f"worker {rank} could not complete it: {text}")
        if switching and several:
            self._switch(job, manifest, job.keep, here)
        return None

    def _switch(self, job: _Job, manifest: Manifest, keep: int, here: Sequence[FileInfo]) -> Exception | None:
        try:
            index.commit(job.root, job.name, manifest, keep, here)
        except (OSError, CheckpointError) as error:
            if _is_listed(job):
                _log.warning("%s is complete, and what follows has failed: %s", job.folder, error)
                return None
            return error
        return None

    def _look_on_disk(self, job: _Job, error: ConnectionError) -> Exception | None:
        """Without a store: whether the checkpoint has been completed, or is within a moment. None: it has."""
        deadline = time.monotonic() + min(self._transport.timeout, _ANY_MOMENT)
        while not _is_listed(job):
            if time.monotonic() > deadline:
                return PeerLostError(f"no word of the others: {error}. Where no launcher keeps the store worker 0 does.")
            time.sleep(0.05)
        return None


def _is_listed(job: _Job) -> bool:
    try:
        return job.name in index.read_latest(job.root)
    except CheckpointError:
        return False


def _checked_path(path: Any) -> Path:
    root = index.folder_of(path)
    with contextlib.suppress(OSError):  # the writer comes upon it, too, and there it does not end the training
        if index.is_checkpoint(root):
            raise ValueError(f"{root} is one checkpoint: pass the folder for checkpoints, {root.parent}, to save")
    return root


def _checked_keep(keep: Any) -> int:
    if isinstance(keep, bool) or not hasattr(keep, "__index__"):
        raise TypeError(f"keep must be a whole number of checkpoints, at least 1, got {keep!r}")
    if keep < 1:
        raise ValueError(f"keep must be a whole number of checkpoints, at least 1, got {keep!r}")
    return int(keep)


def _leave(saver: Saver) -> None:
    """The interpreter ends, or the wrapper was dropped."""
    if threading.current_thread().name.startswith("decent_dp-"):
        # The garbage collector runs in any thread, and these would wait for themselves.
        threading.Thread(target=saver.close, name="leaving").start()
        return
    # An interactive session goes on after an error, and keeps it.
    saver.close(at_error=getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"))
