"""The protocol between two workers: frames over one stream socket.

The worker of higher rank connects, and both greet each other (``greeting``). After that both sides send frames in any order.
A frame is a header (``HEADER``) and a body of ``length`` bytes:

| kind | says | offset | size | body |
|---|---|---|---|---|
| OFFER | there is a message | - | its bytes | - |
| GRANT | the receiver accepts the message up to ``offset`` | bytes granted so far | bytes expected | - |
| DATA | a part of the message | where it starts | bytes of the message | the part |
| NOTE | a few bytes outside any message, never requested | - | its bytes | the bytes |

A message is identified by its ``Key``. A sender offers a message and waits for grants. A receiver grants bytes of the messages
that it was offered, the earliest exchange first, and never more than a window ahead. So a worker that is ahead does not fill
its peer's link with its next round. Messages of at most ``SMALL`` bytes are granted without an offer, because waiting for the
offer would take longer than the message. Either side closes the connection when a frame is wrong (``WireError``). There is no
frame for the end: closing the connection is the end.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from decent_dp.errors import WireError

__all__ = [
    "DATA",
    "GRANT",
    "HEADER",
    "NOTE",
    "OFFER",
    "SMALL",
    "VERSION",
    "Key",
    "check_size",
    "pack",
]

# (round, bucket, slot): what a message is. Slots number the messages of one exchange.
Key: TypeAlias = tuple[int, int, int]

# kind, version, length of the body, round, bucket, slot, offset, size and, in the first DATA after a GRANT, the microseconds
# since the grant came.
HEADER = struct.Struct("<HHIqIIQQI")
VERSION = 4
DATA, OFFER, GRANT, NOTE = range(1, 5)

SMALL = 2**14


def pack(kind: int, key: Key, length: int = 0, offset: int = 0, size: int = 0, age: int = 0) -> bytes:
    """A header."""
    return HEADER.pack(kind, VERSION, length, *key, offset, size, age)


def check_size(rank: int, peer: int, key: Key, theirs: int, ours: int) -> None:
    """Raises WireError when a message of ``peer`` has another size than the expected one."""
    if theirs != ours:
        raise WireError(
            f"round {key[0]}, bucket {key[1]}: worker {peer} has a message of {theirs} bytes where worker {rank} has one of "
            f"{ours}. The workers run different versions or have got out of step; start them together from one installation."
        )
