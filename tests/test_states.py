"""Optimizer state by parameter name: it fits other buckets, and a resumed run equals an undisturbed one."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import AccumAdamW, lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw, optim_fn_adamw
from tests.helpers import SGD, alone, assert_same, batch, loss, net, some_in_the_fast_tests

ONE, MANY, SOME = 25, 1e-6, 500 / 2**20  # of net(): one bucket, one per parameter, and in between


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 6)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


def nested(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.3, 4), lr_scheduler.StepLR(optimizer, 2, 0.5)]
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.SequentialLR(optimizer, parts, [4]), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def two_rates(params: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """Groups by layer, so that a bucket may have either or both, in either order."""
    first = [p for name, p in params if name.startswith("0.")]
    rest = [p for name, p in params if not name.startswith("0.")]
    groups = [{"params": rest}, {"params": first, "lr": 0.02, "momentum": 0.5}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=0.1, momentum=0.9)


def decay_apart(params: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
    """The usual two groups: in a bucket of one parameter one of them is empty."""
    weights = [p for _, p in params if p.ndim > 1]
    rest = [p for _, p in params if p.ndim <= 1]
    return torch.optim.AdamW([{"params": weights}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def cyclic(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.CyclicLR(
        optimizer,
        base_lr=[1e-4 * (1 + size) for size in sizes],
        max_lr=[1e-3 * (1 + size) for size in sizes],
        step_size_up=3,
        cycle_momentum=False,
    )


SETUPS: dict[str, dict[str, Any]] = {
    "sgd": {"optim_fn": SGD},
    "adam": {"optim_fn": partial(torch.optim.Adam, lr=0.01, amsgrad=True)},
    "accum-adamw": {"optim_fn": partial(AccumAdamW, lr=0.01, accum_iter=3)},
    "factory": {"optim_fn": partial(optim_fn_accum_adamw, lr=0.01, accum_iter=2)},
    "two-rates": {"optim_fn": two_rates},
    "lambda": {
        "optim_fn": two_rates,
        "lr_scheduler_fn": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    },
    "cosine": {"optim_fn": two_rates, "lr_scheduler_fn": partial(lr_scheduler.CosineAnnealingLR, T_max=8)},
    "warm-up": {
        "optim_fn": partial(optim_fn_adamw, lr=0.01),
        "lr_scheduler_fn": partial(lr_scheduler_fn_cosine_with_warmup, t_max=6, t_warmup=3),
    },
    "sequential": {"optim_fn": two_rates, "lr_scheduler_fn": sequential},
    "nested": {"optim_fn": two_rates, "lr_scheduler_fn": nested},
    "decay-apart": {"optim_fn": decay_apart},
    "one-cycle": {
        "optim_fn": partial(torch.optim.AdamW, lr=0.01),
        "lr_scheduler_fn": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
    },
}


def train(model: DecentralizedDataParallel, steps: range) -> list[list[float]]:
    """The learning rates after each step, by parameter."""
    rates = []
    for t in steps:
        loss(model, t).backward()
        rates.append(rates_of(model))
    return rates


def rates_of(model: DecentralizedDataParallel) -> list[float]:
    # A frozen parameter has none.
    rate = {id(p): float(group["lr"]) for o in model.optimizers for group in o.param_groups for p in group["params"]}
    return [rate[id(p)] for p in model.module.parameters() if id(p) in rate]


def restarted(saved: tuple[Any, Any], setup: dict[str, Any], size: float, *, early: bool) -> DecentralizedDataParallel:
    """A new run that resumes from ``saved``, loaded before or after its first update."""
    model = alone(net(seed=9), bucket_size_in_mb=size, **setup)
    if not early:
        train(model, range(50, 52))  # something else has been here
    model.load_state_dict(saved[0])
    model.load_optim_state_dict(saved[1])
    return model


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("name", "sizes"), some_in_the_fast_tests(SETUPS, [(ONE, MANY), (MANY, ONE), (SOME, SOME), (SOME, MANY)])
)
def test_resuming(name, sizes):
    setup = SETUPS[name]
    reference = alone(net(), bucket_size_in_mb=sizes[0], **setup)
    rates = train(reference, range(5))
    saved = through_a_file((reference.state_dict(), reference.optim_state_dict()))
    rates += train(reference, range(5, 10))
    assert len({tuple(r) for r in rates}) > 3 or "lr_scheduler_fn" not in setup, "the schedule does not show"

    for early in (True, False):
        model = restarted(copy.deepcopy(saved), setup, sizes[1], early=early)
        assert len(model.optimizers) == 0 or not early
        assert train(model, range(5, 10)) == rates[5:], early
        assert_same(model.module, reference.module)
        if "lr_scheduler_fn" in setup and name != "nested":  # it does not count
            assert [s.last_epoch for s in model.lr_schedulers] == [10] * len(model.optimizers)


def other_rates(params: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """As ``two_rates``, in an edited script."""
    optimizer = two_rates(params)
    for group in optimizer.param_groups:
        group["lr"] *= 3
    return optimizer


@pytest.mark.parametrize(
    ("name", "early"), some_in_the_fast_tests(["two-rates", "lambda", "cosine", "sequential", "nested"], [True, False])
)
def test_the_saved_rates_count(name, early):
    """As in torch: the rates that a schedule starts from are part of its state, those of schedules inside it included."""
    setup = SETUPS[name]
    reference = alone(net(), bucket_size_in_mb=ONE, **setup)
    train(reference, range(2))
    saved = through_a_file((reference.state_dict(), reference.optim_state_dict()))
    model = restarted(saved, {**setup, "optim_fn": other_rates}, SOME, early=early)
    assert train(model, range(2, 8)) == train(reference, range(2, 8))
    assert_same(model.module, reference.module)


def test_the_keys_are_names():
    model = alone(net(), bucket_size_in_mb=SOME, **SETUPS["sequential"])
    assert model.optim_state_dict() == {
        "state": {},
        "param_groups": {},
        "groups": [],
        "schedulers": None,
        "scaler": None,
        "round": 0,
    }
    train(model, range(3))
    found = model.optim_state_dict()
    names = [name for name, _ in net().named_parameters()]
    assert found.keys() == {"state", "param_groups", "groups", "schedulers", "scaler", "round"}
    assert found["round"] == 3
    assert sorted(found["state"]) == sorted(found["param_groups"]) == sorted(names)
    assert all(found["state"][name]["momentum_buffer"].shape == param.shape for name, param in net().named_parameters())
    assert {found["param_groups"][name]["momentum"] for name in names if name.startswith("0.")} == {0.5}
    assert {found["param_groups"][name]["momentum"] for name in names if not name.startswith("0.")} == {0.9}
    assert all("params" not in options for options in found["param_groups"].values())
    assert sorted(found["schedulers"]["by_name"]) == sorted(names)
    assert found["schedulers"]["last_epoch"] == 3


def test_a_pending_window_is_saved():
    model = alone(net(), SGD)
    train(model, range(1))
    model.set_accumulate_grad(True)
    loss(model, 1).backward()
    model.set_accumulate_grad(False)
    found = copy.deepcopy(model.optim_state_dict())
    assert model.stats().updates == 2
    twin = alone(net(), SGD)
    train(twin, range(2))
    for name, state in twin.optim_state_dict()["state"].items():
        assert torch.equal(found["state"][name]["momentum_buffer"], state["momentum_buffer"])


def test_mixed_dtypes_keep_their_state():
    def mixed(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8).bfloat16(), nn.Linear(6, 3).double(), nn.Linear(6, 3))

    def step(model: DecentralizedDataParallel, t: int) -> None:
        x = batch(t)[0]
        parts = [layer(x.to(layer.weight.dtype)).square().mean().double() for layer in model.module]
        model.set_accumulate_grad(True)
        sum(parts).backward()
        model.set_accumulate_grad(False)
        model.update()

    fn = partial(AccumAdamW, lr=0.01, accum_iter=3)
    reference = alone(mixed(0), fn)
    for t in range(4):
        step(reference, t)
    saved = through_a_file((reference.state_dict(), reference.optim_state_dict()))
    states = saved[1]["state"]
    assert states["0.weight"]["exp_avg"].dtype == torch.float32
    assert states["1.weight"]["exp_avg"].dtype == torch.float64
    model = alone(mixed(5), fn, bucket_size_in_mb=MANY)
    model.load_state_dict(saved[0])
    model.load_optim_state_dict(saved[1])
    for m in (reference, model):
        for t in range(4, 8):
            step(m, t)
    assert_same(reference.module, model.module)


# -- the scaler ------------------------------------------------------------------------------------------------------------


def scaled(size: float, start: float, seed: int = 0) -> tuple[DecentralizedDataParallel, torch.amp.GradScaler]:
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=2)
    return alone(net(seed), SGD, scaler=scaler, bucket_size_in_mb=size), scaler


def step_scaled(model: DecentralizedDataParallel, scaler: torch.amp.GradScaler, steps: range) -> list[float]:
    scales = []
    for t in steps:
        # One overflow, which the scaler answers with a skipped step and half the scale.
        scaler.scale(loss(model, t) * (float("inf") if t == 4 else 1.0)).backward()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("cut", [2, 5])
def test_the_scaler_is_resumed(early, cut):
    """Its scale is known before the first loss of the new run is scaled, or its gradients would be divided by another."""
    reference, scaler = scaled(ONE, 1024.0)
    scales = step_scaled(reference, scaler, range(cut))
    saved = through_a_file((reference.state_dict(), reference.optim_state_dict()))
    scales += step_scaled(reference, scaler, range(cut, 10))
    assert len(set(scales)) > 2

    model, other = scaled(MANY, 2.0**16, seed=7)
    if not early:
        step_scaled(model, other, range(20, 22))
    model.load_state_dict(saved[0])
    model.load_optim_state_dict(saved[1])
    assert step_scaled(model, other, range(cut, 10)) == scales[cut:]
    assert_same(model.module, reference.module)


def test_a_scaler_on_one_side_only():
    reference, scaler = scaled(ONE, 1024.0)
    step_scaled(reference, scaler, range(1))
    saved = through_a_file(reference.optim_state_dict())
    assert saved["scaler"]["scale"] == 1024.0
    without = alone(net(), SGD)
    without.load_optim_state_dict(saved)
    train(without, range(2))
    plain = through_a_file(without.optim_state_dict())
    assert plain["scaler"] is None
    model, scaler = scaled(ONE, 64.0)
    model.load_optim_state_dict(plain)
    step_scaled(model, scaler, range(1))
    assert scaler.get_scale() == 64.0


def test_a_scaler_saved_before_the_first_update():
    """A scale that was reduced stays so, although no optimizer has state to save."""
    model, scaler = scaled(ONE, 1024.0)
    scaler.scale(torch.ones(()))
    saved = through_a_file(model.optim_state_dict())
    other, restored = scaled(ONE, 64.0)
    other.load_optim_state_dict(saved)
    step_scaled(other, restored, range(1))
    assert restored.get_scale() == 1024.0


# -- what does not fit -----------------------------------------------------------------------------------------------------


def saved_state() -> dict[str, Any]:
    model = alone(net(), SGD)
    train(model, range(2))
    return copy.deepcopy(model.optim_state_dict())


@pytest.mark.parametrize("early", [True, False])
def test_state_of_another_model(early):
    saved = saved_state()
    model = alone(net(), SGD, bucket_size_in_mb=SOME)
    if not early:
        train(model, range(1))
    before = copy.deepcopy(model.optim_state_dict())
    less = copy.deepcopy(saved)
    del less["param_groups"]["2.bias"]
    with pytest.raises(ValueError, match=r"holds nothing for parameter '2\.bias'"):
        model.load_optim_state_dict(less)
    more = copy.deepcopy(saved)
    more["param_groups"]["head.weight"] = more["param_groups"]["0.weight"]
    with pytest.raises(ValueError, match=r"holds 'head\.weight', which is no trainable parameter"):
        model.load_optim_state_dict(more)
    for wrong in ({}, {"state": {}}, [], None, torch.optim.SGD(net().parameters()).state_dict()):
        with pytest.raises(ValueError, match=r"optim_state_dict|no trainable|holds nothing|by parameter number"):
            model.load_optim_state_dict(wrong)
    # A refused load changes nothing.
    after = model.optim_state_dict()
    assert after["param_groups"] == before["param_groups"]
    for name, state in before["state"].items():
        assert torch.equal(after["state"][name]["momentum_buffer"], state["momentum_buffer"])
    model.load_optim_state_dict(saved)


def test_frozen_parameters_have_no_state():
    def frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    model = alone(frozen(), SGD)
    train(model, range(2))
    saved = through_a_file(model.optim_state_dict())
    assert "0.weight" not in saved["param_groups"]
    alone(frozen(), SGD).load_optim_state_dict(saved)
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        alone(net(), SGD).load_optim_state_dict(saved)


def test_saved_before_the_first_update():
    saved = through_a_file(alone(net(), SGD).optim_state_dict())
    reference = alone(net(), SGD)
    train(reference, range(3))
    model = alone(net(), SGD)
    model.load_optim_state_dict(saved)
    train(model, range(2))
    model.load_optim_state_dict(saved)  # says nothing, changes nothing
    train(model, range(2, 3))
    assert_same(model.module, reference.module)


def test_the_round_is_resumed():
    """It is set before the first update only, and a dict without one does not change it."""
    saved = through_a_file(saved_state())
    model = alone(net(), SGD)
    model.load_optim_state_dict(saved)
    assert model.stats().rounds == model.optim_state_dict()["round"] == 2
    model.load_optim_state_dict({key: value for key, value in saved.items() if key != "round"})
    assert model.stats().rounds == 2
    train(model, range(3))
    assert (model.stats().rounds, model.stats().updates) == (5, 3)
    model.load_optim_state_dict({**saved, "round": 77})  # there are buckets
    train(model, range(1))
    assert (model.stats().rounds, model.optim_state_dict()["round"]) == (6, 6)
    old = alone(net(), SGD)
    old.load_optim_state_dict({key: value for key, value in saved.items() if key != "round"})
    assert old.optim_state_dict()["round"] == 0
    train(old, range(1))
    assert old.stats().rounds == 1
    for wrong in (-1, 2.5, "3", None):
        with pytest.raises(ValueError, match="'round' must be the number of a round, at least 0, got"):
            old.load_optim_state_dict({**saved, "round": wrong})


def test_a_schedule_on_one_side_only():
    saved = saved_state()
    model = alone(net(), **SETUPS["cosine"])
    model.load_optim_state_dict(saved)
    train(model, range(2))
    assert [s.last_epoch for s in model.lr_schedulers] == [2]
    scheduled = through_a_file(model.optim_state_dict())
    plain = alone(net(), two_rates)
    plain.load_optim_state_dict(scheduled)
    assert train(plain, range(2))[1] == rates_of(model)


# -- groups that are empty, and schedulers that keep more by group -------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_schedules_that_keep_more_by_group(early):
    setup = {"optim_fn": decay_apart, "lr_scheduler_fn": cyclic}
    reference = alone(net(), bucket_size_in_mb=MANY, **setup)
    train(reference, range(4))
    saved = through_a_file((reference.state_dict(), reference.optim_state_dict()))
    model = restarted(saved, setup, MANY, early=early)
    assert train(model, range(4, 8)) == train(reference, range(4, 8))
    assert_same(model.module, reference.module)


def test_an_empty_group_takes_the_options_of_others_of_its_number():
    """For any buckets, because users read the first group of the first bucket."""

    def rates(model: DecentralizedDataParallel) -> set[tuple[float, ...]]:
        found = set()
        for optimizer, scheduler in zip(model.optimizers, model.lr_schedulers, strict=True):
            groups = [(float(group["lr"]), group["weight_decay"]) for group in optimizer.param_groups]
            found.add((*groups, *scheduler.get_last_lr()))
        return found

    def groups(edited: int, params: Any) -> torch.optim.Optimizer:
        weights, rest = ([p for _, p in params if (p.ndim > 1) is matrix] for matrix in (True, False))
        made = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}, {"params": [], "lr": 0.3}]
        for group in made[:2]:
            group["lr"] = edited * group.get("lr", 0.1)
        return torch.optim.SGD(made, momentum=0.9)

    setup = {"optim_fn": partial(groups, 1), "lr_scheduler_fn": SETUPS["lambda"]["lr_scheduler_fn"]}
    for before, after in ((MANY, MANY), (ONE, MANY), (MANY, ONE)):
        reference = alone(net(), bucket_size_in_mb=before, **setup)
        train(reference, range(3))
        assert len(rates(reference)) == 1
        saved = through_a_file((reference.state_dict(), reference.optim_state_dict()))
        for early in (True, False):
            model = restarted(saved, {**setup, "optim_fn": partial(groups, 7)}, after, early=early)
            twin = restarted(saved, setup, before, early=True)
            for m in (model, twin):
                train(m, range(3, 5))
            assert rates(model) == rates(twin)
            assert model.get_lr() == twin.get_lr()
        train(reference, range(3, 5))
        assert rates(model) == rates(reference)
