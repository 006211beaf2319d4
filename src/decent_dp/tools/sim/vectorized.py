"""Losses and gradients of all replicas in one pass of ``torch.func.vmap`` over the function of one replica.

The first pass is compared with a ``Reference``; a model that it changes is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from decent_dp.tools.sim.loop import LOSS_FN_TYPE, Reference, check_buffer, check_loss, new_buffer
from decent_dp.tools.sim.stack import Snapshot, Stack

__all__ = ["DiffersError", "VectorizedPass"]

_PREFIX = "model."

# Tolerances as a share of a gradient's largest element, by the narrowest dtype of the parameters. Other kernels round
# otherwise: under autocast to bfloat16 by 0.7 % after one step; a wrong gradient is wrong by far more (the log, "what the
# simulator does with models that are not plain").
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 0.25, torch.float16: 0.1}


class DiffersError(Exception):
    """The pass does not compute what a replica computes alone."""


class _Loss(nn.Module):
    """The loss function as a module, so that ``functional_call`` covers all that it does with the model."""

    def __init__(self, model: nn.Module, loss_fn: LOSS_FN_TYPE) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        return check_loss(self._loss_fn(self.model, *batch))


class VectorizedPass:
    """All replicas at once.

    Gradients are taken inside ``vmap``, so that tensors answer a model's questions (``requires_grad``) as in a training step,
    and hooks on the backward are called or refused, never skipped.

    Args:
        stack: the replicas' values.
        loss_fn: called as ``loss_fn(model, *batch)``.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE) -> None:
        self._stack = stack
        self._loss = _Loss(copy.deepcopy(stack.template), loss_fn)
        self._used: list[bool] = []

    def first(self, reference: Reference, batch: Sequence[Tensor], scales: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The first pass. Inside ``vmap`` unused parameters have gradients of zeros; the reference shows which they are.

        Raises:
            DiffersError: replica 0 is not what it is alone, or would not be later.
            Exception: as ``__call__``.
        """
        if reference.drew_in_python:
            raise DiffersError("it draws random numbers in Python, where all replicas would draw the same")
        if any(gradient is not None and gradient.layout != torch.strided for gradient in reference.gradients):
            raise DiffersError("it has sparse gradients")
        losses, gradients = self._compute(batch, scales)
        difference = _difference(reference, self._stack, losses[0], [gradient[0] for gradient in gradients])
        if difference:
            raise DiffersError(difference)
        self._used = [gradient is not None for gradient in reference.gradients]
        return losses, self._own(gradients)

    def __call__(self, batch: Sequence[Tensor], scales: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The losses (n,), detached and unscaled, and the gradients of the trainable parameters, (n, *shape), or None.

        Raises:
            Exception: any error of the model, the loss, or vmap. Buffers and Python attributes are as before then.
        """
        snapshot = Snapshot(self._stack.buffers.values(), [self._loss])
        try:
            losses, gradients = self._compute(batch, scales)
            for name, gradient, used in zip(self._stack.names, gradients, self._used, strict=True):
                if not used and bool(gradient.any()):
                    raise RuntimeError(f"parameter '{name}' had no gradient in the first step and has one now")
            return losses, self._own(gradients)
        except BaseException:
            snapshot.restore()
            raise

    def _compute(self, batch: Sequence[Tensor], scales: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        stack = self._stack
        params = {name: param.detach() for name, param in stack.params.items()}
        others = {**stack.frozen, **stack.buffers}
        in_dims = (0, 0, None if scales is None else 0, 0)
        computed = vmap(grad_and_value(self._of_one, has_aux=True), in_dims=in_dims, randomness="different")
        # Of the other backends of attention some have no rule for a batch of replicas.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            gradients, (_, (losses, replaced)) = computed(params, others, scales, tuple(batch))
        for name, _ in self._loss.model.named_buffers():
            if name not in stack.buffers:
                raise new_buffer(name)
        for name, value in replaced.items():
            check_buffer(name, value[0], others[name].shape[1:], others[name].dtype)
            others[name].copy_(value)
        return losses.detach(), [gradient.detach() for gradient in gradients.values()]

    def _of_one(
        self, params: dict[str, Tensor], others: dict[str, Tensor], scale: Tensor | None, batch: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        """The scaled loss, the loss, and the tensors that the forward has replaced instead of writing into them."""
        swapped = {_PREFIX + name: tensor for name, tensor in (*params.items(), *others.items())}
        loss = functional_call(self._loss, swapped, tuple(batch))
        replaced = {name: swapped[_PREFIX + name] for name, tensor in others.items() if swapped[_PREFIX + name] is not tensor}
        return loss if scale is None else loss * scale, (loss, replaced)

    def _own(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients that may be written to, each with memory of its own in its parameter's strides; None where unused.

        Autograd gives one tensor for two parameters that are added, and an expanded one for a sum.
        """
        seen: set[int] = set()
        owned: list[Tensor | None] = []
        for gradient, param, used in zip(gradients, self._stack.params.values(), self._used, strict=True):
            if not used:
                owned.append(None)
                continue
            if gradient.stride() != param.stride() or gradient.data_ptr() in seen:
                gradient = torch.empty_like(param, requires_grad=False).copy_(gradient)
            if gradient.numel():
                seen.add(gradient.data_ptr())
            owned.append(gradient)
        return owned


def _difference(reference: Reference, stack: Stack, loss: Tensor, gradients: Sequence[Tensor]) -> str:
    """The difference of replica 0 in the pass to replica 0 alone, in words; empty if there is none but rounding."""
    if reference.drew:
        return ""  # other random numbers: nothing can be compared
    share = max(_TOLERANCES[param.dtype] for param in stack.params.values())
    if not _close(loss, reference.loss, share, 0.0):
        return f"replica 0 has the loss {float(loss):g}, and {float(reference.loss):g} alone"
    # A sum that cancels to nothing but rounding is as large as the rounding of its terms.
    rounding = 1e-2 * share * max((_largest(gradient) for gradient in reference.gradients if gradient is not None), default=0.0)
    for name, expected, gradient in zip(stack.names, reference.gradients, gradients, strict=True):
        if not _close(gradient, torch.zeros_like(gradient) if expected is None else expected, share, rounding):
            return f"replica 0 has another gradient of '{name}' alone"
    row = stack.row(0)
    for name, value in reference.values.items():
        if name in row and not _close(row[name], value, share, 0.0):
            return f"replica 0's '{name}' is another after a forward alone"
    return ""


def _largest(tensor: Tensor) -> float:
    """The size of the largest finite element."""
    wide = tensor.detach().double().abs()
    wide = wide[wide.isfinite()]
    return float(wide.max()) if wide.numel() else 0.0


def _close(value: Tensor, expected: Tensor, share: float, least: float) -> bool:
    if value.shape != expected.shape:
        return False
    atol = max(share * _largest(expected), least, 1e-300)
    return bool(torch.isclose(value.detach().double(), expected.double(), rtol=0.0, atol=atol, equal_nan=True).all())
