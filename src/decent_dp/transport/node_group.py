"""The collectives of the workers of one node, which are one replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from decent_dp._sizes import MIB
from decent_dp.transport.rendezvous import timeout_of

__all__ = ["NodeGroup", "inside_ddp", "ranks_in"]

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
