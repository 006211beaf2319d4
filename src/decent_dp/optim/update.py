"""One update of AccumAdam(W) on lists of tensors. The formula is at the top of `accum`.

Five forms (`compiled` has a sixth), equal up to rounding:

* `single_tensor_accum_adam`: one parameter at a time, as the formula is written. The readable twin of the others.
* a kernel in Triton, for dense parameters on CUDA: one pass over memory, one launch for many tensors.
* a kernel in Numba, where ``decent-dp[fast]`` is installed, for dense float32 parameters on the CPU: one pass, and one call for
  many tensors in each of as many threads as torch uses.
* blocked, for other dense parameters on the CPU: block by block, each small enough for the cache, with torch's fused kernel.
* foreach, for all others: one call for many tensors.

On the CPU the kernel in Numba takes 1.3 times as long as torch's fused AdamW, and the blocked form 2.8 times
(`make bench-optim`); foreach passes take 3.4 to 6.3 times (docs/lab/log.md, "AccumAdamW in one pass").
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from decent_dp.kernels import load_numba, tables

__all__ = [
    "Hyperparameters",
    "TensorLists",
    "blocks",
    "flat_row",
    "is_dense",
    "kernel_numbers",
    "multi_tensor_accum_adam",
    "single_tensor_accum_adam",
    "split_lists",
    "state_dtype",
    "update_alike",
]


_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may keep its values elsewhere
_Row: TypeAlias = "tuple[Tensor, ...]"  # param, grad, exp_avg, exp_avg_sq, accum_grad


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
    for step, alike in split_lists(lists):
        update_alike(alike, step, hyper)


def split_lists(lists: TensorLists) -> Iterator[tuple[int, TensorLists]]:
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


def update_alike(lists: TensorLists, step: int, hyper: Hyperparameters) -> None:
    """Update number ``step`` of tensors that share device, dtype and step."""
    device = lists.params[0].device
    if not torch.compiler.is_compiling():
        if tables.usable(device):
            lists = _update_by_triton(lists, step, hyper)
        elif device.type == "cpu":
            kernels = load_numba("accum_adam_cpu") if lists.params[0].dtype == torch.float32 else None
            if kernels is not None:
                lists = _update_by_numba(kernels, lists, step, hyper)
            if lists.params:
                lists = _update_blocked(lists, step, hyper)
    if lists.params:
        _update_foreach(lists, step, hyper)


def _update_foreach(lists: TensorLists, step: int, hyper: Hyperparameters) -> None:
    """Update number ``step`` of tensors that share device, dtype and step. Two temporaries of the parameters' size
    (three where decay joins the gradient, and copies in float32 of narrower parameters and gradients)."""
    params, grads, exp_avgs, exp_avg_sqs, accum_grads, _ = lists
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
        _refresh_moments(exp_avgs, exp_avg_sqs, accum_grads, hyper)


def _refresh_moments(
    exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], accum_grads: list[Tensor], hyper: Hyperparameters
) -> None:
    """The end of a window."""
    torch._foreach_add_(exp_avgs, accum_grads, alpha=1 - hyper.beta1)
    torch._foreach_mul_(exp_avgs, hyper.beta1)
    torch._foreach_addcmul_(exp_avg_sqs, accum_grads, accum_grads, value=1 - hyper.beta2)
    torch._foreach_mul_(exp_avg_sqs, hyper.beta2)
    torch._foreach_zero_(accum_grads)


# ------------------------------------------------------------------------------------------- the forms in Triton and Numba


def _update_by_triton(lists: TensorLists, step: int, hyper: Hyperparameters) -> TensorLists:
    """Update number ``step`` of those tensors that the kernel can take, in one pass; returns the others."""
    from decent_dp.kernels import accum_adam  # imports Triton

    rows, others = _rows_for_kernels(lists, tables.DTYPES)
    if rows:
        tables.refuse_capture("AccumAdam(W)")
        accum_adam.update(rows, kernel_numbers(step, hyper), decoupled=hyper.decoupled, ends=hyper.ends_window(step))
        torch.autograd.graph.increment_version([row[0] for row in rows])
    return others


# Elements of a thread, below which it takes longer to wake it.
_SHARE = 64 * 1024


def _update_by_numba(kernels: ModuleType, lists: TensorLists, step: int, hyper: Hyperparameters) -> TensorLists:
    """The same with the kernel for float32 on the CPU, by as many threads as torch uses."""
    rows, others = _rows_for_kernels(lists, (torch.float32,))
    if rows:
        entries = [
            (param.data_ptr(), grad.data_ptr(), first.data_ptr(), second.data_ptr(), third.data_ptr(), param.numel(), 0)
            for param, grad, first, second, third in rows
        ]
        table = np.fromiter(chain.from_iterable(entries), np.int64, 7 * len(rows)).reshape(-1, 7)
        ends = table[:, 5].cumsum()
        table[1:, 6] = ends[:-1]
        values = np.array(kernel_numbers(step, hyper), np.float32)
        numel = int(ends[-1])
        threads = max(1, min(torch.get_num_threads(), numel // _SHARE))
        cuts = [numel * i // threads for i in range(threads + 1)]

        def part(i: int) -> None:
            kernels.update(table, cuts[i], cuts[i + 1], values, hyper.decoupled, hyper.ends_window(step))

        started = [_start(part, i) for i in range(1, threads)]
        part(0)
        for each in started:
            each.result()
        torch.autograd.graph.increment_version([row[0] for row in rows])
    return others


def _start(part: Callable[[int], None], i: int) -> Future[None]:
    try:
        return _threads(os.getpid()).submit(part, i)
    except RuntimeError:  # the main thread has ended, or no more threads can be had: this one does it
        part(i)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@functools.cache
def _threads(_: int) -> ThreadPoolExecutor:
    """Those of a process, since a fork copies no threads. They start when they are needed."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="accum_adam")


def kernel_numbers(step: int, hyper: Hyperparameters) -> list[float]:
    """With c = sqrt(1-β2^k): 1-lr·wd or wd, 1/s, 1-β1, 1-β2, c·ε, lr·c/(1-β1^k), β1, β2."""
    k, lr, wd, beta1, beta2 = hyper.window(step), hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2
    c = math.sqrt(1 - beta2**k)
    decay = 1 - lr * wd if hyper.decoupled else wd
    return [decay, 1 / hyper.accum_iter, 1 - beta1, 1 - beta2, c * hyper.eps, lr * c / (1 - beta1**k), beta1, beta2]


def _rows_for_kernels(lists: TensorLists, dtypes: tuple[torch.dtype, ...]) -> tuple[list[_Row], TensorLists]:
    """The rows whose parameter and gradient have these dtypes, in one common order of memory on one device; and the others."""
    others, rows = TensorLists.empty(), []
    of_state = state_dtype(lists.params[0])
    for row in zip(*lists, strict=True):
        if is_dense(row[:5], dtypes, of_state):
            rows.append(row[:5])
        else:
            others.append(*row)
    return rows, others


def is_dense(row: _Row, dtypes: tuple[torch.dtype, ...], of_state: torch.dtype) -> bool:
    """Whether a kernel, which looks at memory rather than shapes and strides, can take the row. Called often: few reads."""
    param, grad, first, second, third = row
    if type(param) not in _PLAIN or type(grad) not in _PLAIN or param.dtype not in dtypes or grad.dtype not in dtypes:
        return False
    if not (first.dtype is second.dtype is third.dtype is of_state):
        return False
    device, shape = param.get_device(), param.shape  # the number of the device
    on_device = device == grad.get_device() == first.get_device() == second.get_device() == third.get_device()
    if not on_device or param.is_neg() or grad.is_neg():
        return False
    if (
        param.is_contiguous()
        and grad.is_contiguous()
        and first.is_contiguous()
        and second.is_contiguous()
        and third.is_contiguous()
        and shape == grad.shape == first.shape == second.shape == third.shape
    ):
        return True
    return flat_row(row) is not None


# ---------------------------------------------------------------------------------------------------- the blocked form

# Elements: two to four blocks of scratch and as many of operands stay in a cache of some MiB. Smaller blocks cost calls:
# 12.3 ms per update with 8 K elements, 7.0 with 32 K, 5.8 with 256 K (docs/lab/log.md, "AccumAdamW in one pass").
_BLOCK = 256 * 1024
_SCRATCH = threading.local()


def _kernel_arguments(hyper: Hyperparameters, step: int) -> dict[str, Any]:
    """The arguments that make torch's fused Adam kernel compute this update.

    From moments E, S the kernel makes B1·E + (1-B1)·g and B2·S + (1-B2)·g², divides them by 1 - B^step and then moves x.
    The update needs m = β1·M + (1-β1)·g, where E = β1·M is stored. With B1 = 1/(2-β1) the kernel's value is m/(2-β1), with
    step = 1 it is divided by 1 - B1 = (1-β1)/(2-β1), and m/(1-β1) results; likewise v/(1-β2). The rate and ε absorb the rest.
    """
    k = hyper.window(step)
    scale1 = (1 - hyper.beta1) / (1 - hyper.beta1**k)
    scale2 = math.sqrt((1 - hyper.beta2) / (1 - hyper.beta2**k))
    return {
        "beta1": 1 / (2 - hyper.beta1),
        "beta2": 1 / (2 - hyper.beta2),
        "lr": hyper.lr * scale1 / scale2,
        "eps": hyper.eps / scale2,
        # Of the decoupled kind, which the kernel multiplies by its own lr.
        "weight_decay": hyper.weight_decay * scale2 / scale1 if hyper.decoupled else 0.0,
    }


def _update_blocked(lists: TensorLists, step: int, hyper: Hyperparameters) -> TensorLists:
    """Update number ``step`` of those tensors that the fused kernel can take; returns the others.

    The tensors share dtype and step, and are on the CPU. The kernel would overwrite both moments, which must stay until the
    window ends: it gets copies of one block at a time, in scratch memory of four blocks per thread.
    """
    others, rows = TensorLists.empty(), []
    for row in zip(*lists, strict=True):
        flat = flat_row(row[:5])
        if flat is None:
            others.append(*row)
        else:
            rows.append(flat)
    if rows:
        arguments, scratch, one = (
            _kernel_arguments(hyper, step),
            _scratch(state_dtype(rows[0][0])),
            torch.ones((), dtype=torch.float32, device="cpu"),
        )
        for block in blocks(rows, _BLOCK):
            _update_block(block, scratch, one, arguments, hyper)
            if hyper.ends_window(step):
                _, _, exp_avgs, exp_avg_sqs, accum_grads = (list(column) for column in zip(*block, strict=True))
                _refresh_moments(exp_avgs, exp_avg_sqs, accum_grads, hyper)
        # The kernel does not do it on the CPU, and autograd would miss that a saved tensor has changed.
        torch.autograd.graph.increment_version([row[0] for row in rows])
    return others


def flat_row(row: _Row) -> _Row | None:
    """The row as 1-D views in one common order of memory; None if there is none, or the kernel cannot take the row.

    The kernel walks through memory and looks at neither shapes nor strides: all of them must agree.
    """
    param, grad = row[0], row[1]
    if type(param) not in _PLAIN or type(grad) not in _PLAIN or grad.layout != torch.strided or grad.device != param.device:
        return None
    if not grad.is_floating_point() or grad.is_neg() or param.is_neg() or any(tensor.shape != param.shape for tensor in row):
        return None
    strides = param.stride()
    order = sorted(range(param.ndim), key=lambda axis: -strides[axis])
    permuted = [tensor.permute(order) for tensor in row]
    if not all(tensor.is_contiguous() for tensor in permuted):
        return None
    return tuple(tensor.view(-1) for tensor in permuted)


def blocks(rows: Iterable[_Row], size: int) -> Iterator[list[_Row]]:
    """Groups of at most `size` elements. Where a row is cut depends on its own length alone: the kernel rounds its last,
    incomplete vector a little differently."""
    block: list[_Row] = []
    room = size
    for row in sorted(rows, key=lambda row: row[0].numel()):  # small rows share blocks
        for part in zip(*(torch.split(tensor, size) for tensor in row), strict=True) if row[0].numel() > size else (row,):
            if part[0].numel() > room:
                yield block
                block, room = [], size
            block.append(part)
            room -= part[0].numel()
    if block:
        yield block


def _scratch(dtype: torch.dtype) -> Tensor:
    """This thread's scratch memory of four blocks; pages that are never used take no memory."""
    scratch: Tensor | None = getattr(_SCRATCH, str(dtype), None)
    if scratch is None or scratch.numel() != 4 * _BLOCK:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
            scratch = torch.empty(4 * _BLOCK, dtype=dtype, device="cpu")
        setattr(_SCRATCH, str(dtype), scratch)
    return scratch


def _update_block(block: list[_Row], scratch: Tensor, one: Tensor, arguments: dict[str, Any], hyper: Hyperparameters) -> None:
    """One update without the end of the window."""
    params, grads, exp_avgs, exp_avg_sqs, accum_grads = (list(column) for column in zip(*block, strict=True))
    sizes = [param.numel() for param in params]
    n = sum(sizes)
    moments, xs, gs = scratch[: 2 * n], params, grads
    torch.cat(exp_avgs + exp_avg_sqs, out=moments)
    copies = torch.split(moments, sizes + sizes)

    narrow = params[0].dtype != scratch.dtype
    decay = hyper.weight_decay != 0 and not hyper.decoupled
    if narrow:
        xs = list(torch.split(scratch[2 * n : 3 * n], sizes))
        torch._foreach_copy_(xs, params)
    if decay or any(grad.dtype != scratch.dtype for grad in grads):
        gs = list(torch.split(scratch[3 * n : 4 * n], sizes))
        torch._foreach_copy_(gs, grads)
    if decay:
        torch._foreach_add_(gs, xs, alpha=hyper.weight_decay)

    ms, vs = copies[: len(sizes)], copies[len(sizes) :]
    torch._fused_adamw_(xs, gs, ms, vs, [], [one] * len(sizes), amsgrad=False, maximize=False, **arguments)
    torch._foreach_add_(accum_grads, gs, alpha=1 / hyper.accum_iter)
    if narrow:
        torch._foreach_copy_(params, xs)
