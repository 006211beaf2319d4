"""A replica of several workers that all hold the same tensors: each of them exchanges its share, and the others get it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decent_dp._checks import check_choice
from decent_dp.engine.layout import TensorSpec
from decent_dp.topo import Topology
from decent_dp.transport import InProcessTransport, NodeGroup, Transport

__all__ = ["Shares", "describe_node"]

# Topologies that know of nodes themselves, and count workers.
_OF_WORKERS = ("hierarchical", "alternating-exp-ring")


def describe_node(replica: object, topology: str | Topology, transport: Transport, on_node: int) -> dict[str, Any] | None:
    """As ``describe_mesh``, the workers of this one's node, if they are one replica; None if each worker is one.

    Args:
        replica: the argument of ``gossip``.
        on_node: workers per node.

    Raises:
        ValueError: ``replica`` is wrong, or nodes cannot be replicas.
    """
    if replica is not None:
        check_choice("replica", replica, ("worker", "node"))
    n, rank = transport.world_size, transport.rank
    if replica is None:
        counts_workers = not isinstance(topology, str) or any(name in topology for name in _OF_WORKERS)
        if not 1 < on_node < n or n % on_node or counts_workers or isinstance(transport, InProcessTransport):
            return None
    elif replica == "worker" or on_node == 1:
        return None
    if n % on_node:
        raise ValueError(
            f"replica='node' with {n} workers, {on_node} on each node: nodes must have equally many workers. Start as many on "
            "each node, give their number (local_world_size=), or pass replica='worker'."
        )
    if isinstance(transport, InProcessTransport):
        raise ValueError("replica='node' needs processes, and the workers of InProcessTransport are threads: leave it out.")
    first = rank - rank % on_node
    return {"rank": rank, "ranks": list(range(first, first + on_node)), "alone": True, "node": True}


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

    def gather(self, kind: str, numbers: Iterable[int]) -> None:
        """Each worker gets the shares of the others of these tensors. All workers call it."""
        self.group.gather([self._known[kind, number][1] for number in sorted(numbers)])


def _cut(tensor: Tensor, rows: int, workers: int) -> list[Tensor]:
    numel = tensor.numel()
    memory = tensor.as_strided((numel,), (1,), tensor.storage_offset())
    matrix = memory.view(rows, numel // rows) if rows > 1 else memory
    return [matrix[len(matrix) * i // workers : len(matrix) * (i + 1) // workers] for i in range(workers)]
