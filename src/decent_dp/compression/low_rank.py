"""Low-rank messages: projections of matrices, from which both ends of an edge find a low-rank part of their difference.

Let X_i and X_j be a matrix (a × b) of two replicas, and V a basis (b × r) that both ends know. Each end sends P = X·V (a × r)
instead of X, and the difference that is mixed is

    (P_j - P_i)·Vᵀ

The ends find opposite differences, so the mean of the replicas does not move. The part of X_j - X_i that is orthogonal to V is
not mixed; it stays in the replicas, and so in the next difference. V follows the difference: an orthonormal basis of P_j - P_i
is the basis U (a × r) of a later exchange of the same edge, in which Q = Xᵀ·U (b × r) is sent, and Q_j - Q_i gives the next V.
So two exchanges are one step of a subspace iteration for the largest singular vectors of the difference. This is PowerGossip
(Vogels, Karimireddy and Jaggi, arXiv 2008.01425) with one message per exchange, and with differences of sent values.

Both ends must have the same basis to the last bit. They compute it from the same numbers in float64 and round it to bfloat16,
so that other processors find the same. A digest of all bases is sent along. If the ends disagree, they mix no matrix, and
start anew from bases that are drawn from a seed.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from decent_dp.compression.blockwise import Blockwise
from decent_dp.compression.codec import Block, Chunk, Compression, FlatTensor, MessageId
from decent_dp.compression.stochastic_rounding import NOISE_LENGTH, noise_at

__all__ = ["LowRank", "low_rank"]

# Bytes of the digest in front of a message, an int64.
_DIGEST = 8
# Elements of a matrix that are multiplied or written at once.
_ELEMENTS_ON_CPU, _ELEMENTS_ON_GPU = 2**16, 2**22
# The share of noise in a basis. It gives directions to columns that are zero or parallel, as when two replicas are equal.
_NOISE = 1e-3
# Columns of noise are read this far from each other; odd, so that no two are the same.
_APART = 1009
# The largest error of an orthonormal basis, before it is rounded.
_WRONG = 0.1

# Torch loads CUDA's linear algebra with the first call, and two threads that call it at once fail.
_LOADING = threading.Lock()

_Bases = list["Tensor | None"]


class _EdgeBases:
    """The bases of a bucket's matrices: those that are drawn, and those that single edges have learned.

    Args:
        tensors: the flat tensors of the bucket.
        matrices: for each whether it is projected.
        rank: the number of columns of a basis.
    """

    def __init__(self, tensors: Sequence[FlatTensor], matrices: Sequence[bool], rank: int, device: torch.device) -> None:
        self._tensors, self._matrices, self._rank, self._device = tensors, matrices, rank, device
        # By side: columns of noise for each matrix, and the bases that are made of them.
        self._noise = [
            {number: self._draw(number, side) for number, is_matrix in enumerate(matrices) if is_matrix} for side in (0, 1)
        ]
        with _LOADING:
            self.drawn = [self._drawn_bases(noise) for noise in self._noise]
        # By members of the edge and side.
        self._learned: dict[tuple[tuple[int, ...], int], _Bases] = {}

    def of(self, edge: tuple[int, ...], side: int) -> _Bases:
        """The bases with which ``edge`` multiplies from ``side``, one for each matrix: what it has learned, or as drawn."""
        drawn = self.drawn[side]
        learned = self._learned.get((edge, side))
        return drawn if learned is None else [own if own is not None else new for own, new in zip(learned, drawn, strict=True)]

    def _drawn_bases(self, noise: Mapping[int, Tensor]) -> _Bases:
        made = _orthonormal([columns.to(torch.float64) for columns in noise.values()])
        bases = {number: basis for number, (basis, _) in zip(noise, made, strict=True)}
        return [bases.get(number) for number in range(len(self._tensors))]

    def _draw(self, number: int, side: int) -> Tensor:
        """Columns of unit length for the basis of a matrix, the same on all workers; float32."""
        tensor = self._tensors[number]
        rows = tensor.rows if side else tensor.columns
        named, dtype = (tensor.index, side), torch.float64

        def part(column: int, start: int) -> Tensor:
            return noise_at(min(NOISE_LENGTH, rows - start), dtype, self._device, *named, start, shift=_APART * column)

        columns = [torch.cat([part(column, start) for start in range(0, rows, NOISE_LENGTH)]) for column in range(self._rank)]
        return torch.stack(columns, dim=1).mul_(math.sqrt(12 / rows)).to(torch.float32)

    def learn(self, edge: tuple[int, ...], side: int, found: Mapping[int, Tensor], sign: float) -> None:
        """Makes the bases of ``side`` from differences of projections from the other one."""
        columns = []
        for number, difference in found.items():
            wide = difference.to(torch.float64)
            wide = wide.mul_(sign) / wide.norm(dim=0).clamp_min(1e-300)
            columns.append(wide.add_(self._noise[side][number], alpha=_NOISE))
        learned = self._learned.setdefault((edge, side), [None] * len(self._tensors))
        for number, (basis, good) in zip(found, _orthonormal(columns), strict=True):
            drawn = self.drawn[side][number]
            assert drawn is not None
            learned[number] = torch.where(good, basis, drawn)

    def forget(self, edge: tuple[int, ...]) -> None:
        for side in (0, 1):
            self._learned.pop((edge, side), None)

    def state(self) -> list[dict[str, Tensor]]:
        """Of each flat tensor, under keys such as '0-3.1': members of the edge, and the side."""
        found: list[dict[str, Tensor]] = [{} for _ in self._tensors]
        for (edge, side), bases in self._learned.items():
            for own, basis in zip(found, bases, strict=True):
                if basis is not None:
                    own[f"{'-'.join(map(str, edge))}.{side}"] = basis
        return found

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        for number, (tensor, entries) in enumerate(zip(self._tensors, by_tensor, strict=True)):
            for key, basis in entries.items():
                members, _, place = key.partition(".")
                # The run that is resumed may have had another compression, or another rank.
                if place not in ("0", "1") or not members or not self._matrices[number]:
                    continue
                side = int(place)
                if basis.shape != (tensor.rows if side else tensor.columns, self._rank):
                    continue
                edge = tuple(map(int, members.split("-")))
                learned = self._learned.setdefault((edge, side), [None] * len(self._tensors))
                learned[number] = basis.to(device=self._device, copy=True)


def _digest_of(bases: _Bases, device: torch.device) -> Tensor:
    """int64, of shape (1,)."""
    bits = [basis.view(torch.int16).flatten() for basis in bases if basis is not None]
    if not bits:
        return torch.zeros(1, dtype=torch.int64, device=device)
    numbers = torch.cat(bits).to(torch.int64)
    # Odd weights: no changed bit is lost modulo 2^64.
    return numbers.mul_(torch.arange(1, 2 * len(numbers), 2, dtype=torch.int64, device=device)).sum(0, keepdim=True)


class LowRank(Compression):
    """Projections of matrices, and everything else whole, as another compression codes them; see the module.

    Each end of an edge multiplies from the right (side 0) and from the left (side 1) in turn. A matrix is projected if that is
    shorter in the mean of both sides.

    Attributes:
        rank: the number of columns of a basis.
        inner: codes the numbers that are sent.
    """

    by_parameter = True
    pairs_only = True
    partial = True
    rank: ClassVar[int]
    inner: ClassVar[type[Blockwise]]

    def __init__(self, tensors: Sequence[FlatTensor], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self._matrices = [self._is_matrix(tensor) for tensor in self.tensors]
        # One layout of the message for each side. Projections of half-precision values are sent in float32.
        self._sides = tuple(self.inner(self._projected(self.tensors, side), self.compute, device) for side in (0, 1))
        self.hint_nbytes = sum(inner.hint_nbytes for inner in self._sides)
        self.most_nbytes = max(self._length(inner) for inner in self._sides)
        self._edge_bases = _EdgeBases(self.tensors, self._matrices, self.rank, device)
        # Exchanges in a row in which the ends had other bases.
        self._mismatches = 0
        self._edge: tuple[int, ...] = ()
        self._lower = True
        self._side = 0
        self._bases: _Bases = []
        self.begin((), 0, 0)

    @classmethod
    def _is_matrix(cls, tensor: FlatTensor) -> bool:
        """Whether it is projected."""
        return cls.rank * (tensor.rows + tensor.columns) < tensor.numel

    @classmethod
    def _projected(cls, tensors: Sequence[FlatTensor], side: int) -> list[FlatTensor]:
        """What is sent of each tensor, from ``side``."""
        lengths = [cls.rank * (t.columns if side else t.rows) if cls._is_matrix(t) else t.numel for t in tensors]
        return [FlatTensor(tensor.index, length) for tensor, length in zip(tensors, lengths, strict=True)]

    @property
    def _inner(self) -> Blockwise:
        return self._sides[self._side]

    @property
    def _elements(self) -> int:
        return _ELEMENTS_ON_CPU if self.device.type == "cpu" else _ELEMENTS_ON_GPU

    def _length(self, inner: Blockwise) -> int:
        return inner.nbytes + _DIGEST if inner.nbytes else 0

    def begin(self, edge: tuple[int, ...], rank: int, meeting: int) -> None:
        self._edge, self._side = edge, meeting % 2
        self._lower = not edge or rank == edge[0]
        self.nbytes = self._length(self._inner)
        self.chunks = (Chunk(0, self.nbytes, (), has_flag=True),) if self.nbytes else ()
        self._bases = self._edge_bases.of(edge, self._side)

    # -- messages -----------------------------------------------------------------------------------------------------

    def hint(self, values: Sequence[Tensor]) -> bytes:
        # Of both sides, as the next exchange may be of either.
        return b"".join(inner.hint(self._numbers(values, side, None)) for side, inner in enumerate(self._sides))

    def _own_part(self, hints: Sequence[bytes]) -> list[bytes]:
        start = self._side * self._sides[0].hint_nbytes
        return [hint[start : start + self._inner.hint_nbytes] for hint in hints]

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        if not self.nbytes:
            return
        out[:_DIGEST].view(torch.int64).copy_(_digest_of(self._bases, self.device))
        for ready in self._inner.encode(
            self._numbers(values, self._side, self._bases), out[_DIGEST:], message_id, self._own_part(hints)
        ):
            yield _DIGEST + ready

    def _numbers(self, values: Sequence[Tensor], side: int, bases: _Bases | None) -> _Numbers:
        """The numbers that are sent for each flat tensor. None: with the bases that are drawn, which give similar sizes."""

        def make(number: int) -> Tensor:
            if not self._matrices[number]:
                return values[number].to(self.compute)
            basis = (bases or self._edge_bases.drawn[side])[number]
            assert basis is not None
            return self._project(values[number], number, side, basis)

        return _Numbers(len(values), make)

    def _project(self, values: Tensor, number: int, side: int, basis: Tensor) -> Tensor:
        """``X·V``, or ``Xᵀ·U`` if ``side`` is 1, flat, of the dtype ``compute``."""
        tensor = self.tensors[number]
        wide, matrix = basis.to(torch.float64), values.view(tensor.rows, tensor.columns)
        # In float64: the precision of narrower products depends on settings and on autocast.
        if side:
            total = torch.zeros(tensor.columns, self.rank, dtype=torch.float64, device=self.device)
            for rows, part in self._in_rows(matrix):
                total.addmm_(part.to(torch.float64).T, wide[rows])
            return total.flatten().to(self.compute)
        out = torch.empty(tensor.rows, self.rank, dtype=self.compute, device=self.device)
        for rows, part in self._in_rows(matrix):
            out[rows] = (part.to(torch.float64) @ wide).to(self.compute)
        return out.flatten()

    def _in_rows(self, matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, self._elements // matrix.shape[1])
        for start in range(0, len(matrix), step):
            rows = slice(start, min(start + step, len(matrix)))
            yield rows, matrix[rows]

    def arrive(self, sent: Tensor, received: Tensor) -> None:
        if self.nbytes:
            self._inner.arrive(sent[_DIGEST:], received[_DIGEST:])

    def differences(self, sent: Tensor, received: Tensor) -> Iterator[tuple[Block, Tensor | None, float]]:
        if not self.nbytes:
            return
        agree = torch.equal(sent[:_DIGEST], received[:_DIGEST])
        self._mismatches = 0 if agree else self._mismatches + 1
        found: dict[int, Tensor] = {}
        broken: set[int] = set()
        before = self._inner.rejected
        for block, difference, unit in self._inner.differences(sent[_DIGEST:], received[_DIGEST:]):
            number, tensor = block.tensor, self.tensors[block.tensor]
            if not self._matrices[number]:
                yield block, difference, unit
                continue
            if number not in found:
                height = tensor.columns if self._side else tensor.rows
                found[number] = torch.empty(height, self.rank, dtype=self.compute, device=self.device)
            if difference is None:
                broken.add(number)
            else:
                found[number].view(-1)[block.start : block.stop] = difference.mul_(unit)
            if block.stop < found[number].numel():
                continue
            if agree and number not in broken:
                yield from self._expand(number, found[number])
                continue
            self.rejected += not agree
            found.pop(number)
            yield Block(number, 0, tensor.numel, 0, 0), None, 1.0
        self.rejected += self._inner.rejected - before
        if agree:
            # Differences have a sign, and both ends take that of the higher rank.
            self._edge_bases.learn(self._edge, 1 - self._side, found, 1.0 if self._lower else -1.0)
        else:
            self._edge_bases.forget(self._edge)

    def _expand(self, number: int, difference: Tensor) -> Iterator[tuple[Block, Tensor, float]]:
        """The difference of the matrices, some rows at a time."""
        tensor, basis = self.tensors[number], self._bases[number]
        assert basis is not None
        left, right = difference.to(torch.float64), basis.to(torch.float64)
        if self._side:
            left, right = right, left
        step = max(1, self._elements // tensor.columns)
        for start in range(0, tensor.rows, step):
            rows = left[start : start + step] @ right.T
            first = start * tensor.columns
            yield Block(number, first, first + rows.numel(), 0, 0), rows.flatten().to(self.compute), 1.0

    def proposals(self, values: Sequence[Tensor], sent: Tensor) -> Iterator[tuple[Block, Tensor]]:
        # A difference of matrices is added to the values themselves.
        for number, (value, is_matrix) in enumerate(zip(values, self._matrices, strict=True)):
            if is_matrix:
                yield Block(number, 0, len(value), 0, 0), value.to(self.compute)
        if self.nbytes:
            for block, proposal in self._inner.proposals(self._numbers(values, self._side, self._bases), sent[_DIGEST:]):
                if not self._matrices[block.tensor]:
                    yield block, proposal

    def first_nonfinite(self, message: Tensor) -> tuple[int, int] | None:
        found = self._inner.first_nonfinite(message[_DIGEST:])
        return None if found is None else (found[0], 0 if self._matrices[found[0]] else found[1])

    def stuck(self, rounds: int) -> list[int]:
        if self._mismatches >= rounds:
            return [number for number, is_matrix in enumerate(self._matrices) if is_matrix]
        return sorted({number for inner in self._sides for number in inner.stuck(rounds)})

    # -- saving and resuming ------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Tensor]]:
        """That of both sides' inner compressions, and the bases."""
        found = self._edge_bases.state()
        for side, inner in enumerate(self._sides):
            for own, entries in zip(found, inner.state(), strict=True):
                own.update({f"{key}_{side}": value for key, value in entries.items()})
        return found

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        for side, inner in enumerate(self._sides):
            end = f"_{side}"
            inner.load_state([{key.removesuffix(end): own[key] for key in own if key.endswith(end)} for own in by_tensor])
        self._edge_bases.load_state(by_tensor)


class _Numbers(Sequence[Tensor]):
    """Tensors that are made when they are read; the last one is kept. A hint mostly reads none."""

    def __init__(self, length: int, make: Callable[[int], Tensor]) -> None:
        self._length, self._make = length, make
        self._last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        if self._last is None or self._last[0] != number:
            self._last = number, self._make(number)
        return self._last[1]


def _orthonormal(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Orthonormal bases of the columns of matrices (a × r, float64) with columns of about unit length, in bfloat16.

    By Cholesky's decomposition of AᵀA = LLᵀ: the columns of A·L⁻ᵀ are orthonormal. The second time this removes the errors of
    the first, so that sums in another order hardly change the result (CholeskyQR2; Fukaya et al., arXiv 1401.5171).

    Returns:
        For each matrix its basis, and whether it is one: not if columns depend on each other. On the device of the matrices.
    """
    for _ in range(2):
        if not matrices:
            return []
        lower = torch.linalg.cholesky_ex(torch.stack([matrix.T @ matrix for matrix in matrices])).L
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverses = torch.linalg.solve_triangular(lower, identity, upper=False)
        matrices = [matrix @ inverse.T for matrix, inverse in zip(matrices, inverses, strict=True)]
    errors = [(matrix.T @ matrix - identity).abs().amax() for matrix in matrices]
    return [(matrix.to(torch.bfloat16), error < _WRONG) for matrix, error in zip(matrices, errors, strict=True)]


@functools.cache
def low_rank(rank: int, inner: type[Blockwise]) -> type[LowRank]:
    """The compression 'low-rank:RANK', or 'low-rank:RANK,INNER'."""
    name = f"low-rank:{rank}" if inner.name is None else f"low-rank:{rank},{inner.name}"
    return type("LowRank", (LowRank,), {"rank": rank, "inner": inner, "name": name, "needs_hints": inner.needs_hints})
