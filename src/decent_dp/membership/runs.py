"""The runs at a store: what it knows of them, which of them live, and how a process joins one."""

from __future__ import annotations

import enum
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from decent_dp.errors import PeerLostError
from decent_dp.faults import check_run
from decent_dp.membership.epoch_store import Entry, Epoch, EpochStore, UnreadableError, newest_epoch, parse, runs_in
from decent_dp.transport import NewcomerTransport, Replicas, check_encrypt
from decent_dp.transport.addresses import probe
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.rendezvous import ROOT, Rendezvous, RunRecord, address_key, network_stack, read_address
from decent_dp.transport.store import StoreClient, add_to, read_text

__all__ = ["Reach", "Run", "join", "look_at_run", "newest_run", "reach", "register", "run_without"]

_log = logging.getLogger(__name__)

# Seconds for a connection to the store.
_SECONDS = 5.0
# Seconds for the answers of a store, which may be stopped.
_STORE_ANSWERS = 20.0
# Seconds for the answer of a worker, which may be stopped.
_ANSWER = 1.0
# Seconds for those of a whole run, whose machines may be gone.
_ANSWERS = 3.0
# Seconds for those of other runs before a new one begins, which they delay.
_OTHERS = 5.0
# Seconds until a run is registered or a place is free: a store that was started again gets its runs from their members.
_FREE = 30.0
# Seconds between two looks at the store.
_AGAIN = 0.5
# Looks after which a process that has drawn a place and is no member counts as ended.
_LOOKS = 10

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
                is_own = entry.name == own.name
                if not is_own and time.monotonic() > deadline:
                    continue
                found, _ = _look(epochs.ask, entry)
                if found is Reach.ANSWERS and is_own:
                    raise ValueError(
                        f"faults=Tolerate(run='{own.name}'): a run of this name lives at this store. End it first, or give "
                        f"this one another name. To join it, pass transport=decent_dp.join(run='{own.name}')."
                    )
                if found is Reach.GONE or is_own:
                    over.append(entry.run_id)
                if found is not Reach.GONE and is_own:
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


def join(
    store: str | Store | None = None, *, rank: int | None = None, run: str | None = None, encrypt: bool | None = None
) -> NewcomerTransport:
    """Prepares this process to join a run with ``faults=Tolerate(...)``: in the place of a worker that is gone, or as one more
    (``Tolerate.max_workers``).

    Pass the result as ``transport`` to ``gossip()`` or ``DecentralizedDataParallel``, with the same arguments as on the other
    workers. This process needs no process group. It gets parameters, buffers and the state of the optimizers from another
    worker, and is a member from its first rounds on. The others do not wait for it.

    A run that is not registered yet is waited for, for half a minute: a store that was started again, empty, learns of it from
    its members.

    Args:
        store: the run's store, as HOST:PORT; None: MASTER_ADDR and MASTER_PORT of the environment.
        rank: of the worker; None: RANK or SLURM_PROCID of the environment, or if none is set, the first one that no member has.
        run: the name of the run (``Tolerate.run``); None: the only one at the store, apart from those whose workers are gone.
        encrypt: as on the other workers; None: as the store says.

    Raises:
        ValueError, TypeError: an argument is wrong, or missing: there are several runs, and none is named.
        PeerLostError: no store answers there, no such run that tolerates faults is registered in it, what it has of the run is
            unreadable, or the run has no place for more.
    """
    check_run(run)
    check_encrypt(encrypt)
    found, own = _look_for_a_place(store, rank, run)
    record = found.record
    if not record.is_of_secret:  # it says whether to encrypt
        raise PeerLostError(
            f"what the store has of the run '{found.name}' was not written by a worker that knows this one's secret: see who "
            "else writes to it, and that DECENT_DP_SECRET (or DECENT_DP_SECRET_FILE) is the same on all workers"
        )
    if encrypt not in (None, record.encrypt):
        raise ValueError(f"encrypt={encrypt}, and the run at the store was started with encrypt={record.encrypt}")
    # A store that has lost its contents counts from the beginning.
    before = max(found.epoch.incarnations.values(), default=0)
    incarnation = before + found.ask(lambda store: add_to(store, f"{found.run_id}/incarnation", 1))
    stack = network_stack() or f"process {os.getpid()}"
    store_of_run = PrefixStore(found.run_id, found.ask(lambda whole: whole))
    shared = Rendezvous(store_of_run, found.run_id, record, own, stack, incarnation=incarnation)
    return NewcomerTransport(shared, found.signature)


def look_at_run(store: str | Store | None = None, run: str | None = None) -> Run:
    """Reads what the store knows of a run. ``store``, ``run``: as of ``join``. It does not wait for one.

    Raises:
        ValueError, TypeError, PeerLostError: as of ``join``.
    """
    check_run(run)
    return _choose(_asking(store), run)


def newest_run(store: str) -> Run | None:
    """The run that was registered last, also one that has ended; None if there is none. ``store``: as of ``join``.

    Raises:
        ValueError, TypeError, PeerLostError: as of ``join``.
    """
    ask = _asking(store)
    entries = ask(runs_in)
    return Run.read(ask, entries[-1]) if entries else None


class _NoRunError(PeerLostError):
    """The run is not registered at the store, or not yet."""


def _choose(ask: Ask, name: str | None) -> Run:
    """The run of this name. None: the one that lives or, if none does, the newest.

    Raises:
        ValueError: without a name, and there are several.
        _NoRunError: there is none.
        UnreadableError: what the store has is something else.
    """
    entries = ask(runs_in)
    found = [entry for entry in entries if name in (None, entry.name)]
    if not found and name is None:
        raise _NoRunError(
            "no run is registered at this store: only a run with faults=decent_dp.Tolerate(...) and a topology that is given "
            "by name can be joined."
        )
    if not found:
        names = ", ".join(f"'{entry.name}'" for entry in entries)
        raise _NoRunError(f"no run of the name '{name}' is registered at this store, which knows {names or 'none'}.")
    if len(found) > 1:
        looks = [(entry, *_look(ask, entry)) for entry in found]
        left = {entry: f"'{entry.name}' ({text})" for entry, reached, text in looks if reached is not Reach.GONE}
        if len(left) > 1:
            raise ValueError(
                f"{len(left)} runs are registered at this store: say which one is meant, by its name (run=, or --run of a "
                f"command): {', '.join(left.values())}. Runs get their names from faults=decent_dp.Tolerate(run=...)."
            )
        found = list(left) or found
    return Run.read(ask, found[-1])


def _asking(store: str | Store | None) -> Ask:
    """Asks a store. That raises PeerLostError if there is no answer within ``_STORE_ANSWERS`` seconds."""
    client = StoreClient(store if isinstance(store, Store) else _server(store), ROOT, _SECONDS)

    def ask(call: Callable[[Store], T]) -> T:
        try:
            return client.run(call, _STORE_ANSWERS)
        except ConnectionError as error:
            raise PeerLostError(
                f"{error}. It must be that of the run (MASTER_ADDR and MASTER_PORT of its workers), and its process must run."
            ) from error

    return ask


def _server(address: object) -> tuple[str, int]:
    if address is None:
        names = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        address = ":".join(names) if all(names) else ""
    if not isinstance(address, str):
        raise TypeError(f"store must be HOST:PORT or a store of torch.distributed, got {address!r}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"store must be HOST:PORT, such as '10.0.0.1:29500', or MASTER_ADDR and MASTER_PORT must be set, got {address!r}"
        )
    return host.strip("[]"), int(port)


def _look_for_a_place(store: str | Store | None, rank: int | None, name: str | None) -> tuple[Run, int]:
    """The run, and the rank in it that this process is to have."""
    text: object = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) if rank is None else rank
    deadline, looks, waits = time.monotonic() + _FREE, 0, False
    while True:
        try:
            run = _choose(_asking(store), name)  # asked anew: it may have been started again
        except _NoRunError as error:
            why = str(error)
        else:
            name = run.name  # of several runs another one may be left meanwhile
            own = _free_rank(run, shared=looks > _LOOKS) if text is None else _given_rank(run, text)
            if own is not None:
                return run, own
            looks += 1
            why = (
                f"the run has {len(run.epoch.members)} members, and no place for more. Give the rank of a worker that is gone, "
                f"or begin the run with faults=Tolerate(max_workers=...) above {run.record.places}."
            )
        if time.monotonic() > deadline:
            raise PeerLostError(why)
        if not waits:
            _log.warning("%s This process waits for %g s.", why, _FREE)
            waits = True
        time.sleep(_AGAIN)


def _given_rank(run: Run, text: object) -> int:
    places = run.record.places
    if (number := str(text)).isdecimal() and int(number) < places:
        return int(number)
    raise ValueError(
        f"rank must be from 0 to {places - 1}, as this run can have {places} workers (faults=Tolerate(max_workers=...)), "
        f"got {text!r}"
    )


def _free_rank(run: Run, *, shared: bool) -> int | None:
    """A rank that no member has; None if there is none, or others that look at the same time have drawn them all.

    Args:
        shared: also one that another process has drawn, as that may have ended. The members let one of them in.
    """
    free = [rank for rank in range(run.record.places) if rank not in run.epoch.members]
    if not free:
        return None
    drawn = run.ask(lambda store: add_to(store, f"{run.run_id}/free/{run.epoch.number}", 1)) - 1
    return free[drawn % len(free)] if drawn < len(free) or shared else None
