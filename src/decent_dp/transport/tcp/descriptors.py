"""Sockets that a forked child process must not keep.

A child, such as a worker of a DataLoader, may outlive its parent. While it holds a copy of a socket, the other end does not
notice that the parent has died.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from weakref import WeakSet

__all__ = ["own"]

_OWNED: WeakSet[socket.socket] = WeakSet()
# A fork waits for it: between the system call that makes a descriptor and its entry in the set, a child would keep a copy.
_LOCK = threading.RLock()


def own(make: Callable[[], socket.socket]) -> socket.socket:
    """Returns the socket that ``make`` returns, without blocking. Child processes close their copy of it."""
    with _LOCK:
        made = make()
        _OWNED.add(made)
    return made


def _close_in_child() -> None:
    for owned in list(_OWNED):
        owned.close()
    _LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_close_in_child)
