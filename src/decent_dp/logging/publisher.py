"""A worker's own part in ``decent-dp watch``: a thread that publishes its status once per second."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path

from decent_dp.checkpoint.saver import Trained, replica_of
from decent_dp.logging.status import BEAT, FolderEntries, Status, StoreEntries, open_folder
from decent_dp.replica.replica import Listener, Replica
from decent_dp.transport.store import server_of
from decent_dp.transport.waiter import telling

__all__ = ["publish"]

_log = logging.getLogger(__name__)

# Statuses with another round over which rates are taken: ten seconds, or as many rounds if they take longer.
_WINDOW = 11
# Seconds for the connection to the store, and for the last word of a worker that leaves.
_CONNECT, _LEAVE = 30.0, 2.0


def publish(model: Trained) -> None:
    """Publishes this worker's status once per second from now on, for ``decent-dp watch``.

    To be called once, on every worker that is to be seen; ``Recorder`` does it by itself. A thread writes a file in a folder of
    this user alone, under the system's folder for temporary files, and an entry in the store of the process group. It ends
    with the replica. A status that cannot be written is a warning in the log, and no error.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned.

    Raises:
        TypeError: it is something else.
        RuntimeError: it was closed.
    """
    replica = replica_of(model, "publish")
    replica.life.refuse_stopped()
    if any(isinstance(listener, _Publisher) for listener in replica.listeners):
        return
    publisher = _Publisher(replica)
    replica.listeners.append(publisher)
    # Before the replica's own, which closes the connections.
    Finalize(replica, publisher.closing, exitpriority=110)
    publisher.thread.start()


class _Publisher(Listener):
    """Writes the statuses of one worker. It does not refer to the replica, which may be collected before the thread ends."""

    def __init__(self, replica: Replica) -> None:
        transport, server = replica.world, server_of(replica.world.store)
        self._engine = replica.engine
        self._now = Status(
            run=transport.run_id,
            name=f"{Path(sys.argv[0]).name or 'python'}, {type(replica.model).__name__}",
            world_size=transport.world_size,
            store="" if server is None else f"{server[0]}:{server[1]}",
            rank=transport.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            began=time.time(),
            beat=0,
            round=0,
            idle_s=0.0,
            step_ms=None,
            waited_ms=None,
            mbit_s=None,
            distance=None,
        )
        self._distance: float | None = None
        # After the last round: the time, the round, the bytes sent and the seconds waited so far.
        self._last = self._sample()
        self._samples = deque([self._last], _WINDOW)
        self._left = threading.Event()
        self.thread = threading.Thread(target=telling(self._publish, _warn), name="decent_dp-status", daemon=True)

    # -- in the training thread ---------------------------------------------------------------------------------------

    def round_ended(self) -> None:
        self._last = self._sample()

    def measured(self, distance: float) -> None:
        self._distance = distance

    def closing(self) -> None:
        """Removes the status; a store that does not answer is waited for a moment only."""
        self._left.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(_LEAVE)

    def _sample(self) -> tuple[float, int, int, float]:
        engine = self._engine
        return time.monotonic(), engine.round, engine.counts.bytes_sent, engine.counts.waited_s

    # -- in the publishing thread -------------------------------------------------------------------------------------

    def _publish(self) -> None:
        places: list[FolderEntries | StoreEntries] = []
        _works(lambda: places.append(self._open_folder()))
        if self._now.store:
            _works(lambda: places.append(self._open_store()))
        while places and not self._left.is_set():
            self._count()
            places = [place for place in places if _works(partial(place.write, self._now))]
            self._left.wait(BEAT)
        for place in places:
            _works(partial(place.remove, self._now.run, self._now.rank))

    def _open_folder(self) -> FolderEntries:
        entries = FolderEntries(open_folder())
        entries.runs()  # removes what killed workers have left
        return entries

    def _open_store(self) -> StoreEntries:
        # A connection of its own, because a call that hangs blocks all others of the same connection.
        entries = StoreEntries(self._now.store, _CONNECT)
        if self._now.rank == 0:
            entries.announce(self._now)
        return entries

    def _count(self) -> None:
        """Makes the next status."""
        last, samples = self._last, self._samples
        if last[1] < samples[-1][1]:  # a checkpoint was loaded
            samples.clear()
        if not samples or last[1] > samples[-1][1]:
            samples.append(last)
        seconds, rounds, sent, waited = (b - a for a, b in zip(samples[0], samples[-1], strict=True))
        some = rounds > 0 and seconds > 0
        self._now = replace(
            self._now,
            beat=self._now.beat + 1,
            round=last[1],
            idle_s=time.monotonic() - last[0],
            step_ms=1e3 * seconds / rounds if some else None,
            waited_ms=1e3 * waited / rounds if some else None,
            mbit_s=8e-6 * sent / seconds if some else None,
            distance=self._distance,
        )


def _works(call: Callable[[], object]) -> bool:
    """Calls it; False, and a warning, if a disk or a store fails."""
    try:
        call()
    except (OSError, RuntimeError) as error:
        _warn(error)
        return False
    return True


def _warn(error: Exception) -> None:
    """Training does not need it."""
    is_expected = isinstance(error, (OSError, RuntimeError))
    what = str(error).partition("\n")[0]
    _log.warning("the status of this worker cannot be published: %s", what, exc_info=None if is_expected else error)
