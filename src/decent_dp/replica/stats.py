"""Counters of a replica."""

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
    """

    updates: int
    rounds: int
    bytes_sent: int
    grad_norm: float | None
    exchanges: int = 0
    waited_s: float = 0.0
    rejected: int = 0
    nonfinite: int = 0
