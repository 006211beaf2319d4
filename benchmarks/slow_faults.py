"""Measures ``faults=Tolerate()`` on slow links while a process joins: ``python -m benchmarks.slow_faults``, or
``make bench-slow-faults``. Needs root and iproute2.

Four nodes train with base-2, each with its own link of ``RATES`` Mbit/s and 0.3 s of emulated computation per step. A fifth one
joins, and copies 100 MB of state. Messages have 4 or 100 MB. All cases run side by side for ``MINUTES`` minutes, as they need
little of the processor; cases such as ``5/100`` (Mbit/s, MB) as arguments: only these, and the other results stay. Each worker
notes four times a second whom it takes for silent or dead, and how long it has not heard from a peer to which it is connected.

Until the new worker is a member each round has a pair for everyone, so an exchange that is left out then is counted by itself.
Writes ``benchmarks/results/slow-faults.json`` and ``slow-faults.md``; the rows are those of ``docs/lab/faults.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import decent_dp
from benchmarks.lab import ROOT, Lab, launcher_variables, missing

N = 4
RATES, MESSAGES, STATE = (1, 5, 10), (4, 100), 100
MINUTES = 40.0
COMPUTATION = 0.3
JOINS_AFTER = 60.0
RESULT = Path(__file__).parent / "results" / "slow-faults.json"


class Model(torch.nn.Module):
    """Sends so many MB per exchange; a process that joins copies ``STATE`` MB."""

    def __init__(self, message: int) -> None:
        super().__init__()
        pieces = max(message // 4, 1)
        self.sent = torch.nn.ParameterList(torch.zeros(message * 250_000 // pieces) for _ in range(pieces))
        self.register_buffer("kept", torch.zeros((STATE - message) * 250_000))


class Watch:
    """What a worker sees of the others; written to ``out`` each second."""

    def __init__(self, replica: Any, out: Path) -> None:
        self._replica, self._out = replica, out
        self.found: dict[str, Any] = {"silent": [], "dead": [], "not_heard_for": 0.0, "longest_step": 0.0, "left_out_before": 0}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        transport, turn = self._replica.world, 0
        links = transport._wire.links
        while True:
            seen, now = transport.neighbours.look(), links.clock.now()
            for kind, peers in (("silent", seen.silent), ("dead", seen.lost)):
                self.found[kind] = sorted({*self.found[kind], *peers})
            for link in list(links.by_rank.values()):
                if link.channels:
                    self.found["not_heard_for"] = max(self.found["not_heard_for"], now - max(link.heard, link.since))
            stats = self._replica.stats()
            if self._replica.roster.size == N:
                self.found["left_out_before"] = stats.holes
            self.found |= {
                "rounds": stats.rounds,
                "exchanges": stats.exchanges,
                "left_out": stats.holes,
                "one_sided": stats.one_sided,
                "reconnects": stats.reconnects,
                "members": self._replica.roster.size,
            }
            turn += 1
            if turn % 4 == 0:
                written = self._out.with_suffix(".new")
                written.write_text(json.dumps(self.found))
                written.replace(self._out)
            time.sleep(0.25)


def work(message: int, out: Path) -> None:
    torch.set_num_threads(1)
    rank, transport = int(os.environ["RANK"]), None
    torch.manual_seed(0)
    model = Model(message)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began = time.monotonic()
    if rank == N:
        time.sleep(JOINS_AFTER)
        began = time.monotonic()
        transport = decent_dp.join(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    else:
        dist.init_process_group("gloo")
    faults = decent_dp.Tolerate(max_workers=N + 1)
    replica: Any = decent_dp.gossip(model, optimizer, topology="base-2", faults=faults, transport=transport)
    watch = Watch(replica, out)
    watch.found["joined_after"] = round(time.monotonic() - began, 1) if rank == N else None
    while True:
        began = time.monotonic()
        torch.autograd.backward([(0 * piece).sum() for piece in model.sent])
        time.sleep(COMPUTATION)
        optimizer.step()
        optimizer.zero_grad()
        watch.found["longest_step"] = max(watch.found["longest_step"], time.monotonic() - began)


def run(rate: int, message: int) -> list[dict[str, Any]]:
    """What each worker has seen; empty: it has not begun to train."""
    with tempfile.TemporaryDirectory() as folder, Lab(N + 1, rate) as lab:
        outs = [Path(folder, f"{rank}.json") for rank in range(N + 1)]
        command = [sys.executable, "-m", "benchmarks.slow_faults", "work", str(message)]
        for rank, out in enumerate(outs):
            env = launcher_variables(rank, N, lab.address(0), library=ROOT / "src")
            with out.with_suffix(".log").open("wb") as log:
                lab.start(rank, [*command, str(out)], {**os.environ, **env}, log, cwd=ROOT)
        try:
            failed = lab.wait(60 * MINUTES)
        except TimeoutError:  # as it should be
            failed = None
        if failed is not None:
            said = outs[failed[0]].with_suffix(".log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{rate} Mbit/s, {message} MB: worker {failed[0]} has ended with {failed[1]}: {said}")
        return [json.loads(out.read_text()) if out.exists() else {} for out in outs]


def table(result: dict[str, Any]) -> str:
    rows = []
    for case, workers in result["cases"].items():
        trained = [worker for worker in workers if worker]
        joined = next((worker["joined_after"] for worker in trained if worker["joined_after"] is not None), None)
        dead = sorted({peer for worker in trained for peer in worker["dead"]})
        cells = [
            "{} Mbit/s, {} MB".format(*case.split("/")),
            f"{joined:.0f} s" if joined is not None else "still copies",
            str(dead) if dead else "none",
            str(sum(worker["left_out_before"] for worker in workers[:N])),
            f"{max(worker['not_heard_for'] for worker in trained):.1f} s",
            str(sum(worker["one_sided"] for worker in trained)),
            str(sum(worker["reconnects"] for worker in trained)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    head = "| link, message | joined after | taken for dead | left out until then | longest silence | halves | reconnects |"
    return "\n".join([head, "|" + "---|" * 7, *rows]) + "\n"


def main() -> None:
    chosen = sys.argv[1:] or [f"{rate}/{message}" for message in MESSAGES for rate in RATES]
    result = json.loads(RESULT.read_text()) if sys.argv[1:] else {"cases": {}}
    command = [sys.executable, "-m", "benchmarks.slow_faults", "case"]
    started = {case: subprocess.Popen([*command, case], stdout=subprocess.PIPE, text=True) for case in chosen}
    failed = []
    for case, process in started.items():
        seen = process.communicate()[0]
        if process.returncode:
            failed.append(case)
        else:
            result["cases"][case] = json.loads(seen)
    result |= {"machine": "two shared cores, nodes are network namespaces", "minutes": MINUTES}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(result))
    print(table(result))
    if failed:
        raise SystemExit(f"these have failed: {', '.join(failed)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(int(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["case"]:
        print(json.dumps(run(*map(int, sys.argv[2].split("/")))))
    elif (lacks := missing()) is not None:
        raise SystemExit(lacks)
    else:
        main()
