"""The launch of a kernel in Triton that updates many parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .pieces import TYPES, on_device
from .tables import numbers, table, tiles

__all__ = ["launch"]


def launch(
    kernel: Any, rows: Sequence[tuple[Tensor, ...]], values: Sequence[float], *options: bool, block: int, warps: int
) -> None:
    """Runs a kernel on rows of a parameter, its gradient and three tensors of its state: a program for ``block`` elements.

    The kernel gets a table of the rows (five addresses and the number of elements), the tiles, the values as float64 on the
    device if parameters are float64, the values, the dtypes of parameter, gradient and state, whether all addresses are
    multiples of 16, the options, and ``block``.
    """
    alike: dict[tuple[torch.dtype, torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = {}
    for param, grad, first, second, third in rows:
        a, b, c, d, e = param.data_ptr(), grad.data_ptr(), first.data_ptr(), second.data_ptr(), third.data_ptr()
        key = param.dtype, grad.dtype, first.dtype, (a | b | c | d | e) % 16 == 0  # all aligned
        if key not in alike:
            alike[key] = []
        alike[key].append((a, b, c, d, e, param.numel()))
    device = rows[0][0].device
    with on_device(device):
        for (of_param, of_grad, of_state, vectors), entries in alike.items():
            counts = tuple([-(-entry[-1] // block) for entry in entries])
            if not sum(counts):
                continue
            whole = table(device, tuple(chain.from_iterable(entries)))
            kernel[(sum(counts),)](
                whole,
                tiles(device, counts),
                numbers(device, values) if of_param == torch.float64 else whole,
                *map(float, values),  # for whole numbers Triton would compile anew
                TYPES[of_param],
                TYPES[of_grad],
                TYPES[of_state],
                vectors,
                *options,
                block,
                num_warps=warps,
            )
