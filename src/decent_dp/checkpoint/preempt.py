"""Pre-emption: a signal to any worker stops all workers after the same round."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from decent_dp._checks import check_number
from decent_dp.checkpoint.saver import Trained, replica_of
from decent_dp.replica.consistency import wait_for_all
from decent_dp.replica.replica import Listener, Replica

__all__ = ["Preemption"]

_log = logging.getLogger(__name__)

# Seconds between two looks for a signal to this worker, or a vote of another one.
_LOOK = 0.02
_CANNOT_BE_CAUGHT = (signal.SIGKILL, signal.SIGSTOP)
# They end a process that was forked in a context. Other signals to a group of processes are not meant for it.
_ENDS_FORKED = (signal.SIGTERM, signal.SIGINT)


@dataclass
class _StopRequest:
    """The signals to this worker, over all contexts of one wrapper.

    Attributes:
        pending: a signal or a request has arrived, and no stop was reached since. A plain attribute: a second signal may
            interrupt the handler of the first, and would wait for ever for a lock that this one holds.
    """

    pending: bool = False


_REQUESTS: WeakKeyDictionary[Replica, _StopRequest] = WeakKeyDictionary()


@dataclass
class _SignalHandler:
    """The handler of one context, which only records the signal. It may outlive the context, so it holds no wrapper.

    Attributes:
        previous: the handlers that it replaces. Those of an outer context record the signal, too.
        stays: a stop was reached in its context, or in an inner one: the process is to exit, and no signal may end it before.
        process: the one that has installed it, and not those that are forked from it.
    """

    request: _StopRequest
    previous: dict[int, Any] = field(default_factory=dict)
    stays: bool = False
    process: int = field(default_factory=os.getpid)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:
            if number in _ENDS_FORKED:  # the sender (a pool, at exit) waits until the process is gone
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.request.pending = True
        outer = self.previous.get(number)
        if isinstance(outer, _SignalHandler):
            outer(number, frame)

    def install(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.previous[number] = signal.signal(number, self)

    def restore(self) -> None:
        """Restores the previous handlers, unless it stays."""
        for number, handler in self.previous.items():
            if isinstance(handler, _SignalHandler):
                handler.stays |= self.stays
            elif self.stays:
                atexit.register(_ignore_at_exit, number)
                continue
            # None: it was not installed from Python, and Python cannot restore it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _ignore_at_exit(number: int) -> None:
    """An interpreter that finalizes runs no handlers, and a signal would end it with an exit code of its own."""
    if isinstance(signal.getsignal(number), _SignalHandler):
        signal.signal(number, signal.SIG_IGN)


class Preemption:
    """A context in which a signal to any worker stops all workers after the same round.

    ::

        with Preemption(model) as stop:
            for x, y in batches:
                criterion(model(x), y).backward()
                if stop.due:
                    break
        if stop.due:
            sys.exit(0 if save(model, path, state={"epoch": epoch}).error is None else 1)

    Entered on all workers. Read ``due`` after each update, on every worker after the same ones. It becomes true after the stop
    round that all workers have agreed on, one or two updates after the signal; save then. A signal during an evaluation, a save
    or before the first update takes effect after the update that follows. ``model.join()`` goes inside the context.

    The signal alone ends nothing: a loop that never reads ``due`` continues, with an error in the log, until it is killed.
    Repeated signals, and signals to all workers, count as one. So when a stop was reached, the handlers, which only record the
    signal, stay for the rest of the process: a signal that reaches one worker later than another must not end it while it
    saves. If no stop was reached, the previous handlers are restored after the context, ``due`` stays False, and a signal that
    arrived too late for an agreement takes effect in the next context.

    Several wrappers need a ``Preemption`` each, one inside the other. A signal applies to all of them: stop when all are
    ``due``. The stop round is a number of a round: a ``load`` of an earlier checkpoint inside the context delays the stop.

    Processes that are forked in the context (of a ``DataLoader``) end by SIGTERM and SIGINT, and ignore the other ``signals``.

    Agreement: a thread of each worker looks for a stop request. If there is one, it votes for the round after the current one,
    and its worker begins no round beyond it until the result is known. The stop round is the greatest vote. Every worker can
    reach it, because no vote is beyond it. So no two workers wait for each other. A worker that waits in a collective (in
    ``join``) votes, too. Where faults are tolerated, only workers that live vote.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned.
        signals: replaces their handlers; () for a worker that only follows the others.
        grace: seconds to wait for workers that do not vote; then an error is raised. Well below the time between the signal and
            the kill, because saving takes the rest.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, model: Trained, signals: Iterable[int] = (signal.SIGTERM,), grace: float = 15.0) -> None:
        self._replica = replica_of(model, "Preemption")
        if isinstance(signals, int):
            raise TypeError(f"signals must be a sequence of signals, such as (signal.SIGTERM,), got {signals!r}")
        self._signals = tuple(signal.Signals(number) for number in signals)
        for number in self._signals:
            if number in _CANNOT_BE_CAUGHT:
                raise ValueError(f"{number.name} cannot be caught: take signals that can, such as SIGTERM or SIGUSR1.")
        self._grace = check_number("grace", grace, "a positive number of seconds", above=0.0)
        self._request = _REQUESTS.setdefault(self._replica, _StopRequest())
        self._vote: _StopVote | None = None
        self._was_due = False

    @property
    def due(self) -> bool:
        """Whether this worker has made the stop round; the same on all workers after the same round.

        After the context: whether it was due at its end.
        """
        return self._was_due if self._vote is None else self._vote.reached()

    def request(self) -> None:
        """Asks all workers to stop, as a signal to this worker does. May be called in a signal handler."""
        self._request.pending = True

    def __enter__(self) -> Preemption:
        replica = self._replica
        replica.life.refuse_stopped()
        if any(isinstance(listener, _StopVote) for listener in replica.listeners):
            raise RuntimeError("Preemption was entered inside Preemption: one is enough, around the loop.")
        if replica.life.joining:
            raise RuntimeError(
                "Preemption was entered inside join(), where workers that have run out still make rounds after it: put "
                "`with Preemption(...) as stop:` around join()."
            )
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Preemption catches signals, which only the main thread of a process can: enter it there, or pass signals=() "
                "for a worker that only follows the others."
            )
        replica.cadence.contexts += 1
        self._handler = _SignalHandler(self._request)
        self._handler.install(self._signals)
        self._vote = _StopVote(replica, self._request, self._grace)
        replica.listeners.append(self._vote)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        vote = self._vote
        assert vote is not None
        self._replica.listeners.remove(vote)
        # Rounds after the context do not count.
        self._was_due = vote.reached()
        self._handler.stays |= self._was_due
        self._handler.restore()
        vote.leave()
        self._vote = None
        self._request.pending &= not self._was_due


class _StopVote(Listener):
    """One worker's part in the agreement on a stop round. A thread votes, and the training thread waits for the votes."""

    def __init__(self, replica: Replica, request: _StopRequest, grace: float) -> None:
        self._plane, self._engine = replica.world.plane, replica.engine
        self._replica, self._request, self._grace = replica, request, grace
        self._lock = threading.Lock()
        # Under the lock: the vote, the time in which all votes are to be there, and the votes.
        self._vote: int | None = None
        self._deadline = 0.0
        self._votes: Future[Mapping[int, str]] = Future()
        self._is_known = self._was_read = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decent_dp-preemption", daemon=True)
        self._thread.start()

    @property
    def _name(self) -> str:  # of a process that joins, known when it has become a member
        return f"preemption/{self._replica.cadence.contexts}"

    @property
    def stop_round(self) -> int | None:
        votes = self._votes
        return max(map(int, votes.result().values())) if votes.done() and votes.exception() is None else None

    def reached(self) -> bool:
        self._was_read = True
        stop_round = self.stop_round
        return stop_round is not None and self._engine.round >= stop_round

    def round_ended(self) -> None:
        """After the round that this worker has voted for: waits for the stop round.

        Raises:
            PeerLostError, PeerTimeoutError: a worker that has not voted is gone, or has not within the grace period.
        """
        with self._lock:
            vote, votes, left = self._vote, self._votes, self._deadline - time.monotonic()
        if vote is None or self._engine.round < vote:
            return
        if not self._is_known:
            late = (
                f"did not vote for a stop round within the grace period of {self._grace:g} s: Preemption must be entered on "
                "all workers, around the same loop."
            )
            wait_for_all(self._replica.world, self._name, votes, max(0.0, left), "a stop round", late)
            self._is_known = True
            _log.warning("all workers stop after round %d", self.stop_round)
        elif left < 0 and not self._was_read:
            self._was_read = True
            _log.error("training continues %g s after round %d was agreed on: read .due", self._grace, self.stop_round)

    def leave(self) -> None:
        """Votes, if it has not, so that the others need not wait for a worker that makes no more rounds in this context.

        The vote is for the next round, which is beyond the last. Others may have voted for the last round, in that round, and
        must not stop there, because this worker has not.
        """
        self._left.set()
        self._cast(asks=False)
        self._thread.join()

    def closing(self) -> None:
        self._cast(asks=False)

    def _run(self) -> None:
        while self._replica.life.before_first_round or not (self._request.pending or self._plane.is_asked(self._name)):
            if self._left.wait(_LOOK):
                return
        if self._request.pending:
            _log.warning("worker %d was asked to stop: all workers stop after the same round", self._replica.world.rank)
        self._cast(asks=True)

    def _cast(self, *, asks: bool) -> None:
        with self._lock:
            if self._vote is not None or self._replica.life.before_first_round:
                return
            self._vote = self._engine.round + 1
            self._deadline = time.monotonic() + self._grace
            try:
                self._votes = self._plane.agree(self._name, str(self._vote), asks=asks)
            except Exception as error:  # the transport was closed, or has failed
                self._votes.set_exception(error)
