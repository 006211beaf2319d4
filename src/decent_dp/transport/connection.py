"""What the links know of one peer: what goes to it, what comes from it, and the frames in between.

A frame is a header and a body. Data frames carry a part of a message, offers say that there is one, grants ask for a part of
it, notes carry a few bytes that nobody asked for, and a hello says who is there.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["DATA", "GRANT", "HEADER", "HELLO", "NOTE", "OFFER", "VERSION", "Connection", "Key", "Lane", "Receiving", "Sending"]

# (round, bucket, slot): what a message is. Slots number the messages of one exchange.
Key: TypeAlias = tuple[int, int, int]

# kind, version, length of what follows, round, bucket, slot, offset in the message, length of the message, and, of the first
# data after a grant, the microseconds since the grant came.
HEADER = struct.Struct("<HHIqIIQQI")
VERSION = 3
DATA, OFFER, GRANT, NOTE, HELLO = range(1, 6)


@dataclass(eq=False)
class Sending:
    """A message on its way out. ``ready`` may grow while it is being written; ``done`` is called in the links' thread."""

    peer: int
    key: Key
    data: memoryview
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    ready: int = 0
    granted: int = 0
    granted_at: float = 0.0
    written: int = 0
    order: int = -1
    queued: bool = False
    offered: bool = False

    @property
    def sendable(self) -> bool:
        return min(self.ready, self.granted) > self.written


@dataclass(eq=False)
class Receiving:
    """A message that is due. ``into`` gives its memory when its first bytes are asked for."""

    peer: int
    key: Key
    size: int
    into: Callable[[], memoryview]
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    granted: int = 0
    received: int = 0
    order: int = -1
    memory: memoryview | None = None


@dataclass(eq=False)
class Lane:
    """What shares a wire: its sendings in the order of need, and the receivings that were offered and still have to be
    asked for.

    Attributes:
        near: within a node, where nothing is scarce.
        outstanding: bytes asked for and not there yet.
        busy: a connection in the middle of a frame of data; nothing else of this lane may go before.
    """

    near: bool
    heap: list[tuple[int, Sending]] = field(default_factory=list)
    due: list[tuple[int, Receiving]] = field(default_factory=list)
    outstanding: int = 0
    busy: Connection | None = None


class Connection:
    """One peer: what goes to it, what comes from it. Used by the links' thread alone."""

    def __init__(self, peer: int, lane: Lane) -> None:
        self.peer, self.lane = peer, lane
        self.socket: socket.socket | None = None
        # Asked for and not there yet, in bytes; when (the first of) it was asked for; and what the link to the peer can do:
        # bytes a second, and seconds from a grant to its first bytes.
        self.outstanding = 0
        self.asked: float | None = None
        self.latency = 0.0
        self.rate = 0.0
        self.spell = 0.0
        self.came = 0
        self.low_water = 1  # bytes that have to be there before the socket counts as readable
        self.lost: str | None = None
        self.mute = False  # the peer takes nothing any more; what it has sent may still be read
        self.writing = False  # registered for it
        # Frames that go before any data, and what is left of the one being written.
        self.control: deque[bytes] = deque()
        self.out: list[memoryview] = []
        self.current: tuple[Sending, int] | None = None
        self.sendings: dict[Key, Sending] = {}
        self.receivings: dict[Key, Receiving] = {}
        self.early_grants: dict[Key, tuple[int, int]] = {}
        self.early_offers: set[Key] = set()
        # What is being read.
        self.header = bytearray(HEADER.size)
        self.have = 0
        self.frame: tuple[int, Key, int, int] | None = None
        self.body: memoryview | None = None
        self.filled = 0
