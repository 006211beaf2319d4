"""The int8 compression by the kernels of ``decent-dp[fast]``: the messages and values of ``Int8``'s own form, sooner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.base import Chunk, FlatTensor, MessageId
from decent_dp.compression.lattice import FloatArray, IntArray, kernels_for, sum_weights
from decent_dp.compression.stochastic_rounding import noise_starts, noise_table

__all__ = ["FastInt8"]


class FastInt8:
    """Codes whole chunks and decodes whole messages, of float32 values on a CPU, without the interpreter lock."""

    @classmethod
    def make(
        cls, tensors: Sequence[FlatTensor], chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device
    ) -> FastInt8 | None:
        """Returns None for other values, and without Numba."""
        kernels = kernels_for(dtype, device)
        return None if kernels is None else cls(kernels, tensors, chunks)

    def __init__(self, kernels: ModuleType, tensors: Sequence[FlatTensor], chunks: Sequence[Chunk]) -> None:
        self._kernels = kernels
        blocks = [block for chunk in chunks for block in chunk.blocks]
        self._blocks = _table([(block.numel, block.at, block.record // 8) for block in blocks], 3)
        place = _table([(block.tensor, block.start, tensors[block.tensor].index) for block in blocks], 3)
        self._tensor, self._start, self._index = place.T
        # Of each chunk: its blocks, and their tensors.
        self._chunks: list[tuple[int, int, list[int]]] = []
        for chunk in chunks:
            first = self._chunks[-1][1] if self._chunks else 0
            self._chunks.append((first, first + len(chunk.blocks), sorted({block.tensor for block in chunk.blocks})))
        self._noise = noise_table(torch.float32, torch.device("cpu")).numpy()

    def encode(
        self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, steps: FloatArray, largest: FloatArray
    ) -> Iterator[bool]:
        """Encodes chunk by chunk, and yields whether all values are finite; writes the blocks' largest to ``largest``."""
        message, weights = out.numpy(), sum_weights()
        records = message.view(np.float64)
        noise = noise_starts((message_id.round, message_id.rank), self._index, self._start)
        for first, last, tensors in self._chunks:
            # Some values are made when they are asked for: they live until the chunk is written.
            own = {tensor: values[tensor].contiguous() for tensor in tensors}
            addresses = self._addresses({tensor: value.data_ptr() for tensor, value in own.items()}, slice(first, last))
            yield self._kernels.encode(
                self._blocks, first, last, addresses, self._noise, noise, steps, largest, message, records, weights
            )

    def mix(
        self, values: Sequence[Tensor], sent: Tensor, received: Tensor, factors: FloatArray, *, moving: bool
    ) -> tuple[npt.NDArray[np.bool_], FloatArray]:
        """Adds each block's difference in steps, times its factor, to ``values`` if the difference is certain and ``moving``.

        Returns:
            For each block, whether it is certain, and how many steps the others were away.
        """
        addresses = self._addresses(dict(enumerate(value.data_ptr() for value in values)), slice(None))
        certain, reach = np.empty(len(factors), dtype=np.bool_), np.empty(len(factors))
        ours, theirs = sent.numpy(), received.numpy()
        self._kernels.mix(
            *(self._blocks, addresses, factors.astype(np.float32), ours, ours.view(np.float64)),
            *(theirs, theirs.view(np.float64), sum_weights(), moving, certain, reach),
        )
        torch.autograd.graph.increment_version(values)
        return certain, reach

    def _addresses(self, of_tensors: Mapping[int, int], blocks: slice) -> IntArray:
        """Of the first value of each block."""
        firsts = np.array([of_tensors[tensor] for tensor in self._tensor[blocks].tolist()], dtype=np.int64)
        addresses: IntArray = firsts + self._start[blocks] * torch.float32.itemsize
        return addresses


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> IntArray:
    return np.array(rows, dtype=np.int64).reshape(-1, columns)
