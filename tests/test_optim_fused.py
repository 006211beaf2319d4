"""The fast forms of the optimizers, of foreach operations and compiled, against their readable twin; torch's kernels."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp.optim import (
    AccumAdam,
    AccumAdamW,
    accum_adamw_foreach,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
    rows,
    update,
)

CLASSES = [AccumAdam, AccumAdamW]
both_classes = pytest.mark.parametrize("cls", CLASSES)
KEYS = ("exp_avg", "exp_avg_sq", "accum_grad")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK", 64)


def leaf(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.preserve_format))


def normal(rng: np.random.Generator, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.asarray(rng.normal(size=shape))).to(dtype)


def run(optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Steps with gradients that depend on the seed and the parameters' shapes alone."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = normal(rng, p.shape, p.dtype)
        optimizer.step()


def close(fast: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> None:
    ps, qs = (o.param_groups[0]["params"] for o in (fast, plain))
    for p, q in zip(ps, qs, strict=True):
        tol = TOLERANCE[p.dtype]
        torch.testing.assert_close(p, q, rtol=tol, atol=tol)
        for key in KEYS:
            value, wanted = fast.state[p][key], plain.state[q][key]
            tol = min(TOLERANCE[value.dtype] if p.dtype in (value.dtype, torch.float32) else TOLERANCE[p.dtype], 1e-2)
            torch.testing.assert_close(value, wanted, rtol=tol, atol=tol)
        assert fast.state[p]["step"] == plain.state[q]["step"]


# --------------------------------------------------------------------------------------------- foreach, block by block


@both_classes
def test_grouping_changes_no_bit(cls: type, small_blocks: None) -> None:
    rng = np.random.default_rng(1)
    params = [normal(rng, (n,), torch.float32) for n in (200, 7, 64, 1, 90)]
    together, reverse = [leaf(p) for p in params], [leaf(p) for p in params]
    alone = [leaf(p) for p in params]
    optimizers = [cls(together, weight_decay=0.1), cls(reverse[::-1], weight_decay=0.1)]
    optimizers += [cls([p], weight_decay=0.1) for p in alone]
    for _ in range(9):
        for same in zip(together, reverse, alone, strict=True):
            grad = normal(rng, same[0].shape, torch.float32)
            for p in same:
                p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q, r in zip(together, reverse, alone, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)


def strange_rows() -> dict[str, tuple[Tensor, Tensor]]:
    """Parameters and gradients that lie in memory in ways of their own."""
    rng = np.random.default_rng(2)
    image, matrix = normal(rng, (2, 3, 4, 5), torch.float32), normal(rng, (6, 8), torch.float32)
    grads = normal(rng, (2, 3, 4, 5), torch.float32), normal(rng, (6, 8), torch.float32)
    last = {"memory_format": torch.channels_last}
    return {
        "channels_last": (image.to(**last), grads[0].to(**last)),
        "contiguous gradient of channels_last": (image.to(**last), grads[0]),
        "channels_last gradient of contiguous": (image, grads[0].to(**last)),
        "transposed": (matrix.t(), grads[1].t()),
        "sliced": (matrix[:, ::2], grads[1][:, ::2]),
        "all sliced alike": (matrix[:, ::2], grads[1][:, ::2]),
        "sliced gradient": (matrix[:, ::2].contiguous(), grads[1][:, ::2]),
        "expanded gradient": (matrix, torch.tensor(0.5).expand(6, 8)),
        "negative view": (matrix, torch.complex(matrix, grads[1]).conj().imag),
        "wide gradient": (matrix.bfloat16(), grads[1]),
        "narrow gradient": (matrix, grads[1].bfloat16()),
        "scalar": (torch.tensor(0.5), torch.tensor(-0.1)),
        "empty": (torch.empty(3, 0), torch.empty(3, 0)),
    }


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", strange_rows())
def test_layouts(name: str, decoupled: bool, small_blocks: None) -> None:
    """And what lies between the elements of a slice stays."""
    param, grad = strange_rows()[name]
    hyper = update.Hyperparameters(0.9, 0.99, 0.1, 0.2, 1e-8, 2, decoupled)
    results = []
    for foreach in (True, False):
        base = torch.full((2 * param.numel() + 2,), 7.0, dtype=param.dtype)
        x = base.as_strided(param.shape, param.stride(), 1).copy_(param)
        before, version = grad.clone(), x._version
        moments = [torch.zeros_like(x, dtype=torch.float32) for _ in range(3)]
        if "all" in name:  # equal strides, but with gaps
            moments = [torch.zeros(100)[:50].as_strided(x.shape, x.stride()) for _ in range(3)]
        row = (x, grad, *moments, torch.tensor(0.0))
        for _ in range(5):
            update.accum_adam([row], hyper, foreach=foreach)
        assert torch.equal(grad, before)
        assert x._version > version
        results.append((base, *moments))
    for fast, plain in zip(*results, strict=True):
        tol = TOLERANCE[fast.dtype]
        torch.testing.assert_close(fast, plain, rtol=tol, atol=tol)


def test_rows_of_other_shapes() -> None:
    """A short gradient is broadcast."""
    x, moments, step = torch.zeros(8), [torch.zeros(8) for _ in range(3)], torch.tensor(0.0)
    numbers = (0.9, 0.99, 0.1, 0.0, 1e-8, 1)
    accum_adamw_foreach([x], [torch.ones(1)], *([m] for m in moments), [step], *numbers)
    torch.testing.assert_close(x, torch.full((8,), -0.1))


# ----------------------------------------------------------------------------------------------------- the compiled form


def compiled_with(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(update, "_BACKEND", backend)
    update._compiled_for.cache_clear()
    update._warn.cache_clear()


def compare_compiled(cls: type, dtype: torch.dtype, steps: int, shapes: Any) -> None:
    rng = np.random.default_rng(3)
    params = [normal(rng, shape, dtype) for shape in shapes]
    options = {"lr": 0.01, "weight_decay": 0.1, "accum_iter": 2}
    fast, plain = (
        cls([leaf(p) for p in params], compiled=True, **options),
        cls([leaf(p) for p in params], foreach=False, **options),
    )
    for t in range(steps):
        for optimizer in (fast, plain):
            optimizer.param_groups[0]["lr"] = 0.01 * (t + 1)
            versions = [p._version for p in optimizer.param_groups[0]["params"]]
            run(optimizer, 1, t)
            assert all(p._version > v for p, v in zip(optimizer.param_groups[0]["params"], versions, strict=True))
    close(fast, plain)


@both_classes
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(of, marks=pytest.mark.slow) for of in (torch.float64, torch.bfloat16))]
)
def test_compiled_equals_readable(cls: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled_with(monkeypatch, count)
    compare_compiled(cls, dtype, 9, [(3, 4), (5,), (), (0,)])
    assert len(graphs) == 2  # within a window and at its end; the step and the rate are not compiled in


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_with(monkeypatch, "inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own code; that it fails is an error
        compare_compiled(AccumAdamW, torch.float32, 4, [(40,)])
        compare_compiled(AccumAdamW, torch.float64, 4, [()])  # Inductor takes such a tensor for a number


def test_without_a_compiler_it_warns_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def broken(*_: Any) -> Any:
        tried.append(1)
        raise FileNotFoundError("no compiler here")

    compiled_with(monkeypatch, broken)
    with pytest.warns(RuntimeWarning, match="could not be compiled and runs eagerly.*no compiler here") as caught:
        compare_compiled(AccumAdam, torch.float32, 5, [(3, 4), (5,)])
    assert len(caught) == len(tried) == 1


def test_compiled_is_an_option_of_groups() -> None:
    with pytest.raises(ValueError, match="compiled=True and foreach=False"):
        AccumAdam([nn.Parameter(torch.ones(2))], compiled=True, foreach=False)
    for factory in (optim_fn_accum_adam, optim_fn_accum_adamw):
        assert factory([("w", nn.Parameter(torch.ones(2)))], compiled=True).param_groups[0]["compiled"] is True
    old = AccumAdam([nn.Parameter(torch.ones(2))]).state_dict()
    del old["param_groups"][0]["compiled"]
    fresh = AccumAdam([nn.Parameter(torch.ones(2))], compiled=True)
    fresh.load_state_dict(old)
    assert fresh.param_groups[0]["compiled"] is True


# --------------------------------------------------------------------------------------------- torch's kernels: factories

FACTORIES = [(optim_fn_adam, torch.optim.Adam), (optim_fn_adamw, torch.optim.AdamW)]
both_factories = pytest.mark.parametrize(("factory", "cls"), FACTORIES)


def named(*params: Tensor) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", leaf(p)) for i, p in enumerate(params)]


@both_factories
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_factories_are_fused_and_equal_torch(factory: Any, cls: type, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    tensors = [normal(rng, shape, dtype) for shape in ((5, 4), (3, 7))]
    fused = factory(named(*tensors), weight_decay=0.1, lr=0.01)
    plain = cls([leaf(t) for t in tensors], weight_decay=0.1, lr=0.01, foreach=False)
    if dtype == torch.float64:
        fused.param_groups[0]["lr"] = torch.tensor(0.01, dtype=dtype)
    assert fused.param_groups[0]["fused"] is True
    for optimizer in (fused, plain):
        run(optimizer, 20)
    for p, q in zip(fused.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert p._version > 1


@both_factories
def test_factories_fall_back(factory: Any, cls: type) -> None:
    """Groups for which the kernel would fail or read the wrong memory."""
    optimizer = factory(named(torch.ones(2, 2, dtype=torch.complex64), torch.ones(2)))
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [False, True]
    sliced = nn.Parameter(torch.ones(4, 6)[:, ::2])
    optimizer = factory([("w", sliced)])
    assert not optimizer.param_groups[0]["fused"]
    run(optimizer, 1)
    assert not factory([("w", nn.Parameter(torch.ones(2, 2, device="meta")))]).param_groups[0]["fused"]
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = factory(list(table.named_parameters()))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


@both_factories
def test_strides_that_the_kernel_does_not_see(factory: Any, cls: type) -> None:
    """A gradient or moments of other strides than the parameter's."""
    tensor, grad = torch.arange(12.0).view(3, 4), torch.arange(12.0, 0, -1).view(4, 3).t()
    fused, plain = factory(named(tensor), weight_decay=0.0), cls([leaf(tensor)], weight_decay=0.0, foreach=False)
    for t in range(4):
        for optimizer in (fused, plain):
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = grad * (t + 1)
            if t == 2:
                optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t().contiguous().t()
            optimizer.step()
    torch.testing.assert_close(fused.param_groups[0]["params"], plain.param_groups[0]["params"])


@both_factories
def test_state_goes_between_kernels(factory: Any, cls: type) -> None:
    """To and from a run on another kernel; each keeps its own, and copies continue alike."""
    tensor = torch.arange(12.0).view(3, 4)
    fused, plain = factory(named(tensor), weight_decay=0.1), cls(named(tensor), weight_decay=0.1, foreach=False)
    for optimizer in (fused, plain):
        run(optimizer, 3)
    state = copy.deepcopy(fused.state_dict()), copy.deepcopy(plain.state_dict())
    fused.load_state_dict(state[1])
    assert (fused.param_groups[0]["fused"], fused.param_groups[0]["foreach"]) == (True, None)
    twins = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    back = cls(named(fused.param_groups[0]["params"][0]), weight_decay=0.1)
    back.load_state_dict(state[0])
    for optimizer in (fused, plain, back, *twins):
        run(optimizer, 3, 9)
    for optimizer in (fused, back, *twins):
        torch.testing.assert_close(optimizer.param_groups[0]["params"], plain.param_groups[0]["params"])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        fused.load_state_dict({**state[1], "param_groups": []})


@both_factories
def test_scaler_skips_and_unscales(factory: Any, cls: type) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    fused, plain = factory(named(tensor), weight_decay=0.1), cls([leaf(tensor)], weight_decay=0.1, foreach=False)
    for optimizer in (fused, plain):
        (p,) = optimizer.param_groups[0]["params"]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[p]["step"] == 2
    torch.testing.assert_close(fused.param_groups[0]["params"], plain.param_groups[0]["params"])
