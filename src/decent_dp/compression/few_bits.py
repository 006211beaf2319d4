"""Messages of 1, 2 or 4 bits per value: what a replica is beyond a reference that both ends of an edge know.

Let x_i and x_j be the values of two replicas, and m the reference of their edge, the same at both ends. Each end sends
c = Q(x - m), which has a few bits per value and a scale per block. Both decode both messages, and

    d_i = c_j - c_i        m <- m + (c_i + c_j)/2

The ends find opposite differences, so the mean of the replicas does not move. What Q rounds away stays in the replicas, and so
in what is sent next time: no value is lost, and none is sent twice. The reference follows the mean of the two. So x - m is
about half of the distance of the replicas and what they have moved since, which is why so few bits are enough. This is
compression of differences to a known estimate as in CHOCO-SGD (Koloskova, Stich and Jaggi, arXiv 1902.00340), with one
reference for both ends of an edge in place of one for each worker at all of its neighbours.

An edge begins with the values with which training began, which are the same on all workers. References have the precision of
arithmetic: in bfloat16 small sums of messages would be rounded away, and both ends would send the same code for ever
(docs/lab/log.md, 2026-12-01). A digest of all that has gone into a reference is sent along. If the ends disagree (a worker
joined, or one end of an exchange could not use it), both begin anew from zero. Until the reference is near the values again,
which takes a few exchanges, they change it only, and mix nothing. The same holds for an edge that first meets late in training.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp.compression.codec import FLAG, Block, Chunk, Compression, FlatTensor, MessageId, flag_view
from decent_dp.compression.lattice import load_numba

__all__ = ["FewBits", "few_bits"]

# Values that share a scale. Tensors are padded to a multiple of it.
_BLOCK = 512
# Values that are coded together: on a CPU few enough for temporaries to stay in its cache.
_ON_CPU, _ON_GPU = 2**16, 2**24
# Bytes in front of a message: the digest, and whether the reference is near the values.
_HEAD = 16
# A reference is near the values if the difference is at most this share of them, or after so many exchanges.
_NEAR, _EXCHANGES = 1 / 16, 8
# In so many exchanges of a bucket from the start on the origin counts as near.
_EARLY = 16
# Values whose digest is made at once.
_DIGESTED = 2**20
# Sizes that codes stand for, in units of the root mean square of a block: the first, and their distance. They have the least
# squared error for a normal distribution (Max, "Quantizing for minimum distortion", 1960).
_LEVELS = {1: (0.7979, 0.0), 2: (0.4528, 1.0572), 4: (0.1676, 0.3352)}
# A product with this has in its highest byte the lowest bits of all bytes of an int64.
_GATHER = 0x0102040810204080
# Of the digest: an odd factor, and the odd weights of bytes.
_FACTOR = 6364136223846793005


@dataclass
class _Reference:
    """Of an edge.

    Attributes:
        values: as the layout of the bucket has them.
        digest: of all that has gone into them.
        near: whether they are near the replica's.
        exchanges: of which it has learned; of the origin those of all edges.
        mismatches: exchanges in a row in which the ends had other ones.
    """

    values: Tensor
    digest: int
    near: bool = True
    exchanges: int = 0
    mismatches: int = 0


class FewBits(Compression):
    """A few bits per value, relative to the reference of the edge; see the module.

    Attributes:
        bits: per value: a sign, and the rest for the size.
    """

    by_parameter = True
    pairs_only = True
    partial = True
    bits: ClassVar[int]

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self.hint_nbytes = 0
        rows = [-(-tensor.numel // _BLOCK) for tensor in self.tensors]
        self._first = [0, *itertools.accumulate(rows)]
        counts = [min(_BLOCK, tensor.numel - at) for tensor in self.tensors for at in range(0, tensor.numel, _BLOCK)]
        self._counts = torch.tensor(counts, dtype=self.compute, device=device)
        # Scales, then one plane of bits after another, then the flag.
        self._planes_at = _HEAD + -(-2 * self._rows // 8) * 8
        nbytes = self._planes_at + self.bits * self._rows * _BLOCK // 8 + FLAG
        self.nbytes = self.most_nbytes = nbytes if self._rows else 0
        self.chunks = (Chunk(0, nbytes, (), has_flag=True),) if self._rows else ()
        self._origin: _Reference | None = None
        self._references: dict[tuple[int, ...], _Reference] = {}
        self._edge: tuple[int, ...] = ()
        self._scratch: Tensor | None = None
        self._numba = load_numba("few_bits_numba") if (dtype, device.type) == (torch.float32, "cpu") else None

    @property
    def _rows(self) -> int:
        """Blocks of all tensors."""
        return self._first[-1]

    # -- layout -------------------------------------------------------------------------------------------------------

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a padded tensor that are the flat tensors of the bucket."""
        starts = (first * _BLOCK for first in self._first)
        return [flat[start : start + tensor.numel] for start, tensor in zip(starts, self.tensors, strict=False)]

    def _clear_padding(self, flat: Tensor) -> None:
        ends = zip(self._first, self._first[1:], self.tensors, strict=False)
        padding = [flat[first * _BLOCK + tensor.numel : end * _BLOCK] for first, end, tensor in ends if tensor.numel % _BLOCK]
        if padding:
            torch._foreach_zero_(padding)

    def _room(self) -> Tensor:
        """Room for all values; of the dtype of arithmetic."""
        if self._scratch is None:
            self._scratch = torch.empty(self._rows * _BLOCK, dtype=self.compute, device=self.device)
        return self._scratch

    def _parts(self) -> Iterator[slice]:
        """Rows that are coded together."""
        step = (_ON_CPU if self.device.type == "cpu" else _ON_GPU) // _BLOCK
        return (slice(start, min(start + step, self._rows)) for start in range(0, self._rows, step))

    def _scales(self, message: Tensor) -> Tensor:
        return message[_HEAD : _HEAD + 2 * self._rows].view(torch.bfloat16)

    def _planes(self, message: Tensor) -> Tensor:
        """The planes of bits, of shape (bits, rows, bytes): first the signs."""
        return message[self._planes_at : len(message) - FLAG].view(self.bits, self._rows, _BLOCK // 8)

    # -- the reference --------------------------------------------------------------------------------------------------

    def _start(self, known: Mapping[int, Tensor]) -> None:
        """Training goes on from these values of some tensors, or of all."""
        if len(known) == len(self.tensors):
            self._origin, self._references = _Reference(self._zeros(), 0), {}
        for reference in (*([] if self._origin is None else [self._origin]), *self._references.values()):
            views = self._views(reference.values)
            for number, value in known.items():
                views[number].copy_(value)
            reference.digest = _signed(reference.digest * _FACTOR + self._digest_of(reference.values, list(known)))

    def begin(self, edge: tuple[int, ...], rank: int, meeting: int) -> None:
        self._edge = edge

    def _reference(self) -> _Reference:
        """That of the present edge; a new one is the origin itself, until it changes."""
        found = self._references.get(self._edge)
        if found is not None:
            return found
        if self._origin is not None:
            near = self._origin.near and self._origin.exchanges < _EARLY
            return _Reference(self._origin.values, self._origin.digest, near)
        return self._unknown()

    def _unknown(self, mismatches: int = 0) -> _Reference:
        """One that begins from zero."""
        return _Reference(self._zeros(), 0, near=False, mismatches=mismatches)

    def _zeros(self) -> Tensor:
        return torch.zeros(self._rows * _BLOCK, dtype=self.compute, device=self.device)

    def _digest_of(self, flat: Tensor, numbers: Sequence[int]) -> int:
        """Of values that came from elsewhere; it does not depend on how buckets are cut."""
        total, views = 0, self._views(flat)
        as_bits = torch.int64 if self.compute == torch.float64 else torch.int32
        for number in numbers:
            tensor, values = self.tensors[number], views[number]
            for start in range(0, len(values), _DIGESTED):
                bits = values[start : start + _DIGESTED].view(as_bits).to(torch.int64, copy=True)
                weights = torch.arange(start, start + len(bits), dtype=torch.int64, device=self.device).mul_(2).add_(1)
                total += (2 * tensor.index + 1) * int(bits.mul_(weights).sum())
        return _signed(total)

    # -- messages -----------------------------------------------------------------------------------------------------

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        if not self.nbytes:
            return
        reference, flat = self._reference(), self._room()
        torch._foreach_copy_(self._views(flat), list(values))
        self._clear_padding(flat)
        rest, known = flat.view(-1, _BLOCK), reference.values.view(-1, _BLOCK)
        size = None if reference.near else rest.square().sum(dtype=torch.float64)
        scales = self._scales(out)
        out[_HEAD + 2 * self._rows : self._planes_at].zero_()
        self._encode(rest, known, scales, self._planes(out))
        if size is not None:
            far = (scales.to(torch.float64).square() * self._counts).sum()
            reference.near = bool(far <= _NEAR**2 * size) or reference.exchanges >= _EXCHANGES
        out[:_HEAD].view(torch.int64).copy_(torch.tensor([reference.digest, reference.near], dtype=torch.int64, device="cpu"))
        finite = scales.isfinite().all()
        flag_view(out).copy_(torch.where(finite, 0, message_id.rank + 1))
        self._references.setdefault(self._edge, reference)
        yield self.nbytes

    def _encode(self, rest: Tensor, known: Tensor, scales: Tensor, planes: Tensor) -> None:
        """Codes ``rest`` less ``known``; writes to ``rest``."""
        first, apart = _LEVELS[self.bits]
        # The number of a level is that of whole distances from here.
        offset = (first - apart / 2) / apart if apart else 0.0
        if self._numba is not None:
            arrays = rest.numpy(), known.numpy(), self._counts.numpy()
            self._numba.encode_rows(*arrays, apart, offset, _bits_of(scales), planes.numpy())
            return
        for part in self._parts():
            rows = rest[part].sub_(known[part])
            # With the mean size in its place, the largest values would hardly get smaller from exchange to exchange.
            scale = scales[part].copy_(torch.sqrt((rows * rows).sum(1) / self._counts[part]))
            _pack(rows < 0, planes[0, part])
            if self.bits == 1:
                continue
            # The number of the level; NaN and infinities are seen in the scale.
            levels = rows.abs().div_(scale.to(self.compute).mul_(apart)[:, None]).sub_(offset)
            numbers = levels.nan_to_num_(0.0, 0.0, 0.0).clamp_(0, 2 ** (self.bits - 1) - 1).to(torch.uint8)
            for bit in range(self.bits - 1):
                _pack(numbers >> bit & 1, planes[1 + bit, part])

    def _decode(self, message: Tensor, part: slice) -> Tensor:
        """What a message says of some rows."""
        signs, (first, apart) = _signs(self.device, self.compute), _LEVELS[self.bits]
        planes = self._planes(message)

        def plane(number: int) -> Tensor:
            """-1 for each bit that is set, and 1 for each that is not."""
            return signs.index_select(0, planes[number, part].reshape(-1).int()).view(-1, _BLOCK)

        scale = self._scales(message)[part].to(self.compute)[:, None]
        if self.bits == 1:
            return plane(0).mul_(scale.mul_(first))
        # Each bit adds its part, or not: half of it, more or less.
        size = torch.full_like(scale, first + apart * (2 ** (self.bits - 1) - 1) / 2)
        for bit in range(self.bits - 1):
            size = size - plane(1 + bit).mul_(apart * 2**bit / 2)
        return plane(0).mul_(size).mul_(scale)

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        found = self._read(sent, received)
        views: Sequence[Tensor | None] = [None] * len(self.tensors) if found is None else self._views(found)
        for number, (tensor, difference) in enumerate(zip(self.tensors, views, strict=True)):
            if tensor.numel:
                yield Block(number, 0, tensor.numel, 0, 0), difference, 1.0

    def mix(self, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
        found = self._read(sent, received)
        if found is not None and rate:
            torch._foreach_add_(list(values), self._views(found.mul_(rate)))

    def _read(self, sent: Tensor, received: Tensor) -> Tensor | None:
        """Learns from two messages; the differences, padded, or None if they are not mixed."""
        if not self.nbytes:
            return None
        (own, here), (other, there) = (message[:_HEAD].view(torch.int64).tolist() for message in (sent, received))
        reference = self._references.get(self._edge)
        found = self._room() if own == other and here == there == 1 else None
        self.rejected += len(self.tensors) if found is None else 0
        if own != other:
            self._references[self._edge] = self._unknown(1 + (reference.mismatches if reference is not None else 0))
            return None
        # Of one that was dropped since (a load), the differences are those of the messages, as at the other end.
        reference = reference or self._unknown()
        reference.mismatches = 0
        self._learn(reference, sent, received, None if found is None else found.view(-1, _BLOCK))
        return found

    def _learn(self, reference: _Reference, sent: Tensor, received: Tensor, out: Tensor | None) -> None:
        """Moves the reference, and writes the differences to ``out``."""
        if self._origin is not None and reference.values is self._origin.values:
            reference.values = reference.values.clone()
        self._move(reference.values.view(-1, _BLOCK), sent, received, out)
        self._clear_padding(reference.values)
        total = sum(int(message[_HEAD:-FLAG].view(torch.int64).sum()) for message in (sent, received))
        reference.digest = _signed(reference.digest * _FACTOR + total)
        reference.exchanges += 1
        if self._origin is not None:
            self._origin.exchanges += 1

    def _move(self, known: Tensor, sent: Tensor, received: Tensor, out: Tensor | None) -> None:
        if self._numba is not None:
            read = [(_bits_of(self._scales(message)), self._planes(message).numpy()) for message in (sent, received)]
            signs, written = _signs(self.device, self.compute).numpy(), known.new_empty(0, _BLOCK, dtype=self.compute)
            written = written if out is None else out
            self._numba.learn_rows(known.numpy(), *read[0], *read[1], *_LEVELS[self.bits], signs, written.numpy())
            return
        for part in self._parts():
            ours, theirs = self._decode(sent, part), self._decode(received, part)
            if out is not None:
                torch.sub(theirs, ours, out=out[part])
            # Products and sums one after another, so that all processors round alike.
            known[part] = ours.add_(theirs).mul_(0.5).add_(known[part])

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        # A difference is added to the values themselves.
        for number, value in enumerate(values):
            yield Block(number, 0, len(value), 0, 0), value.to(self.compute)

    def first_nonfinite(self, message: Tensor) -> tuple[int, int] | None:
        bad = self._scales(message).isfinite().logical_not().nonzero()
        if not len(bad):
            return None
        row = int(bad[0])
        number = next(number for number in reversed(range(len(self.tensors))) if self._first[number] <= row)
        return number, (row - self._first[number]) * _BLOCK

    def stuck(self, rounds: int) -> list[int]:
        mismatches = max((reference.mismatches for reference in self._references.values()), default=0)
        return list(range(len(self.tensors))) if mismatches >= rounds else []

    # -- saving and resuming ------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Tensor]]:
        """Of each flat tensor, under keys such as '0-3.reference': members of the edge, none for the origin; and the counts."""
        found: list[dict[str, Tensor]] = [{} for _ in self.tensors]
        origin = [] if self._origin is None else [((), self._origin)]
        for edge, reference in (*origin, *self._references.items()):
            name = "-".join(map(str, edge))
            for own, values in zip(found, self._views(reference.values), strict=True):
                own[f"{name}.reference"] = values
                own[f"{name}.near"] = torch.tensor([reference.near, reference.exchanges], dtype=torch.int64, device="cpu")
        return found

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        known = {number: entries["known"] for number, entries in enumerate(by_tensor) if "known" in entries}
        names = {key.removesuffix(".reference") for entries in by_tensor for key in entries if key.endswith(".reference")}
        if known and not names:
            self._start(known)
            return
        self._origin, self._references = None, {}
        for name in sorted(names):
            saved = [(entries.get(f"{name}.reference"), entries.get(f"{name}.near")) for entries in by_tensor]
            flat = self._zeros()
            found: list[tuple[bool, int]] = []
            for view, (values, flags) in zip(self._views(flat), saved, strict=True):
                if values is None or flags is None or values.shape != view.shape:
                    found.append((False, 0))
                    continue
                view.copy_(values)
                found.append((bool(flags[0]), int(flags[1])))
            digest = self._digest_of(flat, range(len(self.tensors)))
            reference = _Reference(flat, digest, all(near for near, _ in found), min(exchanges for _, exchanges in found))
            if name:
                self._references[tuple(map(int, name.split("-")))] = reference
            else:
                self._origin = reference


def _bits_of(values: Tensor) -> npt.NDArray[np.uint16]:
    """Of bfloat16 values, which NumPy does not know."""
    return values.view(torch.int16).numpy().view(np.uint16)


def _pack(bits: Tensor, out: Tensor) -> None:
    """Writes bits, which are bytes of 0 or 1, eight to a byte."""
    out.copy_((bits.view(torch.uint8).view(torch.int64) * _GATHER >> 56).to(torch.uint8).view_as(out))


def _signed(number: int) -> int:
    """``number`` modulo 2^64, as an int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """For each byte -1 for each bit that is set, and 1 for the others, from the lowest on: of shape (256, 8)."""
    numbers, places = (torch.arange(count, dtype=torch.int64, device=device) for count in (256, 8))
    return (1 - 2 * (numbers[:, None] >> places & 1)).to(dtype)


@functools.cache
def few_bits(bits: int) -> type[FewBits]:
    """The compression '1bit', '2bit' or '4bit'."""
    return type("FewBits", (FewBits,), {"bits": bits, "name": f"{bits}bit"})
