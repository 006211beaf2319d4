"""The seam: how the values of a bucket become bytes, and what two messages say about the difference of two replicas.

A message also says whether all values in it are finite: it ends with a flag, which is 0, or 1 + the rank of a worker with a
NaN or an infinity. In a group the mean has the largest flag of all members, so that all see it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Block", "Chunk", "Compression", "FlatTensor", "Hints", "MessageId", "all_finite", "part_of"]

# Elements that are worked on at once: on a CPU few enough for the temporaries to stay in its cache, on a GPU many enough
# for a kernel to be worth its launch.
_BLOCK_ON_CPU = 2**16
_BLOCK_ON_GPU = 2**22

# Pieces start at multiples of this, so that any dtype can be read in them.
_ALIGNMENT = 8

# Bytes of the flag at the end of a message, an int64.
_FLAG = 8


@dataclass(frozen=True)
class FlatTensor:
    """A flat tensor of a bucket: a parameter, or all of them where they lie one after another.

    Attributes:
        index: the parameter's number in the model; seeds its rounding. Of no meaning for all of them.
        numel: its elements.
    """

    index: int
    numel: int


@dataclass(frozen=True)
class Block:
    """Elements ``[start, stop)`` of an item, coded together; ``at`` and ``record`` are byte offsets in the message."""

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
    """Bytes ``[start, stop)`` of a message: runs that can be reduced before the rest has come."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class MessageId:
    """What a message belongs to; round and rank seed its rounding.

    Attributes:
        round: of the exchange.
        rank: of the worker that codes; negative for the mean of a group.
        edge: the members of the edge: a wire that learns by edge keeps what it has learnt under them.
    """

    round: int
    rank: int
    edge: tuple[int, ...] = ()


def part_of(values: Tensor, block: Block) -> Tensor:
    """The elements of ``run``, of the values of its item."""
    # A slice costs a microsecond, and most tensors of most models are one run.
    return values if block.stop - block.start == len(values) else values[block.start : block.stop]


def all_finite(values: Tensor) -> bool | Tensor:
    """Whether a tensor has neither NaN nor infinity. On a GPU a tensor, which nobody waits for."""
    if values.device.type != "cpu":
        return values.isfinite().all()
    # One pass: whatever is not finite is in the sum, too. Finite values may overflow it, and are looked at one by one.
    return math.isfinite(values.sum().item()) or bool(values.isfinite().all())


class Compression(ABC):
    """Codes the values of one bucket. Messages are uint8 tensors of ``nbytes``, on the bucket's device.

    One exchange at a time: ``encode``, maybe ``combine``, then ``differences``.

    Args:
        items: what the bucket holds.
        dtype: the items'.
        device: the items'.

    Attributes:
        name: what users call it.
        by_parameter: every parameter has to be an item of its own.
        announces: both ends must know, a round ahead, what the others expect (``hint``).
        nbytes: the length of a message, the same on all workers.
        chunks: which bytes of it can be reduced on their own.
        rejected: runs whose difference could not be told, so far.
    """

    name: ClassVar[str | None]
    by_parameter: ClassVar[bool] = False
    needs_hints: ClassVar[bool] = False
    # Bytes of a record in front of the codes, one a run.
    _record: ClassVar[int] = 0

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = tuple(tensors)
        self.rejected = 0
        self.dtype, self.device = dtype, device
        # Arithmetic of the codec: the items' dtype, but at least float32.
        self.compute = torch.promote_types(dtype, torch.float32)
        self.block_elements = _BLOCK_ON_CPU if device.type == "cpu" or self._record else _BLOCK_ON_GPU
        self.chunks = self._lay_out()
        self.nbytes = self.chunks[-1].stop if self.chunks else 0

    @property
    @abstractmethod
    def code(self) -> torch.dtype:
        """Of what a value is sent as."""

    @property
    def _itemsize(self) -> int:
        return self.code.itemsize

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        """Writes a message, front to back.

        Args:
            values: one flat tensor an item.
            out: the message, to be written.
            heard: hints of all members of the edge, the own one included, where the wire has them.

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
        """As ``encode``, chunk by chunk and without the flag; yields whether all values of the chunk are finite."""

    def reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        """The message of a group's mean, for one chunk.

        Args:
            messages: the bytes of ``chunk``, as single workers or parts of the group sent them.
            sizes: how many workers each stands for.
            out: as long as each of them; may be one of them.
            moment: the same on whoever combines this chunk at this stage, with a negative rank.
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
        """As ``combine``, without the flag; what is written of values that are not finite is not read."""

    @abstractmethod
    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        """What was received minus what was sent, both finite: every run of the bucket, one after the other.

        Yields:
            The run; a 1-D tensor of the dtype ``compute``, which is good until the next one and may be written to, or None for
            a run whose difference cannot be told; and what it is to be multiplied by.
        """

    @abstractmethod
    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """What ``sent`` stands for, run by run, given the values as they are now."""

    def hint(self, values: Sequence[Tensor]) -> bytes:
        """What the members of a coming edge must know; empty where they need nothing."""
        return b""

    def stuck(self, rounds: int) -> list[int]:
        """The numbers of the tensors with a block that was rejected in each of the last ``rounds`` exchanges, or more."""
        return []

    # -- a run that is stopped, and goes on -----------------------------------------------------------------------------

    def entries(self, numel: int, *, in_flight: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of all that is kept of an item of ``numel`` elements: of its memory, of what was announced, and of
        what is under way."""
        blocks = -(-numel // self.block_elements)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.needs_hints:
            found["hint_next"] = (blocks,), torch.int8
        if in_flight:
            found["sent"] = (numel,), self.code
            if self.needs_hints:
                found["hint_in_flight"] = (blocks,), torch.int8
            if self._record:
                found["records"] = (blocks, self._record // torch.float64.itemsize), torch.float64
        return found

    def unpack(self, message: Tensor) -> list[dict[str, Tensor]]:
        """What a written message holds, item by item; it does not depend on the other items.

        Returns:
            ``sent``: the codes of the item, 1-D of the dtype ``code``, in the order of its values; a part of the message
            where they lie in one chunk. ``records``, for wires that have them: one a run, of shape (runs, fields), float64.
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
        """The inverse of ``take_apart``: writes the message ``out``."""
        for part, blocks in zip(parts, self._blocks_by_tensor(), strict=True):
            for number, block in enumerate(blocks):
                self._codes(out, block, self.code).copy_(part["sent"][block.start : block.stop])
                if self._record:
                    out[block.record : block.record + self._record].view(torch.float64).copy_(part["records"][number])

    def resume(self, out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> None:
        """In the place of ``encode``, for a message that ``put_together`` has written in a run that was resumed."""
        if self.chunks:
            self._mark(out, all(self._finite(out, chunk) for chunk in self.chunks), message_id.rank)

    def state(self) -> list[dict[str, Tensor]]:
        """What the wire has learnt, item by item: copies, on the CPU."""
        return [{} for _ in self.tensors]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        """Goes on with what ``memory`` returned."""
        return

    def edge_state(self) -> list[dict[str, Tensor]]:
        """What the wire has learnt of single edges, item by item: live tensors under keys of its own that name the edge.

        Saved in checkpoints, and handed to ``load_edge_state`` of a new wire.
        """
        return [{} for _ in self.tensors]

    def load_edge_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        """Resumes with what ``edge_state`` returned; an edge that is missing starts as a new one."""
        return

    def hint_by_tensor(self, hint: bytes) -> list[Tensor]:
        """An hint as one int8 tensor an item: a value a run."""
        values = torch.tensor(list(hint), dtype=torch.uint8, device="cpu").view(torch.int8)
        return list(torch.split(values, [len(blocks) for blocks in self._blocks_by_tensor()]))

    def hint_of(self, by_tensor: Sequence[Tensor]) -> bytes:
        """The inverse of ``announcement_by_item``."""
        return b"".join(bytes(part.cpu().numpy()) for part in by_tensor)

    def _blocks_by_tensor(self) -> list[list[Block]]:
        found: list[list[Block]] = [[] for _ in self.tensors]
        for chunk in self.chunks:
            for block in chunk.blocks:
                found[block.tensor].append(block)
        return found

    def payload(self, chunks: Sequence[Chunk]) -> int:
        """The bytes of these chunks that stand for values: all but the flag."""
        return sum(chunk.stop - chunk.start - (_FLAG if chunk.stop == self.nbytes else 0) for chunk in chunks)

    # -- values that are not finite ----------------------------------------------------------------------------------------

    def flag(self, message: Tensor) -> int:
        """0 if all values of a message are finite, else 1 + the rank of a worker that has others. Waits for a GPU."""
        return int(self.flag_view(message)) if self.chunks else 0

    def flag_view(self, message: Tensor) -> Tensor:
        """The flag as a part of a message, or of its last chunk: int64, of shape (1,)."""
        return message[-_FLAG:].view(torch.int64)

    def first_nonfinite(self, message: Tensor) -> tuple[int, int] | None:
        """Item and element of the first value of a message that is not finite; None if all are."""
        for chunk in self.chunks:
            for block in chunk.blocks:
                element = self._first_nonfinite(message, block)
                if element is not None:
                    return block.tensor, block.start + element
        return None

    @abstractmethod
    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        """Where in ``run`` the first value is that is not finite, or may be: as exactly as the message tells."""

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
        """The codes of ``run`` in a message whose first byte is ``base`` of the whole."""
        start = block.at - base
        return message[start : start + block.numel * dtype.itemsize].view(dtype)

    def _lay_out(self) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        pending: list[tuple[int, int, int]] = []
        held = start = 0

        def close() -> None:
            nonlocal held, start
            record, at = start, start + self._record * len(pending)
            blocks = []
            for tensor, first, last in pending:
                blocks.append(Block(tensor, first, last, at, record))
                record, at = record + self._record, at + (last - first) * self._itemsize
            stop = -(-at // _ALIGNMENT) * _ALIGNMENT
            chunks.append(Chunk(start, stop, tuple(blocks)))
            pending.clear()
            held, start = 0, stop

        for number, tensor in enumerate(self.tensors):
            for first in range(0, tensor.numel, self.block_elements):
                last = min(first + self.block_elements, tensor.numel)
                if pending and held + last - first > self.block_elements:
                    close()
                pending.append((number, first, last))
                held += last - first
        if pending:
            close()
        if chunks:
            chunks[-1] = replace(chunks[-1], stop=chunks[-1].stop + _FLAG)
        return tuple(chunks)


class Hints:
    """The hints of one bucket: each is made a round before the exchange that it is for, of what is proposed then.

    Attributes:
        next: the one for the coming round; None before the first.
    """

    def __init__(self, compression: Compression) -> None:
        self._compression = compression
        self.next: bytes | None = None

    def advance(self, proposal: Sequence[Tensor]) -> bytes:
        """The hint for this round, and makes that for the next. The first is made just in time."""
        now = self._compression.hint(proposal) if self.next is None else self.next
        self.next = self._compression.hint(proposal)
        return now
