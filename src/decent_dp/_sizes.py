"""Bucket sizes, for the engine and the planner."""

from __future__ import annotations

__all__ = ["MIB", "choose_sizes"]

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
