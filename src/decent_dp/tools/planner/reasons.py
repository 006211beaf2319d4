"""The limit of a predicted step, and a sentence that explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .describe import FSDP, Cluster, Job, Prediction
from .traffic import RoundTraffic, capacities

__all__ = ["explain"]

# Waiting below this part of a step is not mentioned.
_LITTLE = 0.02
# Coding above this part of a worker's computation is the limit.
_MUCH_CODING = 0.25


@dataclass(frozen=True)
class _Load:
    """The busiest link of a kind: seconds per step, and in its worst round; copies in that round; the share of such rounds."""

    mean_s: float
    worst_s: float
    copies: float = 0.0
    share: float = 1.0


def explain(
    cluster: Cluster,
    job: Job,
    found: Prediction,
    rounds: Sequence[RoundTraffic],
    *,
    buckets: int,
    coding_ms: float,
    inside_ms: float,
) -> tuple[str, str]:
    """The limit of the step, and a sentence that explains it.

    Args:
        coding_ms: per step, of coding and of copies to the CPU, of the mean worker.
        inside_ms: per step, that the workers of a node wait for each other.
    """
    if cluster.world_size == 1:
        return "compute", "one worker exchanges nothing: a step is its computation"
    if inside_ms > 0.5 * found.waited_ms > 0.5 * _LITTLE * found.step_ms:
        limit = "links inside a node"
        reason = f"{_ms(inside_ms)} per step are waited for inside the node, whose workers sum gradients and gather parameters"
    else:
        limit, reason = _explain(cluster, job, found, rounds, buckets, coding_ms)
    if found.detour:
        what = "bfloat16 in groups" if found.choice.compression == "bfloat16" else str(found.choice.compression)
        reason += f"; {what} goes through the CPU and TCP, not NCCL"
    return limit, reason


def _explain(
    cluster: Cluster, job: Job, found: Prediction, rounds: Sequence[RoundTraffic], buckets: int, coding_ms: float
) -> tuple[str, str]:
    payload = found.choice.message_bytes(job)
    loads = {
        "links between nodes": _load(cluster, rounds, payload, range(2 * cluster.n_nodes)),
        "links inside a node": _load(
            cluster, rounds, payload, range(2 * cluster.n_nodes, 2 * cluster.n_nodes + 2 * cluster.world_size)
        ),
        "the CPU and TCP": _detours(rounds, payload),
    }
    busiest = max(loads.values(), key=lambda load: load.mean_s)
    if found.waited_ms < _LITTLE * found.step_ms:
        return _hidden(found, busiest, coding_ms)
    latency_s = sum(max((e.latency_s for e in made.transfers), default=0.0) for made in rounds) / len(rounds)
    times = buckets if found.choice.synchronous else 1
    causes = {**{name: load.mean_s for name, load in loads.items()}, "latency": times * latency_s}
    limit = max(causes, key=lambda name: causes[name])
    waited = f"{_ms(found.waited_ms)} per step are waited for"
    if limit == "latency":
        each = f"{buckets} buckets x {_ms(1e3 * latency_s)}" if times > 1 else f"{_ms(1e3 * latency_s)} per round"
        return limit, f"messages are small beside the latency, {each}; {waited}"
    if causes[limit] * 1e3 < 0.5 * found.waited_ms and causes[limit] * 1e3 < 0.25 * found.compute_ms:
        return "compute", f"the exchanges are short ({_per_round(busiest)}), but partners wait for each other: {waited}"
    return limit, f"{_carried(found, limit, loads[limit])}; {waited}"


def _hidden(found: Prediction, busiest: _Load, coding_ms: float) -> tuple[str, str]:
    what = f"its exchanges ({_per_round(busiest)})" if busiest.worst_s else "its exchanges"
    of = f", of which {_ms(coding_ms)} are coding" if coding_ms >= _LITTLE * found.compute_ms else ""
    limit = "coding" if coding_ms >= _MUCH_CODING * found.compute_ms else "compute"
    return limit, f"{what} are hidden behind {_ms(found.compute_ms)} of computation{of}"


def _per_round(load: _Load) -> str:
    """The mean over rounds: a long round can use the time of short ones."""
    mean, worst = _ms(1e3 * load.mean_s), _ms(1e3 * load.worst_s)
    return f"{mean} per round" if mean == worst else f"{mean} per round on average, {worst} at most"


def _carried(found: Prediction, limit: str, load: _Load) -> str:
    """The load of the busiest link of a kind, in words."""
    if limit == "the CPU and TCP":
        return f"a worker's CPU moves its messages for {_ms(1e3 * load.mean_s)} per round"
    where = "a node's link to the others" if limit == "links between nodes" else "a worker's link inside its node"
    sends = "its all-reduce sends" if found.choice.synchronous else "its exchanges send"
    if found.choice.kind == FSDP:
        sends = "its all-gathers and reduce-scatter send the bytes of"
    when = "every step" if load.share == 1 else f"{_portion(load.share)} of the rounds"
    copies = f"{load.copies:.3g} cop{'y' if load.copies == 1 else 'ies'}"
    return f"{sends} {copies} of the parameters over {where} in {when}, {_ms(1e3 * load.worst_s)} each"


def _load(cluster: Cluster, rounds: Sequence[RoundTraffic], payload: float, links: range) -> _Load:
    """The load of the link of ``links`` that is busiest over all rounds."""
    capacity, per_flow = (np.asarray(rates)[links] for rates in capacities(cluster))
    sent, copies, alone = np.zeros((3, len(rounds), len(links)))
    for t, made in enumerate(rounds):
        for transfer in made.transfers:
            for link, amount in transfer.loads:
                if link in links:
                    at = t, link - links.start
                    # The copies that are sent; the time that links cannot be kept busy counts in the seconds only.
                    sent[at] += amount * (transfer.busy if link < 2 * cluster.n_nodes else 1.0)
                    copies[at] += amount
                    alone[at] = max(alone[at], amount)
    # One flow alone may not use all of a node's links.
    seconds = payload * np.maximum(copies / capacity, alone / per_flow)
    busiest = int(seconds.sum(axis=0).argmax())
    own = seconds[:, busiest]
    worst = int(own.argmax())
    share = float((own >= own[worst] * (1 - 1e-9)).mean())
    return _Load(float(own.mean()), float(own[worst]), float(sent[worst, busiest]), share)


def _detours(rounds: Sequence[RoundTraffic], payload: float) -> _Load:
    """The transfers through the CPU and TCP: the seconds of the longest of each round."""
    each = [max((payload / e.most for e in made.transfers), default=0.0) for made in rounds]
    return _Load(sum(each) / len(each), max(each))


def _ms(value: float) -> str:
    """Two significant digits at least."""
    if value >= 10 or value <= 0:
        return f"{value:.0f} ms"
    return f"{value:.{1 - math.floor(math.log10(value))}f} ms"


def _portion(share: float) -> str:
    known = {0.5: "half", 0.25: "a quarter", 0.75: "three quarters", round(1 / 3, 3): "a third", round(2 / 3, 3): "two thirds"}
    return known.get(round(share, 3), f"{share:.0%}")
