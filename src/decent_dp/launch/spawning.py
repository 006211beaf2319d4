"""Workers without a launcher: a function on several processes of this machine, for notebooks and scripts."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import spawn as preparing
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from decent_dp._checks import check_integer
from decent_dp.launch.called import dumped
from decent_dp.launch.local import refuse_in_a_worker
from decent_dp.launch.processes import run_workers

__all__ = ["spawn"]

T = TypeVar("T")

# Seconds for the others to end in when one has failed.
_END = 3.0


def spawn(fn: Callable[..., T], nproc: int, *args: Any) -> list[T]:
    """Runs ``fn(*args)`` on new worker processes of this machine, and returns their results.

    Each worker calls :func:`~decent_dp.launch.initialize_dist` first. The workers are new Python processes: nothing is shared
    with this one, and CUDA may have been used here. The function, its arguments and its results are pickled. A function of a
    notebook is sent with its code and with copies of the notebook's variables that it names; this needs the package
    cloudpickle. In a script, call ``spawn`` under ``if __name__ == "__main__":``, because each worker imports the script.

    Args:
        fn: what each worker runs.
        nproc: the number of workers.
        args: for ``fn``.

    Returns:
        The result of each worker, by rank.

    Raises:
        RuntimeError: a worker failed; the message has its rank and its traceback. The other workers have been ended. Or this
            process is a worker itself, or has a process group.
        TypeError: ``fn`` or an argument cannot be pickled.
        ImportError: ``fn`` is defined in a notebook, and cloudpickle is not installed.
    """
    check_integer("nproc", nproc, at_least=1)
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}")
    refuse_in_a_worker(os.environ, "spawn()")
    if dist.is_initialized():
        raise RuntimeError(
            "spawn() was called in a process that has a process group: call it before initialize_dist(), which the workers "
            "call themselves, or after torch.distributed.destroy_process_group()"
        )
    # Of a notebook, or of a prompt: a main module that workers cannot import.
    main = sys.modules["__main__"]
    by_value = getattr(main, "__spec__", None) is None and not os.path.exists(getattr(main, "__file__", None) or "")
    call = dumped((fn, args), by_value)
    parents = preparing.get_preparation_data("worker")
    parents["authkey"] = bytes(parents["authkey"])  # or it could not be pickled
    with tempfile.TemporaryDirectory(prefix="decent-dp-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps((by_value, parents)) + call)
        ending = run_workers(nproc, ["--call", name], end_s=_END, results=folder)
        if (first := ending.first) is not None:
            more = f"\n\n{first.trace}" if first.trace else "; what it wrote may say more"
            raise RuntimeError(f"worker {first.rank} of {nproc} {first}{more}")
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(nproc)]
