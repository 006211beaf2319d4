"""Topologies: the catalogue, users' own, the registry, the checks and what the checks say."""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_dp.topo import (
    AlternatingExpRingTopology,
    BaseTwoTopology,
    CompleteTopology,
    Edge,
    HierarchicalTopology,
    OnePeerExpTopology,
    RandomMatchingTopology,
    RingTopology,
    Topology,
    TopologyReg,
    make_topology,
)
from decent_dp.topo.abstract import worker_scope

NAMES = ["complete", "ring", "one-peer-exp", "alternating-exp-ring", "base-2", "random-matching", "hierarchical"]
BUILT_IN = [
    CompleteTopology,
    RingTopology,
    OnePeerExpTopology,
    AlternatingExpRingTopology,
    BaseTwoTopology,
    RandomMatchingTopology,
    HierarchicalTopology,
]


def ranks_of(topology: Topology, t: int) -> list[list[int]]:
    return [edge.ranks for edge in topology.round(t)]


def assert_proper(topology: Topology, rounds: int) -> None:
    """Each round is a partition, its matrix symmetric and doubly stochastic, and get_edge is its edge of this rank."""
    n = topology._world_size
    for t in range(rounds):
        edges = topology.round(t)
        assert sorted(rank for edge in edges for rank in edge.ranks) == list(range(n))
        assert all(edge.weight == 1 for edge in edges if len(edge.ranks) == 1)
        W = topology.mixing_matrix(t)
        assert W.shape == (n, n)
        assert W.dtype == np.float64
        assert (W >= 0).all()
        np.testing.assert_array_equal(W, W.T)
        np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
        mine = topology.get_edge(t)
        assert topology._rank in mine.ranks
        assert mine in edges
        for i in range(n):  # the matrix says what the edges say
            edge = next(edge for edge in edges if i in edge.ranks)
            assert W[i, i] == edge.weight
            assert set(np.flatnonzero(W[i])) <= set(edge.ranks)


def period_product(topology: Topology) -> np.ndarray:
    assert topology.period is not None
    return reduce(lambda product, t: topology.mixing_matrix(t) @ product, range(topology.period), np.eye(topology._world_size))


# --- the catalogue


@pytest.mark.parametrize("cls", BUILT_IN)
@given(n=st.integers(1, 40), local=st.integers(1, 9), data=st.data())
@settings(max_examples=30)
def test_built_in_runs_properly_or_says_why_not(cls: type[Topology], n: int, local: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, n - 1))
    reason = cls.unfit(n, local)
    if reason is not None:
        with pytest.raises(ValueError, match=re.escape(reason)):
            cls(local, world_size=n, rank=rank)
        return
    topology = cls(local, world_size=n, rank=rank)
    assert (topology.world_size, topology.local_world_size) == (n, local)
    if topology.period is None:
        assert_proper(topology, 6)
        return
    assert_proper(topology, topology.period + 2)
    assert topology.round(topology.period + 1) == topology.round(1)
    if cls is not RingTopology or n <= 2:
        np.testing.assert_allclose(period_product(topology), np.full((n, n), 1 / n), atol=1e-12)
    if n > 1:  # repeated mixing reaches consensus
        second = sorted(abs(np.linalg.eigvals(period_product(topology))))[-2]
        assert second < 1 - 1e-9


def test_which_sizes_are_served() -> None:
    serves = {name: [n for n in range(1, 10) if TopologyReg.registry[name].unfit(n, 1) is None] for name in NAMES}  # type: ignore[attr-defined]
    assert serves == {
        "complete": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "ring": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "one-peer-exp": [1, 2, 4, 8],
        "alternating-exp-ring": [1, 2, 4, 8],
        "base-2": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "random-matching": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "hierarchical": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    }
    fits = [(n, m) for n in range(1, 13) for m in range(1, 7) if HierarchicalTopology.unfit(n, m) is None]
    assert fits == [(n, m) for n in range(1, 13) for m in range(1, 7) if n % m == 0]
    fits = [(n, m) for n in range(1, 13) for m in range(1, 7) if AlternatingExpRingTopology.unfit(n, m) is None]
    assert fits == [(n, m) for n in range(1, 13) for m in range(1, 7) if n in (m, 2 * m, 4 * m, 8 * m)]


@pytest.mark.parametrize("cls", [CompleteTopology, RingTopology, OnePeerExpTopology, BaseTwoTopology, RandomMatchingTopology])
def test_only_node_aware_topologies_mind_the_nodes(cls: type[Topology]) -> None:
    assert cls(3, world_size=8).round(0) == cls(1, world_size=8).round(0)
    assert cls(16, world_size=8)._n_nodes == 1
    for aware in (AlternatingExpRingTopology, HierarchicalTopology):
        with pytest.raises(ValueError, match="local_world_size=3 does not divide world_size=8"):
            aware(3, world_size=8)


def test_ring_by_hand() -> None:
    assert RingTopology(world_size=2).round(0) == [Edge([0, 1], 0.5)]
    six = RingTopology(world_size=6)
    assert [ranks_of(six, t) for t in range(2)] == [[[0, 1], [2, 3], [4, 5]], [[1, 2], [3, 4], [0, 5]]]
    assert six.period == 2
    five = RingTopology(world_size=5)
    assert ranks_of(five, 0) == [[0], [1, 2], [3, 4]]
    assert ranks_of(five, 3) == [[3], [0, 4], [1, 2]]


@given(half=st.integers(1, 15), rank=st.integers(0, 100))
def test_odd_ring_idles_in_turn_and_alternates_sides(half: int, rank: int) -> None:
    n = 2 * half + 1
    rank %= n
    topology = RingTopology(world_size=n, rank=rank)
    assert topology.period == n
    for t in range(n):
        assert [edge.ranks for edge in topology.round(t) if len(edge.ranks) == 1] == [[t]]
    steps = [(sum(topology.get_edge(t).ranks) - 2 * rank) % n for t in range(rank + 1, rank + n)]
    assert steps == [n - 1, 1] * half  # left, right, left, … until it sits out again


def test_alternating_exp_ring_by_hand() -> None:
    topology = AlternatingExpRingTopology(2, world_size=8)
    assert [ranks_of(topology, t) for t in range(4)] == [
        [[0, 1, 2, 3], [4, 5], [6, 7]],
        [[0, 1], [2, 3], [4, 5, 6, 7]],
        [[0, 1, 4, 5], [2, 3], [6, 7]],
        [[0, 1], [4, 5], [2, 3, 6, 7]],
    ]
    assert {edge.weight for edge in topology.round(0)} == {0.25, 0.5}
    assert ranks_of(AlternatingExpRingTopology(4, world_size=4), 0) == [[0, 1, 2, 3]]
    assert AlternatingExpRingTopology(1, world_size=2).round(1) == [Edge([0], 1.0), Edge([1], 1.0)]


@given(power=st.integers(2, 6), local=st.integers(1, 5))
def test_alternating_exp_ring_is_never_idle_nor_crowded(power: int, local: int) -> None:
    n_nodes = 2**power
    topology = AlternatingExpRingTopology(local, world_size=n_nodes * local)
    assert topology.period == 2 * power
    for t in range(2 * power):
        crossing = [edge for edge in topology.round(t) if len({rank // local for rank in edge.ranks}) > 1]
        nodes = [sorted({rank // local for rank in edge.ranks}) for edge in crossing]
        assert len(crossing) == n_nodes // 4  # half of the n_nodes / 2 pairs
        assert all(b - a == 2 ** (t // 2) for a, b in nodes)
        assert all(len(edge.ranks) == 2 * local for edge in crossing)


def test_large_topologies_are_fast() -> None:
    start = time.process_time()
    for name in NAMES:
        make_topology(name, local_world_size=8, world_size=1024, rank=1023).fingerprint()
    assert time.process_time() - start < 8  # each takes hundredths of a second


# --- topologies of the user's own


class Star(Topology):
    """The hub meets the others in turn, who are idle meanwhile; weights vary by round."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        return [[Edge([0, i], 1 / (i + 1))] + [Edge([j], 1.0) for j in range(1, n) if j != i] for i in range(1, n)]


class RandomPairs(Topology):
    def __init__(self, local_world_size: int = 1, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(local_world_size, **kwargs)
        self.seed = seed  # needed by round: set after super().__init__

    def round(self, t: int) -> list[Edge]:
        ranks = list(range(self._world_size))
        random.Random(f"{self.seed}-{t}").shuffle(ranks)
        pairs = [Edge(ranks[i : i + 2], 0.5) for i in range(0, len(ranks) - 1, 2)]
        return pairs + [Edge(ranks[-1:], 1.0)] * (len(ranks) % 2)


def made_of(*rounds: Any, n: int = 4, rank: int = 0) -> Topology:
    """A periodic topology with these rounds."""

    class Mine(Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return list(rounds)

    topology = Mine(world_size=n, rank=rank)
    assert isinstance(topology, Topology)
    return topology


@given(n=st.integers(2, 12), rank=st.integers(0, 11), seed=st.integers(0, 1000))
def test_subclasses_of_both_forms(n: int, rank: int, seed: int) -> None:
    periodic, other = Star(world_size=n, rank=rank % n), RandomPairs(world_size=n, rank=rank % n, seed=seed)
    assert (periodic.period, other.period) == (n - 1, None)
    assert_proper(periodic, 2 * n)
    assert_proper(other, 10)
    assert periodic.mixing_matrix(n - 2)[0, 0] == 1 / n
    assert other.get_edge(10**6) == other.get_edge(10**6)


def random_partition(draw: Any, n: int) -> list[Edge]:
    ranks, edges = draw(st.permutations(range(n))), []
    while ranks:
        size = draw(st.integers(1, len(ranks)))
        weight = draw(st.floats(0, 1)) if size > 1 else 1
        edges.append(Edge(ranks[:size], weight))
        ranks = ranks[size:]
    return edges


@given(st.data())
def test_any_partition_is_accepted(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    rounds = [random_partition(data.draw, n) for _ in range(data.draw(st.integers(1, 3)))]
    topology = made_of(*rounds, n=n, rank=data.draw(st.integers(0, n - 1)))
    assert topology.period == len(rounds)
    assert [topology.round(t) for t in range(len(rounds))] == rounds
    assert_proper(topology, len(rounds))


def test_group_of_unequal_weights_by_hand() -> None:
    W = made_of([Edge([0, 2, 3], 0.5), Edge([1], 1)]).mixing_matrix(0)
    np.testing.assert_array_equal(W, [[0.5, 0, 0.25, 0.25], [0, 1, 0, 0], [0.25, 0, 0.5, 0.25], [0.25, 0, 0.25, 0.5]])
    assert Edge([0, 2, 3], 0.5).peer_weight == 0.25
    assert Edge([1], 1.0).peer_weight == 0.0


def test_numpy_numbers_and_other_sequences_are_fine() -> None:
    topology = made_of((Edge(np.arange(3), np.float32(0.5)), Edge((np.int64(3),), 1)))  # type: ignore[arg-type]
    edge = topology.get_edge(np.int64(0))  # type: ignore[arg-type]
    assert edge == Edge([0, 1, 2], 0.5)
    assert type(edge.weight) is float
    assert type(edge.ranks[0]) is int


def test_rounds_are_made_once_and_cannot_be_spoilt_from_outside() -> None:
    calls = []

    class Mine(Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            calls.append(1)
            self.given = [[Edge([0, 1], 0.5, group="mine")]]
            return self.given

    topology = Mine(world_size=2)
    topology.given[0][0].ranks.append(7)
    topology.round(0).clear()
    assert topology.round(5) == [Edge([0, 1], 0.5)]
    assert topology.get_edge(5).group == "mine"
    assert topology.get_edge(5) is topology.get_edge(6)
    assert calls == [1]


def test_aperiodic_round_may_build_on_the_periodic_form() -> None:
    class Restless(RingTopology):
        def round(self, t: int) -> list[Edge]:
            return super().round(t * t)

    topology = Restless(world_size=4)
    assert topology.period is None
    assert topology.get_edge(3) == Edge([0, 3], 0.5)


# --- what is refused, and how

BAD_ROUNDS: list[tuple[Any, str]] = [
    ([Edge([0, 1], 0.5), Edge([1, 2], 0.5), Edge([3], 1)], r"rank 1 appears twice, in edge \(0 1\) and in edge \(1 2\); each"),
    ([Edge([0, 1, 0], 0.5), Edge([2, 3], 0.5)], r"rank 0 appears twice"),
    ([Edge([0, 1], 0.5)], r"missing from all edges: rank 2 3; .* Edge\(\[2\], 1.0\) leaves rank 2 idle"),
    ([Edge([0, 1], 0.5), Edge([2, 4], 0.5)], r"edge \(2 4\): rank 4 is out of range; .* workers are 0 to 3"),
    ([Edge([0, -1], 0.5)], r"rank -1 is out of range"),
    ([Edge([0, 1, 2, 3], 0.25), Edge([], 1.0)], r"an edge needs at least one rank, got Edge\(ranks=\[\], weight=1.0\)"),
    ([Edge([0, 1], 1.5), Edge([2, 3], 0.5)], r"edge \(0 1\): weight must be a number in \[0, 1\], got 1.5; .* = 0.5"),
    ([Edge([0, 1], math.nan)], r"got nan"),
    ([Edge([0, 1], "0.5")], r"got '0.5'"),  # type: ignore[arg-type]
    ([Edge([0, 1], True)], r"got True"),
    ([Edge([0], 0.5)], r"rank 0 is alone in its edge with weight 0.5; .* use weight=1"),
    ([(0, 1), (2, 3)], r"holds \(0, 1\), which is no Edge: write Edge\("),
    ([Edge([0.0, 1.0], 0.5)], r"must be a list of integers, got \[0.0, 1.0\]"),  # type: ignore[list-item]
    ([Edge(3, 0.5)], r"must be a list of integers, got 3"),  # type: ignore[arg-type]
    (Edge([0, 1, 2, 3], 0.25), r"is Edge\(.*\), not a list of edges"),
    (None, r"is None, not a list of edges"),
]
GOOD_ROUND = [Edge([0, 1, 2, 3], 0.25)]


@pytest.mark.parametrize(("bad", "says"), BAD_ROUNDS)
def test_bad_round_is_refused_at_construction(bad: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as info:
        made_of(GOOD_ROUND, bad)
    assert str(info.value).startswith("Mine, round 1")

    class Aperiodic(Topology):
        def round(self, t: int) -> list[Edge]:
            return bad  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=says) as info:
        Aperiodic(world_size=4)
    assert str(info.value).startswith("Aperiodic, round 0")


@pytest.mark.parametrize(("bad", "says"), BAD_ROUNDS[::5])
def test_bad_later_round_is_refused_when_looked_up(bad: Any, says: str) -> None:
    class Late(Topology):
        def round(self, t: int) -> list[Edge]:
            return bad if t == 5 else GOOD_ROUND

    topology = Late(world_size=4)
    assert topology.get_edge(4) == GOOD_ROUND[0]
    for look_up in (topology.get_edge, topology.mixing_matrix):
        with pytest.raises(ValueError, match=says) as info:
            look_up(5)
        assert str(info.value).startswith("Late, round 5")
    assert topology.get_edge(6) == GOOD_ROUND[0]


@pytest.mark.parametrize(("rounds", "says"), [([], "has no rounds"), (None, "returned None"), (3, "returned 3")])
def test_no_rounds(rounds: Any, says: str) -> None:
    class Mine(Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return rounds  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=f"Mine.*{says}"):
        Mine(world_size=2)


def test_errors_stay_short_with_many_workers() -> None:
    for bad in ([Edge(list(range(512)), 0.1)], [Edge(list(range(1024)) + [0], 0.1)], [Edge(list(range(1024)), 7)]):
        with pytest.raises(ValueError, match=r"Mine, round 0") as info:
            made_of(bad, n=1024)
        assert len(str(info.value)) < 400


def test_subclass_with_neither_method() -> None:
    class Empty(Topology):
        pass

    for cls in (Empty, Topology):
        with pytest.raises(TypeError, match=rf"{cls.__name__} .*implement _get_topo_edges\(self\).* or round\(self, t\)"):
            cls(world_size=2)


def test_subclass_that_forgets_super() -> None:
    class Forgetful(Topology):
        def __init__(self, local_world_size: int) -> None:
            self.local = local_world_size

        def _get_topo_edges(self) -> list[list[Edge]]:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__\(local_world_size\)"):
        Forgetful(1)


def test_round_that_is_not_a_function_of_t() -> None:
    class Unseeded(Topology):
        count = 0

        def round(self, t: int) -> list[Edge]:
            self.count += 1
            a, b, c = (1, 2, 3) if self.count % 2 else (2, 1, 3)
            return [Edge([0, a], 0.5), Edge([b, c], 0.5)]

    with pytest.raises(ValueError, match=r"Unseeded, round 0, asked for twice, .*must depend on t alone"):
        Unseeded(world_size=4)


@pytest.mark.parametrize("topology", [RingTopology(world_size=4), RandomPairs(world_size=4)])
def test_step_must_be_a_count(topology: Topology) -> None:
    for look_up in (topology.get_edge, topology.mixing_matrix, RingTopology(world_size=4).round):
        with pytest.raises(ValueError, match="must be a whole number, at least 0, got -1"):
            look_up(-1)
        with pytest.raises(TypeError, match=r"must be a whole number, at least ., got 1\.5"):
            look_up(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"local_world_size": 0, "world_size": 2}, ValueError, "RingTopology: local_world_size must be .* at least 1, got 0"),
        ({"world_size": "4"}, TypeError, "world_size must be a whole number, at least ., got '4'"),
        ({"world_size": 4, "rank": 4}, ValueError, "rank must be below world_size=4, got 4"),
        ({"world_size": 4, "rank": -1}, ValueError, "rank must be a whole number, at least 0, got -1"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        RingTopology(**arguments)


# --- where the workers come from


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"pass world_size= and rank=, or call decent_dp.utils.initialize_dist\(\) first"):
        RingTopology()
    assert RingTopology(world_size=3)._rank == 0


def test_default_process_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        topology = RingTopology()
        assert (topology._world_size, topology._rank) == (1, 0)
        with worker_scope(5, 3):
            assert RingTopology()._world_size == 5
    finally:
        dist.destroy_process_group()


def test_worker_scope() -> None:
    with worker_scope(4, 3):
        assert repr(RingTopology(2)) == "RingTopology(2, world_size=4, rank=3)"
        assert RingTopology(world_size=4)._rank == 3
        assert RingTopology(world_size=2)._rank == 0
        assert RingTopology(world_size=8, rank=6)._rank == 6
        with worker_scope(2, 1):
            assert RingTopology()._world_size == 2
        assert RingTopology()._world_size == 4
    with contextlib.suppress(ZeroDivisionError), worker_scope(4, 3):
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="no process group"):
        RingTopology()


# --- registry and make_topology


def test_register_decorator_and_direct_writing() -> None:
    @TopologyReg.register("old-style")
    class OldStyle(Star):
        def __init__(self, local_world_size: int) -> None:
            super().__init__(local_world_size)

    @TopologyReg.register("seeded")
    def seeded(local_world_size: int) -> Topology:
        return RandomPairs(local_world_size, seed=7)

    TopologyReg.registry["direct"] = Star
    TopologyReg.registry["lambda"] = lambda local: Star(local)
    for name, cls in {"old-style": OldStyle, "seeded": RandomPairs, "direct": Star, "lambda": Star}.items():
        topology = make_topology(name, local_world_size=1, world_size=5, rank=2)
        assert type(topology) is cls
        assert_proper(topology, 4)


def test_register_refuses_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match=r"needs a name, as in @TopologyReg\.register"):
        TopologyReg.register(Star)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'x' must be a Topology subclass or a callable"):
        TopologyReg.register("x")(3)  # type: ignore[type-var]
    TopologyReg.register("star")(Star)
    TopologyReg.register("star")(Star)
    assert not caplog.records
    TopologyReg.register("star")(RandomPairs)
    assert "'star'" in caplog.text
    assert TopologyReg.registry["star"] is RandomPairs


def test_unknown_name() -> None:
    for typed, meant in {
        "rnig": "ring",
        "One_Peer_Exp": "one-peer-exp",
        "alternating-exp": "alternating-exp-ring",
    }.items():
        with pytest.raises(ValueError, match=f"unknown topology '{typed}': did you mean '{meant}'\\?"):
            make_topology(typed, local_world_size=1, world_size=4, rank=0)
    with pytest.raises(ValueError, match=r"unknown topology 'xyz'\. Registered: 'complete', 'ring', 'one-peer-exp'"):
        make_topology("xyz", local_world_size=1, world_size=4, rank=0)


@pytest.mark.parametrize("thing", [None, 3, ["ring"], RingTopology])
def test_neither_name_nor_topology(thing: Any) -> None:
    says = "this is a class, so pass its registered name" if thing is RingTopology else ""
    with pytest.raises(TypeError, match=rf"topology must be a registered name or a Topology, got .*{says}"):
        make_topology(thing, local_world_size=1, world_size=4, rank=0)


def test_registered_things_that_are_no_topology() -> None:
    TopologyReg.registry["number"] = 3  # type: ignore[assignment]
    TopologyReg.registry["none"] = lambda local: None  # type: ignore[assignment, return-value]
    TopologyReg.registry["fixed"] = lambda local: Star(local, world_size=3, rank=0)
    with pytest.raises(TypeError, match=r"registry\['number'\] must be .* got 3"):
        make_topology("number", local_world_size=1, world_size=4, rank=0)
    with pytest.raises(TypeError, match=r"registry\['none'\] must return a Topology, got None"):
        make_topology("none", local_world_size=1, world_size=4, rank=0)
    with pytest.raises(ValueError, match=r"topology 'fixed' was built for world_size=3, rank=0.* world_size=4, rank=1"):
        make_topology("fixed", local_world_size=1, world_size=4, rank=1)


def test_instance_is_taken_as_it_is_or_refused() -> None:
    topology = RingTopology(world_size=4, rank=1)
    assert make_topology(topology, local_world_size=2, world_size=4, rank=1) is topology
    for n, rank in ((5, 1), (4, 2)):
        with pytest.raises(ValueError, match=rf"RingTopology, was built for world_size=4, rank=1, .*={n}, rank={rank}"):
            make_topology(topology, local_world_size=1, world_size=n, rank=rank)


# --- fingerprint and printing


def test_fingerprint_is_of_what_the_workers_do() -> None:
    def prints(*topologies: Topology) -> list[Any]:
        return [topology.fingerprint() for topology in topologies]

    a, b = prints(*(RandomPairs(world_size=6, rank=rank) for rank in (0, 5)))
    assert a == b
    assert a["name"] == "RandomPairs"
    assert a["n"] == 6
    assert re.fullmatch("[0-9a-f]{16}", a["rounds"])
    assert prints(RandomPairs(world_size=6, seed=1))[0]["rounds"] != a["rounds"]
    same = prints(made_of([Edge([0, 1], 0.5), Edge([3, 2], 0.5)]), made_of([Edge([2, 3], 0.5), Edge([1, 0], np.float64(0.5))]))
    assert same[0] == same[1]
    base = made_of([Edge([0, 1], 0.5), Edge([2, 3], 0.5)])
    others = [
        made_of([Edge([0, 2], 0.5), Edge([1, 3], 0.5)]),
        made_of([Edge([0, 1], 0.5), Edge([2, 3], 0.5 + 1e-16 * 2)]),
        made_of([Edge([0, 1], 0.5), Edge([2, 3], 0.5)], GOOD_ROUND),
        made_of(*[[Edge([0, 1], 0.5), Edge([2, 3], 0.5)]] * 64, GOOD_ROUND),
        made_of(*[[Edge([0, 1], 0.5), Edge([2, 3], 0.5)]] * 65, GOOD_ROUND),
    ]
    assert len({p["rounds"] for p in prints(base, *others)}) == 6


def test_fingerprint_looks_at_64_rounds_and_checks_them() -> None:
    class Mine(Topology):
        def __init__(self, special: int) -> None:
            self.special = special  # set before super().__init__
            super().__init__(world_size=2)

        def round(self, t: int) -> list[Edge]:
            return [Edge([0, 1], 0.25 if t == self.special else 0.5)]

    rounds = {special: Mine(special).fingerprint()["rounds"] for special in (0, 63, 64, 65)}
    assert len(set(rounds.values())) == 3
    assert rounds[64] == rounds[65]

    class Late(Topology):
        def round(self, t: int) -> list[Edge]:
            return [Edge([0, 1], 0.5 if t < 63 else 2)]

    with pytest.raises(ValueError, match="Late, round 63"):
        Late(world_size=2).fingerprint()


def test_printing() -> None:
    assert str(RingTopology(world_size=3)) == (
        "RingTopology: 3 workers, 3 rounds per period\n"
        "  round 0: (0) idle  (1 2) 0.5\n"
        "  round 1: (1) idle  (0 2) 0.5\n"
        "  round 2: (2) idle  (0 1) 0.5"
    )
    assert str(CompleteTopology(world_size=1)) == "CompleteTopology: 1 worker, 1 round per period\n  round 0: (0) idle"
    assert "rounds do not repeat" in str(RandomPairs(world_size=4))
    assert str(RandomPairs(world_size=4)).endswith("\n  …")
    long = str(RingTopology(world_size=301))
    assert long.count("\n") == 17
    assert "… (151 edges in all)" in long
    assert "(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 … (99 in all)) 0.0101" in str(CompleteTopology(world_size=99))
