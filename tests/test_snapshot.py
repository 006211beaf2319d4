"""A run that is stopped after a save and resumes equals the one that continues after it, bit for bit."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decent_dp.compression import COMPRESSIONS
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import put_back, take
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import SGD, values
from tests.resuming import (
    JOBS,
    MANY,
    PAIRS,
    Branches,
    Job,
    assert_equal,
    dumb_copy,
    go_on,
    run_through,
    step_in_windows,
    trained,
)

TOTAL = 7


def stopped_everywhere(job: Job, n: int, stops: list[int], total: int = TOTAL, **then: Any) -> None:
    """Stops a run at its saves before ``stops``, with all that belongs to it thrown away, and compares with the one that goes
    through. ``then`` are options in which the second run differs."""
    through = run_replicas(n, lambda at: run_through(job, at, at.rank, total, stops))
    for stop in stops:

        def again(at: InProcessTransport, stop: int = stop) -> Any:
            return go_on(job, at, at.rank, range(stop, total), through[at.rank][0][stop], stops, **then)

        for rank, (losses, end) in enumerate(run_replicas(n, again)):
            where = f"stopped at {stop}, worker {rank}"
            assert_equal(losses, through[rank][1][stop:], where)
            assert_equal(end, through[rank][2], where)


# -- bit for bit -----------------------------------------------------------------------------------------------------------


WAYS = [(compression, overlap) for compression in COMPRESSIONS for overlap in (True, False)]


def of_four(topology: str, compression: str | None, overlap: bool) -> Job:
    return Job({"topology": topology, "compression": compression, "overlap": overlap, "_local_world_size": 2})


@pytest.mark.parametrize(("number", "way"), list(enumerate(WAYS)))
def test_every_wire(number, way):
    """Every second one with edges of two workers, the others with one edge of all."""
    topology = ("alternating-exp-ring", "complete")[(number + number // 2) % 2]
    stopped_everywhere(of_four(topology, *way), 4, [2 + number % 3], TOTAL - 1)


# Those that were found to be the hardest.
HARD = ["zoo, clipped", "scaled windows", "reentrant", "pending", "sparse momentum"]


@pytest.mark.parametrize("name", [name if name in HARD else pytest.param(name, marks=pytest.mark.slow) for name in JOBS])
def test_every_kind_of_job(name):
    job = JOBS[name]
    stopped_everywhere(replace(job, options={"topology": "one-peer-exp", "compression": "int8", **job.options}), 2, [1, 4])


@pytest.mark.parametrize("name", ["windows", "pending", "zoo"])
def test_a_second_save_at_once_changes_nothing(name):
    job = replace(JOBS[name], options={**JOBS[name].options, "topology": "one-peer-exp", "compression": "int8"})

    def through(at: InProcessTransport, times: int) -> Any:
        model = job.wrap(0, at)
        for t in range(TOTAL):
            for _ in range(times):
                snapshot = dumb_copy(take(model.replica))
            job.train(model, [t], at.rank)
        return snapshot, dumb_copy(take(model.replica))

    assert_equal(*(run_replicas(2, partial(through, times=times)) for times in (1, 2)))


SETTLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"compression": "int8"},
    "low-rank": {"compression": "low-rank:1"},
    "group": {"topology": "complete"},
    "mix_every": {"mix_every": 3},
    "buckets": MANY,
}


@pytest.mark.parametrize("name", SETTLING)
def test_a_save_mixes_what_is_in_flight(name):
    """The replicas move towards each other, and their mean stays."""
    job = Job({"topology": "ring", **SETTLING[name]})

    def body(at: InProcessTransport) -> Any:
        model = trained(job, 4, at)
        before = values(model.module)
        snapshot = dumb_copy(take(model.replica))
        assert all(bucket.in_flight is None for bucket in model.replica.engine.buckets)
        assert_equal(snapshot["parameters"], values(model.module))
        return before, snapshot["parameters"]

    found = run_replicas(2, body)
    for key in found[0][0]:
        old, new = ([pair[side][key].double() for pair in found] for side in (0, 1))
        torch.testing.assert_close(sum(new), sum(old), rtol=0, atol=1e-6)
    old, new = (
        sum(float((pairs[0][key] - pairs[1][key]).square().sum()) for key in pairs[0])
        for pairs in ([pair[side] for pair in found] for side in (0, 1))
    )
    assert new < (0.01 if name in ("plain", "group", "buckets") else 0.9) * old


def test_a_save_asks_the_optimizers_hook():
    """As before each mix of its bucket."""

    def body(at: InProcessTransport) -> None:
        model = trained(replace(JOBS["hooked"], options={"topology": "one-peer-exp", **MANY}), 3, at)

        def far() -> Any:
            return dumb_copy([state["far"] for one in model.optimizers for state in one.state.values()])

        before = far()
        take(model.replica)
        assert before
        assert not any(torch.equal(old, new) for old, new in zip(before, far(), strict=True))

    run_replicas(2, body)


def test_a_save_of_one_worker_alone_hangs_nobody():
    """It mixes earlier than its neighbour, and the mean of both stays."""

    def body(at: InProcessTransport, saves: bool) -> Any:
        model = trained(PAIRS, 3, at)
        if saves and at.rank:
            take(model.replica)
        for param in model.module.parameters():
            param.grad = torch.full_like(param, 0.1 * at.rank)
        model.update()
        take(model.replica)
        return values(model.module)

    plain, alone = (run_replicas(2, partial(body, saves=saves)) for saves in (False, True))
    for key in plain[0]:
        torch.testing.assert_close(alone[0][key] + alone[1][key], plain[0][key] + plain[1][key], rtol=0, atol=1e-6)


def test_inside_averaged_the_replicas_own_values_are_mixed():
    """The mean stays where it is, and after the with-block each replica is the one that a save outside would have left."""

    def body(at: InProcessTransport, inside: bool) -> Any:
        model = trained(Job({"topology": "one-peer-exp", "compression": "int8"}), 3, at)
        if inside:
            with model.averaged(), model.averaged():
                mean = values(model.module)
                snapshot = dumb_copy(take(model.replica))
                assert_equal(mean, values(model.module))
        else:
            snapshot = dumb_copy(take(model.replica))
        assert_equal(snapshot["parameters"], values(model.module))
        return snapshot

    assert_equal(*(run_replicas(2, partial(body, inside=inside)) for inside in (False, True)))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_alone_and_with_a_worker_that_sits_a_round_out(compression):
    job = Job({"topology": "ring", "compression": compression})
    stopped_everywhere(job, 1, [0, 1, 2], 4)
    stopped_everywhere(job, 3, [0, 1, 2] if compression == "int8" else [1], 4)


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bucket_size_in_mb": 25}, MANY),
    (MANY, {"bucket_size_in_mb": 1e-3}),
    ({"bucket_size_in_mb": 1e-3}, {"bucket_size_in_mb": 25, "param_as_bucket_view": False}),
    ({"param_as_bucket_view": False}, {"param_as_bucket_view": True, "bucket_size_in_mb": 1e-3}),
]


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize("name", ["windows", pytest.param("zoo", marks=pytest.mark.slow)])
def test_other_buckets(name, layout):
    before, after = LAYOUTS[layout]
    for number, compression in enumerate(["int8", *list(COMPRESSIONS)[layout : layout + 1]]):
        job = JOBS[name]
        job = replace(job, options={**job.options, "topology": "one-peer-exp", "compression": compression, **before})
        stopped_everywhere(job, 2, [(1, 4)[(number + layout) % 2]], **after)


def test_another_order_of_first_use():
    """The order that counts is the saved one: buckets are made from it before the first backward."""
    made: list[list[str]] = []

    def job(order: tuple[int, ...], names: list[list[str]] | None = None) -> Job:
        def noting(params: list[Any]) -> torch.optim.Optimizer:
            if names is not None:
                names.append([name for name, _ in params])
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)

        options = {"topology": "one-peer-exp", "compression": "int8", "bucket_size_in_mb": 1e-4}
        return Job(options, model=partial(Branches, order=order), optim_fn=noting)

    def body(at: InProcessTransport, job: Job, saved: Any = None) -> Any:
        if saved is None:
            return run_through(job, at, at.rank, TOTAL, [4])
        return go_on(job, at, at.rank, range(4, TOTAL), saved[at.rank])

    through = run_replicas(1, partial(body, job=job((0, 1, 2, 3), made)))
    first = list(made)
    made.clear()
    run_replicas(1, partial(body, job=job((3, 1, 0, 2), made)))
    assert made != first, "the order of first use does not show"
    made.clear()
    run_replicas(1, partial(body, job=job((3, 1, 0, 2), made), saved=[through[0][0][4]]))
    assert made == first

    through = run_replicas(4, partial(body, job=job((0, 1, 2, 3))))
    saved = [snapshots[4] for snapshots, *_ in through]
    found = run_replicas(4, partial(body, job=job((3, 1, 0, 2)), saved=saved))
    for (_, losses, end), (others, other) in zip(through, found, strict=True):
        assert_equal(others, losses[4:])
        assert_equal(other, end)


def test_states_and_gradients_lie_as_their_parameters_do():
    """A file holds no strides, and sums depend on the order of the memory."""
    job = replace(JOBS["zoo"], optim_fn=SGD, step=step_in_windows)
    [(_, _, saved)] = run_replicas(1, lambda at: run_through(job, at, 0, 5))
    model = job.wrap(3, InProcessTransport())
    put_back(model.replica, saved)
    states = {id(param): state for optimizer in model.optimizers for param, state in optimizer.state.items()}
    strides = {}
    for name, param in model.module.named_parameters():
        if param.grad is not None and "momentum_buffer" in states[id(param)]:
            strides[name] = param.stride()
            assert param.stride() == param.grad.stride() == states[id(param)]["momentum_buffer"].stride(), name
    assert strides["turned"] == (1, 8)
    assert strides["conv.weight"] == (8, 1, 4, 2)


# -- back in a run that goes on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "overlap"),
    [way if way in (("int8", True), (None, False)) else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS],
)
def test_back_to_an_earlier_update(compression, overlap):
    """In the same wrappers, over the same connections, several times and over different data in between."""
    job = replace(JOBS["windows"], options={"topology": "alternating-exp-ring", "compression": compression, "overlap": overlap})
    stops = [0, 1, 4, 5]
    through = run_replicas(4, lambda at: run_through(job, at, at.rank, TOTAL, stops))

    def body(at: InProcessTransport) -> list[Any]:
        model = job.wrap(5, at)
        lists = model.optimizers, model._lr_schedulers
        ends = []
        for number, stop in enumerate((4, 1, 5, 0, 4)):
            if number:
                model.replica.engine.buckets[0].compression.rejected += 1000
            put_back(model.replica, through[at.rank][0][stop])
            losses = []
            for t in range(stop, TOTAL):
                if t in stops:
                    take(model.replica)
                losses += job.train(model, [t], at.rank)
            ends.append((losses, take(model.replica)))
            assert (model.optimizers, model._lr_schedulers) == lists
            assert model.optimizers is lists[0]
            assert [unit.optimizer for unit in model.replica.layout.units] == model.optimizers
            assert_equal(ends[-1], (through[at.rank][1][stop:], through[at.rank][2]), f"back to {stop}")
            job.train(model, [50, 51, 53, 55, 59], at.rank)
            at.control.gather(None)
            under_way = sum(key[0] == "exchange" for key in at._hub._values)  # type: ignore[index]
            at.control.gather(None)
            assert under_way <= 2, "what was under way before a load was not finished"
        assert 4000 <= model.stats().rejected < 5000
        return ends

    run_replicas(4, body)


def test_a_hint_from_before_a_load_is_not_used(monkeypatch):
    """Replicas of another, wilder run at the same round: a quick worker must wait for the new hint of a slow one."""
    calm = Job({"topology": "one-peer-exp", "compression": "int8"})
    through = run_replicas(2, lambda at: run_through(calm, at, at.rank, TOTAL, [3]))

    def body(at: InProcessTransport) -> Any:
        model = calm.wrap(0, at)
        for t in range(3):
            for param in model.module.parameters():
                param.grad = torch.full_like(param, 10.0 * (at.rank + t))
            model.update()
        if at.rank:
            slow(model)
        put_back(model.replica, through[at.rank][0][3])
        losses = calm.train(model, range(3, TOTAL), at.rank)
        return losses, take(model.replica)

    def slow(model: DecentralizedDataParallel) -> None:
        transport = model.replica.agreed.peers
        start = transport.start

        def late(*args: Any) -> Any:
            time.sleep(0.05)
            return start(*args)

        monkeypatch.setattr(transport, "start", late)

    for (losses, end), (_, all_losses, reference) in zip(run_replicas(2, body), through, strict=True):
        assert_equal(losses, all_losses[3:])
        assert_equal(end, reference)
