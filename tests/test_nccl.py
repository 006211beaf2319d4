"""Edges over NCCL, by a communicator that only records its calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from decent_dp.compression import BFloat16, Int8, Lossless
from decent_dp.errors import PeerLostError
from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId, ProcessGroupTransport
from decent_dp.transport.nccl import AllReduceGroups, NcclPairs
from tests.helpers import came, request

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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


def explain(error: RuntimeError, ranks: list[int], exchange_id: ExchangeId) -> RuntimeError:
    return PeerLostError(f"{ranks} {exchange_id}: {error}")


def test_nccl_pairs_are_one_grouped_call():
    noting = Noting()
    exchange = NcclPairs(noting, 5, explain)
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


def test_nccl_pairs_send_encoded_values():
    noting = Noting()
    values = torch.linspace(-3, 3, 20)
    own = request(values, 0, ExchangeId(0, 0), BFloat16)
    NcclPairs(noting, 0, explain).start(Edge([0, 1], 0.5), own).wait()
    assert noting.calls[1] == ("send", 1, torch.uint8, 48)
    assert torch.equal(own.sent[:-8].view(torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize("where", ["start", "send", "recv", "end", "wait"])
def test_nccl_pairs_name_the_peer(where):
    exchange = NcclPairs(Noting(where), 0, explain)
    with pytest.raises(PeerLostError, match=r"\[3\] round 2, bucket 1: NCCL error"):
        exchange.start(Edge([0, 3], 0.5), request(torch.ones(10), 0, ExchangeId(2, 1))).wait()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groups_on_the_device(dtype):
    noting = Noting()
    exchange = AllReduceGroups(noting, 1, explain)
    own = request(torch.arange(9).to(dtype), 1, ExchangeId(1, 2))
    handle = exchange.start(Edge([4, 1, 2], 0.5), own)
    handle.wait()
    # All three had the same: the mean of all is what was sent.
    assert torch.equal(came(own), own.values[0])
    assert torch.equal(own.sent.view(dtype)[:9], own.values[0])
    [(_, reduced, numel), of_flag, *rest] = noting.calls
    assert of_flag == ("allreduce", torch.int64, 1)
    assert reduced == torch.promote_types(dtype, torch.float32)
    assert handle.bytes_sent == 4 * numel * reduced.itemsize // 3
    assert rest == [("wait",)] * 2


def test_a_group_that_fails_names_the_others():
    for where in ("allreduce", "wait"):
        exchange = AllReduceGroups(Noting(where), 1, explain)
        with pytest.raises(PeerLostError, match=r"\[2, 4\] round 1, bucket 3: NCCL error"):
            exchange.start(Edge([4, 1, 2], 0.5), request(torch.ones(10), 1, ExchangeId(1, 3))).wait()


class OnGpu(Tensor):
    """A tensor on the CPU that claims to be on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def choosing(rank: int, n: int) -> list[str]:
    transport = ProcessGroupTransport()
    found = []
    for nccl, encrypt in ((True, None), (True, False), (True, True), (False, None)):
        transport._rendezvous = dataclasses.replace(
            transport._rendezvous, nccl=nccl, run=dataclasses.replace(transport._rendezvous.run, encrypt=encrypt)
        )
        transport._communicators |= {"nccl": Noting(), "nccl/(0, 1, 2)": Noting()}
        for on_gpu in (True, False):
            for kind in (Lossless, BFloat16, Int8):
                own = request(torch.ones(3), rank, ExchangeId(0, 0), kind)
                if on_gpu:
                    own = dataclasses.replace(own, sent=own.sent.as_subclass(OnGpu))
                found += [type(transport.choose(Edge(ranks, 0.5), own)).__name__ for ranks in ([0, 1], [0, 1, 2])]
    transport.control.gather(None)  # no worker leaves while the other still connects
    transport.close()
    return found


def test_exchanges_that_go_over_nccl(workers):
    """On GPUs, if the process group has NCCL and not everything is to be encrypted."""
    nccl = ["NcclPairs", "AllReduceGroups", "NcclPairs", "WireExchanges", "WireExchanges", "WireExchanges"]
    assert workers(2, choosing) == [(nccl + ["WireExchanges"] * 6) * 2 + ["WireExchanges"] * 24] * 2
