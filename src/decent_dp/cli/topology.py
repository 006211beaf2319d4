"""``decent-dp topology list | show | compare``."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from decent_dp.cli.inputs import (
    MOST_ANALYSED,
    BadInputError,
    as_bytes,
    as_count,
    check_workers,
    in_options,
    make,
    require,
    writable,
    writing,
)
from decent_dp.cli.screen import PLOT_ENDINGS, figures, number, one_line, say, size, table, write_json

if TYPE_CHECKING:
    from decent_dp.topo import Edge, Topology
    from decent_dp.topo.analysis import Analysis

__all__ = ["app"]

_SHOWN_ROUNDS, _SHOWN_EDGES, _SHOWN_RANKS = 12, 8, 6
# Rounds of a plot's curve, and of a topology that does not repeat in JSON.
_CURVE, _APERIODIC = 400, 8

app = typer.Typer(help="Topologies: which there are, which fit, how fast they mix and what they send.", no_args_is_help=False)

_LIST = """[bold]Examples[/bold]

decent-dp topology list

decent-dp topology list -n 24 -l 4"""
_SHOW = """[bold]Examples[/bold]

decent-dp topology show base-2 -n 24

decent-dp topology show alternating-exp-ring -n 32 -l 8 --params 65e6

decent-dp topology show complete:100,base-2 -n 6 --plot rounds.png"""
_COMPARE = """[bold]Examples[/bold]

decent-dp topology compare -n 24

decent-dp topology compare -n 64 -l 8 --epsilon 1e-6 --plot decay.png --json"""

N = Annotated[int, typer.Option("-n", "--workers", help="Number of workers.", metavar="N")]
Local = Annotated[int, typer.Option("-l", "--local", help="Workers per node.", metavar="L")]
Epsilon = Annotated[float, typer.Option(help="The consensus error, relative to that at the start, that counts as agreement.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a figure into this file (.png, .pdf, .svg).", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


# -- list ------------------------------------------------------------------------------------------------------------------


@app.command("list", epilog=_LIST)
def list_(
    n: Annotated[int | None, typer.Option("-n", "--workers", help="Say which fit this many workers.", metavar="N")] = None,
    local: Local = 1,
    json: Json = False,
) -> None:
    """The registered topologies, and with -n whether they fit."""
    from decent_dp.topo import TopologyReg, why_unfit

    if n is None and local != 1:
        raise BadInputError("-l is the number of workers per node; say with -n how many there are in all")
    if n is not None:
        check_workers(n, local)
    rows: list[dict[str, Any]] = []
    for name, maker in TopologyReg.registry.items():
        row: dict[str, Any] = {"name": name, "about": _about(maker)}
        if n is not None:
            reason = why_unfit(name, n, local)
            row |= {"fits": reason is None, "reason": reason and in_options(reason)}
        rows.append(row)
    if json:
        write_json({"world_size": n, "local_world_size": None if n is None else local, "topologies": rows})
        return
    if n is None:
        made = table("name", "what it is", left=(0, 1))
        for row in rows:
            made.add_row(row["name"], row["about"])
    else:
        made = table("name", f"{n} workers" + (f", {local} per node" if local > 1 else ""), "what it is", left=(0, 1, 2))
        for row in rows:
            made.add_row(row["name"], "fits" if row["fits"] else row["reason"], row["about"])
    say(made, "", "One after another: 'complete:100,base-2' is 'complete' for 100 updates, then 'base-2'.")


def _about(maker: Any) -> str:
    """The first paragraph of its documentation."""
    text = (inspect.getdoc(maker) or "") if isinstance(maker, type) or inspect.isfunction(maker) else ""
    return one_line(text.partition("\n\n")[0])


# -- show ------------------------------------------------------------------------------------------------------------------


@app.command("show", epilog=_SHOW)
def show(
    name: Annotated[str, typer.Argument(help="A name, or several one after another: complete:100,base-2", metavar="NAME")],
    n: N,
    local: Local = 1,
    epsilon: Epsilon = 1e-3,
    payload: Annotated[str | None, typer.Option(help="Size of one copy of the model: 100MB.")] = None,
    params: Annotated[str | None, typer.Option(help="The same as a number of float32 parameters: 65e6.")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """The rounds of one topology, how fast they mix and what they send; --plot draws them as networks."""
    from decent_dp.topo.analysis import analyse

    _check_epsilon(epsilon)
    nbytes = _payload(payload, params)
    writable("--plot", plot, PLOT_ENDINGS)
    check_workers(n, local, MOST_ANALYSED)
    topology = make(name, n, local)
    analysis = analyse(topology, epsilon=epsilon)
    rounds = [topology.round(t) for t in range(topology.period or _APERIODIC)]
    errors = _errors(topology, analysis)
    try:
        if json:
            edges = [[{"ranks": edge.ranks, "weight": edge.weight} for edge in round_] for round_ in rounds]
            write_json({**_as_json(analysis, nbytes), "name": name, "rounds": edges, "consensus_error": errors})
        else:
            _say_one(name, n, local, rounds, analysis, nbytes)
    finally:  # also after a broken pipe
        if plot is not None:
            _plot(rounds, {name: errors}, plot, f"{name}, ", analysis)
    if plot is not None and not json:
        say("", f"plot: {plot}")


def _say_one(name: str, n: int, local: int, rounds: Sequence[Sequence[Edge]], a: Analysis, nbytes: float | None) -> None:
    where = f" on {n // local} nodes of {local}" if local > 1 and n % local == 0 else f", {local} per node" if local > 1 else ""
    say(f"{name}: {n} worker{'s' * (n > 1)}{where}", "", _rounds_table(rounds, a.period), "")
    say(figures(_in_words(a, nbytes)))


def _check_epsilon(epsilon: float) -> None:
    require("--epsilon", epsilon, above=0)
    if epsilon >= 1:
        raise BadInputError(f"--epsilon must be below 1 (the error at the start), got {epsilon:g}; write 1e-3")


def _payload(payload: str | None, params: str | None) -> float | None:
    if payload is not None and params is not None:
        raise BadInputError("--payload and --params say the same: give one of them")
    if params is not None:
        return 4.0 * as_count("--params", params)
    return None if payload is None else as_bytes("--payload", payload)


def _rounds_table(rounds: Sequence[Sequence[Edge]], period: int | None) -> Table:
    made = table("round", "mixing", "edges", left=(1, 2))
    for t, edges in enumerate(rounds[:_SHOWN_ROUNDS]):
        made.add_row(str(t), _kinds(edges), _few_edges(edges))
    if period is None:
        made.add_row("…", "", "the rounds do not repeat")
    elif period > _SHOWN_ROUNDS:
        left = period - _SHOWN_ROUNDS
        made.add_row("…", "", f"{left} more round{'s' * (left > 1)}; --json has all")
    return made


def _kinds(edges: Iterable[Edge]) -> str:
    """'8 pairs, keep 1/3; 8 idle'."""
    counts = Counter((len(edge.ranks), edge.weight) for edge in edges)
    words = []
    for (members, weight), count in sorted(counts.items(), reverse=True):
        if members == 1:
            words.append(f"{count} idle")
        else:
            kind = "pair" if members == 2 else "group"
            of = f" of {members}" if members > 2 else ""
            words.append(f"{count} {kind}{'s' * (count > 1)}{of}, keep {_fraction(weight)}")
    return "; ".join(words)


def _fraction(weight: float) -> str:
    near = Fraction(weight).limit_denominator(4096)
    return str(near) if abs(float(near) - weight) < 1e-12 else f"{weight:.4g}"


def _few_edges(edges: Sequence[Edge]) -> str:
    """'0-1  2-3  4-5  … 9 more'; idle workers are not listed."""
    active = sorted((sorted(edge.ranks) for edge in edges if len(edge.ranks) > 1), key=lambda ranks: ranks[0])
    shown = ["-".join(_few_ranks(ranks)) for ranks in active[:_SHOWN_EDGES]]
    left = len(active) - len(shown)
    return "  ".join(shown + [f"… {left} more"] * (left > 0)) or "none"


def _few_ranks(ranks: Sequence[int]) -> list[str]:
    if len(ranks) <= _SHOWN_RANKS:
        return [str(rank) for rank in ranks]
    return [*map(str, ranks[: _SHOWN_RANKS - 2]), "…", str(ranks[-1])]


def _in_words(a: Analysis, nbytes: float | None) -> list[tuple[str, str]]:
    def copies(amount: float) -> str:
        return f"{number(amount)} cop{'y' if amount == 1 else 'ies'} of the model" + (
            f" = {size(amount * nbytes)}" if nbytes is not None else ""
        )

    one = a.world_size == 1
    rows = [
        ("period", "the rounds do not repeat" if a.period is None else f"{a.period} round{'s' * (a.period > 1)}"),
        ("averages exactly", _exactly(a)),
        (f"agreement to {a.epsilon:g}", _agreement(a)),
        (
            "consensus error",
            "none is left after a period" if one or a.exact else f"times {number(a.rate)} per round, in the long run",
        ),
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


def _exactly(a: Analysis) -> str:
    if a.period is None:
        return "no (the rounds do not repeat)"
    if not a.exact:
        return "no, the error only shrinks"
    return f"yes: after {a.period} round{'s' * (a.period > 1)} every worker holds the mean of all"


def _agreement(a: Analysis) -> str:
    if a.rounds_to_epsilon is None:
        return "not within the rounds that were tried"
    return f"after {a.rounds_to_epsilon:,} round{'s' * (a.rounds_to_epsilon != 1)}"


def _as_json(a: Analysis, nbytes: float | None = None) -> dict[str, Any]:
    row = dataclasses.asdict(a)
    if nbytes is not None:
        row["payload_bytes"] = nbytes
        row |= {f"{key}_bytes": getattr(a, key) * nbytes for key in ("sent_by_worker", "sent_by_node", "fan_in")}
    return row


def _errors(topology: Topology, a: Analysis) -> list[float]:
    """The consensus error by rounds: to the tolerance, two periods at least, and no further than a plot shows."""
    from decent_dp.topo.analysis import consensus_error

    wanted = max(2 * (a.period or _APERIODIC), int(1.2 * (a.rounds_to_epsilon or _CURVE)))
    return [float(value) for value in consensus_error(topology, min(wanted, _CURVE))]


def _plot(rounds: Sequence[Sequence[Edge]], errors: dict[str, list[float]], path: Path, of: str, a: Analysis) -> None:
    from decent_dp.plots import plot_topology

    local = a.local_world_size
    title = f"{of}{a.world_size} workers" + (f", {local} per node" if local > 1 else "")
    with writing(path):
        plot_topology(rounds, errors, path, title=title, local_world_size=local, epsilon=a.epsilon)


# -- compare ---------------------------------------------------------------------------------------------------------------


@app.command("compare", epilog=_COMPARE)
def compare(n: N, local: Local = 1, epsilon: Epsilon = 1e-3, plot: Plot = None, json: Json = False) -> None:
    """All topologies that fit, one line each, and the reasons of those that do not."""
    from decent_dp.topo import TopologyReg, why_unfit
    from decent_dp.topo.analysis import analyse

    check_workers(n, local, MOST_ANALYSED)
    _check_epsilon(epsilon)
    writable("--plot", plot, PLOT_ENDINGS)
    misfits: dict[str, str] = {}
    found: dict[str, Analysis] = {}
    curves: dict[str, list[float]] = {}
    for name in TopologyReg.registry:
        reason = why_unfit(name, n, local)
        if reason is not None:
            misfits[name] = in_options(reason)
            continue
        topology = make(name, n, local)
        found[name] = analyse(topology, epsilon=epsilon)
        if plot is not None:
            curves[name] = _errors(topology, found[name])
    try:
        if json:
            rows = [{**_as_json(a), "name": name} for name, a in found.items()]
            unfit = [{"name": name, "reason": reason} for name, reason in misfits.items()]
            write_json(
                {"world_size": n, "local_world_size": local, "epsilon": epsilon, "topologies": rows, "do_not_fit": unfit}
            )
        else:
            _say_comparison(found, misfits, epsilon)
    finally:  # also after a broken pipe
        if plot is not None:
            _plot([], curves, plot, "", next(iter(found.values())))
    if plot is not None and not json:
        say("", f"plot: {plot}")


def _say_comparison(found: dict[str, Analysis], misfits: dict[str, str], epsilon: float) -> None:
    # Two lines per heading: the table fits 80 columns.
    near, sends = f"to\n{epsilon:g}", ("worker\nsends", "node\nsends", "into\nnode")
    made = table("topology", "rounds", "exact", "gap", near, "peers", *sends, left=(0,))
    # The fastest to agree first, then the one that sends least.
    order = sorted(found.items(), key=lambda item: (item[1].rounds_to_epsilon or 10**9, item[1].sent_by_worker))
    for name, a in order:
        made.add_row(
            name,
            "-" if a.period is None else str(a.period),
            "yes" if a.exact else "no",
            number(a.spectral_gap, 2),
            "-" if a.rounds_to_epsilon is None else f"{a.rounds_to_epsilon:,}",
            str(a.degree),
            number(a.sent_by_worker),
            number(a.sent_by_node),
            number(a.fan_in),
        )
    say(made, "")
    say(
        f"rounds: of a period. to {epsilon:g}: rounds until the consensus error is that small.",
        "worker sends, node sends: copies of the model per step, by a worker in all and by a node to other nodes.",
        "into node: copies that enter one node from others in one round, at most.",
    )
    if misfits:
        say("", "do not fit:", figures([(f"  {name}", reason) for name, reason in misfits.items()]))
