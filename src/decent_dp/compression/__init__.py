"""How the values of a bucket become bytes on the wire: as they are, in bfloat16, in int8, in a few bits, or projected.

A compression codes the values of a bucket into a message. From two messages alone it tells how far apart the two replicas are.
Only such differences are mixed in (``decent_dp.rules``). Both ends find the same difference with opposite signs, so the mean
over workers does not depend on the rounding.
"""

from __future__ import annotations

from decent_dp._compressions import FEW_BITS, parse_compression
from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.casts import BFloat16, Lossless
from decent_dp.compression.codec import (
    Block,
    Chunk,
    Compression,
    FlatTensor,
    MessageId,
    all_finite,
    flag_of,
    flag_view,
    part_of,
)
from decent_dp.compression.few_bits import FewBits, few_bits
from decent_dp.compression.int8 import Int8
from decent_dp.compression.low_rank import LowRank, low_rank

__all__ = [
    "COMPRESSIONS",
    "BFloat16",
    "Block",
    "Chunk",
    "Compression",
    "FewBits",
    "FlatTensor",
    "Int8",
    "Lossless",
    "LowRank",
    "MessageId",
    "all_finite",
    "check_compression",
    "flag_of",
    "flag_view",
    "for_momentum",
    "part_of",
]

COMPRESSIONS: dict[str | None, type[Blockwise]] = {kind.name: kind for kind in (Lossless, BFloat16, Int8)}


def check_compression(compression: object) -> type[Compression]:
    """The class for ``compression``: None, 'bfloat16', 'int8', '4bit', '2bit', '1bit', or 'low-rank:R', perhaps with one of the
    first three behind a comma.

    Raises:
        ValueError: there is no such compression.
    """
    rank, code = parse_compression(compression)
    if code is not None and code in FEW_BITS:
        return few_bits(FEW_BITS[code])
    return COMPRESSIONS[code] if rank is None else low_rank(rank, COMPRESSIONS[code])


def for_momentum(compression: type[Compression]) -> type[Compression]:
    """Returns the compression of tracked momenta, given that of the parameters: 'int8' if that leaves a part of the differences
    in the replicas, else the same.

    Between two mixes a momentum changes in all directions, by about its own size.
    """
    return Int8 if compression.partial else compression
