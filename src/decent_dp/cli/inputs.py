"""Turns the options of a command into numbers, topologies and files, and refuses bad ones in one line."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decent_dp._checks import did_you_mean

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


class BadInputError(Exception):
    """An option has a bad value; the message is one line and says what to write. Exit code 2."""


# Units. No small package has rates in bits and bytes per second: humanfriendly has sizes and spans, pint is large.
_SCALES = {"": 1.0, **{f"{p}{i}": (1024 if i else 1000) ** (k + 1) for k, p in enumerate("kmgt") for i in ("", "i")}}
_BITS = {f"{p}{unit}": scale / 8 for p, scale in _SCALES.items() for unit in ("bit", "bits", "bit/s", "bits/s", "b/s", "bps")}
_BYTES = {f"{p}{unit}": scale for p, scale in _SCALES.items() for unit in ("byte/s", "byteps")}
_NUMBER = re.compile(r"([-+]?(?:\d+(?:[_,]\d+)*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class _Quantity:
    """Units with their scales, the least and the largest value, and these in words with examples."""

    units: Mapping[str, float]
    least: float
    most: float
    between: str
    write: str
    least_plain: float = 0.0  # a smaller number without a unit lacks it

    def __call__(self, option: str, text: str) -> float:
        """The value of ``text``, such as '25gbit'. Only a 'B' for bytes is case-sensitive.

        Raises:
            BadInputError: it is not a number with a known unit, or it is out of range.
        """
        match = _NUMBER.fullmatch(text.strip())
        if match is None:
            raise BadInputError(f"{option} '{text}' is not understood: write {self.write}")
        number, unit = float(re.sub("[_,]", "", match[1])), match[2].strip()
        if not 0 < number < math.inf:
            raise BadInputError(f"{option} must be above zero and finite, got '{text}': write {self.write}")
        scale = self.units.get(re.sub(r"B(?=/s$|ps$)", "byte", unit).lower())
        if scale is None or (not unit and number < self.least_plain):
            wrong = "a unit that is unknown here" if unit else "no unit"
            raise BadInputError(f"{option} '{text}' has {wrong}: write {self.write}")
        value = number * scale
        if not self.least * (1 - 1e-9) <= value <= self.most:
            raise BadInputError(f"{option} '{text}' is not {self.between}: write {self.write}")
        return value


as_rate = _Quantity(
    {**_BITS, **_BYTES, "": 1 / 8}, 1e3 / 8, 1e18 / 8, "between 1 kbit/s and 1 Ebit/s",
    "a rate such as 25gbit, 100mbit or 3GB/s; a plain number counts bit/s", least_plain=1e6,
)  # fmt: skip
as_seconds = _Quantity(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}, 1e-9, 3600.0, "between 1 ns and 1 h",
    "a time such as 20us, 0.1ms or 1s",
)  # fmt: skip
as_bytes = _Quantity(
    {**_SCALES, **{f"{p}b": scale for p, scale in _SCALES.items()}}, 1.0, 1e18, "between 1 byte and 10^18",
    "a size such as 100MB or 1.5GiB; a plain number counts bytes",
)  # fmt: skip
_count = _Quantity(
    {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}, 0.0, 1e15, "between 1 and 10^15",
    "a whole number such as 65e6, 65M or 1.3B",
)  # fmt: skip


def as_count(option: str, text: str) -> int:
    """A whole number of '65e6', '65M', '1.3B' or '65,000,000'."""
    value = _count(option, text)
    if abs(value - round(value)) > 1e-6 * value or round(value) < 1:
        raise BadInputError(f"{option} '{text}' is no whole number: write {_count.write}")
    return round(value)


@contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """Makes the ``ValueError`` and ``TypeError`` inside errors about an option; ``what`` goes before the message."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{what}: {error}" if what else str(error)) from error


def require(
    option: str, value: float, *, least: float | None = None, above: float | None = None, most: float | None = None
) -> None:
    """Refuses a number that is not finite or out of range."""
    if not math.isfinite(value):
        raise BadInputError(f"{option} must be a finite number, got {value}")
    if least is not None and value < least:
        raise BadInputError(f"{option} must be at least {least:g}, got {value:g}")
    if above is not None and value <= above:
        raise BadInputError(f"{option} must be more than {above:g}, got {value:g}")
    if most is not None and value > most:
        raise BadInputError(f"{option} must be at most {most:g}, got {value:g}")


def one_of(option: str, value: str, known: Iterable[str]) -> str:
    """``value``, if it is in ``known``; else a BadInputError that names them, and the nearest."""
    names = list(known)
    if value in names:
        return value
    raise BadInputError(f"{option} '{value}' is unknown{did_you_mean(value, names) or '.'} Known: {', '.join(names)}")


def check_workers(n: int, local: int, most: int = MOST_WORKERS) -> None:
    """Refuses numbers of workers that no topology can have, and more than a command takes."""
    require("-n", n, least=1)
    require("-l", local, least=1)
    if n > most:
        raise BadInputError(f"-n {n} is more than the {most} workers that this command takes; write a smaller number")
    if local > n:
        raise BadInputError(f"-l {local} workers per node are more than the {n} workers of -n; write at most {n}")
    if n % local:
        fewer, more = n // local * local, (n // local + 1) * local
        raise BadInputError(f"-n {n} workers do not fill nodes of -l {local}; write -n {fewer} or {more}, or another -l")


def make(name: str, n: int, local: int) -> Topology:
    """The topology of a name, or of a composition such as 'complete:100,base-2'."""
    from decent_dp.topo import TopologyReg, make_topology
    from decent_dp.topo.registry import names_that_fit, why_unfit

    check_workers(n, local)
    for part in [name] if name in TopologyReg.registry else [part.strip().partition(":")[0] for part in name.split(",")]:
        reason = why_unfit(part, n, local) if part in TopologyReg.registry else None
        if reason is not None:
            fitting = ", ".join(names_that_fit(n, local)) or "none"
            raise BadInputError(f"'{part}' {in_options(reason)}; of the registered ones fit: {fitting}")
    with refusing():
        return make_topology(name, local_world_size=local, world_size=n, rank=0)


def in_options(reason: str) -> str:
    """The library's message about numbers of workers, with the names of the options."""
    reason = reason.replace("got world_size=", "got ")
    return re.sub(r"\bworld_size=", "-n ", re.sub(r"\blocal_world_size=", "-l ", reason))


def read_json(option: str, path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInputError(f"{option} {path} cannot be read: {error.strerror or error}; give a file that exists") from error
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{option} {path} is not UTF-8 (some shells write > FILE in UTF-16): let the doctor write it, with --out FILE"
        ) from error
    except RecursionError as error:
        raise BadInputError(f"{option} {path} holds no JSON: its brackets are nested too deep") from error
    except ValueError as error:
        raise BadInputError(f"{option} {path} holds no JSON: {error}") from error


def can_plot() -> None:
    """Raises ImportError before any work is done, if matplotlib is not installed."""
    try:
        found = importlib.util.find_spec("matplotlib") is not None
    except ValueError:  # blocked in sys.modules
        found = False
    if not found:
        raise ImportError("plots need matplotlib; in the clone: pip install -e '.[plots]'")


def writable(option: str, path: Path | None, endings: Iterable[str] = ()) -> None:
    """Refuses, before any work is done, a file that could not be written at the end."""
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
    """Refuses, before any work is done, a folder, new or not, in which these files could not be written at the end."""
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
    """Makes an OSError inside a RuntimeError that names the file."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{path} could not be written: {error.strerror or error}; give another place") from error
