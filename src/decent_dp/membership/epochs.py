"""Epochs: whose rounds the topology is planned for, and from which round on.

Epochs are numbered, and follow each other in one line. The store decides on each of them, alone (``EpochStore``). A worker that
misses a member, that a process has asked for a seat, or that was left out and is back, proposes the next one; the first
proposal stays. Who sees it promises a round after which it mixes with nobody before it knows the epoch, and stays a member. The
epoch begins with the round after the largest promise: nobody has passed it, so each round has one topology. Promises are about
a second ahead, so that nobody leaves a round out meanwhile.

Who has proposed writes the epoch when all members have promised whose processes have not ended, or after a wait: of those that
have, and are heard by another one. If it dies, the others do so, one after the other. It does not matter who writes, nor how
late: the first text under a number stays, and all that it names have promised not to mix before they know it. A promise is made
once, and never taken back: somebody may have read it. The membership thread makes it, also while training is busy.

So of a network that has fallen into parts only those with the store make epochs. Without it there are none: members that are
gone stay holes. A store that is back and empty gets the newest epoch again when a majority of its members has come back there,
and they make another one: with a majority of its members an epoch is surely the newest one.

A process that takes the place of a worker is named in the promise of the member that it has asked. It becomes a member with the
epoch, and its incarnation tells it from the process before it (``decent_dp.transport.hello``). Each epoch lists the
incarnations of all its members, for those that have missed earlier ones.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace

from decent_dp.membership.epoch_store import Epoch, EpochStore, Promise
from decent_dp.topo.epoch_topology import EpochTopology
from decent_dp.transport import Neighbours, Replicas
from decent_dp.transport.waiter import start_thread

__all__ = ["Epochs"]

_log = logging.getLogger(__name__)

# Seconds that a promise is ahead of the present round: a proposal is seen, and the epoch known, before they are over.
_AHEAD = 1.2
# Rounds that it is ahead at least: the present one may have begun.
_LEAST = 2
# Seconds between two looks for a proposal. Each worker looks, at one store.
_LOOK = 0.4
# Seconds between two looks at an epoch that is under way: others leave rounds out if it comes late.
_SOON = 0.1
# Seconds for which a process waits for a seat before an epoch is proposed for it, as others may come at the same time; and
# without a look after a worker has left.
_SETTLE = 0.5
# Seconds for the promises of members that somebody cannot hear: twice the time to see a proposal.
_SILENT = 1.0
# Seconds for those of the other ones. They may be busy, or have no store.
_HEARD = 3.0
# Seconds for promises as long as more than half of the members are missing: this worker itself may have been away.
_FEW = 10.0
# Seconds after which the next worker may decide in place of one that does not: less than those of ``_HEARD``.
_TURN = 2.0
# Seconds until a store that did not answer is asked again.
_AGAIN = 2.0
# Seconds between two looks whether the store has lost what it is to keep. A lost connection tells sooner.
_KEEP = 10.0


class Epochs:
    """One worker's part in changing the members.

    Its membership thread makes all calls of the store, which may hang. It begins with the first ``look``.

    Args:
        topology: of the rounds of replicas; it is changed.
        incarnation: of this process.
        replicas: their workers are members together; None: each worker is one.

    Attributes:
        limit: the training thread comes to no epoch of a larger number.
        newest: the newest epoch that names this worker, as its training thread knows them; it may begin later.
        replaced: another process is this worker by now.
        absent: the workers that were gone for this one when it made its last promise.
        mixing_from: until this round this worker mixes with nobody, since it does not know the rounds of the epochs before.
        reserved_until: the round of its last promise.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        neighbours: Neighbours,
        topology: EpochTopology,
        store: EpochStore,
        incarnation: int = 0,
        replicas: Replicas | None = None,
    ) -> None:
        self._rank, self._incarnation = rank, incarnation
        self.replicas = Replicas(tuple((rank,) for rank in range(world_size))) if replicas is None else replicas
        self.limit: float = math.inf
        self._neighbours, self._topology, self._store = neighbours, topology, store
        self.replaced = False
        self.absent: frozenset[int] = frozenset()
        self.mixing_from = self.reserved_until = 0
        # The newest epoch; the newest of those that name this worker; and those of them that its training thread has not come
        # to. A process that joins knows none yet.
        self.newest = self._own = Epoch.first(world_size)
        self._known = None if incarnation else self.newest
        self._new: list[Epoch] = []
        # Processes that want to be members, by rank: the incarnation, since when, and what tells them the epoch.
        self._candidates: dict[int, tuple[int, float, Future[Epoch]]] = {}
        self._lock = threading.RLock()
        # For the membership thread: a member is missed; the newest epoch that another worker knows; it is time to look.
        self._wanted, self._heard = False, 0
        self._wake, self._ending = threading.Event(), False
        self._has_thread = False
        # Of the next epoch: what this worker has promised, and when; whether the store has it; and who has proposed it.
        self._promise: Promise | None = None
        self._promised_at, self._is_told = 0.0, False
        self._proposer: int | None = None
        # Whether the store did not answer the last time; whether that was said; and how many workers have left.
        self._is_away = self._is_warned = False
        self._left = 0
        # If it has lost epochs: who has come back to it. Whether it has none as the run begins; when the next look is due.
        self._back: frozenset[int] | None = None
        self._begins, self._keep_at = not incarnation, 0.0

    @property
    def coming(self) -> int:
        """The number of the newest epoch that the training thread can come to."""
        with self._lock:
            return self._new[-1].number if self._new else self.newest.number

    @property
    def is_member(self) -> bool:
        """Whether the newest epoch that this worker knows of names it."""
        with self._lock:
            return self._known is self._own

    # -- in the training thread ---------------------------------------------------------------------------------------

    def look(self, round_: int, *, wanted: bool) -> Epoch | None:
        """Called before round ``round_``, by the training thread.

        Args:
            wanted: a member is missed.

        Returns:
            A new epoch that names this worker.
        """
        epoch = self._apply(round_)
        with self._lock:
            if (epoch is not None or self.mixing_from) and self.mixing_from <= round_:
                self._begin_to_mix()
            before, self._wanted = self._wanted, wanted and epoch is None and not self._new
            heard, self._heard = self._heard, self._neighbours.newest_epoch()
            if (self._wanted and not before) or self._heard > heard:
                self._wake.set()
        if not self._has_thread:
            self._has_thread = start_thread(_looks_of(self), "decent_dp-membership", self._neighbours.fail)
        return epoch

    def enter(self, epoch: Epoch) -> None:
        """This process, which has joined, is a member from this epoch on."""
        with self._lock:
            self._known = self.newest = self._own = epoch
        self._topology.change(epoch.start, self.replicas.whole(epoch.members))
        self._neighbours.enter_epoch(epoch.number)

    def knows(self, round_: int) -> bool:
        """Whether the members of this round are known: no later epoch may have begun by then."""
        with self._lock:
            if self._new:
                return round_ < self._new[0].start
            if self._promise is not None:
                return round_ <= self.reserved_until
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
            if epoch is not None or self.mixing_from:
                self._begin_to_mix()
        return epoch

    def deal_from(self, round_: int, dealt: int) -> None:
        """The data of the newest epoch are dealt from this round on, after so many shares."""
        with self._lock:
            known, own, newest = self._known, self._own, self.newest
            self.newest = replace(newest, start=round_, dealt=dealt)
            if own.number == newest.number:
                self._own = self.newest
                self._known = self._own if known is own else known

    def stop(self) -> None:
        """This worker ends soon, and promises nothing any more: another process may take its place."""
        self._ending = True
        self._wake.set()

    def close(self) -> None:
        self.stop()
        self._store.close()
        with self._lock:
            candidates, self._candidates = self._candidates, {}
        for _, _, future in candidates.values():
            future.set_exception(ConnectionError("the worker has ended"))

    def _apply(self, round_: int) -> Epoch | None:
        """The training thread comes to the next epoch, which it returns."""
        with self._lock:
            if not self._new or self._new[0].number > self.limit:
                return None
            self.newest = epoch = self._new.pop(0)
        self._topology.change(epoch.start, self.replicas.whole(epoch.members), now=round_)
        return epoch

    def _begin_to_mix(self) -> None:
        """As far as this worker has promised. The caller has the lock."""
        if self._new or not self.is_member:
            return  # it knows no more of the rounds to come
        self.mixing_from = 0
        self._neighbours.stop_mixing_after(None if self._promise is None else self.reserved_until)

    # -- processes that join, in any thread ---------------------------------------------------------------------------

    def offer(self, rank: int, incarnation: int) -> Future[Epoch]:
        """A process wants to be member ``rank``. The result is the epoch that names it.

        Raises:
            ConnectionError: a newer process is this member, or wants to be it; or this one was it, and was left out.
        """
        with self._lock:
            decided = self._own if self._known is None else self._known
            if self.is_seated(rank, incarnation):  # it had asked another worker before
                future: Future[Epoch] = Future()
                future.set_result(decided)
                return future
            present = decided.incarnations.get(rank, 0), time.monotonic(), Future[Epoch]()
            former, since, future = self._candidates.get(rank, present)
            if former >= incarnation:
                raise ConnectionError(f"another process is worker {rank}, or this one was left out before it had connected")
            self._candidates[rank] = incarnation, since, future
        return future

    def is_seated(self, rank: int, incarnation: int) -> bool:
        """Whether the newest epoch names this process."""
        known = self._known
        return known is not None and rank in known.members and known.incarnations.get(rank, 0) == incarnation

    def withdraw(self, rank: int, incarnation: int) -> None:
        """The process that wanted to be this member has gone."""
        with self._lock:
            if rank in self._candidates and self._candidates[rank][0] == incarnation:
                del self._candidates[rank]

    def newest_in_store(self) -> Epoch:
        """The newest epoch, as far as the store answers and knows it."""
        try:
            found = self._store.newest()
        except OSError:
            return self._own
        return self._own if found is None or found.number < self._own.number else found

    # -- in the membership thread -------------------------------------------------------------------------------------

    def look_at_store(self) -> float:
        """Sees to what is due at the store. Returns the seconds until the next time."""
        known = self._known
        if known is None or self.replaced:
            return _LOOK
        left, self._left = self._left, len(self._neighbours.left())
        if self._left > left:  # the store may end with it, and so may this worker: torch would complain about the connection
            return _SETTLE
        try:
            wait = self._see_to_the_next(known)
        except OSError as error:
            if self._ending:
                return _LOOK
            # At once the first time: the connection may be to a server that was started again meanwhile.
            wait, self._is_away = (_AGAIN if self._is_away else 0.0), True
            # It may be empty then, and a call that has failed may have been made or not.
            self._is_told, self._keep_at = False, 0.0
            if wait and (self._promise is not None or self._wants()):
                self._warn(f"the members cannot change until the store answers: {error}")
        else:
            self._is_away = False
        return wait

    def _see_to_the_next(self, known: Epoch) -> float:
        number, is_behind = known.number + 1, self._is_behind()
        if self._promise is not None or is_behind or self._store.is_proposed(number):
            found = self._store.newest() if is_behind else self._store.read(number)
            if found is not None and found.number >= number:
                self._take_in(found)
                return 0.0
            if is_behind:  # the store has lost that epoch, and those that know it put it back
                return _SOON
        elif not self._wants():
            self._keep(known)
            return _LOOK
        if self._promise is None and not self._may_promise(known):
            self._keep(known)
            return _LOOK
        if not self._is_told:
            self._tell(known)
        if (decided := self._decide(known)) is not None:
            self._take_in(decided)
            return 0.0
        return _SOON

    def _wants(self) -> bool:
        """Whether this worker wants another epoch. The lowest member brings one back that the store has lost."""
        now = time.monotonic()
        with self._lock:
            ready = [rank for rank, (_, since, _) in self._candidates.items() if now - since >= _SETTLE]
            offered = bool(self.replicas.whole(ready))
            is_lowest = self._back is not None and self._rank == min(self._here(), default=-1)
            return self._wanted or offered or self._wants_back() or (is_lowest and self._is_most(self._here()))

    def _wants_back(self) -> bool:
        """Whether it was left out, and can be a member again: another worker hears it, or all members have ended."""
        if self._known is None or self.is_member:
            return False
        gone = {*self._neighbours.ended(), *self._neighbours.left()}
        return bool(self._neighbours.living()) or gone.issuperset(self._known.members)

    def _may_promise(self, known: Epoch) -> bool:
        """Whether the epoch can come about: the store has lost none, or a majority of the newest one is here."""
        self._back = self._store.come_back(known.number, self._rank)
        if self._back is not None and not self._is_most(self._here()):
            self._warn(f"the members cannot change, as the store has lost epochs, and most of epoch {known.number} are missing")
            return False
        self._is_warned = False
        return True

    def _tell(self, known: Epoch) -> None:
        """Promises, once, and writes it to the store."""
        with self._lock:
            if self._promise is None:
                self.absent = frozenset(self._neighbours.lost()).union(self._neighbours.left())
                self.reserved_until = self._neighbours.reserve_until(_AHEAD, _LEAST)
                self._promised_at = time.monotonic()
                joining = {rank: incarnation for rank, (incarnation, _, _) in self._candidates.items()}
                since = self._own.number, self._own.start, self._own.dealt, len(self.replicas.whole(self._own.members))
                absent = tuple(sorted(self.absent.union(self._neighbours.silent())))
                self._promise = Promise(self._rank, self._incarnation, self.reserved_until, absent, joining, since)
                _log.info(
                    "epoch %d: this worker mixes until round %d; seats are wanted by %s",
                    known.number + 1,
                    self.reserved_until,
                    joining,
                )
            promise = self._promise
        self._proposer = self._store.promise(known.number + 1, promise)
        self._is_told = True

    def _decide(self, known: Epoch) -> Epoch | None:
        """Writes the epoch, if it is this worker's turn and there are enough promises."""
        waited = time.monotonic() - self._promised_at
        if waited < _TURN * self._turn():
            return None
        promises = {
            rank: promise
            for rank, promise in self._store.promises(known.number + 1).items()
            if promise.incarnation >= known.incarnations.get(rank, 0)
        }
        self._is_told = self._rank in promises
        if not self._is_told or not self._are_enough(known, promises, waited):
            return None
        if (epoch := known.next(promises, self.replicas)) is None:
            return None  # the others of each replica are late, or their processes end
        decided = self._store.decide(epoch, is_newest=self._is_most(promises))
        if decided is None:
            self._warn(f"the members cannot change, as the store has lost epochs, and most of epoch {known.number} are missing")
        return decided

    def _turn(self) -> int:
        """How many workers decide before this one: who has proposed, and then the lowest, if they live."""
        with self._lock:
            living = sorted({self._rank, *self._neighbours.living()})
        first = self._proposer
        if first == self._rank:
            return 0
        is_here = first is not None and first not in self._neighbours.lost()
        return is_here + [rank for rank in living if rank != first].index(self._rank)

    def _are_enough(self, known: Epoch, promised: Mapping[int, Promise], waited: float) -> bool:
        """Whether nobody else is to be waited for, after so many seconds."""
        missing = set(known.members).difference(promised, self._neighbours.ended(), self._neighbours.left())
        if not missing:
            return True
        if 2 * len(set(known.members).intersection(promised)) < len(known.members):
            return waited >= _FEW
        # Of those that this worker is not connected to, others know whether they are silent.
        silent = {rank for promise in promised.values() for rank in promise.absent}.difference(self._neighbours.living())
        return waited >= (_SILENT if missing <= silent else _HEARD)

    def _take_in(self, epoch: Epoch) -> None:
        """There is a newer epoch. A process that joins does not wait for the training thread, which may be in a call of all
        workers, and the others wait in it for that process."""
        with self._lock:
            has_missed = self.mixing_from > 0 or not self.is_member or epoch.number == self._own.number
            self._known, self._promise, self._is_told = epoch, None, False
            self._wanted, self._back, self._is_warned = False, None, False
            self.replaced |= epoch.incarnations.get(self._rank, 0) > self._incarnation
            is_mine = self._rank in epoch.members and not self.replaced
            if is_mine:
                self._own = epoch
                self._new.append(epoch)
                # Others make the rounds until then by an epoch that this worker knows nothing of.
                self.mixing_from = epoch.start if has_missed else 0
            else:
                self.mixing_from = 0
                self._neighbours.stop_mixing_after(-1)
        if is_mine:
            self._neighbours.enter_epoch(epoch.number)
            for rank, incarnation in epoch.incarnations.items():
                if rank != self._rank:
                    self._neighbours.renew(rank, incarnation, epoch.start)
        else:
            _log.warning("this worker was left out of epoch %d: it mixes again when it is a member again", epoch.number)
        self._seat(epoch)

    def _seat(self, epoch: Epoch) -> None:
        """Tells those that are members now, and those whose place another process has."""
        with self._lock:
            found = {rank: self._candidates.pop(rank) for rank in epoch.members if rank in self._candidates}
        for rank, (incarnation, _, future) in found.items():
            if epoch.incarnations.get(rank, 0) == incarnation:
                future.set_result(epoch)
            else:
                future.set_exception(ConnectionError(f"another process is worker {rank} in epoch {epoch.number}"))

    def _keep(self, known: Epoch) -> None:
        """Sees to it that the store has what it is to keep."""
        now = time.monotonic()
        if now < self._keep_at:
            return
        # A next one without a proposal was put back. Another one of this number: all others that knew this one have died.
        for number in [known.number + 1, *([known.number] if self._keep_at == 0.0 and known.number else [])]:
            found = self._store.read(number)
            if found is not None and found.text != known.text:
                self._take_in(found)
                return
        is_newest, begins = self.is_member and self._is_most(self._here()), self._begins and not known.number
        is_whole = self._store.republish_if_missing(known, is_newest=is_newest, begins=begins)
        self._back = None if is_whole else self._store.come_back(known.number, self._rank)
        self._begins, self._keep_at = False, now + (_KEEP if is_whole else 0.0)

    # -- what this worker knows ---------------------------------------------------------------------------------------

    def _is_behind(self) -> bool:
        """Whether another worker knows a newer epoch."""
        return self._known is not None and self._neighbours.newest_epoch() > self._known.number

    def _here(self) -> set[int]:
        """The members that this worker hears, those that have come back to a store without epochs, and itself if it is one."""
        back = set(self._back or ()).difference(self._neighbours.lost())
        return {self._rank, *back, *self._neighbours.living()}.intersection(self.newest.members)

    def _is_most(self, ranks: Collection[int]) -> bool:
        """Whether a majority of the newest members is among them."""
        known = self._own if self._known is None else self._known
        return 2 * len(set(known.members).intersection(ranks)) > len(known.members)

    def _warn(self, why: str) -> None:
        """Once, until an epoch can be made again."""
        if not self._is_warned:
            what = "Training continues" if self._promise is None else "Until then rounds are made without exchanges"
            _log.warning("%s. %s", why, what)
        self._is_warned = True


def _looks_of(epochs: Epochs) -> Callable[[], None]:
    """The work of the membership thread, which keeps nothing alive while it waits."""
    found, wake = weakref.ref(epochs), epochs._wake

    def look() -> None:
        while (epochs := found()) is not None and not epochs._ending:
            wait = epochs.look_at_store()
            del epochs
            wake.wait(wait)
            wake.clear()

    return look
