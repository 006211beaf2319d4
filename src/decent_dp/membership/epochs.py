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
gone stay holes. A store that is back and empty gets the newest epoch again when a majority of its members has come back there
and knows of none newer.

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
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from decent_dp.membership.epoch_store import Epoch, EpochStore, Promise
from decent_dp.topo.epoch_topology import EpochTopology
from decent_dp.transport import Neighbours, Replicas
from decent_dp.transport.waiter import start_thread

__all__ = ["EpochKeeper", "Epochs"]

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
    """The epochs that one worker knows, and to which of them its training thread has come.

    Args:
        topology: of the rounds of replicas; it is changed.
        incarnation: of this process.
        replicas: their workers are members together.

    Attributes:
        keeper: changes the members, in a thread of its own.
        lock: of what both threads change.
        limit: the training thread comes to no epoch of a larger number.
        newest: the newest epoch that names this worker, as its training thread knows them; it may begin later.
        decided: the newest epoch; a process that joins knows none yet.
        promise: of this worker, for the epoch after ``decided``.
        mixing_from: until this round this worker mixes with nobody, since it does not know the rounds of the epochs before.
    """

    def __init__(
        self,
        rank: int,
        replicas: Replicas,
        neighbours: Neighbours,
        topology: EpochTopology,
        store: EpochStore,
        incarnation: int = 0,
    ) -> None:
        self.rank, self.incarnation, self.replicas = rank, incarnation, replicas
        self.limit: float = math.inf
        self.neighbours, self._topology = neighbours, topology
        self.mixing_from = 0
        self.newest = Epoch.first(len(replicas.workers) * replicas.shards)
        self.decided = None if incarnation else self.newest
        # Those of this worker's epochs that its training thread has not come to.
        self._new: list[Epoch] = []
        self.promise: Promise | None = None
        self.lock = threading.RLock()
        self.keeper = EpochKeeper(self, store)

    @property
    def own(self) -> Epoch:
        """The newest epoch that names this worker. Its training thread may come to it later."""
        with self.lock:
            return self._new[-1] if self._new else self.newest

    @property
    def replaced(self) -> bool:
        """Whether another process is this worker by now."""
        return self.decided is not None and self.decided.incarnations.get(self.rank, 0) > self.incarnation

    @property
    def is_member(self) -> bool:
        """Whether the newest epoch that this worker knows of names it."""
        with self.lock:
            return self.decided is not None and self.rank in self.decided.members and not self.replaced

    # -- in the training thread ---------------------------------------------------------------------------------------

    def look(self, round_: int, *, wanted: bool) -> Epoch | None:
        """Called before round ``round_``, by the training thread.

        Args:
            wanted: a member is missed.

        Returns:
            A new epoch that names this worker.
        """
        epoch = self._apply(round_)
        with self.lock:
            if (epoch is not None or self.mixing_from) and self.mixing_from <= round_:
                self._begin_to_mix()
            self.keeper.want(wanted and epoch is None and not self._new)
        return epoch

    def enter(self, epoch: Epoch) -> None:
        """This process, which has joined, is a member from this epoch on."""
        with self.lock:
            self.decided = self.newest = epoch
        self._topology.change(epoch.start, self.replicas.whole(epoch.members))
        self.neighbours.enter_epoch(epoch.number)

    def knows(self, round_: int) -> bool:
        """Whether the members of this round are known: no later epoch may have begun by then."""
        with self.lock:
            if self._new:
                return round_ < self._new[0].start
            if self.promise is not None:
                return round_ <= self.promise.until
        return self.neighbours.look().epoch <= self.newest.number

    def learn(self, known: tuple[int, int, int, str]) -> None:
        """What another member knows (``known``), for a process that joins."""
        number, start, dealt, text = known
        if number:
            self.newest = Epoch.read(number, text)
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
        with self.lock:
            if epoch is not None or self.mixing_from:
                self._begin_to_mix()
        return epoch

    def deal_from(self, round_: int, dealt: int) -> None:
        """The data of the newest epoch are dealt from this round on, after so many shares."""
        with self.lock:
            self.newest = replace(self.newest, start=round_, dealt=dealt)

    def _apply(self, round_: int) -> Epoch | None:
        """The training thread comes to the next epoch, which it returns."""
        with self.lock:
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
        self.neighbours.stop_mixing_after(None if self.promise is None else self.promise.until)

    def is_seated(self, rank: int, incarnation: int) -> bool:
        """Whether the newest epoch names this process."""
        known = self.decided
        return known is not None and rank in known.members and known.incarnations.get(rank, 0) == incarnation

    def take_in(self, epoch: Epoch) -> bool:
        """There is a newer epoch. Returns whether this process is a member of it. A process that joins does not wait for the
        training thread, which may be in a call of all workers, and the others wait in it for that process."""
        with self.lock:
            has_missed = self.mixing_from > 0 or not self.is_member or epoch.number == self.own.number
            self.decided, self.promise = epoch, None
            if is_mine := self.is_member:
                self._new.append(epoch)
                # Others make the rounds until then by an epoch that this worker knows nothing of.
                self.mixing_from = epoch.start if has_missed else 0
            else:
                self.mixing_from = 0
                self.neighbours.stop_mixing_after(-1)
        return is_mine


@dataclass
class _Told:
    """What has become of a worker's last promise.

    Attributes:
        absent: the workers that were gone for this one when it was made. ``proposer``: who has proposed the epoch.
        in_store: whether the store has it; ``at``: since when, on the monotonic clock, anew in one that was lost.
    """

    absent: frozenset[int] = frozenset()
    in_store: bool = False
    at: float = 0.0
    proposer: int | None = None


class EpochKeeper:
    """Changes the members at the store. Its thread makes all calls of that, which may hang, and begins with the first round."""

    def __init__(self, epochs: Epochs, store: EpochStore) -> None:
        self._found, self._store = weakref.ref(epochs), store
        # Processes that want to be members, by rank: the incarnation, since when, and what tells them the epoch.
        self._candidates: dict[int, tuple[int, float, Future[Epoch]]] = {}
        # A member is missed; the newest epoch that another worker knows; it is time to look.
        self._wanted, self._heard, self._wake = False, 0, threading.Event()
        self._has_thread = self._has_ended = False
        self._told = _Told()
        # Whether the store did not answer the last time; whether that was said; and how many workers have left.
        self._is_away = self._is_warned = False
        self._left = 0
        # When it is looked at whether it has what it is to keep.
        self._keep_at = 0.0

    @property
    def _epochs(self) -> Epochs:
        epochs = self._found()
        assert epochs is not None, "whoever calls this keeps them"
        return epochs

    @property
    def absent(self) -> frozenset[int]:
        """The workers that were gone for this one when it made its last promise."""
        return self._told.absent

    def want(self, wanted: bool) -> None:
        """Called in each round, by the training thread. ``wanted``: as of ``Epochs.look``."""
        before, self._wanted = self._wanted, wanted
        heard, self._heard = self._heard, self._epochs.neighbours.look().epoch
        if (self._wanted and not before) or self._heard > heard:
            self._wake.set()
        if not self._has_thread:
            self._has_thread = start_thread(self._run, "decent_dp-membership", self._epochs.neighbours.fail)

    def stop(self) -> None:
        """This worker ends soon, and promises nothing any more: another process may take its place."""
        self._has_ended = True
        self._wake.set()

    def close(self) -> None:
        self.stop()
        self._store.close()
        with self._epochs.lock:
            candidates, self._candidates = self._candidates, {}
        for _, _, future in candidates.values():
            future.set_exception(ConnectionError("the worker has ended"))

    # -- processes that join, in any thread ---------------------------------------------------------------------------

    def offer(self, rank: int, incarnation: int) -> Future[Epoch]:
        """A process wants to be member ``rank``. The result is the epoch that names it.

        Raises:
            ConnectionError: a newer process is this member, or wants to be it; or this one was it, and was left out.
        """
        with self._epochs.lock:
            decided = self._epochs.decided or self._epochs.own
            if self._epochs.is_seated(rank, incarnation):  # it had asked another worker before
                future: Future[Epoch] = Future()
                future.set_result(decided)
                return future
            present = decided.incarnations.get(rank, 0), time.monotonic(), Future[Epoch]()
            former, since, future = self._candidates.get(rank, present)
            if former >= incarnation:
                raise ConnectionError(f"another process is worker {rank}, or this one was left out before it had connected")
            self._candidates[rank] = incarnation, since, future
        return future

    def withdraw(self, rank: int, incarnation: int) -> None:
        """The process that wanted to be this member has gone."""
        with self._epochs.lock:
            if rank in self._candidates and self._candidates[rank][0] == incarnation:
                del self._candidates[rank]

    def newest_in_store(self) -> Epoch:
        """The newest epoch, as far as the store answers and knows it."""
        try:
            found = self._store.newest()
        except OSError:
            return self._epochs.own
        return self._epochs.own if found is None or found.number < self._epochs.own.number else found

    # -- in the membership thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Keeps the epochs alive for no longer than a look."""
        while (epochs := self._found()) is not None and not self._has_ended:
            wait = self.look_at_store()
            del epochs
            self._wake.wait(wait)
            self._wake.clear()

    def look_at_store(self) -> float:
        """Sees to what is due at the store. Returns the seconds until the next time."""
        known = self._epochs.decided
        if known is None or self._epochs.replaced:
            return _LOOK
        left, self._left = self._left, len(self._epochs.neighbours.look().left)
        if self._left > left:  # the store may end with it, and so may this worker: torch would complain about the connection
            return _SETTLE
        try:
            wait = self._see_to_the_next(known)
        except OSError as error:
            if self._has_ended:
                return _LOOK
            # At once the first time: the connection may be to a server that was started again meanwhile.
            wait, self._is_away = (_AGAIN if self._is_away else 0.0), True
            # It may be empty then, and a call that has failed may have been made or not.
            self._told.in_store, self._keep_at = False, 0.0
            if wait and (self._epochs.promise is not None or self._wants()):
                self._warn(f"the members cannot change until the store answers: {error}")
        else:
            self._is_away = False
        return wait

    def _see_to_the_next(self, known: Epoch) -> float:
        number, is_behind = known.number + 1, self._epochs.neighbours.look().epoch > known.number
        if self._epochs.promise is not None or is_behind or self._store.is_proposed(number):
            found = self._store.newest() if is_behind else self._store.read(number)
            if found is not None and found.number >= number:
                self._take_in(found)
                return 0.0
            if is_behind:  # the store has lost that epoch, and those that know it put it back
                self._keep(known)
                return _SOON
        elif not self._wants():
            self._keep(known)
            return _LOOK
        if not self._told.in_store:
            # Else nobody can bring the epoch about, and a promise would leave rounds out.
            if not self._come_back(known):
                self._warn(
                    f"the members cannot change, as the store has lost epochs, and most of epoch {known.number} are missing"
                )
                return _LOOK
            self._is_warned = False
            self._tell(known)
        if (decided := self._decide(known)) is not None:
            self._take_in(decided)
            return 0.0
        return _SOON

    def _wants(self) -> bool:
        """Whether this worker wants another epoch."""
        now = time.monotonic()
        with self._epochs.lock:
            ready = [rank for rank, (_, since, _) in self._candidates.items() if now - since >= _SETTLE]
        return self._wanted or bool(self._epochs.replicas.whole(ready)) or self._wants_back()

    def _wants_back(self) -> bool:
        """Whether it was left out, and can be a member again: another worker hears it, or all members have ended."""
        if self._epochs.decided is None or self._epochs.is_member:
            return False
        seen = self._epochs.neighbours.look()
        return bool(seen.living) or (seen.ended | seen.left).issuperset(self._epochs.decided.members)

    def _tell(self, known: Epoch) -> None:
        """Promises, once, and writes it to the store."""
        epochs, neighbours = self._epochs, self._epochs.neighbours
        with epochs.lock:
            if epochs.promise is None:
                seen = neighbours.look()
                self._told = _Told(seen.lost | seen.left)
                until = neighbours.reserve_until(_AHEAD, _LEAST)
                joining = {rank: incarnation for rank, (incarnation, _, _) in self._candidates.items()}
                since = epochs.own.number, epochs.own.start, epochs.own.dealt, len(epochs.replicas.whole(epochs.own.members))
                absent = tuple(sorted(self._told.absent.union(neighbours.look().silent)))
                epochs.promise = Promise(epochs.rank, epochs.incarnation, until, absent, joining, since)
                _log.info(
                    "epoch %d: this worker mixes until round %d; seats are wanted by %s", known.number + 1, until, joining
                )
            promise = epochs.promise
        self._told.proposer = self._store.promise(known.number + 1, promise)
        self._told.in_store, self._told.at = True, time.monotonic()

    def _decide(self, known: Epoch) -> Epoch | None:
        """Writes the epoch, if it is this worker's turn and there are enough promises."""
        waited = time.monotonic() - self._told.at
        if waited < _TURN * self._turn():
            return None
        promises = {
            rank: promise
            for rank, promise in self._store.promises(known.number + 1).items()
            if promise.incarnation >= known.incarnations.get(rank, 0)
        }
        self._told.in_store = self._epochs.rank in promises
        if not self._told.in_store or not self._are_enough(known, promises, waited):
            return None
        if (epoch := known.next(promises, self._epochs.replicas)) is None:
            return None  # the others of each replica are late, or their processes end
        decided = self._store.decide(epoch)
        self._told.in_store = decided is not None  # else the store was emptied just now
        return decided

    def _turn(self) -> int:
        """How many workers decide before this one: who has proposed, and then the lowest, if they live."""
        seen = self._epochs.neighbours.look()
        first = self._told.proposer
        if first == self._epochs.rank:
            return 0
        is_here = first is not None and first not in seen.lost
        return is_here + [rank for rank in sorted({self._epochs.rank, *seen.living}) if rank != first].index(self._epochs.rank)

    def _are_enough(self, known: Epoch, promised: Mapping[int, Promise], waited: float) -> bool:
        """Whether nobody else is to be waited for, after so many seconds."""
        seen = self._epochs.neighbours.look()
        missing = set(known.members).difference(promised, seen.ended, seen.left)
        if not missing:
            return True
        if 2 * len(set(known.members).intersection(promised)) < len(known.members):
            return waited >= _FEW
        # Of those that this worker is not connected to, others know whether they are silent.
        silent = {rank for promise in promised.values() for rank in promise.absent}.difference(seen.living)
        return waited >= (_SILENT if missing <= silent else _HEARD)

    def _take_in(self, epoch: Epoch) -> None:
        with self._epochs.lock:
            self._told.in_store, self._wanted, self._is_warned = False, False, False
            is_mine = self._epochs.take_in(epoch)
        if is_mine:
            self._epochs.neighbours.enter_epoch(epoch.number)
            for rank, incarnation in epoch.incarnations.items():
                if rank != self._epochs.rank:
                    self._epochs.neighbours.renew(rank, incarnation, epoch.start)
        else:
            _log.warning("this worker was left out of epoch %d: it mixes again when it is a member again", epoch.number)
        self._seat(epoch)

    def _seat(self, epoch: Epoch) -> None:
        """Tells those that are members now, and those whose place another process has."""
        with self._epochs.lock:
            found = {rank: self._candidates.pop(rank) for rank in epoch.members if rank in self._candidates}
        for rank, (incarnation, _, future) in found.items():
            if epoch.incarnations.get(rank, 0) == incarnation:
                future.set_result(epoch)
            else:
                future.set_exception(ConnectionError(f"another process is worker {rank} in epoch {epoch.number}"))

    def _keep(self, known: Epoch) -> None:
        """Sees to it that the store has what it is to keep."""
        if time.monotonic() < self._keep_at:
            return
        is_whole = self._come_back(known)
        # A next one without a proposal was put back. Another one of this number may be made in a store that was lost, until
        # that is whole: all others that knew this one have died.
        for number in (known.number + 1, known.number) if self._keep_at == 0.0 else (known.number + 1,):
            found = self._store.read(number)
            if found is not None and found.text != known.text:
                self._take_in(found)
                return
        self._keep_at = time.monotonic() + _KEEP if is_whole else 0.0

    def _come_back(self, known: Epoch) -> bool:
        """Whether the store has lost no epochs, or has the newest one again."""
        newest = max(known.number, self._epochs.neighbours.look().epoch)
        return self._store.come_back(known, self._epochs.rank, newest)

    def _warn(self, why: str) -> None:
        """Once, until an epoch can be made again."""
        if not self._is_warned:
            what = "Training continues" if self._epochs.promise is None else "Until then rounds are made without exchanges"
            _log.warning("%s. %s", why, what)
        self._is_warned = True
