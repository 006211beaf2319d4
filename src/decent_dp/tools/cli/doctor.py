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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import decent_dp
from decent_dp.tools.cli.inputs import require, writable, writing
from decent_dp.tools.cli.screen import number, one_line, plain_json, say, table, write_json

if TYPE_CHECKING:
    from decent_dp.tools.cli.links import Pair, Probe

__all__ = ["EXAMPLES", "FORMAT", "doctor"]

FORMAT = "decent_dp-doctor-1"

_TORCHRUN = "torchrun --standalone --nproc-per-node 4 -m decent_dp doctor"
# Workers up to which the whole matrix is shown, and columns of a block of it.
_MATRIX, _COLUMNS = 16, 8
_SHOWN_PAIRS = 10
_MOST_SECONDS = 3600.0
# Seconds of a slot beside its measurement, to begin and to gather.
_AROUND_A_SLOT = 0.05
# Parameters whose exchange between nodes is estimated.
_ADVISED = 100e6
_KINDS = {"inside_nodes": "inside nodes", "between_nodes": "between nodes"}

EXAMPLES = f"""[bold]Examples[/bold]

{_TORCHRUN}

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m decent_dp doctor --out links.json

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

    Latency and bandwidth of every pair come from the library's own exchanges. Pairs are measured at once where they share
    neither a node nor its link: for N nodes of L workers it takes at most N x L x L times --seconds-a-pair, a minute and a half
    for 4 nodes of 8. Without torchrun it says what it can about this one machine.
    """
    for option, value in (("--seconds-a-pair", seconds), ("--timeout", timeout)):
        require(option, value, 0 < value <= _MOST_SECONDS, f"above 0 and at most {_MOST_SECONDS:g} seconds")
    if os.environ.get("RANK", "0") == "0":  # the file is worker 0's, and so is the word about it
        writable("--out", out)

    from decent_dp.launch import initialize_dist
    from decent_dp.tools.cli.links import Probe

    began = time.monotonic()
    try:
        with _bounded(timeout):
            initialize_dist()
            probe = Probe(seconds, timeout)
    except (RuntimeError, OSError) as error:
        if (rank := os.environ.get("RANK", "0")) != "0":  # worker 0 reports its own at the end
            _say_error(f"worker {rank}: {error}")
        raise
    try:
        return _examine(probe, seconds, began, json, out)
    except (RuntimeError, _StoppedError) as error:
        if probe.reports():
            stopped = isinstance(error, _StoppedError)
            _say_error(str(error) if stopped else f"the links were not measured to the end: {error}")
        return 1


def _examine(probe: Probe, seconds: float, began: float, json: bool, out: Path | None) -> int:
    """The survey; worker 0 says what came of it while the others wait for it to have done so."""
    with _stopping():
        workers = probe.gather(_card(str(probe.device)))
        nodes = probe.nodes()
        if probe.rank == 0 and probe.world_size > 1:
            _say_duration(probe.world_size, nodes, seconds)
        pairs = probe.survey(nodes)
    code = 1 if any(pair.error for pair in pairs.values()) else 0
    try:
        if probe.rank == 0:
            _deliver(_document(workers, nodes, probe.backend, pairs, time.monotonic() - began), json, out)
    except (RuntimeError, OSError) as error:
        _say_error(str(error))
        code = 1
    finally:
        codes: list[int] = probe.gather(code)
        probe.close()
    return max(codes)


def _deliver(document: dict[str, Any], json: bool, out: Path | None) -> None:
    try:
        if json:
            write_json(document)
        else:
            _report(document, out)
        for found in document["unreachable"][:_SHOWN_PAIRS]:
            _say_error("workers {} and {} do not reach each other: ".format(*found["pair"]) + found["reason"])
    finally:  # also when the reader of the words has gone
        if out is not None:
            with writing(out):
                out.write_text(plain_json(document) + "\n", encoding="utf-8")


def _say_error(text: str) -> None:
    sys.stderr.write(f"decent-dp: {one_line(text)}\n")
    sys.stderr.flush()


# -- around the measuring --------------------------------------------------------------------------------------------------


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Ends the process if the workers do not meet: torch would wait for half an hour."""

    def end() -> None:
        if os.environ.get("RANK", "0") == "0":
            size = os.environ.get("WORLD_SIZE", "1")
            _say_error(
                f"the {size} workers did not meet within {seconds:g} s: see that all are started, with the same MASTER_ADDR "
                "and MASTER_PORT, and that no firewall is between them; --timeout waits longer"
            )
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _stopping() -> Iterator[None]:
    """Lets a worker say a last word when the launcher ends it because another worker has failed."""
    if threading.current_thread() is not threading.main_thread():
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
    except BaseException:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the word takes seconds at most, and then the worker ends anyway
        raise
    signal.signal(signal.SIGTERM, before)


def _say_duration(n: int, nodes: Sequence[int], seconds: float) -> None:
    from decent_dp.tools.cli.links import schedule

    total, slots = n * (n - 1) // 2, len(schedule(nodes))
    about = slots * (seconds + _AROUND_A_SLOT)
    time_ = f"{about:.0f} s" if about < 100 else f"{about / 60:.0f} min"
    once = f", {total / slots:.2g} at once," if total >= 2 * slots else ""
    _say_error(
        f"measuring {total:,} pair{'s' * (total > 1)} of workers{once} takes about {time_}; --seconds-a-pair shortens it"
    )


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
    """The document that ``plan --measured`` reads: matrices from row to column, with null for missing values."""
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
        "worst": _worst(pairs, nodes),
        "seconds": seconds,
    }


def _worst(pairs: dict[tuple[int, int], Pair], nodes: Sequence[int]) -> dict[str, Any]:
    """The worst pair inside nodes and between them, each beside the median of its kind; None where there is none."""
    found: dict[str, Any] = {}
    for kind in _KINDS:
        inside = kind == "inside_nodes"
        good = {(a, b): p for (a, b), p in pairs.items() if not p.error and (nodes[a] == nodes[b]) == inside}
        if not good:
            found[kind] = None
            continue
        slow = min(good, key=lambda pair: good[pair].rate)
        far = max(good, key=lambda pair: good[pair].latency)
        found[kind] = {
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
    return found


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
    cells = [(str(worker["rank"]), str(worker["node"]), worker["host"], worker["device"]) for worker in workers[: 2 * _MATRIX]]
    made = table(("worker", "node", "host", "device"), cells, left=(), folded=(2, 3))
    say("", made, *([f"… {n - 2 * _MATRIX} more"] if n > 2 * _MATRIX else []), "")
    if n == 1:
        say("One worker has no links. To measure those between workers, start it as you start the training:", f"  {_TORCHRUN}")
        return
    _report_links(document)
    say("", *_in_words(document))
    file = str(out) if out is not None else "links.json"
    hint = "" if out is not None else "; --out links.json writes them"
    say("", f"what to make of these links{hint}:", f"  decent-dp plan --measured {file} --params 65e6 --step-ms 60")


def _unit(document: dict[str, Any]) -> tuple[str, float]:
    """In which the rates are shown, and how many of it a Mbit/s is."""
    rates = [value for row in document["mbit_s"] for value in row if value is not None]
    return ("Gbit/s", 1e-3) if rates and statistics.median(rates) >= 1000 else ("Mbit/s", 1.0)


def _report_links(document: dict[str, Any]) -> None:
    unit, scale = _unit(document)
    show = _blocks if document["world_size"] <= _MATRIX else _by_nodes
    say("latency one way, µs", *show(document, "latency_us", 1.0), "")
    say(f"bandwidth of each direction, both at once, {unit}", *show(document, "mbit_s", scale))


def _blocks(document: dict[str, Any], key: str, scale: float) -> list[Any]:
    """The matrix, some columns at a time."""
    n, parts = document["world_size"], []
    for first in range(0, n, _COLUMNS):
        columns = range(first, min(first + _COLUMNS, n))
        rows = [
            (str(a), *("·" if a == b else "none" if row[b] is None else number(row[b] * scale) for b in columns))
            for a, row in enumerate(document[key])
        ]
        parts.append(table(("worker", *map(str, columns)), rows, left=()))
    return parts


def _by_nodes(document: dict[str, Any], key: str, scale: float) -> list[Any]:
    """Many workers: the least, the median and the most inside nodes and between them."""
    nodes, rows = document["nodes"], []
    for name, inside in (("inside a node", True), ("between nodes", False)):
        values = [
            value * scale
            for a, row in enumerate(document[key])
            for b, value in enumerate(row)
            if a != b and value is not None and (nodes[a] == nodes[b]) == inside
        ]
        if values:
            rows.append((name, *map(number, (min(values), statistics.median(values), max(values)))))
    return [table(("links", "least", "median", "most"), rows)]


def _in_words(document: dict[str, Any]) -> list[str]:
    lines = []
    workers, (unit, scale) = document["workers"], _unit(document)

    def ends(pair: Sequence[int]) -> str:
        hosts = [workers[rank]["host"] for rank in pair]
        where = f" (on {hosts[0]} and {hosts[1]})" if hosts[0] != hosts[1] else ""
        return f"worker {pair[0]} and worker {pair[1]}{where}"

    for kind, where in _KINDS.items():
        worst = document["worst"][kind]
        if worst is None:
            continue
        slow, far = worst["slowest"], worst["longest"]
        rate, delay = f"{number(slow['mbit_s'] * scale)} {unit}", f"{number(far['latency_us'])} µs"
        more = _times(slow["median_mbit_s"], slow["mbit_s"]), _times(far["latency_us"], far["median_latency_us"])
        lines.append(f"slowest link {where}: {ends(slow['pair'])}, {rate}{more[0]}")
        lines.append(f"longest way {where}: {ends(far['pair'])}, {delay}{more[1]}")
    if document["unreachable"]:
        pairs = ["{} and {}".format(*found["pair"]) for found in document["unreachable"]]
        others = f", and {len(pairs) - _SHOWN_PAIRS} more pairs; --json has all" if len(pairs) > _SHOWN_PAIRS else ""
        lines.append(f"do not reach each other: workers {', '.join(pairs[:_SHOWN_PAIRS])}{others}")
    else:
        lines.append("all workers reach each other")
    return lines + _advice_on_nodes(document)


def _advice_on_nodes(document: dict[str, Any]) -> list[str]:
    """Returns the time of an exchange between nodes that are replicas, in words."""
    worst, sizes = document["worst"]["between_nodes"], set(Counter(document["nodes"]).values())
    local = max(sizes)
    if worst is None or local == 1 or len(sizes) > 1:
        return []
    ms = [_ADVISED * nbytes * 8e-3 / worst["slowest"]["median_mbit_s"] for nbytes in (4, 2, 1)]
    return [
        "",
        f"replicas: the {local} workers of a node are one (replica='node', the default), and send one copy of the parameters "
        f"per step over the node's link. 100 million of them take {number(ms[0])} ms, with compression='bfloat16' "
        f"{number(ms[1])} ms, with 'int8' {number(ms[2])} ms.",
    ]


def _times(large: float, small: float) -> str:
    factor = large / small if small > 0 else math.inf
    return f", {number(factor, 2)} times worse than the median of these links" if factor >= 1.3 else ""
