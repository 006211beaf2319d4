"""Losses and gradients of the replicas one after another, each by a module of its own: the readable way.

It is a worker's own way, too: a forward of a real module, and ``backward``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decent_dp.sim.stack import Stack

__all__ = [
    "LOSS_FN_TYPE",
    "Loop",
    "Scale",
    "Trial",
    "check_buffer",
    "check_loss",
    "late_buffer",
    "try_out",
    "unused_model",
]

LOSS_FN_TYPE = Callable[..., Tensor]
# The loss of replica i, scaled for the backward.
Scale = Callable[[int, Tensor], Tensor]


def check_loss(loss: Any) -> Tensor:
    """The loss as a tensor without dimensions; raises TypeError or ValueError if it is not one number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss_fn must return the loss as a tensor, got {loss!r}. Is a `return` missing in it?")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(
            f"loss_fn must return one number a replica, got a tensor of shape {tuple(loss.shape)}, {loss.dtype}: take its mean."
        )
    return loss.reshape(())


def check_buffer(name: str, found: Any, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError unless what a forward has put in a buffer's place can be that buffer."""
    if not isinstance(found, Tensor):
        raise ValueError(f"the forward has put {found!r} in the place of buffer '{name}': {_KEEP_BUFFERS}")
    if found.shape != torch.Size(shape) or found.dtype != dtype:
        raise ValueError(
            f"the forward has made buffer '{name}' of shape {tuple(shape)}, {dtype}, one of shape {tuple(found.shape)}, "
            f"{found.dtype}: {_KEEP_BUFFERS}"
        )


def late_buffer(name: str) -> ValueError:
    """What is raised for a buffer that was not there at construction."""
    return ValueError(f"the forward has made buffer '{name}', which had no value at construction: {_KEEP_BUFFERS}")


_KEEP_BUFFERS = (
    "replicas keep the buffers that they begin with. Give it its shape before, or make it a plain attribute of the module and "
    "pass vectorize=False"
)


def unused_model() -> ValueError:
    """What is raised if a loss depends on something, and on no parameter of the model that ``loss_fn`` was given."""
    return ValueError(
        "loss_fn must use the model that it is given as its first argument: its loss depends on no trainable parameter of it. "
        "Does it call another model, such as the one that was passed to VirtualCluster?"
    )


# -- one replica ---------------------------------------------------------------------------------------------------------


def _backward(
    model: nn.Module, loss_fn: LOSS_FN_TYPE, batch: Sequence[Tensor], scale: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, list[Tensor | None], bool]:
    """The loss, the gradients of the trainable parameters, and whether the loss depends on anything that trains."""
    params = [param for param in model.parameters() if param.requires_grad]
    try:
        with torch.enable_grad():
            loss = check_loss(loss_fn(model, *batch))
            depends = loss.requires_grad
            if depends:
                (loss if scale is None else scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), [param.grad for param in params], depends
    finally:
        for param in params:
            param.grad = None


class Replica:
    """A module whose parameters and buffers lie in the stack; all else in it is its own."""

    def __init__(self, stack: Stack, i: int) -> None:
        self.model = copy.deepcopy(stack.template)
        values = stack.row(i)
        named: list[tuple[str, Tensor]] = [*self.model.named_parameters(), *self.model.named_buffers()]
        # Only the data are exchanged, so that whoever holds the parameter itself (nn.LSTM does) holds the right one.
        for name, tensor in named:
            tensor.data = values[name]
        self._held = [(name, tensor, values[name]) for name, tensor in named]
        self._places = list(_places(self.model))

    @torch.no_grad()
    def settle(self) -> None:
        """Brings into the stack what the forward has put in the place of a tensor instead of writing into it.

        Raises:
            ValueError: a buffer has another shape now, or is new; names it.
        """
        known = {(id(owner), key) for _, owner, key, _ in self._places}
        for name, owner, key, _ in _places(self.model):
            if (id(owner), key) not in known:
                raise late_buffer(name)
        for name, owner, key, tensor in self._places:
            found = owner._buffers.get(key)
            if found is not tensor:
                check_buffer(name, found, tensor.shape, tensor.dtype)
                assert found is not None
                tensor.copy_(found)
                owner._buffers[key] = tensor
        for name, tensor, value in self._held:
            if tensor.data_ptr() != value.data_ptr() or tensor.shape != value.shape:
                check_buffer(name, tensor, value.shape, value.dtype)
                value.copy_(tensor)
                tensor.data = value

    def reset(self) -> None:
        """Puts its own tensors back, whatever the forward has put in their places."""
        known = {(id(owner), key) for _, owner, key, _ in self._places}
        for _, owner, key, _ in list(_places(self.model)):
            if (id(owner), key) not in known:
                owner._buffers[key] = None
        for _, owner, key, tensor in self._places:
            owner._buffers[key] = tensor
        for _, tensor, value in self._held:
            tensor.data = value


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """The name, module and key of each buffer, of a shared one each of its places."""
    for prefix, owner in model.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, owner, key, tensor


# -- all of them ---------------------------------------------------------------------------------------------------------


class Loop:
    """All replicas, one after another.

    Args:
        stack: where their values lie.
        loss_fn: called as ``loss_fn(model, *batch)``.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE) -> None:
        self._loss_fn = loss_fn
        self._replicas = [Replica(stack, i) for i in range(stack.n)]

    def __call__(self, batch: Sequence[Tensor], scale: Scale | None) -> tuple[Tensor, list[list[Tensor | None]]]:
        """The losses (n,), detached and unscaled, and for each replica its trainable parameters' gradients.

        Raises:
            ValueError: the loss is not one number, or depends on no replica's parameters; or as ``Replica.settle``.
        """
        losses, rows, depends = [], [], False
        try:
            for i, replica in enumerate(self._replicas):
                scaled = None if scale is None else _of_replica(scale, i)
                loss, gradients, asks = _backward(replica.model, self._loss_fn, [tensor[i] for tensor in batch], scaled)
                replica.settle()
                losses.append(loss)
                rows.append(gradients)
                depends |= asks
            if depends and all(gradient is None for row in rows for gradient in row):
                raise unused_model()
        except BaseException:
            for replica in self._replicas:
                replica.reset()
            raise
        return torch.stack(losses), rows


def _of_replica(scale: Scale, i: int) -> Callable[[Tensor], Tensor]:
    return lambda loss: scale(i, loss)


# -- a trial -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """What a copy of one replica came to, on its own.

    Attributes:
        loss: detached and unscaled.
        gradients: of the trainable parameters, None where there is none.
        values: of all parameters and buffers after the forward, by name.
        depends: whether the loss depends on anything that trains.
        drew: it drew random numbers of torch's: whoever computes it again draws others.
        drew_in_python: it drew from ``random`` or ``numpy.random``.
    """

    loss: Tensor
    gradients: list[Tensor | None]
    values: dict[str, Tensor]
    depends: bool
    drew: bool
    drew_in_python: bool


def try_out(stack: Stack, i: int, loss_fn: LOSS_FN_TYPE, batch: Sequence[Tensor], scale: Scale | None) -> Trial:
    """Computes replica i by a copy; nothing in the stack changes, nor any stream of random numbers."""
    model = stack.replica(i)
    devices = sorted({param.device.index for param in model.parameters() if param.device.type == "cuda"})
    scaled = None if scale is None else _of_replica(scale, i)
    with _random_numbers_kept(devices) as drawn:
        loss, gradients, depends = _backward(model, loss_fn, [tensor[i] for tensor in batch], scaled)
        drew, drew_in_python = drawn()
    values = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return Trial(loss, gradients, values, depends, drew, drew_in_python)


@contextmanager
def _random_numbers_kept(devices: Sequence[int]) -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Inside, random numbers may be drawn, and outside none are missing; tells whether torch's were drawn, and Python's."""

    def of_torch() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

    def of_python() -> str:
        return repr((random.getstate(), np.random.get_state(legacy=False)["state"]))

    torchs, pythons, in_python, in_numpy = of_torch(), of_python(), random.getstate(), np.random.get_state()

    def drawn() -> tuple[bool, bool]:
        now = of_torch()
        return any(not torch.equal(a, b) for a, b in zip(torchs, now, strict=True)), of_python() != pythons

    try:
        with torch.random.fork_rng(devices):
            yield drawn
    finally:
        random.setstate(in_python)
        np.random.set_state(in_numpy)
