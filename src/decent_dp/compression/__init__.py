"""How the values of a bucket become bytes on the wire: as they are, in bfloat16, or in int8.

A compression codes the values of a bucket into a message. From two messages alone it tells how far apart the two replicas are.
Only such differences are mixed in (``decent_dp.rules``). Both ends find the same difference with opposite signs, so the mean
over workers does not depend on the rounding.
"""

from __future__ import annotations

from decent_dp._checks import did_you_mean
from decent_dp.compression.base import Block, Chunk, Compression, FlatTensor, MessageId, all_finite, part_of
from decent_dp.compression.casts import BFloat16, Lossless
from decent_dp.compression.int8 import Int8

__all__ = [
    "COMPRESSIONS",
    "BFloat16",
    "Block",
    "Chunk",
    "Compression",
    "FlatTensor",
    "Int8",
    "Lossless",
    "MessageId",
    "all_finite",
    "check_compression",
    "part_of",
]

COMPRESSIONS: dict[str | None, type[Compression]] = {kind.name: kind for kind in (Lossless, BFloat16, Int8)}


def check_compression(compression: object) -> type[Compression]:
    """The class for ``compression``: None, 'bfloat16' or 'int8'.

    Raises:
        ValueError: there is no such compression.
    """
    if not (compression is None or (isinstance(compression, str) and compression in COMPRESSIONS)):
        names = [name for name in COMPRESSIONS if name is not None]
        # 'float32' and 'fp32' mean None, and would be taken for 'bfloat16'.
        hint = "" if str(compression).startswith("f") else did_you_mean(compression, names)
        raise ValueError(
            f"compression must be None (every dtype as it is), 'bfloat16' or 'int8', got {compression!r}{hint or '.'}"
        )
    return COMPRESSIONS[compression]
