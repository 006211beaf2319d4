"""From a cluster, a job and a choice to the time of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from decent_dp._checks import check_integer
from decent_dp._compressions import parse_compression

from .describe import DDP, FSDP, HSDP, Choice, Cluster, Job, Prediction
from .reasons import explain
from .steps import Array, Timing, all_reduce_steps, exchange_steps
from .traffic import BLOCKS, RoundTraffic, all_reduce_s, buckets_of, capacities, collective, make_rounds

__all__ = ["predict"]

# Steps before the measurement, and at least so many measured. With more jitter 60, a multiple of most periods, so that
# contenders are compared on the same draws.
_WARMUP, _MEASURED = 8, 12
_JITTER, _MEASURED_JITTER = 0.02, 60
# Bytes per second between an accelerator and the CPU, each way: PCIe 3.0 x16 promises 15.75e9.
_HOST_BYTES_PER_S = 10e9
# The all-gather after a mix inside a node: bytes at a time (transport/torch_groups.py).
_CHUNK = 32 * 2**20
# A longer step (30 years) is a typing error.
_LONGEST_S = 1e9
# Nanoseconds per parameter for coding and decoding in a step, by backend. On a processor ('gloo'): the mean step with int8 less
# that with float32, of 4.2 million parameters (benchmarks/results/real-2.json: 397.3 - 382.7 ms; bfloat16 cost less than the
# noise). With 'nccl': ten times the kernels of an H200 (lab/gpus.md: 4.2 and 6.4 ms per 1e9 parameters), as other GPUs have
# down to a tenth of its memory's bandwidth. Few bits: 4.9, 3.8 and 2.4 times int8 (results/coding.json); a guess for a GPU.
_CODING_NS: dict[str, dict[str | None, float]] = {
    "gloo": {None: 0.0, "bfloat16": 0.0, "int8": 3.5, "4bit": 17.0, "2bit": 13.0, "1bit": 8.5},
    "nccl": {None: 0.0, "bfloat16": 0.05, "int8": 0.07, "4bit": 0.3, "2bit": 0.25, "1bit": 0.2},
}
# Nanoseconds per parameter for a projection or its expansion, of a model of a million parameters on one thread (the log,
# "time to the same loss"). Training waits for the expansion; the projection runs beside it. A guess for a GPU.
_PROJECTION_NS = {"gloo": 6.0, "nccl": 0.1}


def predict(cluster: Cluster, job: Job, choice: Choice, *, steps: int | None = None, seed: int = 0) -> Prediction:
    """The time of a training step, the mean over some steps of all workers.

    The model has computation with jitter, buckets, and links with latency and rate that the transfers of a round share. Each
    worker waits for its own partners only. This library: at a bucket's turn in the backward, its exchange of the previous step
    is waited for, then the bucket is mixed, stepped and sent again. DDP: buckets are summed one after another as the backward
    makes them, and the optimizer waits for all. A node that is one replica is a worker whose step contains what its workers
    exchange with each other. The model has no congestion beyond fair shares, no memory, and no shortage of CPU cores.

    Args:
        cluster: workers and links.
        job: a step of a worker alone.
        choice: how to train.
        steps: number of measured steps; None: whole periods of the topology, at least 12, and 60 with a jitter above 0.02.
        seed: of the jitter, at least 0. The same arguments give the same prediction.

    Raises:
        ValueError: the topology is unknown or does not fit the cluster, the choice does not fit the job, ``steps`` or
            ``seed`` is no integer or too small, or the links are too slow for so many parameters.
    """
    if steps is not None:
        steps = check_integer("predict: steps", steps, 1)
    seed = check_integer("predict: seed", seed, 0)
    _check(cluster, job, choice)
    workers, cluster = cluster, cluster.of_nodes() if choice.of_nodes else cluster
    shares = buckets_of(job, choice)
    if choice.synchronous:
        # FSDP's two all-gathers of half the bytes and its reduce-scatter are as much as an all-reduce by a ring.
        how = "nccl" if cluster.backend == "nccl" and choice.kind != FSDP else "ring"
        members = (0 if cluster.world_size > 1 else None,) * cluster.world_size
        rounds = [RoundTraffic((collective(cluster, range(cluster.world_size), how),), members, members)]
    else:
        rounds = make_rounds(cluster, choice)

    period = len(rounds)
    least = _MEASURED if job.jitter <= _JITTER else _MEASURED_JITTER
    measured = steps or period * math.ceil(least / period)
    warmup = period * math.ceil(_WARMUP / period) if period <= _WARMUP else _WARMUP
    timing = make_timing(cluster, job, choice, shares, warmup + measured, seed, warmup=warmup)
    inside_s = 0.0
    if choice.of_nodes or choice.kind == FSDP:
        timing, inside_s = _as_one(workers, job, choice, timing, warmup)
    if choice.synchronous:
        # What FSDP's workers exchange is in the computation already.
        seconds = all_reduce_s(cluster, rounds[0].transfers[0], timing.bytes) * (choice.kind != FSDP)
        ends, waited = all_reduce_steps(timing, 1, seconds)
    else:
        ends, waited = exchange_steps(cluster, rounds, timing)
    step_s = float(((ends[-1] - ends[warmup - 1]) / measured).mean())
    waited_s = min(step_s, float(waited[warmup:].mean()) + inside_s)
    sent = sum(copies for made in rounds for transfer in made.transfers for _, copies in transfer.crossing)
    prediction = Prediction(
        choice=choice,
        step_ms=1e3 * step_s,
        compute_ms=1e3 * (step_s - waited_s),
        waited_ms=1e3 * waited_s,
        node_bytes=sent / period / cluster.n_nodes * choice.message_bytes(job),
        limit="compute",
        reason="",
        mixing=0.0 if choice.synchronous else None,
        detour=any(transfer.detour for made in rounds for transfer in made.transfers),
    )
    coding_ms = 1e3 * _sending_s(cluster, job, choice, rounds)
    inside_ms = 1e3 * inside_s if choice.of_nodes else 0.0
    limit, reason = explain(cluster, job, prediction, rounds, buckets=len(shares), coding_ms=coding_ms, inside_ms=inside_ms)
    return replace(prediction, limit=limit, reason=reason)


def _check(cluster: Cluster, job: Job, choice: Choice) -> None:
    if choice.of_nodes and not cluster.several_of_several:
        sizes = f"world_size={cluster.world_size} and local_world_size={cluster.local_world_size}"
        raise ValueError(f"{choice.name}: nodes are replicas where several have several workers each, got {sizes}")
    if job.sharded != (choice.kind in (HSDP, FSDP)) and not (job.sharded and choice.of_nodes):
        fix = "take replica='node', 'hsdp' or 'fsdp'" if job.sharded else "it is for a Job with sharded=True"
        raise ValueError(f"{choice.name} does not fit a model that is {'' if job.sharded else 'not '}sharded: {fix}")
    slowest = min(min(rates) for rates in capacities(cluster))
    # All workers' at the same time, in both directions of a tree.
    sent = 2 * cluster.world_size * 4 * job.params
    if not (sent / slowest <= _LONGEST_S and job.compute_ms * 1e-3 <= _LONGEST_S):
        raise ValueError(
            f"predict: a step would take years: {job.params:g} parameters, {job.compute_ms:g} ms per step alone, and "
            f"{slowest:g} bytes per second over the slowest link: check the units"
        )


def make_timing(cluster: Cluster, job: Job, choice: Choice, shares: Array, steps: int, seed: int, *, warmup: int = 0) -> Timing:
    """The computation of all workers in all steps; its mean over workers and the steps after ``warmup`` is that of ``job``."""
    n = cluster.world_size * cluster.processes
    spread = math.sqrt(math.log1p(job.jitter**2))
    factor = np.exp(spread * np.random.default_rng(seed).standard_normal((steps, n)) - spread**2 / 2)
    # All contenders have the same draws in the measured steps, however long they warm up, and the same mean.
    factor = np.roll(factor, warmup, axis=0)
    factor /= factor[warmup:].mean()
    work = (job.backward_ms + choice.extra_ms) * 1e-3 * shares
    work[0] += job.forward_ms * 1e-3
    nbytes = choice.message_bytes(job) * shares
    copies = 2 * nbytes / _HOST_BYTES_PER_S / cluster.processes  # to the CPU and back
    return Timing(factor, work, job.optimizer_ms * 1e-3 * shares, _coding_s(cluster, job, choice) * shares, copies, nbytes)


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


def _as_one(cluster: Cluster, job: Job, choice: Choice, timing: Timing, warmup: int) -> tuple[Timing, float]:
    """The workers of a node, or of FSDP all, as one worker: its computation contains what they exchange with each other.

    A node averages its gradients as DDP does, and gathers what its workers have mixed, which nothing hides. Shards gather the
    parameters in the forward and in the backward, and sum gradients in the backward.

    Returns:
        The timing, and the seconds of a step in which a worker waits for the others.
    """
    members = range(cluster.world_size if choice.kind == FSDP else cluster.local_world_size)
    ring = collective(cluster, members, "ring")
    computed = float(timing.work.sum())
    forward = 1e-3 * job.forward_ms
    backward = computed - forward

    def gather_s(nbytes: float, times: int) -> float:
        """Of an all-gather, or a reduce-scatter."""
        return times * float(all_reduce_s(cluster, ring, np.array(nbytes / times))) / 2

    if job.sharded:
        gather, scatter = (gather_s(nbytes * job.params, BLOCKS) for nbytes in (2, 4))
        slowest = timing.factor.reshape(len(timing.factor), -1, len(members)).max(axis=2)
        until = np.maximum(slowest * forward, gather)
        seconds = until + np.maximum(slowest * backward, gather + scatter)
        forward = float(until[warmup:].mean())
    else:
        shares = buckets_of(job, Choice(DDP))
        work = backward * shares
        work[0] += forward
        inside = replace(timing, work=work, after=np.zeros(1))
        ends, _ = all_reduce_steps(inside, cluster.n_nodes, all_reduce_s(cluster, ring, 4 * job.params * shares))
        mixed = 4 * job.params / choice.steps_per_mix
        seconds = np.diff(ends[:, :: len(members)], axis=0, prepend=0.0) + gather_s(mixed, math.ceil(mixed / _CHUNK))
    mean = float(seconds[warmup:].mean())
    work = (mean - forward) * timing.bytes / timing.bytes.sum()
    work[0] += forward
    return replace(timing, factor=seconds / mean, work=work), mean - computed
