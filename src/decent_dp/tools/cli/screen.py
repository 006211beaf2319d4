"""Output: tables and JSON on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["figures", "number", "one_line", "plain_json", "say", "size", "table", "waiting", "write_json"]

# Larger numbers are written with an exponent.
_LARGE = 1e7


def one_line(message: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(message).split())


def say(*parts: Any) -> None:
    """Prints texts, without markup, and tables on stdout. If the reader has gone (``| head``), the command ends quietly."""
    console = Console(file=sys.stdout, highlight=False)
    width = console.width
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, str):
                console.print(part, markup=False, soft_wrap=True)
            else:
                # A table that cannot be folded further exceeds the width, and is not cut.
                console.width = max(width, Measurement.get(console, console.options.update(width=100_000), part).minimum)
                console.print(part)
    _write("\n".join(line.rstrip() if not console.is_terminal else line for line in capture.get().split("\n")))


def write_json(document: Any) -> None:
    """Prints one JSON document on stdout."""
    _write(plain_json(document) + "\n")


def plain_json(document: Any) -> str:
    """JSON with null for numbers that are not finite."""
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise the interpreter writes the rest of the buffer again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None


def waiting(what: str) -> AbstractContextManager[object]:
    """Says what is waited for on stderr, if it is a terminal."""
    console = Console(file=sys.stderr, highlight=False)
    return console.status(what) if console.is_terminal else nullcontext()


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[int] = (0,), folded: Iterable[int] = ()
) -> Table:
    """A table. The ``left`` and ``folded`` columns are text; only folded ones adapt to the terminal: numbers are never cut."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    rows, left, folded = list(rows), set(left), set(folded)
    for index, heading in enumerate(headings):
        fold = index in folded
        widest = max(len(line) for cell in (heading, *(row[index] for row in rows)) for line in (cell.split("\n") or [""]))
        made.add_column(
            Text(heading),
            justify="left" if fold or index in left else "right",
            overflow="fold",
            no_wrap=not fold,
            min_width=None if fold else widest,
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def figures(rows: Iterable[tuple[str, str]]) -> Table:
    """A list of names and texts."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(name), Text(text))
    return grid


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, commas if it is large, an exponent if it is huge; a dash for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if 10 ** (digits - 1) <= abs(value) < _LARGE:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def size(nbytes: float) -> str:
    """Bytes with a unit: '260 MB'."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{number(nbytes / scale)} {unit}"
    return f"{number(nbytes)} B"
