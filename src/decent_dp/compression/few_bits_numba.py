"""Messages of few bits on the CPU in Numba: one pass over the values to code them, and one over the codes to learn from them.

The numbers are those of ``FewBits`` in torch, but for the order in which the squares of a block are summed. bfloat16 numbers
are given as their bits. Rows are blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from decent_dp.compression.int8_numba import _compiled

__all__ = ["encode_rows", "learn_rows"]


@njit
def _narrow(value: Any) -> Any:
    """The bits of the nearest bfloat16, ties to even; of finite values, infinities and NaN."""
    bits = np.float32(value).view(np.uint32)
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit
def _wide(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@_compiled("void(float32[:, ::1], float32[:, ::1], float32[::1], float32, float32, uint16[::1], uint8[:, :, ::1])")
def encode_rows(values: Any, known: Any, counts: Any, apart: Any, offset: Any, scales: Any, planes: Any) -> None:
    """Writes the scales and the planes of bits of ``values - known``; ``values`` become that difference.

    Args:
        counts: of the values in each row that are no padding.
        apart: the distance of two sizes, in units of the scale; ``offset``: subtracted from a size in units of it.
    """
    bits, rows = planes.shape[0], len(values)
    top = np.float32((1 << (bits - 1)) - 1)
    for row in range(rows):
        value, reference = values[row], known[row]
        total = np.float32(0)
        for i in range(len(value)):
            value[i] = np.float32(value[i] - reference[i])
        # Sums of every eighth element, which a processor makes at once.
        sums = np.zeros(8, np.float32)
        for start in range(0, len(value), 8):
            for k in range(8):
                sums[k] += value[start + k] * value[start + k]
        for k in range(8):
            total += sums[k]
        scales[row] = _narrow(np.sqrt(total / counts[row]))
        scale = np.float32(_wide(scales[row]) * apart)
        scale = scale if scale > 0 else np.float32(1)
        for byte in range(len(value) // 8):
            sign = np.uint8(0)
            for k in range(8):
                sign |= np.uint8(value[8 * byte + k] < 0) << np.uint8(k)
            planes[0, row, byte] = sign
        if bits == 1:
            continue
        for byte in range(len(value) // 8):
            one = two = three = np.uint8(0)
            for k in range(8):
                level = np.float32(np.float32(abs(value[8 * byte + k]) / scale) - offset)
                number = np.uint8(min(max(level, np.float32(0)), top)) if level == level else np.uint8(0)
                one |= (number & np.uint8(1)) << np.uint8(k)
                two |= (number >> np.uint8(1) & np.uint8(1)) << np.uint8(k)
                three |= (number >> np.uint8(2) & np.uint8(1)) << np.uint8(k)
            planes[1, row, byte] = one
            if bits == 4:
                planes[2, row, byte], planes[3, row, byte] = two, three


@njit
def _decode(planes: Any, row: Any, scale: Any, first: Any, apart: Any, signs: Any, out: Any) -> None:
    bits = planes.shape[0]
    if bits == 1:
        size = np.float32(scale * np.float32(first))
        for byte in range(len(out) // 8):
            of_byte = signs[planes[0, row, byte]]
            for k in range(8):
                out[8 * byte + k] = of_byte[k] * size
        return
    base = np.float32(first + apart * ((1 << (bits - 1)) - 1) / 2)
    for i in range(len(out)):
        out[i] = base
    for bit in range(bits - 1):
        half = np.float32(apart * (1 << bit) / 2)
        for byte in range(len(out) // 8):
            of_byte = signs[planes[1 + bit, row, byte]]
            for k in range(8):
                out[8 * byte + k] = np.float32(out[8 * byte + k] - np.float32(of_byte[k] * half))
    for byte in range(len(out) // 8):
        of_byte = signs[planes[0, row, byte]]
        for k in range(8):
            out[8 * byte + k] = np.float32(np.float32(of_byte[k] * out[8 * byte + k]) * scale)


@_compiled(
    "void(float32[:, ::1], uint16[::1], uint8[:, :, ::1], uint16[::1], uint8[:, :, ::1], float64, float64, float32[:, ::1], "
    "float32[:, ::1])"
)
def learn_rows(
    known: Any,
    our_scales: Any,
    ours: Any,
    their_scales: Any,
    theirs: Any,
    first: Any,
    apart: Any,
    signs: Any,
    out: Any,
) -> None:
    """Moves ``known`` by the mean of both messages; writes theirs less ours to ``out``, if it has rows."""
    own, other = np.empty(known.shape[1], np.float32), np.empty(known.shape[1], np.float32)
    for row in range(len(known)):
        _decode(ours, row, _wide(our_scales[row]), first, apart, signs, own)
        _decode(theirs, row, _wide(their_scales[row]), first, apart, signs, other)
        reference = known[row]
        if len(out):
            for i in range(len(own)):
                out[row, i] = np.float32(other[i] - own[i])
        for i in range(len(own)):
            mean = np.float32(np.float32(own[i] + other[i]) * np.float32(0.5))
            reference[i] = np.float32(mean + reference[i])
