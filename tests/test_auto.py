"""transport='auto': exchanges over gloo, and the measurement that chooses them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decent_dp
from decent_dp.compression import Compression, FlatTensor, Lossless
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.topo import Edge
from decent_dp.transport import (
    ExchangeId,
    ExchangeRequest,
    Handle,
    InProcessTransport,
    ProcessGroupTransport,
    faster,
    process_group,
    run_replicas,
)
from decent_dp.transport.base import DeferredHandle
from decent_dp.transport.faster import _COMPARED, _PROBE, _SLOW, Comparison, compare
from tests.helpers import came, request
from tests.test_transport import caught, swap, whole_contract
from tests.workers import shorten


class OverGloo(ProcessGroupTransport):
    """gloo was found to be faster, for pairs and groups; its communicators are made when they are needed."""

    def choose(self, edge: Edge, request: ExchangeRequest) -> Any:
        ranks = tuple(sorted(edge.ranks))
        if process_group._is_plain(type(request.compression), len(ranks) > 2):
            self._over_gloo.add(ranks)
        return super().choose(edge, request)


# -- exchanges over gloo ---------------------------------------------------------------------------------------------------


def contract(rank: int, n: int) -> str:
    return whole_contract(OverGloo())


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_contract_over_gloo(workers, n):
    assert workers(n, contract) == ["done"] * n


def train(transport: Any, topology: str, rank: int) -> tuple[list[Tensor], int, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = decent_dp.gossip(model, optimizer, topology=topology, transport=transport, bucket_size_in_mb=0.01)
    data = torch.Generator().manual_seed(rank)
    for _ in range(6):
        model(torch.randn(4, 20, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.flush()
    found = [p.detach().clone() for p in model.parameters()]
    return found, replica.stats().bytes_sent, sorted(transport._over_gloo)


def both_ways(rank: int, n: int) -> list[Any]:
    return [
        [train(kind(), topology, rank) for kind in (ProcessGroupTransport, OverGloo)]
        for topology in ("one-peer-exp", "complete")
    ]


def test_training_over_gloo_equals_training_over_own_connections(workers):
    for rank, (pairs, groups) in enumerate(workers(4, both_ways)):
        own, gloo = pairs
        assert all(torch.equal(a, b) for a, b in zip(own[0], gloo[0], strict=True))
        assert own[1] == gloo[1]
        assert own[2] == []
        assert gloo[2] == sorted(tuple(sorted((rank, rank ^ d))) for d in (1, 2))
        own, gloo = groups
        torch.testing.assert_close(own[0], gloo[0], rtol=1e-5, atol=1e-7)  # sums in another order
        assert gloo[2] == [(0, 1, 2, 3)]


def a_peer_dies(rank: int, n: int) -> Any:
    transport = OverGloo()
    pairs, group = (Edge([0, 1], 0.5), Edge([0, 2], 0.5)), Edge([0, 1, 2], 1 / 3)
    for number, edge in enumerate((*pairs, group)):
        if rank in edge.ranks:
            swap(transport, edge, ExchangeId(number, 0))
    transport.control.gather(None)
    if rank == 2:
        transport.report("ValueError: the cat ate my batch")
        os._exit(3)
    found = caught(swap, transport, (pairs[1] if rank == 0 else group), ExchangeId(3, 0))
    swap(transport, pairs[0], ExchangeId(4, 0))  # only what needs the lost one is lost
    transport.close()
    return found


def test_a_peer_that_dies_is_named(workers):
    outcomes = workers.outcomes(3, a_peer_dies)
    for outcome, who in zip(outcomes[:2], ("worker 2 is gone", "one of the workers [0, 2] is gone"), strict=True):
        assert not outcome.error, outcome.trace
        kind, message, seconds = outcome.value
        assert (kind, seconds < 45) == ("PeerLostError", True), outcome.value
        assert message.startswith(who)
        assert "Worker 2 reported: ValueError: the cat ate my batch" in message


def out_of_step(rank: int, n: int) -> Any:
    transport = OverGloo()
    group = Edge([0, 1, 2], 1 / 3)
    found = [caught(swap, transport, group, ExchangeId(5, 0) if rank else exchange_id) for exchange_id in OTHERS]
    swap(transport, group, ExchangeId(9, 0))
    shorten(transport, 1.0)
    if rank < 2:
        found.append(caught(swap, transport, Edge([0, 1], 0.5), ExchangeId(5 + rank, 0)))
    dist.barrier()
    transport.close()
    return found


OTHERS = [ExchangeId(6, 0), ExchangeId(4, 0), ExchangeId(5, 1)]


def test_peers_in_other_rounds_do_not_mix(workers):
    pairs = []
    for *groups, pair in workers(3, out_of_step)[:2]:
        for kind, message, _ in groups:
            assert kind == "WireError", message
            assert "a worker of the group was in another exchange" in message
        pairs.append(pair[:2])
    # The first wait that times out breaks the communicator, which the other may see before its own time is up.
    assert {"PeerTimeoutError"} <= set(dict(pairs)) <= {"PeerTimeoutError", "PeerLostError"}, pairs
    for rank, (kind, message) in enumerate(pairs):
        what = "sent nothing for" if kind == "PeerTimeoutError" else "is gone, and"
        assert message.startswith(f"worker {1 - rank} {what} round {5 + rank}, bucket 0")


def cannot_encode(rank: int, n: int) -> str:
    transport = OverGloo()
    own = request(torch.ones(5), rank, ExchangeId(0, 0))

    class Broken(type(own.compression)):  # type: ignore[misc]
        def encode(self, *_: Any) -> Any:
            raise RuntimeError("no space left on this device")
            yield

    own.compression.__class__ = Broken
    try:
        transport.start(Edge([0, 1], 0.5), own).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_this_worker_is_not_blamed_on_its_peer(workers):
    assert workers(2, cannot_encode) == ["RuntimeError: no space left on this device"] * 2


def values_change_late(rank: int, n: int) -> float:
    """What is sent are the values of the start, as soon as they have been read."""
    transport = OverGloo()
    values = torch.full((4_000_000,), float(rank))
    own = request(values, rank, ExchangeId(0, 0))
    handle = transport.start(Edge([0, 1], 0.5), own)
    handle.wait_for_read()
    values.fill_(7.0)
    handle.wait()
    transport.close()
    return float(came(own).max())


def test_messages_hold_the_values_of_the_start(workers):
    assert workers(2, values_change_late) == [1.0, 0.0]


# -- the measurement -------------------------------------------------------------------------------------------------------


class Way:
    """Exchanges that take some seconds for the largest message, less for others, and count."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.sizes = seconds, []

    def __call__(self, edge: Edge, request: ExchangeRequest) -> Handle:
        [tensor] = request.compression.tensors
        self.sizes.append(4 * tensor.numel)
        return DeferredHandle(lambda: time.sleep(self.seconds * self.sizes[-1] / _COMPARED))


def make(numel: int) -> Compression:
    return Lossless([FlatTensor(0, numel)], torch.float32, torch.device("cpu"))


def measure(own: float, gloo: float, edges: Callable[[int], list[Edge | None]], *, group: bool = False) -> list[Any]:
    def work(transport: InProcessTransport) -> Any:
        ways = Way(own), Way(gloo)
        found = compare(transport.control, transport.rank, edges(transport.rank), *ways, make, group=group)
        return found, *(way.sizes for way in ways)

    return run_replicas(3, work)


def chain(rank: int) -> list[Edge | None]:
    """A round in which nobody mixes, then one in which the first two do."""
    return [None, Edge([0, 1], 0.5) if rank < 2 else None]


@pytest.mark.parametrize(("own", "gloo"), [(0.02, 0.06), (0.06, 0.02)])
def test_the_faster_way_is_chosen_by_all_alike(own, gloo):
    found = measure(own, gloo, chain)
    assert found[0][0] == found[1][0] == found[2][0]
    for comparison, *sizes in found[:2]:
        assert comparison.gloo_is_faster == (gloo < own)
        assert comparison.own == pytest.approx(own, rel=0.5)
        assert comparison.gloo == pytest.approx(gloo, rel=0.5)
        assert all(max(of_way) == _COMPARED for of_way in sizes)
    assert found[2][1:] == ([], [])
    text = str(found[0][0])
    assert text.startswith("gloo (16 MiB in" if gloo < own else "own connections (16 MiB in")


def test_pairs_with_slow_links_are_not_measured_over_gloo():
    for comparison, own, gloo in measure(32 * _SLOW, 0.0, chain)[:2]:
        assert not comparison.gloo_is_faster
        assert len(own) == 4
        assert not gloo
        assert str(comparison).startswith("own connections (1 MiB in ")
        assert str(comparison).endswith("ms: the links are the limit)")


def test_groups_are_measured_on_slow_links_with_smaller_messages(monkeypatch):
    monkeypatch.setattr(faster, "_LONGEST", 0.3)
    for comparison, _, gloo in measure(0.6, 0.2, lambda rank: [Edge([0, 1, 2], 1 / 3)], group=True):
        assert comparison.gloo_is_faster
        assert max(gloo) < _COMPARED
        assert "MiB in" in str(comparison)


@pytest.mark.parametrize("group", [False, True])
def test_one_message_is_enough_on_a_very_slow_link(monkeypatch, group):
    monkeypatch.setattr(faster, "_TOO_SLOW", 0.01)
    for comparison, own, gloo in measure(0.5, 0.0, lambda rank: [Edge([0, 1, 2], 1 / 3)], group=group):
        assert not comparison.gloo_is_faster
        assert own == [_PROBE]
        assert gloo == []


def test_edges_that_nobody_has_are_not_measured():
    assert [found for found, *_ in measure(0.0, 0.0, lambda rank: [None, None])] == [None] * 3


class InNodes(ProcessGroupTransport):
    """Four workers on two nodes, whose own links are fast."""

    def choose_ways(self, *args: Any, **options: Any) -> None:
        self._rendezvous = dataclasses.replace(self._rendezvous, node_of=("a", "a", "b", "b"))
        super().choose_ways(*args, **options)


def between_nodes(rank: int, n: int) -> Any:
    transport, compared = InNodes(auto=True), []

    def note(control: Any, rank: int, edges: list[Edge | None], *_: Any, group: bool) -> Comparison:
        compared.append([edge and tuple(edge.ranks) for edge in edges])
        return Comparison(4, 1.0, 0.5 if len(compared) == 1 else 2.0)

    process_group.compare = note
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = decent_dp.gossip(model, optimizer, topology="one-peer-exp", transport=transport)
    over_gloo = sorted(transport._over_gloo)
    replica.close()
    transport.close()
    return compared, transport.ways, over_gloo


def test_links_in_a_node_and_between_nodes_are_measured_apart(workers):
    (in_node, between, *groups), ways, over_gloo = workers(4, between_nodes)[0]
    assert in_node == [(0, 1), None]
    assert between == [None, (0, 2)]
    assert groups == [[None, None]] * 2
    assert over_gloo == [(0, 1)]
    assert ways[0].startswith("pairs in a node over gloo")
    assert ways[1].startswith("pairs between nodes over own connections")


# -- the argument ----------------------------------------------------------------------------------------------------------


def automatic(rank: int, n: int) -> list[Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("decent_dp.transport.process_group")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = []
    for topology in ("ring", "complete"):  # pairs, with one worker that mixes with none
        torch.manual_seed(rank)
        model = nn.Linear(3, 2)
        plain = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = decent_dp.gossip(model, optimizer, topology=topology, transport="auto")
        wrapper = DecentralizedDataParallel(
            plain, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), topology=topology, transport="auto"
        )
        for _ in range(4):
            (model(torch.ones(1, 3)).sum() * (1 + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            (wrapper(torch.ones(1, 3)).sum() * (1 + rank)).backward()
        with replica.averaged(), wrapper.averaged():
            pass
        found.append(repr(replica))
        assert all(f", {way}" in repr(wrapper) for way in wrapper.replica.everyone.ways), repr(wrapper)
        wrapper.close()
        replica.close()
    return [*found, records]


@pytest.mark.slow
def test_auto_measures_and_says_what_it_has_found(workers):
    found = workers(3, automatic, timeout=120)
    for rank, (pairs, groups, records) in enumerate(found):
        assert ", pairs in a node over " in pairs
        assert " MiB in " in pairs
        assert ", groups in a node over " in groups
        assert len(records) == (4 if rank == 0 else 0)
        if rank == 0:
            assert records[0].startswith("exchanges: pairs in a node over ")
            assert records[2].startswith("exchanges: groups in a node over ")
    assert len({pairs.partition("pairs in a node over")[2] for pairs, *_ in found}) == 1


def chosen(rank: int, n: int, gloo: float, compression: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The edges that gloo carries, the communicators, the last sentence, and what was compared. Float64 values are frozen."""
    compared = []

    def note(*arguments: Any, group: bool) -> Comparison:
        made = arguments[-1](3)
        compared.append((type(made).__name__, made.dtype, group))
        _, own_rank, edges, _, over_gloo, _ = arguments
        for edge in filter(None, edges):  # makes a communicator, as the measurement does
            over_gloo(edge, request(torch.ones(3), own_rank, ExchangeId(-1, 0))).wait()
        return Comparison(4, 1.0, gloo)

    process_group.compare = note
    model = nn.Linear(3, 2, dtype=dtype)
    model.register_module("frozen", nn.Linear(9, 9, dtype=torch.float64).requires_grad_(False))
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    replica = decent_dp.gossip(model, optimizer, topology="one-peer-exp", compression=compression, transport="auto")
    assert all(f", {way}" in repr(replica) for way in replica.everyone.ways)
    model(torch.ones(1, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    replica.flush()
    transport = replica.everyone
    return sorted(transport._over_gloo), sorted(transport._communicators), transport.ways[-1], compared


def test_exchanges_go_where_they_are_faster(workers):
    for compression in (None, "bfloat16"):
        assert [found[:2] for found in workers(2, chosen, 0.5, compression)] == [([(0, 1)], ["all", "gloo/(0, 1)"])] * 2
    for gloo in (0.97, 2.0):  # a tie is for the own connections
        assert [found[:2] for found in workers(2, chosen, gloo)] == [([], ["all"])] * 2
    for compression in ("int8", "low-rank:2"):  # which nothing else carries
        for over_gloo, _, way, compared in workers(2, chosen, 0.5, compression):
            assert (over_gloo, compared) == ([], [])
            assert way == f"'auto' changes nothing for {compression} messages"


def test_what_is_compared_is_what_will_be_exchanged(workers):
    for compression, dtype, kind in ((None, torch.float16, "Lossless"), ("bfloat16", torch.float32, "BFloat16")):
        for *_, compared in workers(2, chosen, 0.5, compression, dtype):
            assert set(compared) >= {(kind, dtype, False)}
            assert all(of == dtype for _, of, _ in compared)


def groups_in_bfloat16(rank: int, n: int) -> str:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return repr(decent_dp.gossip(model, optimizer, topology="complete", compression="bfloat16", transport="auto"))


def test_it_says_that_there_is_nothing_to_choose(workers):
    for text in workers(3, groups_in_bfloat16):
        assert text.endswith(", 'auto' changes nothing for this topology)")


def wrong_arguments(rank: int, n: int) -> list[str]:
    found = []
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in (
        {"transport": "fastest"},
        {"transport": 3},
        {"transport": "fastest" if rank else None},  # on one worker alone
        {"transport": "auto", "faults": decent_dp.Tolerate()},
        {"transport": "auto" if rank else None},
    ):
        try:
            decent_dp.gossip(model, optimizer, **options)
        except (ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_wrong_arguments_are_refused_on_all_workers(workers):
    for unknown, number, on_one, with_faults, unequal in workers(2, wrong_arguments):
        assert unknown == "ValueError: transport must be None, 'auto' or a Transport, got 'fastest'"
        assert number == "TypeError: transport must be None, 'auto' or a Transport, got 3"
        assert on_one == "ValueError: worker 1: transport must be None, 'auto' or a Transport, got 'fastest'"
        assert with_faults.startswith("ValueError: transport='auto' may choose calls of the process group")
        assert "transport" in unequal
        assert "'auto'" in unequal
