"""The choice of the replicas: workers, or nodes whose workers hold the same parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from decent_dp._checks import check_choice
from decent_dp.topo import Topology
from decent_dp.topo.registry import counts_replicas
from decent_dp.transport import InProcessTransport, NewcomerTransport, Transport, network_stack

__all__ = ["agree_on_nodes", "describe_node", "why_no_node"]

_log = logging.getLogger(__name__)


def describe_node(
    replica: object, topology: str | Topology, transport: Transport, on_node: int, inner: Sequence[int], why_not: str
) -> dict[str, Any] | None:
    """As ``describe_mesh``, of a replica of several workers that are not sharded; None if this worker is to be one.

    Args:
        replica: the argument of ``gossip``.
        on_node: workers per node.
        inner: the ranks over which DistributedDataParallel averages the gradients already; -1 for one outside of the run.
        why_not: why a node cannot be a replica with other arguments; '' if it can.

    Returns:
        That of ``describe_mesh``, or what ``agree_on_nodes`` needs.

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


def agree_on_nodes(found: Sequence[dict[str, Any] | None], rank: int) -> list[dict[str, Any] | None]:
    """The descriptions of all workers, by rank, after it is known which of them are on a node. ``rank``: of this worker.

    Raises:
        ValueError: nodes are to be replicas, and cannot be.
    """
    nodes = [one for one in found if one is not None and "of" in one]
    if not nodes:
        return list(found)
    groups, problem = _nodes_of(found, nodes)
    asked = any(one["of"] == "node" for one in nodes)
    if problem and asked:
        raise ValueError(f"replica='node' {problem}")
    if problem and rank == 0:
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
