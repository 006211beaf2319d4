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
from decent_dp.replica.snapshot import put_back, settle, take
from decent_dp.rules import Gossip, MomentumTracking, OuterNesterov, Rule
from decent_dp.topo import TopologyReg
from decent_dp.transport import InProcessTransport, run_replicas
from tests.checkpoint_cases import error_of, state
from tests.helpers import SGD, loss, net, values
from tests.law_cases import INNER, Case, Linear, Varying, loss_of, twin, whole
from tests.resuming import MANY, Job, assert_equal, dumb_copy, go_on, run_through
from tests.rule_cases import MomentumGossip, Scaled, settings_of_any_kind

_ONE_AT_A_TIME = threading.Lock()


# -- exact resumption -----------------------------------------------------------------------------------------------------

STEPS = 9
# With mix_every=3, four updates are in the middle of a window, and after six an exchange is in flight.
STOPS = {"every third": (4, 6), "tracking, every third": (4, 6), "int8": (3, 6)}
KINDS: dict[str, dict[str, Any]] = {
    "every update": {"rule": OuterNesterov(momentum=0.6)},
    "every third": {"rule": OuterNesterov(lr=0.5, momentum=0.8), "mix_every": 3},
    "synchronous": {"rule": OuterNesterov(momentum=0.6), "mix_every": 3, "overlap": False},
    "complete": {"rule": OuterNesterov(momentum=0.6), "mix_every": 2, "topology": "complete", "grad_clip_norm": 0.5},
    "int8": {"rule": OuterNesterov(momentum=0.6), "compression": "int8", "mix_every": 2},
    "tracking": {"rule": MomentumTracking(), "compression": "int8"},
    "tracking, every third": {"rule": MomentumTracking(), "mix_every": 3},
    "bfloat16": {"rule": OuterNesterov(momentum=0.5), "compression": "bfloat16", "param_as_bucket_view": False},
    "momentum": {"rule": MomentumGossip(), "mix_every": 2},
    "scaled": {"rule": Scaled(), "compression": "int8"},
    "settings": {"rule": settings_of_any_kind()},
}
OTHER_BUCKETS = [{"bucket_size_in_mb": 1e-6}, {"param_as_bucket_view": False}, {}]


def make(kind: str, seed: int = 0, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(net(seed), SGD, **{"topology": "ring", **KINDS[kind], **options})


def everything(model: DecentralizedDataParallel) -> dict[str, Any]:
    """Everything that training has produced, and the rule's state, bit for bit."""
    return {**state(model), "rule": dumb_copy(take(model.replica)["rule"])}


def uninterrupted(rank: int, n: int, path: str, kinds: Sequence[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        model = make(kind)
        torch.manual_seed(rank)
        for t in range(STEPS):
            if t in STOPS.get(kind, (5,)):
                save(model, f"{path}/{kind} {t}")
            loss(model, t, rank).backward()
        found[kind] = everything(model)
        model.close()
    return found


def resumed(rank: int, n: int, path: str, kinds: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for i, kind in enumerate(kinds):
        for stop in STOPS.get(kind, (5,)):
            model = make(kind, 77 + rank, **OTHER_BUCKETS[(i + stop) % 3])
            load(model, f"{path}/{kind} {stop}")
            assert model.stats().rounds == stop
            for t in range(stop, STEPS):
                if t in STOPS.get(kind, (5,)):  # as the run that continued
                    settle(model.replica)
                loss(model, t, rank).backward()
            found[kind].append(everything(model))
            model.close()
    return found


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    # Random draws of Python and NumPy are not seeded here.
    return {key: value for key, value in found.items() if key not in ("draws", "rule")}


@pytest.mark.parametrize(
    "kinds",
    [["int8", "tracking"], pytest.param([*KINDS], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(workers, tmp_path, kinds):
    whole = workers(2, uninterrupted, str(tmp_path), kinds)
    parts = workers(2, resumed, str(tmp_path), kinds)
    for rank in range(2):
        for kind in kinds:
            for stop, part in zip(STOPS.get(kind, (5,)), parts[rank][kind], strict=True):
                where = f"{kind}, stopped at {stop}, worker {rank}"
                assert_equal(part["rule"], whole[rank][kind]["rule"], where)
                assert comparable(part) == comparable(whole[rank][kind]), where
            saved = whole[rank][kind]["rule"]
            assert saved["kind"] == type(KINDS[kind]["rule"]).__name__
            is_saved = KINDS[kind]["rule"].is_saved
            assert saved["state"].keys() == (dict(net().named_parameters()).keys() if is_saved else set())


@pytest.mark.parametrize(
    ("compression", "stops"),
    [
        ("int8", (3,)),
        *(pytest.param(compression, range(6), marks=pytest.mark.slow) for compression in (None, "int8")),
    ],
)
def test_snapshots_at_every_update(compression, stops):
    """Of threads: before each update, the first one and those of a window included; the same buckets and others."""
    job = Job({"topology": "one-peer-exp", "compression": compression, "rule": OuterNesterov(momentum=0.6), "mix_every": 2})
    through = run_replicas(4, lambda at: run_through(job, at, at.rank, 6, range(6)))
    for stop in stops:
        for options in ({}, MANY) if stop % 2 else ({"param_as_bucket_view": False},):

            def again(at: InProcessTransport, stop: int = stop, options: Any = options) -> Any:
                return go_on(job, at, at.rank, range(stop, 6), through[at.rank][0][stop], range(6), **options)

            for rank, (losses, end) in enumerate(run_replicas(4, again)):
                assert_equal(losses, through[rank][1][stop:], f"stopped at {stop}, worker {rank}")
                assert_equal(end, through[rank][2], f"stopped at {stop}, worker {rank}")


# -- other rules, other topologies -----------------------------------------------------------------------------------------


def other_rules(rank: int, n: int, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, rule in {"outer": OuterNesterov(momentum=0.6), "plain": None}.items():
        model = DecentralizedDataParallel(net(), SGD, topology="ring", rule=rule)
        for t in range(4):
            loss(model, t, rank).backward()
        save(model, f"{path}/{name}")
        found[f"{name} parameters"] = values(model.module)
        found[name] = dumb_copy(take(model.replica)["rule"]["state"])
        model.close()

    for name, kind, rule in (("gossip", "outer", None), ("another", "outer", MomentumGossip())):
        model = DecentralizedDataParallel(net(5), SGD, topology="ring", rule=rule)
        for t in range(3):
            loss(model, t, rank).backward()
        before, rounds = values(model.module), model.stats().rounds
        found[f"refused by {name}"] = error_of(lambda model=model, kind=kind: load(model, f"{path}/{kind}"))
        assert_equal(values(model.module), before)
        assert model.stats().rounds == rounds
        loss(model, 3, rank).backward()  # it continues unchanged
        model.close()

    # Plain gossip has no state: another rule begins with what was saved. The next update mixes nothing.
    for overlap in (True, False):
        model = DecentralizedDataParallel(
            net(5), SGD, topology="ring", rule=OuterNesterov(momentum=0.6), mix_every=50, overlap=overlap
        )
        load(model, f"{path}/plain")
        loss(model, 4, rank).backward()
        found[f"begun, {overlap}"] = dumb_copy(take(model.replica)["rule"]["state"])
        model.close()

    # Another lr, topology or compression: the state is kept, and the exchange that was in flight is dropped.
    for name, options in {
        "lr": {"rule": OuterNesterov(lr=0.1)},
        "topology": {"topology": "complete"},
        "compression": {"compression": "int8"},
        "overlap": {"overlap": False},
        "h": {"mix_every": 4},
    }.items():
        model = DecentralizedDataParallel(
            net(5), SGD, **{"topology": "ring", "rule": OuterNesterov(momentum=0.6), **options, **MANY}
        )
        load(model, f"{path}/outer")
        assert_equal(dumb_copy(take(model.replica)["rule"]["state"]), found["outer"], name)
        assert_equal(values(model.module), found["outer parameters"], name)
        for t in range(4, 7):
            loss(model, t, rank).backward()
        found[f"gone on with another {name}"] = values(model.module)
        model.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])  # of two, a ring is complete
def test_other_rules_and_other_settings(workers, tmp_path, n):
    results = workers(n, other_rules, str(tmp_path))
    for rank, found in enumerate(results):
        for name, kind in (("gossip", "Gossip"), ("another", "MomentumGossip")):
            assert found[f"refused by {name}"] == results[0][f"refused by {name}"]
            error, message = found[f"refused by {name}"]
            assert error == "CheckpointError"
            assert f"the rule was OuterNesterov when this was saved, and is {kind} now" in message
        for overlap in (True, False):
            for name, own in found[f"begun, {overlap}"].items():
                loaded = found["plain parameters"][name]
                assert torch.equal(own["anchor"], loaded), (rank, overlap, name)
                assert not own["momentum"].any()
        for key in ("lr", "topology", "compression", "overlap", "h"):
            assert all(value.isfinite().all() for value in found[f"gone on with another {key}"].values())


# -- another number of workers ---------------------------------------------------------------------------------------------

RESIZED = [(2, "mean"), (2, "spread"), (3, "spread"), (6, "spread"), (4, "mean")]


@pytest.mark.parametrize("resized", [[(6, "spread")], pytest.param(RESIZED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_anchor_and_momentum_are_averaged_for_another_number_of_workers(tmp_path, resized):
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
    for n, how in resized:
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


@pytest.mark.parametrize(("n", "how"), [(3, "spread"), (6, "spread"), pytest.param(4, "mean", marks=pytest.mark.slow)])
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
        (Case("varying", "sgd"), {2: ALL}),
        (Case("ring", "adamw"), {3: UPPER, 6: LOWER}),
        (Case("complete", "sgd", h=3), {2: ALL, 6: UPPER}),  # an exchange in flight, and the middle of a window
        (Case("varying", "adamw", h=2), {3: LOWER, 4: UPPER}),
        (Case("ring", "sgd"), {4: "mean"}),
        (Case("varying", "sgd", h=2), {3: "mean", 6: "mean"}),
        (Case("one-peer-exp", "adamw"), {3: "mean", 6: ALL}),
    )
]


def train_and_load(rank: int, case: Case, loads: dict[int, Any], **options: Any) -> np.ndarray:
    model = DecentralizedDataParallel(
        Linear(),
        INNER[case.inner][0],
        topology=case.topology,
        overlap=case.overlap,
        mix_every=case.h,
        rule=case.rule,
        **options,
    )
    for t in range(case.steps):
        loss_of(model, rank, t).backward()
        if t not in loads:
            continue
        if loads[t] == "mean":
            model.global_avg(will_revert=False)
        else:
            new = torch.from_numpy(to_load(rank, t))
            parts = {"upper": new[UPPER]} if loads[t] == UPPER else {"lower": new[LOWER]}
            model.load_state_dict({"upper": new[UPPER], "lower": new[LOWER]} if loads[t] == ALL else parts, strict=False)
    model.close()
    return whole(model.module)


def load_in_the_middle(rank: int, n: int, cases: list[Any]) -> list[np.ndarray]:
    TopologyReg.registry["varying"] = Varying
    options = [{}, {"bucket_size_in_mb": 1e-6}, {"param_as_bucket_view": False}]
    return [train_and_load(rank, case, loads, **options[i % 3]) for i, (case, loads) in enumerate(cases)]


@pytest.mark.parametrize(
    "cases", [[LOADS[i] for i in (2, 8)], pytest.param(LOADS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_load_resets_the_rules_state(workers, cases):
    """A load of all parameters or of some, and a mean for good: the anchor has the loaded values, and the momentum is zero."""
    results = workers(4, load_in_the_middle, cases)
    for i, (case, loads) in enumerate(cases):
        given = {t: how if how == "mean" else (how, [to_load(rank, t) for rank in range(4)]) for t, how in loads.items()}
        want = twin(case, 4, loads=given)
        for rank in range(4):
            np.testing.assert_allclose(
                results[rank][i], want[rank], rtol=0, atol=1e-12, err_msg=f"{case}, loads {loads}, worker {rank}"
            )


@pytest.mark.parametrize(
    ("overlap", "parts"),
    [(True, True), *(pytest.param(*both, marks=pytest.mark.slow) for both in ((False, False), (True, False), (False, True)))],
)
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
        self.counts = [{edge: count.clone() for edge, count in saved.items()} for saved in by_tensor]


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


@pytest.mark.parametrize(
    "then", [MANY, *(pytest.param(how, marks=pytest.mark.slow) for how in ({}, {"param_as_bucket_view": False}))], ids=str
)
@pytest.mark.parametrize("first", [{}, pytest.param(MANY, marks=pytest.mark.slow)], ids=str)
def test_compression_state_of_edges_is_saved(counting, first, then):
    job = Job({"topology": "varying", "compression": "counting", "rule": OuterNesterov(momentum=0.6), **first})
    stops = (0, 1, 5)
    through = run_replicas(4, lambda at: run_through(job, at, at.rank, 8, stops))
    names = dict(net().named_parameters()).keys()
    for stop in stops:

        def again(at: InProcessTransport, stop: int = stop) -> Any:
            model = job.wrap(100 + at.rank, at, **then)
            put_back(model.replica, through[at.rank][0][stop])
            found = [edge_counts(model)]
            job.train(model, range(stop, 8), at.rank)
            found.append(edge_counts(model))
            model.close()
            return found

        for rank, (restored, end) in enumerate(run_replicas(4, again)):
            assert restored == ({name: expected(rank, stop) for name in names} if expected(rank, stop) else {})
            assert end == {name: expected(rank, 8) for name in names}, (stop, rank)


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
            job.train(model, range(5, 7), at.rank)
            model.close()
            return found

        return work

    run_replicas(4, first)
    for rank, found in enumerate(run_replicas(4, going_on("varying", None))):
        assert found == {name: expected(rank, 5) for name in names}
    for n, how in ((2, "mean"), (3, "spread"), (6, "spread")):
        # The workers of those edges are no more.
        assert run_replicas(n, going_on("complete", how)) == [{}] * n


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
