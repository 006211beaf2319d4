"""How the values of a bucket become bytes on the wire: as they are, in bfloat16, or in int8.

A compression codes the values of a bucket into a message. From two messages alone it tells how far apart the two replicas are.
Only such differences are mixed in (``decent_dp.rules``). Both ends find the same difference with opposite signs, so the mean
over workers does not depend on the rounding.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from decent_dp.compression.base import Block, Chunk, Compression, FlatTensor, Hints, MessageId, all_finite, part_of
from decent_dp.compression.casts import BFloat16, Lossless
from decent_dp.compression.int8 import Int8

__all__ = [
    "COMPRESSIONS",
    "BFloat16",
    "Block",
    "Chunk",
    "Compression",
    "FlatTensor",
    "Hints",
    "Int8",
    "Lossless",
    "MessageId",
    "all_finite",
    "check_compression",
    "part_of",
]

COMPRESSIONS: dict[str | None, type[Compression]] = {kind.name: kind for kind in (Lossless, BFloat16, Int8)}

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_compression(compression: object, tensors: Iterable[tuple[str, torch.dtype]]) -> type[Compression]:
    """The class for ``compression``: None, 'bfloat16' or 'int8'.

    Args:
        tensors: names and dtypes of the parameters.

    Raises:
        ValueError: there is no such compression.
        TypeError: the dtype of a parameter cannot be mixed.
    """
    if not (compression is None or (isinstance(compression, str) and compression in COMPRESSIONS)):
        names = [name for name in COMPRESSIONS if name is not None]
        text = str(compression)
        # 'float32' and 'fp32' mean None, and would be taken for 'bfloat16'.
        close = [] if text.startswith("f") else difflib.get_close_matches(text, names, n=1, cutoff=0.4)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"compression must be None (every dtype as it is), 'bfloat16' or 'int8', got {compression!r}.{hint}")
    for name, dtype in tensors:
        if dtype not in _FLOATS:
            raise TypeError(
                f"parameter '{name}' of {dtype} cannot be mixed: trained parameters must be real floating point (float16, "
                "bfloat16, float32 or float64)."
            )
    return COMPRESSIONS[compression]
