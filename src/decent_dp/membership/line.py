"""What a run keeps in the store where faults are tolerated: its line of epochs, and what a process needs to join it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from decent_dp.transport.base import StoreCalls, connect_store, read_text, server_of, store_errors, whole_store

__all__ = ["Line"]

T = TypeVar("T")

# Seconds for a connection, and for an answer of a store that may hang.
_SECONDS, _LIMIT = 2.0, 5.0


class Line:
    """Texts of epochs under their numbers, where the first one stays. It connects again to a server that was lost.

    torch's clients stay broken when their server has ended, and complain on the console.

    Args:
        store: of the run, for a store without a server.
        run_id: names the run, as others may use the same server.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._prefix, self._server = f"decent_dp/{run_id}/line", server_of(store)
        self._client: Store | None = PrefixStore(self._prefix, whole_store(store)) if self._server is None else None
        self._calls, self._lock = StoreCalls(), threading.Lock()

    def probe(self) -> None:
        """Raises ConnectionError if the store does not answer."""
        self._run(lambda store: store.check(["epoch/0"]))

    def write(self, number: int, text: str, before: str | None) -> str | None:
        """Writes an epoch.

        Args:
            before: the text of the epoch before, if it may be written when the store knows nothing of it.

        Returns:
            The text that counts; None if the store knows nothing of the epoch before, and may not be told.

        Raises:
            ConnectionError: the store does not answer. The text may be written.
        """

        def write(store: Store) -> str | None:
            if number and read_text(store, f"epoch/{number - 1}") is None:
                if before is None:
                    return None
                store.compare_set(f"epoch/{number - 1}", "", before)
            return store.compare_set(f"epoch/{number}", "", text).decode()

        return self._run(write)

    def _run(self, call: Callable[[Store], T]) -> T:
        def run() -> T:
            try:
                with store_errors():
                    return call(self._connected())
            except (ConnectionError, OSError):
                self._client = self._client if self._server is None else None
                raise

        with self._lock:
            return self._calls.run(run, _LIMIT)

    def _connected(self) -> Store:
        if self._client is None:
            assert self._server is not None
            self._client = connect_store(*self._server, self._prefix, _SECONDS)
        return self._client
