"""How a process finds a run that it joins, at the run's store."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from decent_dp.errors import PeerLostError
from decent_dp.membership.line import newest_epoch
from decent_dp.transport import NewcomerTransport
from decent_dp.transport.base import connect_store, read_text, store_errors, whole_store
from decent_dp.transport.communicators import NEWEST, ROOT, Rendezvous, network_stack

__all__ = ["join"]

# Seconds for a connection to the store.
_SECONDS = 5.0


def join(store: str | Store | None = None, *, rank: int | None = None) -> NewcomerTransport:
    """Prepares this process to take the place of a worker that is gone, in a run with ``faults=Tolerate(...)``.

    Pass the result as ``transport`` to ``gossip()`` or ``DecentralizedDataParallel``, with the same arguments as on the other
    workers. This process needs no process group. It gets parameters, buffers and the state of the optimizers from another
    worker, and is a member from its first rounds on. The others do not wait for it.

    Args:
        store: the run's store, as HOST:PORT; None: MASTER_ADDR and MASTER_PORT of the environment.
        rank: of the worker; None: RANK of the environment.

    Raises:
        ValueError, TypeError: an argument is wrong, or missing.
        PeerLostError: no store answers there, or no run that tolerates faults is registered in it.
    """
    whole = _whole_store(store)
    try:
        with store_errors():
            run_id = read_text(whole, NEWEST)
            found = {} if run_id is None else {name: read_text(whole, f"{run_id}/{name}") for name in ("run", "signature")}
            if run_id is None or None in found.values():
                raise PeerLostError(
                    "no run is registered at this store: only a run with faults=decent_dp.Tolerate(...) and a topology that is "
                    "given by name can be joined."
                )
            record, signature = (json.loads(found[name] or "") for name in ("run", "signature"))
            own = _own_rank(rank, record["world_size"])
            # A store that has lost its contents counts from the beginning.
            before = max(newest_epoch(whole, run_id).incarnations.values(), default=0)
            incarnation = before + whole.add(f"{run_id}/incarnation", 1)
    except ConnectionError as error:
        raise PeerLostError(str(error)) from error
    stack = network_stack() or f"process {os.getpid()}"
    shared = Rendezvous(
        PrefixStore(run_id, whole),
        own,
        record["world_size"],
        timedelta(seconds=record["timeout"]),
        nccl=False,
        node_of=tuple(record["node_of"]),
        token=bytes.fromhex(record["token"]),
        run_id=run_id,
        node=stack,
        incarnation=incarnation,
    )
    return NewcomerTransport(shared, signature)


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
    host = host.strip("[]")
    try:
        with store_errors():
            return connect_store(host, int(port), ROOT, _SECONDS)
    except OSError as error:
        raise PeerLostError(
            f"no store answers at {store} ({error}): it must be that of the run (MASTER_ADDR and MASTER_PORT of its workers)."
        ) from error


def _own_rank(rank: int | None, world_size: int) -> int:
    text: object = os.environ.get("RANK", "") if rank is None else rank
    with contextlib.suppress(TypeError, ValueError):
        if int(str(text)) in range(world_size):
            return int(str(text))
    raise ValueError(f"rank must be that of a worker of the run, from 0 to {world_size - 1}, or RANK must be set, got {text!r}")
