"""The planner's reasons for the limit of a step, with their numbers; latencies; slow workers; the ranking."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from decent_dp.compression import BFloat16, Int8, Lossless
from decent_dp.tools.analysis import analyse
from decent_dp.tools.planner import (
    Choice,
    Cluster,
    Job,
    Link,
    Prediction,
    candidates,
    plan,
    predict,
    ranking,
    same_rounds,
)
from decent_dp.tools.planner.prediction import make_timing
from decent_dp.tools.planner.traffic import collective, make_rounds
from decent_dp.topo import Edge, SwitchTopology, Topology, make_topology
from decent_dp.topo.schedule import title_of
from decent_dp.transport.groups import find_place
from decent_dp.transport.nccl import takes
from tests.tools.test_planner import MIB, OPE, cluster, coding, job


def topology(name: str, n: int, local: int = 1) -> Topology:
    return make_topology(name, local_world_size=local, world_size=n, rank=0)


# -- what limits a step ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    cluster: Cluster
    choice: Choice
    limit: str
    said: str
    job: Job = field(default_factory=job)
    coding: float | None = None  # of int8


ROWS = {
    "alone": Row(cluster(1), OPE, "compute", "one worker exchanges nothing"),
    "hidden": Row(cluster(8, rate=1e9), OPE, "compute", "exchanges (40 ms per round) are hidden behind 90 ms of computation"),
    "hidden on average": Row(
        cluster(4, 2, rate=200e6),
        Choice("decent_dp", "alternating-exp-ring"),
        "compute",
        "(100 ms per round on average, 200 ms at most) are hidden behind 144 ms of computation",
        job(compute_ms=144),
    ),
    "tiny": Row(cluster(8, rate=1e9), OPE, "compute", "(0.0040 ms per round)", job(params=1000)),
    # Of 8 nodes' links 7 / (7 + 6/7) of the time are used: 1.75 copies of a second each.
    "trees": Row(cluster(8, rate=40e6), Choice("decent_dp", "complete"), "links between nodes",
                 "send 1.75 copies of the parameters over a node's link to the others in every step, 1964 ms each"),
    "ring": Row(cluster(4, rate=40e6), Choice("ddp"), "links between nodes", "all-reduce sends 1.5 copies of the parameters "
                "over a node's link to the others in every step, 1500 ms each"),
    "some rounds": Row(cluster(4, 2, rate=40e6), Choice("decent_dp", "alternating-exp-ring"), "links between nodes",
                       "send 1 copy of the parameters over a node's link to the others in half of the rounds, 1000 ms each"),
    "inside": Row(cluster(4, 4, inside=40e6), OPE, "links inside a node",
                  "1 copy of the parameters over a worker's link inside its node in every step, 1000 ms each; 910 ms"),
    "one flow of four ports": Row(cluster(2, rate=40e6, ports=4), OPE, "links between nodes", "1 copy of .* 1000 ms each"),
    "two flows of four ports": Row(cluster(4, 2, rate=10e6, ports=4, flow_ports=4), Choice("push"), "links between nodes",
                                   "2 copies of .* in half of the rounds, 2000 ms each"),
    "latency": Row(cluster(4, inter_s=0.2), OPE, "latency", "small beside the latency, 600 ms per round; "),
    "latency a bucket": Row(cluster(2, inter_s=0.03), Choice("ddp"), "latency", "beside the latency, 3 buckets x 60 ms; "),
    "coding": Row(cluster(2, rate=12.5e9), replace(OPE, compression="int8"), "coding",
                  "(80 ms per round) are hidden behind 3590 ms of computation, of which 3500 ms are coding", job(params=1e9)),
    "some coding": Row(cluster(2), replace(OPE, compression="int8"), "compute",
                       "behind 95 ms of computation, of which 5.0 ms are coding", coding=0.5),
    "through the CPU": Row(cluster(2, rate=1e12, backend="nccl"), replace(OPE, compression="int8"), "the CPU and TCP",
                           "a worker's CPU moves its messages for 4000 ms per round; 3710 ms per step are waited for; "
                           "int8 goes through the CPU and TCP, not NCCL", job(params=1e9), coding=0.0),
    "partners": Row(cluster(16, rate=40e9), OPE, "compute", "short (1.0 ms per round), but partners wait for each other: ",
                    job(jitter=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_limit_of_a_step_is_named(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if row.coding is not None:
        coding(monkeypatch, row.coding)
    found = predict(row.cluster, row.job, row.choice)
    assert found.limit == row.limit, found.reason
    assert re.search(row.said if ".*" in row.said else re.escape(row.said), found.reason), found.reason


def test_the_cost_of_an_exchange_in_the_backward_is_added() -> None:
    for choice in (Choice("ddp", extra_ms=30), Choice("push", extra_ms=30), replace(OPE, extra_ms=30)):
        assert predict(cluster(4), job(), choice).step_ms == pytest.approx(120), choice
    # To the backward: there is more of it to hide in. Of 10 buckets the last one's bytes are seen, an equal part of 60 ms.
    last = (40e6 - MIB) / 9
    for extra, room in ((0, 60), (30, 90)):
        found = predict(cluster(2, rate=40e6 / 60e-3), job(), Choice("ddp", bucket_mb=last / MIB, extra_ms=extra))
        assert found.step_ms == pytest.approx(30 + room + 60 * last / 40e6)


# -- latency -----------------------------------------------------------------------------------------------------------

ALPHA, BETA = 10e-3, 1e-3


@pytest.mark.parametrize(("local", "ranks"), [(1, 2), (1, 3), (1, 8), (2, 2), (2, 4), (4, 4), (4, 8), (4, 12), (3, 9)])
def test_a_rings_latency_is_that_of_its_longest_way(local: int, ranks: int) -> None:
    """2 (m - 1) times everybody sends what it has got to the next."""
    hops = [BETA if i // local == (i + 1) % ranks // local else ALPHA for i in range(ranks)]
    at = [0.0] * ranks
    for _ in range(2 * (ranks - 1)):
        at = [at[i - 1] + hops[i - 1] for i in range(ranks)]
    made = collective(cluster(ranks, local, inter_s=ALPHA, intra_s=BETA), range(ranks), "ring")
    assert made.latency_s == pytest.approx(max(at))


@pytest.mark.parametrize(("local", "ranks"), [(1, range(2)), (1, range(8)), (4, range(4)), (4, range(8)), (2, [0, 1, 4, 5])])
def test_a_trees_latency_is_that_of_its_longest_branch(local: int, ranks: Any) -> None:
    """An offer, what is asked for and the data a message, up and down."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // local, []).append(rank)

    def up(piece: int, rank: int) -> float:
        parent = find_place(list(nodes.values()), piece, rank).parent
        if parent is None:
            return 0.0
        return 3 * (BETA if parent.rank // local == rank // local else ALPHA) + up(piece, parent.rank)

    longest = max(2 * up(piece, rank) for piece in range(16) for rank in ranks)
    made = collective(cluster(8, local, inter_s=ALPHA, intra_s=BETA), ranks, "tree")
    assert made.latency_s == pytest.approx(longest)


def test_nccls_latency() -> None:
    """Between two nodes trees: along the workers of a node, across and back. A pair has no handshake."""
    made = cluster(8, 4, inter_s=ALPHA, intra_s=BETA, backend="nccl")
    assert collective(made, range(8), "nccl").latency_s == pytest.approx(2 * (ALPHA + 3 * BETA))
    assert collective(made, range(4), "nccl").latency_s == pytest.approx(2 * 3 * BETA)
    pairs = {exchange.latency_s for made_of in make_rounds(made, OPE) for exchange in made_of.transfers}
    assert pairs == {ALPHA, BETA}


def test_every_bucket_of_ddp_has_its_latency() -> None:
    """154 buckets, and 6 hops of a millisecond each."""
    found = predict(cluster(4, inter_s=1e-3), job(params=1e9), Choice("ddp"))
    count = 1 + math.ceil((4e9 - MIB) / (25 * MIB))
    assert found.step_ms == pytest.approx(30 + 60 * MIB / 4e9 + count * 6)
    assert f"{count} buckets x 6.0 ms" in found.reason


# -- jitter ------------------------------------------------------------------------------------------------------------


def test_measured_steps_have_the_same_draws_after_any_start() -> None:
    made, work = cluster(6), job(jitter=0.3)
    short, long = (make_timing(made, work, OPE, np.ones(1), start + 12, 7, warmup=start).factor[start:] for start in (8, 30))
    assert np.array_equal(short, long)
    assert short.std() > 0.2
    assert short.mean() == pytest.approx(1)


# -- compositions ------------------------------------------------------------------------------------------------------


def test_with_mix_every_each_step_exchanges_a_part() -> None:
    made = cluster(8, rate=1e9)
    random = topology("random-matching", 8)
    assert len(make_rounds(made, Choice("decent_dp", random))) == 16
    for h in (2, 3, 20, 64):
        found = predict(made, job(), Choice("decent_dp", random.every(h)))
        assert found.node_bytes == pytest.approx(40e6 / h)
        assert predict(made, job(), Choice("decent_dp", random, mix_every=h)).node_bytes == pytest.approx(40e6 / h)
        assert len(make_rounds(made, Choice("decent_dp", random.every(h)))) == 16
    switch = SwitchTopology((topology("complete", 8), 30), topology("ring", 8))
    for some in (switch.every(20), SwitchTopology((topology("complete", 8), 30), topology("ring", 8).every(20))):
        assert predict(made, job(), Choice("decent_dp", some)).node_bytes == pytest.approx(40e6 / 20)
        assert len(make_rounds(made, Choice("decent_dp", some))) == 2

    class Long(Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return [[Edge([0, 1], 0.5)]] * 300

    assert len(make_rounds(cluster(2), Choice("decent_dp", Long(1, world_size=2, rank=0)))) == 16


def test_a_composition_mixes_as_its_last_part() -> None:
    ring = analyse(topology("ring", 8)).rate
    given = [
        "complete:500,ring",
        "ring:500,one-peer-exp",
        topology("ring", 8).every(4),
        topology("random-matching", 8).every(20),
    ]
    found = plan(cluster(8), job(), [Choice("decent_dp", one) for one in given])
    mixing = {prediction.name: prediction.mixing for prediction in found}
    assert mixing["complete:500,ring"] == pytest.approx(ring)
    assert mixing["ring:500,one-peer-exp"] == pytest.approx(0, abs=1e-9)
    assert mixing["RingTopology, every 4 updates"] == pytest.approx(ring**0.25)
    random = analyse(topology("random-matching", 16)).rate
    assert mixing[title_of(given[3])] is None  # type: ignore[union-attr]  # exact at some time, by chance
    many = plan(cluster(16), job(), [Choice("decent_dp", topology("random-matching", 16).every(20))])
    assert many[0].mixing == pytest.approx(random ** (1 / 20))
    assert predict(cluster(8), job(), Choice("ddp")).mixing == 0


# -- NCCL and what it does not take ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one-peer-exp", "complete", "alternating-exp-ring"])
@pytest.mark.parametrize("wire", [Lossless, BFloat16, Int8])
def test_messages_go_where_the_transport_sends_them(name: str, wire: Any) -> None:
    made, choice = cluster(8, 4, backend="nccl"), Choice("decent_dp", name, wire.name)
    for round_ in make_rounds(made, choice):
        for exchange in round_.transfers:
            assert takes(wire, len(exchange.starters)) != exchange.detour
    assert predict(made, job(), choice).detour == (wire is Int8 or (wire is BFloat16 and name != "one-peer-exp"))


def test_a_detour_costs_what_the_processor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.7 gigabytes a second, encrypted 0.25, two copies at ten and a handshake; in rounds that make it, and never on gloo."""
    work = job(params=100e6)
    with monkeypatch.context() as patch:
        coding(patch, 0.0)
        _check_detours(work)
    # Coding takes a GPU a fiftieth of what it takes a processor.
    free = predict(cluster(4, 4, backend="nccl"), replace(work, forward_ms=130), replace(OPE, compression="int8"))
    assert free.step_ms == pytest.approx(190 + 7 + 20, rel=0.01)
    assert "of which 27 ms are coding" in free.reason


def _check_detours(work: Job) -> None:
    made = cluster(4, 4, backend="nccl")
    int8 = replace(OPE, compression="int8")
    assert predict(made, replace(work, forward_ms=130), int8).step_ms == pytest.approx(190 + 20, rel=0.01)
    assert predict(made, work, int8).step_ms == pytest.approx(100 / 0.7, rel=0.05)
    assert predict(cluster(4, backend="nccl"), work, int8).step_ms == pytest.approx(400, rel=0.05)
    assert predict(made, work, OPE).step_ms == pytest.approx(90)
    assert predict(replace(made, backend="gloo"), work, int8).step_ms == pytest.approx(90)
    group = predict(made, work, Choice("decent_dp", "complete", "bfloat16"))
    assert group.step_ms == pytest.approx(200 / 0.7 * 1.5, rel=0.02)
    assert {e.latency_s for r in make_rounds(made, int8) for e in r.transfers} == {3 * 30e-6}
    assert collective(made, range(4), "tree").latency_s == pytest.approx(2 * 3 * 30e-6)


def test_a_detour_is_not_recommended_above_the_same_through_nccl() -> None:
    def made(choice: Choice, ms: float, detour: bool = False) -> Prediction:
        return Prediction(choice, ms, ms, 0.0, 0.0, "compute", "", 0.0, detour)

    ring, ring8 = Choice("decent_dp", "ring"), Choice("decent_dp", "ring", "int8")
    for ms, first in ((95.0, ring), (99.9, ring), (80.0, ring8)):
        assert ranking._ranked([made(ring8, ms, True), made(ring, 100.0)], job())[0].choice == first
    assert ranking._ranked([made(ring8, 95.0), made(ring, 100.0)], job())[0].choice == ring8
    # In a tie also behind another topology's, whatever its mixing.
    assert ranking._ranked([made(ring8, 99.9, True), replace(made(OPE, 100.0), mixing=0.5)], job())[0].choice == OPE
    found = plan(Cluster(16, 8, Link(20e-6, 3e9), Link(5e-6, 20e9), backend="nccl"), job(params=65e6, compute_ms=60))
    for prediction in found:
        if prediction.detour:
            rest = [other for other in found if other.choice.topology == prediction.choice.topology and not other.detour]
            assert any(found.index(other) < found.index(prediction) for other in rest) or prediction.step_ms * 1.1 < min(
                other.step_ms for other in rest
            )
            assert "goes through the CPU and TCP" in prediction.reason


# -- plans -------------------------------------------------------------------------------------------------------------


def test_one_of_two_with_the_same_rounds_is_shown() -> None:
    assert same_rounds(cluster(8)) == {"base-2": "one-peer-exp", "hierarchical": "one-peer-exp"}
    names = [choice.topology for choice in candidates(cluster(8))]
    assert "one-peer-exp" in names
    assert "base-2" not in names
    assert "base-2" in [choice.topology for choice in candidates(cluster(6))]
    assert "hierarchical" in [choice.topology for choice in candidates(cluster(8, 2))]


def test_in_a_tie_what_sends_less_between_nodes_comes_first() -> None:
    choices = [Choice("decent_dp", "complete"), Choice("decent_dp", "hierarchical")]  # both average exactly; 1.5 copies and 1
    assert [found.name for found in plan(cluster(8, 2), job(), choices)] == ["hierarchical", "complete"]
