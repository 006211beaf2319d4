"""The process group and the device, from the launcher's environment."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from decent_dp.launch.environment import Launch, own_gpu, read_environment
from decent_dp.transport.closed_group import own_default_group

__all__ = ["initialize_dist", "usable_gpus"]

_log = logging.getLogger(__name__)

# Seconds within which all workers must arrive, and between two polls.
_TIMEOUT, _POLL = 1800.0, 0.01
# Seconds between two looks whether a run lives here that this process can only join, and until worker 0 says that it waits.
_LOOK, _SAY = 3.0, 8.0

T = TypeVar("T")


def usable_gpus() -> int:
    """Returns the number of visible GPUs that NCCL can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0


def initialize_dist() -> tuple[int, int]:
    """Initializes the default process group from the environment of torchrun or Slurm's ``srun``; without one, for one worker.

    If every worker of this node has its own GPU, the backend is NCCL and the current device ``cuda:LOCAL_RANK``. Otherwise the
    backend is gloo. An existing process group is kept.

    Returns:
        (rank, world_size).

    Raises:
        RuntimeError: the environment is incomplete, the port of worker 0's store is taken, or this process was started again in
            place of a worker of a run with ``faults``, which lives: ``decent_dp.join()`` is needed. That is said after some
            seconds.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = read_environment(os.environ)
    backend, index = "gloo", own_gpu(launch, usable_gpus(), os.environ)
    if index is not None:
        torch.cuda.set_device(index)
        backend = "nccl"
    # Node-aware topologies read this variable.
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(launch.local_world_size))
    if launch.address is None:
        # A single worker needs no store on a port.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return 0, 1
    os.environ.setdefault("MASTER_ADDR", launch.address)
    os.environ.setdefault("MASTER_PORT", str(launch.port))
    try:
        store = _open_store(launch)
    except RuntimeError as error:  # torch 2.6 raises no DistNetworkError
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        raise RuntimeError(
            f"port {launch.port} of {launch.address} is taken (MASTER_PORT): another run is using it. Set MASTER_PORT to a "
            "free port, or start with `torchrun --standalone`, which picks one."
        ) from error
    store = _unused_store(store, launch.rank, launch.world_size)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
    own_default_group()
    return dist.get_rank(), dist.get_world_size()


def _open_store(launch: Launch) -> Store:
    """The store of all workers: that of a launcher, such as torchrun's agent, or worker 0's own."""
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        str(launch.address),
        launch.port or 0,
        is_master=launch.rank == 0 and not is_served,
        wait_for_workers=False,
        timeout=timedelta(seconds=_TIMEOUT),
        multi_tenant=True,
    )


def _unused_store(store: Store, rank: int, world_size: int) -> Store:
    """Returns the part of a store under a prefix that no earlier attempt has used, when all workers are there.

    A launcher keeps one store for all attempts, and gloo would read the addresses of dead workers in it. The restart count does
    not distinguish attempts, because agents of several nodes count only their own. So worker 0 draws a name for the attempt and
    publishes it with the random ids of all workers, and each worker confirms the name if its own id is among them.

    Raises:
        RuntimeError: not all workers have come; or a run lives at this store without this worker, whose process has to join it.
    """
    own, began, look_at, waits = uuid.uuid4().hex, time.monotonic(), time.monotonic() + _LOOK, False
    numbers = [f"decent_dp/worker/{other}" for other in range(world_size)]
    answers = [f"decent_dp/answer/{other}" for other in range(1, world_size)]
    store.set(numbers[rank], own)
    offered: list[str] = []
    while True:
        if rank == 0:
            if store.check(numbers):
                found = [number.decode() for number in store.multi_get(numbers)]
                if found != offered:
                    offered = found
                    store.set("decent_dp/name", json.dumps([own, found]))
                if not answers or (store.check(answers) and {a.decode() for a in store.multi_get(answers)} == {own}):
                    return PrefixStore(own, store)
        elif store.check(["decent_dp/name"]):
            name, found = json.loads(store.get("decent_dp/name"))
            if own in found:
                store.set(f"decent_dp/answer/{rank}", name)
                return PrefixStore(name, store)
        now = time.monotonic()
        if now >= look_at:
            _refuse_restart(store, rank, world_size)
            look_at = now + _LOOK
        if rank == 0 and now >= began + _SAY and not waits:
            waits = True
            _log.warning(
                "worker 0 of %d has waited for the others for %g s. If it was started again while they train on, it must join "
                "them with decent_dp.join(), at a store that has outlived it (decent-dp roster)",
                world_size,
                _SAY,
            )
        if now > began + _TIMEOUT:
            raise RuntimeError(f"worker {rank} of {world_size} waited {_TIMEOUT:g} s for the others to start")
        time.sleep(_POLL)


def _refuse_restart(store: Store, rank: int, world_size: int) -> None:
    """Raises RuntimeError if the others train on without this worker, and will not come."""
    # Only here: they take time to import.
    from decent_dp.membership.runs import run_without
    from decent_dp.transport.rendezvous import ROOT

    def ask(call: Callable[[Store], T]) -> T:
        return call(PrefixStore(ROOT, store))

    if (name := run_without(ask, rank, world_size)) is not None:
        raise RuntimeError(
            f"the run '{name}' lives at this store without worker {rank}, and its other workers do not start anew: this "
            f"process can only join them. Call decent_dp.join(run='{name}') instead of initialize_dist(), and pass the result "
            "to gossip() or DecentralizedDataParallel as transport. For another run use another store (MASTER_PORT)."
        )
