"""Compressions by the kernels of ``decent-dp[fast]``: the messages and values of their own forms in torch, sooner.

For float32 values on a CPU. Kernels read and write values where they lie, code several chunks or decode a whole message in one
call, and do it without the interpreter lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.codec import Chunk, FlatTensor, MessageId
from decent_dp.compression.lattice import FloatArray, IntArray, kernels_for, sum_weights
from decent_dp.compression.stochastic_rounding import noise_starts, noise_table
from decent_dp.kernels import load_numba

__all__ = ["CastsByKernels", "Int8ByKernels"]

# Chunks that are coded by one call: each call gives the interpreter lock away, which another thread may then hold for 5 ms.
_TOGETHER = 16


class _Places:
    """Where the values of blocks lie."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        blocks = [block for chunk in chunks for block in chunk.blocks]
        self._tensors = [block.tensor for block in blocks]
        self._offsets = np.array([block.start * torch.float32.itemsize for block in blocks], dtype=np.int64)
        # The chunks of each call, and their blocks.
        parts = [chunks[first : first + _TOGETHER] for first in range(0, len(chunks), _TOGETHER)]
        self._lengths = [(len(part), sum(len(chunk.blocks) for chunk in part)) for part in parts]

    def in_turn(self, values: Sequence[Tensor]) -> Iterator[tuple[int, int, int, IntArray]]:
        """Yields the number of chunks of a call, their first block, the one behind their last, and addresses of their values,
        which are valid until the next ones."""
        first = 0
        for chunks, length in self._lengths:
            tensors, last = self._tensors[first : first + length], first + length
            # Some values are made when they are asked for: the kernel reads them while this keeps them.
            own = {tensor: values[tensor].contiguous() for tensor in dict.fromkeys(tensors)}
            yield chunks, first, last, self._addresses([own[tensor].data_ptr() for tensor in tensors], slice(first, last))
            first = last

    def of_all(self, values: Sequence[Tensor]) -> IntArray:
        """Addresses of dense values, which the caller keeps."""
        firsts = [value.data_ptr() for value in values]
        return self._addresses([firsts[tensor] for tensor in self._tensors], slice(None))

    def _addresses(self, firsts: Sequence[int], blocks: slice) -> IntArray:
        addresses: IntArray = np.array(firsts, dtype=np.int64) + self._offsets[blocks]
        return addresses


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> IntArray:
    return np.array(rows, dtype=np.int64).reshape(-1, columns)


class CastsByKernels:
    """Float32 values as they are, or as bfloat16."""

    @classmethod
    def make(
        cls, chunks: Sequence[Chunk], code: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> CastsByKernels | None:
        """Returns None for other values and codes, and without Numba."""
        if (dtype, device.type) != (torch.float32, "cpu") or code not in (torch.float32, torch.bfloat16):
            return None
        kernels = load_numba("casts_cpu")
        return None if kernels is None else cls(kernels, chunks, code)

    def __init__(self, kernels: ModuleType, chunks: Sequence[Chunk], code: torch.dtype) -> None:
        self._places = _Places(chunks)
        self._blocks = _table([(block.numel, block.at // code.itemsize) for chunk in chunks for block in chunk.blocks], 2)
        # NumPy has no bfloat16: bits.
        self._code = np.float32 if code == torch.float32 else np.uint16
        name = "float32" if code == torch.float32 else "bfloat16"
        self._encode, self._mix = getattr(kernels, f"encode_{name}"), getattr(kernels, f"mix_{name}")

    def encode(self, values: Sequence[Tensor], out: Tensor) -> Iterator[bool]:
        """Encodes chunk by chunk, and yields whether all codes are finite."""
        codes = out.numpy().view(self._code)
        for chunks, first, last, addresses in self._places.in_turn(values):
            yield from itertools.repeat(self._encode(self._blocks, first, last, addresses, codes), chunks)

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        """Adds ``rate`` times the difference to dense ``values``."""
        ours, theirs = sent.numpy().view(self._code), received.numpy().view(self._code)
        self._mix(self._blocks, self._places.of_all(values), np.float32(rate), ours, theirs)
        torch.autograd.graph.increment_version(values)


class Int8ByKernels:
    """``Int8`` without its memory of distances."""

    @classmethod
    def make(
        cls, tensors: Sequence[FlatTensor], chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device
    ) -> Int8ByKernels | None:
        """Returns None for other values, and without Numba."""
        kernels = kernels_for(dtype, device)
        return None if kernels is None else cls(kernels, tensors, chunks)

    def __init__(self, kernels: ModuleType, tensors: Sequence[FlatTensor], chunks: Sequence[Chunk]) -> None:
        self._kernels, self._places = kernels, _Places(chunks)
        blocks = [block for chunk in chunks for block in chunk.blocks]
        self._blocks = _table([(block.numel, block.at, block.record // 8) for block in blocks], 3)
        self._index, self._start = _table([(tensors[block.tensor].index, block.start) for block in blocks], 2).T
        self._noise = noise_table(torch.float32, torch.device("cpu")).numpy()

    def encode(
        self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, steps: FloatArray, largest: FloatArray
    ) -> Iterator[bool]:
        """Encodes chunk by chunk, and yields whether all values are finite; writes the blocks' largest to ``largest``."""
        message, weights = out.numpy(), sum_weights()
        records = message.view(np.float64)
        noise = noise_starts((message_id.round, message_id.rank), self._index, self._start)
        for chunks, first, last, addresses in self._places.in_turn(values):
            finite = self._kernels.encode(
                self._blocks, first, last, addresses, self._noise, noise, steps, largest, message, records, weights
            )
            yield from itertools.repeat(finite, chunks)

    def mix(
        self, values: Sequence[Tensor], sent: Tensor, received: Tensor, factors: FloatArray, *, moving: bool
    ) -> tuple[npt.NDArray[np.bool_], FloatArray]:
        """Adds each block's difference in steps, times its factor, to dense ``values`` if it is certain and ``moving``.

        Returns:
            For each block, whether it is certain, and how many steps the others were away.
        """
        certain, reach = np.empty(len(factors), dtype=np.bool_), np.empty(len(factors))
        ours, theirs = sent.numpy(), received.numpy()
        self._kernels.mix(
            *(self._blocks, self._places.of_all(values), factors.astype(np.float32), ours, ours.view(np.float64)),
            *(theirs, theirs.view(np.float64), sum_weights(), moving, certain, reach),
        )
        torch.autograd.graph.increment_version(values)
        return certain, reach
