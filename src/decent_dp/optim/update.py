"""One update of AccumAdam(W) on rows of tensors. The formula is at the top of `accum`.

Two forms, equal up to rounding: the formula as it is written, one parameter at a time, which torch.compile makes one pass over
memory where the user asks for it; and torch's foreach operations, on the CPU block by block, each small enough for the cache.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .rows import Row, split_rows

__all__ = ["Hyperparameters", "accum_adam", "state_dtype"]


@dataclass(frozen=True)
class Hyperparameters:
    """The options of one parameter group, as plain numbers."""

    beta1: float
    beta2: float
    lr: float
    weight_decay: float
    eps: float
    accum_iter: int
    decoupled: bool  # True: AccumAdamW, the decay shrinks x; False: AccumAdam, the decay joins the gradient


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's state and arithmetic: its own, but at least float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def accum_adam(rows: Sequence[Row], hyper: Hyperparameters, *, foreach: bool = True, compiled: bool = False) -> None:
    """One update of parameters: each row is one, its gradient, exp_avg, exp_avg_sq, accum_grad and its step, which is counted.

    No element's result depends on which other rows there are.
    """
    if not rows:
        return
    # Of a plain number torch would make a tensor for each step, which takes longer than the addition.
    torch._foreach_add_([row[-1] for row in rows], torch.ones((), dtype=torch.float32, device="cpu"), alpha=1)
    alike: dict[tuple[torch.device, torch.dtype, int], list[Row]] = {}
    for *tensors, step in rows:
        alike.setdefault((tensors[0].device, tensors[0].dtype, int(step.item())), []).append(tuple(tensors))
    for (_, _, count), found in alike.items():
        if compiled and _update_compiled(found, count, hyper):
            continue
        if foreach:
            for part in split_rows(found):
                _update_foreach(part, count, hyper)
        else:
            _formula(found, _numbers(count, hyper), hyper.decoupled, count % hyper.accum_iter == 0)


def _numbers(step: int, hyper: Hyperparameters) -> list[float]:
    """What the formula needs in update number ``step``: the factor of the decay, s, 1-β1, 1-β2, sqrt(1-β2^k), ε, the rate."""
    k, beta1, beta2 = -(-step // hyper.accum_iter), hyper.beta1, hyper.beta2  # k: the number of the window, from 1
    decay = 1 - hyper.lr * hyper.weight_decay if hyper.decoupled else hyper.weight_decay
    rate = hyper.lr / (1 - beta1**k)
    return [decay, hyper.accum_iter, 1 - beta1, 1 - beta2, math.sqrt(1 - beta2**k), hyper.eps, rate, beta1, beta2]


def _formula(rows: Sequence[Row], numbers: Sequence[Any], decoupled: bool, ends: bool) -> None:
    """The readable form. ``decoupled``: AccumAdamW; ``ends``: this update is the last of its window."""
    decay, s, w1, w2, root, eps, rate, beta1, beta2 = numbers
    for param, grad, exp_avg, exp_avg_sq, accum_grad in rows:
        x, g = param.to(exp_avg.dtype), grad.to(exp_avg.dtype)
        if decoupled:
            x = x * decay
        else:
            g = g + decay * x
        a = accum_grad + g / s
        m = exp_avg + w1 * g
        v = exp_avg_sq + w2 * g * g
        param.copy_(x - rate * m / (v.sqrt() / root + eps))  # rounds once where the parameter is narrower than float32
        if ends:
            exp_avg.copy_((exp_avg + w1 * a) * beta1)
            exp_avg_sq.copy_((exp_avg_sq + w2 * a * a) * beta2)
            accum_grad.zero_()
        else:
            accum_grad.copy_(a)


def _update_foreach(rows: Sequence[Row], step: int, hyper: Hyperparameters) -> None:
    params, grads, exp_avgs, exp_avg_sqs, accum_grads = (list(column) for column in zip(*rows, strict=True))
    beta1, beta2, lr, wd = hyper.beta1, hyper.beta2, hyper.lr, hyper.weight_decay
    k = -(-step // hyper.accum_iter)
    dtype = state_dtype(params[0])
    narrow = params[0].dtype != dtype
    xs = [p.to(dtype) for p in params] if narrow else params
    gs = [g if g.dtype == dtype else g.to(dtype) for g in grads]

    if wd != 0 and hyper.decoupled:
        torch._foreach_mul_(xs, 1 - lr * wd)
    elif wd != 0:
        gs = list(torch._foreach_add(gs, xs, alpha=wd))  # a new list: the gradients are the user's
    torch._foreach_add_(accum_grads, gs, alpha=1 / hyper.accum_iter)

    # m / (sqrt(v)/c + ε) = c·m / (sqrt(v) + c·ε): the division by c goes into two scalars, not over memory.
    c = math.sqrt(1 - beta2**k)
    m = torch._foreach_add(exp_avgs, gs, alpha=1 - beta1)
    denom = torch._foreach_addcmul(exp_avg_sqs, gs, gs, value=1 - beta2)
    torch._foreach_sqrt_(denom)
    torch._foreach_add_(denom, c * hyper.eps)
    torch._foreach_addcdiv_(xs, m, denom, value=-lr * c / (1 - beta1**k))
    if narrow:
        torch._foreach_copy_(params, xs)

    if step % hyper.accum_iter == 0:
        torch._foreach_add_(exp_avgs, accum_grads, alpha=1 - beta1)
        torch._foreach_mul_(exp_avgs, beta1)
        torch._foreach_addcmul_(exp_avg_sqs, accum_grads, accum_grads, value=1 - beta2)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_zero_(accum_grads)


# ------------------------------------------------------------------------------------------------------- by torch.compile

_BACKEND = "inductor"


def _update_compiled(rows: Sequence[Row], step: int, hyper: Hyperparameters) -> bool:
    """The readable form as one pass over memory: a kernel, or a few for very many tensors. False if it cannot be compiled.

    torch compiles once per list of shapes, and again at the first end of a window; inductor's cache on disk
    (TORCHINDUCTOR_CACHE_DIR) keeps the result.
    """
    # Inductor takes a float64 tensor without dimensions on the CPU for a number, and does not write to it.
    rows = [tuple(each.view(1) if each.ndim == 0 else each for each in row) for row in rows]
    # A tensor: torch would compile plain numbers in, and compile again in each update.
    numbers = torch.tensor(_numbers(step, hyper), dtype=state_dtype(rows[0][0]), device=rows[0][0].device)
    one_pass = _compiled_for(tuple((p.device, p.dtype, p.shape, p.stride()) for p, *_ in rows))
    return one_pass(rows, numbers, hyper.decoupled, step % hyper.accum_iter == 0)


@functools.lru_cache(maxsize=256)
def _compiled_for(_shapes: Any) -> Callable[..., bool]:
    """`_formula` for a list of shapes; the result says whether it could be compiled."""
    # torch counts recompilations per code object and gives up after a few, so each list of shapes has its own.
    own = types.FunctionType(_formula.__code__.replace(), _formula.__globals__)
    compiled = torch.compile(own, dynamic=False, backend=_BACKEND)
    works = True

    def run(*arguments: Any) -> bool:
        nonlocal works
        if works:
            try:
                compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:  # the compiler raises it before any tensor changes
                works = False
                _warn(" ".join(str(error).split("\n", 2)[:2]))
        return works

    return run


@functools.lru_cache(maxsize=1)
def _warn(reason: str) -> None:
    warnings.warn(f"compiled=True: the update could not be compiled and runs eagerly. {reason}", RuntimeWarning, stacklevel=3)
