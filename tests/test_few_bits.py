"""Messages of a few bits: the differences that they give, against NumPy in float64; whole runs are in test_low_rank.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decent_dp.compression import FewBits, FlatTensor, MessageId, check_compression, flag_of

CPU = torch.device("cpu")
ALL = ["1bit", "2bit", "4bit"]
# The share of the square of a normal distribution that is left.
LEFT = {"1bit": 0.364, "2bit": 0.119, "4bit": 0.0117}
BLOCK = 512


def drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def half(values: np.ndarray | float) -> np.ndarray:
    """Rounded to bfloat16."""
    return torch.as_tensor(values, dtype=torch.float32).bfloat16().double().numpy()


def quantized(rest: np.ndarray, bits: int) -> np.ndarray:
    """Each block of a tensor as signs times one of a few sizes, the nearest one."""
    first, apart = {1: (0.7979, 0.0), 2: (0.4528, 1.0572), 4: (0.1676, 0.3352)}[bits]
    sizes = first + apart * np.arange(2 ** (bits - 1))
    found = np.empty_like(rest)
    for start in range(0, len(rest), BLOCK):
        part = rest[start : start + BLOCK]
        scale = half(np.sqrt(np.square(part).mean()))
        nearest = np.abs(np.abs(part)[:, None] - scale * sizes).argmin(1)
        found[start : start + BLOCK] = np.where(part < 0, -1, 1) * scale * sizes[nearest]
    return found


class Pair:
    """Two workers, ranks 2 and 5, with some vectors."""

    EDGE = (2, 5)

    def __init__(
        self,
        lengths: Sequence[int],
        name: str = "2bit",
        dtype: torch.dtype = torch.float32,
        origins: Sequence[Sequence[np.ndarray]] = (),
    ) -> None:
        self.lengths, self.dtype = lengths, dtype
        kind = check_compression(name)
        assert issubclass(kind, FewBits)
        self.ends = [kind([FlatTensor(i, length) for i, length in enumerate(lengths)], dtype, CPU) for _ in self.EDGE]
        for end, origin in zip(self.ends, origins or [[np.zeros(length) for length in lengths]] * 2, strict=True):
            end.load_state([{"known": value} for value in self.flat(origin)])

    def flat(self, values: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.tensor(value, dtype=self.dtype) for value in values]

    def send(self, values: Sequence[Sequence[np.ndarray]]) -> list[Tensor]:
        messages = []
        for rank, end, own in zip(self.EDGE, self.ends, values, strict=True):
            end.begin(self.EDGE, rank, 0)
            out = torch.full((end.nbytes,), 255, dtype=torch.uint8)
            assert list(end.encode(self.flat(own), out, MessageId(3, rank), [])) == ([end.nbytes] if end.nbytes else [])
            messages.append(out)
        return messages

    def meet(self, values: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray | None]]:
        """One exchange; both ends' differences, None where nothing is mixed."""
        messages = self.send(values)
        found = []
        for end, ours, theirs in zip(self.ends, messages, messages[::-1], strict=True):
            parts = list(end.differences(ours, theirs))
            assert [(block.tensor, block.start, block.stop) for block, _, _ in parts] == [
                (i, 0, length) for i, length in enumerate(self.lengths) if length
            ]
            found.append([None if difference is None else difference.double().numpy() * unit for _, difference, unit in parts])
        return found


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 1300), min_size=1, max_size=4),
    distance=st.sampled_from([0.0, 1e-3, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
def test_both_ends_find_opposite_differences(name, lengths, distance, dtype, seed):
    pair = Pair(lengths, name, dtype)
    mine = [drawn(length, seed=seed + i) for i, length in enumerate(lengths)]
    theirs = [x + distance * drawn(len(x), seed=seed + 50 + i) for i, x in enumerate(mine)]
    for _ in range(3):
        for there, back in zip(*pair.meet([mine, theirs]), strict=True):
            assert there is not None
            assert np.array_equal(there, -back)


@pytest.mark.parametrize("name", ALL)
def test_messages_say_what_is_beyond_the_reference(name):
    """Against the formulas in NumPy: c = Q(x - m), d = c_j - c_i, m <- m + (c_i + c_j)/2."""
    origin = [drawn(1200, seed=1), drawn(70, seed=2)]
    pair = Pair([1200, 70], name, torch.float64, [origin, origin])
    reference = list(origin)
    x = [[own + 0.1 * drawn(len(own), seed=10 * end + i) for i, own in enumerate(origin)] for end in (1, 2)]
    for turn in range(6):
        found = pair.meet(x)
        codes = [[quantized(own - m, int(name[0])) for own, m in zip(values, reference, strict=True)] for values in x]
        for i, (first, second) in enumerate(zip(*codes, strict=True)):
            assert np.abs(found[0][i] - (second - first)).max() < 1e-12
            reference[i] = reference[i] + (first + second) / 2
        x = [
            [v + d / 2 + 0.01 * drawn(len(v), seed=turn) for v, d in zip(own, ds, strict=True)]
            for own, ds in zip(x, found, strict=True)
        ]


@pytest.mark.parametrize("name", ALL)
def test_a_message_leaves_the_least_squares_of_a_normal_distribution(name):
    x = drawn(2**16, seed=1)
    [[difference], _] = Pair([len(x)], name).meet([[np.zeros(len(x))], [x]])
    left = np.square(difference - x).mean()
    assert left == pytest.approx(LEFT[name], rel=0.02)


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_sent_stays_in_the_replicas(name):
    """Exchanges with a mix by halves bring the replicas together, and do not move their mean."""
    pair, x = Pair([5000], name, torch.float64), [drawn(5000, seed=1), drawn(5000, seed=2)]
    mean, apart = (x[0] + x[1]) / 2, np.linalg.norm(x[0] - x[1])
    for _ in range(40):
        x = [own + difference / 2 for own, [difference] in zip(x, pair.meet([[x[0]], [x[1]]]), strict=True)]
        assert np.abs((x[0] + x[1]) / 2 - mean).max() < 1e-14
    assert np.linalg.norm(x[0] - x[1]) < (0.02 if name == "1bit" else 2**-8) * apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mix_adds_the_differences(dtype):
    """In one call for all tensors, as ``differences`` gives them one by one."""
    x = [[drawn(700, seed=1), drawn(0, seed=2), drawn(30, seed=3)], [drawn(700, seed=4), drawn(0, seed=5), drawn(30, seed=6)]]
    pair, twin = (Pair([700, 0, 30], dtype=dtype) for _ in range(2))
    values = twin.flat(x[0])
    messages = twin.send(x)
    twin.ends[0].mix(values, *messages, 0.3)
    expected = pair.flat(x[0])
    for block, difference, unit in pair.ends[0].differences(*pair.send(x)):
        assert difference is not None
        expected[block.tensor].add_(difference.mul_(0.3 * unit))
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_bytes_of_a_message(name):
    rows = 3 + 1
    [end, _] = Pair([1300, 20], name).ends
    assert end.nbytes == end.most_nbytes == 16 + 2 * rows + int(name[0]) * rows * BLOCK // 8 + 8
    assert Pair([0], name).ends[0].nbytes == 0


def test_ends_that_disagree_begin_anew_and_mix_when_they_know_each_other():
    """As after a worker joined: the other end knows a reference that it does not."""
    x = [[drawn(3000, seed=1)], [drawn(3000, seed=1) + 0.01 * drawn(3000, seed=2)]]
    pair = Pair([3000], origins=[x[0], [np.ones(3000)]])
    assert pair.meet(x) == [[None], [None]]
    assert [end.rejected for end in pair.ends] == [1, 1]
    mixed = [pair.meet(x)[0][0] is not None for _ in range(6)]
    # An exchange leaves 0.35 of the values, and later about half, until it is less than 1/16.
    assert mixed == [False] * 5 + [True]
    assert [end.rejected for end in pair.ends] == [6, 6]
    assert pair.ends[0].stuck(1) == []


def test_an_edge_whose_ends_never_agree_is_stuck():
    """Also if exchanges of other edges between them are mixed."""
    x = [[drawn(600, seed=1), drawn(30, seed=2)]] * 2
    pair = Pair([600, 30], origins=[x[0], [np.ones(600), np.ones(30)]])
    for turn in range(4):
        assert pair.ends[0].stuck(3) == ([] if turn < 3 else [0, 1])
        pair.EDGE = (2, 5)
        if turn:  # in the first one the origins differ
            pair.ends[0]._references[pair.EDGE].digest += 1
        assert pair.meet(x) == [[None, None]] * 2
        pair.EDGE = (2, 7)
        pair.meet(x)
    pair.EDGE = (2, 5)
    pair.meet(x)
    assert pair.ends[0].stuck(1) == []


def test_an_exchange_that_one_end_could_not_use_is_found_out():
    """Its reference did not move, and the next differences would be wrong."""
    x = [[drawn(700, seed=1)], [drawn(700, seed=2)]]
    pair = Pair([700])
    pair.meet(x)
    list(pair.ends[0].differences(*pair.send(x)))
    assert pair.meet(x) == [[None], [None]]


def test_values_that_are_never_near_are_mixed_after_eight_exchanges():
    pair = Pair([3000], origins=[[np.zeros(3000)], [np.ones(3000)]])
    x, mixed = [[np.zeros(3000)], [np.zeros(3000)]], []
    for turn in range(11):
        mixed.append(pair.meet(x)[0][0] is not None)
        x = [[drawn(3000, seed=turn)], [drawn(3000, seed=100 + turn)]]
    assert mixed == [False, *[False] * 8, True, True]


def test_values_that_were_replaced_on_both_ends_are_known():
    """Of one tensor; of the other one the reference stays."""
    x = [[drawn(3000, seed=1 + end), drawn(600, seed=5 + end)] for end in (0, 1)]
    pair = Pair([3000, 600])
    for _ in range(10):
        pair.meet(x)
    loaded = 100 * drawn(3000, seed=3)
    new = [[loaded + 0.1 * own[0], own[1]] for own in x]
    for end in pair.ends:
        end.load_state([{"known": pair.flat([loaded])[0]}, {}])
    [[first, second], _] = pair.meet(new)
    assert np.abs(first - (new[1][0] - new[0][0])).mean() < 0.1
    assert np.abs(second - (x[1][1] - x[0][1])).mean() < 0.5
    pair.ends[0].load_state([{}, {"known": pair.flat(new[0])[1]}])
    assert pair.meet(new) == [[None, None]] * 2


def test_an_exchange_in_flight_is_mixed_after_its_reference_was_dropped():
    """As after a change of the bucket: both ends find the differences that the messages have, and learn nothing."""
    x = [[drawn(700, seed=1)], [drawn(700, seed=2)]]
    pair, twin = Pair([700]), Pair([700])
    messages = pair.send(x)
    for end in pair.ends:
        end.load_state([{"known": value} for value in pair.flat(x[0])])
    [(_, found, _)] = pair.ends[0].differences(*messages)
    [[expected], _] = twin.meet(x)
    assert found is not None
    assert np.array_equal(found.numpy(), expected)
    assert not pair.ends[0]._references


@pytest.mark.parametrize("name", ALL)
def test_small_differences_of_large_values_are_mixed(name):
    """As of the gains of norms late in training, where the values' own rounding in bfloat16 is larger than the differences."""
    start = 1 + 0.1 * drawn(2000, seed=1)
    pair, x = Pair([2000], name, origins=[[start]] * 2), [start + 1e-3 * drawn(2000, seed=end) for end in (2, 3)]
    apart = np.linalg.norm(x[0] - x[1])
    for _ in range(50):
        x = [own + difference / 2 for own, [difference] in zip(x, pair.meet([[x[0]], [x[1]]]), strict=True)]
    assert np.linalg.norm(x[0] - x[1]) < 0.02 * apart


def test_an_edge_that_first_meets_late_is_learned_before_it_mixes():
    """The origin is far away by then, and its messages would be much coarser than what the two differ by."""
    origin = [drawn(3000, seed=1)]
    pair = Pair([3000], origins=[origin, origin])
    x = [[origin[0] + 0.5 * drawn(3000, seed=2) + 0.01 * drawn(3000, seed=3 + end)] for end in (0, 1)]
    for _ in range(20):
        pair.meet(x)
    pair.EDGE = (2, 7)
    mixed = [pair.meet(x)[0][0] is not None for _ in range(8)]
    assert mixed == [False] * 2 + [True] * 6


def test_an_end_that_resumes_has_its_reference():
    """Also in a bucket that is cut differently."""
    origin = [drawn(700, seed=1), drawn(40, seed=2)]
    pair = Pair([700, 40], origins=[origin, origin])
    x = [[own + 0.1 * drawn(len(own), seed=7 + end) for own in origin] for end in (0, 1)]
    pair.meet(x)
    whole = [[{key: value.clone() for key, value in entries.items()} for entries in end.state()] for end in pair.ends]
    expected = pair.meet(x)
    again = Pair([700, 40])
    for end, saved in zip(again.ends, whole, strict=True):
        end.load_state(saved)
    for found, own in zip(again.meet(x), expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(found, own, strict=True))
    alone = Pair([40])
    for end, saved in zip(alone.ends, whole, strict=True):
        end.load_state(saved[1:])
    [[difference], _] = alone.meet([own[1:] for own in x])
    assert np.array_equal(difference, expected[0][1])


def test_a_reference_that_is_not_whole_is_learned_before_it_mixes():
    origin = [drawn(700, seed=1), drawn(40, seed=2)]
    pair = Pair([700, 40], origins=[origin, origin])
    for _ in range(10):
        pair.meet([origin, origin])
    for end in pair.ends:
        [first, _] = [{key: value.clone() for key, value in entries.items()} for entries in end.state()]
        end.load_state([first, {}])
    x = [[own + 1e-3 * drawn(len(own), seed=7 + end) for own in origin] for end in (0, 1)]
    mixed = [pair.meet(x)[0][0] is not None for _ in range(5)]
    assert mixed[0] is False
    assert mixed[-1] is True


def test_a_resume_without_a_reference_begins_from_zero():
    pair = Pair([700])
    for end in pair.ends:
        end.load_state([{}])
        assert end.state() == [{}]
    assert pair.meet([[drawn(700, seed=1)]] * 2) == [[None], [None]]


@pytest.mark.parametrize("name", ALL)
def test_numba_gives_the_same_messages_and_differences(name):
    pytest.importorskip("numba")
    lengths, twin = [1300, 40, 2048], Pair([1300, 40, 2048], name)
    pair = Pair(lengths, name)
    assert all(end._numba is not None for end in pair.ends)
    for end in twin.ends:
        end._numba = None
    for turn in range(5):
        x = [[drawn(length, seed=10 * turn + end + i) for i, length in enumerate(lengths)] for end in (0, 50)]
        x[0][2][:600] = 0.0
        for ours, theirs in zip(pair.send(x), twin.send(x), strict=True):
            assert torch.equal(ours, theirs)
        for first, second in zip(pair.meet(x), twin.meet(x), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    for a, b in zip(pair.ends[0].state(), twin.ends[0].state(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(name, value):
    pair, x = Pair([700, 600], name), [drawn(700, seed=1), drawn(600, seed=2)]
    bad = [x[0], x[1].copy()]
    bad[1][530] = value
    messages = pair.send([x, bad])
    assert list(map(flag_of, messages)) == [0, 1 + 5]
    assert pair.ends[0].first_nonfinite(messages[1]) == (1, 512)
    assert pair.ends[0].first_nonfinite(messages[0]) is None


def test_large_values_and_zeros():
    pair = Pair([600, 600], dtype=torch.float32)
    x = [[np.full(600, 1e17), np.zeros(600)], [np.full(600, -1e17), np.zeros(600)]]
    [[large, zero], _] = pair.meet(x)
    assert np.isfinite(large).all()
    assert (large < 0).all()
    assert (zero == 0).all()


def test_copies_of_the_parameters():
    """One per partner, the origin, and one to code: as the page says."""
    pair, x = Pair([5120]), [[drawn(5120, seed=1)], [drawn(5120, seed=2)]]
    for edge in ((2, 5), (2, 7), (2, 9)):
        pair.EDGE = edge
        pair.meet(x)
    end = pair.ends[0]
    assert end._origin is not None
    kept = [end._room(), end._origin.values, *(reference.values for reference in end._references.values())]
    assert len({tensor.data_ptr() for tensor in kept}) == len(kept) == 5
    assert {tensor.numel() for tensor in kept} == {5120}
