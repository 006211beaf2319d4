"""Exchanges by torch's communicators: over NCCL, and over gloo where it was measured to be faster than our connections.

Calls are matched by their order: each worker starts its exchanges in the same order of (round, bucket). Messages carry no
exchange id. Only compressions without hints are exchanged here, and no fault is tolerated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from decent_dp.errors import WireError
from decent_dp.topo import Edge
from decent_dp.transport.base import DeferredHandle, ExchangeId, ExchangeRequest, Explain, Handle
from decent_dp.transport.communicators import Communicator
from decent_dp.transport.streams import beside
from decent_dp.transport.waiter import Waiter

__all__ = ["AllReduceGroups", "BesideTraining", "Exchanges", "GlooPairs", "NcclPairs"]

# Tags of gloo's messages are 32-bit integers with a sign. A worker that is out of step waits for a message that does not come.
_ROUNDS, _BUCKETS = 2**15, 2**16


class Exchanges(ABC):
    """Starts exchanges of one kind."""

    @abstractmethod
    def bytes_sent(self, edge: Edge, request: ExchangeRequest) -> int:
        """The bytes that this worker puts on the wire, without flags."""

    @abstractmethod
    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        """``Transport.start``."""


class NcclPairs(Exchanges):
    """Pairs of workers with a GPU each: both directions as one grouped call, launched from the training thread.

    Only the flags of a message are read on the CPU.
    """

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def bytes_sent(self, edge: Edge, request: ExchangeRequest) -> int:
        return request.compression.payload(request.compression.chunks)

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
            return _flags(
                work, request, lambda: (request.compression.flag(request.sent), request.compression.flag(request.received))
            )

        return DeferredHandle(finish, self.bytes_sent(edge, request))


class GlooPairs(Exchanges):
    """Pairs of workers on CPUs: a send and a receive, over a communicator of the two."""

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def bytes_sent(self, edge: Edge, request: ExchangeRequest) -> int:
        return request.compression.payload(request.compression.chunks)

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        ranks, exchange_id = tuple(sorted(edge.ranks)), request.exchange_id
        explain = self._explain  # of its own: what waits, or fails, must not keep the communicator
        place = 1 - ranks.index(self._rank)
        peer = ranks[place]
        tag = exchange_id.round % _ROUNDS * _BUCKETS + exchange_id.bucket % _BUCKETS
        _encode(request)
        try:
            received = self._communicator.recv([request.received], place, tag)
            sent = self._communicator.send([request.sent], place, tag)
        except RuntimeError as error:
            raise explain(error, [peer], exchange_id) from error

        def finish() -> None:
            for work in (received, sent):
                _wait(work, explain, [peer], exchange_id)

        return DeferredHandle(finish, self.bytes_sent(edge, request))


class AllReduceGroups(Exchanges):
    """Groups, without compression: an all-reduce in float32 at least, and one of what they must agree on."""

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def bytes_sent(self, edge: Edge, request: ExchangeRequest) -> int:
        # In a ring every worker sends 2 (m - 1)/m of the message, in the dtype of the sum.
        compression, m = request.compression, len(edge.ranks)
        return 2 * (m - 1) * (compression.nbytes // compression.dtype.itemsize) * compression.compute.itemsize // m

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        others, explain = sorted(set(edge.ranks) - {self._rank}), self._explain
        _encode(request)
        dtype, compute = request.compression.dtype, request.compression.compute
        received = request.received.view(dtype)
        total = received.copy_(request.sent.view(dtype)) if dtype == compute else request.sent.view(dtype).to(compute)
        largest: Any = dist.AllreduceOptions()
        largest.reduceOp = dist.ReduceOp.MAX
        flag = request.compression.flag_view(request.sent).clone()
        # Not on a GPU: these few bytes would be copied to it when the computation is done.
        identity = None if flag.is_cuda else torch.cat(_identity(request))
        agreed = flag if identity is None else torch.cat([flag, identity])
        try:
            work = self._communicator.allreduce([total])
            of_flag = self._communicator.allreduce([agreed], largest)
        except RuntimeError as error:
            raise explain(error, others, request.exchange_id) from error

        def finish() -> tuple[int, int] | None:
            _wait(work, explain, others, request.exchange_id)
            _wait(of_flag, explain, others, request.exchange_id)
            if identity is not None:
                _check(agreed[len(flag) :], identity, request)
            total.div_(len(edge.ranks))
            if total is not received:
                received.copy_(total)
            largest_flag = agreed[: len(flag)]
            request.compression.flag_view(request.received).copy_(largest_flag)
            return _flags(of_flag, request, lambda: (request.compression.flag(request.sent), int(largest_flag.sum())))

        return DeferredHandle(finish, self.bytes_sent(edge, request))


class BesideTraining(Exchanges):
    """The exchanges of ``inner``, encoded and started by another thread, one after the other."""

    def __init__(self, inner: Exchanges, waiter: Waiter) -> None:
        self._inner, self._waiter = inner, waiter

    def bytes_sent(self, edge: Edge, request: ExchangeRequest) -> int:
        return self._inner.bytes_sent(edge, request)

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        started = self._waiter.submit(lambda: self._inner.start(edge, request))
        return _StartedHandle(started, self.bytes_sent(edge, request))


class _StartedHandle(Handle):
    def __init__(self, started: Future[Handle], bytes_sent: int) -> None:
        self._started, self.bytes_sent = started, bytes_sent

    def wait_for_read(self) -> None:
        self._started.result()

    def wait(self) -> None:
        handle = self._started.result()
        handle.wait()
        self.flags = handle.flags


def _identity(request: ExchangeRequest) -> tuple[Tensor, Tensor]:
    """Numbers of an exchange. Their maximum over a group is what each member has only if all have the same."""
    numbers = torch.tensor(astuple(request.exchange_id), dtype=torch.int64, device="cpu")
    return numbers, -numbers


def _check(largest: Tensor, own: Tensor, request: ExchangeRequest) -> None:
    """Raises WireError if the members of a group were in other exchanges; ``largest``: the maximum of their identities."""
    if not torch.equal(largest, own):
        round_, bucket = largest[:2].tolist()
        raise WireError(
            f"{request.exchange_id}: a worker of the group was in another exchange (the last round is {round_}, and the last "
            f"bucket {bucket}). The workers have got out of step; start them together from one installation."
        )


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
