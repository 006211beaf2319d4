"""``decent-dp simulate``: many virtual workers on this machine."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated

import typer

from decent_dp._checks import check_choice
from decent_dp.tools.cli.inputs import make, refusing
from decent_dp.tools.cli.screen import figures, number, say, size, table, waiting, write_json

if TYPE_CHECKING:
    from decent_dp.tools.sim.experiment import Result, Simulation

__all__ = ["EXAMPLES", "simulate"]

# Samples of all workers in one step: about 3 GB for the digits' network.
_MOST_SAMPLES = 2**20
# No run recovers from such a mean loss; guessing one of ten classes costs 2.3.
_RUINED = 1000.0

EXAMPLES = """[bold]Examples[/bold]

decent-dp simulate --data digits --topology base-2 -n 64 --alpha 0.1 --optimizer momentum

decent-dp simulate --topology ring -n 16 --compression int8 --mix-every 4

decent-dp simulate --topology complete:100,base-2 -n 24 --optimizer momentum --lr 0.05 --json

Exit code 1 if the loss diverged."""


def simulate(
    n: Annotated[int, typer.Option("-n", "--workers", help="Number of virtual workers.", metavar="N", min=1)],
    topology: Annotated[str, typer.Option(help="A name, or several one after another: complete:100,base-2")],
    data: Annotated[str, typer.Option(help="The data: digits.")] = "digits",
    alpha: Annotated[
        float | None, typer.Option(help="Dirichlet split of the classes: 0.1 is very uneven. Not given: even.")
    ] = None,
    local: Annotated[int, typer.Option("-l", "--local", help="Workers per node.", metavar="L", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Updates of every worker.", min=1)] = 500,
    lr: Annotated[float | None, typer.Option(help="Learning rate. Not given: a good one for the optimizer.")] = None,
    batch: Annotated[int, typer.Option(help="Samples per worker and step.", min=1)] = 32,
    optimizer: Annotated[str, typer.Option(help="gossip-adamw, adamw, accum-adamw, sgd or momentum.")] = "adamw",
    compression: Annotated[str, typer.Option(help="none, bfloat16 or int8.")] = "none",
    mix_every: Annotated[int, typer.Option(help="Mix only in every h-th update.", metavar="H", min=1)] = 1,
    momentum_tracking: Annotated[
        bool, typer.Option("--momentum-tracking", help="With the rule MomentumTracking, for uneven data.")
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Mix with the values sent in the last update.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where the workers are computed: cpu, cuda or cuda:1.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the weights, the split and the batches.", min=0, max=2**63 - 1)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> int:
    """Train many virtual workers on this machine: does the model still learn as well with this topology and compression?"""
    make(topology, n, local)  # needs no torch, whose import takes seconds

    from decent_dp.tools.sim.experiment import Experiment, Simulation

    with refusing():
        check_choice("--data", data, ("digits",))
        if n * batch > _MOST_SAMPLES:
            raise ValueError(
                f"--batch {batch} of {n} workers are {n * batch:,} samples per step, more than the limit of {_MOST_SAMPLES:,} "
                f"samples in memory; write --batch {max(1, _MOST_SAMPLES // n)} or less"
            )
        settings = Simulation(
            topology=topology,
            n=n,
            local_world_size=local,
            alpha=alpha,
            steps=steps,
            batch=batch,
            lr=lr,
            optimizer=optimizer,
            compression=None if compression == "none" else compression,
            overlap=overlap,
            mix_every=mix_every,
            momentum_tracking=momentum_tracking,
            seed=seed,
            eval_every=max(1, steps // 10),
            device=device,
        )
        experiment = Experiment(settings)
    with waiting(f"{topology}: {steps:,} steps of {n} workers"):
        result = experiment.run()
    wrong = (row.step for row in result.rows if not (row.loss <= _RUINED and math.isfinite(row.consensus_distance)))
    diverged = next(wrong, None)
    if json:
        write_json({"format": "decent_dp-simulation-1", **asdict(result), "diverged": diverged})
    else:
        _report(result)
    if diverged is None:
        return 0
    sys.stderr.write(f"decent-dp: diverged by step {diverged:,}: lower --lr\n")
    return 1


def _report(result: Result) -> None:
    settings = result.simulation
    headings = ("step", "loss", "consensus distance", "accuracy", "worst replica", "sent")
    cells = [
        (
            f"{row.step:,}",
            *map(number, (row.loss, row.consensus_distance)),
            *map(_percent, (row.accuracy, row.worst_accuracy)),
            size(row.bytes_sent),
        )
        for row in result.rows
    ]
    made = table(headings, cells, left=())
    few, many = result.samples
    split = f"{few} each" if few == many else f"{few} to {many} each"
    last = result.last
    per_step = size(last.bytes_sent / settings.n / settings.steps)
    rows = [
        ("accuracy", f"{_percent(last.accuracy)} of the mean of all replicas, {_percent(last.worst_accuracy)} of the worst"),
        ("sent", f"{per_step} per worker and step, {result.parameters:,} parameters"),
        ("samples", split + ("" if settings.alpha is None else f", classes split with alpha {settings.alpha:g}")),
        ("took", f"{result.seconds:.1f} s on this machine{'' if settings.device == 'cpu' else f' ({settings.device})'}"),
    ]
    say(_heading(settings), "", made, "", figures(rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _heading(settings: Simulation) -> str:
    """What was simulated, with the settings that are not the usual ones."""
    said = ("topology", "n", "optimizer", "steps", "eval_every")
    own = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in said}
    unusual = [f"{name}={own[name]}" for name in own if own[name] != getattr(type(settings), name)]
    workers = f"{settings.n} worker{'s' * (settings.n > 1)}"
    return f"digits: {', '.join([settings.topology, workers, settings.optimizer, *unusual])}"
