"""Mixing in every h-th update, and one topology after another, with real workers: against NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import DisagreementError, OutOfStepError
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Edge, RingTopology, SwitchTopology, Topology, TopologyReg
from decent_dp.transport import run_replicas
from tests.test_law import AdamWTwin, Linear, data, gradient, matrix

STEPS = 11
ADAMW = partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)


# -- the twin --------------------------------------------------------------------------------------------------------------


def plain(name: str, n: int) -> Topology:
    topology = TopologyReg.registry[name](1, world_size=n, rank=0)  # type: ignore[call-arg]
    assert isinstance(topology, Topology)
    return topology


def mix_of(t: int, h: int, offset: int) -> int | None:
    """The number of the mix in update t, None if there is none: one in every h updates, in that before the turn begins."""
    return t // h if (t + 1) % h == offset % h else None


def mixing(n: int, t: int, turns: list[tuple[str, int]], h: int, offset: int = 0) -> np.ndarray | None:
    """Of update t, None if it does not mix. ``turns`` are names and how many updates each is in use."""
    starts = np.cumsum([0, *(length for _, length in turns)])
    turn = max(i for i in range(len(turns)) if starts[i] <= t)
    mix = mix_of(t - int(starts[turn]), h, offset)
    return None if mix is None else matrix(plain(turns[turn][0], n).round(mix), n)


@dataclass
class Part:
    """Some rows of x that are a bucket: their turn begins ``offset`` updates after a multiple of h and has ``time`` updates."""

    rows: slice
    offset: int
    time: int
    sent: Any = None
    at: int = -1


def parts(h: int) -> list[Part]:
    """The turns: the last registered parameter, of 3 rows of 5, comes first."""
    first = h * 3 // 5
    if not first:
        return [Part(slice(0, 5), 0, h)]
    return [Part(slice(2, 5), 0, first), Part(slice(0, 2), first, h - first)]


def twin(
    n: int,
    turns: list[tuple[str, int]],
    h: int,
    overlap: bool,
    batches: list[int] | None = None,
    k: int = 1,
) -> Any:
    """The parameters of each worker after its batches; ``k`` are summed before a step."""
    x = [np.random.default_rng(7).normal(size=(5, 3)) for _ in range(n)]
    batches = batches or [STEPS] * n
    adam, buckets = AdamWTwin(n), parts(h)

    def finish(part: Part) -> None:
        w = mixing(n, part.at, turns, h, part.offset)
        moves = [sum(w[i, j] * (part.sent[j] - part.sent[i]) for j in range(n)) for i in range(n)]
        for i in range(n):
            x[i][part.rows] += moves[i]
        part.sent = None

    for t in range(max(batches)):
        g = [sum(gradient(x[i], i, k * t + j) for j in range(k)) for i in range(n)]
        mixes = [mixing(n, t, turns, h, part.offset) is not None for part in buckets]
        for part, again in zip(buckets, mixes, strict=True):
            if overlap and part.sent is not None and (again or t - part.at >= part.time):
                finish(part)
        x = [adam(i, t, x[i], g[i]) if t < batches[i] else x[i].copy() for i in range(n)]
        for part, again in zip(buckets, mixes, strict=True):
            if again:
                part.sent, part.at = [xi[part.rows].copy() for xi in x], t
                if not overlap:
                    finish(part)
    return x


# -- the same with the library ---------------------------------------------------------------------------------------------


def train(rank: int, steps: int = STEPS, k: int = 1, join: bool = False, **options: Any) -> tuple[np.ndarray, Any, float]:
    model = DecentralizedDataParallel(Linear(), ADAMW, **options)

    def update(t: int) -> None:
        for j in range(k):
            a, b = (torch.from_numpy(array) for array in data(rank, k * t + j))
            loss = (model(a) - b).square().mean()
            if j < k - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()

    if join:
        with model.join():
            for t in range(steps):
                update(t)
    else:
        for t in range(steps):
            update(t)
    values = torch.cat([p.detach().clone() for p in model.module.parameters()]).numpy()
    stats, distance = model.stats(), model.consensus_distance()
    model.close()
    return values, stats, distance


RING, BASE = [("ring", 10**9)], [("base-2", 10**9)]
SWITCH = [("complete", 4), ("ring", 3), ("base-2", 10**9)]
CASES: list[tuple[Any, list[tuple[str, int]], int]] = [
    ("ring", RING, 3),
    ("base-2", BASE, 3),
    ("ring", RING, 2),
    ("complete:4,ring:3,base-2", SWITCH, 1),
    ("complete:4,ring:3,base-2", SWITCH, 2),
    ("complete:4,ring:3,base-2", SWITCH, 3),
]


def each(rank: int, n: int, chosen: list[tuple[int, bool]]) -> list[np.ndarray]:
    return [
        train(rank, topology=name, mix_every=h, overlap=overlap, bucket_size_in_mb=1e-6 if i % 2 else 25)[0]
        for i, overlap in chosen
        for name, _, h in [CASES[i]]
    ]


SOME = [(0, True), (1, False), (1, True), (3, False), (4, True), (5, True)]
ALL = [(i, overlap) for i in range(len(CASES)) for overlap in (True, False)]


@pytest.mark.parametrize(("n", "chosen"), [(3, SOME), *(pytest.param(n, ALL, marks=pytest.mark.slow) for n in (3, 5, 6))])
def test_workers_equal_numpy(workers, n, chosen):
    results = workers(n, each, chosen)
    for at, (i, overlap) in enumerate(chosen):
        want = twin(n, CASES[i][1], CASES[i][2], overlap)
        for rank in range(n):
            np.testing.assert_allclose(results[rank][at], want[rank], rtol=0, atol=1e-13, err_msg=f"{CASES[i]} worker {rank}")
    # Each case is another computation: else the comparison would prove little.
    assert all(not np.allclose(a, b, atol=1e-6) for at, a in enumerate(results[0]) for b in results[0][:at])


def test_accumulation_and_uneven_batches():
    batches = [4, 9, 6]

    def body(transport: Any) -> list[Any]:
        common = {"topology": "base-2", "mix_every": 2, "transport": transport}
        summed = train(transport.rank, 6, k=2, **common)
        uneven = train(transport.rank, batches[transport.rank], join=True, **common)
        return [summed, uneven]

    results = run_replicas(3, body)
    wanted = twin(3, BASE, 2, True, [6] * 3, k=2), twin(3, BASE, 2, True, batches)
    for rank, found in enumerate(results):
        for (values, *_), want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(values, want[rank], rtol=0, atol=1e-13)
        assert (found[0][1].updates, found[0][1].rounds) == (6, 6)
        assert (found[1][1].updates, found[1][1].rounds) == (batches[rank], 9)


def lossy(rank: int, n: int) -> list[Any]:
    return [
        train(rank, 60, topology=name, mix_every=h, compression=compression, overlap=overlap)
        for compression in (None, "bfloat16", "int8")
        for name, h in (("base-2", 3), ("complete:5,ring", 2), ("random-matching", 1))
        for overlap in (True, False)
    ]


@pytest.mark.slow
def test_lossy_compressions(workers):
    """They go where the lossless one goes, nearly: replicas are as close together."""
    n = 5
    results = workers(n, lossy)
    for i in range(6):
        exact, half, byte = (results[0][i + 6 * compression] for compression in range(3))
        for found in (half, byte):
            assert found[1].rounds == exact[1].rounds == 60
            assert found[1].exchanges == exact[1].exchanges
            assert 0.5 * exact[2] < found[2] < 2 * exact[2]
        assert exact[1].bytes_sent > 1.5 * half[1].bytes_sent > 0
        assert byte[1].bytes_sent > 0  # so small a model's message is mostly its records
        mean = [np.mean([results[rank][i + 6 * compression][0] for rank in range(n)], axis=0) for compression in range(3)]
        assert abs(mean[0] - mean[1]).max() < 0.02
        assert abs(mean[0] - mean[2]).max() < 0.1


def test_messages_and_their_rounds():
    """Only the mixes send, also of a topology of the user's own, and the ring's both sides come up though 2 divides 4."""

    def body(transport: Any) -> list[int]:
        topology = RingTopology(world_size=4, rank=transport.rank)
        model = DecentralizedDataParallel(Linear(), ADAMW, topology=topology, mix_every=4, transport=transport)
        counts = []
        for t in range(9):
            a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
            (model(a) - b).square().mean().backward()
            counts.append(model.stats().bytes_sent)
        model.close()
        return counts

    for counts in run_replicas(4, body):
        assert counts == [0, 48, 48, 120, 120, 168, 168, 240, 240]  # three rows of five, and before them two in their turn


def test_edges_of_the_mixes_are_connected_ahead():
    """No connection is left for the first mix to make."""
    assert run_replicas(4, connected) == [[[0, 1], [0, 3]], [[0, 1], [1, 2]], [[2, 3], [1, 2]], [[2, 3], [0, 3]]]


def connected(transport: Any) -> list[list[int]]:
    prepared: list[Edge] = []
    transport.prepare = prepared.extend
    model = DecentralizedDataParallel(Linear(), ADAMW, topology="ring", mix_every=100, transport=transport)
    model.close()
    return [edge.ranks for edge in prepared]


# -- stopped and resumed ---------------------------------------------------------------------------------------------------

RESUMED = [("complete:3,ring", 2), ("complete:4,ring:3,base-2", 1), ("random-matching", 1), ("random-matching", 3), ("ring", 4)]
FIRST, ALL = 5, 12


def steps(model: DecentralizedDataParallel, rank: int, updates: range) -> list[np.ndarray]:
    """The values that each update leaves behind."""
    found = []
    for t in updates:
        a, b = (torch.from_numpy(array) for array in data(rank, t))
        (model(a) - b).square().mean().backward()
        found.append(torch.cat([p.detach().clone() for p in model.module.parameters()]).numpy())
    return found


def stopped(rank: int, compression: str | None = None, overlap: bool = False, again: bool = True) -> list[Any]:
    results = []
    for topology, h in RESUMED:
        options: dict[str, Any] = {"topology": topology, "mix_every": h, "compression": compression, "overlap": overlap}
        whole = DecentralizedDataParallel(Linear(), ADAMW, **options)
        want = steps(whole, rank, range(ALL))
        rejected, rounds = whole.stats().rejected, whole.stats().rounds
        whole.close()
        model = DecentralizedDataParallel(Linear(), ADAMW, **options)
        found = steps(model, rank, range(FIRST))
        saved = model.state_dict(), model.optim_state_dict()
        model.close()
        model = DecentralizedDataParallel(Linear(), ADAMW, bucket_size_in_mb=1e-6, **options)
        if again:  # stopped once more before its first update
            model.load_optim_state_dict(saved[1])
            saved = saved[0], model.optim_state_dict()
            model.close()
            model = DecentralizedDataParallel(Linear(), ADAMW, **options)
        model.load_state_dict(saved[0])
        model.load_optim_state_dict(saved[1])
        edges = [model.replica.engine.topology.get_edge(model.replica.engine.round).ranks]
        found += steps(model, rank, range(FIRST, ALL))
        edges.append(model.replica.engine.topology.get_edge(model.replica.engine.round).ranks)
        results.append((want, found, edges, rounds, model.stats(), rejected))
        model.close()
    return results


def resumed(rank: int, n: int) -> list[Any]:
    return [stopped(rank), stopped(rank, "int8", again=False), stopped(rank, "int8", overlap=True), unequal(rank)]


def unequal(rank: int) -> list[str]:
    """Worker 1 loads a later save, and then none."""
    said = []
    for load in (True, False):
        model = DecentralizedDataParallel(Linear(), ADAMW, topology="ring")
        steps(model, rank, range(2))
        saved = model.optim_state_dict()
        model.close()
        model = DecentralizedDataParallel(Linear(), ADAMW, topology="ring")
        if rank != 1 or load:
            model.load_optim_state_dict({**saved, "round": 9} if rank == 1 else saved)
        with pytest.raises(OutOfStepError) as info:
            steps(model, rank, range(1))
        said.append(str(info.value))
        model.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 4])
def test_a_resumed_run_continues_where_it_was(workers, n):
    results = workers(n, resumed)
    for rank, (exact, byte, overlapped, said) in enumerate(results):
        for (topology, h), (want, found, edges, rounds, stats, _) in zip(RESUMED, exact, strict=True):
            np.testing.assert_array_equal(found, want, err_msg=f"{topology} {h}")
            assert (rounds, stats.rounds, stats.updates) == (ALL, ALL, ALL - FIRST)
            for t, ranks in zip((FIRST, ALL), edges, strict=True):
                turns = [part.partition(":") for part in topology.split(",")]
                w = mixing(n, t, [(name, int(k or 10**9)) for name, _, k in turns], h)
                w = np.eye(n) if w is None else w
                assert set(ranks) == set(np.flatnonzero(w[rank])), (topology, h, t)
        # The distance of the replicas is not known after a restart: the first exchange may be rejected, and with it the next.
        for lossy in (byte, overlapped):
            for (topology, h), (want, found, _, _, stats, rejected) in zip(RESUMED, lossy, strict=True):
                np.testing.assert_array_equal(found[:FIRST], want[:FIRST])
                assert abs(np.array(found) - want).max() < 0.4, (topology, h)
                assert stats.rejected <= rejected + 2
        counts = [", ".join(f"worker {r}: {9 if r == 1 else 2}" for r in range(n))]
        counts.append(counts[0].replace("9", "0"))
        for text, count in zip(said, counts, strict=True):
            assert f"the workers start at different rounds ({count})" in text


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [(0, ValueError), (-3, ValueError), (2.0, TypeError), (1.5, TypeError), (True, TypeError), ("2", TypeError)],
)
def test_bad_values(value, kind):
    with pytest.raises(kind, match="mix_every must be a whole number of updates, at least 1, got"):
        run_replicas(1, lambda transport: train(0, 1, mix_every=value, transport=transport))


def test_numpy_integers_are_fine():
    values = run_replicas(1, lambda transport: train(0, 2, mix_every=np.int64(2), transport=transport)[0])
    assert np.isfinite(values[0]).all()


def test_a_part_that_would_never_mix():
    def body(transport: Any) -> str:
        with pytest.raises(
            ValueError, match=r"CompleteTopology, every 5 updates, would never mix.*: give it 5 or more"
        ) as info:
            train(transport.rank, 1, topology="complete:3,ring", mix_every=5, transport=transport)
        return str(info.value)

    assert len(set(run_replicas(2, body))) == 1


def test_workers_must_agree():
    def body(transport: Any) -> str:
        with pytest.raises(DisagreementError) as info:
            train(transport.rank, 1, mix_every=2 + transport.rank, transport=transport)
        return str(info.value)

    for text in run_replicas(2, body):
        assert "the settings differ between workers: mix_every is 2 on worker 0 and 3 on worker 1" in text


def test_workers_must_agree_on_the_switch():
    def body(transport: Any) -> str:
        with pytest.raises(DisagreementError) as info:
            train(transport.rank, 1, topology=f"complete:{100 + transport.rank},ring", transport=transport)
        return str(info.value)

    for text in run_replicas(2, body):
        assert "name is 'CompleteTopology for 100 updates, then RingTopology' on worker 0 and" in text


def test_a_part_with_shorter_turns_ends_an_exchange_of_the_part_before():
    """It had four updates to arrive, and its parameters mix again in two."""

    def topology(rank: int) -> Topology:
        ring = RingTopology(world_size=3, rank=rank)
        return SwitchTopology((ring.every(8), 16), ring.every(2))

    def body(transport: Any) -> np.ndarray:
        return train(transport.rank, 20, topology=topology(transport.rank), transport=transport)[0]

    cluster = VirtualCluster(Linear(), ADAMW, topology(0), 3, loss_fn=lambda model, a, b: (model(a) - b).square().mean())
    for t in range(20):
        columns = zip(*(data(rank, t) for rank in range(3)), strict=True)
        cluster.step(*(torch.from_numpy(np.stack(column)) for column in columns))
    found = np.concatenate([value.numpy() for value in cluster.parameters.values()], axis=1)
    np.testing.assert_allclose(np.stack(run_replicas(3, body)), found, rtol=0, atol=1e-12)


class Watching(torch.optim.SGD):
    """Notes the mean of the others before each mix."""

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        for group in self.param_groups:
            self.seen = [*getattr(self, "seen", []), *(param.comm_buffer / (1 - weight) for param in group["params"])]


def test_a_hook_sees_what_was_sent_although_the_replica_has_moved_on():
    """By far more than the 256 steps of int8's lattice, in the updates that an exchange has to arrive."""
    h = 8

    def work(transport: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = DecentralizedDataParallel(
            torch.nn.Linear(6, 6, bias=False),
            partial(Watching, lr=0.5),
            topology="ring",
            compression="int8",
            mix_every=h,
            transport=transport,
        )
        values = []
        for _ in range(6 * h + 1):
            ((1 + 0.01 * transport.rank) * model.module.weight.sum()).backward()
            values.append(model.module.weight.detach().clone())
        (optimizer,) = model.optimizers
        return values, optimizer.seen

    (_, seen), (values, _) = run_replicas(2, work)
    assert len(seen) == 5
    for mix, found in enumerate(seen):
        torch.testing.assert_close(found, values[(mix + 1) * h - 1], rtol=0, atol=0.05)
