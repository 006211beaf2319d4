"""The int8 compression in Numba: bit for bit the form in torch, which is right by the other tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_dp.compression import FlatTensor, Int8, MessageId, flag_of
from decent_dp.compression.blockwise import _BLOCK_ON_CPU as BLOCK
from decent_dp.compression.lattice import LARGEST_NUMBER, Lattice, load_numba
from tests.helpers import some_in_the_fast_tests

pytestmark = pytest.mark.skipif(load_numba() is None, reason="needs Numba that compiles")
CPU = torch.device("cpu")
FEW = 2**13


class Readable(Int8):
    """The form in torch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        fast = self._lattice
        self._lattice = Lattice(fast.blocks, fast._numbers, fast._compute, fast._device)


def randn(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def same(a: Any, b: Any) -> bool:
    """Every bit; also of NaN."""
    return bool(np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)))


class Twins:
    """One worker in both forms: whatever it does must be the same."""

    def __init__(self, values: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.values = [[value.to(dtype, copy=True) for value in values] for _ in range(2)]
        tensors = [FlatTensor(7 * i + 3, len(value)) for i, value in enumerate(values)]
        self.forms = [kind(tensors, dtype, CPU) for kind in (Int8, Readable)]
        assert (type(self.forms[0]._lattice) is not Lattice) == (dtype == torch.float32)

    def check(self) -> None:
        for one, other in zip(*self.values, strict=True):
            assert same(one.view(torch.uint8), other.view(torch.uint8))
        assert all(same(one["ranges"], other["ranges"]) for one, other in zip(*(f.state() for f in self.forms), strict=True))
        assert same(self.forms[0]._rejections, self.forms[1]._rejections)
        assert self.forms[0].rejected == self.forms[1].rejected

    def hint(self) -> bytes:
        one, other = (form.hint(values) for form, values in zip(self.forms, self.values, strict=True))
        assert one == other
        return one

    def encode(self, message_id: MessageId, hints: Sequence[bytes]) -> Tensor:
        outs = []
        for form, values in zip(self.forms, self.values, strict=True):
            out = torch.full((form.nbytes,), 255, dtype=torch.uint8)
            assert [*form.encode(values, out, message_id, hints)] == [chunk.stop for chunk in form.chunks]
            outs.append(out)
        assert torch.equal(*outs)
        self.check()
        return outs[0]

    def mix(self, sent: Tensor, received: Tensor, rate: float) -> None:
        kept = sent.clone(), received.clone()
        for form, values in zip(self.forms, self.values, strict=True):
            form.mix(values, sent, received, rate)
        self.check()
        assert torch.equal(kept[0], sent)
        assert torch.equal(kept[1], received)

    def differences(self, sent: Tensor, received: Tensor) -> int:
        """Returns the number of blocks that could be decoded."""
        decoded = 0
        for (block, one, unit), (there, other, its) in zip(
            *(form.differences(sent, received) for form in self.forms), strict=True
        ):
            assert (block, unit) == (there, its)
            assert (one is None) == (other is None)
            if one is not None:
                assert same(one, other)
                decoded += 1
        self.check()
        return decoded


SIZES = [
    [1],
    [0, 3, 0, 255, 256, 257, 1],
    [FEW - 1, FEW, FEW + 1, 5],
    [BLOCK - 1, 2, BLOCK, 1, BLOCK + 1],
    [3 * BLOCK + 777, 40, 41],
    [],
]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    some_in_the_fast_tests(SIZES, [torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    ids=str,
)
def test_messages_and_values_are_the_same(sizes, dtype):
    """Round after round, near and far: so blocks are accepted and rejected in turn."""
    a, b = (Twins([randn(size, i) for i, size in enumerate(sizes)], dtype) for _ in range(2))
    seen = set()
    for round_ in range(8):
        for values in zip(*b.values, strict=True):
            away = 10.0 ** ((3 * round_) % 7 - 5) * randn(len(values[0]), 100 + round_)
            for value in values:
                value.add_(away)
        hints = [a.hint(), b.hint()]
        sent = [twins.encode(MessageId(round_, rank), hints) for rank, twins in enumerate((a, b))]
        rate = (0.5, 1 / 3, 0.0, 1e-3)[round_ % 4]
        before = a.forms[0].rejected
        if round_ % 3:
            a.mix(*sent, rate)
            b.mix(*reversed(sent), rate)
        else:
            a.differences(*sent)
            b.differences(*reversed(sent))
        seen.add(a.forms[0].rejected > before)
    assert seen == ({False, True} if sizes else {False})


SPECIAL = {
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "NaN": math.nan,
    "the largest": 3.4e38,
    "subnormal": -1e-42,
    "minus zero": -0.0,
}


@pytest.mark.parametrize("special", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("size", [6, BLOCK + 300])
def test_special_values(special, size):
    values = [randn(size, 1), randn(4, 2), randn(FEW + 9, 3)]
    a, b = Twins(values), Twins([value + 1e-3 for value in values])
    a.hint()  # as of the values before
    for value in a.values[0][0], a.values[1][0]:
        value[size - 3] = special
    for round_ in range(5):
        hints = [a.hint(), b.hint()]
        sent = [twins.encode(MessageId(round_, rank), hints) for rank, twins in enumerate((a, b))]
        assert flag_of(sent[0]) == (0 if math.isfinite(special) else 1)
        a.mix(*sent, 0.0)  # changes no bit
        a.mix(*sent, 0.25)
        b.mix(*reversed(sent), 0.25)


@pytest.mark.parametrize("size", [5, 300, FEW + 5, BLOCK])
@pytest.mark.parametrize("exponent", [-126, -30, -21, 0, 127])
def test_numbers_of_any_size(size, exponent):
    """Also those for which there are no codes, and those at the edge; steps of any power of two."""
    value = randn(size, 1).clamp_(-3, 3)
    edge = LARGEST_NUMBER * math.ldexp(1.0, exponent)
    if math.isfinite(edge) and edge < 3e38:
        value[0], value[1], value[2] = edge, -edge * (1 - 2.0**-21), edge * 12.0
    twins = Twins([value, value * 2.0**-12])
    hint = bytes(np.array([exponent] * len(twins.forms[0]._blocks), dtype=np.int8))
    for rank in (0, 3):
        twins.encode(MessageId(1, rank), [hint])


@pytest.mark.parametrize("size", [20, FEW + 300, 2 * BLOCK])
def test_messages_that_do_not_belong_together(size):
    """A changed code, exchanged ones, records of nonsense, and a wrapped difference of -128."""
    a, b = Twins([randn(size, 1), randn(9, 2)]), Twins([randn(size, 1) + 1e-3, randn(9, 2)])
    hints = [a.hint(), b.hint()]
    sent = [twins.encode(MessageId(0, rank), hints) for rank, twins in enumerate((a, b))]
    block = a.forms[0]._blocks[0]
    changed = []
    for place in (block.at, block.at + block.numel - 1):
        other = sent[1].clone()
        other[place] += 1
        changed.append(other)
        other = sent[1].clone()
        other[place] = sent[0][place] + 128
        changed.append(other)
    swapped = sent[1].clone()
    swapped[block.at], swapped[block.at + 1] = sent[1][block.at + 1], sent[1][block.at] + 1
    changed.append(swapped)
    for value in (math.inf, -math.inf, math.nan, 1e300, 0.5):
        for field in range(2):
            other = sent[1].clone()
            other[block.record + 8 * field : block.record + 8 * field + 8].view(torch.float64).fill_(value)
            changed.append(other)
    assert a.differences(*sent) == len(a.forms[0]._blocks)
    for other in changed:
        assert a.differences(sent[0], other) == len(a.forms[0]._blocks) - 1
        a.mix(sent[0], other, 0.5)


@pytest.mark.parametrize("sizes", SIZES[:-1], ids=str)
@pytest.mark.parametrize("distance", [1e-3, 30.0])
def test_means_of_groups(sizes, distance):
    base = [randn(size, i) for i, size in enumerate(sizes)]
    members = [Twins([value + distance * randn(len(value), 9 + rank) for value in base]) for rank in range(3)]
    hints = [member.hint() for member in members]
    messages = [member.encode(MessageId(4, rank), hints) for rank, member in enumerate(members)]
    for own, first in itertools.product((False, True), (1, 2)):
        results = []
        for form in members[0].forms:
            copies = [message.clone() for message in messages]
            out = copies[0] if own else torch.zeros_like(copies[0])
            for chunk in form.chunks:
                parts = [message[chunk.start : chunk.stop] for message in copies]
                form.reduce(chunk, parts, [first, 1, 3], out[chunk.start : chunk.stop], MessageId(4, -1))
            results.append(out)
        assert torch.equal(*results)
    members[0].mix(messages[0], results[0], 0.75)


def test_values_that_are_made_when_they_are_read():
    class Made(Sequence[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Tensor:
            if number > 2:
                raise IndexError
            return randn(3000, number) + 0.0  # a new one

    made = Made()
    twins = Twins(list(made))
    hint = twins.hint()
    expected = twins.encode(MessageId(1, 1), [hint])
    out = torch.full_like(expected, 255)
    for _ in twins.forms[0].encode(made, out, MessageId(1, 1), [hint]):
        for _ in range(9):
            torch.full((3000,), math.nan)  # memory that was freed is used again
    assert torch.equal(out, expected)


def test_values_that_are_not_dense():
    wide = randn(600, 1)
    a, b = Twins([wide[::2]]), Twins([wide[::2] + 1e-3])
    hints = [a.hint(), b.hint()]
    sent = [twins.encode(MessageId(0, rank), hints) for rank, twins in enumerate((a, b))]
    a.mix(*sent, 0.5)
    form = Twins([wide[::2]]).forms[0]
    thin = wide.clone()[::2]
    out = torch.full_like(sent[0], 255)
    form.hint([thin])
    for _ in form.encode([thin], out, MessageId(0, 0), hints):
        pass
    assert torch.equal(out, sent[0])
    form.mix([thin], *sent, 0.5)
    assert torch.equal(thin, a.values[0][0])


def test_a_write_is_announced():
    """So that torch's error for a stale saved tensor comes."""
    a, b = Twins([randn(300, 1)]), Twins([randn(300, 1) + 1e-3])
    hints = [a.hint(), b.hint()]
    sent = [twins.encode(MessageId(0, rank), hints) for rank, twins in enumerate((a, b))]
    parameter = torch.nn.Parameter(a.values[0][0])
    loss = (parameter * parameter).sum()
    with torch.no_grad():
        a.forms[0].mix([parameter.detach()], *sent, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_calls_of_kernels_release_the_interpreter_lock():
    from decent_dp.compression import int8_numba

    assert all(kernel.targetoptions["nogil"] for kernel in (int8_numba._encode, int8_numba._mix))
