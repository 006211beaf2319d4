"""The protocol between two workers: frames over one stream socket.

One of both connects, and they greet each other (``greeting``). After that both sides send frames in any order.
A frame is a header (``HEADER``) and a body of ``length`` bytes:

| kind | says | offset | size | body |
|---|---|---|---|---|
| OFFER | there is a message | - | its bytes | - |
| GRANT | the receiver accepts the message up to ``offset`` | bytes granted so far | bytes expected | - |
| DATA | a part of the message | where it starts | bytes of the message | the part |
| NOTE | a few bytes outside any message, never requested | - | its bytes | the bytes |
| BEAT | the sender lives, and is in this round | - | 1: answer with a BEAT; 2: it makes no rounds now | - |
| GOT, DROP | a vote on an exchange (``votes``) | - | - | - |
| ASK | vote on this exchange now: no more of its message will come | - | - | - |
| BYE | the sender leaves, and needs nothing more | - | - | - |

Headers have a checksum (CRC-32), and so have bodies that leave the machine (``checksum``). A frame that fails it breaks the
connection.

A message is identified by its ``Key``. A sender offers a message and waits for grants. A receiver grants bytes of the messages
that it was offered, the earliest exchange first, and never more than a window ahead. So a worker that is ahead does not fill
its peer's link with its next round. Messages of at most ``SMALL`` bytes are granted without an offer, because waiting for the
offer would take longer than the message. Either side closes the connection when a frame is wrong (``WireError``).
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

from decent_dp.errors import WireError
from decent_dp.transport.link import Key
from decent_dp.transport.messages import ACK, AGREEMENT, ASK, DROP, GOT, check_size
from decent_dp.transport.messages import BLOCKS as BLOCK

__all__ = [
    "ACK",
    "AGREEMENT",
    "ASK",
    "BEAT",
    "BLOCK",
    "BYE",
    "DATA",
    "DROP",
    "GOT",
    "GRANT",
    "HEADER_SIZE",
    "LARGEST_DATA",
    "LARGEST_NOTE",
    "NOTE",
    "OFFER",
    "SMALL",
    "VERSION",
    "DamagedError",
    "Frame",
    "Key",
    "check_size",
    "checksum",
    "pack",
    "unpack",
]

# kind, version, length of the body, epoch, round, bucket, slot, offset, size; in the first DATA after a GRANT, the microseconds
# since the grant came, and in a BEAT the milliseconds since the sender has heard from the receiver; the checksum of the body.
_FIELDS = struct.Struct("<HHIIqIIQQII")
# The checksum of the fields.
_CHECKSUM = struct.Struct("<I")
HEADER_SIZE = _FIELDS.size + _CHECKSUM.size
VERSION = 6
DATA, OFFER, GRANT, NOTE, BEAT, BYE = 1, 2, 3, 4, 5, 9

SMALL = 2**14
# The largest bodies that are accepted. A note has a byte per block of a bucket.
LARGEST_NOTE, LARGEST_DATA = 2**20, 2**21

# Words of 8 bytes in a row of ``checksum``: a prime, so that two parts of a body that have changed places are in other columns,
# whether powers of two lie between them or TCP's segments of 1,448 bytes (up to ``LARGEST_DATA``). Bodies of less than
# ``_SHORT`` bytes have a plain CRC-32: between the frames of a slow link NumPy's code leaves the processor's caches, and then
# takes 0.1 ms. A CRC-32 of at most 5 KiB keeps the interpreter lock.
_ROW, _SHORT, _KEEPS_LOCK = 1451, 2**18, 5 * 2**10


class DamagedError(WireError):
    """A frame does not have the checksum that it was sent with."""


class Frame(NamedTuple):
    """A header."""

    kind: int
    length: int
    epoch: int
    key: Key
    offset: int
    size: int
    age: int
    checksum: int


def pack(
    kind: int, key: Key, length: int = 0, offset: int = 0, size: int = 0, age: int = 0, *, epoch: int = 0, checksum: int = 0
) -> bytes:
    """A header. ``checksum``: that of the body; 0 for none."""
    fields = _FIELDS.pack(kind, VERSION, length, epoch, *key, offset, size, age, checksum)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def unpack(header: bytes | bytearray, peer: int) -> Frame:
    """The header that ``pack`` has made.

    Raises:
        WireError: it was damaged on the way, or is of another version.
    """
    kind, version, length, epoch, *key, offset, size, age, checksum = _FIELDS.unpack_from(header)
    if _CHECKSUM.unpack_from(header, _FIELDS.size)[0] != zlib.crc32(memoryview(header)[: _FIELDS.size]):
        raise DamagedError(f"a frame of worker {peer} was damaged on the way: its checksum is wrong")
    if version != VERSION or kind not in (DATA, OFFER, GRANT, NOTE, BEAT, GOT, DROP, ASK, BYE):
        raise WireError(
            f"worker {peer} sent a frame of kind {kind}, version {version}, where version {VERSION} was due. "
            "Start all workers from one installation."
        )
    largest = {DATA: LARGEST_DATA, NOTE: LARGEST_NOTE}.get(kind, 0)
    if length > largest:
        raise WireError(f"worker {peer} sent a frame of kind {kind} with a body of {length} bytes, where {largest} are allowed")
    return Frame(kind, length, epoch, tuple(key), offset, size, age, checksum)


def checksum(body: bytes | bytearray | memoryview) -> int:
    """The checksum of a body: its CRC-32; of a large one that of the sum of its rows of ``_ROW`` little-endian words, modulo
    2^64, and of its rest.

    This takes a fourth of the time of a CRC-32 of the whole (docs/fast-networks.md). Like that it detects any error within one
    word, and others but for one in 2^32. It misses errors of several words that cancel in the sum of a column.
    """
    if len(body) < _SHORT:
        return zlib.crc32(body)
    rows = len(body) // (8 * _ROW)
    words = np.frombuffer(body, dtype="<u8", count=_ROW * rows).reshape(rows, _ROW)
    total = np.add.reduce(words, axis=0)
    found = 0
    for part in (memoryview(total).cast("B"), memoryview(body)[8 * _ROW * rows :]):
        for start in range(0, len(part), _KEEPS_LOCK):
            found = zlib.crc32(part[start : start + _KEEPS_LOCK], found)
    return found
