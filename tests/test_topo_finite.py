"""'base-2', 'random-matching' and 'hierarchical': exact averages by rational numbers, what is drawn, what crosses nodes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decent_dp.topo import (
    BaseTwoTopology,
    Edge,
    HierarchicalTopology,
    OnePeerExpTopology,
    RandomMatchingTopology,
    Topology,
    TopologyReg,
)
from decent_dp.topo.registry import names_that_fit, why_unfit


def product(topology: Topology) -> np.ndarray:
    """Of a period's matrices, from the definition of an edge: a group's rows are mixed at once."""
    assert topology.period is not None
    p = np.eye(topology.world_size)
    for t in range(topology.period):
        mixed = np.full_like(p, np.nan)
        for edge in topology.round(t):
            m, rows = len(edge.ranks), p[edge.ranks]
            w = np.full((m, m), (1 - edge.weight) / max(m - 1, 1))
            np.fill_diagonal(w, edge.weight)
            mixed[edge.ranks] = w @ rows
        p = mixed
    return p


# -- base-2 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [*range(1, 41), 63, 64, 100, 127])
def test_base_two_is_exact_in_rational_numbers(n):
    topology = BaseTwoTopology(world_size=n)
    e = (n & -n).bit_length() - 1
    odd = n >> e
    assert topology.period == max(e + (2 * (odd.bit_length() - 1) + 1 if odd > 1 else 0), 1)
    start = [Fraction(i * i + 1, i + 1) for i in range(n)]
    values = list(start)
    for t in range(topology.period):
        for edge in topology.round(t):
            assert len(edge.ranks) <= 2
            if len(edge.ranks) == 2:
                i, j = edge.ranks
                own = Fraction(edge.weight).limit_denominator(n)
                assert abs(own - Fraction(edge.weight)) < Fraction(1, 10**15)
                assert own >= Fraction(1, 2)  # nobody takes more than half of another
                values[i], values[j] = own * values[i] + (1 - own) * values[j], own * values[j] + (1 - own) * values[i]
    assert values == [sum(start, Fraction(0)) / n] * n


@pytest.mark.parametrize("power", range(8))
def test_base_two_of_a_power_of_two_is_one_peer_exp(power):
    ours, theirs = BaseTwoTopology(world_size=2**power), OnePeerExpTopology(world_size=2**power)
    assert ours.period == theirs.period
    assert [ours.round(t) for t in range(power)] == [theirs.round(t) for t in range(power)]


def test_base_two_of_seven_by_hand():
    """4 + 2 + 1: each set averages; the four meet the rest with weight 3/7, and average; the two meet the last, and average."""
    pairs = [
        {tuple(edge.ranks): edge.weight for edge in BaseTwoTopology(world_size=7).round(t) if len(edge.ranks) > 1}
        for t in range(5)
    ]
    assert [set(round_) for round_ in pairs] == [
        {(0, 1), (2, 3), (4, 5)},
        {(0, 2), (1, 3)},
        {(0, 4), (1, 5), (2, 6)},
        {(4, 5), (3, 6), (0, 2)},
        {(4, 6), (3, 5), (1, 2)},
    ]
    assert set(pairs[2].values()) == {1 - 3 / 7}
    assert pairs[3] == {(4, 5): 0.5, (3, 6): 0.5, (0, 2): 1 - 1 / 3}


# -- random-matching -------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), seed=st.integers(0, 2**32 - 1), t=st.integers(0, 10**9), rank=st.integers(0, 59))
def test_random_matching_pairs_everybody(n, seed, t, rank):
    topology = RandomMatchingTopology(world_size=n, rank=rank % n, seed=seed)
    edges = topology.round(t)
    assert sorted(r for edge in edges for r in edge.ranks) == list(range(n))
    assert sorted(len(edge.ranks) for edge in edges) == [1] * (n % 2) + [2] * (n // 2)
    assert {edge.weight for edge in edges if len(edge.ranks) == 2} <= {0.5}
    assert edges == RandomMatchingTopology(world_size=n, seed=seed).round(t)
    assert topology.period is None


def test_random_matching_is_the_frozen_stream_and_uniform():
    # NumPy promises that RandomState's stream stays: these pairs are for ever.
    assert RandomMatchingTopology(world_size=6, seed=5).round(2) == [Edge([1, 4], 0.5), Edge([2, 5], 0.5), Edge([0, 3], 0.5)]
    topology = RandomMatchingTopology(world_size=5, seed=1)
    met = np.zeros((5, 5))
    for t in range(4000):
        for edge in topology.round(t):
            met[edge.ranks[0], edge.ranks[-1]] += 1
    chances = met[np.triu_indices(5)] / 4000  # each of 5 sits out, and each of 10 pairs meets, in a fifth of the rounds
    assert abs(chances - 0.2).max() < 0.03


def test_random_matching_seeds():
    rounds = [[RandomMatchingTopology(world_size=8, seed=seed).round(t) for t in range(6)] for seed in range(4)]
    assert all(a != b for i, a in enumerate(rounds) for b in rounds[:i])
    assert len({str(edges) for edges in rounds[0]}) == 6
    for seed, kind, says in [
        (-1, ValueError, "seed must be a whole number, at least 0, got -1"),
        (2**32, ValueError, r"seed must be below 2\^32"),
        (1.5, TypeError, r"seed must be a whole number, at least ., got 1\.5"),
    ]:
        with pytest.raises(kind, match=says):
            RandomMatchingTopology(world_size=4, seed=seed)  # type: ignore[arg-type]
    one, other = (RandomMatchingTopology(world_size=4, seed=seed).fingerprint() for seed in (3, 4))
    assert one["name"] == "RandomMatchingTopology with seed 3"
    assert one["rounds"] != other["rounds"]
    assert repr(RandomMatchingTopology(2, world_size=4, seed=3)) == "RandomMatchingTopology(2, world_size=4, rank=0, seed=3)"


def test_the_last_rounds_are_kept():
    """Who asks for rounds t, t + 1, t, t + 1 makes each once."""
    asked = []

    class Asked(RandomMatchingTopology):
        def round(self, t: int) -> list[Edge]:
            asked.append(t)
            return super().round(t)

    topology = Asked(world_size=4)  # round 0 is looked up here
    asked.clear()
    for t in range(5):
        for _ in range(3):
            topology.get_edge(t)
            topology.get_edge(t + 1)
    assert asked == [1, 2, 3, 4, 5]
    for t in range(100):
        topology.get_edge(t)
    assert 2 <= len(topology._recent_rounds) <= 8


# -- hierarchical ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [1, 2, 3, 4])
def test_hierarchical_averages_exactly_and_its_nodes_follow_base_two(local):
    for n_nodes in [*range(1, 20), 24, 31]:
        n = n_nodes * local
        topology, nodes = HierarchicalTopology(local, world_size=n), BaseTwoTopology(world_size=n_nodes)
        assert topology.period == nodes.period
        np.testing.assert_allclose(product(topology), 1 / n, rtol=0, atol=1e-12)
        x = np.random.default_rng(n).normal(size=n)
        means = x.reshape(n_nodes, local).mean(axis=1)
        for t in range(topology.period or 0):
            x = topology.mixing_matrix(t) @ x
            means = nodes.mixing_matrix(t) @ means
            # From the first round on all workers of a node are alike.
            np.testing.assert_allclose(x.reshape(n_nodes, local), means[:, None].repeat(local, 1), atol=1e-12)


@given(n_nodes=st.integers(2, 40), local=st.integers(1, 5))
def test_hierarchical_sends_one_copy_between_nodes(n_nodes, local):
    topology = HierarchicalTopology(local, world_size=n_nodes * local)
    for t in range(topology.period or 0):
        for edge in topology.round(t):
            nodes = sorted({rank // local for rank in edge.ranks})
            assert len(nodes) <= 2
            assert edge.ranks == [rank for node in nodes for rank in range(node * local, (node + 1) * local)]
            assert 0 <= edge.weight <= 1


def test_hierarchical_by_hand():
    assert HierarchicalTopology(2, world_size=6).round(0) == [Edge([0, 1, 2, 3], 0.25), Edge([4, 5], 0.5)]
    # 3 nodes, second round: node 0 meets node 2 with weight 1/3, so each takes 1/6 of each of the other node's, and its own.
    assert HierarchicalTopology(2, world_size=6).round(1) == [Edge([0, 1, 4, 5], 0.5), Edge([2, 3], 0.5)]
    assert HierarchicalTopology(4, world_size=4).round(0) == [Edge([0, 1, 2, 3], 0.25)]
    for n in range(1, 30):
        alone, pairs = HierarchicalTopology(world_size=n), BaseTwoTopology(world_size=n)
        assert [alone.round(t) for t in range(alone.period or 0)] == [pairs.round(t) for t in range(pairs.period or 0)]


# --- which one fits


def test_names_that_fit():
    assert names_that_fit(16, 4) == list(TopologyReg.registry)
    assert names_that_fit(24, 4) == ["complete", "ring", "base-2", "random-matching", "hierarchical"]
    assert names_that_fit(7, 2) == ["complete", "ring", "base-2", "random-matching"]
    assert why_unfit("ring", 7, 2) is None
    assert why_unfit("one-peer-exp", 7, 2) == "needs a power of two workers, got world_size=7"
    assert "does not divide" in (why_unfit("hierarchical", 7, 2) or "")
    with pytest.raises(ValueError, match="did you mean 'base-2'"):
        why_unfit("base2", 7, 2)
