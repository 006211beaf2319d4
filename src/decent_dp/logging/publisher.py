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

# Seconds over which rates are taken; at least two rounds, if they take longer.
_WINDOW = 10.0
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
    replica.refuse_stopped()
    if any(isinstance(listener, _Publisher) for listener in replica.listeners):
        return
    publisher = _Publisher(replica)
    replica.listeners.append(publisher)
    # Before the replica's own, which closes the connections.
    Finalize(replica, publisher.end, exitpriority=110)
    publisher.start()


class _Publisher(Listener):
    """Writes the statuses of one worker. It does not refer to the replica, which may be collected before the thread ends."""

    def __init__(self, replica: Replica) -> None:
        transport, server = replica.world, server_of(replica.world.store)
        self._engine = replica.engine
        self._run, self._rank, self._world_size = transport.run_id, transport.rank, transport.world_size
        self._name = f"{Path(sys.argv[0]).name or 'python'}, {type(replica.model).__name__}"
        self._store = "" if server is None else f"{server[0]}:{server[1]}"
        self._host, self._began, self._beat = socket.gethostname(), time.time(), 0
        self._distance: float | None = None
        self._last = self._sample()
        self._samples = deque([self._last])
        self._places: list[FolderEntries | StoreEntries] = []
        self._left = threading.Event()
        self._thread = threading.Thread(target=telling(self._publish, _warn), name="decent_dp-status", daemon=True)

    # -- in the training thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def round_ended(self) -> None:
        self._last = self._sample()

    def measured(self, distance: float) -> None:
        self._distance = distance

    def closing(self) -> None:
        self.end()

    def end(self) -> None:
        """Removes the status; a store that does not answer is waited for a moment only."""
        self._left.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE)

    def _sample(self) -> tuple[float, int, int, float]:
        engine = self._engine
        return time.monotonic(), engine.round, engine.bytes_sent, engine.waited

    # -- in the publishing thread -------------------------------------------------------------------------------------

    def _publish(self) -> None:
        for open_place in (self._open_folder, self._open_store):
            _works(open_place)
        while self._places and not self._left.is_set():
            status = self._status()
            self._places = [place for place in self._places if _works(partial(place.write, status))]
            self._left.wait(BEAT)
        for place in self._places:
            _works(partial(place.remove, self._run, self._rank))

    def _open_folder(self) -> None:
        entries = FolderEntries(open_folder())
        entries.runs()  # removes what killed workers have left
        self._places.append(entries)

    def _open_store(self) -> None:
        if self._store:
            # A connection of its own, because a call that hangs blocks all others of the same connection.
            entries = StoreEntries(self._store, _CONNECT)
            if self._rank == 0:
                entries.announce(self._status())
            self._places.append(entries)

    def _status(self) -> Status:
        last, samples = self._last, self._samples
        if last[1] < samples[-1][1]:  # a checkpoint was loaded
            samples.clear()
        if not samples or last[1] > samples[-1][1]:
            samples.append(last)
        while len(samples) > 2 and last[0] - samples[1][0] >= _WINDOW:
            samples.popleft()
        seconds, rounds, sent, waited = (b - a for a, b in zip(samples[0], samples[-1], strict=True))
        some = rounds > 0 and seconds > 0
        self._beat += 1
        return Status(
            run=self._run,
            name=self._name,
            world_size=self._world_size,
            store=self._store,
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            began=self._began,
            beat=self._beat,
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
