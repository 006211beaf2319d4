"""Times the Python part of a step: ``python -m benchmarks.overhead``, or ``make bench-overhead``.

A model of 1,000 small tensors trains on one worker (n = 1: nothing is exchanged): by plain PyTorch, by ``gossip()`` and by the
wrapper, in turns of a few steps in one process. The figure is the median over the turns of (turn - plain turn next to it), for
each step and parameter tensor. Writes ``benchmarks/results/overhead.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import decent_dp
from decent_dp.transport import InProcessTransport

LAYERS = 500  # of two tensors each
STEPS, TURNS = 10, 40
RESULT = Path(__file__).parent / "results" / "overhead.json"


class Stack(nn.Module):
    """Layers beside each other, so that autograd's own part stays small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum()


def make(how: str) -> Callable[[], None]:
    """A training step."""
    model: Any = Stack()
    x = torch.randn(1, 2)
    if how == "wrapper":
        model = decent_dp.DecentralizedDataParallel(
            model, lambda named: torch.optim.SGD([p for _, p in named], lr=1e-6), transport=InProcessTransport()
        )

        def wrapped() -> None:
            model(x).backward()

        return wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if how == "gossip":
        decent_dp.gossip(model, optimizer, transport=InProcessTransport())

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(turns: int) -> dict[str, Any]:
    """Microseconds per step and tensor: of a plain step, and the extra time of the others."""
    steps = {how: make(how) for how in ("plain", "gossip", "wrapper")}
    times: dict[str, list[float]] = {how: [] for how in steps}
    gc.disable()
    for turn in range(turns + 2):
        for how, step in steps.items():
            began = time.thread_time()
            for _ in range(STEPS):
                step()
            if turn >= 2:
                times[how].append((time.thread_time() - began) / STEPS / (2 * LAYERS) * 1e6)
    gc.enable()
    found: dict[str, Any] = {"tensors": 2 * LAYERS, "turns": turns, "plain": statistics.median(times["plain"])}
    for how in ("gossip", "wrapper"):
        more = [a - b for a, b in zip(times[how], times["plain"], strict=True)]
        quarters = statistics.quantiles(more, n=4)
        found[how] = {"median": statistics.median(more), "quartiles": [quarters[0], quarters[2]]}
    return found


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.turns)
    print(f"plain step: {found['plain']:.2f} us for each tensor")
    for how in ("gossip", "wrapper"):
        low, high = found[how]["quartiles"]
        print(f"{how}: {found[how]['median']:.2f} us more ({low:.2f} to {high:.2f})")
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
