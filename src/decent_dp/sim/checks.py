"""What arguments must be, in one line that names them."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

__all__ = ["flag", "number", "real", "whole"]

# Of float32, in which optimizers compute.
_LARGEST = 2.0**128


def whole(name: str, value: Any, least: int = 1, below: int | None = None) -> int:
    """``value`` as an integer from ``least`` on, and less than ``below``.

    Raises:
        TypeError, ValueError: it is none; names the argument and its value.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if found < least:
        raise ValueError(f"{name} must be at least {least}, got {found}")
    if below is not None and found >= below:
        raise ValueError(f"{name} must be less than 2**{below.bit_length() - 1}, got {found}")
    return found


def real(value: Any) -> float | None:
    """``value`` as a float, infinite where it is too large for one; None if it is no number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def number(name: str, value: Any, want: str, *, positive: bool) -> float:
    """``value`` as a float that is finite in float32 too, positive or at least zero.

    Raises:
        TypeError, ValueError: it must be ``want``.
    """
    found = real(value)
    if found is None:
        raise TypeError(f"{name} must be {want}, got {value!r}")
    if not (0 < found < _LARGEST or (found == 0 and not positive)):
        raise ValueError(f"{name} must be {want}, got {value!r}")
    return found


def flag(name: str, value: Any) -> bool:
    """``value`` as True or False; raises TypeError if it is another thing, whatever its truth."""
    if value not in (True, False):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)
