"""Arithmetic on a lattice: values become lattice numbers and their lowest bytes, and numbers become two weighted sums.

Small blocks that lie one after another are coded together, as on a CPU a call costs more than the arithmetic of a short vector.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.codec import Block, Chunk, part_of
from decent_dp.kernels import load_numba

__all__ = ["LARGEST_NUMBER", "PRIME", "FloatArray", "IntArray", "Scratch", "Stretch", "kernels_for", "runs_of", "sum_weights"]

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

# Lattice numbers are below this, so that float32 holds them and `_MAGIC` finds them.
LARGEST_NUMBER = 2**21

# Blocks are summed as a matrix with so many columns, and at most as many rows.
_COLUMNS = 256
# Weights of the columns' sums (21 + 16 + 16 bits: exact in float64); and of columns and rows in the sum of both, which is
# taken modulo a prime (21 + 9 + 8 + 17 + 8 bits: exact in int64).
_WEIGHTS, _BY_COLUMN, _BY_ROW = 2**16, 2**9, 2**17
PRIME = 2**31 - 1
# Numbers below these have exact sums in float32: of columns, and of rows with weights.
_SMALL, _TINY = 2**16, 2**7
# On a CPU, blocks of up to so many numbers are coded together.
_FEW = 2**13

# 1.5 · 2^23: a float32 of this size has no fraction, so that adding it rounds to the nearest integer, ties to even, and the
# lowest byte of the sum is that integer modulo 256.
_MAGIC = 12582912.0


class Stretch:
    """Blocks of a chunk that are coded together; their codes lie one after another.

    Attributes:
        places: of the blocks, in the order of the message.
        at: the byte of the first code in the message.
        record: that of the first record.
        numel: the number of values of all blocks.
        small: NumPy sums them; otherwise it is one block.
        bounds: where each block starts in the run; one more entry for the end.
        edges: the same as an array.
    """

    def __init__(self, first: int, blocks: Sequence[Block], record_bytes: int, *, small: bool) -> None:
        self.blocks, self.small = tuple(blocks), small
        self.places = slice(first, first + len(blocks))
        self.at, self.record = blocks[0].at, blocks[0].record
        self.record_stop = self.record + len(blocks) * record_bytes
        self.bounds = [0, *itertools.accumulate(block.numel for block in blocks)]
        self.numel = self.bounds[-1]
        self.edges: IntArray = np.array(self.bounds, dtype=np.int64)
        self._starts = self.edges[:-1]
        # The weights of each number, only for runs of small blocks.
        self._weights: tuple[FloatArray, IntArray] | None = None

    def codes(self, message: Tensor, base: int = 0) -> Tensor:
        """The codes in a part of the message that starts at its byte ``base``."""
        return message[self.at - base : self.at - base + self.numel]

    def records(self, message: Tensor, base: int = 0) -> Tensor:
        """The records, one per row."""
        return message[self.record - base : self.record_stop - base].view(torch.float64).view(len(self.blocks), -1)

    def largest(self, numbers: Tensor) -> FloatArray:
        """The largest absolute value of each block; NaN if it contains one."""
        if len(self.blocks) == 1:
            return np.array([largest(numbers)])
        found: FloatArray = np.maximum.reduceat(np.abs(numbers.numpy()), self._starts).astype(np.float64)
        return found

    def small_sums(self, numbers: Tensor) -> tuple[FloatArray, FloatArray]:
        """``Scratch.sums`` of small blocks; all sums are exact."""
        if self._weights is None:
            weights, by_column, by_row = _weights()
            in_block = np.concatenate([np.arange(block.numel) for block in self.blocks])
            row, column = np.divmod(in_block, _COLUMNS)
            self._weights = weights[column], by_column[column].astype(np.int64) * by_row[row]
        wide = numbers.numpy().astype(np.float64)
        in_columns, in_both = wide * self._weights[0], wide.astype(np.int64) * self._weights[1]
        return np.add.reduceat(in_columns, self._starts), (np.add.reduceat(in_both, self._starts) % PRIME).astype(np.float64)


def runs_of(chunk: Chunk, first: int, device: torch.device, record_bytes: int) -> Iterator[Stretch]:
    """The blocks of a chunk as runs; ``first`` is the place of its first block."""
    small = [device.type == "cpu" and block.numel <= _FEW for block in chunk.blocks]
    for together, members in itertools.groupby(range(len(small)), small.__getitem__):
        found = list(members)
        for part in [found] if together else [[member] for member in found]:
            yield Stretch(first + part[0], [chunk.blocks[member] for member in part], record_bytes, small=together)


class Scratch:
    """Temporaries for one run, on the device of the bucket."""

    def __init__(self, runs: Sequence[Stretch], compute: torch.dtype, device: torch.device) -> None:
        longest = max((run.numel for run in runs), default=0)
        size = -(-longest // _COLUMNS) * _COLUMNS
        self._compute, self._device = compute, device
        self._kernels = kernels_for(compute, device)
        self._numbers = torch.empty(size, dtype=compute, device=device)
        self._values = torch.empty(longest, dtype=compute, device=device)
        self._bytes = torch.empty(longest, dtype=torch.uint8, device=device)
        self._products = torch.empty(size, dtype=torch.float64, device=device)

    def gather(self, run: Stretch, values: Sequence[Tensor]) -> Tensor:
        """The values of a run, one after another."""
        parts = [part_of(values[block.tensor], block) for block in run.blocks]
        if len(parts) == 1:
            only = parts[0]
            return only if only.dtype == self._compute else self._values[: run.numel].copy_(only)
        return torch.cat([part.to(self._compute) for part in parts], out=self._values[: run.numel])

    def numbers(self, run: Stretch, value: Tensor, inverse_steps: FloatArray, noise: Sequence[Tensor], codes: Tensor) -> Tensor:
        """``value / step``, rounded up or down at random so that its mean is right; ``codes`` get their lowest bytes."""
        numbers = self._numbers[: run.numel]
        # Steps are powers of two: the products are exact, and one rounding is left, fused or not.
        if len(noise) == 1:
            torch.add(noise[0], value, alpha=float(inverse_steps[0]), out=numbers)
        else:
            torch.cat(list(noise), out=numbers)
            lengths = np.diff(run.bounds)
            factors = torch.from_numpy(np.repeat(inverse_steps, lengths)).to(self._compute)
            numbers.addcmul_(value, factors)
        if self._compute == torch.float32:
            numbers.add_(_MAGIC)
            codes.copy_(numbers.view(torch.int32))
            return numbers.sub_(_MAGIC)
        codes.copy_(numbers.round_().nan_to_num(0, 0, 0).to(torch.int64))
        return numbers

    def round_up_or_down(
        self, run: Stretch, value: Tensor, noise: Sequence[Tensor], codes: Tensor
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Numbers of the values themselves, with a step of 1: the largest of each block, and its two sums."""
        if self._kernels is None:
            numbers = self.numbers(run, value, np.ones(len(run.blocks)), noise, codes)
            most = run.largest(numbers)
            return most, *self.sums(run, numbers, most)
        found = np.empty((3, len(run.blocks)))
        together = torch.cat(list(noise)) if len(noise) > 1 else noise[0]
        self._kernels.round_up_or_down(
            *(run.edges, value.numpy(), together.numpy(), codes.numpy(), sum_weights(), *found),
        )
        return found[0], found[1], found[2]

    def sums(self, run: Stretch, numbers: Tensor, largest: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Two weighted sums of the integers of each block; those of a block that has other values mean nothing. Wrong integers
        may cancel in the columns, but then hardly in columns and rows."""
        with np.errstate(invalid="ignore"):
            if run.small:
                return run.small_sums(numbers)
            return self._large_sums(numbers, float(largest[0]))

    def _large_sums(self, numbers: Tensor, largest: float) -> tuple[FloatArray, FloatArray]:
        size = numbers.numel()
        rows = -(-size // _COLUMNS)
        weights, by_column, by_row = _weights()
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
        return np.array([weights @ in_columns]), np.array([float(int(by_row[:rows] @ in_rows) % PRIME)])

    def wrapped(
        self, run: Stretch, ours: FloatArray, our_codes: Tensor, theirs: FloatArray, their_codes: Tensor
    ) -> tuple[Tensor, FloatArray, npt.NDArray[np.bool_]]:
        """Theirs less ours, in steps; of each block the largest of them, and whether it is certain. Both ends find the same."""
        steps = self._numbers[: run.numel]
        if self._kernels is not None:
            largest, certain = np.empty(len(run.blocks)), np.empty(len(run.blocks), dtype=np.bool_)
            self._kernels.wrap(
                *(run.edges, our_codes.numpy(), ours, their_codes.numpy(), theirs),
                *(sum_weights(), steps.numpy(), largest, certain),
            )
            return steps, largest, certain
        wrapped = self._bytes[: run.numel]
        torch.sub(their_codes, our_codes, out=wrapped)
        steps.copy_(wrapped.view(torch.int8))
        largest = run.largest(steps)
        columns, both = self.sums(run, steps, largest)
        # Records of what is not finite, or has no codes: every comparison with them is false.
        with np.errstate(invalid="ignore"):
            certain = (columns == theirs[:, 0] - ours[:, 0]) & ((theirs[:, 1] - ours[:, 1] - both) % PRIME == 0)
        # -128 is the one difference that has the same sign on both ends.
        return steps, largest, certain & (largest < 128)


@functools.cache
def _weights() -> tuple[FloatArray, FloatArray, IntArray]:
    """The weights of the columns' sums, and those of columns and of rows in the sum of both."""
    draw = np.random.default_rng(20200713)
    columns, by_column = (draw.integers(1, limit, _COLUMNS).astype(np.float64) for limit in (_WEIGHTS, _BY_COLUMN))
    return columns, by_column, draw.integers(1, _BY_ROW, _COLUMNS)


@functools.cache
def sum_weights() -> IntArray:
    """The same in rows, as kernels take them."""
    return np.stack([weights.astype(np.int64) for weights in _weights()])


def kernels_for(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """The kernels for arithmetic in ``dtype``, or None."""
    return load_numba("int8_cpu") if dtype == torch.float32 and device.type == "cpu" else None


def largest(value: Tensor) -> float:
    """The largest absolute value; 0 of none."""
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(value)
    return max(-float(low), float(high)) + 0.0  # never -0.0, as it is saved
