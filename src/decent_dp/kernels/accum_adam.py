"""One update of AccumAdam(W) on CUDA in one pass over memory, for many tensors in one launch. In Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launching import launch
from .pieces import pointer_at, quotient, root

__all__ = ["update"]

# Of six that were tried on an H200 none is better by more than the noise.
_BLOCK, _WARPS = 2048, 4


@triton.jit
def _tile(
    param, grad, exp_avg, exp_avg_sq, accum_grad, offsets, mask,
    decay, share, w1, w2, eps, rate, beta1, beta2, DECOUPLED: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """The readable form on some elements; ``mask`` is None where all of them exist."""
    state = accum_grad.dtype.element_ty
    stored = tl.load(param + offsets, mask=mask)
    x = stored.to(state)
    g = tl.load(grad + offsets, mask=mask).to(state)
    first = tl.load(exp_avg + offsets, mask=mask)
    second = tl.load(exp_avg_sq + offsets, mask=mask)
    a = tl.load(accum_grad + offsets, mask=mask)
    if DECOUPLED:
        x = x * decay
    else:
        g = g + decay * x
    a = a + share * g
    m = first + w1 * g
    v = second + w2 * g * g
    x = x - quotient(rate * m, root(v) + eps)
    tl.store(param + offsets, x.to(stored.dtype), mask=mask)
    if ENDS:
        tl.store(exp_avg + offsets, (first + w1 * a) * beta1, mask=mask)
        tl.store(exp_avg_sq + offsets, (second + w2 * a * a) * beta2, mask=mask)
        a = tl.zeros_like(a)
    tl.store(accum_grad + offsets, a, mask=mask)


@triton.jit
def _update(
    rows, of_tiles, wide, decay, share, w1, w2, eps, rate, beta1, beta2,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, ALIGNED: tl.constexpr,
    DECOUPLED: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each tile of ``BLOCK`` elements. ``wide`` has the eight numbers for float64 state."""
    place = of_tiles + 2 * tl.program_id(0)
    row = rows + 6 * tl.load(place)
    first = tl.load(place + 1) * BLOCK
    param = pointer_at(row, PARAM, ALIGNED) + first
    grad = pointer_at(row + 1, GRAD, ALIGNED) + first
    exp_avg = pointer_at(row + 2, STATE, ALIGNED) + first
    exp_avg_sq = pointer_at(row + 3, STATE, ALIGNED) + first
    accum_grad = pointer_at(row + 4, STATE, ALIGNED) + first
    left = tl.load(row + 5) - first
    if tl.float64 == STATE:
        decay, share, w1, w2 = tl.load(wide), tl.load(wide + 1), tl.load(wide + 2), tl.load(wide + 3)
        eps, rate, beta1, beta2 = tl.load(wide + 4), tl.load(wide + 5), tl.load(wide + 6), tl.load(wide + 7)
    offsets = tl.arange(0, BLOCK)
    # Without a mask, which would forbid vectors, wherever that can be.
    if left >= BLOCK:
        _tile(
            param, grad, exp_avg, exp_avg_sq, accum_grad, offsets, None,
            decay, share, w1, w2, eps, rate, beta1, beta2, DECOUPLED, ENDS,
        )  # fmt: skip
    else:
        _tile(
            param, grad, exp_avg, exp_avg_sq, accum_grad, offsets, offsets < left,
            decay, share, w1, w2, eps, rate, beta1, beta2, DECOUPLED, ENDS,
        )  # fmt: skip


def update(
    rows: Sequence[tuple[Tensor, ...]], values: Sequence[float], *, decoupled: bool, ends: bool, block: int = 0, warps: int = 0
) -> None:
    """One update of parameters that share a device and a step.

    Args:
        rows: (param, grad, exp_avg, exp_avg_sq, accum_grad) of each parameter: dense, of one shape and order of memory, and of
            the dtypes in ``tables.DTYPES``; the last three float64 where the parameter is, else float32.
        values: with c = sqrt(1-β2^k): 1-lr·wd (``decoupled``) or wd, 1/s, 1-β1, 1-β2, c·ε, lr·c/(1-β1^k), β1, β2.
        decoupled: the decay shrinks the parameter; otherwise it joins the gradient.
        ends: this update is the last one of a window.
    """
    launch(_update, rows, values, decoupled, ends, block=block or _BLOCK, warps=warps or _WARPS)
