"""Everything that fits a cluster, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from decent_dp.tools.analysis import MOST_WORKERS, analyse
from decent_dp.topo import TopologyReg, make_topology
from decent_dp.topo.registry import counts_replicas, why_unfit
from decent_dp.topo.schedule import stages_of

from .describe import COMPRESSIONS, DDP, DECENT_DP, FSDP, HSDP, Choice, Cluster, Job, Prediction
from .prediction import predict
from .traffic import buckets_of

__all__ = ["candidates", "default_replica", "left_out", "plan", "same_rounds"]

DEFAULT_MB, OTHER_MB = 25.0, (10.0, 50.0)
# Other bucket sizes change a step by some percent, so they are predicted only for choices that are this near to the fastest.
_NEAR = 1.1
# A choice that goes through the CPU must be this many times faster than the same through NCCL.
_SURE = 1.1
# Predictions that are nearer to each other are a tie.
_TIE = 0.01


def left_out(cluster: Cluster) -> dict[str, str]:
    """Registered topologies that do not fit the cluster, with the reason."""
    reasons = {name: why_unfit(name, *_size(cluster, name)) for name in TopologyReg.registry}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def default_replica(cluster: Cluster, name: str) -> str:
    """Returns the unit that ``gossip`` makes a replica by default: 'node' or 'worker'."""
    return "node" if cluster.several_of_several and counts_replicas(name) else "worker"


def _size(cluster: Cluster, name: str) -> tuple[int, int]:
    """The number of replicas that a topology connects, and that on a node."""
    counted = cluster.of_nodes() if default_replica(cluster, name) == "node" else cluster
    return counted.world_size, counted.local_world_size


def same_rounds(cluster: Cluster) -> dict[str, str]:
    """Registered topologies that fit and have the rounds of one registered before, with the name of that one."""
    first: dict[tuple[object, ...], str] = {}
    same = {}
    for name in _names(cluster):
        n, local = _size(cluster, name)
        made = make_topology(name, local_world_size=local, world_size=n, rank=0)
        known = first.setdefault((n, made.fingerprint()["rounds"]), name)
        if known != name:
            same[name] = known
    return same


def _names(cluster: Cluster) -> list[str]:
    """The registered topologies that fit."""
    misfits = left_out(cluster)
    return [name for name in TopologyReg.registry if name not in misfits]


def candidates(cluster: Cluster, *, sharded: bool = False) -> list[Choice]:
    """DDP, and every registered topology that fits with every compression; one of those that have the same rounds.

    Where there are several nodes of several workers each, nodes are the replicas, but in topologies that know of nodes.
    ``sharded``: of a sharded job, HSDP and FSDP, and nodes alone.
    """
    same = same_rounds(cluster)
    found = [Choice(DDP)]
    if sharded:
        found = [Choice(HSDP), Choice(FSDP)] if cluster.several_of_several else [Choice(FSDP)]
    for name in _names(cluster):
        replica = default_replica(cluster, name)
        if name not in same and (replica == "node" or not sharded):
            found += [Choice(DECENT_DP, name, compression, replica=replica) for compression in COMPRESSIONS]
    return found


def plan(cluster: Cluster, job: Job, choices: Sequence[Choice] | None = None, *, seed: int = 0) -> list[Prediction]:
    """Predictions of all choices, the fastest first.

    Predictions within 1 % of each other are a tie. Then DDP comes first, as all its replicas are equal; then NCCL before the
    detour through the CPU, better mixing, more bytes per parameter, less traffic between nodes, and the default bucket size.
    A choice that goes through the CPU is also behind the same topology through NCCL unless it is 10 % faster, as its time is
    a guess.

    Args:
        cluster, job, seed: as of ``predict``.
        choices: None: ``candidates(cluster)``, and other bucket sizes of the fastest and of DDP where they make a difference.

    Raises:
        ValueError: as of ``predict``, for given choices.
    """
    mixing: dict[object, float | None] = {}

    def found(choice: Choice) -> Prediction:
        prediction = predict(cluster, job, choice, seed=seed)
        if choice.synchronous:
            return prediction
        key = choice.topology, choice.mix_every, choice.low_rank, choice.replica
        if key not in mixing:
            mixing[key] = _mixing(cluster, choice)
        return replace(prediction, mixing=mixing[key])

    if choices is not None:
        return _ranked([found(choice) for choice in choices], job)
    usual = [found(choice) for choice in candidates(cluster, sharded=job.sharded)]
    best = min(prediction.step_ms for prediction in usual)
    others = []
    for prediction in usual:
        choice = prediction.choice
        if choice.kind != DDP and prediction.step_ms > _NEAR * best:
            continue
        cuts = [buckets_of(job, choice).tolist()]
        for size in OTHER_MB:
            other = replace(choice, bucket_mb=size)
            cut = buckets_of(job, other).tolist()
            if cut not in cuts:  # small models have the same buckets for several sizes
                cuts.append(cut)
                again = found(other)
                if abs(again.step_ms / prediction.step_ms - 1) > _TIE:
                    others.append(again)
    return _ranked([*usual, *others], job)


def _mixing(cluster: Cluster, choice: Choice) -> float | None:
    """The factor by which a step shrinks the consensus error, of a composition that of its last part."""
    cluster = cluster.of_nodes() if choice.of_nodes else cluster
    if choice.topology is None or choice.low_rank or cluster.world_size > MOST_WORKERS:
        return None
    made = make_topology(choice.topology, local_world_size=cluster.local_world_size, world_size=cluster.world_size, rank=0)
    topology = stages_of(made)[-1].topology
    h = choice.steps_per_mix
    known = analyse(topology)
    # Random rounds average exactly at some time by chance, and not in every period.
    return float(known.rate ** (1 / h)) if known.rate or known.exact else None


def _ranked(predictions: Sequence[Prediction], job: Job) -> list[Prediction]:
    def preference(found: Prediction) -> tuple[float, ...]:
        mixing = 1.0 if found.mixing is None else round(found.mixing, 6)
        differ = not found.choice.synchronous
        away = abs(found.choice.bucket_mb - DEFAULT_MB)
        return differ, found.detour, mixing, -found.choice.message_bytes(job), found.node_bytes, away, found.step_ms

    # The fastest prediction of each topology without a detour.
    direct: dict[object, float] = {}
    for found in predictions:
        if found.choice.decentralized and not found.detour:
            name = found.choice.topology, found.choice.replica
            direct[name] = min(direct.get(name, math.inf), found.step_ms)

    def by(found: Prediction) -> float:
        """The time that counts: of a detour that is hardly faster than the same through NCCL, the latter's."""
        name = found.choice.topology, found.choice.replica
        other = direct.get(name, math.inf) if found.detour else math.inf
        return max(found.step_ms, other) if found.step_ms * _SURE > other else found.step_ms

    left = sorted(predictions, key=by)
    ranked: list[Prediction] = []
    while left:
        # From the fastest that is left, so that ties do not add up.
        tied = [found for found in left if by(found) <= by(left[0]) * (1 + _TIE)]
        ranked += sorted(tied, key=preference)
        left = left[len(tied) :]
    return ranked
