"""The workers of one replica, where faults are tolerated: they make the same rounds, and end together.

Their forwards and backwards have collectives of torch, which cannot go on without one of them. A collective of gloo that waits
for a stopped process cannot be left, either. So a thread looks at them, and ends this process if its training thread is stuck.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError
from decent_dp.membership import Members, MembershipMonitor
from decent_dp.replica.consistency import wait_for_all
from decent_dp.replica.shards import param_groups_of
from decent_dp.transport import Transport, is_of_network
from decent_dp.transport.waiter import start_thread

__all__ = ["Mates"]

_log = logging.getLogger(__name__)

# Seconds between two looks at the others.
_LOOK = 0.05
# Seconds for which the training thread must have stood at one instruction, after another worker of the replica was lost, to
# count as stuck in a collective.
_STUCK = 2.0
# Seconds until a failed collective is no consequence of a worker that is gone: its connections break at the same time.
_EXPLAINED = 1.0
# The packages of torch in which it waits.
_WAITS_IN = ("distributed", "autograd")
# The exit status of a process that is ended here.
_EXIT = 1


class Mates:
    """One worker's view of those that hold the other parts of its replica. Where there are none it does nothing.

    It is made in the training thread.

    Args:
        transport: of all workers.
        members: of the run. Where it needs all of its workers nothing is done, either.

    Attributes:
        ranks: of the workers of this replica. ``number``: of the replica; ``position``: of this worker in it.
        nonfinite_in: the last round in which one of them was not finite, as of the last ``agree_on``; -1 if none ever was.
        error: set when one of them is gone.
    """

    def __init__(self, transport: Transport, members: Members) -> None:
        self._transport, self._replicas = transport, (replicas := members.replicas)
        self._monitor = members if replicas.shards > 1 and isinstance(members, MembershipMonitor) else None
        self.number, self.position = replicas.place_of(transport.rank)
        self.ranks, self.nonfinite_in = replicas.workers_of(self.number), -1
        self._kind, self._votes = "", 0
        self._training = threading.get_ident()
        # Set when there is nothing to look at any more: the replica is closed, or the training thread has got the error.
        self._ending = threading.Event()
        self.error: PeerLostError | None = None
        # Makes the objects of fully_shard what they were.
        self._undo = contextlib.ExitStack()

    def start(self, incarnation: int) -> None:
        """They can be connected. ``incarnation``: of the first of them."""
        self._kind = f"mates {self.ranks[0]} {incarnation}"
        if self._monitor is not None:
            for rank in set(self.ranks) - {self._transport.rank}:  # in agreements each meets the first one only
                self._transport.plane.connect(rank)
            start_thread(_looks_of(self), "decent_dp-mates", self._monitor.neighbours.fail)

    def agree_on(self, target: int, nonfinite: int, *, alone: bool = False) -> int:
        """The round in which this replica goes on, the same on all of its workers, and so is ``nonfinite_in`` after it. They
        call it together.

        They come to epochs in the same round, too: as soon as all of them know one.

        Args:
            target: the first round that the others of this worker have not passed.
            nonfinite: the last round in which this worker's part was not finite.
            alone: they make no steps together at present. Then it is each worker's own.

        Raises:
            PeerLostError, PeerTimeoutError: one of them is gone, or does not come.
        """
        if self._monitor is None:
            return target
        epochs = self._monitor.epochs
        if alone:
            if epochs is not None:
                epochs.limit = math.inf
            self.nonfinite_in = nonfinite
            return target
        self._training = threading.get_ident()
        name, what, self._votes = f"{self._kind}/{self._votes}", "a round", self._votes + 1
        own = target, nonfinite, 0 if epochs is None else -epochs.own.number
        agreed = self._transport.plane.agree(name, json.dumps(own), among=self.ranks)
        late = f"did not come to {what} of its replica: the workers of one replica make the same steps."
        texts = wait_for_all(self._transport, name, agreed, self._transport.timeout, what, late)
        if lost := [rank for rank in self.ranks if rank not in texts]:
            self._lose(lost)
        self.refuse_lost()
        target, self.nonfinite_in, known = map(max, zip(*map(json.loads, texts.values()), strict=True))
        if epochs is not None:
            epochs.limit = -known
        return target

    def refuse_lost(self) -> None:
        """Raises PeerLostError if one of them is gone."""
        if self.error is not None:
            self._ending.set()
            raise self.error

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Context manager around a collective of the replica: if it fails as one of them is gone, the error says so."""
        try:
            yield
        except RuntimeError as error:
            is_own = type(error).__module__ == PeerLostError.__module__  # says what has happened
            if self._monitor is None and not is_own and len(self.ranks) > 1 and is_of_network(error):
                others = [rank for rank in self.ranks if rank != self._transport.rank]
                raise self._transport.explain(error, others, "a collective of its replica") from error
            deadline = time.monotonic() + (0.0 if is_own or self._monitor is None else _EXPLAINED)
            while time.monotonic() < deadline and self._look(failed=True):
                time.sleep(_LOOK / 10)
            if self.error in (None, error) or (is_own and not isinstance(error, PeerError)):
                raise
            self._ending.set()
            raise self.error from error

    def explain(self, modules: Iterable[Any]) -> None:
        """The collectives of these modules of ``fully_shard`` are in ``explaining`` from now on."""
        if len(self.ranks) == 1:
            return
        found = weakref.ref(self)
        for group in (group for module in modules for group in param_groups_of(module)):
            # Older versions of torch have no objects for them: their errors stay torch's.
            for comm in filter(None, (getattr(group, name, None) for name in ("_all_gather_comm", "_reduce_scatter_comm"))):
                kind: Any = type(comm)

                def call(*args: Any, inner: Any = kind.__call__, **kwargs: Any) -> Any:
                    with contextlib.nullcontext() if (mates := found()) is None else mates.explaining():
                        return inner(*args, **kwargs)

                comm.__class__ = type(kind.__name__, (kind,), {"__call__": call})
                self._undo.callback(setattr, comm, "__class__", kind)

    def wait_for_whole_replicas(self) -> None:
        """Until all workers of each replica, or none, are among those of the last collective of all.

        Raises:
            PeerLostError: some of this worker's replica are not.
            PeerTimeoutError: some of another replica take part alone for the process group's timeout.
        """
        control, replicas = self._transport.control, self._replicas
        deadline = time.monotonic() + self._transport.timeout
        while self._monitor is not None and len(replicas.whole(control.ranks)) * replicas.shards < len(control.ranks):
            if lost := [rank for rank in self.ranks if rank not in control.ranks]:
                self._lose(lost)
                self.refuse_lost()
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"of the workers {list(control.ranks)}, which make this call, some belong to replicas of which others are "
                    f"gone, and they have not ended within {self._transport.timeout:g} s: end their processes."
                )
            control.gather(None)  # the others of such a replica end

    def close(self) -> None:
        self._ending.set()
        self._undo.close()

    def _lose(self, ranks: Sequence[int]) -> None:
        if self.error is not None or self._monitor is None:
            return
        own, several = self._transport.rank, len(ranks) > 1
        who = f"worker{'s' if several else ''} {', '.join(map(str, ranks))}"
        self.error = PeerLostError(
            f"{who} {'have' if several else 'has'} ended, or cannot be heard, and worker {own} is of the same "
            f"replica: this replica cannot go on, and ends. The others continue. Start its workers {list(self.ranks)} again, "
            "together: they join the run (decent_dp.join)."
        )
        _log.error("%s", self.error)
        self._monitor.neighbours.fail(self.error)  # for the other replicas it is gone from now on
        if self._monitor.epochs is not None:
            self._monitor.epochs.keeper.stop()

    # -- in the thread that looks -------------------------------------------------------------------------------------

    def _look(self, *, failed: bool = False) -> bool:
        """Whether all of them are here. ``failed``: a collective has, so that those that have left are missed, too."""
        if self._monitor is None:
            return True
        seen, own = self._monitor.neighbours.look(), self._transport.rank
        gone = seen.lost | seen.ended if failed else (seen.lost | seen.ended) - seen.left
        if lost := [rank for rank in self.ranks if rank in gone and rank != own]:
            self._lose(lost)
        return self.error is None

    def _end_if_stuck(self) -> None:
        """Ends the process if its training thread waits where it cannot be told of the error."""
        before, since = None, 0.0
        while not self._ending.wait(_LOOK) and (frame := sys._current_frames().get(self._training)) is not None:
            at = id(frame), frame.f_lasti
            if at != before:
                before, since = at, time.monotonic()
            elif time.monotonic() - since > self._patience(frame):
                _end(frame, self.error)

    def _patience(self, frame: FrameType) -> float:
        """Seconds for which the thread may stand here: in a collective or a backward of torch it waits for the others, and
        where it reads from a GPU it may."""
        where = [file.filename for file in traceback.extract_stack(frame)]
        if any(os.sep.join(("torch", room)) in name for name in where for room in _WAITS_IN):
            return _STUCK
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return self._monitor.faults.dead_after if on_gpu and self._monitor is not None else math.inf


def _end(frame: FrameType, error: PeerLostError | None) -> None:
    where, what = "".join(traceback.format_stack(frame)), f"{PeerLostError.__module__}.{PeerLostError.__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.write(f"The training thread waits here for another worker of its replica:\n{where}{what}\n")
    sys.stderr.flush()
    os._exit(_EXIT)


def _looks_of(mates: Mates) -> Callable[[], None]:
    """The work of the thread, which keeps nothing alive while all is well."""
    found, ending = weakref.ref(mates), mates._ending

    def look() -> None:
        while not ending.wait(_LOOK):
            mates = found()
            if mates is None:
                return
            if not mates._look():
                mates._end_if_stuck()
                return
            del mates

    return look
