"""One contract, run against everything that moves bytes; and what happens when a worker goes wrong."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decent_dp.bucket import Envelope
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError, WireError
from decent_dp.topo import Edge
from decent_dp.transport import Exchange, Handle, InProcessTransport, Label, ProcessGroupTransport, Transport, run_replicas
from decent_dp.transport.base import Later
from decent_dp.transport.communicators import Notes, peer_error
from decent_dp.transport.group import Groups, NcclGroups
from decent_dp.transport.inprocess import LocalHub
from decent_dp.transport.pairwise import NcclPairs
from decent_dp.transport.waiter import Waiter

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [33, 0, 1, 5000]  # of the payloads of the buckets of a round


class Staged(ProcessGroupTransport):
    """Pairs go as tensors on a GPU would over gloo."""

    def choose(self, edge: Edge, sent: Envelope) -> Exchange:
        return self._staged if len(edge.ranks) == 2 else super().choose(edge, sent)


class Counted(Exchange):
    """Passes on, and looks at what the wrapper asks for."""

    def __init__(self, inner: Exchange) -> None:
        self.inner, self.asked = inner, []

    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        self.asked.append((list(edge.ranks), label))
        return self.inner.start(edge, sent, received, label)


# -- the contract: exchange ------------------------------------------------------------------------------------------------


def payload(rank: int, label: Label, numel: int, dtype: torch.dtype) -> Tensor:
    """What a worker sends. Two of the largest overflow float16 when they are summed."""
    generator = torch.Generator().manual_seed(1000 * label.round + 10 * label.bucket + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
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


def exchanges(transport: Transport, rounds: list[list[Edge]], dtype: torch.dtype, first: int = 0) -> None:
    """All buckets of two rounds are under way at any time; the two sets of envelopes take turns."""
    rank = transport.rank
    transport.prepare([next(e for e in edges if rank in e.ranks) for edges in rounds])
    sets = [[(Envelope(n, dtype, CPU), Envelope(n, dtype, CPU)) for n in SIZES] for _ in range(2)]
    flying: list[list[tuple[Edge, Label, Handle, Envelope, Envelope]]] = []

    def land() -> None:
        for edge, label, handle, sent, received in flying.pop(0):
            if rank == 0 and label.bucket == 0:
                time.sleep(0.02)  # the others are ahead: what they write now is not for this round
            handle.wait()
            check(edge, label, sent, received)
            sent.payload.fill_(math.nan)

    def check(edge: Edge, label: Label, sent: Envelope, received: Envelope) -> None:
        numel = sent.payload.numel()
        others = [payload(r, label, numel, dtype).double() for r in edge.ranks if r != rank]
        mean = torch.stack(others).mean(0)
        largest = max(float(o.abs().max()) if numel else 0.0 for o in [*others, sent.payload.double()])
        # One rounding at the end, and where it is a sum those of sums in float32.
        sums = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * largest if len(others) > 1 else 0.0
        allowed = torch.finfo(dtype).eps * mean.abs() * (len(others) > 1) + sums
        assert ((received.payload.double() - mean).abs() <= allowed).all(), (dtype, edge, label)
        assert torch.equal(sent.payload, payload(rank, label, numel, dtype)), "what is sent was changed"

    for t in range(first, first + 2 * len(rounds)):
        edge = next(e for e in rounds[t % len(rounds)] if rank in e.ranks)
        if len(flying) == 2:
            land()
        flying.append([])
        if len(edge.ranks) == 1:
            continue
        for bucket, (sent, received) in enumerate(sets[t % 2]):
            label = Label(t, bucket)
            sent.payload.copy_(payload(rank, label, sent.payload.numel(), dtype))
            received.payload.fill_(math.nan)
            handle = transport.exchange.start(edge, sent, received, label)
            own = sent.payload.nbytes
            assert own <= handle.bytes_sent or not isinstance(transport, ProcessGroupTransport) or len(edge.ranks) > 2
            assert handle.bytes_sent <= 64 + 4 * own * (len(edge.ranks) - 1)
            flying[-1].append((edge, label, handle, sent, received))
    while flying:
        land()


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

    for dtype in FLOATS:
        tensor = payload(rank, Label(0, 0), 50, dtype)
        expected = torch.stack([payload(r, Label(0, 0), 50, dtype).double() for r in range(n)]).mean(0)
        collectives.mean(tensor).wait()
        # Sums are taken in float32 at least: 60000 + 60000 is no infinity in float16.
        slack = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * 60000
        assert ((tensor.double() - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + slack).all(), dtype
    empty = torch.empty(0)
    collectives.mean(empty).wait()

    flying = []
    for i in range(20):
        tensor = torch.full((7 + i % 3,), float(rank + i * n))
        flying.append((i, tensor, collectives.mean(tensor)))
        if i % 5 == 2:
            assert collectives.gather(i) == [i] * n  # others go past those under way
    for i, tensor, handle in flying:
        handle.wait()
        assert torch.equal(tensor, torch.full_like(tensor, (n - 1) / 2 + i * n))


# -- the contract: everybody -----------------------------------------------------------------------------------------------


def whole_contract(transport: Transport) -> str:
    n = transport.world_size
    control(transport)
    for i, dtype in enumerate(FLOATS):
        # Rounds go on: large numbers too, as after days of training.
        first = 12 * i if i % 2 else 12 * 10**6 * i
        if n != 3:
            exchanges(transport, pairing(n), dtype, first)
        if n > 2:
            exchanges(transport, grouping(n), dtype, first)
    transport.report("nothing")
    transport.close()
    return "held"


def over_gloo(rank: int, n: int) -> list[str]:
    return [whole_contract(kind()) for kind in (ProcessGroupTransport, Staged)]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_contract_over_gloo(workers, n):
    assert workers(n, over_gloo) == [["held", "held"]] * n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_contract_in_process(n):
    assert run_replicas(n, whole_contract, timeout=20) == ["held"] * n


def test_contract_of_one():
    control(InProcessTransport())


def test_idle_workers_are_left_alone():
    def work(transport: InProcessTransport) -> list[Any]:
        counted = transport._exchange = Counted(transport.exchange)
        torch.manual_seed(0)
        model = DecentralizedDataParallel(
            nn.Linear(2, 2), lambda params: torch.optim.SGD(params, lr=0.1), topology="ring", transport=transport
        )
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
        model.close()
        return counted.asked

    for rank, asked in enumerate(run_replicas(3, work, timeout=20)):
        assert [(len(ranks), label.round) for ranks, label in asked] == [(2, t) for t in range(6) if t % 3 != rank]


# -- bytes_sent ------------------------------------------------------------------------------------------------------------


def sent_bytes(transport: Transport) -> list[int]:
    counts = []
    for bucket, (ranks, dtype) in enumerate(
        [([0, 1], torch.float32), ([0, 1], torch.bfloat16), ([0, 1, 2], torch.float32), ([0, 1, 2], torch.bfloat16)]
    ):
        if transport.rank in ranks:
            sent, received = envelopes(300, dtype)
            handle = transport.exchange.start(Edge(ranks, 0.5), sent, received, Label(0, bucket))
            counts.append(handle.bytes_sent)
            handle.wait()
    return counts


def sent_over_gloo(rank: int, n: int) -> list[list[int]]:
    return [sent_bytes(kind()) for kind in (ProcessGroupTransport, Staged)]


def test_bytes_sent(workers):
    # A pair sends its message, 64 bytes of header included; a ring of three moves 4/3 of the (float32) payload.
    gloo = [1264, 664, 1600, 1600]
    assert workers(3, sent_over_gloo) == [[gloo] * 2, [gloo] * 2, [[1600, 1600]] * 2]
    # In a process every other member gets a copy.
    assert run_replicas(3, sent_bytes, timeout=20)[1] == [1200, 600, 2400, 1200]


# -- messages that were not due --------------------------------------------------------------------------------------------


def envelopes(numel: int = 10, dtype: torch.dtype = torch.float32) -> tuple[Envelope, Envelope]:
    sent, received = Envelope(numel, dtype, CPU), Envelope(numel, dtype, CPU)
    sent.payload.fill_(1.0)
    return sent, received


def swap(transport: Transport, edge: Edge, label: Label, numel: int = 10, dtype: torch.dtype = torch.float32) -> None:
    sent, received = envelopes(numel, dtype)
    transport.exchange.start(edge, sent, received, label).wait()
    assert torch.equal(received.payload, sent.payload)


def caught(attempt: Callable[..., object], *args: Any, **options: Any) -> tuple[str, str, float]:
    """What is raised (its kind must be the house's own), in which words and after how many seconds."""
    began = time.monotonic()
    try:
        attempt(*args, **options)
    except (PeerError, WireError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def wrong_messages(rank: int, n: int) -> dict[str, tuple[str, str, float]]:
    found = {}
    pair, group = Edge([0, 1], 0.5), Edge([0, 1, 2], 1 / 3)
    for kind in (ProcessGroupTransport, Staged):
        name, transport = kind.__name__, kind()
        transport.prepare([group])
        if rank < 2:
            found[f"{name} round"] = caught(swap, transport, pair, Label(5 + rank, 0))
            # A worker of another version or kind, by hand: another bucket, a shorter message, a foreign one.
            for what, change in (("bucket", (2, 9)), ("rank", (3, 7)), ("magic", (0, 1)), ("bytes", (4, 99))):
                if rank == 0:
                    sent, _ = envelopes()
                    header = [0x0DECE47D_00000001, 4, 0, 0, sent.raw.numel()]
                    header[change[0]] = change[1]
                    sent.raw[:40].view(torch.int64).copy_(torch.tensor(header))
                    into = torch.empty_like(sent.raw)
                    works = transport._pairs.post(1, sent.raw, into, Label(4, 0))
                    for work in works:
                        work.wait()
                else:
                    found[f"{name} {what}"] = caught(swap, transport, pair, Label(4, 0))
            if rank == 0:
                work = transport._communicators["all"].send([torch.zeros(40, dtype=torch.uint8)], 1, 0)
                transport._communicators["all"].recv([torch.empty(104, dtype=torch.uint8)], 1, 0).wait()
                work.wait()
            else:
                found[f"{name} shorter"] = caught(swap, transport, pair, Label(4, 0))
        if kind is ProcessGroupTransport:
            for dtype in FLOATS:
                out_of_step = Label(5 + (rank == 2), 1)
                found[f"group round {dtype}"] = caught(swap, transport, group, out_of_step, dtype=dtype)
                other = Label(5, 1 + (rank == 0))
                found[f"group bucket {dtype}"] = caught(swap, transport, group, other, dtype=dtype)
            found["group round empty"] = caught(swap, transport, group, Label(int(rank == 1), 1), numel=0)
        # The connection is whole: what is due still comes.
        if rank < 2:
            swap(transport, pair, Label(7, 0))
        swap(transport, group, Label(8, 0))
        transport.close()
    return found


def test_messages_that_were_not_due(workers):
    found = workers(3, wrong_messages)
    assert len(found[1]) > len(found[2]) >= 9
    for rank, outcomes in enumerate(found):
        for what, (kind, message, _) in outcomes.items():
            assert kind == "WireError", (rank, what)
            if "group" in what:
                assert re.search(r"round \d+, bucket \d+", message)
            else:
                assert f"worker {1 - rank} sent" in message, what
    assert "5, 0, 0, 104) where" in found[1]["ProcessGroupTransport round"][1]
    assert "6, 0, 0, 104) was due" in found[1]["Staged round"][1]


# -- workers that are gone, or silent --------------------------------------------------------------------------------------


def a_peer_that_is_gone(rank: int, n: int, staged: bool) -> Any:
    transport = (Staged if staged else ProcessGroupTransport)()
    first, last, group = Edge([0, 1], 0.5), Edge([0, 3], 0.5), Edge([1, 2, 3], 1 / 3)
    transport.prepare([group] if rank else [])
    for edge in (first, last, group):
        if rank in edge.ranks:
            swap(transport, edge, Label(0, 0))
    transport.control.gather(None)
    if rank == 3:
        transport.report("ValueError: the cat ate my batch")
        os._exit(3)
    found = {}
    if rank == 0:
        found["pair"] = caught(swap, transport, last, Label(1, 0))
        found["pair again"] = caught(swap, transport, last, Label(2, 0))
    else:
        found["group"] = caught(swap, transport, group, Label(1, 0))
        found["group again"] = caught(swap, transport, group, Label(2, 0))
    if rank < 2:
        swap(transport, first, Label(1, 0))  # only what needs the lost one is lost
    found["gather"] = caught(transport.control.gather, None)
    transport.report("PeerLostError")
    transport.close()
    return found


@pytest.mark.parametrize("staged", [False, True])
def test_a_peer_that_is_gone(workers, staged):
    outcomes = workers.outcomes(4, a_peer_that_is_gone, staged, group_timeout=25)
    assert outcomes[3].exitcode == 3
    for rank, outcome in enumerate(outcomes[:3]):
        assert not outcome.error, outcome.trace
        names = {"pair": "worker 3", "group": f"one of the workers {[r for r in (1, 2, 3) if r != rank]}"}
        for what, (kind, message, seconds) in outcome.value.items():
            assert (kind, seconds < 8) == ("PeerLostError", True), (rank, what, seconds, message)
            if what != "gather":
                assert message.startswith(names[what.split()[0]]), message
                assert "is gone" in message
                assert "round" in message
            assert "Worker 3 reported: ValueError: the cat ate my batch" in message


def a_peer_that_is_silent(rank: int, n: int) -> Any:
    """The last worker is silent; each of the others waits for it in another way, on a transport that no other uses."""
    plain, other, grouped, staged = ProcessGroupTransport(), ProcessGroupTransport(), ProcessGroupTransport(), Staged()
    grouped.prepare([Edge([1, 2, 4], 1 / 3)] if rank in (1, 2, 4) else [])
    other.control.gather(None)
    label, found = Label(3, 1), None
    if rank == 0:
        found = caught(swap, plain, Edge([0, 4], 0.5), label)
    elif rank == 1:
        found = caught(swap, grouped, Edge([1, 2, 4], 1 / 3), label)
    elif rank == 2:
        found = caught(swap, staged, Edge([2, 4], 0.5), label)
    elif rank == 3:
        found = caught(other.control.gather, None)
    time.sleep(0.7 if found else 1.9)  # nobody leaves before the last has lost its patience
    for transport in (plain, other, grouped, staged):
        transport.close()
    return found


def test_a_peer_that_is_silent(workers):
    starts = [
        "worker 4 sent nothing for round 3, bucket 1",
        "one of the workers [2, 4] sent nothing for round 3, bucket 1",
        "worker 4 sent nothing for round 3, bucket 1",
        "one of the workers [0, 1, 2, 4] sent nothing for a gather",
    ]
    found = workers(5, a_peer_that_is_silent, group_timeout=1.2)
    for start, (kind, message, seconds) in zip(starts, found, strict=False):
        assert kind == "PeerTimeoutError", message
        assert 1.0 < seconds < 1.9, seconds
        assert message.startswith(f"{start} within the process group's timeout of 1.2 s"), message
        assert "model.join()" in message


def leavers(rank: int, n: int, size: int, abruptly: bool) -> str:
    """Edges of neighbours; the first of each edge waits and is gone, the last comes late to its own wait."""
    edge = next(Edge(list(range(a, a + size)), 0.5) for a in range(0, n, size) if a <= rank < a + size)
    transport = ProcessGroupTransport()
    transport.prepare([edge])
    numel = 4_000_000  # more than the sockets hold: a send that is not waited for would be cut off
    sent, received = envelopes(numel)
    transport.exchange.start(edge, sent, received, Label(0, 0)).wait()
    handles = [transport.exchange.start(edge, sent, received, Label(1, 0))]
    if rank != edge.ranks[0]:
        time.sleep(0.1)
    for handle in handles:
        handle.wait()
    if abruptly and rank == edge.ranks[0]:
        os._exit(0)
    assert torch.equal(received.payload, sent.payload)
    return "fine"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("abruptly", [False, True])
def test_who_leaves_first_breaks_nobody(workers, size, abruptly):
    n = 6
    for _ in range(2):
        outcomes = workers.outcomes(n, leavers, size, abruptly)
        for rank, outcome in enumerate(outcomes):
            if not (abruptly and rank % size == 0):
                assert outcome.value == "fine", (rank, outcome.trace)


# -- in process ------------------------------------------------------------------------------------------------------------


def test_a_thread_that_raises_is_named_and_quoted():
    def work(transport: InProcessTransport) -> Any:
        if transport.rank == 2:
            transport.report("ValueError: no more milk")
            raise ValueError("no more milk")
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"worker 2 is gone.*round 0, bucket 0.*no more milk"):
            swap(transport, Edge([0, 1, 2], 1 / 3), Label(0, 0))
        with pytest.raises(PeerLostError, match="worker 2"):
            transport.control.gather(None)
        swap(transport, Edge([1, 0], 0.5), Label(1, 0))
        assert time.monotonic() - began < 5
        return None

    with pytest.raises(ValueError, match="no more milk"):
        run_replicas(3, work, timeout=30)


def test_the_consequence_of_an_error_does_not_hide_it():
    def work(transport: InProcessTransport) -> Any:
        if transport.rank == 1:
            raise KeyError("cause")
        return transport.control.gather(None)

    with pytest.raises(KeyError, match="cause"):
        run_replicas(3, work, timeout=30)


def test_a_thread_that_has_returned_is_not_waited_for():
    def work(transport: InProcessTransport) -> Any:
        swap(transport, Edge([0, 1], 0.5), Label(0, 0))
        if transport.rank == 0:
            # What it had brought before it left is still there.
            time.sleep(0.1)
            assert transport.control.gather(0) == [0, 1]
            return caught(swap, transport, Edge([0, 1], 0.5), Label(1, 0))
        transport._hub.bring(("control", 0), 1, "1")
        return None

    kind, message, seconds = run_replicas(2, work, timeout=6)[0]
    assert kind == "PeerLostError"
    assert "worker 1" in message
    assert seconds < 3


def test_a_silent_thread():
    hub = LocalHub(3, timeout=0.2)
    with pytest.raises(PeerTimeoutError, match=r"worker 2 sent nothing for round 4, bucket 1 within 0.2"):
        swap(hub.transport(0), Edge([0, 2], 0.5), Label(4, 1))
    with pytest.raises(PeerTimeoutError, match="worker 1 sent nothing for a gather"):
        hub.transport(0).control.gather(None)


def test_payloads_of_two_lengths_in_process():
    def work(transport: InProcessTransport) -> Any:
        swap(transport, Edge([0, 1], 0.5), Label(0, 0), numel=3 + transport.rank)

    with pytest.raises(WireError, match="round 0, bucket 0"):
        run_replicas(2, work, timeout=10)


# -- communicators ---------------------------------------------------------------------------------------------------------


def listening() -> set[str]:
    """'address:port', in the kernel's hexadecimal, on which this process listens."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found |= {row[1] for row in rows if row[3] == "0A" and row[9] in own}
    return found


def quiet_and_few(rank: int, n: int) -> tuple[int, set[str]]:
    made, before = [], listening()
    gloo = dist.ProcessGroupGloo

    class Counting(gloo):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            made.append(args[1:3])
            super().__init__(*args)

    dist.ProcessGroupGloo = Counting
    torch.manual_seed(rank)
    model = DecentralizedDataParallel(nn.Linear(3, 2), lambda p: torch.optim.SGD(p, lr=0.1), topology="one-peer-exp")
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
    opened = listening() - before
    model.close()
    return len(made), {address.split(":")[0] for address in opened}


def test_few_communicators_and_nothing_beyond_loopback(workers):
    for made, addresses in workers(16, quiet_and_few, timeout=60):
        assert 1 <= made <= 2
        # 127.0.0.1, as the kernel prints it.
        assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def listens(rank: int, n: int) -> tuple[int, set[str]]:
    def beyond() -> Any:
        # Where the host's own name is a loopback address, what it listens on would not show it.
        raise AssertionError("a device for other machines was made")

    dist.ProcessGroupGloo.create_default_device = beyond
    before = listening()
    transport = ProcessGroupTransport()
    transport.prepare([Edge([0, 1, 2], 1 / 3)])
    opened = listening() - before
    swap(transport, Edge([0, 1, 2], 1 / 3), Label(0, 0))
    return len(opened), {address.split(":")[0] for address in opened | (listening() - before)}


def test_a_group_listens_on_loopback_alone(workers):
    for opened, addresses in workers(3, listens):
        assert opened >= 1, "the test does not see our sockets"
        assert addresses == {"0100007F"}


def beside_user_groups(rank: int, n: int) -> list[Any]:
    def total(group: Any) -> float | None:
        if dist.get_rank(group) < 0:
            return None
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        return float(tensor)

    before = dist.new_group([0, 2])
    members = dist.new_group([3, 1, 2])
    found = [total(before)]
    if rank in (1, 2, 3):
        transport = ProcessGroupTransport(members)
        assert (transport.rank, transport.world_size) == (dist.get_rank(members), 3)
        # Only its members make it, and only they are counted: the rest is the contract again.
        control(transport)
        exchanges(transport, grouping(3), torch.float32)
        torch.manual_seed(rank)
        model = DecentralizedDataParallel(
            nn.Linear(3, 1), lambda p: torch.optim.SGD(p, lr=0.0), topology="complete", process_group=members
        )
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
        found.append(model.consensus_distance() < 1e-6)
    after = dist.new_group([0, 1])
    everybody = ProcessGroupTransport()
    control(everybody)
    swap(everybody, Edge([0, 1, 2, 3], 0.25), Label(0, 0))
    last = dist.new_group([0, 1, 2, 3])
    found += [total(group) for group in (before, members, after, last, None)]
    # Two wrappers side by side do not hear each other.
    one, two = ProcessGroupTransport(), ProcessGroupTransport()
    edge = Edge([0, 1], 0.5) if rank < 2 else Edge([2, 3], 0.5)
    pairs = [envelopes() for _ in range(2)]
    for i, (sent, _) in enumerate(pairs):
        sent.payload.fill_(10.0 * rank + i)
    order = [0, 1] if rank % 2 else [1, 0]
    handles = {i: (one, two)[i].exchange.start(edge, *pairs[i], Label(0, 0)) for i in order}
    for i in order:
        handles[i].wait()
        assert torch.equal(pairs[i][1].payload, torch.full((10,), 10.0 * (rank ^ 1) + i))
    return found


def test_beside_groups_of_the_users(workers):
    found = workers(4, beside_user_groups)
    assert found[0] == [2.0, 2.0, None, 1.0, 6.0, 6.0]
    assert found[1] == [None, True, None, 6.0, 1.0, 6.0, 6.0]
    assert found[2] == [2.0, True, 2.0, 6.0, None, 6.0, 6.0]
    assert found[3] == [None, True, None, 6.0, None, 6.0, 6.0]


def its_timeout(rank: int, n: int) -> tuple[float, float]:
    short = dist.new_group([0, 1], timeout=timedelta(seconds=1.25))
    return (
        ProcessGroupTransport()._meeting.timeout.total_seconds(),
        ProcessGroupTransport(short)._meeting.timeout.total_seconds(),
    )


def test_the_timeout_is_the_process_groups(workers):
    assert workers(2, its_timeout, group_timeout=7.5) == [(7.5, 1.25)] * 2


# -- NCCL, by a communicator that only notes what it is asked for ----------------------------------------------------------


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

    def allreduce(self, tensors: list[Tensor]) -> Noting:
        tensors[0].mul_(3)
        return self._note("allreduce", tensors[0].dtype, tensors[0].numel())

    def wait(self) -> None:
        self._note("wait")


def explain(error: RuntimeError, ranks: list[int], label: Label) -> RuntimeError:
    return PeerLostError(f"{ranks} {label}: {error}")


def test_nccl_pairs_are_one_grouped_call():
    noting = Noting()
    exchange = NcclPairs(noting, 5, explain)
    sent, received = envelopes(7, torch.bfloat16)
    first = exchange.start(Edge([5, 2], 0.5), sent, received, Label(0, 0))
    second = exchange.start(Edge([0, 5], 0.5), sent, received, Label(1, 0))
    grouped = [("start",), ("send", 2, torch.bfloat16, 7), ("recv", 2, torch.bfloat16, 7), ("end",)]
    assert noting.calls == grouped + [(c[0], 0, *c[2:]) if len(c) > 1 else c for c in grouped]
    first.wait()
    assert noting.calls[8:] == [("wait",)]
    assert torch.equal(received.payload, torch.full((7,), 2.0, dtype=torch.bfloat16))
    assert (first.bytes_sent, second.bytes_sent) == (14, 14)


@pytest.mark.parametrize("where", ["start", "send", "recv", "end", "wait"])
def test_nccl_pairs_name_the_peer(where):
    exchange = NcclPairs(Noting(where), 0, explain)
    with pytest.raises(PeerLostError, match=r"\[3\] round 2, bucket 1: NCCL error"):
        exchange.start(Edge([0, 3], 0.5), *envelopes(), Label(2, 1)).wait()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_groups_on_the_device(dtype):
    noting, asked = Noting(), []

    def connect(ranks: tuple[int, ...]) -> Noting:
        asked.append(ranks)
        return noting

    exchange = NcclGroups(1, connect, explain)
    sent, received = envelopes(9, dtype)
    sent.payload.copy_(torch.arange(9))
    exchange.start(Edge([4, 1, 2], 0.5), sent, received, Label(1, 2)).wait()
    assert asked == [(1, 2, 4)]
    # All three had the same: the mean of the others is what was sent.
    assert torch.equal(received.payload, sent.payload)
    [(_, reduced, _), *rest] = noting.calls
    assert reduced == torch.promote_types(dtype, torch.float32)
    assert rest == [("wait",)]


def test_a_group_that_fails_names_the_others():
    for where in ("allreduce", "wait"):
        exchange = NcclGroups(1, lambda ranks, where=where: Noting(where), explain)
        with pytest.raises(PeerLostError, match=r"\[2, 4\] round 1, bucket 3: NCCL error"):
            exchange.start(Edge([4, 1, 2], 0.5), *envelopes(), Label(1, 3)).wait()
    waiter = Waiter("test")
    groups = Groups(1, lambda ranks: Noting("allreduce"), waiter, explain)
    handles = [groups.start(Edge([4, 1, 2], 0.5), *envelopes(), Label(1, bucket)) for bucket in range(2)]
    for bucket, handle in enumerate(handles):
        with pytest.raises(PeerLostError, match=rf"\[2, 4\] round 1, bucket {bucket}: NCCL error"):
            handle.wait()
    waiter.close()
    with pytest.raises(RuntimeError, match="closed"):
        groups.start(Edge([4, 1, 2], 0.5), *envelopes(), Label(2, 0))


# -- small parts -----------------------------------------------------------------------------------------------------------


def test_the_waiter_keeps_order_and_outlives_errors():
    waiter, done = Waiter("test"), []

    def fail() -> None:
        raise ZeroDivisionError("mine")

    futures = [waiter.submit(lambda i=i: (time.sleep(0.01 * (3 - i)), done.append(i))) for i in range(3)]
    failed = waiter.submit(fail)
    last = waiter.submit(lambda: done.append("last"))
    for future in (*futures, last):
        assert future.result(5) is None
    with pytest.raises(ZeroDivisionError, match="mine"):
        failed.result(5)
    assert done == [0, 1, 2, "last"]
    thread = waiter._thread
    assert thread is not None
    assert thread.daemon
    waiter.close()
    thread.join(5)
    assert not thread.is_alive()


def test_labels_and_handles():
    assert str(Label(3, 1)) == "round 3, bucket 1"
    calls = []
    handle = Later(lambda: calls.append(1), 12)
    assert (handle.bytes_sent, calls) == (12, [])
    handle.wait()
    assert calls == [1]


class BrokenStore:
    """A store whose keeper is gone."""

    def set(self, *_: Any) -> None:
        raise RuntimeError("connection was reset")

    check = get = set


def test_notes():
    store = dist.HashStore()
    mine, other = Notes(store, 0), Notes(store, 1)
    assert mine.read([0, 1]) == ""
    other.write("ValueError: größer\nthan " + "x" * 5000)
    mine.write("my own")
    said = mine.read([0, 1, 2])
    assert said.startswith(" Worker 1 reported: ValueError: größer\nthan x")
    assert "my own" not in said
    assert len(said) < 2100
    broken = Notes(BrokenStore(), 0)
    broken.write("lost")
    assert "store does not answer" in broken.read([1])


def test_words_of_errors():
    notes = Notes(dist.HashStore(), 0)
    minute = timedelta(minutes=1)
    gone = peer_error(RuntimeError("Connection closed by peer [127.0.0.1]:1"), [4], "round 1, bucket 0", notes, minute)
    assert isinstance(gone, PeerLostError)
    assert str(gone).startswith("worker 4 is gone")
    silent = peer_error(RuntimeError("Timed out waiting 60000ms for recv"), [4, 5], "a gather", notes, minute)
    assert isinstance(silent, PeerTimeoutError)
    assert "one of the workers [4, 5] sent nothing for a gather within the process group's timeout of 60 s" in str(silent)
