"""The mean of the replicas, and how far they are from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decent_dp.engine.layout import MIB
from decent_dp.transport import Control

__all__ = ["average_", "broadcast_", "squared_distance"]

# Tensors travel together up to this size: it bounds the extra memory.
_PIECE_BYTES = 16 * MIB


def average_(control: Control, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Replaces each tensor by its mean over workers; returns each one's squared L2 distance to it as it was (float64)."""
    distances = []
    for piece in _pieces(tensors):
        mean = _mean(control, piece)
        for tensor, averaged in zip(piece, _cut(mean, piece), strict=True):
            distances.append(_square(tensor, averaged))
            tensor.copy_(averaged)
    return distances


def squared_distance(control: Control, tensors: Sequence[Tensor]) -> float:
    """The squared L2 distance of this worker's tensors to their mean over workers; nothing is changed."""
    total = 0.0
    for piece in _pieces(tensors):
        mean = _mean(control, piece)
        total += sum(float(_square(t, averaged)) for t, averaged in zip(piece, _cut(mean, piece), strict=True))
    return total


def broadcast_(control: Control, tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by worker 0's; any dtype."""
    for piece in _pieces(tensors):
        flat = _flatten(piece)
        control.broadcast(flat)
        for tensor, value in zip(piece, _cut(flat, piece), strict=True):
            tensor.copy_(value)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype and device, of at most ``_PIECE_BYTES`` unless a single one is larger."""
    piece: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = piece and (piece[0].dtype, piece[0].device) == (tensor.dtype, tensor.device)
        if piece and (not alike or size + tensor.nbytes > _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += tensor.nbytes
    if piece:
        yield piece


def _flatten(piece: Sequence[Tensor]) -> Tensor:
    # In logical order, whatever the strides.
    return torch.cat([tensor.detach().reshape(-1) for tensor in piece])


def _mean(control: Control, piece: Sequence[Tensor]) -> Tensor:
    flat = _flatten(piece)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    control.mean(flat).wait()
    return flat


def _cut(flat: Tensor, piece: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in piece])
    return [part.view(tensor.shape) for part, tensor in zip(parts, piece, strict=True)]


def _square(tensor: Tensor, mean: Tensor) -> Tensor:
    return (tensor.detach().double() - mean.double()).square().sum()
