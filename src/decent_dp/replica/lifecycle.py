"""The life of a replica: whether it can make rounds, what it refuses at a wrong time, and its end."""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
import threading
from collections.abc import Callable, Iterator

import torch

from decent_dp.engine import Engine
from decent_dp.membership import Epochs
from decent_dp.replica.mates import Mates
from decent_dp.transport import Transport

__all__ = ["Lifecycle", "State", "shut_down"]

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """Whether a replica makes rounds. That a round has failed is ``Lifecycle.fault``, in each of these."""

    # -> IN_JOIN: join() is entered. -> CLOSED: close().
    OPEN = "open"
    # -> RUN_OUT: this worker has no batch any more. -> OPEN: an error leaves join().
    IN_JOIN = "in join()"
    # -> OPEN: no worker has a batch any more.
    RUN_OUT = "run out"
    # -> SUPERSEDED: it was unused, and closed because a newer replica takes the model over.
    CLOSED = "closed"
    SUPERSEDED = "superseded"


class Lifecycle:
    """What a replica can do now. Calls at a wrong time are refused with a RuntimeError.

    Args:
        what: the replica, for messages. ``model``: the expression for the model itself.
        world: connects all workers. ``mates``: those of this replica.
        on_cuda: whether the model is on a GPU.

    Attributes:
        state: see ``State``.
        fault: the error that left a round. No further one can be made, and the replica can still be read and saved.
        before_first_round: of a process that joins a run: makes it a member.
    """

    def __init__(self, what: str, model: str, world: Transport, mates: Mates, *, on_cuda: bool) -> None:
        self._what, self._model, self._on_cuda = what, model, on_cuda
        self._world, self._mates = world, mates
        self.state = State.OPEN
        self.fault: BaseException | None = None
        self.before_first_round: Callable[[], None] | None = None
        # The exception that was handled already when the replica was made.
        self._handled = id(sys.exc_info()[1])

    @property
    def closed(self) -> bool:
        """Whether rounds are over."""
        return self.state in (State.CLOSED, State.SUPERSEDED)

    @property
    def joining(self) -> bool:
        """Whether it is inside ``join``."""
        return self.state in (State.IN_JOIN, State.RUN_OUT)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Context manager around a round, or a part of one: an exception that leaves it is the replica's ``fault``."""
        try:
            with self._mates.explaining():
                yield
        except BaseException as error:
            self.fault = error
            self._world.report(f"{type(error).__name__}: {error}")
            raise

    def passing_error(self) -> BaseException | None:
        """The exception that passes a ``finally``, or that an ``except`` handles, in the caller or above it; None if there is
        none, or it was handled already when the replica was made."""
        error = sys.exc_info()[1]
        is_end = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
        return None if is_end or id(error) == self._handled else error

    def refuse_stopped(self) -> None:
        """No round can be made: the replica is closed, failed, or in a CUDA-graph capture."""
        self.refuse_superseded()
        if self.closed:
            raise RuntimeError(f"{self._what} was closed: train before close(), or use {self._model} on its own.")
        if self.fault is not None:
            raise RuntimeError(
                f"an update failed earlier ({type(self.fault).__name__}: {self.fault}), and this replica is out of step with "
                "the others: start the workers again."
            ) from self.fault
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph is being captured, and {self._what} would make its rounds in the capture and never in a replay: "
                "capture the forward and the backward alone, before gossip() (torch.cuda.make_graphed_callables), or use "
                "torch.compile(mode='reduce-overhead'), and step outside. A replay uses the memory that parameters had: give "
                "the wrapper param_as_bucket_view=False, or it moves them."
            )

    def refuse_superseded(self) -> None:
        """A newer replica has taken the model over."""
        if self.state is State.SUPERSEDED:
            raise RuntimeError(f"{self._what} had made no update when a newer one took its model over: use the newer one.")

    def refuse_closed(self) -> None:
        """It is closed; called before a save."""
        self.refuse_superseded()
        if self.closed:
            raise RuntimeError(f"{self._what} was closed: save before close(), or keep {self._model}.state_dict().")

    def refuse_failed(self, what: str) -> None:
        """A round has failed. Here and below ``what`` names the user's call."""
        if self.fault is not None:
            raise RuntimeError(
                f"{what} came after an update that failed half-way ({type(self.fault).__name__}: {self.fault}): this replica "
                "is out of step with the others. Start the workers again from what was saved before."
            ) from self.fault

    def refuse_inside(self, what: str) -> None:
        """A backward is running."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{what} was called inside a backward: call it after the backward has returned.")

    def refuse_in_join(self, what: str, instead: str = "after") -> None:
        """It is inside ``join``, where workers may wait in another collective."""
        if self.joining:
            raise RuntimeError(
                f"{what} was called inside join(), where some workers have run out: call it {instead} the with-block."
            )

    def refuse_before_member(self, what: str) -> None:
        """This process joins a run, and has made no step yet."""
        if self.before_first_round is not None:
            raise RuntimeError(
                f"{what} was called in a process that joins a run, before its first step: it is no member yet, and has the "
                f"newest state of another worker already. Leave {what} out where replica.roster.seat is -1."
            )


def shut_down(engine: Engine, transport: Transport, epochs: Epochs | None, owner: threading.Thread) -> None:
    """Finishes the exchanges in flight, so that neighbours do not fail in them, and closes the transport.

    Args:
        epochs: those of the run, if its members can change. Closed, too.
        owner: the training thread.
    """
    if threading.current_thread() not in (owner, threading.main_thread()):
        # The garbage collector may call this in any thread. In a transport's thread, or in one that trains another replica,
        # waiting for the exchange would deadlock.
        args = engine, transport, epochs
        threading.Thread(target=lambda: shut_down(*args, threading.current_thread()), name="decent_dp-shutdown").start()
        return
    error = getattr(sys, "last_value", None)  # the exception that ends the interpreter, if any
    if error is not None:
        transport.report(f"{type(error).__name__} in round {engine.round}: {error}".rstrip(": "))
    try:
        engine.drop()
    except Exception as lost:
        if error is None:
            _log.warning("the last exchange could not be finished: %s", lost)
    if epochs is not None:
        epochs.keeper.close()
    transport.close()
