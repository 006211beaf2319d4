"""From a cluster, a job and a choice to the time of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from decent_dp._checks import check_integer
from decent_dp._compressions import parse_compression

from .describe import FSDP, HSDP, Choice, Cluster, Job, Prediction
from .events import Timeline, Timing, simulate, simulate_all_reduce
from .inside import as_one
from .reasons import explain
from .traffic import RoundTraffic, all_reduce_s, buckets_of, capacities, collective, make_rounds

__all__ = ["most_buckets_of", "predict"]

# Steps before the measurement, and at least so many measured. With more jitter 60, a multiple of most periods, so that
# contenders are compared on the same draws; fewer for many workers, which make many draws.
_WARMUP, _MEASURED = 8, 12
_JITTER, _MEASURED_JITTER, _MEASURED_MANY, _MANY = 0.02, 60, 24, 64
# Transfers that a prediction may simulate. For more workers buckets are merged: 12 at most, and 4 at least (with 2, steps that
# links nearly limit are predicted a quarter too long).
_TRANSFERS, _MOST_BUCKETS, _FEWEST_BUCKETS = 6000, 12, 4
# Bytes per second between an accelerator and the CPU, each way: PCIe 3.0 x16 promises 15.75e9.
_HOST_BYTES_PER_S = 10e9
# A longer step (30 years) is a typing error.
_LONGEST_S = 1e9
# Nanoseconds per parameter for coding and decoding in a step, by backend. On a processor ('gloo'): the mean step with int8 less
# that with float32, of 4.2 million parameters (benchmarks/results/real-2.json: 397.3 - 382.7 ms; bfloat16 cost less than the
# noise). With 'nccl': ten times the kernels of an H200 (docs/gpus.md: 4.2 and 6.4 ms per 1e9 parameters), as other GPUs have
# down to a tenth of its memory's bandwidth.
_CODING_NS: dict[str, dict[str | None, float]] = {
    "gloo": {None: 0.0, "bfloat16": 0.0, "int8": 3.5},
    "nccl": {None: 0.0, "bfloat16": 0.05, "int8": 0.07},
}
# Nanoseconds per parameter for a projection or its expansion, of a model of a million parameters on one thread (the log,
# "time to the same loss"). Training waits for the expansion; the projection runs beside it. A guess for a GPU.
_PROJECTION_NS = {"gloo": 6.0, "nccl": 0.1}


def most_buckets_of(world_size: int) -> int:
    """The number of buckets of this library that are simulated; more are merged."""
    return max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, _TRANSFERS // (20 * max(1, world_size // 2))))


def predict(cluster: Cluster, job: Job, choice: Choice, *, steps: int | None = None, seed: int = 0) -> Prediction:
    """The time of a training step, from a simulation of some steps of all workers.

    The model has computation with jitter, buckets, and links with latency and rate that flows share. Each worker waits for its
    own partners only. This library: at a bucket's turn in the backward, its exchange of the previous step is waited for, then
    the bucket is mixed, stepped and sent again. DDP: buckets are summed one after another as the backward makes them, and the
    optimizer waits for all. A node that is one replica is a worker whose step contains what its workers exchange with each
    other. The model has no congestion beyond fair shares, no memory, and no shortage of CPU cores.

    Args:
        cluster: workers and links.
        job: a step of a worker alone.
        choice: how to train.
        steps: number of measured steps; None: whole periods of the topology, at least 12, and 60 with a jitter above 0.02 (24
            for more than 64 workers).
        seed: of the jitter, at least 0. The same arguments give the same prediction.

    Raises:
        ValueError: the topology is unknown or does not fit the cluster, the choice does not fit the job, ``steps`` or
            ``seed`` is no integer or too small, or the links are too slow for so many parameters.
    """
    if steps is not None:
        steps = check_integer("predict: steps", steps, 1)
    seed = check_integer("predict: seed", seed, 0)
    _check_sizes(cluster, job)
    _check_unit(cluster, job, choice)
    workers, cluster = cluster, cluster.of_nodes() if choice.of_nodes else cluster
    shares = buckets_of(job, choice, most_buckets_of(cluster.world_size))
    if choice.synchronous:
        # FSDP's two all-gathers of half the bytes and its reduce-scatter are as much as an all-reduce by a ring.
        how = "nccl" if cluster.backend == "nccl" and choice.kind != FSDP else "ring"
        members = (0 if cluster.world_size > 1 else None,) * cluster.world_size
        rounds = [RoundTraffic((collective(cluster, range(cluster.world_size), how),), members, members)]
    else:
        rounds = make_rounds(cluster, choice)
    measured = steps or _whole_periods(cluster, job, len(rounds))

    period = len(rounds)
    warmup = period * math.ceil(_WARMUP / period) if period <= _WARMUP else _WARMUP
    timing = make_timing(cluster, job, choice, shares, warmup + measured, seed, warmup=warmup)
    inside_s = 0.0
    if choice.of_nodes or choice.kind == FSDP:
        timing, inside_s = as_one(workers, job, choice, timing, warmup)
    if choice.kind == FSDP:
        outcome = simulate_all_reduce(timing, lambda size: 0.0)
    elif choice.synchronous:
        outcome = simulate_all_reduce(timing, lambda size: all_reduce_s(cluster, rounds[0].transfers[0], size))
    else:
        outcome = simulate(rounds, timing, *capacities(cluster))
    return _summarize(cluster, job, choice, rounds, outcome, warmup, len(shares), inside_s)


def _check_unit(cluster: Cluster, job: Job, choice: Choice) -> None:
    if choice.of_nodes and not cluster.several_of_several:
        sizes = f"world_size={cluster.world_size} and local_world_size={cluster.local_world_size}"
        raise ValueError(f"{choice.name}: nodes are replicas where several have several workers each, got {sizes}")
    if job.sharded != (choice.kind in (HSDP, FSDP)) and not (job.sharded and choice.of_nodes):
        fix = "take replica='node', 'hsdp' or 'fsdp'" if job.sharded else "it is for a Job with sharded=True"
        raise ValueError(f"{choice.name} does not fit a model that is {'' if job.sharded else 'not '}sharded: {fix}")


def _check_sizes(cluster: Cluster, job: Job) -> None:
    slowest = min(min(rates) for rates in capacities(cluster))
    # All workers' at the same time, in both directions of a tree.
    sent = 2 * cluster.world_size * 4 * job.params
    if not (slowest > 0 and sent / slowest <= _LONGEST_S and job.compute_ms * 1e-3 <= _LONGEST_S):
        raise ValueError(
            f"predict: a step would take years: {job.params:g} parameters, {job.compute_ms:g} ms per step alone, and "
            f"{slowest:g} bytes per second over the slowest link: check the units"
        )


def _whole_periods(cluster: Cluster, job: Job, period: int) -> int:
    least = _MEASURED
    if job.jitter > _JITTER:
        least = _MEASURED_JITTER if cluster.world_size <= _MANY else _MEASURED_MANY
    return period * math.ceil(least / period)


def make_timing(
    cluster: Cluster, job: Job, choice: Choice, shares: Sequence[float], steps: int, seed: int, *, warmup: int = 0
) -> Timing:
    """The computation of all workers in all steps; its mean over workers and the steps after ``warmup`` is that of ``job``."""
    n = cluster.world_size * cluster.processes
    random = np.random.default_rng(seed)
    spread = math.sqrt(math.log1p(job.jitter**2))
    factor = np.exp(spread * random.standard_normal((steps, n)) - spread**2 / 2)
    # All contenders have the same draws in the measured steps, however long they warm up, and the same mean.
    factor = np.roll(factor, warmup, axis=0)
    factor /= factor[warmup:].mean()
    part = np.asarray(shares)
    backward = (job.backward_ms + choice.extra_ms) * 1e-3 * part
    backward[0] += job.forward_ms * 1e-3
    coding = _coding_s(cluster, job, choice) * part
    nbytes = choice.message_bytes(job) * part
    copies = 2 * nbytes / _HOST_BYTES_PER_S / cluster.processes  # to the CPU and back
    after = job.optimizer_ms * 1e-3 * part
    return Timing(factor, backward.tolist(), after.tolist(), coding.tolist(), copies.tolist(), nbytes.tolist())


def _coding_s(cluster: Cluster, job: Job, choice: Choice) -> float:
    """Seconds for coding and decoding in a step."""
    _, code = parse_compression(choice.compression)
    ns = _CODING_NS[cluster.backend][code] * choice.numbers_sent(job) + _PROJECTION_NS[cluster.backend] * choice.low_rank
    return ns * 1e-9 * job.params / choice.steps_per_mix / cluster.processes


def _sending_s(cluster: Cluster, job: Job, choice: Choice, rounds: Sequence[RoundTraffic]) -> float:
    """Seconds per step of coding, and of copies to the CPU and back, the mean over workers and rounds."""
    if not choice.decentralized:
        return 0.0
    begun = [made.transfers[start] for made in rounds for start in made.starts if start is not None]
    sent = sum(transfer.detour for transfer in begun) * choice.message_bytes(job) / choice.steps_per_mix
    copies = 2 * sent / _HOST_BYTES_PER_S / cluster.processes
    return (len(begun) * _coding_s(cluster, job, choice) + copies) / (len(rounds) * cluster.world_size)


def _summarize(
    cluster: Cluster,
    job: Job,
    choice: Choice,
    rounds: Sequence[RoundTraffic],
    outcome: Timeline,
    warmup: int,
    buckets: int,
    inside_s: float,
) -> Prediction:
    measured = len(outcome.ends) - warmup
    step_s = float(((outcome.ends[-1] - outcome.ends[warmup - 1]) / measured).mean())
    computed_s = step_s - min(step_s, float(outcome.waited[warmup:].mean()) + inside_s)
    sent = [copies for made in rounds for transfer in made.transfers for _, copies in transfer.crossing]
    prediction = Prediction(
        choice=choice,
        step_ms=1e3 * step_s,
        compute_ms=1e3 * computed_s,
        waited_ms=1e3 * (step_s - computed_s),
        node_bytes=sum(sent) / len(rounds) / cluster.n_nodes * choice.message_bytes(job),
        limit="compute",
        reason="",
        mixing=0.0 if choice.synchronous else None,
        detour=any(transfer.detour for made in rounds for transfer in made.transfers),
    )
    coding_ms = 1e3 * _sending_s(cluster, job, choice, rounds)
    inside_ms = 1e3 * inside_s if choice.of_nodes else 0.0
    limit, reason = explain(cluster, job, prediction, rounds, buckets=buckets, coding_ms=coding_ms, inside_ms=inside_ms)
    return replace(prediction, limit=limit, reason=reason)
