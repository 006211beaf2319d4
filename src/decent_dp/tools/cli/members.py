"""``decent-dp roster``, ``status`` and ``kill``: the store of a run, its members, and a drill."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from decent_dp.tools.cli.inputs import BadInputError
from decent_dp.tools.cli.screen import say, table

if TYPE_CHECKING:
    from decent_dp.membership.runs import Run

__all__ = ["KILL_EXAMPLES", "ROSTER_EXAMPLES", "STATUS_EXAMPLES", "kill", "roster", "status"]

ROSTER_EXAMPLES = """[bold]Examples[/bold]

decent-dp roster --bind 10.0.0.1:29500

MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 python train.py

Exit codes: 0 after Ctrl-C or SIGTERM, 1 the address cannot be used, 2 bad input."""


STATUS_EXAMPLES = """[bold]Examples[/bold]

decent-dp status 10.0.0.1:29500

decent-dp status 10.0.0.1:29500 --run exp7

The address is that of the run's store: MASTER_ADDR:MASTER_PORT, which is used if none is given.
Exit codes: 0 fine, 1 no store or no run that tolerates faults, 2 bad input, or several runs and no --run."""
KILL_EXAMPLES = """[bold]Examples[/bold]

decent-dp kill 3 10.0.0.1:29500

Exit codes: 0 it was killed, 1 it does not answer or runs on another machine, 2 bad input, or several runs and no --run."""

_Address = Annotated[str | None, typer.Argument(metavar="[HOST:PORT]", help="The run's store.")]
_Name = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="Which run, if several use the store: Tolerate(run=...).")
]


def roster(
    bind: Annotated[
        str, typer.Option(help="Where workers reach it. Everybody who does can read and change it.", metavar="HOST:PORT")
    ] = "127.0.0.1:29500",
) -> int:
    """Serve the store of a run, so that it outlives every worker.

    Without it worker 0 keeps the store, or torchrun's agent on the first node does. A run that tolerates faults trains on
    without a store, but its members cannot change.
    """
    host, _, number = bind.rpartition(":")
    if not host or not number.isdecimal() or int(number) > 65535:
        raise BadInputError(f"--bind must be HOST:PORT, such as 127.0.0.1:29500, got '{bind}'")

    from decent_dp.launch.local import store_on

    host = host.strip("[]")
    ended = threading.Event()
    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, lambda *_: ended.set())
    try:
        store = store_on(host, int(number))
    except OSError as error:
        raise RuntimeError(f"the store cannot listen on {bind}: {error.strerror}. Give an address of this machine.") from error
    say(f"the store is at {host}:{store.port}. In the environment of each worker:")
    say(f"MASTER_ADDR={host} MASTER_PORT={store.port} TORCHELASTIC_USE_AGENT_STORE=True")
    ended.wait()
    return 0


def status(address: _Address = None, name: _Name = None) -> int:
    """Show the members of a run with faults=Tolerate(...): seat, machine, process, and whether it answers."""
    from decent_dp.membership.runs import reach

    run = _look(address, name)
    replicas, rows = run.replicas, []
    seats = replicas.whole(run.epoch.members)
    for rank, found in run.addresses(range(run.record.places)).items():
        if found is None and rank >= run.record.world_size:
            continue  # nobody has had this place yet
        seat = str(seats.index(replicas.place_of(rank)[0])) if rank in run.epoch.members else "-"
        where = [str(found["machine"]), str(found["pid"])] if found else ["?", "?"]
        rows.append([str(rank), seat, *where, reach(found).value])
    members = f"{len(run.epoch.members)} of at most {run.record.places} workers"
    say(f"run {run.name}: epoch {run.epoch.number}, {members}")
    say(table(("worker", "seat", "machine", "process", "answers"), rows, left=(2,)))
    return 0


def kill(
    worker: Annotated[int, typer.Argument(help="Its rank.", metavar="WORKER")], address: _Address = None, name: _Name = None
) -> int:
    """Kill a worker of this machine (SIGKILL), to see what its death costs. The others continue without it."""
    from decent_dp.membership.runs import Reach, reach
    from decent_dp.transport.rendezvous import network_stack

    run = _look(address, name)
    if worker not in run.epoch.members:
        raise BadInputError(f"worker {worker} is not a member: members are {', '.join(map(str, run.epoch.members))}")
    found = run.addresses([worker])[worker]
    if not found or reach(found) not in (Reach.ANSWERS, Reach.SILENT):
        raise RuntimeError(f"worker {worker} does not answer from here")
    if found["node"] != network_stack():
        raise RuntimeError(f"worker {worker} is process {found['pid']} on {found['machine']}: run the command there")
    os.kill(int(found["pid"]), signal.SIGKILL)
    say(f"worker {worker} of run {run.name} was killed (process {found['pid']})")
    return 0


def _look(address: str | None, name: str | None) -> Run:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch comes: it would log a stack if a store is gone
    from decent_dp.membership.runs import look_at_run

    try:
        return look_at_run(address, name)
    except ValueError as error:
        raise BadInputError(str(error)) from error
