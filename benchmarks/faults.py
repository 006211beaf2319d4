"""Measures what ``faults=Tolerate()`` costs and saves: ``python -m benchmarks.faults``, or ``make bench-faults``.

Four workers of this machine, base-2:

- cost: two models of 1 M parameters train in turns, one with and one without ``faults``; the figure is the median over the
  turns of the ratio of their step times, with 200 and with 20 ms of emulated computation per step.
- what happens if: the scenarios of ``benchmarks.what_if``, one after the other, with steps of 10 ms and ``dead_after=10``.

It takes six minutes. Names of scenarios, or ``cost``, as arguments: only these are measured, and the other results stay.
Writes ``benchmarks/results/faults.json`` and ``faults.md``; the rows are those of the page ``docs/faults.md``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import decent_dp
from benchmarks.scenarios import N, make, say, step
from benchmarks.what_if import SCENARIOS, run
from tests.workers import Workers

# Turns of so many steps, by the seconds of computation of a step.
PACES, STEPS = {0.2: 14, 0.02: 40}, 10
RESULT = Path(__file__).parent / "results" / "faults.json"


def cost(rank: int, n: int) -> dict[str, float]:
    kinds = [make(None, 1000), make(decent_dp.Tolerate(), 1000)]
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


def rows(result: dict[str, Any]) -> dict[str, str]:
    """What the page shows: the last cell of each row, by its first one."""
    found = {
        f"step time with `faults`, {pace} of computation": f"{ratio:.3f} of that without"
        for pace, ratio in result["cost"].items()
    }
    for name, scenario in SCENARIOS.items():
        found |= {what: text.format(**say(result["scenarios"][name])) for what, text in scenario.rows.items()}
    return found


def main() -> None:
    chosen, workers = sys.argv[1:] or ["cost", *SCENARIOS], Workers()
    kept = json.loads(RESULT.read_text()) if sys.argv[1:] else {}
    costs, seen = workers(N, cost)[0] if "cost" in chosen else kept["cost"], kept.get("scenarios", {})
    for name in chosen:
        if name == "cost":
            continue
        found = run(workers, name)
        seen[name] = {what: round(value, 4) if isinstance(value, float) else value for what, value in found.items()}
        for what, text in SCENARIOS[name].rows.items():
            print(f"{what}: {text.format(**say(found))}", flush=True)
    result = {"machine": "two shared cores, workers of one machine", "cost": costs, "scenarios": seen}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    table = "".join(f"| {what} | {value} |\n" for what, value in rows(result).items())
    RESULT.with_suffix(".md").write_text("| what | measured |\n|---|---|\n" + table)


if __name__ == "__main__":
    main()
