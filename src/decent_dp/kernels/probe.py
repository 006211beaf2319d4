"""Whether Triton works on a device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pieces import on_device

__all__ = ["probe"]


@triton.jit
def _add_one(values):
    tl.store(values + tl.program_id(0), tl.load(values + tl.program_id(0)) + 1)


def probe(device: torch.device) -> None:
    """Runs a tiny kernel.

    Raises:
        Exception: it does not compile, does not run, or computes something else.
    """
    values = torch.ones(2, dtype=torch.float32, device=device)
    with on_device(device):
        _add_one[(2,)](values)
    if values.tolist() != [2.0, 2.0]:
        raise RuntimeError(f"a kernel that adds 1 to 1 gives {values.tolist()}")
