"""Low-rank messages: the differences that they give, against NumPy in float64; whole runs with them, and with few bits."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import decent_dp
from decent_dp.compression import FlatTensor, LowRank, MessageId, check_compression
from decent_dp.compression.low_rank import _digest_of
from decent_dp.engine.layout import TensorSpec
from decent_dp.rules import OuterNesterov
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Edge, Topology, make_topology
from decent_dp.topo.schedule import largest_group, meetings
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import some_in_the_fast_tests
from tests.resuming import MANY, Job, assert_equal, go_on, run_through
from tests.tools.sim_cases import Case, compare, train_really

CPU = torch.device("cpu")
ALL = ["low-rank:1", "low-rank:4", "low-rank:2,bfloat16", "low-rank:2,int8"]


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


class Pair:
    """Two workers, ranks 2 and 5, with some matrices (rows, columns), or vectors (one row)."""

    EDGE = (2, 5)

    def __init__(self, shapes: Sequence[tuple[int, int]], name: str = "low-rank:4", dtype: torch.dtype = torch.float64) -> None:
        self.shapes, self.dtype = shapes, dtype
        tensors = [FlatTensor(i, rows * columns, rows) for i, (rows, columns) in enumerate(shapes)]
        kind = check_compression(name)
        assert issubclass(kind, LowRank)
        self.ends = [kind(tensors, dtype, CPU) for _ in self.EDGE]
        self.round = 0

    def meet(self, values: Sequence[Sequence[np.ndarray]], meeting: int) -> list[list[np.ndarray | None]]:
        """One exchange; both ends' differences as matrices, None where nothing is mixed."""
        flat = [[torch.tensor(value, dtype=self.dtype).flatten() for value in own] for own in values]
        hints = [end.hint(own) for end, own in zip(self.ends, flat, strict=True)]
        messages = []
        for rank, end, own in zip(self.EDGE, self.ends, flat, strict=True):
            end.begin(self.EDGE, rank, meeting)
            out = torch.full((end.nbytes,), 255, dtype=torch.uint8)
            for ready in end.encode(own, out, MessageId(self.round, rank), hints):
                assert 0 < ready <= end.nbytes
            messages.append(out)
        self.round += 1
        return [self._decode(self.ends[0], *messages), self._decode(self.ends[1], *reversed(messages))]

    def _decode(self, end: LowRank, sent: Tensor, received: Tensor) -> list[np.ndarray | None]:
        found: list[Any] = [np.full(rows * columns, np.nan) for rows, columns in self.shapes]
        for block, difference, unit in end.differences(sent, received):
            if difference is None:
                found[block.tensor] = None
            else:
                found[block.tensor][block.start : block.stop] = difference.double().numpy() * unit
        return [None if own is None else own.reshape(shape) for own, shape in zip(found, self.shapes, strict=True)]


def largest(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The nearest matrix of a rank (Eckart and Young)."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


# -- one edge --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    distance=st.sampled_from([0.0, 1e-3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_both_ends_find_opposite_differences(name, shapes, distance, dtype, seed):
    pair = Pair(shapes, name, dtype)
    mine = [drawn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    theirs = [x + distance * drawn(*x.shape, seed=seed + 50 + i) for i, x in enumerate(mine)]
    for meeting in (0, 1, 1, 0, 2):
        for there, back in zip(*pair.meet([mine, theirs], meeting), strict=True):
            assert there is None if back is None else np.array_equal(there, -back)
            assert back is not None or "int8" in name  # a distance that it did not expect


@pytest.mark.parametrize("shape", [(30, 20), (7, 300), (300, 7)])
def test_a_difference_is_projected_onto_a_basis_of_the_last_difference(shape):
    """Against a subspace iteration in NumPy, which has other bases of the same spaces."""
    pair, rank = Pair([shape]), 4
    mine = drawn(*shape, seed=1)
    u, _, v = np.linalg.svd(drawn(*shape, seed=2), full_matrices=False)
    difference = (u[:, :6] * [10, 9, 7, 5, 1, 0.5]) @ v[:6]
    projected = np.zeros((0, 0))
    for meeting in range(12):
        [[there], _] = pair.meet([[mine], [mine + difference]], meeting)
        basis = pair.ends[0]._bases[0].double().numpy()
        assert np.abs(basis.T @ basis - np.eye(rank)).max() < 0.01
        # Rounded to bfloat16, so that it is exact: V·Vᵀ as it is.
        exact = basis @ (basis.T @ difference) if meeting % 2 else difference @ basis @ basis.T
        assert np.abs(there - exact).max() < 1e-12
        if meeting:
            spanned, _ = np.linalg.qr(projected)
            assert np.abs(basis - spanned @ (spanned.T @ basis)).max() < 0.02
        projected = difference.T @ basis if meeting % 2 else difference @ basis
    # It has found the largest part of the difference.
    assert np.linalg.norm(difference - there) < 1.02 * np.linalg.norm(difference - largest(difference, rank))


def test_what_is_mixed_leaves_the_rest_in_the_difference():
    """Exchanges with a mix by halves remove the whole difference."""
    pair = Pair([(40, 30)])
    x = [drawn(40, 30, seed=1), drawn(40, 30, seed=2)]
    mean = (x[0] + x[1]) / 2
    for meeting in range(60):
        found = pair.meet([[x[0]], [x[1]]], meeting)
        x = [own + difference / 2 for own, [difference] in zip(x, found, strict=True)]
        assert np.abs((x[0] + x[1]) / 2 - mean).max() < 1e-14
    assert np.linalg.norm(x[0] - x[1]) < 1e-3 * np.linalg.norm(mean)


def test_small_matrices_and_vectors_are_sent_whole():
    shapes = [(1, 50), (4, 4), (8, 8), (9, 8), (50, 1)]  # 4 · (9 + 8) < 9 · 8
    pair = Pair(shapes)
    values = [[drawn(*shape, seed=i + end) for i, shape in enumerate(shapes)] for end in (0, 9)]
    found, _ = pair.meet(values, 0)
    for i, (shape, difference) in enumerate(zip(shapes, found, strict=True)):
        assert np.allclose(difference, values[1][i] - values[0][i], atol=1e-12) != (shape == (9, 8))


@pytest.mark.parametrize(("name", "itemsize"), [("low-rank:3", 4), ("low-rank:3,bfloat16", 2), ("low-rank:3,int8", 1)])
def test_the_bytes_of_a_message(name, itemsize):
    pair = Pair([(100, 40), (1, 30)], name, torch.float32)
    for meeting, numbers in ((0, 3 * 100 + 30), (1, 3 * 40 + 30)):
        for end in pair.ends:
            end.begin(pair.EDGE, 2, meeting)
        records = 2 * 24 if itemsize == 1 else 0
        sent = sum(chunk.payload for chunk in pair.ends[0].chunks)
        assert numbers * itemsize <= sent - records - 8 < numbers * itemsize + 8  # the digest, and padding


def test_proposals_are_matrices_as_they_are_and_what_is_sent_of_the_rest():
    """So a difference of matrices is one of the values themselves."""
    pair = Pair([(30, 20), (1, 6)], "low-rank:2,bfloat16")
    values = [torch.from_numpy(drawn(600, seed=1)), torch.from_numpy(drawn(6, seed=2))]
    end = pair.ends[0]
    message = torch.empty(end.nbytes, dtype=torch.uint8)
    for _ in end.encode(values, message, MessageId(0, 2), []):
        pass
    found = {block.tensor: proposal for block, proposal in end.proposals(values, message)}
    assert torch.equal(found[0], values[0])
    assert torch.equal(found[1], values[1].bfloat16().double())


def test_equal_replicas_and_parallel_columns():
    shape = (20, 12)
    pair = Pair([shape])
    x, one = drawn(*shape, seed=1), np.outer(drawn(20, seed=2), drawn(12, seed=3))
    for meeting in range(6):
        found, _ = pair.meet([[x], [x]], meeting)
        assert (found[0] == 0).all()
    for meeting in range(6, 12):  # one direction only: the other columns of the basis are noise
        [[found], _] = pair.meet([[x], [x + one]], meeting)
    assert np.abs(found - one).max() < 0.01 * np.abs(one).max()
    # Largest after nothing: a basis has no memory of a size.
    for meeting in range(12, 18):
        [[found], _] = pair.meet([[x], [x + 1e-12 * one]], meeting)
    assert np.abs(found - 1e-12 * one).max() < 1e-13


def test_ends_with_other_bases_mix_no_matrix_and_start_anew():
    pair = Pair([(30, 20), (1, 6)])
    values = [[drawn(30, 20, seed=1), drawn(1, 6, seed=2)], [drawn(30, 20, seed=3), drawn(1, 6, seed=4)]]
    first = pair.meet(values, 0)
    pair.meet(values, 1)
    learned = pair.ends[1]._edge_bases._learned[pair.EDGE, 0][0]
    learned.view(torch.int16)[3, 1] ^= 1  # the last bit of one number
    for found in pair.meet(values, 2):
        assert found[0] is None
        assert found[1] is not None  # the vector needs no basis
    assert [end.rejected for end in pair.ends] == [1, 1]
    assert all(np.array_equal(*both) for both in zip(pair.meet(values, 4)[0], first[0], strict=True))  # as drawn
    assert pair.ends[0].stuck(1) == []


def test_a_changed_bit_anywhere_changes_the_digest():
    pair = Pair([(30, 20), (25, 31)])
    end = pair.ends[0]
    whole = int(_digest_of(end._bases, end.device))
    for number, bit in itertools.product((0, 1), (0, 7, 15)):
        numbers = end._bases[number].view(torch.int16).view(-1)
        for place in (0, 1, len(numbers) // 2, len(numbers) - 1):
            numbers[place] ^= -(2**15) if bit == 15 else 2**bit
            assert int(_digest_of(end._bases, end.device)) != whole
            numbers[place] ^= -(2**15) if bit == 15 else 2**bit
    assert int(_digest_of(end._bases, end.device)) == whole
    end._bases.reverse()
    assert int(_digest_of(end._bases, end.device)) != whole


def test_edges_have_bases_of_their_own():
    pair = Pair([(30, 20)])
    values = [[drawn(30, 20, seed=1)], [drawn(30, 20, seed=2)]]
    for meeting in (0, 1):
        pair.meet(values, meeting)
    other = Pair([(30, 20)])
    other.EDGE = (2, 7)
    other.ends[0] = pair.ends[0]  # worker 2 has met worker 5 before
    for found in other.meet(values, 2):
        assert found[0] is not None
    assert set(pair.ends[0]._edge_bases._learned) == {((2, 5), 0), ((2, 5), 1), ((2, 7), 1)}


# -- the matrix of a parameter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (torch.zeros(6, 5), 6),
        (torch.zeros(5, 6).T, 5),  # in memory it is 5 × 6
        (torch.zeros(8, 3, 2, 2), 8),
        (torch.zeros(8, 3, 2, 2).to(memory_format=torch.channels_last), 8),
        (torch.zeros(1, 7), 7),
        (torch.zeros(7, 1), 7),
        (torch.zeros(1, 5, 6), 5),
        (torch.zeros(9), 1),
        (torch.zeros(()), 1),
        (torch.zeros(0, 4), 1),
    ],
)
def test_rows_of_a_parameter(tensor, rows):
    assert TensorSpec.of("x", tensor).rows == rows


# -- whole runs ------------------------------------------------------------------------------------------------------------

CASES = [
    Case("ring", "wide", "sgd", options={"compression": "low-rank:2"}),
    Case("one-peer-exp", "conv", "momentum", options={"compression": "low-rank:1,bfloat16"}),
    Case("base-2", "attention", "adamw", options={"compression": "low-rank:2,int8"}),
    Case("ring", "mlp", "momentum", "float32", options={"compression": "low-rank:1"}),
    Case("unrepeated", "mlp", "sgd", options={"compression": "low-rank:2", "overlap": False}),
    Case("one-peer-exp", "channels-last", "momentum", options={"compression": "low-rank:2,int8", "mix_every": 2}),
    Case("ring", "wide", "sgd", options={"compression": "1bit"}),
    Case("one-peer-exp", "conv", "momentum", options={"compression": "2bit", "mix_every": 2}),
    # Not attention: its keys have a bias without a gradient, and a sign of rounding errors is worth a whole step.
    Case("base-2", "mlp", "adamw", options={"compression": "4bit"}),
    Case("unrepeated", "mlp", "momentum", "float32", options={"compression": "1bit", "overlap": False}),
]


def cases(n: int) -> list[Case]:
    return [case for case in CASES if n == 4 or case.topology != "one-peer-exp"]


def real(rank: int, n: int) -> list[Any]:
    return [train_really(rank, n, case) for case in cases(n)]


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, 5])
def test_processes_equal_the_simulator(workers, n):
    found = workers(n, real, timeout=120)
    for i, case in enumerate(cases(n)):
        compare(case, n, [worker[i] for worker in found])


@pytest.mark.parametrize(
    ("topology", "compression"), some_in_the_fast_tests(["ring", "one-peer-exp"], ["low-rank:2", "low-rank:2,int8", "2bit"])
)
def test_a_resumed_run_is_the_same_run(topology, compression):
    n = 3 if topology == "ring" else 4
    job = Job({"topology": topology, "compression": compression})
    stops = (1, 2, 5)
    through = run_replicas(n, lambda at: run_through(job, at, at.rank, 8, stops))
    bases = [key for entries in through[0][0][5]["compression"].values() for key in entries]
    assert bases or "int8" in compression  # whose first blocks are rejected
    for stop, how in zip(stops, ({}, MANY, {"param_as_bucket_view": False}), strict=True):

        def again(at: InProcessTransport, stop: int = stop, how: dict[str, Any] = how) -> Any:
            return go_on(job, at, at.rank, range(stop, 8), through[at.rank][0][stop], stops, **how)

        for rank, (losses, end) in enumerate(run_replicas(n, again)):
            assert_equal(losses, through[rank][1][stop:], f"{stop}, worker {rank}")
            assert_equal(end, through[rank][2], f"{stop}, worker {rank}")


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for t in steps:
        draw = torch.Generator().manual_seed(100 * t + rank)
        x = torch.randn(8, 16, generator=draw)
        optimizer.zero_grad()
        (model(x) - x[:, :10]).square().mean().backward()
        optimizer.step()


def mixing(at: InProcessTransport, compression: str, **how: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A network of two matrices, its optimizer and replica."""
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    how = {"topology": "one-peer-exp", "compression": compression, "transport": at, **how}
    return model, optimizer, decent_dp.gossip(model, optimizer, **how)


@pytest.mark.parametrize(("compression", "rejected"), [("low-rank:2", 2), ("2bit", 16)])
def test_a_load_on_one_worker_is_found_out(caplog, compression, rejected):
    """Its end of the exchange is dropped, and learns nothing from it: bases or references differ, and both start anew."""

    def work(at: InProcessTransport) -> Any:
        model, optimizer, replica = mixing(at, compression)
        train(model, optimizer, range(4), at.rank)
        if at.rank == 0:
            model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        train(model, optimizer, range(4, 20), at.rank)
        found = replica.stats().rejected
        replica.close()
        return found, [param.detach().numpy().copy() for param in model.parameters()]

    with caplog.at_level(logging.WARNING):
        (first, a), (second, b) = run_replicas(2, work)
    assert first == second == rejected  # both matrices once, or all four tensors until they are known
    assert not caplog.records
    assert max(np.abs(x - y).max() for x, y in zip(a, b, strict=True)) < 0.1


def test_values_that_were_loaded_are_known_to_both_ends():
    """They are far from what a pair knew of each other, and messages relative to that would be as coarse."""
    with torch.random.fork_rng():  # not in the workers, which are threads and share the generator
        loaded = {key: 100 * value for key, value in net(7).state_dict().items()}

    def work(at: InProcessTransport) -> float:
        model, optimizer, replica = mixing(at, "2bit")
        train(model, optimizer, range(6), at.rank)
        model.load_state_dict(loaded)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.01 * at.rank)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, range(6, 10), at.rank)
        distance = replica.consensus_distance()
        replica.close()
        return distance

    with torch.random.fork_rng():
        assert run_replicas(2, work)[0] < 0.02


@pytest.mark.parametrize("compression", ["low-rank:2", "2bit"])
def test_a_load_of_a_part_keeps_the_rest(compression):
    """A layer is loaded on all workers between two steps: what is in flight is mixed for the other one, and all go on."""
    with torch.random.fork_rng():
        loaded = net(7)[2].state_dict()

    def work(at: InProcessTransport) -> Any:
        model, optimizer, replica = mixing(at, compression)
        train(model, optimizer, range(6), at.rank)
        before = replica.stats().rejected
        model[2].load_state_dict(loaded)
        train(model, optimizer, range(6, 12), at.rank)
        rejected = replica.stats().rejected - before
        distance = replica.consensus_distance()
        replica.close()
        return rejected, distance

    with torch.random.fork_rng():
        found = run_replicas(2, work)
    assert found[0] == found[1]
    assert found[0][0] == 0
    assert found[0][1] < 0.1


def test_a_run_resumes_with_any_other_compression():
    """What it does not know starts as in a new run."""
    names = ["low-rank:2", "2bit", "int8"]

    def work(at: InProcessTransport) -> list[bool]:
        states, seen = {}, []
        for name in names:
            model, optimizer, replica = mixing(at, name)
            train(model, optimizer, range(4), at.rank)
            states[name] = replica.state_dict()
            replica.close()
        for before, after in itertools.permutations(names, 2):
            model, optimizer, replica = mixing(at, after)
            replica.load_state_dict(states[before])
            train(model, optimizer, range(4, 8), at.rank)
            seen.append(all(bool(param.isfinite().all()) for param in model.parameters()))
            replica.close()
        return seen

    with torch.random.fork_rng():
        assert run_replicas(2, work) == [[True] * 6] * 2


@pytest.mark.parametrize("compression", ["low-rank:2,int8", "1bit"])
def test_an_infinity_is_left_out_and_named(caplog, compression):
    def work(at: InProcessTransport) -> Any:
        model, optimizer, replica = mixing(at, compression)
        train(model, optimizer, range(2), at.rank)
        if at.rank == 1:
            with torch.no_grad():
                model[2].weight[3, 3] = torch.inf
        train(model, optimizer, range(2, 4), at.rank)
        nonfinite = replica.stats().nonfinite
        replica.close()
        return nonfinite, all(bool(param.isfinite().all()) for param in model.parameters())

    with caplog.at_level(logging.WARNING):
        found = run_replicas(2, work)
    nonfinite, finite = found[0]
    assert nonfinite > 0
    assert finite
    assert "parameter '2." in caplog.text


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["low-rank", "low-rank:", "low-rank:0", "low-rank:-1", "low-rank:2,", "low-rank:2,float32"])
def test_names(name):
    with pytest.raises(ValueError, match=r"'low-rank:R' sends projections of rank R.*Got"):
        check_compression(name)
    kind = check_compression("low-rank:2,int8")
    assert kind is check_compression("low-rank:2,int8")
    assert (kind.name, kind.needs_hints, check_compression("low-rank:2").needs_hints) == ("low-rank:2,int8", True, False)


@pytest.mark.parametrize("compression", ["low-rank:2", "2bit"])
@pytest.mark.parametrize("topology", ["complete", "complete:4,base-2", "hierarchical"])
def test_groups_are_refused_on_all_workers(topology, compression):
    def work(at: InProcessTransport) -> str:
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(ValueError, match="needs a topology of pairs") as error:
            decent_dp.gossip(model, optimizer, topology=topology, compression=compression, local_world_size=2, transport=at)
        return str(error.value)

    assert len(set(run_replicas(4, work))) == 1
    with pytest.raises(ValueError, match="needs a topology of pairs"):
        VirtualCluster(net(0), partial(torch.optim.SGD, lr=0.1), topology, 4, compression=compression, local_world_size=2)


@pytest.mark.parametrize("compression", ["low-rank:2", "2bit"])
def test_momentum_that_repeats_a_pull_is_refused(compression):
    def work(at: InProcessTransport) -> None:
        with pytest.raises(ValueError, match="leaves a part of the differences in the replicas"):
            mixing(at, compression, rule=OuterNesterov(lr=0.7, momentum=0.5))

    run_replicas(2, work)


@pytest.mark.parametrize("name", ["base-2", "ring", "one-peer-exp"])
@pytest.mark.parametrize("n", [5, 7, 8])
@pytest.mark.parametrize("h", [1, 3])
def test_sides_alternate_in_the_meetings_of_each_edge(name, n, h):
    """Also of edges that occur more than once in a period, as all of a ring of five do."""
    if name == "one-peer-exp" and n != 8:
        return
    whole = make_topology(f"{name}:20,{name}", local_world_size=1, world_size=n, rank=0)
    topology, seen = whole.every(h), Counter[tuple[int, ...]]()
    for t in range(60):
        if t == 20:
            seen.clear()  # the second part begins
        for edge in topology.round(t):
            if len(edge.ranks) > 1:
                ranks = tuple(sorted(edge.ranks))
                assert meetings(topology, t, edge.ranks) == seen[ranks]
                seen[ranks] += 1


@pytest.mark.parametrize("simulated", [False, True])
def test_the_meetings_of_an_edge_are_counted_where_messages_are_made(monkeypatch, simulated):
    """A ring of five, in which every edge occurs twice in a period."""
    n, begin, seen = 5, LowRank.begin, {}

    def noting(self: LowRank, edge: tuple[int, ...], rank: int, meeting: int) -> None:
        if edge:  # not of a message that is only planned
            seen.setdefault((edge, rank), []).append(meeting)
        begin(self, edge, rank, meeting)

    monkeypatch.setattr(LowRank, "begin", noting)
    how: dict[str, Any] = {"topology": "ring", "compression": "low-rank:1"}

    def work(at: InProcessTransport) -> None:
        model = nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = decent_dp.gossip(model, optimizer, transport=at, **how)
        model.weight.grad = torch.zeros(8, 8)
        for _ in range(20):
            optimizer.step()
        replica.close()

    if simulated:
        optim_fn = partial(torch.optim.SGD, lr=0.0)
        cluster = VirtualCluster(nn.Linear(8, 8, bias=False), optim_fn, n=n, loss_fn=lambda model, x: model(x).sum(), **how)
        for _ in range(20):
            cluster.step(torch.zeros(n, 1, 8))
    else:
        run_replicas(n, work)
    assert len(seen) == 2 * n
    assert all(len(meetings) > 6 and meetings == list(range(len(meetings))) for meetings in seen.values()), seen


def test_meetings_and_groups_of_topologies():
    base = make_topology("base-2", local_world_size=1, world_size=8, rank=0)
    switch = make_topology("ring:5,base-2", local_world_size=1, world_size=8, rank=0)
    matching = make_topology("random-matching", local_world_size=1, world_size=8, rank=0)
    assert [meetings(matching, t, [0, 1]) for t in (0, 1, 7)] == [0, 1, 7]
    assert tuple(map(largest_group, (base, switch, matching))) == (2, 2, 2)
    assert largest_group(make_topology("ring:5,complete", local_world_size=1, world_size=8, rank=0).every(3)) == 8


def test_tracked_momenta_beside_projections_are_sent_as_int8():
    """With real workers and in the simulator alike."""
    shape = (64, 48)

    def work(at: InProcessTransport) -> int:
        model = nn.Linear(48, 64, bias=False)
        optimizer = decent_dp.GossipAdamW(model.parameters(), lr=0.01, tracking=True)
        replica = decent_dp.gossip(model, optimizer, topology="one-peer-exp", compression="low-rank:2", transport=at)
        for t in range(25):
            draw = torch.Generator().manual_seed(t)
            model.weight.grad = torch.randn(shape, generator=draw)
            optimizer.step()
        sent = replica.stats().bytes_sent
        replica.close()
        return sent

    cluster = VirtualCluster(
        nn.Linear(48, 64, bias=False),
        partial(decent_dp.GossipAdamW, lr=0.01, tracking=True),
        "one-peer-exp",
        2,
        loss_fn=lambda model, x: model(x).square().mean(),
        compression="low-rank:2",
    )
    for _ in range(25):
        cluster.step(torch.randn(2, 4, 48))
    assert set(run_replicas(2, work)) == {cluster.bytes_sent // 2}
    projections = 13 * 2 * 4 * 64 + 12 * 2 * 4 * 48 + 25 * 8  # both sides in turn, and the digests
    momenta = cluster.bytes_sent // 2 - projections
    assert 25 * 64 * 48 <= momenta <= 1.02 * 25 * 64 * 48


def test_no_two_columns_of_noise_are_the_same():
    kind = check_compression("low-rank:64")
    for index in range(0, 600, 7):
        end = kind([FlatTensor(index, 300 * 200, 300)], torch.float32, CPU)
        for bases in end._edge_bases.drawn:
            [basis] = bases
            gram = basis.double().T @ basis.double()
            assert (gram - torch.eye(64)).abs().max() < 0.02


def test_a_basis_that_is_none_is_replaced(monkeypatch):
    """As with a column of noise that is zero, which none is. (Of two that are equal, rounding may make a basis.)"""
    pair = Pair([(30, 20)])
    for end in pair.ends:
        for noise in end._edge_bases._noise:
            noise[0][:, 1] = 0
    x = drawn(30, 20, seed=1)
    for meeting in range(4):
        [[found], _] = pair.meet([[x], [x]], meeting)
        assert (found == 0).all()
    [[found], _] = pair.meet([[x], [x + 1]], 4)
    assert np.isfinite(found).all()
    drawn_bases = pair.ends[0]._edge_bases.drawn[0]
    assert all(torch.equal(own, basis) for own, basis in zip(pair.ends[0]._bases, drawn_bases, strict=True))


class Late(Topology):
    """Pairs, and later a group."""

    def round(self, t: int) -> list[Edge]:
        if t == 300:
            return [Edge([0, 1, 2], 1 / 3), Edge([3, 4], 0.5), Edge([5], 1.0)]
        a, b, c = (t % 3, (t + 1) % 3, (t + 2) % 3)
        return [Edge([a, b], 0.5), Edge([c, 3], 0.5), Edge([4, 5], 0.5)]


@pytest.mark.slow
def test_a_group_that_comes_late_is_an_error_on_all_workers():
    def work(at: InProcessTransport) -> str:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        topology = Late(world_size=6, rank=at.rank)
        replica = decent_dp.gossip(model, optimizer, topology=topology, compression="low-rank:1", transport=at)
        model.weight.grad = torch.zeros(8, 8)
        for _ in range(300):
            optimizer.step()
        with pytest.raises(ValueError, match=r"round 300 has the edge \[0, 1, 2\]") as error:
            optimizer.step()
        replica.close()
        return str(error.value)

    assert len(set(run_replicas(6, work))) == 1


def test_bases_end_with_the_edges_at_a_resume_with_other_workers(tmp_path):
    """The workers of those edges are no more; the rest of the run goes on."""

    def first(at: InProcessTransport) -> int:
        model, optimizer, replica = mixing(at, "low-rank:2")
        train(model, optimizer, range(6), at.rank)
        found = len(replica.state_dict()["compression"])
        decent_dp.save(replica, tmp_path)
        replica.close()
        return found

    def then(at: InProcessTransport) -> tuple[int, int]:
        model, optimizer, replica = mixing(at, "low-rank:2")
        decent_dp.load(replica, tmp_path, resize="mean")
        before = len(replica.state_dict()["compression"])
        train(model, optimizer, range(6, 12), at.rank)
        after = len(replica.state_dict()["compression"])
        replica.close()
        return before, after

    with torch.random.fork_rng():
        assert run_replicas(4, first) == [2] * 4
        assert run_replicas(2, then) == [(0, 2)] * 2
