"""A replica of several workers that all hold the same tensors: each of them exchanges its share, and the others get it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from decent_dp._dtensors import local
from decent_dp.engine.layout import TensorSpec
from decent_dp.serialization import decode, encode
from decent_dp.transport import NodeGroup

__all__ = ["Shares", "UnevenNode", "parts_of"]


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
            tensors = {key: torch.empty(shape, dtype=dtype, device="cpu") for key, (shape, dtype) in kinds.items()}
        self.group.broadcast((tensors[key] for key in kinds), source)
        return tree if is_source else decode(text, lambda key: tensors[key])

    def gather(self, kind: str, numbers: Iterable[int]) -> None:
        """Each worker gets the shares of the others of these tensors. All workers call it."""
        self.group.gather([self._known[kind, number][1] for number in sorted(numbers)])


def parts_of(kind: str, tensors: Iterable[Tensor], shares: Shares | None) -> list[Tensor]:
    """This worker's parts of a replica's tensors: of DTensors the local ones, and where it has shares these."""
    if shares is None:
        return [local(tensor) for tensor in tensors]
    return [shares.own(kind, number, tensor) for number, tensor in enumerate(tensors)]


def _cut(tensor: Tensor, rows: int, workers: int) -> list[Tensor]:
    numel = tensor.numel()
    memory = tensor.as_strided((numel,), (1,), tensor.storage_offset())
    matrix = memory.view(rows, numel // rows) if rows > 1 else memory
    return [matrix[len(matrix) * i // workers : len(matrix) * (i + 1) // workers] for i in range(workers)]


class UnevenNode:
    """Inside ``join``: the workers of a node tell each other their next calls, and those without batches follow the others.

    Attributes:
        source: the position of a worker that still trains, at the last meeting. ``some_are_out``: whether another one did not.
        behind: whether there was such a meeting.
    """

    def __init__(self, group: NodeGroup) -> None:
        self._group = group
        self.source, self.some_are_out, self.behind = 0, False, False

    def meet(self, what: str) -> str:
        """Returns the next call of the workers that still train; '' if none does. All call it; one without batches passes ''.

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
        return str(found[self.source])
