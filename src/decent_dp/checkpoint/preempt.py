"""Pre-emption: a worker that is told to go tells the others, and all stop after the same round."""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from decent_dp.checkpoint.trained import Trained, replica_of
from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError
from decent_dp.replica.replica import Listener, Replica
from decent_dp.transport.base import read_text

__all__ = ["Preemption"]

_log = logging.getLogger(__name__)

# Seconds between two looks at the store: while nothing is asked (more where many workers look), and while all wait.
_IDLE, _IDLE_BY_WORKER, _BUSY = 0.2, 0.001, 0.02
# Seconds more than the grace period that the training thread waits for the thread that gives up after it.
_MARGIN = 5.0
# What cannot be caught.
_NEVER = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}
# What ends a process that was forked in a context; whatever else is sent to a group of processes is not meant for it.
_ENDS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class _Wish:
    """What a wrapper's workers were told by signals, over all its contexts.

    Attributes:
        turns: contexts entered so far: the workers' contexts of one number belong together.
        told: a signal has come that no round was agreed on for. A plain attribute: a second signal may interrupt the handler of
            the first, and would wait for ever for a lock that this one holds.
    """

    turns: int = 0
    told: bool = False


_WISHES: WeakKeyDictionary[Replica, _Wish] = WeakKeyDictionary()


@dataclass
class _Ear:
    """The handler of one context, which takes note and does nothing else. It may outlive the context, so it holds no wrapper.

    Attributes:
        wish: where it takes note.
        before: the handlers that it stands in for; those that are ears themselves, of an outer context, hear of it, too.
        stays: a stop was reached in it, or inside it: this process is to go, and no signal may end it before it has.
        process: which hears; others are forked from it.
    """

    wish: _Wish
    before: dict[int, Any] = field(default_factory=dict)
    stays: bool = False
    process: int = field(default_factory=os.getpid)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:
            # Whoever ends it (a pool, at exit) waits until it is gone.
            if number in _ENDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.wish.told = True
        outer = self.before.get(number)
        if isinstance(outer, _Ear):
            outer(number, frame)

    def listen(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.before[number] = signal.signal(number, self)

    def give_back(self) -> None:
        """Puts back the handlers of before; or none that would do anything, if it stays."""
        for number, handler in self.before.items():
            if isinstance(handler, _Ear):
                handler.stays |= self.stays
            elif self.stays:
                atexit.register(_ignore_at_exit, number)
                continue
            # None: it was not installed from Python, and Python cannot put it back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _ignore_at_exit(number: int) -> None:
    """While the interpreter is taken down it has no handlers, and a signal would end it with an exit code of its own."""
    if isinstance(signal.getsignal(number), _Ear):
        signal.signal(number, signal.SIG_IGN)


class Preemption:
    """A context in which a signal to any worker stops all of them after the same round.

    ::

        with Preemption(model) as stop:
            for x, y in batches:
                criterion(model(x), y).backward()
                if stop.due:
                    break
        if stop.due:
            sys.exit(0 if save(model, path, state={"epoch": epoch}).error is None else 1)

    Called on all workers. Ask ``due`` after each update, on every worker at the same ones: it becomes true after the round that
    all have agreed on, which is one or two updates after the signal; save then. A signal during an evaluation, a save or before
    the first update takes effect after the update that follows. ``model.join()`` goes inside the context.

    A signal alone ends nothing: a loop that never asks ``due`` goes on, and says so in the log, until whoever sent the signal
    kills it. Signals that come again, or to all workers at once, are one. So when a stop was reached, the handlers that only
    take note stay for the rest of the process: a signal that comes to one worker later than to another must not end it while
    it saves. Where none was reached the old handlers are back after the context, ``due`` stays False, and a signal that came
    too late for a round to be agreed on is obeyed in the next one.

    Each of several wrappers has a ``Preemption`` of its own, one inside the other: a signal is for all of them. Stop when all
    of them are ``due``. A round is a number: who goes back with ``load`` inside the context has it that much farther ahead.

    Processes that are forked in the context (of a ``DataLoader``) end by SIGTERM and SIGINT, and take no notice of what else
    is in ``signals``.

    How the workers agree. Signal handlers only take note. A thread of each worker looks at the store; when somebody has been
    told to go, it promises, for its worker, not to begin a round after the one under way without knowing the outcome. The
    greatest of all promises is the round to stop after, which every worker can reach, as none is further. It is posted by
    whoever promises last. So nobody waits for a worker that waits for it, and a worker that is parked in a collective (in
    ``join``) promises, too.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned.
        signals: what is caught, in the place of the handlers that there are; () for a worker that only follows the others.
        grace: seconds that workers which do not answer are waited for, with an error after it. Well below what is left
            between the signal and the kill, as saving needs the rest.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, model: Trained, signals: Iterable[int] = (signal.SIGTERM,), grace: float = 15.0) -> None:
        replica = replica_of(model, "Preemption")
        if isinstance(signals, int):
            raise TypeError(f"signals must be a sequence of signals, such as (signal.SIGTERM,), got {signals!r}")
        self._signals = tuple(signal.Signals(number) for number in signals)
        for number in self._signals:
            if number in _NEVER:
                raise ValueError(f"{number.name} cannot be caught: take signals that can, such as SIGTERM or SIGUSR1.")
        if not (isinstance(grace, (int, float)) and math.isfinite(grace) and grace > 0):
            raise ValueError(f"grace must be a positive number of seconds, got {grace!r}")
        self._replica, self._grace = replica, float(grace)
        self._wish = _WISHES.setdefault(replica, _Wish())
        self._ear = _Ear(self._wish)
        self._agreement: _Agreement | None = None
        self._was_due = False

    @property
    def due(self) -> bool:
        """Whether this worker has made the last round before it is to go; the same on all workers at the same round.

        After the context, what it was at its end.
        """
        return self._was_due if self._agreement is None else self._agreement.reached()

    def __enter__(self) -> Preemption:
        replica = self._replica
        replica.refuse_stopped()
        if any(isinstance(listener, _Agreement) for listener in replica.listeners):
            raise RuntimeError("Preemption was entered inside Preemption: one is enough, around the loop.")
        if replica.joining:
            raise RuntimeError(
                "Preemption was entered inside join(), where workers that have run out still make rounds after it: put "
                "`with Preemption(model) as stop:` around `with model.join():`."
            )
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Preemption catches signals, which only the main thread of a process can: enter it there, or pass signals=() "
                "for a worker that only follows the others."
            )
        self._wish.turns += 1
        self._agreement = _Agreement(replica, self._wish, self._grace)
        self._ear = _Ear(self._wish)
        self._ear.listen(self._signals)
        replica.listeners.append(self._agreement)
        self._agreement.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        agreement = self._agreement
        assert agreement is not None
        self._replica.listeners.remove(agreement)
        # Frozen: a round made later, outside, may be the one that was agreed on.
        self._was_due = agreement.reached()
        self._ear.stays |= self._was_due
        self._ear.give_back()
        agreement.leave()
        self._agreement = None
        self._wish.told &= not self._was_due


class _Agreement(Listener):
    """One worker's part in finding the round to stop after.

    ``promise``, ``last`` and ``failure`` are written under ``changed``; the training thread waits on it for the last two.
    """

    def __init__(self, replica: Replica, wish: _Wish, grace: float) -> None:
        transport = replica.everyone
        self._transport, self._store, self._engine = transport, transport.store, replica.engine
        self._where, self._wish, self._grace = f"preemption/{wish.turns}", wish, grace
        self._changed = threading.Condition()
        self._promise: int | None = None
        self._last: int | None = None
        self._failure: Exception | None = None
        self._was_looked_at = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="decent_dp-preemption", daemon=True)
        self._pause = max(_IDLE, _IDLE_BY_WORKER * transport.world_size)

    # -- in the training thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._thread.start()

    def reached(self) -> bool:
        self._was_looked_at = True
        return self._last is not None and self._engine.round >= self._last

    def round_ended(self) -> None:
        """After a round: waits where another must not be begun before the outcome is known.

        Raises:
            PeerLostError, PeerTimeoutError: a worker that has not answered is gone, or has not within the grace period.
        """
        with self._changed:
            if self._promise is None or self._engine.round < self._promise:
                return
            # The watching thread gives up after the grace period; a store that hangs must not hang this one.
            bound = self._grace + _MARGIN
            if not self._changed.wait_for(lambda: self._last is not None or self._failure is not None, bound):
                raise PeerTimeoutError(f"no round to stop after was agreed on within {bound:g} s: the store does not answer.")
            if self._last is None and self._failure is not None:
                raise self._failure

    def leave(self) -> None:
        """The worker makes no more rounds in this context: the others need not wait for it.

        It promises what it would in the middle of one more round, and that is beyond the last: whoever was asked in the last
        round, and has promised not to go beyond it, must not stop there either.
        """
        self._over.set()
        self._thread.join(_IDLE)
        if self._failure is not None:
            return  # perhaps the store does not answer: torch prints a stack at each try
        try:
            self._give_promise()
        except RuntimeError as error:
            _log.info("left without a word to the others: %s", error)

    # -- in the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._over.is_set() and not self._is_asked():
                deadline = time.monotonic() + self._pause
                while not self._wish.told and time.monotonic() < deadline and not self._over.wait(_BUSY):
                    pass
            if not self._over.is_set():
                self._agree()
        except PeerError as error:
            self._fail(error)
        except RuntimeError as error:  # of the store
            said = str(error).partition("\n")[0]  # torch adds a stack in C++
            self._fail(PeerLostError(f"the workers cannot agree on a round to stop after: the store does not answer: {said}."))
        if self._last is not None and not self._over.wait(self._grace) and not self._was_looked_at:
            _log.error("the training goes on %g s after round %d was agreed on: nobody asks .due", self._grace, self._last)

    def _is_asked(self) -> bool:
        if self._wish.told:
            _log.warning("worker %d was told to go: all workers stop after the same round", self._transport.rank)
            self._store.set(f"{self._where}/asked", str(self._transport.rank))
            return True
        return read_text(self._store, f"{self._where}/asked") is not None

    def _agree(self) -> None:
        deadline = time.monotonic() + self._grace
        self._give_promise()
        while (last := read_text(self._store, f"{self._where}/last")) is None:
            late, lost = time.monotonic() > deadline, self._transport.lost()
            if late or lost:
                promises = self._promises()
                absent = [rank for rank, promise in enumerate(promises) if promise is None]
                gone = [rank for rank in absent if rank in lost]
                if gone:
                    raise PeerLostError(f"worker {gone[0]} is gone, and the workers were to agree on a round to stop after.")
                if not absent:
                    self._decide()  # whoever was to do it may be gone; all come to the same
                elif late:
                    raise PeerTimeoutError(
                        f"worker {absent[0]} has not said within the grace period of {self._grace:g} s which round it can stop "
                        "after: Preemption is to be entered on all workers, around the same loop."
                    )
            if self._over.wait(_BUSY):
                return
        with self._changed:
            self._last = int(last)
            self._changed.notify_all()
        _log.warning("all workers stop after round %s", last)

    def _give_promise(self) -> None:
        """Says once which round this worker will not go beyond alone: the one that is under way."""
        with self._changed:
            if self._promise is not None:
                return
            self._promise = self._engine.round + 1
        self._store.set(f"{self._where}/promise/{self._transport.rank}", str(self._promise))
        if self._store.add(f"{self._where}/promises", 1) == self._transport.world_size:
            self._decide()

    def _decide(self) -> None:
        self._store.set(f"{self._where}/last", str(max(int(promise) for promise in self._promises() if promise is not None)))

    def _promises(self) -> list[str | None]:
        return [read_text(self._store, f"{self._where}/promise/{rank}") for rank in range(self._transport.world_size)]

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        _log.error("%s", error)
