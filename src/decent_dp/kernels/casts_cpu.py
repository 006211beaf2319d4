"""Float32 values as they are, or as bfloat16, on the CPU, in one pass over the values, with the numbers of the form in torch.

Values are read and written where they lie: the caller passes addresses of dense float32 values, and keeps the tensors alive.
Blocks are the rows of an int64 table: the number of values, and the place of the first code in the message, counted in codes.
bfloat16 is the upper half of a float32, and is read and written as bits. (Those of a NaN are not torch's, which depend on its
place in a vector. No such message is mixed.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from decent_dp.kernels.numba_tools import compiled, floats_at  # digest b437af300d67

__all__ = ["encode_bfloat16", "encode_float32", "mix_bfloat16", "mix_float32"]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY, _INFINITY_16 = np.uint32(0x7F800000), np.uint32(0x7F80)
# Of every NaN: with the rounding, the bits of one could become an infinity, or a zero with a sign.
_NAN_16 = np.uint32(0x7FC0)


@njit
def _copy(value: Any, codes: Any) -> Any:
    """Returns the largest magnitude as bits, which is that of an infinity or of a NaN if there is one."""
    top = np.uint32(0)
    for i in range(len(value)):
        codes[i] = value[i]
        top = max(top, np.uint32(np.float32(value[i]).view(np.uint32) & _MAGNITUDE))
    return top


@njit
def _round(value: Any, codes: Any) -> Any:
    top = np.uint32(0)
    for i in range(len(value)):
        bits = np.float32(value[i]).view(np.uint32)
        # To the nearest, ties to even.
        rounded = np.uint32(
            np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        )
        code = _NAN_16 if np.uint32(bits & _MAGNITUDE) > _INFINITY else rounded
        codes[i] = np.uint16(code)
        top = max(top, np.uint32(code & np.uint32(0x7FFF)))
    return top


@compiled("boolean(int64[:, ::1], int64, int64, int64[::1], float32[::1])")
def encode_float32(blocks: Any, first: int, last: int, addresses: Any, codes: Any) -> bool:
    """Writes the codes of blocks [first, last), to whose values ``addresses`` points; whether all codes are finite."""
    finite = True
    for b in range(first, last):
        numel, at = blocks[b]
        finite &= _copy(carray(floats_at(addresses[b - first]), numel), codes[at : at + numel]) < _INFINITY
    return finite


@compiled("boolean(int64[:, ::1], int64, int64, int64[::1], uint16[::1])")
def encode_bfloat16(blocks: Any, first: int, last: int, addresses: Any, codes: Any) -> bool:
    """The same with codes in bfloat16."""
    finite = True
    for b in range(first, last):
        numel, at = blocks[b]
        finite &= _round(carray(floats_at(addresses[b - first]), numel), codes[at : at + numel]) < _INFINITY_16
    return finite


@njit
def _add(value: Any, ours: Any, theirs: Any, rate: Any) -> None:
    for i in range(len(value)):
        value[i] = np.float32(value[i] + np.float32(np.float32(theirs[i] - ours[i]) * rate))


@njit
def _add_16(value: Any, ours: Any, theirs: Any, rate: Any) -> None:
    for i in range(len(value)):
        own = np.uint32(np.uint32(ours[i]) << np.uint32(16)).view(np.float32)
        other = np.uint32(np.uint32(theirs[i]) << np.uint32(16)).view(np.float32)
        value[i] = np.float32(value[i] + np.float32(np.float32(other - own) * rate))


@compiled("void(int64[:, ::1], int64[::1], float32, float32[::1], float32[::1])")
def mix_float32(blocks: Any, addresses: Any, rate: Any, ours: Any, theirs: Any) -> None:
    """Adds ``rate`` times their message less ours to the values."""
    for b in range(len(blocks)):
        numel, at = blocks[b]
        part = slice(at, at + numel)
        _add(carray(floats_at(addresses[b]), numel), ours[part], theirs[part], rate)


@compiled("void(int64[:, ::1], int64[::1], float32, uint16[::1], uint16[::1])")
def mix_bfloat16(blocks: Any, addresses: Any, rate: Any, ours: Any, theirs: Any) -> None:
    """The same with messages in bfloat16."""
    for b in range(len(blocks)):
        numel, at = blocks[b]
        part = slice(at, at + numel)
        _add_16(carray(floats_at(addresses[b]), numel), ours[part], theirs[part], rate)
