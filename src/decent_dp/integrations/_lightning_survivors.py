"""The collectives of both Lightning strategies: with ``faults``, among the workers that live."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from decent_dp import Gossip
from decent_dp.integrations._lightning_common import Strategy
from decent_dp.integrations._survivors import SurvivorCollectives
from decent_dp.transport import Control

__all__ = ["LightningOverSurvivors"]

T = TypeVar("T")


class LightningOverSurvivors(Strategy):  # type: ignore[misc]
    """The part of both strategies that Lightning makes its collectives with. It comes before a DDPStrategy.

    Without ``faults`` they are those of the process group. With it they are those of the living workers while there is a
    replica in training. After that, if a worker is gone, each one is on its own.
    """

    # Of the replica that was last in training, if it tolerates deaths.
    _last_control: Control | None = None
    # The collectives of a replica, by which they are numbered.
    _of_replica: tuple[Gossip, SurvivorCollectives] | None = None

    def current_replica(self) -> Gossip | None:
        """The replica over whose connections the workers speak; None if none is in training."""
        raise NotImplementedError

    def survivors(self) -> SurvivorCollectives | None:
        """The workers of a collective; None for those of the process group."""
        replica = self.current_replica()
        if replica is not None:
            self._last_control = replica.survivors
        control = self._last_control
        if control is None or (replica is None and len(control.ranks) == self.world_size):
            return None
        if replica is None:
            return self.alone(control.ranks)
        if self._of_replica is None or self._of_replica[0] is not replica:
            self._of_replica = replica, SurvivorCollectives(self.global_rank, replica, regrouped=self._take_over)
        return self._of_replica[1]

    def alone(self, ranks: Sequence[int]) -> SurvivorCollectives:
        """The collectives of this worker only; ``ranks``: of those that live."""
        return SurvivorCollectives(self.global_rank, None, ranks, regrouped=self._take_over)

    @property
    def has_lost_workers(self) -> bool:
        """Whether a worker is gone, so that the process group cannot be used any more."""
        survivors = self.survivors()
        return survivors is not None and len(survivors.ranks) < self.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes files and logs: the first one that lives."""
        survivors = self.survivors()
        return bool(self.global_rank == (0 if survivors is None else survivors.ranks[0]))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This worker's share of the data; among the living workers when a data loader is made anew."""
        survivors = self.survivors()
        if survivors is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        rank, number = survivors.position
        return {"num_replicas": number, "rank": rank}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        survivors = self.survivors()
        if survivors is None:
            super().barrier(*args, **kwargs)
        else:
            survivors.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        survivors = self.survivors()
        found: T = super().broadcast(obj, src) if survivors is None else survivors.broadcast(obj, src)
        return found

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        survivors = self._survivors_of(group)
        if survivors is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        survivors.reduce_(tensor, "sum" if reduce_op is None else reduce_op)
        return tensor

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._survivors_of(group) is None or not isinstance(tensor, Tensor):
            return super().all_reduce(tensor, group, reduce_op)
        return self.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Shape (living workers, ...). Raises ValueError for ``sync_grads``, with faults."""
        survivors = self._survivors_of(group)
        if survivors is None:
            found: Tensor = super().all_gather(tensor, group, sync_grads)
            return found
        if sync_grads:
            raise ValueError(
                "all_gather(sync_grads=True) sends gradients to other workers, which faults= does not: leave it out"
            )
        return torch.stack(self.gather_tensors(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        survivors = self.survivors()
        if survivors is None:
            return bool(super().reduce_boolean_decision(decision, all))
        decisions = survivors.gather(bool(decision))
        return False not in decisions if all else True in decisions

    def gather_tensors(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """The tensors of all workers, for torchmetrics."""
        survivors = self._survivors_of(group)
        if survivors is None:
            found: list[Tensor] = gather_all_tensors(tensor, group)
            return found
        return [own.to(tensor.device) for (own,) in survivors.gather_tensors([tensor])]

    @contextlib.contextmanager
    def survivor_metrics(self, module: nn.Module) -> Iterator[None]:
        """Inside, the metrics of torchmetrics in ``module`` gather among the living workers."""

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return self.gather_tensors(tensor, group)

        changed = [part for part in module.modules() if isinstance(part, Metric) and part.dist_sync_fn is None]
        for metric in changed:
            metric.dist_sync_fn = gather  # not the method: a copy of the metric would copy this strategy
        try:
            yield
        finally:
            for metric in changed:
                metric.dist_sync_fn = None

    def _survivors_of(self, group: Any) -> SurvivorCollectives | None:
        """Of a collective of this group. A smaller one is the user's own, and a worker on its own makes none."""
        survivors = self.survivors()
        of_all = group is None or group is dist.group.WORLD
        return survivors if of_all or (survivors is not None and survivors.is_alone) else None

    def _take_over(self) -> None:
        """The first living worker logs, if worker 0 is gone."""
        if self.is_global_zero:
            rank_zero_only.rank = 0
