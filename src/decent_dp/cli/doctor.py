"""``decent-dp doctor``: what the workers are, who reaches whom, and what the links between them are worth."""

from __future__ import annotations

import math
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import decent_dp
from decent_dp.cli.inputs import require, writable
from decent_dp.cli.screen import number, one_line, plain_json, progress_console, say, table, write_json

if TYPE_CHECKING:
    from decent_dp.transport.probe import Pair, Probe

__all__ = ["EXAMPLES", "FORMAT", "doctor"]

FORMAT = "decent_dp-doctor-1"

_TORCHRUN = "torchrun --standalone --nproc-per-node 4 -m decent_dp.cli doctor"
# Workers up to which the whole matrix is shown, and columns of a block of it.
_MATRIX, _COLUMNS = 16, 8

EXAMPLES = f"""[bold]Examples[/bold]

{_TORCHRUN}

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m decent_dp.cli doctor --out links.json

decent-dp plan --measured links.json --params 65e6 --step-ms 60

Exit code 1 if a worker does not reach another."""


class _StoppedError(Exception):
    """The launcher ends all workers, as one of them has failed. (No RuntimeError: those of a pair are results.)"""


def doctor(
    seconds: Annotated[float, typer.Option("--seconds-a-pair", help="How long a pair is measured, about.")] = 0.3,
    timeout: Annotated[float, typer.Option(help="Seconds that a silent worker is waited for.")] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON document, which plan --measured reads.", metavar="FILE")
    ] = None,
) -> int:
    """Check the workers and measure the links between them; start it as you start the training, with torchrun.

    Latency and bandwidth of every pair come from the library's own exchanges, one pair at a time. Without torchrun it says
    what it can about this one machine.
    """
    require("--seconds-a-pair", seconds, above=0)
    require("--timeout", timeout, above=0)
    if os.environ.get("RANK", "0") == "0":  # the file is worker 0's, and so is the word about it
        writable("--out", out)

    from decent_dp.launch import initialize_dist
    from decent_dp.transport.probe import Probe

    began = time.monotonic()
    with _bounded(timeout):
        rank, _ = initialize_dist()
        probe = Probe(seconds, timeout)
    try:
        return _examine(probe, seconds, began, json, out)
    except (RuntimeError, _StoppedError) as error:
        reason: Exception = error
    with _ending_calmly():
        _explain(probe, rank, reason)
    return 1


def _examine(probe: Probe, seconds: float, began: float, json: bool, out: Path | None) -> int:
    """The survey; worker 0 says what came of it while the others wait for it to have done so."""
    workers = probe.gather(_card(str(probe.device)))
    nodes = probe.nodes()
    with _stopping(probe.rank), _progress(probe, seconds) as on_pair:
        pairs = probe.survey(on_pair)
    code = 1 if any(pair.error for pair in pairs.values()) else 0
    if probe.rank == 0:
        document = _document(workers, nodes, probe.backend, pairs, time.monotonic() - began)
        if out is not None:
            out.write_text(plain_json(document) + "\n", encoding="utf-8")
        if json:
            write_json(document)
        else:
            _report(document, out)
        for (a, b), pair in pairs.items():
            if pair.error:
                sys.stderr.write(f"decent-dp: workers {a} and {b} do not reach each other: {one_line(pair.error)}\n")
    probe.gather(None)
    probe.close()
    return code


def _explain(probe: Probe, rank: int, reason: Exception) -> None:
    """One line by worker 0 about a survey that broke off; the others wait for it."""
    gone = [] if isinstance(reason, _StoppedError) else probe.roll_call()
    if rank == 0:
        text = one_line(reason)
        if gone:
            who = f"worker {gone[0]} is" if len(gone) == 1 else f"workers {', '.join(map(str, gone))} are"
            text = f"{who} gone: killed, or failed with words of its own; see there. The links were not measured to the end"
        sys.stderr.write(f"decent-dp: {text}\n")
        sys.stderr.flush()
        probe.dismiss()


# -- around the measuring --------------------------------------------------------------------------------------------------


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Ends the process if the workers do not meet: torch would wait for half an hour."""

    def end() -> None:
        if os.environ.get("RANK", "0") == "0":
            size = os.environ.get("WORLD_SIZE", "1")
            sys.stderr.write(
                f"decent-dp: the {size} workers did not meet within {seconds:g} s: see that all are started, with the same "
                "MASTER_ADDR and MASTER_PORT, and that no firewall is between them; --timeout waits longer\n"
            )
            sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _stopping(rank: int) -> Iterator[None]:
    """Lets worker 0 say a last word when the launcher ends it because another worker has failed."""
    if rank != 0 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise _StoppedError(
            "stopped by the launcher, as another worker has failed or was killed: see its own words. "
            "The links were not measured to the end"
        )

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _ending_calmly() -> Iterator[None]:
    """A launcher that ends all workers now is welcome to, once the word is said."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield


@contextmanager
def _progress(probe: Probe, seconds: float) -> Iterator[Any]:
    """What to call before each pair: worker 0 shows it where somebody looks."""
    console = progress_console() if probe.rank == 0 else None
    total = probe.world_size * (probe.world_size - 1) // 2
    if console is None or total == 0:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{total} pairs, at most about {total * seconds:.0f} s", total=total)

        def on_pair(a: int, b: int) -> None:
            bar.update(task, description=f"workers {a} and {b}", advance=1)

        yield on_pair


# -- what was found --------------------------------------------------------------------------------------------------------


def _card(device: str) -> dict[str, str]:
    import torch

    if device.startswith("cuda"):
        device += f" ({torch.cuda.get_device_name(device)})"
    return {
        "host": socket.gethostname(),
        "device": device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "decent_dp": decent_dp.__version__,
    }


def _document(
    workers: Sequence[dict[str, str]],
    nodes: Sequence[int],
    backend: str,
    pairs: dict[tuple[int, int], Pair],
    seconds: float,
) -> dict[str, Any]:
    """What ``plan --measured`` reads: matrices from row to column, null where there is nothing."""
    n = len(workers)
    latency: list[list[float | None]] = [[None] * n for _ in range(n)]
    rate: list[list[float | None]] = [[None] * n for _ in range(n)]
    for (a, b), pair in pairs.items():
        if not pair.error:
            latency[a][b] = latency[b][a] = pair.latency * 1e6
            rate[a][b] = rate[b][a] = pair.rate * 8 / 1e6
    return {
        "format": FORMAT,
        "world_size": n,
        "nodes": list(nodes),
        "backend": backend,
        "workers": [{"rank": rank, "node": nodes[rank], **card} for rank, card in enumerate(workers)],
        "latency_us": latency,
        "mbit_s": rate,
        "unreachable": [{"pair": [a, b], "reason": one_line(p.error)} for (a, b), p in pairs.items() if p.error],
        "worst": _worst(pairs),
        "seconds": seconds,
    }


def _worst(pairs: dict[tuple[int, int], Pair]) -> dict[str, Any] | None:
    good = {pair: found for pair, found in pairs.items() if not found.error}
    if not good:
        return None
    slow = min(good, key=lambda pair: good[pair].rate)
    far = max(good, key=lambda pair: good[pair].latency)
    return {
        "slowest": {
            "pair": list(slow),
            "mbit_s": good[slow].rate * 8 / 1e6,
            "median_mbit_s": statistics.median(p.rate for p in good.values()) * 8 / 1e6,
        },
        "longest": {
            "pair": list(far),
            "latency_us": good[far].latency * 1e6,
            "median_latency_us": statistics.median(p.latency for p in good.values()) * 1e6,
        },
    }


def _report(document: dict[str, Any], out: Path | None) -> None:
    workers, n = document["workers"], document["world_size"]
    count = len(set(document["nodes"]))
    first = workers[0]
    say(
        f"decent_dp {first['decent_dp']}, torch {first['torch']}, Python {first['python']}",
        f"backend {document['backend']}, {n} worker{'s' * (n > 1)} on {count} node{'s' * (count > 1)}",
    )
    for worker in workers[1:]:
        other = [f"{key} {worker[key]}" for key in ("decent_dp", "torch", "python") if worker[key] != first[key]]
        if other:
            say(f"worker {worker['rank']} has {', '.join(other)}: start all workers from one installation")
    made = table("worker", "node", "host", "device", left=(2, 3))
    for worker in workers[: 2 * _MATRIX]:
        made.add_row(str(worker["rank"]), str(worker["node"]), worker["host"], worker["device"])
    say("", made, *([f"… {n - 2 * _MATRIX} more"] if n > 2 * _MATRIX else []), "")
    if n == 1:
        say("One worker has no links. To measure those between workers, start it as you start the training:", f"  {_TORCHRUN}")
        return
    _report_links(document)
    say("", *_in_words(document))
    file = str(out) if out is not None else "links.json"
    hint = "" if out is not None else "; --out links.json writes them"
    say("", f"what to make of these links{hint}:", f"  decent-dp plan --measured {file} --params 65e6 --step-ms 60")


def _report_links(document: dict[str, Any]) -> None:
    rates = [value for row in document["mbit_s"] for value in row if value is not None]
    giga = bool(rates) and statistics.median(rates) >= 1000
    unit, scale = ("Gbit/s", 1e-3) if giga else ("Mbit/s", 1.0)
    show = _blocks if document["world_size"] <= _MATRIX else _by_nodes
    say("latency one way, µs", *show(document, "latency_us", 1.0), "")
    say(f"bandwidth of each direction, both at once, {unit}", *show(document, "mbit_s", scale))


def _blocks(document: dict[str, Any], key: str, scale: float) -> list[Any]:
    """The matrix, some columns at a time."""
    n, parts = document["world_size"], []
    for first in range(0, n, _COLUMNS):
        columns = range(first, min(first + _COLUMNS, n))
        made = table("worker", *map(str, columns), left=())
        for a, row in enumerate(document[key]):
            cells = ["·" if a == b else "none" if row[b] is None else number(row[b] * scale) for b in columns]
            made.add_row(str(a), *cells)
        parts.append(made)
    return parts


def _by_nodes(document: dict[str, Any], key: str, scale: float) -> list[Any]:
    """Many workers: the least, the median and the most inside nodes and between them."""
    nodes, made = document["nodes"], table("links", "least", "median", "most")
    for name, inside in (("inside a node", True), ("between nodes", False)):
        values = [
            value * scale
            for a, row in enumerate(document[key])
            for b, value in enumerate(row)
            if a != b and value is not None and (nodes[a] == nodes[b]) == inside
        ]
        if values:
            made.add_row(name, number(min(values)), number(statistics.median(values)), number(max(values)))
    return [made]


def _in_words(document: dict[str, Any]) -> list[str]:
    lines = []
    worst, workers = document["worst"], document["workers"]

    def ends(pair: Sequence[int]) -> str:
        hosts = [workers[rank]["host"] for rank in pair]
        where = f" (on {hosts[0]} and {hosts[1]})" if hosts[0] != hosts[1] else ""
        return f"worker {pair[0]} and worker {pair[1]}{where}"

    if worst is not None:
        slow, far = worst["slowest"], worst["longest"]
        rate = f"{number(slow['mbit_s'])} Mbit/s"
        lines.append(f"slowest link: {ends(slow['pair'])}, {rate}{_times(slow['median_mbit_s'], slow['mbit_s'])}")
        delay = f"{number(far['latency_us'])} µs"
        lines.append(f"longest way: {ends(far['pair'])}, {delay}{_times(far['latency_us'], far['median_latency_us'])}")
    if document["unreachable"]:
        pairs = ", ".join("{} and {}".format(*found["pair"]) for found in document["unreachable"])
        lines.append(f"do not reach each other: workers {pairs}")
    else:
        lines.append("all workers reach each other")
    return lines


def _times(large: float, small: float) -> str:
    factor = large / small if small > 0 else math.inf
    return f", {factor:.2g} times worse than the median" if factor >= 1.3 else ""
