"""How the values of a bucket become bytes on the wire: as they are, in bfloat16, in int8, or as low-rank projections.

A compression codes the values of a bucket into a message. From two messages alone it tells how far apart the two replicas are.
Only such differences are mixed in (``decent_dp.rules``). Both ends find the same difference with opposite signs, so the mean
over workers does not depend on the rounding.
"""

from __future__ import annotations

from decent_dp._compressions import parse_compression
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
    "flag_of",
    "flag_view",
    "for_momentum",
    "part_of",
]

COMPRESSIONS: dict[str | None, type[Blockwise]] = {kind.name: kind for kind in (Lossless, BFloat16, Int8)}


def check_compression(compression: object) -> type[Compression]:
    """The class for ``compression``: None, 'bfloat16', 'int8', or 'low-rank:R', perhaps with one of the others behind a comma.

    Raises:
        ValueError: there is no such compression.
    """
    rank, code = parse_compression(compression)
    return COMPRESSIONS[code] if rank is None else low_rank(rank, COMPRESSIONS[code])


def for_momentum(compression: type[Compression]) -> type[Compression]:
    """Returns the compression of tracked momenta, given that of the parameters: 'int8' if that is low-rank, else the same.

    Between two mixes a momentum changes in all directions, of which a projection would take a few.
    """
    return Int8 if issubclass(compression, LowRank) else compression
