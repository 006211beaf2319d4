"""The exchanges between the workers of a node that is one replica, and between those that shard a model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .describe import DDP, FSDP, Choice, Cluster, Job
from .events import Timing, simulate_all_reduce
from .traffic import BLOCKS, all_reduce_s, buckets_of, collective

__all__ = ["as_one"]

# The all-gather after a mix: bytes at a time (transport/node_group.py).
_CHUNK = 32 * 2**20


def as_one(cluster: Cluster, job: Job, choice: Choice, timing: Timing, warmup: int) -> tuple[Timing, float]:
    """The workers of a node, or of FSDP all, as one worker: its computation contains what they exchange with each other.

    A node averages its gradients as DDP does, and gathers what its workers have mixed, which nothing hides. Shards gather the
    parameters in the forward and in the backward, and sum gradients in the backward.

    Args:
        cluster, job, choice: as of ``predict``.
        timing: of all workers; ``warmup``: steps before the mean of its computation is that of ``job``.

    Returns:
        The timing, and the seconds of a step in which a worker waits for the others.
    """
    members = range(cluster.world_size if choice.kind == FSDP else cluster.local_world_size)
    ring = collective(cluster, members, "ring")
    computed = float(sum(timing.work))
    forward = 1e-3 * job.forward_ms
    backward = computed - forward

    def gather_s(nbytes: float, times: int) -> float:
        """Of an all-gather, or a reduce-scatter."""
        return times * all_reduce_s(cluster, ring, nbytes / times) / 2

    factor = timing.factor.reshape(len(timing.factor), -1, len(members))
    if job.sharded:
        gather, scatter = (gather_s(nbytes * job.params, BLOCKS) for nbytes in (2, 4))
        slowest = factor.max(axis=2)
        until = np.maximum(slowest * forward, gather)
        seconds = until + np.maximum(slowest * backward, gather + scatter)
        forward = float(until[warmup:].mean())
    else:
        shares = np.array(buckets_of(job, Choice(DDP), 0))
        parts, nothing = backward * shares, [0.0] * len(shares)
        parts[0] += forward
        nodes = [
            Timing(factor[:, node], parts.tolist(), nothing, nothing, nothing, (4 * job.params * shares).tolist())
            for node in range(cluster.n_nodes)
        ]
        ends = [simulate_all_reduce(node, lambda size: all_reduce_s(cluster, ring, size)).ends[:, 0] for node in nodes]
        mixed = 4 * job.params / choice.steps_per_mix
        seconds = np.diff(ends, prepend=0.0).T + gather_s(mixed, math.ceil(mixed / _CHUNK))
    mean = float(seconds[warmup:].mean())
    work = (mean - forward) * np.array(timing.bytes) / sum(timing.bytes)
    work[0] += forward
    return replace(timing, factor=seconds / mean, work=work.tolist()), mean - computed
