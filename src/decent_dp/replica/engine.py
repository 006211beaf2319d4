"""What happens to a bucket in an update: finish the exchange under way, step, start the next one.

The three are separate, so that they can be put in either order: overlapped (finish, step, start) or synchronous (step, start,
finish), and so that a round can go by without a step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from decent_dp.bucket import Block, BucketPlan
from decent_dp.errors import PeerLostError
from decent_dp.handed import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, make_optimizer, make_scheduler
from decent_dp.mixing import Gossip, MixRule
from decent_dp.topo import Edge, Topology
from decent_dp.transport import Handle, Label, Parcel, Transport
from decent_dp.wire import Item, Wire

__all__ = ["Bucket", "Engine", "make_bucket"]


@dataclass(frozen=True)
class _UnderWay:
    """An exchange that was started: what is finished is what was started.

    Attributes:
        announced: what this worker had told its members for it.
    """

    edge: Edge
    handle: Handle
    announced: bytes


class Bucket:
    """A block of parameters with its wire, its optimizer and, maybe, an exchange under way.

    ``number`` stands in its messages: that of no other bucket that this wrapper has made.
    """

    def __init__(
        self, number: int, block: Block, wire: type[Wire], optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> None:
        self.number = number
        self.block = block
        self.optimizer = optimizer
        self.scheduler = scheduler
        slots, plan = block.plan.slots, block.plan
        if wire.by_parameter or block.flat is None:
            items = [Item(slot.index, slot.spec.numel) for slot in slots]
        else:
            items = [Item(slots[0].index, plan.numel)]
        self.wire = wire(items, plan.dtype, plan.device)
        # Made at the first exchange: a worker that never has one (n = 1) pays nothing.
        self._messages: tuple[Tensor, Tensor] | None = None
        # What this worker has told the members of its next edge.
        self.announced: bytes | None = None
        self.under_way: _UnderWay | None = None
        # Parameters (by id) whose part of the difference under way belongs to values that are gone.
        self.disowned: set[int] = set()
        self.pre_average_hook: Callable[[Edge, float], object] | None = getattr(optimizer, "pre_average_hook", None)

    @property
    def values(self) -> list[Tensor]:
        """The parameters' values as the wire's items."""
        return self.block.flat_values(by_parameter=self.wire.by_parameter)

    @property
    def messages(self) -> tuple[Tensor, Tensor]:
        """What is sent and what is received."""
        if self._messages is None:
            device, nbytes = self.block.plan.device, self.wire.nbytes
            sent, received = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
            self._messages = sent, received
        return self._messages

    # -- a run that is stopped, and goes on -----------------------------------------------------------------------------

    def held(self) -> dict[str, dict[str, Tensor]]:
        """By parameter name, what an exchange needs beside the parameters: of the messages, and of what was told.

        The entries of a parameter do not depend on the bucket that it is in:

            sent       what is under way of it: codes, 1-D, in the order of its memory; and ``records``, see the wire
            told       what was announced for the exchange under way, int8
            announced  what was announced for the round that comes, int8
            ranges     what the wire has learnt, float64 of shape (runs, 4)

        A wire without records, announcements or a memory has no such entries, and what is not under way is not there.
        Tensors on the bucket's device may be parts of the message: good until the next exchange starts.
        """
        wire, by_item = self.wire, self.wire.memory()
        texts = {"told": None if self.under_way is None else self.under_way.announced, "announced": self.announced}
        for key, text in texts.items():
            if text is not None and wire.announces:
                for entries, part in zip(by_item, wire.announcement_by_item(text), strict=True):
                    entries[key] = part
        if self.under_way is not None:
            for entries, parts in zip(by_item, wire.take_apart(self.messages[0]), strict=True):
                entries.update(parts)
        if len(by_item) < len(self.block.names):  # one of all, on a wire that only has codes
            sent, slots = by_item[0].get("sent"), self.block.plan.slots
            by_item = [{} if sent is None else {"sent": sent[slot.offset : slot.offset + slot.spec.numel]} for slot in slots]
        return dict(zip(self.block.names, by_item, strict=True))

    def hold(self, by_name: Mapping[str, Mapping[str, Tensor]], *, under_way: bool) -> bytes | None:
        """Takes back what ``held`` returned, maybe of other buckets.

        Args:
            under_way: an exchange is to go on.

        Returns:
            What was announced for the exchange under way; None: there is none.

        Raises:
            ValueError: something is missing, or of another shape or dtype; names the parameter.
        """
        wire, device = self.wire, self.block.plan.device
        entries = [
            _checked(slot.spec.name, by_name.get(slot.spec.name, {}), wire.entries(slot.spec.numel, under_way=under_way))
            for slot in self.block.plan.slots
        ]
        if wire.announces:
            self.announced = wire.announcement_of([entry["announced"] for entry in entries])
            wire.remember(entries)
        if not under_way:
            return None
        parts: list[Mapping[str, Tensor]] = [{**entry, "sent": entry["sent"].to(device)} for entry in entries]
        if len(wire.items) < len(parts):
            parts = [{"sent": torch.cat([part["sent"] for part in parts])}]
        wire.put_together(parts, self.messages[0])
        return wire.announcement_of([entry["told"] for entry in entries]) if wire.announces else b""


def _checked(
    name: str, entries: Mapping[str, Tensor], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> Mapping[str, Tensor]:
    for key, (shape, dtype) in wanted.items():
        found = entries.get(key)
        if found is None or tuple(found.shape) != shape or found.dtype != dtype:
            was = "is missing" if found is None else f"is {tuple(found.shape)} {found.dtype}"
            raise ValueError(f"'{key}' of the exchange of parameter '{name}' {was}, and should be {shape} {dtype}")
    return entries


def make_bucket(
    number: int,
    plan: BucketPlan,
    params: Sequence[Parameter],
    wire: type[Wire],
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
    optimizer = make_optimizer(optim_fn, list(zip(block.names, block.params, strict=True)))
    return Bucket(number, block, wire, optimizer, make_scheduler(lr_scheduler_fn, optimizer))


class Engine:
    """Carries updates out, bucket by bucket.

    Attributes:
        round: of the update that is under way or comes next; counts updates, also those that a scaler skipped
            and those before a restart, whose number ``load_optim_state_dict`` sets.
        steps: optimizer steps taken.
        factor: the adaptive factor γ.
        exchanges: finished, of single buckets.
        bytes_sent: put on the wire by this worker for exchanges.
        waited: seconds that the training thread has waited for exchanges.
        started: the last round whose exchanges these buckets have started, idle ones included; None: none yet.
    """

    def __init__(self, transport: Transport, topology: Topology) -> None:
        self._transport = transport
        self._topology = topology
        self._rule: MixRule = Gossip()
        self.buckets: list[Bucket] = []
        self.round = 0
        self.steps = 0
        self.factor = 1.0
        self.exchanges = 0
        self.bytes_sent = 0
        self.waited = 0.0
        self.started: int | None = None
        # Of buckets that are gone.
        self._rejected = 0

    @property
    def rejected(self) -> int:
        """Runs whose difference a wire could not tell."""
        return self._rejected + sum(bucket.wire.rejected for bucket in self.buckets)

    def install(self, buckets: list[Bucket]) -> None:
        """These take the place of all buckets that there were, which have nothing under way."""
        self._rejected = self.rejected
        self.buckets, self.started = buckets, None

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
        before = time.perf_counter()
        with record_function("decent_dp.wait"):
            under_way.handle.wait()
        self.waited += time.perf_counter() - before
        self.exchanges += 1
        disowned, bucket.disowned = bucket.disowned, set()
        if len(disowned) < len(bucket.block.params):
            with record_function("decent_dp.mix"):
                self._mix(bucket, under_way.edge, disowned)

    def step(self, bucket: Bucket) -> None:
        """The optimizer's step and the scheduler's; parameters without a gradient stay as they are."""
        with record_function("decent_dp.step"):
            bucket.optimizer.step()
        self.pass_step(bucket)

    def pass_step(self, bucket: Bucket) -> None:
        """The scheduler's step alone: the replica has taken a step in which this bucket could not take part."""
        if bucket.scheduler is not None:
            bucket.scheduler.step()

    @torch.no_grad()
    def start(self, bucket: Bucket) -> None:
        """Puts the parameters on the wire for the current round."""
        edge, label = self._topology.get_edge(self.round), Label(self.round, bucket.number)
        announced = self._announce(bucket, edge, label) if bucket.wire.announces else b""
        self.started = self.round
        if len(edge.ranks) > 1:
            self._send(bucket, edge, label, announced)

    @torch.no_grad()
    def start_again(self, bucket: Bucket, told: bytes) -> None:
        """Puts on the wire, for the round before, what the bucket's message holds of a run that was stopped.

        Args:
            told: what had been announced for it.
        """
        edge, label = self._topology.get_edge(self.round - 1), Label(self.round - 1, bucket.number)
        if bucket.wire.announces:
            self._transport.exchange.announce(edge, label, told)
        self._send(bucket, edge, label, told, coded=True)

    def announce_again(self, bucket: Bucket) -> None:
        """Tells the coming edge what was announced to it in a run that was stopped."""
        if bucket.wire.announces and bucket.announced is not None:
            self._announce_ahead(bucket, self.round, bucket.announced)

    def _send(self, bucket: Bucket, edge: Edge, label: Label, announced: bytes, *, coded: bool = False) -> None:
        sent, received = bucket.messages
        values = self._rule.propose(bucket.values)
        parcel = Parcel(bucket.wire, values, sent, received, announced, self._transport.rank, label, coded)
        handle = self._transport.exchange.start(edge, parcel)
        self.bytes_sent += handle.bytes_sent
        bucket.under_way = _UnderWay(edge, handle, announced)

    def _announce(self, bucket: Bucket, edge: Edge, label: Label) -> bytes:
        """Tells the next edge what it must know, and returns what this one was told."""
        exchange, values = self._transport.exchange, bucket.values
        now = bucket.announced
        if now is None:  # the first round of this run, which may be any: told just in time
            now = bucket.wire.announcement(values)
            if len(edge.ranks) > 1:
                exchange.announce(edge, label, now)
        bucket.announced = bucket.wire.announcement(values)
        self._announce_ahead(bucket, self.round + 1, bucket.announced)
        return now

    def _announce_ahead(self, bucket: Bucket, round_: int, text: bytes) -> None:
        coming = self._topology.get_edge(round_)
        if len(coming.ranks) > 1:
            # Who has made its last update may be gone already. If that round comes, its exchange says so.
            with contextlib.suppress(PeerLostError):
                self._transport.exchange.announce(coming, Label(round_, bucket.number), text)

    def let_go(self) -> None:
        """Returns once the parameters may be written to by anybody: what is to be sent of them has been read."""
        for bucket in self.buckets:
            if bucket.under_way is not None:
                bucket.under_way.handle.let_go()

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
        size, pull = len(edge.ranks), self.factor * (1.0 - edge.weight)
        # Of a group the mean of all has come: the mean of the others is as much further away.
        scale = 1.0 if size == 2 else size / (size - 1)
        kept = [(param, param.detach().clone()) for param in bucket.block.params if id(param) in disowned]
        values, wire = bucket.values, bucket.wire
        if bucket.pre_average_hook is not None:
            self._mix_with_hook(bucket, edge, scale)
        else:
            for run, difference, unit in wire.differences(*bucket.messages):
                self._rule.mix([values[run.item][run.start : run.stop]], [difference], pull * scale * unit)
        for param, value in kept:
            param.copy_(value)
        bucket.block.written()

    def _mix_with_hook(self, bucket: Bucket, edge: Edge, scale: float) -> None:
        """As ``_mix``, and lets the optimizer see, and change, the weighted sum over the others before it is mixed in."""
        assert bucket.pre_average_hook is not None
        plan, values, pull = bucket.block.plan, bucket.values, 1.0 - edge.weight
        others = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device)
        own = torch.empty_like(others)
        firsts = [0]
        for item in bucket.wire.items:
            firsts.append(firsts[-1] + item.numel)

        def place(flat: Tensor, item: int, start: int, stop: int) -> Tensor:
            return flat[firsts[item] + start : firsts[item] + stop]

        for run, proposal in bucket.wire.proposals(values, bucket.messages[0]):
            for flat in (own, others):
                place(flat, run.item, run.start, run.stop).copy_(proposal)
        for run, difference, unit in bucket.wire.differences(*bucket.messages):
            place(others, run.item, run.start, run.stop).add_(difference, alpha=scale * unit)
        others.mul_(pull)
        params: list[Any] = list(bucket.block.params)
        try:
            for param, view in zip(params, bucket.block.views(others), strict=True):
                param.comm_buffer = view
            bucket.pre_average_hook(edge, edge.weight)
        finally:
            for param in params:
                del param.comm_buffer
        if pull:
            others.div_(pull)
        for number, value in enumerate(values):
            difference = place(others, number, 0, len(value)) - place(own, number, 0, len(value))
            self._rule.mix([value], [difference], self.factor * pull)
