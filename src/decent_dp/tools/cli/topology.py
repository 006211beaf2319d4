"""``decent-dp topology show | compare``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decent_dp.tools.cli.inputs import (
    MOST_ANALYSED,
    as_ranks,
    check_workers,
    in_options,
    make,
    refusing,
    require,
    writable,
    writing,
)
from decent_dp.tools.cli.screen import figures, number, say, table, write_json

if TYPE_CHECKING:
    from decent_dp.tools.analysis import Analysis
    from decent_dp.topo import Topology

__all__ = ["app"]

# Characters of a round.
_LONGEST_LINE = 160
# Rounds of a plot's curve, and of a topology that does not repeat in JSON.
_CURVE, _APERIODIC = 400, 8
_OF_SURVIVORS = ("rate", "exact", "rounds_to_epsilon")

app = typer.Typer(help="Topologies: which fit, how fast they mix and what they send.", no_args_is_help=False)

_SHOW = """[bold]Examples[/bold]

decent-dp topology show base-2 -n 24

decent-dp topology show alternating-exp-ring -n 32 -l 8

decent-dp topology show complete:100,base-2 -n 6 --plot rounds.png

decent-dp topology show base-2 -n 16 --dead 3,5"""
_COMPARE = """[bold]Examples[/bold]

decent-dp topology compare -n 24

decent-dp topology compare -n 64 -l 8 --epsilon 1e-6 --json"""

N = Annotated[int, typer.Option("-n", "--workers", help="Number of workers.", metavar="N", min=1)]
Local = Annotated[int, typer.Option("-l", "--local", help="Workers per node.", metavar="L", min=1)]
Epsilon = Annotated[float, typer.Option(help="The consensus error, relative to that at the start, that counts as agreement.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


# -- show ------------------------------------------------------------------------------------------------------------------


@app.command("show", epilog=_SHOW)
def show(
    name: Annotated[str, typer.Argument(help="A name, or several one after another: complete:100,base-2", metavar="NAME")],
    n: N,
    local: Local = 1,
    epsilon: Epsilon = 1e-3,
    dead: Annotated[
        str | None, typer.Option(help="Workers that are gone: say how fast the others still mix.", metavar="I,J")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a figure into this file (.png, .pdf, .svg).", metavar="FILE")] = None,
    json: Json = False,
) -> None:
    """The rounds of one topology, how fast they mix and what they send; --plot draws them as networks."""
    from decent_dp.tools.analysis import analyse, consensus_error

    _check_epsilon(epsilon)
    writable("--plot", plot, plot=True)
    check_workers(n, local, MOST_ANALYSED)
    topology = make(name, n, local)
    gone = [] if dead is None else as_ranks("--dead", dead, n)
    left = _survivors(topology, gone, epsilon) if gone else None
    analysis = analyse(topology, epsilon=epsilon)
    rounds = [topology.round(t) for t in range(topology.period or _APERIODIC)]
    # To the tolerance, two periods at least, and no further than a plot shows.
    wanted = max(2 * (analysis.period or _APERIODIC), int(1.2 * (analysis.rounds_to_epsilon or _CURVE)))
    errors = [float(value) for value in consensus_error(topology, min(wanted, _CURVE))]
    try:
        if json:
            edges = [[{"ranks": edge.ranks, "weight": edge.weight} for edge in round_] for round_ in rounds]
            document = {**dataclasses.asdict(analysis), "name": name, "rounds": edges, "consensus_error": errors}
            if left is not None:
                document["survivors"] = {"dead": gone, **{key: getattr(left, key) for key in _OF_SURVIVORS}}
            write_json(document)
        else:
            where = f" on {n // local} nodes of {local}" if local > 1 else ""
            say(f"{name}: {n} worker{'s' * (n > 1)}{where}", "", *map(_shortened, str(topology).splitlines()[1:]), "")
            say(figures(_in_words(analysis) + ([] if left is None else [_left_in_words(gone, left)])))
    finally:  # also after a broken pipe
        if plot is not None:
            from decent_dp.tools.plots import plot_topology

            title = f"{name}, {n} workers" + (f", {local} per node" if local > 1 else "")
            with writing(plot):
                plot_topology(rounds, errors, plot, title=title, local_world_size=local, epsilon=epsilon)
    if plot is not None and not json:
        say("", f"plot: {plot}")


def _check_epsilon(epsilon: float) -> None:
    require("--epsilon", epsilon, 0 < epsilon < 1, "above 0 and below 1, the error at the start")


def _survivors(topology: Topology, gone: Sequence[int], epsilon: float) -> Analysis:
    from decent_dp.tools.analysis import analyse, without
    from decent_dp.topo.schedule import check_pairs

    with refusing():
        check_pairs(topology, "--dead")
    return analyse(without(topology, gone), epsilon=epsilon)


def _left_in_words(gone: Sequence[int], left: Analysis) -> tuple[str, str]:
    heading, others = f"without {', '.join(map(str, gone))}", f"the {left.world_size} others"
    if left.world_size == 1:
        return heading, "one worker trains alone"
    if left.rate == 1:
        return heading, f"cut: {others} are in parts that never mix"
    reached = "" if left.rounds_to_epsilon is None else f"; {left.epsilon:g} after {left.rounds_to_epsilon:,} rounds"
    return heading, f"{others}: consensus error times {number(left.rate)} per round, in the long run{reached}"


def _shortened(line: str) -> str:
    """A round of many edges, or of large ones: as far as it fits."""
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE].rsplit(maxsplit=1)[0]} … (--json has all)"


def _in_words(a: Analysis) -> list[tuple[str, str]]:
    def copies(amount: float) -> str:
        return f"{number(amount)} cop{'y' if amount == 1 else 'ies'} of the model"

    def rounds(count: int) -> str:
        return f"{count:,} round{'s' * (count != 1)}"

    exact = a.world_size == 1 or a.exact
    rows = [
        ("period", "the rounds do not repeat" if a.period is None else rounds(a.period)),
        ("averages exactly", f"yes: after {rounds(a.period or 0)} every worker holds the mean of all" if a.exact else "no"),
        (
            f"agreement to {a.epsilon:g}",
            "not within the rounds that were tried" if a.rounds_to_epsilon is None else f"after {rounds(a.rounds_to_epsilon)}",
        ),
        ("consensus error", "none is left after a period" if exact else f"times {number(a.rate)} per round, in the long run"),
        ("spectral gap", "none: no period" if a.spectral_gap is None else f"{number(a.spectral_gap)} of a period's matrix"),
        ("peers of a worker", f"{a.degree}, in groups of up to {a.largest_group}"),
        ("idle", f"{100 * a.idle:.3g} % of the rounds"),
        ("a worker sends", f"{copies(a.sent_by_worker)} per step"),
    ]
    if a.local_world_size < a.world_size:
        rows += [
            ("a node sends", f"{copies(a.sent_by_node)} to other nodes per step"),
            ("into one node", f"at most {copies(a.fan_in)} in one round"),
        ]
    return rows


# -- compare ---------------------------------------------------------------------------------------------------------------


@app.command("compare", epilog=_COMPARE)
def compare(n: N, local: Local = 1, epsilon: Epsilon = 1e-3, json: Json = False) -> None:
    """All topologies that fit, one line each, and the reasons of those that do not."""
    from decent_dp.tools.analysis import analyse
    from decent_dp.topo import TopologyReg
    from decent_dp.topo.registry import why_unfit

    check_workers(n, local, MOST_ANALYSED)
    _check_epsilon(epsilon)
    reasons = {name: why_unfit(name, n, local) for name in TopologyReg.registry}
    misfits = {name: in_options(reason) for name, reason in reasons.items() if reason is not None}
    found = {name: analyse(make(name, n, local), epsilon=epsilon) for name in reasons if name not in misfits}
    if json:
        rows = [{**dataclasses.asdict(a), "name": name} for name, a in found.items()]
        unfit = [{"name": name, "reason": reason} for name, reason in misfits.items()]
        write_json({"world_size": n, "local_world_size": local, "epsilon": epsilon, "topologies": rows, "do_not_fit": unfit})
        return
    # Two lines per heading: the table fits 80 columns.
    headings = ("topology", "rounds", "exact", "gap", f"to\n{epsilon:g}", "peers", "worker\nsends", "node\nsends", "into\nnode")
    # The fastest to agree first, then the one that sends least.
    order = sorted(found.items(), key=lambda item: (item[1].rounds_to_epsilon or 10**9, item[1].sent_by_worker))
    cells = [
        (
            name,
            "-" if a.period is None else str(a.period),
            "yes" if a.exact else "no",
            number(a.spectral_gap, 2),
            "-" if a.rounds_to_epsilon is None else f"{a.rounds_to_epsilon:,}",
            str(a.degree),
            *map(number, (a.sent_by_worker, a.sent_by_node, a.fan_in)),
        )
        for name, a in order
    ]
    say(
        table(headings, cells),
        "",
        f"rounds: of a period. to {epsilon:g}: rounds until the consensus error is that small.",
        "worker sends, node sends: copies of the model per step, by a worker in all and by a node to other nodes.",
        "into node: copies that enter one node from others in one round, at most.",
    )
    if misfits:
        say("", "do not fit:", figures([(f"  {name}", reason) for name, reason in misfits.items()]))
