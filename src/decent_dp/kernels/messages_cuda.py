"""Messages on a GPU, in Triton: one pass over memory for each coding and each mixing, for all tensors of a bucket at once.

Tensors are found through a table of tiles. A tile is up to `TILE` elements of one tensor that lie one after another, in memory
and in the message. Those whose memory allows wide loads have launches of their own.

Products and sums are rounded one after the other (``enable_fp_fusion=False``), as the forms in torch do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .pieces import on_device

__all__ = [
    "Lattice",
    "Part",
    "Tiles",
    "encode_int8",
    "encode_plain",
    "largest",
    "mix_int8",
    "mix_plain",
    "moved",
    "verify_int8",
]

COLUMNS = 256
# Elements of a tile: 32 for each thread of four warps.
TILE = 4096
_WARPS = 4
# Bytes that one thread loads at once.
_VECTOR = 16
# Alignment of codes of one byte in a message, of which each thread writes a few at once.
_CODES = 8
# What the table says of a tile: its place from the base tensor in elements, its first code in the message in codes, its number
# of elements, its block, and its first row in the block.
_FIELDS = 5

_LARGEST: tl.constexpr = tl.constexpr(2.0**21)
_PRIME: tl.constexpr = tl.constexpr(2**31 - 1)
_UNIT: tl.constexpr = tl.constexpr(2.0**-16)
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
_COLUMNS: tl.constexpr = tl.constexpr(COLUMNS)
_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the bits of a float32


@dataclass(frozen=True)
class Part:
    """Elements ``[start, start + numel)`` of tensor number ``tensor``; ``at`` is the byte of the first code in the message.

    ``numel`` is at most 2^16 where blocks are summed. Parts are numbered in order: these are the numbers of blocks.
    """

    tensor: int
    start: int
    numel: int
    at: int


class Tiles:
    """The tiles of a bucket's parts, on its device.

    Args:
        itemsize: bytes of a value; ``code_itemsize``: of a code, which ``Part.at`` is a multiple of.
    """

    def __init__(self, parts: Sequence[Part], itemsize: int, code_itemsize: int, device: torch.device) -> None:
        self._itemsize, self._code_itemsize, self._device = itemsize, code_itemsize, device
        rows = []
        for number, part in enumerate(parts):
            first = np.arange(0, part.numel, TILE, dtype=np.int64)
            table = np.zeros((len(first), _FIELDS), dtype=np.int64)
            table[:, 0] = part.start + first
            table[:, 1] = part.at // code_itemsize + first
            table[:, 2] = np.minimum(part.numel - first, TILE)
            table[:, 3] = number
            table[:, 4] = first // COLUMNS
            rows.append(table)
        self._rows = np.concatenate(rows) if rows else np.zeros((0, _FIELDS), dtype=np.int64)
        self._tensor = np.repeat([part.tensor for part in parts], [len(table) for table in rows]).astype(np.int64)
        self._addresses: list[int] = []
        # Tables of the tiles with wide loads, which are all full, and of the others: for codes and values, and for codes alone.
        self._bound = self._unbound = self._split(self._rows, np.ones(len(self._rows), dtype=bool))
        self._base = self._bound[0]

    def bind(self, values: Sequence[Tensor]) -> None:
        """Finds the tensors, which may have moved since the last call; of the device and dtype of the bucket, 1-D."""
        addresses = [value.data_ptr() for value in values]
        if addresses == self._addresses:
            return
        self._addresses = addresses
        self._base = next((value for value in values if value.numel() and value.data_ptr() % _VECTOR == 0), values[0])
        table, places = self._rows.copy(), np.array(addresses, dtype=np.int64) - self._base.data_ptr()
        assert not (places % self._itemsize).any(), "tensors of one dtype lie a whole number of elements apart"
        table[:, 0] += places[self._tensor] // self._itemsize
        aligned = (table[:, 0] * self._itemsize % _VECTOR == 0) & (self._base.data_ptr() % _VECTOR == 0)
        self._bound = self._split(table, aligned)

    def _split(self, table: Any, aligned: Any) -> tuple[Tensor, Tensor]:
        aligned = aligned & (table[:, 2] == TILE) & (table[:, 1] * self._code_itemsize % self._code_alignment == 0)
        wide, rest = (moved(torch.from_numpy(part), self._device) for part in (table[aligned], table[~aligned]))
        return wide, rest

    @property
    def _code_alignment(self) -> int:
        return _CODES if self._code_itemsize == 1 else _VECTOR

    def launch(self, kernel: Any, *arguments: Any, messages: Sequence[Tensor] = (), values: bool = True) -> None:
        """Launches ``kernel`` on all tiles.

        Args:
            messages: all have the same layout; codes are as aligned as the least aligned of them.
            values: whether the kernel looks at the tensors of ``bind``.
        """
        wide = all(message.data_ptr() % _VECTOR == 0 for message in messages)
        steps = _VECTOR // self._itemsize, self._code_alignment // self._code_itemsize
        tables = self._bound if values else self._unbound
        with on_device(self._device):
            for table, aligned in zip(tables, (wide, False), strict=True):
                if len(table):
                    multiples = steps if aligned else (1, 1)
                    kernel[(len(table),)](
                        self._base, table, *arguments, TILE, *multiples, aligned, num_warps=_WARPS, enable_fp_fusion=False
                    )


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, queued on its current stream without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device, copy=True)
    return tensor.pin_memory().to(device, non_blocking=True)


@triton.jit
def _tile(table, MULTIPLE: tl.constexpr, CODES: tl.constexpr):
    """The place, the first code, the number of elements, the block and the first row of this program's tile."""
    row = table + tl.program_id(0).to(tl.int64) * 5
    place = tl.multiple_of(tl.load(row), MULTIPLE)
    at = tl.multiple_of(tl.load(row + 1), CODES)
    return place, at, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


# -- the values themselves, in their own dtype or a narrower one ---------------------------------------------------------


@triton.jit(do_not_specialize=["mark"])
def _encode_plain(
    base, table, codes, flag, mark, TILE: tl.constexpr, MULTIPLE: tl.constexpr, CODES: tl.constexpr, WHOLE: tl.constexpr
):
    place, at, count, _, _ = _tile(table, MULTIPLE, CODES)
    offsets = tl.arange(0, TILE)
    if WHOLE:
        code = tl.load(base + place + offsets).to(codes.dtype.element_ty)
        tl.store(codes + at + offsets, code)
    else:
        inside = offsets < count
        code = tl.load(base + place + offsets, mask=inside, other=0.0).to(codes.dtype.element_ty)
        tl.store(codes + at + offsets, code, mask=inside)
    # False for NaN, too.
    finite = tl.abs(code.to(tl.float32)) < float("inf")
    if tl.min(finite.to(tl.int32)) == 0:
        tl.atomic_max(flag, mark + tl.zeros((), tl.int64))


@triton.jit
def _mix_plain(
    base, table, sent, received, rate, TILE: tl.constexpr, MULTIPLE: tl.constexpr, CODES: tl.constexpr, WHOLE: tl.constexpr
):
    place, at, count, _, _ = _tile(table, MULTIPLE, CODES)
    offsets = tl.arange(0, TILE)
    if WHOLE:
        x = tl.load(base + place + offsets)
        theirs, ours = tl.load(received + at + offsets), tl.load(sent + at + offsets)
    else:
        inside = offsets < count
        x = tl.load(base + place + offsets, mask=inside, other=0.0)
        theirs = tl.load(received + at + offsets, mask=inside, other=0.0)
        ours = tl.load(sent + at + offsets, mask=inside, other=0.0)
    moved = (x.to(tl.float32) + (theirs.to(tl.float32) - ours.to(tl.float32)) * rate).to(x.dtype)
    if WHOLE:
        tl.store(base + place + offsets, moved)
    else:
        tl.store(base + place + offsets, moved, mask=offsets < count)


def encode_plain(tiles: Tiles, values: Sequence[Tensor], codes: Tensor, flag: Tensor, mark: int) -> None:
    """Writes ``values`` into ``codes``, the message in the dtype of its codes; ``flag`` (int64, of shape (1,)) becomes ``mark``
    if a code is not finite, else 0."""
    flag.zero_()
    tiles.bind(values)
    tiles.launch(_encode_plain, codes, flag, mark, messages=[codes])


def mix_plain(tiles: Tiles, values: Sequence[Tensor], sent: Tensor, received: Tensor, rate: float) -> None:
    """values += rate · (received - sent), in float32; the messages are given in the dtype of their codes."""
    tiles.bind(values)
    tiles.launch(_mix_plain, sent, received, rate, messages=[sent, received])
    torch.autograd.graph.increment_version(values)


# -- one byte per value (see `compression.int8` and `compression.lattice`) -----------------------------------------------


@triton.jit
def _add_sums(number, sums, block, row, factors, SMALL: tl.constexpr, ROWS: tl.constexpr):
    """Adds the two weighted sums of the integers of a tile to those of its block. They are exact in any order.

    ``SMALL``: the integers are of 8 bits, and the sums over rows fit into 32.
    """
    columns, rows = tl.arange(0, _COLUMNS), tl.arange(0, ROWS)
    weights, by_column = tl.load(factors + columns), tl.load(factors + _COLUMNS + columns)
    by_row = tl.load(factors + 2 * _COLUMNS + row + rows)
    wide = number.to(tl.int64)
    tl.atomic_add(sums + 4 * block, tl.sum(wide * weights[None, :].to(tl.int64)))
    tl.atomic_add(sums + 4 * block + 1, tl.sum(wide * (by_row[:, None] * by_column[None, :]).to(tl.int64)) % _PRIME)


@triton.jit
def _encode_int8(
    base,
    table,
    codes,
    sums,
    steps,
    starts,
    noise,
    factors,
    TILE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    place, at, count, block, row = _tile(table, MULTIPLE, CODES)
    offsets = tl.arange(0, TILE // _COLUMNS)[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    if WHOLE:
        x = tl.load(base + place + offsets).to(tl.float32)
    else:
        x = tl.load(base + place + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    drawn = tl.load(noise + tl.load(starts + block) + row * _COLUMNS + offsets).to(tl.float32)
    shifted = ((drawn + 0.5) * _UNIT + x * tl.load(steps + 2 * block + 1)) + _MAGIC
    number = shifted - _MAGIC
    code = (shifted.to(tl.int32, bitcast=True) & 255).to(tl.uint8)
    if WHOLE:
        tl.store(codes + at + offsets, code)
    else:
        tl.store(codes + at + offsets, code, mask=offsets < count)
        number = tl.where(offsets < count, number, 0.0)
    # As integers, the bits of absolute values are in the order of these; infinity is above all numbers, and NaN above it.
    most = tl.max(tl.max(number.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    tl.atomic_max(sums + 4 * block + 2, most.to(tl.int64))
    tl.atomic_max(sums + 4 * block + 3, largest.to(tl.int64))
    fits = tl.abs(number) < _LARGEST
    _add_sums(tl.where(fits, number, 0.0).to(tl.int32), sums, block, row, factors, False, TILE // _COLUMNS)


@triton.jit(do_not_specialize=["mark"])
def _write_records(sums, message, places, flag, mark, blocks, LANES: tl.constexpr):
    """Writes the records of an encoded message, of float64, from the sums of blocks."""
    block = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = block < blocks
    first = tl.load(sums + 4 * block, mask=there, other=0)
    second = tl.load(sums + 4 * block + 1, mask=there, other=0)
    most = tl.load(sums + 4 * block + 2, mask=there, other=0)
    largest = tl.load(sums + 4 * block + 3, mask=there, other=0)
    finite = largest < _INFINITE
    fits = finite & (most.to(tl.int32).to(tl.float32, bitcast=True) < _LARGEST)
    second = ((second % _PRIME) + _PRIME) % _PRIME
    without = tl.where(finite, float("inf"), float("nan")).to(tl.float64)
    at = message + tl.load(places + block, mask=there, other=0)
    tl.store(at, tl.where(fits, first.to(tl.float64), without), mask=there)
    tl.store(at + 1, tl.where(fits, second.to(tl.float64), without), mask=there)
    tl.store(at + 2, tl.where(fits, 0.0, without), mask=there)
    if tl.min(finite.to(tl.int32)) == 0:
        tl.atomic_max(flag, mark + tl.zeros((), tl.int64))


@triton.jit
def _verify_int8(
    base,
    table,
    sent,
    received,
    sums,
    factors,
    TILE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    _, at, count, block, row = _tile(table, MULTIPLE, CODES)
    offsets = tl.arange(0, TILE // _COLUMNS)[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    if WHOLE:
        wrapped = (tl.load(received + at + offsets) - tl.load(sent + at + offsets)).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        inside = offsets < count
        theirs = tl.load(received + at + offsets, mask=inside, other=0)
        wrapped = (theirs - tl.load(sent + at + offsets, mask=inside, other=0)).to(tl.int8, bitcast=True).to(tl.int32)
    tl.atomic_max(sums + 4 * block + 2, tl.max(tl.max(tl.abs(wrapped), axis=1), axis=0).to(tl.int64))
    _add_sums(wrapped, sums, block, row, factors, True, TILE // _COLUMNS)


@triton.jit
def _judge(sums, sent, received, places, found, blocks, LANES: tl.constexpr):
    """Writes whether the difference of each block is certain, and how far the other's values lie, in steps."""
    block = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = block < blocks
    first = tl.load(sums + 4 * block, mask=there, other=0).to(tl.float64)
    second = tl.load(sums + 4 * block + 1, mask=there, other=0)
    most = tl.load(sums + 4 * block + 2, mask=there, other=0)
    at = tl.load(places + block, mask=there, other=0)
    ours, theirs = tl.load(sent + at, mask=there, other=0.0), tl.load(received + at, mask=there, other=0.0)
    certain = first == theirs - ours
    ours, theirs = tl.load(sent + at + 1, mask=there, other=0.0), tl.load(received + at + 1, mask=there, other=0.0)
    # Where a record is none, the first comparison is false, and this one of no meaning.
    both = tl.where(certain, theirs - ours, 0.0).to(tl.int64) - second
    certain = certain & (both % _PRIME == 0) & (most < 128)
    reach = tl.load(received + at + 2, mask=there, other=0.0)
    tl.store(found + 2 * block, tl.where(certain, 1.0, 0.0).to(tl.float64), mask=there)
    tl.store(found + 2 * block + 1, tl.maximum(reach, most.to(tl.float64)), mask=there)


@triton.jit
def _mix_int8(
    base,
    table,
    sent,
    received,
    found,
    steps,
    rate,
    TILE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    place, at, count, block, _ = _tile(table, MULTIPLE, CODES)
    if tl.load(found + 2 * block) != 0:
        factor = rate * tl.load(steps + 2 * block)
        offsets = tl.arange(0, TILE)
        if WHOLE:
            x = tl.load(base + place + offsets)
            wrapped = (tl.load(received + at + offsets) - tl.load(sent + at + offsets)).to(tl.int8, bitcast=True)
            tl.store(base + place + offsets, (x.to(tl.float32) + wrapped.to(tl.float32) * factor).to(x.dtype))
        else:
            inside = offsets < count
            x = tl.load(base + place + offsets, mask=inside, other=0.0)
            theirs = tl.load(received + at + offsets, mask=inside, other=0)
            wrapped = (theirs - tl.load(sent + at + offsets, mask=inside, other=0)).to(tl.int8, bitcast=True)
            tl.store(base + place + offsets, (x.to(tl.float32) + wrapped.to(tl.float32) * factor).to(x.dtype), mask=inside)


@triton.jit
def _largest(base, table, found, TILE: tl.constexpr, MULTIPLE: tl.constexpr, CODES: tl.constexpr, WHOLE: tl.constexpr):
    place, _, count, block, _ = _tile(table, MULTIPLE, CODES)
    offsets = tl.arange(0, TILE)
    if WHOLE:
        x = tl.load(base + place + offsets).to(tl.float32)
    else:
        x = tl.load(base + place + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    tl.atomic_max(found + block, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF))


_LANES = 128


@dataclass(frozen=True)
class Lattice:
    """What is the same in all exchanges of a bucket.

    Attributes:
        tiles: of its blocks.
        places: of the blocks' records in the message, in float64s; int64, of shape (blocks,).
        factors: weights of columns, factors of columns and factors of rows, int32, of shape (3, 256).
        noise: k for (k + 1/2) · 2^-16, int16, of shape (2^17,).
    """

    tiles: Tiles
    places: Tensor
    factors: Tensor
    noise: Tensor

    @property
    def blocks(self) -> int:
        return len(self.places)

    @property
    def _programs(self) -> tuple[int]:
        return (triton.cdiv(self.blocks, _LANES),)


def encode_int8(
    lattice: Lattice, values: Sequence[Tensor], out: Tensor, flag: Tensor, mark: int, steps: Tensor, starts: Tensor
) -> Tensor:
    """Writes a message.

    Args:
        steps: the step of each block and its inverse, float32, of shape (blocks, 2).
        starts: where the noise of each block begins, int32, of shape (blocks,).

    Returns:
        (blocks, 4), int64. In the last two columns the bits of two float32: of the largest lattice number and of the largest
        value, both without sign.
    """
    sums = torch.zeros(lattice.blocks, 4, dtype=torch.int64, device=out.device)
    flag.zero_()
    lattice.tiles.bind(values)
    lattice.tiles.launch(_encode_int8, out, sums, steps, starts, lattice.noise, lattice.factors, messages=[out])
    with on_device(out.device):
        _write_records[lattice._programs](sums, out.view(torch.float64), lattice.places, flag, mark, lattice.blocks, _LANES)
    return sums


def verify_int8(lattice: Lattice, sent: Tensor, received: Tensor) -> Tensor:
    """Compares two messages: (blocks, 2), float64: 1.0 where the difference of a block is certain, and how far the other's
    values lie from this worker's, in steps."""
    sums = torch.zeros(lattice.blocks, 4, dtype=torch.int64, device=sent.device)
    found = torch.empty(lattice.blocks, 2, dtype=torch.float64, device=sent.device)
    lattice.tiles.launch(_verify_int8, sent, received, sums, lattice.factors, messages=[sent, received], values=False)
    records = sent.view(torch.float64), received.view(torch.float64)
    with on_device(sent.device):
        _judge[lattice._programs](sums, *records, lattice.places, found, lattice.blocks, _LANES)
    return found


def mix_int8(
    lattice: Lattice, values: Sequence[Tensor], sent: Tensor, received: Tensor, found: Tensor, steps: Tensor, rate: float
) -> None:
    """values += rate · step · (received - sent) in the blocks that are certain (``found``: of ``verify_int8``)."""
    lattice.tiles.bind(values)
    lattice.tiles.launch(_mix_int8, sent, received, found, steps, rate, messages=[sent, received])
    torch.autograd.graph.increment_version(values)


def largest(lattice: Lattice, values: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of each block, float32, of shape (blocks,)."""
    found = torch.zeros(lattice.blocks, dtype=torch.int32, device=lattice.places.device)
    lattice.tiles.bind(values)
    lattice.tiles.launch(_largest, found)
    return found.view(torch.float32)
