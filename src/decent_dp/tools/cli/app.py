"""The commands, their errors and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import rich  # noqa: F401  typer can do without it, the tables cannot
import typer

from decent_dp.tools.cli import doctor, launch, members, plan, simulate, topology, watch
from decent_dp.tools.cli.inputs import BadInputError
from decent_dp.tools.cli.screen import one_line, say

__all__ = ["app", "run"]

# typer has its own copy of click, or uses the package: its own error leads to the right base class.
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


app = typer.Typer(
    name="decent-dp",
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.add_typer(topology.app, name="topology")
app.command("simulate", epilog=simulate.EXAMPLES)(simulate.simulate)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
# The first argument that is no option ends those of the command: the rest is the script's.
app.command("launch", epilog=launch.EXAMPLES, context_settings={"allow_interspersed_args": False})(launch.launch)
app.command("roster", epilog=members.ROSTER_EXAMPLES)(members.roster)
app.command("status", epilog=members.STATUS_EXAMPLES)(members.status)
app.command("kill", epilog=members.KILL_EXAMPLES)(members.kill)
app.command("watch", epilog=watch.EXAMPLES)(watch.watch)

EXAMPLES = """[bold]Examples[/bold]

decent-dp topology compare -n 24 -l 4

decent-dp simulate --data digits --topology base-2 -n 64 --alpha 0.1 --optimizer momentum

decent-dp plan --params 65e6 --step-ms 60 -n 32 -l 4 --inter 25gbit --intra 200gbit

torchrun --standalone --nproc-per-node 4 -m decent_dp doctor

decent-dp launch --nproc 4 train.py

decent-dp watch

Exit codes: 0 fine, 1 something failed while it ran, 2 bad input."""


def _show_version(wanted: bool) -> None:
    if wanted:
        import decent_dp

        say(f"decent-dp {decent_dp.__version__}")
        raise typer.Exit(0)


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Decentralized data-parallel training: topologies, simulations, predicted step times, links, launches, live tables."""
    if context.invoked_subcommand is None:
        say(context.get_help())


def run(argv: Sequence[str]) -> int:
    """Runs one command; returns the exit code. Errors about the input or the environment are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that knows no '·'
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(args=list(argv), prog_name="decent-dp", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except SystemExit:
        return 0  # rich and typer, if the reader of a help text has gone
    except BadInputError as error:
        return _fail(str(error), 2)
    except _CLICK_ERROR as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "decent-dp"
        text = one_line(error.format_message())  # type: ignore[attr-defined]
        stop = "" if text.endswith((".", "?")) else "."
        return _fail(f"{text}{stop} See: {path} --help", getattr(error, "exit_code", 2))
    except (NotImplementedError, RecursionError):
        raise  # RuntimeErrors that are faults of the program, which need their traceback
    except (RuntimeError, ImportError, OSError) as error:
        return _fail(str(error) or type(error).__name__, 1)


def _fail(message: str, code: int) -> int:
    # Only rank 0 reports.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        sys.stderr.write(f"decent-dp: {one_line(message)}\n")
    return code
