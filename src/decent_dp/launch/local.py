"""Several workers on this machine: their environment, and the store through which they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial

from torch._C._distributed_c10d import TCPStore

from decent_dp.launch.environment import read_environment

__all__ = ["refuse_in_a_worker", "store_on", "usable_cores", "worker_environment", "worker_variables"]

_LOOPBACKS = ("lo", "lo0")  # Linux, macOS


def refuse_in_a_worker(environ: Mapping[str, str], what: str) -> None:
    """Refuses to start workers in one that a launcher has started: each of them would start its own.

    Raises:
        RuntimeError: the environment is a worker's.
    """
    launch = read_environment(environ)
    # A shell or a notebook under Slurm is a step of one task.
    if launch.launcher == "torchrun" or launch.world_size > 1:
        names = "RANK and WORLD_SIZE" if launch.launcher == "torchrun" else "SLURM_PROCID and SLURM_STEP_ID"
        raise RuntimeError(
            f"{what} starts workers itself, and was called in a worker ({names} are set): call it once, without another "
            "launcher, and in a script under `if __name__ == '__main__':`"
        )


def usable_cores() -> int:
    """Returns the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment(nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what workers on one machine need, a share of the cores and the loopback interface, where the user set nothing."""
    found = {"OMP_NUM_THREADS": str(max(1, usable_cores() // nproc))}
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACKS]
    if loopback:
        found["GLOO_SOCKET_IFNAME"] = loopback[0]
    # An empty value counts as none.
    return {name: environ.get(name) or value for name, value in found.items()}


def worker_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Returns the environment of a worker whose launcher serves the store, at this port of 127.0.0.1."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The port is of a store that exists: worker 0 opens none.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **worker_environment(nproc, os.environ),
    }


def store_on(host: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Returns a store at this address; port 0: one that the system chooses. Its server lives as long as this object.

    torch's own server would listen on all interfaces.

    Raises:
        OSError: the address is not this machine's, or the port is in use.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        port = listener.getsockname()[1]
        # multi_tenant: torchrun's agent, which wants to serve this port itself, takes the server of this process.
        serve = partial(
            TCPStore,
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        try:
            return serve()
        except NotImplementedError:  # torch 2.6: its server on libuv takes no descriptor
            return serve(use_libuv=False)
