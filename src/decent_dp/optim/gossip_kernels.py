"""The step of GossipAdamW by the kernels for CUDA: which parameters they take, and the numbers of each launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from decent_dp.kernels import gossip_adamw_cuda as kernels
from decent_dp.kernels import tables
from decent_dp.optim.gossip_state import (
    BOUND,
    COUNT,
    FALL,
    GAINS,
    LARGE,
    LR,
    MEANS,
    PLAIN,
    ROOTS,
    SHARED,
    SMALLEST,
    TINY,
    UpdateRow,
)

__all__ = ["KernelStep", "takes"]

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)  # a subclass may keep its values elsewhere
_KINDS = {GAINS: kernels.GAINS, ROOTS: kernels.ROOTS}


def takes(group: dict[str, Any], row: UpdateRow, drift: Tensor | None) -> bool:
    """Whether the kernels, which look at memory rather than shapes and strides, take this parameter."""
    (param, grad, first, second, _, _), lr = row, group["lr"]
    # For each parameter in each step: a read of a tensor takes about as long as ten of Python's own steps.
    if type(param) not in _PLAIN_TYPES or param.dtype not in tables.DTYPES or not tables.usable(param.device):
        return False
    if isinstance(lr, Tensor) and not lr.is_cpu:  # reading it would wait for the GPU
        return False
    if not first.dtype is second.dtype is param.dtype:
        return False
    if not (param.is_contiguous() and grad.is_contiguous() and first.is_contiguous() and second.is_contiguous()):
        return False
    if param.is_neg() or grad.is_neg() or first.is_neg() or second.is_neg():
        return False
    shape, number = param.shape, param.get_device()
    if not shape == grad.shape == first.shape == second.shape:
        return False
    if not number == grad.get_device() == first.get_device() == second.get_device():
        return False
    for tensor in (grad,) if drift is None else (grad, drift):
        if type(tensor) not in _PLAIN_TYPES or tensor.dtype not in tables.DTYPES:
            return False
    return drift is None or (drift.is_contiguous() and drift.shape == shape and drift.get_device() == number)


class KernelStep:
    """One step of the parameters of a group: gathers what can share a launch, then runs it.

    Args:
        group: of the optimizer.
        n: the number of replicas.
        batches: the global batch, in batches of this replica; n if all have equal ones.
        every: the number of steps from one renewal of the statistics to the next.
        drift_scale: the factor that drifts are given with.
    """

    def __init__(self, group: dict[str, Any], n: int, batches: float, every: int, drift_scale: float) -> None:
        self._group, self._n, self._batches, self._every, self._drift_scale = group, n, batches, every, drift_scale
        self._lr, (self._beta1, self._beta2) = float(group["lr"]), group["betas"]
        self._sign = -1 if group["maximize"] else 1
        # By the device, the factors, the count before the step, and the number of products and the ratio of `kernels.Renewal`.
        self._renewals: dict[tuple[torch.device, str, int, int, bool], list[kernels.Matrix]] = {}
        # By the device, the count before the step, and the factors.
        self._updates: dict[tuple[torch.device, int, str], list[kernels.Matrix]] = {}
        self._counts: list[Tensor] = []
        self._steps: list[Tensor] = []

    def add_vector(self, row: UpdateRow) -> None:
        """A parameter with AdamW's own update, whose count is on the CPU."""
        matrix = kernels.Matrix(row.param, row.grad, row.exp_avg, row.exp_avg_sq, 1, row.param.numel())
        self._updates.setdefault((row.param.device, int(row.step), GAINS), []).append(matrix)
        self._steps.append(row.step)

    def add_matrix(self, row: UpdateRow, state: dict[str, Any], drift: Tensor | None) -> None:
        """A parameter with statistics, and its drift if its second moment is to be the same for all replicas."""
        count = state[COUNT]
        t, (factors, other) = int(count), (GAINS, ROOTS) if drift is None else (ROOTS, GAINS)
        had = factors in state
        state.pop(other, None)
        if not had:
            state[factors] = torch.empty_like(state[MEANS])
        param, grad, first, second, _, step = row
        rows = len(param)
        size = rows, param.numel() // rows
        matrix = kernels.Matrix(param, grad, first, second, *size, state[factors], state[MEANS], state[SHARED], drift)
        if t % self._every == 0:
            self._renewals.setdefault((param.device, factors, t, *self._products(t, state, factors, had)), []).append(matrix)
        elif not had:  # they are those of an AdamW, or of a run with another rule
            self._renewals.setdefault((param.device, factors, t, 0, False), []).append(matrix)
        self._updates.setdefault((param.device, t, factors), []).append(matrix)
        self._counts.append(count)
        self._steps.append(step)

    def run(self) -> None:
        for (_, factors, t, products, ratio), matrices in self._renewals.items():
            kernels.renew(matrices, self._renewal(factors, t, products, ratio))
        for (_, t, factors), matrices in self._updates.items():
            values = self._values(t + 1, factors)
            kernels.update(matrices, _KINDS[factors], values, maximize=self._group["maximize"])
            # Autograd would miss that saved tensors have changed.
            torch.autograd.graph.increment_version([matrix.param for matrix in matrices])
        counts = self._counts + [step for step in self._steps if step.is_cpu]
        if counts:
            # Of a plain number torch would make a tensor for each count, which takes longer than the addition.
            torch._foreach_add_(counts, torch.ones((), dtype=torch.float32, device="cpu"), alpha=1)
        on_gpu = [step for step in self._steps if not step.is_cpu]
        if on_gpu:
            torch._foreach_add_(on_gpu, 1)

    def _values(self, t: int, factors: str) -> list[float]:
        beta1, beta2, lr = self._beta1, self._beta2, self._lr
        correction = 1 / math.sqrt(1 - beta2**t) if factors == GAINS else SMALLEST / (self._n * self._batches * (1 - beta2**t))
        keep, scale = 1 - lr * self._group["weight_decay"], -lr / (1 - beta1**t)
        return [keep, beta1, 1 - beta1, beta2, 1 - beta2, correction, self._group["eps"], scale]

    def _products(self, t: int, state: dict[str, Any], factors: str, had: bool) -> tuple[int, bool]:
        """The number of products and the ratio of the renewal that takes this step's gradient."""
        if t < PLAIN:
            return 1, False
        if factors == GAINS:
            return 2, False
        slowest = FALL * float(state[LR])
        state[LR].fill_(max(self._lr, slowest))
        return (2, True) if self._lr < slowest or self._lr == 0 or not had else (3, False)

    def _renewal(self, factors: str, t: int, products: int, ratio: bool) -> kernels.Renewal:
        """The renewal that takes this step's gradient, as `GossipAdamW._take_gradient` does; without products none."""
        given: dict[str, Any] = {"bound": BOUND, "smallest": SMALLEST, "tiny": TINY, "large": LARGE}
        if products:
            given.update(products=products, ratio=ratio, weight=1 - self._beta2 ** (self._every if t else 1))
        if products >= 2:
            # m is the average of -g if the loss is maximized.
            given.update(of_signal=self._sign / (1 - self._beta1**t))
        if products == 3:
            given.update(of_drift=self._sign / (self._lr * self._drift_scale))
        known = 1 - self._beta2 ** (t + 1 if products else t)
        given.update(eps=self._group["eps"], n=self._n, batches=self._batches, known=known)
        return kernels.Renewal(kind=_KINDS[factors], **given)
