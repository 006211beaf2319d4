"""One update of AccumAdam(W) on the CPU in one pass over memory, for many tensors in one call.

Values are read and written where they lie: the caller passes addresses of dense float32 values, and keeps the tensors alive.
Every operation rounds as in torch, for each element by itself, so that no result depends on where a tensor is cut.
"""

from __future__ import annotations

import math
from typing import Any

from numba import carray, njit

from decent_dp.kernels.numba_tools import compiled, floats_at  # digest b437af300d67

__all__ = ["update"]

# Elements whose moments are still in the first cache at the end of a window, when a second loop refreshes them. (One loop that
# writes four arrays would not be vectorized: the compiler must prove that they do not overlap.)
_CHUNK = 1024


# "numpy": a division by zero gives an infinity. Python's error would forbid vectors.
@njit(error_model="numpy")
def _move(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    accum_grad: Any,
    decay: Any,
    share: Any,
    w1: Any,
    w2: Any,
    eps: Any,
    rate: Any,
    decoupled: Any,
) -> None:
    """The readable form on some elements, but for the end of the window."""
    for i in range(len(param)):
        x, g = param[i], grad[i]
        if decoupled:
            x = x * decay
        else:
            g = g + decay * x
        accum_grad[i] = accum_grad[i] + share * g
        m = exp_avg[i] + w1 * g
        v = exp_avg_sq[i] + w2 * g * g
        param[i] = x - rate * m / (math.sqrt(v) + eps)


@njit
def _refresh(exp_avg: Any, exp_avg_sq: Any, accum_grad: Any, w1: Any, w2: Any, beta1: Any, beta2: Any) -> None:
    """The end of the window."""
    for i in range(len(accum_grad)):
        a = accum_grad[i]
        exp_avg[i] = (exp_avg[i] + w1 * a) * beta1
        exp_avg_sq[i] = (exp_avg_sq[i] + w2 * a * a) * beta2
        accum_grad[i] = 0


@compiled("void(int64[:, ::1], int64, int64, float32[::1], boolean, boolean)")
def update(rows: Any, first: int, last: int, values: Any, decoupled: bool, ends: bool) -> None:
    """One update of elements [first, last), counted over all parameters.

    Args:
        rows: for each parameter, the addresses of param, grad, exp_avg, exp_avg_sq and accum_grad, its number of elements, and
            that of the elements in the rows before it.
        first: of the first element.
        last: of the element after the last one.
        values: with c = sqrt(1-β2^k): 1-lr·wd (``decoupled``) or wd, 1/s, 1-β1, 1-β2, c·ε, lr·c/(1-β1^k), β1, β2.
        decoupled: the decay shrinks the parameter; otherwise it joins the gradient.
        ends: this update is the last one of a window.
    """
    decay, share, w1, w2, eps, rate, beta1, beta2 = values
    for r in range(len(rows)):
        numel, before = rows[r, 5], rows[r, 6]
        param = carray(floats_at(rows[r, 0]), numel)
        grad = carray(floats_at(rows[r, 1]), numel)
        exp_avg = carray(floats_at(rows[r, 2]), numel)
        exp_avg_sq = carray(floats_at(rows[r, 3]), numel)
        accum_grad = carray(floats_at(rows[r, 4]), numel)
        start, stop = max(first - before, 0), min(last - before, numel)
        while start < stop:
            at = slice(start, min(start + _CHUNK, stop) if ends else stop)
            _move(
                param[at], grad[at], exp_avg[at], exp_avg_sq[at], accum_grad[at],
                decay, share, w1, w2, eps, rate, decoupled,
            )  # fmt: skip
            if ends:
                _refresh(exp_avg[at], exp_avg_sq[at], accum_grad[at], w1, w2, beta1, beta2)
            start = at.stop
