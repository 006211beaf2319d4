"""One byte per value: the position of the value on a lattice, modulo 256 steps.

Replicas are close to each other, and a step that is small beside their distance is very small beside their values. So the
lattice is made for the distance. With the same step on both ends, ``wrap(code_j - code_i) · step`` is the difference of
the two rounded values as long as it is less than 128 steps, however large the values are (modulo quantisation, as in
Moniqua, Lu and De Sa, ICML 2020). Rounding is stochastic, so that it is right in the mean.

The step of a block is a power of two. Both ends must use the same step. So a worker sends a hint to the members of its next
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

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.base import Block, Chunk, FlatTensor, MessageId
from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.stochastic_rounding import noise_at

__all__ = ["Int8"]

# Lattice numbers are below this, so that float32 holds them and `_MAGIC` finds them.
_LARGEST_NUMBER = 2**21

# Blocks are summed as a matrix with so many columns, and at most as many rows.
_COLUMNS = 256
# Weights of the columns' sums (21 + 16 + 16 bits: exact in float64); and of columns and rows in the sum of both, which is
# taken modulo a prime (21 + 9 + 8 + 17 + 8 bits: exact in int64).
_WEIGHTS, _BY_COLUMN, _BY_ROW = 2**16, 2**9, 2**17
_PRIME = 2**31 - 1
# Numbers below these have exact sums in float32: of columns, and of rows with weights.
_SMALL, _TINY = 2**16, 2**7
# Up to so many numbers NumPy is faster than torch, whose calls cost more.
_FEW = 2**12

# 1.5 · 2^23: a float32 of this size has no fraction, so that adding it rounds to the nearest integer, ties to even, and the
# lowest byte of the sum is that integer modulo 256.
_MAGIC = 12582912.0

# A worker expects so many times the distance that it has seen, and forgets at this rate: partners change with the round, and
# the distance to a partner of long ago is larger than to the others.
_MARGIN = 2.0
_MEMORY = 0.8
# The distance that it expects in the beginning, and one that is enough for any two replicas, in units of the largest value.
# The factors of the distance after a rejection, below and beyond what is enough for any two: the members of a group are
# decoded together, and may be further apart than any two.
_AT_FIRST, _ENOUGH = 1 / 32, 2.0
_WIDER, _BEYOND = 16.0, 4.0

# Records: two sums and a reach, in float64. In place of the first sum: a block whose values are not
# finite, or that has no codes.
_FIELDS = 3
_NOT_FINITE, _NOTHING = math.nan, math.inf

FloatArray: TypeAlias = npt.NDArray[np.float64]


class Int8(Blockwise):
    """One byte per value, relative to the distance between replicas; see the module."""

    name = "int8"
    by_parameter = True
    needs_hints = True
    _record = 8 * _FIELDS

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self._blocks = [block for chunk in self.chunks for block in chunk.blocks]
        # Where the records' fields are, in float64s.
        self._rows = np.array([[block.record // 8 + i for i in range(_FIELDS)] for block in self._blocks], dtype=np.int64)
        self._rows = self._rows.reshape(-1, _FIELDS)
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
        for i in np.flatnonzero(self._largest == 0):
            block = self._blocks[i]
            self._largest[i] = _largest(values[block.tensor][block.start : block.stop])
        expected = np.where(np.isnan(self._expected), _AT_FIRST * self._largest, self._expected)
        # A step below the values' own resolution would leave the numbers that can be summed.
        step = np.maximum(np.maximum(expected / 127, 4 * self._largest / _LARGEST_NUMBER), 2.0**-126)
        exponents = np.ceil(np.log2(np.where(np.isfinite(step), step, 1.0)))
        return bytes(np.clip(exponents, -126, 127).astype(np.int8))

    def resume(self, out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> None:
        super().resume(out, message_id, hints)
        self._set_steps(hints)

    def state(self) -> list[dict[str, Tensor]]:
        table = np.stack([self._seen, self._expected, self._failed, self._largest], axis=1)
        counts = [len(blocks) for blocks in self._blocks_by_tensor()]
        return [{"ranges": part} for part in torch.split(torch.from_numpy(table), counts)]

    def load_state(self, state: Sequence[Mapping[str, Tensor]]) -> None:
        table = torch.cat([part["ranges"] for part in state]).cpu().numpy()
        self._seen, self._expected, self._failed, self._largest = (column.copy() for column in table.T)

    def _set_steps(self, hints: Sequence[bytes]) -> None:
        exponents = np.stack([np.frombuffer(hint, dtype=np.int8) for hint in hints]).max(0)
        self._steps = np.ldexp(1.0, exponents.astype(np.int32))

    def _accept(self, place: int, steps: float) -> None:
        """A block was decoded, and the others were this many steps away."""
        distance, before = max(steps, 1.0) * self._steps[place], self._seen[place]
        self._seen[place] = distance if math.isnan(before) else max(distance, _MEMORY * before)
        self._expected[place] = _MARGIN * self._seen[place]
        self._failed[place] = 0.0
        self._rejections[place] = 0

    def _reject(self, place: int) -> None:
        self._rejected += 1
        self._rejections[place] += 1
        reach, before, enough = 127 * self._steps[place], self._failed[place], _ENOUGH * self._largest[place]
        if reach <= before:
            return  # its hint was sent before the last rejection, and it failed for the same reason
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

    def _encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[bool]:
        self._set_steps(hints)
        scratch = _Scratch(self)
        place = 0
        for chunk in self.chunks:
            finite = True
            for block in chunk.blocks:
                value = scratch.as_compute(values[block.tensor][block.start : block.stop])
                record, codes = self._record_of(out, block), self._codes(out, block, torch.uint8)
                numbers = scratch.numbers(value, 1.0 / self._steps[place], self._noise(message_id, block), codes)
                largest = _largest(numbers)
                if largest < _LARGEST_NUMBER:  # false for NaN
                    self._largest[place] = largest * self._steps[place]
                    _write(record, [*scratch.sums(numbers, largest), 0.0])
                elif bool(torch.isfinite(value).all()):
                    self._largest[place] = _largest(value)
                    _write(record, [_NOTHING] * _FIELDS)
                else:
                    finite = False
                    _write(record, [_NOT_FINITE] * _FIELDS)
                place += 1
            yield finite

    def _finite(self, message: Tensor, chunk: Chunk) -> bool:
        return not any(np.isnan(_read(self._record_of(message, block))[0]) for block in chunk.blocks)

    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        return 0 if np.isnan(_read(self._record_of(message, block))[0]) else None

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        scratch = _Scratch(self)
        ours, theirs = self._read(sent), self._read(received)
        for place, block in enumerate(self._blocks):
            our_codes, their_codes = (self._codes(message, block, torch.uint8) for message in (sent, received))
            found = scratch.wrapped(ours[place], our_codes, theirs[place], their_codes)
            if found is None:
                self._reject(place)
                yield block, None, 1.0
                continue
            steps, largest = found
            self._accept(place, max(theirs[place, 2], largest))
            yield block, steps, float(self._steps[place])

    def _reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        scratch = _Scratch(self)
        for block in chunk.blocks:
            records = [_read(self._record_of(message, block, chunk.start)) for message in messages]
            parts = [self._codes(message, block, torch.uint8, chunk.start) for message in messages]
            record, codes = self._record_of(out, block, chunk.start), self._codes(out, block, torch.uint8, chunk.start)
            if any(np.isnan(read[0]) for read in records):
                _write(record, [_NOT_FINITE] * _FIELDS)
            elif not self._move(records, parts, sizes, record, codes, scratch, self._noise(message_id, block)):
                _write(record, [_NOTHING] * _FIELDS)

    def _move(
        self,
        records: Sequence[FloatArray],
        parts: Sequence[Tensor],
        sizes: Sequence[int],
        record: Tensor,
        codes: Tensor,
        scratch: _Scratch,
        noise: Tensor,
    ) -> bool:
        """Writes the mean of some messages as the first one's lattice numbers, each moved by a few steps; False if some of
        the values that it represents would be too far from it."""
        total = torch.zeros(len(codes), dtype=self.compute, device=self.device)
        reach = float(records[0][2])
        for theirs, their_codes, size in zip(records[1:], parts[1:], sizes[1:], strict=True):
            found = scratch.wrapped(records[0], parts[0], theirs, their_codes)
            if found is None:
                return False
            steps, largest = found
            reach = max(reach, largest + float(theirs[2]))
            total.add_(steps, alpha=size)
        moves = torch.empty_like(codes)
        moved = scratch.numbers(total.div_(sum(sizes)), 1.0, noise, moves)
        largest = _largest(moved)
        if not reach + largest <= 127:
            return False
        sums = scratch.sums(moved, largest)
        torch.add(parts[0], moves, out=codes)
        _write(record, [records[0][0] + sums[0], (records[0][1] + sums[1]) % _PRIME, reach + largest])
        return True

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        records = self._read(sent)
        for place, block in enumerate(self._blocks):
            value = values[block.tensor][block.start : block.stop].to(self.compute)
            if not np.isfinite(records[place, 0]):
                yield block, value.clone()
                continue
            step, code = float(self._steps[place]), self._codes(sent, block, torch.int8).to(self.compute)
            # The lattice number with this code that is nearest to the value.
            yield block, (code + 256 * torch.round((value / step - code) / 256)) * step

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _record_of(self, message: Tensor, block: Block, base: int = 0) -> Tensor:
        return message[block.record - base : block.record - base + self._record].view(torch.float64)

    def _read(self, message: Tensor) -> FloatArray:
        """All records of a message, one per row."""
        array: FloatArray = message.cpu().numpy().view(np.float64)
        return array[self._rows]

    def _noise(self, message_id: MessageId, block: Block) -> Tensor:
        index = self.tensors[block.tensor].index
        return noise_at(block.numel, self.compute, self.device, message_id.round, message_id.rank, index, block.start)


class _Scratch:
    """Temporaries for one block, on the device of the bucket."""

    def __init__(self, compression: Int8) -> None:
        longest = min(compression.block_elements, max((block.numel for block in compression._blocks), default=0))
        size = -(-longest // _COLUMNS) * _COLUMNS
        self._compute, self._device = compression.compute, compression.device
        self._numbers = torch.empty(size, dtype=compression.compute, device=compression.device)
        self._values = torch.empty(
            longest if compression.dtype != compression.compute else 0, dtype=compression.compute, device=compression.device
        )
        self._bytes = torch.empty(longest, dtype=torch.uint8, device=compression.device)
        self._products = torch.empty(size, dtype=torch.float64, device=compression.device)

    def as_compute(self, value: Tensor) -> Tensor:
        return value if value.dtype == self._compute else self._values[: value.numel()].copy_(value)

    def numbers(self, value: Tensor, inverse_step: float, noise: Tensor, codes: Tensor) -> Tensor:
        """``value / step``, rounded up or down at random so that its mean is right; ``codes`` get their lowest bytes."""
        size = value.numel()
        numbers = self._numbers[:size]
        # The step is a power of two: the product is exact, and one rounding is left, fused or not.
        torch.add(noise, value, alpha=inverse_step, out=numbers)
        if self._compute == torch.float32:
            numbers.add_(_MAGIC)
            codes.copy_(numbers.view(torch.int32))
            return numbers.sub_(_MAGIC)
        codes.copy_(numbers.round_().nan_to_num(0, 0, 0).to(torch.int64))
        return numbers

    def sums(self, numbers: Tensor, largest: float) -> tuple[float, float]:
        """Two weighted sums of integers. Wrong ones may cancel in the columns, but then hardly in columns and rows."""
        size = numbers.numel()
        rows = -(-size // _COLUMNS)
        weights, by_column, by_row = _weights()
        if size <= _FEW and numbers.device.type == "cpu":  # all sums are exact in float64
            few = np.zeros(rows * _COLUMNS)
            few[:size] = numbers.numpy()
            table = few.reshape(rows, _COLUMNS)
            in_rows = np.asarray(table @ by_column, dtype=np.int64)
            return float(weights @ table.sum(0)), float(int(by_row[:rows] @ in_rows) % _PRIME)
        whole = self._numbers[: rows * _COLUMNS]
        whole[size:] = 0
        matrix = whole.view(rows, _COLUMNS)
        factors = torch.from_numpy(by_column).to(self._device)
        # Not a product of matrices: its precision depends on settings and on autocast, and the two ends could disagree.
        if largest < _TINY:
            columns, products = matrix.sum(0), self._products.view(self._compute)[: whole.numel()].view_as(matrix)
            torch.mul(matrix, factors.to(self._compute), out=products)
        else:
            products = self._products[: whole.numel()].view_as(matrix).copy_(matrix)
            columns = (matrix if largest < _SMALL else products).sum(0)
            products.mul_(factors)
        in_rows = products.sum(1).cpu().numpy().astype(np.int64)
        in_columns = columns.cpu().numpy().astype(np.float64)
        return float(weights @ in_columns), float(int(by_row[:rows] @ in_rows) % _PRIME)

    def wrapped(
        self, ours: FloatArray, our_codes: Tensor, theirs: FloatArray, their_codes: Tensor
    ) -> tuple[Tensor, float] | None:
        """Theirs less ours, in steps, and the largest of them; None if that cannot be determined. Both ends find the same."""
        if not (np.isfinite(ours[0]) and np.isfinite(theirs[0])):
            return None
        wrapped = self._bytes[: our_codes.numel()]
        torch.sub(their_codes, our_codes, out=wrapped)
        steps = self._numbers[: our_codes.numel()].copy_(wrapped.view(torch.int8))
        largest = _largest(steps)
        # -128 is the one difference that has the same sign on both ends.
        if largest >= 128:
            return None
        columns, both = self.sums(steps, largest)
        if columns != theirs[0] - ours[0] or (theirs[1] - ours[1] - both) % _PRIME:
            return None
        return steps, largest


@functools.cache
def _weights() -> tuple[FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """The weights of the columns' sums, and those of columns and of rows in the sum of both."""
    draw = np.random.default_rng(20200713)
    columns, by_column = (draw.integers(1, limit, _COLUMNS).astype(np.float64) for limit in (_WEIGHTS, _BY_COLUMN))
    return columns, by_column, draw.integers(1, _BY_ROW, _COLUMNS)


def _largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(value)
    return max(-float(low), float(high))


def _write(record: Tensor, fields: Sequence[float]) -> None:
    record.copy_(torch.tensor(fields, dtype=torch.float64, device="cpu"))


def _read(record: Tensor) -> FloatArray:
    fields: FloatArray = record.cpu().numpy().copy()
    return fields
