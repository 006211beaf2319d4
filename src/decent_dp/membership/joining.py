"""How a process finds a run that it joins, at the run's store."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from decent_dp.errors import PeerLostError
from decent_dp.faults import check_run
from decent_dp.membership.index import runs_in
from decent_dp.membership.runs import Ask, Run, choose, registered
from decent_dp.transport import NewcomerTransport, check_encrypt
from decent_dp.transport.rendezvous import ROOT, Rendezvous, network_stack
from decent_dp.transport.store import StoreClient, add_to

__all__ = ["join", "look_at_run", "newest_run"]

_log = logging.getLogger(__name__)

# Seconds for a connection to the store.
_SECONDS = 5.0
# Seconds until a run is registered or a place is free: a store that was started again gets its runs from their members.
_FREE = 30.0
# Seconds between two looks at the store.
_AGAIN = 0.5
# Looks after which a process that has taken a place and is no member counts as ended.
_LOOKS = 10
# Seconds for the answers of a store, which may be stopped.
_ANSWER = 20.0

T = TypeVar("T")


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
    ask = _asking(store)
    found = choose(ask, run)
    if found is None:
        raise PeerLostError(registered(ask, run))
    return found


def newest_run(store: str) -> Run | None:
    """The run that was registered last, also one that has ended; None if there is none. ``store``: as of ``join``.

    Raises:
        ValueError, TypeError, PeerLostError: as of ``join``.
    """
    ask = _asking(store)
    entries = ask(runs_in)
    return Run.read(ask, entries[-1]) if entries else None


def _asking(store: str | Store | None) -> Ask:
    """Asks a store. That raises PeerLostError if there is no answer within ``_ANSWER`` seconds."""
    client = StoreClient(store if isinstance(store, Store) else _server(store), ROOT, _SECONDS)

    def ask(call: Callable[[Store], T]) -> T:
        try:
            return client.run(call, _ANSWER)
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
        ask = _asking(store)  # anew: it may have been started again
        run = choose(ask, name)
        if run is None:
            why = registered(ask, name)
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
    """A rank that no member has; None if there is none, or others that look at the same time were faster.

    Args:
        shared: also one that another process has taken, as that may have ended. The members let one of them in.
    """

    def take(store: Store) -> int | None:
        keys = {rank: f"{run.run_id}/free/{run.epoch.number}/{rank}" for rank in range(run.record.places)}
        taken = {rank: add_to(store, key, 0) for rank, key in keys.items() if rank not in run.epoch.members}
        for rank in sorted(taken, key=lambda rank: taken[rank]):
            if taken[rank] and not shared:
                break
            if add_to(store, keys[rank], 1) == taken[rank] + 1:
                return rank
        return None

    return run.ask(take)
