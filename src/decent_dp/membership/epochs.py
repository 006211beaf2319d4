"""Epochs: whose rounds the topology is planned for, and from which round on.

Epochs are numbered, and follow each other in one line. A worker that misses a member, or that was left out and is back, opens
the agreement on the next one (``decent_dp.transport.agreement``). All living workers promise a round after which they mix
with nobody before they know the result. The epoch begins with the round after the largest promise: nobody has passed it, so
each round has one topology. Promises are about a second ahead, so that nobody leaves a round out while the result is on its
way. A promise is never taken back, as others may know a result.

Before a result counts it is written to the store, under the number of its epoch, where the first one stays. So of a network
that has fallen into parts only the one with the store makes epochs. Before anybody promises anything, the store must answer:
without it there are no new epochs, and members that are gone stay holes. A store that is back and empty gets the newest epoch
again from a majority of its members, with the next one: they make one for that.

A process that takes the place of a worker is named in the promise of the member that it has asked. It becomes a member with the
epoch, and its incarnation tells it from the process before it (``decent_dp.transport.hello``). Each epoch lists the
incarnations of all its members, for those that have missed earlier ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from decent_dp.membership.line import Epoch, Line, promises_of
from decent_dp.topo.epochs import EpochTopology
from decent_dp.transport import Neighbours
from decent_dp.transport.agreement import Decision
from decent_dp.transport.waiter import Waiter, telling

__all__ = ["Epochs"]

_log = logging.getLogger(__name__)

_PREFIX = "epoch/"
# Seconds that a promise is ahead of the present round, and rounds at least.
_AHEAD, _LEAST = 1.0, 2
# Seconds until a store that did not answer is asked again, and between two looks whether it has lost what it is to keep. The
# lowest member that is here looks so many times as often: it decides on the epoch that brings everything back.
_AGAIN, _KEEP, _LOWEST = 2.0, 10.0, 5
# In the statement of a worker that has found the store empty.
_EMPTY = '"empty": true'


@dataclass(frozen=True)
class _Promise:
    """What a member contributes to the agreement on an epoch.

    Attributes:
        until: it mixes with nobody after this round, before it knows the epoch.
        joining: incarnations of processes that have asked it for a seat, by rank.
        processes: ``Epoch.incarnations`` of the present one.
        since: number, start, dealt and size of the present one.
    """

    until: int
    joining: Mapping[int, int]
    processes: Mapping[int, int]
    since: tuple[int, int, int, int]


class Epochs:
    """One worker's part in changing the members.

    Args:
        topology: of the rounds; it is changed.
        incarnation: of this process.

    Attributes:
        newest: the newest epoch that names this worker, as its training thread knows them; it may begin later.
        replaced: another process is this worker by now.
        absent: the workers that were gone for this one when it made its last promise.
    """

    def __init__(
        self, rank: int, world_size: int, neighbours: Neighbours, topology: EpochTopology, line: Line, incarnation: int = 0
    ) -> None:
        self._incarnation, self.replaced = incarnation, False
        self.absent: frozenset[int] = frozenset()
        # Processes that want to be members, by rank: the incarnation, since when, and what tells them the epoch.
        self._candidates: dict[int, tuple[int, float, Future[Epoch]]] = {}
        self._keep_at, self._kept = time.monotonic() + _KEEP / _LOWEST, Future[None]()
        self._kept.set_result(None)
        # Whether the store did not answer the last look.
        self._is_away = False
        self._rank, self._neighbours, self._topology, self._line = rank, neighbours, topology, line
        self._consensus = neighbours.consensus
        self.newest = Epoch(0, 0, 0, tuple(range(world_size)), {}, "[]")
        # The number of the line's newest epoch, which may not name this worker. A process that joins is no member yet.
        self._number = -1 if incarnation else 0
        self._result: Future[Decision] | None = None
        # The newest epoch that has been decided, the newest of those that name this worker, and those of them that its training
        # thread has not come to.
        self._decided = self._own = self.newest
        self._new: list[Epoch] = []
        # What this worker has promised in the agreement that is open.
        self._until = 0
        # Until this round it mixes with nobody, since it does not know the rounds of the epochs before.
        self._from = 0
        self._lock = threading.RLock()
        # Looks whether the store answers, before anybody promises anything. The result is why it does not.
        self._prober = Waiter("decent_dp-epochs")
        self._probe: Future[OSError | None] | None = None
        self._probe_at, self._warned = 0.0, False
        # The store is another one than before, and does not know the newest epoch.
        self._is_forgotten = False
        if not incarnation:
            self._prober.submit(telling(self._found, neighbours.fail))
        self._consensus.govern(_PREFIX, self._vote, self._ratify)

    @property
    def is_member(self) -> bool:
        """Whether the newest epoch that this worker knows of names it."""
        with self._lock:
            return self._number == self._own.number

    @property
    def _name(self) -> str:
        return f"{_PREFIX}{self._number + 1}"

    def look(self, round_: int, *, wanted: bool) -> Epoch | None:
        """Called before round ``round_``, by the training thread.

        Args:
            wanted: a member is missed, or a process wants to be one.

        Returns:
            A new epoch that names this worker.
        """
        epoch = self._apply(round_)
        if (epoch is not None or self._from) and self._from <= round_:
            with self._lock:
                self._begin_to_mix()
        if time.monotonic() >= self._keep_at and self._kept.done():
            self._keep_at = time.monotonic() + (_KEEP / _LOWEST if self._rank == min(self._here(), default=-1) else _KEEP)
            self._kept = self._prober.submit(telling(self._keep, self._neighbours.fail))
        self._follow()
        with self._lock:
            number, is_due = self._number, epoch is None and self._result is None and not self._new
        if is_due and (wanted or not self.is_member or self._can_put_back()):
            self._propose_if_the_store_answers(number)
        return epoch

    def offer(self, rank: int, incarnation: int) -> Future[Epoch]:
        """A process wants to be member ``rank``. The result is the epoch that names it. Called by any thread.

        Raises:
            ConnectionError: a newer process is this member, or wants to be it; or this one was it, and was left out.
        """
        with self._lock:
            decided = self._decided
            present = decided.incarnations.get(rank, 0)
            if present == incarnation and rank in decided.members:  # it had asked another worker before
                future: Future[Epoch] = Future()
                future.set_result(decided)
                return future
            former, since, future = self._candidates.get(rank, (present, time.monotonic(), Future()))
            if former >= incarnation:
                raise ConnectionError(f"another process is worker {rank}, or this one was left out before it had connected")
            self._candidates[rank] = incarnation, since, future
        return future

    def is_seated(self, rank: int, incarnation: int) -> bool:
        """Whether an epoch that has been decided names this process."""
        decided = self._decided
        return rank in decided.members and decided.incarnations.get(rank, 0) == incarnation

    def withdraw(self, rank: int, incarnation: int) -> None:
        """The process that wanted to be this member has gone."""
        with self._lock:
            if rank in self._candidates and self._candidates[rank][0] == incarnation:
                del self._candidates[rank]

    def offered(self, seconds: float) -> bool:
        """Whether a process has waited so long for a seat."""
        now = time.monotonic()
        with self._lock:
            return any(now - since >= seconds for _, since, _ in self._candidates.values())

    def newest_in_store(self) -> Epoch:
        """The newest epoch, as far as the store answers and knows it."""
        with contextlib.suppress(OSError):
            return max(self._line.newest(), self._own, key=lambda epoch: epoch.number)
        return self._own

    def enter(self, epoch: Epoch) -> None:
        """This process, which has joined, is a member from this epoch on."""
        with self._lock:
            self._number, self.newest, self._own = epoch.number, epoch, epoch
            self._decided = max(epoch, self._decided, key=lambda epoch: epoch.number)
        self._topology.change(epoch.start, epoch.members, since=epoch.start)
        self._neighbours.enter_epoch(epoch.number)

    def knows(self, round_: int) -> bool:
        """Whether the members of this round are known: no later epoch may have begun by then."""
        with self._lock:
            if self._new:
                return round_ < self._new[0].start
            if self._result is not None:
                return round_ <= self._until
        return self._neighbours.newest_epoch() <= self.newest.number

    def learn(self, known: tuple[int, int, int, str]) -> None:
        """What another member knows (``known``), for a process that joins."""
        number, start, dealt, text = known
        if number:
            self.newest = self._own = Epoch.read(number, text)
        self.deal_from(start, dealt)

    @property
    def known(self) -> tuple[int, int, int, str]:
        """Number, start, dealt and text of the newest epoch."""
        newest = self.newest
        return newest.number, newest.start, newest.dealt, newest.text

    def restart(self) -> Epoch | None:
        """Rounds may be earlier ones from now on: the newest members mix in all of them.

        Returns:
            A new epoch that names this worker.
        """
        epoch = None
        while (newer := self._apply(0)) is not None:
            epoch = newer
        self._topology.restart()
        self.deal_from(0, 0)
        with self._lock:
            if epoch is not None or self._from:
                self._begin_to_mix()
        return epoch

    def _can_put_back(self) -> bool:
        """Whether the store has lost the newest epoch, and a majority of its members is here. The next epoch brings it back,
        while they still are a majority. The lowest member asks for it: it decides, so that its store must answer."""
        here = self._here()
        return self._is_forgotten and self._rank == min(here, default=-1) and 2 * len(here) > len(self.newest.members)

    def _here(self) -> set[int]:
        """The members that this worker hears, and itself if it is one."""
        return {self._rank, *self._neighbours.living()}.intersection(self.newest.members)

    def _begin_to_mix(self) -> None:
        """As far as this worker has promised. The caller has the lock."""
        if self._new or not self.is_member:
            return  # it knows no more of the rounds to come
        self._from = 0
        self._neighbours.confine(None if self._result is None else self._until)

    def deal_from(self, round_: int, dealt: int) -> None:
        """The data of the newest epoch are dealt from this round on, after so many shares."""
        with self._lock:
            is_own = self._own.number == self.newest.number
            self.newest = replace(self.newest, start=round_, dealt=dealt)
            self._own = self.newest if is_own else self._own

    def close(self) -> None:
        self._prober.close()
        self._line.close()
        with self._lock:
            candidates, self._candidates = self._candidates, {}
        for _, _, future in candidates.values():
            future.set_exception(ConnectionError("the worker has ended"))

    # -- in any thread ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Takes part in the next epoch if others have made it, or are about to. They would wait for this worker, whose training
        thread may be busy, in an evaluation for example."""
        with self._lock:
            known = self._neighbours.newest_epoch()
            if known > self._number + 1 >= 1:
                self._leave(known)
            if self._number >= 0 and (known > self._number or self._consensus.heard(self._name)):
                self._propose(self._number)

    def _leave(self, number: int) -> None:
        """There is an epoch that this worker knows nothing of: it mixes with nobody until one names it."""
        with self._lock:
            self._number, self._result, self._from = number, None, 0
            self._neighbours.confine(-1)
        _log.warning("this worker was left out of epoch %d: it mixes again when the others have taken it in", number)

    def _vote(self, name: str) -> None:
        """Another worker has opened an agreement. Called in a thread of the transport."""
        self._follow()

    def _propose(self, after: int) -> None:
        """Takes part in the epoch after this one, if it is still the next."""
        with self._lock:
            if self._result is not None or self._number != after:
                return
            self.absent = frozenset(self._neighbours.lost()).union(self._neighbours.left())
            until = self._until = self._neighbours.promise(_AHEAD, _LEAST)
            joining = {rank: incarnation for rank, (incarnation, _, _) in self._candidates.items()}
            newest, number = self._own, self._number + 1
            since = newest.number, newest.start, newest.dealt, len(newest.members)
            promise = _Promise(until, joining, newest.incarnations, since)
            _log.info("%s: this worker mixes until round %d; seats are wanted by %s", self._name, until, joining)
            said = json.dumps(asdict(promise) | ({"empty": True} if self._is_forgotten else {}))
            result = self._result = self._consensus.propose(self._name, said)
        # A future drops what its callbacks raise.
        result.add_done_callback(lambda result: telling(lambda: self._decide(number, result), self._neighbours.fail)())

    def _decide(self, number: int, result: Future[Decision]) -> None:
        """Called in the thread that learns the result. A process that joins does not wait for the training thread, which may
        be in a call of all workers, and the others wait in it for that process."""
        if result.exception() is not None:
            return  # the transport was closed, or has failed, which ``Neighbours.refuse_failed`` tells
        epoch = Epoch.read(number, _text_of(result.result()))
        with self._lock:
            self._decided = max(epoch, self._decided, key=lambda epoch: epoch.number)
            is_mine = False
            self._is_forgotten = False
            if any(_EMPTY in said for said in result.result().texts.values()):
                self._keep_at = 0.0  # the store has to learn this worker's address, too
            if self._number == number - 1:  # else it was left out of a later one meanwhile
                has_missed = self._from > 0 or not self.is_member
                self._number, self._result = number, None
                self.replaced |= epoch.incarnations.get(self._rank, 0) > self._incarnation
                is_mine = self._rank in epoch.members and not self.replaced
                if is_mine:
                    self._own = epoch
                    self._new.append(epoch)
                    # Others make the rounds until then by an epoch that this worker knows nothing of.
                    self._from = epoch.start if has_missed else 0
                else:
                    self._neighbours.confine(-1)
        if is_mine:
            self._neighbours.enter_epoch(number)
        if self._rank in epoch.members:
            for rank, incarnation in epoch.incarnations.items():
                if rank != self._rank:
                    self._neighbours.renew(rank, incarnation, epoch.start)
        self._seat(epoch)
        self._follow()

    def _propose_if_the_store_answers(self, after: int) -> None:
        if self._probe is None and time.monotonic() >= self._probe_at:
            self._probe = self._prober.submit(self._ask_the_store)
        if self._probe is None or not self._probe.done():
            return
        error, self._probe = self._probe.result(), None
        if error is None:
            self._warned = False
            self._propose(after)
            return
        self._probe_at = time.monotonic() + _AGAIN
        if not self._warned:
            _log.warning("the members cannot change until the store answers. Training continues: %s", error)
        self._warned = True

    def _ask_the_store(self) -> OSError | None:
        try:
            self._line.probe()
        except OSError as error:
            return error
        return None

    def _apply(self, round_: int) -> Epoch | None:
        """The training thread comes to the next epoch that has been decided, which it returns."""
        with self._lock:
            if not self._new:
                return None
            self.newest = epoch = self._new.pop(0)
        self._topology.change(epoch.start, epoch.members, since=round_ - 2 * self._topology.longest_turn())
        return epoch

    def _seat(self, epoch: Epoch) -> None:
        """Tells those that are members now, and those whose place another process has."""
        with self._lock:
            found = {rank: self._candidates.pop(rank) for rank in epoch.members if rank in self._candidates}
        for rank, (incarnation, _, future) in found.items():
            if epoch.incarnations.get(rank, 0) == incarnation:
                future.set_result(epoch)
            else:
                future.set_exception(ConnectionError(f"another process is worker {rank} in epoch {epoch.number}"))

    def _found(self) -> None:
        with contextlib.suppress(OSError):  # the first epoch is written by those that need it then
            self._line.keep()
            self._line.write(0, "[]", None)

    def _keep(self) -> None:
        try:
            self._is_forgotten = not self._line.keep(self._own.number)
            self._is_away = False
        except OSError:
            # At once the first time: the connection may be to a server that was started again meanwhile.
            self._keep_at = time.monotonic() + (_AGAIN if self._is_away else 0.0)
            self._is_away = True

    def _ratify(self, name: str, decision: Decision) -> Decision | None:
        """Writes a result to the store. Called in a thread of its own.

        Returns:
            The result that counts. None: the store does not answer, or has come back empty, and this worker may not know the
            newest epoch.
        """
        number = int(name.removeprefix(_PREFIX))
        text = _text_of(decision)
        # With a majority of its members an epoch is the newest one.
        newest = self._own  # another thread may replace it
        members = set(newest.members)
        is_newest = newest.number == number - 1 and 2 * len(decision.texts.keys() & members) > len(members)
        before = newest.text if is_newest else None
        won: str | None = None
        with contextlib.suppress(OSError):
            won = self._line.write(number, text, before)
        if won is None:
            # What was promised stays promised: the text may be written, and others may learn of it.
            if not self._warned:
                _log.warning("epoch %d: the store does not take it. Until it does, rounds are made without exchanges", number)
            self._warned = True
            return None
        self._warned = False
        return Decision(promises_of(won), {})  # without the links: nobody needs them, and they would be most of its message


def _text_of(decision: Decision) -> str:
    """As in the store: each promise with those that have made it, as many are equal."""
    found: dict[str, list[int]] = {}
    for rank, said in sorted(decision.texts.items()):
        found.setdefault(said, []).append(rank)
    return json.dumps(list(found.items()))
