"""The int8 compression on the CPU, in one or two passes over the values, with exactly the numbers of the form in torch.

``encode`` and ``mix`` read and write values where they lie, so that one call codes blocks of many tensors: the caller passes
addresses of dense float32 values, and keeps the tensors alive. Blocks are the rows of an int64 table: the number of values,
the byte of the first code in the message, and the record's place, counted in float64.

``weights`` has the weights of both sums in its rows: of columns in the first, of columns and of rows in the second. All sums
are exact, in any order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit

from decent_dp.kernels.numba_tools import compiled, floats_at  # digest b437af300d67

__all__ = ["encode", "mix", "round_up_or_down", "wrap"]

_COLUMNS = 256
_PRIME = 2**31 - 1
_LARGEST_NUMBER = 2**21
# 1.5 · 2^23, and its bits. The bits of its sum with a small number, less these, are the nearest integer, ties to even. Of a
# sum with a large number, an infinity or a NaN they are far from zero.
_MAGIC, _MAGIC_BITS = np.float32(12582912.0), np.int32(0x4B400000)


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


@compiled(
    "boolean(int64[:, ::1], int64, int64, int64[::1], float32[::1], int64[::1], float64[::1], float64[::1], uint8[::1], "
    "float64[::1], int64[:, ::1])"
)
def encode(
    blocks: Any,
    first: int,
    last: int,
    addresses: Any,
    table: Any,
    noise: Any,
    steps: Any,
    largest: Any,
    message: Any,
    records: Any,
    weights: Any,
) -> bool:
    """Writes the codes and records of blocks [first, last), and ``largest``, their largest values.

    Args:
        addresses: of the values of these blocks.
        noise, steps: of all blocks, where the noise starts in ``table``, and the step.
        message, records: the same memory, as bytes and as float64.

    Returns:
        Whether all values are finite.
    """
    finite = True
    for b in range(first, last):
        numel, at, record = blocks[b]
        value = carray(floats_at(addresses[b - first]), numel)
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
            if math.isnan(top):
                finite = False
                records[record] = records[record + 1] = reach = math.nan
            else:
                largest[b] = top
                records[record] = records[record + 1] = reach = math.inf
        records[record + 2] = reach
    return finite


@compiled("void(int64[::1], float32[::1], float32[::1], uint8[::1], int64[:, ::1], float64[::1], float64[::1], float64[::1])")
def round_up_or_down(bounds: Any, value: Any, noise: Any, codes: Any, weights: Any, most: Any, first: Any, second: Any) -> None:
    """Rounds values to numbers at random; writes their lowest bytes, and of each block the largest, and the two sums."""
    for b in range(len(bounds) - 1):
        part = slice(bounds[b], bounds[b + 1])
        most[b], first[b], second[b] = _round_block(value[part], noise[part], np.float32(1.0), codes[part], weights)


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


@compiled(
    "void(int64[:, ::1], int64[::1], float32[::1], uint8[::1], float64[::1], uint8[::1], float64[::1], int64[:, ::1], "
    "boolean, boolean[::1], float64[::1])"
)
def mix(
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
    reach: Any,
) -> None:
    """Adds to the values of each block, if that is certain, their message less ours, in steps, times the block's factor.

    Args:
        moving: if not, the values stay as they are.
        certain, reach: of each block, whether it is, and how far their values may lie from ours, in steps.
    """
    for b in range(len(blocks)):
        numel, at, record = blocks[b]
        own, other = ours[at : at + numel], theirs[at : at + numel]
        most, certain[b] = _check_block(own, other, our_records[record:], their_records[record:], weights)
        reach[b] = max(their_records[record + 2], float(most))
        if certain[b] and moving:
            _add(carray(floats_at(addresses[b]), numel), own, other, factors[b])


@compiled(
    "void(int64[::1], uint8[::1], float64[:, ::1], uint8[::1], float64[:, ::1], int64[:, ::1], float32[::1], float64[::1], "
    "boolean[::1])"
)
def wrap(
    bounds: Any,
    ours: Any,
    our_records: Any,
    theirs: Any,
    their_records: Any,
    weights: Any,
    steps: Any,
    most: Any,
    certain: Any,
) -> None:
    """Writes theirs less ours, in steps; of each block the largest of them, and whether it is certain."""
    for b in range(len(bounds) - 1):
        part = slice(bounds[b], bounds[b + 1])
        most[b], certain[b] = _check_block(ours[part], theirs[part], our_records[b], their_records[b], weights)
    for i in range(len(ours)):
        steps[i] = np.float32(np.int8(np.uint8(theirs[i] - ours[i])))
