"""The end of a worker: it finishes its exchanges and closes its connections."""

from __future__ import annotations

import logging
import sys
import threading

from decent_dp.engine import Engine
from decent_dp.membership import Epochs
from decent_dp.transport import Transport

__all__ = ["passing_error", "shut_down"]

_log = logging.getLogger(__name__)


def passing_error(handled: int) -> BaseException | None:
    """The exception that passes a ``finally``, or that an ``except`` handles, in the caller or above it; None if there is none.

    Args:
        handled: the ``id`` of the one that was handled already when the replica was made.
    """
    error = sys.exc_info()[1]
    is_end = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
    return None if is_end or id(error) == handled else error


def shut_down(engine: Engine, transport: Transport, epochs: Epochs | None, owner: threading.Thread) -> None:
    """Finishes the exchanges in flight, so that neighbours do not fail in them, and closes the transport.

    Args:
        epochs: those of the run, if its members can change. Closed, too.
        owner: the training thread.
    """
    if threading.current_thread() not in (owner, threading.main_thread()):
        # The garbage collector may call this in any thread. In a transport's thread, or in one that trains another replica,
        # waiting for the exchange would deadlock.
        threading.Thread(target=_shut_down, args=(engine, transport, epochs), name="decent_dp-shutdown").start()
    else:
        _shut_down(engine, transport, epochs)


def _shut_down(engine: Engine, transport: Transport, epochs: Epochs | None) -> None:
    error = getattr(sys, "last_value", None)  # the exception that ends the interpreter, if any
    if error is not None:
        transport.report(f"{type(error).__name__} in round {engine.round}: {error}")
    try:
        engine.drop()
    except Exception as lost:
        if error is None:
            _log.warning("the last exchange could not be finished: %s", lost)
    if epochs is not None:
        epochs.close()
    transport.close()
