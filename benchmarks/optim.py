"""Times updates of this library's optimizers beside torch's AdamW: ``python -m benchmarks.optim``, or ``make bench-optim``.

The parameters are those of the lab's model, on one thread. Forms take turns, four updates each (a window of AccumAdamW), so
that other load on the machine slows all of them alike. Medians over the turns of an update's time are printed and written to
optim.json. ``--compiled`` needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.report import machine
from benchmarks.setups import BLOCKS, HIDDEN, PARAMETERS, WIDTH
from decent_dp.optim import AccumAdamW, GossipAdamW

ROOT = Path(__file__).resolve().parents[1]


def make_params() -> list[torch.nn.Parameter]:
    """The parameters of the lab's model, each with a gradient."""
    shapes = [(WIDTH,), (WIDTH,), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)] * BLOCKS
    draw = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=draw)
    return params


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optim", description="Times updates of optimizers.")
    parser.add_argument("--updates", type=int, default=200, help="timed updates of each form, in turns of four")
    parser.add_argument("--compiled", action="store_true", help="also the form made by torch.compile")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gossip_adamw = GossipAdamW(make_params())
    gossip_adamw.set_replicas(16)
    tracking = GossipAdamW(make_params(), tracking=True)
    tracking.set_replicas(16)
    forms: dict[str, Callable[[], object]] = {
        "torch AdamW, fused": torch.optim.AdamW(make_params(), fused=True).step,
        "torch AdamW, foreach": torch.optim.AdamW(make_params(), foreach=True).step,
        "GossipAdamW": gossip_adamw.step,
        "GossipAdamW, tracking": tracking.step,
        "AccumAdamW": AccumAdamW(make_params()).step,
        "AccumAdamW, readable": AccumAdamW(make_params(), foreach=False).step,
    }
    if args.compiled:
        forms["AccumAdamW, compiled"] = AccumAdamW(make_params(), compiled=True).step
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(2 + args.updates // 4):
        for name, step in forms.items():
            began = time.perf_counter()
            for _ in range(4):
                step()
            if turn >= 2:  # two windows of warm-up, in which every form is compiled
                times[name].append(1e3 * (time.perf_counter() - began) / 4)
    base = median(times["torch AdamW, fused"])
    lines = {name: {"ms": round(median(own), 2), "to_fused": round(median(own) / base, 2)} for name, own in times.items()}
    for name, line in lines.items():
        print(f"{name:32}{line['ms']:8.2f} ms{line['to_fused']:8.2f} x fused")
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"parameters": PARAMETERS, "tensors": 6 * BLOCKS, "updates": args.updates, "threads": 1}
    (args.out / "optim.json").write_text(json.dumps({**settings, "machine": machine(), "forms": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
