"""What a store knows of a run, and whether that run still lives."""

from __future__ import annotations

import enum
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from decent_dp.membership.epoch_store import Epoch, EpochStore, newest_epoch
from decent_dp.membership.index import Entry, UnreadableError, parse, runs_in
from decent_dp.transport import Replicas
from decent_dp.transport.addresses import probe
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.rendezvous import RunRecord, address_key, network_stack, read_address
from decent_dp.transport.store import read_text

__all__ = ["Ask", "Reach", "Run", "choose", "reach", "register", "registered", "run_without"]

_log = logging.getLogger(__name__)

# Seconds for the answer of a worker, which may be stopped.
_ANSWER = 1.0
# Seconds for those of a whole run, whose machines may be gone.
_ANSWERS = 3.0
# Seconds for those of other runs before a new one begins, which they delay.
_OTHERS = 5.0

T = TypeVar("T")

# The first byte that a ZeroMQ socket says on each connection (ZMTP 3.1).
_ZEROMQ = b"\xff"


class Ask(Protocol):
    """Calls a function with the store, of which all keys begin with ``ROOT``, and returns its result."""

    def __call__(self, call: Callable[[Store], T], /) -> T: ...


class Reach(enum.Enum):
    """What a look at the address of a worker, or of all members of a run, tells. The values are for people."""

    ANSWERS = "yes"
    SILENT = "silent"  # something holds its socket and says nothing: the process is stopped, or has ended and left a child
    GONE = "no"  # nobody listens there any more, or it has said that it leaves
    UNKNOWN = "?"  # the store has no address, or there is no way to it from here


@dataclass(frozen=True)
class Run:
    """What the store knows of a run.

    Attributes:
        ask: asks the store.
        record: what its workers have in common.
        signature: of their settings. ``replicas``: from it.
        epoch: the newest one.
    """

    ask: Ask = field(repr=False)
    run_id: str
    name: str
    record: RunRecord
    signature: Mapping[str, Any]
    replicas: Replicas
    epoch: Epoch

    @classmethod
    def read(cls, ask: Ask, entry: Entry) -> Run:
        """The run of an entry in the list of runs.

        Raises:
            UnreadableError: what the store has is something else.
        """
        keys = [f"{entry.run_id}/{name}" for name in ("run", "signature")]
        texts, epoch = ask(lambda store: ([read_text(store, key) for key in keys], newest_epoch(store, entry.run_id)))
        record = parse(keys[0], "what the workers of a run have in common", texts[0], RunRecord.read)
        settings = parse(keys[1], "the settings of a run", texts[1], _read_signature)
        return cls(ask, entry.run_id, entry.name, record, *settings, epoch or Epoch.first(record.world_size))

    def addresses(self, ranks: Iterable[int]) -> dict[int, Mapping[str, Any] | None]:
        """Where the present processes of workers listen, and which processes they are; {} of one that has left, None if the
        store does not know it.

        Raises:
            UnreadableError: the store has something else.
        """
        keys = {rank: f"{self.run_id}/{address_key(rank, self.epoch.incarnations.get(rank, 0))}" for rank in ranks}
        texts = self.ask(lambda store: {rank: read_text(store, key) for rank, key in keys.items()})
        found: dict[int, Mapping[str, Any] | None] = {}
        for rank, text in texts.items():
            found[rank] = {} if text == "" else None
            if text:
                found[rank] = parse(keys[rank], f"the address of worker {rank}", text, read_address)
        return found

    def reach(self, but: int | None = None) -> Reach:
        """Whether members answer: one does, none of them listens any more, or it cannot be told from here.

        Args:
            but: a rank that is not asked.

        Raises:
            UnreadableError: as of ``addresses``.
        """
        deadline, found = time.monotonic() + _ANSWERS, set()
        for rank, address in self.addresses(self.epoch.members).items():
            if rank == but:
                continue
            found.add(reach(address) if time.monotonic() < deadline else Reach.UNKNOWN)
            if Reach.ANSWERS in found:
                return Reach.ANSWERS
        return Reach.GONE if found <= {Reach.GONE} else Reach.UNKNOWN


def reach(address: Mapping[str, Any] | None, seconds: float = _ANSWER) -> Reach:
    """Whether the process answers that has stored this address (``Run.addresses``)."""
    own = network_stack() or ""
    if not address:
        return Reach.UNKNOWN if address is None else Reach.GONE
    if "host" not in address and address["node"] != own:
        return Reach.UNKNOWN  # it listens within its machine only
    try:
        stream = probe(address, own, seconds)
    except UnreachableError as error:
        return Reach.GONE if error.is_refused else Reach.UNKNOWN
    except OSError:  # no descriptor is left
        return Reach.UNKNOWN
    with stream:
        try:
            # Another program may have the port now. A process says nothing that is stopped, or has left the socket to a child.
            return Reach.ANSWERS if stream.recv(1) == _ZEROMQ else Reach.GONE
        except TimeoutError:
            return Reach.SILENT
        except OSError:
            return Reach.UNKNOWN


def choose(ask: Ask, name: str | None) -> Run | None:
    """The run of this name. None: the one that lives or, if none does, the newest.

    Returns:
        None if there is none.

    Raises:
        ValueError: without a name, and there are several.
        UnreadableError: what the store has is something else.
    """
    found = [entry for entry in ask(runs_in) if name in (None, entry.name)]
    if len(found) > 1:
        looks = [(entry, *_look(ask, entry)) for entry in found]
        left = {entry: f"'{entry.name}' ({text})" for entry, reached, text in looks if reached is not Reach.GONE}
        if len(left) > 1:
            raise ValueError(
                f"{len(left)} runs are registered at this store: say which one is meant, by its name (run=, or --run of a "
                f"command): {', '.join(left.values())}. Runs get their names from faults=decent_dp.Tolerate(run=...)."
            )
        found = list(left) or found
    return Run.read(ask, found[-1]) if found else None


def registered(ask: Ask, name: str | None) -> str:
    """What there is in place of the run that was not found, as an error message."""
    if name is None:
        return (
            "no run is registered at this store: only a run with faults=decent_dp.Tolerate(...) and a topology that is given "
            "by name can be joined."
        )
    names = ", ".join(f"'{entry.name}'" for entry in ask(runs_in))
    return f"no run of the name '{name}' is registered at this store, which knows {names or 'none'}."


def register(epochs: EpochStore) -> None:
    """Registers a run that begins, and removes those that are over from the list. Called by worker 0.

    Raises:
        ValueError: a run of its name lives.
    """
    own, deadline = epochs.entry, time.monotonic() + _OTHERS
    try:
        while True:
            over = []
            for entry in _entries(epochs.ask):
                if entry.name != own.name and time.monotonic() > deadline:
                    continue
                found, _ = _look(epochs.ask, entry)
                if found is Reach.ANSWERS and entry.name == own.name:
                    raise ValueError(
                        f"faults=Tolerate(run='{own.name}'): a run of this name lives at this store. End it first, or give "
                        f"this one another name. To join it, pass transport=decent_dp.join(run='{own.name}')."
                    )
                if found is Reach.GONE or entry.name == own.name:
                    over.append(entry.run_id)
                if found is not Reach.GONE and entry.name == own.name:
                    _log.warning(
                        "the run '%s' of before is replaced at the store, as no worker of it answers worker 0. If it lives, "
                        "nobody can join it any more",
                        own.name,
                    )
            if epochs.register(over):
                break
    except ConnectionError as error:
        _log.warning("the run '%s' is registered when the store answers: %s", own.name, error)


def run_without(ask: Ask, rank: int, world_size: int) -> str | None:
    """The name of a run of so many workers that lives without worker ``rank``, which does not answer; None if there is none."""
    for entry in _entries(ask):
        try:
            run = Run.read(ask, entry)
            if run.record.world_size == world_size and run.reach(but=rank) is Reach.ANSWERS:
                own = run.addresses([rank])[rank] if rank in run.epoch.members else {}
                if reach(own) is not Reach.ANSWERS:
                    return run.name
        except UnreadableError as error:
            _log.warning("%s", error)
    return None


def _entries(ask: Ask) -> list[Entry]:
    try:
        return ask(runs_in)
    except UnreadableError:  # whoever registers a run says so
        return []


def _look(ask: Ask, entry: Entry) -> tuple[Reach, str]:
    """Whether the members of a run answer, and how many there are, in words."""
    try:
        run = Run.read(ask, entry)
        reached = run.reach()
    except UnreadableError:
        return Reach.UNKNOWN, "unreadable"
    return reached, f"{len(run.epoch.members)} members{', which do not answer from here' * (reached is not Reach.ANSWERS)}"


def _read_signature(found: Any) -> tuple[Mapping[str, Any], Replicas]:
    replicas = Replicas(tuple(map(tuple, found["settings"]["workers of each replica"])))
    ranks = list(itertools.chain(*replicas.workers))
    is_whole = len(set(map(len, replicas.workers))) == 1 and all(type(rank) is int for rank in ranks)
    if not is_whole or sorted(ranks) != [*range(len(ranks))]:
        raise ValueError("every worker must be in one replica, and all replicas of one size")
    return found, replicas
