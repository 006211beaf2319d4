"""Workers without a launcher: a function on several processes of this machine, for notebooks and scripts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch.distributed as dist

from decent_dp._checks import check_integer, install_hint
from decent_dp.launch.group import initialize_dist
from decent_dp.launch.local import Failure, cause, refuse_in_a_worker, store_on, worker_variables
from decent_dp.launch.script import end_with_parent, last_line

__all__ = ["spawn"]

T = TypeVar("T")

# Seconds between two looks; for the others after a worker has lost a peer, for it says nothing of the peer; to end in.
_POLL, _CAUSE, _END = 0.02, 2.0, 3.0


@dataclass
class _Worker:
    """A process, the pipe on which it is called and answers, and its answer: its pickled result, or a failure."""

    rank: int
    process: BaseProcess
    pipe: Connection
    answer: bytes | Failure | None = None


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
    by_value = _is_interactive()
    call = _dumped((fn, args), by_value)
    store = store_on()
    workers: list[_Worker] = []
    try:
        for rank in range(nproc):
            with _environment(worker_variables(rank, nproc, store.port)):
                workers.append(_start(rank, by_value))
        for worker in workers:
            # One that has ended says so by its exit code.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send_bytes(call)
        _wait_for_all(workers)
    finally:
        _end(workers)
        del store  # a traceback that a notebook keeps would keep its server
    # Each is of bytes, or _wait_for_all would have raised.
    return [pickle.loads(worker.answer) for worker in workers if isinstance(worker.answer, bytes)]


# -- what is sent ----------------------------------------------------------------------------------------------------------


def _is_interactive() -> bool:
    """Whether this process's main module is one that workers cannot import: of a notebook, or of a prompt."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not os.path.exists(getattr(main, "__file__", None) or "")


def _dumped(values: Any, by_value: bool) -> bytes:
    """Pickles, with the code of what is defined in the main module if ``by_value``."""
    dumps: Callable[[Any], bytes] = pickle.dumps
    if by_value:
        try:
            import cloudpickle

            dumps = cloudpickle.dumps
        except ImportError:
            fn = values[0]
            if getattr(fn, "__module__", None) == "__main__":
                raise ImportError(
                    f"workers cannot import {getattr(fn, '__name__', fn)!r}, which is defined in a notebook: put it in a file "
                    f"and import it, or install cloudpickle; {install_hint('notebook')}",
                    name="cloudpickle",
                ) from None
    try:
        return dumps(values)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"spawn() pickles the function, its arguments and its results, and one of them cannot be: {error}. Define the "
            "function at the top level of a file, and make in it what cannot be pickled"
        ) from error


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables for the processes that start inside: some libraries read them while they are loaded."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- processes -------------------------------------------------------------------------------------------------------------


def _start(rank: int, by_value: bool) -> _Worker:
    # A fork would hang in the threads of OpenMP and fail in those of autograd and CUDA, which are not copied.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with theirs:
        # Without the call: start() would wait for ever for a process that ends before it has read more than a pipe holds.
        process = context.Process(target=_work, args=(theirs, rank, by_value), name=f"worker {rank}")
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
    return _Worker(rank, process, ours)


def _work(pipe: Connection, rank: int, by_value: bool) -> None:
    """What a worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the caller, which ends the workers
    end_with_parent()
    call = pipe.recv_bytes()
    try:
        initialize_dist()
        fn, args = pickle.loads(call)
        answer: bytes | Failure = _dumped(fn(*args), by_value)
    except BaseException as error:
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function
        trace = "".join(traceback.format_exception(type(error), error, inner)).rstrip()
        # While the frames still live: what ends with them, the others will notice later.
        pipe.send_bytes(pickle.dumps(Failure(rank, None, last_line(error), time.time(), trace)))
        sys.exit(1)
    pipe.send_bytes(pickle.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_all(workers: Sequence[_Worker]) -> None:
    """Waits until all workers have answered and ended; raises when one has failed."""
    running, failures, deadline = list(workers), [], float("inf")
    while running and time.monotonic() < deadline:
        for worker in list(running):
            code = worker.process.exitcode  # before the answer, which comes first
            if worker.answer is None and worker.pipe.poll():
                with contextlib.suppress(EOFError, OSError):
                    worker.answer = pickle.loads(worker.pipe.recv_bytes())
            if isinstance(worker.answer, Failure):
                failures.append(worker.answer)
            elif code is not None and (code != 0 or worker.answer is None):
                failures.append(Failure(worker.rank, code, "", time.time()))
            elif code is None:
                continue
            running.remove(worker)
        if failures:
            first = cause(failures)
            # A worker that has lost a peer is not the cause; the cause will be heard of in a moment.
            deadline = min(deadline, time.monotonic() + (_CAUSE if first.follows_another else 0.0))
        if running and time.monotonic() < deadline:
            time.sleep(_POLL)
    if failures:
        first = cause(failures)
        more = f"\n\n{first.trace}" if first.trace else "; what it wrote may say more"
        raise RuntimeError(f"worker {first.rank} of {len(workers)} {first}{more}")


def _end(workers: Sequence[_Worker]) -> None:
    """Ends the workers that still run, and waits for all."""
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + _END
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        worker.pipe.close()
