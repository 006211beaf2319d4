"""The names of compressions, for code with and without torch."""

from __future__ import annotations

import re

from decent_dp._checks import did_you_mean

__all__ = ["CODES", "FEW_BITS", "bytes_per_number", "needs_pairs", "parse_compression"]

# Bytes of a float32 number on the wire.
CODES: dict[str | None, int] = {None: 4, "bfloat16": 2, "int8": 1}
# Bits of a number, relative to what the other worker knows.
FEW_BITS: dict[str, int] = {"4bit": 4, "2bit": 2, "1bit": 1}


def bytes_per_number(code: str | None) -> float:
    """Bytes of a float32 number on the wire, with its share of the scale of 512."""
    return FEW_BITS[code] / 8 + 2 / 512 if code is not None and code in FEW_BITS else CODES[code]


def needs_pairs(compression: str | None) -> bool:
    """Whether messages are relative to what two workers know of each other."""
    rank, code = parse_compression(compression)
    return rank is not None or code in FEW_BITS


def parse_compression(compression: object) -> tuple[int | None, str | None]:
    """Returns the rank of low-rank messages, or None for whole ones, and how numbers are coded: a key of ``CODES``, or for
    whole ones of ``FEW_BITS``.

    Raises:
        ValueError: there is no such compression.
    """
    names = [name for name in CODES if name is not None]
    if compression is None or (isinstance(compression, str) and compression in (*names, *FEW_BITS)):
        return None, compression
    text = compression if isinstance(compression, str) else ""
    found = re.fullmatch(r"low-rank:(\d+)(?:,(.+))?", text)
    if found is not None and int(found[1]) >= 1 and (found[2] is None or found[2] in names):
        return int(found[1]), found[2]
    if text.startswith("low-rank"):
        raise ValueError(
            "compression='low-rank:R' sends projections of rank R, at least 1, such as 'low-rank:4'; 'low-rank:4,int8' and "
            f"'low-rank:4,bfloat16' send them with fewer bytes. Got {compression!r}."
        )
    # 'float32' and 'fp32' mean None, and would be taken for 'bfloat16'.
    hint = "" if str(compression).startswith("f") else did_you_mean(compression, [*names, *FEW_BITS, "low-rank:4"])
    raise ValueError(
        "compression must be None (every dtype as it is), 'bfloat16', 'int8', '4bit', '2bit', '1bit' or 'low-rank:R' (such as "
        f"'low-rank:4,int8'), got {compression!r}{hint or '.'}"
    )
