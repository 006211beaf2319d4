"""The arithmetic of int8 messages: values become lattice numbers and their lowest bytes, and numbers two weighted sums."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.codec import Block, MessageId
from decent_dp.compression.stochastic_rounding import noise_at

__all__ = [
    "FIELDS",
    "LARGEST_NUMBER",
    "PRIME",
    "BoolArray",
    "FloatArray",
    "IntArray",
    "Lattice",
    "largest",
    "load_numba",
    "sum_weights",
    "weighted_sums",
]

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

logger = logging.getLogger(__name__)

# Of a record: two sums and a reach, in float64.
FIELDS = 3

# Lattice numbers are below this, so that float32 holds them and `_MAGIC` finds them.
LARGEST_NUMBER = 2**21

# Blocks are summed as a matrix with so many columns, and at most as many rows.
_COLUMNS = 256
# Weights of the columns' sums (21 + 16 + 16 bits: exact in float64); and of columns and rows in the sum of both, which is
# taken modulo a prime (21 + 9 + 8 + 17 + 8 bits: exact in int64).
_WEIGHTS, _BY_COLUMN, _BY_ROW = 2**16, 2**9, 2**17
PRIME = 2**31 - 1

# 1.5 · 2^23: a float32 of this size has no fraction, so that adding it rounds to the nearest integer, ties to even, and the
# lowest byte of the sum is that integer modulo 256.
_MAGIC = 12582912.0


class Lattice:
    """The arithmetic on the blocks of a bucket, one after another in torch: the readable form.

    Args:
        blocks: of a message; their number of elements is at most 2^16.
        numbers: of the parameter of each block.
        compute: the dtype of arithmetic.
        device: of values and messages.
    """

    def __init__(self, blocks: Sequence[Block], numbers: Sequence[int], compute: torch.dtype, device: torch.device) -> None:
        self.blocks, self._numbers, self._compute, self._device = tuple(blocks), tuple(numbers), compute, device

    def encode(
        self,
        places: slice,
        parts: Sequence[Tensor],
        steps: FloatArray,
        message_id: MessageId,
        out: Tensor,
        base: int = 0,
    ) -> FloatArray:
        """Writes the codes and records of some blocks.

        Args:
            places: of the blocks, whose values are ``parts``, and whose ``steps`` are powers of two.
            out: the message from its byte ``base`` on.

        Returns:
            The largest absolute value of each block; NaN where one is not finite.
        """
        found = np.empty(len(parts))
        for i, (block, number) in enumerate(zip(self.blocks[places], self._numbers[places], strict=True)):
            value = parts[i].to(self._compute)
            at = message_id.round, message_id.rank, number, block.start
            noise = noise_at(block.numel, self._compute, self._device, *at)
            numbers = _round(noise, value, 1.0 / steps[i], _codes(out, block, base))
            most = largest(numbers)
            if most < LARGEST_NUMBER:  # false for NaN
                record, found[i] = [*weighted_sums(numbers.to(torch.float64)), 0.0], most * steps[i]
            elif bool(value.isfinite().all()):
                record, found[i] = [math.inf] * FIELDS, largest(value)
            else:
                record, found[i] = [math.nan] * FIELDS, math.nan
            _record(out, block, base).copy_(torch.tensor(record, dtype=torch.float64, device="cpu"))
        return found

    def compare(self, places: slice, ours: Tensor, theirs: Tensor, base: int = 0) -> tuple[BoolArray, FloatArray]:
        """Compares some blocks of two messages, from byte ``base`` on. Both ends find the same.

        Returns:
            For each block whether the differences are certain, and the largest of them, in steps.
        """
        blocks = self.blocks[places]
        certain, most = np.zeros(len(blocks), dtype=np.bool_), np.empty(len(blocks))
        for i, block in enumerate(blocks):
            certain[i], most[i] = _compare(block, self.difference(block, ours, theirs, base), ours, theirs, base)
        return certain, most

    def mix(self, parts: Sequence[Tensor], ours: Tensor, theirs: Tensor, factors: FloatArray) -> tuple[BoolArray, FloatArray]:
        """Compares all blocks, and adds the differences that are certain, times the blocks' ``factors``, to ``parts``."""
        certain, most = np.zeros(len(self.blocks), dtype=np.bool_), np.empty(len(self.blocks))
        for i, block in enumerate(self.blocks):
            steps = self.difference(block, ours, theirs)
            certain[i], most[i] = _compare(block, steps, ours, theirs)
            if certain[i] and factors[i]:
                parts[i].add_(steps.mul_(float(factors[i])))
        return certain, most

    def difference(self, block: Block, ours: Tensor, theirs: Tensor, base: int = 0) -> Tensor:
        """Theirs less ours, in steps, modulo 256: a new 1-D tensor of the dtype of arithmetic."""
        return (_codes(theirs, block, base) - _codes(ours, block, base)).view(torch.int8).to(self._compute)


def _compare(block: Block, steps: Tensor, ours: Tensor, theirs: Tensor, base: int = 0) -> tuple[bool, float]:
    """Whether ``steps`` are the differences of a block that two messages mean, and the largest of them."""
    own, other = (_record(message, block, base).tolist() for message in (ours, theirs))
    most = largest(steps)
    first, second = weighted_sums(steps)
    # Records of what is not finite, or has no codes: every comparison with them is false. -128 is the one difference that has
    # the same sign on both ends.
    same = first == other[0] - own[0] and (other[1] - own[1] - second) % PRIME == 0
    return same and most < 128, most


def _codes(message: Tensor, block: Block, base: int) -> Tensor:
    return message[block.at - base : block.at - base + block.numel]


def _record(message: Tensor, block: Block, base: int) -> Tensor:
    return message[block.record - base : block.record - base + 8 * FIELDS].view(torch.float64)


def _round(noise: Tensor, value: Tensor, inverse_step: float, codes: Tensor) -> Tensor:
    """``value / step``, rounded up or down at random so that its mean is right; ``codes`` get the lowest bytes."""
    # Steps are powers of two: the products are exact, and one rounding is left, fused or not.
    numbers = torch.add(noise, value, alpha=float(inverse_step))
    if numbers.dtype == torch.float32:
        numbers.add_(_MAGIC)
        codes.copy_(numbers.view(torch.int32))
        return numbers.sub_(_MAGIC)
    codes.copy_(numbers.round_().nan_to_num(0, 0, 0).to(torch.int64))
    return numbers


def weighted_sums(numbers: Tensor) -> tuple[float, float]:
    """Two weighted sums of the integers of a block. Wrong integers may cancel in the columns, but then hardly in columns and
    rows. All partial sums are exact: in float64, or in float32 if no number is beyond 128."""
    weights, by_column, by_row = sum_weights()
    if len(numbers) % _COLUMNS:  # pad() copies where there is nothing to pad, too
        numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % _COLUMNS))
    matrix = numbers.view(-1, _COLUMNS)
    columns = matrix.sum(0).cpu().numpy().astype(np.float64)
    # Not a product of matrices: its precision depends on settings and on autocast, and the two ends could disagree.
    rows = (matrix * torch.from_numpy(by_column).to(matrix)).sum(1).cpu().numpy().astype(np.int64)
    return float(weights.astype(np.float64) @ columns), float(int(by_row[: len(rows)] @ rows) % PRIME)


@functools.cache
def sum_weights() -> IntArray:
    """The weights of the columns' sums, and those of columns and of rows in the sum of both, in three rows."""
    draw = np.random.default_rng(20200713)
    columns, by_column = (draw.integers(1, limit, _COLUMNS) for limit in (_WEIGHTS, _BY_COLUMN))
    return np.stack([columns, by_column, draw.integers(1, _BY_ROW, _COLUMNS)])


def largest(value: Tensor) -> float:
    """The largest absolute value; 0 of none."""
    if not value.numel():
        return 0.0
    low, high = torch.aminmax(value)
    return max(-float(low), float(high)) + 0.0  # never -0.0, as it is saved


@functools.cache
def load_numba(name: str = "int8_numba") -> ModuleType | None:
    """Imports a module of this package, whose import compiles what it contains or reads it from Numba's cache.

    Returns None where Numba is not installed, is told not to compile (``NUMBA_DISABLE_JIT=1``), or cannot compile.
    """
    # Functions that are not compiled would be slower than torch by a factor of a thousand, and Numba takes 60 MB to be asked.
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return None
    try:
        from numba import config

        return None if config.DISABLE_JIT else importlib.import_module(f"decent_dp.compression.{name}")
    except Exception as error:  # of any package below Numba: versions that do not fit, no compiler for this machine
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            logger.warning("Numba does not work, so that torch takes its place: %s: %s", type(error).__name__, error)
        return None
