"""What happens to a bucket in an update: finish the exchange under way, step, start the next one.

The three are separate, so that they can be put in either order: overlapped (finish, step, start) or synchronous (step, start,
finish), and so that a round can go by without a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from decent_dp.bucket import Block, BucketPlan
from decent_dp.mixing import Gossip, MixRule
from decent_dp.topo import Edge, Topology
from decent_dp.transport import Handle, Label, Transport

__all__ = ["LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "Bucket", "Engine", "make_bucket"]

OPTIM_FN_TYPE = Callable[[list[tuple[str, Tensor]]], Optimizer]
LR_SCHEDULER_FN_TYPE = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class _UnderWay:
    """An exchange that was started: what is finished is what was started."""

    edge: Edge
    handle: Handle


class Bucket:
    """A block of parameters with its optimizer and, maybe, an exchange under way."""

    def __init__(self, index: int, block: Block, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        self.index = index
        self.block = block
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.under_way: _UnderWay | None = None
        # Parameters (by id) whose part of the difference under way belongs to values that are gone.
        self.disowned: set[int] = set()
        self.pre_average_hook: Callable[[Edge, float], object] | None = getattr(optimizer, "pre_average_hook", None)


def make_bucket(
    index: int,
    plan: BucketPlan,
    params: Sequence[Parameter],
    optim_fn: OPTIM_FN_TYPE,
    lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
    *,
    as_view: bool,
) -> Bucket:
    """Lays a bucket out and calls the user's factories for it.

    Raises:
        TypeError, ValueError: the factories do not return what they should.
    """
    block = Block(plan, params, as_view=as_view)
    optimizer: Any = optim_fn([(name, param) for name, param in zip(block.names, block.params, strict=True)])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optim_fn must return a torch.optim.Optimizer, got {optimizer!r}. Is a `return` missing in it?")
    _check_taken(optimizer, block)
    return Bucket(index, block, optimizer, None if lr_scheduler_fn is None else _make_scheduler(lr_scheduler_fn, optimizer))


def _check_taken(optimizer: Optimizer, block: Block) -> None:
    """An optimizer must take each of its bucket's parameters once, and no other."""
    counts = Counter(id(param) for group in optimizer.param_groups for param in group["params"])
    for param, name in zip(block.params, block.names, strict=True):
        count = counts.pop(id(param), 0)
        if count != 1:
            raise ValueError(
                f"optim_fn {'takes twice' if count else 'leaves out'} parameter '{name}': each of the (name, parameter) pairs "
                "that it is given must be in exactly one parameter group. Freeze parameters that are not to train "
                "(requires_grad_(False)) before wrapping the model."
            )
    if counts:
        raise ValueError(
            f"optim_fn returned an optimizer with {len(counts)} parameters that it was not given: it must take exactly the "
            "(name, parameter) pairs of its argument, and is called once a bucket."
        )


def _make_scheduler(lr_scheduler_fn: LR_SCHEDULER_FN_TYPE, optimizer: Optimizer) -> LRScheduler:
    scheduler: Any = lr_scheduler_fn(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "lr_scheduler_fn returned a ReduceLROnPlateau, which waits for a metric, and the wrapper steps schedulers by the "
            "update. Return one that counts steps, or none and set the rate in model.optimizers yourself."
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"lr_scheduler_fn must return a torch.optim.lr_scheduler.LRScheduler, got {scheduler!r}. Is a `return` missing "
            "in it?"
        )
    return scheduler


class Engine:
    """Carries updates out, bucket by bucket.

    Attributes:
        round: of the update that is under way or comes next; counts updates, also those that a scaler skipped.
        steps: optimizer steps taken.
        factor: the adaptive factor γ.
        bytes_sent: put on the wire by this worker for exchanges.
    """

    def __init__(self, transport: Transport, topology: Topology) -> None:
        self._transport = transport
        self._topology = topology
        self._rule: MixRule = Gossip()
        self.buckets: list[Bucket] = []
        self.round = 0
        self.steps = 0
        self.factor = 1.0
        self.bytes_sent = 0

    def disown(self, params: Iterable[Parameter] | None = None) -> None:
        """The values of ``params`` (None: of all) were replaced: the difference under way is not added to the new ones."""
        chosen = None if params is None else {id(param) for param in params}
        for bucket in self.buckets:
            if bucket.under_way is not None:
                own = {id(param) for param in bucket.block.params}
                bucket.disowned |= own if chosen is None else own & chosen

    @torch.no_grad()
    def finish(self, bucket: Bucket) -> None:
        """Waits for the exchange under way, if there is one, and mixes."""
        under_way, bucket.under_way = bucket.under_way, None
        if under_way is None:
            return
        under_way.handle.wait()
        disowned, bucket.disowned = bucket.disowned, set()
        if len(disowned) < len(bucket.block.params):
            self._mix(bucket, under_way.edge, disowned)

    def step(self, bucket: Bucket) -> None:
        """The optimizer's step and the scheduler's; parameters without a gradient stay as they are."""
        bucket.optimizer.step()
        self.pass_step(bucket)

    def pass_step(self, bucket: Bucket) -> None:
        """The scheduler's step alone: the replica has taken a step in which this bucket could not take part."""
        if bucket.scheduler is not None:
            bucket.scheduler.step()

    @torch.no_grad()
    def start(self, bucket: Bucket) -> None:
        """Puts the parameters on the wire for the current round."""
        edge = self._topology.get_edge(self.round)
        if len(edge.ranks) == 1:
            return
        self._rule.propose(bucket.block.own, bucket.block.sent)
        sent, received = bucket.block.envelopes
        handle = self._transport.exchange.start(edge, sent, received, Label(self.round, bucket.index))
        self.bytes_sent += handle.bytes_sent
        bucket.under_way = _UnderWay(edge, handle)

    def wait_all(self) -> None:
        """Finishes what is on the wire and drops it."""
        self.disown()
        errors = []
        for bucket in self.buckets:
            try:
                self.finish(bucket)
            except Exception as error:
                errors.append(error)  # the others still have to be waited for
        if errors:
            raise errors[0]

    def _mix(self, bucket: Bucket, edge: Edge, disowned: set[int]) -> None:
        block = bucket.block
        sent, received = block.envelopes
        if disowned:
            for param, mine, theirs in zip(block.params, block.views(sent), block.views(received), strict=True):
                if id(param) in disowned:
                    theirs.copy_(mine)  # no difference: the new value stays
        if bucket.pre_average_hook is not None:
            self._call_hook(bucket, edge)
        self._rule.mix(block.own, block.sent, block.others, self.factor * (1.0 - edge.weight))
        block.written()

    def _call_hook(self, bucket: Bucket, edge: Edge) -> None:
        """Lets the optimizer see, and change, the weighted sum over the others before it is mixed in."""
        assert bucket.pre_average_hook is not None
        others, pull = bucket.block.envelopes[1], 1.0 - edge.weight
        others.payload.mul_(pull)
        params: list[Any] = list(bucket.block.params)
        try:
            for param, view in zip(params, bucket.block.views(others), strict=True):
                param.comm_buffer = view
            bucket.pre_average_hook(edge, edge.weight)
        finally:
            for param in params:
                del param.comm_buffer
        if pull:
            others.payload.div_(pull)
