"""The planner's model: against closed forms, the library's own trees and buckets; plans; bad input."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from decent_dp._sizes import choose_sizes
from decent_dp.tools.planner import Choice, Cluster, Job, Link, candidates, left_out, plan, predict, prediction
from decent_dp.tools.planner.prediction import make_timing
from decent_dp.tools.planner.steps import all_reduce_steps, exchange_steps
from decent_dp.tools.planner.traffic import buckets_of, collective, make_rounds
from decent_dp.topo import Edge, Topology, make_topology
from decent_dp.transport.groups import find_place

FREE = Link(0.0, math.inf)
OPE = Choice("decent_dp", "one-peer-exp")
MIB = 2**20


def job(params: float = 10e6, compute_ms: float = 90.0, optimizer_ms: float = 0.0, jitter: float = 0.0, **rest: Any) -> Job:
    return Job.of_step(params, compute_ms, optimizer_ms=optimizer_ms, jitter=jitter, **rest)


def cluster(n: int, local: int = 1, rate: float = math.inf, inside: float = math.inf, **rest: Any) -> Cluster:
    alpha, beta = rest.pop("inter_s", 0.0), rest.pop("intra_s", 0.0)
    return Cluster(n, local, Link(alpha, rate), Link(beta, inside), **rest)


# -- closed forms ------------------------------------------------------------------------------------------------------


class Across(Topology):
    """Two nodes; worker i of the one with worker i of the other, always."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        half = self._world_size // 2
        return [[Edge([i, i + half], 0.5) for i in range(half)]]


@dataclass
class Form:
    """The expected time of a step, of 90 ms of computation and 40 MB of parameters unless said otherwise.

    Attributes:
        coding: nanoseconds per parameter for int8.
        nbytes, limit: None if they are not looked at.
    """

    cluster: Cluster
    choice: Choice
    step_ms: float
    nbytes: float | None = None
    limit: str | None = None
    job: Job = field(default_factory=job)
    coding: float = 0.0
    rel: float = 0.01


DDP, NODE = Choice("ddp"), Choice("decent_dp", "base-2", replica="node")
TURNS = Choice("decent_dp", "alternating-exp-ring")
ACROSS = Choice("decent_dp", Across(4, world_size=8, rank=0))
BETWEEN, INSIDE, FIRST = "links between nodes", "links inside a node", MIB / 40e6
LAST = (1 - FIRST) / 9
SHARDED = job(sharded=True)


EVERY_4 = make_topology("one-peer-exp", local_world_size=1, world_size=2, rank=0).every(4)

FORMS: dict[str, Form] = {
    # One worker, and links without limit.
    **{f"{choice.name}, {n} workers": Form(made, choice, 90, 0 if n == 1 else None, "compute", job(optimizer_ms=7))
       for choice in (DDP, Choice("push"), OPE, Choice("decent_dp", "complete"))
       for n, made in ((1, cluster(1, rate=1.0)), (4, cluster(4, 2)))},
    # Forward, the first MiB's share of the backward, the ring's bytes, the optimizer.
    **{f"DDP of {n} is bound by its bytes": Form(cluster(n, rate=10e6), DDP, 28 + FIRST * 56 + 8e3 * (n - 1) / n + 6,
                                                 80e6 * (n - 1) / n, BETWEEN, job(optimizer_ms=6), rel=1e-6)
       for n in (2, 3, 8)},
    # 10 buckets in a backward of 600 ms, 10 ms each: only the last one's are seen.
    "DDP hides all but its last bucket": Form(cluster(2, rate=40e6 / 0.1), Choice("ddp", bucket_mb=LAST * 40e6 / MIB),
                                              900 + 100 * LAST, job=job(compute_ms=900), rel=1e-6),
    # The longer of bytes and computation.
    **{f"{name}, {ms} ms": Form(cluster(8, rate=40e9 / ms), Choice("decent_dp", name), max(ms, 90), 40e6,
                                BETWEEN if ms > 90 else "compute")
       for name in ("one-peer-exp", "ring") for ms in (80, 100, 500)},
    "bfloat16": Form(cluster(4, rate=10e6), replace(OPE, compression="bfloat16"), 2e3, 20e6),
    "int8": Form(cluster(4, rate=10e6), replace(OPE, compression="int8"), 1e3, 10e6),
    "coding": Form(cluster(2), replace(OPE, compression="int8"), 90 + 40, coding=4.0),
    "no coding": Form(cluster(2), OPE, 90, coding=4.0),
    "coding only in steps that mix": Form(cluster(2), Choice("decent_dp", EVERY_4, "int8"), 90 + 10, coding=4.0),
    # What is sent in every other round may take as long as a step and the backward of the next.
    "rounds inside nodes make room": Form(cluster(4, 2, rate=40e9 / 127), TURNS, 90, rel=0.06),
    "but not for all": Form(cluster(4, 2, rate=40e9 / 400), TURNS, 215, rel=0.06),
    # Four flows share a node's link and all its ports, and one alone has no more than one, or flow_ports.
    **{f"{ports} ports": Form(cluster(8, 4, rate=40e6, ports=ports), ACROSS, copies * 1e3)
       for ports, copies in ((1, 4), (2, 2), (4, 1), (8, 1))},
    "flows of two ports": Form(cluster(8, 4, rate=40e6, ports=8, flow_ports=2), ACROSS, 500),
    # Offer, grant and data, but for what a bucket is ahead of the next.
    "latency": Form(Cluster(4, 1, Link(0.2, 1e12), FREE), OPE, 600, limit="latency", rel=0.15),
    # Of 8 workers on 2 nodes 1, 2 and 4 cross, each way.
    "push": Form(cluster(8, 4, rate=40e6), Choice("push"), 1e3 * 7 / 3, 40e6 * 7 / 3, rel=0.03),
    # A node that is a replica sends one copy over its link, and over all its ports a part each.
    **{f"nodes of {local}, {code}": Form(cluster(4 * local, local, rate=4e6), replace(NODE, compression=code), nbytes / 4e3,
                                         nbytes, BETWEEN, rel=0.02)
       for local, code, nbytes in ((2, None, 40e6), (8, "int8", 10e6))},
    "a node's ports": Form(cluster(16, 4, rate=4e6, ports=4), NODE, 2500, 40e6, rel=0.02),
    "half a copy with turns": Form(cluster(16, 4, rate=4e6), replace(NODE, mix_every=2), 5_000, 20e6, rel=0.02),
    "a group of nodes": Form(cluster(16, 4, rate=4e6), replace(NODE, topology="complete"), 16_000, 60e6, rel=0.1),
    # Inside a node of 4 an all-reduce takes 1.5 copies, after the first bucket of the backward, and an all-gather 0.75.
    **{f"inside, every {h}": Form(cluster(8, 4, inside=20e6), replace(NODE, mix_every=h), 28 + FIRST * 56 + 3006 + 1500 / h,
                                         None, INSIDE, job(optimizer_ms=6), rel=1e-6) for h in (1, 2)},
    "each process codes its part": Form(cluster(8, 4), replace(NODE, compression="int8"), 90 + 40 / 4, coding=4.0),
    # Eight threads of 0.25 GB/s send the encrypted messages that NCCL does not take.
    "a node's threads": Form(cluster(16, 8, backend="nccl"), replace(NODE, compression="int8"), 2000,
                             job=job(params=4e9), rel=0.02),
    # Of 40 MB nodes of 4 gather three quarters, in two bytes a parameter, in forward and backward, and sum in four.
    **{f"shards, {ms} ms inside": Form(cluster(16, 4, rate=1e12, inside=40e9 / ms), NODE, step, 40e6, job=SHARDED, rel=1e-3)
       for ms, step in ((10, 30 + 60), (80, 30 + 90), (400, 150 + 450))},
    # An all-reduce of 1.5 copies over 4 nodes, beside a backward of 32 blocks.
    **{f"HSDP, {ms} ms between": Form(cluster(16, 4, rate=40e9 / ms, inside=0.5e9), Choice("hsdp"),
                                      max(30 + 90 / 32 + 1.5 * ms, 30 + 90 + 1.5 * ms / 32), 60e6, job=SHARDED, rel=1e-3)
       for ms in (0.1, 1000.0)},
    # 15/16 of 20 MB in the forward, of 60 MB in the backward, at 40 MB/s.
    "FSDP": Form(cluster(16, 4, rate=40e6, inside=1e12), Choice("fsdp"), 1875, 75e6, BETWEEN, SHARDED, rel=1e-6),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_closed_forms(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    coding(monkeypatch, form.coding)
    found = predict(form.cluster, form.job, form.choice)
    assert found.step_ms == pytest.approx(form.step_ms, rel=form.rel)
    assert found.step_ms == pytest.approx(found.compute_ms + found.waited_ms)
    assert form.nbytes is None or found.node_bytes == pytest.approx(form.nbytes)
    assert form.limit in (None, found.limit)


@pytest.mark.parametrize("local", [1, 4])
@pytest.mark.parametrize("name", ["one-peer-exp", "complete", "alternating-exp-ring", None])
def test_more_bandwidth_is_never_slower(name: str | None, local: int) -> None:
    choice = Choice("ddp") if name is None else Choice("decent_dp", name)
    work = job(jitter=0.02)
    found = [predict(cluster(8, local, rate, 10 * rate), work, choice).step_ms for rate in (1e7, 3e7, 1e8, 2e8, 1e9, 1e11)]
    # The order in a queue may change: a few thousandths.
    assert all(fast <= 1.005 * slow for slow, fast in itertools.pairwise(found))


def test_ddp_waits_for_the_slowest_of_all() -> None:
    """Without bytes, a step is the mean of the largest of n draws."""
    work = job(jitter=0.1)
    found = predict(cluster(16), work, Choice("ddp"), steps=400)
    draws = np.random.default_rng(5).standard_normal((100_000, 16)).max(axis=1)
    s = math.sqrt(math.log1p(0.01))
    assert found.step_ms == pytest.approx(90 * np.exp(s * draws - s * s / 2).mean(), rel=0.01)


def coding(monkeypatch: pytest.MonkeyPatch, int8: float) -> None:
    """Nanoseconds per parameter."""
    for backend in prediction._CODING_NS:
        monkeypatch.setitem(prediction._CODING_NS, backend, {None: 0.0, "bfloat16": 0.0, "int8": int8})


@pytest.mark.parametrize(("name", "n", "rests"), [("ring", 6, 0), ("ring", 5, 1), ("base-2", 6, 1), ("base-2", 5, 2)])
def test_an_idle_worker_waits_for_more_than_one_exchange(name: str, n: int, rests: int) -> None:
    """The mean is an exchange. After r rounds in a row without a peer a step takes r + 1 exchanges less r computations; but all
    workers together have ended a step an exchange after the one before.
    """
    made, work, choice = cluster(n, rate=40e6), job(), Choice("decent_dp", name)
    rounds = make_rounds(made, choice)
    timing = make_timing(made, work, choice, buckets_of(work, choice), 4 * len(rounds), 0)
    ends = exchange_steps(made, rounds, timing)[0][2 * len(rounds) - 1 :]
    assert np.diff(ends, axis=0).mean() == pytest.approx(1.0, rel=0.01)
    assert np.diff(ends, axis=0).max() == pytest.approx(1.0 + rests * (1.0 - 0.09), rel=0.06)
    assert np.diff(ends.max(axis=1)).max() == pytest.approx(1.0, rel=0.01)


def test_messages_take_the_way_out_and_the_way_in() -> None:
    """Two nodes of two: ways out of nodes 0 and 1, in, then of workers 4 to 7 out and 8 to 11 in."""
    made = cluster(4, 2)
    near, far = (round_.transfers for round_ in make_rounds(made, Choice("push")))
    assert [dict(exchange.loads) for exchange in near] == [{4: 1, 9: 1}, {0: 1, 3: 1}, {6: 1, 11: 1}, {1: 1, 2: 1}]
    assert [dict(exchange.loads) for exchange in far] == [{0: 1, 3: 1}] * 2 + [{1: 1, 2: 1}] * 2
    inside, across = (round_.transfers[0] for round_ in make_rounds(made, OPE))
    assert dict(inside.loads) == dict.fromkeys((4, 5, 8, 9), 1)
    assert dict(across.loads) == dict.fromkeys(range(4), 1)


# -- other computations of the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [5e9, 10e9, 40e9])
def test_ddps_slowest_chain_begins_with_one_of_four_buckets(rate: float) -> None:
    """Links that first wait for buckets and then make them wait: one bucket after another, in the long way."""
    made, work, choice = cluster(4, rate=rate), job(params=100e6, optimizer_ms=6, jitter=0.2), Choice("ddp", bucket_mb=5)
    timing = make_timing(made, work, choice, buckets_of(work, choice), 20, seed=3)
    seconds = 1.5 * timing.bytes / rate
    ends, waited = all_reduce_steps(timing, 1, seconds)
    now = np.zeros(4)
    for t, factor in enumerate(timing.factor):
        own, done = now, 0.0
        for b, computed in enumerate(timing.work):
            own = own + factor * computed
            done = max(done, own.max()) + seconds[b]
        assert waited[t] == pytest.approx(done - own)
        now = done + factor * timing.after.sum()
        assert ends[t] == pytest.approx(now)


def test_buckets_are_the_librarys() -> None:
    for params in (1000, MIB // 4, 10**6, 4_208_640, 65 * 10**6, 10**9):
        for limit in (0.5, 10, 25, 400):
            shares = buckets_of(job(params=params), Choice("decent_dp", "ring", bucket_mb=limit))
            first, size = choose_sizes(4 * params, limit * MIB)
            assert sum(shares) == pytest.approx(1)
            assert shares[0] * 4 * params == pytest.approx(min(first, 4 * params))
            count = 1 + math.ceil(max(0, 4 * params - first) / size - 1e-9)
            assert len(shares) == min(count, 12)
            assert count > 12 or max(shares[1:], default=0) * 4 * params <= size * (1 + 1e-9)


@pytest.mark.parametrize(
    ("local", "ranks"),
    [
        (2, range(8)),
        (2, [0, 1, 4, 5]),
        (2, [0, 2, 4, 6]),
        (2, range(12)),
        (3, range(12)),
        (3, [0, 1, 2, 6, 7, 8]),
        (4, range(4)),
    ],
)
def test_trees_send_what_the_transport_sends(local: int, ranks: Any) -> None:
    made = cluster(12, local)
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // local, []).append(rank)
    pieces = len(nodes) * local * 4
    between: Counter[int] = Counter()
    inside: Counter[int] = Counter()
    for piece in range(pieces):
        for rank in ranks:
            place = find_place(list(nodes.values()), piece, rank)
            branches = [*place.children, *([] if place.parent is None else [place.parent])]
            for other in (branch.rank for branch in branches):
                if other // local == rank // local:
                    inside[rank] += 1
                else:
                    between[rank // local] += 1
    made_of = collective(made, ranks, "tree")
    assert dict(made_of.crossing) == pytest.approx({node: count / pieces for node, count in between.items()})
    first = 2 * made.n_nodes
    out = {link - first: copies for link, copies in made_of.loads if first <= link < first + 12}
    assert out == pytest.approx({rank: count / pieces for rank, count in inside.items()})


def test_a_collectives_bytes_by_backend() -> None:
    for backend, how, nodes, copies in (
        ("gloo", "ring", 2, 1.75), ("nccl", "nccl", 2, 1.0), ("nccl", "nccl", 4, 1.875), ("gloo", "tree", 4, 1.5),
    ):  # fmt: skip
        made = cluster(4 * nodes, 4, backend=backend)
        assert dict(collective(made, range(4 * nodes), how).crossing) == pytest.approx(dict.fromkeys(range(nodes), copies))


# -- properties --------------------------------------------------------------------------------------------------------


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_ranks_all_that_fits() -> None:
    made = Cluster(16, 4, Link(20e-6, 3e9), Link(5e-6, 20e9))
    found = plan(made, job(params=65e6))
    names = {prediction.name for prediction in found}
    assert names == {choice.name for choice in candidates(made)}
    assert {"ddp", "ring, node", "one-peer-exp, node, int8", "alternating-exp-ring, bfloat16", "hierarchical"} <= names
    assert "one-peer-exp" not in names
    for first, second in itertools.pairwise(found):
        assert second.step_ms > first.step_ms / 1.011  # ties aside
    for each in found:
        assert each.step_ms >= 90 * (1 - 1e-9)
        assert each.step_ms == pytest.approx(each.compute_ms + each.waited_ms)
        assert each.reason
        assert "\n" not in each.reason
        assert each.as_dict()["limit"] == each.limit
        assert each.as_dict()["mix_every"] == each.choice.mix_every


def test_ties_go_to_better_mixing_and_less_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    coding(monkeypatch, 0.0)
    work = Job(1e6, 30, 60, jitter=0)
    names = [found.name for found in plan(cluster(8, rate=1e12), work)]
    assert names.index("one-peer-exp") < names.index("one-peer-exp, bfloat16") < names.index("one-peer-exp, int8")
    assert names.index("one-peer-exp, int8") < names.index("ring")  # the one averages exactly, the other does not
    one = plan(
        cluster(8, rate=1e12), work, [Choice("decent_dp", "ring"), Choice("decent_dp", "complete", "bfloat16"), Choice("ddp")]
    )
    assert [found.name for found in one] == ["ddp", "complete, bfloat16", "ring"]
    assert one[0].mixing == 0


def test_a_misfit_is_left_out_with_the_reason() -> None:
    made = cluster(6, 2)
    assert "power of two" in left_out(made)["one-peer-exp"]
    names = {found.name for found in plan(made, job())}
    assert "ring, node" in names
    assert not any("one-peer-exp" in name for name in names)
    with pytest.raises(ValueError, match="power of two"):
        plan(made, job(), [OPE])


def test_other_sizes_of_bucket_are_listed_where_they_matter() -> None:
    made, work = Cluster(8, 1, Link(2e-3, 1e9), FREE), job(params=65e6, compute_ms=150)
    found = plan(made, work)
    ddp = {p.choice.bucket_mb: p.step_ms for p in found if p.name == "ddp"}
    assert 25 in ddp
    assert len(ddp) > 1
    usual = {p.name: p.step_ms for p in found if p.choice.bucket_mb == 25}
    assert all(abs(p.step_ms / usual[p.name] - 1) > 0.01 for p in found if p.choice.bucket_mb != 25)


# -- bad input ---------------------------------------------------------------------------------------------------------

LINK, NAN = Link(0, 1e9), float("nan")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Link(-1e-6, 1e9), "latency_s must be seconds, .* got -1e-06"),
        (lambda: Link(0, 0), "bytes_per_s must be bytes per second, at least 1, .* got 0"),
        (lambda: Link(0, "25gbit"), "bytes_per_s .* got '25gbit'"),  # type: ignore[arg-type]
        (lambda: Link.of_gbit(0), "gbit must be Gbit/s .* got 0"),
        (lambda: Cluster(8, 3, LINK, LINK), "local_world_size=3 does not divide world_size=8"),
        (lambda: Cluster(8, 2, 25.0, LINK), "inter must be a Link, got 25.0: write Link"),  # type: ignore[arg-type]
        (lambda: Cluster(8, 2, LINK, LINK, backend="mpi"), "backend must be 'gloo' or 'nccl', got 'mpi'"),
        (lambda: Cluster(8, 2, LINK, LINK, flow_ports=2), "flow_ports=2 is more than ports=1"),
        (lambda: Job(0, 1, 1), "params must be .* above 0, .* got 0"),
        (lambda: Job(1e6, 0, 0), "are all 0: give the milliseconds"),
        (lambda: Job(1e6, 1, 1, jitter=1.5), "jitter must be .* below 1 .* got 1.5"),
        (lambda: Job.of_step(1e6, 5, optimizer_ms=6), "optimizer_ms=6 is more than step_ms=5"),
        (lambda: Choice("theirs"), "kind must be 'ddp', 'hsdp', 'fsdp', 'decent_dp' or 'push', got 'theirs'"),
        (lambda: Choice("decent_dp"), "topology must be a name or a Topology, got None"),
        (lambda: Choice("ddp", "ring"), "topology='ring' is for kind='decent_dp' only, got kind='ddp'"),
        (lambda: Choice("decent_dp", "ring", replica="host"), "replica must be 'worker' or 'node', got 'host'"),
        (lambda: Choice("decent_dp", "ring", "int4"), "Choice: compression must be None .*, got 'int4'"),
        (lambda: Choice("ddp", bucket_mb=0), "bucket_mb must be MiB above 0, .* got 0"),
        (lambda: predict(cluster(4), job(), OPE, seed=-1), "seed must be a whole number, at least 0, got -1"),
        (lambda: predict(cluster(4, rate=1.0), job(params=1e12), OPE), "a step would take years: 1e\\+12 parameters"),
        (lambda: predict(cluster(4, 4), job(), replace(OPE, replica="node")), "several workers each, got world_size=4"),
        (lambda: predict(cluster(4), job(), Choice("fsdp")), "fsdp does not fit a model that is not sharded"),
        (lambda: predict(cluster(4, 2), job(sharded=True), OPE), "does not fit a model that is sharded: take replica='node'"),
        (lambda: predict(cluster(4), job(), Choice("decent_dp", "rong")), "unknown topology 'rong': did you mean 'ring'"),
    ],
)  # fmt: skip
def test_bad_input_is_reported_in_one_line(make: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said) as caught:
        make()
    assert "\n" not in str(caught.value)
