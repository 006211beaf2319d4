"""One update of AccumAdam(W) on lists of tensors. The formula is at the top of `accum`.

Three forms, equal up to rounding:

* `single_tensor_accum_adam`: one parameter at a time, as the formula is written. The readable twin of the others.
* `multi_tensor_accum_adam`: torch's foreach operations, on the CPU block by block, each small enough for the cache.
* `compiled_accum_adam`: one pass over memory by torch.compile, where the user asks for it.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .rows import Row, split_rows

__all__ = [
    "Hyperparameters",
    "TensorLists",
    "compiled_accum_adam",
    "multi_tensor_accum_adam",
    "single_tensor_accum_adam",
    "state_dtype",
]


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

    def window(self, step: int) -> int:
        """k, the number of the window (from 1) in which update number ``step`` (from 1) lies."""
        return -(-step // self.accum_iter)

    def ends_window(self, step: int) -> bool:
        return step % self.accum_iter == 0


class TensorLists(NamedTuple):
    """The tensors of one update, a column for each role; row i belongs to parameter i."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    accum_grads: list[Tensor]
    state_steps: list[Tensor]

    @classmethod
    def empty(cls) -> TensorLists:
        return cls([], [], [], [], [], [])

    def append(self, *row: Tensor) -> None:
        for column, tensor in zip(self, row, strict=True):
            column.append(tensor)


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's state and arithmetic: its own, but at least float32."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------------------------------------- the update


def single_tensor_accum_adam(lists: TensorLists, hyper: Hyperparameters) -> None:
    """The formula, one parameter at a time: the readable twin of `multi_tensor_accum_adam`."""
    beta1, beta2, lr, wd = hyper.beta1, hyper.beta2, hyper.lr, hyper.weight_decay
    for param, grad, exp_avg, exp_avg_sq, accum_grad, state_step in zip(*lists, strict=True):
        state_step += 1
        step = int(state_step.item())
        k = hyper.window(step)
        x, g = param.to(state_dtype(param)), grad.to(state_dtype(param))

        if hyper.decoupled:
            x = x * (1 - lr * wd)
        else:
            g = g + wd * x
        accum_grad += g / hyper.accum_iter

        m = exp_avg + (1 - beta1) * g
        v = exp_avg_sq + (1 - beta2) * g * g
        denom = v.sqrt() / math.sqrt(1 - beta2**k) + hyper.eps
        param.copy_(x - lr / (1 - beta1**k) * m / denom)  # rounds once where the parameter is narrower than float32

        if hyper.ends_window(step):
            exp_avg.add_((1 - beta1) * accum_grad).mul_(beta1)
            exp_avg_sq.add_((1 - beta2) * accum_grad * accum_grad).mul_(beta2)
            accum_grad.zero_()


def multi_tensor_accum_adam(lists: TensorLists, hyper: Hyperparameters) -> None:
    """The same for many tensors at a time. No element's result depends on which other tensors are in the lists."""
    for step, alike in _split_lists(lists):
        _update_alike(alike, step, hyper)


def _update_alike(lists: TensorLists, step: int, hyper: Hyperparameters) -> None:
    """Update number ``step`` of tensors that share device, dtype and step."""
    for rows in split_rows(list(zip(*lists[:5], strict=True))):
        _update_foreach(rows, step, hyper)


def _split_lists(lists: TensorLists) -> Iterator[tuple[int, TensorLists]]:
    """Counts the update and splits the lists by device, dtype and step; gives each part with its step."""
    if not lists.params:
        return
    # Of a plain number torch would make a tensor for each step, which takes longer than the addition.
    torch._foreach_add_(lists.state_steps, torch.ones((), dtype=torch.float32, device="cpu"), alpha=1)
    keys = [(row[0].device, row[0].dtype, int(row[-1].item())) for row in zip(lists.params, lists.state_steps, strict=True)]
    if keys.count(keys[0]) == len(keys):
        yield keys[0][-1], lists
        return
    alike: dict[tuple[torch.device, torch.dtype, int], TensorLists] = {}
    for key, row in zip(keys, zip(*lists, strict=True), strict=True):
        alike.setdefault(key, TensorLists.empty()).append(*row)
    for (_, _, step), found in alike.items():
        yield step, found


def _update_foreach(rows: Sequence[Row], step: int, hyper: Hyperparameters) -> None:
    params, grads, exp_avgs, exp_avg_sqs, accum_grads = (list(column) for column in zip(*rows, strict=True))
    beta1, beta2, lr, wd = hyper.beta1, hyper.beta2, hyper.lr, hyper.weight_decay
    k = hyper.window(step)
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

    if hyper.ends_window(step):
        torch._foreach_add_(exp_avgs, accum_grads, alpha=1 - beta1)
        torch._foreach_mul_(exp_avgs, beta1)
        torch._foreach_addcmul_(exp_avg_sqs, accum_grads, accum_grads, value=1 - beta2)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_zero_(accum_grads)


# ---------------------------------------------------------------------------------------------------- the compiled form

_BACKEND = "inductor"


def compiled_accum_adam(lists: TensorLists, hyper: Hyperparameters) -> None:
    """`multi_tensor_accum_adam` in one pass over memory: a kernel per device, dtype and step, or a few for very many tensors.

    torch compiles once per list of shapes, and again at the first end of a window; inductor's cache on disk
    (TORCHINDUCTOR_CACHE_DIR) keeps the result. Without a compiler it warns, and runs the other form.
    """
    for step, alike in _split_lists(lists):
        # Inductor takes a float64 tensor without dimensions on the CPU for a number, and does not write to it.
        alike = TensorLists(*([each.view(1) if each.ndim == 0 else each for each in column] for column in alike))
        k, beta1, beta2 = hyper.window(step), hyper.beta1, hyper.beta2
        c, decay = math.sqrt(1 - beta2**k), hyper.lr * hyper.weight_decay
        rate = hyper.lr * c / (1 - beta1**k)
        values = [1 - decay if hyper.decoupled else hyper.weight_decay, 1 / hyper.accum_iter, 1 - beta1, 1 - beta2]
        # A tensor: torch would compile plain numbers in, and compile again in each update.
        dtype, device = state_dtype(alike.params[0]), alike.params[0].device
        numbers = torch.tensor([*values, c * hyper.eps, rate, beta1, beta2], dtype=dtype, device=device)
        one_pass = _compiled_for(tuple((p.device, p.dtype, p.shape, p.stride()) for p in alike.params))
        if not one_pass(*alike[:5], numbers, hyper.decoupled, hyper.ends_window(step)):
            _update_alike(alike, step, hyper)


def _one_pass(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    accum_grads: list[Tensor],
    numbers: Tensor,
    decoupled: bool,
    ends: bool,
) -> None:
    """The function to compile: the readable form, with the divisors of the moments in ``numbers``."""
    decay, share, w1, w2, eps, rate, beta1, beta2 = numbers.unbind()
    for param, grad, exp_avg, exp_avg_sq, accum_grad in zip(params, grads, exp_avgs, exp_avg_sqs, accum_grads, strict=True):
        x, g = param.to(numbers.dtype), grad.to(numbers.dtype)
        if decoupled:
            x = x * decay
        else:
            g = g + decay * x
        a = accum_grad + share * g
        m = exp_avg + w1 * g
        v = exp_avg_sq + w2 * g * g
        param.copy_(x - rate * m / (v.sqrt() + eps))
        if ends:
            exp_avg.copy_((exp_avg + w1 * a) * beta1)
            exp_avg_sq.copy_((exp_avg_sq + w2 * a * a) * beta2)
            accum_grad.zero_()
        else:
            accum_grad.copy_(a)


@functools.lru_cache(maxsize=256)
def _compiled_for(_shapes: Any) -> Callable[..., bool]:
    """`_one_pass` for a list of shapes; the result says whether it could be compiled."""
    # torch counts recompilations per code object and gives up after a few, so each list of shapes has its own.
    own = types.FunctionType(_one_pass.__code__.replace(), _one_pass.__globals__)
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
