"""The counters of a worker."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """Counters of one worker.

    Attributes:
        updates: optimizer steps taken.
        rounds: rounds made, including those before a restart; more than ``updates`` if a scaler skipped steps, or ``join``
            made rounds without one.
        bytes_sent: bytes that this worker has sent for exchanges, without headers and flags.
        grad_norm: norm of the gradients of the last update before clipping; None without ``grad_clip_norm``.
        exchanges: finished exchanges of single buckets.
        waited_s: seconds that the training thread has waited for exchanges.
        rejected: blocks of parameters that were not mixed, because replicas were further apart than the compression can
            represent.
        nonfinite: rounds that this worker sat out, because a replica of its edge had a NaN or an infinity.
        holes: exchanges of single buckets that were left out, because the other worker was gone, silent or much too slow;
            0 without ``faults``.
        one_sided: exchanges that this worker has dropped, as it could not learn whether the other one mixes them: the only
            ones that can move the mean over the replicas.
        reconnects: connections to other workers that were made in place of lost ones; 0 without ``faults``.
    """

    updates: int
    rounds: int
    bytes_sent: int
    grad_norm: float | None
    exchanges: int = 0
    waited_s: float = 0.0
    rejected: int = 0
    nonfinite: int = 0
    holes: int = 0
    one_sided: int = 0
    reconnects: int = 0
