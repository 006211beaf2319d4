"""``decent-dp launch``: workers on this machine, with the environment that they get said aloud."""

from __future__ import annotations

import importlib.machinery
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from decent_dp.tools.cli.inputs import BadInputError

__all__ = ["EXAMPLES", "launch"]

EXAMPLES = """[bold]Examples[/bold]

decent-dp launch --nproc 4 train.py --epochs 5

decent-dp launch --nproc 4 --max-restarts 3 -m project.train

decent-dp launch --nproc 4 --keep-going --max-restarts 3 train.py

OMP_NUM_THREADS=2 decent-dp launch train.py

Exit codes: 0 fine, 1 a worker failed, 2 bad input, 128 and its number after a signal."""

# More workers than these have to be asked for: on a large machine they would fill the memory.
_MOST_CHOSEN = 8

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_NOT_BEGUN = (
    ". All have ended: --keep-going needs a run that has begun, with faults= and with a topology that is given by a single name"
)


def launch(
    script: Annotated[str, typer.Argument(help="A Python file; with -m the name of a module.")],
    args: Annotated[list[str] | None, typer.Argument(help="What follows is for the script.")] = None,
    nproc: Annotated[
        str, typer.Option("--nproc", "-n", help="Workers, or 'auto': one per GPU, else one per core, at most 8.", metavar="N")
    ] = "auto",
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all workers are started again when one has failed.", metavar="N")
    ] = 0,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going", help="When a worker has failed the others go on, and --max-restarts starts it alone again."
        ),
    ] = False,
) -> int:
    """Start a script on several workers of this machine, as torchrun does; nothing leaves the machine.

    When one has failed all end, but with --keep-going.

    Ctrl-C and SIGTERM are forwarded to all workers, which are killed if they have not ended after 30 seconds.
    """
    _check_script(script, module)
    if nproc != "auto" and not (nproc.isdecimal() and int(nproc) > 0):
        raise BadInputError(f"--nproc must be a whole number, at least 1, or auto, got '{nproc}'")

    from decent_dp.launch.local import refuse_in_a_worker, worker_environment

    try:
        refuse_in_a_worker(os.environ, "decent-dp launch")
    except RuntimeError as error:
        raise BadInputError(str(error)) from error
    workers, chosen = _count(nproc)
    environ = worker_environment(workers, os.environ)
    _announce(workers, chosen, environ)
    os.environ.update(environ)
    command = [*(["-m"] if module else []), script, *(args or [])]
    attempts = 1 if keep_going else max_restarts + 1
    for attempt in range(attempts):
        failure = _run(workers, max_restarts, command, attempt, keep_going=keep_going)
        if isinstance(failure, int):
            return failure
        if attempt + 1 < attempts:
            _say(f"{failure}; all start again (restart {attempt + 1} of {max_restarts})")
    raise RuntimeError(failure)


def _check_script(script: str, module: bool) -> None:
    if module:
        # Only the first part: to look for more would import it.
        name = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(name, [os.getcwd(), *sys.path]) is None:
            raise BadInputError(f"there is no module '{name}' here: -m takes the name of a module, as python -m does")
    elif not Path(script).is_file():
        hint = ": did you forget -m?" if "/" not in script and not script.endswith(".py") else ""
        raise BadInputError(f"there is no file '{script}'{hint or ': write the path of a Python file'}")


def _count(nproc: str) -> tuple[int, str]:
    """The number of workers, and where it comes from."""
    from decent_dp.launch.group import usable_gpus
    from decent_dp.launch.local import usable_cores

    if nproc != "auto":
        return int(nproc), "--nproc"
    gpus, cores = usable_gpus(), usable_cores()
    if gpus:
        return gpus, "one per visible GPU; --nproc changes it"
    if cores > _MOST_CHOSEN:
        return _MOST_CHOSEN, f"at most {_MOST_CHOSEN} on {cores} cores; --nproc changes it"
    return cores, "one per core; --nproc changes it"


def _announce(workers: int, chosen: str, environ: Mapping[str, str]) -> None:
    """Says on stderr, since stdout is the script's, what the workers get."""
    from decent_dp.launch.environment import Launch, own_gpu
    from decent_dp.launch.group import usable_gpus
    from decent_dp.launch.local import usable_cores

    gpus = usable_gpus()
    backend = f"gloo: {workers} workers for {gpus} visible GPU{'s' * (gpus > 1)}" if gpus else "gloo: no GPU is visible"
    if own_gpu(Launch("torchrun", 0, workers, 0, workers, "127.0.0.1", 0), gpus, os.environ) is not None:
        backend = f"nccl: each worker has its own GPU ({gpus} visible)"
    why = "OMP_NUM_THREADS is set" if os.environ.get("OMP_NUM_THREADS") else f"{usable_cores()} cores"
    interface = environ.get("GLOO_SOCKET_IFNAME")
    network = f"loopback only{f' ({interface})' if interface else ''}: nothing leaves this machine"
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        network = f"interface {interface} (GLOO_SOCKET_IFNAME is set)"
    sys.stderr.write(
        f"workers  {workers} ({chosen})\n"
        f"backend  {backend}\n"
        f"threads  {environ['OMP_NUM_THREADS']} per worker ({why})\n"
        f"network  {network}\n"
        "output   of all workers, here\n"
    )


def _run(workers: int, max_restarts: int, command: Sequence[str], attempt: int, *, keep_going: bool) -> int | str:
    """Runs the workers; returns the exit code, or what is said about the worker that failed first."""
    from decent_dp.errors import PeerLostError
    from decent_dp.launch.processes import run_workers
    from decent_dp.membership.runs import newest_run

    def look(store: str) -> dict[int, int] | None:
        if not keep_going:
            return None
        try:
            run = newest_run(store)
        except PeerLostError:
            return None
        return None if run is None else {rank: run.epoch.incarnations.get(rank, 0) for rank in run.epoch.members}

    outcome = run_workers(workers, command, look=look, say=_say, max_restarts=max_restarts, attempt=attempt, signals=_SIGNALS)
    if outcome.signal:
        _say(f"stopped by {signal.Signals(outcome.signal).name}; the workers have ended")
        return 128 + outcome.signal
    if (first := outcome.first) is not None:
        said = f"worker {first.rank} of {workers} {first}{'; its traceback is above' if first.message else ''}"
        return said if outcome.begun or not keep_going else said + _NOT_BEGUN
    if len(outcome.finished) < workers:
        _say(f"{len(outcome.finished)} of {workers} workers have finished")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"decent-dp: {line}\n")
