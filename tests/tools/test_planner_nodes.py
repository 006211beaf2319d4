"""The planner where the workers of a node are one replica, whole or sharded; the numbers are computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.replica.assignment import describe_node
from decent_dp.tools.planner import Choice, Cluster, Job, Link, candidates, plan, predict, recipe
from decent_dp.topo.registry import names_that_fit
from tests.tools.test_planner import MIB, cluster, coding, job

NODE = Choice("decent_dp", "base-2", replica="node")
# 4 nodes of 8 GPUs, 25 Gbit/s between them and NVLink inside.
GPUS = Cluster(32, 8, Link.of_gbit(25, 20), Link.of_gbit(2400, 5), backend="nccl")


@pytest.mark.parametrize("local", [2, 4, 8])
@pytest.mark.parametrize(("compression", "nbytes"), [(None, 40e6), ("bfloat16", 20e6), ("int8", 10e6)])
def test_a_nodes_link_carries_one_copy(local: int, compression: str | None, nbytes: float) -> None:
    """A tenth of the parameters per second: the step is the time of its message."""
    found = predict(cluster(4 * local, local, rate=4e6), job(), replace(NODE, compression=compression))
    assert found.node_bytes == pytest.approx(nbytes)
    assert found.step_ms == pytest.approx(1e3 * nbytes / 4e6, rel=0.02)
    assert found.limit == "links between nodes"


def test_what_the_topology_says_is_per_node() -> None:
    """One-peer-exp of 4 nodes, half a copy with turns; a group of 4 sends 1.5 copies. All ports carry a part."""
    made = cluster(16, 4, rate=4e6)
    for choice, copies in (
        (replace(NODE, mix_every=2), 0.5),
        (replace(NODE, topology="complete"), 1.5),
        (replace(NODE, topology="alternating-exp-ring"), 0.5),
    ):
        assert predict(made, job(), choice).node_bytes == pytest.approx(copies * 40e6)
    four = replace(made, ports=4)
    assert predict(four, job(), NODE).step_ms == pytest.approx(10_000 / 4, rel=0.02)


@pytest.mark.parametrize("h", [1, 2])
def test_a_node_averages_gradients_and_gathers_what_was_mixed(h: int) -> None:
    """Inside a node of 4 an all-reduce takes 1.5 copies, after the first bucket of the backward, and an all-gather 0.75."""
    copy_ms = 2000.0
    found = predict(cluster(8, 4, inside=40e6 / (copy_ms * 1e-3)), job(optimizer_ms=6), replace(NODE, mix_every=h))
    first = MIB / 40e6
    assert found.step_ms == pytest.approx(28 + first * 56 + 1.5 * copy_ms + 0.75 * copy_ms / h + 6)
    assert found.compute_ms == pytest.approx(90)
    assert found.limit == "links inside a node"


def test_each_process_codes_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    coding(monkeypatch, 4.0)
    assert predict(cluster(8, 4), job(), replace(NODE, compression="int8")).step_ms == pytest.approx(90 + 40 / 4)
    coding(monkeypatch, 0.0)
    # Eight threads of 0.25 GB/s send the encrypted messages that NCCL does not take.
    assert predict(cluster(16, 8, backend="nccl"), job(params=4e9), replace(NODE, compression="int8")).step_ms == pytest.approx(
        4e9 / 2e9 * 1e3, rel=0.02
    )


# -- sharded models ----------------------------------------------------------------------------------------------------

SHARDED = job(sharded=True)


@pytest.mark.parametrize(("inside_ms", "forward", "backward"), [(10, 30, 60), (80, 30, 90), (400, 150, 450)])
def test_shards_gather_twice_and_sum_once(inside_ms: float, forward: float, backward: float) -> None:
    """Of 40 MB nodes of 4 gather three quarters, in two bytes a parameter, in forward and backward, and sum in four."""
    made = cluster(16, 4, rate=1e12, inside=40e6 / (inside_ms * 1e-3))
    found = predict(made, SHARDED, NODE)
    assert found.step_ms == pytest.approx(forward + backward, rel=1e-3)
    assert found.node_bytes == pytest.approx(40e6)
    # An all-reduce of 1.5 copies over 4 nodes, beside a backward of 32 blocks.
    for copy_ms in (0.1, 1000.0):
        hsdp = predict(replace(made, inter=Link(0, 40e6 / (copy_ms * 1e-3))), SHARDED, Choice("hsdp"))
        shown = forward + backward / 32 + 1.5 * copy_ms
        assert hsdp.step_ms == pytest.approx(max(shown, forward + backward + 1.5 * copy_ms / 32), rel=1e-3)
        assert hsdp.node_bytes == pytest.approx(60e6)


def test_over_all_workers_shards_cross_the_links_between_nodes() -> None:
    """15/16 of 20 MB in the forward, of 60 MB in the backward, at 40 MB/s."""
    found = predict(cluster(16, 4, rate=40e6, inside=1e12), SHARDED, Choice("fsdp"))
    assert found.step_ms == pytest.approx(1e3 * 15 / 16 * (0.5 + 1.5))
    assert found.node_bytes == pytest.approx(15 / 16 * 80e6)
    assert found.limit == "links between nodes"


def test_a_plan_of_a_sharded_model() -> None:
    found = plan(GPUS, Job.of_step(7e9, 2140, sharded=True))
    assert {one.choice.kind for one in found} == {"hsdp", "fsdp", "decent_dp"}
    assert all(one.choice.of_nodes for one in found if one.choice.kind != "fsdp")
    one_node = plan(Cluster(8, 8, Link(0, 1e9), Link(0, 1e11)), Job.of_step(7e9, 2140, sharded=True))
    assert [one.name for one in one_node] == ["fsdp"]
    taken = recipe(GPUS, Job.of_step(7e9, 2140, sharded=True), found)
    hsdp = next(one for one in found if one.choice.kind == "hsdp")
    assert taken.to_ddp == pytest.approx(taken.prediction.step_ms * taken.steps / hsdp.step_ms)
    fast = replace(GPUS, inter=Link.of_gbit(3200, 5))
    best = recipe(fast, Job.of_step(7e9, 2140, sharded=True), plan(fast, Job.of_step(7e9, 2140, sharded=True)))
    assert best.code.startswith("fully_shard(model")


# -- plans -------------------------------------------------------------------------------------------------------------


def test_candidates_are_what_gossip_makes_by_default() -> None:
    transport: Any = SimpleNamespace(world_size=32, rank=0)
    replicas = {choice.topology: choice.replica for choice in candidates(GPUS) if choice.decentralized}
    for name in names_that_fit(32, 8):
        node = describe_node(None, name, transport, 8, (), "") is not None
        assert replicas.get(name, "node") == ("node" if node else "worker"), name
    assert {"hierarchical", "alternating-exp-ring", "one-peer-exp"} <= set(replicas)
    for made in (cluster(8), cluster(8, 8)):
        assert {choice.replica for choice in candidates(made)} == {"worker"}


@pytest.mark.parametrize("gbit", [0.05, 1, 5, 10])
def test_the_recipe_says_how_to_write_it(gbit: float) -> None:
    made = replace(GPUS, inter=Link.of_gbit(gbit, 20))
    work = Job.of_step(350e6, 400)
    found = recipe(made, work, plan(made, work))
    assert found.code.endswith('replica="node")')
    assert found.prediction.choice.topology in ("base-2", "one-peer-exp")
    assert found.prediction.node_bytes <= 0.35e9 + 1
    assert found.prediction.choice.low_rank == (gbit < 1)


def test_one_box_without_nvlink() -> None:
    """Eight GPUs whose all-reduce takes 557 ms beside a backward of 336: a pair sends 4/7 of its bytes, less if compressed."""
    nbytes = 557e-3 * 10e9 / 1.75
    made = Cluster(8, 8, Link(0, math.inf), Link(0, 10e9), backend="nccl")
    work = Job(nbytes / 4, 168, 336, jitter=0)
    found = {one.name: one.step_ms for one in plan(made, work) if one.choice.bucket_mb == 25}
    # From the second bucket on, of 25 MiB, each is there before the one before is summed.
    assert found["ddp"] == pytest.approx(168 + 336 * 26 * MIB / nbytes + 557 * (1 - MIB / nbytes))
    assert found["one-peer-exp"] == pytest.approx(504)
    int8 = found["one-peer-exp, int8"]
    # Beside it 0.07 ns of coding and two copies at 10 GB/s of each byte; 0.7 GB/s of it are 1,137 ms.
    assert int8 == pytest.approx(nbytes / 4 / 0.7e9 * 1e3, rel=0.02)
