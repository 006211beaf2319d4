"""Validation of single arguments, with the same error texts everywhere."""

from __future__ import annotations

import difflib
import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["check_bool", "check_choice", "check_integer", "check_number", "did_you_mean", "install_hint", "to_float"]


def check_integer(name: str, value: Any, at_least: int | None = None, unit: str = "") -> int:
    """Returns ``value`` as an int. NumPy's integers are integers; bools and floats are not.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is below ``at_least``.
    """
    want = f"a whole number{f' of {unit}' if unit else ''}{'' if at_least is None else f', at least {at_least}'}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {want}, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be {want}, got {value!r}")
    return operator.index(value)


def check_bool(name: str, value: Any) -> bool:
    """Returns ``value``.

    Raises:
        TypeError: ``value`` is neither True nor False.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_number(
    name: str, value: Any, want: str, *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """Returns ``value`` as a finite float within the bounds. ``want`` describes them in the error.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is outside the bounds.
    """
    number = to_float(value)
    if number is None:
        raise TypeError(f"{name} must be {want}, got {value!r}")
    if not (math.isfinite(number) and at_least <= number < below and number > above):
        raise ValueError(f"{name} must be {want}, got {value!r}")
    return number


def to_float(value: Any) -> float | None:
    """Returns ``value`` as a float, infinite if it is too large for one; None if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_choice(name: str, value: Any, known: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``known``.

    Raises:
        ValueError: it is not; suggests the closest one.
    """
    known = list(known)
    if not isinstance(value, str) or value not in known:
        choices = " or ".join(filter(None, [", ".join(map(repr, known[:-1])), repr(known[-1])]))
        raise ValueError(f"{name} must be {choices}, got {value!r}{did_you_mean(value, known) or '.'}")
    return value


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """Returns the end of an error message, which suggests the closest of ``known``; '' if none is close."""
    close = difflib.get_close_matches(str(value).lower(), list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else ""


def install_hint(extra: str) -> str:
    """Returns the end of an error message about a missing package: the line that installs it.

    By name, pip keeps the version that is installed, although its registry has only an earlier one.
    """
    return f"pip install 'decent-dp[{extra}]', or in a clone of the repository: pip install -e '.[{extra}]'"
