"""The update of AccumAdam(W) as one pass over memory, by torch.compile, on request.

It needs a C++ compiler. Without one it warns and runs the forms of `update`. On CUDA the kernel in Triton, which `update` has,
needs no such request, and runs instead. On the CPU it is for installations without Numba, whose kernel in `update` takes no
longer. torch compiles once per list of shapes, and again at the first end of a window; inductor's cache on disk
(TORCHINDUCTOR_CACHE_DIR) keeps the result.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from decent_dp.kernels import tables

from .update import Hyperparameters, TensorLists, kernel_numbers, split_lists, state_dtype, update_alike

__all__ = ["compiled_accum_adam"]

_BACKEND = "inductor"
_FAILED: set[Any] = set()  # the lists of shapes that the compiler refused


def compiled_accum_adam(lists: TensorLists, hyper: Hyperparameters) -> None:
    """`multi_tensor_accum_adam`, compiled: one kernel per device, dtype and step, or a few for very many tensors."""
    for step, alike in split_lists(lists):
        key = tuple((p.device, p.dtype, p.shape, p.stride()) for p in alike.params)
        if key not in _FAILED and not tables.usable(alike.params[0].device):
            try:
                numbers = _on_device(alike.params[0], kernel_numbers(step, hyper))
                _compile_for(key)(*alike[:5], numbers, hyper.decoupled, hyper.ends_window(step))
                continue
            except torch._dynamo.exc.TorchDynamoException as error:  # the compiler raises it before any tensor changes
                _FAILED.add(key)
                _warn(" ".join(str(error).split("\n", 2)[:2]))
        update_alike(alike, step, hyper)


def _on_device(param: Tensor, values: list[float]) -> Tensor:
    """The numbers that change between updates, as a tensor: torch would compile plain numbers in, and compile again."""
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
    """The function to compile: the readable form, with the numbers of `kernel_numbers`."""
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
def _compile_for(_key: Any) -> Callable[..., None]:
    # torch counts recompilations per code object and gives up after a few, so each list of shapes has its own.
    own = types.FunctionType(_one_pass.__code__.replace(), _one_pass.__globals__)
    compiled: Callable[..., None] = torch.compile(own, dynamic=False, backend=_BACKEND)
    return compiled


@functools.lru_cache(maxsize=1)
def _warn(reason: str) -> None:
    warnings.warn(f"compiled=True: the update could not be compiled and runs eagerly. {reason}", RuntimeWarning, stacklevel=3)
