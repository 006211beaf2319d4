"""What runs that tolerate faults keep in a store: their list, and for each its epochs and what a process needs to join it.

The keys of an epoch, below the id of the run:

- ``epoch/N``: the epoch. The first text stays, whoever writes another one.
- ``epoch/N/proposal``: who wants it, and sees to it first.
- ``epoch/N/promises``: a line of each worker that takes part (``Promise``).
- ``epoch/N/back``: if the store has lost the epochs, the ranks of the workers that know of none newer than this one.

Beside them are ``epoch``, a number from which on the newest one is looked for, and ``whole``: a store that has it has lost none
of the epochs.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from decent_dp.errors import PeerLostError
from decent_dp.faults import check_run
from decent_dp.transport import Replicas
from decent_dp.transport.rendezvous import ROOT, RUNS
from decent_dp.transport.store import UNREADABLE, StoreClient, count_of, read_bytes, read_text, warn_of_unreadable

__all__ = ["Entry", "Epoch", "EpochStore", "Promise", "UnreadableError", "newest_epoch", "parse", "runs_in"]

_log = logging.getLogger(__name__)

# Seconds for the last word of a worker that leaves.
_LEAVE = 2.0
# Epochs whose proposal and promises are kept. A worker that wakes finds the proposal of the epoch that it has missed.
_KEPT = 8

T = TypeVar("T")


class UnreadableError(PeerLostError):
    """The store holds something else than it should.

    Args:
        key: below ``ROOT``.
        what: should be there.
        found: what is there.
    """

    def __init__(self, key: str, what: str, found: str) -> None:
        super().__init__(
            f"the store has {found} under the key '{ROOT}/{key}', where {what} should be: another program, or another version "
            "of decent_dp, has written or removed it. Start the store again, empty: the members of a run write it anew. Or "
            "give each program a store of its own."
        )


@dataclass(frozen=True)
class Entry:
    """One run. ``run_id``, 32 hexadecimal digits, is drawn and begins its keys; ``name`` is the user's, or drawn."""

    run_id: str
    name: str

    @classmethod
    def read(cls, run_id: str, name: str) -> Entry:
        """Raises ValueError or TypeError if it is none that a run writes."""
        if len(bytes.fromhex(run_id)) != 16 or check_run(name) is None:
            raise ValueError("no entry of a run")
        return cls(run_id, name)


def parse(key: str, what: str, text: str | None, read: Callable[[Any], T]) -> T:
    """What ``read`` makes of the JSON in ``text``.

    Raises:
        UnreadableError: it raises one of ``UNREADABLE``, or there is nothing.
    """
    with contextlib.suppress(*UNREADABLE):
        return read(json.loads(text or ""))
    raise UnreadableError(key, what, "nothing" if text is None else repr(text if len(text) <= 60 else f"{text[:59]}…"))


def runs_in(store: Store) -> list[Entry]:
    """The runs, in the order in which they were registered. All keys of ``store`` begin with ``ROOT``.

    Raises:
        UnreadableError: there is something else.
    """
    return _entries(read_text(store, RUNS))


def _entries(text: str | None) -> list[Entry]:
    return parse(RUNS, "the list of runs", text, lambda said: [Entry.read(*pair) for pair in said]) if text else []


@dataclass(frozen=True)
class Promise:
    """What a worker contributes to the next epoch.

    Attributes:
        until: it mixes with nobody after this round before it knows the epoch.
        absent: those that it cannot hear.
        joining: incarnations of processes that have asked it for a seat, by rank.
        since: number, start, dealt and size (in replicas) of the newest epoch that names it.
    """

    rank: int
    incarnation: int
    until: int
    absent: tuple[int, ...]
    joining: Mapping[int, int]
    since: tuple[int, int, int, int]

    def write(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Promise:
        """Raises one of several errors if it is nothing that ``write`` returns."""
        said = json.loads(text)
        number, start, dealt, size = since = tuple(said["since"])
        rank, incarnation, until, absent = said["rank"], said["incarnation"], said["until"], tuple(said["absent"])
        _check_numbers(rank, incarnation, until, *absent, *since)
        return cls(rank, incarnation, until, absent, _by_rank(said["joining"]), (number, start, dealt, size))


@dataclass(frozen=True)
class Epoch:
    """The members from round ``start`` on.

    Attributes:
        members: ranks in ascending order; their positions are the seats.
        incarnations: of the newest processes that have joined later, by rank; also of those that are no members any more.
        dealt: as of ``Roster``.
        text: as it is in the store.
    """

    number: int
    start: int
    dealt: int
    members: tuple[int, ...]
    incarnations: Mapping[int, int]
    text: str

    @classmethod
    def first(cls, world_size: int) -> Epoch:
        """The one in which a run begins. The store has none of this number."""
        return cls(0, 0, 0, tuple(range(world_size)), {}, "")

    @classmethod
    def read(cls, number: int, text: str) -> Epoch:
        """Raises one of several errors if it is no epoch."""
        said = json.loads(text)
        members, incarnations = tuple(said["members"]), _by_rank(said["incarnations"])
        _check_numbers(said["start"], said["dealt"], *members)
        if not members or list(members) != sorted(set(members)):
            raise ValueError(f"members must be ranks in ascending order, got {members}")
        return cls(number, said["start"], said["dealt"], members, incarnations, text)

    @classmethod
    def stored(cls, number: int, value: bytes | None) -> Epoch | None:
        """The epoch that the store has under this number. None: no worker has written it, so that it counts as missing."""
        with contextlib.suppress(*UNREADABLE):
            return None if value is None else cls.read(number, value.decode())
        return None

    def next(self, promises: Mapping[int, Promise], replicas: Replicas) -> Epoch | None:
        """The epoch after this one: of those that have promised, by rank, and of the processes that have asked them.

        Whom none of the others hears is left out: it would be a hole for all of them, and nobody would miss it. So is a replica
        of which a worker is missing. None: there would be no replica in it.
        """
        missed = Counter(rank for promise in promises.values() for rank in promise.absent)
        heard = {rank for rank in promises if missed[rank] < len(promises) - 1}
        joining: dict[int, int] = {}
        for promise in promises.values():
            for rank, incarnation in promise.joining.items():
                # Who has promised lives, though the member that a process has asked does not hear it.
                if rank not in promises and incarnation > max(joining.get(rank, 0), self.incarnations.get(rank, 0)):
                    joining[rank] = incarnation
        # Processes come as a whole replica: one whose mate's place is still taken would be left with a mate that is none.
        for own in map(replicas.workers_of, {replicas.place_of(rank)[0] for rank in joining}):
            if any(rank in promises for rank in own):
                joining = {rank: incarnation for rank, incarnation in joining.items() if rank not in own}
        named = {*(heard or promises), *joining}
        members = tuple(sorted(rank for number in replicas.whole(named) for rank in replicas.workers_of(number)))
        if not members:
            return None
        joining = {rank: incarnation for rank, incarnation in joining.items() if rank in members}
        seated = {rank: promise.incarnation for rank, promise in promises.items() if promise.incarnation}
        incarnations = dict(sorted({**self.incarnations, **joining, **seated}.items()))
        # Shares of data are counted from the newest epoch that one of them knows. A load may have changed its start since.
        said = [promise.since for promise in promises.values()]
        own = self.number, self.start, self.dealt, len(replicas.whole(self.members))
        _, since, before, size = max([*said, own], key=lambda known: known[0])
        # An epoch may follow another one before that begins. It does not begin earlier.
        start = max([since, *(promise.until + 1 for promise in promises.values())])
        dealt = before + (start - since) * size
        entries = {"start": start, "dealt": dealt, "members": members, "incarnations": incarnations}
        return Epoch.read(self.number + 1, json.dumps(entries, separators=(",", ":")))


class EpochStore:
    """Texts of epochs under their numbers, where the first one stays; and what a process needs to join, with the run's name.

    Each call raises ConnectionError if the store does not answer. What it was to write may be written then.

    Args:
        store: of the run.
        run_id: names the run, as others may use the same server.
        records: ``Transport.records``, and more of the kind.
        name: of the run, for people; None: the beginning of ``run_id``.
    """

    def __init__(self, store: Store, run_id: str, records: Mapping[str, str], name: str | None = None) -> None:
        self._run_id, self._records, self._store = run_id, records, StoreClient(store, ROOT)
        self.entry = Entry(run_id, name or run_id[:8])
        self._all, self._warned = store, False

    def ask(self, call: Callable[[Store], T]) -> T:
        """The result of calls of the store, of which all keys begin with ``ROOT``."""
        return self._store.run(call)

    def register(self, over: Collection[str] = ()) -> bool:
        """Writes all that a process needs to join a run that begins.

        Args:
            over: the ids of runs that this one replaces.

        Returns:
            False if another run has its name.
        """

        def write(store: Store) -> bool:
            self._write_records(store)
            store.compare_set(self._key("whole"), "", "1")
            return self._enter(store, over)

        return self._store.run(write)

    def come_back(self, epoch: Epoch, rank: int, newest: int) -> bool:
        """Worker ``rank`` writes what is missing: the newest epoch that it knows, and what a process needs to join.

        A store that has lost the epochs gets one when a majority of its members has come back and knows of none newer, so that
        it surely is the newest.

        Args:
            newest: the largest number of an epoch that this worker has heard of.

        Returns:
            Whether the store has all that it is to keep.
        """
        whole, own, back = self._key("whole"), self._key(f"epoch/{epoch.number}"), self._key(f"epoch/{newest}/back")

        def write(store: Store) -> bool:
            keys = [RUNS, whole, *map(self._key, self._records), *([own] if epoch.number else [])]
            if store.check(keys):
                return True  # as nearly always: the texts are as long as there are workers, and each of them looks
            if not store.check([whole]):
                here = {int(line) for line in (read_bytes(store, back) or b"").split() if line.isdigit()}
                if rank not in here:
                    store.append(back, f"{rank}\n")  # type: ignore[attr-defined]
                if newest > epoch.number or 2 * len({*here, rank}.intersection(epoch.members)) <= len(epoch.members):
                    return False
            if epoch.number:
                store.compare_set(own, "", epoch.text)
                store.compare_set(self._key("epoch"), "", str(epoch.number))
            store.compare_set(whole, "", "1")
            self._put_back(store)
            return True

        return self._store.run(write)

    def is_proposed(self, number: int) -> bool:
        """Whether somebody wants the epoch of this number."""
        return bool(self._store.run(lambda store: store.check([self._key(f"epoch/{number}/proposal")])))

    def promise(self, number: int, promise: Promise) -> int | None:
        """Proposes an epoch, unless somebody has, and adds a promise for it, which may be there already.

        Returns:
            The rank of the worker that has proposed it; None if what the store has is nothing that a worker writes.
        """
        proposal, text = self._key(f"epoch/{number}/proposal"), f"\n{promise.write()}\n"

        def write(store: Store) -> bytes:
            by = store.compare_set(proposal, "", str(promise.rank))
            store.append(self._key(f"epoch/{number}/promises"), text)  # type: ignore[attr-defined]
            return by

        by = self._store.run(write)
        return int(by) if by.isdigit() else None

    def promises(self, number: int) -> dict[int, Promise]:
        """The promises for an epoch, by rank. Lines that no worker has written are skipped."""
        key = self._key(f"epoch/{number}/promises")
        found: dict[int, Promise] = {}
        for line in (self._store.run(lambda store: read_bytes(store, key)) or b"").split(b"\n"):
            try:
                promise = Promise.read(line.decode()) if line else None
            except UNREADABLE:
                warn_of_unreadable(key, "the other promises count")
            else:
                if promise is not None:
                    # The newer process counts. Of one process all are the same.
                    found[promise.rank] = max(promise, found.get(promise.rank, promise), key=lambda one: one.incarnation)
        return found

    def decide(self, epoch: Epoch) -> Epoch | None:
        """Writes an epoch, if there is none of its number.

        Returns:
            The one that counts; None if the store has lost epochs, and this may be no new one, or if it cannot be written.
        """
        own, old = self._key(f"epoch/{epoch.number}"), max(0, epoch.number - _KEPT)

        def write(store: Store) -> Epoch | None:
            if not store.check([self._key("whole")]):
                return None
            won = store.compare_set(own, "", epoch.text)
            if Epoch.stored(epoch.number, won) is None:
                warn_of_unreadable(own, "the members write the epoch in its place")
                won = store.compare_set(own, won, epoch.text)  # type: ignore[arg-type]  # unless another one was faster
            if (found := Epoch.stored(epoch.number, won)) is not None:
                store.set(self._key("epoch"), str(epoch.number))  # where those that join begin to look
                self._put_back(store)
                for name in ("proposal", "promises", "back"):
                    store.delete_key(self._key(f"epoch/{old}/{name}"))
            return found

        return self._store.run(write)

    def read(self, number: int) -> Epoch | None:
        """The epoch of this number, if there is one."""
        return Epoch.stored(number, self._store.run(lambda store: read_bytes(store, self._key(f"epoch/{number}"))))

    def newest(self) -> Epoch | None:
        """The newest epoch that the store knows, if there is one."""
        return self._store.run(lambda store: newest_epoch(store, self._run_id))

    def close(self) -> None:
        """Nothing is asked any more. The store learns that this process has left: nobody listens at its address."""
        self._store.close()
        own = next((self._key(name) for name in self._records if name.startswith("address/")), None)
        if own is None:  # threads of one process
            return
        # Through a connection of its own: if the server has ended with worker 0, torch would complain about the old one.
        client = StoreClient(self._all, ROOT)
        with contextlib.suppress(RuntimeError, OSError):  # also where the interpreter ends, and starts no thread
            client.run(lambda store: store.set(own, ""), _LEAVE)
        client.close()

    def _write_records(self, store: Store) -> None:
        for key, text in self._records.items():
            if not store.check([self._key(key)]):
                store.compare_set(self._key(key), "", text)

    def _put_back(self, store: Store) -> None:
        """What a process needs to join. The list of runs comes last: whoever finds this run there finds everything."""
        if store.check([RUNS, *map(self._key, self._records)]):
            return
        self._write_records(store)
        if not self._enter(store) and not self._warned:
            self._warned = True
            _log.warning(
                "another run has taken the name %r at the store, and nobody can join this one: give each run a name of its own "
                "(faults=decent_dp.Tolerate(run=...))",
                self.entry.name,
            )

    def _enter(self, store: Store, over: Collection[str] = ()) -> bool:
        """Adds this run to the list, and removes those that are over. Returns False if another run has its name."""
        while True:  # until nobody else changes it at the same time
            text = read_text(store, RUNS)
            try:
                found = _entries(text)
            except UnreadableError as error:
                _log.warning("%s It is replaced.", error)
                store.set(RUNS, "")
                continue
            kept = [one for one in found if one.run_id not in over]
            if self.entry not in kept:
                if self.entry.name in [one.name for one in kept]:
                    return False
                kept.append(self.entry)
            wanted = json.dumps([[one.run_id, one.name] for one in kept])
            if kept == found or store.compare_set(RUNS, text or "", wanted).decode() == wanted:
                return True

    def _key(self, name: str) -> str:
        return f"{self._run_id}/{name}"


def newest_epoch(store: Store, run_id: str) -> Epoch | None:
    """The newest epoch in a store, of which all keys begin with ``ROOT``; None if there is none."""

    def read(number: int) -> bytes | None:
        return read_bytes(store, f"{run_id}/epoch/{number}")

    first = count_of(store, f"{run_id}/epoch") or 1  # it may be an older one
    if read(first) is None:
        first = 1
    newest, number = None, first
    while (value := read(number)) is not None:
        if (epoch := Epoch.stored(number, value)) is None:
            warn_of_unreadable(f"{run_id}/epoch/{number}", "the epochs before and after it count")
        newest, number = epoch or newest, number + 1
    while newest is None and first > 1:
        first -= 1
        newest = Epoch.stored(first, read(first))
    return newest


def _by_rank(numbers: Mapping[str, int]) -> dict[int, int]:
    found = {int(rank): number for rank, number in numbers.items()}
    _check_numbers(*found, *found.values())
    return found


def _check_numbers(*numbers: Any) -> None:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"numbers must be whole and not negative, got {numbers}")
