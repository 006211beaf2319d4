"""Why a step takes what it takes, in words that a user can act on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .describe import WIRE_BYTES, Cluster, Job, Prediction
from .traffic import Round, capacities

__all__ = ["explain"]

# Waiting of so small a part of a step is not worth a word.
_LITTLE = 0.02
# A step is a slow worker's, up to this.
_NEAR = 0.03
# Coding is named where it is this part of what a worker computes.
_MUCH_CODING = 0.25


@dataclass(frozen=True)
class _Load:
    """What the busiest link of a kind carries: seconds a step, and in its worst round; copies there; share of such rounds."""

    mean_s: float
    worst_s: float
    copies: float = 0.0
    share: float = 1.0
    link: int = -1


def explain(
    cluster: Cluster, job: Job, found: Prediction, rounds: Sequence[Round], *, buckets: int, coding_ms: float
) -> tuple[str, str]:
    """What limits the step, and a sentence that says why.

    Args:
        cluster, job, found, rounds: what was predicted, and from what.
        buckets: number of them.
        coding_ms: milliseconds a step of coding and of copies to the CPU, of the mean worker.
    """
    if cluster.world_size == 1:
        return "compute", "one worker exchanges nothing: a step is its computation"
    limit, reason = _explain(cluster, job, found, rounds, buckets, coding_ms)
    if found.detour:
        what = "bfloat16 in groups" if found.choice.wire == "bfloat16" else found.choice.wire
        reason += f"; {what} goes through the CPU and TCP, not NCCL"
    return limit, reason


def _explain(
    cluster: Cluster, job: Job, found: Prediction, rounds: Sequence[Round], buckets: int, coding_ms: float
) -> tuple[str, str]:
    wire = job.param_bytes if found.choice.wire == "float32" else WIRE_BYTES[found.choice.wire]
    payload = job.params * wire
    loads = {
        "links between nodes": _load(cluster, rounds, payload, range(2 * cluster.n_nodes)),
        "links inside a node": _load(
            cluster, rounds, payload, range(2 * cluster.n_nodes, 2 * cluster.n_nodes + 2 * cluster.world_size)
        ),
        "the CPU and TCP": _detours(rounds, payload),
    }
    busiest = max(loads.values(), key=lambda load: load.mean_s)
    slow = _slow_worker(cluster, job, found, coding_ms, busiest)
    if slow is not None:
        return "a slow worker", slow
    if found.waited_ms < _LITTLE * found.step_ms:
        return _hidden(found, busiest, coding_ms)
    latency_s = sum(max((e.latency_s for e in made.exchanges), default=0.0) for made in rounds) / len(rounds)
    times = buckets if found.choice.kind == "ddp" else 1
    causes = {**{name: load.mean_s for name, load in loads.items()}, "latency": times * latency_s}
    limit = max(causes, key=lambda name: causes[name])
    waited = f"{_ms(found.waited_ms)} a step are waited for"
    if limit == "latency":
        each = f"{buckets} buckets x {_ms(1e3 * latency_s)}" if times > 1 else f"{_ms(1e3 * latency_s)} a round"
        return limit, f"messages are small beside the latency, {each}; {waited}"
    if causes[limit] * 1e3 < 0.5 * found.waited_ms and causes[limit] * 1e3 < 0.25 * found.compute_ms:
        return "compute", f"the exchanges are short ({_per_round(busiest)}), but partners wait for each other: {waited}"
    return limit, f"{_carried(cluster, found, limit, loads[limit])}; {waited}"


def _slow_worker(cluster: Cluster, job: Job, found: Prediction, coding_ms: float, busiest: _Load) -> str | None:
    """The sentence, if the step is as long as that of a slow worker alone, and links would let it be shorter."""
    slowest = max(cluster.slow_workers.values(), default=1.0)
    own_ms = job.compute_ms + found.choice.extra_ms + coding_ms
    alike = abs(found.step_ms - slowest * own_ms) <= _NEAR * found.step_ms
    if slowest <= 1 + _LITTLE or not alike or busiest.mean_s * 1e3 >= (1 - _NEAR) * found.step_ms:
        return None
    rank = max(cluster.slow_workers, key=lambda rank: cluster.slow_workers[rank])
    return (
        f"worker {rank} takes {_ms(slowest * own_ms)} for a step of {_ms(own_ms)}, and the others wait for it, "
        "directly or through their partners"
    )


def _hidden(found: Prediction, busiest: _Load, coding_ms: float) -> tuple[str, str]:
    what = f"its exchanges ({_per_round(busiest)})" if busiest.worst_s else "its exchanges"
    of = f", of which {_ms(coding_ms)} are coding" if coding_ms >= _LITTLE * found.compute_ms else ""
    limit = "coding" if coding_ms >= _MUCH_CODING * found.compute_ms else "compute"
    return limit, f"{what} are hidden behind {_ms(found.compute_ms)} of computation{of}"


def _per_round(load: _Load) -> str:
    """The mean over rounds: a round with much may borrow time from those with little."""
    mean, worst = _ms(1e3 * load.mean_s), _ms(1e3 * load.worst_s)
    return f"{mean} a round" if mean == worst else f"{mean} a round on average, {worst} at most"


def _carried(cluster: Cluster, found: Prediction, limit: str, load: _Load) -> str:
    """What is sent over the busiest link of a kind."""
    if limit == "the CPU and TCP":
        return f"a worker's processor moves its messages for {_ms(1e3 * load.mean_s)} a round"
    where = "a node's link to the others" if limit == "links between nodes" else "a worker's link inside its node"
    node = load.link % cluster.n_nodes
    if limit == "links between nodes" and cluster.slow_nodes.get(node, 1.0) > 1 + _LITTLE:
        where = f"the slow link of node {node}"
    who = "its all-reduce sends" if found.choice.kind == "ddp" else "its exchanges send"
    when = "every step" if load.share == 1 else f"{_portion(load.share)} of the rounds"
    copies = f"{load.copies:.3g} cop{'y' if load.copies == 1 else 'ies'}"
    return f"{who} {copies} of the parameters over {where} in {when}, {_ms(1e3 * load.worst_s)} each"


def _load(cluster: Cluster, rounds: Sequence[Round], payload: float, links: range) -> _Load:
    """Of the link of ``links`` that is busiest over all rounds."""
    capacity, per_flow = (np.asarray(rates)[links] for rates in capacities(cluster))
    sent, copies, alone = np.zeros((3, len(rounds), len(links)))
    for t, made in enumerate(rounds):
        for exchange in made.exchanges:
            for link, amount in exchange.loads:
                if link in links:
                    at = t, link - links.start
                    # Copies by the law; the time that links cannot be kept busy is in the seconds alone.
                    sent[at] += amount * (exchange.busy if link < 2 * cluster.n_nodes else 1.0)
                    copies[at] += amount
                    alone[at] = max(alone[at], amount)
    # One flow alone does not have all of a node's links.
    seconds = payload * np.maximum(copies / capacity, alone / per_flow)
    busiest = int(seconds.sum(axis=0).argmax())
    own = seconds[:, busiest]
    worst = int(own.argmax())
    share = float((own >= own[worst] * (1 - 1e-9)).mean())
    return _Load(float(own.mean()), float(own[worst]), float(sent[worst, busiest]), share, links.start + busiest)


def _detours(rounds: Sequence[Round], payload: float) -> _Load:
    """What goes through the CPU and TCP: the seconds of the longest such exchange of a round."""
    each = [max((payload / e.most for e in made.exchanges), default=0.0) for made in rounds]
    return _Load(sum(each) / len(each), max(each))


def _ms(value: float) -> str:
    """Two significant digits at least."""
    if value >= 10 or value <= 0:
        return f"{value:.0f} ms"
    return f"{value:.{1 - math.floor(math.log10(value))}f} ms"


def _portion(share: float) -> str:
    known = {0.5: "half", 0.25: "a quarter", 0.75: "three quarters", round(1 / 3, 3): "a third", round(2 / 3, 3): "two thirds"}
    return known.get(round(share, 3), f"{share:.0%}")
