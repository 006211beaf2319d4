"""Bucket layout: a plan that assigns parameters to buckets, and the flat buffer of each bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from decent_dp._sizes import choose_sizes
from decent_dp.topo import Topology, schedule

__all__ = ["BucketPlan", "FlatBuffer", "Slot", "TensorSpec", "dense_stride", "plan_buckets", "plan_turns"]


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides of ``tensor`` in a buffer: its own if it is dense (channels_last, transposed), else contiguous."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape, dtype and device of a tensor, and its strides in a buffer, in elements.

    Attributes:
        whole: the number of elements of the tensor of which this one is a shard; None: it is whole.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    whole: int | None = None

    @classmethod
    def of(cls, name: str, tensor: Tensor, whole: int | None = None) -> TensorSpec:
        return cls(name, tuple(tensor.shape), dense_stride(tensor), tensor.dtype, tensor.device, whole)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def rows(self) -> int:
        """The rows of the matrix that its memory is: the size of its outermost dimension; 1 below two dimensions."""
        if len(self.shape) < 2 or not self.numel:
            return 1
        return max(zip(self.stride, self.shape, strict=True), key=lambda dimension: (dimension[1] > 1, dimension[0]))[1]

    def check(self, tensor: Tensor) -> None:
        """Raises RuntimeError if ``tensor`` has another shape, dtype or device; strides may differ."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype or tensor.device != self.device:
            raise RuntimeError(
                f"parameter '{self.name}' was {self.shape} {self.dtype} on {self.device} when the workers agreed on the model, "
                f"and is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} now: convert or move the model before "
                "gossip() or the wrapper is called, and call it again after a change."
            )


@dataclass(frozen=True)
class Slot:
    """A tensor's place in a buffer: ``index`` into the specs, ``offset`` in elements."""

    index: int
    offset: int
    spec: TensorSpec

    def view(self, flat: Tensor) -> Tensor:
        """The tensor's view of ``flat`` (1-D, at least ``offset + numel`` long), with its own strides."""
        return flat.as_strided(self.spec.shape, self.spec.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class BucketPlan:
    """Tensors of one dtype and device, one after another in a flat buffer of ``numel`` elements."""

    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device


def plan_buckets(
    specs: Sequence[TensorSpec], order: Sequence[int], limit_bytes: float, first_bytes: float | None = None
) -> list[BucketPlan]:
    """Assigns tensors to buckets.

    Args:
        specs: the tensors.
        order: the indices of the tensors to assign, in this order.
        limit_bytes: upper size of a bucket in bytes. Tensors are never split; a larger one has its own bucket.
        first_bytes: upper size of the first tensor's bucket; None for the same.

    Returns:
        Buckets of one dtype and device each, in the order in which their last tensor comes in ``order``, so that a bucket
        is complete no later than the next.
    """
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    groups: list[list[int]] = []
    for index in order:
        spec = specs[index]
        kind, size = (spec.dtype, spec.device), spec.numel * spec.dtype.itemsize
        limit = first_bytes if first_bytes is not None and groups and filling.get(kind) is groups[0] else limit_bytes
        if kind not in filling or filled[kind] + size > limit:
            filling[kind], filled[kind] = [], 0
            groups.append(filling[kind])
        filling[kind].append(index)
        filled[kind] += size

    position = {index: place for place, index in enumerate(order)}
    groups.sort(key=lambda group: position[group[-1]])
    plans = []
    for group in groups:
        offsets = [0, *accumulate(specs[index].numel for index in group)]
        slots = tuple(Slot(index, offset, specs[index]) for index, offset in zip(group, offsets, strict=False))
        plans.append(BucketPlan(slots, offsets[-1], specs[group[0]].dtype, specs[group[0]].device))
    return plans


def plan_turns(
    specs: Sequence[TensorSpec], order: Sequence[int], limit_bytes: float, topology: Topology
) -> list[tuple[BucketPlan, Topology]]:
    """Assigns tensors to buckets, and gives each bucket the topology with its turn.

    With ``mix_every`` a tensor's turn depends on its place in reverse registration order and on the sizes of whole tensors. So
    numbers do not depend on the sizes of buckets, nor on ``order``, nor on how tensors are sharded.

    Args:
        specs, order, limit_bytes: as of ``plan_buckets``.
        topology: of the whole, which includes ``mix_every``.
    """
    if sorted(order) != list(range(len(specs))):
        raise ValueError(f"order must be a permutation of 0..{len(specs) - 1}, got {list(order)!r}")
    sizes = [(spec.numel if spec.whole is None else spec.whole) * spec.dtype.itemsize for spec in specs]
    total, h = max(1, sum(sizes)), schedule.stages_of(topology)[-1].every
    if h == 1:
        first, limit = choose_sizes(sum(spec.numel * spec.dtype.itemsize for spec in specs), limit_bytes)
        return [(plan, topology) for plan in plan_buckets(specs, order, limit, first)]
    # By slot: the bytes before it, and its tensors.
    slots: dict[int, tuple[int, set[int]]] = {}
    before = 0
    for index in reversed(range(len(specs))):
        slots.setdefault(min(h * before // total, h - 1), (before, set()))[1].add(index)
        before += sizes[index]
    position = {index: place for place, index in enumerate(order)}
    planned = []
    for start, members in slots.values():
        own = schedule.spread(topology, start, start + sum(sizes[index] for index in members), total)
        planned += [(plan, own) for plan in plan_buckets(specs, [i for i in order if i in members], limit_bytes)]
    return sorted(planned, key=lambda turn: max(position[slot.index] for slot in turn[0].slots))


class FlatBuffer:
    """The tensors of a bucket, which belong to the user and may get other storage.

    With ``as_view`` they become views of one flat tensor; otherwise they stay separate tensors, with the same numbers.

    Args:
        tensors: of all buckets, by the plan's indices. The caller may replace entries of this list before ``rebind``.
    """

    def __init__(self, plan: BucketPlan, tensors: Sequence[Tensor], *, as_view: bool) -> None:
        self.plan = plan
        self._tensors, self._chosen = tensors, [slot.index for slot in plan.slots]
        self.params: list[Tensor] = []
        self.names = [slot.spec.name for slot in plan.slots]
        self.flat = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device) if as_view else None
        self._strides = [slot.spec.stride for slot in plan.slots]
        # Addresses of the tensors at the last `rebind`.
        self._addresses: list[int] = []
        self._values: dict[bool, list[Tensor]] = {}
        self.rebind()

    def rebind(self) -> None:
        """Takes tensors whose storage was replaced since the last call back into the buffer, with their new values.

        Raises:
            RuntimeError: a tensor no longer has the shape, dtype or device that it had at construction.
        """
        tensors = self._tensors
        params = self.params = [tensors[index] for index in self._chosen]
        # This runs in every step. Whole lists are compared first, which is cheap.
        if (
            [p.data_ptr() for p in params] == self._addresses
            and [p.stride() for p in params] == self._strides
            and all(p.dtype is self.plan.dtype for p in params)
        ):
            return
        known = self._addresses or [-1] * len(params)
        for slot, param, address in zip(self.plan.slots, params, known, strict=True):
            spec = slot.spec
            same, turned = param.data_ptr() == address, param.stride() != spec.stride
            if same and not turned and param.dtype == spec.dtype:
                continue
            spec.check(param)
            if self.flat is not None:
                view = slot.view(self.flat)
                # In the same place with other strides, source and destination overlap.
                view.copy_(param.detach().clone() if same else param.detach())
                param.data = view
            elif turned:
                param.data = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(param)
        self._addresses = [p.data_ptr() for p in params]
        self._values.clear()

    def values(self, *, by_parameter: bool) -> list[Tensor]:
        """Returns the values as 1-D tensors in memory order: the flat tensor, or one per parameter if ``by_parameter``."""
        if by_parameter not in self._values:
            if self.flat is None:
                found = [p.detach().as_strided((p.numel(),), (1,), p.storage_offset()) for p in self.params]
            elif by_parameter:
                found = [self.flat[slot.offset : slot.offset + slot.spec.numel] for slot in self.plan.slots]
            else:
                found = [self.flat]
            self._values[by_parameter] = found
        return self._values[by_parameter]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns views of ``flat`` (1-D, with this layout), one per tensor, in its shape and strides."""
        return [slot.view(flat) for slot in self.plan.slots]

    def written(self) -> None:
        """Increments the tensors' versions, so that autograd detects stale saved tensors."""
        if self.flat is not None:
            torch.autograd.graph.increment_version(self.params)
