"""One worker of ``benchmarks.time_to_loss``: trains a character transformer as a contender does, or only times its steps.

Reads rank and address from the environment, as under torchrun. Does one ``Run`` after another, and writes a list of results to
``OUT/RANK.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import contenders
from benchmarks.characters import CharacterTransformer, loss_fn, text
from benchmarks.lab import INTERFACE

WIDTH, DEPTH, LENGTH, SAMPLES = 128, 5, 32, 8
PUBLISHED = "decent-dp-0.2.3"
# Steps with whole gradients before PowerSGD begins: the fewest that PyTorch allows.
FULL_STEPS = 2


@dataclass(frozen=True)
class Run:
    """What a worker does.

    Attributes:
        contender: 'alone', 'ddp', 'ddp/fp16', 'powersgd/RANK', 'post-local/H', those of ``benchmarks.contenders`` (as
            'diloco/H' or 'muloco/H/BITS'), 'muon' (DDP with Muon), the published package, or 'ours/TOPOLOGY/COMPRESSION/H'
            (also 'ours-muon/…'), where COMPRESSION may be 'none' and H is ``mix_every``.
        steps: to train, or to time.
        lr: the highest rate of the cosine schedule.
        emulated_ms: milliseconds of forward and backward on an emulated accelerator; None: real computation.
        timed: measure the time of the steps only, after as many to warm up.
        width: of the model.
        dilation: emulated and measured times are those of a clock that runs so many times slower.
    """

    contender: str
    steps: int
    lr: float = 3e-3
    seed: int = 0
    emulated_ms: float | None = None
    timed: bool = False
    width: int = WIDTH
    dilation: int = 1


class Training(NamedTuple):
    """``step`` trains on a batch; ``leave`` ends what is in flight; ``params`` are the replica's."""

    step: Callable[[Tensor, Tensor], Any]
    leave: Callable[[], Any]
    params: list[nn.Parameter]


class Accelerator:
    """An emulated accelerator: blocks of a model end one after another, each so many seconds after the one before.

    The processor's own work for a block is hidden in that time, as on an accelerator, whose kernels are launched ahead. The
    processor is free for the network and its threads in the meantime.
    """

    def __init__(self, model: CharacterTransformer, seconds: float) -> None:
        self._block = seconds / (3 * len(model.blocks))
        self._ends = 0.0
        model.register_forward_pre_hook(lambda _module, _inputs: self._begin())
        for block in model.blocks:
            # After the block: its backward takes the time before the block's gradients are there.
            block.register_forward_hook(lambda _module, _inputs, x: _Busy.apply(x, self))  # type: ignore[no-untyped-call]

    def _begin(self) -> None:
        self._ends = time.perf_counter()

    def run(self, blocks: int) -> None:
        """Waits for the end of a forward, or of a backward, which takes twice as long."""
        self._ends += blocks * self._block
        time.sleep(max(0.0, self._ends - time.perf_counter()))


class _Busy(torch.autograd.Function):
    """The identity, which takes the time of a block on an accelerator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, accelerator: Accelerator) -> Tensor:
        ctx.accelerator = accelerator
        accelerator.run(1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.accelerator.run(2)
        return grads[0], None


def make_model(run: Run) -> nn.Module:
    torch.manual_seed(run.seed)
    model = CharacterTransformer(text()[2], LENGTH, run.width, DEPTH)
    if run.emulated_ms is not None:
        Accelerator(model, run.dilation * run.emulated_ms / 1e3)
    return model


def rates(run: Run) -> Callable[[int], float]:
    """The schedule: a linear warm-up over a tenth of the steps, then a cosine to 0."""
    warm_up = max(10, run.steps // 10)

    def factor(t: int) -> float:
        if t < warm_up:
            return (t + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (t - warm_up) / max(1, run.steps - warm_up)))

    return factor


def adamw(params: Any, run: Run) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=run.lr, weight_decay=0.01, fused=True)


def make_training(run: Run, model: Any) -> Training:
    kind, *options = run.contender.split("/")
    params = list(model.parameters())
    if kind == PUBLISHED:
        return _published(run, model, params)
    if kind.startswith("ours"):
        return _ours(run, model, params, kind, *options)
    optimizer: Any
    free = run.emulated_ms is not None  # an accelerator hides such work
    if kind == "demo":
        optimizer = contenders.DeMo(params, run.lr, most=int(options[0]), free=free)
    elif kind in ("muloco", "muon"):
        optimizer = contenders.Muon(list(model.named_parameters()), run.lr, free=free)
    else:
        optimizer = adamw(params, run)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates(run))
    if kind in ("ddp", "powersgd", "post-local", "snoo", "muon"):
        # PowerSGD's hook starts collectives from callbacks: with several buckets and gloo, workers start them in other orders.
        size = 1000 if kind == "powersgd" else None
        # All models are made from one seed, and sending them once more would take minutes.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=size, init_sync=False)
        if kind == "post-local":
            optimizer = _post_local(run, model, optimizer, int(options[0]))
        else:
            _compress(model, run.contender)
    after = _after(kind, model, params, [int(option) for option in options if option.isdigit()])

    def step(x: Tensor, y: Tensor) -> None:
        loss_fn(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if after is not None:
            after()

    return Training(step, getattr(after, "close", lambda: None), params)


def _after(kind: str, model: nn.Module, params: list[nn.Parameter], options: list[int]) -> Any:
    """What is called after each step of the optimizer; None: nothing is."""
    if kind == "streaming":
        # Blocks; what is before them belongs to the first one, and what is behind them to the last.
        fragments: list[list[nn.Parameter]] = [[] for _ in range(DEPTH)]
        number = 0
        for name, param in model.named_parameters():
            number = int(name.split(".")[1]) if name.startswith("blocks.") else number
            fragments[number].append(param)
        return contenders.StreamingDiLoCo(fragments, *options)
    outer: dict[str, Any] = {
        "diloco": contenders.OuterMean,
        "muloco": contenders.OuterMean,
        "snoo": contenders.Snoo,
        "sparseloco": contenders.SparseLoCo,
        "noloco": contenders.NoLoCo,
        "factored": contenders.FactoredGossip,
    }
    return outer[kind](params, *options) if kind in outer else None


def _compress(model: DistributedDataParallel, how: str) -> None:
    """Registers the communication hook of PyTorch with which DDP is compressed."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if how == "ddp/fp16":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif how.startswith("powersgd/"):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(how.partition("/")[2]), start_powerSGD_iter=FULL_STEPS, warm_start=True
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _post_local(run: Run, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, h: int) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    start = 0 if run.timed else run.steps // 10
    alone, _ = dist.new_subgroups(1)  # type: ignore[no-untyped-call]
    how = {"start_localSGD_iter": max(1, start), "post_local_gradient_allreduce": False}
    state = PostLocalSGDState(None, alone, **how)  # type: ignore[no-untyped-call]
    model.register_comm_hook(state, post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=h, warmup_steps=max(1, start)))


def _ours(
    run: Run, model: nn.Module, params: list[nn.Parameter], kind: str, topology: str, compression: str, h: str
) -> Training:
    import decent_dp

    optimizer: Any
    if kind == "ours-muon":
        optimizer = contenders.Muon(list(model.named_parameters()), run.lr, free=run.emulated_ms is not None)
    elif kind == "ours-adamw":
        optimizer = adamw(params, run)
    else:
        optimizer = decent_dp.GossipAdamW(params, lr=run.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates(run))
    replica = decent_dp.gossip(
        model,
        optimizer,
        topology=topology.removeprefix("sync "),
        compression=None if compression == "none" else compression,
        mix_every=int(h),
        overlap=not topology.startswith("sync "),
    )

    def step(x: Tensor, y: Tensor) -> None:
        loss_fn(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return Training(step, replica.close, params)


def _published(run: Run, model: nn.Module, params: list[nn.Parameter]) -> Training:
    from decent_dp.ddp import DecentralizedDataParallel

    wrapper: Any = DecentralizedDataParallel(
        model,
        lambda named: adamw([param for _, param in named], run),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rates(run)),
        topology="one-peer-exp",
    )

    def leave() -> None:
        # The published package has no call that only finishes the exchanges in flight.
        for work in wrapper._comm_ops:
            if work is not None:
                work.wait()

    return Training(lambda x, y: loss_fn(wrapper, x, y).backward(), leave, params)  # type: ignore[no-untyped-call]


# -- the run ---------------------------------------------------------------------------------------------------------------


def windows(data: Tensor, rng: np.random.Generator, samples: int) -> tuple[Tensor, Tensor]:
    starts = torch.from_numpy(rng.integers(0, len(data) - LENGTH - 1, samples))
    found = data[starts[:, None] + torch.arange(LENGTH + 1)]
    return found[:, :-1], found[:, 1:]


@torch.no_grad()
def mean_loss(run: Run, params: list[nn.Parameter], held_out: bool) -> float:
    """The loss of the mean of all replicas on 1024 windows, which rank 0 computes; for any contender alike."""
    mean = torch.cat([param.detach().flatten() for param in params])
    if run.contender != "alone":  # several may train beside one another
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if dist.get_rank():
        return 0.0
    model = make_model(replace(run, emulated_ms=None))
    for param, value in zip(model.parameters(), torch.split(mean, [param.numel() for param in params]), strict=True):
        param.copy_(value.view_as(param))
    trained, other, _ = text()
    x, y = windows(other if held_out else trained, np.random.default_rng(7), 1024)
    return float(loss_fn(model, x, y))


def train(run: Run) -> dict[str, Any]:
    """The losses on training data during the run, on both kinds of data at its end, and the seconds of its steps."""
    rank = dist.get_rank()
    training = make_training(run, make_model(run))
    curve, seconds = [], 0.0
    for t in range(run.steps):
        x, y = windows(text()[0], np.random.default_rng([run.seed, t, rank]), SAMPLES)
        before = time.perf_counter()
        training.step(x, y)
        seconds += time.perf_counter() - before
        if (t + 1) % max(1, run.steps // 10) == 0:
            curve.append([t + 1, mean_loss(run, training.params, held_out=False)])
    result = {"curve": curve, "held_out": mean_loss(run, training.params, held_out=True), "seconds": seconds}
    training.leave()
    return result


def measure(run: Run) -> dict[str, Any]:
    """The mean of the steps in ms, after as many steps to warm up: means of whole periods of topology and ``mix_every``."""
    training = make_training(run, make_model(run))
    x, y = windows(text()[0], np.random.default_rng(0), SAMPLES)
    if run.emulated_ms is not None:  # the processor's own forward and backward are to take no time
        x, y = x[:1, :4], y[:1, :4]
    dist.barrier()
    for _ in range(run.steps):
        training.step(x, y)
    # No barrier: it would let an exchange in flight end for free.
    sent = bytes_sent()
    busy, before = time.process_time(), time.perf_counter()
    for _ in range(run.steps):
        training.step(x, y)
    seconds, busy, sent = time.perf_counter() - before, time.process_time() - busy, bytes_sent() - sent
    training.leave()
    return {"ms": 1e3 * seconds / run.steps / run.dilation, "busy_ms": 1e3 * busy / run.steps, "bytes": sent / run.steps}


def bytes_sent(table: Path = Path("/proc/self/net/dev")) -> int:
    """Bytes that have left this node of a lab over its link, headers included."""
    lines = table.read_text().splitlines()
    return sum(int(line.split()[9]) for line in map(str.strip, lines) if line.startswith(f"{INTERFACE}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True, help="a JSON list of Runs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1200))
    results = []
    for run in [Run(**given) for given in json.loads(args.worker)]:
        results.append({"run": asdict(run), **(measure(run) if run.timed else train(run))})
        dist.barrier()
    (args.out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    # PowerSGD's hook leaves threads that end the process with an error.
    os._exit(0)


if __name__ == "__main__":
    main()
