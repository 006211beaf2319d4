"""The analysis of topologies against matrices, closed forms and the bytes of real workers."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_dp.tools.analysis import (
    Analysis,
    analyse,
    consensus_error,
    is_doubly_stochastic,
    mixing_matrix,
    without,
)
from decent_dp.topo import (
    CompleteTopology,
    Edge,
    HierarchicalTopology,
    RandomMatchingTopology,
    RingTopology,
    Topology,
    TopologyReg,
    make_topology,
)
from decent_dp.topo.schedule import title_of
from decent_dp.transport.groups import find_place

NAMES = ["complete", "ring", "one-peer-exp", "alternating-exp-ring", "base-2", "random-matching", "hierarchical"]


def made(name: str, n: int, local: int = 1) -> Topology:
    return make_topology(name, local_world_size=local, world_size=n, rank=0)


def fitting(n: int, local: int) -> list[str]:
    return [name for name in NAMES if TopologyReg.registry[name].unfit(n, local) is None]  # type: ignore[attr-defined]


def graph(kind: nx.Graph) -> Topology:
    return Topology.from_graph(nx.convert_node_labels_to_integers(kind), allow_disconnected=True)


class Groups(Topology):
    """Groups over unequal parts of nodes, weights other than the average's, and idle workers."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        return [
            [Edge(list(range(5)), 0.4), Edge([5, n - 1], 0.9), Edge(list(range(6, n - 1)), 0.2)],
            [Edge(list(range(0, n, 2)), 0.5), *(Edge([rank], 1.0) for rank in range(1, n, 2))],
        ]


# -- matrices --------------------------------------------------------------------------------------------------------------


def period_product(topology: Topology) -> np.ndarray:
    p = np.eye(topology.world_size)
    for t in range(topology.period or 0):
        p = topology.mixing_matrix(t) @ p
    return p


@given(n=st.integers(1, 40), local=st.integers(1, 6), t=st.integers(0, 99), h=st.integers(1, 3))
@settings(max_examples=20)
def test_matrices_are_doubly_stochastic(n, local, t, h):
    for name in fitting(n, local):
        topology = made(name, n, local).every(h)
        assert is_doubly_stochastic(mixing_matrix(topology, t))
        np.testing.assert_array_equal(mixing_matrix(topology, t), topology.mixing_matrix(t))
        if topology.period is not None:
            p = mixing_matrix(topology)
            assert is_doubly_stochastic(p)
            np.testing.assert_allclose(p, period_product(topology), atol=1e-14)


def test_is_doubly_stochastic_refuses_other_matrices():
    rows_alone, columns_alone = [[0.5, 0.5], [0.4, 0.6]], [[0.5, 0.4], [0.5, 0.6]]
    for bad in (rows_alone, columns_alone, [[-0.5, 1.5], [1.5, -0.5]], [[0.5, 0.5]], [1.0], [[math.nan, 1], [1, 0]]):
        assert not is_doubly_stochastic(bad)
    assert is_doubly_stochastic([[0.25, 0.75], [0.75, 0.25]])
    assert is_doubly_stochastic(np.eye(2) + 1e-11, tolerance=1e-10)
    assert not is_doubly_stochastic(np.eye(2) + 1e-11)


def test_a_period_is_needed_for_its_matrix():
    with pytest.raises(ValueError, match="RandomMatchingTopology with seed 0 has no period: pass t=, the round"):
        mixing_matrix(RandomMatchingTopology(world_size=4))


# -- consensus error -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [2, 8, 16])
def test_error_is_that_of_the_product(name, n):
    topology = made(name, n, 2)
    errors = consensus_error(topology, 12)
    assert errors.shape == (13,)
    p, mean = np.eye(n), np.full((n, n), 1 / n)
    for t in range(13):
        want = np.linalg.norm(p - mean) / np.linalg.norm(np.eye(n) - mean)
        assert errors[t] == pytest.approx(want, rel=1e-12, abs=1e-14)
        p = topology.mixing_matrix(t) @ p


# -- how fast --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 6, 64, 130, pytest.param(500, marks=pytest.mark.slow)])
def test_ring_has_its_closed_form(n):
    """The product of the ring's two projections has the squared cosines of 2 pi k / n; its norm is the first cosine."""
    found = analyse(RingTopology(world_size=n))
    cosine = math.cos(2 * math.pi / n)
    assert found.spectral_gap == pytest.approx(1 - cosine, rel=1e-3)
    assert 1 - found.rate == pytest.approx(1 - max(cosine, 0), rel=1e-3)  # two rounds per period
    assert found.exact == (n == 4)


def test_parts_that_never_mix_have_no_gap():
    apart = analyse(graph(nx.disjoint_union(nx.cycle_graph(9), nx.complete_graph(7))))
    assert (apart.spectral_gap, apart.rate, apart.rounds_to_epsilon, apart.exact) == (0.0, 1.0, None, False)
    alone = analyse(graph(nx.empty_graph(10)))
    assert (alone.spectral_gap, alone.rate, alone.idle, alone.degree, alone.sent_by_worker) == (0.0, 1.0, 1.0, 0, 0.0)


@given(n=st.integers(1, 30), local=st.integers(1, 5), h=st.integers(1, 3))
@settings(max_examples=10)
def test_exactness_and_rounds_to_epsilon(n, local, h):
    for name in fitting(n, local):
        topology = made(name, n, local).every(h)
        found = analyse(topology, epsilon=0.01, limit=300)
        exact = topology.period is not None and np.allclose(period_product(topology), 1 / n, atol=1e-11)
        assert found.exact == exact
        if exact:
            assert (found.spectral_gap, found.rate) == (1.0, 0.0)
        errors = consensus_error(topology, 300)
        below = np.flatnonzero(errors <= 0.01)
        assert found.rounds_to_epsilon == (int(below[0]) if len(below) else None)
        assert (found.world_size, found.local_world_size, found.period) == (n, local, topology.period)
        assert (found.name, found.epsilon) == (title_of(topology), 0.01)


def test_random_matching_decays_as_expected():
    for n in (50, 300):
        found = analyse(RandomMatchingTopology(world_size=n))
        assert found.rate == pytest.approx(math.sqrt((n - 2) / (2 * n - 2)), rel=0.02)
        assert (found.period, found.spectral_gap, found.exact) == (None, None, False)
    assert analyse(RandomMatchingTopology(world_size=2)).rate < 1e-6


def test_a_switch_is_analysed_where_it_first_mixes():
    every = make_topology("complete:500,ring", local_world_size=1, world_size=8, rank=0).every(100)
    found = analyse(every)
    assert (found.degree, found.rounds_to_epsilon, found.rate) == (7, 100, 0.0)
    # 6400 updates: 5 mixes of all, 59 of pairs.
    assert found.sent_by_worker == pytest.approx((5 * 2 * 7 / 8 + 59) / 6400)
    assert found.idle == pytest.approx(0.99)


def test_every_of_an_aperiodic_topology():
    inner, h = RandomMatchingTopology(2, world_size=6), 3
    once, found = analyse(inner, epsilon=0.01), analyse(inner.every(h), epsilon=0.01)
    assert (found.degree, found.largest_group, found.fan_in) == (once.degree, 2, once.fan_in)
    assert (found.period, found.spectral_gap, found.name) == (None, None, title_of(inner.every(h)))
    assert (found.idle, found.sent_by_worker) == (pytest.approx(1 - 1 / h), pytest.approx(1 / h))
    assert found.sent_by_node == pytest.approx(once.sent_by_node / h)
    assert found.rate == pytest.approx(once.rate ** (1 / h))
    assert found.rounds_to_epsilon == h * (once.rounds_to_epsilon or 0)
    assert analyse(inner.every(h), epsilon=0.01, limit=h * (once.rounds_to_epsilon or 0) - 1).rounds_to_epsilon is None


class Shifted(Topology):
    """The rounds of 'base-2', begun later."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        base = made("base-2", self._world_size)
        return [base.round(t + 2) for t in range(base.period or 0)]


@pytest.mark.parametrize("n", [5, 7, 25, 99])
def test_rate_of_a_topology_exact_after_several_periods(n):
    topology = Shifted(world_size=n)
    found = analyse(topology)
    assert not found.exact
    assert found.rate == 0.0
    assert 0 <= (found.spectral_gap or 0) < 1
    assert found.rounds_to_epsilon is not None
    assert found.rounds_to_epsilon <= 2 * (topology.period or 0)


def test_rate_of_fast_topologies_is_no_rounding_error():
    """Their error also reaches rounding within some periods, but by shrinking."""

    class Near(Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return [[Edge([0, 1], 0.505)]]

    assert analyse(Near(world_size=2)).rate == pytest.approx(0.01)


def test_decay_is_measured_down_to_rounding_and_no_further():
    class Slow(Topology):
        """A factor of 0.25 per round, which reaches rounding in the 20th."""

        def round(self, t: int) -> list[Edge]:
            return [Edge([0, 1, 2], 0.5)]

    assert analyse(Slow(world_size=3)).rate == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.3, 1e-2, 1e-5])
@pytest.mark.parametrize("topology", [RingTopology(world_size=12), RingTopology(world_size=7), graph(nx.petersen_graph())])
def test_powers_find_the_round_that_step_by_step_finds(topology, epsilon):
    errors = consensus_error(topology, 1500)
    first = int(np.flatnonzero(errors <= epsilon)[0])
    for limit in (first, first + 1, 1500):
        assert analyse(topology, epsilon=epsilon, limit=limit).rounds_to_epsilon == first
    if first > 1:
        assert analyse(topology, epsilon=epsilon, limit=first - 1).rounds_to_epsilon is None


# -- what it costs ---------------------------------------------------------------------------------------------------------


def traffic(topology: Topology) -> tuple[float, float, float]:
    """By brute force: every message of the trees, with as many chunks as make all turns equal."""
    n, local, period = topology.world_size, topology.local_world_size, topology.period
    assert period is not None
    n_nodes = -(-n // local)
    sent, crossed, largest = 0.0, 0.0, 0.0
    for t in range(period):
        entered = np.zeros(n_nodes)
        for edge in topology.round(t):
            nodes: dict[int, list[int]] = {}
            for rank in sorted(edge.ranks):
                nodes.setdefault(rank // local, []).append(rank)
            pieces = min(map(len, nodes.values())) * len(nodes)
            for piece in range(pieces):
                for rank in edge.ranks:
                    parent = find_place(list(nodes.values()), piece, rank).parent
                    for a, b in [] if parent is None else [(rank, parent.rank), (parent.rank, rank)]:
                        sent += 1 / pieces
                        if a // local != b // local:
                            crossed += 1 / pieces
                            entered[b // local] += 1 / pieces
        largest = max(largest, entered.max())
    return sent / (n * period), crossed / (n_nodes * period), largest


@pytest.mark.parametrize(("n", "local"), [(1, 1), (2, 1), (6, 1), (6, 2), (6, 6), (8, 2), (12, 3), (12, 5), (16, 4), (3, 8)])
def test_bytes_are_those_of_the_trees(n, local):
    topologies = [made(name, n, local) for name in fitting(n, local) if name != "random-matching"]
    topologies += [Groups(local, world_size=n)] if n >= 9 else []
    for topology in topologies:
        found = analyse(topology, payload=10.0)
        want = [10 * value for value in traffic(topology)]
        assert [found.sent_by_worker, found.sent_by_node, found.fan_in] == pytest.approx(want), topology


def test_figures_by_hand():
    found = analyse(HierarchicalTopology(4, world_size=24), payload=100.0)
    assert found == Analysis(
        "HierarchicalTopology", 24, 4, 4, True, 1.0, 0.0, 4, 1e-3, 15, 8, 0.0, 168.75, 75.0, 100.0
    )  # six nodes: 4 rounds, in two of which two nodes sit out; so a worker sends 2·7/8 in 3/4 of them, and 2·3/4 in 1/4
    with pytest.raises(FrozenInstanceError):
        found.name = "other"  # type: ignore[misc]
    ring = analyse(RingTopology(2, world_size=5))
    assert (ring.degree, ring.largest_group, ring.idle, ring.sent_by_worker) == (2, 2, pytest.approx(0.2), pytest.approx(0.8))
    groups = analyse(Groups(4, world_size=12))
    assert (groups.degree, groups.largest_group, groups.idle) == (7, 6, 6 / 24)
    complete = analyse(CompleteTopology(4, world_size=8).every(5))
    assert (complete.idle, complete.period, complete.sent_by_worker) == (0.8, 5, pytest.approx(2 * 7 / 8 / 5))
    assert (complete.sent_by_node, complete.fan_in) == (pytest.approx(1 / 5), 1.0)


# -- sizes and bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"payload": -1.0}, ValueError, r"payload must be a size, at least 0, got -1\.0"),
        ({"payload": "1"}, TypeError, "payload must be a size, at least 0, got '1'"),
        ({"epsilon": 0.0}, ValueError, r"epsilon must be between 0 and 1, got 0\.0"),
        ({"limit": 0}, ValueError, "limit must be a whole number, at least 1, got 0"),
        ({"topology": "ring"}, TypeError, "analyse takes a Topology, got 'ring'"),
        ({"topology": RingTopology(world_size=1026)}, ValueError, "RingTopology has 1026 workers: analyse takes at most 1024"),
    ],
)
def test_bad_arguments(options, kind, says):
    with pytest.raises(kind, match=says):
        analyse(**{"topology": RingTopology(world_size=4), **options})


# -- without some workers --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["base-2", "ring", "random-matching", "every", "graph"]), st.integers(2, 12), st.data(), st.integers(0, 40)
)
def test_survivors_mix_as_the_matrices_without_the_edges_of_the_dead(name: str, n: int, data: st.DataObject, t: int) -> None:
    gone = data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))
    whole = graph(nx.path_graph(n)) if name == "graph" else made("ring", n).every(3) if name == "every" else made(name, n)
    left = without(whole, gone)
    assert left.survivors == [rank for rank in range(n) if rank not in gone]
    assert (left.world_size, left.period) == (n - len(gone), whole.period)
    expected = np.eye(n)
    for edge in whole.round(t):
        if len(edge.ranks) == 2 and not gone & set(edge.ranks):
            i, j = edge.ranks
            expected[[i, j], [i, j]], expected[[i, j], [j, i]] = edge.weight, 1 - edge.weight
    np.testing.assert_array_equal(left.mixing_matrix(t), expected[np.ix_(left.survivors, left.survivors)])
    assert is_doubly_stochastic(left.mixing_matrix(t))


def test_how_fast_survivors_come_together() -> None:
    """The long-run factor per round: with one dead of a power of two it is one half, and 1 where a ring falls apart."""
    for n in (8, 16, 32):
        for name in ("base-2", "one-peer-exp"):
            assert analyse(without(made(name, n), [])).exact
            for dead in range(n):
                assert analyse(without(made(name, n), [dead])).rate == pytest.approx(0.5, abs=1e-9)
    two = [analyse(without(made("base-2", 8), [0, other])) for other in range(1, 8)]
    assert (min(f.rate for f in two), max(f.rate for f in two)) == pytest.approx((2 ** (-2 / 3), 2 ** (-1 / 3)))
    # A ring of m survivors in a line: twice cut is in two parts, next to each other in one.
    ring = made("ring", 16)
    rates = {gone: analyse(without(ring, gone)).rate for gone in ((), (3,), (3, 4), (3, 5), (0, 8))}
    assert {gone: round(rate, 3) for gone, rate in rates.items()} == {
        (): 0.924, (3,): 0.978, (3, 4): 0.975, (3, 5): 1.0, (0, 8): 1.0,
    }  # fmt: skip
    # 1 - gap is the norm of one period, which a chain of averages reaches only later.
    assert analyse(without(made("base-2", 16), [3])).spectral_gap == pytest.approx(1 - 0.25)


def test_without_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"without needs a topology of pairs.* groups of 6: use 'base-2'"):
        without(made("complete", 6), [1])
    with pytest.raises(ValueError, match="rank 6 is out of range; the ranks of the 6 workers are 0 to 5"):
        without(made("ring", 6), [2, 6])
    with pytest.raises(ValueError, match="all 2 workers are gone"):
        without(made("ring", 2), [0, 1])
    with pytest.raises(TypeError, match="without takes a Topology, got 'ring'"):
        without("ring", [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a rank must be"):
        without(made("ring", 6), [-1])
    left = without(made("ring", 6), [4, 1])
    assert (str(left).splitlines()[0], repr(left)) == (
        "RingTopology without 1, 4: 4 workers, 2 rounds per period",
        "without(RingTopology(1, world_size=6, rank=0), [1, 4])",
    )
