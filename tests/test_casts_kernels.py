"""Values as they are and as bfloat16 by kernels of Numba: bit for bit the forms in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_dp.compression import BFloat16, FlatTensor, Lossless, MessageId
from decent_dp.compression.blockwise import _BLOCK_ON_CPU as BLOCK
from decent_dp.kernels import load_numba

pytestmark = pytest.mark.skipif(load_numba("casts_cpu") is None, reason="needs Numba that compiles")
KINDS = pytest.mark.parametrize("kind", [Lossless, BFloat16], ids=["float32", "bfloat16"])


def twins(kind: type[Lossless], sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Lossless]:
    forms = [kind([FlatTensor(i, size) for i, size in enumerate(sizes)], dtype, torch.device("cpu")) for _ in range(2)]
    assert forms[0]._fast is not None
    forms[1]._fast = None
    return forms


def encode(form: Lossless, values: Sequence[Tensor], rank: int = 0) -> Tensor:
    out = torch.full((form.nbytes,), 255, dtype=torch.uint8)
    assert [*form.encode(values, out, MessageId(0, rank), ())] == [chunk.stop for chunk in form.chunks]
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def some_bits(draw: np.random.Generator, size: int) -> Tensor:
    """Values of any finite bits, many of them near ties between two of bfloat16."""
    bits = draw.integers(0, 2**32, size, dtype=np.uint32)
    near = draw.integers(0, 3, size) == 0
    bits[near] = (bits[near] & np.uint32(0xFFFF0000)) + draw.integers(0x7FFE, 0x8003, near.sum(), dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    return values.masked_fill_(~values.isfinite(), 1.5)


@KINDS
@pytest.mark.parametrize("seed", range(10))
def test_messages_and_values_are_the_same(kind, seed):
    draw = np.random.default_rng(seed)
    sizes = [int(2 ** draw.uniform(0, 17.5)) * int(draw.integers(0, 5) > 0) for _ in range(draw.integers(1, 9))]
    forms = twins(kind, sizes)
    generator = torch.Generator().manual_seed(seed)
    a = [some_bits(draw, size) if i % 2 else torch.randn(size, generator=generator) for i, size in enumerate(sizes)]
    b = [value * (1 + 1e-3 * torch.randn(len(value), generator=generator)) for value in a]
    messages = []
    for rank, values in enumerate((a, b)):
        one, other = (encode(form, values, rank) for form in forms)
        assert torch.equal(one, other)
        messages.append(one)
    kept = [message.clone() for message in messages]
    for rate in (0.5, 1 / 3, 0.0, 1e-4):
        mixed = []
        for form in forms:
            values = [value.clone() for value in a]
            form.mix(values, *messages, rate)
            mixed.append(values)
        assert all(same(one, other) for one, other in zip(*mixed, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(kept, messages, strict=True))


def codes_of(form: Lossless, message: Tensor) -> list[Tensor]:
    return [form._codes(message, block, form.code) for chunk in form.chunks for block in chunk.blocks]


@KINDS
@pytest.mark.parametrize("size", [1, 7, 64, BLOCK + 77])
@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan, 3.4e38, -3.39e38, 1e-45, -0.0])
def test_special_values(kind, size, special):
    """Also finite ones that are infinite as bfloat16. Bits of a NaN depend on its place in torch's vectors."""
    forms = twins(kind, [size, 3])
    for place in {0, size // 2, size - 1}:
        values = [torch.full((size,), 0.1), torch.ones(3)]
        values[0][place] = special
        one, other = (encode(form, values, 4) for form in forms)
        assert forms[0].flag(one) == forms[1].flag(other) == (0 if values[0].to(forms[0].code).isfinite().all() else 5)
        assert forms[0].first_nonfinite(one) == forms[1].first_nonfinite(other)
        for mine, its in zip(codes_of(forms[0], one), codes_of(forms[1], other), strict=True):
            assert torch.equal(mine.isnan(), its.isnan())
            assert same(*(sent.float().nan_to_num(0.0, math.inf, -math.inf) for sent in (mine, its)))


def test_every_upper_half_of_a_nan_stays_one():
    """Rounding its bits could give an infinity, or a zero with a sign."""
    bits = np.array([0x7F800001, 0x7F80FFFF, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0xFFFF8000], np.uint32)
    values = torch.from_numpy(bits.view(np.float32))
    form = twins(BFloat16, [6])[0]
    [sent] = codes_of(form, encode(form, [values]))
    assert sent.isnan().all()


def test_other_values_are_left_to_torch():
    for kind in (Lossless, BFloat16):
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            assert kind([FlatTensor(0, 5)], dtype, torch.device("cpu"))._fast is None


@KINDS
def test_values_that_are_not_dense(kind):
    wide = torch.randn(600, generator=torch.Generator().manual_seed(0))
    forms = twins(kind, [300])
    messages = [encode(forms[1], [wide[::2]]), encode(forms[1], [wide[1::2]])]
    results = []
    for form in forms:
        thin = wide.clone()[::2]
        assert torch.equal(encode(form, [thin]), messages[0])
        form.mix([thin], *messages, 0.5)
        results.append(thin)
    assert torch.equal(*results)
    assert not torch.equal(results[0], wide[::2])


@KINDS
def test_values_that_are_made_when_they_are_read(kind):
    class Made(Sequence[Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: Any) -> Tensor:
            return torch.full((3000,), number + 0.5)

    form = twins(kind, [3000, 3000])[0]
    assert torch.equal(encode(form, Made()), encode(form, [Made()[0], Made()[1]]))


@KINDS
def test_a_write_is_announced(kind):
    """So that torch's error for a stale saved tensor comes."""
    form = twins(kind, [5])[0]
    messages = [encode(form, [torch.zeros(5)]), encode(form, [torch.ones(5)])]
    parameter = torch.nn.Parameter(torch.ones(5))
    loss = (parameter * parameter).sum()
    with torch.no_grad():
        form.mix([parameter.detach()], *messages, 0.5)
    assert torch.equal(parameter.detach(), torch.full((5,), 1.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_parameters():
    for form in twins(Lossless, []):
        assert encode(form, []).numel() == 0
        form.mix([], torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), 0.5)
