"""Exchanges of GPUs over NCCL.

Calls are matched by their order: each worker starts its exchanges in the same order of (round, bucket). Messages carry no
exchange id. Only compressions without hints are exchanged here, and no fault is tolerated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.profiler import record_function

from decent_dp.compression import Compression, Lossless, flag_of, flag_view
from decent_dp.topo import Edge
from decent_dp.transport.interface import ExchangeRequest, Explain, Handle
from decent_dp.transport.streams import beside

__all__ = ["NcclExchanges", "takes"]

# torch's stubs leave out what its communicators can do (send, recv, allreduce, … on lists of tensors).
Communicator: TypeAlias = Any


def takes(compression: type[Compression], members: int) -> bool:
    """Whether an exchange of so many workers can be made here: its messages need no hints, and a group's are summed as they
    are."""
    return compression is Lossless if members > 2 else issubclass(compression, Lossless)


class NcclExchanges:
    """Pairs swap their messages in one grouped call, launched from the training thread. A group makes an all-reduce in float32
    at least, and one of the flags. Only the flags of a message are read on the CPU.

    Args:
        store: for the communicators: one of all workers, for pairs, and one of each group.
        timeout: seconds, of the communicators.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float, explain: Explain) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._explain = explain
        self._communicators: dict[str, Communicator] = {}

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        members = sorted(edge.ranks)
        others = [rank for rank in members if rank != self._rank]
        is_pair = len(others) == 1
        communicator = self._communicator("nccl", range(self._world_size)) if is_pair else self._communicator("", members)
        with record_function("decent_dp.encode"):
            for _ in request.encode([]):
                pass
        call, finish = (_plan_pair if is_pair else _plan_group)(communicator, others, request)
        try:  # what else fails is this worker's own, such as a full GPU
            works = call()
        except RuntimeError as error:
            raise self._explain(error, others, request.exchange_id) from error

        def wait() -> tuple[int, int] | None:
            for work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._explain(error, others, request.exchange_id) from error
            read = finish()
            if not request.sent.is_cuda:  # where reading the messages costs nothing
                return None
            # The training thread waits for the exchange, and not for the backward that is queued.
            with beside(request.sent.device, "flags"):
                works[-1].wait()
                return read()

        return Handle(wait, _bytes_sent(request, len(members)))

    def _communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        name = name or f"nccl/{tuple(ranks)}"
        if name not in self._communicators:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self._timeout)
            store, position = PrefixStore(name, self._store), list(ranks).index(self._rank)
            try:
                self._communicators[name] = dist.ProcessGroupNCCL(store, position, len(ranks), options)
            except RuntimeError as error:
                raise self._explain(error, [rank for rank in ranks if rank != self._rank], "a communicator") from error
        return self._communicators[name]

    def close(self) -> None:
        self._communicators.clear()


# A call of the communicator, which returns what is to be waited for, the flags last; and one that completes the exchange then,
# and returns how the flags are read.
_Plan: TypeAlias = tuple[Callable[[], list[Any]], Callable[[], Callable[[], tuple[int, int]]]]


def _plan_pair(communicator: Communicator, others: list[int], request: ExchangeRequest) -> _Plan:
    def call() -> list[Any]:
        communicator._start_coalescing()
        communicator.send([request.sent], others[0], 0)
        communicator.recv([request.received], others[0], 0)
        return [communicator._end_coalescing()]

    return call, lambda: lambda: (flag_of(request.sent), flag_of(request.received))


def _plan_group(communicator: Communicator, others: list[int], request: ExchangeRequest) -> _Plan:
    dtype, compute = request.compression.dtype, request.compression.compute
    received = request.received.view(dtype)
    total = received.copy_(request.sent.view(dtype)) if dtype == compute else request.sent.view(dtype).to(compute)
    largest: Any = dist.AllreduceOptions()
    largest.reduceOp = dist.ReduceOp.MAX
    flag = flag_view(request.sent).clone()

    def finish() -> Callable[[], tuple[int, int]]:
        total.div_(len(others) + 1)
        if total is not received:
            received.copy_(total)
        flag_view(request.received).copy_(flag)
        return lambda: (flag_of(request.sent), int(flag.sum()))

    return lambda: [communicator.allreduce([total]), communicator.allreduce([flag], largest)], finish


def _bytes_sent(request: ExchangeRequest, members: int) -> int:
    compression = request.compression
    if members == 2:
        return sum(chunk.payload for chunk in compression.chunks)
    # In a ring every worker sends 2 (m - 1)/m of the message, in the dtype of the sum.
    numel = compression.nbytes // compression.dtype.itemsize
    return 2 * (members - 1) * numel * compression.compute.itemsize // members
