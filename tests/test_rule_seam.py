"""The calls of a rule, the coding of its proposals, and the settings that workers must share."""

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
from decent_dp.topo import Edge, TopologyReg, make_topology
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, error_of, loss, net
from tests.law_cases import Varying
from tests.rule_cases import MomentumGossip, Recorder, Scaled, Versatile, settings_of_any_kind
from tests.test_compression_in_training import Bag, flat, shake

N = 4
SOME = partial(torch.optim.SGD, lr=0.05)


# -- the calls of a rule ---------------------------------------------------------------------------------------------------


def check_log(log: list[Any], total: int, rounds: int, pending: int, h: int = 1) -> dict[int, set[bool]]:
    """Every element had every round, once by each method and in order; the last ``pending`` ones only by ``propose``.

    With mix_every=h an element has a round in the first h updates, and then in every h-th; where a topology begins, earlier or
    later by less than h.

    Returns:
        For each round whether something came, for the elements.
    """
    proposed, applied = np.full(total, -1), np.full(total, -1)
    came: dict[int, set[bool]] = {}
    for verb, number, there, something in log:
        if verb == "propose":
            gaps = number - proposed[there]
            most = np.where(proposed[there] < 0, h, 2 * h - 1)
            assert ((gaps >= 1) & (gaps <= most)).all(), f"proposes for round {number} after {proposed[there]}"
            # With overlap=False it is this round that is applied next; else the one before has been.
            assert (applied[there] == proposed[there]).all(), "an older round has not ended"
            proposed[there] = number
        else:
            assert (proposed[there] == number).all(), "the received values belong to the last proposal"
            assert (applied[there] < number).all(), f"applies round {number} after {applied[there]}"
            applied[there] = number
            came.setdefault(number, set()).add(something)
    assert (proposed >= rounds - 2 * h + 1).all()
    assert (proposed < rounds).all()
    if h == 1 or not pending:
        assert ((proposed > applied) == bool(pending)).all()
    return came


def record(rank: int, topology: str, steps: int, *, transport: Any = None, **options: Any) -> tuple[Any, Any, list[Any]]:
    Recorder.begin()
    model = DecentralizedDataParallel(Bag(0), SOME, topology=topology, rule=Recorder(), transport=transport, **options)
    x = model.module.params
    for _ in range(steps):
        sum((p * (rank + 1)).sum() for p in x).backward()
    log, stats = list(Recorder.log), model.stats()
    model.close()
    return log, stats, [len(p.reshape(-1)) for p in x]


RECORDED: list[tuple[str, dict[str, Any]]] = [
    ("varying", {}),
    ("varying", {"overlap": False, "param_as_bucket_view": False}),
    ("varying", {"mix_every": 3, "bucket_size_in_mb": 1e-6}),
    ("complete:3,ring", {"mix_every": 2}),
    ("ring", {"compression": "bfloat16", "mix_every": 2, "overlap": False, "bucket_size_in_mb": 1e-6}),
    ("one-peer-exp", {"compression": "int8", "param_as_bucket_view": False}),
    ("complete", {"compression": "int8", "mix_every": 2}),
]


def record_all(rank: int, n: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    TopologyReg.registry["varying"] = Varying
    return [record(rank, topology, 8, **options) for topology, options in cases]


def edge_in(topology: str, t: int, rank: int, h: int) -> Edge:
    """A worker's edge in update t, which is mix t // h of the bucket whose turn it is."""
    TopologyReg.registry["varying"] = Varying
    made = make_topology(topology, local_world_size=1, world_size=N, rank=0)
    return next(edge for edge in made.round(t // h) if rank in edge.ranks)


@pytest.mark.parametrize(
    "cases", [[RECORDED[i] for i in (1, 2, 3, 5)], pytest.param(RECORDED, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_rule_is_called_for_every_round(workers, cases):
    """Also of those in which this worker is idle, and also by the buckets that are small."""
    results = workers(N, record_all, cases)
    for rank, found in enumerate(results):
        for (topology, options), (log, stats, numels) in zip(cases, found, strict=True):
            h = options.get("mix_every", 1)
            came = check_log(log, sum(numels), 8, int(options.get("overlap", True)), h)
            for t, something in came.items():
                if "," in topology and h > 1:
                    continue  # the rounds of a part begin with its first update
                edge = edge_in(topology, t, rank, h)
                meets = len(edge.ranks) > 1 and edge.weight < 1.0
                assert something == {meets} or (options.get("compression") == "int8" and meets), (topology, options, rank, t)
            if h == 1:
                assert set(range(8)) == {number for _, number, *_ in log}
            proposals = [entry for entry in log if entry[0] == "propose"]
            slices = {(there.start, there.stop) for _, _, there, _ in proposals}
            rounds = {(number, there.start) for _, number, there, _ in proposals}
            assert len(proposals) == len(rounds), "one call for each slice and round"
            assert h > 1 or len(proposals) == 8 * len(slices)
            assert stats.rounds == 8


def far_apart(rank: int) -> tuple[list[Any], int, int, int]:
    """int8 cannot tell differences so much larger than it expects; then the blocks are rejected."""
    Recorder.begin()
    model = DecentralizedDataParallel(
        Bag(0), partial(torch.optim.SGD, lr=0.0), topology="one-peer-exp", compression="int8", rule=Recorder()
    )
    shake(model.module, rank, 1000.0)
    for _ in range(6):
        sum(p.sum() for p in model.module.params).backward()
    log, rejected, total = list(Recorder.log), model.stats().rejected, sum(p.numel() for p in model.module.params)
    model.close()
    return log, rejected, total, 6


def uneven(rank: int) -> tuple[list[Any], int]:
    Recorder.begin()
    model = DecentralizedDataParallel(net(), SGD, topology="ring", rule=Recorder(), mix_every=2)
    with model.join():
        for t in range(3 + 4 * rank):
            loss(model, t, rank).backward()
    log, total = list(Recorder.log), sum(p.numel() for p in model.module.parameters())
    assert model.stats().rounds == 7
    model.close()
    return log, total


def skipped(rank: int) -> tuple[list[Any], int]:
    """Some steps are skipped by the scaler, the factor is 0 for a while, and a backward fails half-way."""
    Recorder.begin()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = DecentralizedDataParallel(net(), SGD, topology="ring", rule=Recorder(), scaler=scaler)
    for t in range(7):
        model.set_adaptive_factor(0.0 if t in (2, 3) else 1.0)
        value = loss(model, t, rank) * (float("inf") if t == 4 else 1.0)
        scaler.scale(value).backward()
    log, total = list(Recorder.log), sum(p.numel() for p in model.module.parameters())
    assert (model.stats().updates, model.stats().rounds) == (6, 7)
    model.close()
    return log, total


def in_two_workers(rank: int, n: int) -> Any:
    return far_apart(rank), uneven(rank), skipped(rank)


def test_rounds_without_a_step_or_a_difference_are_rounds(workers):
    for apart, (log, total), (skipping, of_skipping) in workers(2, in_two_workers):
        log_apart, rejected, numbers, rounds = apart
        came = check_log(log_apart, numbers, rounds, 1)
        assert came[0] == {False}
        assert True in came[rounds - 2]
        assert sum(verb == "apply" and not something for verb, _, _, something in log_apart) == rejected > 0
        check_log(log, total, 7, 1, 2)
        came = check_log(skipping, of_skipping, 7, 1)
        # The factor is that at the time of the mix: in updates 2 and 3, those of rounds 1 and 2.
        assert [came[t] for t in range(6)] == [{True}, {False}, {False}, {True}, {True}, {True}]


def test_one_worker_calls_its_rule_in_every_round():
    for options in ({}, {"overlap": False, "mix_every": 2, "bucket_size_in_mb": 1e-6}):
        Recorder.begin()
        model = alone(net(), rule=Recorder(), **options)
        for t in range(5):
            loss(model, t).backward()
        log = list(Recorder.log)
        h = options.get("mix_every", 1)
        came = check_log(log, sum(p.numel() for p in model.parameters()), 5, int(not options), h)
        assert set.union(*came.values()) == {False}
        assert {number for _, number, *_ in log} == set(range(5))
        model.close()


@pytest.mark.parametrize("compression", [None, "int8"])
def test_the_simulator_calls_the_rule_in_every_round(compression):
    TopologyReg.registry["varying"] = Varying
    for topology, h in (("varying", 1), ("complete:3,ring", 2)):
        Recorder.begin()
        cluster = VirtualCluster(
            net(), SGD, topology, N, loss_fn=squares, compression=compression, mix_every=h, rule=Recorder()
        )
        for t in range(7):
            cluster.step(torch.randn(N, 5, 6, generator=torch.Generator().manual_seed(t)))
        check_log(Recorder.log, N * sum(p.numel() for p in net().parameters()), 7, 1, h)


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
