"""One worker of a measurement: a training loop as users write it, timed. Started by ``benchmarks.net``.

The timed steps follow the warm-up at once: a barrier between them would let an exchange that overlaps the next step end for
free, and hide one of them from the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.setups import BLOCKS, FORWARD_MS, GOSSIP, HIDDEN, WIDTH, Contender, Setup


class Accelerator(torch.autograd.Function):
    """The identity, which sleeps for the time of a block on an accelerator, so that the processor is free for the network."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_MS / 1e3)
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        time.sleep(2 * FORWARD_MS / 1e3)
        return grads[0]


class Block(nn.Module):
    """LayerNorm -> Linear -> GELU -> Linear beside a skip connection."""

    def __init__(self, emulated: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.emulated = emulated

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers(x)
        # After the block: its backward sleeps before the block's gradients are there.
        return Accelerator.apply(x) if self.emulated else x  # type: ignore[no-untyped-call]


class Training(NamedTuple):
    """``step`` makes one step; ``leave`` finishes the exchanges in flight."""

    step: Callable[[], Any]
    leave: Callable[[], Any]


def _adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def make_training(contender: Contender, wrapper: Any, setup: Setup, rank: int) -> Training:
    """The model, its batch and the loop's body for a contender. ``wrapper``: see ``load_wrapper``."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block(emulated=not setup.real) for _ in range(BLOCKS)))
    data = torch.Generator().manual_seed(1 + rank)
    x, y = (torch.randn(setup.rows, WIDTH, generator=data) for _ in "xy")

    if contender.topology is None:  # alone, or DDP: the loop owns the optimizer
        if wrapper is not None:
            model = wrapper(model, gradient_as_bucket_view=True)
        optimizer = _adamw(model.parameters())

        def plain_step() -> None:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(plain_step, lambda: None)

    if contender.kind in GOSSIP:
        optimizer = _adamw(model.parameters())
        compression = None if contender.wire == "float32" else contender.wire
        mixing = wrapper(model, optimizer, topology=contender.topology, compression=compression)

        def own_step() -> None:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return Training(own_step, mixing.close)

    options: dict[str, Any] = {"topology": contender.topology}
    if contender.wire != "float32":
        options["compression"] = contender.wire
    model = wrapper(model, lambda named: _adamw([param for _, param in named]), **options)

    def step() -> None:
        (model(x) - y).square().mean().backward()

    def leave() -> None:
        if contender.kind == "ours":
            model.close()
            return
        # The published package has no call that only finishes the exchanges in flight.
        for work in model._comm_ops:
            if work is not None:
                work.wait()

    return Training(step, leave)


def load_wrapper(contender: Contender, library: Path | None) -> Any:
    """The wrapper class, or ``gossip``; None for no exchange.

    Raises:
        RuntimeError: the package came from another place than ``library``.
    """
    if contender.topology is None:
        return DistributedDataParallel if contender.kind == "ddp" else None
    import decent_dp
    from decent_dp.ddp import DecentralizedDataParallel

    found = Path(str(decent_dp.__file__)).resolve()
    if library is None or not found.is_relative_to(library.resolve()):
        raise RuntimeError(f"decent_dp was imported from {found}, and not from {library}")
    if contender.kind == "tolerant":
        return partial(decent_dp.gossip, faults=decent_dp.Tolerate())
    if contender.kind == "plain":
        return partial(decent_dp.gossip, encrypt=False)
    if contender.kind == "worker":
        return partial(decent_dp.gossip, replica="worker")
    return decent_dp.gossip if contender.kind == "gossip" else DecentralizedDataParallel


# -- counters of the machine ------------------------------------------------------------------------------------------


def bytes_sent(interface: str) -> int:
    """Bytes that this node has sent since its creation, with headers."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def resident(what: str) -> int:
    """Bytes of this process in memory: now (``VmRSS``), or the most since the last reset (``VmHWM``)."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"this kernel does not tell {what}")
    return 1024 * int(found[1])


def reset_peak() -> None:
    """Resets ``VmHWM``; if the kernel refuses, it counts from the start of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# -- the run ----------------------------------------------------------------------------------------------------------


def measure(training: Training, warmup: int, steps: int, interface: str, base: int) -> dict[str, Any]:
    """The timed steps in ms and the moments between them, this worker's processor time for them, bytes that the node sent, and
    peak memory above ``base``.
    """
    dist.barrier()
    for _ in range(warmup):
        training.step()
    reset_peak()
    sent = bytes_sent(interface)
    busy = time.process_time()
    times = [time.perf_counter()]
    for _ in range(steps):
        training.step()
        times.append(time.perf_counter())
    return {
        "ms": [1e3 * (end - start) for start, end in itertools.pairwise(times)],
        "at": [1e3 * at for at in times],  # on Linux one clock for all processes
        "busy": 1e3 * (time.process_time() - busy),
        "bytes": bytes_sent(interface) - sent,
        "memory": resident("VmHWM") - base,
    }


def main() -> None:
    """Reads rank and address from the environment, as under torchrun, and writes ``OUT/RANK.json``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--setup", required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds that a collective may take")
    parser.add_argument("--library", type=Path, help="where decent_dp must come from")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    setup, contender = Setup.parse(args.setup), Contender.parse(args.contender)
    wrapper = load_wrapper(contender, args.library)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    dist.barrier()
    base = resident("VmRSS")
    training = make_training(contender, wrapper, setup, dist.get_rank())
    result = measure(training, args.warmup, args.steps, os.environ["GLOO_SOCKET_IFNAME"], base)
    (args.out / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    training.leave()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
