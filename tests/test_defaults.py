"""Another default dtype, or another default device, changes nothing: what the library makes has a dtype and a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decent_dp
from decent_dp.checkpoint import AveragedReplica, calibrate, export, load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import AccumAdam, AccumAdamW, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.rules import GASLoC, MomentumTracking, OuterNesterov
from decent_dp.tools.sim import Simulation, run
from decent_dp.tools.sim.datasets import digits
from tests.helpers import SGD, seed_cpu

N, STEPS = 2, 6
DEFAULTS = ("float64", "bfloat16", "meta")
ADAMW = partial(torch.optim.AdamW, lr=0.01)
GOSSIP_ADAMW = partial(decent_dp.GossipAdamW, lr=0.01)


@contextlib.contextmanager
def default(name: str) -> Iterator[None]:
    """'meta' has no values: a tensor that is made there by mistake is an error, as one on the CPU is in a run on a GPU."""
    if name == "float32":
        pass
    elif name == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        torchs: the optimizer is torch's, which makes its step on the default device.
        rounds: with float64 as default, AdamW's step is float64, and its results differ by rounding, as torch's own do.
        fast: in the fast tests, too.
    """

    optimizer: Callable[..., Any] = SGD
    options: dict[str, Any] = field(default_factory=dict)
    torchs: bool = False
    rounds: bool = False
    fast: bool = False


CASES = {
    "adamw, complete": Case(ADAMW, {"topology": "complete"}, torchs=True),
    "gossip-adamw, complete, tracking": Case(partial(GOSSIP_ADAMW, tracking=True), {"topology": "complete"}, rounds=True),
    "accum-adamw, int8": Case(partial(AccumAdamW, lr=0.01, accum_iter=2), {"compression": "int8"}),
    "accum-adam, bfloat16": Case(partial(AccumAdam, lr=0.01, accum_iter=2), {"compression": "bfloat16", "mix_every": 2}),
    "low-rank, int8": Case(SGD, {"compression": "low-rank:2,int8"}, fast=True),
    "complete, outer": Case(SGD, {"compression": "int8", "topology": "complete", "rule": OuterNesterov(), "mix_every": 2}),
    "gasloc, synchronous": Case(SGD, {"topology": "complete", "rule": GASLoC(), "overlap": False}),
    "tracking": Case(SGD, {"topology": "ring", "rule": MomentumTracking()}),
    "faults": Case(GOSSIP_ADAMW, {"faults": decent_dp.Tolerate()}, rounds=True, fast=True),
}
WRAPPED = {
    "clipped": Case(SGD, {"grad_clip_norm": 0.1}, fast=True),
    "adamw": Case(optim_fn_adamw, torchs=True),
    "accum-adamw, faults": Case(partial(optim_fn_accum_adamw, accum_iter=2), {"faults": decent_dp.Tolerate()}),
}


def small(seed: int) -> nn.Module:
    seed_cpu(seed)
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator("cpu").manual_seed(rank)
    made = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    return [(made(5, 6), made(5, 3)) for _ in range(STEPS)]


def observed(model: nn.Module, replica: Any) -> list[Any]:
    """Means, distances and values."""
    found = [replica.consensus_distance(), sorted(replica.gather(1))]
    with replica.averaged():
        found += [value.clone() for value in model.state_dict().values()]
    return [*found, *(value.clone() for value in model.state_dict().values())]


def train(model: Any, replica: Any, optimizer: Any, data: list[Any], begin: int = 0, end: int = STEPS) -> None:
    for x, y in data[begin:end]:
        (model(x) - y).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def gossips(case: Case, model: nn.Module, data: list[Any], folder: Path) -> list[Any]:
    optimizer = case.optimizer(model.parameters())
    replica = decent_dp.gossip(model, optimizer, **case.options)
    average = AveragedReplica(replica, decay=0.5)
    train(model, replica, optimizer, data, 0, STEPS // 2)
    average.update()
    found = observed(model, replica)
    save(replica, folder / "saves", wait=True)
    with replica.join():
        train(model, replica, optimizer, data, STEPS // 2)
    found += observed(model, replica)
    load(replica, folder / "saves")
    found += observed(model, replica)
    with average.averaged():
        found += [value.clone() for value in model.state_dict().values()]
    export(replica, folder / "model.pt")
    with replica.averaged():
        calibrate(replica, [x for x, _ in data[:2]])
    replica.average_()
    found += [value.clone() for value in model.state_dict().values()]
    replica.close()
    return found


def wraps(case: Case, model: nn.Module, data: list[Any]) -> list[Any]:
    wrapper = DecentralizedDataParallel(model, case.optimizer, topology=case.options.get("topology", "ring"), **case.options)
    train(wrapper, wrapper, None, data)
    found = [*observed(model, wrapper), wrapper.global_avg(return_d2c=True)]
    wrapper.close()
    return found


def everything(rank: int, n: int, folder: str, some: bool) -> dict[str, list[str]]:
    """For each default: the cases whose results differ from those of float32 on the CPU."""
    data, differ = batches(rank), {}
    expected: dict[str, list[Any]] = {}
    for name in ("float32", *DEFAULTS):
        differ[name] = []
        for kind, cases in (("gossip", CASES), ("wrapper", WRAPPED)):
            for what, case in cases.items():
                if (name == "meta" and case.torchs) or (some and not case.fast):
                    continue
                model = small(rank)
                with default(name):
                    where = Path(folder) / f"{name} {what}"
                    found = gossips(case, model, data, where) if kind == "gossip" else wraps(case, model, data)
                key = f"{kind}, {what}"
                if name == "float32":
                    expected[key] = found
                elif not same(found, expected[key], 1e-4 * (case.rounds and name == "float64")):
                    differ[name].append(key)
    return differ


def same(found: list[Any], expected: list[Any], tolerance: float) -> bool:
    """``tolerance``: relative, of numbers of parameters; 0.0 for equal bits."""
    for a, b in zip(found, expected, strict=True):
        if isinstance(a, Tensor) and (a.dtype != b.dtype or not torch.allclose(a, b, tolerance, 0.01 * tolerance)):
            return False
        if not isinstance(a, Tensor) and a != (pytest.approx(b, rel=tolerance) if tolerance else b):
            return False
    return True


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
def test_defaults_change_nothing(workers, tmp_path, some):
    for found in workers(N, everything, str(tmp_path), some):
        assert found == {name: [] for name in ("float32", *DEFAULTS)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_no_simulation(dtype):
    settings = Simulation(n=4, steps=4, eval_every=2, batch=8, optimizer="accum-adamw", compression="int8")
    expected = run(settings, hidden=(8,))
    digits.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        found = run(settings, hidden=(8,))
    finally:
        torch.set_default_dtype(torch.float32)
        digits.cache_clear()
    assert found.rows == expected.rows
