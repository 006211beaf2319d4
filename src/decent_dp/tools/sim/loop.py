"""Losses and gradients of the replicas one after another, each with a module of its own.

A worker computes in the same way: the forward of a real module, and ``backward``. This is the readable twin of ``vectorized``.
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

from decent_dp.tools.sim.stack import Snapshot, Stack

__all__ = ["LOSS_FN_TYPE", "Loop", "Reference", "check_buffer", "check_loss", "compute_alone", "new_buffer", "unused_model"]

LOSS_FN_TYPE = Callable[..., Tensor]


def check_loss(loss: Any) -> Tensor:
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


def check_buffer(name: str, value: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError unless ``value``, which a forward has put in the place of a buffer, can be that buffer."""
    if not isinstance(value, Tensor):
        raise ValueError(f"the forward has put {value!r} in the place of buffer '{name}': {_KEEP_BUFFERS}")
    if value.shape != torch.Size(shape) or value.dtype != dtype:
        raise ValueError(
            f"the forward has changed buffer '{name}' of shape {tuple(shape)}, {dtype}, to shape {tuple(value.shape)}, "
            f"{value.dtype}: {_KEEP_BUFFERS}"
        )


def new_buffer(name: str) -> ValueError:
    """The error for a buffer that was not there at construction."""
    return ValueError(f"the forward has made buffer '{name}', which had no value at construction: {_KEEP_BUFFERS}")


def unused_model() -> ValueError:
    """The error for a loss that depends on something, and on no parameter of the model that ``loss_fn`` was given."""
    return ValueError(
        "loss_fn must use the model that it is given as its first argument: its loss depends on no trainable parameter of it. "
        "Does it call another model, such as the one that was passed to VirtualCluster?"
    )


def _backward(
    model: nn.Module, loss_fn: LOSS_FN_TYPE, batch: Sequence[Tensor], scales: Tensor | None, i: int
) -> tuple[Tensor, list[Tensor | None], bool]:
    """Replica i's loss, the gradients of its trainable parameters, and whether the loss depends on anything that trains."""
    params = [param for param in model.parameters() if param.requires_grad]
    try:
        with torch.enable_grad():
            loss = check_loss(loss_fn(model, *(tensor[i] for tensor in batch)))
            if loss.requires_grad:
                (loss if scales is None else loss * scales[i]).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), [param.grad for param in params], loss.requires_grad
    finally:
        for param in params:
            param.grad = None


# -- all replicas --------------------------------------------------------------------------------------------------------


class _ReplicaModule:
    """A module whose parameters and buffers lie in the stack; the rest of it is its own."""

    def __init__(self, stack: Stack, i: int) -> None:
        self.model = copy.deepcopy(stack.template)
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
        """Copies into the stack each tensor that the forward has replaced instead of writing into it.

        Raises:
            ValueError: a buffer has another shape now, or is new; names it.
        """
        now = dict(self.model.named_buffers(remove_duplicate=False))
        for name in now.keys() - self._own_buffers.keys():
            raise new_buffer(name)
        for name, buffer in self._own_buffers.items():
            value: Any = now.get(name)
            if value is not buffer:
                check_buffer(name, value, buffer.shape, buffer.dtype)
                buffer.copy_(value)
                owner, _, key = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[key] = buffer
        for name, tensor, value in self._tensors:
            if tensor.data_ptr() != value.data_ptr() or tensor.shape != value.shape:
                check_buffer(name, tensor, value.shape, value.dtype)
                value.copy_(tensor)
        self.bind()


class Loop:
    """All replicas, one after another.

    Args:
        stack: the replicas' values.
        loss_fn: called as ``loss_fn(model, *batch)``.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE) -> None:
        self._stack, self._loss_fn = stack, loss_fn
        self._replicas = [_ReplicaModule(stack, i) for i in range(stack.n)]

    def __call__(self, batch: Sequence[Tensor], scales: Tensor | None) -> tuple[Tensor, list[list[Tensor | None]]]:
        """The losses (n,), detached and unscaled, and for each replica its trainable parameters' gradients.

        Raises:
            ValueError: the loss is not one number, or depends on no replica's parameters; or as ``write_back``.
        """
        losses, rows, depends = [], [], False
        snapshot = Snapshot(self._stack.buffers.values(), [replica.model for replica in self._replicas])
        try:
            for i, replica in enumerate(self._replicas):
                loss, gradients, trains = _backward(replica.model, self._loss_fn, batch, scales, i)
                replica.write_back()
                losses.append(loss)
                rows.append(gradients)
                depends |= trains
            if depends and all(gradient is None for row in rows for gradient in row):
                raise unused_model()
        except BaseException:
            snapshot.restore()
            for replica in self._replicas:
                replica.bind()
            raise
        return torch.stack(losses), rows


# -- one replica, as a reference -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """One replica, computed alone by a copy.

    Attributes:
        loss: detached and unscaled.
        gradients: of the trainable parameters, None where there is none.
        values: of all parameters and buffers after the forward, by name.
        depends: whether the loss depends on anything that trains.
        drew: it drew random numbers of torch's, so that another computation draws others.
        drew_in_python: it drew from ``random`` or ``numpy.random``.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    values: dict[str, Tensor]
    depends: bool
    drew: bool
    drew_in_python: bool


def compute_alone(stack: Stack, i: int, loss_fn: LOSS_FN_TYPE, batch: Sequence[Tensor], scales: Tensor | None) -> Reference:
    """Computes a copy of replica i; changes neither the stack nor any stream of random numbers."""
    model = stack.replica(i)
    devices = sorted({param.device.index for param in model.parameters() if param.device.type == "cuda"})

    def torch_states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

    def python_states() -> str:
        return repr((random.getstate(), np.random.get_state(legacy=False)["state"]))

    before, python, of_random, of_numpy = torch_states(), python_states(), random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            loss, gradients, depends = _backward(model, loss_fn, batch, scales, i)
            drew = any(not torch.equal(a, b) for a, b in zip(before, torch_states(), strict=True))
        drew_in_python = python_states() != python
    finally:
        random.setstate(of_random)
        np.random.set_state(of_numpy)
    values = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return Reference(loss, gradients, values, depends, drew, drew_in_python)
