"""What a launcher's environment says about a worker. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "own_gpu", "read_environment"]

# Below Linux's range of ephemeral ports; the job id and the step id choose one. Steps may run at once in one job, and the next
# jobs on the same node, so that the port of a step is far from the one of the next.
_SLURM_PORTS, _BETWEEN_STEPS = range(20000, 30000), 1009


@dataclass(frozen=True)
class Launch:
    """The launcher's description of a worker.

    Attributes:
        launcher: 'torchrun', 'slurm' or 'none'.
        address, port: of worker 0's store; None without a launcher.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None


def read_environment(environ: Mapping[str, str]) -> Launch:
    """Reads the environment of torchrun (or any launcher with its variables), of Slurm's ``srun``, or of a single process.

    Raises:
        RuntimeError: a variable is missing or not a number; the message names it.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local_rank = _number(environ, "LOCAL_RANK", 0 if world_size == 1 else None)
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1)
        if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
            raise RuntimeError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR or MASTER_PORT is not. Start the script with torchrun, or set "
                "both to an address and a free port of worker 0."
            )
        return Launch(
            "torchrun",
            rank,
            world_size,
            local_rank,
            local_world_size,
            environ["MASTER_ADDR"],
            _number(environ, "MASTER_PORT"),
        )
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _read_slurm(environ)
    if "RANK" in environ or environ.get("WORLD_SIZE", "1") != "1":
        # With half an environment, every worker would silently train alone.
        missing = "WORLD_SIZE" if "RANK" in environ else "RANK"
        raise RuntimeError(f"the environment variable {missing} is missing: start the script with torchrun or srun.")
    return Launch("none", 0, 1, 0, 1, None, None)


def _read_slurm(environ: Mapping[str, str]) -> Launch:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_NNODES", 1))
    # "4(x2),3": four tasks on each of two nodes, then three. The entry at this node's index is this node's count.
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(repeat or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    local_world_size = counts[node] if node < len(counts) else max(1, world_size // nodes)
    step = _number(environ, "SLURM_JOB_ID", 0) + _BETWEEN_STEPS * _number(environ, "SLURM_STEP_ID", 0)
    port = _number(environ, "MASTER_PORT", _SLURM_PORTS[step % len(_SLURM_PORTS)])
    if nodes > 1 and "MASTER_ADDR" not in environ and environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        # The list of nodes is sorted, whatever the tasks' order: the others would wait for worker 0 at the wrong address.
        raise RuntimeError(
            "srun --distribution=arbitrary does not tell the workers on which node worker 0 runs: set MASTER_ADDR to the "
            "address of worker 0, the first line of SLURM_HOSTFILE."
        )
    address = environ.get("MASTER_ADDR") or _first_host(
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    )
    return Launch(
        "slurm",
        _number(environ, "SLURM_PROCID"),
        world_size,
        _number(environ, "SLURM_LOCALID", 0),
        local_world_size,
        address if nodes > 1 else environ.get("MASTER_ADDR", "127.0.0.1"),
        port,
    )


def _first_host(nodes: str) -> str:
    """Returns the first host of Slurm's short form: 'gpu03' of 'gpu[03-05,9],cpu1'."""
    # Replaces each bracket by its first number, and cuts at the first comma.
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]
    if not host or nodes.startswith("["):
        raise RuntimeError(f"the list of nodes {nodes!r} names no host: set MASTER_ADDR to the address of worker 0.")
    return host


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise RuntimeError(f"the environment variable {name} is missing: start the script with torchrun or srun.")
        return default
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"the environment variable {name} must be a whole number, got {text!r}") from None


def own_gpu(launch: Launch, visible: int, environ: Mapping[str, str]) -> int | None:
    """Returns the index of this worker's own GPU among the visible ones; None if it has none, or shares one."""
    # A launcher may omit the number of workers per node; the local rank gives a lower bound.
    if visible >= max(launch.local_world_size, launch.local_rank + 1):
        return launch.local_rank
    # Slurm can make a different single GPU visible to each task.
    one = re.fullmatch(r"(?:.*:)?1", environ.get("SLURM_GPUS_PER_TASK", ""))  # "1" or "a100:1"
    own = one is not None or environ.get("SLURM_GPU_BIND") in ("single:1", "per_task:1")
    return 0 if launch.launcher == "slurm" and visible == 1 and own else None
