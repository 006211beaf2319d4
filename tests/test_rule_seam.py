"""The calls of a rule, the coding of its proposals, and the settings that workers must share."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_dp.compression.int8 import Int8
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.rules import Gossip, OuterNesterov, Round, Rule
from decent_dp.rules.rule import check_rule
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Edge, TopologyReg, make_topology
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, loss, net, values
from tests.rule_cases import MomentumGossip, Recorder, Scaled, Versatile, settings_of_any_kind
from tests.test_compression_in_training import Bag, flat, shake
from tests.test_law import Varying

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


def far_apart(rank: int, n: int) -> tuple[list[Any], int, int, int]:
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


def test_a_rejected_block_is_a_round_without_a_difference(workers):
    for log, rejected, total, rounds in workers(2, far_apart):
        came = check_log(log, total, rounds, 1)
        assert came[0] == {False}
        assert True in came[rounds - 2]
        assert sum(verb == "apply" and not something for verb, _, _, something in log) == rejected > 0


def uneven(rank: int, n: int) -> tuple[list[Any], int]:
    Recorder.begin()
    model = DecentralizedDataParallel(net(), SGD, topology="ring", rule=Recorder(), mix_every=2)
    with model.join():
        for t in range(3 + 4 * rank):
            loss(model, t, rank).backward()
    log, total = list(Recorder.log), sum(p.numel() for p in model.module.parameters())
    assert model.stats().rounds == 7
    model.close()
    return log, total


def skipped(rank: int, n: int) -> tuple[list[Any], int]:
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


def without_steps(rank: int, n: int) -> Any:
    return uneven(rank, n), skipped(rank, n)


def test_rounds_without_a_step_are_rounds(workers):
    for (log, total), (skipping, of_skipping) in workers(2, without_steps):
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


# -- how buckets are cut ---------------------------------------------------------------------------------------------------

CUTS: list[dict[str, Any]] = [
    {},
    {"bucket_size_in_mb": 1e-6},
    {"param_as_bucket_view": False},
    {"param_as_bucket_view": False, "bucket_size_in_mb": 1e-6},
]


def cut(rank: int, n: int, every: bool) -> dict[str, list[np.ndarray]]:
    TopologyReg.registry["varying"] = Varying
    found: dict[str, list[np.ndarray]] = {}
    kinds: list[tuple[str, torch.dtype, Rule, int]] = [
        (None, torch.float32, OuterNesterov(momentum=0.6), 1),
        (None, torch.bfloat16, OuterNesterov(lr=0.3, momentum=0.7), 2),
        ("bfloat16", torch.float32, MomentumGossip(), 1),
        ("int8", torch.float32, OuterNesterov(momentum=0.6), 2),
        ("int8", torch.bfloat16, MomentumGossip(), 1),
    ]
    for i, (compression, dtype, rule, h) in enumerate(kinds if every else kinds[1:]):
        for options in CUTS if every else (CUTS[0], CUTS[1 + i % 3]):
            how = {"topology": "varying", "compression": compression, "rule": rule, "mix_every": h, **options}
            model = DecentralizedDataParallel(Bag(0, dtype), SOME, **how)
            for t in range(5 if every else 4):
                draw = torch.Generator().manual_seed(10 * rank + t)
                pulls = [torch.randn(p.shape, generator=draw).to(dtype) for p in model.module.params]
                sum((p * pull).sum() for p, pull in zip(model.module.params, pulls, strict=True)).backward()
            found.setdefault(f"{compression} {dtype}", []).append(flat(model.module))
            model.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True], ids=["in turn", "every way"])
def test_numbers_do_not_depend_on_how_buckets_are_cut(workers, every):
    """In each kind of numbers in one of the other ways, in turn, or in ``every`` one."""
    for found in workers(N, cut, every):
        assert len(found) == (5 if every else 4)
        for kind, (first, *others) in found.items():
            assert len(others) == (3 if every else 1)
            for i, other in enumerate(others):
                np.testing.assert_array_equal(first, other, err_msg=f"{kind}, {i}")


# -- scale hints -----------------------------------------------------------------------------------------------------------


def hinted(rank: int, rule: Rule | None, transport: Any = None, **options: Any) -> tuple[np.ndarray, list[np.ndarray], int]:
    """Parameters in the end, the exponents of each hint, and the rejected blocks."""
    exponents: list[np.ndarray] = []

    def note(self: Int8, values: Any) -> bytes:
        made = hint(self, values)
        exponents.append(np.frombuffer(made, dtype=np.int8))
        return made

    hint = Int8.hint
    model = DecentralizedDataParallel(
        Bag(0), SOME, topology="one-peer-exp", compression="int8", rule=rule, transport=transport, **options
    )
    with mock.patch.object(Int8, "hint", note):
        for t in range(7):
            draw = torch.Generator().manual_seed(10 * rank + t)
            pulls = [torch.randn(p.shape, generator=draw) for p in model.module.params]
            sum((p * pull).sum() for p, pull in zip(model.module.params, pulls, strict=True)).backward()
    found = flat(model.module), exponents, model.stats().rejected
    model.close()
    return found


HINTED: list[dict[str, Any]] = [{"mix_every": 2}, {"overlap": False, "param_as_bucket_view": False}]


def hint_all(rank: int, n: int) -> list[Any]:
    return [[hinted(rank, rule, **options) for rule in (None, Scaled(1024.0), Scaled(2.0**-9))] for options in HINTED]


def test_scale_hints_are_those_of_the_proposal(workers):
    """A power of two times the parameters: the same roundings, steps that are as much larger, and the same numbers."""
    for found in workers(2, hint_all):
        for plain, up, down in found:
            for (parameters, exponents, rejected), shift in ((up, 10), (down, -9)):
                np.testing.assert_array_equal(parameters, plain[0])
                assert rejected == plain[2]
                for own, plainly in zip(exponents, plain[1], strict=True):
                    sized = np.arange(len(own))[plainly > -126 + 10]  # of tensors without elements it is the least there is
                    np.testing.assert_array_equal(own[sized] - plainly[sized].astype(int), shift)
            assert plain[2] < 20, "of more than 60 runs, few were further apart than it was expected in the beginning"


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
    """Records the others' values in its hook."""

    shown: list[list[Tensor]]

    def __init__(self, params: Any) -> None:
        super().__init__([p for _, p in params], lr=0.01)
        self.shown = []

    def pre_average_hook(self, edge: Any, weight: float) -> None:
        self.shown.append([p.comm_buffer.clone() for group in self.param_groups for p in group["params"]])


def test_hooks_of_optimizers_see_the_proposals():
    """On a lossy compression as on a lossless one."""

    def work(transport: Any, compression: str | None) -> Any:
        model = DecentralizedDataParallel(
            Bag(0), Watching, topology="complete", compression=compression, rule=Scaled(1024.0), transport=transport
        )
        for t in range(3):
            sum((p * (transport.rank + t)).sum() for p in model.module.params).backward()
        [optimizer] = model.optimizers
        shown = optimizer.shown
        model.close()
        return shown

    plain, coarse = (run_replicas(2, partial(work, compression=compression)) for compression in (None, "int8"))
    for one, other in zip(plain, coarse, strict=True):
        for round_, (exact, near) in enumerate(zip(one, other, strict=True)):
            for a, b in zip(exact, near, strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=8.0, msg=lambda m, r=round_: f"round {r}: {m}")


# -- agreement -------------------------------------------------------------------------------------------------------------


def wrapped(rank: int, rules: list[Any], **options: Any) -> tuple[str, str]:
    try:
        DecentralizedDataParallel(net(), SGD, rule=rules[rank], **options).close()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


DIFFERENT: list[tuple[list[Any], str]] = [
    ([OuterNesterov(momentum=0.6), OuterNesterov(momentum=0.6), OuterNesterov(lr=0.5)], "0.5"),
    ([OuterNesterov(momentum=0.6), OuterNesterov(momentum=0.5), OuterNesterov(momentum=0.6)], "0.5"),
    ([OuterNesterov(momentum=0.6), OuterNesterov(momentum=0.6), None], "Gossip"),
    ([None, OuterNesterov(momentum=0.6), OuterNesterov(momentum=0.6)], "OuterNesterov"),
    ([Gossip(), MomentumGossip(0.7), Gossip()], "MomentumGossip"),
    ([Versatile(nested=[1]), Versatile(nested=[1]), Versatile(nested=[2])], "nested"),
]


def disagree(rank: int, n: int) -> list[tuple[str, str]]:
    return [wrapped(rank, rules) for rules, _ in DIFFERENT]


def test_all_workers_refuse_different_rules(workers):
    first, *others = workers(3, disagree)
    assert others == [first, first]
    for (kind, message), (rules, part) in zip(first, DIFFERENT, strict=True):
        assert kind == "DisagreementError", rules
        assert "the settings differ between workers: rule is " in message, rules
        assert part in message, rules


def agree(rank: int, n: int) -> list[tuple[str, str]]:
    rules = [settings_of_any_kind(), OuterNesterov(lr=1), OuterNesterov(lr=1.0), Gossip(), None]
    pairs = [(rules[0], settings_of_any_kind()), (rules[1], rules[2]), (rules[3], rules[4])]
    return [wrapped(rank, list(pair)) for pair in pairs]


def settings_behind_rules(rank: int, n: int) -> list[tuple[str, str]]:
    """A rule's settings may have any names: they hide nothing in which workers differ."""
    rule = Versatile()
    return [
        wrapped(rank, [rule, rule], overlap=rank == 0),
        wrapped(rank, [rule, rule], mix_every=1 + rank),
        wrapped(rank, [rule, rule], compression=("int8", None)[rank]),
    ]


def agree_and_differ(rank: int, n: int) -> Any:
    return agree(rank, n), settings_behind_rules(rank, n)


def test_equal_rules_are_agreed_on_and_hide_no_other_difference(workers):
    (agreed, one), (also, other) = workers(2, agree_and_differ)
    assert agreed == also == [("", "")] * 3
    assert one == other
    for (kind, message), name in zip(one, ("overlap", "mix_every", "compression"), strict=True):
        assert kind == "DisagreementError", name
        assert f"the settings differ between workers: {name} is " in message


def test_objects_that_are_no_rule_are_refused(workers):
    for rules, kind, message in WRONG:
        want = (kind, message)
        with pytest.raises(TypeError) as caught:
            alone(net(), rule=rules)
        assert (type(caught.value).__name__, str(caught.value)) == want
        with pytest.raises(TypeError) as caught:
            VirtualCluster(net(), SGD, "ring", 4, rule=rules)
        assert str(caught.value) == message
        with pytest.raises(TypeError) as caught:
            check_rule(rules)
        assert str(caught.value) == message
    # Only one worker has it: all raise the same error.
    for found in workers(2, one_is_wrong):
        assert found == [("TypeError", f"worker 1: {message}") for _, _, message in WRONG]


class Unsettled(Rule):
    """Has a setting that cannot be compared."""

    def __init__(self) -> None:
        self.size = torch.ones(2)

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        return

    def __repr__(self) -> str:
        return "Unsettled()"


_NO_RULE = "rule must be a decent_dp.rules.Rule such as OuterNesterov(lr=0.7), or None for plain gossip, got "
WRONG: list[tuple[Any, str, str]] = [
    (
        OuterNesterov,
        "TypeError",
        "rule must be an object, and OuterNesterov is a class: pass rule=OuterNesterov(...)",
    ),
    ("x", "TypeError", _NO_RULE + "'x'"),
    (0.7, "TypeError", _NO_RULE + "0.7"),
    (
        Unsettled(),
        "TypeError",
        "the settings of rule Unsettled() must be numbers, strings and lists of them: Object of type Tensor is not JSON "
        "serializable",
    ),
]


def one_is_wrong(rank: int, n: int) -> list[tuple[str, str]]:
    return [wrapped(rank, [None, rule]) for rule, _, _ in WRONG]


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


def test_the_documented_rule_with_one_worker():
    """It has nothing to mix: plain training."""
    ours, theirs = alone(net(), rule=MomentumGossip()), alone(net())
    for t in range(4):
        loss(ours, t).backward()
        loss(theirs, t).backward()
    for name, value in values(ours.module).items():
        assert torch.equal(value, values(theirs.module)[name]), name
