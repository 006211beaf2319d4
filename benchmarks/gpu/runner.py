"""Runs cases in separate processes: a case that fails or hangs costs its processes, and the other cases run in new ones."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from benchmarks.gpu.case import CASES, PATIENCE, Case, Meeting, SkipError, Worker
from decent_dp.errors import PeerError
from decent_dp.transport import run_replicas

__all__ = ["CPU", "Report", "Row", "describe_device", "run"]

Result = Literal["passed", "failed", "skipped", "optional", "timeout", "not run"]

# Seconds for a worker to start, and to report its error after another worker has.
_START, _GRACE = 90.0, 5.0

# A forked process cannot use CUDA if its parent has: importing these does not.
_CONTEXT = multiprocessing.get_context("forkserver")
_LAUNCHES = count()

# The description of the device without a GPU.
CPU: dict[str, Any] = {"device": "cpu", "name": "", "cuda": torch.version.cuda, "capability": None}


@dataclass(frozen=True)
class Report:
    """The result of a case on one process: ``error`` is one line about the exception, '' without one.

    Attributes:
        follows: the error is the consequence of another worker's.
        figures: measurements.
    """

    result: Result
    detail: str = ""
    trace: str = ""
    follows: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    case: Case
    result: Result
    seconds: float
    detail: str = ""
    trace: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.result in ("passed", "skipped", "optional")


@dataclass(frozen=True)
class Seat:
    """The arguments of a process."""

    rank: int
    n: int
    device: str
    modules: Sequence[str]
    port: int
    launch: str


# -- in a worker -------------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, seat: Seat) -> None:
    """Runs the cases whose keys arrive, until None arrives."""
    torch.set_num_threads(1)
    # Warnings that each case would repeat: several workers are on one GPU. Cases that need them listen (``warnings_of``).
    logging.getLogger("decent_dp").setLevel(logging.ERROR)
    torch._logging.set_logs(all=logging.ERROR)  # type: ignore[attr-defined]
    for module in seat.modules:
        importlib.import_module(module)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    device = torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        # Results are compared with another order of the same sums, so no sum may be of fewer bits.
        torch.backends.cudnn.allow_tf32 = False
    if seat.n > 1:
        store: Store = dist.TCPStore("127.0.0.1", seat.port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        store = PrefixStore(seat.launch, store)
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.n, timeout=timedelta(seconds=PATIENCE))
        dist.barrier()
    pipe.send(Report("passed"))
    while (order := pipe.recv()) is not None:
        key, folder = order
        pipe.send(_run_case(CASES[key], seat, device, Path(folder)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _run_case(case: Case, seat: Seat, device: torch.device, folder: Path) -> Report:
    faulthandler.dump_traceback_later(case.timeout - 1, exit=False)
    try:
        torch.manual_seed(1000 + seat.rank)
        if case.how == "processes":
            worker = Worker(seat.rank, seat.n, case.driver, device, folder)
            detail, figures = case.body(worker), worker.figures
        else:
            detail, figures = _run_threads(case, device, folder)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an error of a kernel belongs to the case that has queued it
        return Report("passed", detail or "", figures=figures)
    except SkipError as reason:
        return Report("skipped", str(reason))
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        trace = traceback.format_exc()
        return Report("failed", f"{type(error).__name__}: {lines[0]}", trace, isinstance(error, PeerError))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_threads(case: Case, device: torch.device, folder: Path) -> tuple[str | None, dict[str, Any]]:
    meeting = Meeting(case.n)
    errors: list[BaseException] = []

    def work(transport: Any) -> tuple[str | None, dict[str, Any]]:
        rank: int = transport.rank
        try:
            worker = Worker(rank, case.n, case.driver, device, folder, meeting)
            return case.body(worker), worker.figures
        except BaseException as error:
            errors.append(error)
            meeting.abort(rank)
            raise

    try:
        return run_replicas(case.n, work, timeout=PATIENCE)[0]
    except BaseException:
        raise errors[0] from None


def _describe(pipe: Connection) -> None:
    found = dict(CPU)
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(0)
        found.update(device="cuda:0", name=torch.cuda.get_device_name(0), capability=f"{major}.{minor}")
    pipe.send(found)


# -- in the parent -----------------------------------------------------------------------------------------------------


def describe_device() -> dict[str, Any]:
    """``device`` ('cuda:0' or 'cpu'), its ``name``, ``cuda`` (torch's version of it) and ``capability``.

    Asked for in a process of its own: the one that workers are forked from has to leave CUDA alone.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_describe, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START):
            raise RuntimeError(f"CUDA did not answer within {_START:g} s: is the driver well (nvidia-smi)?")
        found: dict[str, Any] = ours.recv()
    except EOFError:
        process.join(5)
        raise RuntimeError(f"looking for a GPU ended the process that did (exit code {process.exitcode})") from None
    finally:
        process.kill()
        process.join()
    return found


class _Launch:
    """Processes that run cases together."""

    def __init__(self, n: int, device: str, modules: Sequence[str], port: int) -> None:
        name = f"launch{next(_LAUNCHES)}"
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(n):
            ours, theirs = _CONTEXT.Pipe()
            seat = Seat(rank, n, device, modules, port, name)
            process = _CONTEXT.Process(target=_serve, args=(theirs, seat), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.started = self._collect(_START)

    def run(self, case: Case) -> Report:
        with tempfile.TemporaryDirectory(prefix="decent_dp-gpu-") as folder:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # a dead worker is found by its missing report
                    pipe.send((case.key, folder))
            return self._collect(case.timeout, case.dies)

    def end(self, *, now: bool) -> None:
        """Ends the processes, at once or when they are done."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if not now:
                with contextlib.suppress(OSError):
                    pipe.send(None)
                process.join(20)
            process.kill()
            process.join()
            pipe.close()

    def _collect(self, timeout: float, dies: int | None = None) -> Report:
        """Merges the reports of all processes; that of rank ``dies`` is its end."""
        deadline = time.monotonic() + timeout
        found: dict[int, Report] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    found[rank] = ready.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    result: Result = "passed" if rank == dies else "failed"
                    found[rank] = Report(result, f"the process ended with exit code {code}")
                if found[rank].result == "failed":
                    deadline = min(deadline, time.monotonic() + _GRACE)
        failed = {rank: report for rank, report in found.items() if report.result == "failed"}
        if failed:
            # The cause before its consequences.
            rank = min(failed, key=lambda rank: (failed[rank].follows, rank))
            return replace(failed[rank], detail=f"worker {rank}: {failed[rank].detail}")
        if waiting:
            return Report("timeout", f"workers {sorted(waiting.values())} had not ended after {timeout:g} s")
        return found[0]


def run(
    cases: Sequence[Case], device: str, modules: Sequence[str], limit: float, timeout: float | None = None, lanes: int = 1
) -> Iterator[Row]:
    """Runs ``cases``, which ``modules`` register, in launches of as many processes as each needs; yields rows as they end.

    Args:
        limit: seconds for all; later cases do not run.
        timeout: of each case; None for its own.
        lanes: how many cases run at a time; ``quiet`` ones run after all others, one after another.
    """
    ends = time.monotonic() + limit
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    by_size = sorted((case for case in cases if not case.quiet), key=lambda case: case.processes)
    rows: queue.Queue[Row | None] = queue.Queue()

    def fill(lane: int) -> None:
        try:
            for row in _run_in_turn(by_size[lane::lanes], device, modules, store.port, ends, timeout):
                rows.put(row)
        finally:
            rows.put(None)

    for lane in range(lanes):
        threading.Thread(target=fill, args=(lane,), name=f"lane {lane}", daemon=True).start()
    for _ in range(lanes):
        while (row := rows.get()) is not None:
            yield row
    yield from _run_in_turn([case for case in cases if case.quiet], device, modules, store.port, ends, timeout)


def _run_in_turn(
    cases: Sequence[Case], device: str, modules: Sequence[str], port: int, ends: float, timeout: float | None
) -> Iterator[Row]:
    """Runs ``cases`` one after another until ``ends``, in the processes of the case before where they are as many."""
    for processes in sorted({case.processes for case in cases}):
        launch: _Launch | None = None
        for case in [case for case in cases if case.processes == processes]:
            left = ends - time.monotonic()
            if left <= 0:
                yield Row(case, "not run", 0.0, "the time for all cases was over")
                continue
            began = time.monotonic()
            bounded = replace(case, timeout=min(timeout or case.timeout, max(left, 5.0)))
            if launch is None:
                launch = _Launch(processes, device, modules, port)
                began = time.monotonic()
            report = launch.started
            if report.result == "passed":
                report = launch.run(bounded)
            yield _row(case, report, time.monotonic() - began)
            if report.result not in ("passed", "skipped") or case.alone:
                launch.end(now=True)
                launch = None
        if launch is not None:
            launch.end(now=False)


def _row(case: Case, report: Report, seconds: float) -> Row:
    result = report.result
    if result in ("failed", "timeout") and case.optional():
        result = "optional"
    return Row(case, result, seconds, report.detail, report.trace, report.figures)
