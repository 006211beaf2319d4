"""Preparation of one replica's gradients before its optimizers step: unscaling, clipping, skipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["GradientPolicy"]


class GradientPolicy:
    """Unscales and clips the gradients of a replica, and decides whether its optimizers step.

    Args:
        params: the trainable parameters of the replica.
        scaler: unscales the gradients and may skip the step; None without one.
        max_norm: the largest norm of all gradients together; 0 for no clipping.
    """

    def __init__(self, params: Sequence[Parameter], scaler: torch.amp.GradScaler | None, max_norm: float) -> None:
        self._params, self._max_norm = params, max_norm
        self.scaler = scaler
        self._proxy: Any = _OptimizerProxy(params)
        self.last_norm: Tensor | None = None

    @property
    def needs_all(self) -> bool:
        """Whether every gradient must be present before any bucket may step."""
        return self.scaler is not None or self._max_norm > 0

    def allows_step(self) -> bool:
        """Prepares the gradients in place; False when there are none, or when the scaler skips this step."""
        if not any(param.grad is not None for param in self._params):
            return False
        if self.scaler is not None:
            self.scaler.unscale_(self._proxy)
        if self._max_norm > 0:
            self.last_norm = torch.nn.utils.clip_grad_norm_(self._params, self._max_norm)
        if self.scaler is None:
            return True
        self._proxy.stepped = False
        self.scaler.step(self._proxy)
        self.scaler.update()
        return bool(self._proxy.stepped)


class _OptimizerProxy:
    """Represents all optimizers of a replica to a GradScaler, so that one infinity in any gradient skips them all.

    Its step only records that the scaler would have stepped. The buckets' optimizers step after their exchanges.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.param_groups = [{"params": list(params)}]
        self.stepped = False

    def step(self) -> None:
        self.stepped = True
