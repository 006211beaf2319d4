"""The definition of an update."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from decent_dp.ddp import DecentralizedDataParallel, Stats
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, assert_same, batch, beside, loss, net, plain, values

MANY = 1e-6  # MiB: one bucket per parameter


def counts(model: DecentralizedDataParallel) -> tuple[int, int]:
    return model.stats().updates, model.stats().rounds


# -- zero_grad ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "between", "after", "never", "optimizers"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_anywhere(where, set_to_none):
    model = alone(net(), bucket_size_in_mb=MANY)
    expected = plain(net(), [[t] for t in range(4)])
    for t in range(4):
        if where == "before":
            model.zero_grad(set_to_none)
        value = loss(model, t)
        if where == "between":
            model.zero_grad(set_to_none)
        if where == "optimizers":
            for optimizer in model.optimizers:
                optimizer.zero_grad(set_to_none)
        value.backward()
        if where == "after":
            model.zero_grad(set_to_none)
        assert counts(model) == (t + 1, t + 1)
        assert all(p.grad is None for p in model.parameters())
    assert_same(model, expected)


# -- forwards ----------------------------------------------------------------------------------------------------------


# -- accumulation ------------------------------------------------------------------------------------------------------

WINDOWS = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def documents_loop(model: Any) -> None:
    for window in WINDOWS:
        model.set_accumulate_grad(True)
        for t in window:
            (loss(model, t) / len(window)).backward()
        model.set_accumulate_grad(False)


def scripts_loop(model: Any) -> None:
    for window in WINDOWS:
        for i, t in enumerate(window):
            model.set_accumulate_grad(i < len(window) - 1)
            (loss(model, t) / len(window)).backward()


def ddp_loop(model: Any) -> None:
    for window in WINDOWS:
        with model.no_sync():
            for t in window[:-1]:
                (loss(model, t) / len(window)).backward()
        (loss(model, window[-1]) / len(window)).backward()


@pytest.mark.parametrize("loop", [documents_loop, scripts_loop, ddp_loop])
@pytest.mark.parametrize("overlap", [True, False])
def test_three_accumulation_loops(loop, overlap):
    model = alone(net(), bucket_size_in_mb=MANY, overlap=overlap)
    loop(model)
    assert_same(dict(model.named_parameters()), values(plain(net(), WINDOWS, scale=float)))
    assert counts(model) == (3, 3)


def enter(context: Any) -> None:
    with context:
        pass


OBSERVERS = {
    "state_dict": lambda m: m.state_dict(),
    "module.state_dict": lambda m: m.module.state_dict(),
    "optim_state_dict": lambda m: m.optim_state_dict(),
    "global_avg": lambda m: (m.global_avg(), m.revert_global_avg()),
    "averaged": lambda m: enter(m.averaged()),
    "consensus_distance": lambda m: m.consensus_distance(),
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: list(m.named_parameters()),
    "an evaluation": lambda m: (m.eval(), m(batch(5)[0]), m.train()),
}


class Reference:
    """Plain PyTorch with windows as the documents define them."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, SGD(list(model.named_parameters()))
        self.keeps, self.window, self.updates, self.rounds = False, "idle", 0, 0

    def step(self) -> None:
        self.updates += any(p.grad is not None for p in self.model.parameters())
        self.rounds += 1
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.window = "idle"

    def backward(self, t: int, keeps: bool) -> None:
        loss(self.model, t).backward()
        if keeps:
            self.window = "open"
        else:
            self.step()

    def observe(self) -> None:
        if self.window == "pending":
            self.step()


CALLS = st.one_of(
    st.just(("backward",)),
    st.tuples(st.just("accumulate"), st.booleans()),
    st.tuples(st.just("no_sync"), st.integers(0, 2), st.sampled_from(["once", "nested", "raises"])),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("observe"), st.sampled_from([*OBSERVERS])),
    st.tuples(st.just("update"), st.booleans()),
)


def call(model: Any, twin: Reference, t: int, what: str, *how: Any) -> None:
    if what == "backward":
        loss(model, t).backward()
        twin.backward(t, twin.keeps)
    elif what == "accumulate":
        model.set_accumulate_grad(*how)
        twin.observe()
        (twin.keeps,) = how
        if twin.window == "open" and not twin.keeps:
            twin.window = "pending"
    elif what == "no_sync":
        twin.observe()
        with (
            contextlib.suppress(KeyError),
            model.no_sync(),
            model.no_sync() if how[1] == "nested" else contextlib.nullcontext(),
        ):
            for i in range(how[0]):
                loss(model, t + i).backward()
                twin.backward(t + i, keeps=True)
            if how[1] == "raises":
                raise KeyError
    elif what == "zero_grad":
        model.zero_grad(*how)
        twin.observe()
        twin.optimizer.zero_grad(*how)
        twin.window = "pending" if twin.window == "pending" else "idle"
    elif what == "observe":
        OBSERVERS[how[0]](model)
        twin.observe()
    else:  # also gradients that were set by hand
        for param in (*model.module.parameters(), *twin.model.parameters()) if how[0] else ():
            param.grad = torch.full_like(param, 0.1)
        model.update()
        twin.step()


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(CALLS, min_size=3, max_size=12))
def test_windows_are_those_of_the_documents(calls):
    """What observes a pending window makes its update, and an open one stays open; a window that is discarded is none."""
    model, twin = alone(net()), Reference(net())
    for number, (what, *how) in enumerate(calls):
        call(model, twin, 10 * number, what, *how)
        assert counts(model) == (twin.updates, twin.rounds), calls[: number + 1]
        assert_same(values(model.module), values(twin.model))
    model.close()


@pytest.mark.parametrize("observer", [*OBSERVERS, "load", "close"])
def test_every_observer_updates_a_pending_window(observer):
    model = alone(net())
    with model.no_sync():
        loss(model, 0).backward()
    model.set_accumulate_grad(True)
    loss(model, 1).backward()
    model.set_accumulate_grad(False)
    assert counts(model) == (0, 0)
    if observer == "load":
        model.load_state_dict(copy.deepcopy(model.module).state_dict())
    elif observer == "close":
        model.close()
    else:
        OBSERVERS[observer](model)
    assert counts(model) == (1, 1)
    assert observer == "load" or assert_same(model.module, plain(net(), [[0, 1]])) is None


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("adam", [True, False])
def test_pending_window_and_an_evaluation_in_inference_mode(first, adam):
    """The update allocates buckets, messages and state that have to train later."""
    optim_fn = partial(torch.optim.AdamW, lr=0.01) if adam else SGD
    model = alone(net(), optim_fn)
    steps = [[0]] if first else [[7], [0]]
    if not first:
        loss(model, 7).backward()
    model.set_accumulate_grad(True)
    loss(model, 0).backward()
    model.set_accumulate_grad(False)
    model.eval()
    with torch.inference_mode(), model.averaged():
        model(batch(5)[0])
    model.train()
    loss(model, 1).backward()
    assert_same(model, plain(net(), [*steps, [1]], optim_fn))


def test_accumulation_keeps_the_rounds_in_step():
    """With an evaluation on one worker only."""
    model = net()

    def body(at: Any) -> Any:
        options = {"topology": "complete", "overlap": False, "bucket_size_in_mb": MANY, "transport": at}
        results = []
        for loop in (documents_loop, scripts_loop, ddp_loop):
            wrapper = DecentralizedDataParallel(copy.deepcopy(model), SGD, **options)
            loop(wrapper)
            if at.rank == 1:
                wrapper.eval()
                wrapper(batch(0)[0])
            results.append((values(wrapper), counts(wrapper)))
            wrapper.close()
        return results

    expected = values(plain(net(), WINDOWS, scale=float))
    for found, count in itertools.chain(*run_replicas(2, body)):
        assert count == (3, 3)
        assert_same(found, expected, 1e-6)


# -- one step ----------------------------------------------------------------------------------------------------------


def test_a_run_of_one_step_and_observing_before_it():
    def one_step(at: Any) -> None:
        wrapper = DecentralizedDataParallel(models[at.rank], SGD, topology="one-peer-exp", transport=at)
        assert wrapper.get_lr() == 0.0
        assert wrapper.optimizers == wrapper._optims == wrapper._lr_schedulers == []
        assert wrapper.consensus_distance() == 0.0
        assert wrapper.global_avg(return_d2c=True) == 0.0
        wrapper.revert_global_avg()
        with wrapper.averaged():
            wrapper.eval()
            wrapper(batch(0)[0])
        wrapper.train()
        assert wrapper.stats() == Stats(0, 0, 0, None)
        loss(wrapper, 0, at.rank).backward()
        assert counts(wrapper) == (1, 1)
        assert (wrapper.get_lr(), wrapper._lr_schedulers, wrapper.lr_schedulers) == (0.1, [None], [])
        if at.rank == 0:
            assert_same(wrapper, expected)
        assert wrapper.consensus_distance() > 0

    models, expected = [net(0), net(1)], plain(net(0), [[0]])
    run_replicas(2, one_step)


# -- schedulers --------------------------------------------------------------------------------------------------------


def test_schedulers_step_once_per_optimizer_step():
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    model = alone(net(), lr_scheduler_fn=schedule, bucket_size_in_mb=MANY)
    twin = net()
    optimizer = SGD(list(twin.named_parameters()))
    scheduler = schedule(optimizer)
    for t in range(7):
        loss(twin, t).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss(model, t).backward()
        assert model.get_lr() == optimizer.param_groups[0]["lr"]
        assert len(model._optims) == len(model._lr_schedulers) > 1
        for one, other in zip(model._lr_schedulers, model._optims, strict=True):
            assert one.get_last_lr()[0] == other.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    assert_same(model, twin)


def test_autograd_grad_is_no_update():
    model = alone(net())
    x = batch(0)[0].requires_grad_()
    output = model(x).sum()
    torch.autograd.grad(output, [x, *model.parameters()], retain_graph=True)
    torch.autograd.grad(output, x)
    assert counts(model) == (0, 0)
    loss(model, 0).backward()
    assert counts(model) == (1, 1)
    assert_same(model, plain(net(), [[0]]))


@pytest.mark.parametrize("call", ["update", "global_avg", "consensus_distance"])
def test_calls_that_cannot_run_inside_a_backward_are_refused(call):
    model = alone(net())
    x = batch(0)[0].requires_grad_()
    x.register_hook(lambda _: getattr(model, call)())
    with pytest.raises(RuntimeError, match="inside a backward"):
        model(x).sum().backward()


def test_double_backward():
    def step(m: Any, t: int) -> torch.Tensor:
        x = batch(t)[0].requires_grad_()
        output = m(x).square().sum()
        (penalty,) = torch.autograd.grad(output, x, create_graph=True)
        return output + penalty.square().sum()

    model = beside(net(), step, tolerance=1e-6, bucket_size_in_mb=MANY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model, 9).backward(create_graph=True)
    assert counts(model) == (5, 5)
