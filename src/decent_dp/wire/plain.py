"""Wires that send the values themselves: in the bucket's own dtype, or in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decent_dp.wire.base import Moment, Piece, Run, Wire

__all__ = ["BFloat16", "Lossless"]


class Lossless(Wire):
    """Every value as it is, in the bucket's own dtype."""

    name = "float32"

    @property
    def _code(self) -> torch.dtype:
        return self.dtype

    @property
    def _itemsize(self) -> int:
        return self._code.itemsize

    def encode(self, values: Sequence[Tensor], out: Tensor, moment: Moment, heard: Sequence[bytes]) -> Iterator[int]:
        for piece in self.pieces:
            for run in piece.runs:
                self._codes(out, run, self._code).copy_(values[run.item][run.start : run.stop])
            yield piece.stop

    def combine(self, piece: Piece, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, moment: Moment) -> None:
        count = sum(sizes)
        for run in piece.runs:
            # Sums in float32 at least: in bfloat16 a sum of many would lose what distinguishes them, in float16 it would
            # overflow. Copies, as ``out`` may be one of the messages.
            codes = [self._codes(message, run, self._code, piece.start) for message in messages]
            total = torch.zeros(run.numel, dtype=self.compute, device=self.device)
            for code, size in zip(codes, sizes, strict=True):
                total += code if size == 1 else code.to(self.compute) * size
            self._codes(out, run, self._code, piece.start).copy_(total.div_(count))

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Run, Tensor, float]]:
        scratch = torch.empty(2, self.run_elements, dtype=self.compute, device=self.device)
        for piece in self.pieces:
            for run in piece.runs:
                theirs, ours = (self._codes(message, run, self._code) for message in (received, sent))
                difference = scratch[0, : run.numel]
                if self._code == self.compute:
                    torch.sub(theirs, ours, out=difference)
                else:
                    difference.copy_(theirs).sub_(scratch[1, : run.numel].copy_(ours))
                yield run, difference, 1.0

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Run, Tensor]]:
        for piece in self.pieces:
            for run in piece.runs:
                yield run, self._codes(sent, run, self._code).to(self.compute)


class BFloat16(Lossless):
    """Every value rounded to the nearest bfloat16; values of two bytes as they are."""

    name = "bfloat16"

    @property
    def _code(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype.itemsize > 2 else self.dtype
