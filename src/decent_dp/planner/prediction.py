"""From a cluster, a job and a choice to the time of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .describe import WIRE_BYTES, Choice, Cluster, Job, Prediction, whole
from .events import Outcome, Timing, simulate, simulate_all_reduce
from .reasons import explain
from .traffic import Exchange, Round, buckets_of, capacities, collective, make_rounds

__all__ = ["most_buckets_of", "predict"]

# Steps until what the start has left is gone, and at least so many that are measured. With more jitter more of them: 60, of
# which most topologies have whole periods, so that contenders are compared on the same draws; fewer where many workers draw.
_WARMUP, _MEASURED = 8, 12
_JITTER, _MEASURED_JITTER, _MEASURED_MANY, _MANY = 0.02, 60, 24, 64
# Exchanges that a prediction may simulate: for more workers buckets are merged, 12 at most and 4 at least (with 2, steps that
# links nearly limit come out a quarter too long).
_EXCHANGES, _MOST_BUCKETS, _FEWEST_BUCKETS = 6000, 12, 4
# Workers have the same rate, up to this.
_AGREE = 0.01
# Bytes a second between an accelerator and the CPU, each way: PCIe 3.0 x16 promises 15.75e9.
_HOST_BYTES_PER_S = 10e9
# A step so long (30 years) is a typing error, and so is one for which floats do not suffice.
_LONGEST_S = 1e9


Rates = npt.NDArray[np.float64]  # seconds a step of each worker


def most_buckets_of(world_size: int) -> int:
    """So many buckets of this library are simulated; more are merged."""
    return max(_FEWEST_BUCKETS, min(_MOST_BUCKETS, _EXCHANGES // (20 * max(1, world_size // 2))))


def predict(
    cluster: Cluster,
    job: Job,
    choice: Choice,
    *,
    steps: int | None = None,
    most_buckets: int | None = None,
    seed: int = 0,
) -> Prediction:
    """The time of a training step, by simulating some steps of all workers.

    What is modelled: computation with jitter, buckets, links that latency and rate describe, shared by all flows on them; each
    worker waits for its own partners alone. This library: at a bucket's turn in the backward, what was sent of it a step ago is
    waited for, mixed, stepped and sent again. DDP: buckets are summed one after another as the backward makes them, and the
    optimizer waits for all. What is not: congestion beyond fair shares, memory, a processor that is short of cores.

    A worker or a link that is slow slows others a partner further each round, around a long ring not all within the steps that
    are simulated: with one of them, and while rates differ, the slowest worker's counts, which in the end is that of all.

    Args:
        cluster: workers and links.
        job: a step of a worker alone.
        choice: how to train.
        steps: that are measured; None: whole periods of the topology, at least 12, and 60 with a jitter above 0.02 (24 for
            more than 64 workers).
        most_buckets: of this library more equal buckets than these are merged; None: 12, and fewer for many workers.
        seed: of the jitter, at least 0. The same arguments give the same prediction.

    Raises:
        ValueError: the topology is unknown or does not fit the cluster, ``steps``, ``most_buckets`` or ``seed`` is no integer
            or too small, or the links are too slow for so many parameters.
    """
    if steps is not None:
        steps = whole("predict: steps", steps, "leave it out for whole periods")
    if most_buckets is not None:
        most_buckets = whole("predict: most_buckets", most_buckets, "leave it out", least=2)
    seed = whole("predict: seed", seed, "give 0", least=0)
    _check_sizes(cluster, job)
    shares = buckets_of(job, choice, most_buckets or most_buckets_of(cluster.world_size))
    if choice.kind == "ddp":
        how = "nccl" if cluster.backend == "nccl" else "ring"
        members = (0 if cluster.world_size > 1 else None,) * cluster.world_size
        rounds = [Round((collective(cluster, range(cluster.world_size), how),), members, members)]
    else:
        rounds = make_rounds(cluster, choice)
    measured = steps or _whole_periods(cluster, job, len(rounds))

    period = len(rounds)
    warmup = period * math.ceil(_WARMUP / period) if period <= _WARMUP else _WARMUP
    timing = make_timing(cluster, job, choice, shares, warmup + measured, seed, warmup=warmup)
    if choice.kind == "ddp":
        outcome = simulate_all_reduce(timing, lambda size: all_reduce_s(cluster, rounds[0].exchanges[0], size))
    else:
        outcome = simulate(rounds, timing, *capacities(cluster), overlap=choice.overlap)
    return _summarize(cluster, job, choice, rounds, outcome, warmup, len(shares))


def _check_sizes(cluster: Cluster, job: Job) -> None:
    slowest = min(min(rates) for rates in capacities(cluster))
    payload = job.params * max(job.param_bytes, 4)
    longest = max([1.0, *cluster.slow_workers.values()]) * job.compute_ms * 1e-3
    # Every worker's at the same time, in both directions of a tree.
    if not (slowest > 0 and 2 * cluster.world_size * payload / slowest <= _LONGEST_S and longest <= _LONGEST_S):
        raise ValueError(
            f"predict: a step would take years: {job.params:g} parameters, {job.compute_ms:g} ms a step alone, and "
            f"{slowest:g} bytes a second over the slowest link: see the units"
        )


def _whole_periods(cluster: Cluster, job: Job, period: int) -> int:
    """Steps that are measured."""
    least = _MEASURED
    if job.jitter > _JITTER:
        least = _MEASURED_JITTER if cluster.world_size <= _MANY else _MEASURED_MANY
    return period * math.ceil(least / period)


def _step_s(cluster: Cluster, job: Job, rates: Rates, measured: int) -> float:
    """The mean worker's, or the slowest one's while others have not come to its rate."""
    slow = cluster.slow_workers.values()
    noise = 6 * job.jitter * max([1.0, *slow]) * job.compute_ms * 1e-3 / measured
    alike = float(rates.max() - rates.min()) <= _AGREE * float(rates.mean()) + noise
    even = all(factor == 1 for factor in (*slow, *cluster.slow_nodes.values()))
    return float(rates.mean() if even or alike else rates.max())


def make_timing(
    cluster: Cluster, job: Job, choice: Choice, shares: Sequence[float], steps: int, seed: int, *, warmup: int = 0
) -> Timing:
    """The computation of all workers in all steps; of the steps after ``warmup`` its mean over workers is as ``job`` says."""
    n = cluster.world_size
    random = np.random.default_rng(seed)
    spread = math.sqrt(math.log1p(job.jitter**2))
    factor = np.exp(spread * random.standard_normal((steps, n)) - spread**2 / 2)
    # The same draws for all contenders where it counts, however long they warm up. And few draws have another mean, by which
    # contenders with more or fewer steps would differ.
    factor = np.roll(factor, warmup, axis=0)
    factor /= factor[warmup:].mean()
    for rank, slower in cluster.slow_workers.items():
        factor[:, rank] *= slower
    part = np.asarray(shares)
    backward = (job.backward_ms + choice.extra_ms) * 1e-3 * part
    backward[0] += job.forward_ms * 1e-3
    ours = choice.kind == "ours"
    coding = job.coding_s(choice.wire, cluster.backend) * part if ours else 0 * part
    nbytes = job.params * _wire_bytes(job, choice) * part
    # To the CPU and back.
    copies = 2 * nbytes / _HOST_BYTES_PER_S
    after = job.optimizer_ms * 1e-3 * part
    return Timing(factor, backward.tolist(), after.tolist(), coding.tolist(), copies.tolist(), nbytes.tolist())


def _wire_bytes(job: Job, choice: Choice) -> int:
    return job.param_bytes if choice.wire == "float32" else WIRE_BYTES[choice.wire]


def all_reduce_s(cluster: Cluster, exchange: Exchange, size: float) -> float:
    """Seconds of an all-reduce of ``size`` bytes that has the links for itself."""
    _, per_flow = capacities(cluster)
    slowest = max((copies / per_flow[link] for link, copies in exchange.loads), default=0.0)
    return exchange.latency_s + size * slowest if len(exchange.starters) > 1 else 0.0


def _sending_s(cluster: Cluster, job: Job, choice: Choice, rounds: Sequence[Round]) -> float:
    """Seconds a step of coding, and of copies to the CPU and back, the mean over workers and rounds."""
    if choice.kind != "ours":
        return 0.0
    begun = [made.exchanges[start] for made in rounds for start in made.starts if start is not None]
    detours = sum(exchange.detour for exchange in begun)
    copy = 2 * job.params * _wire_bytes(job, choice) / _HOST_BYTES_PER_S
    all_ = len(begun) * job.coding_s(choice.wire, cluster.backend) + detours * copy
    return all_ / (len(rounds) * cluster.world_size)


def _summarize(
    cluster: Cluster,
    job: Job,
    choice: Choice,
    rounds: Sequence[Round],
    outcome: Outcome,
    warmup: int,
    buckets: int,
) -> Prediction:
    measured = len(outcome.ends) - warmup
    rates = (outcome.ends[-1] - outcome.ends[warmup - 1]) / measured
    mean_s, step_s = float(rates.mean()), _step_s(cluster, job, rates, measured)
    computed_s = mean_s - min(mean_s, float(outcome.waited[warmup:].mean()))
    sent = [copies for made in rounds for exchange in made.exchanges for _, copies in exchange.crossing]
    prediction = Prediction(
        choice=choice,
        step_ms=1e3 * step_s,
        compute_ms=1e3 * computed_s,
        waited_ms=1e3 * (step_s - computed_s),
        node_bytes=sum(sent) / len(rounds) / cluster.n_nodes * job.params * _wire_bytes(job, choice),
        limit="compute",
        reason="",
        mixing=0.0 if choice.kind == "ddp" else None,
        detour=any(exchange.detour for made in rounds for exchange in made.exchanges),
    )
    coding_ms = 1e3 * _sending_s(cluster, job, choice, rounds)
    limit, reason = explain(cluster, job, prediction, rounds, buckets=buckets, coding_ms=coding_ms)
    return replace(prediction, limit=limit, reason=reason)
