"""One step of GossipAdamW on CUDA in one pass over memory, for many tensors in one launch. In Triton.

A launch finds its tensors through a table of addresses, and its part of a tensor through a table of tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from decent_dp._triton import on_device

__all__ = ["attempt", "is_dense", "update"]

# Of six pairs that were tried on an H200 none is better by more than the noise.
_BLOCK, _WARPS = 2048, 4

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may keep its values elsewhere


@triton.jit
def _pointer_at(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer whose address stands in a table; ``ALIGNED``: it is a multiple of 16."""
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # Of the pointer, because a hint on the integer is lost, and without one the compiler reads no vectors.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _root(x):
    """Rounded as IEEE 754 asks: ``tl.sqrt`` of float32 is an approximation."""
    if x.dtype == tl.float64:  # noqa: SIM108
        found = tl.sqrt(x)
    else:  # not after a return: it would be compiled for float64, too
        found = tl.sqrt_rn(x)
    return found


@triton.jit
def _quotient(x, y):
    """Likewise."""
    if x.dtype == tl.float64:  # noqa: SIM108
        found = x / y
    else:
        found = tl.div_rn(x, y)
    return found


@triton.jit
def _tile(
    param, grad, exp_avg, exp_avg_sq, own, offsets, mask,
    keep, w1, beta2, of_momentum, of_gradient, eps, rate,
    WIDE: tl.constexpr, TRACKING: tl.constexpr, MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """The readable form on some elements; ``mask`` is None where all of them exist."""
    state = tl.float64 if WIDE else tl.float32
    stored = tl.load(param + offsets, mask=mask)
    g = tl.load(grad + offsets, mask=mask).to(state)
    y = tl.load(exp_avg + offsets, mask=mask).to(state)
    v = tl.load(exp_avg_sq + offsets, mask=mask).to(state)
    if MAXIMIZE:
        g = -g
    if TRACKING:
        correction = y - tl.load(own + offsets, mask=mask).to(state)
        g = g + correction
    y = y + w1 * (g - y)
    if TRACKING:
        tl.store(own + offsets, (y - correction).to(stored.dtype), mask=mask)
    v = beta2 * v + of_momentum * (y * y) + of_gradient * (g * g)
    x = keep * stored.to(state) - _quotient(rate * y, _root(v) + eps)
    tl.store(param + offsets, x.to(stored.dtype), mask=mask)
    tl.store(exp_avg + offsets, y.to(stored.dtype), mask=mask)
    tl.store(exp_avg_sq + offsets, v.to(stored.dtype), mask=mask)


@triton.jit
def _update(
    rows, of_tiles, wide, keep, w1, beta2, of_momentum, of_gradient, eps, rate,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr,
    TRACKING: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each tile of ``BLOCK`` elements. ``wide`` has the seven numbers for float64 parameters."""
    place = of_tiles + 2 * tl.program_id(0)
    row = rows + 6 * tl.load(place)
    first = tl.load(place + 1) * BLOCK
    param = _pointer_at(row, PARAM, ALIGNED) + first
    grad = _pointer_at(row + 1, GRAD, ALIGNED) + first
    exp_avg = _pointer_at(row + 2, STATE, ALIGNED) + first
    exp_avg_sq = _pointer_at(row + 3, STATE, ALIGNED) + first
    own = _pointer_at(row + 4, STATE, ALIGNED) + first
    left = tl.load(row + 5) - first
    WIDE: tl.constexpr = tl.float64 == PARAM
    if WIDE:
        keep, w1, beta2, of_momentum = tl.load(wide), tl.load(wide + 1), tl.load(wide + 2), tl.load(wide + 3)
        of_gradient, eps, rate = tl.load(wide + 4), tl.load(wide + 5), tl.load(wide + 6)
    offsets = tl.arange(0, BLOCK)
    # Without a mask, which would forbid vectors, wherever that can be.
    if left >= BLOCK:
        _tile(
            param, grad, exp_avg, exp_avg_sq, own, offsets, None,
            keep, w1, beta2, of_momentum, of_gradient, eps, rate, WIDE, TRACKING, MAXIMIZE,
        )  # fmt: skip
    else:
        _tile(
            param, grad, exp_avg, exp_avg_sq, own, offsets, offsets < left,
            keep, w1, beta2, of_momentum, of_gradient, eps, rate, WIDE, TRACKING, MAXIMIZE,
        )  # fmt: skip


def update(rows: Sequence[tuple[Tensor, ...]], values: Sequence[float], *, tracking: bool, maximize: bool) -> None:
    """One step of parameters that share a device and a step.

    Args:
        rows: (param, grad, exp_avg, exp_avg_sq, own momentum) of each parameter, which ``is_dense``.
        values: with known_i = 1-β_i^t: 1-lr·wd, 1-β1, β2, the weights of the squared momentum and of the squared gradient in v,
            √known2·ε, lr·√known2/known1.
        tracking: without it the last tensor of a row is not used.
    """
    alike: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = {}
    for param, grad, first, second, third in rows:
        a, b, c, d, e = param.data_ptr(), grad.data_ptr(), first.data_ptr(), second.data_ptr(), third.data_ptr()
        key = param.dtype, grad.dtype, (a | b | c | d | e) % 16 == 0  # all aligned
        alike.setdefault(key, []).append((a, b, c, d, e, param.numel()))
    device = rows[0][0].device
    with on_device(device):
        for (of_param, of_grad, aligned), entries in alike.items():
            counts = tuple([-(-entry[-1] // _BLOCK) for entry in entries])
            if not sum(counts):
                continue
            table = _table(device, _stream(device), tuple(chain.from_iterable(entries)))
            _update[(sum(counts),)](
                table,
                _tiles(device, _stream(device), counts),
                # Triton passes arguments as float32.
                _moved(torch.tensor(values, dtype=torch.float64, device="cpu"), device) if of_param == torch.float64 else table,
                *map(float, values),  # for whole numbers Triton would compile anew
                *(_TYPES[of_param], _TYPES[of_grad], _TYPES[of_param]),
                *(aligned, tracking, maximize, _BLOCK),
                num_warps=_WARPS,
            )


def attempt(device: torch.device, dtype: torch.dtype) -> None:
    """Runs the kernel."""
    row = [torch.ones(8, dtype=dtype, device=device) for _ in range(5)]
    update([tuple(row)], [0.5, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0], tracking=False, maximize=False)
    if row[0].tolist() != [0.5] * 8:
        raise RuntimeError(f"half of 1 is {row[0].tolist()}")


def is_dense(row: tuple[Tensor, ...]) -> bool:
    """Whether the kernel, which looks at memory rather than shapes and strides, can take the row. Called often: few reads."""
    param, grad, first, second, third = row
    if type(param) not in _PLAIN or type(grad) not in _PLAIN or param.dtype not in _TYPES or grad.dtype not in _TYPES:
        return False
    if not (first.dtype is second.dtype is third.dtype is param.dtype):
        return False
    device, shape, strides = param.get_device(), param.shape, param.stride()  # the number of the device
    for other in (grad, first, second, third):
        if other.get_device() != device or other.shape != shape or other.is_neg():
            return False
    if all(tensor.is_contiguous() for tensor in row):
        return True
    # Without gaps, in one common order of memory.
    order = sorted(range(param.ndim), key=lambda axis: -strides[axis])
    return all(tensor.permute(order).is_contiguous() for tensor in row)


# Optimizers ask in every step for the same tables, so that a copy is rarely made; wrappers with an optimizer for each of many
# buckets ask for as many. What a table says about memory depends on its key alone. Only kernels that follow the copy on its
# stream may read it.


@functools.lru_cache(maxsize=256)
def _table(device: torch.device, _: int, values: tuple[int, ...]) -> Tensor:
    return _moved(torch.tensor(values, dtype=torch.int64, device="cpu"), device)


@functools.lru_cache(maxsize=256)
def _tiles(device: torch.device, _: int, counts: tuple[int, ...]) -> Tensor:
    """(row, number of the tile in the row) of each tile, where row i has ``counts[i]`` tiles: int64, of shape (tiles, 2)."""
    numbers = torch.tensor(counts, dtype=torch.int64, device="cpu")
    rows = torch.repeat_interleave(numbers)
    firsts = numbers.cumsum(0) - numbers
    return _moved(torch.stack([rows, torch.arange(len(rows), dtype=torch.int64, device="cpu") - firsts[rows]], dim=1), device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _moved(values: Tensor, device: torch.device) -> Tensor:
    # From pinned memory, so that the host does not wait.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
