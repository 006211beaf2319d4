"""``decent-dp watch``: a live table of the workers of a run."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from decent_dp.tools.cli.inputs import BadInputError
from decent_dp.tools.cli.screen import number, say, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from decent_dp.logging.status import Status

__all__ = ["EXAMPLES", "View", "watch"]

# Seconds for an answer of the store, and after which a run without any status has ended.
_ANSWER, _OVER = 10.0, 15.0
# Seconds between two looks while the first statuses are waited for.
_LOOK = 0.1
_HEADINGS = ("worker", "host", "round", "step ms", "waited ms", "Mbit/s", "distance", "state")

EXAMPLES = """[bold]Examples[/bold]

decent-dp watch

decent-dp watch 10.0.0.1:29500

decent-dp watch --once

On a machine of the run no address is needed. Elsewhere it is that of the run's store: MASTER_ADDR:MASTER_PORT."""


class Entries(Protocol):
    """A place where workers publish."""

    def runs(self) -> Sequence[Status]: ...

    def statuses(self, run: Status) -> dict[int, Status]: ...


def watch(
    address: Annotated[str | None, typer.Argument(metavar="[HOST:PORT]", help="The store of a run elsewhere.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="ID", help="Which run, if there are several.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
) -> int:
    """Show the workers of a run, live: round, time of a step, waiting, traffic, distance.

    The script calls decent_dp.logging.publish(replica), or makes a Recorder. A look at a run asks nothing of its workers.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before torch comes: it would log a stack if a store is gone
    entries, runs = _find(address)
    chosen, others = _choose(runs, run)
    view = View(chosen, entries, others)
    console = Console(highlight=False)
    if once or not console.is_terminal:
        end = time.monotonic() + view.silent
        while view.look() is None and not view.settled and time.monotonic() < end:
            time.sleep(_LOOK)
        say(*view.parts())
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while (last := view.look()) is None:
            live.update(Group(*view.parts()), refresh=True)
            time.sleep(view.beat)
        live.update(Group(*view.parts()), refresh=True)
    say(last)
    return 0


# -- where ---------------------------------------------------------------------------------------------------------------


class _Bounded:
    """The entries of a store, with a limit for each answer."""

    def __init__(self, address: str) -> None:
        from decent_dp.logging.status import StoreEntries
        from decent_dp.transport.waiter import Waiter

        self._calls = Waiter("decent_dp-store")
        try:
            self._entries = self._calls.run(lambda: StoreEntries(address, _ANSWER), 3 * _ANSWER)
        except (RuntimeError, OSError):
            raise ConnectionError(
                f"no store answers at {address}. The run has ended, or this is not MASTER_ADDR:MASTER_PORT of its workers."
            ) from None

    def runs(self) -> Sequence[Status]:
        return self._calls.run(self._entries.runs, _ANSWER)

    def statuses(self, run: Status) -> dict[int, Status]:
        return self._calls.run(lambda: self._entries.statuses(run), _ANSWER)


def _find(address: str | None) -> tuple[Entries, Sequence[Status]]:
    from decent_dp.logging.status import FolderEntries, open_folder

    how = "Call decent_dp.logging.publish(replica) in the script, on every worker"
    if address is None:
        entries: Entries = FolderEntries(open_folder())
        if not (runs := entries.runs()):
            raise RuntimeError(f"no worker on this machine publishes. {how}; for workers elsewhere: decent-dp watch HOST:PORT")
        return entries, runs
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise BadInputError(f"an address is HOST:PORT, such as 10.0.0.1:29500, got {address!r}")
    entries = _Bounded(address)
    if not (runs := entries.runs()):
        raise RuntimeError(f"no worker publishes in the store at {address}. {how}.")
    return entries, runs


def _choose(runs: Sequence[Status], wanted: str | None) -> tuple[Status, Sequence[Status]]:
    """The run to show, and the other ones."""
    found = [run for run in runs if wanted is None or run.run.startswith(wanted)]
    if not found:
        raise BadInputError(f"there is no run {wanted!r}: there is {', '.join(map(_describe, runs))}")
    return found[-1], [run for run in runs if run is not found[-1]]


def _describe(run: Status) -> str:
    return f"{run.run[:8]} ({_plain(run.name)}, {run.world_size} worker{'s' * (run.world_size > 1)})"


def _plain(text: str) -> str:
    """Without what would move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:60]


# -- what ------------------------------------------------------------------------------------------------------------------


class View:
    """What is known of a run, and since when by this process's clock.

    Args:
        run: to be shown.
        entries: where it was found. If these are the files of this machine, and workers elsewhere are missing there, the run's
            store is asked.
        others: other runs there.
    """

    def __init__(
        self, run: Status, entries: Entries, others: Sequence[Status] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        from decent_dp.logging.status import BEAT, SILENT

        self.beat, self.silent = BEAT, SILENT
        self._run, self._others, self._entries, self._clock = run, others, entries, clock
        self._statuses: dict[int, Status] = {}
        self._present: set[int] = set()
        self._first: dict[int, int] = {}
        self._heard: dict[int, float] = {}

    def look(self) -> str | None:
        """Reads the statuses; returns the last word if the run is over."""
        try:
            found = self._entries.statuses(self._run)
            if len(found) < self._run.world_size and not self._statuses and self._run.store:
                found = self._everywhere() or found
        except (RuntimeError, OSError):
            if not self._statuses:
                raise
            return f"the run's store does not answer any more: the run has ended, or its machine is gone. {self._progress()}"
        now = self._clock()
        for rank, status in found.items():
            if rank not in self._statuses or status.beat != self._statuses[rank].beat:
                self._heard[rank] = now
            self._first.setdefault(rank, status.beat)
        self._statuses.update(found)
        self._present = set(found)
        if not found:
            return f"the run has ended. {self._progress()}"
        silence = min(now - self._heard[rank] for rank in found)
        if silence > _OVER:
            return f"no worker has said anything for {silence:.0f} s: the run was stopped or killed. {self._progress()}"
        return None

    def _everywhere(self) -> dict[int, Status] | None:
        """The statuses in the store, if it answers and has more."""
        from decent_dp.logging.status import FolderEntries

        if not isinstance(self._entries, FolderEntries):
            return None
        try:
            store = _Bounded(self._run.store)
            found = store.statuses(self._run)
        except (RuntimeError, OSError):
            return None
        self._entries = store
        return found

    @property
    def settled(self) -> bool:
        """Whether a second status of each worker has come, so that it is known to live."""
        return len(self._statuses) == self._run.world_size and all(
            rank not in self._present or status.beat != self._first[rank] for rank, status in self._statuses.items()
        )

    def _progress(self) -> str:
        return f"Its last round: {max((status.round for status in self._statuses.values()), default=0)}."

    def parts(self) -> list[RenderableType]:
        """The table, and the other runs."""
        rows = [self._row(rank) for rank in range(self._run.world_size)]
        parts: list[RenderableType] = [Text(f"run {_describe(self._run)}"), table(_HEADINGS, rows, left=(1, 7))]
        if self._others:
            parts.append(Text(f"other runs, shown with --run ID: {', '.join(map(_describe, self._others))}", style="dim"))
        return parts

    def _row(self, rank: int) -> list[str]:
        status = self._statuses.get(rank)
        if status is None:
            return [str(rank), "-", "-", "-", "-", "-", "-", "has not said anything"]
        silence = self._clock() - self._heard[rank]
        if rank not in self._present:
            state = "ended"
        elif silence > self.silent:
            state = f"silent for {silence:.0f} s"
        elif status.idle_s > max(self.silent, 3e-3 * (status.step_ms or 0.0)):
            state = f"no round for {status.idle_s:.0f} s"
        else:
            state = "trains"
        return [
            str(rank),
            _plain(status.host),
            f"{status.round:,}",
            _cell(status.step_ms),
            _cell(status.waited_ms),
            _cell(status.mbit_s),
            _cell(status.distance),
            state,
        ]


def _cell(value: float | None) -> str:
    return str(value) if value is not None and not math.isfinite(value) else number(value)
