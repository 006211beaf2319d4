"""Wires that send the values themselves: in the bucket's own dtype, or in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decent_dp.wire.base import Moment, Piece, Run, Wire, all_finite, part_of
from decent_dp.wire.noise import NOISE_LENGTH, noise_at

__all__ = ["BFloat16", "Lossless"]


class Lossless(Wire):
    """Every value as it is, in the bucket's own dtype."""

    name = "float32"

    @property
    def code(self) -> torch.dtype:
        return self.dtype

    def _encode(self, values: Sequence[Tensor], out: Tensor, moment: Moment, heard: Sequence[bytes]) -> Iterator[bool | Tensor]:
        for piece in self.pieces:
            codes = self._all_codes(out, piece)
            torch.cat([part_of(values[run.item], run) for run in piece.runs], out=codes)
            yield all_finite(codes)

    def _finite(self, message: Tensor, piece: Piece) -> bool | Tensor:
        return all_finite(self._all_codes(message, piece))

    def _first_nonfinite(self, message: Tensor, run: Run) -> int | None:
        found = self._codes(message, run, self.code).isfinite().logical_not_().nonzero()
        return int(found[0]) if len(found) else None

    def _combine(self, piece: Piece, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, moment: Moment) -> None:
        codes = [self._all_codes(message, piece, piece.start) for message in messages]
        # Sums in float32 at least: in bfloat16 a sum of many would lose what distinguishes them, in float16 it would
        # overflow. In a tensor of its own, as ``out`` may be one of the messages.
        total = torch.zeros(len(codes[0]), dtype=self.compute, device=self.device)
        for code, size in zip(codes, sizes, strict=True):
            total += code if size == 1 else code.to(self.compute) * size
        self._round(total.div_(sum(sizes)), self._all_codes(out, piece, piece.start), moment, piece)

    def _round(self, mean: Tensor, codes: Tensor, moment: Moment, piece: Piece) -> None:
        """Writes the mean of a group as codes."""
        codes.copy_(mean)

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Run, Tensor | None, float]]:
        scratch = torch.empty(2, self.run_elements, dtype=self.compute, device=self.device)
        for piece in self.pieces:
            theirs, ours = (self._all_codes(message, piece) for message in (received, sent))
            difference = scratch[0, : len(ours)]
            if self.code == self.compute:
                torch.sub(theirs, ours, out=difference)
            else:
                difference.copy_(theirs).sub_(scratch[1, : len(ours)].copy_(ours))
            for run, part in self._split(difference, piece):
                yield run, part, 1.0

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Run, Tensor]]:
        for piece in self.pieces:
            yield from self._split(self._all_codes(sent, piece).to(self.compute), piece)

    def _all_codes(self, message: Tensor, piece: Piece, base: int = 0) -> Tensor:
        """The codes of all runs of ``piece``, which lie one after another, in a message whose first byte is ``base``."""
        last = piece.runs[-1]
        return message[piece.start - base : last.at - base + last.numel * self._itemsize].view(self.code)

    def _split(self, values: Tensor, piece: Piece) -> Iterator[tuple[Run, Tensor]]:
        return zip(piece.runs, torch.split(values, [run.numel for run in piece.runs]), strict=True)


class BFloat16(Lossless):
    """Every value rounded to the nearest bfloat16; values of two bytes as they are.

    The mean of a group is rounded at random, up or down, so that it is right in the mean: to the nearest, all members of a
    large group would step back to the values that they have, and what one of them has learnt would be lost.
    """

    name = "bfloat16"
    by_parameter = True

    @property
    def code(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype.itemsize > 2 else self.dtype

    def _round(self, mean: Tensor, codes: Tensor, moment: Moment, piece: Piece) -> None:
        if self.code == self.dtype:
            codes.copy_(mean)
            return
        whole, single = torch.split(codes, [run.numel for run in piece.runs]), mean.to(torch.float32)
        # A float32 whose lower half is zero is a bfloat16: noise below that half, then the half is cut off.
        for (run, values), out in zip(self._split(single, piece), whole, strict=True):
            index = self.items[run.item].index
            for start in range(0, run.numel, NOISE_LENGTH):
                part = values[start : start + NOISE_LENGTH]
                noise = noise_at(part.numel(), torch.float32, self.device, moment.round, moment.rank, index, run.start + start)
                bits = part.view(torch.int32) + noise.add(0.5).mul_(2**16).to(torch.int32)
                rounded = bits.bitwise_and_(-(2**16)).view(torch.float32)
                # A NaN may become a number, and nobody would find what the flag tells of.
                out[start : start + NOISE_LENGTH].copy_(torch.where(part.isfinite(), rounded, part))
