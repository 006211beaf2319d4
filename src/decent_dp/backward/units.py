"""Buckets with the optimizers that the user's factories make for them: laid out alike on all workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from decent_dp.engine import Bucket, Edit, Engine
from decent_dp.engine.layout import MIB, Block
from decent_dp.handed import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, make_optimizer, make_scheduler
from decent_dp.replica.parameters import Parameters
from decent_dp.replica.settings import Settings
from decent_dp.topo import Edge

__all__ = ["Builder", "MadeLater", "Unit"]

T = TypeVar("T")


class MadeLater(list[T]):
    """A list that is empty at first; an entry that is asked for too early is an IndexError that says what to do.

    Args:
        why: of the error, while the list is empty.
    """

    def __init__(self, why: str = "", made: Iterable[T] = ()) -> None:
        super().__init__(made)
        self.why = why

    @overload
    def __getitem__(self, place: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
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

    @property
    def block(self) -> Block:
        return self.bucket.block

    def step(self) -> None:
        """The optimizer's step and the scheduler's; parameters without a gradient stay as they are."""
        with record_function("decent_dp.step"):
            self.optimizer.step()
        self.pass_step()

    def pass_step(self) -> None:
        """The scheduler's step alone: the replica has taken a step in which this bucket could not take part."""
        if self.scheduler is not None:
            self.scheduler.step()

    @cached_property
    def edit(self) -> Edit | None:
        """Lets an optimizer with a ``pre_average_hook`` see, and change, what is mixed in; None for any other."""
        hook = getattr(self.optimizer, "pre_average_hook", None)
        if hook is None:
            return None

        def edit(edge: Edge, others: list[Tensor]) -> None:
            try:
                for param, view in zip(self.block.params, others, strict=True):
                    param.comm_buffer = view  # type: ignore[attr-defined]
                hook(edge, edge.weight)
            finally:
                for param in self.block.params:
                    del param.comm_buffer  # type: ignore[attr-defined]

        return edit


class Builder:
    """Lays units out, and calls the user's factories for them.

    Args:
        as_view: parameters become views of one flat block in each bucket.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Parameters,
        settings: Settings,
        optim_fn: OPTIM_FN_TYPE,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
        *,
        as_view: bool,
    ) -> None:
        self._engine, self._parameters, self._settings = engine, parameters, settings
        self._optim_fn, self._lr_scheduler_fn, self._as_view = optim_fn, lr_scheduler_fn, as_view

    def lay_out(self, order: Sequence[int]) -> list[Unit]:
        """New units, whose parameters lie in their blocks from now on.

        Args:
            order: of the parameters, by number.

        Raises:
            TypeError, ValueError: the factories do not return what they should.
        """
        specs, params = self._parameters.specs, self._parameters.params
        units: list[Unit] = []
        for bucket in self._engine.lay_out(specs, params, order, self._settings.bucket_size_in_mb * MIB, as_view=self._as_view):
            named = [(slot.spec.name, params[slot.index]) for slot in bucket.block.plan.slots]
            optimizer = make_optimizer(self._optim_fn, named)
            units.append(Unit(bucket, optimizer, make_scheduler(self._lr_scheduler_fn, optimizer)))
        return units

    @torch.no_grad()
    def release(self) -> None:
        """Each parameter lies on its own again, as before there were buckets: a place at another distance from the start of
        its memory may be reason enough for a kernel to sum in another order."""
        if not self._as_view:
            return
        for spec, param in zip(self._parameters.specs, self._parameters.params, strict=True):
            own = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            param.data = own.copy_(param.detach())
