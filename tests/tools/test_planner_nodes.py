"""The planner where the workers of a node are one replica, whole or sharded; the numbers are computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.replica.assignment import describe_node
from decent_dp.tools.planner import Cluster, Job, Link, candidates, plan, recipe
from decent_dp.topo.registry import names_that_fit
from tests.tools.test_planner import MIB, cluster

# 4 nodes of 8 GPUs, 25 Gbit/s between them and NVLink inside.
GPUS = Cluster(32, 8, Link.of_gbit(25, 20), Link.of_gbit(2400, 5), backend="nccl")


# -- sharded models ----------------------------------------------------------------------------------------------------


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
