"""Edges of two: a send and a receive on one communicator of all workers, so that no pair needs a process group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from decent_dp.bucket import Envelope
from decent_dp.errors import WireError
from decent_dp.topo import Edge
from decent_dp.transport.base import Exchange, Handle, Label, Later
from decent_dp.transport.communicators import Communicator
from decent_dp.transport.waiter import Waiter

__all__ = ["NcclPairs", "Pairs", "StagedPairs"]

# Says that a message is ours, and of which format.
_MAGIC = 0x0DECE47D_00000001
_HEADER_FIELDS = 5

# Turns a communicator's error into one that names the peer.
Explain = Callable[[RuntimeError, list[int], Label], RuntimeError]


def _peer(edge: Edge, rank: int) -> int:
    first, second = edge.ranks
    return second if first == rank else first


def _header(raw: Tensor) -> Tensor:
    return raw[: 8 * _HEADER_FIELDS].view(torch.int64)


def _stamp(raw: Tensor, rank: int, label: Label) -> None:
    _header(raw).copy_(torch.tensor([_MAGIC, label.round, label.bucket, rank, raw.numel()], device="cpu"))


def _check(raw: Tensor, peer: int, label: Label) -> None:
    """gloo delivers a message to whatever receive is next, and a shorter one without a word: so each says what it is."""
    found, due = _header(raw).tolist(), [_MAGIC, label.round, label.bucket, peer, raw.numel()]
    if found != due:
        raise WireError(
            f"worker {peer} sent (magic, round, bucket, rank, bytes) = {tuple(found)} where {tuple(due)} was due. The "
            "workers run different versions or have got out of step; start them together from one installation."
        )


class Pairs(Exchange):
    """Pairs of workers with tensors on the CPU, over gloo."""

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        peer = _peer(edge, self._rank)
        _stamp(sent.raw, self._rank, label)
        try:
            works = self.post(peer, sent.raw, received.raw, label)
        except RuntimeError as error:
            raise self._explain(error, [peer], label) from error

        def finish() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._explain(error, [peer], label) from error
            _check(received.raw, peer, label)

        return Later(finish, sent.raw.nbytes)

    def post(self, peer: int, out: Tensor, into: Tensor, label: Label) -> tuple[Any, Any]:
        # Messages of one tag arrive in the order in which they were sent; rounds need no tag of their own.
        receive = self._communicator.recv([into], peer, label.bucket)
        return receive, self._communicator.send([out], peer, label.bucket)


class StagedPairs(Exchange):
    """Pairs of workers whose tensors gloo cannot read (on a GPU): copied through the CPU by a waiting thread."""

    def __init__(self, pairs: Pairs, rank: int, waiter: Waiter, explain: Explain) -> None:
        self._pairs, self._rank, self._waiter, self._explain = pairs, rank, waiter, explain

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        peer = _peer(edge, self._rank)
        pin = sent.raw.is_cuda
        out = torch.empty(sent.raw.shape, dtype=torch.uint8, device="cpu", pin_memory=pin)
        into = torch.empty(sent.raw.shape, dtype=torch.uint8, device="cpu", pin_memory=pin)
        ready = written(sent.raw)

        def move() -> None:
            ready()
            out.copy_(sent.raw)
            _stamp(out, self._rank, label)
            for work in self._pairs.post(peer, out, into, label):
                work.wait()

        future = self._waiter.submit(move)

        def finish() -> None:
            wait_for(future, self._explain, [peer], label)
            _check(into, peer, label)
            received.raw.copy_(into)

        return Later(finish, out.nbytes)


class NcclPairs(Exchange):
    """Pairs of workers with a GPU each, over NCCL: both directions as one grouped call, in the order of the calls.

    Nothing is read back on the CPU, so messages carry no header: NCCL pairs calls by their order alone.
    """

    def __init__(self, communicator: Communicator, rank: int, explain: Explain) -> None:
        self._communicator, self._rank, self._explain = communicator, rank, explain

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        peer = _peer(edge, self._rank)
        try:
            self._communicator._start_coalescing()
            self._communicator.send([sent.payload], peer, 0)
            self._communicator.recv([received.payload], peer, 0)
            work = self._communicator._end_coalescing()
        except RuntimeError as error:
            raise self._explain(error, [peer], label) from error

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._explain(error, [peer], label) from error

        return Later(finish, sent.payload.nbytes)


def written(tensor: Tensor) -> Callable[[], None]:
    """A call that blocks until what is queued on the current stream has been written to ``tensor``."""
    if not tensor.is_cuda:
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    wait: Callable[[], None] = event.synchronize
    return wait


def wait_for(future: Future[None], explain: Explain, ranks: list[int], label: Label) -> None:
    """The waiting thread's result; its communicator's errors explained, ours as they are."""
    try:
        future.result()
    except WireError:
        raise
    except RuntimeError as error:
        raise explain(error, ranks, label) from error
