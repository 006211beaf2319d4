"""The int8 compression on the CPU in Numba, in one or two passes over the values, with exactly the numbers of ``Lattice``.

The functions read and write values where they lie, so that one call codes blocks of many tensors: they get addresses of dense
float32 values, and their caller keeps the tensors alive. Blocks are the rows of an int64 table: the number of values, the byte
of the first code in the message, and the record's place, counted in float64. ``weights`` has the weights of both sums in its
rows: of columns in the first, of columns and of rows in the second. All sums are exact, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from decent_dp.compression.codec import Block, MessageId
from decent_dp.compression.lattice import BoolArray, FloatArray, IntArray, Lattice, sum_weights
from decent_dp.compression.stochastic_rounding import noise_starts, noise_table

__all__ = ["NumbaLattice"]

_COLUMNS = 256
_PRIME = 2**31 - 1
_LARGEST_NUMBER = 2**21
# 1.5 · 2^23, and its bits. The bits of its sum with a small number, less these, are the nearest integer, ties to even. Of a
# sum with a large number, an infinity or a NaN they are far from zero.
_MAGIC, _MAGIC_BITS = np.float32(12582912.0), np.int32(0x4B400000)


def _compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function for ``signature`` now. Its calls release the interpreter lock, and check no bounds.

    Without ``fastmath``, and without fused products and sums: numbers are those of the same operations in torch.
    """

    def compile_it(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except Exception:
            # No folder can be written, a disk is full, or a file is broken: without the cache, each process compiles. If it
            # was another error, it comes again. (Numba replaces its files whole, so that many processes may write them.)
            return njit(signature, nogil=True)(function)

    return compile_it


@intrinsic
def _floats_at(typing_context: Any, address: Any) -> Any:
    """The float32 values that lie at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(address), generate


@njit
def _round_row(
    value: Any, noise: Any, inverse: Any, codes: Any, columns: Any, both: Any, by_row: Any, low: Any, high: Any
) -> Any:
    """Codes a row, and adds it to the sums of the columns, without and with the row's weight."""
    for c in range(len(value)):
        bits = np.float32(np.float32(noise[c] + np.float32(value[c] * inverse)) + _MAGIC).view(np.int32)
        codes[c] = np.uint8(bits)
        number = np.int32(bits - _MAGIC_BITS)
        low, high = min(low, number), max(high, number)
        columns[c] += number
        both[c] += np.int64(number) * by_row
    return low, high


@njit
def _round_block(value: Any, noise: Any, inverse: Any, codes: Any, weights: Any) -> Any:
    """Codes a block; the largest absolute number, and the two sums, which mean nothing if a number is too large."""
    columns, both = np.zeros(_COLUMNS, np.int32), np.zeros(_COLUMNS, np.int64)
    low = high = np.int32(0)
    for row, start in enumerate(range(0, len(value), _COLUMNS)):
        part = slice(start, min(start + _COLUMNS, len(value)))
        low, high = _round_row(value[part], noise[part], inverse, codes[part], columns, both, weights[2, row], low, high)
    first = second = np.int64(0)
    for c in range(_COLUMNS):
        first += weights[0, c] * columns[c]
        second += weights[1, c] * both[c]
    return max(np.int64(high), -np.int64(low)), first, second % _PRIME


@_compiled(
    "void(int64[:, ::1], int64[::1], float32[::1], int64[::1], float64[::1], float64[::1], uint8[::1], float64[::1], "
    "int64[:, ::1])"
)
def _encode(
    blocks: Any,
    addresses: Any,
    table: Any,
    noise: Any,
    steps: Any,
    largest: Any,
    message: Any,
    records: Any,
    weights: Any,
) -> None:
    """Writes the codes and records of blocks, and ``largest``, their largest values; NaN where one is not finite.

    Args:
        addresses: of the values of the blocks.
        noise: where it starts in ``table``.
        message, records: the same memory, as bytes and as float64.
    """
    for b in range(len(blocks)):
        numel, at, record = blocks[b]
        value = carray(_floats_at(addresses[b]), numel)
        codes = message[at : at + numel]
        most, one, other = _round_block(value, table[noise[b] : noise[b] + numel], np.float32(1.0 / steps[b]), codes, weights)
        reach = 0.0
        if most < _LARGEST_NUMBER:
            largest[b] = most * steps[b]
            records[record], records[record + 1] = one, other
        else:
            top = np.float32(0.0)
            for i in range(numel):
                if not math.isfinite(value[i]):
                    top = np.float32(math.nan)
                    break
                top = max(top, abs(value[i]))
            largest[b] = top
            if math.isnan(top):
                records[record] = records[record + 1] = reach = math.nan
            else:
                records[record] = records[record + 1] = reach = math.inf
        records[record + 2] = reach


@njit
def _sum_row(ours: Any, theirs: Any, columns: Any, by_column: Any, low: Any, high: Any) -> Any:
    """Adds the differences of a row to the sums of the columns, and returns their sum with the columns' weights."""
    total = np.int32(0)  # 7 + 9 + 8 bits
    for c in range(len(ours)):
        difference = np.int8(np.uint8(theirs[c] - ours[c]))
        low, high = min(low, difference), max(high, difference)
        columns[c] = np.int16(columns[c] + np.int16(difference))  # 7 + 8 bits
        total = np.int32(total + np.int32(np.int32(difference) * np.int32(by_column[c])))
    return low, high, total


@njit
def _check_block(ours: Any, theirs: Any, our_record: Any, their_record: Any, weights: Any) -> Any:
    """The largest wrapped difference of a block, and whether the differences are certain."""
    columns, by_column = np.zeros(_COLUMNS, np.int16), weights[1].astype(np.int16)
    low = high = np.int8(0)
    first = second = np.int64(0)
    for row, start in enumerate(range(0, len(ours), _COLUMNS)):
        part = slice(start, min(start + _COLUMNS, len(ours)))
        low, high, total = _sum_row(ours[part], theirs[part], columns, by_column, low, high)
        second += np.int64(total) * weights[2, row]
    for c in range(_COLUMNS):
        first += weights[0, c] * columns[c]
    most = max(np.int64(high), -np.int64(low))
    # Records of what is not finite, or has no codes: every comparison with them is false. (A remainder of them is a NaN.)
    same = their_record[0] - our_record[0] == first and (their_record[1] - our_record[1] - second) % _PRIME == 0
    return most, same and most < 128  # -128 is the one difference that has the same sign on both ends


@njit
def _add(value: Any, ours: Any, theirs: Any, factor: Any) -> None:
    for i in range(len(value)):
        difference = np.float32(np.int8(np.uint8(theirs[i] - ours[i])))
        value[i] = np.float32(value[i] + np.float32(difference * factor))


@_compiled(
    "void(int64[:, ::1], int64[::1], float32[::1], uint8[::1], float64[::1], uint8[::1], float64[::1], int64[:, ::1], "
    "boolean, boolean[::1], float64[::1])"
)
def _mix(
    blocks: Any,
    addresses: Any,
    factors: Any,
    ours: Any,
    our_records: Any,
    theirs: Any,
    their_records: Any,
    weights: Any,
    moving: bool,
    certain: Any,
    most: Any,
) -> None:
    """Writes for each block whether the differences are certain, and the largest, in steps; ``moving``: adds those that are,
    times the block's factor, to its values."""
    for b in range(len(blocks)):
        numel, at, record = blocks[b]
        own, other = ours[at : at + numel], theirs[at : at + numel]
        most[b], certain[b] = _check_block(own, other, our_records[record:], their_records[record:], weights)
        if certain[b] and moving:
            _add(carray(_floats_at(addresses[b]), numel), own, other, factors[b])


class NumbaLattice(Lattice):
    """``Lattice`` for float32 values."""

    def __init__(self, blocks: Sequence[Block], numbers: Sequence[int], compute: torch.dtype, device: torch.device) -> None:
        super().__init__(blocks, numbers, compute, device)
        rows = [(block.numel, block.at, block.record // 8) for block in blocks]
        self._table: IntArray = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._index = np.array(numbers, dtype=np.int64)
        self._start = np.array([block.start for block in blocks], dtype=np.int64)
        self._noise = noise_table(torch.float32, torch.device("cpu")).numpy()

    def _rows(self, places: slice, base: int) -> IntArray:
        rows: IntArray = self._table[places] - np.array([0, base, base // 8])
        return rows

    def encode(
        self,
        places: slice,
        parts: Sequence[Tensor],
        steps: FloatArray,
        message_id: MessageId,
        out: Tensor,
        base: int = 0,
    ) -> FloatArray:
        message, largest = out.numpy(), np.empty(len(parts))
        noise = noise_starts((message_id.round, message_id.rank), self._index[places], self._start[places])
        dense = [part.contiguous() for part in parts]
        _encode(
            *(self._rows(places, base), _addresses(dense), self._noise, noise, steps, largest, message),
            *(message.view(np.float64), sum_weights()),
        )
        return largest

    def compare(self, places: slice, ours: Tensor, theirs: Tensor, base: int = 0) -> tuple[BoolArray, FloatArray]:
        rows = self._rows(places, base)
        return self._compare(rows, np.zeros(len(rows), np.int64), np.zeros(len(rows)), ours, theirs, moving=False)

    def mix(self, parts: Sequence[Tensor], ours: Tensor, theirs: Tensor, factors: FloatArray) -> tuple[BoolArray, FloatArray]:
        if not all(part.is_contiguous() for part in parts):
            return super().mix(parts, ours, theirs, factors)
        found = self._compare(self._table, _addresses(parts), factors, ours, theirs, moving=bool(factors.any()))
        torch.autograd.graph.increment_version(parts)
        return found

    def _compare(
        self, rows: IntArray, addresses: IntArray, factors: FloatArray, ours: Tensor, theirs: Tensor, *, moving: bool
    ) -> tuple[BoolArray, FloatArray]:
        certain, most = np.empty(len(rows), dtype=np.bool_), np.empty(len(rows))
        own, other = ours.numpy(), theirs.numpy()
        _mix(
            *(rows, addresses, factors.astype(np.float32), own, own.view(np.float64), other, other.view(np.float64)),
            *(sum_weights(), moving, certain, most),
        )
        return certain, most


def _addresses(parts: Sequence[Tensor]) -> IntArray:
    return np.array([part.data_ptr() for part in parts], dtype=np.int64)
