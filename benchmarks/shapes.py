"""Steps with float32 pairs for many shapes of runs: ``python -m benchmarks.shapes``, or ``make bench-shapes``.

Needs Linux, root, iproute2.

Numbers of workers, sizes of models and rates of links that nothing is tuned to. Each worker has its own node (``lab.py``). Its
model computes nothing and sleeps a third of the time that its parameters take over the link, so steps can take as long as the
parameters with the headers of TCP, IP and Ethernet do. Writes ``shapes.json`` and ``shapes.md``; takes ten minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, LabError, missing
from benchmarks.report import machine

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "shapes.json"
LAYERS = 8
# Bytes of a frame of Ethernet, and of those that are the message's: a segment of TCP with time stamps.
FRAME, SEGMENT = 1514, 1448


@dataclass(frozen=True)
class Shape:
    """Workers, millions of parameters, and Mbit/s of each worker's link in each direction."""

    workers: int
    millions: float
    rate: float

    @property
    def limit(self) -> float:
        """Seconds that the parameters and their headers take over the link. There are pairs in each round of 'base-2'."""
        return self.millions * 1e6 * 4 * 8 / (self.rate * 1e6) * FRAME / SEGMENT

    @property
    def period(self) -> int:
        """Rounds of 'base-2'."""
        return {2: 1, 3: 3, 6: 4, 8: 3, 12: 5}[self.workers]

    @property
    def warmup(self) -> int:
        """Steps until all workers are as far apart as later: those without a pair in a round are ahead."""
        return max(3, 2 * self.period if self.workers > 3 else 0)

    @property
    def steps(self) -> int:
        """Whole periods, of some seconds at least."""
        return self.period * max(3 if self.period == 1 else 2, round(6 / (self.period * max(self.limit, 0.3))))


GRID = [
    *(Shape(2, millions, rate) for millions, rate in [(1, 10), (1, 100), (1, 1000), (10, 100), (10, 1000), (100, 1000)]),
    *(Shape(3, millions, rate) for millions, rate in [(1, 35), (10, 350)]),
    *(Shape(6, millions, rate) for millions, rate in [(1, 10), (1, 100), (2.5, 35), (10, 100), (10, 500), (50, 500)]),
    *(Shape(8, millions, rate) for millions, rate in [(1, 20), (10, 200)]),
    *(Shape(12, millions, rate) for millions, rate in [(1, 20), (1, 100), (10, 200), (10, 300)]),
]


# -- a worker ---------------------------------------------------------------------------------------------------------


def work(shape: Shape, out: Path) -> None:
    """Trains, and writes the seconds of its steps."""
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    import decent_dp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    pause = shape.limit / 3 / (3 * LAYERS)

    class Layer(torch.autograd.Function):
        """The identity; its parameter's gradient is zero. Backward takes twice as long as forward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, param: Tensor, zeros: Tensor) -> Tensor:
            ctx.zeros = zeros
            time.sleep(pause)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            time.sleep(2 * pause)
            return grads[0], ctx.zeros, None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [int(shape.millions * 1e6 / LAYERS)] * LAYERS
            self.layers = nn.ParameterList(torch.randn(size) for size in sizes)
            self.zeros = [torch.zeros(size) for size in sizes]

        def forward(self, x: Tensor) -> Any:
            for param, zeros in zip(self.layers, self.zeros, strict=True):
                x = Layer.apply(x, param, zeros)  # type: ignore[no-untyped-call]
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = decent_dp.gossip(model, optimizer, topology="base-2")
    x = torch.ones(1, requires_grad=True)
    for step in range(shape.warmup + shape.steps):
        if step == shape.warmup:
            began = time.perf_counter()
        model(x).sum().backward()
        optimizer.step()
    seconds = (time.perf_counter() - began) / shape.steps
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(seconds))
    replica.close()
    dist.barrier()
    dist.destroy_process_group()


# -- the lab ----------------------------------------------------------------------------------------------------------


def measure(shape: Shape) -> dict[str, float]:
    """One row of the result.

    Raises:
        RuntimeError: a worker failed; with the end of its log.
    """
    load = os.getloadavg()[0]
    with Lab(shape.workers, shape.rate) as lab, tempfile.TemporaryDirectory(prefix="ddplab-") as folder:
        out = Path(folder)
        arguments = [str(value) for value in (shape.workers, shape.millions, shape.rate)]
        command = [sys.executable, "-m", "benchmarks.shapes", "--worker", *arguments, "--out", folder]
        lab.run(command, out, 90 + 4 * shape.limit * (shape.warmup + shape.steps))
        seconds = max(json.loads((out / f"{rank}.json").read_text()) for rank in range(shape.workers))
    return {
        **asdict(shape),
        "steps": shape.steps,
        "limit_ms": round(1e3 * shape.limit, 1),
        "ms": round(1e3 * seconds, 1),
        "to_limit": round(seconds / shape.limit, 3),
        "load_before": round(load, 2),
    }


def make_table(rows: Sequence[Mapping[str, float]]) -> str:
    """The rows in Markdown."""
    lines = ["| workers | million parameters | Mbit/s | limit ms | ms per step | vs limit |", "| ---: |" + " ---: |" * 5]
    for row in rows:
        cells = [f"{row[key]:g}" for key in ("workers", "millions", "rate")]
        cells += [f"{row[key]:.0f}" for key in ("limit_ms", "ms")]
        lines.append(f"| {' | '.join([*cells, format(row['to_limit'], '.2f')])} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shapes", description="Steps with pairs for many shapes of runs."
    )
    parser.add_argument("--worker", nargs=3, type=float, metavar=("WORKERS", "MILLIONS", "RATE"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[], help="only these numbers, beside the results of the others"
    )
    args = parser.parse_args(argv)
    if args.worker:
        work(Shape(int(args.worker[0]), *args.worker[1:]), args.out)
        return 0
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    kept = json.loads(args.out.read_text())["rows"] if args.workers and args.out.exists() else []
    found = {Shape(row["workers"], row["millions"], row["rate"]): row for row in kept}
    try:
        for shape in GRID:
            if args.workers and shape.workers not in args.workers:
                continue
            found[shape] = measure(shape)
            rows = [found[each] for each in GRID if each in found]
            print(make_table([found[shape]]).splitlines()[-1], flush=True)
            args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(make_table(rows))
    except (LabError, RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, LabError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
