"""Buckets with their optimizers, which the user's factories make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from decent_dp._sizes import MIB
from decent_dp.arguments import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, make_optimizer, make_scheduler
from decent_dp.engine import Bucket, Edit, Engine
from decent_dp.engine.layout import FlatBuffer
from decent_dp.optim.tracking import rule_for
from decent_dp.replica.construction import Settings
from decent_dp.replica.momenta import Momenta, tell_replicas
from decent_dp.replica.parameters import Parameters
from decent_dp.topo import Edge
from decent_dp.topo.edges import EdgeOfHook
from decent_dp.transport import Transport

__all__ = ["Builder", "DeferredList", "Unit"]

T = TypeVar("T")


# Rounds of a period for whose edges process groups are made, where the optimizer has a ``pre_average_hook``.
_MOST_ROUNDS = 64


class DeferredList(list[T]):
    """A list that is empty at first; indexing it too early raises an IndexError with advice.

    Args:
        why: the text of that error.
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
    """A bucket and its optimizer.

    Attributes:
        transport: of all workers.
    """

    bucket: Bucket
    optimizer: Optimizer
    scheduler: LRScheduler | None
    transport: Transport

    @property
    def buffer(self) -> FlatBuffer:
        return self.bucket.buffer

    def step(self) -> None:
        """Steps the optimizer and the scheduler."""
        with record_function("decent_dp.step"):
            self.optimizer.step()
        self.step_scheduler()

    def step_scheduler(self) -> None:
        """Steps the scheduler alone, for a step of the replica in which this bucket did not take part."""
        if self.scheduler is not None:
            self.scheduler.step()

    @cached_property
    def edit(self) -> Edit | None:
        """Calls the optimizer's ``pre_average_hook``, which may change the sum that is mixed in; None without such a hook."""
        hook = getattr(self.optimizer, "pre_average_hook", None)
        if hook is None:
            return None

        def edit(edge: Edge, others: list[Tensor]) -> None:
            try:
                for param, view in zip(self.buffer.params, others, strict=True):
                    param.comm_buffer = view  # type: ignore[attr-defined]
                hook(self._shown(edge), edge.weight)
            finally:
                for param in self.buffer.params:
                    del param.comm_buffer  # type: ignore[attr-defined]

        return edit

    def _shown(self, edge: Edge) -> Edge:
        """Returns the edge for a ``pre_average_hook``: its group is the user's, or was made for it."""
        if edge.group is not None:
            return edge
        return EdgeOfHook(edge.ranks, edge.weight, partial(self.transport.process_group_of, edge.ranks))


class Builder:
    """Makes units with the user's factories.

    Args:
        transport: of all workers, each of which holds a replica.
        as_view: whether parameters become views of one flat buffer per bucket.
    """

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        parameters: Parameters,
        settings: Settings,
        optim_fn: OPTIM_FN_TYPE,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
        *,
        as_view: bool,
    ) -> None:
        self._engine, self._transport, self._parameters, self._settings = engine, transport, parameters, settings
        self._optim_fn, self._lr_scheduler_fn, self._as_view = optim_fn, lr_scheduler_fn, as_view

    def lay_out(self, order: Sequence[int]) -> list[Unit]:
        """Returns new units; with ``as_view`` their parameters are views from now on.

        Args:
            order: parameter indices in bucket order.

        Raises:
            TypeError, ValueError: a factory returns something else than an optimizer or a scheduler of these parameters.
        """
        specs, params = self._parameters.specs, self._parameters.params
        units: list[Unit] = []
        for bucket in self._engine.lay_out(specs, params, order, self._settings.bucket_size_in_mb * MIB, as_view=self._as_view):
            named = [(slot.spec.name, params[slot.index]) for slot in bucket.buffer.plan.slots]
            optimizer = make_optimizer(self._optim_fn, named)
            tell_replicas([optimizer], self._transport.world_size)
            units.append(Unit(bucket, optimizer, make_scheduler(self._lr_scheduler_fn, optimizer), self._transport))
        if any(unit.edit is not None for unit in units):
            topology = self._engine.topology
            rounds = range(min(topology.period or 0, _MOST_ROUNDS))
            self._transport.make_groups(edge for t in rounds for edge in topology.round(t))
        return units

    def lay_out_momenta(self, units: Sequence[Unit], order: Sequence[int]) -> tuple[Momenta, list[Bucket]]:
        """Returns the tracked momenta of these optimizers, and new buckets for them.

        Raises:
            ValueError: the momentum of an optimizer is not known, or one asks for the rule that the wrapper was not given.
        """
        engine, optimizers = self._engine, [unit.optimizer for unit in units]
        if rule_for(engine.rule, optimizers) is not engine.rule:
            raise ValueError(
                "GossipAdamW(tracking=True) needs the rule here, too: DecentralizedDataParallel(..., rule=MomentumTracking())."
            )
        names = dict(zip(map(id, self._parameters.params), self._parameters.names, strict=True))
        found, limit = Momenta(optimizers, names, engine.rule), self._settings.bucket_size_in_mb * MIB
        return found, engine.lay_out_momenta(found.specs, found.tensors, order if found.specs else (), limit, len(units))

    @torch.no_grad()
    def release(self) -> None:
        """Gives each parameter its own storage again.

        A resumed run is exact only so: another alignment may make a kernel sum in another order.
        """
        if not self._as_view:
            return
        for spec, param in zip(self._parameters.specs, self._parameters.params, strict=True):
            own = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            param.data = own.copy_(param.detach())
