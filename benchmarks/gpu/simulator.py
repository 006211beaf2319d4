"""The simulator, with all replicas on the device."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.case import ALONE, GOSSIP, SINGLE, SkipError, Worker, case, raised
from decent_dp.rules import MomentumTracking, OuterNesterov
from decent_dp.tools.sim import Simulation, VirtualCluster, run
from decent_dp.tools.sim.datasets import Data, digits


@cache
def clouds() -> Data:
    """Clouds around ten points: 1437 samples of 64 numbers to train on and 360 to test with, ten classes."""
    generator = torch.Generator().manual_seed(11)
    labels = torch.arange(1797, device="cpu") % 10
    centers = torch.rand(10, 64, generator=generator, device="cpu")
    x = centers[labels] + 0.35 * torch.randn(1797, 64, generator=generator, device="cpu")
    return Data(x[:1437], labels[:1437], x[1437:], labels[1437:], 10)


def data() -> Data:
    """The digits if scikit-learn, which has them, is installed; else clouds of points."""
    try:
        return digits()
    except ImportError:
        return clouds()


SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD, not overlapped": {"optimizer": "sgd", "overlap": False},
    "GossipAdamW, momentum tracking": {"optimizer": "gossip-adamw", "momentum_tracking": True, "alpha": 0.3},
    "AccumAdamW, mix_every": {"optimizer": "accum-adamw", "mix_every": 2},
    "bfloat16, complete": {"compression": "bfloat16", "topology": "complete", "optimizer": "momentum"},
    "int8": {"compression": "int8", "optimizer": "momentum"},
}


@case("simulator: as on the CPU", SINGLE, drivers=GOSSIP, timeout=150)
def as_on_the_cpu(worker: Worker) -> str:
    """The same settings on both, up to rounding, which training amplifies: within 1 % of the loss after 20 steps."""
    base = Simulation(n=8, topology="one-peer-exp", steps=20, eval_every=20, batch=16, lr=0.01)
    worst = 0.0
    for name, changes in SETTINGS.items():
        settings = replace(base, **changes)
        here = run(replace(settings, device=str(worker.device)), data(), (32,)).last
        if not worker.cuda:
            continue
        there = run(settings, data(), (32,)).last
        for what in ("loss", "consensus_distance"):
            a, b = getattr(here, what), getattr(there, what)
            assert abs(a - b) <= 0.01 * abs(b) + 1e-4, f"{name}: {what} {a:.6g}, and {b:.6g} on the CPU"
            worst = max(worst, abs(a - b) / abs(b))
        assert here.bytes_sent == there.bytes_sent, f"{name}: {here.bytes_sent} bytes, and {there.bytes_sent} on the CPU"
        assert abs(here.accuracy - there.accuracy) <= 0.02, f"{name}: accuracy {here.accuracy}, and {there.accuracy} on the CPU"
    if not worker.cuda:
        raise SkipError("it runs here, and the second run would be the same")
    return f"{len(SETTINGS)} runs, within {worst:.1e}"


class Odd(nn.Module):
    """BatchNorm, whose buffers every replica has, and a layer by a branch in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out - y).square().mean()


@case("simulator: a cluster as on the CPU", SINGLE, drivers=GOSSIP)
def cluster(worker: Worker) -> str:
    """One pass and the loop, rules, a GradScaler, and replicas that die and come back; float64, so that all is near."""
    variants: dict[str, dict[str, Any]] = {
        "one pass": {},
        "the loop": {"vectorize": False},
        "outer": {"rule": OuterNesterov(), "mix_every": 2, "topology": "complete"},
        "tracking": {"rule": MomentumTracking()},
        "a scaler": {"scaler": True},
        "deaths": {"rule": MomentumTracking(), "deaths": True},
    }
    worst = 0.0
    for name, options in variants.items():
        found = []
        for device in (worker.device, torch.device("cpu")):
            chosen = {"topology": "one-peer-exp", **options}
            dies, scaled = chosen.pop("deaths", False), chosen.pop("scaler", False)
            if scaled:
                chosen["scaler"] = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=3)
            torch.manual_seed(2)
            model = Odd().double().to(device)
            optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
            made = VirtualCluster(model, optimizer, chosen.pop("topology"), 8, loss_fn=square, **chosen)
            generator = torch.Generator().manual_seed(4)
            for t in range(12):
                x, y = (torch.randn(8, 5, size, generator=generator, dtype=torch.float64, device="cpu") for size in (6, 1))
                if dies and t in (3, 8):
                    (made.kill if t == 3 else made.revive)([1, 6])
                losses = made.step(x.to(device), y.to(device))
            assert losses.device.type == device.type
            mean = made.mean_model()
            found.append([value.detach().cpu() for value in (*made.parameters.values(), *mean.buffers(), *mean.parameters())])
        for a, b in zip(*found, strict=True):
            worst = max(worst, float((a.double() - b.double()).abs().max()))
        assert worst < 1e-9, f"{name}: differs from the CPU's by {worst:.2g}"
    return f"{', '.join(variants)}: within {worst:.1e}"


def check_many(n: int, steps: int, worker: Worker) -> str:
    settings = Simulation(
        topology="one-peer-exp",
        n=n,
        steps=steps,
        eval_every=steps,
        optimizer="momentum",
        device=str(worker.device),
    )
    began = time.perf_counter()
    result = run(settings, data())
    seconds = time.perf_counter() - began
    assert result.last.accuracy > (0.5 if steps >= 200 else 0.2), f"the mean model is right for {result.last.accuracy:.1%}"
    text = f"{seconds:.1f} s for {n:,} replicas, {steps} steps, accuracy {result.last.accuracy:.3f}"
    return text if worker.cuda else f"{text} (a stand-in for 1,024 replicas and 500 steps)"


@case("simulator: 1,024 replicas, 500 steps", SINGLE, drivers=GOSSIP, timeout=200, quiet=True)
def many(worker: Worker) -> str:
    """Of the digits' network; on the CPU fewer of both."""
    return check_many(1024, 500, worker) if worker.cuda else check_many(32, 40, worker)


@case("simulator: no such GPU", ALONE, drivers=GOSSIP)
def no_such_gpu(worker: Worker) -> str:
    if worker.cuda and torch.cuda.device_count() > 90:
        raise SkipError("there are many")
    settings = Simulation(n=2, steps=1, device="cuda:90")
    return raised(ValueError, lambda: run(settings, data()), "needs a GPU")
