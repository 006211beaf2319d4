"""Gradients of one replica: the end of their backward, and what is done before its optimizers step: unscaling, clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["EndOfBackward", "GradientPolicy", "tensors_in"]


class EndOfBackward:
    """A callback that autograd's engine calls at the end of the running backward, the outermost one.

    The engine references it until then. If it is gone without a call, the backward has raised.

    Args:
        ended: called at the end.
        nested: called at the end of a backward inside another one (reentrant checkpointing).
    """

    def __init__(self, ended: Callable[[], None], nested: Callable[[], None] = lambda: None) -> None:
        self._ended, self._nested = ended, nested
        # The hook on the node of the outer backward that has run an inner one, until that node is done. It references this.
        self._outer: Any = None

    def queue(self) -> None:
        """Registers this callback for the running backward."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self)

    def __call__(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._ended()
        else:
            self._outer = node.register_hook(self._continue)
            self._nested()

    def _continue(self, *_: Any) -> None:
        self.leave_outer()
        self.queue()

    def leave_outer(self) -> None:
        """Called outside any backward, too: an outer backward that has raised after its inner one continues no more."""
        if self._outer is not None:
            self._outer.remove()
            self._outer = None


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yields the tensors in lists, tuples, dicts (such as ``ModelOutput``) and dataclasses, as PyTorch DDP does."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors_in(getattr(output, field.name))


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
