"""Measures training steps over slow links: ``python -m benchmarks.net``, or ``make bench-net``. Needs Linux, root, iproute2.

    python -m benchmarks.net --setup 8x1-60                               # the usual contenders of a set-up
    python -m benchmarks.net --setup 4x2-100 --contender alone 'ours:*'   # some

Nodes are network namespaces (``lab.py``), workers run a training loop in them (``worker.py``). Prints a table, and writes
it as SETUP.json, SETUP.md and SETUP.png. Exit code 0; 1 if a contender failed, 2 if something is missing, 128 + n by signal n.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

try:
    from rich.console import Console

    from benchmarks.report import Run, make_console, make_lines, make_run, print_table, write_chart, write_json
except ImportError:
    needs = "The network lab needs rich and matplotlib; in the clone of the repository: pip install -e '.[demo]'"
    raise SystemExit(needs) from None

from benchmarks.lab import Lab, LabError, launcher_variables, missing, shape
from benchmarks.limits import step_limit
from benchmarks.setups import OURS, PARAMETERS, PUBLISHED, WIRE_BYTES, Contender, Setup, choose_contenders, of_replicas
from decent_dp.topo import Topology, make_topology

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED_PATH = ROOT / "benchmarks" / f".{PUBLISHED}"
DEFAULT_SETUPS = ["8x1-60", "8x1-200", "4x2-100", "real-2", "real-8x1-200"]
START_S, STEP_S = 120.0, 15.0  # how long the start of the workers and a step may take, beside four copies over a link


class ContenderError(RuntimeError):
    """A contender failed; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """How a set-up is measured.

    Attributes:
        lib: the folder with this project's decent_dp.
        congestion_control: of TCP.
    """

    name: str
    setup: Setup
    contenders: Sequence[Contender]
    warmup: int
    steps: int
    repeat: int
    lib: Path
    congestion_control: str = "reno"


def install_published() -> None:
    """Puts the published package into a folder of its own, as it has the import name of this one.

    Raises:
        ContenderError: pip could not get it.
    """
    if (PUBLISHED_PATH / "decent_dp").exists():
        return
    name, _, number = PUBLISHED.rpartition("-")
    command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(PUBLISHED_PATH)]
    # torch is installed already; its other dependency, the logger, is added.
    done = subprocess.run(
        [sys.executable, *command, f"{name}=={number}", "loguru==0.7.3"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ContenderError(f"{name}=={number} could not be installed: {_reason(done.stderr)}")


# -- a run ------------------------------------------------------------------------------------------------------------


def _reason(log: str) -> str:
    """The error in a worker's log, in one line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).rstrip() for line in log.splitlines()]
    # An error begins at the margin; messages of the process group at its shutdown may follow it.
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt): ", line)]
    said = [line.strip() for line in lines if line.strip()]
    return (errors or said or ["it wrote nothing"])[-1]


def run_contender(lab: Lab, plan: Plan, contender: Contender) -> Run:
    """Starts the workers of one contender, waits for them and puts their results together.

    Raises:
        ContenderError: a worker failed, or the time is up.
    """
    ours = dict.fromkeys(OURS, plan.lib)
    library = {**ours, PUBLISHED: PUBLISHED_PATH}.get(contender.kind)
    if contender.kind == PUBLISHED:
        install_published()
    copy_s = 0.0 if plan.setup.rate is None else PARAMETERS * WIRE_BYTES["float32"] * 8 / (plan.setup.rate * 1e6)
    seconds = START_S + (STEP_S + 4 * copy_s) * (plan.warmup + plan.steps)
    options = {"setup": plan.name, "contender": contender.name, "warmup": plan.warmup, "steps": plan.steps, "timeout": seconds}
    with tempfile.TemporaryDirectory(prefix="ddplab-") as folder:
        out = Path(folder)
        command = [sys.executable, "-m", "benchmarks.worker", "--out", folder]
        command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
        command += ["--library", str(library)] if library else []
        size = plan.setup.world_size
        for rank in range(size):
            with (out / f"{rank}.log").open("wb") as log:
                env = _environ(lab, plan.setup, rank, library)
                lab.start(rank // plan.setup.local, command, env, log, cwd=ROOT)
        try:
            failed = lab.wait(seconds + 30)  # a worker that has waited for so long names its peer
        except TimeoutError as error:
            raise ContenderError(str(error)) from None
        finally:
            lab.stop()
        if failed is not None:
            rank, code = failed
            said = _reason((out / f"{rank}.log").read_text(errors="replace"))
            killed = f"killed by {signal.Signals(-code).name}; " if code < 0 else ""
            raise ContenderError(f"worker {rank}: {killed}{said}")
        return make_run([json.loads((out / f"{rank}.json").read_text()) for rank in range(size)], plan.setup.local)


def _environ(lab: Lab, setup: Setup, rank: int, library: Path | None) -> dict[str, str]:
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # as after a plain install, wherever this runs
    env.pop("PYTHONPATH", None)
    return env | launcher_variables(rank, setup.world_size, lab.address(0), local=setup.local, library=library)


# -- a set-up ---------------------------------------------------------------------------------------------------------


def topology_rounds(setup: Setup, name: str | None) -> list[list[list[int]]]:
    """The groups of each round of a period; of a topology without a period, of its first 64 rounds."""
    made = _topology(setup, name)
    return [[list(edge.ranks) for edge in made.round(t)] for t in range(made.period or 64)]


def _topology(setup: Setup, name: str | None) -> Topology:
    assert name is not None
    return make_topology(name, local_world_size=setup.local, world_size=setup.world_size, rank=0)


def whole_periods(setup: Setup, contenders: Sequence[Contender], steps: int) -> int:
    """``steps``, rounded up to whole periods of all contenders that have one, so that no round counts twice as often."""
    periods = [_topology(of_replicas(setup, c), c.topology).period or 1 for c in contenders if c.topology]
    common = math.lcm(*periods)
    return -(-steps // common) * common


class Measured(NamedTuple):
    """All runs of a set-up, why contenders failed, and how TCP shared the links."""

    runs: dict[Contender, list[Run]]
    errors: dict[Contender, str]
    congestion_control: str


def measure(plan: Plan, console: Console) -> Measured:
    """Runs all contenders of a set-up, in rotating order. One that failed is not started again."""
    runs: dict[Contender, list[Run]] = {contender: [] for contender in plan.contenders}
    errors: dict[Contender, str] = {}
    with Lab(plan.setup.nodes, plan.setup.rate, plan.congestion_control) as lab:
        for turn in range(plan.repeat):
            shift = turn % len(plan.contenders)
            for contender in [*plan.contenders[shift:], *plan.contenders[:shift]]:
                if contender in errors:
                    continue
                try:
                    run = run_contender(lab, plan, contender)
                except ContenderError as error:
                    errors[contender] = str(error)
                    runs[contender].clear()
                    console.print(f"  {contender.name}: {error}", soft_wrap=True)
                    continue
                runs[contender].append(run)
                console.print(f"  {contender.name}: {run['mean']:.0f} ms per step")
        return Measured(runs, errors, lab.congestion_control())


def find_limits(plan: Plan, compute_ms: float | None) -> dict[Contender, float]:
    """The limit of every contender with a topology; none while a step's compute is not known."""
    if compute_ms is None:
        return {}
    return {
        contender: step_limit(
            topology_rounds(of_replicas(plan.setup, contender), contender.topology),
            of_replicas(plan.setup, contender).local,
            PARAMETERS * WIRE_BYTES[contender.wire],
            plan.setup.rate,
            compute_ms,
        )
        for contender in plan.contenders
        if contender.topology
    }


def run_setup(plan: Plan, out: Path, console: Console) -> bool:
    """Measures a set-up, prints its table and writes its files; False if a contender failed."""
    console.print(f"{plan.name}: {plan.setup.words()}; {plan.steps} steps after {plan.warmup}")
    load = os.getloadavg()[0]
    runs, errors, congestion_control = measure(plan, console)
    alone = make_lines({c: own for c, own in runs.items() if c.kind == "alone"}, {}, {})
    compute = alone[0]["mean_ms"] if alone and alone[0]["mean_ms"] else plan.setup.emulated_ms
    lines = make_lines(runs, find_limits(plan, compute), errors)
    print_table(console, f"{plan.name}: {plan.setup.words()}", lines)
    settings: dict[str, Any] = {
        "setup": plan.name,
        "words": plan.setup.words(),
        "parameters": PARAMETERS,
        "rows": plan.setup.rows,
        "steps": plan.steps,
        "warmup": plan.warmup,
        "repeat": plan.repeat,
        "link": None if plan.setup.rate is None else " ".join(["tbf", *shape(plan.setup.rate)]),
        "congestion_control": congestion_control,
        "compute_ms": None if compute is None else round(compute, 1),
        "load_before": round(load, 2),  # of the last minute: a busy machine gives other numbers
    }
    write_json(out / f"{plan.name}.json", lines, settings)
    write_chart(out / f"{plan.name}.png", f"{plan.name}: {plan.setup.words()}", lines)
    return not errors


# -- the command line -------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.net", description="Measures training steps over slow links.")
    parser.add_argument("--setup", nargs="+", default=DEFAULT_SETUPS, metavar="NAME", help="[real-]NODESxWORKERS[-MBIT]")
    parser.add_argument("--contender", nargs="+", default=[], metavar="NAME", help="a name or a pattern, such as 'ours:*:int8'")
    parser.add_argument("--steps", type=int, default=30, help="at least so many timed steps; rounded up to whole periods")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (at least 2)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each contender, in rotating order; medians are reported")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--lib", type=Path, default=ROOT / "src", help="the folder with this project's decent_dp")
    parser.add_argument("--congestion-control", metavar="NAME", default="reno", help="of TCP, such as bbr")
    args = parser.parse_args(argv)
    if min(args.steps, args.repeat) < 1 or args.warmup < 2:
        parser.error("--steps and --repeat must be at least 1, and --warmup at least 2")
    return args


def _plans(args: argparse.Namespace) -> list[Plan]:
    plans = []
    for name in args.setup:
        setup = Setup.parse(name)
        contenders = choose_contenders(setup, args.contender)
        steps = whole_periods(setup, contenders, args.steps)
        lib = args.lib.resolve()
        plans.append(Plan(name, setup, contenders, args.warmup, steps, args.repeat, lib, args.congestion_control))
    return plans


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)  # through all `finally`s


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    args = _parse(argv)
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _exit)
    sys.path.insert(0, str(args.lib.resolve()))
    try:
        plans = _plans(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    console = make_console()
    try:
        # A list: a contender that failed does not keep the next set-up from being measured.
        good = [run_setup(plan, args.out, console) for plan in plans]
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
