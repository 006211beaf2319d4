"""Process groups of torch: of the workers of a node, of an edge, and of a mesh."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from decent_dp._sizes import MIB
from decent_dp.topo import Edge

__all__ = ["EdgeGroups", "NodeGroup", "gather_in_mesh", "group_of_replicas", "inside_ddp", "ranks_in", "timeout_of"]

# Bytes that are gathered together; they bound the extra memory.
_CHUNK = 32 * MIB

# Its name since torch 2.13.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def inside_ddp(model: Any) -> tuple[Any, Any]:
    """The module in DistributedDataParallel, and its process group; of ``replicate`` the same module; else the model, None."""
    if isinstance(model, DistributedDataParallel):
        return model.module, model.process_group if dist.get_world_size(model.process_group) > 1 else None
    if any(kind.__module__ == "torch.distributed._composable.replicate" for kind in type(model).__mro__):
        from torch.distributed._composable.replicate import replicate

        state: Any = replicate.state(model)
        group = state._init_kwargs.get("process_group") if state._init_kwargs else state._ddp.process_group
        return model, group or dist.group.WORLD
    return model, None


def ranks_in(group: Any, process_group: Any = None) -> list[int]:
    """The ranks of the workers of ``group`` in ``process_group`` (None: the default one), or -1. None has no workers."""
    if group is None:
        return []
    known = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    return [known.index(rank) if rank in known else -1 for rank in dist.get_process_group_ranks(group)]


# Made before, by ranks and by the group of all: each has threads, connections, and memory on a GPU.
_made: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _group_of(ranks: Sequence[int], of_all: Any) -> Any:
    """The process group of these ranks of the default group, which call this together."""
    parent, group = _made.get(tuple(ranks), (None, None))
    if parent is not of_all:
        timeout, backend = timeout_of(of_all), dist.get_backend(of_all)
        # The workers of a node are in as many groups: with other numbers this would wait for ever (torch 2.13).
        group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
        _made[tuple(ranks)] = of_all, group
    return group


class EdgeGroups:
    """Process groups for the hooks of the user's that a mix calls.

    Args:
        of_all: the process group of all workers; None: there are none.
    """

    def __init__(self, of_all: Any = None) -> None:
        self._of_all = of_all
        self._made: dict[tuple[int, ...], Any] = {}

    def make(self, edges: Iterable[Edge]) -> None:
        """Makes one for each of these edges. Called by all workers together."""
        # All processes of the default group have to call new_group. With use_local_synchronization=True its members alone do,
        # but its name depends on how many groups each of them is in: if they differ, it waits for ever (torch 2.13).
        if self._of_all is not None and self._of_all is dist.group.WORLD:
            for ranks in sorted({tuple(sorted(edge.ranks)) for edge in edges if edge.group is None} - self._made.keys()):
                if 1 < len(ranks) < dist.get_world_size():
                    self._made[ranks] = dist.new_group(list(ranks), timeout_of(self._of_all))

    def of(self, ranks: Sequence[int]) -> Any:
        """The process group of all workers, or one of ``make``; None if there is none."""
        if self._of_all is None or len(ranks) == dist.get_world_size(self._of_all):
            return self._of_all
        return self._made.get(tuple(sorted(ranks)))


def group_of_replicas(process_group: Any, own_ranks: Sequence[int]) -> Any:
    """The process group of all workers of all replicas, for the argument ``process_group`` of ``gossip()``.

    With replicas of several workers that may be the group of the workers at one position of all, as a mesh gives it.

    Args:
        own_ranks: of the workers of this one's replica, in the default group; none if it has a whole one.
    """
    if process_group is None or not own_ranks or dist.get_rank(process_group) < 0:
        return process_group
    given = dist.get_process_group_ranks(process_group)
    replicas: list[list[int]] = [[]] * len(given)
    dist.all_gather_object(replicas, list(own_ranks), group=process_group)
    ranks = sorted(itertools.chain(*replicas))
    one_of_each = all(set(given) & set(own) == {rank} for rank, own in zip(given, replicas, strict=True))
    if not one_of_each or len(set(ranks)) < len(ranks) or len(ranks) == len(given):
        return process_group
    if len(ranks) == dist.get_world_size():
        return None
    made: Any = dist.new_group(
        ranks, timeout_of(process_group), dist.get_backend(process_group), use_local_synchronization=True
    )
    return made


def gather_in_mesh(mesh: Any, value: Any) -> list[Any]:
    """The values of the workers of a device mesh, in no particular order, over its process groups. All of them call it."""
    found = [value]
    for group in mesh.get_all_groups():
        parts: list[list[Any]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
        found = list(itertools.chain(*parts))
    return found


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of a process group's collectives."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            backend: Any = group._get_backend(torch.device(device))  # type: ignore[union-attr]
            return timedelta(seconds=backend.options._timeout.total_seconds())
    return default_pg_timeout


class NodeGroup:
    """The process group of the workers of a node, all of which call each method together.

    Args:
        ranks: of these workers in the run, in ascending order.
        process_group: of all workers of the run, or of these alone, as in a process that joins; None for the default group.
        averages: whether gradients are averaged over ``process_group`` already.
        joins_as: the rank in the run of a process that joins it. Its process group may be of several nodes that do.

    Attributes:
        size: the number of workers.
    """

    def __init__(
        self, ranks: Sequence[int], process_group: Any = None, *, averages: bool = False, joins_as: int | None = None
    ) -> None:
        if not dist.is_initialized():  # in a process that joins a run
            raise RuntimeError(
                "the workers of a node that joins a run need a process group of their own: start all of them together "
                "(torchrun --nproc-per-node), and call initialize_dist() before decent_dp.join(..., rank=...)."
            )
        self._group: Any = process_group or dist.group.WORLD
        of_all = dist.get_process_group_ranks(self._group)
        in_run = list[Any](range(len(of_all)))
        if joins_as is not None:
            dist.all_gather_object(in_run, joins_as, group=self._group)
            if [rank for rank in in_run if rank in ranks] != list(ranks):
                raise ValueError(
                    f"the processes that join have the ranks {in_run} in the run, in the order of their process group, and a "
                    f"node there is the workers {list(ranks)}: start the workers of a node together, in this order "
                    "(decent_dp.join(rank=...))."
                )
        if len(ranks) < len(of_all):
            self._group = _group_of([of_all[in_run.index(rank)] for rank in ranks], self._group)
        self._position, self.size = dist.get_rank(self._group), len(ranks)
        self.averages = averages

    @staticmethod
    def _numbers(tensor: Tensor) -> Tensor:
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    def sum_(self, tensor: Tensor) -> Any:
        """Starts to replace the tensor by the sum over the workers; returns what has to be waited for."""
        return dist.all_reduce(self._numbers(tensor), group=self._group, async_op=True)

    @property
    def backend(self) -> str:
        found = str(dist.get_backend(self._group))
        return "gloo or nccl" if found == "undefined" else found  # by device

    def gather_values(self, value: Any) -> list[Any]:
        """The values of all workers, in the order of their ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Each worker gets those of the one at position ``source``. They may be on the CPU where the group is of GPUs."""
        only_cuda = self.backend == "nccl"
        for tensor in tensors:
            there = (tensor.cuda() if only_cuda else tensor.detach()).contiguous()
            # As bytes: gloo does not know every dtype.
            dist.broadcast(there.reshape(-1).view(torch.uint8), group=self._group, group_src=source)
            if there.data_ptr() != tensor.data_ptr():
                tensor.copy_(there)

    @torch.no_grad()
    def gather(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Each worker has its own shares of some tensors, and gets those of the others.

        Args:
            shares: for each tensor those of all workers, in the order of their ranks; dense, of any dtypes on one device.
        """
        chunk: list[Sequence[Tensor]] = []
        size = 0
        for tensor in shares:
            nbytes = sum(share.nbytes for share in tensor)
            if chunk and (size + nbytes > _CHUNK or _kind(tensor[0]) != _kind(chunk[0][0])):
                self._gather_chunk(chunk)
                chunk, size = [], 0
            chunk.append(tensor)
            size += nbytes
        if chunk:
            self._gather_chunk(chunk)

    def _gather_chunk(self, shares: Sequence[Sequence[Tensor]]) -> None:
        lengths = [sum(tensor[position].numel() for tensor in shares) for position in range(self.size)]
        like, longest = shares[0][0], max(lengths)
        gathered = torch.empty(self.size * longest, dtype=like.dtype, device=like.device)
        parts = [gathered[position * longest :][:length] for position, length in enumerate(lengths)]
        own = torch.zeros(longest, dtype=like.dtype, device=like.device)
        torch.cat([tensor[self._position].reshape(-1) for tensor in shares], out=own[: lengths[self._position]])
        _all_gather(gathered, own, group=self._group)
        for position, part in enumerate(parts):
            if position != self._position:
                mine = [tensor[position] for tensor in shares]
                pieces = torch.split(part, [share.numel() for share in mine])
                torch._foreach_copy_(mine, [piece.view(share.shape) for piece, share in zip(pieces, mine, strict=True)])


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device
