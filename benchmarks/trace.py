"""Traces two updates over a link that is fast enough, and over one that is not: ``make trace``. Needs Linux, root, iproute2.

Two workers train in the network lab, with the accelerator that ``worker.py`` emulates; worker 0 runs PyTorch's profiler as a
script would. The ranges go to benchmarks/results/trace.json, and ``make figures`` draws them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, missing

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "trace.json"
# Mbit/s, and the compression.
LINKS: dict[str, tuple[float, str | None]] = {"fast": (400, None), "slow": (100, None), "int8": (100, "int8")}
RANGES = ("forward", "backward", "step", "decent_dp.wait", "decent_dp.mix", "decent_dp.encode", "decent_dp.send")
WARM_UP, UPDATES = 4, 2
SECONDS = 200.0


def ranges_of(trace: dict[str, Any]) -> list[list[Any]]:
    """[name, begin, end] in milliseconds since the first forward, of the ranges in a trace of the profiler."""
    found = []
    for event in trace["traceEvents"]:
        name = "step" if event.get("name", "").startswith("Optimizer.step") else event.get("name")
        if event.get("cat") in ("user_annotation", "cpu_op") and name in RANGES:
            found.append((name, event["ts"], event["ts"] + event["dur"]))
    start = min(begin for name, begin, _ in found if name == "forward")
    milliseconds = [[name, round((begin - start) / 1e3, 2), round((end - start) / 1e3, 2)] for name, begin, end in found]
    return sorted(joined(milliseconds), key=lambda entry: entry[1])


def joined(ranges: list[list[Any]], gap: float = 3.0) -> list[list[Any]]:
    """Ranges of one name that follow each other within ``gap`` milliseconds, as one: a send is hundreds of calls."""
    found: list[list[Any]] = []
    for name in RANGES:
        own = sorted(entry[1:] for entry in ranges if entry[0] == name)
        for begin, end in own:
            if found and found[-1][0] == name and begin - found[-1][2] < gap and name.endswith((".send", ".encode", ".mix")):
                found[-1][2] = max(found[-1][2], end)
            else:
                found.append([name, begin, end])
    return found


def train(compression: str | None) -> dict[str, Any] | None:
    """One worker; worker 0 returns its trace."""
    import torch
    from torch import nn
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import profile, record_function

    import decent_dp
    from benchmarks.setups import BLOCKS, WIDTH
    from benchmarks.worker import Block

    rank, _ = decent_dp.initialize_dist()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(emulated=True) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    replica = decent_dp.gossip(model, optimizer, compression=compression)
    x = torch.randn(8, WIDTH)

    def update() -> None:
        with record_function("forward"):
            loss = model(x).square().mean()
        with record_function("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def updates(count: int) -> None:
        for _ in range(count):
            update()

    updates(WARM_UP)
    trace = None
    if rank == 0:
        with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as running:
            updates(UPDATES)
        with tempfile.TemporaryDirectory() as folder:
            running.export_chrome_trace(f"{folder}/trace.json")
            trace = json.loads(Path(f"{folder}/trace.json").read_text())
    else:
        updates(UPDATES)
    replica.close()
    return trace


def measure(rate: float, compression: str | None) -> list[list[Any]]:
    with Lab(2, rate) as lab, tempfile.TemporaryDirectory(prefix="ddplab-") as folder:
        command = [sys.executable, "-m", "benchmarks.trace", "--worker", folder, compression or ""]
        lab.run(command, Path(folder), SECONDS)
        return ranges_of(json.loads(Path(folder, "trace.json").read_text()))


def main(measured: Callable[[float, str | None], list[list[Any]]] = measure) -> int:
    if sys.argv[1:2] == ["--worker"]:
        trace = train(sys.argv[3] or None)
        if trace is not None:
            Path(sys.argv[2], "trace.json").write_text(json.dumps(trace))
        return 0
    if (reason := missing()) is not None:
        print(reason, file=sys.stderr)
        return 2
    found = {name: {"mbit_s": link[0], "compression": link[1], "ranges": measured(*link)} for name, link in LINKS.items()}
    RESULT.write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
