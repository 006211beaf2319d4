"""``decent-dp plan``: the fastest topology, compression and bucket size on a cluster."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from decent_dp.tools.cli.inputs import (
    MOST_ANALYSED,
    BadInputError,
    as_count,
    as_rate,
    as_seconds,
    check_workers,
    refusing,
)
from decent_dp.tools.cli.screen import figures, number, say, size, table, waiting, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decent_dp.tools.planner import Cluster, Job, Prediction, Recipe

__all__ = ["EXAMPLES", "plan"]

_LATENCY_INTER, _LATENCY_INTRA = "20us", "5us"
# Short words for a narrow column.
_LIMITS = {"links between nodes": "network", "links inside a node": "node", "the CPU and TCP": "cpu"}

EXAMPLES = """[bold]Examples[/bold]

decent-dp plan --params 65e6 --step-ms 60 -n 32 -l 4 --inter 25gbit --intra 200gbit

decent-dp plan --params 1.3B --step-ms 400 -n 8 --inter 10gbit --latency-inter 50us --jitter 0.05 --top 20

decent-dp plan --params 350M --step-ms 400 -n 8 -l 8 --intra 100gbit

decent-dp plan --params 7B --step-ms 2140 -n 32 -l 8 --inter 100gbit --intra 2400gbit --sharded

torchrun --standalone --nproc-per-node 4 -m decent_dp doctor --out links.json

decent-dp plan --measured links.json --params 65e6 --step-ms 60 --json

--step-ms is a step of one worker alone: measure it without any exchange. Rates: 25gbit, 100mbit, 3GB/s. Times: 20us, 0.1ms."""


def plan(
    params: Annotated[str, typer.Option(help="Trainable parameters: 65e6, 65M, 1.3B.")],
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a step of one worker alone: forward, backward, optimizer.")],
    n: Annotated[int | None, typer.Option("-n", "--workers", help="Number of workers.", metavar="N", min=1)] = None,
    local: Annotated[int | None, typer.Option("-l", "--local", help="Workers per node.", metavar="L", min=1)] = None,
    inter: Annotated[str | None, typer.Option(help="A node's link to other nodes: 25gbit, 3GB/s.")] = None,
    intra: Annotated[
        str | None, typer.Option(help="A worker's link inside its node: 200gbit; of PCIe 4.0 about 100gbit each.")
    ] = None,
    latency_inter: Annotated[str | None, typer.Option(help=f"One way between nodes; if not given {_LATENCY_INTER}.")] = None,
    latency_intra: Annotated[str | None, typer.Option(help=f"One way inside a node; if not given {_LATENCY_INTRA}.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Workers and links as decent-dp doctor has measured them.", metavar="FILE")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="nccl or gloo; if not given that of --measured, else nccl.")] = None,
    optimizer_ms: Annotated[float, typer.Option(help="The optimizer's part of --step-ms.")] = 0.0,
    jitter: Annotated[float, typer.Option(help="Standard deviation of a worker's step, relative to its mean.")] = 0.01,
    width: Annotated[
        float | None, typer.Option(help="Hidden size of a transformer, for low-rank messages; if not given, from --params.")
    ] = None,
    sharded: Annotated[bool, typer.Option(help="The model is sharded over the workers of a node (fully_shard).")] = False,
    top: Annotated[int, typer.Option(help="Show so many; 0: all.", min=0)] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Predict the step time of PyTorch DDP and of each topology, compression and bucket size on your cluster, with reasons."""
    from decent_dp.tools.planner import Cluster, Job, recipe
    from decent_dp.tools.planner import plan as rank_all

    count = as_count("--params", params)
    with refusing():
        job = Job.of_step(count, step_ms, optimizer_ms=optimizer_ms, jitter=jitter, width=width, sharded=sharded)
    if measured is not None:
        given = {"-n": n, "-l": local, "--inter": inter, "--intra": intra}
        given |= {"--latency-inter": latency_inter, "--latency-intra": latency_intra}
        for option, value in given.items():
            if value is not None:
                raise BadInputError(f"{option} and --measured say the same: leave {option} out, or --measured")
        with refusing():
            cluster = Cluster.from_measured(measured, backend=backend)
    else:
        cluster = _cluster(n, local or 1, (inter, latency_inter), (intra, latency_intra), backend or "nccl")

    with refusing(), waiting(f"{cluster.world_size} workers: predicting every contender"):
        found = rank_all(cluster, job)
        best_of_all = recipe(cluster, job, found)
    best = {prediction.name: prediction for prediction in reversed(found)}  # of its bucket sizes
    found = [prediction for prediction in found if prediction is best[prediction.name]]
    shown = list(enumerate(found, 1))
    if top:
        # DDP is always shown, for comparison.
        baseline = next(place for place in shown if place[1].choice.synchronous)
        shown = shown[:top] + [baseline] * (baseline not in shown[:top])
    if json:
        write_json(_document(cluster, job, shown, len(found), best_of_all))
        return
    _report(cluster, job, shown, len(found), best_of_all)


def _cluster(
    n: int | None, local: int, inter: tuple[str | None, str | None], intra: tuple[str | None, str | None], backend: str
) -> Cluster:
    from decent_dp.tools.planner import Cluster

    if n is None:
        raise BadInputError("the workers are missing: write -n 32 (and -l 4 for 4 per node), or --measured FILE")
    check_workers(n, local, MOST_ANALYSED)
    # A link that does not exist cannot limit.
    between = _link("--inter", *inter, _LATENCY_INTER, f"{n // local} nodes" if local < n else "")
    inside = _link("--intra", *intra, _LATENCY_INTRA, f"{local} workers per node" if local > 1 else "")
    with refusing():
        return Cluster(n, local, between, inside, backend=backend)


def _link(option: str, rate: str | None, latency: str | None, default: str, needed: str) -> Any:
    from decent_dp.tools.planner import Link

    seconds = as_seconds(option.replace("--", "--latency-"), latency or default)
    if rate is None:
        if needed:
            raise BadInputError(f"{option} is missing: with {needed} the rate of that link matters; write {option} 25gbit")
        return Link(seconds, math.inf)
    return Link(seconds, as_rate(option, rate))


# -- what was found --------------------------------------------------------------------------------------------------------


def _document(cluster: Cluster, job: Job, shown: Sequence[tuple[int, Prediction]], count: int, best: Recipe) -> dict[str, Any]:
    from decent_dp.tools.planner import left_out, same_rounds

    links = {
        name: {"latency_us": link.latency_s * 1e6, "mbit_s": link.bytes_per_s * 8 / 1e6}
        for name, link in (("inter", cluster.inter), ("intra", cluster.intra))
    }
    named = ("world_size", "local_world_size", "backend", "ports")
    return {
        "format": "decent_dp-plan-1",
        "cluster": {**{name: getattr(cluster, name) for name in named}, **links},
        "job": asdict(job),
        "ranked": count,
        "predictions": [{"rank": place, **prediction.as_dict()} for place, prediction in shown],
        "recipe": {"code": best.code, "steps": best.steps, "to_ddp": best.to_ddp, **best.prediction.as_dict()},
        "same_rounds": [{"name": name, "as": other} for name, other in same_rounds(cluster).items()],
        "do_not_fit": [{"name": name, "reason": reason} for name, reason in left_out(cluster).items()],
    }


def _report(cluster: Cluster, job: Job, shown: Sequence[tuple[int, Prediction]], count: int, best: Recipe) -> None:
    from decent_dp.tools.planner import left_out, same_rounds

    n, local = cluster.world_size, cluster.local_world_size
    links = [
        f"{name} {_rate(link.bytes_per_s)}, {number(link.latency_s * 1e6)} µs"
        for name, link, is_there in (
            ("between nodes", cluster.inter, local < n),
            ("inside a node", cluster.intra, local > 1),
        )
        if is_there
    ]
    workers = f"{n} worker{'s' * (n > 1)}" + (f", {local} per node" if local > 1 else "")
    say(f"{workers}, {cluster.backend}; {'; '.join(links) or 'no links'}")
    split = f"forward {number(job.forward_ms)}, backward {number(job.backward_ms)}, optimizer {number(job.optimizer_ms)}"
    say(f"{job.params:,.0f} parameters, {number(job.compute_ms)} ms per step alone ({split})", "", _ranking(shown), "")
    if len(shown) < count:
        say(f"{count - len(shown)} more are not shown; --top 0 shows all", "")
    say("The fastest first; within 1 % by better mixing, then by less compression. Node sends: to other nodes, per step.", "")
    for place, prediction in _worth_a_word(shown):
        say(f"{place}. {_named(prediction)}: {prediction.reason}")
    if any(prediction.choice.replica == "node" for _, prediction in shown):
        say("", 'node: the workers of a node are one replica; write gossip(model, optimizer, topology=..., replica="node")')
    say("", "the least time to DDP's loss:", f"  {best.code}", _recipe_in_words(best))
    twins = same_rounds(cluster)
    if twins:
        say("", "the same rounds here:", figures([(f"  {name}", f"is {other}") for name, other in twins.items()]))
    misfits = left_out(cluster)
    if misfits:
        say("", "do not fit:", figures([(f"  {name}", reason) for name, reason in misfits.items()]))


def _recipe_in_words(best: Recipe) -> str:
    prediction = best.prediction
    if prediction.choice.synchronous:
        return "  no other choice is predicted to reach its loss earlier"
    steps = f"{number(prediction.step_ms)} ms per step, about {number(best.steps)} times DDP's steps with GossipAdamW"
    return f"  {number(best.to_ddp)} of DDP's time: {steps}"


def _ranking(shown: Sequence[tuple[int, Prediction]]) -> Table:
    # Two lines per heading: the table fits 80 columns.
    baseline = next(prediction for _, prediction in shown if prediction.choice.synchronous)
    speed = f"speed\nto {baseline.name.upper()}"
    sizes = ("bucket\nMiB", "ms per\nstep", speed, "node\nsends")
    rows = [
        (
            str(place),
            _contender(prediction),
            prediction.choice.compression or "-",
            number(prediction.choice.bucket_mb),
            number(prediction.step_ms, 4),
            "" if prediction is baseline else f"{number(baseline.step_ms / prediction.step_ms)} x",
            size(prediction.node_bytes),
            _LIMITS.get(prediction.limit, prediction.limit),
        )
        for place, prediction in shown
    ]
    return table(("", "contender", "com-\npression", *sizes, "limited\nby"), rows, left=(1, 2), folded=(7,))


def _contender(prediction: Prediction) -> str:
    choice = prediction.choice
    if not choice.decentralized:
        return f"PyTorch {choice.name.upper()}"
    return f"{choice.topology_name}{', node' * choice.of_nodes}"


def _named(prediction: Prediction) -> str:
    compression = prediction.choice.compression
    return _contender(prediction) + (f", {compression}" if compression else "")


def _worth_a_word(shown: Sequence[tuple[int, Prediction]]) -> list[tuple[int, Prediction]]:
    """The best of three topologies, and DDP."""
    explained: dict[str, tuple[int, Prediction]] = {}
    for place, prediction in shown:
        name = _contender(prediction)
        if name not in explained and (len(explained) < 3 or prediction.choice.synchronous):
            explained[name] = place, prediction
    return list(explained.values())


def _rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8 / 1e6
    if math.isinf(mbit):
        return "without limit"
    return f"{number(mbit / 1000)} Gbit/s" if mbit >= 1000 else f"{number(mbit)} Mbit/s"
