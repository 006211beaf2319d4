"""Mixing in some updates only, and one topology after another."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decent_dp.topo import (
    BaseTwoTopology,
    CompleteTopology,
    Edge,
    EveryTopology,
    HierarchicalTopology,
    OnePeerExpTopology,
    RandomMatchingTopology,
    RingTopology,
    SwitchTopology,
    Topology,
    TopologyReg,
    make_topology,
)
from decent_dp.topo.schedule import edges_ahead, stages_of


def made(text: Any, n: int = 4, rank: int = 0, local: int = 1) -> Topology:
    return make_topology(text, local_world_size=local, world_size=n, rank=rank)


def idle(n: int) -> list[Edge]:
    return [Edge([rank], 1.0) for rank in range(n)]


# -- every -----------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(["ring", "base-2", "random-matching"]), st.integers(1, 9), st.integers(2, 7), st.data())
@settings(max_examples=60)
def test_every_mixes_with_all_rounds_in_turn(name, n, h, data):
    rank = data.draw(st.integers(0, n - 1))
    inner = made(name, n, rank)
    topology = inner.every(h)
    assert topology.period == (None if inner.period is None else h * inner.period)
    mixes = 0
    for t in range(h * 8):
        if t % h == h - 1:
            assert topology.round(t) == inner.round(mixes)
            assert topology.get_edge(t) == inner.get_edge(mixes)
            np.testing.assert_array_equal(topology.mixing_matrix(t), inner.mixing_matrix(mixes))
            mixes += 1
        else:
            assert topology.round(t) == idle(n)
            assert topology.get_edge(t) == Edge([rank], 1.0)
    assert mixes == 8
    assert (topology.world_size, topology._rank) == (n, rank)
    assert isinstance(topology, EveryTopology)


def test_every_of_every_and_of_one():
    ring = RingTopology(2, world_size=6, rank=3)
    assert ring.every(1) is ring
    twice = ring.every(2).every(3)
    assert twice.fingerprint() == ring.every(6).fingerprint()
    assert [twice.round(t) for t in range(24)] == [ring.every(6).round(t) for t in range(24)]
    assert repr(twice) == "RingTopology(2, world_size=6, rank=3).every(6)"
    assert str(ring.every(2)).splitlines()[:3] == [
        "RingTopology, every 2 updates: 6 workers, 4 rounds per period",
        "  round 0: (0) idle  (1) idle  (2) idle  (3) idle  (4) idle  (5) idle",
        "  round 1: (0 1) 0.5  (2 3) 0.5  (4 5) 0.5",
    ]
    for h, kind in ((0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(kind, match="every: h must be"):
            ring.every(h)
    with pytest.raises(TypeError, match=r"EveryTopology is made of topologies, got .*this is a class: make one"):
        EveryTopology(RingTopology, 2)  # type: ignore[arg-type]


def test_fingerprints_tell_what_is_inside_also_where_64_rounds_are_idle():
    n = 6
    ring, base = RingTopology(world_size=n), BaseTwoTopology(world_size=n)
    matching = [RandomMatchingTopology(world_size=n, seed=seed) for seed in (1, 2)]
    all_of_them: list[Topology] = [ring, base, *matching]
    all_of_them += [topology.every(h) for topology in list(all_of_them) for h in (2, 100, 101)]
    all_of_them += [SwitchTopology((a, k), b) for a in (ring, base) for b in (ring, base, *matching) for k in (70, 80)]
    all_of_them += [SwitchTopology((ring, 170), base).every(100), SwitchTopology((ring, 7), (base, 3), ring)]
    prints = [topology.fingerprint() for topology in all_of_them]
    assert len({p["rounds"] for p in prints}) == len(prints)
    assert len({p["name"] for p in prints}) == len(prints)
    assert all(re.fullmatch("[0-9a-f]{16}", str(p["rounds"])) and p["n"] == n for p in prints)
    others = [type(t)(world_size=n, rank=5).fingerprint() for t in (ring, base)]
    assert others == prints[:2]
    assert RingTopology(world_size=n, rank=2).every(100).fingerprint() == ring.every(100).fingerprint()


def test_the_inner_topologys_own_checks_still_hold():
    class Late(Topology):
        def round(self, t: int) -> list[Edge]:
            return [Edge([0, 1], 0.5 if t < 2 else 7)]

    topology = Late(world_size=2).every(3)
    assert topology.get_edge(5) == Edge([0, 1], 0.5)
    for look_up in (topology.get_edge, topology.mixing_matrix):
        with pytest.raises(ValueError, match=r"Late, round 2, edge \(0 1\): weight must be"):
            look_up(8)
        with pytest.raises(ValueError, match="at least 0, got -1"):
            look_up(-1)


# -- switch ----------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6), st.data())
@settings(max_examples=60)
def test_switch_starts_each_part_at_its_round_0(n, first, second, data):
    rank = data.draw(st.integers(0, n - 1))
    parts = [made(name, n, rank) for name in ("complete", "ring", "base-2")]
    topology = made(f"complete:{first}, ring:{second},base-2", n, rank)
    by_hand = SwitchTopology((parts[0], first), (parts[1], second), parts[2])
    want = [parts[0].round(t) for t in range(first)] + [parts[1].round(t) for t in range(second)]
    want += [parts[2].round(t) for t in range(8)]
    for switch in (topology, by_hand):
        assert switch.period is None
        assert [switch.round(t) for t in range(len(want))] == want
        # In any order: what a resumed run asks for first is not round 0.
        for t in reversed(range(len(want))):
            edge = switch.get_edge(t)
            assert edge == next(edge for edge in want[t] if rank in edge.ranks)
            assert set(np.flatnonzero(switch.mixing_matrix(t)[rank])) == set(edge.ranks)
    assert topology.fingerprint() == by_hand.fingerprint()


@given(st.integers(6, 20), st.integers(1, 6))
def test_every_of_a_switch_still_switches_by_updates(length, h):
    ring, base = RingTopology(world_size=6), BaseTwoTopology(world_size=6)
    topology = SwitchTopology((ring, length), base).every(h)
    first, then = ring.every(h), base.every(h)
    for t in range(60):
        assert topology.round(t) == (first.round(t) if t < length else then.round(t - length))


def test_a_part_that_would_never_mix_is_refused():
    ring, base = RingTopology(world_size=6), BaseTwoTopology(world_size=6)
    says = "RingTopology, every 5 updates, would never mix, as it is in use for 3 updates only: give it 5 or more, or mix"
    for make in (
        lambda: SwitchTopology((ring, 3), base).every(5),
        lambda: SwitchTopology((ring.every(5), 3), base),
        lambda: made("base-2:7,ring:3,complete", 6).every(5),
        lambda: SwitchTopology((SwitchTopology((ring, 3), base), 20), base).every(5),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    assert SwitchTopology((ring, 5), base).every(5).get_edge(4) == ring.get_edge(0)
    assert SwitchTopology((ring, 1), base.every(9)).period is None  # the last part stays


def test_invariants_of_compositions():
    ring, base = RingTopology(world_size=6), BaseTwoTopology(world_size=6)
    switch = SwitchTopology((base, 50), ring)
    for topology, every in (
        (ring, 1),
        (ring.every(3), 3),
        (switch, 1),
        (switch.every(4), 4),
        (EveryTopology(switch.every(4), 3), 12),
        (SwitchTopology((ring, 3), switch), 1),
    ):
        last = stages_of(topology)[-1]
        assert (last.topology, last.every) == (ring, every)


def test_edges_ahead_are_those_that_will_be_used():
    ring, exp = RingTopology(world_size=8, rank=5), OnePeerExpTopology(world_size=8, rank=5)
    assert edges_ahead(ring, 64) == [ring.get_edge(0), ring.get_edge(1)]
    assert edges_ahead(exp, 2) == [exp.get_edge(0), exp.get_edge(1)]
    assert edges_ahead(exp.every(100), 64) == edges_ahead(exp, 64)
    assert edges_ahead(SwitchTopology((ring, 1000), exp).every(3), 64) == edges_ahead(ring, 64) + edges_ahead(exp, 64)
    assert edges_ahead(RandomMatchingTopology(world_size=8), 64) == []


def test_switch_prints():
    topology = SwitchTopology((CompleteTopology(world_size=2), 1), RingTopology(2, world_size=2))
    assert str(topology).splitlines()[0] == "CompleteTopology for 1 update, then RingTopology: 2 workers, rounds do not repeat"
    assert repr(topology) == (
        "SwitchTopology((CompleteTopology(1, world_size=2, rank=0), 1), RingTopology(2, world_size=2, rank=0))"
    )
    assert topology.local_world_size == 2
    assert made("complete:3,hierarchical", 6, local=3).local_world_size == 3
    assert isinstance(stages_of(made("complete:3,hierarchical", 6, local=3))[-1].topology, HierarchicalTopology)


RING, RING3 = RingTopology(world_size=4), RingTopology(world_size=3)


@pytest.mark.parametrize(
    ("parts", "kind", "says"),
    [
        ((RING,), TypeError, r"needs two topologies at least, SwitchTopology\(\(first, updates\), \.\.\., last\); got 1"),
        ((), TypeError, "got 0"),
        ((RING, RING), TypeError, "every part but the last is a pair of a topology and its updates"),
        (((RING, 3), (RING, 4)), TypeError, "SwitchTopology is made of topologies, got "),
        (((RING, 3), "ring"), TypeError, "SwitchTopology is made of topologies, got 'ring'"),
        (((RING, 0), RING), ValueError, "the updates of a part must be a whole number, at least 1, got 0"),
        (((RING, 2.0), RING), TypeError, r"the updates of a part must be a whole number, at least ., got 2\.0"),
        (((RING3, 2), RING), ValueError, "for the same workers, got world_size=3, rank=0 and world_size=4, rank=0"),
        (((RingTopology(world_size=4, rank=1), 2), RING), ValueError, "world_size=4, rank=1 and world_size=4, rank=0"),
    ],
)
def test_bad_switches(parts, kind, says):
    with pytest.raises(kind, match=says):
        SwitchTopology(*parts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("complete,ring", "'complete' must be a name and a number of updates, such as 'complete:500'"),
        ("complete:0,ring", "'complete:0' must be a name and a number"),
        (",ring", "'' must be"),
        (
            "complete:5,",
            r"topology 'complete:5,': unknown topology ''\. Several are written 'complete:500,base-2'\. Registered: ",
        ),
        (
            "complete:500;ring",
            r"topology 'complete:500;ring': unknown topology 'complete:500;ring': did you mean 'complete'\? Several are",
        ),
        ("complete:5,ring:", "topology 'complete:5,ring:': unknown topology 'ring:': did you mean 'ring'"),
        ("complete:5", "its last part, 'complete:5', goes on for ever: give it without a number"),
        ("rnig:5,complete", r"unknown topology 'rnig': did you mean 'ring'\?"),
        ("one-peer-exp:5,ring", "OnePeerExpTopology needs a power of two workers, got world_size=6"),
    ],
)
def test_bad_texts(text, says):
    with pytest.raises(ValueError, match=says):
        made(text, 6)


def test_a_registered_name_wins():
    name = "complete:3,ring"
    TopologyReg.registry[name] = RingTopology
    TopologyReg.registry["a:b"] = RingTopology
    try:
        assert type(made(name)) is RingTopology
        assert isinstance(made("complete:2,a:b"), SwitchTopology)
        assert isinstance(made("a:b:2,complete"), SwitchTopology)
    finally:
        del TopologyReg.registry[name], TopologyReg.registry["a:b"]
    assert type(made(name)) is SwitchTopology
