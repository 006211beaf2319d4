"""What the kernels in Triton share."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

__all__ = ["TYPES", "on_device", "pointer_at", "quotient", "root"]

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit
def pointer_at(entry, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer whose address stands in a table; ``ALIGNED``: it is a multiple of 16."""
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        # Of the pointer, because a hint on the integer is lost, and without one the compiler reads no vectors.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def root(x):
    """Rounded as IEEE 754 asks: ``tl.sqrt`` of float32 is an approximation."""
    if x.dtype == tl.float64:  # noqa: SIM108
        found = tl.sqrt(x)
    else:  # not after a return: it would be compiled for float64, too
        found = tl.sqrt_rn(x)
    return found


@triton.jit
def quotient(x, y):
    """Likewise."""
    if x.dtype == tl.float64:  # noqa: SIM108
        found = x / y
    else:
        found = tl.div_rn(x, y)
    return found
