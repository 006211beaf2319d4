"""Who takes part in a collective when some workers are gone: those that come to it agree over the store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport.base import read_text, store_errors

__all__ = ["Meeting"]

_FIRST_POLL, _LAST_POLL = 0.005, 0.1


class Meeting:
    """Agrees on the workers of one collective after the other.

    Each worker that comes to a collective says so in the store, and names those that are gone as far as it knows. The worker of
    lowest rank closes the meeting when all have come that nobody has named, or another one does, after a while.

    Args:
        store: shared by these workers alone.
        get_lost: returns the workers that are gone, as far as this one knows.
        timeout: seconds for which a worker waits for the others.
    """

    def __init__(self, store: Store, rank: int, world_size: int, get_lost: Callable[[], list[int]], timeout: float) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._get_lost, self._timeout = get_lost, timeout
        self._count = 0

    def members(self) -> list[int]:
        """Waits for the others. Returns the ranks of those that take part, the same on all of them.

        Raises:
            PeerLostError: the others have gone on without this worker.
            PeerTimeoutError: they have not all come.
            ConnectionError: the store does not answer.
        """
        key, self._count = f"meeting/{self._count}", self._count + 1
        deadline, pause = time.monotonic() + self._timeout, _FIRST_POLL
        said: list[int] | None = None
        while True:
            with store_errors():
                lost = self._get_lost()
                if said != lost:
                    self._store.set(f"{key}/{self._rank}", json.dumps(lost))
                    said = lost
                closed = read_text(self._store, f"{key}/members")
                # In the end all look who is there: the worker that should close it may be gone, and only others know.
                if closed is None and (pause == _LAST_POLL or self._rank == min(set(range(self._world_size)) - set(lost))):
                    closed = self._close(key)
            if closed is not None:
                members: list[int] = json.loads(closed)
                if self._rank not in members:
                    raise PeerLostError(
                        f"the others took worker {self._rank} for gone, and workers {members} have made this call without it: "
                        "start it again from the newest checkpoint."
                    )
                return members
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"not all workers have come to this call within the process group's timeout of {self._timeout:g} s: make "
                    "it on every worker. (One that is gone is missed only if a living worker was connected to it.)"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)

    def _close(self, key: str) -> str | None:
        """Closes the meeting if everybody has come who is not named as gone."""
        here = self._present(key)
        gone = {rank for lost in here.values() for rank in lost} - here.keys()
        if len(here) + len(gone) < self._world_size:
            return None
        members = json.dumps(sorted(here))
        # Of two that both close it, the first wins.
        return self._store.compare_set(f"{key}/members", "", members).decode()

    def _present(self, key: str) -> dict[int, Sequence[int]]:
        texts = ((rank, read_text(self._store, f"{key}/{rank}")) for rank in range(self._world_size))
        return {rank: json.loads(text) for rank, text in texts if text is not None}
