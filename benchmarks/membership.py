"""Measures the protocol of members with many seats: ``python -m benchmarks.membership``, or ``make bench-membership``.

The world is that of ``benchmarks.many_seats``. 1 % of the workers die each minute, and ``RETURN`` seconds later a new process
asks for the place of each. Two cases: processes are killed, so that connections break at once and new ones are refused
(``REFUSED``); and machines cannot be reached, and count as dead after ``DEAD_AFTER`` seconds.

Also measured: how many operations one real TCPStore does on this machine, from two client processes. Figures for ``ASKED``
seats are projected from those of 256 and 1,000, each by a power of the size.

Writes ``benchmarks/results/membership.json`` and ``membership.md``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import queue
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.many_seats import CHURN, DEAD_AFTER, REFUSED, world_of

RESULT = Path(__file__).parent / "results" / "membership.json"
# Seats, and virtual seconds of churn for each.
KILLED, UNREACHABLE, ASKED = {64: 1200, 256: 150, 512: 90, 1000: 60}, {64: 1200, 256: 150, 512: 90, 1000: 60}, 10_000
BEGIN = 2.0  # virtual seconds until all have begun
CALM = 10.0  # and those before the churn


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection looks at the objects of all workers, and whichever works at that moment would be charged for it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(n: int, seconds: float, notice: float, seed: int = 0) -> dict[str, Any]:
    """Figures of ``n`` seats under churn for so many virtual seconds."""
    with world_of(n, seed=seed, notice=notice) as world, no_garbage_collection():
        world.run(BEGIN)
        start = world.figures()
        world.run(BEGIN + CALM)
        before = world.figures()
        calm = {name: (before[name] - start[name]) / CALM for name in ("operations", "store_bytes")}
        for worker in world.workers:
            worker.cpu = 0.0
        began = world.now
        world.at(world.random.uniform(0.0, min(1.0 / (CHURN * n), seconds)), lambda: world.disturb(began + seconds))
        world.run(began + seconds)
        found = {name: value - before[name] for name, value in world.figures().items()}
        epochs = found["epochs"] or 1  # the last one may be unfinished
        late = [world.now - died - notice for _, _, died in world.missing if world.now - died > notice]
        return {
            "seats": n,
            "seconds": seconds,
            "notice": notice,
            "start_operations": start["operations"],
            "start_store_bytes": start["store_bytes"],
            "epochs": found["epochs"],
            "calm_operations_per_s": calm["operations"],
            "calm_bytes_per_s": calm["store_bytes"],
            "operations_per_s": found["operations"] / seconds,
            "store_bytes_per_s": found["store_bytes"] / seconds,
            "operations_per_epoch": (found["operations"] - calm["operations"] * seconds) / epochs,
            "bytes_per_epoch": (found["store_bytes"] - calm["store_bytes"] * seconds) / epochs,
            "largest_text": max(map(len, world.store.texts.values())),
            "deaths": len(world.reached) + len(late),
            "reached_median": statistics.median([*world.reached, *late]),
            "reached_worst": max([*world.reached, *late]),
            "not_reached": len(late),
            "seated_median": statistics.median(world.seated) if world.seated else None,
            "held": found["held"] / found["steps"],
            "cpu_busiest_per_epoch": max(worker.cpu for worker in world.workers) / epochs,
            "cpu_mean_per_epoch": statistics.fmean(worker.cpu for worker in world.workers) / epochs,
        }


def ask(port: int, seconds: float, counts: Any) -> None:
    """Asks a store as the workers do, and says how often."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        store.check(["run/address", "run/run"])
        count += 1
    counts.put(count / seconds)


def store_rate(seconds: float = 3.0) -> float:
    """Operations per second of one TCPStore with two clients."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("run/run", "x" * 1000)
    context = multiprocessing.get_context("spawn")
    counts = context.Queue()
    clients = [context.Process(target=ask, args=(store.port, seconds, counts)) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        return float(sum(counts.get(timeout=120) for _ in clients))
    except queue.Empty:
        raise RuntimeError("a client of the store does not answer") from None
    finally:
        for client in clients:
            client.kill()
            client.join()


# What is projected, as a power of the size.
_GROWING = (
    "start_operations",
    "start_store_bytes",
    "operations_per_s",
    "store_bytes_per_s",
    "calm_operations_per_s",
    "calm_bytes_per_s",
    "operations_per_epoch",
    "bytes_per_epoch",
    "largest_text",
    "cpu_busiest_per_epoch",
    "cpu_mean_per_epoch",
)


def project(rows: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """What ``n`` seats would need, from the largest of the measured sizes and the last but two."""
    small, large = rows[-3], rows[-1]
    found: dict[str, Any] = {"seats": n}
    for name in _GROWING:
        power = math.log(large[name] / small[name]) / math.log(large["seats"] / small["seats"])
        found[name] = large[name] * (n / large["seats"]) ** power
    return found


def reached(row: dict[str, Any]) -> str:
    """Median and worst, and of how many deaths. One that no epoch has answered at the end counts with its time so far."""
    least = "≥ " if row["not_reached"] else ""
    return f"{row['reached_median']:.1f} ({least}{row['reached_worst']:.1f}) of {row['deaths']}"


def table(result: dict[str, Any]) -> str:
    """The committed table."""
    lines = [
        "| seats | store: operations per second without changes | per epoch: operations | per epoch: MB | largest text, KB | "
        "busiest worker: CPU s per epoch | killed: s to a common epoch, median (worst) of deaths | unreachable: the same | "
        "unreachable: held |",
        "|" + "---|" * 9,
    ]
    for row in [*result["killed"], result["projected"]]:
        other = next((r for r in result["unreachable"] if r["seats"] == row["seats"]), None)
        cells = [
            f"{row['seats']:,}" + (", measured" if "seconds" in row else ", projected"),
            f"{row['calm_operations_per_s']:,.0f}",
            f"{row['operations_per_epoch']:,.0f}",
            f"{row['bytes_per_epoch'] / 1e6:,.1f}",
            f"{row['largest_text'] / 1e3:,.0f}",
            f"{row['cpu_busiest_per_epoch']:.2g}",
            *(reached(r) if r and "seconds" in r else "–" for r in (row, other)),
            f"{100 * other['held']:.0f} %" if other else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    result: dict[str, Any] = {"machine": "one of two shared cores", "store_rate": store_rate(), "killed": [], "unreachable": []}
    for n in KILLED:
        for case, sizes, notice in (("killed", KILLED, REFUSED), ("unreachable", UNREACHABLE, DEAD_AFTER)):
            if n in sizes:
                began = time.monotonic()
                result[case].append(measure(n, sizes[n], notice))
                print(f"{case}, {time.monotonic() - began:.0f} s:", result[case][-1], flush=True)
    result["projected"] = project(result["killed"], ASKED)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
