"""The gradients of a node's workers become their mean while the backward runs.

As in DistributedDataParallel, gradients are summed in buckets, each of which is in flight while the backward goes on. But the
hooks are on the parameters alone, and not around the forward: whatever is called of the model, and whatever part of it a loss
uses, its gradients are averaged. So every worker of the node makes the same backwards, as under DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from decent_dp._sizes import choose_sizes
from decent_dp.engine.layout import BucketPlan, TensorSpec, plan_buckets
from decent_dp.gradients import EndOfBackward
from decent_dp.transport import NodeGroup

__all__ = ["NodeGradients"]


class _GradientBucket:
    """Gradients that are summed together: one flat tensor, and behind it for each whether this worker has it."""

    def __init__(self, plan: BucketPlan, params: Sequence[Tensor]) -> None:
        """``params``: of all buckets."""
        self.indices = [slot.index for slot in plan.slots]
        self.params = [params[index] for index in self.indices]
        self.flat = torch.zeros(plan.numel + len(self.params), dtype=plan.dtype, device=plan.device)
        self._values, self._counts = torch.split(self.flat, [plan.numel, len(self.params)])
        self._views = [slot.view(self.flat) for slot in plan.slots]
        self.missing = len(self.params)

    @torch.no_grad()
    def fill(self, workers: int, *, empty: bool = False) -> None:
        """Puts in this worker's part of the mean; ``empty``: without any gradient."""
        grads = [None if empty else param.grad for param in self.params]
        if all(grad is not None for grad in grads):
            self._counts.fill_(1)
        else:
            self.flat.zero_()
            self._counts[[i for i, grad in enumerate(grads) if grad is not None]] = 1
        _copy([(view, grad) for view, grad in zip(self._views, grads, strict=True) if grad is not None])
        self._values.div_(workers)  # first, so that the sum is in the range of half precision

    @torch.no_grad()
    def unpack(self) -> None:
        """Gradients become the means. One that no worker has stays None."""
        if any(param.grad is None for param in self.params):  # else the numbers, which a GPU may have, are not read
            for param, view, count in zip(self.params, self._views, self._counts.tolist(), strict=True):
                if param.grad is None and count:
                    param.grad = torch.empty_like(param, dtype=view.dtype)
        _copy([(param.grad, view) for param, view in zip(self.params, self._views, strict=True) if param.grad is not None])


@dataclass
class _Running:
    """A running backward."""

    task: int  # autograd's id of it
    end: weakref.ref[EndOfBackward]  # its end callback, which is gone if it has raised
    arrived: set[int] = field(default_factory=set)  # indices of the parameters whose gradients have come
    streams: dict[torch.device, Any] = field(default_factory=dict)  # of the gradients, per device
    in_flight: list[Any] = field(default_factory=list)  # of the buckets that are being summed, which are the first ones
    met: bool = False  # whether ``NodeGradients.meet`` was called


class NodeGradients:
    """Averages the gradients of parameters over the workers of a node from now on.

    Args:
        params: those that train, in the same order on all of the node's workers.
        group: of these workers.
        limit: bytes of a bucket at most; 0 for one per parameter.
        explaining: the context in which a backward waits for the others.

    Attributes:
        hooks: the handles of the hooks on the parameters.
        is_open: whether gradients are each worker's own, from a backward in ``no_sync``.
        averaged: whether a backward has averaged them since the user of this object has set it to False.
        meet: called before a backward's first sum; by default does nothing.
    """

    def __init__(
        self, params: Sequence[Tensor], group: NodeGroup, limit: float, explaining: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._params, self._group, self._limit, self._explaining = params, group, limit, explaining
        # Made at the end of the first backward, from the order in which the node's first worker has got the gradients.
        self._buckets: list[_GradientBucket] = []
        self._first_order: dict[int, None] = {}
        self._bucket_of: dict[int, int] = {}
        self._backward: _Running | None = None
        # Buckets are summed at the end: once a gradient has come from a backward inside a backward, which may add to a gradient
        # that was there, or gradients have come in several CUDA streams.
        self._at_end = False
        self._unsynced = 0
        self.is_open = self.averaged = False
        self.meet: Callable[[], object] = lambda: None
        # On a GPU, hooks of CPU and CUDA parameters run in different threads.
        self._lock = threading.RLock()
        came, untyped = weakref.WeakMethod(self.came), list[Any](params)
        self.hooks = [
            param.register_post_accumulate_grad_hook(lambda _, i=i: call(i) if (call := came()) else None)
            for i, param in enumerate(untyped)
        ]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which gradients stay each worker's own."""
        self._unsynced += 1
        try:
            yield
        finally:
            self._unsynced -= 1

    def without_gradients(self) -> None:
        """Takes part in a backward of the node's other workers."""
        with self._explaining():
            self._lay_out()
            sums = []
            for bucket in self._buckets:
                bucket.fill(self._group.size, empty=True)
                sums.append(self._group.sum_(bucket.flat))
            for work in sums:
                work.wait()

    # -- in the backward ----------------------------------------------------------------------------------------------

    def came(self, index: int) -> None:
        """Called when a parameter's gradient has been accumulated."""
        if self._unsynced:
            self.is_open = True
            return
        with self._lock:
            backward = self._begun()
            param = self._params[index]
            if param.grad is not None and param.grad.layout != torch.strided:
                raise RuntimeError(
                    "a gradient is sparse (nn.Embedding(sparse=True)?), and the workers of a node average dense ones: leave "
                    "sparse=True out, or pass replica='worker' to gossip()."
                )
            self._at_end |= backward.task != torch._C._current_graph_task_id()
            if param.is_cuda:
                stream = torch.cuda.current_stream(param.device)
                self._at_end |= backward.streams.setdefault(param.device, stream) != stream
            if not self._buckets:
                self._first_order.setdefault(index)
                return
            number = self._bucket_of[index]
            if number < len(backward.in_flight):
                raise RuntimeError(
                    "a gradient came twice in one backward, from a backward inside it, and was averaged already: use "
                    "torch.utils.checkpoint with use_reentrant=False, or in every step."
                )
            # Those that were complete before this gradient: the user's hooks on the last one have been called by now.
            with self._explaining():
                while not self._at_end and not self._buckets[len(backward.in_flight)].missing:
                    self._sum_next(backward)
            if index not in backward.arrived:
                backward.arrived.add(index)
                self._buckets[number].missing -= 1

    def _begun(self) -> _Running:
        backward = self._backward
        if backward is not None and backward.end() is None:  # it has raised
            if backward.in_flight:
                raise RuntimeError(
                    "an earlier backward raised when the workers of its node had begun to average its gradients, and is out of "
                    "step with theirs: start the workers again."
                )
            backward = None
        if backward is None:
            me = weakref.ref(self)
            end = EndOfBackward(
                lambda: gradients._end() if (gradients := me()) else None,
                lambda: setattr(gradients, "_at_end", True) if (gradients := me()) else None,
            )
            end.queue()
            backward = self._backward = _Running(torch._C._current_graph_task_id(), weakref.ref(end))
            for bucket in self._buckets:
                bucket.missing = len(bucket.params)
        return backward

    def _sum_next(self, backward: _Running) -> None:
        self._meet(backward)
        bucket = self._buckets[len(backward.in_flight)]
        bucket.fill(self._group.size)
        backward.in_flight.append(self._group.sum_(bucket.flat))

    def _meet(self, backward: _Running) -> None:
        if not backward.met:
            backward.met = True
            self.meet()

    def _end(self) -> None:
        with self._lock, self._explaining():
            backward, self._backward = self._backward, None
            if backward is None:
                return
            self._meet(backward)
            self._lay_out()
            while len(backward.in_flight) < len(self._buckets):
                self._sum_next(backward)
            for work in backward.in_flight:
                work.wait()
            for bucket in self._buckets:
                bucket.unpack()
            self.is_open, self.averaged = False, True

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Makes the buckets. All workers of the node call it at their first backward."""
        if self._buckets:
            return
        orders = self._group.gather_values(list(self._first_order))
        order = list(dict.fromkeys([*max(orders, key=len), *range(len(self._params))]))
        specs = [replace(TensorSpec.of("", param), dtype=_dtype(param)) for param in self._params]
        first, limit = choose_sizes(sum(spec.numel * spec.dtype.itemsize for spec in specs), self._limit)
        self._buckets = [_GradientBucket(plan, self._params) for plan in plan_buckets(specs, order, limit, first)]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices}


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [value for _, value in pairs])


def _dtype(param: Tensor) -> torch.dtype:
    """Of a parameter's gradient. Newer versions of torch let it differ from the parameter's."""
    found: torch.dtype = getattr(param, "grad_dtype", None) or param.dtype
    return found
