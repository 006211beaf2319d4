"""Edges over NCCL, by a communicator that only records its calls."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.compression import BFloat16, Int8, Lossless
from decent_dp.errors import PeerLostError
from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId, ProcessGroupTransport
from decent_dp.transport.nccl import NcclExchanges
from tests.helpers import came, request


class Noting:
    """Answers as ProcessGroupNCCL does, at once: a receive gets twos, a sum over three workers triples."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[Any] = []
        self.fail = fail

    def _note(self, *call: Any) -> Noting:
        self.calls.append(call)
        if call[0] == self.fail:
            raise RuntimeError("NCCL error: remote process exited")
        return self

    def _start_coalescing(self) -> None:
        self._note("start")

    def _end_coalescing(self) -> Noting:
        return self._note("end")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Noting:
        return self._note("send", peer, tensors[0].dtype, tensors[0].numel())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Noting:
        tensors[0].fill_(2.0)
        return self._note("recv", peer, tensors[0].dtype, tensors[0].numel())

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Noting:
        if options is None:
            tensors[0].mul_(3)
        return self._note("allreduce", tensors[0].dtype, tensors[0].numel())

    def wait(self) -> None:
        self._note("wait")


def explain(error: Exception, ranks: list[int], what: object) -> RuntimeError:
    return PeerLostError(f"{ranks} {what}: {error}")


def over(noting: Noting, rank: int, n: int = 6, group: str = "(1, 2, 4)") -> NcclExchanges:
    made = NcclExchanges(dist.HashStore(), rank, n, 60.0, explain)
    made._communicators = {"nccl": noting, f"nccl/{group}": noting}
    return made


def test_a_pair_is_one_grouped_call():
    noting = Noting()
    exchange = over(noting, 5)
    own = request(torch.ones(8, dtype=torch.bfloat16), 5, ExchangeId(0, 0))
    first = exchange.start(Edge([5, 2], 0.5), own)
    assert torch.equal(own.sent[:-8].view(torch.bfloat16), own.values[0])
    second = exchange.start(Edge([0, 5], 0.5), own)
    grouped = [("start",), ("send", 2, torch.uint8, 24), ("recv", 2, torch.uint8, 24), ("end",)]
    assert noting.calls == grouped + [(c[0], 0, *c[2:]) if len(c) > 1 else c for c in grouped]
    first.wait()
    assert noting.calls[8:] == [("wait",)]
    assert torch.equal(own.received, torch.full((24,), 2, dtype=torch.uint8))
    assert (first.bytes_sent, second.bytes_sent) == (16, 16)


def test_a_pair_sends_encoded_values():
    noting = Noting()
    values = torch.linspace(-3, 3, 20)
    own = request(values, 0, ExchangeId(0, 0), BFloat16)
    over(noting, 0).start(Edge([0, 1], 0.5), own).wait()
    assert noting.calls[1] == ("send", 1, torch.uint8, 48)
    assert torch.equal(own.sent[:-8].view(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_group_is_summed_in_float32_at_least(dtype):
    noting = Noting()
    own = request(torch.arange(9).to(dtype), 1, ExchangeId(1, 2))
    handle = over(noting, 1).start(Edge([4, 1, 2], 0.5), own)
    handle.wait()
    # All three had the same: the mean of all is what was sent.
    assert torch.equal(came(own), own.values[0])
    assert torch.equal(own.sent.view(dtype)[:9], own.values[0])
    [(_, reduced, numel), of_flag, *rest] = noting.calls
    assert of_flag == ("allreduce", torch.int64, 1)
    assert reduced == torch.promote_types(dtype, torch.float32)
    assert handle.bytes_sent == 4 * numel * reduced.itemsize // 3
    assert rest == [("wait",)] * 2


@pytest.mark.parametrize(
    ("ranks", "where"), [([0, 1], where) for where in ("start", "send", "recv", "end", "wait")] + [([4, 1, 2], "wait")]
)
def test_an_exchange_that_fails_names_the_others(ranks, where):
    others = sorted(set(ranks) - {1})
    with pytest.raises(PeerLostError, match=rf"\{others} round 2, bucket 1: NCCL error"):
        over(Noting(where), 1).start(Edge(ranks, 0.5), request(torch.ones(10), 1, ExchangeId(2, 1))).wait()


class Full(Tensor):
    """A tensor on a GPU without memory for a copy."""

    def to(self, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_gpu_is_no_lost_worker():
    own = request(torch.ones(10, dtype=torch.bfloat16), 1, ExchangeId(2, 1))
    with pytest.raises(torch.OutOfMemoryError):
        over(Noting(), 1).start(Edge([4, 1, 2], 0.5), dataclasses.replace(own, sent=own.sent.as_subclass(Full)))


class OnGpu(Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def choosing(rank: int, n: int) -> list[str]:
    transport = ProcessGroupTransport()
    taken: list[str] = []
    for name in ("_nccl", "_exchanges"):
        setattr(transport, name, SimpleNamespace(start=lambda *_, name=name: taken.append(name), close=lambda: None))
    for nccl, encrypt in ((True, None), (True, False), (True, True), (False, None)):
        transport._rendezvous = dataclasses.replace(
            transport._rendezvous, nccl=nccl, run=dataclasses.replace(transport._rendezvous.run, encrypt=encrypt)
        )
        for on_gpu in (True, False):
            for kind in (Lossless, BFloat16, Int8):
                own = request(torch.ones(3), rank, ExchangeId(0, 0), kind)
                if on_gpu:
                    own = dataclasses.replace(own, sent=own.sent.as_subclass(OnGpu))
                for ranks in ([0, 1], [0, 1, 2]):
                    transport.start(Edge(ranks, 0.5), own)
    transport.control.gather(None)  # no worker leaves while the other still connects
    transport.close()
    return taken


def test_exchanges_that_go_over_nccl(workers):
    """On GPUs, if the process group has NCCL and not everything is to be encrypted."""
    nccl = ["_nccl", "_nccl", "_nccl", "_exchanges", "_exchanges", "_exchanges"]
    assert workers(2, choosing) == [(nccl + ["_exchanges"] * 6) * 2 + ["_exchanges"] * 24] * 2
