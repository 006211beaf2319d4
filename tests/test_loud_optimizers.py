"""Optimizers that differ between workers, that keep state where no save finds it, that are asked for too early; and scalers."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import decent_dp
from decent_dp.backward.scaled import refuse_scaled_loss
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import optim_fn_adamw
from decent_dp.replica.snapshot import take
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import SGD, alone, error_of, loss, net

AdamW = torch.optim.AdamW


def groups(named: Any, **of_biases: Any) -> Optimizer:
    """AdamW with the biases in their own group."""
    weights, biases = ([param for name, param in named if ("bias" in name) is bias] for bias in (False, True))
    return AdamW([{"params": weights}, {"params": biases, **of_biases}], lr=0.1, weight_decay=0.1)


# By name: the optimizer of worker 0 and that of worker 1 for (name, parameter) pairs; what the error says.
DIFFER: dict[str, tuple[Any, Any, str]] = {
    "class": (lambda named: SGD(named), lambda named: AdamW(named), "SGD"),
    "decay": (
        partial(AdamW, weight_decay=0.1),
        partial(AdamW, weight_decay=0.2),
        "weight_decay of AdamW for '0.weight' and 5 more is 0.1 on worker 0 and 0.2 on worker 1",
    ),
    "betas": (partial(AdamW, betas=(0.9, 0.99)), AdamW, "is [0.9, 0.99] on worker 0 and [0.9, 0.999] on worker 1"),
    "switch": (partial(AdamW, amsgrad=True), AdamW, "amsgrad of AdamW for '0.weight' and 5 more is True on worker 0"),
    "group": (
        partial(groups, weight_decay=0.0),
        partial(groups, weight_decay=0.1),
        "weight_decay of AdamW for '0.bias' and 2 more is 0.0 on worker 0 and 0.1 on worker 1",
    ),
    # It puts weights first, and buckets biases.
    "order": (lambda named: SGD(named), optim_fn_adamw, "AdamW"),
    "groups": (lambda named: groups(sorted(named, key=lambda pair: "bias" in pair[0])), AdamW, "AdamW"),
}


def reordered(named: Any) -> Optimizer:
    return AdamW([param for _, param in reversed(named)])


def split(named: Any) -> Optimizer:
    return AdamW([{"params": [param]} for _, param in named])


# These are no error.
SAME = {
    "how": (partial(AdamW, foreach=True), partial(AdamW, foreach=False)),
    "tensor": (partial(AdamW, lr=torch.tensor(0.5)), partial(AdamW, lr=0.5)),
    "split": (split, AdamW),
}


def outcome(call: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = error_of(call)
    return error or "; ".join(str(one.message) for one in caught)


def differing(rank: int, n: int) -> dict[str, tuple[str, str]]:
    found = {}
    cases = {**{name: case[:2] for name, case in DIFFER.items()}, **SAME}
    cases["rate"] = (partial(AdamW, lr=0.1), partial(AdamW, lr=1.0))
    cases["reordered"] = (AdamW, reordered)
    for name, makers in cases.items():
        make = makers[min(rank, 1)]

        def by_gossip(make: Any = make) -> None:
            model = net()
            decent_dp.gossip(model, make(list(model.named_parameters())), topology="ring").close()

        def by_wrapper(make: Any = make) -> None:
            model = DecentralizedDataParallel(net(), make, topology="ring")
            try:
                loss(model, 0, rank).backward()
            finally:
                model.close()

        found[name] = outcome(by_gossip), outcome(by_wrapper)

    def scheduled() -> None:
        schedules = (torch.optim.lr_scheduler.ConstantLR, torch.optim.lr_scheduler.LinearLR)
        model = DecentralizedDataParallel(net(), SGD, lambda opt: schedules[rank > 0](opt, 0.5), topology="ring")
        try:
            loss(model, 0, rank).backward()
        finally:
            model.close()

    found["scheduler"] = outcome(scheduled), outcome(scheduled)
    return found


def test_workers_with_different_optimizers(workers):
    found, *others = workers(3, differing)
    assert found["class"][0].startswith("DisagreementError: ")
    for name, (_, _, text) in DIFFER.items():
        for i, said in enumerate(found[name]):
            assert "DisagreementError: " in said, (name, i, said)
            assert text in said, (name, i, said)
            assert all(other[name][i] == said for other in others), (name, i)
    for name in SAME:
        assert found[name] == ("", ""), name
    assert "the class of the optimizer for '0.weight' and 5 more is 'SGD' on worker 0 and 'AdamW'" in found["order"][1]
    # gossip()'s state is the user's, by position; the wrapper's is by name.
    assert "DisagreementError" in found["reordered"][0]
    assert found["reordered"][1] == ""
    for i, said in enumerate(found["rate"]):
        assert "lr of AdamW for '0.weight' and 5 more is 0.1 on worker 0 and 1.0 on worker 1. Pass the same" in said
        assert all(other["rate"][i] == said for other in others)
    said, _ = found["scheduler"]
    assert "the class of the scheduler for" in said
    assert "'ConstantLR' on worker 0 and 'LinearLR' on worker 1" in said


class SelfTuning(Optimizer):
    """Changes an option as it trains, as Prodigy does."""

    def __init__(self, params: Any, d: float = 1.0) -> None:
        super().__init__(params, {"lr": 0.1, "d": d})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] += 0.5
            for param in group["params"]:
                self.state[param]["seen"] = torch.ones_like(param)


def test_options_that_training_has_changed_are_not_compared():
    def work(transport: Any) -> tuple[str, str]:
        model = net()
        optimizer = SelfTuning(model.parameters())
        for _ in range(1 + transport.rank):
            optimizer.step()  # as after a load of each worker's own state
        found = error_of(lambda: decent_dp.gossip(model, optimizer, topology="ring", transport=transport))
        model = net()
        fresh = SelfTuning(model.parameters(), d=float(transport.rank))
        return found, error_of(lambda: decent_dp.gossip(model, fresh, topology="ring", transport=transport))

    for trained, fresh in run_replicas(2, work):
        assert trained == ""
        assert fresh.startswith("DisagreementError: ")
        assert "d of SelfTuning for '0.weight' and 5 more is 0.0 on worker 0 and 1.0 on worker 1" in fresh


# -- hidden state ----------------------------------------------------------------------------------------------------------


class TwoInOne(Optimizer):
    """Two real ones under a home-made one."""

    shape = "attributes"

    def __init__(self, params: Any) -> None:
        params = [param for _, param in params] if isinstance(params, list) else list(params)
        super().__init__(params, {"lr": 0.1})
        matrices = [param for param in params if param.dim() > 1]
        rest = [param for param in params if param.dim() < 2]
        inner = [kind(some, lr=0.1) for kind, some in ((Momentum, matrices), (AdamW, rest)) if some]
        if self.shape == "attributes":
            for one in inner:
                setattr(self, type(one).__name__.lower(), one)
        else:
            self.inner = inner if self.shape == "list" else {str(i): one for i, one in enumerate(inner)}
        self._all = inner if self.shape == "attributes" else None
        if self.shape == "shared":
            for one in inner:
                one.state = self.state

    def step(self, closure: Any = None) -> None:
        inner = self._all or (self.inner.values() if isinstance(self.inner, dict) else self.inner)
        for one in inner:
            one.step()


Momentum = partial(torch.optim.SGD, momentum=0.9)
InAList = type("InAList", (TwoInOne,), {"shape": "list"})
InADict = type("InADict", (TwoInOne,), {"shape": "dict"})
Shared = type("Shared", (TwoInOne,), {"shape": "shared"})


class Sign(Optimizer):
    """sign-SGD, without any state; subclasses keep some in attributes."""

    def __init__(self, params: Any) -> None:
        params = [param for _, param in params] if isinstance(params, list) else list(params)
        super().__init__(params, {"lr": 0.01})
        self.every = params
        self.scratch = torch.zeros(1)
        self.prepare()

    def prepare(self) -> None: ...

    def remember(self, number: int, param: torch.Tensor) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, param in enumerate(self.every):
            if param.grad is not None:
                self.remember(number, param)
                param -= 0.01 * param.grad.sign()


class ByParameter(Sign):
    def prepare(self) -> None:
        self.exp_avg = {param: torch.zeros_like(param) for param in self.every}


class HoldsItself(Sign):
    def prepare(self) -> None:
        self.chain: list[Any] = []
        self.chain.append(self.chain)


class BesideItsState(ByParameter):
    def remember(self, number: int, param: torch.Tensor) -> None:
        self.state[param]["step"] = torch.ones(())


class InAnAttributeList(Sign):
    def prepare(self) -> None:
        self.exp_avgs: list[Any] = []

    def remember(self, number: int, param: torch.Tensor) -> None:
        self.exp_avgs.append(param.grad.clone())


class SaysItself(TwoInOne):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "inner": [one.state_dict() for one in self._all or ()]}


def saves(kind: Any, wrapped: bool) -> tuple[str, str]:
    """The errors of a save before the first step, and after it."""
    model = net()
    if wrapped:
        wrapper = alone(model, kind)
        before = outcome(lambda: take(wrapper.replica))
        loss(wrapper, 0).backward()
        after = outcome(lambda: take(wrapper.replica))
        assert outcome(wrapper.optim_state_dict) == after
        wrapper.close()
        return before, after
    optimizer = kind(model.parameters())
    replica = decent_dp.gossip(model, optimizer, transport=InProcessTransport())
    before = outcome(lambda: take(replica))
    loss(model, 0).backward()
    optimizer.step()
    after = outcome(lambda: take(replica))
    replica.close()
    return before, after


@pytest.mark.parametrize("wrapped", [False, True], ids=["gossip", "wrapper"])
def test_state_that_no_save_finds(wrapped):
    hidden = {
        TwoInOne: ("sgd (SGD)", "adamw (AdamW)"),
        InAList: ("inner (SGD)", "inner (AdamW)"),
        InADict: ("inner (SGD)", "inner (AdamW)"),
        ByParameter: ("exp_avg",),
        BesideItsState: ("exp_avg",),
        InAnAttributeList: ("exp_avgs",),
    }
    for kind, places in hidden.items():
        before, after = saves(kind, wrapped)
        assert before == "", kind
        assert after.startswith(f"ValueError: {kind.__name__} has stepped parameter '"), (kind, after)
        assert any(f"in its attribute {place}," in after for place in places), after
        assert "gossip(model, [muon, adamw])" in after
    for kind in (partial(torch.optim.SGD, lr=0.1), AdamW, torch.optim.Adagrad, Shared, Sign, HoldsItself):
        assert saves(kind, wrapped) == ("", ""), kind
    before, after = saves(SaysItself, wrapped)
    assert (after == "") is not wrapped, after  # by the wrapper state is saved by parameter name


def test_advice_for_optimizers_inside_an_optimizer():
    model = net()
    params = list(model.parameters())
    both = [Momentum([p for p in params if p.dim() > 1], lr=0.1), AdamW([p for p in params if p.dim() < 2])]
    both[0].partner = both[1]  # one that is saved itself
    replica = decent_dp.gossip(model, both, transport=InProcessTransport())
    loss(model, 0).backward()
    for optimizer in both:
        optimizer.step()
    saved = take(replica)["optim"]["optimizers"]
    assert sorted(name for one in saved for name in one["state"]) == sorted(name for name, _ in model.named_parameters())
    replica.close()


@pytest.mark.parametrize("kind", [TwoInOne, InAList, InADict])
def test_a_step_that_makes_a_round_does_not_warn(kind):
    """The real optimizers are passed, and the home-made one steps them."""
    model = net()
    two = kind(model.parameters())
    inner = two._all or (two.inner.values() if isinstance(two.inner, dict) else two.inner)
    replica = decent_dp.gossip(model, list(inner), transport=InProcessTransport())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(model, 0).backward()
        two.step()
    assert replica.stats().rounds == 1
    replica.close()


# -- errors that say what to do --------------------------------------------------------------------------------------------


def test_a_wrapper_without_optim_fn():
    with pytest.raises(TypeError, match=r"optim_fn is missing.*functools.partial\(torch.optim.AdamW, lr=1e-3\)"):
        DecentralizedDataParallel(net(), transport=InProcessTransport())


def test_optimizers_indexed_before_the_first_update():
    model = alone(net())
    for early in (
        lambda: model.optimizers[0],
        lambda: model._optims[-1],
        lambda: model.lr_schedulers[0],
        lambda: model._lr_schedulers[0],
    ):
        with pytest.raises(IndexError, match=r"are made at the first update, one per bucket.*lr_scheduler_fn"):
            early()
    for empty in (model.optimizers, model._optims, model.lr_schedulers, model._lr_schedulers):
        assert isinstance(empty, list)
        assert (bool(empty), empty[:], list(empty)) == (False, [], [])
    kept = model._optims
    loss(model, 0).backward()
    assert kept[0] is model.optimizers[0]
    assert model._lr_schedulers == [None] * len(kept)
    with pytest.raises(IndexError, match="pass lr_scheduler_fn"):
        model.lr_schedulers[0]


def test_a_scaler_that_was_not_passed_to_the_wrapper():
    def work(transport: Any) -> tuple[str, bool]:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        before = [param.detach().clone() for param in model.parameters()]
        # It is on one worker only: all raise.
        scaler = torch.amp.GradScaler("cpu") if transport.rank == 0 else None
        value = loss(model, 0)
        said = error_of(lambda: (scaler.scale(value) if scaler is not None else value).backward())
        kept = all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
        model.close()
        return said, kept

    for said, kept in run_replicas(2, work):
        assert kept
        assert "RuntimeError: " in said
        assert "a GradScaler has scaled a loss" in said
        assert "would be 65536 times too large. Pass scaler=" in said


def test_scalers_that_are_no_mistake():
    scaled = torch.amp.GradScaler("cpu")
    scaled.scale(torch.ones(()))  # of another model, which is said
    model = alone(net(), scaler=torch.amp.GradScaler("cpu", enabled=False))
    loss(model, 0).backward()
    model.close()
    model = alone(net(), scaler=scaled)
    scaled.scale(loss(model, 0))  # not yet updated, and this wrapper's
    other = alone(net())
    loss(other, 0).backward()
    scaled.scale(loss(model, 0)).backward()
    model.close()
    assert (other.stats().updates, model.stats().updates) == (1, 1)
    other.close()
    other = alone(net())  # one that was updated belongs to somebody
    loss(other, 0).backward()
    del scaled, model
    never = [torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)]
    third = alone(nn.Linear(6, 3))
    loss(third, 0).backward()
    assert len(never) == 2


def test_a_scaler_that_nobody_holds_is_no_mistake_in_any_thread():
    """Threads look at the same time, and none keeps it alive for another."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            scaler: Any = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.itself = scaler
            del scaler
            together = threading.Barrier(4)
            for looked in [threads.submit(lambda: (together.wait(60), refuse_scaled_loss())) for _ in range(4)]:  # noqa: B023
                looked.result()
