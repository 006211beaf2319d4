"""Rules by themselves: the law, their settings, narrow numbers, and settings that would drive replicas apart."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from decent_dp.rules import GASLoC, Gossip, MomentumTracking, OuterNesterov, Round, Rule
from decent_dp.rules.growth import grows
from decent_dp.rules.rule import apply_rule
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import make_topology
from decent_dp.topo.schedule import stages_of

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wider_differences_are_rounded_once(dtype):
    """A difference too small for the replica's dtype beside a large value still counts in full."""
    own, difference = torch.full((4,), 3.0, dtype=dtype), torch.full((4,), 1 / 3, dtype=torch.float64)
    apply_rule(RULE, own, {}, difference.clone(), 0.75, ROUND)
    assert torch.equal(own, torch.full((4,), 3.25, dtype=dtype))


def test_the_rule_is_abstract_or_final():
    with pytest.raises(TypeError, match="abstract"):
        Rule()
    assert isinstance(RULE, Rule)


# -- settings ---------------------------------------------------------------------------------------------------------------

LR, MOMENTUM = "must be a positive number, got ", "must be in [0, 1), got "
WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    *((OuterNesterov, {"lr": lr}, ValueError, f"lr of OuterNesterov {LR}{lr}") for lr in (0, -1.0, math.nan, math.inf)),
    *((OuterNesterov, {"lr": lr}, TypeError, f"lr of OuterNesterov {LR}{lr!r}") for lr in ("0.7", True)),
    *((OuterNesterov, {"momentum": mu}, ValueError, f"momentum of OuterNesterov {MOMENTUM}{mu}") for mu in (1, -0.1, math.nan)),
    (OuterNesterov, {"momentum": None}, TypeError, f"momentum of OuterNesterov {MOMENTUM}None"),
    (GASLoC, {"lr": 0}, ValueError, f"lr of GASLoC {LR}0"),
    (GASLoC, {"momentum": 1.0}, ValueError, f"momentum of GASLoC {MOMENTUM}1.0"),
    (MomentumTracking, {"momentum": 1}, TypeError, "momentum of MomentumTracking"),
    (MomentumTracking, {"ahead": 2}, ValueError, "ahead of MomentumTracking"),
]


@pytest.mark.parametrize(("kind", "arguments", "error", "message"), WRONG)
def test_wrong_settings_are_named(kind, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        kind(**arguments)


def test_settings_are_numbers_and_cannot_be_changed():
    rule = OuterNesterov(lr=1, momentum=0)
    assert (rule, repr(rule)) == (OuterNesterov(1.0, 0.0), "OuterNesterov(lr=1.0, momentum=0.0)")
    with pytest.raises(AttributeError):
        rule.lr = 0.5  # type: ignore[misc]


# -- narrower numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_state_is_wider_than_narrow_parameters(dtype):
    values = torch.randn(9, generator=torch.Generator().manual_seed(1)).to(dtype)
    rule = OuterNesterov()
    state = rule.state(values)
    assert {key: tensor.dtype for key, tensor in state.items()} == {
        "anchor": torch.promote_types(dtype, torch.float32),
        "momentum": torch.promote_types(dtype, torch.float32),
        "proposal": dtype,
    }
    assert all(tensor.shape == values.shape for tensor in state.values())
    assert len({tensor.data_ptr() for tensor in (values, *state.values())}) == 4, "nothing is shared"


def test_small_steps_are_not_lost_in_bfloat16():
    """Each outer step is less than half a step of bfloat16 at 1, and 40 of them are ten such steps: the anchor has them all."""
    values = torch.ones(3, dtype=torch.bfloat16)
    rule = OuterNesterov(lr=0.25, momentum=0.0)
    state = rule.state(values)
    for t in range(40):
        proposal = rule.propose(values, state, Round(t))
        assert proposal.dtype == torch.bfloat16
        rule.apply(values, state, torch.full((3,), -(2.0**-8)), Round(t))
    torch.testing.assert_close(state["anchor"], torch.full((3,), float(state["anchor"][0])))
    assert 1 - 40 * 2.0**-8 < float(state["anchor"][0]) < 1 - 5 * 2.0**-8
    assert (values.float() - state["anchor"]).abs().max() <= 2.0**-8


# -- rules that would drive replicas apart ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "topology", "n", "works"),
    [
        (OuterNesterov(), "base-2", 8, None),
        pytest.param(OuterNesterov(), "base-2", 5, "0.7", marks=pytest.mark.slow),
        pytest.param(OuterNesterov(), "base-2", 6, "0.7", marks=pytest.mark.slow),
        pytest.param(OuterNesterov(), "base-2", 16, "0.7", marks=pytest.mark.slow),
        (OuterNesterov(), "complete", 6, None),
        (GASLoC(1.0, 0.9), "base-2", 8, "0.7"),
        pytest.param(GASLoC(1.0, 0.9), "random-matching", 6, "0.7", marks=pytest.mark.slow),
        pytest.param(GASLoC(), "ring:9,base-2", 16, None, marks=pytest.mark.slow),
        (GASLoC(1.0, 0.9), "complete:9,base-2", 16, "0.5"),
    ],
)
@pytest.mark.parametrize("h", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_momentum_that_drives_replicas_apart_is_refused(rule, topology, n, works, h):
    """Against the spectral radius of a period; without a period, against the distance of simulated replicas."""
    made = make_topology(topology, local_world_size=1, world_size=n, rank=0).every(h)
    if works is None:
        assert rule.fit(made, lossy=False, partial=False) == rule
    else:
        with pytest.raises(ValueError, match=f"drives {n} replicas apart. Use momentum={works}, or topology='complete'"):
            rule.fit(made, lossy=False, partial=False)
    if h > 1:
        return

    assert diverges(rule, topology, n) == (works is not None)
    if works is not None:
        assert not diverges(replace(rule, momentum=float(works)), topology, n)


def diverges(rule: Any, topology: str, n: int) -> bool:
    last = stages_of(make_topology(topology, local_world_size=1, world_size=n, rank=0))[-1].topology
    if last.period is None:
        return distance(rule, topology, n) > 1000
    one, period = np.eye(n), np.eye(2 * n)
    for t in range(last.period):
        w, mu = last.mixing_matrix(t), rule.momentum
        if isinstance(rule, GASLoC):  # of anchors and last proposals
            mix = np.block([[w + mu * one, -mu * one], [one, 0 * one]])
        else:  # of anchors and momenta
            mix = np.block([[one - rule.lr * (1 + mu) * (one - w), -rule.lr * mu**2 * one], [one - w, mu * one]])
        period = mix @ period
    apart = np.kron(np.eye(2), one - 1 / n)
    return bool(np.abs(np.linalg.eigvals(apart @ period @ apart)).max() > 1)


def distance(rule: Any, topology: str, n: int) -> float:
    """Of simulated replicas that follow noise, whatever the rule refuses."""

    class Unfitted(type(rule)):
        def fit(self, topology: Any, **_: Any) -> Any:
            return self

    cluster = VirtualCluster(
        nn.Linear(2, 2, bias=False),
        partial(torch.optim.SGD, lr=1.0),
        topology,
        n,
        loss_fn=lambda model, x: (model.weight * x).sum(),
        rule=Unfitted(rule.lr, rule.momentum),
    )
    for t in range(400):
        cluster.step(torch.randn(n, 2, 2, generator=torch.Generator().manual_seed(t)))
    return cluster.consensus_distance()


@pytest.mark.parametrize("rule", [OuterNesterov(momentum=0.1), GASLoC(momentum=0.1)])
def test_momentum_with_low_rank_messages_is_refused(rule):
    made = make_topology("ring", local_world_size=1, world_size=4, rank=0)
    with pytest.raises(ValueError, match="Use momentum=0, or compression=None"):
        rule.fit(made, lossy=False, partial=True)
    assert replace(rule, momentum=0.0).fit(made, lossy=False, partial=True).momentum == 0


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (1.5, 0.0), (2.5, 0.0), (2.5, 0.5), (100.0, 0.0)])
def test_a_rate_that_drives_replicas_apart_is_refused(lr, momentum, n):
    """The distance of two that mix is multiplied by 1 - lr."""
    rule, ring = OuterNesterov(lr, momentum), make_topology("ring", local_world_size=1, world_size=n, rank=0)
    assert diverges(rule, "ring", n) == (lr > 2)
    if lr < 2:
        assert rule.fit(ring, lossy=False, partial=False) == rule
        return
    with pytest.raises(ValueError, match=rf"drives {n} of them apart, whatever the momentum is\. Use lr=1 or less"):
        rule.fit(ring, lossy=False, partial=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e60])
def test_replicas_that_are_no_numbers_are_driven_apart(value):
    class Breaking(Gossip):
        def apply(self, values: Any, state: Any, difference: Any, round: Any) -> None:
            values[0] = value

    assert grows(Breaking(), make_topology("ring", local_world_size=1, world_size=4, rank=0))
