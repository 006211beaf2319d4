"""How a worker goes: connections are given back, and nobody's exchange is broken."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from decent_dp.engine import Engine
from decent_dp.transport import Transport

__all__ = ["given_back_on_error", "shut_down"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def given_back_on_error(transport: Transport, ours: bool) -> Iterator[None]:
    """A wrapper that could not be made cannot be closed: the threads and sockets of its transport would stay."""
    try:
        yield
    except BaseException as error:
        if ours:
            transport.report(f"{type(error).__name__} while it wrapped its model: {error}")
            transport.close()
        raise


def shut_down(engine: Engine, transport: Transport, owner: threading.Thread) -> None:
    """A worker that goes must not break the exchange that its neighbours are still in.

    Args:
        owner: the thread that trains.
    """
    if threading.current_thread() not in (owner, threading.main_thread()):
        # The garbage collector runs in any thread. In one that moves bytes, or that trains another replica of this process, a
        # wait for the exchange would be a wait for that thread itself.
        threading.Thread(target=_shut_down, args=(engine, transport), name="leaving").start()
    else:
        _shut_down(engine, transport)


def _shut_down(engine: Engine, transport: Transport) -> None:
    error = getattr(sys, "last_value", None)  # what ends this interpreter, if something does
    if error is not None:
        transport.report(f"{type(error).__name__} in round {engine.round}: {error}")
    try:
        engine.drop()
    except Exception as lost:
        if error is None:
            _log.warning("the last exchange could not be finished: %s", lost)
    transport.close()
