"""Compressions: the differences between replicas that their messages give, against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decent_dp.compression import (
    COMPRESSIONS,
    BFloat16,
    Compression,
    FlatTensor,
    Int8,
    Lossless,
    MessageId,
    check_compression,
    flag_of,
    int8,
)
from decent_dp.compression.blockwise import _BLOCK_ON_CPU
from decent_dp.compression.lattice import LARGEST_NUMBER, PRIME, sum_weights, weighted_sums
from tests.helpers import compression_of, expect_the_most, some_in_the_fast_tests

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BLOCK = _BLOCK_ON_CPU
KINDS_AND_DTYPES = pytest.mark.parametrize(("kind", "dtype"), some_in_the_fast_tests(COMPRESSIONS.values(), FLOATS))


def randn(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def encode(
    compression: Compression, values: Sequence[Tensor], hints: Sequence[bytes] = (), round_: int = 0, rank: int = 0
) -> Tensor:
    out = torch.full((compression.nbytes,), 255, dtype=torch.uint8)
    for _ in compression.encode(values, out, MessageId(round_, rank), hints):
        pass
    return out


def decode(compression: Compression, sent: Tensor, received: Tensor) -> list[Tensor]:
    """Differences by tensor, in float64; a rejected block is filled with 12345."""
    found = [torch.full((tensor.numel,), 12345.0, dtype=torch.float64) for tensor in compression.tensors]
    for block, difference, unit in compression.differences(sent, received):
        if difference is None:
            continue
        assert difference.shape == (block.numel,)
        found[block.tensor][block.start : block.stop] = difference.double() * unit
    return found


class Pair:
    """Two replicas that exchange round after round; ``fresh``: as at the start of training, else at any distance."""

    def __init__(self, a: Sequence[Tensor], b: Sequence[Tensor], kind: type[Compression] = Int8, fresh: bool = False) -> None:
        self.values = [list(a), list(b)]
        self.compressions = [compression_of(values, kind) for values in self.values]
        if not fresh:
            for compression, values in zip(self.compressions, self.values, strict=True):
                expect_the_most(compression, values)

    def send_hint(self) -> list[bytes]:
        return [compression.hint(values) for compression, values in zip(self.compressions, self.values, strict=True)]

    def messages(self, round_: int = 0, hints: list[bytes] | None = None) -> list[Tensor]:
        hints = self.send_hint() if hints is None else hints
        return [encode(self.compressions[i], self.values[i], hints, round_, i) for i in range(2)]

    def meet(self, round_: int = 0, hints: list[bytes] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        messages = self.messages(round_, hints)
        return decode(self.compressions[0], *messages), decode(self.compressions[1], *reversed(messages))

    def step(self, block: int = 0) -> float:
        steps = {compression._steps[block] for compression in self.compressions}
        assert len(steps) == 1
        return float(steps.pop())

    @property
    def rejected(self) -> list[int]:
        return [compression.rejected for compression in self.compressions]


# -- what all of them promise ---------------------------------------------------------------------------------------------


@st.composite
def replicas(draw):
    dtype = draw(st.sampled_from(FLOATS))
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    scale, distance = 10.0 ** draw(st.integers(-3, 3)), 10.0 ** draw(st.integers(-4, 0))
    seed = draw(st.integers(0, 2**16))
    a = [(randn(size, seed + i, torch.float64) * scale).to(dtype) for i, size in enumerate(sizes)]
    b = [(x.double() + randn(len(x), seed + 99 + i, torch.float64) * scale * distance).to(dtype) for i, x in enumerate(a)]
    return dtype, a, b


def allowed(kind: type[Compression], pair: Pair, a: Tensor, b: Tensor, block: int) -> Tensor:
    """How far a difference may be off."""
    compute = torch.finfo(torch.promote_types(a.dtype, torch.float32)).eps * (a.double().abs() + b.double().abs())
    if kind is Int8:
        return compute + 2 * pair.step(block)
    if kind is BFloat16 and a.dtype.itemsize > 2:
        return compute + 2.0**-8 * (a.double().abs() + b.double().abs()) + 1e-38
    return compute


@pytest.mark.parametrize("kind", COMPRESSIONS.values(), ids=COMPRESSIONS)
@settings(max_examples=30)
@given(case=replicas())
def test_both_ends_find_opposite_differences(kind, case):
    _, a, b = case
    pair = Pair(a, b, kind)
    blocks = iter(range(len(a)))
    for x, y, there, back in zip(a, b, *pair.meet(3), strict=True):
        assert torch.equal(there, -back)
        if len(x):
            assert ((there - (y.double() - x.double())).abs() <= allowed(kind, pair, x, y, next(blocks))).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lossless_compression_is_exact(dtype):
    values = randn(2 * BLOCK + 5, 1, dtype)
    values[:2] = torch.tensor([-0.0, torch.finfo(dtype).max])
    [there], [back] = Pair([torch.zeros_like(values)], [values], Lossless).meet()
    assert torch.equal(there, values.double())
    assert torch.equal(back, -values.double())
    compression = compression_of([values])
    message = encode(compression, [values])
    assert compression.nbytes - 8 - 7 <= len(values) * dtype.itemsize <= compression.nbytes - 8
    assert message[: values.nbytes].numpy().tobytes() == values.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bfloat16_rounds_to_nearest(dtype):
    values = randn(1000, 1, dtype)
    compression = compression_of([values], BFloat16)
    expected = values if dtype.itemsize == 2 else values.bfloat16()
    assert compression.nbytes == 2008
    assert torch.equal(encode(compression, [values])[:2000].view(expected.dtype), expected)
    assert (expected.double() - values.double()).abs().max() <= 2.0**-8 * values.abs().max()


@KINDS_AND_DTYPES
def test_mixing_adds_the_differences(kind, dtype):
    """Rounded one after the other; a rate of zero changes no bit."""
    a, b = [randn(300, 1, dtype), randn(7, 2, dtype)], [randn(300, 3, dtype), randn(7, 4, dtype)]
    a[0][0], b[0][0] = -0.0, 1.0
    pair = Pair(a, b, kind)
    messages = pair.messages()
    kept = [value.clone() for value in a]
    pair.compressions[0].mix(a, *messages, 0.0)
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, kept, strict=True))
    for block, difference, unit in pair.compressions[0].differences(*messages):
        assert difference is not None
        kept[block.tensor][block.start : block.stop].add_(difference.mul_(0.3 * unit))
    pair.compressions[0].mix(a, *messages, 0.3)
    assert all(torch.equal(x, y) for x, y in zip(a, kept, strict=True))


@pytest.mark.parametrize("kind", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_chunks_that_are_reported_ready_are_final(kind):
    values = [randn(size, size) for size in (5, 3 * BLOCK + 7, 0, BLOCK, 1)]
    compression = compression_of(values, kind)
    out = torch.full((compression.nbytes,), 255, dtype=torch.uint8)
    seen = []
    for ready in compression.encode(values, out, MessageId(0, 0), [compression.hint(values)]):
        seen.append((ready, out[:ready].clone()))
    assert [ready for ready, _ in seen] == [chunk.stop for chunk in compression.chunks]
    assert seen[-1][0] == compression.nbytes
    assert all(torch.equal(early, out[:ready]) for ready, early in seen)


@pytest.mark.parametrize("kind", COMPRESSIONS.values(), ids=COMPRESSIONS)
@settings(max_examples=40)
@given(sizes=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3 * BLOCK)), max_size=6), dtype=st.sampled_from(FLOATS))
def test_chunks_contain_every_element_once(kind, sizes, dtype):
    compression = kind([FlatTensor(i, size) for i, size in enumerate(sizes)], dtype, CPU)
    blocks = [block for chunk in compression.chunks for block in chunk.blocks]
    for i, size in enumerate(sizes):
        own = [(block.start, block.stop) for block in blocks if block.tensor == i]
        assert [x for start, stop in own for x in (start, stop)] == [
            x for start in range(0, size, BLOCK) for x in (start, min(start + BLOCK, size))
        ]
    end = 0
    itemsize = compression._itemsize
    for chunk in compression.chunks:
        assert chunk.start == end
        assert chunk.start % 8 == 0
        assert 0 < sum(block.numel for block in chunk.blocks) <= BLOCK
        taken = [(block.at, block.at + block.numel * itemsize) for block in chunk.blocks]
        if compression._record:
            taken += [(block.record, block.record + compression._record) for block in chunk.blocks]
        taken.sort()
        assert taken[0][0] == chunk.start
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(taken))
        flag = 8 if chunk is compression.chunks[-1] else 0
        assert taken[-1][1] + flag <= chunk.stop < taken[-1][1] + flag + 8
        end = chunk.stop
    assert compression.nbytes == end


@KINDS_AND_DTYPES
def test_the_layout_does_not_change_the_numbers(kind, dtype):
    """The same parameters in other buckets, in another order, and as one flat tensor where the compression allows that."""
    sizes = [700, 1, 2 * BLOCK + 9, 0, 33]
    a = [randn(size, i, dtype) for i, size in enumerate(sizes)]
    b = [(x.double() + 0.01 * randn(len(x), 50 + i, torch.float64)).to(dtype) for i, x in enumerate(a)]

    def differences(groups: list[list[int]]) -> dict[int, Tensor]:
        found = {}
        for group in groups:
            compressions = [kind([FlatTensor(i, sizes[i]) for i in group], dtype, CPU) for _ in range(2)]
            for round_ in range(2):  # the second with the narrow range
                own, other = [a[i] for i in group], [b[i] for i in group]
                hints = [compressions[0].hint(own), compressions[1].hint(other)]
                messages = [
                    encode(compression, values, hints, round_, rank)
                    for rank, (compression, values) in enumerate(zip(compressions, (own, other), strict=True))
                ]
                for i, difference in zip(group, decode(compressions[0], *messages), strict=True):
                    decode(compressions[1], *reversed(messages))
                    found[i] = torch.cat([found.get(i, torch.empty(0, dtype=torch.float64)), difference])
        return found

    whole = differences([[0, 1, 2, 3, 4]])
    for groups in ([[0], [1], [2], [3], [4]], [[4, 2], [3, 1, 0]], [[3, 2, 4, 1], [0]]):
        assert {i: d.tolist() for i, d in differences(groups).items()} == {i: d.tolist() for i, d in whole.items()}
    if not kind.by_parameter:
        [flat], _ = Pair([torch.cat(a)], [torch.cat(b)], kind).meet()
        assert torch.equal(flat, torch.cat([d[: sizes[i]] for i, d in sorted(whole.items())]))


@pytest.mark.parametrize("kind", COMPRESSIONS.values(), ids=COMPRESSIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_proposals_equal_the_decoded_message(kind, dtype):
    a, b = [randn(BLOCK + 5, 1, dtype), randn(3, 2, dtype)], [randn(BLOCK + 5, 3, dtype), randn(3, 4, dtype)]
    pair = Pair(a, b, kind)
    messages = pair.messages()
    stand_for = []
    for i in range(2):
        flat = [torch.zeros(len(x), dtype=torch.float64) for x in a]
        for block, proposal in pair.compressions[i].proposals(pair.values[i], messages[i]):
            flat[block.tensor][block.start : block.stop] = proposal
        stand_for.append(flat)
    for x, y, difference in zip(*stand_for, decode(pair.compressions[0], *messages), strict=True):
        assert ((y - x) - difference).abs().max() <= 8 * torch.finfo(pair.compressions[0].compute).eps


# -- int8 ------------------------------------------------------------------------------------------------------------------


def exponent(hint: bytes, block: int = 0) -> int:
    return int(np.frombuffer(hint, dtype=np.int8)[block])


SCALES = [(1.0, 1e-3), (1e4, 1e-2), (1e8, 1.0), (1e30, 1e20), (1e-30, 1e-33), (1e-37, 1e-38)]


@pytest.mark.parametrize(
    ("dtype", "scale", "distance"),
    [(dtype, *SCALES[0]) for dtype in FLOATS] + [(dtype, *scales) for dtype in FLOATS[:2] for scales in SCALES[1:]],
)
def test_the_step_follows_the_distance(dtype, scale, distance):
    size = 3000
    a = (scale * (1 + 0.1 * randn(size, 1, torch.float64))).to(dtype)
    b = (a.double() + distance * randn(size, 2, torch.float64)).to(dtype)
    pair = Pair([a], [b])
    largest = [float(x.abs().max()) for x in (a, b)]
    hints = pair.send_hint()
    # Twice the largest value is enough for any distance of two, and not much more than enough.
    assert all(2 * x / 127 <= 2.0 ** exponent(h) < 32 * x / 127 for h, x in zip(hints, largest, strict=True))
    pair.meet(0, hints)
    assert pair.step() == 2.0 ** max(map(exponent, hints))
    exact = b.double() - a.double()
    seen = float(exact.abs().max())
    for round_ in range(1, 30):
        [there], _ = pair.meet(round_)
        assert (there - exact).abs().max() <= 2.001 * pair.step()
    # The measured distance is off by two steps at most, and the margin is two: the step settles where 127 of them cover that.
    assert pair.step() <= max(2 * max(2 * seen / 123, 4 * max(largest) / 2**21), 2.0**-126)
    assert 127 * pair.step() >= 1.9 * seen
    assert pair.rejected == [0, 0]


def test_the_largest_hint_counts_per_block():
    a = [randn(10, 1), 1000 * randn(10, 2)]
    b = [100 * randn(10, 3), randn(10, 4)]
    pair = Pair(a, b)
    pair.meet()
    for block in range(2):
        largest = max(float(a[block].abs().max()), float(b[block].abs().max()))
        assert 2 * largest / 127 <= pair.step(block) < 32 * largest / 127


def test_the_range_shrinks_slowly():
    a = randn(500, 1)
    pair = Pair([a], [a + 1.0])
    for round_ in range(8):
        pair.meet(round_)
    far = pair.step()
    pair.values[1] = [a.clone()]
    pair.meet(8)
    pair.meet(9)
    assert pair.step() >= far / 2, "one close meeting is no reason to expect no other"
    for round_ in range(10, 90):
        pair.meet(round_)
    assert pair.step() <= far / 64


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int8_is_right_in_the_mean(dtype):
    size, rounds = 1800, 100
    a, b = randn(size, 1, dtype), (randn(size, 1, torch.float64) + 0.05 * randn(size, 2, torch.float64)).to(dtype)
    total = torch.zeros(size, dtype=torch.float64)
    step = 0.0
    for round_ in range(rounds):
        pair = Pair([a], [b])  # anew, so that the step stays
        total += pair.meet(round_)[0][0]
        step = pair.step()
    off = (total / rounds - (b.double() - a.double())) / step
    # A rounded value varies by at most 1/4 step squared, their difference by 1/2.
    error = math.sqrt(0.5 / rounds)
    assert off.abs().max() <= 5.5 * error
    assert abs(float(off.mean())) <= 5 * error / math.sqrt(size)
    assert off.abs().max() > 0


def test_rounding_is_drawn_by_round_rank_and_parameter():
    values = randn(2 * BLOCK, 1)
    hints = [compression_of([values], Int8).hint([values])]

    def codes(round_: int, rank: int, index: int) -> bytes:
        compression = Int8([FlatTensor(index, len(values))], torch.float32, CPU)
        return encode(compression, [values], hints, round_, rank).numpy().tobytes()

    one = codes(3, 1, 5)
    assert codes(3, 1, 5) == one
    assert len({one, codes(4, 1, 5), codes(3, 2, 5), codes(3, 1, 6), codes(3 + 2**40, 1, 5)}) == 5
    # Two blocks do not share it either.
    same = torch.full((2 * BLOCK,), 0.3)
    compression = compression_of([same], Int8)
    message = encode(compression, [same], [compression.hint([same])])
    first, second = (message[block.at : block.at + BLOCK] for chunk in compression.chunks for block in chunk.blocks)
    assert not torch.equal(first, second)


def narrow(steps: float, size: int = 64, dtype: torch.dtype = torch.float32) -> Pair:
    """Two replicas on one lattice, whose next exchange has a step of 1 whatever their distance, ``steps`` by element."""
    a = torch.arange(size, dtype=torch.float64).to(dtype)
    return Pair([a], [a + steps])


ONE = [bytes(1)] * 2  # hints of a step of 2^0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [0, 1, -1, 126, 127, -127])
def test_distances_below_128_steps_are_found(steps, dtype):
    pair = narrow(steps, dtype=dtype)
    [there], [back] = pair.meet(0, ONE)
    assert (there.unique().tolist(), pair.rejected) == ([steps], [0, 0])
    assert torch.equal(there, -back)


@pytest.mark.parametrize("steps", [128, -128, 129, 200, 256, -256, 257, 512, 1024, 2**16, 2**20])
def test_larger_distances_are_detected_by_both_ends(steps):
    for changed in ([0], [63], range(64)):
        pair = narrow(0)
        pair.values[1][0][list(changed)] += steps
        for [found] in pair.meet(0, ONE):
            assert (found == 12345).all()
        assert pair.rejected == [1, 1]


@pytest.mark.parametrize("size", [1000, BLOCK])
@pytest.mark.parametrize("pattern", ["pair", "neighbours", "row", "column", "rectangle", "alternating", "random"])
def test_patterns_of_turns_are_detected(pattern, size):
    """Multiples of 256 steps leave every code as it is, and may cancel in a plain sum."""
    up, down = {
        "pair": ([3], [size // 2]),
        "neighbours": ([7], [8]),
        "row": (slice(0, 256, 2), slice(1, 256, 2)),
        "column": ([5], [5 + 256]),
        "rectangle": ([5, 300, 0, 257], [5 + 39, 300 - 39, 1, 256]),
        "alternating": (slice(0, None, 2), slice(1, None, 2)),
        "random": ([], []),
    }[pattern]
    moved = torch.zeros(size)
    moved[up], moved[down] = 256, -256
    if pattern == "random":
        moved = 256 * torch.randint(-2, 3, (size,), generator=torch.Generator().manual_seed(size)).float()
        moved[0] -= moved.sum()
    pair = narrow(3, size)
    pair.values[1][0] += moved
    for [found] in pair.meet(0, ONE):
        assert (found == 12345).all()
    assert pair.rejected == [1, 1]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**16), spread=st.sampled_from([20.0, 60.0, 200.0, 2000.0]))
def test_no_wrong_difference_is_ever_mixed(seed, spread):
    """At random distances from well within the range to far beyond."""
    a = 100 * randn(500, seed)
    b = a + spread * randn(500, seed + 1)
    pair = Pair([a], [b])
    [there], [back] = pair.meet(seed, ONE)
    if pair.rejected == [0, 0]:
        assert (there - (b.double() - a.double())).abs().max() <= 2.001
        assert torch.equal(there, -back)
    else:
        assert pair.rejected == [1, 1]
        assert (there == 12345).all()
        assert (back == 12345).all()
    assert (pair.rejected == [0, 0]) == (float((b - a).abs().max()) < 128) or 126 < float((b - a).abs().max()) < 130


@pytest.mark.parametrize("dtype", [FLOATS[0], *(pytest.param(other, marks=pytest.mark.slow) for other in FLOATS[1:])], ids=str)
def test_after_a_jump_the_next_exchange_is_wide_and_only_that_block_is_skipped(dtype):
    a = [randn(2 * BLOCK, 1, dtype), randn(70, 2, dtype)]
    b = [(x.double() + 0.001 * randn(len(x), 3, torch.float64)).to(dtype) for x in a]
    pair = Pair(a, b)
    for round_ in range(6):
        pair.meet(round_)
    assert pair.rejected == [0, 0]
    b[0][BLOCK + 3] += 50.0
    there, back = pair.meet(6)
    for found in (there, back):
        assert (found[0][BLOCK:] == 12345).all()
        assert (found[0][:BLOCK] != 12345).all()
        assert (found[1] != 12345).all()
    assert pair.rejected == [1, 1]
    # Sixteen times wider is not enough for this, twice the largest value is.
    there, _ = pair.meet(7)
    assert pair.rejected == [2, 2]
    there, _ = pair.meet(8)
    assert pair.rejected == [2, 2]
    assert abs(float(there[0][BLOCK + 3]) - 50.0) <= 2 * pair.step(1) + 0.1
    assert pair.step(0) < 0.01 < pair.step(1)
    pair.meet(9)
    for round_ in range(10, 50):
        b[0][BLOCK + 3] = a[0][BLOCK + 3]
        pair.meet(round_)
    assert pair.step(1) < 0.01


def rounds_of(pair: Pair, rounds: int) -> list[tuple[list[Tensor], float]]:
    """The result of one end in each round, and the step."""
    found = []
    for round_ in range(rounds):
        there, back = pair.meet(round_)
        found.append((there, pair.step()))
        assert all(torch.equal(x, -y) or ((x == 12345) & (y == 12345)).all() for x, y in zip(there, back, strict=True))
    return found


@pytest.mark.parametrize("distance", [1e-4, 1e-2, 0.3, 2.0])
def test_ranges_grow_to_any_distance(distance):
    a = randn(5000, 1)
    b = a + distance * randn(5000, 2)
    pair = Pair([a], [b], fresh=True)
    found = rounds_of(pair, 12)
    mixed = [bool((there[0] != 12345).all()) for there, _ in found]
    assert mixed == sorted(mixed), "once found, it is enough"
    assert mixed.index(True) <= 2, "there are two wider ranges"
    largest = float(torch.stack([a, b]).abs().max())
    assert pair.step() <= max(2 * 2 * float((b - a).abs().max()) / 123, 4 * largest / 2**21)
    for there, step in found:
        assert ((there[0] == 12345) | ((there[0] - (b.double() - a.double())).abs() <= 2.001 * step)).all()
    if distance == 0.3:
        assert mixed.index(True) == 1
        assert found[1][1] <= 2 * largest / 127


def test_a_distant_peer_that_is_rarely_met_is_decoded():
    """Two rounds with a near one, one with a far one: a wide range must outlast the near ones."""
    a = randn(3000, 1)
    values = [[a], [a + 1e-4 * randn(3000, 2)], [a + 3e-3 * randn(3000, 3)]]
    compressions = [compression_of(value, Int8) for value in values]
    for compression, value in zip(compressions, values, strict=True):
        compression.hint(value)
        compression._expected = np.full(1, 1e-3)  # as after many rounds in which all were near
        compression._seen = compression._expected / 2
    far = []
    for round_ in range(30):
        now = [compression.hint(value) for compression, value in zip(compressions, values, strict=True)]
        other = 2 if round_ % 3 == 2 else 1
        messages = [encode(compressions[i], values[i], [now[0], now[other]], round_, i) for i in (0, other)]
        [there] = decode(compressions[0], *messages)
        [back] = decode(compressions[other], *reversed(messages))
        assert torch.equal(there, -back) or ((there == 12345) & (back == 12345)).all()
        if other == 2:
            far.append(bool((there != 12345).all()))
    assert not far[0]
    assert all(far[1:]), far


def test_equal_replicas_are_hardly_moved_in_the_beginning():
    """A trained model with outliers, say: a range that is enough for any two replicas would round all to coarse steps."""
    value = 0.02 * randn(BLOCK, 1)
    value[7] = 1.0
    pair = Pair([value], [value.clone()], fresh=True)
    for there, _ in (pair.meet(round_) for round_ in range(3)):
        assert float(there[0].std()) < 0.02 * 0.02


class Recorded(TorchDispatchMode):
    """The names of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_neither_end_decides_by_a_matrix_product(monkeypatch):
    """How exact one is depends on settings, on autocast and on the machine; ends that differ would decide differently."""
    monkeypatch.setattr(int8, "load_numba", lambda: None)  # what kernels do is not recorded
    a = randn(BLOCK, 1)
    pair = Pair([a], [a + 0.01 * randn(BLOCK, 2)])
    with Recorded() as recorded:
        pair.meet(3)
    assert "sum" in recorded.names
    assert recorded.names.isdisjoint({"mv", "mm", "bmm", "dot", "vdot", "addmv", "addmm", "matmul", "einsum", "linear"})


def test_the_largest_finite_values():
    a = torch.tensor([3e38, -3e38, 0.0, 1.0])
    pair = Pair([a], [-a])
    for round_ in range(3):
        [there], [back] = pair.meet(round_)
        # Twice that is no float32: it is an infinity, or nothing is mixed. It is not a wrong number.
        for found, expected in ((there, -2 * a.double()), (back, 2 * a.double())):
            ok = (found == 12345) | ((found - expected).abs() <= 2 * pair.step()) | (found == expected.sign() * math.inf)
            assert ok.all(), found


BAD = [math.nan, math.inf, -math.inf]


@KINDS_AND_DTYPES
def test_a_message_flags_values_that_are_not_finite(kind, dtype):
    """Also of a message that was put together again; the largest finite values are finite."""
    sizes = [BLOCK + 100, 0, 5, 2 * BLOCK + 1]
    huge = min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max) / 3  # a sum of them overflows
    clean = [torch.full((size,), huge, dtype=dtype) for size in sizes]
    clean[0][::2] *= -1
    places = [(0, 3), (0, BLOCK + 99), (2, 0), (3, 2 * BLOCK)]
    for tensor, element in [*places, (-1, 0)]:
        for bad in BAD if tensor >= 0 else [0.0]:
            values = [value.clone() for value in clean]
            if tensor >= 0:
                values[tensor][element] = bad
            compression = compression_of(values, kind)
            hints = [compression.hint(values)]
            message = encode(compression, values, hints, rank=6)
            assert flag_of(message) == (7 if tensor >= 0 else 0), (tensor, element, bad)
            where = compression.first_nonfinite(message)
            if tensor < 0:
                assert where is None
            elif kind is Int8:  # which run, and no more
                assert where == (tensor, element // BLOCK * BLOCK)
            else:
                assert where == (tensor, element)


def test_a_block_that_was_not_finite_recovers():
    """The state of the distance is as before."""
    a = randn(50, 1)
    pair, steps = Pair([a], [a + 0.5]), []
    for round_ in range(4):
        spoilt = round_ == 2
        pair.values[1] = [a + (math.nan if spoilt else 0.5)]
        messages = pair.messages(round_)
        assert [flag_of(message) for message in messages] == [0, 2 * spoilt]
        if not spoilt:
            [there] = decode(pair.compressions[0], *messages)
            decode(pair.compressions[1], *reversed(messages))
            assert (there - 0.5).abs().max() <= 2 * pair.step()
            steps.append(pair.step())
    assert steps[2] == steps[1] < steps[0]


# -- groups ----------------------------------------------------------------------------------------------------------------


def reduce(
    compression: Compression, messages: Sequence[Tensor], sizes: Sequence[int], round_: int = 0, part: int = 0
) -> Tensor:
    out = torch.full((compression.nbytes,), 255, dtype=torch.uint8)
    for chunk in compression.chunks:
        there = slice(chunk.start, chunk.stop)
        compression.reduce(chunk, [m[there] for m in messages], sizes, out[there], MessageId(round_, -1 - part))
    return out


class Group:
    def __init__(self, members: Sequence[Sequence[Tensor]], kind: type[Compression]) -> None:
        self.members = [list(m) for m in members]
        self.compressions = [compression_of(m, kind) for m in self.members]
        for compression, member in zip(self.compressions, self.members, strict=True):
            expect_the_most(compression, member)

    def meet(self, round_: int = 0, hints: list[bytes] | None = None, tree: bool = False) -> list[list[Tensor]]:
        """Each member's differences to the mean; with a tree the last two are reduced first."""
        hints = hints or [compression.hint(m) for compression, m in zip(self.compressions, self.members, strict=True)]
        self.messages = [
            encode(w, m, hints, round_, i) for i, (w, m) in enumerate(zip(self.compressions, self.members, strict=True))
        ]
        if tree:
            part = reduce(self.compressions[-1], self.messages[-2:], [1, 1], round_, 1)
            parts, sizes = [*self.messages[:-2], part], [1] * (len(self.members) - 2) + [2]
        else:
            parts, sizes = self.messages, [1] * len(self.members)
        self.mean = reduce(self.compressions[0], parts, sizes, round_)
        return [
            decode(compression, message, self.mean)
            for compression, message in zip(self.compressions, self.messages, strict=True)
        ]


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"), some_in_the_fast_tests(COMPRESSIONS.values(), FLOATS, [(3, False), (4, True), (7, True)])
)
def test_the_mean_of_a_group(kind, dtype, shape):
    size, tree = shape
    common = [randn(BLOCK + 11, 1, torch.float64), randn(9, 2, torch.float64), randn(0, 0, torch.float64)]
    members = [[(x + 0.1 * randn(len(x), 3 + i, torch.float64)).to(dtype) for x in common] for i in range(size)]
    group = Group(members, kind)
    found = group.meet(5, tree=tree)
    means = [np.mean([m[tensor].double().numpy() for m in members], axis=0) for tensor in range(3)]
    coded = []
    for compression, own, message, differences in zip(group.compressions, members, group.messages, found, strict=True):
        exact = [torch.zeros(len(x), dtype=torch.float64) for x in own]
        for block, proposal in compression.proposals(own, message):
            exact[block.tensor][block.start : block.stop] = proposal
        coded.append([x + d for x, d in zip(exact, differences, strict=True)])
    for tensor, mean in enumerate(means):
        if not len(mean):
            continue
        if kind is Int8:
            bound = (3.01 if tree else 2.01) * max(group.compressions[0]._steps)
        else:
            bound = (
                (4 if tree else 2) * 5 * torch.finfo(torch.bfloat16 if kind is BFloat16 and dtype.itemsize > 2 else dtype).eps
            )
        for of_member in coded:
            assert np.abs(of_member[tensor].numpy() - mean).max() <= bound
            # All decode one mean.
            assert (of_member[tensor] - coded[0][tensor]).abs().max() <= 16 * torch.finfo(group.compressions[0].compute).eps


def test_sums_are_computed_in_float32_at_least():
    values = [torch.tensor([60000.0, 1.0], dtype=torch.float16) for _ in range(4)]
    group = Group([[v] for v in values], Lossless)
    assert all((d[0] == 0).all() for d in group.meet())
    small = [torch.tensor([256.0], dtype=torch.bfloat16), *(torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(7))]
    group = Group([[v] for v in small], Lossless)
    group.meet()
    assert float(group.mean[:2].view(torch.bfloat16)) == float(torch.tensor(263 / 8).bfloat16())


def test_out_may_be_one_of_the_messages():
    for kind in COMPRESSIONS.values():
        group = Group([[randn(100, i)] for i in range(3)], kind)
        group.meet()
        compression, [chunk] = group.compressions[0], group.compressions[0].chunks
        messages = [m.clone() for m in group.messages]
        for place in range(3):
            own = [m.clone() for m in messages]
            compression.reduce(chunk, own, [1, 1, 1], own[place], MessageId(0, -1))
            assert torch.equal(own[place], group.mean), (kind, place)


@pytest.mark.parametrize("tree", [False, True])
def test_a_group_on_int8_is_right_in_the_mean(tree):
    size, rounds = 1000, 100
    members = [[randn(size, 7) + 0.1 * randn(size, i)] for i in range(4)]
    mean = torch.stack([m[0].double() for m in members]).mean(0)
    total, step = torch.zeros(size, dtype=torch.float64), 0.0
    for round_ in range(rounds):
        group = Group(members, Int8)
        total += group.meet(round_, tree=tree)[0][0] + members[0][0].double()
        step = float(group.compressions[0]._steps[0])
    off = (total / rounds - mean) / step
    # The own rounding, which the difference does not have, and that of the mean (and of a part of it).
    error = math.sqrt((0.25 + 0.25 / 4 + 0.25 * (2 if tree else 1)) / rounds)
    assert off.abs().max() <= 5 * error
    assert abs(float(off.mean())) <= 5 * error / math.sqrt(size)


@pytest.mark.parametrize("tree", [False, True])
def test_a_group_on_bfloat16_keeps_the_progress_of_one_member(tree):
    """Less than half a bfloat16 apart, to nearest it would be lost in every round; it must come through in the mean."""
    size, rounds = 1200, 130
    base = randn(size, 7).bfloat16().float()
    members = [[base.clone()] for _ in range(4)]
    members[0][0] *= 1 + 2.0**-6  # of whose mean with the others a quarter is left: half the distance of two bfloat16s or less
    mean = torch.stack([m[0].bfloat16().double() for m in members]).mean(0)
    total = torch.zeros(size, dtype=torch.float64)
    for round_ in range(rounds):
        group = Group(members, BFloat16)
        group.meet(round_, tree=tree)
        total += group.mean.view(torch.bfloat16)[:size].double()
    unit = 2.0 ** torch.floor(torch.log2(base.abs().double())) * 2.0**-7
    off = (total / rounds - mean) / unit
    error = math.sqrt(0.25 * (2 if tree else 1) / rounds)
    assert off.abs().max() <= 5 * error
    assert abs(float(off.mean())) <= 5 * error / math.sqrt(size)


@pytest.mark.parametrize("tree", [False, True])
def test_a_member_out_of_range_rejects_for_all(tree):
    """That block alone, and in that round alone."""
    members = [[torch.arange(50.0), torch.arange(9.0)] for _ in range(4)]
    members[2][0][5] += 512
    group = Group(members, Int8)
    for differences in group.meet(0, [bytes(2)] * 4, tree):
        assert (differences[0] == 12345).all()
        assert (differences[1].abs() <= 2).all()
    assert [compression.rejected for compression in group.compressions] == [1] * 4
    for differences in group.meet(1, tree=tree):
        assert (differences[0] != 12345).all()


@settings(max_examples=50)
@given(places=st.lists(st.integers(-130, 130), min_size=3, max_size=6), tree=st.booleans())
@example(places=[100] * 18 + [26, -54], tree=True)  # the part's mean is near, one of its members is not
def test_a_group_decodes_on_all_members_or_on_none(places, tree):
    members = [[torch.zeros(20) + torch.arange(20.0) * 10 + place * (torch.arange(20) == 7)] for place in places]
    group = Group(members, Int8)
    found = group.meet(3, [bytes(1)] * len(places), tree)
    skipped = {bool((d[0] == 12345).all()) for d in found}
    assert len(skipped) == 1
    if max(places) - min(places) < 30:
        assert skipped == {False}
    if not skipped.pop():
        for place, [difference] in zip(places, found, strict=True):
            assert abs(float(difference[7]) - (sum(places) / len(places) - place)) <= (2 if tree else 1)
            assert (difference[torch.arange(20) != 7].abs() <= 1e-6).all()
    else:
        assert [compression.rejected for compression in group.compressions] == [1] * len(places)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.parametrize("signs", [True, False])
def test_a_group_at_any_distance_mixes_after_a_few_rounds(size, tree, signs):
    """Also where replicas are as far from each other as from zero, as parameters that began as zeros are."""
    members = [[0.94 * randn(2000, i).sign() if signs else randn(2000, i)] for i in range(size)]
    group = Group(members, Int8)
    for round_ in range(5):
        found = group.meet(round_, tree=tree)
        if (found[0][0] != 12345).all():
            break
    mean = torch.stack([m[0].double() for m in members]).mean(0)
    for [own], [difference] in zip(members, found, strict=True):
        assert (own.double() + difference - mean).abs().max() <= 4 * float(group.compressions[0]._steps[0])


@pytest.mark.parametrize(("kind", "tree"), some_in_the_fast_tests(COMPRESSIONS.values(), [False, True]))
def test_all_members_learn_of_one_that_is_not_finite(kind, tree):
    sizes = [BLOCK + 7, 40]
    of_a_gpu = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)[0]  # a NaN, as NVIDIA's have its bits
    for bad, tensor, element in ((math.nan, 0, 3), (math.inf, 0, BLOCK + 6), (-math.inf, 1, 39), (of_a_gpu, 1, 0)):
        for spoilt in ([], [1], [0, 2]):
            members = [[randn(size, i) for size in sizes] for i in range(4)]
            for member in spoilt:
                members[member][tensor][element] = bad
            group = Group(members, kind)
            group.meet(tree=tree)
            compression, mean = group.compressions[0], group.mean
            assert flag_of(mean) == (spoilt[-1] + 1 if spoilt else 0)
            where = compression.first_nonfinite(mean)
            block = element // BLOCK * BLOCK
            assert where == (None if not spoilt else (tensor, block if kind is Int8 else element))


# -- names -----------------------------------------------------------------------------------------------------------------


def test_names_of_compressions():
    assert {None: Lossless, "bfloat16": BFloat16, "int8": Int8} == COMPRESSIONS
    for name, kind in COMPRESSIONS.items():
        assert check_compression(name) is kind


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bf16", "'bfloat16'"),
        ("Int8", "'int8'"),
        ("float32", None),
        ("fp32", None),
        (8, None),
        (torch.int8, "'int8'"),
    ],
)
def test_an_unknown_compression(name, hint):
    with pytest.raises(
        ValueError,
        match=r"compression must be None \(every dtype as it is\), 'bfloat16', 'int8', '4bit', .* or 'low-rank:R' .*, got",
    ) as caught:
        check_compression(name)
    assert repr(name) in str(caught.value)
    assert (f": did you mean {hint}?" in str(caught.value)) if hint else ("did you mean" not in str(caught.value))


@pytest.mark.parametrize("size", [20, 9000])
def test_a_value_too_large_for_the_lattice_is_not_mixed(size):
    """Nor is its block, as it hides others in a sum: here one that is 256 steps away, whose code is the same. It is finite."""
    a = [torch.zeros(size), torch.arange(30.0)]
    a[0][7] = 1e30
    b = [a[0].clone(), a[1] + 3]
    b[0][3] += 256
    pair = Pair(a, b, fresh=True)
    assert [flag_of(message) for message in pair.messages(0, [bytes(2)])] == [0, 0]
    for (first, second), sign in zip(pair.meet(0, [bytes(2)]), (1, -1), strict=True):
        assert (first == 12345).all()
        assert (second == 3 * sign).all()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2**7), ("float64", 2**15), ("float64", LARGEST_NUMBER - 1)])
@pytest.mark.parametrize("size", [2300, 2**16])
def test_the_sums_are_exact(dtype, limit, size):
    """Workers with and without a GPU, and with and without Numba, must agree."""
    drawn = np.random.default_rng(limit).integers(-limit, limit, size, endpoint=True)
    weights, by_column, by_row = (np.asarray(given, dtype=object) for given in sum_weights())
    for integers in (drawn, np.full(size, -limit)):
        exact = [int(x) for x in integers]  # Python's integers have no limit
        columns = sum(x * int(weights[place % 256]) for place, x in enumerate(exact))
        both = sum(x * int(by_column[place % 256]) * int(by_row[place // 256]) for place, x in enumerate(exact)) % PRIME
        assert weighted_sums(torch.from_numpy(integers).to(getattr(torch, dtype))) == (columns, both)


@pytest.mark.parametrize("tree", [False, True])
def test_a_member_expects_the_farthest_of_its_group(tree):
    """Not the mean, which is nearer."""
    members = [[torch.arange(20.0) + place] for place in (0, 0, 60)]
    group = Group(members, Int8)
    group.meet(0, [bytes(1)] * 3, tree)
    for compression, member in zip(group.compressions, members, strict=True):
        assert 127 * 2.0 ** exponent(compression.hint(member)) >= 2 * 60
