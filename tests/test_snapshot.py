"""A run that is stopped and goes on equals the one that is not, bit for bit; and a snapshot that does not fit changes
nothing."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decent_dp.compression import COMPRESSIONS
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import put_back, take
from decent_dp.topo import TopologyReg
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import SGD
from tests.resuming import JOBS, MANY, Branches, Job, assert_equal, go_on, run_through, step_in_windows

TOTAL = 7


def stopped_everywhere(job: Job, n: int, stops: list[int], total: int = TOTAL, **then: Any) -> None:
    """Stops a run before each of ``stops``, with all that belongs to it thrown away, and compares with the one that goes
    through. ``then`` are options in which the second run differs."""
    through = run_replicas(n, lambda at: run_through(job, at, at.rank, total, stops))
    for stop in stops:

        def again(at: InProcessTransport, stop: int = stop) -> Any:
            return go_on(job, at, at.rank, range(stop, total), through[at.rank][0][stop], **then)

        for rank, (losses, end) in enumerate(run_replicas(n, again)):
            where = f"stopped at {stop}, worker {rank}"
            assert_equal(losses, through[rank][1][stop:], where)
            assert_equal(end, through[rank][2], where)


# -- bit for bit -----------------------------------------------------------------------------------------------------------


# The others keep nothing between rounds.
INT8_AND_OTHERS = pytest.mark.parametrize(
    "compression", ["int8", *(pytest.param(other, marks=pytest.mark.slow) for other in COMPRESSIONS if other != "int8")]
)
WAYS = [(compression, overlap) for compression in COMPRESSIONS for overlap in (True, False)]


def of_four(topology: str, compression: str | None, overlap: bool) -> Job:
    return Job({"topology": topology, "compression": compression, "overlap": overlap, "_local_world_size": 2})


@pytest.mark.parametrize(("number", "way"), list(enumerate(WAYS)))
def test_every_wire(number, way):
    """Every second one with edges of two workers, the others with one edge of all."""
    topology = ("alternating-exp-ring", "complete")[(number + number // 2) % 2]
    stopped_everywhere(of_four(topology, *way), 4, [2 + number % 3], TOTAL - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "n"), [(topology, n) for topology in TopologyReg.registry for n in (4, 8)])
def test_every_topology_and_wire(topology, n):
    """Each at some update, the overlapped ones after the first step too; one of a topology before it."""
    ways = WAYS if n == 4 else WAYS[zlib.crc32(topology.encode()) % 2 :: 2]
    for number, (compression, overlap) in enumerate(ways):
        late = 2 + zlib.crc32(f"{topology} {n} {compression}".encode()) % 3
        stops = [*([0] if number == 1 else [1] if overlap and n == 4 else []), late]
        stopped_everywhere(of_four(topology, compression, overlap), n, stops, TOTAL - 1)


# Those that were found to be the hardest.
HARD = ["zoo, clipped", "scaled windows", "reentrant", "pending", "sparse momentum"]


@pytest.mark.parametrize("name", HARD)
def test_the_hardest_kinds_of_jobs(name):
    job = JOBS[name]
    stopped_everywhere(replace(job, options={"topology": "one-peer-exp", "compression": "int8", **job.options}), 2, [1, 4])


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_every_kind_of_job(name):
    synchronous = list(COMPRESSIONS)[zlib.crc32(name.encode()) % 3]
    for compression, overlap, stops in (("int8", True, [1, 3, 5]), ("bfloat16", True, [4]), (synchronous, False, [2])):
        job = JOBS[name]
        how = {"topology": "alternating-exp-ring", "compression": compression, "overlap": overlap, "_local_world_size": 2}
        stopped_everywhere(replace(job, options={**how, **job.options}), 4, stops)


@pytest.mark.parametrize("name", ["windows", "pending", "zoo", pytest.param("accum-adamw", marks=pytest.mark.slow)])
def test_looking_changes_nothing(name):
    job = replace(JOBS[name], options={**JOBS[name].options, "topology": "one-peer-exp", "compression": "int8"})
    ends = [
        run_replicas(2, lambda at, stops=stops: run_through(job, at, at.rank, TOTAL, stops)[1:]) for stops in ([], range(TOTAL))
    ]
    assert_equal(*ends)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_alone_and_with_a_worker_that_sits_a_round_out(compression):
    job = Job({"topology": "ring", "compression": compression})
    stopped_everywhere(job, 1, [0, 1, 2], 4)
    stopped_everywhere(job, 3, [0, 1, 2] if compression == "int8" else [1], 4)


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_other_numbers_of_workers(n, compression):
    for topology in ("ring", "complete") if n > 1 else ("complete",):
        stopped_everywhere(
            Job({"topology": topology, "compression": compression, **MANY}), n, [0, 1, 2] if n < 5 else [1, 2], 5
        )


@INT8_AND_OTHERS
def test_a_chain_of_stops(compression):
    """Stopped and gone on at once, several times, also when nothing was done in between."""
    job = Job({"topology": "one-peer-exp", "compression": compression}, step=step_in_windows)
    through = run_replicas(4, lambda at: run_through(job, at, at.rank, TOTAL))
    saved: list[Any] = run_replicas(4, lambda at: run_through(job, at, at.rank, 2)[2])
    for first, last in ((2, 2), (2, 3), (3, 5), (5, 5), (5, TOTAL)):
        part = run_replicas(4, lambda at, s=range(first, last), kept=saved: go_on(job, at, at.rank, s, kept[at.rank]))
        saved = [end for _, end in part]
    assert_equal(saved, [end for *_, end in through])


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bucket_size_in_mb": 25}, MANY),
    (MANY, {"bucket_size_in_mb": 1e-3}),
    ({"bucket_size_in_mb": 1e-3}, {"bucket_size_in_mb": 25, "param_as_bucket_view": False}),
    ({"param_as_bucket_view": False}, {"param_as_bucket_view": True, "bucket_size_in_mb": 1e-3}),
]


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize(
    ("name", "n"), [("windows", 2), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("momentum", "zoo", "windows"))]
)
def test_other_buckets(name, n, layout):
    before, after = LAYOUTS[layout]
    for number, compression in enumerate(COMPRESSIONS if n == 4 else ["int8", *list(COMPRESSIONS)[layout : layout + 1]]):
        job = JOBS[name]
        job = replace(job, options={**job.options, "topology": "one-peer-exp", "compression": compression, **before})
        stopped_everywhere(job, n, [(1, 4)[(number + layout) % 2]], **after)


@INT8_AND_OTHERS
def test_another_order_of_first_use(compression):
    """The order that counts is the saved one: buckets are made from it before the first backward."""
    made: list[list[str]] = []

    def job(order: tuple[int, ...], names: list[list[str]] | None = None) -> Job:
        def noting(params: list[Any]) -> torch.optim.Optimizer:
            if names is not None:
                names.append([name for name, _ in params])
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)

        options = {"topology": "one-peer-exp", "compression": compression, "bucket_size_in_mb": 1e-4}
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
                model.replica.engine.buckets[0].compression._rejected += 1000
            put_back(model.replica, through[at.rank][0][stop])
            ends.append((job.train(model, range(stop, TOTAL), at.rank), take(model.replica)))
            assert (model.optimizers, model._lr_schedulers) == lists
            assert model.optimizers is lists[0]
            assert [unit.optimizer for unit in model.replica.units] == model.optimizers
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

    def body(at: InProcessTransport, dropped: bool) -> Any:
        model = calm.wrap(0, at)
        for t in range(3):
            for param in model.module.parameters():
                param.grad = torch.full_like(param, 10.0 * (at.rank + t))
            model.update()
        if at.rank:
            slow(model)
        snapshot = through[at.rank][0][3]
        put_back(model.replica, {**snapshot, "exchange": None} if dropped else snapshot)
        losses = calm.train(model, range(3, TOTAL), at.rank)
        return losses, take(model.replica)

    def slow(model: DecentralizedDataParallel) -> None:
        transport = model.replica.transport
        start = transport.start

        def late(*args: Any) -> Any:
            time.sleep(0.05)
            return start(*args)

        monkeypatch.setattr(transport, "start", late)

    found = run_replicas(2, partial(body, dropped=False))
    for (losses, end), (_, all_losses, reference) in zip(found, through, strict=True):
        assert_equal(losses, all_losses[3:])
        assert_equal(end, reference)

    def fresh(at: InProcessTransport) -> Any:
        return go_on(calm, at, at.rank, range(3, TOTAL), {**through[at.rank][0][3], "exchange": None})

    dropped = run_replicas(2, partial(body, dropped=True))
    for (losses, end), (others, reference) in zip(dropped, run_replicas(2, fresh), strict=True):
        assert_equal(losses, others)
        assert_equal(end, reference)
