"""One contract for all transports, and the errors when a worker fails."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.compression import BFloat16, Int8, Lossless
from decent_dp.compression.blockwise import _BLOCK_ON_CPU
from decent_dp.compression.codec import MessageId
from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError, WireError
from decent_dp.topo import Edge
from decent_dp.transport import (
    ExchangeId,
    ExchangeRequest,
    Handle,
    InProcessTransport,
    ProcessGroupTransport,
    Transport,
    run_replicas,
)
from decent_dp.transport.collectives import Collectives, _Said
from decent_dp.transport.in_process import LocalHub
from tests.helpers import came, compression_of, request
from tests.workers import shorten

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHIFTS = 9973  # of random numbers that are drawn once: each message begins at another of them
SIZES = [33, 0, 1, 5000, 2 * _BLOCK_ON_CPU]  # of the buckets of a round; the last is more than one chunk


class OffHost(Tensor):
    """A tensor on the CPU that claims not to be."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


class Staged(ProcessGroupTransport):
    """Messages go as those on a GPU would: sockets cannot read them."""

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        sent, received = request.sent.as_subclass(OffHost), request.received.as_subclass(OffHost)
        return super().start(edge, dataclasses.replace(request, sent=sent, received=received))


# -- the contract: exchange ------------------------------------------------------------------------------------------------


@cache
def noise() -> Tensor:
    return torch.randn(max(SIZES) + SHIFTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def payload(rank: int, exchange_id: ExchangeId, numel: int, dtype: torch.dtype) -> Tensor:
    """The values that a worker sends. Two of the largest overflow float16 when they are summed."""
    first = (1000 * exchange_id.round + 10 * exchange_id.bucket + rank) % SHIFTS
    values = noise()[first : first + numel].clone()
    if numel:
        values[0] = 60000 - 100 * rank
    return values.to(dtype)


def pairing(n: int) -> list[list[Edge]]:
    """Rounds of pairs: every pairing of neighbours and of the first with the last; 0.3 because weights are not the wire's."""
    if n == 2:
        return [[Edge([0, 1], 0.5)], [Edge([1, 0], 0.3)]]
    return [
        [Edge([0, 1], 0.5), Edge([2, 3], 0.5)],
        [Edge([2, 1], 0.3), Edge([3, 0], 0.3)],
        [Edge([0, 2], 0.5), Edge([3, 1], 0.5)],
    ]


def grouping(n: int) -> list[list[Edge]]:
    """Rounds of groups, some beside a pair or an idle worker, ranks in any order."""
    if n == 3:
        return [[Edge([2, 0, 1], 0.2)], [Edge([0, 1, 2], 1 / 3)], [Edge([0, 2], 0.5), Edge([1], 1.0)]]
    return [[Edge([0, 1, 2, 3], 0.25)], [Edge([3, 1, 0], 0.5), Edge([2], 1.0)], [Edge([1, 2, 3], 0.1), Edge([0], 1.0)]]


def exchanges(transport: Transport, rounds: list[list[Edge]], dtype: torch.dtype, first: int = 0, turn: int = 0) -> None:
    """All buckets of two rounds are in flight at any time; the two sets of buckets take turns. ``turn``: of another call."""
    rank = transport.rank
    transport.prepare([next(e for e in edges if rank in e.ranks) for edges in rounds])
    buckets = [compression_of([torch.empty(size, dtype=dtype)]) for size in SIZES]
    flying: list[list[tuple[Edge, Handle, ExchangeRequest]]] = []

    def land() -> None:
        for edge, handle, own in flying.pop(0):
            if rank == 0 and own.exchange_id.bucket % len(SIZES) == 0:
                time.sleep(0.02)  # the others are ahead: what they write now is not for this round
            handle.wait()
            check(edge, own)
            own.sent.fill_(255)
            own.values[0].fill_(math.nan)

    def check(edge: Edge, own: ExchangeRequest) -> None:
        size = own.values[0].numel()
        assert torch.equal(own.values[0], payload(rank, own.exchange_id, size, dtype)), "what is sent was changed"
        ranks = edge.ranks if len(edge.ranks) > 2 else [r for r in edge.ranks if r != rank]
        sent = [payload(r, own.exchange_id, size, dtype) for r in ranks]
        expected = sent[0] if len(sent) == 1 else torch.stack([x.double() for x in sent]).mean(0)
        found = came(own)
        if len(sent) == 1:
            assert torch.equal(found, expected), (dtype, edge, own.exchange_id)
        else:
            largest = max(float(x.abs().max()) if size else 0.0 for x in sent)
            # One rounding at the end, after sums in float32 at least.
            allowed = torch.finfo(dtype).eps * expected.abs() + 8 * sum_eps(dtype) * largest
            assert ((found.double() - expected).abs() <= allowed).all(), (dtype, edge, own.exchange_id)

    for t in range(first, first + 2 * len(rounds)):
        edge = next(e for e in rounds[t % len(rounds)] if rank in e.ranks)
        if len(flying) == 2:
            land()
        flying.append([])
        if len(edge.ranks) == 1:
            continue
        for bucket, compression in enumerate(buckets):
            exchange_id = ExchangeId(t, bucket + (2 * turn + t % 2) * len(SIZES))
            own = request(payload(rank, exchange_id, SIZES[bucket], dtype), rank, exchange_id, compression=compression)
            handle = transport.start(edge, own)
            assert len(edge.ranks) > 2 or handle.bytes_sent == sum(chunk.payload for chunk in compression.chunks)
            assert handle.bytes_sent <= 2 * compression.nbytes * (len(edge.ranks) - 1)
            flying[-1].append((edge, handle, own))
    while flying:
        land()


def sum_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps


class NotesHints(Int8):
    noted: Sequence[bytes] = ()

    def encode(self, values: Sequence[torch.Tensor], out: torch.Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Any:
        self.noted = hints
        return super().encode(values, out, message_id, hints)


def hinted_exchanges(transport: Transport, edges: list[list[Edge]]) -> None:
    """A compression that waits for the others' hints, which may start the exchange long after this worker."""
    rank, size = transport.rank, _BLOCK_ON_CPU + 4464
    for t, round_ in enumerate(edges):
        edge = next(e for e in round_ if rank in e.ranks)
        if len(edge.ranks) == 1:
            continue

        def own_of(r: int, exchange_id: ExchangeId) -> ExchangeRequest:
            return request(torch.linspace(-1, 1, size) * (1 + r / 10), r, exchange_id, NotesHints)

        exchange_ids = [ExchangeId(t, bucket) for bucket in range(2)]
        handles = []
        for bucket, exchange_id in enumerate(exchange_ids):
            own = own_of(rank, exchange_id)
            if bucket == 1 and rank == edge.ranks[0]:
                time.sleep(0.05)
            handles.append((own, transport.start(edge, own)))
        for own, handle in handles:
            handle.wait()
            members = [own_of(r, own.exchange_id) for r in edge.ranks]
            hints = [member.hint for member in members]
            step = float(2.0 ** max(x - 256 if x > 127 else x for x in b"".join(hints)))
            others = [m for m in members if m.rank != rank]
            assert own.compression.noted == [own.hint, *(m.hint for m in others)], "each once, by rank"  # type: ignore[attr-defined]
            found = torch.cat([d * unit for _, d, unit in own.compression.differences(own.sent, own.received)])
            if len(edge.ranks) == 2:
                [other] = others
                for _ in other.encode([own.hint]):
                    pass
                assert torch.equal(own.received, other.sent)
                expected = other.values[0] - own.values[0]
            else:
                expected = torch.stack([m.values[0] for m in members]).mean(0) - own.values[0]
            assert len(found) == size
            assert (found - expected).abs().max() <= (2 + (len(edge.ranks) > 2)) * step


# -- the contract: control -------------------------------------------------------------------------------------------------

ANY_DTYPE = [
    *FLOATS,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]
MESSAGES = [
    None,
    ["Grüße, 世界 🙂", {"a": [1, 2.5, None, True]}],
    "x" * 100_000,
    "",
    [0.1, 1e-300, 123456789012345678901234567890],
]


def control(transport: Transport) -> None:
    rank, n, collectives = transport.rank, transport.world_size, transport.control

    def values(dtype: torch.dtype, *shape: int) -> Tensor:
        numbers = torch.arange(1, 1 + math.prod(shape)).reshape(shape)
        return (
            (numbers % 2 == 1)
            if dtype is torch.bool
            else (numbers.to(dtype) * (1 + 2j) if dtype.is_complex else numbers.to(dtype))
        )

    for dtype in ANY_DTYPE:
        for expected, blank in (
            (values(dtype, 3, 4), torch.zeros(3, 4, dtype=dtype)),
            (values(dtype, 4, 3), torch.zeros(3, 4, dtype=dtype).t()),
            (values(dtype, 3, 2), torch.zeros(3, 4, dtype=dtype)[:, ::2]),
            (values(dtype, 0, 4), torch.zeros(0, 4, dtype=dtype)),
            (values(dtype, 1)[0], torch.zeros((), dtype=dtype)),
        ):
            if rank == 0:
                blank.copy_(expected)
            stride = blank.stride()
            collectives.broadcast(blank)
            assert torch.equal(blank, expected), dtype
            assert blank.stride() == stride

    for shift in range(len(MESSAGES)):
        found = collectives.gather(MESSAGES[(rank + shift) % len(MESSAGES)])
        assert found == [MESSAGES[(r + shift) % len(MESSAGES)] for r in range(n)]
    odd = collectives.gather([math.nan, math.inf, -math.inf] if rank == n - 1 else [])
    assert odd[:-1] == [[]] * (n - 1)
    assert math.isnan(odd[-1][0])
    assert odd[-1][1:] == [math.inf, -math.inf]

    def own_tensors(r: int) -> list[Tensor]:
        if r == 1:
            return []
        small = [values(dtype, *shape)[..., ::2] for dtype in ANY_DTYPE for shape in ((3, 1 + r), (0, 4), (r, 3))]
        return [*small, torch.tensor(r), torch.full((2_500_001,), r, dtype=torch.uint8), torch.tensor([1j]).conj()]

    for r, tensors in enumerate(collectives.gather_tensors(own_tensors(rank))):
        for tensor, sent in zip(tensors, own_tensors(r), strict=True):
            assert (tensor.dtype, tensor.shape, tensor.device.type) == (sent.dtype, sent.shape, "cpu")
            assert torch.equal(tensor, sent), sent.dtype
    assert collectives.gather_tensors([]) == [[]] * n

    for dtype in FLOATS:
        tensor = payload(rank, ExchangeId(0, 0), 50, dtype)
        expected = torch.stack([payload(r, ExchangeId(0, 0), 50, dtype).double() for r in range(n)]).mean(0)
        collectives.mean(tensor)
        # Sums are taken in float32 at least: 60000 + 60000 is no infinity in float16.
        slack = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * 60000
        assert ((tensor.double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + slack).all(), dtype
    empty = torch.empty(0)
    collectives.mean(empty)


# -- the contract: everybody -----------------------------------------------------------------------------------------------


def whole_contract(transport: Transport) -> str:
    n = transport.world_size
    control(transport)
    for i, dtype in enumerate(FLOATS):
        # Large round numbers, as after days of training.
        first = 24 * (i + 1) if i % 2 else 12 * 10**6 * (i + 1)
        if n != 3:
            exchanges(transport, pairing(n), dtype, first=first, turn=i + 1)
        if n > 2:
            exchanges(transport, grouping(n), dtype, first=first + 12, turn=i + 1)
    hinted_exchanges(transport, grouping(n) if n > 2 else pairing(n))
    transport.report("nothing")
    transport.close()
    return "done"


def between_processes(rank: int, n: int) -> list[str]:
    transport = Staged()
    found = [whole_contract(ProcessGroupTransport()), whole_contract(transport)]
    assert transport._waiter._thread is not None, "nothing was staged"
    return found


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_contract_between_processes(workers, n):
    assert workers(n, between_processes) == [["done", "done"]] * n


@pytest.mark.parametrize("n", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_contract_in_process(n):
    assert run_replicas(n, whole_contract) == ["done"] * n


def test_contract_of_one():
    control(InProcessTransport())
    alone = Collectives(LocalHub(4).transport(3).plane, (3,), ["here"] * 4, 60.0, kind="alone", among=(3,))  # a newcomer's
    control(SimpleNamespace(rank=0, world_size=1, control=alone))  # type: ignore[arg-type]


# -- bytes_sent ------------------------------------------------------------------------------------------------------------


def sent_bytes(transport: Transport) -> list[int]:
    counts = []
    for bucket, (ranks, kind) in enumerate(
        [([0, 1], Lossless), ([0, 1], BFloat16), ([0, 1, 2], Lossless), ([0, 1, 2], BFloat16)]
    ):
        if transport.rank in ranks:
            own = request(torch.ones(300), transport.rank, ExchangeId(0, bucket), kind)
            handle = transport.start(Edge(ranks, 0.5), own)
            counts.append(handle.bytes_sent)
            handle.wait()
    # With many chunks every worker is the root of equally many: a group moves 2 (m - 1)/m messages per worker.
    own = request(torch.ones(9 * _BLOCK_ON_CPU), transport.rank, ExchangeId(1, 0))
    handle = transport.start(Edge([0, 1, 2], 0.5), own)
    handle.wait()
    return [*counts, handle.bytes_sent]


def sent_between_processes(rank: int, n: int) -> list[list[int]]:
    return [sent_bytes(kind()) for kind in (ProcessGroupTransport, Staged)]


def test_bytes_sent(workers):
    whole = 9 * 4 * _BLOCK_ON_CPU * 4 // 3
    # A pair sends its message. A group's first chunk of a round has its first worker as the root, which sends the mean to both
    # others, and the next chunk the second one.
    expected = [[1200, 600, 2400, 600, whole], [1200, 600, 1200, 1200, whole], [1200, 600, whole]]
    assert workers(3, sent_between_processes) == [[counts] * 2 for counts in expected]
    # In a process every other member gets a copy.
    assert run_replicas(3, sent_bytes)[1] == [1200, 600, 2400, 1200, 9 * 8 * _BLOCK_ON_CPU]


# -- messages that were not due --------------------------------------------------------------------------------------------


def swap(
    transport: Transport, edge: Edge, exchange_id: ExchangeId, numel: int = 10, dtype: torch.dtype = torch.float32
) -> None:
    own = request(torch.ones(numel, dtype=dtype), transport.rank, exchange_id)
    transport.start(edge, own).wait()
    assert torch.equal(came(own), own.values[0])


def caught(attempt: Callable[..., object], *args: Any, **options: Any) -> tuple[str, str, float]:
    """The error that is raised (of this library), its text and the seconds until it."""
    began = time.monotonic()
    try:
        attempt(*args, **options)
    except (PeerError, WireError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def wrong_messages(rank: int, n: int) -> dict[str, tuple[str, str, float]]:
    found = {}
    os.environ["DECENT_DP_DEAD_AFTER"] = "2"  # for so long the other one looks for a worker that has ended its connections
    pair, group = Edge([0, 1], 0.5), Edge([0, 1, 2], 1 / 3)
    for kind in (ProcessGroupTransport, Staged):
        for edge in (pair, group):
            transport = kind()
            transport.prepare([group])
            others = [other for other in (Edge([0, 2], 0.5), Edge([1, 2], 0.5)) if rank in other.ranks]
            if rank in edge.ranks:
                exchange_id = ExchangeId(5, 1)
                what = f"{kind.__name__} {len(edge.ranks)}"
                found[what] = caught(swap, transport, edge, exchange_id, numel=10 if rank == 1 else 11 + rank)
                # It does not recover either.
                found[what + " again"] = caught(swap, transport, edge, ExchangeId(6, 0))
                transport.report(found[what][1])
            if len(edge.ranks) == 2:  # other connections are whole
                for other in others:
                    swap(transport, other, ExchangeId(7, 0))
            dist.barrier()
            transport.close()
    return found


def test_messages_of_another_size(workers):
    found = workers(3, wrong_messages)
    assert [len(outcomes) for outcomes in found] == [8, 8, 4]
    kinds = {}
    for rank, outcomes in enumerate(found):
        for what, (kind, message, seconds) in outcomes.items():
            assert seconds < 45, (rank, what, seconds)
            kinds.setdefault(what, []).append(kind)
            if kind == "WireError":
                assert "round 5, bucket 1" in message, message
                assert " bytes where worker " in message, message
            else:
                assert kind == "PeerLostError", (rank, what, message)
    for what, of_ranks in kinds.items():
        # The first to notice closes the connection, and the other may see only that.
        assert "again" in what or "WireError" in of_ranks, (what, of_ranks)


# -- workers that are gone, or silent --------------------------------------------------------------------------------------


def out_of_step(rank: int, n: int) -> Any:
    transport = ProcessGroupTransport()
    shorten(transport, 0.8)
    found = [
        caught(swap, transport, Edge([0, 1], 0.5), exchange_id)
        for exchange_id in (ExchangeId(5 + rank, 0), ExchangeId(9, 2 - rank))
    ]
    shorten(transport, 60)
    transport.control.gather(None)
    # The connection is whole, and what is due still comes.
    swap(transport, Edge([0, 1], 0.5), ExchangeId(10, 0))
    transport.close()
    return found


def test_peers_in_other_rounds_wait_for_each_other(workers):
    for rank, found in enumerate(workers(2, out_of_step)):
        for (kind, message, _), exchange_id in zip(
            found, (f"round {5 + rank}, bucket 0", f"round 9, bucket {2 - rank}"), strict=True
        ):
            assert kind == "PeerTimeoutError"
            assert message.startswith(f"worker {1 - rank} sent nothing for {exchange_id} within"), message


# -- in process ------------------------------------------------------------------------------------------------------------


def test_a_thread_that_raises_is_named_and_its_error_is_raised():
    def work(transport: InProcessTransport) -> Any:
        if transport.rank == 2:
            raise ValueError("no more milk")
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"worker 2 is gone.*round 0, bucket 0"):
            swap(transport, Edge([0, 1, 2], 1 / 3), ExchangeId(0, 0))
        with pytest.raises(PeerLostError, match="worker 2"):
            transport.control.gather(None)
        swap(transport, Edge([1, 0], 0.5), ExchangeId(1, 0))
        assert time.monotonic() - began < 45
        return None

    with pytest.raises(ValueError, match="no more milk"):
        run_replicas(3, work)


def test_a_thread_that_has_returned_is_not_waited_for():
    def work(transport: InProcessTransport) -> Any:
        swap(transport, Edge([0, 1], 0.5), ExchangeId(0, 0))
        if transport.rank == 0:
            # Messages from before its end are still there.
            time.sleep(0.1)
            assert transport.control.gather(0) == [0, 1]
            return caught(swap, transport, Edge([0, 1], 0.5), ExchangeId(1, 0))
        transport.plane.agree("start/0/0", _Said("a gather", 0, 0, 0, -1, False, [], "1").write())
        return None

    kind, message, seconds = run_replicas(2, work)[0]
    assert kind == "PeerLostError"
    assert "worker 1" in message
    assert seconds < 45


def test_a_silent_thread():
    hub = LocalHub(3, timeout=0.2)
    with pytest.raises(PeerTimeoutError, match=r"worker 2 sent nothing for round 4, bucket 1 within 0.2"):
        swap(hub.transport(0), Edge([0, 2], 0.5), ExchangeId(4, 1))
    with pytest.raises(PeerTimeoutError, match=r"have come to a gather within .* 0.2 s: worker 1, worker 2 did not"):
        hub.transport(0).control.gather(None)


def test_two_transports_of_one_hub_do_not_meet():
    def work(transport: InProcessTransport) -> Any:
        both = [transport, transport._hub.transport(transport.rank)]
        own = [request(torch.full((3,), 10.0 * i + transport.rank), transport.rank, ExchangeId(0, 0)) for i in range(2)]
        for handle in [each.start(Edge([0, 1], 0.5), mine) for each, mine in zip(both, own, strict=True)]:
            handle.wait()
        gathered = [each.control.gather(f"{i}{each.rank}") for i, each in enumerate(both)]
        return gathered, [came(mine)[0].item() for mine in own]

    found = run_replicas(2, work, timeout=5.0)
    assert found == [([["00", "01"], ["10", "11"]], [1.0, 11.0]), ([["00", "01"], ["10", "11"]], [0.0, 10.0])]


def test_payloads_of_two_lengths_in_process():
    def work(transport: InProcessTransport) -> Any:
        swap(transport, Edge([0, 1], 0.5), ExchangeId(0, 0), numel=3 + 2 * transport.rank)

    with pytest.raises(WireError, match="round 0, bucket 0"):
        run_replicas(2, work)
