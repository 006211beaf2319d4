"""Turns the options of a command into numbers, topologies and files, and refuses bad ones in one line."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decent_dp.topo import Topology

__all__ = [
    "BadInputError",
    "as_count",
    "as_ranks",
    "as_rate",
    "as_seconds",
    "check_workers",
    "in_options",
    "make",
    "refusing",
    "require",
    "writable",
    "writing",
]

# For more workers a table of rounds takes minutes. An analysis or a prediction takes seconds up to the second number.
MOST_WORKERS, MOST_ANALYSED = 16_384, 1024
_PLOT_ENDINGS = (".png", ".pdf", ".svg")


class BadInputError(Exception):
    """An option has a bad value; the message is one line and says what to write. Exit code 2."""


# -- numbers with units ----------------------------------------------------------------------------------------------------

# No small package has rates in bits and bytes per second: humanfriendly has sizes and spans, pint is large.
_NUMBER = re.compile(r"([-+]?(?:\d+(?:[_,]\d+)*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)", re.DOTALL)
_PREFIXES = {"": 1.0, **{f"{p}{i}": (1024.0 if i else 1000.0) ** (k + 1) for k, p in enumerate("kmgt") for i in ("", "i")}}
_BITS = {f"{p}{unit}": scale / 8 for p, scale in _PREFIXES.items() for unit in ("bit", "bits", "bit/s", "bits/s", "b/s", "bps")}
_RATES = {**_BITS, **{f"{p}{unit}": scale for p, scale in _PREFIXES.items() for unit in ("byte/s", "byteps")}}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _value(option: str, text: str, units: Mapping[str, float], write: str) -> float:
    """The value of ``text``, such as '25gbit'. Only a 'B' for bytes is case-sensitive."""
    match = _NUMBER.fullmatch(text.strip())
    scale = units.get(re.sub(r"B(?=/s$|ps$)", "byte", match[2].strip()).lower()) if match else None
    if match is None or scale is None:
        raise BadInputError(f"{option} '{text}' is not understood: write {write}")
    value = float(re.sub("[_,]", "", match[1])) * scale
    if not 0 < value < math.inf:
        raise BadInputError(f"{option} must be above zero and finite, got '{text}': write {write}")
    return value


def as_rate(option: str, text: str) -> float:
    """Bytes per second of '25gbit', '100Mbps' or '3GB/s'."""
    return _value(option, text, _RATES, "a rate such as 25gbit, 100mbit or 3GB/s")


def as_seconds(option: str, text: str) -> float:
    """Seconds of '20us', '0.1ms' or '1s'."""
    return _value(option, text, _TIMES, "a time such as 20us, 0.1ms or 1s")


def as_count(option: str, text: str) -> int:
    """A whole number of '65e6', '65M', '1.3B' or '65,000,000'."""
    write = "a whole number such as 65e6, 65M or 1.3B"
    value = _value(option, text, _COUNTS, write)
    if abs(value - round(value)) > 1e-6 * value or round(value) < 1:
        raise BadInputError(f"{option} '{text}' is no whole number: write {write}")
    return round(value)


def require(option: str, value: float, holds: bool, want: str) -> None:
    """Refuses a value for which the condition does not hold. (Chained comparisons do not hold for NaN.)"""
    if not holds:
        raise BadInputError(f"{option} must be {want}, got {value:g}")


# -- workers and topologies ------------------------------------------------------------------------------------------------


@contextmanager
def refusing() -> Iterator[None]:
    """Makes the ``ValueError`` and ``TypeError`` inside errors about an option."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadInputError(in_options(str(error))) from error


def in_options(reason: str) -> str:
    """The library's message about numbers of workers, with the names of the options."""
    reason = reason.replace("got world_size=", "got ")
    return re.sub(r"\bworld_size=", "-n ", re.sub(r"\blocal_world_size=", "-l ", reason))


def check_workers(n: int, local: int, most: int = MOST_WORKERS) -> None:
    """Refuses numbers of workers that no topology can have, and more than a command takes."""
    if n > most:
        raise BadInputError(f"-n {n} is more than the {most} workers that this command takes; write a smaller number")
    if local > n:
        raise BadInputError(f"-l {local} workers per node are more than the {n} workers of -n; write at most {n}")
    if n % local:
        fewer, more = n // local * local, (n // local + 1) * local
        raise BadInputError(f"-n {n} workers do not fill nodes of -l {local}; write -n {fewer} or {more}, or another -l")


def make(name: str, n: int, local: int) -> Topology:
    """The topology of a name, or of a composition such as 'complete:100,base-2'."""
    from decent_dp.topo import make_topology

    check_workers(n, local)
    with refusing():
        return make_topology(name, local_world_size=local, world_size=n, rank=0)


def as_ranks(option: str, text: str, n: int) -> list[int]:
    """Some of n workers, from '3,5'."""
    write = f"numbers of workers, 0 to {n - 1}, such as 0,{n - 1}"
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise BadInputError(f"{option} '{text}' is not understood: write {write}") from None
    if not 0 <= ranks[0] <= ranks[-1] < n:
        raise BadInputError(f"{option} '{text}' has a number that is none of the -n {n} workers: write {write}")
    if len(ranks) == n:
        raise BadInputError(f"{option} '{text}' leaves none of the -n {n} workers: leave one at least")
    return ranks


# -- files -----------------------------------------------------------------------------------------------------------------


def writable(option: str, path: Path | None, *, plot: bool = False) -> None:
    """Refuses, before any work is done, a file that could not be written at the end.

    Raises:
        ImportError: it is for a plot, and matplotlib is not installed.
    """
    if path is None:
        return
    place = path if path.exists() else path.parent
    if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
        raise BadInputError(f"{option} {path} cannot be written: give a file in a folder that exists and may be written to")
    if plot:
        from decent_dp.tools.plots import figure_class

        figure_class()
        if path.suffix.lower() not in _PLOT_ENDINGS:
            raise BadInputError(f"{option} {path} has no ending that is known here: write one of {', '.join(_PLOT_ENDINGS)}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes an OSError inside a RuntimeError that names the file."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{path} could not be written: {error.strerror or error}; give another place") from error
