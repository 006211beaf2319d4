"""From what a user types to numbers, topologies and files; what cannot be meant is refused in one line."""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decent_dp.topo import Topology

__all__ = [
    "BadInputError",
    "as_bytes",
    "as_count",
    "as_rate",
    "as_seconds",
    "can_plot",
    "check_workers",
    "in_options",
    "make",
    "one_of",
    "read_json",
    "refusing",
    "require",
    "writable",
    "writable_folder",
    "writing",
]

# For more workers a table of rounds takes minutes. An analysis or a prediction takes seconds up to the second number.
MOST_WORKERS, MOST_ANALYSED = 16_384, 1024
# What links, models and steps can be, with room on both sides: bits a second, parameters, seconds, bytes.
_RATES, _MOST_COUNT, _TIMES, _MOST_BYTES = (1e3, 1e18), 10**15, (1e-9, 3600.0), 1e18
# A plain number below it was meant to have a unit.
_PLAIN_BITS = 1e6

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NUMBER = re.compile(r"([-+]?(?:\d+(?:[_,]\d+)*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)", re.DOTALL)


class BadInputError(Exception):
    """What was typed cannot be meant; the message is one line and says what to write. Exit code 2."""


@contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """The ``ValueError`` and ``TypeError`` of what is called inside are about what the user typed; ``what`` goes before."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{what}: {error}" if what else str(error)) from error


def require(
    option: str, value: float, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> None:
    """Refuses a number that is too small or too large, or none at all.

    Raises:
        BadInputError: ``value`` is not finite, less than ``least``, not more than ``above``, or more than ``most``.
    """
    if not math.isfinite(value):
        raise BadInputError(f"{option} must be a finite number, got {value}")
    if least is not None and value < least:
        raise BadInputError(f"{option} must be at least {least:g}, got {value:g}")
    if above is not None and value <= above:
        raise BadInputError(f"{option} must be more than {above:g}, got {value:g}")
    if most is not None and value > most:
        raise BadInputError(f"{option} must be at most {most:g}, got {value:g}")


def one_of(option: str, value: str, known: Iterable[str]) -> str:
    """``value``, if it is known.

    Raises:
        BadInputError: it is not; the message names what is, and the nearest.
    """
    names = list(known)
    if value in names:
        return value
    close = difflib.get_close_matches(value.lower(), names, n=1)
    hint = f"Did you mean '{close[0]}'? " if close else ""
    raise BadInputError(f"{option} '{value}' is unknown. {hint}Known: {', '.join(names)}")


def as_rate(option: str, text: str) -> float:
    """Bytes a second of '25gbit', '1.5 Gbit/s', '100mbps', '3GB/s', or a plain number of bits a second.

    Raises:
        BadInputError: it is no rate from 1 kbit/s to 1 Ebit/s, or its unit is missing or unknown.
    """
    help_ = "write a rate such as 25gbit, 100mbit or 3GB/s"
    number, unit = _split(option, text, help_)
    if not unit and number < _PLAIN_BITS:
        raise BadInputError(f"{option} '{text}' has no unit: write {text.strip()}gbit (a plain number counts bits a second)")
    bits = 8 * _bytes_a_second(option, text, number, unit, help_)
    if not _RATES[0] <= bits <= _RATES[1]:
        raise BadInputError(f"{option} '{text}' is no rate of a link, 1 kbit/s to 1 Ebit/s: {help_}")
    return bits / 8


def _bytes_a_second(option: str, text: str, number: float, unit: str, help_: str) -> float:
    match = re.fullmatch(r"([kmgt]?)bits?(?:/s|ps)?", unit, re.IGNORECASE)
    if match or not unit:
        return number * (_PREFIXES[match[1].lower()] if match else 1) / 8
    match = re.fullmatch(r"([kmgtKMGT]?)(i?)(B|b)(?:/s|ps)", unit)
    if match is None or (match[2] and not match[1]):
        raise BadInputError(f"{option} '{text}' has a unit that is unknown here: {help_}")
    scale = 1024 ** ("kmgt".index(match[1].lower()) + 1) if match[2] else _PREFIXES[match[1].lower()]
    return number * scale / (1 if match[3] == "B" else 8)


def as_seconds(option: str, text: str) -> float:
    """Seconds of '20us', '0.1ms', '300 ns' or '1s'.

    Raises:
        BadInputError: it is no time from 1 ns to 1 h, or its unit is missing or unknown.
    """
    help_ = "write a time such as 20us, 0.1ms or 1s"
    number, unit = _split(option, text, help_)
    units = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
    if unit.lower() not in units:
        raise BadInputError(f"{option} '{text}' has {'a unit that is unknown here' if unit else 'no unit'}: {help_}")
    seconds = number * units[unit.lower()]
    if not _TIMES[0] * (1 - 1e-9) <= seconds <= _TIMES[1]:
        raise BadInputError(f"{option} '{text}' is not between 1 ns and 1 h: {help_}")
    return seconds


def as_bytes(option: str, text: str) -> float:
    """Bytes of '100MB', '1.5 GiB', or a plain number.

    Raises:
        BadInputError: it is no size of 1 byte to 10^18, or its unit is unknown.
    """
    help_ = "write a size such as 100MB or 1.5GiB; a plain number counts bytes"
    number, unit = _split(option, text, help_)
    match = re.fullmatch(r"(?:([kmgt])(i?))?b?", unit, re.IGNORECASE)
    if match is None:
        raise BadInputError(f"{option} '{text}' has a unit that is unknown here: {help_}")
    prefix = (match[1] or "").lower()
    nbytes = number * (1024 ** ("kmgt".index(prefix) + 1) if match[2] else _PREFIXES[prefix])
    if not 1 <= nbytes <= _MOST_BYTES:
        raise BadInputError(f"{option} '{text}' is not between 1 byte and 10^18: {help_}")
    return nbytes


def as_count(option: str, text: str) -> int:
    """A whole number of '65e6', '65M', '1.3B', '65,000,000' or '65000000'.

    Raises:
        BadInputError: it is no whole number from 1 to 10^15.
    """
    help_ = "write a whole number such as 65e6, 65M or 1.3B"
    number, unit = _split(option, text, help_)
    scales = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    if unit.lower() not in scales:
        raise BadInputError(f"{option} '{text}' has a unit that is unknown here: {help_}")
    value = number * scales[unit.lower()]
    if value > _MOST_COUNT:
        raise BadInputError(f"{option} '{text}' is more than 10^15: {help_}")
    if abs(value - round(value)) > 1e-6 * value or round(value) < 1:
        raise BadInputError(f"{option} '{text}' is no whole number: {help_}")
    return round(value)


def _split(option: str, text: str, help_: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise BadInputError(f"{option} '{text}' is not understood: {help_}")
    number = float(match[1].replace(",", "").replace("_", ""))
    if not 0 < number < math.inf:
        raise BadInputError(f"{option} must be above zero and finite, got '{text}': {help_}")
    return number, match[2].strip()


def check_workers(n: int, local: int, most: int = MOST_WORKERS) -> None:
    """Refuses numbers of workers that no topology can have, and more than a command takes."""
    require("-n", n, least=1)
    require("-l", local, least=1)
    if n > most:
        raise BadInputError(f"-n {n} is more than the {most} workers that this command takes; write a smaller number")
    if local > n:
        raise BadInputError(f"-l {local} workers a node are more than the {n} workers of -n; write at most {n}")
    if n % local:
        fewer, more = n // local * local, (n // local + 1) * local
        raise BadInputError(f"-n {n} workers do not fill nodes of -l {local}; write -n {fewer} or {more}, or another -l")


def make(name: str, n: int, local: int) -> Topology:
    """The topology of a name, or of a composition such as 'complete:100,base-2'.

    Raises:
        BadInputError: the name is unknown, or it does not serve so many workers.
    """
    from decent_dp.topo import TopologyReg, make_topology, names_that_fit, why_unfit

    check_workers(n, local)
    for part in [name] if name in TopologyReg.registry else [part.strip().partition(":")[0] for part in name.split(",")]:
        reason = why_unfit(part, n, local) if part in TopologyReg.registry else None
        if reason is not None:
            fitting = ", ".join(names_that_fit(n, local)) or "none"
            raise BadInputError(f"'{part}' {in_options(reason)}; of the registered ones fit: {fitting}")
    with refusing():
        return make_topology(name, local_world_size=local, world_size=n, rank=0)


def in_options(reason: str) -> str:
    """What the library says about numbers of workers, as who typed options would say it."""
    reason = reason.replace("got world_size=", "got ")
    return re.sub(r"\bworld_size=", "-n ", re.sub(r"\blocal_world_size=", "-l ", reason))


def read_json(option: str, path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        BadInputError: there is no such file, it cannot be read, or it holds no JSON in UTF-8.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInputError(f"{option} {path} cannot be read: {error.strerror or error}; give a file that exists") from error
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{option} {path} is not UTF-8 (some shells write > FILE in UTF-16): let the doctor write it, with --out FILE"
        ) from error
    except RecursionError as error:
        raise BadInputError(f"{option} {path} holds no JSON that can be meant: its brackets are nested too deep") from error
    except ValueError as error:
        raise BadInputError(f"{option} {path} holds no JSON: {error}") from error


def can_plot() -> None:
    """Says before any work is done that a figure cannot be drawn.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # blocked in sys.modules
        found = False
    if not found:
        raise ImportError("plots need matplotlib; in the clone: pip install -e '.[plots]'")


def writable(option: str, path: Path | None, endings: Iterable[str] = ()) -> None:
    """Refuses, before any work is done, a file that could not be written at its end.

    Raises:
        BadInputError: its folder is not there, it or its folder may not be written to, it is a folder itself, or its ending
            says no format that is known.
        ImportError: as of ``can_plot``, where endings are given.
    """
    if path is None:
        return
    if path.is_dir():
        raise BadInputError(f"{option} {path} is a folder: give the name of a file in it")
    if not path.parent.is_dir():
        raise BadInputError(f"{option} {path}: the folder {path.parent} does not exist; make it first")
    _permitted(option, path, path if path.exists() else path.parent)
    if endings:
        can_plot()
    known = list(endings)
    if known and path.suffix.lower() not in known:
        raise BadInputError(f"{option} {path} has no ending that is known here: write one of {', '.join(known)}")


def writable_folder(option: str, path: Path | None, files: Iterable[str]) -> None:
    """Refuses, before any work is done, a folder, there or to be made, in which these files could not be written at the end.

    Raises:
        BadInputError: it is no folder, it cannot be made, or it or a file may not be written to.
    """
    if path is None:
        return
    if path.is_dir():
        for name in files:
            writable(option, path / name)
        return
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise BadInputError(f"{option} {path}: {nearest} is no folder; give the name of one, new or not")
    _permitted(option, path, nearest)


def _permitted(option: str, path: Path, place: Path) -> None:
    if not os.access(place, os.W_OK):
        what = "it" if place == path else f"the folder {place}"
        raise BadInputError(f"{option} {path}: {what} may not be written to; give another place")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with a file names the file.

    Raises:
        RuntimeError: it could not be written.
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{path} could not be written: {error.strerror or error}; give another place") from error
