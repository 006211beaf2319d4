"""Rules between workers: rejected differences, the coding of proposals, and the settings that workers must share."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.rules import Gossip, OuterNesterov, Round, Rule
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Edge
from decent_dp.transport import run_replicas
from tests.helpers import SGD, error_of, net
from tests.rule_cases import MomentumGossip, Scaled, Versatile, settings_of_any_kind
from tests.test_compression_in_training import Bag, flat, shake

N = 4
SOME = partial(torch.optim.SGD, lr=0.05)


# -- rounds without a difference -------------------------------------------------------------------------------------------


class Counting(Rule):
    """Plain gossip that notes, of each round, whether something came; tests/test_law.py has the numbers of such rounds."""

    def __init__(self) -> None:
        self.came: list[tuple[int, bool]] = []

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        self.came.append((round.number, difference is not None))
        if difference is not None:
            values.add_(difference)


def test_a_rejected_block_is_a_round_without_a_difference():
    """int8 cannot tell differences so much larger than it expects."""

    def far_apart(at: Any) -> tuple[list[tuple[int, bool]], int]:
        rule, sgd = Counting(), partial(torch.optim.SGD, lr=0.0)
        model = DecentralizedDataParallel(Bag(0), sgd, topology="one-peer-exp", compression="int8", rule=rule, transport=at)
        shake(model.module, at.rank, 1000.0)
        for _ in range(6):
            sum(p.sum() for p in model.module.params).backward()
        found = list(rule.came), model.stats().rejected
        model.close()
        return found

    for came, rejected in run_replicas(2, far_apart):
        assert {something for t, something in came if t == 0} == {False}
        assert (4, True) in came
        assert sum(not something for _, something in came) == rejected > 0


def squares(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


# -- proposals -------------------------------------------------------------------------------------------------------------

HINTED: list[dict[str, Any]] = [{"mix_every": 2}, {"overlap": False, "param_as_bucket_view": False}]


@pytest.mark.parametrize("options", HINTED, ids=str)
def test_scale_hints_are_those_of_the_proposal(options):
    """A power of two times the parameters: steps that are as much larger, the same roundings, and the same numbers."""

    def trained(at: Any, rule: Rule | None) -> tuple[np.ndarray, int]:
        how = {"topology": "one-peer-exp", "compression": "int8", "rule": rule, "transport": at, **options}
        model = DecentralizedDataParallel(Bag(0), SOME, **how)
        for t in range(7):
            draw = torch.Generator().manual_seed(10 * at.rank + t)
            pulls = [torch.randn(p.shape, generator=draw) for p in model.module.params]
            sum((p * pull).sum() for p, pull in zip(model.module.params, pulls, strict=True)).backward()
        model.close()
        return flat(model.module), model.stats().rejected

    plain, *others = (
        run_replicas(2, lambda at, rule=rule: trained(at, rule)) for rule in (None, Scaled(1024.0), Scaled(2.0**-9))
    )
    for found in others:
        for (values, rejected), (expected, of_plain) in zip(found, plain, strict=True):
            np.testing.assert_array_equal(values, expected)
            # Of more than 60 runs, few were further apart than it was expected in the beginning.
            assert rejected == of_plain < 20


def test_scale_hints_in_the_simulator():
    batches = [torch.randn(N, 5, 6, generator=torch.Generator().manual_seed(t)) for t in range(8)]
    found = []
    for rule in (Gossip(), Scaled(4096.0)):
        cluster = VirtualCluster(net(), SGD, "ring", N, loss_fn=squares, compression="int8", rule=rule)
        for batch in batches:
            cluster.step(batch)
        found.append((cluster.parameters, cluster.rejected))
    assert found[0][1] == found[1][1] < 60
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name]), name


class Watching(torch.optim.SGD):
    """Records the mean of the others' values in its hook."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)
        self.seen: list[Tensor] = []

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        self.seen += [param.comm_buffer / (1 - weight) for group in self.param_groups for param in group["params"]]


@pytest.mark.parametrize("compression", [None, "int8"])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_hook_sees_the_proposal_although_the_replica_has_moved_on(scale, compression):
    """By far more than the 256 steps of int8's lattice, in the updates that an exchange has to arrive."""
    h, rule = 8, None if scale == 1.0 else Scaled(scale)

    def work(at: Any) -> tuple[list[Tensor], list[Tensor]]:
        how = {"topology": "ring", "compression": compression, "rule": rule, "mix_every": h, "transport": at}
        model = DecentralizedDataParallel(torch.nn.Linear(6, 6, bias=False), Watching, **how)
        values = []
        for _ in range(6 * h + 1):
            ((1 + 0.01 * at.rank) * model.module.weight.sum()).backward()
            values.append(model.module.weight.detach().clone())
        (optimizer,) = model.optimizers
        model.close()
        return values, optimizer.seen

    (_, seen), (values, _) = run_replicas(2, work)
    assert len(seen) == 5
    for mix, found in enumerate(seen):
        torch.testing.assert_close(found / scale, values[(mix + 1) * h - 1], rtol=0, atol=0.05 if compression else 1e-4)


# -- agreement -------------------------------------------------------------------------------------------------------------

OUTER = OuterNesterov(momentum=0.6)
# Of worker 0 and of the other: None if they agree, else what the error has.
RULES: list[tuple[Any, Any, str | None]] = [
    (OUTER, OuterNesterov(lr=0.5), "0.5"),
    (OUTER, None, "Gossip"),
    (Gossip(), MomentumGossip(0.7), "MomentumGossip"),
    (Versatile(nested=[1]), Versatile(nested=[2]), "nested"),
    (settings_of_any_kind(), settings_of_any_kind(), None),
    (OuterNesterov(lr=1, momentum=0.6), OuterNesterov(lr=1.0, momentum=0.6), None),
    (Gossip(), None, None),
]


def refused(at: Any, rule: Any, **options: Any) -> str:
    return error_of(lambda: DecentralizedDataParallel(net(), SGD, rule=rule, transport=at, **options).close())


@pytest.mark.parametrize(("first", "second", "part"), RULES)
def test_workers_agree_on_rules(first, second, part):
    one, other = run_replicas(2, lambda at: refused(at, second if at.rank else first))
    assert one == other
    if part is None:
        assert one == ""
    else:
        assert one.startswith("DisagreementError: ")
        assert "the settings differ between workers: rule is " in one
        assert part in one


@pytest.mark.parametrize("name", ["overlap", "mix_every", "compression"])
def test_settings_of_a_rule_hide_no_other_difference(name):
    """They may have any names."""
    different = {"overlap": (True, False), "mix_every": (1, 2), "compression": ("int8", None)}[name]
    found = run_replicas(2, lambda at: refused(at, Versatile(), **{name: different[at.rank]}))
    assert all(f"the settings differ between workers: {name} is " in text for text in found)


class Unsettled(Rule):
    """Has a setting that cannot be compared."""

    def __init__(self) -> None:
        self.size = torch.ones(2)

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        return

    def __repr__(self) -> str:
        return "Unsettled()"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (OuterNesterov, "OuterNesterov is a class: pass rule=OuterNesterov(...)"),
        ("x", "rule must be a decent_dp.rules.Rule such as OuterNesterov(lr=0.7), or None for plain gossip, got 'x'"),
        (Unsettled(), "the settings of rule Unsettled() must be numbers, strings and lists of them: "),
    ],
    ids=["class", "text", "unsettled"],
)
def test_objects_that_are_no_rule_are_refused(rule, said):
    """By the simulator, and on all workers if one has it."""
    with pytest.raises(TypeError, match=re.escape(said)):
        VirtualCluster(net(), SGD, "ring", 4, rule=rule)
    found = run_replicas(2, lambda at: refused(at, rule if at.rank else None))
    assert found[0] == found[1]
    assert found[0].startswith("TypeError: worker 1: ")
    assert said in found[0]


# -- a rule of a user's ----------------------------------------------------------------------------------------------------


def test_the_documented_rule_brings_replicas_closer():
    """With the same bytes, and without moving the mean; in the simulator and between workers alike."""
    distances, means, replicas = [], [], []
    for rule in (None, MomentumGossip(0.5)):
        cluster = VirtualCluster(net().double(), SGD, "ring", 16, loss_fn=squares_to, rule=rule)
        seen = 0.0
        for t in range(40):
            draw = torch.Generator().manual_seed(t)
            x, y = torch.randn(16, 5, 6, generator=draw).double(), torch.randn(16, 5, 3, generator=draw).double()
            cluster.step(x, y)
            seen += cluster.consensus_distance() if t >= 20 else 0.0
        distances.append(seen / 20)
        means.append(cluster.bytes_sent)
        replicas.append(cluster)
    assert distances[1] < 0.9 * distances[0]
    assert means[0] == means[1]


def squares_to(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()
