"""Compressions on a GPU by Triton's kernels: all tensors of a bucket in a few launches.

Messages and values are those of the forms in torch. Numbers for the host are copied to it beside the computation. For values
that are computed in float32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decent_dp.compression.codec import FLAG, Block, FlatTensor, MessageId
from decent_dp.compression.lattice import FloatArray, sum_weights
from decent_dp.compression.stochastic_rounding import noise_starts, noise_table
from decent_dp.kernels.cuda import cuda_kernels

__all__ = ["CastsOnCuda", "Int8OnCuda"]

_log = logging.getLogger(__name__)


def _kernels_for(blocks: Sequence[Block], dtype: torch.dtype, device: torch.device) -> Any:
    """The module of the kernels; None without Triton, for other values, and where there is nothing to do."""
    return cuda_kernels("messages_cuda", device) if blocks and dtype.itemsize <= torch.float32.itemsize else None


def _tiles(kernels: Any, blocks: Sequence[Block], dtype: torch.dtype, code: torch.dtype, device: torch.device) -> Any:
    parts = [kernels.Part(block.tensor, block.start, block.numel, block.at) for block in blocks]
    return kernels.Tiles(parts, dtype.itemsize, code.itemsize, device)


@functools.cache
def _works(attempt: Callable[..., None], kernels: Any, code: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels run. They are compiled here, for both forms of tiles: later, other workers would wait for that."""
    try:
        attempt(kernels, code, dtype, device)
    except Exception as error:  # a version of Triton that lacks something, a compiler that is missing
        _log.warning(
            "Triton's kernels for %s as %s do not work on %s, so that exchanges take longer: %s", dtype, code, device, error
        )
        return False
    return True


def _specimen(
    tile: int, record: int, code: torch.dtype, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Block], list[Tensor]]:
    """Values of a whole tile and of one more element, a block for each, and two messages."""
    first, last = 2 * record, 2 * record + tile * code.itemsize
    blocks = [Block(0, 0, tile, first, 0), Block(0, tile, tile + 1, last, record)]
    values = torch.zeros(tile + 1, dtype=dtype, device=device)
    return [values], blocks, [torch.zeros(last + 2 * FLAG, dtype=torch.uint8, device=device) for _ in range(2)]


class CastsOnCuda:
    """Values as they are, or in a narrower dtype."""

    @classmethod
    def make(cls, blocks: Sequence[Block], code: torch.dtype, dtype: torch.dtype, device: torch.device) -> CastsOnCuda | None:
        kernels = _kernels_for(blocks, dtype, device)
        if kernels is None or not _works(cls._try, kernels, code, dtype, device):
            return None
        return cls(kernels, blocks, code, dtype, device)

    @classmethod
    def _try(cls, kernels: Any, code: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        values, blocks, (sent, received) = _specimen(kernels.TILE, 0, code, dtype, device)
        coder = cls(kernels, blocks, code, dtype, device)
        coder.encode(values, sent, sent[-FLAG:].view(torch.int64), MessageId(0, 0))
        coder.mix(values, sent, received, 0.5)

    def __init__(
        self, kernels: Any, blocks: Sequence[Block], code: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels, self._code = kernels, code
        self._tiles = _tiles(kernels, blocks, dtype, code, device)

    def encode(self, values: Sequence[Tensor], out: Tensor, flag: Tensor, message_id: MessageId) -> None:
        """Writes a message."""
        # As a list: the tensors of a low-rank message are made when they are read.
        self._kernels.encode_plain(self._tiles, list(values), self._codes(out), flag, message_id.rank + 1)

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        """values += rate · (received - sent)."""
        self._kernels.mix_plain(self._tiles, values, self._codes(sent), self._codes(received), rate)

    def _codes(self, message: Tensor) -> Tensor:
        return message[:-FLAG].view(self._code)


class Int8OnCuda:
    """``Int8`` without its memory of distances."""

    @classmethod
    def make(
        cls, tensors: Sequence[FlatTensor], blocks: Sequence[Block], dtype: torch.dtype, device: torch.device
    ) -> Int8OnCuda | None:
        kernels = _kernels_for(blocks, dtype, device)
        if kernels is None or not _works(cls._try, kernels, torch.uint8, dtype, device):
            return None
        return cls(kernels, tensors, blocks, dtype, device)

    @classmethod
    def _try(cls, kernels: Any, code: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
        values, blocks, (sent, received) = _specimen(kernels.TILE, 24, code, dtype, device)
        coder = cls(kernels, [FlatTensor(0, len(values[0]))], blocks, dtype, device)
        coder.set_steps(np.ones(len(blocks)))
        coder.encode(values, sent, sent[-FLAG:].view(torch.int64), MessageId(0, 0))
        coder.mix(values, sent, received, coder.verified(sent, received)[0], 0.5)
        coder.largest(values)

    def __init__(
        self, kernels: Any, tensors: Sequence[FlatTensor], blocks: Sequence[Block], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kernels, self._device = kernels, device
        self._lattice = kernels.Lattice(
            _tiles(kernels, blocks, dtype, torch.uint8, device),
            torch.tensor([block.record // 8 for block in blocks], dtype=torch.int64, device=device),
            torch.from_numpy(sum_weights().astype(np.int32)).to(device),
            # Half the bytes of the numbers themselves, which are read as often as the values.
            (noise_table(torch.float32, device) * 2**16 - 0.5).to(torch.int16),
        )
        self._numbers = np.array([tensors[block.tensor].index for block in blocks], dtype=np.int64)
        self._starts = np.array([block.start for block in blocks], dtype=np.int64)
        self._steps: Tensor | None = None
        self._encoded: _Reading | None = None
        self._verified: tuple[Tensor, _Reading] | None = None

    def largest(self, values: Sequence[Tensor]) -> FloatArray:
        """The largest absolute value of each block. Waits for the GPU."""
        found: Tensor = self._kernels.largest(self._lattice, list(values))
        return found.cpu().numpy().astype(np.float64)

    def set_steps(self, steps: FloatArray) -> None:
        """An exchange begins, with these steps of its blocks."""
        self._verified = None
        self._steps = self._kernels.moved(
            torch.from_numpy(np.stack([steps, 1.0 / steps], axis=1).astype(np.float32)), self._device
        )

    def encode(self, values: Sequence[Tensor], out: Tensor, flag: Tensor, message_id: MessageId) -> None:
        """Writes a message."""
        starts = noise_starts((message_id.round, message_id.rank), self._numbers, self._starts).astype(np.int32)
        moved = self._kernels.moved(torch.from_numpy(starts), self._device)
        arguments = flag, message_id.rank + 1, self._steps, moved
        self._encoded = _Reading(self._kernels.encode_int8(self._lattice, list(values), out, *arguments))

    def encoded(self) -> tuple[FloatArray, FloatArray] | None:
        """The largest lattice number and the largest absolute value of each block of the last message, once."""
        if self._encoded is None:
            return None
        sums, self._encoded = self._encoded.read(), None
        most, largest = (np.ascontiguousarray(sums[:, column].astype(np.int32)).view(np.float32) for column in (2, 3))
        return most.astype(np.float64), largest.astype(np.float64)

    def verify(self, sent: Tensor, received: Tensor) -> None:
        """Begins to compare two messages, on the current stream."""
        found = self._kernels.verify_int8(self._lattice, sent, received)
        self._verified = found, _Reading(found)

    def verified(self, sent: Tensor, received: Tensor) -> tuple[Tensor, FloatArray]:
        """(blocks, 2), on the device and on the CPU: whether the difference of a block is certain, and the reach of the other's
        values in steps. Kernels that are launched from now on can read the first."""
        if self._verified is None:
            self.verify(sent, received)
        assert self._verified is not None
        (found, reading), self._verified = self._verified, None
        host = reading.read()
        if found.is_cuda:
            found.record_stream(torch.cuda.current_stream(found.device))
        return found, host

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, found: Tensor, rate: float) -> None:
        """values += rate · step · (received - sent) in the blocks that are certain."""
        self._kernels.mix_int8(self._lattice, list(values), sent, received, found, self._steps, rate)


class _Reading:
    """A copy of a small tensor to the CPU, queued on the current stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._event: Any = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Any:
        """Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
