"""Epochs: whose rounds the topology is planned for, and from which round on.

Epochs are numbered, and follow each other in one line. A worker that misses a member, or that was left out and is back, opens
the agreement on the next one (``decent_dp.transport.agreement``). All workers that live promise a round after which they mix
with nobody before they know the result. The epoch begins with the round after the largest promise: nobody has passed it, so
each round has one topology. Promises are about a second ahead, so that nobody leaves a round out while the result is on its
way. A promise is never taken back, as others may know a result.

Before a result counts it is written to the store, under the number of its epoch, where the first one stays. So of a network
that has fallen into parts only the one with the store makes epochs. Before anybody promises anything, the store must answer:
without it there are no new epochs, and members that are gone stay holes. A store that is back and empty gets the newest epoch
again from a majority of its members.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from decent_dp.membership.line import Line
from decent_dp.topo.epochs import EpochTopology
from decent_dp.transport import Neighbours
from decent_dp.transport.agreement import Decision
from decent_dp.transport.waiter import Waiter

__all__ = ["Epoch", "Epochs"]

_log = logging.getLogger(__name__)

_PREFIX = "epoch/"
# Seconds that a promise is ahead of the present round, and rounds at least.
_AHEAD, _LEAST = 1.0, 2
# Seconds until a store that did not answer is asked again.
_AGAIN = 2.0


@dataclass(frozen=True)
class Epoch:
    """Who mixes from round ``start`` on.

    Attributes:
        members: ranks in ascending order; their positions are the seats.
    """

    number: int
    start: int
    members: tuple[int, ...]


class Epochs:
    """One worker's part in planning rounds anew.

    Args:
        topology: of the rounds; it is changed.

    Attributes:
        newest: the newest epoch that names this worker; it may begin later.
    """

    def __init__(self, rank: int, world_size: int, neighbours: Neighbours, topology: EpochTopology, line: Line) -> None:
        self._rank, self._neighbours, self._topology, self._line = rank, neighbours, topology, line
        self._consensus = neighbours.consensus
        self.newest = Epoch(0, 0, tuple(range(world_size)))
        # That of the newest epoch, as it is in the store.
        self._text = "[]"
        # The number of the line's newest epoch, which may not name this worker.
        self._number = 0
        self._result: Future[Decision] | None = None
        self._lock = threading.Lock()
        # Looks whether the store answers, before anybody promises anything.
        self._prober = Waiter("decent_dp-epochs")
        self._probe: Future[None] | None = None
        self._probe_at, self._warned = 0.0, False
        if rank == 0:
            self._prober.submit(self._found)
        self._consensus.govern(_PREFIX, self._vote, self._ratify)

    @property
    def is_member(self) -> bool:
        """Whether the newest epoch that this worker knows of names it."""
        return self._number == self.newest.number

    @property
    def _name(self) -> str:
        return f"{_PREFIX}{self._number + 1}"

    def look(self, round_: int, *, wanted: bool) -> Epoch | None:
        """Called before round ``round_``, by the training thread.

        Args:
            wanted: a member is missed.

        Returns:
            A new epoch that names this worker.
        """
        result = self._result
        if result is not None and result.done():
            return self._adopt(result.result(), round_)
        known = self._neighbours.newest_epoch()
        if known > self._number + 1:
            self._leave(known)
        if self._result is None:
            if known > self._number or self._consensus.heard(self._name):
                self._propose()
            elif wanted or not self.is_member:
                self._propose_if_the_store_answers()
        return None

    def close(self) -> None:
        self._prober.close()

    def _leave(self, number: int) -> None:
        """There is an epoch that this worker knows nothing of: it mixes with nobody until one names it."""
        with self._lock:
            self._number, self._result = number, None
        self._neighbours.confine(-1)
        _log.warning("this worker was left out of epoch %d: it mixes again when the others have taken it in", number)

    def _vote(self, name: str) -> None:
        """Another worker has opened an agreement. Called in a thread of the transport."""
        if name == self._name:
            self._propose()

    def _propose(self) -> None:
        with self._lock:
            if self._result is None:
                promise = self._neighbours.promise(_AHEAD, _LEAST)
                self._result = self._consensus.propose(self._name, str(promise))

    def _propose_if_the_store_answers(self) -> None:
        if self._probe is None and time.monotonic() >= self._probe_at:
            self._probe = self._prober.submit(self._line.probe)
        if self._probe is None or not self._probe.done():
            return
        error, self._probe = self._probe.exception(), None
        if error is None:
            self._warned = False
            self._propose()
            return
        self._probe_at = time.monotonic() + _AGAIN
        if not self._warned:
            _log.warning("the members cannot change until the store answers. Training continues: %s", error)
        self._warned = True

    def _adopt(self, decision: Decision, round_: int) -> Epoch | None:
        with self._lock:
            self._number, self._result = self._number + 1, None
        members, start = _read(decision)
        if self._rank not in members:
            self._neighbours.confine(-1)
            return None
        self.newest = Epoch(self._number, start, members)
        self._text = _text_of(decision)
        self._topology.change(start, members, since=round_ - 2 * self._topology.longest_turn())
        self._neighbours.confine(None)
        self._neighbours.enter_epoch(self._number)
        return self.newest

    def _found(self) -> None:
        with contextlib.suppress(ConnectionError, OSError):  # the first epoch is written by those that need it then
            self._line.write(0, self._text, None)

    def _ratify(self, name: str, decision: Decision) -> Decision | None:
        """Writes a result to the store. Called in a thread of its own.

        Returns:
            The result that counts. None: the store does not answer, or has come back empty, and this worker may not know the
            newest epoch.
        """
        number = int(name.removeprefix(_PREFIX))
        text = _text_of(decision)
        # With a majority of its members an epoch is the newest one.
        members = set(self.newest.members)
        is_newest = self.newest.number == number - 1 and 2 * len(decision.texts.keys() & members) > len(members)
        before = self._text if is_newest else None
        won: str | None = None
        with contextlib.suppress(ConnectionError, OSError):
            won = self._line.write(number, text, before)
        if won is None:
            # What was promised stays promised: the text may be written, and others may learn of it.
            if not self._warned:
                _log.warning("epoch %d: the store does not take it. Until it does, rounds are made without exchanges", number)
            self._warned = True
            return None
        self._warned = False
        return decision if won == text else Decision(dict(json.loads(won)), {})


def _text_of(decision: Decision) -> str:
    return json.dumps([[rank, said] for rank, said in decision.texts.items()])


def _read(decision: Decision) -> tuple[tuple[int, ...], int]:
    """The members, and the first round: that after the largest promise."""
    promises = {rank: int(text) for rank, text in decision.texts.items()}
    return tuple(sorted(promises)), max(promises.values(), default=0) + 1
