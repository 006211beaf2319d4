"""Tables on the device that tell one launch about many tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["DEVICES", "DTYPES", "numbers", "refuse_capture", "table", "tiles", "usable"]

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
    except ImportError as error:  # Triton comes with torch's builds for CUDA
        _warn(device, error)
        return False
    try:
        probe(device)
    except Exception as error:  # of the compiler, the driver or the device: torch's own kernels run instead
        _warn(device, error)
        return False
    return True


def _warn(device: torch.device, error: Exception) -> None:
    reason = " ".join(str(error).split("\n", 2)[:2])
    warnings.warn(
        f"Triton does not work on {device}, so that exchanges and optimizers take longer: {reason}", RuntimeWarning, 3
    )


def refuse_capture(what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured: it would replay the numbers and addresses of this step."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and the step of {what} cannot be part of it, as each step has other numbers: "
            "capture the forward and the backward alone (torch.cuda.make_graphed_callables)."
        )


def table(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """The integers as an int64 tensor on the device, for kernels on its current stream.

    Optimizers ask in every step for the same addresses, so that the copy is rarely made. What a cached table says about
    memory depends on its key alone.
    """
    return _table(device, _stream(device), values)


def tiles(device: torch.device, counts: tuple[int, ...]) -> Tensor:
    """(row, number of the tile in the row) of each tile, where row i has ``counts[i]`` tiles: int64, of shape (tiles, 2).

    Like ``table``, and asked for by the short counts: there are many tiles.
    """
    return _tiles(device, _stream(device), counts)


# Wrappers with an optimizer for each of many buckets ask for as many tables.
@functools.lru_cache(maxsize=256)
def _table(device: torch.device, _: int, values: tuple[int, ...]) -> Tensor:
    return _moved(torch.tensor(values, dtype=torch.int64, device="cpu"), device)


@functools.lru_cache(maxsize=256)
def _tiles(device: torch.device, _: int, counts: tuple[int, ...]) -> Tensor:
    numbers = torch.tensor(counts, dtype=torch.int64, device="cpu")
    rows = torch.repeat_interleave(numbers)
    firsts = numbers.cumsum(0) - numbers
    return _moved(torch.stack([rows, torch.arange(len(rows), dtype=torch.int64, device="cpu") - firsts[rows]], dim=1), device)


def _stream(device: torch.device) -> int:
    # Only kernels that follow the copy on its stream may read a table.
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _moved(values: Tensor, device: torch.device) -> Tensor:
    # From pinned memory, so that the host does not wait.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def numbers(device: torch.device, values: Sequence[float]) -> Tensor:
    """Plain numbers as float64 on the device: Triton passes arguments as float32."""
    on_gpu = device.type == "cuda"
    found = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=on_gpu)
    return found.to(device, non_blocking=on_gpu)
