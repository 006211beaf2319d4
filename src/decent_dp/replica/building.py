"""Makes the buckets of a replica, and with them its optimizers: alike on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.bucket import MIB, choose_sizes, plan_buckets
from decent_dp.errors import OutOfStepError
from decent_dp.handed import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE
from decent_dp.replica.agree import agree, share, worker_counts
from decent_dp.replica.engine import Bucket, make_bucket
from decent_dp.replica.guard import Guard
from decent_dp.replica.settings import Settings
from decent_dp.replica.states import load_optim_state
from decent_dp.transport import Transport
from decent_dp.wire import WIRES

__all__ = ["Builder"]


class Builder:
    """Lays buckets out and calls the user's factories for them.

    Args:
        guard: knows the parameters.
        as_view: parameters become views of one flat block a bucket.

    Attributes:
        optimizers: one a bucket; empty while there are none.
        schedulers: one a bucket, or None where there is no factory.
        order: of the parameters, by number, from which the buckets were planned; None while there are none.
        pending: optimizer state that was loaded before there were buckets.
    """

    def __init__(
        self,
        guard: Guard,
        transport: Transport,
        settings: Settings,
        optim_fn: OPTIM_FN_TYPE,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
        *,
        as_view: bool,
    ) -> None:
        self._guard, self._transport, self._settings = guard, transport, settings
        self._optim_fn, self._lr_scheduler_fn, self._as_view = optim_fn, lr_scheduler_fn, as_view
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler | None] = []
        self.order: list[int] | None = None
        self.pending: dict[str, Any] | None = None
        # Buckets are numbered through, so that what was said of those that are gone is not taken for the new ones.
        self._made = 0

    @property
    def schedules(self) -> bool:
        """Whether there is a factory of schedulers."""
        return self._lr_scheduler_fn is not None

    def build(self, order: Sequence[int], round_: int) -> list[Bucket]:
        """At the first update: all workers lay out the same buckets, in worker 0's order of gradients."""
        control, rank = self._transport.control, self._transport.rank
        rounds = control.gather(round_)
        if len(set(rounds)) > 1:
            raise OutOfStepError(
                f"the first update is of different rounds ({worker_counts(rounds)}): the workers have loaded optimizer states "
                "of different rounds, or some have loaded none. Load on every worker what was saved at the same update."
            )
        first: list[int] = share(control, rank, list(order) if rank == 0 else None)
        whole = list(dict.fromkeys([*first, *range(len(self._guard.params))]))

        def make() -> list[Bucket]:
            buckets = self.lay_out(whole)
            if self.pending is not None:
                load_optim_state(buckets, self.pending)
            return buckets

        buckets = agree(control, make)
        self.pending = None
        self.install(buckets, whole)
        return buckets

    def lay_out(self, order: Sequence[int]) -> list[Bucket]:
        """New buckets, whose parameters lie in their blocks from now on; nothing else is changed before ``install``.

        Raises:
            TypeError, ValueError: the factories do not return what they should.
        """
        specs = self._guard.specs
        first, limit = choose_sizes(specs, self._settings.bucket_size_in_mb * MIB)
        wire, make = WIRES[self._settings.wire], (self._optim_fn, self._lr_scheduler_fn)
        return [
            make_bucket(self._made + i, plan, self._guard.params, wire, *make, as_view=self._as_view)
            for i, plan in enumerate(plan_buckets(specs, order, limit, first))
        ]

    @torch.no_grad()
    def release(self) -> None:
        """Each parameter lies on its own again, as before there were buckets: a place at another distance from the start of
        its memory may be reason enough for a kernel to sum in another order."""
        if not self._as_view:
            return
        for spec, param in zip(self._guard.specs, self._guard.params, strict=True):
            own = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            param.data = own.copy_(param.detach())

    def install(self, buckets: Sequence[Bucket], order: Sequence[int] | None) -> None:
        """These take the place of all buckets that there were."""
        self.order = None if order is None else list(order)
        self._made += len(buckets)
        # In place: users hold the lists.
        self.optimizers[:] = [bucket.optimizer for bucket in buckets]
        self.schedulers[:] = [bucket.scheduler for bucket in buckets]
