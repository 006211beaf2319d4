"""One step of GossipAdamW on CUDA in one pass over memory, for many tensors in one launch. In Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launching import launch
from .pieces import pointer_at, quotient, root

__all__ = ["update"]

# Those of AccumAdam.
_BLOCK, _WARPS = 2048, 4


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
    x = keep * stored.to(state) - quotient(rate * y, root(v) + eps)
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
    param = pointer_at(row, PARAM, ALIGNED) + first
    grad = pointer_at(row + 1, GRAD, ALIGNED) + first
    exp_avg = pointer_at(row + 2, STATE, ALIGNED) + first
    exp_avg_sq = pointer_at(row + 3, STATE, ALIGNED) + first
    own = pointer_at(row + 4, STATE, ALIGNED) + first
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
        rows: (param, grad, exp_avg, exp_avg_sq, own momentum) of each parameter: dense, of one shape and order of memory, and
            of the dtypes in ``tables.DTYPES``; the last three have the parameter's.
        values: with known_i = 1-β_i^t: 1-lr·wd, 1-β1, β2, the weights of the squared momentum and of the squared gradient in v,
            √known2·ε, lr·√known2/known1.
        tracking: without it the last tensor of a row is not used.
    """
    launch(_update, rows, values, tracking, maximize, block=_BLOCK, warps=_WARPS)
