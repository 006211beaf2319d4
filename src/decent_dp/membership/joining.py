"""How a process finds a run that it joins, at the run's store."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from decent_dp.errors import PeerLostError
from decent_dp.membership.line import Epoch, newest_epoch
from decent_dp.transport import NewcomerTransport
from decent_dp.transport.communicators import NEWEST, ROOT, Rendezvous, address_key, network_stack
from decent_dp.transport.store import StoreCalls, connect_store, read_text, store_errors, whole_store

__all__ = ["Run", "join", "look_at_run"]

# Seconds for a connection to the store, until a place is free, and between two looks for one; and looks after which a process
# that has taken one and is no member counts as ended.
_SECONDS, _FREE, _AGAIN, _LOOKS = 5.0, 30.0, 0.5, 10
# Seconds for the answers of a store, which may be stopped.
_ANSWER = 20.0

T = TypeVar("T")


def join(store: str | Store | None = None, *, rank: int | None = None) -> NewcomerTransport:
    """Prepares this process to join a run with ``faults=Tolerate(...)``: in the place of a worker that is gone, or as one more
    (``Tolerate.max_workers``).

    Pass the result as ``transport`` to ``gossip()`` or ``DecentralizedDataParallel``, with the same arguments as on the other
    workers. This process needs no process group. It gets parameters, buffers and the state of the optimizers from another
    worker, and is a member from its first rounds on. The others do not wait for it.

    Args:
        store: the run's store, as HOST:PORT; None: MASTER_ADDR and MASTER_PORT of the environment.
        rank: of the worker; None: RANK or SLURM_PROCID of the environment, or if none is set, the first one that no member has.

    Raises:
        ValueError, TypeError: an argument is wrong, or missing.
        PeerLostError: no store answers there, no run that tolerates faults is registered in it, or it has no place for more.
    """
    run, own = _look_for_a_place(store, rank)
    record = run.record
    # A store that has lost its contents counts from the beginning.
    before = max(run.epoch.incarnations.values(), default=0)
    incarnation = before + _ask(lambda: run.store.add(f"{run.run_id}/incarnation", 1))
    stack = network_stack() or f"process {os.getpid()}"
    shared = Rendezvous(
        PrefixStore(run.run_id, run.store),
        own,
        record["world_size"],
        timedelta(seconds=record["timeout"]),
        nccl=False,
        node_of=tuple(record["node_of"]),
        token=bytes.fromhex(record["token"]),
        run_id=run.run_id,
        node=stack,
        incarnation=incarnation,
        places=record["places"],
    )
    return NewcomerTransport(shared, run.signature)


@dataclass(frozen=True)
class Run:
    """What the store knows of the run that began last.

    Attributes:
        store: with the keys of all runs.
        record: what its workers have in common (``Transport.records``); the secret is among it.
        signature: of their settings.
        epoch: the newest one; epoch 0 names nobody.
    """

    store: Store
    run_id: str
    record: Mapping[str, Any] = field(repr=False)
    signature: Mapping[str, Any]
    epoch: Epoch

    @property
    def members(self) -> tuple[int, ...]:
        return self.epoch.members or tuple(range(self.record["world_size"]))

    def address(self, rank: int) -> dict[str, Any] | None:
        """Where the present process of a worker listens, and which process it is; None if the store does not know it."""
        key = f"{self.run_id}/{address_key(rank, self.epoch.incarnations.get(rank, 0))}"
        text = _ask(lambda: read_text(self.store, key))
        return None if text is None else dict(json.loads(text))


def look_at_run(store: str | Store | None = None) -> Run:
    """Reads what the store knows of the run that began last. ``store``: as of ``join``.

    Raises:
        ValueError, TypeError, PeerLostError: as of ``join``.
    """

    def read() -> tuple[Store, str | None, dict[str, str | None], Epoch | None]:
        whole = _whole_store(store)
        run_id = read_text(whole, NEWEST)
        if run_id is None:
            return whole, None, {}, None
        found = {name: read_text(whole, f"{run_id}/{name}") for name in ("run", "signature")}
        return whole, run_id, found, newest_epoch(whole, run_id)

    whole, run_id, found, epoch = _ask(read)
    if run_id is None or epoch is None or None in found.values():
        raise PeerLostError(
            "no run is registered at this store: only a run with faults=decent_dp.Tolerate(...) and a topology that is "
            "given by name can be joined."
        )
    record, signature = (json.loads(found[name] or "") for name in ("run", "signature"))
    return Run(whole, run_id, record, signature, epoch)


def _ask(call: Callable[[], T]) -> T:
    """The result of calls of a store.

    Raises:
        PeerLostError: it does not answer, or not within ``_ANSWER`` seconds.
    """
    calls = StoreCalls()
    try:
        with store_errors():
            return calls.run(call, _ANSWER)
    except ConnectionError as error:
        raise PeerLostError(
            f"{error}. It must be that of the run (MASTER_ADDR and MASTER_PORT of its workers), and its process must run."
        ) from error
    finally:
        calls.close()


def _whole_store(store: str | Store | None) -> Store:
    if isinstance(store, Store):
        return PrefixStore(ROOT, whole_store(store))
    if store is None:
        names = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        store = ":".join(names) if all(names) else ""
    if not isinstance(store, str):
        raise TypeError(f"store must be HOST:PORT or a store of torch.distributed, got {store!r}")
    host, _, port = store.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"store must be HOST:PORT, such as '10.0.0.1:29500', or MASTER_ADDR and MASTER_PORT must be set, got {store!r}"
        )
    try:
        return connect_store(host.strip("[]"), int(port), ROOT, _SECONDS)
    except OSError as error:
        raise ConnectionError(f"no store answers at {store} ({error})") from error


def _look_for_a_place(store: str | Store | None, rank: int | None) -> tuple[Run, int]:
    """The run, and the rank in it that this process is to have."""
    text: object = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) if rank is None else rank
    run, deadline = look_at_run(store), time.monotonic() + _FREE
    places = run.record["places"]
    if text is not None:
        with contextlib.suppress(TypeError, ValueError):
            if int(str(text)) in range(places):
                return run, int(str(text))
        raise ValueError(
            f"rank must be from 0 to {places - 1}, as this run can have {places} workers (faults=Tolerate(max_workers=...)), "
            f"got {text!r}"
        )
    looks = 0
    while (found := _free_rank(run, shared=looks > _LOOKS)) is None:
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"the run has {len(run.members)} members, and no place for more. Give the rank of a worker that is gone, or "
                f"begin the run with faults=Tolerate(max_workers=...) above {places}."
            )
        time.sleep(_AGAIN)
        run, looks = look_at_run(store), looks + 1
    return run, found


def _free_rank(run: Run, *, shared: bool) -> int | None:
    """A rank that no member has. Another process that looks at the same time gets another one.

    Args:
        shared: also one that another process has taken, as that may have ended. The members let one of them in.
    """

    def take() -> int | None:
        taken = {}
        for rank in range(run.record["places"]):
            key = f"{run.run_id}/free/{run.epoch.number}/{rank}"
            if rank not in run.members:
                taken[rank] = run.store.add(key, 0 if shared else 1)
                if taken[rank] == 1 and not shared:
                    return rank
        if taken and shared:
            rank = min(taken, key=lambda rank: taken[rank])
            run.store.add(f"{run.run_id}/free/{run.epoch.number}/{rank}", 1)
            return rank
        return None

    return _ask(take)
