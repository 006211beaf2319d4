"""The situations of real scripts on one GPU: ``make gpu``. Prints a table, writes JSON; exit code 1 if a case has failed."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

MODULES = tuple(
    f"benchmarks.gpu.{name}"
    for name in (
        "situations",
        "loops",
        "wires",
        "keeping",
        "devices",
        "graphs",
        "sharding",
        "nccl",
        "survival",
        "simulator",
        "frameworks",
        "kernels",
        "speed",
    )
)
LAYOUT = "{:<52} {:<8} {:<10} {:>2} {:<8} {:>6}  {}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases; the exit code.

    Args:
        arguments: of the command; None for this process's.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.json"), help="where the JSON goes (%(default)s)")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of cases, as in a shell")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU if there is one, else the CPU")
    parser.add_argument("--timeout", type=float, help="seconds for each case, instead of its own")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all cases (%(default)s)")
    parser.add_argument("--lanes", type=int, help="cases at a time: one for each three cores, at most 6")
    parser.add_argument("--modules", nargs="+", default=list(MODULES), help="modules that register cases")
    args = parser.parse_args(arguments)
    try:
        import torch

        from benchmarks.gpu.case import CASES
        from benchmarks.gpu.runner import CPU, describe_device, run
    except ModuleNotFoundError as error:
        print(
            f"{sys.executable} has no {error.name}: these cases need torch (2.6 or newer) and NumPy, and src in PYTHONPATH. "
            "After `make test`: make gpu PYTHON=.venv/bin/python",
            file=sys.stderr,
        )
        return 2
    for module in args.modules:
        importlib.import_module(module)
    chosen = [case for case in CASES.values() if any(fnmatch.fnmatch(case.name, pattern) for pattern in args.only)]
    if not chosen:
        parser.error(f"no case is called {args.only}; there are: {', '.join(sorted({case.name for case in CASES.values()}))}")
    began = time.monotonic()
    found = CPU if args.device == "cpu" else describe_device()
    if args.device == "cuda" and found["device"] == "cpu":
        print(f"there is no GPU that torch {torch.__version__} can use (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    on_gpu = found["device"] != "cpu"
    if on_gpu:
        print(f"DEVICE: {found['name']} ({found['device']}), CUDA {found['cuda']}, torch {torch.__version__}")
    else:
        print(f"NO GPU: EVERYTHING BELOW RAN ON THE CPU. It says nothing about CUDA. torch {torch.__version__}")
    print(LAYOUT.format("case", "driver", "workers", "n", "result", "s", "detail"), flush=True)
    lanes = args.lanes or max(1, min(6, (os.cpu_count() or 1) // 3))
    rows = []
    for row in run(chosen, found["device"], args.modules, args.limit, args.timeout, lanes):
        case = row.case
        print(LAYOUT.format(case.name, case.driver, case.how, case.n, row.result, f"{row.seconds:.1f}", row.detail), flush=True)
        rows.append(row)
    for row in rows:
        if row.trace and not row.ok:
            print(f"\n--- {row.case.key}\n{row.trace}", flush=True)
    counts = Counter(row.result for row in rows)
    seconds = time.monotonic() - began
    text = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    print(f"{len(rows)} cases on {found['name'] or 'the CPU (NO GPU)'} in {seconds:.0f} s: {text}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": "cuda" if on_gpu else "cpu",
        "device_name": found["name"],
        "capability": found["capability"],
        "cuda": found["cuda"],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "seconds": round(seconds, 1),
        "counts": dict(counts),
        "rows": [
            {
                "case": row.case.name,
                "driver": row.case.driver,
                "how": row.case.how,
                "workers": row.case.n,
                "result": row.result,
                "seconds": round(row.seconds, 2),
                "detail": row.detail,
                **({"trace": row.trace} if row.trace else {}),
                **({"figures": row.figures} if row.figures else {}),
            }
            for row in rows
        ],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {args.out}")
    if on_gpu and importlib.util.find_spec("matplotlib"):
        from benchmarks.gpu.picture import draw

        draw(report["rows"], found["name"], args.out.with_suffix(".png"))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    # Here alone: a process has one fork server, and that of the tests has its own list.
    loaded = ["torch", "torch._dynamo", "numpy", "decent_dp.ddp", "decent_dp.optim", "benchmarks.gpu.runner"]
    multiprocessing.set_forkserver_preload(loaded)
    sys.exit(main())
