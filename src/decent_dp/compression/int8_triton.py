"""The int8 compression on a GPU, in Triton: one pass over memory for each coding and each mixing, for all tensors of a bucket.

Messages and values are those of ``Lattice``. Tensors are found through a table of tiles. A tile is up to `TILE` elements of a
tensor that lie one after another, in memory and in the message. Those whose memory allows wide loads have own launches.
Products and sums are rounded one after the other (``enable_fp_fusion=False``), as the form in torch does it. What the host must
know is copied to it beside the computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from decent_dp._triton import on_device
from decent_dp.compression.codec import FLAG, Block, MessageId, flag_view
from decent_dp.compression.lattice import FIELDS, BoolArray, FloatArray, sum_weights
from decent_dp.compression.stochastic_rounding import noise_starts, noise_table

__all__ = ["TritonLattice", "attempt"]

COLUMNS = 256
# Elements of a tile: 32 for each thread of four warps.
TILE = 4096
_WARPS = 4
# Bytes that one thread loads at once.
_VECTOR = 16
# Alignment of codes in a message, of which each thread writes a few at once.
_CODES = 8
# What the table says of a tile: its place from the base tensor in elements, its first code in the message, its number
# of elements, its block, and its first row in the block.
_FIELDS = 5

_LARGEST: tl.constexpr = tl.constexpr(2.0**21)
_PRIME: tl.constexpr = tl.constexpr(2**31 - 1)
_UNIT: tl.constexpr = tl.constexpr(2.0**-16)
_MAGIC: tl.constexpr = tl.constexpr(12582912.0)
_COLUMNS: tl.constexpr = tl.constexpr(COLUMNS)
_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # the bits of a float32


class _Tiles:
    """The tiles of a bucket's blocks, of at most 2^16 elements each, on its device. ``itemsize``: bytes of a value."""

    def __init__(self, blocks: Sequence[Block], itemsize: int, device: torch.device) -> None:
        self._itemsize, self._device = itemsize, device
        rows = []
        for number, block in enumerate(blocks):
            first = np.arange(0, block.numel, TILE, dtype=np.int64)
            table = np.zeros((len(first), _FIELDS), dtype=np.int64)
            table[:, 0] = block.start + first
            table[:, 1] = block.at + first
            table[:, 2] = np.minimum(block.numel - first, TILE)
            table[:, 3] = number
            table[:, 4] = first // COLUMNS
            rows.append(table)
        self._rows = np.concatenate(rows) if rows else np.zeros((0, _FIELDS), dtype=np.int64)
        self._tensor = np.repeat([block.tensor for block in blocks], [len(table) for table in rows]).astype(np.int64)
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
        aligned = aligned & (table[:, 2] == TILE) & (table[:, 1] % _CODES == 0)
        wide, rest = (_moved(torch.from_numpy(part), self._device) for part in (table[aligned], table[~aligned]))
        return wide, rest

    def launch(self, kernel: Any, *arguments: Any, messages: Sequence[Tensor] = (), values: bool = True) -> None:
        """Launches ``kernel`` on all tiles.

        Args:
            messages: all have the same layout; codes are as aligned as the least aligned of them.
            values: whether the kernel looks at the tensors of ``bind``.
        """
        wide = all(message.data_ptr() % _VECTOR == 0 for message in messages)
        steps = _VECTOR // self._itemsize, _CODES
        tables = self._bound if values else self._unbound
        with on_device(self._device):
            for table, aligned in zip(tables, (wide, False), strict=True):
                if len(table):
                    multiples = steps if aligned else (1, 1)
                    kernel[(len(table),)](
                        self._base, table, *arguments, TILE, *multiples, aligned, num_warps=_WARPS, enable_fp_fusion=False
                    )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
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


_LANES = 128


class TritonLattice:
    """The arithmetic on the blocks of a bucket on a GPU, all of them in a few launches.

    Args:
        blocks, numbers: as of ``Lattice``.
        dtype: of the values, which are computed in float32.
    """

    def __init__(self, blocks: Sequence[Block], numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._blocks = device, len(blocks)
        self._tiles = _Tiles(blocks, dtype.itemsize, device)
        # Of the blocks' records in the message, in float64s.
        self._places = torch.tensor([block.record // 8 for block in blocks], dtype=torch.int64, device=device)
        # Weights of columns, factors of columns and factors of rows.
        self._factors = torch.from_numpy(sum_weights().astype(np.int32)).to(device)
        # k for (k + 1/2) · 2^-16: half of the numbers themselves, which are read as often as the values.
        self._noise = (noise_table(torch.float32, device) * 2**16 - 0.5).to(torch.int16)
        self._numbers = np.array(numbers, dtype=np.int64)
        self._starts = np.array([block.start for block in blocks], dtype=np.int64)
        # The step of each block and its inverse.
        self._steps: Tensor | None = None
        self._encoded: _Reading | None = None
        self._compared: tuple[Tensor, _Reading] | None = None

    def _programs(self) -> tuple[int]:
        return (triton.cdiv(self._blocks, _LANES),)

    def set_steps(self, steps: FloatArray) -> None:
        """An exchange begins, with these steps of its blocks."""
        self._compared = None
        self._steps = _moved(torch.from_numpy(np.stack([steps, 1.0 / steps], axis=1).astype(np.float32)), self._device)

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId) -> None:
        """Writes a message, with its flag."""
        starts = noise_starts((message_id.round, message_id.rank), self._numbers, self._starts).astype(np.int32)
        moved, flag, mark = _moved(torch.from_numpy(starts), self._device), flag_view(out), message_id.rank + 1
        # Two sums, and the bits of two float32: of the largest lattice number and of the largest value, both without sign.
        sums = torch.zeros(self._blocks, 4, dtype=torch.int64, device=self._device)
        flag.zero_()
        values = list(values)  # the tensors of a low-rank message are made when they are read, and live until the launch
        self._tiles.bind(values)
        self._tiles.launch(_encode_int8, out, sums, self._steps, moved, self._noise, self._factors, messages=[out])
        with on_device(self._device):
            _write_records[self._programs()](sums, out.view(torch.float64), self._places, flag, mark, self._blocks, _LANES)
        self._encoded = _Reading(sums)

    def encoded(self) -> tuple[FloatArray, FloatArray] | None:
        """The largest lattice number and the largest absolute value of each block of the last message, once."""
        if self._encoded is None:
            return None
        sums, self._encoded = self._encoded.read(), None
        most, largest = (np.ascontiguousarray(sums[:, column].astype(np.int32)).view(np.float32) for column in (2, 3))
        return most.astype(np.float64), largest.astype(np.float64)

    def begin_compare(self, ours: Tensor, theirs: Tensor) -> None:
        """Begins to compare two messages, on the current stream."""
        sums = torch.zeros(self._blocks, 4, dtype=torch.int64, device=self._device)
        # Whether the difference of a block is certain, and how far the other's values lie from this worker's, in steps.
        found = torch.empty(self._blocks, 2, dtype=torch.float64, device=self._device)
        self._tiles.launch(_verify_int8, ours, theirs, sums, self._factors, messages=[ours, theirs], values=False)
        records = ours.view(torch.float64), theirs.view(torch.float64)
        with on_device(self._device):
            _judge[self._programs()](sums, *records, self._places, found, self._blocks, _LANES)
        self._compared = found, _Reading(found)

    def compare(self, ours: Tensor, theirs: Tensor) -> tuple[BoolArray, FloatArray, Tensor]:
        """For each block whether the differences are certain, and the reach of the other's values, in steps; and both on the
        device, where kernels that are launched from now on can read them."""
        if self._compared is None:
            self.begin_compare(ours, theirs)
        assert self._compared is not None
        (found, reading), self._compared = self._compared, None
        host = reading.read()
        if found.is_cuda:
            found.record_stream(torch.cuda.current_stream(found.device))
        return host[:, 0] != 0, host[:, 1], found

    def mix(self, values: Sequence[Tensor], ours: Tensor, theirs: Tensor, found: Tensor, rate: float) -> None:
        """values += rate · step · (theirs - ours) in the blocks that are certain (``found``: of ``compare``)."""
        values = list(values)
        self._tiles.bind(values)
        self._tiles.launch(_mix_int8, ours, theirs, found, self._steps, rate, messages=[ours, theirs])
        torch.autograd.graph.increment_version(values)


def attempt(device: torch.device, dtype: torch.dtype) -> None:
    """Runs all kernels, for both forms of tiles: values of a whole tile and of one more element, a block for each."""
    record = 8 * FIELDS
    first, last = 2 * record, 2 * record + TILE
    blocks = [Block(0, 0, TILE, first, 0), Block(0, TILE, TILE + 1, last, record)]
    values = [torch.zeros(TILE + 1, dtype=dtype, device=device)]
    sent, received = (torch.zeros(last + 2 * FLAG, dtype=torch.uint8, device=device) for _ in range(2))
    coder = TritonLattice(blocks, [0, 0], dtype, device)
    coder.set_steps(np.ones(len(blocks)))
    coder.encode(values, sent, MessageId(0, 0))
    coder.mix(values, sent, received, coder.compare(sent, received)[2], 0.5)


class _Reading:
    """A copy of a small tensor to the CPU, queued on the current stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._event: Any = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Any:
        """Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
