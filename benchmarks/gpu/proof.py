"""Loss against steps of 8 replicas of 25 million parameters and more on one GPU: ``make gpu-proof`` (ten minutes).

The replicas are simulated (``VirtualCluster``), without links: DDP, this library with several messages, tracked momenta, DiLoCo
and MuLoCo, each with the bytes that a worker would send. They train a transformer on the bytes of Python's standard library.
All take the same number of steps, as many as fit into the time. At the end four real workers train on the same GPU.

    python -m benchmarks.gpu.proof --seconds 540 --width 512 --depth 8 --out runs/gpu-proof.json
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.characters import CharacterTransformer, loss_fn
from benchmarks.contenders import Muon
from decent_dp import GossipAdamW, gossip
from decent_dp.launch import spawn
from decent_dp.rules import OuterNesterov
from decent_dp.tools.sim import VirtualCluster

N, REAL = 8, 4
LENGTH, SAMPLES, EVALUATED = 128, 8, 64
# Of the text, in bytes; of the time, for the real workers; of the steps, those that are timed first.
TEXT, SHARE, TIMED = 8_000_000, 0.15, 3


def adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for _, param in params], lr=lr, weight_decay=0.01)


def gossip_adamw(params: Any, lr: float, tracking: bool = False) -> torch.optim.Optimizer:
    return GossipAdamW([param for _, param in params], lr=lr, weight_decay=0.01, tracking=tracking)


def tracked(params: Any, lr: float) -> torch.optim.Optimizer:
    return gossip_adamw(params, lr, tracking=True)


def muon(params: Any, lr: float) -> torch.optim.Optimizer:
    return Muon(list(params), lr)


@dataclass(frozen=True)
class Way:
    """A way to train. ``one``: all samples of a step in one batch of one replica, as under DDP."""

    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    lr: float
    how: Mapping[str, Any] = field(default_factory=dict)
    one: bool = False


def _ours(lr: float = 5e-4, **how: Any) -> Way:
    return Way(gossip_adamw, lr, how)


LOCAL = {"topology": "complete", "mix_every": 30, "rule": OuterNesterov(lr=0.7, momentum=0.9)}
WAYS: dict[str, Way] = {
    "DDP": Way(adamw, 1e-3, {"topology": "complete"}, one=True),
    "gossip()": _ours(),
    "gossip(), '2bit'": _ours(compression="2bit"),
    "gossip(), '1bit', every 4": _ours(compression="1bit", mix_every=4),
    "gossip(), 'low-rank:16,int8', every 2": _ours(compression="low-rank:16,int8", mix_every=2),
    "gossip(), tracked": Way(tracked, 5e-4),
    "DiLoCo, every 30": Way(adamw, 5e-4, LOCAL),
    "MuLoCo, every 30": Way(muon, 5e-4, {**LOCAL, "vectorize": False}),
}


def text() -> Tensor:
    """Python's standard library, file after file."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"\n".join(path.read_bytes() for path in files)[:TEXT]
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(torch.int64)


def windows(data: Tensor, seed: Sequence[int], samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(sum(number * 1_000_003**i for i, number in enumerate(seed)) % 2**63)
    starts = torch.randint(0, len(data) - LENGTH - 1, (samples,), generator=draw)
    found = data[starts[:, None] + torch.arange(LENGTH + 1)].to(device)
    return found[:, :-1], found[:, 1:]


def schedule(steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """A warm-up over a tenth of the steps, then a cosine to 0."""

    def factor(t: int) -> float:
        first = max(1, steps // 10)
        return (t + 1) / first if t < first else 0.5 * (1 + math.cos(math.pi * min(1.0, (t - first) / max(1, steps - first))))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def make_model(width: int, depth: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return CharacterTransformer(256, LENGTH, width, depth).to(device)


class Training:
    """Replicas that train in one of the ways."""

    def __init__(self, way: Way, model: nn.Module, data: Tensor, device: torch.device, steps: int) -> None:
        how = {"topology": "base-2", **way.how}
        self.n, self.data, self.device, self.t = 1 if way.one else N, data, device, 0
        self.cluster = VirtualCluster(
            model,
            lambda params: way.optimizer(params, way.lr),
            how.pop("topology"),
            self.n,
            loss_fn=loss_fn,
            lr_scheduler_fn=schedule(steps),
            **how,
        )

    def step(self) -> None:
        x, y = zip(*(windows(self.data, (self.t, i), SAMPLES, self.device) for i in range(N)), strict=True)
        shape = (self.n, N * SAMPLES // self.n, LENGTH)
        self.cluster.step(torch.cat(x).view(shape), torch.cat(y).view(shape))
        self.t += 1

    @torch.no_grad()
    def loss(self) -> float:
        x, y = windows(self.data, (7, 7, 7), EVALUATED, self.device)
        return float(loss_fn(self.cluster.mean_model(), x, y))


def timed(way: Way, model: nn.Module, data: Tensor, device: torch.device) -> float:
    """Seconds of a step, after one that warms up."""
    training = Training(way, model, data, device, 1 + TIMED)
    training.step()
    training.loss()
    began = time.perf_counter()
    for _ in range(TIMED):
        training.step()
    training.loss()
    return (time.perf_counter() - began) / TIMED


def train(way: Way, model: nn.Module, data: Tensor, device: torch.device, steps: int) -> dict[str, Any]:
    training, curve, began = Training(way, model, data, device, steps), [], time.perf_counter()
    for t in range(steps):
        training.step()
        if (t + 1) % max(1, steps // 10) == 0:
            curve.append([t + 1, training.loss()])
    seconds = time.perf_counter() - began
    sent = training.cluster.bytes_sent / N / steps
    return {"lr": way.lr, "curve": curve, "step_ms": 1e3 * seconds / steps, "bytes_per_step": sent}


def real(rank_device: str, width: int, depth: int, seconds: float) -> dict[str, float]:
    """One of four workers that share the device, with messages of 1 bit; for so many seconds, the same number of steps."""
    import torch.distributed as dist

    device, rank = torch.device(rank_device), dist.get_rank()
    model, data = make_model(width, depth, device), text()
    optimizer = GossipAdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    replica = gossip(model, optimizer, compression="1bit")
    t, began, going = 0, time.perf_counter(), True
    while going:
        x, y = windows(data, (t, rank), SAMPLES, device)
        optimizer.zero_grad()
        loss = loss_fn(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        t += 1
        if t % 10 == 0:
            going = all(replica.gather(time.perf_counter() - began < seconds).values())
    ms = 1e3 * (time.perf_counter() - began) / t
    with replica.averaged(), torch.no_grad():
        final = float(loss_fn(model, *windows(data, (7, 7, 7), EVALUATED, device)))
    stats = replica.stats()
    found = {"steps": t, "step_ms": ms, "loss": final, "bytes_per_step": stats.bytes_sent / t, "rejected": stats.rejected}
    replica.close()
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.proof", description="Loss against steps on one GPU.")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-proof.json"))
    args = parser.parse_args(arguments)
    began, device = time.perf_counter(), torch.device(args.device)
    model, data = make_model(args.width, args.depth, device), text()
    params = sum(param.numel() for param in model.parameters())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    print(f"{params / 1e6:.1f} million parameters, {N} replicas, on {name}", flush=True)
    step_s = {way: timed(WAYS[way], model, data, device) for way in WAYS}
    left = (1 - SHARE) * args.seconds - (time.perf_counter() - began)
    steps = max(10, int(0.9 * left / sum(step_s.values())))
    results: dict[str, Any] = {"device": name, "parameters": params, "replicas": N, "steps": steps, "ways": {}}
    print(f"{'':40}{'MB per step':>12}{'ms per step':>12}   loss after tenths of {steps} steps")
    for way, settings in WAYS.items():
        found = results["ways"][way] = train(settings, model, data, device, steps)
        if way == "DDP":  # a ring all-reduce of float32
            found["bytes_per_step"] = 8 * params * (N - 1) / N
        losses = " ".join(f"{loss:.3f}" for _, loss in found["curve"])
        print(f"{way:40}{found['bytes_per_step'] / 1e6:12.3f}{found['step_ms']:12.1f}   {losses}", flush=True)
    results["real"] = spawn(real, REAL, args.device, args.width, args.depth, SHARE * args.seconds / 2)[0]
    print(f"{REAL} real workers, '1bit': {results['real']}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
