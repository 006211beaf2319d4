"""Tensors of many parameters that are updated together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Row", "label_of", "refuse_capture", "refuse_sparse", "split_rows"]

# A parameter of one update, or a part of it: the parameter, its gradient, and tensors of its state.
Row: TypeAlias = "tuple[Tensor, ...]"

# Elements that are updated together on the CPU: five to seven tensors of them stay in a cache of some MiB. With tracking an
# update of GossipAdamW takes 17.7 ms with 128 K, 19.1 with 256 K, and 20.5 with 32 K.
_BLOCK = 128 * 1024

_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may keep its values elsewhere


def refuse_capture(what: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured: it would replay the numbers and addresses of this step."""
    if not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured, and the step of {what} cannot be part of it, as each step has other numbers: "
            "capture the forward and the backward alone (torch.cuda.make_graphed_callables)."
        )


def label_of(group: dict[str, Any], i: int) -> str:
    """The i-th parameter of a group in an error message."""
    name = f"{group['param_names'][i]!r}, " if "param_names" in group else ""
    return f"parameter {i} ({name}shape {tuple(group['params'][i].shape)})"


def refuse_sparse(optimizer: Optimizer, what: str) -> None:
    """Raises RuntimeError if a gradient is sparse."""
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{what} does not support sparse gradients, but {label_of(group, i)} has one ({param.grad.layout}): make "
                    "it dense (nn.Embedding(..., sparse=False)) or use torch.optim.SparseAdam"
                )


def split_rows(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of one device in parts that are updated together: on the CPU blocks that stay in its cache, elsewhere all.

    Where a row is cut depends on its own length alone: torch rounds the last, incomplete vector of a tensor a little
    differently.
    """
    if not rows:
        return
    if rows[0][0].device.type != "cpu" or torch.compiler.is_compiling():
        yield list(rows)
        return
    flat = [_flat(row) for row in rows]
    block: list[Row] = []
    room = _BLOCK
    for row in sorted((row for row in flat if row is not None), key=lambda row: row[0].numel()):  # small rows share blocks
        for part in zip(*(torch.split(tensor, _BLOCK) for tensor in row), strict=True) if row[0].numel() > _BLOCK else (row,):
            if part[0].numel() > room:
                yield block
                block, room = [], _BLOCK
            block.append(part)
            room -= part[0].numel()
    if block:
        yield block
    if rest := [row for row, found in zip(rows, flat, strict=True) if found is None]:
        yield rest


def _flat(row: Row) -> Row | None:
    """The row as 1-D views in one common order of memory; None if there is none."""
    param, grad, *_ = row
    if type(param) not in _PLAIN or type(grad) not in _PLAIN or any(tensor.shape != param.shape for tensor in row):
        return None
    strides = param.stride()
    order = sorted(range(param.ndim), key=lambda axis: -strides[axis])
    permuted = [tensor.permute(order) for tensor in row]
    return tuple(tensor.view(-1) for tensor in permuted) if all(tensor.is_contiguous() for tensor in permuted) else None
