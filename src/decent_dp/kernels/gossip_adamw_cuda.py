"""Steps of GossipAdamW on CUDA, for many parameters in one launch, and its statistics in three more. In Triton.

No sum depends on the order in which programs run, so that a resumed run repeats every bit on the same kind of GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pieces import TYPES, at_least, at_most, on_device, pointer_at, quotient, root
from .tables import aligned, numbers, table, tiles

__all__ = ["GAINS", "ROOTS", "Matrix", "Renewal", "renew", "update"]

GAINS, ROOTS = 1, 2
_BLOCK, _WARPS = 1024, 8
# Of the sums: the rows of one program, of which it reads a few at a time, and its columns.
_STRIP, _ROWS, _COLUMNS, _SUM_WARPS = 128, 8, 256, 4
_PARTS, _ENTRIES = 16, 128  # of their second half
_CHUNK = 2048  # of the factors


class Matrix(NamedTuple):
    """A parameter of one step: contiguous, as ``rows`` × ``columns``."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rows: int
    columns: int
    factors: Tensor | None = None  # gains or roots of rows and columns; None: AdamW's update
    means: Tensor | None = None
    shared: Tensor | None = None
    drift: Tensor | None = None


# ---------------------------------------------------------------------------------------------------------- the update


@triton.jit
def _tile(
    param, grad, exp_avg, exp_avg_sq, offsets, mask, of_rows, of_columns,
    keep, beta1, w1, beta2, w2, correction, eps, scale, KIND: tl.constexpr, MAXIMIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some elements; ``mask`` is None where all of them exist."""
    state = tl.float64 if WIDE else tl.float32
    stored = tl.load(param + offsets, mask=mask)
    old_first = tl.load(exp_avg + offsets, mask=mask)
    old_second = tl.load(exp_avg_sq + offsets, mask=mask)
    g = tl.load(grad + offsets, mask=mask).to(state)
    if MAXIMIZE:
        g = -g
    m = beta1 * old_first.to(state) + w1 * g
    v = beta2 * old_second.to(state) + w2 * g * g
    if KIND == 2:
        denominator = at_least((of_rows * of_columns).to(state), root(v * correction)) + eps
        change = quotient(m, denominator) * scale
    else:
        change = quotient(m * scale, root(v) * correction + eps) * of_rows * of_columns
    x = keep * stored.to(state) + change
    tl.store(param + offsets, x.to(stored.dtype), mask=mask)
    tl.store(exp_avg + offsets, m.to(old_first.dtype), mask=mask)
    tl.store(exp_avg_sq + offsets, v.to(old_second.dtype), mask=mask)


@triton.jit
def _update(
    matrices, of_tiles, wide, keep, beta1, w1, beta2, w2, correction, eps, scale,
    PARAM: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each tile of ``BLOCK`` elements. ``wide`` has the eight numbers for float64 parameters."""
    place = of_tiles + 2 * tl.program_id(0)
    entry = matrices + 7 * tl.load(place)
    first = tl.load(place + 1) * BLOCK
    param = pointer_at(entry, PARAM, ALIGNED) + first
    grad = pointer_at(entry + 1, GRAD, ALIGNED) + first
    exp_avg = pointer_at(entry + 2, PARAM, ALIGNED) + first
    exp_avg_sq = pointer_at(entry + 3, PARAM, ALIGNED) + first
    factors = pointer_at(entry + 4, tl.float32, False)
    rows = tl.load(entry + 5)
    columns = tl.load(entry + 6)
    WIDE: tl.constexpr = tl.float64 == PARAM
    if WIDE:
        keep, beta1, w1, beta2 = tl.load(wide), tl.load(wide + 1), tl.load(wide + 2), tl.load(wide + 3)
        w2, correction, eps, scale = tl.load(wide + 4), tl.load(wide + 5), tl.load(wide + 6), tl.load(wide + 7)
    offsets = tl.arange(0, BLOCK)
    left = tl.maximum(rows, 1) * columns - first
    of_rows = tl.full([BLOCK], 1.0, tl.float32)
    of_columns = tl.full([BLOCK], 1.0, tl.float32)
    if rows > 0:
        row = (first // columns).to(tl.int32)
        column = (first % columns).to(tl.int32) + offsets
        width = columns.to(tl.int32)
        if columns >= BLOCK:  # at most one row ends in the tile: no division
            beyond = column >= width
            in_row = row + beyond.to(tl.int32)
            in_column = tl.where(beyond, column - width, column)
        else:
            in_row = row + column // width
            in_column = column % width
        exists = offsets < left
        of_rows = tl.load(factors + in_row, mask=exists, other=1.0)
        of_columns = tl.load(factors + rows + in_column, mask=exists, other=1.0)
    # Without a mask, which would forbid vectors, wherever that can be.
    if left >= BLOCK:
        _tile(
            param, grad, exp_avg, exp_avg_sq, offsets, None, of_rows, of_columns,
            keep, beta1, w1, beta2, w2, correction, eps, scale, KIND, MAXIMIZE, WIDE,
        )  # fmt: skip
    else:
        _tile(
            param, grad, exp_avg, exp_avg_sq, offsets, offsets < left, of_rows, of_columns,
            keep, beta1, w1, beta2, w2, correction, eps, scale, KIND, MAXIMIZE, WIDE,
        )  # fmt: skip


def update(matrices: Sequence[Matrix], kind: int, values: Sequence[float], *, maximize: bool) -> None:
    """One step of parameters that share a device and a count of steps.

    Args:
        matrices: contiguous, of the dtypes in ``tables.DTYPES``; the moments have the parameter's. Without ``factors`` they may
            have any shape.
        kind: ``GAINS`` or ``ROOTS``: what the factors are.
        values: 1 - lr·λ, β1, 1-β1, β2, 1-β2, with gains 1/√(1-β2^t), with roots the least share of v, ε, and -lr/(1-β1^t).
    """
    alike: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = {}
    for param, grad, first, second, rows, columns, factors, *_ in matrices:
        a, b, c, d = param.data_ptr(), grad.data_ptr(), first.data_ptr(), second.data_ptr()
        last = (0, 0, param.numel()) if factors is None else (factors.data_ptr(), rows, columns)
        key = param.dtype, grad.dtype, (a | b | c | d) % 16 == 0  # all aligned
        if key not in alike:
            alike[key] = []
        alike[key].append((a, b, c, d, *last))
    device = matrices[0].param.device
    with on_device(device):
        for (of_param, of_grad, vectors), entries in alike.items():
            counts = tuple([-(-max(entry[5], 1) * entry[6] // _BLOCK) for entry in entries])
            if not sum(counts):
                continue
            whole = table(device, tuple(chain.from_iterable(entries)))
            _update[(sum(counts),)](
                whole,
                tiles(device, counts),
                numbers(device, values) if of_param == torch.float64 else whole,
                *map(float, values),  # for whole numbers Triton would compile anew
                TYPES[of_param],
                TYPES[of_grad],
                vectors,
                kind,
                maximize,
                _BLOCK,
                num_warps=_WARPS,
            )


# ------------------------------------------------------------------------------------------------------ the statistics


@dataclass(frozen=True)
class Renewal:
    """The numbers of one renewal of the statistics and of the factors that follow from them.

    Attributes:
        kind: ``GAINS`` or ``ROOTS``.
        products: of the gradients. 1: with themselves; 2: also with the momentum; 3: also with the drift. 0: the statistics
            stay, and only the factors are written.
        ratio: with two products, whether the common signal is the share of the signal that it was; otherwise it is all of it.
        weight: of this gradient in the averages.
        of_signal: the factor of the products with the momentum.
        of_drift: the factor of those with the drift.
        eps: ε, which is added to the roots.
        n: the number of replicas.
        batches: the global batch, in batches of this replica; n if all have equal ones.
        known: 1 less the weight of zeros in the averages.
        bound, smallest, tiny, large: the constants of ``optim.gossip_adamw``.
    """

    kind: int
    eps: float
    n: int
    batches: float
    known: float
    bound: float
    smallest: float
    tiny: float
    large: float
    products: int = 0
    ratio: bool = False
    weight: float = 0.0
    of_signal: float = 0.0
    of_drift: float = 0.0


@triton.jit
def _sums(
    matrices, of_tiles, partial, eps, GRAD: tl.constexpr, STATE: tl.constexpr, DRIFT: tl.constexpr, PRODUCTS: tl.constexpr,
    ALIGNED: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums of the products over the rows and the columns of a tile of STRIP × COLUMNS elements.

    A matrix of R × C elements, in D × A tiles, has in ``partial`` first its rows' sums, (A, PRODUCTS, R), then its columns',
    (D, PRODUCTS, C).
    """
    place = of_tiles + 2 * tl.program_id(0)
    entry = matrices + 12 * tl.load(place)
    tile = tl.load(place + 1)
    grad = pointer_at(entry, GRAD, ALIGNED)
    exp_avg = pointer_at(entry + 1, STATE, ALIGNED)
    drift = pointer_at(entry + 2, DRIFT, ALIGNED)
    roots = pointer_at(entry + 5, tl.float32, False)
    partial += tl.load(entry + 6)
    R, C, across = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 10)
    if ALIGNED:
        C = tl.multiple_of(C, 8)
    strip, band = tile // across, tile % across
    columns = band * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < C
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    signal = tl.zeros([ROWS, COLUMNS], tl.float32)
    drifted = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PRODUCTS == 3:
        of_columns = tl.load(roots + R + columns, mask=in_row, other=0.0)
    for start in range(0, STRIP, ROWS):
        rows = strip * STRIP + start + tl.arange(0, ROWS)
        exists = rows < R
        mask = exists[:, None] & in_row[None, :]
        at = rows[:, None] * C + columns[None, :]
        sums = partial + band * PRODUCTS * R + rows
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        product = g * g
        squares += product
        tl.store(sums, tl.sum(product, 1), mask=exists)
        if PRODUCTS > 1:
            product = g * tl.load(exp_avg + at, mask=mask, other=0.0).to(tl.float32)
            signal += product
            tl.store(sums + R, tl.sum(product, 1), mask=exists)
        if PRODUCTS == 3:
            of_rows = tl.load(roots + rows, mask=exists, other=0.0)
            # In an order that forms no products of small numbers.
            product = of_rows[:, None] * of_columns[None, :] + eps
            product = product * tl.load(drift + at, mask=mask, other=0.0).to(tl.float32) * g
            drifted += product
            tl.store(sums + 2 * R, tl.sum(product, 1), mask=exists)
    sums = partial + across * PRODUCTS * R + strip * PRODUCTS * C + columns
    tl.store(sums, tl.sum(squares, 0), mask=in_row)
    if PRODUCTS > 1:
        tl.store(sums + C, tl.sum(signal, 0), mask=in_row)
    if PRODUCTS == 3:
        tl.store(sums + 2 * C, tl.sum(drifted, 0), mask=in_row)


@triton.jit
def _between(a, b, weight):
    """As ``torch.lerp``: exact at both ends."""
    return tl.where(weight < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


@triton.jit
def _averages(
    matrices, of_tiles, partial, weight, of_signal, of_drift, bound, tiny,
    PRODUCTS: tl.constexpr, RATIO: tl.constexpr, PARTS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Takes the sums of ENTRIES rows and columns into the averages."""
    place = of_tiles + 2 * tl.program_id(0)
    entry = matrices + 12 * tl.load(place)
    first = tl.load(place + 1) * ENTRIES
    means = pointer_at(entry + 3, tl.float32, False)
    shared = pointer_at(entry + 4, tl.float32, False)
    partial += tl.load(entry + 6)
    R, C, down, across = tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10)
    entries = first + tl.arange(0, ENTRIES)
    exists = entries < R + C
    of_row = entries < R
    count = tl.where(of_row, across, down)
    apart = tl.where(of_row, R, C)
    at = tl.where(of_row, entries, across * PRODUCTS * R + entries - R)
    most = tl.maximum(across, down)
    if first + ENTRIES <= R:
        most = across
    if first >= R:
        most = down
    squares = tl.zeros([ENTRIES], tl.float32)
    signal = tl.zeros([ENTRIES], tl.float32)
    drifted = tl.zeros([ENTRIES], tl.float32)
    for start in range(0, most, PARTS):
        parts = start + tl.arange(0, PARTS)
        mask = (parts[:, None] < count[None, :]) & exists[None, :]
        sums = partial + at[None, :] + parts[:, None] * PRODUCTS * apart[None, :]
        squares += tl.sum(tl.load(sums, mask=mask, other=0.0), 0)
        if PRODUCTS > 1:
            signal += tl.sum(tl.load(sums + apart[None, :], mask=mask, other=0.0), 0)
        if PRODUCTS == 3:
            drifted += tl.sum(tl.load(sums + 2 * apart[None, :], mask=mask, other=0.0), 0)
    size = tl.where(of_row, C, R).to(tl.float32)
    squares = quotient(squares, size)
    signal = quotient(signal, size) * of_signal if PRODUCTS > 1 else squares
    V = tl.load(shared + entries, mask=exists, other=0.0)
    S = tl.load(shared + R + C + entries, mask=exists, other=0.0)
    common = tl.load(shared + 2 * (R + C) + entries, mask=exists, other=0.0)
    v = tl.load(means + entries, mask=exists, other=0.0)
    new = signal
    if RATIO:
        new = signal * at_most(at_least(quotient(common, at_least(S, tiny)), 0.0), 1.0)
    if PRODUCTS == 3:
        new = signal + at_most(at_least(quotient(drifted, size) * of_drift, -bound * squares), bound * squares)
    tl.store(means + entries, _between(v, squares, weight), mask=exists)
    tl.store(shared + entries, _between(V, squares, weight), mask=exists)
    tl.store(shared + R + C + entries, _between(S, signal, weight), mask=exists)
    tl.store(shared + 2 * (R + C) + entries, _between(common, new, weight), mask=exists)


@triton.jit
def _v_of_all(means, shared, entries, exists, least, KIND: tl.constexpr):
    """v of this replica, and V, which with roots is at least the part that v is of it."""
    v = tl.load(means + entries, mask=exists, other=0.0)
    V = tl.load(shared + entries, mask=exists, other=0.0)
    if KIND == 2:
        V = at_least(V, v * least)
    return v, V


@triton.jit
def _factors(matrices, least, noise, known, smallest, tiny, large, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """Writes the gains or roots of one matrix."""
    entry = matrices + 12 * tl.program_id(0)
    means = pointer_at(entry + 3, tl.float32, False)
    shared = pointer_at(entry + 4, tl.float32, False)
    factors = pointer_at(entry + 5, tl.float32, False)
    R, C = tl.load(entry + 7), tl.load(entry + 8)
    own = tl.zeros([CHUNK], tl.float32)
    of_all = tl.zeros([CHUNK], tl.float32)
    for start in range(0, R, CHUNK):
        entries = start + tl.arange(0, CHUNK)
        v, V = _v_of_all(means, shared, entries, entries < R, least, KIND)
        own += v
        of_all += V
    size = R.to(tl.float32)
    mean_v, mean_V = quotient(tl.sum(own, 0), size), quotient(tl.sum(of_all, 0), size)
    if KIND == 2:
        # The weight of zeros cancels here, so that it is corrected once in a product of roots.
        of_rows = 1.0 / root(at_least(mean_V * known, tiny))
    else:
        of_rows = root(at_most(at_least(quotient(mean_V, at_least(mean_v, tiny)), least), large))
    for start in range(0, R + C, CHUNK):
        entries = start + tl.arange(0, CHUNK)
        exists = entries < R + C
        v, V = _v_of_all(means, shared, entries, exists, least, KIND)
        S = tl.load(shared + R + C + entries, mask=exists, other=0.0)
        common = tl.load(shared + 2 * (R + C) + entries, mask=exists, other=0.0)
        divisor = at_least(V, tiny)
        S = at_most(at_least(quotient(S, divisor), 0.0), 1.0)
        common = at_most(at_least(quotient(common, divisor), 0.0), 1.0)
        share = at_least(common + (1 - S) * noise, smallest * noise)
        fourth = root(root(share))
        if KIND == 2:
            factor = root(V) * fourth
        else:
            rho = at_most(at_least(quotient(V, at_least(v, tiny)), least), large)
            factor = 1.0 / (root(rho) * fourth)
        factor = tl.where(entries < R, factor * of_rows, factor)
        tl.store(factors + entries, factor, mask=exists)


def renew(matrices: Sequence[Matrix], how: Renewal) -> None:
    """Takes the gradients into the statistics, and writes the factors. Before the step, which changes the momentum.

    Args:
        matrices: on one device, with factors, means and shared means, and where there are three products with drifts.
    """
    alike: dict[tuple[torch.dtype, torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = {}
    for each in matrices:
        assert each.factors is not None
        assert each.means is not None
        assert each.shared is not None
        drift = each.grad if each.drift is None else each.drift
        vectors = (each.grad.data_ptr(), each.exp_avg.data_ptr(), drift.data_ptr())
        key = (each.grad.dtype, each.exp_avg.dtype, drift.dtype, aligned(vectors) and each.columns % 8 == 0)
        rest = (each.means.data_ptr(), each.shared.data_ptr(), each.factors.data_ptr(), each.rows, each.columns)
        alike.setdefault(key, []).append((*vectors, *rest))
    device = matrices[0].grad.device
    with on_device(device):
        for (grad, state, drifts, vectorized), entries in alike.items():
            _renew_alike(device, (TYPES[grad], TYPES[state], TYPES[drifts], how.products, vectorized), entries, how)


def _renew_alike(device: torch.device, kinds: tuple[object, ...], entries: list[tuple[int, ...]], how: Renewal) -> None:
    found: list[int] = []
    of_sums, of_entries, of_partial = [], [], 0
    for *addresses, rows, columns in entries:
        down, across = -(-rows // _STRIP), -(-columns // _COLUMNS)
        found += [*addresses, of_partial, rows, columns, down, across, 0]
        of_partial += how.products * (across * rows + down * columns)
        of_sums.append(down * across)
        of_entries.append(-(-(rows + columns) // _ENTRIES))
    whole = table(device, tuple(found))
    if how.products:
        _take_gradients(device, whole, kinds, of_sums, of_entries, of_partial, how)
    _factors[(len(entries),)](
        whole, 1 / how.batches, 1 / how.n, float(how.known), how.smallest, how.tiny, how.large, how.kind, _CHUNK, num_warps=8
    )


def _take_gradients(
    device: torch.device,
    whole: Tensor,
    kinds: tuple[object, ...],
    of_sums: list[int],
    of_entries: list[int],
    of_partial: int,
    how: Renewal,
) -> None:
    partial = torch.empty(of_partial, dtype=torch.float32, device=device)
    _sums[(sum(of_sums),)](
        whole,
        tiles(device, tuple(of_sums)),
        partial,
        float(how.eps),
        *kinds,
        _STRIP,
        _ROWS,
        _COLUMNS,
        num_warps=_SUM_WARPS,
    )
    _averages[(sum(of_entries),)](
        whole,
        tiles(device, tuple(of_entries)),
        partial,
        *map(float, (how.weight, how.of_signal, how.of_drift, how.bound, how.tiny)),
        how.products,
        how.ratio,
        _PARTS,
        _ENTRIES,
    )
