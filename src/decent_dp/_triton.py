"""Kernels in Triton, which comes with torch's builds for CUDA, and needs a C compiler and a GPU that it knows."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from types import ModuleType

import torch

__all__ = ["DEVICES", "load_triton", "on_device"]

# The tests of the kernels on Triton's interpreter add the CPU.
DEVICES = {"cuda"}


@functools.cache
def load_triton(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Imports a module of kernels for tensors of this device and dtype, and tries it.

    The module's ``attempt(device, dtype)`` runs its kernels on small tensors. So they are compiled before other workers wait.

    Returns:
        None where kernels are not for the device, or do not work, which is warned of: torch's own run instead.
    """
    if device.type not in DEVICES or torch.version.hip is not None:
        return None
    try:
        module = importlib.import_module(name)
        module.attempt(device, dtype)
    except Exception as error:  # of the import, the compiler, the driver or the device
        reason = " ".join(str(error).split("\n", 2)[:2])
        what = name.rpartition(".")[2]
        warnings.warn(f"{what} for {dtype} does not work on {device}, and takes longer without: {reason}", RuntimeWarning, 2)
        return None
    return module


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
