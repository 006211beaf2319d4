"""A replica of several workers that all hold the same tensors: each of them exchanges its share, and the others get it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decent_dp._checks import check_choice
from decent_dp.engine.layout import TensorSpec
from decent_dp.serialization import decode, encode
from decent_dp.topo import Topology
from decent_dp.transport import InProcessTransport, NodeGroup, Transport, ranks_in

__all__ = ["Shares", "UnevenNode", "agree_on_nodes", "describe_node"]

_log = logging.getLogger(__name__)

# Topologies that know of nodes themselves, and count workers.
_OF_WORKERS = ("hierarchical", "alternating-exp-ring")


def describe_node(
    replica: object, topology: str | Topology, transport: Transport, on_node: int, inner: Any = None, process_group: Any = None
) -> dict[str, Any] | None:
    """As ``describe_mesh``: the workers of this one's node, or of ``inner``, if they are one replica; else None.

    Args:
        replica: the argument of ``gossip``.
        on_node: workers per node.
        inner: the process group over which gradients are averaged already.

    Raises:
        ValueError: ``replica`` is wrong, or nodes cannot be replicas.
    """
    if replica is not None:
        check_choice("replica", replica, ("worker", "node"))
    n, rank = transport.world_size, transport.rank
    if inner is not None:
        ranks = ranks_in(inner, process_group)
        if replica == "worker" or min(ranks) < 0 or len(ranks) == n > 1:
            over = f"all {n} workers" if len(ranks) == n else f"{len(ranks)} workers"
            raise ValueError(
                f"the model is wrapped in DistributedDataParallel over {over}, which averages its gradients: that is one "
                "replica, and there must be several. Wrap it over the workers of a node (process_group=), or pass its .module."
            )
        return {"rank": rank, "ranks": ranks, "alone": True} if len(ranks) > 1 else None
    if replica == "worker" or (on_node == 1 and replica is None):
        return None
    if isinstance(transport, InProcessTransport):
        if replica is None:
            return None
        raise ValueError("replica='node' needs processes, and the workers of InProcessTransport are threads: leave it out.")
    if replica is None and (not isinstance(topology, str) or any(name in topology for name in _OF_WORKERS)):
        return None
    first = rank - rank % on_node
    return {"rank": rank, "ranks": list(range(first, first + on_node)), "alone": replica is not None, "of": replica or "auto"}


def agree_on_nodes(found: Sequence[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """The results of ``describe_node`` of all workers, by rank, if nodes can be replicas; else None for each.

    Raises:
        ValueError: they cannot, and are to be.
    """
    nodes = [one for one in found if one is not None and "of" in one]
    if not nodes or (len(nodes[0]["ranks"]) == len(found) and nodes[0]["of"] == "auto"):
        return [None if one is not None and "of" in one else one for one in found]
    sizes = [1 if one is None else len(one["ranks"]) for one in found]
    if len(nodes) == len(found) and len(set(sizes)) == 1 and len(found) % sizes[0] == 0:
        return [{"rank": one["rank"], "ranks": one["ranks"], "alone": True} for one in nodes]
    if all(one is None or one.get("of") == "auto" for one in found):
        _log.info("nodes have different numbers of workers, so each worker is a replica")
        return [None] * len(found)
    other = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), 0)
    raise ValueError(
        f"replica='node' with {len(found)} workers, {sizes[0]} on the node of worker 0 and {sizes[other]} on that of worker "
        f"{other}: nodes must have equally many. Start as many on each node (local_world_size=), or pass replica='worker'."
    )


class Shares:
    """Cuts tensors into shares of the workers: rows of the matrix that a tensor's memory is, or elements of a vector.

    Args:
        position: of this worker. ``workers``: how many there are.
        group: of them.
    """

    def __init__(self, position: int, workers: int, group: NodeGroup) -> None:
        self._position, self._workers, self.group = position, workers, group
        # Of each tensor: its address, and the shares by worker.
        self._known: dict[tuple[str, int], tuple[int, list[Tensor]]] = {}

    def own(self, kind: str, number: int, tensor: Tensor) -> Tensor:
        """The share of this worker, a view. ``kind`` and ``number`` name the tensor, the same on all workers."""
        known = self._known.get((kind, number))
        if known is None or known[0] != tensor.data_ptr():
            spec = TensorSpec.of("", tensor)
            if tensor.stride() != spec.stride:
                tensor.data = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(tensor)
            known = self._known[kind, number] = tensor.data_ptr(), _cut(tensor.detach(), spec.rows, self._workers)
        return known[1][self._position]

    @property
    def is_first(self) -> bool:
        """Whether this is the node's first worker, whose snapshots have what all of its workers have in common."""
        return self._position == 0

    def broadcast(self, tree: Any, source: int = 0) -> Any:
        """The tree of plain values and tensors (``serialization``) of the worker at this position. All workers call it."""
        is_source = self._position == source
        text, tensors = encode(tree) if is_source else ("", {})
        kinds = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        text, kinds = self.group.gather_values((text, kinds))[source]
        if not is_source:
            tensors = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in kinds.items()}
        self.group.broadcast((tensors[key] for key in kinds), source)
        return tree if is_source else decode(text, tensors.__getitem__)

    def gather(self, kind: str, numbers: Iterable[int]) -> None:
        """Each worker gets the shares of the others of these tensors. All workers call it."""
        self.group.gather([self._known[kind, number][1] for number in sorted(numbers)])


def _cut(tensor: Tensor, rows: int, workers: int) -> list[Tensor]:
    numel = tensor.numel()
    memory = tensor.as_strided((numel,), (1,), tensor.storage_offset())
    matrix = memory.view(rows, numel // rows) if rows > 1 else memory
    return [matrix[len(matrix) * i // workers : len(matrix) * (i + 1) // workers] for i in range(workers)]


class UnevenNode:
    """Inside ``join``: the workers of a node tell each other what each does next, and who has run out follows the others.

    Attributes:
        source: the position of a worker that still trains, at the last meeting. ``some_are_out``: whether another one did not.
        behind: whether there was such a meeting.
    """

    def __init__(self, group: NodeGroup) -> None:
        self._group = group
        self.source, self.some_are_out, self.behind = 0, False, False

    def meet(self, what: str) -> str:
        """What the workers that still train do next; '' if all have run out. Called by all, with '' by one that has.

        Raises:
            RuntimeError: they do different things.
        """
        found = self._group.gather_values(what)
        training = [position for position, its in enumerate(found) if its]
        if not training:
            return ""
        self.source = training[0]
        self.some_are_out = len(training) < len(found)
        self.behind |= self.some_are_out
        if len({found[position] for position in training}) > 1:
            raise RuntimeError(
                f"inside join() the workers of a node do different things next ({', '.join(filter(None, found))}): each batch "
                "needs as many backwards, and steps, on all of them."
            )
        return found[self.source]
