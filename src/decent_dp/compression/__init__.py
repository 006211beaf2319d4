"""How the values of a bucket become bytes on the wire: as they are, in bfloat16, in int8, or as low-rank projections.

A compression codes the values of a bucket into a message. From two messages alone it tells how far apart the two replicas are.
Only such differences are mixed in (``decent_dp.rules``). Both ends find the same difference with opposite signs, so the mean
over workers does not depend on the rounding.
"""

from __future__ import annotations

import re

from decent_dp._checks import did_you_mean
from decent_dp.compression.base import Block, Chunk, Compression, FlatTensor, MessageId, all_finite, part_of
from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.casts import BFloat16, Lossless
from decent_dp.compression.int8 import Int8
from decent_dp.compression.low_rank import LowRank, low_rank

__all__ = [
    "COMPRESSIONS",
    "BFloat16",
    "Block",
    "Chunk",
    "Compression",
    "FlatTensor",
    "Int8",
    "Lossless",
    "LowRank",
    "MessageId",
    "all_finite",
    "check_compression",
    "part_of",
]

COMPRESSIONS: dict[str | None, type[Blockwise]] = {kind.name: kind for kind in (Lossless, BFloat16, Int8)}


def check_compression(compression: object) -> type[Compression]:
    """The class for ``compression``: None, 'bfloat16', 'int8', or 'low-rank:R', perhaps with one of the others behind a comma.

    Raises:
        ValueError: there is no such compression.
    """
    names = [name for name in COMPRESSIONS if name is not None]
    text = compression if isinstance(compression, str) else None
    if compression is None or text in names:
        return COMPRESSIONS[text]
    if text is not None and (found := re.fullmatch(r"low-rank:(\d+)(?:,(.+))?", text)) is not None:
        rank, inner = int(found[1]), found[2]
        if rank >= 1 and (inner is None or inner in names):
            return low_rank(rank, COMPRESSIONS[inner])
    if text is not None and text.startswith("low-rank"):
        raise ValueError(
            "compression='low-rank:R' sends projections of rank R, at least 1, such as 'low-rank:4'; 'low-rank:4,int8' and "
            f"'low-rank:4,bfloat16' send them with fewer bytes. Got {compression!r}."
        )
    # 'float32' and 'fp32' mean None, and would be taken for 'bfloat16'.
    hint = "" if str(compression).startswith("f") else did_you_mean(compression, [*names, "low-rank:4"])
    raise ValueError(
        "compression must be None (every dtype as it is), 'bfloat16', 'int8' or 'low-rank:R' (such as 'low-rank:4,int8'), got "
        f"{compression!r}{hint or '.'}"
    )
