"""The values themselves: in the bucket's own dtype, or in bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.codec import Block, Chunk, FlatTensor, MessageId, all_finite, part_of
from decent_dp.compression.stochastic_rounding import NOISE_LENGTH, noise_at

__all__ = ["BFloat16", "Lossless"]

# Chunks that are encoded by one call: each call gives the interpreter lock away, which another thread may then hold for 5 ms.
_TOGETHER = 128


class Lossless(Blockwise):
    """Every value as it is, in the bucket's own dtype."""

    name: ClassVar[str | None] = None

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        parts = [self.chunks[first : first + _TOGETHER] for first in range(0, len(self.chunks), _TOGETHER)]
        self._runs = [(len(part), list(_joined(part, self._itemsize))) for part in parts]
        # The message that was encoded last, and its parts for the runs.
        self._viewed: Tensor | None = None
        self._views: list[list[Tensor]] = []

    @classmethod
    def code_of(cls, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _encode(
        self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]
    ) -> Iterator[bool | Tensor]:
        if self._viewed is not out:
            self._viewed, self._views = out, [[self._all_codes(out, run) for run in runs] for _, runs in self._runs]
        for (chunks, runs), views in zip(self._runs, self._views, strict=True):
            finite: bool | Tensor = True
            for run, codes in zip(runs, views, strict=True):
                torch.cat([part_of(values[block.tensor], block) for block in run.blocks], out=codes)
                finite = finite & all_finite(codes)
            yield from itertools.repeat(finite, chunks)

    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        found = self._codes(message, block, self.code).isfinite().logical_not_().nonzero()
        return int(found[0]) if len(found) else None

    def _reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        codes = [self._all_codes(message, chunk, chunk.start) for message in messages]
        # Sums in float32 at least: in bfloat16 a sum of many would lose their differences, in float16 it would overflow. In a
        # tensor of its own, as ``out`` may be one of the messages.
        total = torch.zeros(len(codes[0]), dtype=self.compute, device=self.device)
        for code, size in zip(codes, sizes, strict=True):
            total += code if size == 1 else code.to(self.compute) * size
        self._round(total.div_(sum(sizes)), self._all_codes(out, chunk, chunk.start), message_id, chunk)

    def _round(self, mean: Tensor, codes: Tensor, message_id: MessageId, chunk: Chunk) -> None:
        """Writes the mean of a group as codes."""
        codes.copy_(mean)

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        for chunk, difference in self._by_chunk(sent, received):
            for block, part in self._split(difference, chunk):
                yield block, part, 1.0

    def _by_chunk(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        """The differences of each chunk, valid until the next one."""
        scratch = torch.empty(2, self.block_elements, dtype=self.compute, device=self.device)
        for chunk in self.chunks:
            theirs, ours = (self._all_codes(message, chunk) for message in (received, sent))
            difference = scratch[0, : len(ours)]
            if self.code == self.compute:
                torch.sub(theirs, ours, out=difference)
            else:
                difference.copy_(theirs).sub_(scratch[1, : len(ours)].copy_(ours))
            yield chunk, difference

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        if not rate:
            return
        for chunk, difference in self._by_chunk(sent, received):
            difference.mul_(rate)
            parts = [part_of(values[block.tensor], block) for block in chunk.blocks]
            torch._foreach_add_(parts, [part for _, part in self._split(difference, chunk)])

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        for chunk in self.chunks:
            yield from self._split(self._all_codes(sent, chunk).to(self.compute), chunk)

    def _all_codes(self, message: Tensor, chunk: Chunk, base: int = 0) -> Tensor:
        """The codes of all blocks of ``chunk``, one after another; ``message`` starts at byte ``base`` of the whole."""
        last = chunk.blocks[-1]
        return message[chunk.start - base : last.at - base + last.numel * self._itemsize].view(self.code)

    def _split(self, values: Tensor, chunk: Chunk) -> Iterator[tuple[Block, Tensor]]:
        return zip(chunk.blocks, torch.split(values, [block.numel for block in chunk.blocks]), strict=True)


class BFloat16(Lossless):
    """Every value rounded to the nearest bfloat16; values of two bytes as they are.

    The mean of a group is rounded at random, up or down, so that it is right in the mean. Rounded to the nearest, all members
    of a large group would return to the values that they have, and the progress of a single one would be lost. The sums of
    nodes are rounded so, too, before their root rounds the mean (docs/lab/log.md, 2026-11-23).
    """

    name = "bfloat16"
    by_parameter = True

    @classmethod
    def code_of(cls, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype.itemsize > 2 else dtype

    def _round(self, mean: Tensor, codes: Tensor, message_id: MessageId, chunk: Chunk) -> None:
        if self.code == self.dtype:
            codes.copy_(mean)
            return
        whole, single = torch.split(codes, [block.numel for block in chunk.blocks]), mean.to(torch.float32)
        # A float32 whose lower half is zero is a bfloat16: noise below that half, then the half is cut off.
        for (block, values), out in zip(self._split(single, chunk), whole, strict=True):
            index = self.tensors[block.tensor].index
            for start in range(0, block.numel, NOISE_LENGTH):
                part = values[start : start + NOISE_LENGTH]
                noise = noise_at(
                    part.numel(), torch.float32, self.device, message_id.round, message_id.rank, index, block.start + start
                )
                bits = part.view(torch.int32) + noise.add(0.5).mul_(2**16).to(torch.int32)
                rounded = bits.bitwise_and_(-(2**16)).view(torch.float32)
                # A NaN could become a number, and the parameter that the flag reports would not be found.
                out[start : start + NOISE_LENGTH].copy_(torch.where(part.isfinite(), rounded, part))


def _joined(chunks: Sequence[Chunk], itemsize: int) -> Iterator[Chunk]:
    """The same blocks in fewer chunks, where nothing lies between the codes of two, with adjacent blocks as one."""
    blocks: list[Block] = []
    for chunk in chunks:
        for block in chunk.blocks:
            last = blocks[-1] if blocks else None
            if last is not None and last.at + last.numel * itemsize != block.at:
                yield Chunk(blocks[0].at, last.at, tuple(blocks))
                blocks, last = [], None
            if last is not None and (last.tensor, last.stop) == (block.tensor, block.start):
                blocks[-1] = replace(last, stop=block.stop)
            else:
                blocks.append(block)
    if blocks:
        yield Chunk(blocks[0].at, blocks[-1].at, tuple(blocks))
