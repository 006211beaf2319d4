"""The definition of an update."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch

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


def test_several_forwards_before_one_backward():
    def step(m: Any, t: int) -> torch.Tensor:
        with torch.no_grad():
            m(batch(99)[0])
        m(batch(98)[0])  # without a backward
        return (m(batch(t)[0]) - m(batch(t + 50)[0]) - batch(t)[1]).square().mean()

    assert counts(beside(net(), step, bucket_size_in_mb=MANY)) == (4, 4)


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
    "set_accumulate_grad": lambda m: m.set_accumulate_grad(True),
    "no_sync": lambda m: enter(m.no_sync()),
    "state_dict": lambda m: m.state_dict(),
    "module.state_dict": lambda m: m.module.state_dict(),
    "optim_state_dict": lambda m: m.optim_state_dict(),
    "global_avg": lambda m: m.global_avg(),
    "averaged": lambda m: enter(m.averaged()),
    "consensus_distance": lambda m: m.consensus_distance(),
    "parameters": lambda m: list(m.parameters()),
    "named_parameters": lambda m: list(m.named_parameters()),
    "zero_grad": lambda m: m.zero_grad(),
    "load": lambda m: m.load_state_dict(copy.deepcopy(m.module).state_dict()),
    "close": lambda m: m.close(),
    "an evaluation": lambda m: (m.eval(), m(batch(5)[0])),
}


@pytest.mark.parametrize("observer", OBSERVERS)
def test_every_observer_updates_a_pending_window(observer):
    model = alone(net())
    model.set_accumulate_grad(True)
    loss(model, 0).backward()
    loss(model, 1).backward()
    model.set_accumulate_grad(False)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    assert counts(model) == (0, 0)
    assert_same({n: p.detach() for n, p in model.module.named_parameters()}, before)
    OBSERVERS[observer](model)
    assert counts(model) == (1, 1)
    if observer != "load":
        assert_same(model.module, plain(net(), [[0, 1]]))


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


def test_the_next_backward_joins_a_pending_window():
    model = alone(net())
    model.set_accumulate_grad(True)
    loss(model, 0).backward()
    model.set_accumulate_grad(False)
    loss(model, 1).backward()
    assert counts(model) == (1, 1)
    assert_same(model, plain(net(), [[0, 1]]))


@pytest.mark.parametrize(
    "observer",
    [o for o in OBSERVERS if o not in ("zero_grad", "close", "load", "no_sync", "set_accumulate_grad", "an evaluation")],
)
def test_open_window_stays_open(observer):
    model = alone(net())
    with model.no_sync():
        loss(model, 0).backward()
    OBSERVERS[observer](model)
    model.eval()
    model(batch(0)[0])
    model.train()
    assert counts(model) == (0, 0)
    if observer == "global_avg":
        model.revert_global_avg()
    loss(model, 1).backward()
    assert counts(model) == (1, 1)
    assert_same(model, plain(net(), [[0, 1]]))


def test_zero_grad_discards_an_open_window():
    model = alone(net())
    with model.no_sync():
        loss(model, 0).backward()
        model.zero_grad()
        loss(model, 1).backward()
    loss(model, 2).backward()
    assert counts(model) == (1, 1)
    assert_same(model, plain(net(), [[1, 2]]))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_discarded_window_is_not_pending(set_to_none):
    model = alone(net())
    loss(model, 0).backward()  # momentum: an update with zeros would move
    model.set_accumulate_grad(True)
    loss(model, 1).backward()
    model.zero_grad(set_to_none)
    model.set_accumulate_grad(False)
    model.state_dict()
    assert counts(model) == (1, 1)


def test_set_accumulate_grad_without_gradients_makes_nothing_pending():
    model = alone(net())
    for flag in (True, False, True, False):
        model.set_accumulate_grad(flag)
    model.state_dict()
    assert counts(model) == (0, 0)
    model.set_accumulate_grad(True)
    loss(model, 0).backward()
    for p in model.module.parameters():
        p.grad = None
    model.set_accumulate_grad(False)
    model.state_dict()
    assert counts(model) == (0, 0)


def test_no_sync_nests_and_keeps_set_accumulate_grad():
    model = alone(net())
    model.set_accumulate_grad(True)
    with model.no_sync(), model.no_sync():
        loss(model, 0).backward()
    loss(model, 1).backward()
    assert counts(model) == (0, 0)
    model.set_accumulate_grad(False)
    loss(model, 2).backward()
    assert_same(model, plain(net(), [[0, 1, 2]]))


def test_no_sync_ends_with_an_exception():
    model = alone(net())
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    loss(model, 0).backward()
    assert counts(model) == (1, 1)


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


def test_update_applies_gradients_set_by_hand():
    model = alone(net())
    twin = net()
    optimizer = SGD(list(twin.named_parameters()))
    for _ in range(3):
        for m in (model.module, twin):
            for i, p in enumerate(m.parameters()):
                p.grad = torch.full_like(p, 0.1 * (i + 1))
        optimizer.step()
        model.update()
    assert counts(model) == (3, 3)
    assert_same(model, twin)
    assert all(p.grad is None for p in model.parameters())


def test_update_without_gradients_is_a_round_and_no_step():
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    model = alone(net(), lr_scheduler_fn=schedule)
    loss(model, 0).backward()
    before = values(model)
    model.update()
    assert counts(model) == (1, 2)
    assert model.get_lr() == 0.05
    assert_same(model, before)


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
