"""Means over workers, distances to them, and broadcasts, for lists of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from decent_dp._sizes import MIB
from decent_dp.errors import NonFiniteError
from decent_dp.transport import Collectives, Replicas

__all__ = ["average_", "broadcast_", "control_of_part", "differing", "squared_distance"]

# Upper size of tensors that are sent together; it bounds the extra memory.
_CHUNK_BYTES = 16 * MIB


def control_of_part(control: Collectives, replicas: Replicas, rank: int) -> Collectives:
    """The collectives of the workers that hold the part of a replica that worker ``rank``, this one, holds.

    Args:
        control: of all workers, who call this together.
    """
    if replicas.shards == 1:
        return control
    _, own = replicas.place_of(rank)
    return control.part([rank for rank in control.ranks if replicas.place_of(rank)[1] == own])


def average_(control: Collectives, tensors: Sequence[Tensor], counts: float | None = None) -> list[Tensor]:
    """Replaces each tensor by its mean over workers; returns the squared L2 distances of the old values to it (float64).

    ``counts``: the weight of this worker's values in the mean, 0 if it is none of them; None on all workers: all are equal.
    """
    distances = []
    for tensor, mean in _means(control, tensors, counts):
        distances.append(_square(tensor, mean))
        tensor.copy_(mean)
    return distances


def squared_distance(control: Collectives, tensors: Sequence[Tensor], counts: float | None = None) -> float:
    """Returns the squared L2 distance of this worker's tensors to their mean over workers, as ``average_``; changes nothing."""
    return sum(float(_square(tensor, mean)) for tensor, mean in _means(control, tensors, counts))


def broadcast_(control: Collectives, tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by worker 0's; any dtype. Only what differs is sent."""
    for chunk in _chunks(differing(control, tensors)):
        flat = _flatten(chunk)
        control.broadcast(flat)
        for tensor, value in _split(flat, chunk):
            tensor.copy_(value)


def differing(control: Collectives, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those tensors that do not have the same bits on all workers; the same ones everywhere."""
    if not tensors:
        return []
    digests = control.gather([_digest(tensor) for tensor in tensors])
    return [tensor for tensor, *own in zip(tensors, *digests, strict=True) if len(set(own)) > 1]


def _digest(tensor: Tensor) -> str:
    raw: Any = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups consecutive tensors of one dtype and device, up to ``_CHUNK_BYTES`` or one tensor."""
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        alike = chunk and (chunk[0].dtype, chunk[0].device) == (tensor.dtype, tensor.device)
        if chunk and (not alike or size + tensor.nbytes > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _flatten(chunk: Sequence[Tensor]) -> Tensor:
    # In logical order, for any strides.
    return torch.cat([tensor.detach().reshape(-1) for tensor in chunk])


def _means(control: Collectives, tensors: Sequence[Tensor], counts: float | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each tensor with its mean over workers."""
    for chunk in _chunks(tensors):
        flat = _flatten(chunk)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if counts is None:
            control.mean(flat)
        else:
            flat = flat.mul_(counts) if counts else flat.zero_()  # 0 times a NaN is a NaN
            # The weight of those that count travels with the values: a worker may die before its part has arrived.
            flat = torch.cat([flat, flat.new_full((1,), float(counts))])
            control.mean(flat)
            if not flat[-1] > 0:
                raise NonFiniteError(
                    "the last worker whose replica is finite has died in the mean of all: the others hold a NaN."
                )
            flat = flat[:-1] / flat[-1]
        yield from _split(flat, chunk)


def _split(flat: Tensor, chunk: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    parts = torch.split(flat, [tensor.numel() for tensor in chunk])
    return ((tensor, part.view(tensor.shape)) for part, tensor in zip(parts, chunk, strict=True))


def _square(tensor: Tensor, mean: Tensor) -> Tensor:
    return (tensor.detach().double() - mean.double()).square().sum()
