"""Snapshots that do not fit, and loads that not all workers can make: refused on all of them, and nothing is changed."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import OutOfStepError
from decent_dp.replica.snapshot import put_back, take
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import SGD, alone, batch, loss, net
from tests.resuming import (
    ADAMW,
    JOBS,
    MANY,
    PAIRS,
    Job,
    Zoo,
    assert_equal,
    dumb_copy,
    go_on,
    run_through,
    step_in_windows,
    trained,
)


def changed(snapshot: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at ``path``; None: without it."""
    found = dumb_copy(snapshot)
    *way, last = path.split("/")
    inner = found
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return found


class Picky(nn.Module):
    """Has extra state that it may refuse."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Zoo(seed)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


UNFIT: list[tuple[str, Any, type[Exception], str]] = [
    ("parameters/inner.turned", None, ValueError, r"parameter 'inner\.turned' is not in the snapshot"),
    ("parameters/inner.more", torch.zeros(3), ValueError, r"the parameter 'inner\.more', and this model has none"),
    (
        "parameters/inner.turned",
        torch.zeros(3, 8),
        ValueError,
        r"'inner\.turned' was saved as \(3, 8\) float32, and is \(8, 3\)",
    ),
    ("parameters/inner.wide.bias", torch.zeros(8), ValueError, r"'inner\.wide\.bias' was saved as \(8,\) float32.*float64"),
    ("buffers/inner.seen", None, ValueError, r"buffer 'inner\.seen' is not in the snapshot"),
    ("buffers/inner.phase", torch.zeros(3), ValueError, r"buffer 'inner\.phase' was saved as \(3,\) float32.*complex64"),
    ("extra_state/inner.counted", None, ValueError, r"extra state of the module 'inner\.counted' is not in the snapshot"),
    ("extra_state/inner.counted", {"calls": -1}, ValueError, "calls below zero"),
    ("optim/param_groups/inner.turned", None, ValueError, r"nothing for parameter 'inner\.turned'"),
    ("optimizer", "AdamW", ValueError, r"the optimizer was AdamW when this was saved, and is Wide now"),
    ("scheduler", "StepLR", ValueError, r"the scheduler was StepLR when this was saved, and is None now"),
    ("optim/scaler", {"scale": 2.0}, ValueError, r"saved with a GradScaler, and this run has none"),
    ("order", ["inner.turned"], ValueError, "the order of parameters"),
    ("round", -1, ValueError, "'round' is -1"),
    ("window", "owed", ValueError, "'window' is 'owed'"),
    ("factor", 1.5, ValueError, r"'factor' is 1\.5"),
    ("grads", None, ValueError, "not a snapshot of a replica: it has no entry 'grads'"),
    ("grads/inner.turned", torch.zeros(3), ValueError, r"gradient of 'inner\.turned' was saved as \(3,\)"),
    ("grads/inner.more", torch.zeros(3), ValueError, r"gradient of 'inner\.more', which is not a trainable"),
    ("grads/inner.turned", torch.zeros(8, 3).double(), ValueError, r"gradient of 'inner\.turned' .* \(8, 3\) float64, and is"),
    ("grads/inner.narrow.bias", torch.zeros(8), ValueError, r"saved as \(8,\) float32, and is \(8,\) bfloat16"),
    ("grads/inner.turned", [1.0], ValueError, r"gradient of 'inner\.turned' was saved as a list, and is \(8, 3\) float32"),
    ("parameters/inner.turned", 3.0, ValueError, r"'inner\.turned' was saved as a float, and is"),
    *((name, None, ValueError, f"it has no entry '{name}'") for name in ("scheduler", "arrived")),
    ("arrived", "x", ValueError, "'arrived' is 'x'"),
    ("arrived", ["inner.more"], ValueError, r"gradient of 'inner\.more', which is not a trainable"),
]


def state_of(model: DecentralizedDataParallel) -> Any:
    """Everything that a refused load must leave alone."""
    objects = [*model.optimizers, *model.replica.engine.buckets, *model.module.parameters()]
    return dumb_copy(take(model.replica, settled=False)), [id(one) for one in objects]


def test_a_misfit_is_refused_on_all_workers_and_changes_nothing():
    bad = 1
    job = Job({"topology": "one-peer-exp", "compression": "int8", **MANY}, model=Picky, optim_fn=JOBS["zoo"].optim_fn)
    job = replace(job, step=step_in_windows)
    through = run_replicas(2, lambda at: run_through(job, at, at.rank, 9, [4]))

    def body(at: InProcessTransport) -> list[tuple[str, str]]:
        model = trained(job, 4, at)
        fits = dumb_copy(take(model.replica))
        job.train(model, range(4, 5), at.rank)  # in the middle of a window
        errors, before = [], state_of(model)
        for path, value, kind, _ in UNFIT:
            with pytest.raises(kind) as caught:
                put_back(model.replica, changed(fits, path, value) if at.rank == bad else fits)
            errors.append((type(caught.value).__name__, str(caught.value)))
            assert_equal(state_of(model), before, path)
            assert not model.replica.life.fault, path
        job.train(model, range(5, 9), at.rank)
        assert_equal(dumb_copy(take(model.replica)), through[at.rank][2])
        return errors

    found = run_replicas(2, body)
    assert found[0] == found[1]
    for (path, _, kind, match), (name, message) in zip(UNFIT, found[0], strict=True):
        with pytest.raises(AssertionError, match=match):
            raise AssertionError(message)
        assert name == kind.__name__, path
        assert message.startswith(f"worker {bad}: "), path


def test_an_optim_fn_that_fails_changes_nothing():
    fails = [False]

    def optim_fn(params: list[Any]) -> torch.optim.Optimizer:
        if fails[0]:
            raise ValueError("not again")
        return SGD([param for _, param in params])

    job = replace(PAIRS, optim_fn=optim_fn)
    through = run_replicas(2, lambda at: run_through(job, at, at.rank, 6))

    def body(at: InProcessTransport) -> None:
        model = trained(job, 3, at)
        before = state_of(model)
        at.control.gather(None)
        fails[0] = True
        with pytest.raises(ValueError, match="not again"):
            put_back(model.replica, before[0])
        at.control.gather(None)
        fails[0] = False
        assert_equal(state_of(model), before)
        job.train(model, range(3, 6), at.rank)
        assert_equal(dumb_copy(take(model.replica)), through[at.rank][2])

    run_replicas(2, body)


def test_workers_whose_snapshots_do_not_belong_together():
    through = run_replicas(2, lambda at: run_through(PAIRS, at, at.rank, 5, [0, 2, 4])[0])
    one_bucket = run_replicas(2, lambda at: run_through(replace(PAIRS, options=MANY), at, at.rank, 3, [2])[0])

    def body(at: InProcessTransport) -> list[str]:
        model = PAIRS.wrap(0, at)
        own = through[at.rank]
        turned = one_bucket[at.rank][2]
        turned = {**turned, "order": turned["order"][::-1]}
        errors = []
        for snapshot, kind in (
            (own[2 + 2 * at.rank], OutOfStepError),
            (own[2] if at.rank else own[0], OutOfStepError),
            (turned if at.rank else own[2], ValueError),
        ):
            before = state_of(model)
            with pytest.raises(kind) as caught:
                put_back(model.replica, snapshot)
            errors.append(str(caught.value))
            assert_equal(state_of(model), before)
        PAIRS.train(model, range(2), at.rank)
        assert_equal(dumb_copy(take(model.replica)), own[2])
        return errors

    found = run_replicas(2, body)
    assert found[0] == found[1]
    assert "different rounds (worker 0: 2, worker 1: 4)" in found[0][0]
    assert "different rounds (worker 0: 0, worker 1: 2)" in found[0][1]
    assert "different orders" in found[0][2]


def test_a_scaler_of_another_run():
    job = JOBS["scaler"]
    scaled, plain = trained(job, 2), trained(PAIRS, 2)
    for model, snapshot, words in (
        (plain, take(scaled.replica), "with a GradScaler, and this run has none"),
        (scaled, take(plain.replica), "without a GradScaler, and this run has one"),
    ):
        with pytest.raises(ValueError, match=words):
            put_back(model.replica, dumb_copy(snapshot))


def test_a_scaler_with_what_is_no_number():
    job = JOBS["scaler"]
    model = trained(job, 3)
    saved = dumb_copy(take(model.replica))
    job.train(model, range(3, 4), 0)
    before = state_of(model)
    for value in ("x", True, [1.0]):
        with pytest.raises(ValueError, match=r"state of the GradScaler\['scale'\] was saved as"):
            put_back(model.replica, changed(saved, "optim/scaler/scale", value))
        assert_equal(state_of(model), before)
        assert not model.replica.life.fault
    whole = replace(job, scaled=False).wrap(0, InProcessTransport(), scaler=torch.amp.GradScaler("cpu", init_scale=4))
    put_back(whole.replica, saved)  # a number that was given as an int
    assert whole.replica.scaler.get_scale() == saved["optim"]["scaler"]["scale"]


# -- states of optimizers --------------------------------------------------------------------------------------------------


class Whitening(torch.optim.Optimizer):
    """Keeps a square matrix a parameter, in a shape that a parameter of another model might have."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__([param for _, param in params], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            flat = param.grad.reshape(len(param), -1)
            state = self.state[param]
            state["square"] = state.get("square", torch.eye(len(param))) * 0.9 + 0.1 * flat @ flat.T
            state["table"] = [torch.arange(5.0)]
            param.sub_(0.05 * torch.linalg.solve(state["square"], flat).reshape(param.shape))


SHAPES: list[tuple[str, Any, str, tuple[int, ...]]] = [
    ("momentum_buffer", SGD, "2.weight", (3, 3)),
    ("exp_avg_sq", ADAMW, "2.bias", (11,)),
    ("step", ADAMW, "2.bias", (2,)),
    ("row_var", torch.optim.Adafactor, "2.weight", (11, 1)),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_a_state_of_another_shape_is_refused(case):
    key, optim_fn, name, shape = case
    if optim_fn in (torch.optim.Adafactor,):
        optim_fn = partial(_unnamed, optim_fn)
    job = Job({"topology": "one-peer-exp"}, optim_fn=optim_fn)

    def body(at: InProcessTransport) -> None:
        model = trained(job, 2, at)
        saved = dumb_copy(take(model.replica))
        bad = changed(saved, f"optim/state/{name}/{key}", torch.zeros(shape))
        job.train(model, [2], at.rank)
        before = state_of(model)
        with pytest.raises(ValueError, match=rf"worker 1: (?=.*'{key}')(?=.*'{name}').* was saved as"):
            put_back(model.replica, bad if at.rank else saved)
        assert_equal(state_of(model), before)
        put_back(model.replica, saved)
        job.train(model, [2], at.rank)
        assert_equal(state_of(model)[0], before[0])

    run_replicas(2, body)


def _unnamed(kind: Any, params: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([param for _, param in params])
    return optimizer


@pytest.mark.parametrize(
    "optim_fn", [Whitening, *(partial(_unnamed, kind) for kind in (torch.optim.Adafactor, torch.optim.Adagrad))]
)
def test_states_of_other_shapes_than_their_parameters(optim_fn):
    """Of optimizers that need them."""
    job = Job({}, optim_fn=optim_fn)
    snapshots, losses, end = run_through(job, InProcessTransport(), 0, 6, [3])
    others, other = go_on(job, InProcessTransport(), 0, range(3, 6), snapshots[3])
    assert_equal(others, losses[3:])
    assert_equal(other, end)


class Global(torch.optim.SGD):
    """Keeps something of all parameters together."""

    def __init__(self, params: Any, key: Any, value: Any) -> None:
        super().__init__([param for _, param in params], lr=0.1)
        self.state[key] = value


class Beside(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__([param for _, param in params], lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": 3}


@pytest.mark.parametrize(
    ("optim_fn", "what"),
    [
        (partial(Global, key="k", value={"n": 0}), "Global keeps 'k'"),
        (partial(Global, key="k", value=7), "Global keeps 'k'"),
        (partial(Global, key=torch.zeros(2), value={"n": 0}), "Global keeps a tensor"),
        (Beside, "Beside keeps 'seen'"),
    ],
)
def test_state_of_no_parameter_is_not_dropped_silently(optim_fn, what):
    model = alone(net(), optim_fn)
    empty = dumb_copy(take(model.replica))  # there are none yet
    loss(model, 0).backward()
    for save in (lambda: take(model.replica), model.optim_state_dict):
        with pytest.raises(ValueError, match=f"{what}, which belongs to no parameter .* keep it in param_groups"):
            save()
    loss(model, 1).backward()
    assert model.stats().updates == 2
    put_back(model.replica, empty)


@pytest.mark.parametrize("key", ["k", torch.zeros(2)], ids=["word", "tensor"])
def test_an_entry_that_was_only_looked_at_is_nothing(key):
    model = alone(net(), partial(Global, key=key, value={}))
    loss(model, 0).backward()
    assert take(model.replica)["optim"]["state"] == {}


# -- one worker alone ------------------------------------------------------------------------------------------------------


def test_a_load_inside_a_backward_of_one_worker():
    """Told to all at once: nobody waits for one that has gone on."""

    def body(at: InProcessTransport) -> str:
        model = trained(PAIRS, 2, at)
        saved = dumb_copy(take(model.replica))
        errors: list[str] = []

        def load(_: Any = None) -> None:
            with pytest.raises(RuntimeError) as caught:
                put_back(model.replica, saved)
            errors.append(str(caught.value))

        if at.rank:
            model.set_accumulate_grad(True)
            loss(model, 2, at.rank).backward()
            model.set_accumulate_grad(False)  # owed
            load()
        else:
            output = model(batch(2)[0])
            output.register_hook(load)
            output.square().mean().backward()
        assert (model.stats().updates, model.replica.life.fault) == (3, None)
        [error] = errors
        return error

    began = time.monotonic()
    found = run_replicas(2, body)
    assert time.monotonic() - began < 45  # a silent one is waited for 60 s
    assert found[0] == found[1]
    assert found[0].startswith("worker 0: load was called inside a backward")


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("due", ["raised", "owed"])
def test_a_load_where_one_worker_has_an_update_to_make(due, overlap):
    """The others are waiting for it, before they come to the load."""
    job = Job({"topology": "one-peer-exp", "overlap": overlap})

    def body(at: InProcessTransport) -> None:
        model = trained(job, 2, at)
        saved = dumb_copy(take(model.replica))
        if at.rank == 0:
            job.train(model, [2], 0)
        elif due == "owed":
            model.set_accumulate_grad(True)
            loss(model, 2, 1).backward()
            model.set_accumulate_grad(False)
        else:
            output = model(batch(2, 1)[0])
            output.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.square().mean().backward()
        put_back(model.replica, saved)
        assert_equal(dumb_copy(take(model.replica)), saved)

    run_replicas(2, body)


def test_a_load_at_different_updates():
    """A worker that is ahead cannot load an earlier round while the exchange of the other is still to come."""

    def body(at: InProcessTransport) -> str:
        model = trained(PAIRS, 3, at)
        saved = dumb_copy(take(model.replica))
        if at.rank == 0:
            PAIRS.train(model, [3], 0)
        before = state_of(model)
        with pytest.raises(OutOfStepError, match="loading needs all workers at the same update") as caught:
            put_back(model.replica, saved)
        assert_equal(state_of(model), before)
        assert not model.replica.life.fault
        if at.rank == 1:
            PAIRS.train(model, [3], 1)
        put_back(model.replica, saved)
        assert_equal(dumb_copy(take(model.replica)), saved)
        return str(caught.value)

    found = run_replicas(2, body)
    assert found[0] == found[1]
    assert "worker 0: 4, worker 1: 3" in found[0]
