"""Rules, and their law, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decent_dp.rules import Gossip, Round, Rule
from decent_dp.rules.rule import apply_rule

RULE, ROUND = Gossip(), Round(0)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def mix(own: list[Tensor], sent: list[Tensor], others: list[Tensor], pull: float) -> list[Tensor]:
    """With differences as a compression decodes them: in float32 at least."""
    own = [t.clone() for t in own]
    wider = [torch.promote_types(t.dtype, torch.float32) for t in own]
    differences = [o.to(w) - s.to(w) for o, s, w in zip(others, sent, wider, strict=True)]
    for value, difference in zip(own, differences, strict=True):
        apply_rule(RULE, value, {}, difference, pull, ROUND)
    return own


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60)
@given(
    x=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
    weight=st.floats(0, 1),
    factor=st.floats(0, 1),
)
def test_the_law(x, seed, weight, factor):
    rng = np.random.default_rng(seed)
    own, sent, others = np.array(x), rng.normal(size=len(x)), rng.normal(size=len(x))
    expected = own + factor * (1 - weight) * (others - sent)
    [mixed] = mix([torch.tensor(own)], [torch.tensor(sent)], [torch.tensor(others)], factor * (1 - weight))
    np.testing.assert_allclose(mixed.numpy(), expected, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_law_in_every_dtype(dtype):
    own, sent, others = (randn(200, seed=s).to(dtype) for s in range(3))
    for pull in (0.25, 2 / 3, 1.0):
        expected = own.double() + pull * (others.double() - sent.double())
        [mixed] = mix([own], [sent], [others], pull)
        assert mixed.dtype == dtype
        # Three roundings of numbers below 16.
        assert (mixed.double() - expected).abs().max() <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lossy", [False, True])
def test_the_mean_over_workers_stays(dtype, lossy):
    n, weight, factor = 4, 0.4, 0.7
    replicas = [randn(300, seed=s).to(dtype) for s in range(n)]
    # Any values may be sent: only their differences are added.
    sent = [(r * 8).round() / 8 if lossy else r.clone() for r in replicas]
    after = []
    for i in range(n):
        others = (sum(sent[j].double() for j in range(n) if j != i) / (n - 1)).to(dtype)
        after += mix([replicas[i]], [sent[i]], [others], factor * (1 - weight))
    moved = torch.stack([a.double() for a in after]).mean(0) - torch.stack([r.double() for r in replicas]).mean(0)
    assert moved.abs().max() <= 16 * torch.finfo(dtype).eps
    assert not torch.equal(after[0], replicas[0])


def test_two_workers_with_weight_one_half_meet_in_the_middle():
    a, b = randn(5, seed=1), randn(5, seed=2)
    [left], [right] = mix([a], [a], [b], 0.5), mix([b], [b], [a], 0.5)
    torch.testing.assert_close(left, (a + b) / 2)
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_difference_of_zero_changes_nothing(bad):
    own = randn(4)
    for sent, others in ((own, torch.full_like(own, bad)), (torch.full_like(own, bad), own)):
        [mixed] = mix([own], [sent], [others], 0.0)
        assert torch.equal(mixed, own)


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), pull=st.floats(0, 1), dtype=st.sampled_from(DTYPES))
@example(sizes=[5, 9, 9, 9], pull=0.1875, dtype=torch.bfloat16)
@example(sizes=[5, 9, 9, 9], pull=0.1875, dtype=torch.float16)
def test_how_the_list_is_cut_does_not_matter(sizes, pull, dtype):
    own, sent, others = (randn(sum(sizes), seed=s).to(dtype) for s in range(3))
    cut = mix(*(list(t.split(sizes)) for t in (own, sent, others)), pull)
    [whole] = mix([own], [sent], [others], pull)
    assert torch.equal(torch.cat(cut), whole)


def test_an_edit_between_steps_survives():
    before, others = randn(6, seed=1), randn(6, seed=2)
    sent = before.clone()
    edited = before.clamp(-0.1, 0.1)
    [mixed] = mix([edited], [sent], [others], 0.5)
    torch.testing.assert_close(mixed, edited + 0.5 * (others - before))


def test_propose_changes_nothing_and_apply_writes_in_place():
    own = [randn(3), randn(2, 2, seed=1).t()]
    kept = [t.clone() for t in own]
    addresses = [t.data_ptr() for t in own]
    for value, k in zip(own, kept, strict=True):
        assert torch.equal(RULE.propose(value, {}, ROUND), k)
        apply_rule(RULE, value, {}, torch.ones_like(value), 0.5, ROUND)
    assert [t.data_ptr() for t in own] == addresses
    for o, k in zip(own, kept, strict=True):
        torch.testing.assert_close(o, k + 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wider_differences_are_rounded_once(dtype):
    """A difference too small for the replica's dtype beside a large value still counts in full."""
    own, difference = torch.full((4,), 3.0, dtype=dtype), torch.full((4,), 1 / 3, dtype=torch.float64)
    apply_rule(RULE, own, {}, difference.clone(), 0.75, ROUND)
    assert torch.equal(own, torch.full((4,), 3.25, dtype=dtype))


@pytest.mark.parametrize("size", [3, 4, 7])
def test_the_mean_of_all_is_as_good_as_that_of_the_others(size):
    """With the mean of all members for r and m/(m - 1) times the pull it is the same law."""
    members, weight = [randn(50, seed=s) for s in range(size)], 0.3
    others, everybody = torch.stack(members[1:]).mean(0), torch.stack(members).mean(0)
    [a] = mix([members[0]], [members[0]], [others], 1 - weight)
    [b] = mix([members[0]], [members[0]], [everybody], (1 - weight) * size / (size - 1))
    torch.testing.assert_close(a, b)


def test_scalars_and_empty_tensors():
    nothing = torch.empty(0)
    [a, b] = mix([torch.tensor(1.0), nothing], [torch.tensor(1.0), nothing], [torch.tensor(3.0), nothing], 0.5)
    assert (a.item(), b.numel()) == (2.0, 0)


def test_the_rule_is_abstract_or_final():
    with pytest.raises(TypeError, match="abstract"):
        Rule()
    assert isinstance(RULE, Rule)
