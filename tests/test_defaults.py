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
from decent_dp.optim import AccumAdam, AccumAdamW, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.rules import GASLoC, MomentumTracking, OuterNesterov
from decent_dp.tools.sim import Simulation, run
from decent_dp.tools.sim.datasets import digits
from tests.helpers import SGD, Driven, seed_cpu

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


def observed(driven: Driven) -> list[Any]:
    """Means, distances and values."""
    found = [driven.user.consensus_distance(), sorted(driven.user.gather(1))]
    with driven.user.averaged():
        found += [value.clone() for value in driven.model.state_dict().values()]
    return [*found, *(value.clone() for value in driven.model.state_dict().values())]


def train(driven: Driven, data: list[Any]) -> None:
    for x, y in data:
        (driven.forward(x) - y).square().mean().backward()
        if driven.optimizer is not None:
            driven.optimizer.step()
            driven.optimizer.zero_grad()


def results_of(case: Case, driver: str, model: nn.Module, data: list[Any], folder: Path) -> list[Any]:
    driven = Driven(driver, model, "processes", case.optimizer, **{"topology": "ring", **case.options})
    average = AveragedReplica(driven.user, decay=0.5)
    train(driven, data[: STEPS // 2])
    average.update()
    found = observed(driven)
    save(driven.user, folder / "saves", wait=True)
    with driven.user.join():
        train(driven, data[STEPS // 2 :])
    found += observed(driven)
    load(driven.user, folder / "saves")
    found += observed(driven)
    with average.averaged():
        found += [value.clone() for value in driven.model.state_dict().values()]
    export(driven.user, folder / "model.pt")
    with driven.user.averaged():
        calibrate(driven.user, [x for x, _ in data[:2]])
    if driver == "gossip":
        driven.user.average_()
    else:
        found.append(driven.user.global_avg(will_revert=False, return_d2c=True))
    found += [value.clone() for value in driven.model.state_dict().values()]
    driven.user.close()
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
                    found = results_of(case, kind, model, data, Path(folder) / f"{name} {kind} {what}")
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
