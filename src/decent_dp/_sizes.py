"""Bucket sizes, for the engine and the planner."""

from __future__ import annotations

import math

__all__ = ["MIB", "choose_sizes", "statistics_interval"]

MIB = 2**20
# The number of buckets of a model. Each costs some Python time per step, and the exchange of the last one is not hidden.
_BUCKETS = 8


def choose_sizes(total_bytes: float, limit_bytes: float) -> tuple[float, float]:
    """Returns the sizes of the first and of the other buckets, in bytes, at most ``limit_bytes``.

    Buckets are updated and sent one after another while gradients arrive. A large model has about ``_BUCKETS`` of them, and the
    first one is small, so that sending begins early.
    """
    size = min(limit_bytes, max(MIB, total_bytes / _BUCKETS))
    return (size / 4 if total_bytes > size else size), size


# Statistics are exchanged more rarely where messages are shorter than this share of the parameters, by so many times at most.
_OFTEN, _MOST_RARELY = 1 / 8, 16


def statistics_interval(every: int, message_share: float) -> int:
    """Returns the number of the parameters' exchanges to one of an optimizer's statistics.

    Args:
        every: the fewest.
        message_share: the bytes of a message as a share of those of the parameters.
    """
    return every * min(max(1, math.ceil(_OFTEN / max(message_share, 1e-9))), _MOST_RARELY)
