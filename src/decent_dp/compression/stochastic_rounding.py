"""Noise for stochastic rounding: drawn once, and read from a place that a hash of what is rounded chooses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["NOISE_LENGTH", "noise_at", "noise_table", "starts_at"]

IntArray: TypeAlias = npt.NDArray[np.int64]

_SIZE = 2**16
# The most values that are rounded at once.
NOISE_LENGTH = 2**16


def noise_at(numel: int, dtype: torch.dtype, device: torch.device, *what: int, shift: int = 0) -> Tensor:
    """``numel`` (at most ``NOISE_LENGTH``) values of [-1/2, 1/2), for the rounding of what these numbers name.

    Args:
        shift: gives other values for another shift, modulo 2^16.
    """
    start = (_hash(*what) + shift) % _SIZE
    return noise_table(dtype, device)[start : start + numel]


@functools.cache
def noise_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every multiple of 2^-16 in [-1/2, 1/2) once (at its middle), in random order, and the beginning again.

    Every round reads from another random place, so each value gets each of them with the same probability, and the rounding
    is right in the mean.
    """
    drawn = (np.random.default_rng(20240607).permutation(_SIZE) + 0.5) / _SIZE - 0.5
    return torch.from_numpy(np.concatenate([drawn, drawn[:NOISE_LENGTH]])).to(device=device, dtype=dtype)


def starts_at(what: Sequence[int], *arrays: IntArray) -> IntArray:
    """Where ``noise_at`` starts to read for each element of ``arrays``, whose numbers follow those of ``what``."""
    state = np.full(len(arrays[0]), _hash(*what), dtype=np.uint64)
    for numbers in arrays:
        state += numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    starts: IntArray = (state % np.uint64(_SIZE)).astype(np.int64)
    return starts


def _hash(*numbers: int) -> int:
    """Mixes integers (the finaliser of SplitMix64, Steele et al. 2014, after each)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state
