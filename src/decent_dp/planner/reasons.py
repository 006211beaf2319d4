"""Why a step takes what it takes, in words that a user can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .describe import WIRE_BYTES, Cluster, Job, Prediction
from .traffic import Round, capacities

__all__ = ["explain"]

# Waiting of so small a part of a step is not worth a word.
_LITTLE = 0.02


@dataclass(frozen=True)
class _Load:
    """What the busiest link of a kind carries: seconds a step, and in its worst round; copies there; share of such rounds."""

    mean_s: float
    worst_s: float
    copies: float
    share: float
    link: int = -1


def explain(cluster: Cluster, job: Job, found: Prediction, rounds: Sequence[Round]) -> tuple[str, str]:
    """What limits the step, and a sentence that says why."""
    wire = job.param_bytes if found.choice.wire == "float32" else WIRE_BYTES[found.choice.wire]
    payload = job.params * wire
    between = _load(cluster, rounds, payload, range(2 * cluster.n_nodes))
    inside = _load(cluster, rounds, payload, range(2 * cluster.n_nodes, 2 * cluster.n_nodes + 2 * cluster.world_size))
    latency_s = sum(max((e.latency_s for e in made.exchanges), default=0.0) for made in rounds) / len(rounds)
    own_ms = job.compute_ms + found.choice.extra_ms
    slowest = max(cluster.slow_workers.values(), default=1.0)
    most = max(between.worst_s, inside.worst_s) * 1e3

    if cluster.world_size == 1:
        return "compute", "one worker exchanges nothing: a step is its computation"
    if slowest > 1 + _LITTLE and slowest * own_ms > 0.97 * found.step_ms:
        rank = max(cluster.slow_workers, key=lambda rank: cluster.slow_workers[rank])
        return "a slow worker", (
            f"worker {rank} takes {slowest * own_ms:.0f} ms for a step of {own_ms:.0f} ms, and the others wait for it, "
            "directly or through their partners"
        )
    if found.waited_ms < _LITTLE * found.step_ms:
        what = f"its exchanges ({_ms(most)} at most in a round)" if most else "its exchanges"
        return "compute", f"{what} are hidden behind {_ms(found.compute_ms)} of computation"
    causes = {"links between nodes": between.mean_s, "links inside a node": inside.mean_s, "latency": latency_s}
    limit = max(causes, key=lambda name: causes[name])
    waited = f"{_ms(found.waited_ms)} a step are waited for"
    if limit == "latency":
        return limit, f"messages are small beside the latency, {_ms(1e3 * latency_s)} a round; {waited}"
    if causes[limit] * 1e3 < 0.5 * found.waited_ms and causes[limit] * 1e3 < 0.25 * found.compute_ms:
        return (
            "compute",
            f"the exchanges are short ({_ms(most)} at most in a round), but partners wait for each other: {waited}",
        )
    load = between if limit == "links between nodes" else inside
    where = "a node's link to the others" if limit == "links between nodes" else "a worker's link inside its node"
    if load is between and load.link % cluster.n_nodes in cluster.slow_nodes:
        where = f"the slow link of node {load.link % cluster.n_nodes}"
    who = "its all-reduce sends" if found.choice.kind == "ddp" else "its exchanges send"
    when = "every step" if load.share == 1 else f"{_portion(load.share)} of the rounds"
    copies = f"{load.copies:.3g} cop{'y' if load.copies == 1 else 'ies'}"
    return limit, f"{who} {copies} of the parameters over {where} in {when}, {_ms(1e3 * load.worst_s)} each; {waited}"


def _load(cluster: Cluster, rounds: Sequence[Round], payload: float, links: range) -> _Load:
    """Of the link of ``links`` that is busiest over all rounds."""
    if not links:
        return _Load(0.0, 0.0, 0.0, 0.0)
    capacity, per_flow = (np.asarray(rates)[links] for rates in capacities(cluster))
    copies, alone = np.zeros((2, len(rounds), len(links)))
    for t, made in enumerate(rounds):
        for exchange in made.exchanges:
            for link, amount in exchange.loads:
                if link in links:
                    copies[t, link - links.start] += amount
                    alone[t, link - links.start] = max(alone[t, link - links.start], amount)
    # One flow alone does not have all of a node's links.
    seconds = payload * np.maximum(copies / capacity, alone / per_flow)
    busiest = int(seconds.sum(axis=0).argmax())
    own = seconds[:, busiest]
    worst = int(own.argmax())
    share = float((own >= own[worst] * (1 - 1e-9)).mean())
    return _Load(float(own.mean()), float(own[worst]), float(copies[worst, busiest]), share, links.start + busiest)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _portion(share: float) -> str:
    known = {0.5: "half", 0.25: "a quarter", 0.75: "three quarters", round(1 / 3, 3): "a third", round(2 / 3, 3): "two thirds"}
    return known.get(round(share, 3), f"{share:.0%}")
