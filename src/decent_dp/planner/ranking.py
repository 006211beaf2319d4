"""All that fits a cluster, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decent_dp.topo import TopologyReg, make_topology, names_that_fit, why_unfit

from .describe import WIRE_BYTES, Choice, Cluster, Job, Prediction
from .prediction import predict
from .traffic import buckets_of

__all__ = ["candidates", "left_out", "plan"]

DEFAULT_MB, OTHER_MB = 25.0, (10.0, 50.0)
# Other sizes of bucket change a step by some percent: they are looked at only where that may matter.
_NEAR = 1.1
# Predictions that are nearer than this are a tie.
_TIE = 0.01
# Exchanges that a prediction of a plan may simulate: with more workers, buckets are merged.
_EXCHANGES = 6000


def left_out(cluster: Cluster) -> dict[str, str]:
    """Registered topologies that do not fit the cluster, with the reason."""
    reasons = {name: why_unfit(name, cluster.world_size, cluster.local_world_size) for name in TopologyReg.registry}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def candidates(cluster: Cluster, *, wires: Sequence[str] = tuple(WIRE_BYTES), bucket_mb: float = DEFAULT_MB) -> list[Choice]:
    """DDP, and every registered topology that fits on every wire."""
    names = names_that_fit(cluster.world_size, cluster.local_world_size)
    return [Choice("ddp", bucket_mb=bucket_mb), *(Choice("ours", name, wire, bucket_mb) for name in names for wire in wires)]


def plan(cluster: Cluster, job: Job, choices: Sequence[Choice] | None = None, *, seed: int = 0) -> list[Prediction]:
    """Predictions of all choices, the fastest first.

    Those within 1 % of each other are a tie: DDP comes first, as all its replicas are equal, then what mixes better, then the
    more exact wire, then what sends less between nodes, then the default size of bucket.

    Args:
        cluster, job, seed: as of ``predict``.
        choices: None: ``candidates(cluster)``, and of the fastest and of DDP other sizes of bucket where they make a
            difference. What ``left_out(cluster)`` names is not among those.

    Raises:
        ValueError: as of ``predict``, for choices that are given.
    """
    mixing: dict[object, float | None] = {}
    most = max(2, min(12, _EXCHANGES // (20 * max(1, cluster.world_size // 2))))

    def found(choice: Choice) -> Prediction:
        if choice.topology not in mixing:
            mixing[choice.topology] = _mixing(cluster, choice)
        factor = 0.0 if choice.kind == "ddp" else mixing[choice.topology]
        return replace(predict(cluster, job, choice, most_buckets=most, seed=seed), mixing=factor)

    if choices is not None:
        return _ranked([found(choice) for choice in choices])
    usual = [found(choice) for choice in candidates(cluster)]
    best = min(prediction.step_ms for prediction in usual)
    others = []
    for prediction in usual:
        choice = prediction.choice
        if choice.kind != "ddp" and prediction.step_ms > _NEAR * best:
            continue
        cuts = [buckets_of(job, choice, most)]
        for size in OTHER_MB:
            other = replace(choice, bucket_mb=size)
            cut = buckets_of(job, other, most)
            if cut not in cuts:  # small models are cut alike
                cuts.append(cut)
                again = found(other)
                if abs(again.step_ms / prediction.step_ms - 1) > _TIE:
                    others.append(again)
    return _ranked([*usual, *others])


def _mixing(cluster: Cluster, choice: Choice) -> float | None:
    """The factor by which a round shrinks the consensus error; None for a push, which is no partition into edges."""
    if choice.kind != "ours" or choice.topology is None:
        return None
    from decent_dp.topo.analysis import analyse

    made = make_topology(choice.topology, local_world_size=cluster.local_world_size, world_size=cluster.world_size, rank=0)
    return float(analyse(made).rate)


def _ranked(predictions: Sequence[Prediction]) -> list[Prediction]:
    def preference(found: Prediction) -> tuple[float, ...]:
        mixing = 1.0 if found.mixing is None else round(found.mixing, 6)
        exactness = WIRE_BYTES[found.choice.wire]
        differ = found.choice.kind != "ddp"
        return differ, mixing, -exactness, found.node_bytes, abs(found.choice.bucket_mb - DEFAULT_MB), found.step_ms

    left = sorted(predictions, key=lambda found: found.step_ms)
    ranked: list[Prediction] = []
    while left:
        # Measured from the fastest that is left, so that ties do not add up.
        tied = [found for found in left if found.step_ms <= left[0].step_ms * (1 + _TIE)]
        ranked += sorted(tied, key=preference)
        left = left[len(tied) :]
    return ranked
