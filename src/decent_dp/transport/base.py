"""The two seams between the wrapper and whatever moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decent_dp.bucket import Envelope
from decent_dp.topo import Edge

__all__ = ["Control", "Exchange", "Handle", "Label", "Later", "Transport"]


@dataclass(frozen=True)
class Label:
    """What a message is about. Both ends check it."""

    round: int
    bucket: int

    def __str__(self) -> str:
        return f"round {self.round}, bucket {self.bucket}"


class Handle(ABC):
    """Something under way.

    Attributes:
        bytes_sent: what this worker puts on the wire for it, in bytes.
    """

    bytes_sent: int = 0

    @abstractmethod
    def wait(self) -> None:
        """Blocks until it is there. Called once.

        Raises:
            PeerLostError, PeerTimeoutError: another worker is gone or silent; the message names its rank.
            WireError: what came is not what was due.
        """


class Later(Handle):
    """A handle whose wait is a call."""

    def __init__(self, finish: Callable[[], None], bytes_sent: int = 0) -> None:
        self._finish = finish
        self.bytes_sent = bytes_sent

    def wait(self) -> None:
        self._finish()


class Exchange(ABC):
    """Moves messages along the edges of a topology, beside the computation."""

    @abstractmethod
    def start(self, edge: Edge, sent: Envelope, received: Envelope, label: Label) -> Handle:
        """Begins the exchange of this worker with the others of ``edge`` (at least two ranks).

        After the handle's ``wait``, ``received.payload`` holds the mean of the *other* members' ``sent.payload``, and
        ``sent`` may be written again. Until then both belong to the transport. Every member starts its exchanges in the
        same order of (round, bucket), with payloads of one length and dtype.
        """


class Control(ABC):
    """Collectives of all workers, called by all in the same order."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Every worker's ``tensor`` (any dtype, dense or not) becomes that of rank 0."""

    @abstractmethod
    def gather(self, message: Any) -> list[Any]:
        """The messages (anything that JSON can hold) of all workers, by rank."""

    @abstractmethod
    def mean(self, tensor: Tensor) -> Handle:
        """``tensor`` (floating point, contiguous) becomes, after the handle's ``wait``, its mean over workers.

        Sums are taken in float32 at least.
        """


@dataclass
class Transport(ABC):
    """How the bytes of one wrapper move.

    Attributes:
        rank: this worker's, in the process group.
        world_size: how many workers there are.
    """

    rank: int
    world_size: int

    @property
    @abstractmethod
    def exchange(self) -> Exchange: ...

    @property
    @abstractmethod
    def control(self) -> Control: ...

    @abstractmethod
    def prepare(self, edges: list[Edge]) -> None:
        """Connects this worker along ``edges`` ahead of their first exchange; called by all workers together."""

    @abstractmethod
    def report(self, cause: str) -> None:
        """Leaves word of what went wrong here, for the others to quote if they lose this worker; '' takes it back."""

    @abstractmethod
    def close(self) -> None:
        """Gives connections and threads back. What is under way must have been waited for."""
