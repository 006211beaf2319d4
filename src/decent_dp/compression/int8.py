"""One byte per value: the position of the value on a lattice, modulo 256 steps.

Replicas are close to each other, and a step that is small beside their distance is very small beside their values. So the
lattice is made for the distance. With the same step on both ends, ``wrap(code_j - code_i) · step`` is the difference of
the two rounded values as long as it is less than 128 steps, however large the values are (modulo quantisation, as in
Moniqua, Lu and De Sa, ICML 2020). Rounding is stochastic, so that it is right in the mean.

The step of a block is a power of two. Both ends must use the same step. So a worker sends a hint to the other members of an
edge, the step for the distance that it expects there, and the largest hint is used. It expects the distance that it has seen
lately, with a margin. In the beginning all replicas are equal, and it expects a small part of the largest value: a step that
is enough for any two replicas would round their values coarsely, and it is better not to mix replicas than to move them at
random.

A message has a record for each block: two weighted sums of the lattice numbers (integers that a float64 holds exactly, so that
both ends find the same), and how far the values that it represents may lie from it. Wrapped differences must add up to the
difference of the sums. If they do not, the distance was larger than expected, and both ends see that. The block is rejected:
it is not mixed in this round, and the next hints ask for a much larger step, until the block can be decoded.

The record of a block with an infinity or a NaN says so. It has no codes, and nothing of its message is mixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.by_kernels import Int8ByKernels
from decent_dp.compression.codec import Block, Chunk, FlatTensor, MessageId, part_of
from decent_dp.compression.lattice import LARGEST_NUMBER, PRIME, FloatArray, IntArray, Scratch, Stretch, largest, runs_of
from decent_dp.compression.on_cuda import Int8OnCuda
from decent_dp.compression.stochastic_rounding import noise_at

__all__ = ["Int8"]

# A worker expects so many times the distance that it has seen, and forgets at this rate: partners change with the round, and
# the distance to a partner of long ago is larger than to the others.
_MARGIN = 2.0
_MEMORY = 0.8
# The distance that it expects in the beginning, and one that is enough for any two replicas, in units of the largest value.
# The factors of the distance after a rejection, below and beyond what is enough for any two: the members of a group are
# decoded together, and may be further apart than any two.
_AT_FIRST, _ENOUGH = 1 / 32, 2.0
_WIDER, _BEYOND = 16.0, 4.0

# Records: two sums and a reach, in float64. In place of the first sum: a block whose values are not
# finite, or that has no codes.
_FIELDS = 3
_NOT_FINITE, _NOTHING = math.nan, math.inf


class Int8(Blockwise):
    """One byte per value, relative to the distance between replicas; see the module."""

    name = "int8"
    by_parameter = True
    needs_hints = True
    _record = 8 * _FIELDS

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self._blocks = [block for chunk in self.chunks for block in chunk.blocks]
        # The runs of each chunk, by its start.
        self._runs: dict[int, list[Stretch]] = {}
        first = 0
        for chunk in self.chunks:
            self._runs[chunk.start] = list(runs_of(chunk, first, device, self._record))
            first += len(chunk.blocks)
        self._fast = Int8ByKernels.make(self.tensors, self.chunks, dtype, device)
        # The distance of each block seen lately and the expected one (NaN: none yet), the largest for which it was rejected
        # since it was last decoded, and its largest value.
        self._seen = np.full(len(self._blocks), np.nan)
        self._expected = np.full(len(self._blocks), np.nan)
        self._failed = np.zeros(len(self._blocks))
        # Exchanges in a row in which each block was rejected.
        self._rejections = np.zeros(len(self._blocks), dtype=np.int64)
        self._largest = np.zeros(len(self._blocks))
        self._steps = np.ones(len(self._blocks))
        self._on_cuda = Int8OnCuda.make(self.tensors, self._blocks, dtype, device)

    @classmethod
    def code_of(cls, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    # -- the range ----------------------------------------------------------------------------------------------------

    def hint(self, values: Sequence[Tensor]) -> bytes:
        """The exponents of the steps that this worker asks for, a signed byte for each block."""
        self._take_encoded()
        self._look_at_zeros(values)
        expected = np.where(np.isnan(self._expected), _AT_FIRST * self._largest, self._expected)
        # A step below the values' own resolution would leave the numbers that can be summed.
        step = np.maximum(np.maximum(expected / 127, 4 * self._largest / LARGEST_NUMBER), 2.0**-126)
        exponents = np.ceil(np.log2(np.where(np.isfinite(step), step, 1.0)))
        return bytes(np.clip(exponents, -126, 127).astype(np.int8))

    def _look_at_zeros(self, values: Sequence[Tensor]) -> None:
        """Finds the largest values of the blocks in which none is known."""
        unknown = np.flatnonzero(self._largest == 0)
        if self._on_cuda is not None and len(unknown):
            self._largest[unknown] = self._on_cuda.largest(values)[unknown]
            return
        for i in unknown:
            block = self._blocks[i]
            self._largest[i] = largest(values[block.tensor][block.start : block.stop])

    def _take_encoded(self) -> None:
        """Learns the largest values of the last message, which a GPU has found meanwhile."""
        found = None if self._on_cuda is None else self._on_cuda.encoded()
        if found is not None:
            most, values = found
            fits = most < LARGEST_NUMBER
            self._largest = np.where(fits, most * self._steps, np.where(np.isfinite(values), values, self._largest))

    def state(self) -> list[dict[str, Tensor]]:
        self._take_encoded()
        table = np.stack([self._seen, self._expected, self._failed, self._largest], axis=1)
        counts = np.bincount([block.tensor for block in self._blocks], minlength=len(self.tensors)).tolist()
        return [{"ranges": part} for part in torch.split(torch.from_numpy(table), counts)]

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        tables = []
        for own, entries in zip(self.state(), by_tensor, strict=True):
            fresh, saved = own["ranges"], entries.get("ranges")
            fits = saved is not None and (saved.shape, saved.dtype) == (fresh.shape, fresh.dtype)
            tables.append(saved.cpu() if saved is not None and fits else fresh)
        table = torch.cat(tables).numpy()
        self._seen, self._expected, self._failed, self._largest = (column.copy() for column in table.T)

    def _set_steps(self, hints: Sequence[bytes]) -> None:
        exponents = np.stack([np.frombuffer(hint, dtype=np.int8) for hint in hints]).max(0)
        self._take_encoded()  # in units of the steps until now
        self._steps = np.ldexp(1.0, exponents.astype(np.int32))
        if self._on_cuda is not None:
            self._on_cuda.set_steps(self._steps)

    def _accept(self, places: int | IntArray, steps: float | FloatArray) -> None:
        """Blocks were decoded, and the others were this many steps away."""
        # fmax: of a block that was never seen, NaN, the distance itself.
        self._seen[places] = np.fmax(np.maximum(steps, 1.0) * self._steps[places], _MEMORY * self._seen[places])
        self._expected[places] = _MARGIN * self._seen[places]
        self._failed[places] = 0.0
        self._rejections[places] = 0

    def _reject(self, place: int) -> None:
        self._rejected += 1
        self._rejections[place] += 1
        reach, before, enough = 127 * self._steps[place], self._failed[place], _ENOUGH * self._largest[place]
        self._failed[place] = reach
        wider = enough if before else min(_WIDER * reach, enough)
        if reach >= enough:
            wider = _BEYOND * reach
        self._expected[place] = wider
        # An exchange with a nearer worker must not make it forget the one that was too far away.
        self._seen[place] = np.fmax(self._seen[place], wider / _MARGIN)

    def stuck(self, rounds: int) -> list[int]:
        return sorted({self._blocks[place].tensor for place in np.flatnonzero(self._rejections >= rounds)})

    # -- messages -----------------------------------------------------------------------------------------------------

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        if self._on_cuda is None:
            yield from super().encode(values, out, message_id, hints)
            return
        self._set_steps(hints)
        self._on_cuda.encode(values, out, self.flag_view(out), message_id)
        yield self.nbytes

    def _encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[bool]:
        self._set_steps(hints)
        if self._fast is not None:
            yield from self._fast.encode(values, out, message_id, self._steps, self._largest)
            return
        scratch = self._scratch()
        for runs in self._runs.values():
            finite = True
            for run in runs:
                finite &= self._encode_run(run, values, out, message_id, scratch)
            yield finite

    def _encode_run(self, run: Stretch, values: Sequence[Tensor], out: Tensor, message_id: MessageId, scratch: Scratch) -> bool:
        """Encodes the blocks of a run; whether all their values are finite."""
        steps = self._steps[run.places]
        value = scratch.gather(run, values)
        numbers = scratch.numbers(run, value, 1.0 / steps, self._noise(message_id, run), run.codes(out))
        most = run.largest(numbers)
        fits = most < LARGEST_NUMBER  # false for NaN
        records = np.zeros((len(run.blocks), _FIELDS))
        records[:, 0], records[:, 1] = scratch.sums(run, numbers, most)
        self._largest[run.places] = np.where(fits, most * steps, self._largest[run.places])
        finite = True
        for i in np.flatnonzero(~fits):
            part = value[run.bounds[i] : run.bounds[i + 1]]
            if bool(torch.isfinite(part).all()):
                self._largest[run.places.start + i] = largest(part)
                records[i] = _NOTHING
            else:
                finite = False
                records[i] = _NOT_FINITE
        run.records(out).copy_(torch.from_numpy(records))
        return finite

    def _first_nonfinite(self, message: Tensor, block: Block) -> int | None:
        return 0 if bool(self._first_field(message, block).isnan()) else None

    def _first_field(self, message: Tensor, block: Block) -> Tensor:
        """Of the block's record: whether it has codes."""
        return message[block.record : block.record + 8].view(torch.float64)

    def arrive(self, sent: Tensor, received: Tensor) -> None:
        if self._on_cuda is not None:
            self._on_cuda.verify(sent, received)

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        if self._on_cuda is not None:
            found = self._judge_on_cuda(self._on_cuda, sent, received)
            if rate:
                self._on_cuda.mix(values, sent, received, found, rate)
        elif self._fast is None or not all(value.is_contiguous() for value in values):
            super().mix(values, sent, received, rate)
        else:
            self._judge(*self._fast.mix(values, sent, received, rate * self._steps, moving=bool(rate)))

    def _judge(self, certain: npt.NDArray[np.bool_], steps: FloatArray) -> None:
        """For each block, whether it was decoded, and how many steps the others were away."""
        accepted = np.flatnonzero(certain)
        self._accept(accepted, steps[accepted])
        for place in np.flatnonzero(~certain):
            self._reject(int(place))

    def _judge_on_cuda(self, coder: Int8OnCuda, sent: Tensor, received: Tensor) -> Tensor:
        """The same, as the kernel has found; returns its result."""
        self._take_encoded()
        found, host = coder.verified(sent, received)
        self._judge(host[:, 0] != 0, host[:, 1])
        return found

    def _differences_on_cuda(
        self, coder: Int8OnCuda, sent: Tensor, received: Tensor
    ) -> Iterator[tuple[Block, Tensor | None, float]]:
        self._judge_on_cuda(coder, sent, received)
        for place, block in enumerate(self._blocks):
            if self._rejections[place]:
                yield block, None, 1.0
                continue
            wrapped = self._codes(received, block, torch.uint8) - self._codes(sent, block, torch.uint8)
            yield block, wrapped.view(torch.int8).to(self.compute), float(self._steps[place])

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        if self._on_cuda is not None:
            yield from self._differences_on_cuda(self._on_cuda, sent, received)
            return
        scratch, hosts = self._scratch(), (sent.cpu(), received.cpu())
        for run in self._each_run():
            ours, theirs = (run.records(message).numpy() for message in hosts)
            steps, most, certain = scratch.wrapped(run, ours, run.codes(sent), theirs, run.codes(received))
            for i, block in enumerate(run.blocks):
                place = run.places.start + i
                if not certain[i]:
                    self._reject(place)
                    yield block, None, 1.0
                    continue
                self._accept(place, max(float(theirs[i, 2]), float(most[i])))
                yield block, steps[run.bounds[i] : run.bounds[i + 1]], float(self._steps[place])

    def _reduce(
        self, chunk: Chunk, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, message_id: MessageId
    ) -> None:
        scratch = self._scratch()
        for run in self._runs[chunk.start]:
            records = [run.records(message, chunk.start).cpu().numpy().copy() for message in messages]
            parts = [run.codes(message, chunk.start) for message in messages]
            noise = self._noise(message_id, run)
            written = self._move(run, records, parts, sizes, run.codes(out, chunk.start), scratch, noise)
            written[np.isnan([read[:, 0] for read in records]).any(0)] = _NOT_FINITE
            run.records(out, chunk.start).copy_(torch.from_numpy(written))

    def _move(
        self,
        run: Stretch,
        records: Sequence[FloatArray],
        parts: Sequence[Tensor],
        sizes: Sequence[int],
        codes: Tensor,
        scratch: Scratch,
        noise: Sequence[Tensor],
    ) -> FloatArray:
        """Writes the mean of some messages as the first one's lattice numbers, each moved by a few steps, and returns its
        records. A block has no codes if some of the values that it represents would be too far from it."""
        total = torch.zeros(run.numel, dtype=self.compute, device=self.device)
        good, reach = np.isfinite(records[0][:, 0]), records[0][:, 2]
        for theirs, their_codes, size in zip(records[1:], parts[1:], sizes[1:], strict=True):
            steps, most, certain = scratch.wrapped(run, records[0], parts[0], theirs, their_codes)
            good &= certain
            reach = np.maximum(reach, most + theirs[:, 2])
            total.add_(steps, alpha=size)
        moves = torch.empty_like(codes)
        most, columns, both = scratch.round_up_or_down(run, total.div_(sum(sizes)), noise, moves)
        torch.add(parts[0], moves, out=codes)
        found = np.stack([records[0][:, 0] + columns, (records[0][:, 1] + both) % PRIME, reach + most], axis=1)
        found[~(good & (reach + most <= 127))] = _NOTHING
        return found

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        for place, block in enumerate(self._blocks):
            value = part_of(values[block.tensor], block).to(self.compute)
            if not bool(self._first_field(sent, block).isfinite()):
                yield block, value.clone()
                continue
            step, code = float(self._steps[place]), self._codes(sent, block, torch.int8).to(self.compute)
            # The lattice number with this code that is nearest to the value.
            yield block, (code + 256 * torch.round((value / step - code) / 256)) * step

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _scratch(self) -> Scratch:
        return Scratch(list(self._each_run()), self.compute, self.device)

    def _each_run(self) -> Iterator[Stretch]:
        return itertools.chain.from_iterable(self._runs.values())

    def _noise(self, message_id: MessageId, run: Stretch) -> list[Tensor]:
        by_round = message_id.round, message_id.rank
        return [
            noise_at(block.numel, self.compute, self.device, *by_round, self.tensors[block.tensor].index, block.start)
            for block in run.blocks
        ]
