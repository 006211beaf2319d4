"""The interface: the values of a bucket become a message, and two messages give the difference of two replicas.

A message ends with a flag that says whether all its values are finite: 0, or 1 + the rank of a worker with a NaN or an
infinity. The mean of a group has the largest flag of all members, so that all of them see it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Block", "Chunk", "Compression", "FlatTensor", "MessageId", "all_finite", "part_of"]

# Elements of a block: on a CPU few enough for the temporaries to stay in its cache, on a GPU enough for a kernel to be worth
# its launch.
_BLOCK_ON_CPU = 2**16
_BLOCK_ON_GPU = 2**22

# Chunks start at multiples of this, so that any dtype can be read in them.
_ALIGNMENT = 8

# Bytes of the flag at the end of a message, an int64.
_FLAG = 8


@dataclass(frozen=True)
class FlatTensor:
    """A flat tensor of a bucket: one parameter, or all of them where they lie one after another.

    Attributes:
        index: the parameter's number in the model, which seeds its rounding; not used if it stands for all of them.
        numel: its number of elements.
    """

    index: int
    numel: int


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


@dataclass(frozen=True)
class MessageId:
    """Identifies a message; round and rank seed its rounding.

    Attributes:
        round: of the exchange.
        rank: of the worker that codes; negative for the mean of a group.
        edge: the members of the edge, under which a compression keeps a state for each edge.
    """

    round: int
    rank: int
    edge: tuple[int, ...] = ()


def part_of(values: Tensor, block: Block) -> Tensor:
    """The elements of ``block``, of the values of its flat tensor."""
    # A slice costs a microsecond, and most tensors of most models are one block.
    return values if block.stop - block.start == len(values) else values[block.start : block.stop]


def all_finite(values: Tensor) -> bool | Tensor:
    """Whether a tensor has neither NaN nor infinity; on a GPU as a tensor, without waiting for it."""
    if values.device.type != "cpu":
        return values.isfinite().all()
    # One pass: the sum contains any NaN or infinity (docs/log.md, 2026-11-22). Finite values may overflow it, and are then
    # checked one by one.
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


class Compression(ABC):
    """Codes the values of one bucket. Messages are uint8 tensors of ``nbytes``, on the bucket's device.

    One exchange at a time: ``encode``, perhaps ``reduce``, then ``differences``.

    Args:
        tensors: the flat tensors of the bucket.
        dtype, device: of the tensors.

    Attributes:
        name: as users pass it.
        by_parameter: every parameter must be a flat tensor of its own.
        needs_hints: a worker must know the ``hint`` of all members of the edge before it can encode.
        nbytes: the length of a message, the same on all workers.
        chunks: the parts of a message that can be reduced on their own.
        rejected: blocks whose difference could not be determined, so far.
    """

    name: ClassVar[str | None]
    by_parameter: ClassVar[bool] = False
    needs_hints: ClassVar[bool] = False
    # Bytes of the record of each block, in front of the codes.
    _record: ClassVar[int] = 0

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = tuple(tensors)
        self.rejected = 0
        self.dtype, self.device = dtype, device
        # For arithmetic: the tensors' dtype, but at least float32.
        self.compute = torch.promote_types(dtype, torch.float32)
        self.block_elements = _BLOCK_ON_CPU if device.type == "cpu" or self._record else _BLOCK_ON_GPU
        self.chunks = self._lay_out()
        self.nbytes = self.chunks[-1].stop if self.chunks else 0

    @property
    @abstractmethod
    def code(self) -> torch.dtype:
        """The dtype in which values are sent."""

    @property
    def _itemsize(self) -> int:
        return self.code.itemsize

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        """Writes a message, front to back.

        Args:
            values: one 1-D tensor for each of ``tensors``.
            out: the message, to be written.
            hints: of all members of the edge, this worker included, where they are needed.

        Yields:
            How many bytes of ``out`` are final.
        """
        finite: bool | Tensor = True
        for chunk, found in zip(self.chunks, self._encode(values, out, message_id, hints), strict=True):
            finite = finite & found
            if chunk is self.chunks[-1]:
                self._mark(out, finite, message_id.rank)
            yield chunk.stop

    @abstractmethod
    def _encode(
        self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]
    ) -> Iterator[bool | Tensor]:
        """Encodes chunk by chunk, without the flag; yields whether all values of the chunk are finite."""

    def reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        """Writes one chunk of the message of a group's mean.

        Args:
            messages: the bytes of ``chunk``, as single workers or parts of the group sent them.
            sizes: the number of workers in each of them.
            out: as long as each of them; may be one of them.
            message_id: with a negative rank; the same on any worker that reduces this chunk at this stage.
        """
        flags = [self.flag_view(message) for message in messages] if chunk.stop == self.nbytes else []
        flag = torch.cat(flags).max() if flags else None  # before ``out`` is written
        self._reduce(chunk, messages, sizes, out, message_id)
        if flag is not None:
            self.flag_view(out).copy_(flag)

    @abstractmethod
    def _reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        """Reduces without the flag; the result for values that are not finite is never read."""

    @abstractmethod
    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        """The received message minus the sent one, both finite, block by block.

        Yields:
            The block; its difference, a 1-D tensor of the dtype ``compute`` that is valid until the next one and may be
            written to, or None if it cannot be determined; and the factor of the difference.
        """

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

    def unpack(self, message: Tensor) -> list[dict[str, Tensor]]:
        """Splits a written message into entries for each flat tensor, which do not depend on the other tensors.

        Returns:
            ``sent``: the codes of the tensor, 1-D of the dtype ``code``, in the order of its values; a view of the message if
            they lie in one chunk. ``records``, if there are any: one row for each block, of shape (blocks, fields), float64.
        """
        parts: list[dict[str, Tensor]] = []
        for tensor, blocks in zip(self.tensors, self._blocks_by_tensor(), strict=True):
            chunks = [self._codes(message, block, self.code) for block in blocks]
            if blocks and blocks[-1].at - blocks[0].at == (blocks[-1].start - blocks[0].start) * self._itemsize:
                chunks = [message[blocks[0].at : blocks[0].at + tensor.numel * self._itemsize].view(self.code)]
            part = {"sent": torch.cat(chunks) if len(chunks) > 1 else chunks[0] if chunks else message[:0].view(self.code)}
            if self._record:
                records = [message[block.record : block.record + self._record].view(torch.float64) for block in blocks]
                fields = self._record // torch.float64.itemsize
                part["records"] = torch.stack(records) if records else message[:0].view(torch.float64).view(0, fields)
            parts.append(part)
        return parts

    def pack(self, parts: Sequence[Mapping[str, Tensor]], out: Tensor) -> None:
        """The inverse of ``unpack``: writes the message ``out``."""
        for part, blocks in zip(parts, self._blocks_by_tensor(), strict=True):
            for number, block in enumerate(blocks):
                self._codes(out, block, self.code).copy_(part["sent"][block.start : block.stop])
                if self._record:
                    out[block.record : block.record + self._record].view(torch.float64).copy_(part["records"][number])

    def resume(self, out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> None:
        """Takes the place of ``encode`` for a message that ``pack`` has written in a resumed run."""
        if self.chunks:
            self._mark(out, all(self._finite(out, chunk) for chunk in self.chunks), message_id.rank)

    def state(self) -> list[dict[str, Tensor]]:
        """The state of this compression for each flat tensor: copies, on the CPU."""
        return [{} for _ in self.tensors]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Resumes from what ``state`` returned."""
        return

    def edge_state(self) -> list[dict[str, Tensor]]:
        """The state for single edges, for each flat tensor: live tensors under keys that name the edge.

        It is saved in checkpoints and passed to ``load_edge_state``.
        """
        return [{} for _ in self.tensors]

    def load_edge_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        """Resumes with what ``edge_state`` returned; an edge that is missing starts as a new one."""
        return

    def hint_by_tensor(self, hint: bytes) -> list[Tensor]:
        """Splits a hint into one int8 tensor for each flat tensor, with one value per block."""
        values = torch.tensor(list(hint), dtype=torch.uint8, device="cpu").view(torch.int8)
        return list(torch.split(values, [len(blocks) for blocks in self._blocks_by_tensor()]))

    def hint_of(self, by_tensor: Sequence[Tensor]) -> bytes:
        """The inverse of ``hint_by_tensor``."""
        return b"".join(bytes(part.cpu().numpy()) for part in by_tensor)

    def _blocks_by_tensor(self) -> list[list[Block]]:
        found: list[list[Block]] = [[] for _ in self.tensors]
        for chunk in self.chunks:
            for block in chunk.blocks:
                found[block.tensor].append(block)
        return found

    def payload(self, chunks: Sequence[Chunk]) -> int:
        """The bytes of these chunks without the flag."""
        return sum(chunk.stop - chunk.start - (_FLAG if chunk.stop == self.nbytes else 0) for chunk in chunks)

    # -- values that are not finite ----------------------------------------------------------------------------------------

    def flag(self, message: Tensor) -> int:
        """0 if all values of a message are finite, else 1 + the rank of a worker that has others. Waits for a GPU."""
        return int(self.flag_view(message)) if self.chunks else 0

    def flag_view(self, message: Tensor) -> Tensor:
        """The flag as a part of a message, or of its last chunk: int64, of shape (1,)."""
        return message[-_FLAG:].view(torch.int64)

    def first_nonfinite(self, message: Tensor) -> tuple[int, int] | None:
        """Flat tensor and element of the first value of a message that is not finite; None if all are."""
        for chunk in self.chunks:
            for block in chunk.blocks:
                element = self._first_nonfinite(message, block)
                if element is not None:
                    return block.tensor, block.start + element
        return None

    @abstractmethod
    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        """The first element of ``block`` that is not finite, as exactly as the message can say."""

    @abstractmethod
    def _finite(self, message: Tensor, chunk: Chunk) -> bool | Tensor:
        """Whether all values in a written chunk are finite."""

    def _mark(self, out: Tensor, finite: bool | Tensor, rank: int) -> None:
        """Writes the flag."""
        if isinstance(finite, Tensor):
            self.flag_view(out).copy_(torch.where(finite, 0, rank + 1))
        else:
            self.flag_view(out).fill_(0 if finite else rank + 1)

    # -- messages -------------------------------------------------------------------------------------------------------

    def _codes(self, message: Tensor, block: Block, dtype: torch.dtype, base: int = 0) -> Tensor:
        """The codes of ``block`` in a part of the message that starts at its byte ``base``."""
        start = block.at - base
        return message[start : start + block.numel * dtype.itemsize].view(dtype)

    def _lay_out(self) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        pending: list[tuple[int, int, int]] = []
        elements = start = 0

        def close() -> None:
            nonlocal elements, start
            record, at = start, start + self._record * len(pending)
            blocks = []
            for tensor, first, last in pending:
                blocks.append(Block(tensor, first, last, at, record))
                record, at = record + self._record, at + (last - first) * self._itemsize
            stop = -(-at // _ALIGNMENT) * _ALIGNMENT
            chunks.append(Chunk(start, stop, tuple(blocks)))
            pending.clear()
            elements, start = 0, stop

        for number, tensor in enumerate(self.tensors):
            for first in range(0, tensor.numel, self.block_elements):
                last = min(first + self.block_elements, tensor.numel)
                if pending and elements + last - first > self.block_elements:
                    close()
                pending.append((number, first, last))
                elements += last - first
        if pending:
            close()
        if chunks:
            chunks[-1] = replace(chunks[-1], stop=chunks[-1].stop + _FLAG)
        return tuple(chunks)
