"""Losses and gradients of all replicas in one pass of ``torch.func.vmap``, over what is the function of one of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from decent_dp.sim.loop import LOSS_FN_TYPE, Scale, Trial, check_buffer, check_loss, late_buffer
from decent_dp.sim.stack import Stack

__all__ = ["OnePass", "differs", "unfit"]

_PREFIX = "model."


class _Loss(nn.Module):
    """The loss function as a module, so that it may do with the model whatever it likes."""

    def __init__(self, model: nn.Module, loss_fn: LOSS_FN_TYPE) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        return check_loss(self._loss_fn(self.model, *batch))


class OnePass:
    """All replicas at once.

    Gradients are taken inside of ``vmap``, replica by replica as it were: what a model asks of its tensors is what it would be
    told in a training step, and hooks on the backward are called or refused, never passed over.

    Args:
        stack: where their values lie.
        loss_fn: called as ``loss_fn(model, *batch)``.

    Attributes:
        used: whether each trainable parameter has a gradient; None as long as nobody has said it. There it looks as zeros.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE) -> None:
        self._stack = stack
        self.used: list[bool] | None = None
        self._loss = _Loss(copy.deepcopy(stack.template), loss_fn)

    def __call__(self, batch: Sequence[Tensor], scale: Scale | None) -> tuple[Tensor, list[Tensor | None]]:
        """The losses (n,), detached and unscaled, and the gradients of the trainable parameters, (n, *shape).

        Raises:
            Exception: whatever the model, the loss, or vmap raise. The replicas' values may be half changed then.
        """
        stack = self._stack
        params = {name: param.detach() for name, param in stack.params.items()}
        others = {**stack.frozen, **stack.buffers}
        of_loss = None
        if scale is not None:
            one_each = torch.ones(stack.n, device=next(iter(params.values())).device)
            of_loss = torch.stack([scale(i, one) for i, one in enumerate(one_each.unbind())])
        computed = vmap(
            grad_and_value(self._of_one, has_aux=True), in_dims=(0, 0, None if scale is None else 0, 0), randomness="different"
        )
        # Of the other backends of attention some have no rule for a batch of replicas.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            found, (_, (losses, replaced)) = computed(params, others, of_loss, tuple(batch))
        known = stack.buffers.keys()
        for name, _ in self._loss.model.named_buffers():
            if name not in known:
                raise late_buffer(name)
        for name, value in replaced.items():
            check_buffer(name, value[0], others[name].shape[1:], others[name].dtype)
            others[name].copy_(value)
        return losses.detach(), self._gradients(found)

    def _of_one(
        self, params: dict[str, Tensor], others: dict[str, Tensor], factor: Tensor | None, batch: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        """The scaled loss, the loss, and what the forward has put in the place of a tensor instead of writing into it."""
        swapped = {_PREFIX + name: tensor for name, tensor in (*params.items(), *others.items())}
        loss = functional_call(self._loss, swapped, tuple(batch))
        replaced = {name: swapped[_PREFIX + name] for name, tensor in others.items() if swapped[_PREFIX + name] is not tensor}
        return loss if factor is None else loss * factor, (loss, replaced)

    def _gradients(self, found: dict[str, Tensor]) -> list[Tensor | None]:
        if self.used is None:
            return _own(list(found.values()), list(self._stack.params.values()))
        gradients: list[Tensor | None] = []
        for (name, gradient), used in zip(found.items(), self.used, strict=True):
            if not used and bool(gradient.any()):
                raise RuntimeError(f"parameter '{name}' had no gradient in the first step and has one now")
            gradients.append(gradient if used else None)
        return _own(gradients, list(self._stack.params.values()))


def _own(gradients: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor | None]:
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


# -- against one replica on its own --------------------------------------------------------------------------------------

# Of a gradient's largest element, by the narrowest dtype of the parameters: other kernels round otherwise (under autocast to
# half precision), and what is wrong is wrong by far more.
_LOOSE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 0.25, torch.float16: 0.1}


def unfit(trial: Trial) -> str:
    """Why a model that did this on its own needs no trying in one pass, in words; empty if it does."""
    if trial.drew_in_python:
        return "it draws random numbers in Python, where all replicas would draw the same"
    if any(gradient is not None and gradient.layout != torch.strided for gradient in trial.gradients):
        return "it has sparse gradients"
    return ""


def differs(trial: Trial, stack: Stack, loss: Tensor, gradients: Sequence[Tensor | None]) -> str:
    """In what replica 0 of the pass is not what it is on its own, in words; empty if it is the same but for rounding.

    Args:
        trial: replica 0 on its own.
        stack: after the pass.
        loss: of replica 0 in the pass.
        gradients: of replica 0 in the pass.
    """
    if trial.drew:
        return ""  # other random numbers: nothing can be compared
    share = max(_LOOSE[param.dtype] for param in stack.params.values())
    if not _close(loss, trial.loss, share, 0.0):
        return f"replica 0 has the loss {float(loss):g}, and {float(trial.loss):g} on its own"
    # What cancels to nothing but rounding is as large as the rounding of what was summed.
    rounding = 1e-2 * share * max((_size(gradient) for gradient in trial.gradients if gradient is not None), default=0.0)
    for name, want, found in zip(stack.names, trial.gradients, gradients, strict=True):
        other = torch.zeros_like(stack.params[name][0]) if want is None else want
        if found is not None and not _close(found, other, share, rounding):
            return f"replica 0 has another gradient of '{name}' on its own"
    after = stack.row(0)
    for name, value in trial.values.items():
        if name in after and not _close(after[name], value, share, 0.0):
            return f"replica 0's '{name}' is another after a forward on its own"
    return ""


def _size(tensor: Tensor) -> float:
    """Of the largest finite element."""
    wide = tensor.detach().double().abs()
    wide = wide[wide.isfinite()]
    return float(wide.max()) if wide.numel() else 0.0


def _close(found: Tensor, want: Tensor, share: float, least: float) -> bool:
    if found.shape != want.shape:
        return False
    atol = max(share * _size(want), least, 1e-300)
    return bool(torch.isclose(found.detach().double(), want.detach().double(), rtol=0.0, atol=atol, equal_nan=True).all())
