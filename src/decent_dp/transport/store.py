"""The store of the workers, whose server may be gone, or stopped."""

from __future__ import annotations

import functools
import logging
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from decent_dp.errors import PeerError
from decent_dp.transport.waiter import Waiter

__all__ = [
    "ROOT",
    "UNREADABLE",
    "StoreClient",
    "add_to",
    "connect_store",
    "count_of",
    "read_bytes",
    "read_text",
    "server_of",
    "warn_of_unreadable",
    "whole_store",
]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The beginning of all keys of this library in a store.
ROOT = "decent_dp"
# What reading raises that other programs have written.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Seconds for a connection of a client, and for a call at the end.
_SECONDS = 2.0
# Seconds for an answer of a store that may hang.
_LIMIT = 5.0
# Digits of a counter: the server's own numbers have 64 bits.
_DIGITS = 18
# Calls that may hang, each with a connection of its own, before no other is made: the server is stopped, perhaps.
_MOST_HANGING = 3
_HANGS = "the store does not answer, and does not fail"


def read_text(store: Store, key: str) -> str | None:
    """The text that is stored under ``key``; None if there is none. Does not wait, as ``store.get`` would."""
    value = read_bytes(store, key)
    return None if value is None else value.decode(errors="replace")


def read_bytes(store: Store, key: str) -> bytes | None:
    """As ``read_text``, for what may be no text."""
    return store.get(key) if store.check([key]) else None


def count_of(store: Store, key: str) -> int:
    """The number of a counter below ``ROOT``; 0 for none, and for what is no number."""
    value = read_bytes(store, key)
    return 0 if value is None or _is_unreadable(key, value) else int(value)


def add_to(store: Store, key: str, amount: int) -> int:
    """``store.add``, to what ``count_of`` returns. Where there is no number, the server would close the connection."""
    value = read_bytes(store, key)
    if value is not None and _is_unreadable(key, value):
        store.compare_set(key, value, "0")  # type: ignore[arg-type]
    return store.add(key, amount)


def _is_unreadable(key: str, count: bytes) -> bool:
    if count.isdigit() and len(count) <= _DIGITS:
        return False
    warn_of_unreadable(key, "it counts as 0")
    return True


@functools.cache  # once per process
def warn_of_unreadable(key: str, meaning: str) -> None:
    """Logs a warning for a value that no worker can have written.

    Args:
        key: below ``ROOT``.
        meaning: what is made of it.
    """
    _log.warning(
        "the store has something else under '%s/%s' than workers write there, and it is skipped: %s. See who else writes to "
        "this store.",
        ROOT,
        key,
        meaning,
    )


def whole_store(store: Store) -> Store:
    """Returns the store that ``store`` is a part of, with the keys of all runs."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def server_of(store: Store) -> tuple[str, int] | None:
    """Returns the host and the port of the server that keeps ``store``; None if there is none."""
    store = whole_store(store)
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def connect_store(host: str, port: int, prefix: str, seconds: float) -> Store:
    """Returns a new connection to the server of a store, for keys with this prefix.

    Raises:
        OSError: nothing listens there.
        RuntimeError: no store answers within ``seconds``, or twice as many. One whose process is stopped is waited for without
            end (``StoreClient``).
    """
    # torch would try again until then, and print a stack.
    socket.create_connection((host, port), seconds).close()
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(prefix, store)


class StoreClient:
    """Calls of a store, each within a limit, from any thread. It connects again to a server that was lost.

    torch's clients stay broken when their server has ended, and complain on the console. When its process is stopped
    (SIGSTOP) they ignore their own timeout: the constructor, ``get``, ``check``, ``add`` and ``wait`` return only when it is
    killed or continues, and until then block all other calls of the same client (torch 2.13). So a daemon thread makes the
    calls. It ends with ``close``, or with this object.

    Args:
        store: any part of it, or the host and port of its server.
        prefix: of the keys.
        seconds: for a connection.
    """

    def __init__(self, store: Store | tuple[str, int], prefix: str, seconds: float = _SECONDS) -> None:
        self._prefix, self._seconds = prefix, seconds
        self._server = store if isinstance(store, tuple) else server_of(store)
        self._store: Store | None = None
        if not isinstance(store, tuple) and self._server is None:
            self._store = PrefixStore(prefix, whole_store(store))
        self._lock, self._closed = threading.Lock(), False
        # The thread in use, its last call, and the calls of former ones that have not returned.
        self._threads = [Waiter("decent_dp-store")]
        self._last: futures.Future[Any] | None = None
        self._hanging: list[futures.Future[Any]] = []
        weakref.finalize(self, lambda threads: threads[0].close(), self._threads).atexit = False

    def start(self) -> None:
        """Starts the thread; else the first call does. When the interpreter exits no thread can start any more."""
        self._threads[0].start()

    def run(self, call: Callable[[Store], T], limit: float | None = None) -> T:
        """Returns the result of ``call``, or raises its error.

        Args:
            limit: in seconds; None: ``_LIMIT``.

        Raises:
            ConnectionError: the store does not answer within the limit, or the client was closed.
        """
        limit = _LIMIT if limit is None else limit
        if not self._lock.acquire(timeout=limit):
            raise ConnectionError("the store does not answer: other calls wait for it")
        try:
            if self._closed:
                raise ConnectionError("the worker has ended")
            if self._last is not None and not self._last.done():
                self._hanging = [future for future in self._hanging if not future.done()]
                if self._server is None or len(self._hanging) >= _MOST_HANGING:
                    raise ConnectionError(_HANGS)
                # A connection that was cut for a minute may wait for another one before it sends again. A new one may not.
                self._hanging.append(self._last)
                self._threads[0].close()
                self._threads[0], self._store = Waiter("decent_dp-store"), None
            try:
                self._last = future = self._threads[0].submit(lambda: self._call(call))
            except RuntimeError as error:  # the system gives it no thread
                raise ConnectionError(f"the store cannot be asked: {error}") from error
            if not futures.wait([future], limit).done:
                raise ConnectionError(_HANGS)
            return future.result()
        finally:
            self._lock.release()

    def _call(self, call: Callable[[Store], T]) -> T:
        store = None
        try:
            store = self._connected()
            return call(store)
        except PeerError:
            raise  # of what the store has answered
        except (OSError, RuntimeError) as error:
            if self._store is store and self._server is not None:
                self._store = None
            if isinstance(error, OSError):
                raise
            # torch has kinds of RuntimeError, and adds a stack in C++ after the first line.
            raise ConnectionError(f"the store does not answer: {str(error).partition(chr(10))[0]}") from error

    def close(self) -> None:
        """Waits for a call that is being made, but not for one that hangs, and ends the thread."""
        self._closed = True
        self._threads[0].close(wait=_SECONDS if self._lock.locked() else 0.0)

    def _connected(self) -> Store:
        if self._store is None:
            assert self._server is not None
            try:
                self._store = connect_store(*self._server, self._prefix, self._seconds)
            except OSError as error:
                # Without its cause: whoever looks up an address would take a server that refuses for a peer that does.
                raise ConnectionError("no store answers at {}:{} ({})".format(*self._server, error)) from None
        return self._store
