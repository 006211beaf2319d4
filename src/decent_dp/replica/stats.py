"""What a replica has done so far."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """Counters of one worker.

    Attributes:
        updates: optimizer steps taken.
        rounds: rounds made, also before a restart; more than ``updates`` where a scaler skipped a step or ``join`` went on
            without one.
        bytes_sent: put on the wire by this worker for exchanges, without the headers of frames and the flags of messages.
        grad_norm: of the last update, before clipping; None without ``grad_clip_norm``.
        exchanges: finished, of single buckets.
        waited_s: seconds that the training thread has waited for exchanges.
        rejected: blocks of parameters that were not mixed in a round, as replicas were further apart than a lossy wire
            could tell.
        nonfinite: rounds that this worker sat out, as a replica, its own or another one of the edge, had a NaN or an infinity.
    """

    updates: int
    rounds: int
    bytes_sent: int
    grad_norm: float | None
    exchanges: int = 0
    waited_s: float = 0.0
    rejected: int = 0
    nonfinite: int = 0
