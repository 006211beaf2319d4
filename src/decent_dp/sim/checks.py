"""Checks of single arguments; an error is one line that names the argument."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

__all__ = ["number", "real", "whole"]


def whole(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an integer from ``least`` on. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return operator.index(value)


def number(name: str, value: Any, want: str, *, positive: bool) -> float:
    """``value`` as a float that is positive or at least zero. Raises TypeError or ValueError: it must be ``want``."""
    found = real(value)
    if found is None:
        raise TypeError(f"{name} must be {want}, got {value!r}")
    # Finite in float32, in which optimizers compute.
    if not (0 < found < 2.0**128 or (found == 0 and not positive)):
        raise ValueError(f"{name} must be {want}, got {value!r}")
    return found


def real(value: Any) -> float | None:
    """``value`` as a float, infinite where it is too large for one; None if it is no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
