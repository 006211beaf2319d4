"""What goes on the wire: lossless, bfloat16, int8.

A wire codes the values of a bucket into a message and says, from two messages alone, how far apart the two replicas are.
Only such differences are mixed in (``decent_dp.rules``), and both ends find the same with opposite signs, so the mean over
workers stays whatever the rounding.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from decent_dp.wire.base import Hints, Item, Moment, Piece, Run, Wire, all_finite, part_of
from decent_dp.wire.modulo import Int8
from decent_dp.wire.plain import BFloat16, Lossless

__all__ = [
    "WIRES",
    "BFloat16",
    "Hints",
    "Int8",
    "Item",
    "Lossless",
    "Moment",
    "Piece",
    "Run",
    "Wire",
    "all_finite",
    "check_compression",
    "check_wire",
    "part_of",
]

WIRES: dict[str, type[Wire]] = {wire.name: wire for wire in (Lossless, BFloat16, Int8)}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_wire(name: object, tensors: Iterable[tuple[str, torch.dtype]]) -> type[Wire]:
    """The wire called ``name``, for parameters of these names and dtypes.

    Raises:
        ValueError: there is no such wire.
        TypeError: a parameter's dtype is nothing that can be mixed.
    """
    if not isinstance(name, str) or name not in WIRES:
        close = difflib.get_close_matches(str(name), WIRES, n=1, cutoff=0.4)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"wire must be one of {', '.join(map(repr, WIRES))}, got {name!r}.{hint}")
    for parameter, dtype in tensors:
        if dtype not in _FLOATS:
            raise TypeError(
                f"wire={name!r} cannot carry parameter '{parameter}' of {dtype}: trained parameters must be real floating "
                "point (float16, bfloat16, float32 or float64)."
            )
    return WIRES[name]


def check_compression(compression: object, tensors: Iterable[tuple[str, torch.dtype]]) -> str:
    """The name of the wire for a ``compression``: None, 'bfloat16' or 'int8'.

    Raises:
        ValueError: there is no such compression.
        TypeError: a parameter's dtype is nothing that can be mixed.
    """
    names = [name for name in WIRES if name != Lossless.name]
    if compression is not None and compression not in names:
        close = difflib.get_close_matches(str(compression), names, n=1, cutoff=0.4)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"compression must be None (every dtype as it is), 'bfloat16' or 'int8', got {compression!r}.{hint}")
    return check_wire(Lossless.name if compression is None else compression, tensors).name
