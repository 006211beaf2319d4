"""Autograd's events: when a backward of a replica begins and ends, and the window of gradients that are accumulated."""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from decent_dp.gradients import EndOfBackward, tensors_in

__all__ = ["Backward", "Backwards", "Window", "inside_backward"]


def inside_backward() -> bool:
    """Whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Window(enum.Enum):
    """The state of gradient accumulation."""

    # No gradients. -> OPEN: a backward ends while gradients are accumulated.
    IDLE = "idle"
    # More gradients may come. -> PENDING: set_accumulate_grad(False). -> IDLE: a backward without accumulation, or zero_grad.
    OPEN = "open"
    # The window is complete. -> IDLE: the next backward joins it and updates, or an observer updates first.
    PENDING = "pending"


@dataclass
class Backward:
    """A running backward.

    Attributes:
        end: reference to its end callback.
        accumulating: whether gradients were accumulated at its start; it may end, or raise, after ``no_sync`` has ended.
        expected: whether it reaches parameters, so that it is an update even if it raises before the first gradient.
        arrived: whether a gradient has arrived.
    """

    end: weakref.ref[EndOfBackward]
    accumulating: bool
    expected: bool
    arrived: bool = False

    @property
    def raised(self) -> bool:
        """Whether it has raised: the engine has dropped the end callback without calling it."""
        return self.end() is None


class Backwards:
    """The backwards of a replica. Neither autograd nor the parameters keep it alive.

    Args:
        params: the trainable parameters.
        ended: a method, called with the lock at the end of an outermost backward in which gradients have arrived, or when one
            is found to have raised that reaches parameters.

    Attributes:
        lock: on a GPU, hooks of CPU and CUDA parameters run in different threads.
        running: the present backward, or one that has raised.
        accumulate: whether backwards keep gradients for a later one, by ``set_accumulate_grad``.
        window: of these.
        order: parameter indices in the order of their first gradients.
        hooks: to be removed at the end.
    """

    def __init__(self, params: Sequence[nn.Parameter], ended: Callable[[Backward], None]) -> None:
        self._params, self._ended = params, weakref.WeakMethod(ended)
        self.lock = threading.RLock()
        self.running: Backward | None = None
        self.accumulate, self.window, self._paused = False, Window.IDLE, 0
        self.order: dict[int, None] = {}
        self._me = me = weakref.ref(self)

        def gradient_hook(index: int) -> Callable[[Tensor], None]:
            return lambda _: own._gradient(index) if (own := me()) is not None else None

        untyped: Any = params  # torch does not type its hooks
        self.hooks = [param.register_post_accumulate_grad_hook(gradient_hook(i)) for i, param in enumerate(untyped)]

    @property
    def accumulating(self) -> bool:
        """Whether backwards keep gradients now, by ``set_accumulate_grad`` or inside ``no_sync``."""
        return self.accumulate or self._paused > 0

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The context of ``no_sync``."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def discarded(self) -> None:
        """Called when the user has cleared the gradients."""
        if self.window is Window.OPEN:
            self.window = Window.IDLE

    @_disable_dynamo
    def after_forward(self, output: Any) -> None:
        """Registers hooks on the output, so that a backward that raises before its first gradient is noticed."""
        me = self._me

        def hook(_: Tensor) -> None:
            if (own := me()) is not None:
                own.enter()

        tensor: Any
        for tensor in tensors_in(output):
            # A hook on a leaf would stay for ever.
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def enter(self) -> Backward:
        """Records the running backward and registers the callback at its end."""
        with self.lock:
            self.recover()
            if self.running is None:
                me = self._me
                end = EndOfBackward(lambda: own._end() if (own := me()) is not None else None)
                end.queue()
                self.running = Backward(weakref.ref(end), self.accumulating, self._reaches_parameters())
            return self.running

    def recover(self) -> None:
        """Ends the last backward if it has raised."""
        with self.lock:
            backward = self.running
            if backward is None:
                return
            if not inside_backward() and (end := backward.end()) is not None:
                end.leave_outer()
                del end
            if backward.raised:
                self._end()

    def _end(self) -> None:
        with self.lock:
            backward, self.running = self.running, None
            # Else it was torch.autograd.grad, or a loss without parameters.
            if backward is not None and (backward.arrived or (backward.raised and backward.expected)):
                ended = self._ended()
                assert ended is not None, "the replica holds this object"
                ended(backward)

    def _gradient(self, index: int) -> None:
        """Called when a parameter's gradient has been accumulated."""
        backward = self.running
        if backward is None or backward.raised:
            backward = self.enter()  # the first gradient of this backward
        backward.arrived = True
        self.order.setdefault(index)

    def _reaches_parameters(self) -> bool:
        """Whether the running backward accumulates gradients in parameters (torch.autograd.grad does not)."""
        edges = (torch.autograd.graph.get_gradient_edge(param) for param in self._params if param.requires_grad)
        try:
            return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
        except RuntimeError:
            return False  # torch raises this for a leaf among the inputs of torch.autograd.grad
