"""Real workers for tests: processes from a fork server that has torch loaded, with a process group over loopback.

``spawn`` would take ten seconds per test, and plain ``fork`` hangs once autograd has run in the parent.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

# Warnings of other packages' own code, which no call of ours can avoid: the message's beginning, category and module.
FOREIGN: list[tuple[str, type[Warning], str]] = [
    # torch 2.15's compiler, with Python 3.13.0 only.
    ("Guards may run slower on Python 3.13.0", RuntimeWarning, "torch._dynamo.guards"),
    # SequentialLR of torch 2.6, of its own calls.
    ("The epoch parameter in `scheduler.step()` was not necessary", UserWarning, "torch.optim.lr_scheduler"),
]

_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: a second of import that torch's optimizers ask for when the first one is made. Kernels: half a second, and
# some seconds where they are compiled. (What is not installed is left out.)
PRELOADED = [
    *("torch", "torch._dynamo", "numpy", "pytest", "hypothesis", "tests.workers"),
    *("decent_dp._gossip", "decent_dp.checkpoint", "decent_dp.ddp", "decent_dp.optim"),
    *("decent_dp.compression.int8_numba", "tests.growth_once"),
]
_CONTEXT.set_forkserver_preload(PRELOADED)
_LAUNCHES = count()


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: with a value, with an error, or killed."""

    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    seconds: float = 0.0
    exitcode: int | None = 0


class Workers:
    """Starts workers and collects their results. One store serves every launch of a test session."""

    def __init__(self) -> None:
        import torch.distributed as dist

        # Kept by the parent, as torchrun's agent does: it outlives every worker.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __call__(
        self, n: int, body: Callable[..., Any], *args: Any, timeout: float = 200, group_timeout: float = 60
    ) -> list[Any]:
        """Runs ``body(rank, n, *args)`` on n workers and returns the results. Any failure fails the test with its traceback."""
        outcomes = self.outcomes(n, body, *args, timeout=timeout, group_timeout=group_timeout)
        for rank, outcome in enumerate(outcomes):
            if outcome.error or outcome.exitcode != 0:
                traces = "\n".join(f"--- worker {r}: {o.trace or o.error or o.exitcode}" for r, o in enumerate(outcomes))
                raise AssertionError(f"worker {rank} failed: {outcome.error}: {outcome.message}\n{traces}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, n: int, body: Callable[..., Any], *args: Any, timeout: float = 200, group_timeout: float = 60
    ) -> list[Outcome]:
        """As a call, but failures are returned; a worker that still runs after ``timeout`` seconds is killed and fails."""
        key = f"launch{next(_LAUNCHES)}"
        pipes, processes = [], []
        for rank in range(n):
            ours, theirs = zip(_CONTEXT.Pipe(duplex=False), _CONTEXT.Pipe(duplex=False), strict=True)
            process = _CONTEXT.Process(
                target=_worker,
                args=(theirs[0], self._store.port, key, rank, n, group_timeout, body, args, theirs[1]),
                daemon=True,
            )
            process.start()
            for pipe in theirs:
                pipe.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def over_sockets(rank: int, n: int, body: Callable[..., Any], *args: Any) -> Any:
    """A worker that runs a body of threads, ``body(transport, *args)``."""
    from decent_dp.transport import ProcessGroupTransport

    return body(ProcessGroupTransport(), *args)


def shorten(transport: Any, seconds: float) -> None:
    """From now on waits of ``transport`` fail after ``seconds``; the workers connected with a timeout for busy machines."""
    transport.timeout = transport._exchanges.policy._timeout = seconds
    shared = transport._rendezvous
    transport._rendezvous = replace(shared, run=replace(shared.run, timeout=seconds))
    transport.control._timeout = transport.control._tree._timeout = seconds
    for communicator in transport._nccl._communicators.values():
        communicator._set_default_timeout(timedelta(seconds=seconds))


def say(what: str) -> None:
    """Tells the workers of this launch that are in ``hear(what)``."""
    _store().set(f"said/{what}", "")


def hear(what: str, seconds: float = 150) -> None:
    """Waits until a worker of this launch has said so."""
    _store().wait([f"said/{what}"], timedelta(seconds=seconds))


def has_said(what: str) -> bool:
    """Whether a worker of this launch has said so."""
    return bool(_store().check([f"said/{what}"]))


def _store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def _collect(pipes: list[tuple[Connection, Connection]], processes: list[Any], timeout: float) -> list[Outcome]:
    deadline = time.monotonic() + timeout
    found: dict[int, Outcome] = {}
    waiting = {pipe: rank for rank, (pipe, _) in enumerate(pipes)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                found[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                found[rank] = Outcome(error="Gone", exitcode=processes[rank].exitcode)
    # A worker that has answered must also be able to leave.
    stuck = []
    for rank, process in enumerate(processes):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            stuck.append(rank)
    if stuck:
        traces = [f"--- worker {r}: {o.trace}" for r, o in found.items() if o.error]
        traces += [f"--- worker {r} stands here:\n{_where(processes[r], pipes[r][1])}" for r in stuck]
        raise AssertionError("\n".join([f"workers {stuck} still ran after {timeout} s", *traces]))
    return [found[rank] for rank in range(len(processes))]


def _where(process: Any, pipe: Connection) -> str:
    """What all threads of a worker do."""
    os.kill(process.pid, signal.SIGUSR1)
    found = b""
    while pipe.poll(1.0) and (more := os.read(pipe.fileno(), 2**16)):
        found += more
    return found.decode(errors="replace")


def _worker(
    pipe: Connection,
    port: int,
    key: str,
    rank: int,
    n: int,
    group_timeout: float,
    body: Any,
    args: Any,
    stacks: Connection | None = None,
) -> None:
    import torch
    import torch.distributed as dist

    if stacks is not None:
        faulthandler.register(signal.SIGUSR1, stacks.fileno())
    gc.freeze()  # what is loaded already is not walked again: a collection takes 1 ms instead of 80
    warnings.simplefilter("error")
    for message, category, module in FOREIGN:
        warnings.filterwarnings("ignore", re.escape(message), category, re.escape(module))
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    began = time.monotonic()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        # Processes start seconds apart on a busy machine, and the group's timeout may be shorter than that.
        store.set(f"started/{key}/{rank}", "")
        store.wait([f"started/{key}/{other}" for other in range(n)], timedelta(seconds=120))
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(key, store), rank=rank, world_size=n, timeout=timedelta(seconds=group_timeout)
        )
        dist.barrier()  # A worker that leaves at once must not break the group of one that still connects.
        began = time.monotonic()
        outcome = Outcome(value=body(rank, n, *args), seconds=time.monotonic() - began)
    except BaseException as error:
        outcome = Outcome(
            error=type(error).__name__,
            message=str(error),
            trace=traceback.format_exc(),
            seconds=time.monotonic() - began,
        )
    # Plain pickle: multiprocessing's own would share tensors' memory, which ends with the worker.
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
