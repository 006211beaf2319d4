"""Whether the fast forms can be used here."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch

__all__ = ["cuda_kernels"]

_log = logging.getLogger(__name__)


def cuda_kernels(module: str, device: torch.device) -> Any:
    """Returns a module of this package that is written in Triton, for tensors on ``device``; None if it cannot be used."""
    return _try(module, device) if device.type == "cuda" and torch.version.hip is None else None


@functools.cache
def _try(module: str, device: torch.device) -> Any:
    try:
        kernels = importlib.import_module(f"decent_dp.kernels.{module}")
        kernels.probe(device)
    # Triton raises errors of many kinds where there is no compiler for its launchers, or a GPU is too old.
    except Exception as error:
        _log.warning("exchanges and updates on %s take longer, because Triton cannot be used: %s", device, error)
        return None
    return kernels
