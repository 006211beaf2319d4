"""The optimizers against a float64 twin in NumPy and against torch; factories; schedules."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from decent_dp.optim import (
    AccumAdam,
    AccumAdamW,
    accum_adam_foreach,
    accum_adamw_foreach,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
    rows,
)

Array = np.ndarray[Any, np.dtype[np.float64]]
CLASSES = [AccumAdam, AccumAdamW]
FORMS = [True, False]
SHAPES = [(3, 4), (5,), (), (0,), (2, 3, 2)]
both_classes = pytest.mark.parametrize("cls", CLASSES)
both_forms = pytest.mark.parametrize("foreach", FORMS)


def formula(
    x: Array, grads: list[Array], s: int, lr: float, b1: float, b2: float, eps: float, wd: float, decoupled: bool
) -> tuple[Array, Array, Array, Array]:
    """x, β1·M, β2·V, a after these gradients: the documented formula, window by window, in float64."""
    M, V, a = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for k, start in enumerate(range(0, len(grads), s), start=1):
        seen = []
        for g in grads[start : start + s]:
            if decoupled:
                x = x - lr * wd * x
            else:
                g = g + wd * x
            seen.append(g)
            m_hat = (b1 * M + (1 - b1) * g) / (1 - b1**k)
            v_hat = (b2 * V + (1 - b2) * g**2) / (1 - b2**k)
            x = x - lr * m_hat / (np.sqrt(v_hat) + eps)
        a = sum(seen) / s
        if len(seen) == s:
            M = b1 * M + (1 - b1) * a
            V = b2 * V + (1 - b2) * a**2
            a = np.zeros_like(x)
    return x, b1 * M, b2 * V, a


def numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.asarray(rng.normal(size=shape))


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    rng = np.random.default_rng(seed)
    return [nn.Parameter(torch.tensor(numbers(rng, shape)).to(dtype)) for shape in shapes]


def gradients(steps: int, seed: int = 1, shapes: Any = SHAPES) -> list[list[Array]]:
    rng = np.random.default_rng(seed)
    return [[numbers(rng, shape) for shape in shapes] for _ in range(steps)]


def feed(optimizer: torch.optim.Optimizer, grads: list[list[Array]]) -> None:
    """Step once for each list of gradients, in the order of the optimizer's parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = torch.tensor(g).to(p.dtype)
        optimizer.step()


def as_numpy(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy().copy()


def same(xs: Any, ys: Any) -> None:
    for x, y in zip(xs, ys, strict=True):
        assert torch.equal(x, y)


def same_state(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> None:
    """Equal to the last bit: parameters, and state with its dtypes."""
    ps, qs = ([p for g in o.param_groups for p in g["params"]] for o in (one, two))
    for p, q in zip(ps, qs, strict=True):
        assert torch.equal(p, q)
        assert one.state[p].keys() == two.state[q].keys()
        for key in one.state[p]:
            assert one.state[p][key].dtype == two.state[q][key].dtype
            assert torch.equal(one.state[p][key], two.state[q][key]), key


# --------------------------------------------------------------------------------------------------------- the formula


@given(
    s=st.integers(1, 5),
    steps=st.integers(1, 13),
    lr=st.sampled_from([0.0, 1e-3, 0.1]),
    betas=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.9, 0.999])),
    eps=st.sampled_from([1e-8, 1e-3, 0.5]),
    wd=st.sampled_from([0.0, 0.01, 0.7]),
    cls=st.sampled_from(CLASSES),
    foreach=st.sampled_from(FORMS),
    block=st.sampled_from([1, 4, 5, 12, 2**17]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100, derandomize=True)
def test_optimizer_follows_the_formula(s, steps, lr, betas, eps, wd, cls, foreach, block, seed) -> None:
    """In whole blocks, in several, and in parts of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_BLOCK", block)
        follows_the_formula(s, steps, lr, betas, eps, wd, cls, foreach, seed)


def follows_the_formula(s, steps, lr, betas, eps, wd, cls, foreach, seed) -> None:
    for dtype, tol in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        params = parameters(seed, dtype)
        starts = [as_numpy(p) for p in params]
        grads = gradients(steps, seed + 1)
        optimizer = cls(params, lr, betas, eps, wd, s, foreach=foreach)
        feed(optimizer, grads)
        for i, p in enumerate(params):
            rounded = [as_numpy(torch.tensor(row[i]).to(dtype)) for row in grads]
            want = formula(starts[i], rounded, s, lr, *betas, eps, wd, cls is AccumAdamW)
            state = optimizer.state[p]
            got = (p, state["exp_avg"], state["exp_avg_sq"], state["accum_grad"])
            for value, wanted in zip(got, want, strict=True):
                assert value.dtype == dtype
                np.testing.assert_allclose(as_numpy(value), wanted, rtol=tol, atol=tol)
            assert state["step"].item() == steps


@both_forms
@both_classes
@pytest.mark.parametrize("s", [1, 4])
def test_long_runs_follow_the_formula(s: int, cls: type, foreach: bool) -> None:
    """Bias correction at k large and small; the defaults of the signature."""
    shapes, steps = [(4, 3), (7,)], 103
    params = parameters(3, torch.float64, shapes)
    starts, grads = [as_numpy(p) for p in params], gradients(steps, 4, shapes)
    feed(cls(params, weight_decay=0.1, foreach=foreach, **({} if s == 4 else {"accum_iter": s})), grads)
    for i, p in enumerate(params):
        want, *_ = formula(starts[i], [row[i] for row in grads], s, 1e-3, 0.9, 0.999, 1e-8, 0.1, cls is AccumAdamW)
        np.testing.assert_allclose(as_numpy(p), want, rtol=1e-12, atol=1e-13)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cls", "torch_cls"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)])
def test_window_of_one_is_torch(cls: type, torch_cls: type, foreach: bool, dtype: torch.dtype) -> None:
    ours, theirs = parameters(5, dtype), parameters(5, dtype)
    options = {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}
    grads = gradients(100, 6)
    feed(cls(ours, accum_iter=1, foreach=foreach, **options), grads)
    feed(torch_cls(theirs, foreach=True, **options), grads)
    for p, q in zip(ours, theirs, strict=True):
        # over 100 steps float32 itself wanders by some units in the last place
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize(("form", "decoupled"), [(accum_adam_foreach, False), (accum_adamw_foreach, True)])
def test_functional_forms_with_their_own_steps_and_windows(form: Any, decoupled: bool) -> None:
    """Three tensors at steps 0, 1, 2 of windows of two, one call each time; argument order as documented."""
    hyper = {"s": 2, "lr": 0.03, "b1": 0.8, "b2": 0.95, "eps": 1e-4, "wd": 0.2, "decoupled": decoupled}
    rng = np.random.default_rng(0)
    starts, history = [numbers(rng, (3,)) for _ in range(3)], [[numbers(rng, (3,)) for _ in range(7)] for _ in range(3)]
    rows = [formula(x, h[:ahead], **hyper) for ahead, (x, h) in enumerate(zip(starts, history, strict=True))]
    params, exp_avgs, exp_avg_sqs, accum_grads = ([torch.tensor(row[c]) for row in rows] for c in range(4))
    steps = [torch.tensor(float(ahead)) for ahead in range(3)]
    for t in range(5):
        grads = [torch.tensor(h[t + ahead]) for ahead, h in enumerate(history)]
        before = [g.clone() for g in grads]
        form(params, grads, exp_avgs, exp_avg_sqs, accum_grads, steps, 0.8, 0.95, 0.03, 0.2, 1e-4, 2)
        same(grads, before)
    assert [step.item() for step in steps] == [5, 6, 7]
    for i in range(3):
        want = formula(starts[i], history[i][: 5 + i], **hyper)
        for value, wanted in zip((params[i], exp_avgs[i], exp_avg_sqs[i], accum_grads[i]), want, strict=True):
            np.testing.assert_allclose(as_numpy(value), wanted, rtol=1e-12, atol=1e-14)


def test_functional_forms_refuse_bad_lists() -> None:
    x, step = torch.ones(2, dtype=torch.bfloat16), torch.tensor(0.0)
    good = [[x], [x], [torch.zeros(2)], [torch.zeros(2)], [torch.zeros(2)], [step]]
    numbers_ = (0.9, 0.99, 1e-3, 0.0, 1e-8, 4)
    with pytest.raises(ValueError, match="'grads': 0"):
        accum_adam_foreach(good[0], [], *good[2:], *numbers_)
    with pytest.raises(ValueError, match=r"exp_avg_sqs\[0\] is torch.bfloat16"):
        accum_adamw_foreach(*good[:3], [x], *good[4:], *numbers_)
    assert step.item() == 0
    accum_adamw_foreach([], [], [], [], [], [], *numbers_)
    leaf = nn.Parameter(torch.ones(2))
    accum_adamw_foreach([leaf], [torch.ones(2)], *good[2:], *numbers_)  # no no_grad around it
    assert step.item() == 1


# ------------------------------------------------------------------------------------------------- dtypes and layouts


@both_forms
@both_classes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_round_once(cls: type, foreach: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step: the formula in float32 from the rounded parameter, state in float32 never rounded."""
    params, shadow = parameters(9, dtype), parameters(9, dtype)
    shadow = [nn.Parameter(p.float()) for p in shadow]
    options = {"lr": 0.01, "weight_decay": 0.1, "accum_iter": 3, "foreach": foreach}
    optimizer, wide = cls(params, **options), cls(shadow, **options)
    for row in gradients(10, 10):
        row = [as_numpy(torch.tensor(g).to(dtype)) for g in row]
        feed(optimizer, [row])
        feed(wide, [row])
        for p, q in zip(params, shadow, strict=True):
            q.data.copy_(q.data.to(dtype))
            assert p.dtype == dtype
            assert torch.equal(p.float(), q)
            for key in ("exp_avg", "exp_avg_sq", "accum_grad"):
                assert optimizer.state[p][key].dtype == torch.float32
                assert torch.equal(optimizer.state[p][key], wide.state[q][key])


@both_forms
@both_classes
def test_gradient_stays_and_version_moves(cls: type, foreach: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(0, dtype)
        optimizer = cls(params, weight_decay=0.5, accum_iter=2, foreach=foreach)
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(3):
            versions = [p._version for p in params]
            optimizer.step()
            assert all(torch.equal(p.grad, torch.ones_like(p)) for p in params)
            assert all(p._version > v for p, v in zip(params, versions, strict=True))


# --------------------------------------------------------------------------------------------- behaviour as optimizer


@both_forms
def test_parameters_without_gradient_do_not_count(foreach: bool) -> None:
    rng = np.random.default_rng(2)
    params = parameters(12, torch.float64, [(3,), (3,), (3,)])
    starts, seen = [as_numpy(p) for p in params], [[], [], []]
    optimizer = AccumAdam(params, accum_iter=3, lr=0.1, foreach=foreach)
    for t in range(20):
        for i, p in enumerate(params[:2]):
            p.grad = None
            if i == 0 or t % 3:
                seen[i].append(numbers(rng, (3,)))
                p.grad = torch.tensor(seen[i][-1])
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params[:2]] == [20, 13]
    assert params[2] not in optimizer.state
    for p, x, grads in zip(params, starts, seen, strict=True):
        want, *_ = formula(x, grads, 3, 0.1, 0.9, 0.999, 1e-8, 0.0, False)
        np.testing.assert_allclose(as_numpy(p), want, rtol=1e-12)


def test_groups_have_their_own_options() -> None:
    a, b = parameters(13, torch.float64, [(4,), (4,)])
    starts, grads = [as_numpy(a), as_numpy(b)], gradients(9, 14, [(4,), (4,)])
    second = {"params": [b], "lr": 0.2, "betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.3, "accum_iter": 2}
    optimizer = AccumAdamW([{"params": [a]}, second], lr=torch.tensor(0.1, dtype=torch.float64), accum_iter=4)
    feed(optimizer, grads)
    for p, x, i, hyper in (
        (a, starts[0], 0, (4, 0.1, 0.9, 0.999, 1e-8, 0.0)),
        (b, starts[1], 1, (2, 0.2, 0.5, 0.9, 0.1, 0.3)),
    ):
        want, *_ = formula(x, [row[i] for row in grads], *hyper, True)
        np.testing.assert_allclose(as_numpy(p), want, rtol=1e-12)


def test_closure_and_schedulers() -> None:
    (p,) = parameters(0, torch.float64, [(3,)])
    start = as_numpy(p)
    optimizer = AccumAdam([p], lr=0.1, accum_iter=2)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx((start**2).sum())
    want, *_ = formula(start, [2 * start], 2, 0.1, 0.9, 0.999, 1e-8, 0.0, False)
    np.testing.assert_allclose(as_numpy(p), want)
    assert optimizer.step() is None
    halving.step()
    halving.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@both_forms
def test_sparse_gradients_are_refused_before_anything_moves(foreach: bool) -> None:
    dense, table = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    groups = [{"params": [("dense", dense)]}, {"params": [("table", table.weight)]}]
    optimizer = AccumAdam(groups, foreach=foreach)
    (table(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(RuntimeError, match=r"sparse.*'table'.*SparseAdam"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1e-3}, r"lr must be >= 0, but is -0\.001"),
        ({"lr": float("nan")}, "lr must be >= 0, but is nan"),
        ({"lr": torch.ones(2)}, r"1 element.*\(2,\)"),
        ({"betas": (1.0, 0.9)}, r"\[0, 1\), but is \(1\.0, 0\.9\)"),
        ({"betas": (0.9,)}, r"two numbers"),
        ({"eps": -1e-8}, "eps must be >= 0, but is -1e-08"),
        ({"weight_decay": -0.1}, r"weight_decay must be >= 0, but is -0\.1"),
        ({"accum_iter": 0}, "int >= 1, but is 0"),
        ({"accum_iter": True}, "int >= 1, but is True"),
    ],
)
@both_classes
def test_options_are_validated(cls: type, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        cls(parameters(), **options)
    optimizer = cls(parameters())
    with pytest.raises(ValueError, match=match):
        optimizer.add_param_group({"params": parameters(), **options})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match=r"complex.*'z'.*complex64"):
        cls([("z", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])


# ------------------------------------------------------------------------------------------------------------- saving


def copies(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """The optimizer carried over in every way there is, each with its own parameters."""
    cls, options = type(optimizer), {k: v for k, v in optimizer.defaults.items() if k != "differentiable"}
    yield copy.deepcopy(optimizer)
    yield pickle.loads(pickle.dumps(optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for saved in (optimizer.state_dict(), torch.load(io.BytesIO(file.getvalue()), weights_only=True)):
        fresh = cls([nn.Parameter(p.detach().clone()) for p in params], **options)
        fresh.load_state_dict(saved)
        yield fresh
    reloaded = copy.deepcopy(optimizer)
    reloaded.load_state_dict(optimizer.state_dict())
    yield reloaded


@both_forms
@both_classes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resumes_bit_for_bit_in_the_middle_of_a_window(cls: type, foreach: bool, dtype: torch.dtype) -> None:
    params = parameters(15, dtype)
    optimizer = cls(params, lr=0.01, weight_decay=0.1, accum_iter=4, foreach=foreach)
    grads = gradients(13, 16)
    feed(optimizer, grads[:6])
    twins = list(copies(params, optimizer))
    for twin in twins:
        same_state(optimizer, twin)
    feed(optimizer, grads[6:])
    for twin in twins:  # after the original has moved: nothing may be shared with it
        feed(twin, grads[6:])
        same_state(optimizer, twin)


def test_loads_older_state_dicts() -> None:
    """No 'foreach', state in the parameter's bfloat16, steps as numbers, betas as a list."""
    (p,) = parameters(17, torch.bfloat16, [(3,)])
    moments = {
        key: torch.full((3,), value, dtype=torch.bfloat16)
        for key, value in (("exp_avg", 0.5), ("exp_avg_sq", 0.25), ("accum_grad", 0.125))
    }
    group = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0, "accum_iter": 3, "params": [0]}
    optimizer = AccumAdam([p])
    optimizer.load_state_dict({"state": {0: {"step": 2, **moments}}, "param_groups": [group]})
    state = optimizer.state[p]
    assert {key: (state[key].dtype, state[key][0].item()) for key in moments} == {
        "exp_avg": (torch.float32, 0.5),
        "exp_avg_sq": (torch.float32, 0.25),
        "accum_grad": (torch.float32, 0.125),
    }
    p.grad = torch.full_like(p, 3.0)
    optimizer.step()  # the third of its window
    assert state["step"].item() == 3
    torch.testing.assert_close(state["exp_avg"], torch.full((3,), 0.9 * (0.5 + 0.1 * 1.125)))
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((3,), 0.99 * (0.25 + 0.01 * 1.125**2)))


def test_hooks_around_loading_are_kept() -> None:
    """A user's pre-hook may exchange the dict, and their post-hook decides."""
    params = parameters(0, torch.bfloat16, [(3,)])
    optimizer = AccumAdam(params)
    feed(optimizer, gradients(1, 0, [(3,)]))
    other = copy.deepcopy(optimizer.state_dict())
    other["state"][0]["exp_avg"].fill_(1.001)

    def last_word(opt: torch.optim.Optimizer) -> None:
        opt.state[params[0]]["exp_avg_sq"].fill_(7.003)

    optimizer.register_load_state_dict_pre_hook(lambda _, given: other)
    optimizer.register_load_state_dict_post_hook(last_word)
    for _ in range(2):
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(optimizer.state[params[0]]["exp_avg"], torch.full((3,), 1.001))
        assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], torch.full((3,), 7.003))
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_foreign_state_dicts_are_refused() -> None:
    theirs = torch.optim.AdamW(parameters())
    feed(theirs, gradients(1))
    ours = AccumAdamW(parameters())
    feed(ours, gradients(1))
    with pytest.raises(ValueError, match="param group 0 has no accum_iter"):
        ours.load_state_dict(theirs.state_dict())
    half = ours.state_dict()
    half["state"] = {0: {k: v for k, v in half["state"][0].items() if k != "accum_grad"}}
    with pytest.raises(ValueError, match="state 0 has no accum_grad"):
        ours.load_state_dict(half)
    wide = AccumAdamW([nn.Parameter(torch.ones(9)) for _ in SHAPES])
    with pytest.raises(ValueError, match=r"exp_avg of its state 0 has shape \(3, 4\), but the parameter has \(9,\)"):
        wide.load_state_dict(ours.state_dict())


# ---------------------------------------------------------------------------------------------------------- factories


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subnet = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.bias_net = nn.Linear(2, 2, bias=False)
        self.table = nn.ParameterDict({"bias": nn.Parameter(torch.ones(2, 2))})
        self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("factory", "cls", "decay"),
    [
        (optim_fn_adam, torch.optim.Adam, 1 / 32768),
        (optim_fn_adamw, torch.optim.AdamW, 0.1),
        (optim_fn_accum_adam, AccumAdam, 1 / 32768),
        (optim_fn_accum_adamw, AccumAdamW, 0.1),
    ],
)
def test_factories_put_decay_on_weights(factory: Any, cls: type, decay: float) -> None:
    model = Model()
    names = dict(model.named_parameters())
    optimizer = factory(list(names.items()))
    assert type(optimizer) is cls
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (decay, 0)
    assert set(decayed["param_names"]) == {"subnet.weight", "conv.weight", "bias_net.weight"}
    assert set(plain["param_names"]) == set(names) - set(decayed["param_names"])
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.9, 0.999), 1e-8)
        assert group.get("accum_iter", 4) == 4
        assert all(names[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))

    sum(p.sum() * 0 for p in model.parameters()).backward()  # with zero gradients only decay moves anything
    before = {name: p.detach().clone() for name, p in names.items()}
    optimizer.step()
    assert {name for name, p in names.items() if not torch.equal(p, before[name])} == set(decayed["param_names"])

    only_bias = factory([("a.bias", names["subnet.bias"])], lr=0.5)
    assert [(g["weight_decay"], g["lr"]) for g in only_bias.param_groups] == [(0, 0.5)]
    assert [g["weight_decay"] for g in factory([("w", names["subnet.weight"])]).param_groups] == [decay]
    assert len(factory([]).param_groups) == 1
    with pytest.raises(TypeError, match=r"\(name, parameter\) pairs"):
        factory(list(model.parameters()))


# ----------------------------------------------------------------------------------------------------------- schedules


def rate(t: int, lr: float, t_max: int, t_warmup: int, eta: float = 1e-6, decay: float = 0.01) -> float:
    if t < t_warmup:
        return lr * decay + lr * (1 - decay) * t / t_warmup
    if t >= t_warmup + t_max:
        return eta
    return eta + 0.5 * (lr - eta) * (1 + math.cos(math.pi * (t - t_warmup) / t_max))


def two_groups(lrs: tuple[Any, Any] = (0.1, 0.003)) -> torch.optim.Optimizer:
    a, b = parameters(0, shapes=[(2,), (2,)])
    return torch.optim.SGD([{"params": [a], "lr": lrs[0]}, {"params": [b], "lr": lrs[1]}], lr=1.0)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    """The rates of the next steps, one list per step."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        assert scheduler.get_last_lr() == seen[-1]
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("t_max", "t_warmup"), [(20, 5), (7, 1), (1, 3), (10, 0)])
def test_schedule_follows_the_formula(t_max: int, t_warmup: int) -> None:
    optimizer = two_groups()
    seen = rates(optimizer, lr_scheduler_fn_cosine_with_warmup(optimizer, t_max, t_warmup), t_max + t_warmup + 9)
    for t, pair in enumerate(seen):
        assert pair == pytest.approx([rate(t, lr, t_max, t_warmup) for lr in (0.1, 0.003)], rel=1e-12)
    assert seen[t_warmup] == [0.1, 0.003]
    assert all(pair == [1e-6, 1e-6] for pair in seen[t_warmup + t_max :])


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_schedule_is_saved_and_loaded(optimizer_first: bool) -> None:
    optimizer = two_groups()
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, 12, 4)
    rates(optimizer, scheduler, 6)
    saved = pickle.loads(pickle.dumps((optimizer.state_dict(), scheduler.state_dict())))
    again = two_groups()
    if optimizer_first:
        again.load_state_dict(saved[0])
    resumed = lr_scheduler_fn_cosine_with_warmup(again, 99, 98)
    resumed.load_state_dict(saved[1])
    if not optimizer_first:
        again.load_state_dict(saved[0])
    assert rates(again, resumed, 15) == rates(optimizer, scheduler, 15)
    one = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(ValueError, match="2 param groups, but the optimizer has 1"):
        lr_scheduler_fn_cosine_with_warmup(one, 9, 1).load_state_dict(saved[1])


def test_schedule_with_tensor_rates_and_our_optimizer() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = AccumAdamW(parameters(), lr=lr)
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, 8, 2)
    for t in range(12):
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr.item() == pytest.approx(rate(t, 0.1, 8, 2))
        optimizer.step()
        scheduler.step()
    scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0, 5), "t_max must be > 0 and finite, but is 0"),
        ((10, -1), "t_warmup must be >= 0 and finite, but is -1"),
        ((10, 1, -1e-6), "cosine_eta_min must be >= 0 and finite, but is -1e-06"),
        ((10, 1, 0.0, 1.5), r"warmup_decay must be in \[0, 1\], but is 1\.5"),
    ],
)
def test_schedule_arguments_are_validated(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        lr_scheduler_fn_cosine_with_warmup(two_groups(), *arguments)
