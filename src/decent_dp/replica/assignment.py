"""Which workers are one replica: each alone, those of a node, or those over which the model is sharded.

Each worker describes the workers of its replica (``describe_mesh``, ``describe_node``), and ``assign_replicas`` makes replicas
of the descriptions of all. Workers at the same position in their replicas hold the same part, and mix it with each other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from decent_dp._checks import check_choice
from decent_dp.errors import DisagreementError
from decent_dp.replica.shards import is_sharded, mesh_of
from decent_dp.topo import Topology
from decent_dp.topo.registry import counts_replicas
from decent_dp.transport import InProcessTransport, NewcomerTransport, Replicas, Transport, network_stack

__all__ = ["assign_replicas", "describe_mesh", "describe_node", "ranks_of_mesh", "why_no_node"]

_log = logging.getLogger(__name__)

_MESH = (
    'mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replica", "shard")) and '
    'fully_shard(..., mesh=mesh["shard"])'
)


def ranks_of_mesh(model: object) -> list[int]:
    """The ranks, in the default group, of the workers that hold parts of this replica; none if this worker has all of it."""
    mesh = mesh_of(model)
    return [] if mesh is None else _ranks(mesh)


def _ranks(mesh: Any) -> list[int]:
    found: list[int] = mesh.mesh.flatten().sort().values.tolist()
    return found


def describe_mesh(model: nn.Module) -> dict[str, Any] | None:
    """Describes, as JSON, the workers of this replica; None if this worker has all of it.

    Returns:
        rank   of this worker in the default group
        ranks  of all workers of the replica, sorted
        alone  whether the mesh has another dimension for replicas, of size 1

    Raises:
        ValueError: parameters lie on different workers, or cannot be mixed; names a parameter.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    sharded: list[tuple[str, Any]] = [(name, tensor) for name, tensor in named if is_sharded(tensor)]
    if not sharded:
        return None
    first, mesh = sharded[0][0], sharded[0][1].device_mesh
    ranks = _ranks(mesh)
    for name, tensor in sharded:
        if any(part.is_partial() for part in tensor.placements):
            raise ValueError(
                f"'{name}' is placed as {tensor.placements}: a Partial placement holds summands, which cannot be mixed. "
                "Redistribute it to Shard or Replicate before gossip()."
            )
        if _ranks(tensor.device_mesh) != ranks:
            raise ValueError(
                f"'{name}' lies on the workers {_ranks(tensor.device_mesh)}, and '{first}' on {ranks}: all parameters of a "
                "replica must lie on the same workers."
            )
    for name, param in model.named_parameters():
        if param.requires_grad and not is_sharded(param):
            raise ValueError(
                f"parameter '{name}' trains and is not sharded, and '{first}' is: its copies in one replica would drift apart. "
                "Call fully_shard on the whole model (after its parts), or freeze it."
            )
    # Older versions of torch do not know the root mesh of a slice.
    root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    return {"rank": mesh.get_rank(), "ranks": ranks, "alone": root.ndim > mesh.ndim and root.size() == mesh.size()}


def describe_node(
    replica: object, topology: str | Topology, transport: Transport, on_node: int, inner: Sequence[int], why_not: str
) -> dict[str, Any] | None:
    """As ``describe_mesh``, of a replica of several workers that are not sharded, or what is needed to find them.

    Args:
        replica: the argument of ``gossip``.
        on_node: workers per node.
        inner: the ranks over which DistributedDataParallel averages the gradients already; -1 for one outside of the run.
        why_not: why a node cannot be a replica with other arguments; '' if it can.

    Raises:
        ValueError: ``replica`` is wrong, or does not go with other arguments.
    """
    if replica is not None:
        check_choice("replica", replica, ("worker", "node"))
    if len(inner) > 1:
        if isinstance(transport, NewcomerTransport):
            raise ValueError(
                "the model is in DistributedDataParallel, and this process joins a run: pass the model without it. gossip() "
                "averages the gradients of a node's workers itself."
            )
        _check_inner(replica, inner, transport.world_size)
        return {"rank": transport.rank, "ranks": list(inner), "alone": True}
    if replica is None and why_not and transport.rank == 0 and 1 < on_node < transport.world_size:
        _log.warning("each worker is a replica, and the workers of a node send a copy each: %s", why_not)
    if transport.world_size == 1:
        return None
    if isinstance(transport, InProcessTransport):
        why_not = "the workers of InProcessTransport are threads"
    if replica == "node" and why_not:
        raise ValueError(f"replica='node' does not work here: {why_not}. Leave it out, or pass replica='worker'.")
    if replica == "worker" or (replica is None and (why_not or not counts_replicas(topology))):
        return None
    return {"rank": transport.rank, "of": replica or "auto", "on_node": on_node, "host": network_stack()}


def why_no_node(model: nn.Module, transport: Transport) -> str:
    """Why the model cannot be trained with a node as a replica; '' if it can."""
    cpu = next((name for name, param in model.named_parameters() if param.requires_grad and param.device.type == "cpu"), None)
    if cpu is not None and transport.only_cuda:
        return f"'{cpu}' is on the CPU, and NCCL, with which the workers of a node would average gradients, is for GPUs only"
    name = next((name for name, module in model.named_modules() if getattr(module, "sparse", False) is True), None)
    if name is not None:
        what = f"'{name}'" if name else "the model"
        return f"{what} has sparse gradients (sparse=True), and the workers of a node average dense ones"
    return ""


def _check_inner(replica: object, inner: Sequence[int], n: int) -> None:
    over = f"the model is in DistributedDataParallel over {len(inner)} of {n} workers, which averages its gradients"
    if len(inner) == n:
        raise ValueError(
            f"{over}: that is one replica, and there must be several. Wrap it over the workers of a node (process_group=), or "
            "pass its .module."
        )
    if replica == "worker":
        raise ValueError(f"{over}, and replica='worker' was given: these workers are one replica. Leave it out.")
    if min(inner) < 0:
        raise ValueError(f"{over}, and some of them are not in the process group that mixes: pass the group of all.")


# -- of all workers --------------------------------------------------------------------------------------------------------


def assign_replicas(descriptions: Sequence[dict[str, Any] | None], here: int = 0) -> Replicas:
    """Makes the assignment from the descriptions of all workers, by rank. ``here``: of this worker.

    Raises:
        ValueError, DisagreementError: replicas differ in form or overlap; all workers raise the same error.
    """
    descriptions = _with_nodes(descriptions, here)
    found: list[dict[str, Any]] = [one for one in descriptions if one is not None]
    if not found:
        return Replicas(tuple((rank,) for rank in range(len(descriptions))))
    if len(found) < len(descriptions):
        plain, sharded = (next(r for r, one in enumerate(descriptions) if (one is None) is no) for no in (True, False))
        raise DisagreementError(
            f"the model is sharded on worker {sharded} (its parameters are DTensors) and not on worker {plain}: build the "
            "same model on every worker, and call fully_shard on all of them."
        )
    at = {one["rank"]: rank for rank, one in enumerate(found)}
    for rank, one in enumerate(found):
        if outside := [other for other in one["ranks"] if other not in at]:
            raise ValueError(
                f"the replica of worker {rank} lies on the ranks {one['ranks']} of the default group, and {outside} are "
                "not in the process group that mixes: process_group must be of whole replicas, or of the workers at one "
                'position of all replicas (mesh["replica"].get_group()), or left out.'
            )
    members = [tuple(at[other] for other in one["ranks"]) for one in found]
    for rank, own in enumerate(members):
        if other := [other for other in own if members[other] != own or rank not in own]:
            raise ValueError(
                f"worker {rank} holds a part of a replica on the workers {list(own)}, and worker {other[0]} of one on "
                f"{list(members[other[0]])}: replicas must not overlap. Use the slice of one mesh: {_MESH}."
            )
    workers = tuple(sorted(set(members), key=min))
    if odd := [own for own in workers if len(own) != len(workers[0])]:
        raise ValueError(
            f"the replica on the workers {list(workers[0])} has {len(workers[0])} shards, and that on {list(odd[0])} has "
            f"{len(odd[0])}: all replicas must have as many. Use the slice of one mesh: {_MESH}."
        )
    if len(workers) == 1 < len(descriptions) and not all(one["alone"] for one in found):
        raise ValueError(
            f"all {len(descriptions)} workers hold parts of one replica, so there is no other replica to mix with: "
            f"shard over an inner dimension of a mesh, {_MESH}. (With one replica on purpose: the same, with replicas = 1.)"
        )
    return Replicas(workers)


def _with_nodes(found: Sequence[dict[str, Any] | None], here: int) -> Sequence[dict[str, Any] | None]:
    """The descriptions after it is known which workers are on a node.

    Raises ValueError if nodes cannot be replicas, and a worker wants them to be.
    """
    nodes = [one for one in found if one is not None and "of" in one]
    if not nodes:
        return found
    groups, problem = _nodes_of(found, nodes)
    asked = any(one["of"] == "node" for one in nodes)
    if problem and asked:
        raise ValueError(f"replica='node' {problem}")
    if problem and here == 0:
        _log.warning("each worker is a replica, as replica='node' %s", problem)
    if problem or len(groups) == len(found) or (len(groups) == 1 and not asked):
        return [None if one is not None and "of" in one else one for one in found]
    return [{"rank": r, "ranks": next(own for own in groups if r in own), "alone": True} for r in range(len(found))]


def _nodes_of(found: Sequence[Any], nodes: Sequence[dict[str, Any]]) -> tuple[list[list[int]], str]:
    """The ranks on each node; or why they cannot be known, or nodes not be replicas."""
    n = len(found)
    if len(nodes) < n:
        other = next(rank for rank, one in enumerate(found) if one is None or "of" not in one)
        return [], (
            f"needs all workers: worker {nodes[0]['rank']} can be of a node, and worker {other} cannot. Pass the same "
            "replica=, topology and model on all."
        )
    sizes, hosts = [one["on_node"] for one in nodes], [one["host"] for one in nodes]
    other = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), 0)
    if other or n % sizes[0]:
        last = f", and {sizes[other]} on that of worker {other}" if other else ""
        return [], (
            f"needs nodes of equally many workers, and of {n} workers {sizes[0]} are on the node of worker 0{last}. Start as "
            "many on each node (LOCAL_WORLD_SIZE, or local_world_size=), or pass replica='worker'."
        )
    if len(set(hosts)) == 1:  # it can only be a trial
        return [list(range(first, first + sizes[0])) for first in range(0, n, sizes[0])], ""
    groups = [[rank for rank in range(n) if hosts[rank] == host] for host in dict.fromkeys(hosts)]
    wrong = next((own for own in groups if len(own) != sizes[0]), None)
    if wrong is not None:
        return [], (
            f"needs to know the workers of each node: with local_world_size={sizes[0]}, the workers {wrong} are on one "
            "machine. Pass the number of workers per machine, or replica='worker'."
        )
    return groups, ""
