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

__all__ = ["Groups", "NcclGroups"]

Connect = Callable[[tuple[int, ...]], Communicator]

# Elements of a piece where the sum cannot be taken in place: half a MiB of float32, which bounds the extra memory.
_PIECE = 2**17

# Round, bucket and the round's square are summed along with the payload, modulo this, so that sums of any group stay exact
# in float32. The square is for the member whose round happens to be the mean of the others'.
_MODULUS = 4096
_MARKS = 3


class Groups(Exchange):
    """Groups of workers, over gloo: tensors elsewhere come to the CPU.

    The sum over the group comes from an all-reduce; the mean of the *others* is ``(sum - own) / (m - 1)``. Sums are taken
    in float32 at least: in bfloat16 a sum of many workers would lose what distinguishes them, in float16 it would overflow.

    Args:
        connect: makes (or finds) the communicator of a group of ranks.
    """

    def __init__(self, rank: int, connect: Connect, waiter: Waiter, explain: Explain) -> None:
        self._rank, self._connect, self._waiter, self._explain = rank, connect, waiter, explain

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        ranks = tuple(sorted(edge.ranks))
        communicator = self._connect(ranks)
        ready = written(sent.raw)
        dtype = torch.promote_types(sent.payload.dtype, torch.float32)
        in_place = dtype == sent.payload.dtype and sent.raw.device.type == "cpu"

        def move() -> None:
            ready()
            if in_place:
                _sum_in_place(communicator, sent, received, len(ranks), label)
            else:
                _sum_in_pieces(communicator, sent.payload, received.payload, len(ranks), label, dtype)
                written(received.raw)()

        others = [rank for rank in ranks if rank != self._rank]
        future = self._waiter.submit(move)
        return Later(lambda: wait_for(future, self._explain, others, label), _ring_bytes(sent.payload, len(ranks)))


class NcclGroups(Exchange):
    """Groups of workers with a GPU each, over NCCL.

    Launched from the training thread, as the pairs are: all workers launch everything in one order of (round, bucket).
    Nothing is read back on the CPU, so nothing is marked.
    """

    def __init__(self, rank: int, connect: Connect, explain: Explain) -> None:
        self._rank, self._connect, self._explain = rank, connect, explain

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        ranks = tuple(sorted(edge.ranks))
        others = [rank for rank in ranks if rank != self._rank]
        communicator = self._connect(ranks)
        dtype = torch.promote_types(sent.payload.dtype, torch.float32)
        in_place = dtype == sent.payload.dtype
        total = received.payload.copy_(sent.payload) if in_place else sent.payload.to(dtype)
        try:
            work = communicator.allreduce([total])
        except RuntimeError as error:
            raise self._explain(error, others, label) from error

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._explain(error, others, label) from error
            total.sub_(sent.payload).div_(len(others))
            if not in_place:
                received.payload.copy_(total)

        return Later(finish, _ring_bytes(sent.payload, len(ranks)))


def _ring_bytes(payload: Tensor, size: int) -> int:
    """What a ring moves out of every worker: 2 (m - 1)/m of the payload, as it is summed."""
    itemsize = torch.promote_types(payload.dtype, torch.float32).itemsize
    return 2 * (size - 1) * payload.numel() * itemsize // size


def _sum_in_place(communicator: Communicator, sent: Envelope, received: Envelope, size: int, label: Label) -> None:
    received.payload.copy_(sent.payload)
    header = received.whole[: received.HEADER_BYTES // received.payload.dtype.itemsize]
    header.zero_()
    header[:_MARKS] = _mark(label, header)
    communicator.allreduce([received.whole]).wait()
    _check(header[:_MARKS], size, label)
    received.payload.sub_(sent.payload).div_(size - 1)


def _sum_in_pieces(
    communicator: Communicator, sent: Tensor, received: Tensor, size: int, label: Label, dtype: torch.dtype
) -> None:
    # A payload without elements still makes its call: every member counts calls alike.
    for piece, into in zip(torch.split(sent, _PIECE), torch.split(received, _PIECE), strict=True):
        total = torch.empty(_MARKS + piece.numel(), dtype=dtype, device="cpu")
        total[:_MARKS] = _mark(label, total)
        total[_MARKS:].copy_(piece)
        communicator.allreduce([total]).wait()
        _check(total[:_MARKS], size, label)
        into.copy_(total[_MARKS:].sub_(piece.to("cpu")).div_(size - 1))


def _mark(label: Label, like: Tensor) -> Tensor:
    return like.new_tensor([label.round % _MODULUS, label.bucket % _MODULUS, label.round**2 % _MODULUS])


def _check(total: Tensor, size: int, label: Label) -> None:
    if not torch.equal(total, size * _mark(label, total)):
        raise WireError(f"{label}: the members of a group of {size} were in different rounds. Start all workers together.")
