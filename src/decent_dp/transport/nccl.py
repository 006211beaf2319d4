"""Exchanges of GPUs over NCCL.

Calls are matched by their order: each worker starts its exchanges in the same order of (round, bucket). Messages carry no
exchange id. Only compressions without hints are exchanged here, and no fault is tolerated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from decent_dp.compression import flag_of, flag_view
from decent_dp.topo import Edge
from decent_dp.transport.interface import DeferredHandle, ExchangeRequest, Explain, Handle
from decent_dp.transport.rendezvous import Communicator
from decent_dp.transport.streams import beside
from decent_dp.transport.votes import ExchangeId

__all__ = ["AllReduceGroups", "NcclPairs"]


class NcclPairs:
    """Pairs of workers with a GPU each: both directions as one grouped call, launched from the training thread.

    Only the flags of a message are read on the CPU.
    """

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        peer = next(rank for rank in edge.ranks if rank != self._rank)
        _encode(request)
        try:
            self._communicator._start_coalescing()
            self._communicator.send([request.sent], peer, 0)
            self._communicator.recv([request.received], peer, 0)
            work = self._communicator._end_coalescing()
        except RuntimeError as error:
            raise self._explain(error, [peer], request.exchange_id) from error

        def finish() -> tuple[int, int] | None:
            _wait(work, self._explain, [peer], request.exchange_id)
            return _flags(work, request, lambda: (flag_of(request.sent), flag_of(request.received)))

        return DeferredHandle(finish, sum(chunk.payload for chunk in request.compression.chunks))


class AllReduceGroups:
    """Groups, without compression: an all-reduce in float32 at least, and one of the flags."""

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        others, explain = sorted(set(edge.ranks) - {self._rank}), self._explain
        _encode(request)
        dtype, compute = request.compression.dtype, request.compression.compute
        received = request.received.view(dtype)
        total = received.copy_(request.sent.view(dtype)) if dtype == compute else request.sent.view(dtype).to(compute)
        largest: Any = dist.AllreduceOptions()
        largest.reduceOp = dist.ReduceOp.MAX
        flag = flag_view(request.sent).clone()
        try:
            work = self._communicator.allreduce([total])
            of_flag = self._communicator.allreduce([flag], largest)
        except RuntimeError as error:
            raise explain(error, others, request.exchange_id) from error

        def finish() -> tuple[int, int] | None:
            _wait(work, explain, others, request.exchange_id)
            _wait(of_flag, explain, others, request.exchange_id)
            total.div_(len(edge.ranks))
            if total is not received:
                received.copy_(total)
            flag_view(request.received).copy_(flag)
            return _flags(of_flag, request, lambda: (flag_of(request.sent), int(flag.sum())))

        # In a ring every worker sends 2 (m - 1)/m of the message, in the dtype of the sum.
        numel, m = request.compression.nbytes // dtype.itemsize, len(edge.ranks)
        return DeferredHandle(finish, 2 * (m - 1) * numel * compute.itemsize // m)


def _encode(request: ExchangeRequest) -> None:
    with record_function("decent_dp.encode"):
        for _ in request.encode([]):
            pass


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
