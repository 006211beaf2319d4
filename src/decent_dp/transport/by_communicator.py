"""Edges of workers with a GPU each, over NCCL.

Everything is launched from the training thread, in the order in which exchanges start. It is the same on all workers: NCCL
matches calls by their order alone. Only the flags of a message are read on the CPU, so messages carry no exchange id. Only
compressions without hints are exchanged here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from decent_dp.topo import Edge
from decent_dp.transport.base import DeferredHandle, ExchangeId, ExchangeRequest, Explain, Handle
from decent_dp.transport.communicators import Communicator
from decent_dp.transport.streams import beside

__all__ = ["NcclGroups", "NcclPairs"]


class NcclPairs:
    """Pairs: both directions as one grouped call."""

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        peer = next(rank for rank in edge.ranks if rank != self._rank)
        for _ in request.encode([]):
            pass
        try:
            self._communicator._start_coalescing()
            self._communicator.send([request.sent], peer, 0)
            self._communicator.recv([request.received], peer, 0)
            work = self._communicator._end_coalescing()
        except RuntimeError as error:
            raise self._explain(error, [peer], request.exchange_id) from error

        def finish() -> tuple[int, int] | None:
            _wait(work, self._explain, [peer], request.exchange_id)
            return _flags(
                work, request, lambda: (request.compression.flag(request.sent), request.compression.flag(request.received))
            )

        return DeferredHandle(finish, request.compression.payload(request.compression.chunks))


class NcclGroups:
    """Groups, without compression: an all-reduce in float32 at least."""

    def __init__(self, rank: int, connect: Callable[[tuple[int, ...]], Communicator], explain: Explain) -> None:
        self._rank, self._connect, self._explain = rank, connect, explain

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        ranks = tuple(sorted(edge.ranks))
        others = [rank for rank in ranks if rank != self._rank]
        communicator = self._connect(ranks)
        for _ in request.encode([]):
            pass
        dtype, compute = request.compression.dtype, request.compression.compute
        received = request.received.view(dtype)
        total = received.copy_(request.sent.view(dtype)) if dtype == compute else request.sent.view(dtype).to(compute)
        largest: Any = dist.AllreduceOptions()
        largest.reduceOp = dist.ReduceOp.MAX
        flag = request.compression.flag_view(request.sent).clone()
        try:
            work = communicator.allreduce([total])
            of_flag = communicator.allreduce([flag], largest)
        except RuntimeError as error:
            raise self._explain(error, others, request.exchange_id) from error

        def finish() -> tuple[int, int] | None:
            _wait(work, self._explain, others, request.exchange_id)
            _wait(of_flag, self._explain, others, request.exchange_id)
            total.div_(len(ranks))
            if total is not received:
                received.copy_(total)
            request.compression.flag_view(request.received).copy_(flag)
            return _flags(of_flag, request, lambda: (request.compression.flag(request.sent), int(flag.sum())))

        # In a ring every worker sends 2 (m - 1)/m of the payload, in the dtype of the sum.
        return DeferredHandle(finish, 2 * (len(ranks) - 1) * total.nbytes // len(ranks))


def _flags(work: Any, request: ExchangeRequest, read: Callable[[], tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the result of ``read`` when ``work`` is done; None on a CPU, where reading the messages costs nothing."""
    if not request.sent.is_cuda:
        return None
    # The training thread waits for the exchange, and not for the backward that is queued.
    with beside(request.sent.device, "flags"):
        work.wait()
        return read()


def _wait(work: Any, explain: Explain, ranks: list[int], exchange_id: ExchangeId) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise explain(error, ranks, exchange_id) from error
