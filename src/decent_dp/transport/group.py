"""Edges of more than two: an all-reduce on a communicator of the edge's ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decent_dp.bucket import Envelope
from decent_dp.errors import WireError
from decent_dp.topo import Edge
from decent_dp.transport.base import Exchange, Handle, Label, Later
from decent_dp.transport.communicators import Communicator
from decent_dp.transport.pairwise import Explain, wait_for, written
from decent_dp.transport.waiter import Waiter

__all__ = ["Groups"]

# Elements of a piece where the sum cannot be taken in place: half a MiB of float32, which bounds the extra memory.
_PIECE = 2**17

# Round, bucket and the round's square are summed along with the payload, modulo this, so that sums of any group stay exact
# in float32. The square is for the member whose round happens to be the mean of the others'.
_MODULUS = 4096
_MARKS = 3


class Groups(Exchange):
    """Groups of workers, over gloo or NCCL.

    The sum over the group comes from an all-reduce; the mean of the *others* is ``(sum - own) / (m - 1)``. Sums are taken
    in float32 at least: in bfloat16 a sum of many workers would lose what distinguishes them, in float16 it would overflow.

    Args:
        connect: makes (or finds) the communicator of a group of ranks.
        on_device: the communicator reads the tensors where they are (NCCL); else they come to the CPU.
    """

    def __init__(
        self,
        rank: int,
        connect: Callable[[tuple[int, ...]], Communicator],
        waiter: Waiter,
        explain: Explain,
        *,
        on_device: bool,
    ) -> None:
        self._rank, self._connect, self._waiter, self._explain = rank, connect, waiter, explain
        self._on_device = on_device

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        ranks = tuple(sorted(edge.ranks))
        communicator = self._connect(ranks)
        ready = written(sent.raw)
        dtype = torch.promote_types(sent.payload.dtype, torch.float32)
        in_place = dtype == sent.payload.dtype and (self._on_device or not sent.raw.is_cuda)

        def move() -> None:
            ready()
            if in_place:
                _sum_in_place(communicator, sent, received, len(ranks), label)
            else:
                device = sent.raw.device if self._on_device else torch.device("cpu")
                _sum_in_pieces(communicator, sent.payload, received.payload, len(ranks), label, dtype, device)
            written(received.raw)()

        others = [rank for rank in ranks if rank != self._rank]
        future = self._waiter.submit(move)
        # A ring moves 2 (m - 1)/m of the payload out of every worker.
        moved = 2 * (len(ranks) - 1) * sent.payload.numel() * dtype.itemsize // len(ranks)
        return Later(lambda: wait_for(future, self._explain, others, label), moved)


def _sum_in_place(communicator: Communicator, sent: Envelope, received: Envelope, size: int, label: Label) -> None:
    received.payload.copy_(sent.payload)
    header = received.whole[: received.HEADER_BYTES // received.payload.dtype.itemsize]
    header.zero_()
    header[:_MARKS] = _mark(label, header)
    communicator.allreduce([received.whole]).wait()
    _check(header[:_MARKS], size, label)
    received.payload.sub_(sent.payload).div_(size - 1)


def _sum_in_pieces(
    communicator: Communicator,
    sent: Tensor,
    received: Tensor,
    size: int,
    label: Label,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    # A payload without elements still makes its call: every member counts calls alike.
    for piece, into in zip(torch.split(sent, _PIECE), torch.split(received, _PIECE), strict=True):
        total = torch.empty(_MARKS + piece.numel(), dtype=dtype, device=device)
        total[:_MARKS] = _mark(label, total)
        total[_MARKS:].copy_(piece)
        communicator.allreduce([total]).wait()
        _check(total[:_MARKS], size, label)
        into.copy_(total[_MARKS:].sub_(piece.to(device)).div_(size - 1))


def _mark(label: Label, like: Tensor) -> Tensor:
    return like.new_tensor([label.round % _MODULUS, label.bucket % _MODULUS, label.round**2 % _MODULUS])


def _check(total: Tensor, size: int, label: Label) -> None:
    if total.is_cuda:
        return  # reading it would stop the stream; NCCL pairs calls by their order
    if not torch.equal(total, size * _mark(label, total)):
        raise WireError(f"{label}: the members of a group of {size} were in different rounds. Start all workers together.")
