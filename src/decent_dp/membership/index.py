"""The list of the runs at a store, with their names, and texts in the store that are not what they should be."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from decent_dp.errors import PeerLostError
from decent_dp.faults import check_run
from decent_dp.transport.rendezvous import ROOT, RUNS
from decent_dp.transport.store import UNREADABLE, read_text

__all__ = ["Entry", "UnreadableError", "enter", "parse", "runs_in"]

_log = logging.getLogger(__name__)

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


def enter(store: Store, entry: Entry, over: Collection[str] = ()) -> bool:
    """Adds a run to the list, if it is missing there.

    Args:
        over: the ids of runs that are removed.

    Returns:
        Whether it is in the list: False if another run has its name.
    """
    while True:  # until nobody else changes it at the same time
        text = read_text(store, RUNS)
        try:
            found = _entries(text)
        except UnreadableError as error:
            _log.warning("%s It is replaced.", error)
            store.set(RUNS, "")
            continue
        kept = [one for one in found if one.run_id not in over]
        if entry not in kept:
            if entry.name in [one.name for one in kept]:
                return False
            kept.append(entry)
        wanted = json.dumps([[one.run_id, one.name] for one in kept])
        if kept == found or store.compare_set(RUNS, text or "", wanted).decode() == wanted:
            return True


def _entries(text: str | None) -> list[Entry]:
    return parse(RUNS, "the list of runs", text, lambda said: [Entry.read(*pair) for pair in said]) if text else []
