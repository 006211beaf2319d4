"""Sharded models that cannot be mixed are refused with one error on all workers; others are accepted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import decent_dp
from decent_dp.errors import DisagreementError
from decent_dp.replica.assignment import assign_replicas
from decent_dp.replica.snapshot import take
from decent_dp.topo import Edge, RingTopology
from decent_dp.transport import InProcessTransport
from decent_dp.transport.peers import Peers
from tests.helpers import error_of
from tests.sharded_cases import SGD, Odd, mesh_of, needs_shards, shard

pytestmark = needs_shards


def gossip(model: nn.Module, **options: Any) -> decent_dp.Gossip:
    return decent_dp.gossip(model, SGD(model.parameters()), **options)


def everybody() -> Any:
    return gossip(shard(Odd(), None))


def hybrid() -> Any:
    return gossip(shard(Odd(), mesh_of(2, 2)))


def wrapper() -> Any:
    return decent_dp.DecentralizedDataParallel(shard(Odd(), mesh_of(2, 2)["shard"]), SGD)


def wrapper_of_gathered() -> Any:
    model = shard(Odd(), mesh_of(2, 2)["shard"])
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return decent_dp.DecentralizedDataParallel(model, SGD)


def partial() -> Any:
    from torch.distributed.tensor import DTensor, Partial

    model = shard(Odd(), mesh_of(2, 2)["shard"])
    model.odd = nn.Parameter(DTensor.from_local(torch.ones(2), mesh_of(2, 2)["shard"], [Partial()]))
    return gossip(model)


def part() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Odd()
    fully_shard(model.first, mesh=mesh_of(2, 2)["shard"])
    return gossip(model)


def two_meshes() -> Any:
    from torch.distributed.fsdp import fully_shard

    model, mesh = Odd(), mesh_of(2, 2)
    fully_shard(model.first, mesh=mesh["replica"])
    return gossip(fully_shard(model, mesh=mesh["shard"]))


def some() -> Any:
    mesh, model = mesh_of(2, 2), Odd()
    return gossip(shard(model, mesh["shard"]) if mesh.get_coordinate()[0] == 0 else model)


def crossed() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replica", "shard"))
    return gossip(shard(Odd(), mesh["shard"]))


def other_dimension() -> Any:
    from torch.distributed.tensor import Shard

    mesh, model = mesh_of(2, 2), nn.Linear(4, 4)
    how = {"shard_placement_fn": lambda param: Shard(param.ndim - 1)} if mesh.get_coordinate()[0] else {}
    from torch.distributed.fsdp import fully_shard

    return gossip(fully_shard(model, mesh=mesh["shard"], **how))


def in_process() -> Any:
    return gossip(shard(Odd(), mesh_of(2, 2)["shard"]), transport=InProcessTransport())


def torn() -> Any:
    """Worker 3 is outside, and hears so at once."""
    return gossip(shard(Odd(), mesh_of(2, 2)["shard"]), process_group=torch.distributed.new_group([0, 1, 2]))


def torn_hybrid() -> Any:
    mesh = mesh_of(2, 2)
    return gossip(shard(Odd(), mesh), process_group=mesh["replica"].get_group())


def made_for_workers() -> Any:
    return gossip(shard(Odd(), mesh_of(2, 2)["shard"]), topology=RingTopology(1))


BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "everybody": (everybody, "ValueError", "all 4 workers hold parts of one replica, so there is no other replica to mix with"),
    "hybrid": (hybrid, "ValueError", "all 4 workers hold parts of one replica"),
    "wrapper": (wrapper, "TypeError", "the model is sharded (fully_shard): sharded replicas train with decent_dp.gossip("),
    "wrapper, gathered": (wrapper_of_gathered, "TypeError", "sharded replicas train with decent_dp.gossip("),
    "partial": (partial, "ValueError", "'odd' is placed as (Partial(sum),): a Partial placement holds summands"),
    "part": (part, "ValueError", "parameter 'scale' trains and is not sharded, and 'first.weight' is"),
    "two meshes": (two_meshes, "ValueError", "all parameters of a replica must lie on the same workers"),
    "some": (some, "DisagreementError", "the model is sharded on worker 0 (its parameters are DTensors) and not on worker 2"),
    "crossed": (crossed, "DisagreementError", "placed as Shard(0) on the workers [1, 0] of each replica"),
    "other dimension": (other_dimension, "DisagreementError", "placed as Shard(1) on the workers [0, 1] of each replica"),
    "in process": (in_process, "ValueError", "are not in the process group that mixes"),
    "torn": (torn, "ValueError", ""),  # the texts are below
    "torn hybrid": (torn_hybrid, "ValueError", "process_group must be of whole replicas, or of the workers at one position"),
    "made for workers": (made_for_workers, "ValueError", "is used with world_size=2"),
}


def body(rank: int, n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    found = {}
    for name, (call, _, _) in BAD.items():
        try:
            call().close()
            found[name] = ("nothing", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    return found, {name: call() for name, call in GOOD.items()}


# -- what is taken ---------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, steps: int = 2, **options: Any) -> float:
    """Trains on the worker's own data; returns how far replicas are from each other."""
    rank = torch.distributed.get_rank()
    optimizer = SGD(model.parameters())
    replica = decent_dp.gossip(model, optimizer, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
    distance = replica.consensus_distance()
    replica.close()
    return distance


def one_replica() -> Any:
    return trained(shard(Odd(), mesh_of(1, 4)["shard"]))


def one_shard() -> Any:
    return trained(shard(Odd(), mesh_of(4, 1)["shard"]))


def crossing_nodes() -> Any:
    """Replicas of the workers 0, 2 and 1, 3."""
    from torch.distributed.device_mesh import init_device_mesh

    return trained(shard(Odd(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replica"))["shard"]))


def same_positions() -> Any:
    """The group that a mesh gives says the same as none."""
    mesh = mesh_of(2, 2)
    of_all = trained(shard(Odd(), mesh["shard"]))
    return [of_all - trained(shard(Odd(), mesh["shard"]), process_group=mesh["replica"].get_group()), of_all > 0]


def in_a_group() -> Any:
    """Two of the workers are a group of two replicas."""
    mesh = mesh_of(2, 2)
    model = shard(Odd(), mesh_of(4, 1)["shard"])
    return trained(model, process_group=mesh["shard"].get_group())


def with_copies() -> Any:
    """Tensor parallelism inside: every worker has the whole of some parameters, which count once."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = mesh_of(2, 2)
    found = []
    for placement in (Shard(0), Replicate()):
        weight = torch.arange(4.0).reshape(4, 1) + 1
        own = weight.chunk(2)[mesh.get_coordinate()[1]] if placement.is_shard() else weight
        model = nn.Module()
        model.weight = nn.Parameter(DTensor.from_local(own.clone(), mesh["shard"], [placement]))
        optimizer = SGD(model.parameters())
        replica = decent_dp.gossip(model, optimizer, topology="complete")
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight.square().sum() * (mesh.get_coordinate()[0] + 1)).backward()
            optimizer.step()
        found.append(replica.consensus_distance())
        replica.close()
    return found


def in_two_dimensions() -> Any:
    """Tensor parallelism and FSDP inside one replica."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "shard", "tensor"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return trained(fully_shard(model, mesh=mesh["shard"]), steps=1)


def unreduced() -> str:
    """HSDP inside one replica: reduced over shards, and not yet over their copies."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replica", "copy", "shard"))
    model: Any = fully_shard(nn.Linear(6, 1), mesh=mesh["copy", "shard"])
    replica = decent_dp.gossip(model, SGD(model.parameters()))
    model.set_requires_all_reduce(False)
    model(torch.ones(1, 6)).sum().backward()
    try:
        return error_of(lambda: take(replica))
    finally:
        replica.close()


def nothing_here() -> Any:
    """All shards of every second worker are empty."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for compression, topology in ((None, "one-peer-exp"), ("bfloat16", "complete"), ("int8", "one-peer-exp")):
        model = fully_shard(nn.Linear(6, 1), mesh=mesh_of(2, 2)["shard"])
        found.append(trained(model, compression=compression, topology=topology))
    return found


def offloaded() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return trained(shard(Odd(), mesh_of(2, 2)["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False)))


def gathered_before() -> Any:
    """A forward before the call has left gathered parameters in the model's place."""
    model = shard(Odd(), mesh_of(2, 2)["shard"])
    with contextlib.suppress(ValueError), torch.no_grad():
        model(torch.ones(1, 6))
    optimizer = SGD(shards_of(model))
    replica = decent_dp.gossip(model, optimizer)
    distance = replica.consensus_distance()
    replica.close()
    return distance


def shards_of(model: Any) -> Any:
    model.reshard()
    found = list(model.parameters())
    model.unshard()
    return found


GOOD: dict[str, Callable[[], Any]] = {
    "one replica": one_replica,
    "one shard": one_shard,
    "crossing": crossing_nodes,
    "in a group": in_a_group,
    "same positions": same_positions,
    "with copies": with_copies,
    "in two dimensions": in_two_dimensions,
    "unreduced": unreduced,
    "nothing here": nothing_here,
    "offloaded": offloaded,
    "gathered before": gathered_before,
}


@pytest.mark.slow
def test_refused_and_accepted_arguments(workers):
    outcomes = workers(4, body)
    for name, (_, kind, text) in BAD.items():
        for rank, (errors, _) in enumerate(outcomes):
            assert errors[name][0] == kind, (name, rank, errors[name])
            assert text in errors[name][1], (name, rank, errors[name][1])
    assert ["must be of whole replicas, or of" in errors["torn"][1] for errors, _ in outcomes] == [True, True, True, False]
    assert "this worker is not a member of process_group" in outcomes[3][0]["torn"][1]
    taken = [good for _, good in outcomes]
    for name in ("one shard", "crossing", "offloaded"):
        assert taken[0][name] > 0, name
        assert all(good[name] == taken[0][name] for good in taken), name
    assert [good["same positions"] for good in taken] == [[0.0, True]] * 4
    assert [good["one replica"] for good in taken] == [0.0] * 4
    assert [good["in two dimensions"] for good in taken] == [0.0] * 4
    assert all("gradients FSDP has not reduced yet" in good["unreduced"] for good in taken)
    assert [good["gathered before"] for good in taken] == [0.0] * 4
    assert min(taken[0]["nothing here"]) > 0
    assert all(good["nothing here"] == taken[0]["nothing here"] for good in taken)
    assert taken[0]["in a group"] == taken[1]["in a group"] > 0
    split, copied = taken[0]["with copies"]
    assert split == copied > 0
    assert all(good["with copies"] == [split, copied] for good in taken)


def card(rank: int, *ranks: int, alone: bool = False) -> dict[str, Any]:
    return {"rank": rank, "ranks": list(ranks), "alone": alone}


def test_replicas_are_whole_disjoint_and_of_one_size():
    assert assign_replicas([None, None]).workers == ((0,), (1,))
    cards = [card(0, 0, 2), card(1, 1, 3), card(2, 0, 2), card(3, 1, 3)]
    assert assign_replicas(cards).workers == ((0, 2), (1, 3))
    assert assign_replicas(cards).workers_of(2) == (4, 5)  # who joins
    assert assign_replicas(cards).place_of(5) == (2, 1)
    assert assign_replicas(cards).peers_on_node(5, 1) == 1
    assert assign_replicas(cards).place_of(2) == (0, 1)
    # Two workers per node: 0 and its peer 1 share one. If each replica has its own node, 0 and its peer 2 do not.
    assert assign_replicas(cards).peers_on_node(0, 2) == 2
    assert assign_replicas([card(0, 0, 1), card(1, 0, 1), card(2, 2, 3), card(3, 2, 3)]).peers_on_node(0, 2) == 1
    # As given, where replicas are whole: users may say that nodes are smaller or larger than they are.
    assert assign_replicas([None, None]).peers_on_node(0, 8) == 8
    # Ranks of a group that is not the default one.
    assert assign_replicas([card(6, 6, 7), card(7, 6, 7), card(8, 8, 9), card(9, 8, 9)]).workers == ((0, 1), (2, 3))
    assert assign_replicas([card(0, 0)]).workers == ((0,),)
    with pytest.raises(ValueError, match="replicas must not overlap"):
        assign_replicas([card(0, 0, 1), card(1, 0, 1), card(2, 1, 2)])
    with pytest.raises(ValueError, match=r"the replica on the workers \[0, 1\] has 2 shards, and that on \[2\] has 1"):
        assign_replicas([card(0, 0, 1), card(1, 0, 1), card(2, 2)])
    with pytest.raises(ValueError, match=r"and \[2\] are not in the process group"):
        assign_replicas([card(0, 0, 2), card(1, 1)])
    with pytest.raises(DisagreementError, match=r"sharded on worker 1 .* not on worker 0"):
        assign_replicas([None, card(1, 1)])


def test_peers_have_the_ranks_of_the_whole():
    whole, exchange = Mock(rank=5), Mock()
    peers = Peers(whole, [1, 3, 5], 3)
    assert (peers.rank, peers.world_size, peers.rank_in_all(2)) == (2, 3, 5)
    here, there = Edge([0, 2], 0.5), Edge([1, 5], 0.5)
    peers.prepare([here])
    whole.prepare.assert_called_once_with([there])
    peers.start(here, "request")
    whole.start.assert_called_once_with(there, "request")
    whole.table.living.return_value = [0, 3, 4, 5]
    assert peers.living() == [1, 2]
    for verb, own, theirs in (
        ("usable", (here, exchange), (there, exchange)),
        ("skip", (here, exchange), (there, exchange)),
        ("round_of", (1,), (3,)),
        ("has_dropped", ([0, 1], exchange), ([1, 3], exchange)),
    ):
        getattr(peers, verb)(*own)
        getattr(whole.table, verb).assert_called_once_with(*theirs)
