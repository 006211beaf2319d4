"""Messages of exchanges on their way: what is sent, and what is received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from decent_dp.transport.messages import WHOLE, Key

__all__ = ["SMALL", "Message", "Priority", "Receiving", "Sending"]

# Messages of at most so many bytes are wanted as a whole at once: waiting would take longer than the message.
SMALL = 2**14
# The order in which messages are needed: by round, bucket and step of the exchange, then by when they were added.
Priority: TypeAlias = tuple[int, int, int, int]


@dataclass(eq=False)
class Message:
    """A message in one direction. ``done`` and ``failed`` are called in the transport's thread.

    Attributes:
        step: its place in the order of the messages of its exchange.
        granted: the bytes from its beginning that are wanted.
        offered: of one that is received: the peer is known to have it, or to be in the exchange; of one that is sent: the peer
            was told.
    """

    peer: int
    key: Key
    memory: memoryview
    done: Callable[[], None]
    failed: Callable[[BaseException], None]
    step: int = 0
    granted: int = 0
    offered: bool = False
    order: int = -1
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.memory)

    @property
    def priority(self) -> Priority:
        return *self.key[:2], self.step, self.order

    @property
    def is_mutual(self) -> bool:
        """Whether its key is that of two messages, one in each direction."""
        return self.key[2] == WHOLE


@dataclass(eq=False)
class Sending(Message):
    """A message on its way out.

    Attributes:
        ready: its first bytes that are final; may grow while it is being written.
        arrived: bytes that the peer says it has. ``sent``: those that were sent once, over any connection.
        lent: some of it was sent without a copy, over this connection.
    """

    ready: int = 0
    written: int = 0
    arrived: int = 0
    sent: int = 0
    lent: bool = False
    queued: bool = False

    @property
    def sendable(self) -> bool:
        return min(self.ready, self.granted) > self.written

    @property
    def is_lent(self) -> bool:
        """Whether libzmq may still read its memory, for a peer that waits for it."""
        return self.lent and self.written > self.arrived


@dataclass(eq=False)
class Receiving(Message):
    """A message that is expected.

    Attributes:
        sources: the number of peers whose messages of the same exchange share its link.
    """

    sources: int = 1
    received: int = 0
