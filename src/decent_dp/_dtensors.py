"""Parts of DTensors on this worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_sharded", "local", "placed"]


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. Checked by name, because importing the class takes most of a second."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """Returns the local part of a DTensor, which shares its memory, and any other tensor itself.

    FSDP replaces parts (at the first forward, and when the model is moved), so callers must not cache the result.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        part: Tensor = sharded.to_local()
    return part


def placed(part: Tensor, like: Tensor) -> Tensor:
    """Returns the DTensor with local part ``part`` and the placement of ``like``; ``part`` itself if ``like`` is no DTensor."""
    if not is_sharded(like):
        return part
    sharded: Any = like
    made: Tensor = type(sharded).from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
    return made
