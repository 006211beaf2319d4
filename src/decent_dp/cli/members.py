"""``decent-dp status`` and ``decent-dp kill``: the members of a run that tolerates faults, and a drill."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decent_dp.cli.inputs import BadInputError
from decent_dp.cli.screen import say, table

if TYPE_CHECKING:
    from decent_dp.membership.joining import Run

__all__ = ["KILL_EXAMPLES", "STATUS_EXAMPLES", "kill", "status"]

# Seconds for an answer of a worker.
_ANSWER = 1.0

STATUS_EXAMPLES = """[bold]Examples[/bold]

decent-dp status 10.0.0.1:29500

The address is that of the run's store: MASTER_ADDR:MASTER_PORT, which is used if none is given.
Exit codes: 0 fine, 1 no store or no run that tolerates faults, 2 bad input."""
KILL_EXAMPLES = """[bold]Examples[/bold]

decent-dp kill 3 10.0.0.1:29500

Exit codes: 0 it was killed, 1 it does not answer or runs on another machine, 2 bad input."""

_Address = Annotated[str | None, typer.Argument(metavar="[HOST:PORT]", help="The run's store.")]


def status(address: _Address = None) -> int:
    """Show the members of a run with faults=Tolerate(...): seat, machine, process, and whether it answers."""
    run = _look(address)
    say(f"epoch {run.epoch.number}, {len(run.members)} of {run.record['world_size']} workers")
    rows = []
    for rank in range(run.record["world_size"]):
        found = run.address(rank)
        seat = str(run.members.index(rank)) if rank in run.members else "-"
        where = ["?", "?"] if found is None else [str(found["machine"]), str(found["pid"])]
        rows.append([str(rank), seat, *where, "yes" if found is not None and _answers(found) else "no"])
    say(table(("worker", "seat", "machine", "process", "answers"), rows, left=(2,)))
    return 0


def kill(worker: Annotated[int, typer.Argument(help="Its rank.", metavar="WORKER")], address: _Address = None) -> int:
    """Kill a worker of this machine (SIGKILL), to see what its death costs. The others continue without it."""
    from decent_dp.transport.communicators import network_stack

    run = _look(address)
    if worker not in run.members:
        raise BadInputError(f"worker {worker} is not a member: members are {', '.join(map(str, run.members))}")
    found = run.address(worker)
    if found is None or not _answers(found):
        raise RuntimeError(f"worker {worker} does not answer from here")
    if found["node"] != network_stack():
        raise RuntimeError(f"worker {worker} is process {found['pid']} on {found['machine']}: run the command there")
    os.kill(int(found["pid"]), signal.SIGKILL)
    say(f"worker {worker} was killed (process {found['pid']})")
    return 0


def _look(address: str | None) -> Run:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch comes: it would log a stack if a store is gone
    from decent_dp.membership.joining import look_at_run

    try:
        return look_at_run(address)
    except ValueError as error:
        raise BadInputError(str(error)) from error


def _answers(found: dict[str, Any]) -> bool:
    """Whether a process listens at a worker's address. A frozen one does, too."""
    from decent_dp.transport.communicators import network_stack
    from decent_dp.transport.tcp.addresses import dial_at

    if "host" not in found and found["node"] != network_stack():
        return False  # it listens within its machine only
    try:
        dial_at(found, network_stack() or "", _ANSWER).close()
    except OSError:
        return False
    return True
