"""The state of a rule and of a compression in saves, loads and other numbers of workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decent_dp._compressions import CODES
from decent_dp.checkpoint import load, save
from decent_dp.compression import COMPRESSIONS, Lossless, MessageId
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import settle, take
from decent_dp.rules import Gossip, MomentumTracking, OuterNesterov, Rule
from decent_dp.topo import TopologyReg
from decent_dp.transport import InProcessTransport, run_replicas
from tests.checkpoint_cases import error_of
from tests.helpers import SGD, loss, net, values
from tests.law_cases import INNER, Case, Linear, Varying, loss_of, twin, whole
from tests.resuming import MANY, PAIRS, Job, assert_equal, dumb_copy, go_on, run_through, trained
from tests.rule_cases import MomentumGossip, Scaled, settings_of_any_kind

_ONE_AT_A_TIME = threading.Lock()


# -- exact resumption -----------------------------------------------------------------------------------------------------

STEPS = 9
# The updates before which a run stops: with mix_every=3, four are in the middle of a window, and after six an exchange is in
# flight. Before the first one, and within a window of two, in "complete".
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "every third": ({"rule": OuterNesterov(lr=0.5, momentum=0.8), "mix_every": 3}, (4, 6)),
    "synchronous": ({"rule": OuterNesterov(momentum=0.6), "mix_every": 3, "overlap": False}, (5,)),
    "complete": (
        {"rule": OuterNesterov(momentum=0.6), "mix_every": 2, "topology": "complete", "grad_clip_norm": 0.5},
        (0, 1, 4),
    ),
    "int8": ({"rule": OuterNesterov(momentum=0.6), "compression": "int8", "mix_every": 2}, (3, 6)),
    "tracking, int8": ({"rule": MomentumTracking(), "compression": "int8"}, (5,)),
    "tracking, every third": ({"rule": MomentumTracking(), "mix_every": 3}, (4, 6)),
    "momentum": ({"rule": MomentumGossip(), "mix_every": 2}, (5,)),
    "scaled": ({"rule": Scaled(), "compression": "int8"}, (5,)),
    "settings": ({"rule": settings_of_any_kind()}, (5,)),
}
OTHER_BUCKETS: list[dict[str, Any]] = [MANY, {"param_as_bucket_view": False}, {}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(kind):
    """With the rule's state, in other buckets."""
    options, stops = KINDS[kind]
    job = Job({"topology": "ring", **options})
    through = run_replicas(2, lambda at: run_through(job, at, at.rank, STEPS, stops))
    for stop in stops:

        def again(at: InProcessTransport, stop: int = stop) -> Any:
            later = [t for t in stops if t > stop]  # as the run that continued
            return go_on(job, at, at.rank, range(stop, STEPS), through[at.rank][0][stop], later, **OTHER_BUCKETS[stop % 3])

        for (snapshots, losses, end), (losses_again, end_again) in zip(through, run_replicas(2, again), strict=True):
            assert_equal(losses_again, losses[stop:], f"stopped at {stop}")
            assert_equal(end_again, end, f"stopped at {stop}")
            rule = snapshots[stop]["rule"]
            assert rule["kind"] == type(options["rule"]).__name__
            assert bool(rule["state"]) == (options["rule"].is_saved and stop > 0)


# -- other rules, other topologies -----------------------------------------------------------------------------------------


def test_other_rules_and_other_settings(tmp_path):
    """The state of another rule is refused, plain gossip has none, and with other settings it is kept."""
    outer = {"topology": "ring", "rule": OuterNesterov(momentum=0.6)}

    def first(options: dict[str, Any], at: InProcessTransport) -> Any:
        model = trained(Job({"topology": "ring"}), 4, at, **options)
        save(model, tmp_path / ("outer" if options else "plain"))
        found = values(model.module), dumb_copy(take(model.replica)["rule"]["state"])
        model.close()
        return found

    saved = run_replicas(3, partial(first, outer))
    plain = run_replicas(3, partial(first, {}))

    def refused(rule: Any, at: InProcessTransport) -> Any:
        model = trained(Job({"topology": "ring"}), 3, at, rule=rule)
        before = values(model.module)
        found = error_of(lambda: load(model, tmp_path / "outer"))
        assert_equal(values(model.module), before)
        assert model.stats().rounds == 3
        loss(model, 3, at.rank).backward()  # it continues unchanged
        model.close()
        return found

    for rule, name in ((None, "Gossip"), (MomentumGossip(), "MomentumGossip")):
        for kind, text in run_replicas(3, partial(refused, rule)):
            assert kind == "CheckpointError"
            assert f"the rule was OuterNesterov when this was saved, and is {name} now" in text

    def going_on(path: str, options: dict[str, Any], at: InProcessTransport) -> Any:
        model = PAIRS.wrap(5, at, **{**outer, **options})
        load(model, tmp_path / path)
        found = values(model.module), dumb_copy(take(model.replica)["rule"]["state"])
        loss(model, 4, at.rank).backward()
        begun = dumb_copy(take(model.replica)["rule"]["state"])
        model.close()
        return found, begun

    # The rule begins with what was saved. The update that follows mixes nothing.
    for overlap in (True, False):
        for ((own, _), begun), (before, _) in zip(
            run_replicas(3, partial(going_on, "plain", {"mix_every": 50, "overlap": overlap})), plain, strict=True
        ):
            assert_equal(own, before)
            for name, value in before.items():
                assert torch.equal(begun[name]["anchor"], value)
                assert not begun[name]["momentum"].any()
    for options in ({"rule": OuterNesterov(lr=0.1)}, {"topology": "complete"}, {"compression": "int8"}, {"mix_every": 4}):
        found = run_replicas(3, partial(going_on, "outer", {**MANY, **options}))
        assert_equal([own for own, _ in found], saved, str(options))


# -- another number of workers ---------------------------------------------------------------------------------------------


def test_anchor_and_momentum_are_averaged_for_another_number_of_workers(tmp_path):
    job = Job({"topology": "ring", "rule": OuterNesterov(momentum=0.6), "mix_every": 2})

    def save_some(at: InProcessTransport) -> Any:
        model = job.wrap(0, at)
        job.train(model, range(7), at.rank)
        save(model, tmp_path)
        found = dumb_copy(take(model.replica)["rule"])
        model.close()
        return found

    def load_some(at: InProcessTransport, how: str) -> Any:
        model = job.wrap(5, at, topology="complete", **MANY)
        load(model, tmp_path, resize=how)
        found = dumb_copy(take(model.replica)["rule"])
        job.train(model, range(7, 10), at.rank)
        after = dumb_copy(take(model.replica)["rule"])
        model.close()
        return found, after

    saved = run_replicas(4, save_some)
    for n, how in ((3, "spread"), (6, "spread"), (4, "mean")):
        for rank, (found, after) in enumerate(run_replicas(n, partial(load_some, how=how))):
            group = range(4) if how == "mean" else [j for j in range(4) if j * n // 4 == rank] if n < 4 else [rank * 4 // n]
            assert found["kind"] == "OuterNesterov"
            for name, own in found["state"].items():
                assert own.keys() == {"anchor", "momentum", "proposal"}
                for key in ("anchor", "momentum"):
                    mean = torch.stack([saved[j]["state"][name][key].double() for j in group]).mean(0).float()
                    assert torch.equal(own[key], mean), (n, how, rank, name, key)
            assert not torch.equal(after["state"]["0.weight"]["anchor"], found["state"]["0.weight"]["anchor"])
    momenta = [one["state"]["0.weight"]["momentum"] for one in saved]
    assert not torch.equal(momenta[0], momenta[1]), "workers must differ, or a mean would prove nothing"


def momenta_of(model: DecentralizedDataParallel) -> tuple[Tensor, Tensor]:
    """The tracked momenta, and this worker's own."""
    states = [state for optimizer in model.optimizers for state in optimizer.state.values()]
    tracked, own = (torch.cat([state[key].flatten() for state in states]) for key in ("momentum_buffer", "own_momentum"))
    return tracked.double(), own.double()


@pytest.mark.parametrize(("n", "how"), [(3, "spread"), (6, "spread")])
def test_tracked_momenta_have_the_mean_of_the_own_ones_with_another_number_of_workers(tmp_path, n, how):
    """Groups of unequal sizes: what mixes had changed does not add up to zero over them."""
    job = Job({"topology": "base-2", "rule": MomentumTracking()})

    def save_some(at: InProcessTransport) -> Any:
        model = job.wrap(0, at)
        job.train(model, range(7), at.rank)
        save(model, tmp_path)
        found = momenta_of(model)
        model.close()
        return found

    def load_some(at: InProcessTransport) -> Any:
        model = job.wrap(5, at)
        load(model, tmp_path, resize=how)
        tracked, own = momenta_of(model)
        assert torch.equal(tracked, own)
        job.train(model, range(7, 10), at.rank)
        settle(model.replica)
        found = momenta_of(model)
        model.close()
        return found

    saved, after = (
        [torch.stack(each) for each in zip(*run_replicas(*run), strict=True)] for run in ((4, save_some), (n, load_some))
    )
    for tracked, own in (saved, after):
        torch.testing.assert_close(tracked.mean(0), own.mean(0), rtol=0, atol=1e-6)
        assert (tracked - own).abs().max() > 0.01


# -- a load in the middle --------------------------------------------------------------------------------------------------


def to_load(rank: int, t: int) -> np.ndarray:
    return np.random.default_rng([11, rank, t]).normal(size=(5, 3))


ALL, UPPER, LOWER = slice(0, 5), slice(0, 2), slice(2, 5)
LOADS: list[tuple[Case, dict[int, Any]]] = [
    (replace(case, overlap=overlap, steps=11, rule=OuterNesterov(momentum=0.6)), loads)
    for overlap in (True, False)
    for case, loads in (
        (Case("ring", "adamw"), {3: UPPER, 6: LOWER}),
        (Case("complete", "sgd", h=3), {2: ALL, 6: UPPER}),  # an exchange in flight, and the middle of a window
        (Case("varying", "sgd", h=2), {3: "mean", 6: "mean"}),
    )
]


def train_and_load(case: Case, loads: dict[int, Any], options: dict[str, Any], at: InProcessTransport) -> np.ndarray:
    how = {"topology": case.topology, "overlap": case.overlap, "mix_every": case.h, "rule": case.rule, **options}
    model = DecentralizedDataParallel(Linear(), INNER[case.inner][0], transport=at, **how)
    for t in range(case.steps):
        loss_of(model, at.rank, t).backward()
        if loads.get(t) == "mean":
            model.global_avg(will_revert=False)
        elif t in loads:
            new = torch.from_numpy(to_load(at.rank, t))
            parts = {"upper": new[UPPER], "lower": new[LOWER]}
            names = {"upper": [UPPER, ALL], "lower": [LOWER, ALL]}
            model.load_state_dict({name: part for name, part in parts.items() if loads[t] in names[name]}, strict=False)
    model.close()
    return whole(model.module)


@pytest.mark.parametrize("number", range(len(LOADS)))
def test_a_load_resets_the_rules_state(number, monkeypatch):
    """A load of all parameters or of some, and a mean for good: the anchor has the loaded values, and the momentum is zero."""
    monkeypatch.setitem(TopologyReg.registry, "varying", Varying)
    case, loads = LOADS[number]
    found = run_replicas(4, partial(train_and_load, case, loads, OTHER_BUCKETS[number % 3]))
    given = {t: how if how == "mean" else (how, [to_load(rank, t) for rank in range(4)]) for t, how in loads.items()}
    np.testing.assert_allclose(np.stack(found), twin(case, 4, loads=given), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("overlap", "parts"), [(True, True), (False, False)])
def test_a_load_and_then_a_save(overlap, parts):
    """A save between a load and the next update resumes like the run that was not stopped."""
    job = Job({"topology": "ring", "rule": OuterNesterov(momentum=0.6), "mix_every": 2, "overlap": overlap})
    other = values(net(9))
    if parts:
        other = {name: value for name, value in other.items() if name.startswith("2.")}

    def through(at: InProcessTransport) -> Any:
        model = job.wrap(0, at)
        job.train(model, range(4), at.rank)
        model.load_state_dict(other, strict=False)
        snapshot = dumb_copy(take(model.replica))
        job.train(model, range(4, 8), at.rank)
        end = dumb_copy(take(model.replica))
        model.close()
        return snapshot, end

    whole = run_replicas(3, through)

    def again(at: InProcessTransport) -> Any:
        return go_on(job, at, at.rank, range(4, 8), whole[at.rank][0], **MANY)[1]

    for rank, end in enumerate(run_replicas(3, again)):
        assert_equal(end, whole[rank][1], f"worker {rank}")


# -- what a compression learns of edges ------------------------------------------------------------------------------------


class Counting(Lossless):
    """Counts, for each edge and parameter, how often it has encoded for it."""

    name = "counting"
    by_parameter = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts: list[dict[str, Tensor]] = [{} for _ in self.tensors]

    def begin(self, edge: tuple[int, ...], rank: int, meeting: int) -> None:
        assert rank in edge
        assert list(edge) == sorted(edge)
        self.edge = "-".join(map(str, edge))

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        for counts in self.counts:
            counts.setdefault(self.edge, torch.zeros(1, dtype=torch.int64)).add_(1)
        yield from super().encode(values, out, message_id, hints)

    def state(self) -> list[dict[str, Tensor]]:
        return self.counts

    def load_state(self, by_tensor: Sequence[Mapping[str, Tensor]]) -> None:
        self.counts = [{edge: count.clone() for edge, count in saved.items() if edge != "known"} for saved in by_tensor]


@pytest.fixture
def counting(monkeypatch) -> None:
    monkeypatch.setitem(COMPRESSIONS, Counting.name, Counting)
    monkeypatch.setattr("decent_dp._compressions.CODES", {**CODES, Counting.name: 4})
    monkeypatch.setitem(TopologyReg.registry, "varying", Varying)


def edge_counts(model: DecentralizedDataParallel) -> dict[str, dict[str, int]]:
    return {name: {edge: int(n) for edge, n in own.items()} for name, own in take(model.replica)["compression"].items()}


def expected(rank: int, rounds: int) -> dict[str, int]:
    counts: dict[str, int] = {}
    for t in range(rounds):
        edge = next(edge for edge in Varying(1, world_size=4, rank=0).round(t) if rank in edge.ranks)
        if len(edge.ranks) > 1:
            key = "-".join(map(str, sorted(edge.ranks)))
            counts[key] = counts.get(key, 0) + 1
    return counts


def test_compression_state_is_in_files_and_ends_with_the_edges(counting, tmp_path):
    job = Job({"topology": "varying", "compression": "counting"})
    names = dict(net().named_parameters()).keys()

    def first(at: InProcessTransport) -> None:
        model = job.wrap(0, at)
        job.train(model, range(5), at.rank)
        save(model, tmp_path)
        model.close()

    def going_on(topology: str, resize: str | None) -> Callable[[InProcessTransport], Any]:
        def work(at: InProcessTransport) -> Any:
            model = job.wrap(1 + at.rank, at, topology=topology, **MANY)
            load(model, Path(tmp_path), resize=resize)
            found = edge_counts(model)
            job.train(model, range(5, 8), at.rank)
            found = found, edge_counts(model)
            model.close()
            return found

        return work

    run_replicas(4, first)
    for rank, found in enumerate(run_replicas(4, going_on("varying", None))):
        assert found == tuple({name: expected(rank, t) for name in names} for t in (5, 8))
    for n, how in ((2, "mean"), (6, "spread")):
        # The workers of those edges are no more.
        assert [found for found, _ in run_replicas(n, going_on("complete", how))] == [{}] * n


def test_what_compressions_save():
    def work(at: InProcessTransport) -> Any:
        found = []
        for compression in (None, "bfloat16", "int8"):
            rule: Rule = Gossip()
            with _ONE_AT_A_TIME:
                inner = net()
            model = DecentralizedDataParallel(inner, SGD, topology="ring", compression=compression, rule=rule, transport=at)
            loss(model, 0, at.rank).backward()
            saved = take(model.replica)
            found.append(({key for own in saved["compression"].values() for key in own}, saved["rule"]))
            model.close()
        return found

    rule = {"kind": "Gossip", "state": {}}
    assert run_replicas(2, work) == [[(set(), rule), (set(), rule), ({"ranges"}, rule)]] * 2
