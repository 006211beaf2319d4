"""Losses and gradients of all replicas: in one pass of ``torch.func.vmap``, or one replica after another.

The loop computes as a worker does, by the forward of a real module and ``backward``. It is the readable twin of the pass.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from decent_dp.tools.sim.stack import Snapshot, Stack

__all__ = ["LOSS_FN_TYPE", "Gradients", "Loop", "VectorizedPass"]

LOSS_FN_TYPE = Callable[..., Tensor]


@dataclass
class Gradients:
    """The result of a step's forward and backward. Either ``stacked`` or ``rows`` is given.

    Attributes:
        losses: (n,), detached and unscaled.
        stacked: one gradient per trainable parameter, (n, *shape), None where it has none.
        rows: for each replica one gradient per trainable parameter, None where it has none.
    """

    losses: Tensor
    stacked: list[Tensor | None] | None = None
    rows: list[list[Tensor | None]] | None = None

    def of_replica(self, i: int) -> list[Tensor | None]:
        if self.stacked is not None:
            return [None if gradient is None else gradient[i] for gradient in self.stacked]
        assert self.rows is not None
        return self.rows[i]


# -- what a model may do ---------------------------------------------------------------------------------------------------


def _check_loss(loss: Any) -> Tensor:
    """The loss as a tensor without dimensions; raises TypeError or ValueError if it is not one number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return the loss as a tensor, got {loss!r}. Is a `return` missing in it?")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss_fn must return one number per replica, got a tensor of shape {tuple(loss.shape)}, {loss.dtype}: take its "
            "mean."
        )
    return loss.reshape(())


_KEEP_BUFFERS = (
    "replicas keep their first set of buffers. Give it its shape before, or make it a plain attribute of the module and "
    "pass vectorize=False"
)


def _check_buffer(name: str, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError unless ``value``, which a forward has put in the place of a buffer, can be that buffer."""
    if not isinstance(value, Tensor):
        raise ValueError(f"the forward has put {value!r} in the place of buffer '{name}': {_KEEP_BUFFERS}")
    if value.shape != torch.Size(shape) or value.dtype != dtype:
        raise ValueError(
            f"the forward has changed buffer '{name}' of shape {tuple(shape)}, {dtype}, to shape {tuple(value.shape)}, "
            f"{value.dtype}: {_KEEP_BUFFERS}"
        )


def _check_no_new_buffer(model: nn.Module, known: Sequence[str]) -> None:
    for name in dict(model.named_buffers(remove_duplicate=False)).keys() - set(known):
        raise ValueError(f"the forward has made buffer '{name}', which had no value at construction: {_KEEP_BUFFERS}")


def _unused_model() -> ValueError:
    """The error for a loss that depends on something, and on no parameter of the model that ``loss_fn`` was given."""
    return ValueError(
        "loss_fn must use the model that it is given as its first argument: its loss depends on no trainable parameter of it. "
        "Does it call another model, such as the one that was passed to VirtualCluster?"
    )


# -- one after another -----------------------------------------------------------------------------------------------------


class _ReplicaModule:
    """A module whose parameters and buffers lie in the stack; the rest of it is its own."""

    def __init__(self, stack: Stack, i: int) -> None:
        self.model = copy.deepcopy(stack.template)
        self.params = [param for param in self.model.parameters() if param.requires_grad]
        row = stack.row(i)
        named: list[tuple[str, Tensor]] = [*self.model.named_parameters(), *self.model.named_buffers()]
        self._tensors = [(name, tensor, row[name]) for name, tensor in named]
        self._own_buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.bind()

    def bind(self) -> None:
        """Lets the module's tensors lie in the stack."""
        # Only ``.data`` is exchanged, so that a module that keeps the parameter itself (nn.LSTM) keeps the right one.
        for _, tensor, value in self._tensors:
            tensor.data = value

    @torch.no_grad()
    def write_back(self) -> None:
        """Copies into the stack each tensor that the forward has replaced instead of writing into it."""
        _check_no_new_buffer(self.model, list(self._own_buffers))
        now = dict(self.model.named_buffers(remove_duplicate=False))
        for name, buffer in self._own_buffers.items():
            value: Any = now.get(name)
            if value is not buffer:
                _check_buffer(name, value, buffer.shape, buffer.dtype)
                buffer.copy_(value)
                owner, _, key = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[key] = buffer
        for name, tensor, value in self._tensors:
            if tensor.data_ptr() != value.data_ptr() or tensor.shape != value.shape:
                _check_buffer(name, tensor, value.shape, value.dtype)
                value.copy_(tensor)
        self.bind()


class Loop:
    """All replicas, one after another, each with Python objects of its own."""

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE) -> None:
        self._stack, self._loss_fn = stack, loss_fn
        self._replicas = [_ReplicaModule(stack, i) for i in range(stack.n)]

    def __call__(self, batch: Sequence[Tensor], scales: Tensor | None) -> Gradients:
        """The losses, and the gradients of losses times ``scales`` if given.

        Raises:
            ValueError: the loss is not one number, or depends on no replica's parameters; or as ``write_back``.
            Exception: an error of ``loss_fn`` or the model. Buffers and modules' Python attributes are as before then.
        """
        losses: list[Tensor] = []
        rows: list[list[Tensor | None]] = []
        depends = False
        with Snapshot(self._stack.buffers.values(), [replica.model for replica in self._replicas]):
            try:
                for i, replica in enumerate(self._replicas):
                    with torch.enable_grad():
                        loss = _check_loss(self._loss_fn(replica.model, *(tensor[i] for tensor in batch)))
                        if loss.requires_grad:
                            (loss if scales is None else loss * scales[i]).backward()  # type: ignore[no-untyped-call]
                    replica.write_back()
                    losses.append(loss.detach())
                    rows.append([param.grad for param in replica.params])
                    depends |= loss.requires_grad
                if depends and all(gradient is None for row in rows for gradient in row):
                    raise _unused_model()
            except BaseException:
                for replica in self._replicas:
                    replica.bind()
                raise
            finally:
                for replica in self._replicas:
                    for param in replica.params:
                        param.grad = None
        return Gradients(torch.stack(losses), rows=rows)


# -- in one pass -----------------------------------------------------------------------------------------------------------

_PREFIX = "model."


class _Loss(nn.Module):
    """The loss function as a module, so that ``functional_call`` covers all that it does with the model."""

    def __init__(self, model: nn.Module, loss_fn: LOSS_FN_TYPE) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn

    def forward(self, *batch: Tensor) -> Tensor:
        return _check_loss(self._loss_fn(self.model, *batch))


class VectorizedPass:
    """All replicas at once.

    Gradients are taken inside ``vmap``, so that tensors answer a model's questions (``requires_grad``) as in a training step,
    and hooks on the backward are called or refused, never skipped. ``vmap`` refuses by itself a model whose Python code depends
    on values, that checkpoints activations, has backward hooks on modules or sparse gradients.

    Args, calls and errors as of ``Loop``, and RuntimeError for a model that cannot be computed so.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE) -> None:
        self._stack = stack
        self._loss = _Loss(copy.deepcopy(stack.template), loss_fn)
        self._kept_in = _kept_buffer(stack.template)

    def __call__(self, batch: Sequence[Tensor], scales: Tensor | None) -> Gradients:
        if self._kept_in is not None:
            raise _refusal(f"it keeps a buffer beside its name, in {self._kept_in}")
        with Snapshot(self._stack.buffers.values(), [self._loss]):
            python, numpy = random.getstate(), np.random.get_state()
            try:
                found = self._compute(batch, scales)
            except RuntimeError as error:
                first_line = str(error).strip().partition("\n")[0]
                raise _refusal(f"{type(error).__name__}: {first_line.partition('. ')[0]}") from error
            if (random.getstate(), _keys(np.random.get_state())) != (python, _keys(numpy)):
                random.setstate(python)
                np.random.set_state(numpy)
                raise _refusal("it draws random numbers in Python, where all replicas would draw the same")
        return found

    def _compute(self, batch: Sequence[Tensor], scales: Tensor | None) -> Gradients:
        stack = self._stack
        params = {name: param.detach() for name, param in stack.params.items()}
        others = {**stack.frozen, **stack.buffers}
        used: list[bool] = []

        def of_one(
            params: dict[str, Tensor], others: dict[str, Tensor], scale: Tensor | None, batch: Sequence[Tensor]
        ) -> tuple[Tensor, tuple[Tensor, list[Tensor], dict[str, Tensor]]]:
            """The loss, the gradients, and the tensors that the forward has replaced instead of writing into them."""
            swapped = {_PREFIX + name: tensor for name, tensor in (*params.items(), *others.items())}
            loss = functional_call(self._loss, swapped, tuple(batch))
            gradients: Sequence[Tensor | None] = [None] * len(params)
            if loss.requires_grad:
                scaled = loss if scale is None else loss * scale
                gradients = torch.autograd.grad(scaled, list(params.values()), allow_unused=True)
            used.extend(gradient is not None for gradient in gradients)
            replaced = {
                name: swapped[_PREFIX + name] for name, tensor in others.items() if swapped[_PREFIX + name] is not tensor
            }
            for name, value in replaced.items():
                _check_buffer(name, value, others[name].shape, others[name].dtype)
            return loss.detach(), (loss, [gradient for gradient in gradients if gradient is not None], replaced)

        in_dims = (0, 0, None if scales is None else 0, 0)
        # ``grad`` lets autograd see the parameters; of the loss, detached, it has nothing to compute. It would not say which
        # parameters are unused: they take no step.
        computed = vmap(grad(of_one, has_aux=True), in_dims=in_dims, randomness="different")
        # Of the other backends of attention some have no rule for a batch of replicas.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            _, (losses, gradients, replaced) = computed(params, others, scales, tuple(batch))
        _check_no_new_buffer(self._loss.model, list(dict(stack.template.named_buffers(remove_duplicate=False))))
        for name, value in replaced.items():
            others[name].copy_(value)
        # Of the stack's parameters, which are detached, the losses depend inside of ``grad`` only.
        if losses.requires_grad:
            named = [param for param in self._loss.model.parameters() if param.requires_grad]
            kept = torch.autograd.grad(losses.sum(), named, allow_unused=True) if named else ()
            if any(gradient is not None for gradient in kept):
                # ``functional_call`` exchanges what a module has by name, and no list of parameters beside it.
                raise RuntimeError("it reads a parameter from a list, or another attribute that is no parameter")
            if not gradients:
                raise _unused_model()
        own = iter(self._own([param for param, is_used in zip(stack.params.values(), used, strict=True) if is_used], gradients))
        return Gradients(losses.detach(), [next(own) if is_used else None for is_used in used])

    def _own(self, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients that may be written to, each with memory of its own in its parameter's strides.

        Autograd gives one tensor for two parameters that are added, and an expanded one for a sum.
        """
        seen: set[int] = set()
        owned = []
        for gradient, param in zip(gradients, params, strict=True):
            if gradient.stride() != param.stride() or gradient.data_ptr() in seen:
                gradient = torch.empty_like(param, requires_grad=False).copy_(gradient)
            if gradient.numel():
                seen.add(gradient.data_ptr())
            owned.append(gradient)
        return owned


def _kept_buffer(model: nn.Module) -> str | None:
    """An attribute that holds a buffer beside its name, which ``functional_call`` does not exchange."""
    buffers = {id(buffer) for buffer in model.buffers()}
    for module in model.modules():
        for name, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            if name != "_buffers" and any(id(one) in buffers for one in held):
                return f"{type(module).__name__}.{name}"
    return None


def _keys(state: Any) -> tuple[Any, ...]:
    """What changes when NumPy's global generator draws."""
    return state[1].tobytes(), *state[2:]


def _refusal(cause: str) -> RuntimeError:
    return RuntimeError(
        f"all replicas cannot be computed in one pass ({cause}). If the model and the batch are right, pass vectorize=False: "
        "then replicas are computed one after another"
    )
