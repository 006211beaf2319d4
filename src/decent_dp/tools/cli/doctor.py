"""``decent-dp doctor``: what the workers are, who reaches whom, and what the links between them are worth."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import decent_dp
from decent_dp.tools.cli.inputs import require, writable, writing
from decent_dp.tools.cli.screen import number, one_line, plain_json, say, table, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from decent_dp.tools.cli.links import Pair, Probe

__all__ = ["EXAMPLES", "doctor"]

_TORCHRUN = "torchrun --standalone --nproc-per-node 4 -m decent_dp doctor"
# Workers up to which the whole matrix is shown, so that it fits 80 columns, and the workers that are listed.
_MATRIX, _LISTED = 10, 32
_SHOWN_PAIRS = 10
_MOST_SECONDS = 3600.0
# Seconds of a slot beside its measurement, to begin and to gather.
_AROUND_A_SLOT = 0.05
# Parameters whose exchange between nodes is estimated.
_ADVISED = 100e6
_KINDS = {"inside nodes": True, "between nodes": False}
# A link that is so many times slower than the median is worth a word.
_SLOW = 1.3

EXAMPLES = f"""[bold]Examples[/bold]

{_TORCHRUN}

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m decent_dp doctor --out links.json

decent-dp plan --measured links.json --params 65e6 --step-ms 60

Exit code 1 if a worker does not reach another."""


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
        timer = threading.Timer(timeout, _did_not_meet, [timeout])
        timer.daemon = True
        timer.start()
        try:
            initialize_dist()
            probe = Probe(seconds, timeout)
        finally:
            timer.cancel()
        return _examine(probe, seconds, began, json, out)
    except (RuntimeError, OSError) as error:
        if (rank := os.environ.get("RANK", "0")) == "0":  # worker 0 reports its own at the end
            raise RuntimeError(f"the links were not measured: {error}") from error
        _say_error(f"worker {rank}: {error}")
        return 1


def _examine(probe: Probe, seconds: float, began: float, json: bool, out: Path | None) -> int:
    """The survey; worker 0 says what came of it while the others wait for it to have done so."""
    from decent_dp.tools.cli.links import schedule

    workers, nodes = probe.gather(_card(str(probe.device))), probe.nodes()
    if probe.rank == 0 and (n := probe.world_size) > 1:
        about = len(schedule(nodes)) * (seconds + _AROUND_A_SLOT)
        time_ = f"{about:.0f} s" if about < 100 else f"{about / 60:.0f} min"
        _say_error(f"measuring {n * (n - 1) // 2:,} pairs of workers takes about {time_}; --seconds-a-pair shortens it")
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


def _did_not_meet(seconds: float) -> None:
    """Ends the process: torch would wait for half an hour."""
    if os.environ.get("RANK", "0") == "0":
        _say_error(
            f"the {os.environ.get('WORLD_SIZE', '1')} workers did not meet within {seconds:g} s: see that all are "
            "started, with the same MASTER_ADDR and MASTER_PORT, and that no firewall is between them; --timeout waits longer"
        )
    os._exit(1)


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
    from decent_dp.tools.planner.measured import FORMAT

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
        "seconds": seconds,
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
    cells = [(str(worker["rank"]), str(worker["node"]), worker["host"], worker["device"]) for worker in workers[:_LISTED]]
    made = table(("worker", "node", "host", "device"), cells, left=(), folded=(2, 3))
    say("", made, *([f"… {n - _LISTED} more"] if n > _LISTED else []), "")
    if n == 1:
        say("One worker has no links. To measure those between workers, start it as you start the training:", f"  {_TORCHRUN}")
        return
    unit, scale = _unit(document)
    say("latency one way, µs", _matrix(document, "latency_us", 1.0), "")
    say(f"bandwidth of each direction, both at once, {unit}", _matrix(document, "mbit_s", scale))
    say("", *_in_words(document))
    file = str(out) if out is not None else "links.json"
    hint = "" if out is not None else "; --out links.json writes them"
    say("", f"what to make of these links{hint}:", f"  decent-dp plan --measured {file} --params 65e6 --step-ms 60")


def _links(document: dict[str, Any], key: str, inside: bool) -> dict[tuple[int, int], float]:
    """The values of pairs inside nodes, or of those between nodes."""
    nodes = document["nodes"]
    return {
        (a, b): document[key][a][b]
        for a, b in combinations(range(len(nodes)), 2)
        if document[key][a][b] is not None and (nodes[a] == nodes[b]) == inside
    }


def _unit(document: dict[str, Any]) -> tuple[str, float]:
    """In which the rates are shown, and how many of it a Mbit/s is."""
    rates = [rate for inside in (True, False) for rate in _links(document, "mbit_s", inside).values()]
    return ("Gbit/s", 1e-3) if rates and statistics.median(rates) >= 1000 else ("Mbit/s", 1.0)


def _matrix(document: dict[str, Any], key: str, scale: float) -> Table:
    """The matrix; of many workers the least, the median and the most."""
    if document["world_size"] > _MATRIX:
        kinds = {name: [scale * value for value in _links(document, key, inside).values()] for name, inside in _KINDS.items()}
        rows = [(name, *map(number, (min(own), statistics.median(own), max(own)))) for name, own in kinds.items() if own]
        return table(("links", "least", "median", "most"), rows)
    cells = [
        (str(a), *("·" if a == b else "none" if value is None else number(value * scale) for b, value in enumerate(row)))
        for a, row in enumerate(document[key])
    ]
    return table(("worker", *map(str, range(len(cells)))), cells, left=())


def _in_words(document: dict[str, Any]) -> list[str]:
    lines = []
    unit, scale = _unit(document)
    for name, inside in _KINDS.items():
        rates = _links(document, "mbit_s", inside)
        if not rates:
            continue
        pair = min(rates, key=lambda pair: rates[pair])
        hosts = [document["workers"][rank]["host"] for rank in pair]
        where = f" (on {hosts[0]} and {hosts[1]})" if hosts[0] != hosts[1] else ""
        usual = statistics.median(rates.values())
        factor = usual / rates[pair]
        more = f", {number(factor, 2)} times slower than the median of these links" if factor >= _SLOW else ""
        lines.append(
            f"slowest link {name}: worker {pair[0]} and worker {pair[1]}{where}, {number(rates[pair] * scale)} {unit}{more}"
        )
    if document["unreachable"]:
        pairs = ["{} and {}".format(*found["pair"]) for found in document["unreachable"]]
        others = f", and {len(pairs) - _SHOWN_PAIRS} more pairs; --json has all" if len(pairs) > _SHOWN_PAIRS else ""
        lines.append(f"do not reach each other: workers {', '.join(pairs[:_SHOWN_PAIRS])}{others}")
    else:
        lines.append("all workers reach each other")
    sizes, between = set(Counter(document["nodes"]).values()), _links(document, "mbit_s", inside=False)
    if between and len(sizes) == 1 and (local := max(sizes)) > 1:
        usual = statistics.median(between.values())
        ms = [number(_ADVISED * nbytes * 8e-3 / usual) for nbytes in (4, 2, 1)]
        lines += [
            "",
            f"replicas: the {local} workers of a node are one (replica='node', the default), and send one copy of the "
            f"parameters per step over the node's link. 100 million of them take {ms[0]} ms, with compression='bfloat16' "
            f"{ms[1]} ms, with 'int8' {ms[2]} ms.",
        ]
    return lines
