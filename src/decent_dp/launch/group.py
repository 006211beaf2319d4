"""The process group and the device, from the launcher's environment."""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from decent_dp.launch.environment import own_gpu, read_environment
from decent_dp.transport.closed_group import own_default_group

__all__ = ["initialize_dist", "usable_gpus"]

# Seconds within which all workers must arrive, and between two polls.
_TIMEOUT, _POLL = 1800.0, 0.01


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
        RuntimeError: the environment is incomplete, or the port of worker 0's store is taken.
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
        store = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _unused_store(launch.address, launch.port or 0, launch.rank, launch.world_size)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
        own_default_group()
    except RuntimeError as error:  # torch 2.6 raises no DistNetworkError
        if "EADDRINUSE" not in str(error) and "address already in use" not in str(error).lower():
            raise
        raise RuntimeError(
            f"port {launch.port} of {launch.address} is taken (MASTER_PORT): another run is using it. Set MASTER_PORT to a "
            "free port, or start with `torchrun --standalone`, which picks one."
        ) from error
    return dist.get_rank(), dist.get_world_size()


def _unused_store(address: str, port: int, rank: int, world_size: int) -> Store:
    """Returns the store of torchrun's agent under a prefix that no earlier attempt has used.

    The agent keeps one store for all attempts, and gloo would read the addresses of dead workers in it. The restart count does
    not distinguish attempts, because agents of several nodes count only their own. So worker 0 draws a name for the attempt and
    publishes it with the random ids of all workers, and each worker confirms the name if its own id is among them.
    """
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT))
    own, deadline = uuid.uuid4().hex, time.monotonic() + _TIMEOUT
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
        if time.monotonic() > deadline:
            raise RuntimeError(f"worker {rank} of {world_size} waited {_TIMEOUT:g} s for the others to start")
        time.sleep(_POLL)
