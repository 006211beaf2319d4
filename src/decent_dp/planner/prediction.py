"""From a cluster, a job and a choice to the time of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .describe import WIRE_BYTES, Choice, Cluster, Job, Prediction
from .events import Outcome, Timing, simulate, simulate_all_reduce
from .reasons import explain
from .traffic import Exchange, Round, buckets_of, capacities, collective, make_rounds

__all__ = ["predict"]

# Steps until what the start has left is gone, and at least so many that are measured.
_WARMUP, _MEASURED = 8, 12
_MOST_BUCKETS = 12


def predict(
    cluster: Cluster, job: Job, choice: Choice, *, steps: int | None = None, most_buckets: int = _MOST_BUCKETS, seed: int = 0
) -> Prediction:
    """The time of a training step, by simulating some steps of all workers.

    What is modelled: computation with jitter, buckets, links that latency and rate describe, shared by all flows on them; each
    worker waits for its own partners alone. This library: at a bucket's turn in the backward, what was sent of it a step ago is
    waited for, mixed, stepped and sent again. DDP: buckets are summed one after another as the backward makes them, and the
    optimizer waits for all. What is not: congestion beyond fair shares, memory, a processor that is short of cores; with
    'nccl', that int8 goes over TCP.

    Args:
        cluster: workers and links.
        job: a step of a worker alone.
        choice: how to train.
        steps: that are measured; None: whole periods of the topology, at least 12.
        most_buckets: more equal buckets than these are merged.
        seed: of the jitter. The same arguments give the same prediction.

    Raises:
        ValueError: the topology is unknown or does not fit the cluster, or ``steps`` or ``most_buckets`` is too small.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"predict: steps must be at least 1, got {steps!r}: leave it out for whole periods")
    if most_buckets < 2:
        raise ValueError(f"predict: most_buckets must be at least 2, got {most_buckets!r}: leave it out")
    shares = buckets_of(job, choice, most_buckets)
    if choice.kind == "ddp":
        how = "nccl" if cluster.backend == "nccl" else "ring"
        whole = collective(cluster, range(cluster.world_size), how)
        members = tuple(range(cluster.world_size))
        rounds = [Round((whole,), (0,) * len(members), (0,) * len(members))]
    else:
        rounds = make_rounds(cluster, choice)
    period = len(rounds)
    measured = steps if steps is not None else period * math.ceil(_MEASURED / period)
    warmup = period * math.ceil(_WARMUP / period) if period <= _WARMUP else _WARMUP
    timing = make_timing(cluster, job, choice, shares, warmup + measured, seed)
    if choice.kind == "ddp":
        outcome = simulate_all_reduce(timing, lambda size: all_reduce_s(cluster, rounds[0].exchanges[0], size))
    else:
        outcome = simulate(rounds, timing, *capacities(cluster), overlap=choice.overlap)
    return _summarize(cluster, job, choice, rounds, outcome, warmup)


def make_timing(cluster: Cluster, job: Job, choice: Choice, shares: Sequence[float], steps: int, seed: int) -> Timing:
    """The computation of all workers in all steps."""
    n = cluster.world_size
    random = np.random.default_rng(seed)
    spread = math.sqrt(math.log1p(job.jitter**2))
    factor = np.exp(spread * random.standard_normal((steps, n)) - spread**2 / 2)
    for rank, slower in cluster.slow_workers.items():
        factor[:, rank] *= slower
    part = np.asarray(shares)
    backward = (job.backward_ms + choice.extra_ms) * 1e-3 * part
    backward[0] += job.forward_ms * 1e-3
    coding = job.coding_s(choice.wire, cluster.backend) if choice.kind == "ours" and n > 1 else 0.0
    # Half of it before a message leaves, beside the backward, and half when it is mixed.
    after = job.optimizer_ms * 1e-3 * part + coding / 2 * part
    nbytes = job.params * (job.param_bytes if choice.wire == "float32" else WIRE_BYTES[choice.wire]) * part
    return Timing(factor[:, :, None] * backward, after.tolist(), (coding / 2 * part).tolist(), nbytes.tolist())


def all_reduce_s(cluster: Cluster, exchange: Exchange, size: float) -> float:
    """Seconds of an all-reduce of ``size`` bytes that has the links for itself."""
    _, per_flow = capacities(cluster)
    slowest = max((copies / per_flow[link] for link, copies in exchange.loads), default=0.0)
    return exchange.latency_s + size * slowest if len(exchange.starters) > 1 else 0.0


def _summarize(
    cluster: Cluster, job: Job, choice: Choice, rounds: Sequence[Round], outcome: Outcome, warmup: int
) -> Prediction:
    measured = len(outcome.ends) - warmup
    step_s = float((outcome.ends[-1] - outcome.ends[warmup - 1]).mean()) / measured
    waited_s = min(step_s, float(outcome.waited[warmup:].mean()))
    sent = [copies for made in rounds for exchange in made.exchanges for _, copies in exchange.crossing]
    wire = job.param_bytes if choice.wire == "float32" else WIRE_BYTES[choice.wire]
    prediction = Prediction(
        choice=choice,
        step_ms=1e3 * step_s,
        compute_ms=1e3 * (step_s - waited_s),
        waited_ms=1e3 * waited_s,
        node_bytes=sum(sent) / len(rounds) / cluster.n_nodes * job.params * wire,
        limit="compute",
        reason="",
    )
    limit, reason = explain(cluster, job, prediction, rounds)
    return replace(prediction, limit=limit, reason=reason)
