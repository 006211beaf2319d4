"""Measures what ``faults=Tolerate()`` costs and saves: ``python -m benchmarks.faults``, or ``make bench-faults``.

Four workers of this machine, base-2, over local sockets:

- cost: two models of 1 M parameters train in turns, one with and one without ``faults``; the figure is the median over the
  turns of the ratio of their step times, with 200 and with 20 ms of emulated computation per step.
- kill, freeze: worker 3 gets SIGKILL, or SIGSTOP for 15 seconds, in the middle of a run with steps of 10 ms. When the first of
  the others leaves it out, the longest step of the others, their optimizer steps, when all others make the rounds of three, and
  for the freeze when they make those of four again.

Writes ``benchmarks/results/faults.json`` and ``faults.md``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import decent_dp

N, VICTIM = 4, 3
# Turns of so many steps, by the seconds of computation of a step.
PACES, STEPS = {0.2: 14, 0.02: 40}, 10
PACE, FAULT_AT = 0.01, 100
FROZEN = 15.0
RESULT = Path(__file__).parent / "results" / "faults.json"


def connect(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store: Any = dist.FileStore(f"{folder}/store", N)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N, timeout=timedelta(seconds=120))


def make(faults: decent_dp.Tolerate | None, width: int = 1000) -> tuple[nn.Module, torch.optim.Optimizer, decent_dp.Gossip]:
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, decent_dp.gossip(model, optimizer, faults=faults)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, pace: float) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    time.sleep(pace)
    optimizer.step()


def cost(rank: int, folder: str) -> Any:
    connect(rank, folder)
    kinds = [make(None), make(decent_dp.Tolerate())]
    found = {}
    for pace, turns in PACES.items():
        ratios = []
        for turn in range(turns):
            seconds = [0.0, 0.0]
            for kind in (0, 1) if turn % 2 else (1, 0):
                dist.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    step(*kinds[kind][:2], pace)
                seconds[kind] = time.perf_counter() - began
            ratios.append(seconds[1] / seconds[0])
        found[f"{1000 * pace:g} ms"] = statistics.median(ratios)
    for _, _, replica in kinds:
        replica.close()
    return found


def fault(rank: int, folder: str, number: int) -> Any:
    connect(rank, folder)
    model, optimizer, replica = make(decent_dp.Tolerate(), 100)
    when = Path(folder) / "when"
    noticed, longest, ended, steps = 0.0, 0.0, 0.0, 0
    changes: list[tuple[float, bool]] = []  # when a roster began, and whether the victim is in it
    replica.on_roster(lambda old, new: changes.append((time.monotonic(), VICTIM in new.members)))
    total = 600 if number == signal.SIGKILL else int((FROZEN + 6) / PACE)
    for t in range(total):
        if (rank, t) == (VICTIM, FAULT_AT):
            when.write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)
        began = time.monotonic()
        step(model, optimizer, PACE)
        ended = time.monotonic()
        steps += 1
        if rank != VICTIM and t > 20:
            longest = max(longest, ended - began)
            noticed = noticed or (ended if VICTIM in replica.roster.holes else 0.0)
    at = float(when.read_text())
    planned = next((began - at for began, is_in in changes if not is_in), None)
    back = next((began - at - FROZEN for began, is_in in changes if is_in), None)
    result = {"noticed": noticed and noticed - at, "longest": longest, "steps": steps, "planned": planned, "back": back}
    time.sleep(1.0 if number == signal.SIGKILL else FROZEN / 3)  # who leaves is no hole
    replica.close()
    return result


def run(work: Any, *args: Any) -> list[Any]:
    """The results of the workers; None of one that was killed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = context.SimpleQueue()
        processes = [context.Process(target=_work, args=(queue, work, rank, folder, *args)) for rank in range(N)]
        for process in processes:
            process.start()
        waker = threading.Thread(target=_wake, args=(processes[VICTIM].pid, Path(folder) / "when"), daemon=True)
        waker.start()
        for process in processes:
            process.join(180)
        found: list[Any] = [None] * N
        while not queue.empty():
            rank, result = queue.get()
            found[rank] = result
    return found


def _work(queue: Any, work: Any, rank: int, *args: Any) -> None:
    queue.put((rank, work(rank, *args)))


def _wake(pid: int, when: Path) -> None:
    """Continues a process that has stopped itself, ``FROZEN`` seconds later."""
    while not (when.exists() and when.read_text()):
        time.sleep(0.05)
        if not when.parent.exists():
            return
    time.sleep(FROZEN)
    with contextlib.suppress(ProcessLookupError):  # it was killed
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    costs = run(cost)
    kill, freeze = run(fault, signal.SIGKILL), run(fault, signal.SIGSTOP)
    faults = {}
    for name, found in (("kill", kill), ("freeze", freeze)):
        others = [found[rank] for rank in range(N) if rank != VICTIM]
        near = [one for one in others if one["noticed"]]
        faults[name] = {
            "noticed_s": min(one["noticed"] for one in near),
            "longest_step_s": max(one["longest"] for one in others),
            "steps_lost": sum(max(one["steps"] for one in others) - one["steps"] for one in others),
            "planned_anew_s": max(one["planned"] for one in others),
            "mixes_again_s": max(one["back"] for one in others) if name == "freeze" else None,
        }
    result = {"machine": "two shared cores, workers of one machine", "cost": costs[0], **faults}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(table(result))
    print(table(result))


def table(result: dict[str, Any]) -> str:
    kill, freeze = result["kill"], result["freeze"]
    rows = [
        ("step time with `faults`, 200 ms of computation", f"{result['cost']['200 ms']:.3f} of that without"),
        ("the same, 20 ms of computation", f"{result['cost']['20 ms']:.3f}"),
        ("kill -9: left out after", f"{kill['noticed_s']:.2f} s"),
        ("kill -9: longest step of the others", f"{kill['longest_step_s']:.2f} s"),
        ("kill -9: the others mix without it, by new rounds, after", f"{kill['planned_anew_s']:.2f} s"),
        ("frozen for 15 s: left out after", f"{freeze['noticed_s']:.2f} s"),
        ("frozen: longest step of the others", f"{freeze['longest_step_s']:.2f} s"),
        ("frozen: the same, after", f"{freeze['planned_anew_s']:.2f} s"),
        ("frozen: it mixes again after it wakes", f"{freeze['mixes_again_s']:.2f} s"),
        ("optimizer steps that the others lose", str(kill["steps_lost"] + freeze["steps_lost"])),
    ]
    return "| what | measured |\n|---|---|\n" + "".join(f"| {what} | {value} |\n" for what, value in rows)


if __name__ == "__main__":
    main()
