"""Graphs as topologies: every link once a period, few rounds, the same on all workers, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_dp.topo import Edge, GraphTopology, RingTopology, Topology, TopologyReg, make_topology
from decent_dp.topo.abstract import worker_scope


def links_of(topology: Topology) -> Counter[tuple[int, int]]:
    """How often each pair meets in a period."""
    assert topology.period is not None
    met: Counter[tuple[int, int]] = Counter()
    for t in range(topology.period):
        for edge in topology.round(t):
            assert edge.weight == (0.5 if len(edge.ranks) == 2 else 1)
            if len(edge.ranks) == 2:
                met[tuple(sorted(edge.ranks))] += 1  # type: ignore[index]
    return met


def largest_degree(graph: nx.Graph) -> int:
    return max(degree for _, degree in graph.degree)


def checked(graph: nx.Graph, **options: Any) -> Topology:
    """The topology, in which each link comes up once, in at most one round more than the largest degree."""
    topology = Topology.from_graph(graph, **options)
    assert topology.period is not None
    assert links_of(topology) == {tuple(sorted(link)): 1 for link in graph.edges}
    most = largest_degree(graph) + (0 if nx.is_bipartite(graph) else 1)
    assert 1 <= topology.period <= max(most, 1)
    return topology


@given(st.integers(1, 14), st.floats(0, 1), st.integers(0, 10**6))
@settings(max_examples=300)
def test_any_graph(n, density, seed):
    graph = nx.gnp_random_graph(n, density, seed=seed)
    topology = checked(graph, allow_disconnected=True)
    if nx.is_connected(graph):
        p = np.linalg.multi_dot([np.eye(n), *(topology.mixing_matrix(t) for t in range(topology.period or 0)), np.eye(n)])
        assert n == 1 or sorted(abs(np.linalg.eigvals(p)))[-2] < 1 - 1e-9
        Topology.from_graph(graph)


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0.1, 1), st.integers(0, 10**6))
@settings(max_examples=150)
def test_bipartite_graphs_need_no_more_rounds_than_neighbours(a, b, density, seed):
    graph = nx.convert_node_labels_to_integers(nx.bipartite.random_graph(a, b, density, seed=seed))
    labels = list(range(a + b))
    random.Random(seed).shuffle(labels)
    topology = checked(nx.relabel_nodes(graph, dict(enumerate(labels))), allow_disconnected=True)
    assert topology.period == max(largest_degree(graph), 1)


@pytest.mark.parametrize(
    ("graph", "rounds"),
    [
        (nx.hypercube_graph(5), 5),
        (nx.cycle_graph(6), 2),
        (nx.cycle_graph(7), 3),
        (nx.path_graph(2), 1),
        (nx.star_graph(9), 9),
        (nx.petersen_graph(), 4),  # of degree 3, and known to need 4
        (nx.complete_graph(7), 7),
        (nx.grid_2d_graph(4, 5), 4),
        (nx.empty_graph(1), 1),
    ],
)
def test_known_graphs(graph, rounds):
    assert checked(nx.convert_node_labels_to_integers(graph)).period == rounds


def test_large_graphs_are_fast():
    start = time.process_time()
    checked(nx.random_regular_graph(7, 2000, seed=1))
    checked(nx.gnp_random_graph(200, 0.5, seed=1))
    assert time.process_time() - start < 10  # about one second


@given(st.integers(2, 12), st.floats(0.2, 1), st.integers(0, 10**6))
@settings(max_examples=60)
def test_the_order_of_nodes_and_links_does_not_matter(n, density, seed):
    graph = nx.gnp_random_graph(n, density, seed=seed)
    shuffled = nx.Graph()
    rng = random.Random(seed)
    shuffled.add_nodes_from(rng.sample(sorted(graph.nodes), n))
    shuffled.add_edges_from((v, u) if rng.random() < 0.5 else (u, v) for u, v in rng.sample(sorted(graph.edges), graph.size()))
    one, other = (Topology.from_graph(g, allow_disconnected=True) for g in (graph, shuffled))
    assert [one.round(t) for t in range(one.period or 0)] == [other.round(t) for t in range(other.period or 0)]
    assert one.fingerprint() == other.fingerprint()


def test_every_round_of_a_path_by_hand():
    graph = nx.Graph([(2, 1), (0, 1)])
    graph.add_edge(2, 3, weight=17.0)  # attributes are not looked at
    topology = Topology.from_graph(graph, local_world_size=2)
    assert [topology.round(t) for t in range(2)] == [
        [Edge([0, 1], 0.5), Edge([2, 3], 0.5)],
        [Edge([1, 2], 0.5), Edge([0], 1.0), Edge([3], 1.0)],
    ]
    assert isinstance(topology, GraphTopology)
    assert topology.local_world_size == 2
    assert repr(topology) == "GraphTopology(<3 links>, 2, world_size=4, rank=0)"


DIRECTED, MULTI, LOOP, NAMED = nx.DiGraph([(0, 1)]), nx.MultiGraph([(0, 1)]), nx.Graph([(0, 1), (1, 1)]), nx.Graph([("a", "b")])


@pytest.mark.parametrize(
    ("graph", "kind", "says"),
    [
        (DIRECTED, TypeError, r"directed.* pass graph\.to_undirected\(\)"),
        (MULTI, TypeError, r"several edges between two nodes: pass networkx\.Graph\(graph\)"),
        (LOOP, ValueError, r"links node 1 to itself: .*networkx\.selfloop_edges"),
        (nx.Graph(), ValueError, "is empty: it needs a node for each worker"),
        (NAMED, ValueError, r"2 nodes must be the workers 0 to 1, got 'a': networkx\.convert_node_labels_to_integers\(graph\)"),
        (nx.Graph([(1, 2), (2, 3)]), ValueError, "3 nodes must be the workers 0 to 2, got 3: "),
        (nx.Graph([(0.0, 1.0)]), ValueError, r"got 0\.0"),
        (nx.Graph([(True, False)]), ValueError, "got True"),
        (nx.grid_2d_graph(2, 2), ValueError, r"got \(0, 0\)"),
        ("ring", TypeError, "from_graph takes a networkx graph, got 'ring'"),
        (None, TypeError, "got None"),
        (
            nx.Graph([(0, 3), (1, 2), (4, 2)]),
            ValueError,
            "disconnected: its 2 parts are of 2 3 workers, and workers 0 and 1, for example, never hear of each other; .*=True",
        ),
        (nx.empty_graph(40), ValueError, r"its 40 parts are of 1 1 .* … \(40 in all\) workers"),
    ],
)
def test_bad_arguments_are_refused(graph, kind, says):
    with pytest.raises(kind, match=says):
        Topology.from_graph(graph)


def test_a_disconnected_graph_may_be_asked_for():
    topology = checked(nx.Graph([(0, 3), (1, 2), (4, 2)]), allow_disconnected=True)
    assert topology.world_size == 5
    assert Topology.from_graph(nx.empty_graph(3), allow_disconnected=True).round(0) == [Edge([r], 1.0) for r in range(3)]


def test_workers_of_nodes():
    graph = nx.cycle_graph(4)
    assert (Topology.from_graph(graph)._rank, Topology.from_graph(graph, rank=2)._rank) == (0, 2)
    with worker_scope(4, 3):
        assert Topology.from_graph(graph).get_edge(0).ranks == [2, 3]
    for scope in (worker_scope(6, 3), worker_scope(3, 1)):
        with scope, pytest.raises(ValueError, match=r"graph has 4 nodes, but world_size=[36]: .* workers 0 to [25]"):
            Topology.from_graph(graph)
    with pytest.raises(ValueError, match="graph has 4 nodes, but world_size=5"):
        Topology.from_graph(graph, world_size=5)
    TopologyReg.registry["four"] = lambda local: Topology.from_graph(graph, local_world_size=local)
    try:
        made = make_topology("four", local_world_size=2, world_size=4, rank=1)
    finally:
        del TopologyReg.registry["four"]
    assert (made.world_size, made.local_world_size, made._rank) == (4, 2, 1)
    assert isinstance(RingTopology.from_graph(graph, world_size=4), GraphTopology)


# -- rounds that are made when they are looked up --------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [RingTopology(world_size=9, rank=4), Topology.from_graph(nx.petersen_graph(), rank=4)])
def test_rounds_one_by_one_are_those_of_the_whole_period(topology):
    whole = topology._get_topo_edges()
    assert topology.period == len(whole)
    for t in range(2 * len(whole)):
        edges = whole[t % len(whole)]
        assert topology.round(t) == edges
        assert topology.get_edge(t) == next(edge for edge in edges if 4 in edge.ranks)
        assert topology.get_edge(t) is topology.get_edge(t)
        topology.round(t).clear()

    class Backwards(type(topology)):  # type: ignore[misc]
        def _get_topo_edges(self) -> list[list[Edge]]:
            return super()._get_topo_edges()[::-1]  # type: ignore[no-any-return]

    n = topology.world_size
    back = Backwards(world_size=n, rank=4) if n == 9 else Backwards(nx.petersen_graph(), rank=4)
    assert [back.round(t) for t in range(len(whole))] == whole[::-1]
    assert back.get_edge(0) == topology.get_edge(len(whole) - 1)
    assert back.fingerprint()["rounds"] != topology.fingerprint()["rounds"]


def test_graphs_that_differ_late_have_other_fingerprints():
    star, other = nx.empty_graph(100), nx.empty_graph(100)
    star.add_edges_from((0, i) for i in range(1, 99))
    other.add_edges_from((0, i) for i in range(1, 100) if i != 98)
    one, two = (Topology.from_graph(graph, allow_disconnected=True) for graph in (star, other))
    assert [one.round(t) for t in range(64)] == [two.round(t) for t in range(64)]
    prints = [one.fingerprint(), two.fingerprint(), Topology.from_graph(star, rank=5, allow_disconnected=True).fingerprint()]
    assert prints[0]["rounds"] != prints[1]["rounds"]
    assert prints[0] == prints[2]


def test_a_rank_is_the_process_groups_if_it_has_as_many_workers(workers):
    assert workers(3, in_a_group) == [([0, 1], 0), ([0, 1], 1), ([2], 2)]


def in_a_group(rank: int, n: int) -> tuple[list[int], int]:
    with pytest.raises(ValueError, match="graph has 4 nodes, but world_size=3"):
        Topology.from_graph(nx.cycle_graph(4))
    assert Topology.from_graph(nx.path_graph(3))._rank == rank
    topology = Topology.from_graph(nx.path_graph(3), world_size=3)
    assert Topology.from_graph(nx.path_graph(4), world_size=4)._rank == 0
    assert Topology.from_graph(nx.path_graph(3), world_size=3, rank=1)._rank == 1
    return topology.get_edge(0).ranks, topology._rank


def test_needs_neither_networkx_nor_torch():
    """Nor does any other topology. Of thousands of rounds none is made before it is looked up: here 16 million edges."""
    script = """
import sys
from decent_dp.topo import RingTopology, Topology, TopologyReg, make_topology

class Graph:
    nodes, edges = range(3), [(0, 1), (2, 1)]
    is_directed = is_multigraph = lambda self: False

print(Topology.from_graph(Graph()))
for name in TopologyReg.registry:
    topology = make_topology(name, local_world_size=2, world_size=8, rank=5)
    topology.get_edge(3), topology.mixing_matrix(1), topology.fingerprint(), str(topology)
assert RingTopology(world_size=4095, rank=7).get_edge(2 * 4095 + 6).ranks == [7, 8]
assert "torch" not in sys.modules and "networkx" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["  round 0: (0 1) 0.5  (2) idle", "  round 1: (1 2) 0.5  (0) idle"]
