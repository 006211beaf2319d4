"""The interface: the values of a bucket become a message, and two messages give the difference of two replicas.

A message ends with a flag that says whether all its values are finite: 0, or 1 + the rank of a worker with a NaN or an
infinity. The mean of a group has the largest flag of all members, so that all of them see it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = [
    "FLAG",
    "Block",
    "Chunk",
    "Compression",
    "FlatTensor",
    "MessageId",
    "all_finite",
    "flag_of",
    "flag_view",
    "part_of",
]

# Bytes of the flag at the end of a message, an int64.
FLAG = 8


@dataclass(frozen=True)
class FlatTensor:
    """A flat tensor of a bucket: one parameter, or all of them where they lie one after another.

    Attributes:
        index: the parameter's number in the model, which seeds its rounding; not used if it stands for all of them.
        numel: its number of elements.
        rows: of the matrix that these elements are, row after row; 1 for all that is no matrix.
    """

    index: int
    numel: int
    rows: int = 1

    @property
    def columns(self) -> int:
        return self.numel // self.rows


@dataclass(frozen=True)
class Block:
    """Elements ``[start, stop)`` of a flat tensor, coded together; ``at`` and ``record`` are byte offsets in the message."""

    tensor: int
    start: int
    stop: int
    at: int
    record: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Bytes ``[start, stop)`` of a message: blocks that can be reduced before the rest has come."""

    start: int
    stop: int
    blocks: tuple[Block, ...]
    has_flag: bool = False

    @property
    def payload(self) -> int:
        """Its bytes without the flag."""
        return self.stop - self.start - (FLAG if self.has_flag else 0)


@dataclass(frozen=True)
class MessageId:
    """Identifies a message; round and rank seed its rounding.

    Attributes:
        round: of the exchange.
        rank: of the worker that codes; negative for the mean of a group.
    """

    round: int
    rank: int


def part_of(values: Tensor, block: Block) -> Tensor:
    """The elements of ``block``, of the values of its flat tensor."""
    # A slice costs a microsecond, and most tensors of most models are one block.
    return values if block.stop - block.start == len(values) else values[block.start : block.stop]


def all_finite(values: Tensor) -> bool | Tensor:
    """Whether a tensor has neither NaN nor infinity; on a GPU as a tensor, without waiting for it."""
    if values.device.type != "cpu":
        return values.isfinite().all()
    # One pass: the sum contains any NaN or infinity (docs/lab/log.md, 2026-11-22). Finite values may overflow it, and are then
    # checked one by one.
    total: Any = values.sum().tolist()  # unlike item(), it keeps the interpreter lock
    return math.isfinite(total) or bool(values.isfinite().all())


def flag_view(message: Tensor) -> Tensor:
    """The flag as a part of a message, or of its last chunk: int64, of shape (1,)."""
    return message[-FLAG:].view(torch.int64)


def flag_of(message: Tensor) -> int:
    """0 if all values of a message are finite, else 1 + the rank of a worker that has others. Waits for a GPU."""
    return int(flag_view(message)) if len(message) else 0


class Compression(ABC):
    """Codes the values of one bucket. Messages are uint8 tensors of ``nbytes``, on the bucket's device.

    One exchange at a time: ``begin``, ``encode``, perhaps ``reduce``, then ``differences``.

    Args:
        tensors: the flat tensors of the bucket.
        dtype, device: of the tensors.

    Attributes:
        name: as users pass it.
        by_parameter: every parameter must be a flat tensor of its own.
        needs_hints: a worker must know the ``hint`` of all members of the edge before it can encode.
        pairs_only: edges of more than two workers are refused.
        partial: differences are a part of the true ones, and the rest stays in the replicas.
        nbytes: the length of a message of this exchange, the same on all workers.
        most_nbytes: the length of the longest message.
        chunks: the parts of a message that can be reduced on their own.
        hint_nbytes: the length of a hint.
        rejected: blocks whose difference could not be determined, so far.
    """

    name: ClassVar[str | None]
    by_parameter: ClassVar[bool] = False
    needs_hints: ClassVar[bool] = False
    pairs_only: ClassVar[bool] = False
    partial: ClassVar[bool] = False

    nbytes: int
    most_nbytes: int
    chunks: tuple[Chunk, ...]
    hint_nbytes: int

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = tuple(tensors)
        self.dtype, self.device = dtype, device
        # For arithmetic: the tensors' dtype, but at least float32.
        self.compute = torch.promote_types(dtype, torch.float32)
        self.rejected = 0

    def begin(self, edge: tuple[int, ...], rank: int, meeting: int) -> None:
        """Announces the next exchange.

        Args:
            edge: the ranks that take part, sorted.
            rank: this worker's.
            meeting: how often this edge has met before (``Topology.meetings``).
        """
        return

    @abstractmethod
    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        """Writes a message, front to back.

        Args:
            values: one 1-D tensor for each of ``tensors``.
            out: the message, to be written.
            hints: of all members of the edge, this worker included, where they are needed.

        Yields:
            How many bytes of ``out`` are final.
        """

    def reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        """Writes one chunk of the message of a group's mean; not called where ``pairs_only``.

        Args:
            messages: the bytes of ``chunk``, as single workers or parts of the group sent them.
            sizes: the number of workers in each of them.
            out: as long as each of them; may be one of them.
            message_id: with a negative rank; the same on any worker that reduces this chunk at this stage.
        """
        raise AssertionError("groups of more than two are refused at construction")

    def arrive(self, sent: Tensor, received: Tensor) -> None:
        """Both messages are there, on the current stream of a GPU, and ``differences`` or ``mix`` will be called: begins what
        these would wait for. The call may be left out."""
        return

    @abstractmethod
    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        """The received message minus the sent one, both finite, block by block.

        Yields:
            The block; its difference, a 1-D tensor of the dtype ``compute`` that is valid until the next one and may be
            written to, or None if it cannot be determined; and the factor of the difference.
        """

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        """Adds ``rate`` times the difference of two messages, both finite, to ``values`` (one 1-D tensor for each of
        ``tensors``). Products and sums are rounded one after the other, so that the numbers do not depend on how they are made.
        """
        for block, difference, unit in self.differences(sent, received):
            if difference is not None and rate:  # a rate of zero must not turn a neighbour's infinity into NaN (0 · inf)
                part_of(values[block.tensor], block).add_(difference.mul_(rate * unit))

    @abstractmethod
    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """The values that ``sent`` represents, block by block, given the present values."""

    def hint(self, values: Sequence[Tensor]) -> bytes:
        """Returns what the members of the next edge must know; empty if they need nothing."""
        return b""

    def stuck(self, rounds: int) -> list[int]:
        """The numbers of the tensors with a block that was rejected in each of the last ``rounds`` exchanges, or more."""
        return []

    # -- saving and resuming ---------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Tensor]]:
        """What an exchange leaves for later ones, for each flat tensor; it does not depend on the other tensors.

        The tensors may be live. Those of a single edge have keys that name it.
        """
        return [{} for _ in self.tensors]

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        """Resumes from what ``state`` returned. What is missing, or of another compression, starts as in a new run.

        An entry 'known' has the present values of a tensor, which are probably the same on all workers: at the start, and of
        tensors that were loaded. Without other entries they take the place of what was known of these tensors.
        """
        return

    @abstractmethod
    def first_nonfinite(self, message: Tensor) -> tuple[int, int] | None:
        """Flat tensor and element of the first value of a message that is not finite; None if all are."""
