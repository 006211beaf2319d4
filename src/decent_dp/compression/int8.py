"""One byte per value: the position of the value on a lattice, modulo 256 steps.

Replicas are close to each other, and a step that is small beside their distance is very small beside their values. So the
lattice is made for the distance. With the same step on both ends, ``wrap(code_j - code_i) · step`` is the difference of
the two rounded values as long as it is less than 128 steps, however large the values are (modulo quantisation, as in
Moniqua, Lu and De Sa, ICML 2020). Rounding is stochastic, so that it is right in the mean.

The step of a block is a power of two. Both ends must use the same step. So a worker sends a hint to the other members of an
edge, the step for the distance that it expects there, and the largest hint is used. It expects the distance that it has seen
lately, with a margin. In the beginning all replicas are equal, and it expects a small part of the largest value: a step that
is enough for any two replicas would round their values coarsely, and it is better not to mix replicas than to move them at
random.

A message has a record for each block: two weighted sums of the lattice numbers (integers that a float64 holds exactly, so that
both ends find the same), and how far the values that it represents may lie from it. Wrapped differences must add up to the
difference of the sums. If they do not, the distance was larger than expected, and both ends see that. The block is rejected:
it is not mixed in this round, and the next hints ask for a much larger step, until the block can be decoded.

The record of a block with an infinity or a NaN says so. It has no codes, and nothing of its message is mixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from decent_dp._triton import load_triton
from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.codec import Block, Chunk, FlatTensor, MessageId, part_of
from decent_dp.compression.lattice import (
    FIELDS,
    LARGEST_NUMBER,
    PRIME,
    BoolArray,
    FloatArray,
    IntArray,
    Lattice,
    load_numba,
)

__all__ = ["Int8"]

# A worker expects so many times the distance that it has seen, and forgets at this rate: partners change with the round, and
# the distance to a partner of long ago is larger than to the others.
_MARGIN = 2.0
_MEMORY = 0.8
# The distance that it expects in the beginning, and one that is enough for any two replicas, in units of the largest value.
# The factors of the distance after a rejection, below and beyond what is enough for any two: the members of a group are
# decoded together, and may be further apart than any two.
_AT_FIRST, _ENOUGH = 1 / 32, 2.0
_WIDER, _BEYOND = 16.0, 4.0

# In place of the first sum of a record: a block whose values are not finite, or that has no codes.
_NOT_FINITE, _NOTHING = math.nan, math.inf

# Chunks that are encoded by one call: each call gives the interpreter lock away, which another thread may then hold for 5 ms.
_TOGETHER = 16

_KERNELS = "decent_dp.compression.int8_triton"


class Int8(Blockwise):
    """One byte per value, relative to the distance between replicas; see the module."""

    name = "int8"
    by_parameter = True
    needs_hints = True
    _record = 8 * FIELDS

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self._blocks = [block for chunk in self.chunks for block in chunk.blocks]
        # The places of each chunk's blocks, by its start.
        ends = list(itertools.accumulate(len(chunk.blocks) for chunk in self.chunks))
        self._places = {chunk.start: slice(end - len(chunk.blocks), end) for chunk, end in zip(self.chunks, ends, strict=True)}
        self._reach_at = [block.record // 8 + 2 for block in self._blocks]
        numbers = [self.tensors[block.tensor].index for block in self._blocks]
        fast = load_numba() if (dtype, device.type) == (torch.float32, "cpu") else None
        self._lattice: Lattice = (fast.NumbaLattice if fast else Lattice)(self._blocks, numbers, self.compute, device)
        triton: ModuleType | None = None
        if self._blocks and self.compute == torch.float32:
            triton = load_triton(_KERNELS, device, dtype)
        self._on_cuda = triton.TritonLattice(self._blocks, numbers, dtype, device) if triton else None
        # The distance of each block seen lately and the expected one (NaN: none yet), the largest for which it was rejected
        # since it was last decoded, and its largest value.
        self._seen = np.full(len(self._blocks), np.nan)
        self._expected = np.full(len(self._blocks), np.nan)
        self._failed = np.zeros(len(self._blocks))
        # Exchanges in a row in which each block was rejected.
        self._rejections = np.zeros(len(self._blocks), dtype=np.int64)
        self._largest = np.zeros(len(self._blocks))
        self._steps = np.ones(len(self._blocks))

    @classmethod
    def code_of(cls, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    # -- the range ----------------------------------------------------------------------------------------------------

    def hint(self, values: Sequence[Tensor]) -> bytes:
        """The exponents of the steps that this worker asks for, a signed byte for each block."""
        self._take_encoded()
        self._look_at_zeros(values)
        expected = np.where(np.isnan(self._expected), _AT_FIRST * self._largest, self._expected)
        # A step below the values' own resolution would leave the numbers that can be summed.
        step = np.maximum(np.maximum(expected / 127, 4 * self._largest / LARGEST_NUMBER), 2.0**-126)
        exponents = np.ceil(np.log2(np.where(np.isfinite(step), step, 1.0)))
        return bytes(np.clip(exponents, -126, 127).astype(np.int8))

    def _look_at_zeros(self, values: Sequence[Tensor]) -> None:
        """Finds the largest values of the blocks in which none is known."""
        unknown = np.flatnonzero(self._largest == 0)
        parts = [part_of(values[block.tensor], block) for block in map(self._blocks.__getitem__, unknown)]
        if parts:  # read at once: a GPU is waited for once
            self._largest[unknown] = torch.stack(torch._foreach_norm(parts, math.inf)).cpu().to(torch.float64).numpy()

    def _take_encoded(self) -> None:
        """Learns the largest values of the last message, which a GPU has found meanwhile."""
        found = None if self._on_cuda is None else self._on_cuda.encoded()
        if found is not None:
            most, values = found
            fits = most < LARGEST_NUMBER
            self._largest = np.where(fits, most * self._steps, np.where(np.isfinite(values), values, self._largest))

    def state(self) -> list[dict[str, Tensor]]:
        self._take_encoded()
        table = np.stack([self._seen, self._expected, self._failed, self._largest], axis=1)
        counts = np.bincount([block.tensor for block in self._blocks], minlength=len(self.tensors)).tolist()
        return [{"ranges": part} for part in torch.split(torch.from_numpy(table), counts)]

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        tables = []
        for own, entries in zip(self.state(), by_tensor, strict=True):
            fresh, saved = own["ranges"], entries.get("ranges")
            fits = saved is not None and (saved.shape, saved.dtype) == (fresh.shape, fresh.dtype)
            tables.append(saved.cpu() if saved is not None and fits else fresh)
        table = torch.cat(tables).numpy()
        self._seen, self._expected, self._failed, self._largest = (column.copy() for column in table.T)

    def _set_steps(self, hints: Sequence[bytes]) -> None:
        exponents = np.stack([np.frombuffer(hint, dtype=np.int8) for hint in hints]).max(0)
        self._take_encoded()  # in units of the steps until now
        self._steps = np.ldexp(1.0, exponents.astype(np.int32))
        if self._on_cuda is not None:
            self._on_cuda.set_steps(self._steps)

    def _accept(self, places: int | IntArray, steps: float | FloatArray) -> None:
        """Blocks were decoded, and the others were this many steps away."""
        # fmax: of a block that was never seen, NaN, the distance itself.
        self._seen[places] = np.fmax(np.maximum(steps, 1.0) * self._steps[places], _MEMORY * self._seen[places])
        self._expected[places] = _MARGIN * self._seen[places]
        self._failed[places] = 0.0
        self._rejections[places] = 0

    def _reject(self, place: int) -> None:
        self.rejected += 1
        self._rejections[place] += 1
        reach, before, enough = 127 * self._steps[place], self._failed[place], _ENOUGH * self._largest[place]
        self._failed[place] = reach
        wider = enough if before else min(_WIDER * reach, enough)
        if reach >= enough:
            wider = _BEYOND * reach
        self._expected[place] = wider
        # An exchange with a nearer worker must not make it forget the one that was too far away.
        self._seen[place] = np.fmax(self._seen[place], wider / _MARGIN)

    def stuck(self, rounds: int) -> list[int]:
        return sorted({self._blocks[place].tensor for place in np.flatnonzero(self._rejections >= rounds)})

    # -- messages -----------------------------------------------------------------------------------------------------

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        if self._on_cuda is None:
            yield from super().encode(values, out, message_id, hints)
            return
        self._set_steps(hints)
        self._on_cuda.encode(values, out, message_id)
        yield self.nbytes

    def _encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[bool]:
        self._set_steps(hints)
        for start in range(0, len(self.chunks), _TOGETHER):
            chunks = self.chunks[start : start + _TOGETHER]
            places = slice(self._places[chunks[0].start].start, self._places[chunks[-1].start].stop)
            parts = [part_of(values[block.tensor], block) for block in self._blocks[places]]
            found = self._lattice.encode(places, parts, self._steps[places], message_id, out)
            bad = np.isnan(found)
            self._largest[places] = np.where(bad, self._largest[places], found)
            yield from itertools.repeat(not bad.any(), len(chunks))

    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        return 0 if bool(self._first_field(message, block).isnan()) else None

    def _first_field(self, message: Tensor, block: Block) -> Tensor:
        """Of the block's record: whether it has codes."""
        return message[block.record : block.record + 8].view(torch.float64)

    def arrive(self, sent: Tensor, received: Tensor) -> None:
        if self._on_cuda is not None:
            self._on_cuda.begin_compare(sent, received)

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        if self._on_cuda is not None:
            self._take_encoded()
            certain, reach, found = self._on_cuda.compare(sent, received)
            self._judge(certain, reach)
            if rate:
                self._on_cuda.mix(values, sent, received, found, rate)
            return
        parts = [part_of(values[block.tensor], block) for block in self._blocks]
        certain, most = self._lattice.mix(parts, sent, received, rate * self._steps)
        self._judge(certain, np.maximum(most, self._reaches(received)))

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        if self._on_cuda is not None:
            self._take_encoded()
            certain, reach, _ = self._on_cuda.compare(sent, received)
        else:
            certain, most = self._lattice.compare(slice(None), sent, received)
            reach = np.maximum(most, self._reaches(received))
        self._judge(certain, reach)
        for place, block in enumerate(self._blocks):
            if certain[place]:
                yield block, self._lattice.difference(block, sent, received), float(self._steps[place])
            else:
                yield block, None, 1.0

    def _judge(self, certain: BoolArray, reach: FloatArray) -> None:
        """For each block, whether it was decoded, and how many steps the others may be away."""
        accepted = np.flatnonzero(certain)
        self._accept(accepted, reach[accepted])
        for place in np.flatnonzero(~certain):
            self._reject(int(place))

    def _reaches(self, message: Tensor) -> FloatArray:
        """How far the values that each block of a message represents may lie from it."""
        found: FloatArray = message.cpu().numpy().view(np.float64)[self._reach_at]
        return found

    def _records(self, chunk: Chunk, message: Tensor) -> FloatArray:
        """The records of a chunk's blocks, which a message begins with: of shape (blocks, 3). On a CPU a view."""
        count = len(chunk.blocks)
        records: FloatArray = message[: self._record * count].cpu().numpy().view(np.float64).reshape(count, FIELDS)
        return records

    def _reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        # The mean is the first one's lattice numbers, each moved by a few steps. A block has no codes if some of the values
        # that it represents would be too far from it.
        places, base = self._places[chunk.start], chunk.start
        records = [self._records(chunk, message).copy() for message in messages]
        good, reach = np.isfinite(records[0][:, 0]), records[0][:, 2]
        totals = [torch.zeros(block.numel, dtype=self.compute, device=self.device) for block in chunk.blocks]
        for theirs, message, size in zip(records[1:], messages[1:], sizes[1:], strict=True):
            certain, most = self._lattice.compare(places, messages[0], message, base)
            good &= certain
            reach = np.maximum(reach, most + theirs[:, 2])
            for block, total in zip(chunk.blocks, totals, strict=True):
                total.add_(self._lattice.difference(block, messages[0], message, base), alpha=size)
        for total in totals:
            total.div_(sum(sizes))
        moves = torch.empty_like(messages[0])
        most = self._lattice.encode(places, totals, np.ones(len(totals)), message_id, moves, base)
        moved = self._records(chunk, moves)
        codes = slice(chunk.blocks[0].at - base, chunk.blocks[-1].at - base + chunk.blocks[-1].numel)
        torch.add(messages[0][codes], moves[codes], out=out[codes])
        sums = records[0][:, 0] + moved[:, 0], (records[0][:, 1] + moved[:, 1]) % PRIME
        written = np.stack([*sums, reach + most], axis=1)
        written[~(good & (reach + most <= 127))] = _NOTHING
        written[np.isnan([read[:, 0] for read in records]).any(0)] = _NOT_FINITE
        out[: self._record * len(written)].view(torch.float64).copy_(torch.from_numpy(written.reshape(-1)))

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        for place, block in enumerate(self._blocks):
            value = part_of(values[block.tensor], block).to(self.compute)
            if not bool(self._first_field(sent, block).isfinite()):
                yield block, value.clone()
                continue
            step, code = float(self._steps[place]), self._codes(sent, block, torch.int8).to(self.compute)
            # The lattice number with this code that is nearest to the value.
            yield block, (code + 256 * torch.round((value / step - code) / 256)) * step
