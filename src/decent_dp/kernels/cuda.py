"""The kernels that can be used on a device."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .tables import usable

__all__ = ["cuda_kernels"]


def cuda_kernels(module: str, device: torch.device) -> Any:
    """Returns a module of this package that is written in Triton, for tensors on ``device``; None if it cannot be used."""
    return importlib.import_module(f"decent_dp.kernels.{module}") if usable(device) else None
