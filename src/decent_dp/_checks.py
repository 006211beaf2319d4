"""Checks of single arguments, with the same words everywhere."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

__all__ = ["check_choice", "check_integer", "check_number", "did_you_mean"]


def check_integer(name: str, value: Any, at_least: int | None = None, unit: str = "") -> int:
    """``value`` as an int. NumPy's integers are integers too; bools and floats are not.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below ``at_least``.
    """
    of = f" of {unit}" if unit else ""
    bound = "" if at_least is None else f", at least {at_least}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number{of}{bound}, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be a whole number{of}{bound}, got {value!r}")
    return int(value)


def check_number(name: str, value: Any, *, positive: bool = False, unit: str = "") -> float:
    """``value`` as a finite float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or not positive where it must be.
    """
    what = f"a {'positive ' if positive else ''}number{f' of {unit}' if unit else ''}"
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return float(value)


def check_choice(name: str, value: Any, known: Iterable[str]) -> str:
    """``value``, if it is one of ``known``.

    Raises:
        ValueError: it is not; suggests the closest.
    """
    known = list(known)
    if value not in known:
        choices = " or ".join(filter(None, [", ".join(map(repr, known[:-1])), repr(known[-1])]))
        raise ValueError(f"{name} must be {choices}, got {value!r}{did_you_mean(value, known) or '.'}")
    return str(value)


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """The end of an error message that suggests the closest of ``known``; '' if none is close."""
    close = difflib.get_close_matches(str(value).lower(), list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else ""
