"""Noise for stochastic rounding: drawn once, and read from a place that a hash of what is rounded chooses."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["NOISE_LENGTH", "noise_at", "noise_starts", "noise_table"]

_SIZE = 2**16
# The most values that are rounded at once.
NOISE_LENGTH = 2**16

# Of SplitMix64.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def noise_at(numel: int, dtype: torch.dtype, device: torch.device, *what: int, shift: int = 0) -> Tensor:
    """``numel`` (at most ``NOISE_LENGTH``) values of [-1/2, 1/2), for the rounding of what these numbers name.

    Args:
        shift: gives other values for another shift, modulo 2^16.
    """
    start = (_hash(*what) + shift) % _SIZE
    return noise_table(dtype, device)[start : start + numel]


def noise_starts(what: tuple[int, ...], *more: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where ``noise_at`` starts in ``noise_table`` for ``what`` and one number of each of some arrays, all of one length."""
    state = np.full(len(more[0]), _hash(*what), dtype=np.uint64)
    for numbers in more:
        state += numbers.astype(np.uint64) + np.uint64(_STEP)
        state = (state ^ state >> np.uint64(30)) * np.uint64(_FIRST)
        state = (state ^ state >> np.uint64(27)) * np.uint64(_SECOND)
        state ^= state >> np.uint64(31)
    starts: npt.NDArray[np.int64] = (state % np.uint64(_SIZE)).astype(np.int64)
    return starts


@functools.cache
def noise_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every multiple of 2^-16 in [-1/2, 1/2) once (at its middle), in random order, and the beginning again.

    Every round reads from another random place, so each value gets each of them with the same probability, and the rounding
    is right in the mean.
    """
    drawn = (np.random.default_rng(20240607).permutation(_SIZE) + 0.5) / _SIZE - 0.5
    return torch.from_numpy(np.concatenate([drawn, drawn[:NOISE_LENGTH]])).to(device=device, dtype=dtype)


def _hash(*numbers: int) -> int:
    """Mixes integers (the finaliser of SplitMix64, Steele et al. 2014, after each)."""
    state = 0
    for number in numbers:
        state = (state + number + _STEP) % 2**64
        state = ((state ^ state >> 30) * _FIRST) % 2**64
        state = ((state ^ state >> 27) * _SECOND) % 2**64
        state ^= state >> 31
    return state
