"""The update of AccumAdam(W) as one pass over memory, made by torch.compile when asked for.

On the CPU this needs a C++ compiler, on CUDA Triton. Where there is none, a warning says so and `update` goes on eagerly.
The compiler runs once for each list of shapes, and again at the first end of a window; what it makes is kept in inductor's
cache on disk (TORCHINDUCTOR_CACHE_DIR), from which later processes take it.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .update import Hyper, Lists, cohorts, state_dtype, update_cohort

__all__ = ["compiled_accum_adam"]

_BACKEND = "inductor"


def compiled_accum_adam(lists: Lists, hyper: Hyper) -> None:
    """`multi_tensor_accum_adam`, compiled: for each device, dtype and step one kernel, or few for very many tensors."""
    for step, cohort in cohorts(lists):
        key = tuple((p.device, p.dtype, p.shape, p.stride()) for p in cohort.params)
        one_pass = _compiled(key)
        try:
            if one_pass is not None:
                one_pass(*cohort[:5], _numbers(cohort.params[0], step, hyper), hyper.decoupled, hyper.ends_window(step))
                continue
        except torch._dynamo.exc.TorchDynamoException as error:  # raised by the compiler, before anything has run
            _no_compiler(error)
            _GIVEN_UP.add(key)
        update_cohort(cohort, step, hyper)


def _numbers(param: Tensor, step: int, hyper: Hyper) -> Tensor:
    """What changes from update to update, as a tensor: as plain numbers they would be compiled in.

    In this order, with c = sqrt(1-β2^k): 1-lr·wd or wd, 1/s, 1-β1, 1-β2, c·ε, lr·c/(1-β1^k), β1, β2.
    """
    k, wd = hyper.window(step), hyper.weight_decay
    c = math.sqrt(1 - hyper.beta2**k)
    values = [
        1 - hyper.lr * wd if hyper.decoupled else wd,
        1 / hyper.accum_iter,
        1 - hyper.beta1,
        1 - hyper.beta2,
        c * hyper.eps,
        hyper.lr * c / (1 - hyper.beta1**k),
        hyper.beta1,
        hyper.beta2,
    ]
    on_cuda = param.device.type == "cuda"  # from pinned memory, so that the host does not wait for the device
    numbers = torch.tensor(values, dtype=state_dtype(param), device="cpu", pin_memory=on_cuda)
    return numbers.to(param.device, non_blocking=on_cuda)


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
    """What is compiled: the readable form, with the numbers of `_numbers`."""
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


_GIVEN_UP: set[Any] = set()


def _compiled(key: Any) -> Callable[..., None] | None:
    """`_one_pass`, compiled for lists of these shapes; None where that has failed before."""
    return None if key in _GIVEN_UP else _compile_for(key)


@functools.lru_cache(maxsize=256)
def _compile_for(_key: Any) -> Callable[..., None]:
    # torch counts recompilations by code object and gives up after a few: every list of shapes has its own.
    own = types.FunctionType(_one_pass.__code__.replace(), _one_pass.__globals__)
    compiled: Callable[..., None] = torch.compile(own, dynamic=False, backend=_BACKEND)
    return compiled


@functools.lru_cache(maxsize=1)
def _warn(reason: str) -> None:
    warnings.warn(f"compiled=True: the update could not be compiled and runs eagerly. {reason}", RuntimeWarning, stacklevel=3)


def _no_compiler(error: Exception) -> None:
    _warn(" ".join(str(error).split("\n", 2)[:2]))
