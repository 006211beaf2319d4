"""Buckets with their optimizers, which the user's factories make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from decent_dp.engine import Bucket, Edit
from decent_dp.topo import Edge
from decent_dp.topo.edges import EdgeOfHook
from decent_dp.transport import Transport

__all__ = ["DeferredList", "Unit", "edit_of"]

T = TypeVar("T")


class DeferredList(list[T]):
    """A list that is empty at first; indexing it too early raises an IndexError with the text ``why``."""

    def __init__(self, why: str = "", made: Iterable[T] = ()) -> None:
        super().__init__(made)
        self.why = why

    def __getitem__(self, place: Any) -> Any:
        if not self and not isinstance(place, slice):
            raise IndexError(self.why)
        return super().__getitem__(place)


@dataclass(frozen=True)
class Unit:
    """A bucket and its optimizer."""

    bucket: Bucket
    optimizer: Optimizer
    scheduler: LRScheduler | None

    def step(self) -> None:
        """Steps the optimizer and the scheduler."""
        with record_function("decent_dp.step"):
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def edit_of(unit: Unit, transport: Transport) -> Edit | None:
    """Calls the optimizer's ``pre_average_hook``, which may change the sum that is mixed in; None without such a hook."""
    hook = getattr(unit.optimizer, "pre_average_hook", None)
    if hook is None:
        return None

    def edit(edge: Edge, others: list[Tensor]) -> None:
        params = unit.bucket.buffer.params
        if edge.group is None:  # a group of the user's stays
            edge = EdgeOfHook(edge.ranks, edge.weight, partial(transport.groups.of, edge.ranks))
        try:
            for param, view in zip(params, others, strict=True):
                param.comm_buffer = view  # type: ignore[attr-defined]
            hook(edge, edge.weight)
        finally:
            for param in params:
                del param.comm_buffer  # type: ignore[attr-defined]

    return edit
