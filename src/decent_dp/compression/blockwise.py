"""Messages of blocks: parts of flat tensors that are coded together, in chunks that can be reduced on their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from decent_dp.compression.codec import FLAG, Block, Chunk, Compression, FlatTensor, MessageId, flag_view

__all__ = ["Blockwise"]

# Elements of a block: on a CPU few enough for the temporaries to stay in its cache, on a GPU enough for a kernel to be worth
# its launch.
_BLOCK_ON_CPU = 2**16
_BLOCK_ON_GPU = 2**22

# Chunks start at multiples of this, so that any dtype can be read in them.
_ALIGNMENT = 8


class Blockwise(Compression):
    """Codes block by block. All messages have one length, and the mean of a group is made chunk by chunk."""

    # Bytes of the record of each block, in front of the codes.
    _record: ClassVar[int] = 0

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self.block_elements = _BLOCK_ON_CPU if device.type == "cpu" or self._record else _BLOCK_ON_GPU
        self.chunks = self._lay_out()
        self.nbytes = self.most_nbytes = self.chunks[-1].stop if self.chunks else 0
        self.hint_nbytes = sum(len(chunk.blocks) for chunk in self.chunks)

    @classmethod
    @abstractmethod
    def code_of(cls, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which values of ``dtype`` are sent."""

    @property
    def code(self) -> torch.dtype:
        return self.code_of(self.dtype)

    @property
    def _itemsize(self) -> int:
        return self.code.itemsize

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
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
        flags = [flag_view(message) for message in messages] if chunk.stop == self.nbytes else []
        flag = torch.cat(flags).max() if flags else None  # before ``out`` is written
        self._reduce(chunk, messages, sizes, out, message_id)
        if flag is not None:
            flag_view(out).copy_(flag)

    @abstractmethod
    def _reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        """Reduces without the flag; the result for values that are not finite is never read."""

    # -- values that are not finite ----------------------------------------------------------------------------------------

    def first_nonfinite(self, message: Tensor) -> tuple[int, int] | None:
        for chunk in self.chunks:
            for block in chunk.blocks:
                element = self._first_nonfinite(message, block)
                if element is not None:
                    return block.tensor, block.start + element
        return None

    @abstractmethod
    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        """The first element of ``block`` that is not finite, as exactly as the message can say."""

    def _mark(self, out: Tensor, finite: bool | Tensor, rank: int) -> None:
        """Writes the flag."""
        if isinstance(finite, Tensor):
            flag_view(out).copy_(torch.where(finite, 0, rank + 1))
        else:
            out.numpy()[-FLAG:].view(np.int64)[0] = 0 if finite else rank + 1  # NumPy: each call of torch gives the lock away

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
            chunks[-1] = replace(chunks[-1], stop=chunks[-1].stop + FLAG, has_flag=True)
        return tuple(chunks)
