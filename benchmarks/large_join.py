"""Measures how long a process with a large model needs to join a run: ``python -m benchmarks.large_join``, or
``make bench-large-join``. Needs root and iproute2.

Three workers train with AdamW, int8 and mix_every=16, each on a node of its own: 2 GB of state. A fourth one joins after some
steps. Then two nodes of two workers train a quarter as much, and a node of two joins: the state has to come once.

*Ideal* is the state's bytes over the bandwidth of a link. Writes ``large-join.json`` and ``large-join.md`` into
``benchmarks/results``; the table is that of ``docs/lab/faults.md``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import decent_dp
from benchmarks.lab import INTERFACE, PORT, ROOT, Lab, launcher_variables, missing

# By workers per node: nodes that begin, and trainable parameters. AdamW has two moments for each.
CASES = {1: (3, 168_000_000), 2: (2, 42_000_000)}
PIECES = 16
RATES = (None, 1000)
COMPUTATION = 0.5
# The first exchange, after 16 steps, takes longer than others: its memory is new.
WARM, JOINS_AFTER, STEPS_AFTER = 18, 20, 12
RESULT = Path(__file__).parent / "results" / "large-join.json"


def received() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text())


def touch_memory() -> float:
    """Has the system touch most of the memory that it has, and give it back. Returns the bytes per second.

    The host of a virtual machine provides memory when it is touched first, more slowly than most links carry it, and takes it
    back after a while. Copies of a state are made in new memory.
    """
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    count = max(1, int(free.split()[1]) // 2**20 - 4)
    began = time.monotonic()
    parts = [torch.empty(2**30, dtype=torch.uint8) for _ in range(count)]
    for part in parts:
        part.numpy()[::4096] = 0
    return count * 2**30 / (time.monotonic() - began)


def work(local: int, out: Path) -> None:
    torch.set_num_threads(1)
    nodes, parameters = CASES[local]
    rank, n, transport, began = int(os.environ["RANK"]), nodes * local, None, 0.0
    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.zeros(parameters // PIECES) for _ in range(PIECES))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    joins = rank >= n
    dist.init_process_group("gloo", rank=rank - n * joins, world_size=local if joins else n)
    store = os.environ["RUN"]
    if joins:
        while not (out.parent / "go").exists():
            time.sleep(0.05)
        began, before = time.monotonic(), received()
        transport = decent_dp.join(store, rank=rank)
    faults = decent_dp.Tolerate(max_workers=n + local)
    options: dict[str, Any] = {"compression": "int8", "mix_every": 16, "faults": faults, "transport": transport}
    replica = decent_dp.gossip(model, optimizer, **options)
    found: dict[str, Any] = {"repr": repr(replica)}
    if joins:
        found |= {"fetched_s": time.monotonic() - began, "received": received() - before}
    for piece in model:
        piece.grad = torch.zeros_like(piece)
    steps: list[tuple[float, int]] = []
    since = None
    while since is None or len(steps) < since + STEPS_AFTER:
        began_step = time.monotonic()
        time.sleep(COMPUTATION)
        optimizer.step()
        steps.append((time.monotonic() - began_step, replica.roster.size))
        if joins and "member_s" not in found:
            found["member_s"] = time.monotonic() - began
        if replica.roster.size > nodes and since is None:
            since = len(steps)
        if rank == 0 and len(steps) == JOINS_AFTER:
            (out.parent / "go").touch()
    found |= {"steps": steps, "holes": replica.stats().holes}
    out.write_text(json.dumps(found))
    replica.close()


def run(rate: int | None, local: int) -> dict[str, Any]:
    nodes, parameters = CASES[local]
    n = nodes * local
    with tempfile.TemporaryDirectory() as folder, Lab(nodes + 1, rate) as lab:
        outs = [Path(folder, f"{rank}.json") for rank in range(n + local)]
        for rank, out in enumerate(outs):
            joins = rank >= n
            at = lab.address(nodes if joins else 0)
            env = launcher_variables(rank, n, at, local=local, library=ROOT / "src")
            env |= {"RUN": f"{lab.address(0)}:{PORT}"}
            command = [sys.executable, "-m", "benchmarks.large_join", "work", str(local), str(out)]
            with out.with_suffix(".log").open("wb") as log:
                lab.start(rank // local, command, {**os.environ, **env}, log, cwd=ROOT)
        failed = lab.wait(600)
        if failed is not None:
            said = outs[failed[0]].with_suffix(".log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{rate} Mbit/s: worker {failed[0]} has ended with {failed[1]}: {said}")
        seen = [json.loads(out.read_text()) for out in outs]
    state = 3 * 4 * parameters
    before = [seconds for one in seen[:n] for seconds, size in one["steps"][WARM:] if size == nodes]
    joiners = seen[n:]
    return {
        "rate": rate,
        "local": local,
        "state": state,
        "fetched_s": max(one["fetched_s"] for one in joiners),
        "member_s": max(one["member_s"] for one in joiners),
        "received": joiners[0]["received"] / state,
        "ideal_s": None if rate is None else 8 * state / (rate * 1e6),
        "step_median": statistics.median(before),
        "step_longest": max(before),
        "holes": sum(one["holes"] for one in seen[:n]),
        "replica": joiners[0]["repr"][-160:],
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| joins | link | state | bytes that came, of it | time to the copy | ideal | first step after `join()` | step of the "
        "others, median | longest | left out |"
    )
    lines = [head, "|" + "---|" * 10]
    for row in rows:
        cells = [
            "a worker" if row["local"] == 1 else f"a node of {row['local']}",
            "not limited" if row["rate"] is None else f"{row['rate']} Mbit/s",
            f"{row['state'] / 1e9:.1f} GB",
            f"{row['received']:.2f}",
            f"{row['fetched_s']:.1f} s",
            "" if row["ideal_s"] is None else f"{row['ideal_s']:.1f} s",
            f"{row['member_s']:.1f} s",
            f"{row['step_median']:.2f} s",
            f"{row['step_longest']:.2f} s",
            str(row["holes"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = []
    for local in CASES:
        for rate in RATES:
            memory = touch_memory()
            rows.append({**run(rate, local), "touched": memory})
            print(rows[-1], flush=True)
    RESULT.write_text(json.dumps({"machine": "two shared cores, nodes are network namespaces", "rows": rows}, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(int(sys.argv[2]), Path(sys.argv[3]))
    elif (lacks := missing()) is not None:
        raise SystemExit(lacks)
    else:
        main()
