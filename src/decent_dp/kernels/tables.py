"""Tables on the device that tell one launch about many tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DEVICES", "DTYPES", "aligned", "numbers", "table", "tiles", "usable"]

# The tests of the kernels on Triton's interpreter add the CPU.
DEVICES = {"cuda"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.cache
def usable(device: torch.device) -> bool:
    """Whether kernels in Triton run on this device; tries it once. Triton needs a C compiler, and a GPU that it knows."""
    if device.type not in DEVICES or torch.version.hip is not None:
        return False
    try:
        from .probe import probe
    except ImportError:  # Triton comes with torch's builds for CUDA, and can be missing with others
        return False
    try:
        probe(device)
    except Exception as error:  # of the compiler, the driver or the device: torch's own kernels run instead
        reason = " ".join(str(error).split("\n", 2)[:2])
        warnings.warn(
            f"Triton does not work on {device}, so that exchanges and optimizers take longer: {reason}", RuntimeWarning, 2
        )
        return False
    return True


def table(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """The integers as an int64 tensor on the device, for kernels on its current stream.

    Optimizers ask in every step for the same addresses, so that the copy is rarely made. What a cached table says about
    memory depends on its key alone.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64, device=device)
    return _on_gpu(device, torch.cuda.current_stream(device).cuda_stream, values)


# Wrappers with an optimizer for each of many buckets ask for as many tables.
@functools.lru_cache(maxsize=256)
def _on_gpu(device: torch.device, _stream: int, values: tuple[int, ...]) -> Tensor:
    # From pinned memory, so that the host does not wait. Only kernels that follow the copy on its stream may read the table.
    return torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=True).to(device, non_blocking=True)


@functools.lru_cache(maxsize=256)
def tiles(counts: tuple[int, ...]) -> tuple[int, ...]:
    """(row, number of the tile in the row) of each tile, one pair after another, where row i has ``counts[i]`` tiles."""
    return tuple(number for row, count in enumerate(counts) for i in range(count) for number in (row, i))


def numbers(device: torch.device, values: Sequence[float]) -> Tensor:
    """Plain numbers as float64 on the device: Triton passes arguments as float32."""
    on_gpu = device.type == "cuda"
    found = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
    return found.to(device, non_blocking=on_gpu)


def aligned(addresses: Sequence[int]) -> bool:
    """Whether vectors of 16 bytes can be read from all of them."""
    merged = 0
    for address in addresses:
        merged |= address
    return merged % 16 == 0
