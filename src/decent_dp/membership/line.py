"""What a run keeps in the store where faults are tolerated: its line of epochs, and what a process needs to join it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from decent_dp.membership.index import Entry, enter
from decent_dp.transport.rendezvous import ROOT, RUNS
from decent_dp.transport.store import StoreClient, count_of, read_bytes, warn_of_unreadable

__all__ = ["Epoch", "Line", "newest_epoch", "promises_of"]

_log = logging.getLogger(__name__)

# Seconds for the last word of a worker that leaves.
_LEAVE = 2.0

T = TypeVar("T")


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
    def read(cls, number: int, text: str) -> Epoch:
        """The epoch that a text stands for: the promises of those that agreed on it, by rank."""
        promises = promises_of(text)
        said: list[dict[str, Any]] = [json.loads(promise) for promise in set(promises.values())]
        joining, processes = (_newest(promise[key] for promise in said) for key in ("joining", "processes"))
        # Who has promised lives, though the member that a process has asked does not hear it.
        joining = {rank: incarnation for rank, incarnation in joining.items() if rank not in promises}
        members = tuple(sorted({*promises, *joining}))
        # From the newest epoch that one of them knows: its number, first round, shares dealt before it, and size.
        _, since, before, size = max((promise["since"] for promise in said), default=(0, 0, 0, 0))
        # An epoch may follow another one before that begins. It does not begin earlier.
        start = max([since, *(promise["until"] + 1 for promise in said)], default=1)
        return cls(number, start, before + (start - since) * size, members, _newest([joining, processes]), text)

    @classmethod
    def stored(cls, number: int, value: bytes | None) -> Epoch | None:
        """The epoch that the store has under this number; None: no worker has written it. So it counts as if it was not there.

        A function of the number and the bytes alone: all find the same.
        """
        if value is None:
            return None
        try:
            epoch = cls.read(number, value.decode())
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
        found = [epoch.start, epoch.dealt, *epoch.members, *epoch.incarnations, *epoch.incarnations.values()]
        is_whole = all(type(n) is int and n >= 0 for n in found) and bool(epoch.members) is (number > 0)
        return epoch if is_whole else None


class Line:
    """Texts of epochs under their numbers, where the first one stays; and what a process needs to join, with the run's name.

    Args:
        store: of the run.
        run_id: names the run, as others may use the same server.
        records: ``Transport.records``, and more of the kind.
        name: of the run, for people; None: the beginning of ``run_id``.
    """

    def __init__(self, store: Store, run_id: str, records: Mapping[str, str], name: str | None = None) -> None:
        self._run_id, self._records, self._store = run_id, records, StoreClient(store, ROOT)
        self.entry = Entry(run_id, name or run_id[:8])
        self._whole, self._warned = store, False

    def ask(self, call: Callable[[Store], T]) -> T:
        """The result of calls of the store, of which all keys begin with ``ROOT``.

        Raises:
            ConnectionError: it does not answer.
        """
        return self._store.run(call)

    def register(self, over: Collection[str]) -> bool:
        """Writes all that a process needs to join a run that begins, as worker 0 does.

        Args:
            over: the ids of runs that this one replaces.

        Returns:
            False if another run has its name.

        Raises:
            ConnectionError: the store does not answer.
        """

        def write(store: Store) -> bool:
            self._write_records(store)
            store.compare_set(self._key("epoch/0"), "", "[]")
            return enter(store, self.entry, over)

        return self._store.run(write)

    def keep(self, number: int = 0) -> bool:
        """Writes what a process needs to join, as far as it is missing. A store that has lost the epoch gets it together with
        that (``write``): who found one without the other could not tell who the members are.

        Returns:
            Whether the store knows the epoch of this number.

        Raises:
            ConnectionError: the store does not answer.
        """
        epoch = self._key(f"epoch/{number}")

        def write(store: Store) -> bool:
            if store.check([RUNS, epoch, *map(self._key, self._records)]):
                return True  # as nearly always: the texts are as long as there are workers, and each of them looks
            knows = bool(store.check([epoch]))
            if knows:
                self._put_back(store)
            return knows

        return self._store.run(write)

    def probe(self) -> None:
        """Raises ConnectionError if the store does not answer."""
        self._store.run(lambda store: store.check([RUNS]))

    def write(self, number: int, text: str, before: str | None) -> str | None:
        """Writes an epoch.

        Args:
            before: the text of the epoch before, if it may be written when the store knows nothing of it.

        Returns:
            The text that counts; None if the store knows nothing of the epoch before, and may not be told, or if it cannot be
            written.

        Raises:
            ConnectionError: the store does not answer. The text may be written.
        """
        former, own = self._key(f"epoch/{number - 1}"), self._key(f"epoch/{number}")

        def write(store: Store) -> str | None:
            if number and not store.check([former]):
                if before is None:
                    return None
                store.compare_set(former, "", before)
            won = store.compare_set(own, "", text)
            if Epoch.stored(number, won) is None:
                warn_of_unreadable(own, "the members write the epoch in its place")
                won = store.compare_set(own, won, text)  # type: ignore[arg-type]  # unless another one was faster
            if (epoch := Epoch.stored(number, won)) is None:
                return None
            store.set(self._key("epoch"), str(number))  # where those that join begin to look
            self._put_back(store)
            return epoch.text

        return self._store.run(write)

    def newest(self) -> Epoch:
        """The newest epoch that the store knows; the first one names nobody.

        Raises:
            ConnectionError: the store does not answer.
        """
        return self._store.run(lambda store: newest_epoch(store, self._run_id))

    def close(self) -> None:
        """Nothing is asked any more. The store learns that this process has left: nobody listens at its address."""
        self._store.close()
        own = next((self._key(name) for name in self._records if name.startswith("address/")), None)
        if own is None:  # threads of one process
            return
        # Through a connection of its own: if the server has ended with worker 0, torch would complain about the old one.
        client = StoreClient(self._whole, ROOT)
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
        if not enter(store, self.entry) and not self._warned:
            self._warned = True
            _log.warning(
                "another run has taken the name %r at the store, and nobody can join this one: give each run a name of its own "
                "(faults=decent_dp.Tolerate(run=...))",
                self.entry.name,
            )

    def _key(self, name: str) -> str:
        return f"{self._run_id}/{name}"


def promises_of(text: str) -> dict[int, str]:
    """The promises that an epoch in the store is made of, by rank."""
    return dict(sorted((int(rank), promise) for promise, ranks in json.loads(text) for rank in ranks))


def newest_epoch(store: Store, run_id: str) -> Epoch:
    """The newest epoch in a store, of which all keys begin with ``ROOT``. Epoch 0 names nobody."""

    def read(number: int) -> bytes | None:
        return read_bytes(store, f"{run_id}/epoch/{number}")

    first = count_of(store, f"{run_id}/epoch")  # it may be an older one
    if read(first) is None:
        first = 0
    newest, number = None, first
    while (value := read(number)) is not None:
        if (epoch := Epoch.stored(number, value)) is None:
            warn_of_unreadable(f"{run_id}/epoch/{number}", "the epochs before and after it count")
        newest, number = epoch or newest, number + 1
    while newest is None and first > 0:
        first -= 1
        newest = Epoch.stored(first, read(first))
    return newest or Epoch.read(0, "[]")


def _newest(parts: Iterable[Mapping[Any, int]]) -> dict[int, int]:
    """The largest number of each rank."""
    found: dict[int, int] = {}
    for part in parts:
        for rank, number in part.items():
            found[int(rank)] = max(number, found.get(int(rank), 0))
    return found
