"""Losses and gradients of all replicas: in one pass (``torch.func.vmap``), or one replica after another.

The loop is the readable twin of the other, and takes over for a model that ``vmap`` refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from decent_dp.sim.stack import Stack

__all__ = ["LOSS_FN_TYPE", "Found", "Gradients"]

LOSS_FN_TYPE = Callable[..., Tensor]
# The loss of replica i, scaled for the backward.
Scale = Callable[[int, Tensor], Tensor]

_log = logging.getLogger(__name__)
_PREFIX = "model."


@dataclass
class Found:
    """What a step's forward and backward gave.

    Attributes:
        losses: (n,), detached and unscaled.
        stacked: one gradient a trainable parameter, (n, *shape), None where it has none; None if there are only ``rows``.
        rows: for each replica one gradient a trainable parameter, None where it has none. Views of ``stacked`` if there is one.
    """

    losses: Tensor
    stacked: list[Tensor | None] | None
    rows: Sequence[list[Tensor | None]]


class _Rows(Sequence[list["Tensor | None"]]):
    """The rows of stacked gradients, as they are asked for."""

    def __init__(self, stacked: list[Tensor | None], n: int) -> None:
        self._stacked, self._n = stacked, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        return [None if gradient is None else gradient[i] for gradient in self._stacked]


class _Loss(nn.Module):
    """The loss function as a module, so that it may do with the model whatever it likes."""

    def __init__(self, model: nn.Module, loss_fn: LOSS_FN_TYPE) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Any = self._loss_fn(self.model, *batch)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return the loss as a tensor, got {loss!r}. Is a `return` missing in it?")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"loss_fn must return one number a replica, got a tensor of shape {tuple(loss.shape)}, {loss.dtype}: "
                "take its mean."
            )
        return loss.reshape(())


class Gradients:
    """Computes them.

    Args:
        stack: the replicas.
        loss_fn: called as ``loss_fn(model, *batch)``.
        vectorize: True: in one pass, or raise; False: the loop; None: in one pass if the first step shows that it goes.

    Attributes:
        vectorized: None as long as that is open.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE, vectorize: bool | None) -> None:
        self._stack = stack
        self._loss = _Loss(stack.template, loss_fn)
        self.vectorized = vectorize

    def __call__(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        if self.vectorized is None:
            return self._first(batch, scale)
        return self._in_one_pass(batch, scale) if self.vectorized else self._one_by_one(batch, scale)

    def _first(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        others = [*self._stack.frozen.values(), *self._stack.buffers.values()]
        kept = [tensor.clone() for tensor in others]
        try:
            found = self._in_one_pass(batch, scale)
        except Exception as error:
            refusal = error
        else:
            self.vectorized = True
            return found
        with torch.no_grad():  # what was half done must not be done twice
            for tensor, value in zip(others, kept, strict=True):
                tensor.detach_().copy_(value)
        found = self._one_by_one(batch, scale)  # an error of the user's own comes again here
        self.vectorized = False
        cause = str(refusal).strip().partition("\n")[0].partition(". ")[0]
        _log.warning(
            "this model cannot be computed for all replicas at once (%s: %s): it is computed replica by replica, which is "
            "slower. vectorize=False does so without trying.",
            type(refusal).__name__,
            cause,
        )
        return found

    def _in_one_pass(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        stack = self._stack

        def one(params: dict[str, Tensor], others: dict[str, Tensor], *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self._call(params, others, batch)

        params = list(stack.params.values())
        # Of the other backends of attention some have no rule for a batch of replicas.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            others = {**stack.frozen, **stack.buffers}
            losses, replaced = vmap(one, randomness="different")(dict(stack.params), others, *batch)
            scaled = losses if scale is None else torch.stack([scale(i, loss) for i, loss in enumerate(losses.unbind())])
            gradients: list[Tensor | None] = [None] * len(params)
            if scaled.requires_grad:
                gradients = list(torch.autograd.grad(scaled.sum(), params, allow_unused=True))
        with torch.no_grad():
            for name, value in replaced.items():
                others[name].copy_(value)
        stacked = _own(gradients, params)
        return Found(losses.detach(), stacked, _Rows(stacked, stack.n))

    def _one_by_one(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        stack, losses, rows = self._stack, [], []
        for i in range(stack.n):
            params = {name: param.detach()[i].requires_grad_() for name, param in stack.params.items()}
            others = {name: tensor[i] for name, tensor in (*stack.frozen.items(), *stack.buffers.items())}
            with torch.enable_grad():
                loss, replaced = self._call(params, others, [tensor[i] for tensor in batch])
                scaled = loss if scale is None else scale(i, loss)
                gradients: list[Tensor | None] = [None] * len(params)
                if scaled.requires_grad:
                    gradients = list(torch.autograd.grad(scaled, list(params.values()), allow_unused=True))
            with torch.no_grad():
                for name, value in replaced.items():
                    others[name].copy_(value)
            losses.append(loss.detach())
            rows.append(_own(gradients, list(params.values())))
        return Found(torch.stack(losses), None, rows)

    def _call(
        self, params: dict[str, Tensor], others: dict[str, Tensor], batch: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and what the forward has put in the place of a tensor instead of writing into it."""
        swapped = {_PREFIX + name: tensor for name, tensor in (*params.items(), *others.items())}
        loss = functional_call(self._loss, swapped, tuple(batch))
        replaced = {name: swapped[_PREFIX + name] for name, tensor in others.items() if swapped[_PREFIX + name] is not tensor}
        return loss, replaced


def _own(gradients: list[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients that may be written to: each has memory of its own, in its parameter's strides.

    Autograd gives one tensor for two parameters that are added, and an expanded one for a sum.
    """
    seen: set[int] = set()
    owned: list[Tensor | None] = []
    for gradient, param in zip(gradients, params, strict=True):
        if gradient is None:
            owned.append(None)
            continue
        gradient = gradient.detach()
        if gradient.stride() != param.stride() or gradient.data_ptr() in seen:
            gradient = torch.empty_like(param, requires_grad=False).copy_(gradient)
        if gradient.numel():
            seen.add(gradient.data_ptr())
        owned.append(gradient)
    return owned
