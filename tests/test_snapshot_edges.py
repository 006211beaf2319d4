"""Snapshots at moments that are none, and of runs that do not fit."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from decent_dp import serialization
from decent_dp.checkpoint.files import Record, Shard, write_shard
from decent_dp.compression import COMPRESSIONS, Compression, FlatTensor
from decent_dp.compression.blockwise import _BLOCK_ON_CPU
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import PeerTimeoutError
from decent_dp.replica.host_copies import HostMemory
from decent_dp.replica.snapshot import put_back, take
from decent_dp.serialization import encode
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import SGD, alone, assert_same, batch, loss, net, values
from tests.resuming import (
    JOBS,
    MANY,
    PAIRS,
    Job,
    assert_equal,
    dumb_copy,
    go_on,
    run_through,
    step_in_windows,
    trained,
)
from tests.workers import hear, say, shorten

# -- moments ---------------------------------------------------------------------------------------------------------------


def test_between_averaging_and_reverting_there_is_nothing_to_save():
    def body(at: InProcessTransport) -> None:
        model = trained(PAIRS, 3, at)
        before = dumb_copy(take(model.replica))
        model.global_avg()
        with pytest.raises(RuntimeError, match=r"between global_avg\(\) and revert_global_avg\(\).*will_revert=False"):
            take(model.replica)
        with model.averaged(), pytest.raises(RuntimeError, match="between global_avg"):
            take(model.replica)
        model.revert_global_avg()
        assert_equal(dumb_copy(take(model.replica)), before)
        model.global_avg(will_revert=False)
        mean = values(model.module)
        assert_equal(dumb_copy(take(model.replica))["parameters"], mean)  # what is in flight belongs to the old values

    run_replicas(2, body)


def test_a_load_while_replicas_are_the_mean_is_what_stays():
    through = run_replicas(2, lambda at: run_through(PAIRS, at, at.rank, 6, [2]))

    def body(at: InProcessTransport, reverted: bool) -> None:
        model = trained(PAIRS, 4, at)
        snapshots, _, end = through[at.rank]
        if reverted:
            model.global_avg()
            put_back(model.replica, snapshots[2])
            model.revert_global_avg()  # the load has dropped the backup: nothing is undone
        else:
            with model.averaged():
                put_back(model.replica, snapshots[2])
        PAIRS.train(model, range(2, 6), at.rank)
        assert_equal(dumb_copy(take(model.replica)), end)

    for reverted in (True, False):
        run_replicas(2, partial(body, reverted=reverted))


def test_values_that_were_replaced_before_the_save_stay_replaced():
    """The difference in flight belongs to the old values: of some parameters, and of all."""
    new = values(net(7))
    for loaded in (["0.weight", "2.bias"], list(new)):

        def replaced(at: InProcessTransport, loaded: list[str] = loaded) -> Any:
            model = trained(PAIRS, 4, at)
            model.load_state_dict({name: new[name] + at.rank for name in loaded}, strict=False)
            snapshot = dumb_copy(take(model.replica))
            assert_equal(
                {name: snapshot["parameters"][name] for name in loaded}, {name: new[name] + at.rank for name in loaded}
            )
            return snapshot, PAIRS.train(model, range(4, 9), at.rank), dumb_copy(take(model.replica))

        through = run_replicas(2, replaced)
        found = run_replicas(2, lambda at, t=through: go_on(PAIRS, at, at.rank, range(4, 9), t[at.rank][0]))
        for (_, *reference), again in zip(through, found, strict=True):
            assert_equal(list(again), reference)


def test_inside_a_backward_there_is_no_step_boundary():
    model = alone(net(), SGD)
    saved = dumb_copy(take(model.replica))
    errors: list[str] = []

    def hook(grad: Tensor) -> None:
        for call in (lambda: take(model.replica), lambda: put_back(model.replica, saved)):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    output = model(batch(0)[0])
    output.register_hook(hook)
    output.square().mean().backward()
    assert len(errors) == 2
    assert all("inside a backward: call it after the backward has returned" in error for error in errors)
    assert model.stats().updates == 1


def test_after_close_there_is_nothing_to_save_or_to_go_on():
    model = alone(net(), SGD)
    loss(model, 0).backward()
    saved = dumb_copy(take(model.replica))
    model.close()
    with pytest.raises(RuntimeError, match=r"was closed: save before close\(\), or keep model\.module\.state_dict\(\)"):
        take(model.replica)
    with pytest.raises(RuntimeError, match="was closed"):
        put_back(model.replica, saved)


def test_after_an_update_that_failed_the_state_is_not_one_to_go_on_from():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("no more")
            return super().step(closure)

    model = alone(net(), lambda params: Failing([p for _, p in params], lr=0.1))
    loss(model, 0).backward()
    saved = dumb_copy(take(model.replica))
    Failing.fails = True
    with pytest.raises(ValueError, match="no more"):
        loss(model, 1).backward()
    Failing.fails = False
    with pytest.raises(RuntimeError, match=r"save came after an update that failed half-way \(ValueError: no more\)"):
        take(model.replica)
    with pytest.raises(RuntimeError, match="an update failed earlier"):
        put_back(model.replica, saved)


def test_in_join_workers_save_what_they_have_and_do_not_load():
    def body(at: InProcessTransport) -> Any:
        model = PAIRS.wrap(0, at)
        with model.join():
            PAIRS.train(model, range(3), at.rank)
            snapshot = dumb_copy(take(model.replica))
            with pytest.raises(RuntimeError, match=r"inside join\(\).*before the with-block"):
                put_back(model.replica, snapshot)
            PAIRS.train(model, range(3, 5 + 2 * at.rank), at.rank)
        return snapshot, dumb_copy(take(model.replica))

    through = run_replicas(2, body)

    def again(at: InProcessTransport) -> Any:
        model = PAIRS.wrap(3, at)
        put_back(model.replica, through[at.rank][0])
        with model.join():
            PAIRS.train(model, range(3, 5 + 2 * at.rank), at.rank)
        return dumb_copy(take(model.replica))

    assert_equal(run_replicas(2, again), [end for _, end in through])


def test_an_optimizer_state_that_waits_for_the_first_update_goes_on_waiting():
    before = trained(PAIRS, 4)
    state = dumb_copy(before.optim_state_dict())
    reference = alone(net(3), SGD)
    reference.load_optim_state_dict(dumb_copy(state))
    snapshot = take(reference.replica)
    kept = dumb_copy(snapshot)
    assert kept["order"] is None
    assert kept["round"] == 4
    for _ in range(2):  # the snapshot is not used up
        model = alone(net(9), SGD)
        put_back(model.replica, kept)
        assert_equal(dumb_copy(model.optim_state_dict()), state)
        PAIRS.train(model, range(2), 0)
    PAIRS.train(reference, range(2), 0)
    assert_same(model.module, reference.module)
    assert_equal(dumb_copy(take(model.replica)), dumb_copy(take(reference.replica)))


def test_a_window_of_a_scaler_ends_before_anything_is_scaled_again():
    """A scaler has no scale of its own before it has scaled something: the gradients that were saved must not see that."""
    job = Job(scaled=True)

    def opened(model: DecentralizedDataParallel, steps: range) -> None:
        model.set_accumulate_grad(True)
        for t in steps:
            model.replica.scaler.scale(loss(model, t)).backward()

    def ended(model: DecentralizedDataParallel, steps: range) -> Any:
        model.set_accumulate_grad(False)
        model.eval()
        with torch.no_grad():
            found = [loss(model, 9)]
        model.train()
        for t in steps:
            model.replica.scaler.scale(loss(model, t)).backward()
        return found, dumb_copy(take(model.replica))

    model = job.wrap(0, InProcessTransport())
    opened(model, range(2))
    saved = dumb_copy(take(model.replica))
    other = job.wrap(3, InProcessTransport())
    put_back(other.replica, saved)
    assert other.replica.scaler.get_scale() == 256.0
    assert_equal(ended(other, range(2, 5)), ended(model, range(2, 5)))


@pytest.mark.parametrize("name", ["zoo", "scaled windows"])
def test_a_load_where_the_caller_infers(name):
    """The result trains, whatever it was made from."""
    job = replace(JOBS[name], options={**JOBS[name].options, "topology": "one-peer-exp", "compression": "int8"})
    through = run_replicas(2, lambda at: run_through(job, at, at.rank, 7, [0, 4]))

    def body(at: InProcessTransport, stop: int) -> None:
        model = trained(job, 2, at)
        with torch.inference_mode():
            put_back(model.replica, dumb_copy(through[at.rank][0][stop]))
        losses = []
        for t in range(stop, 7):
            if t == 4:
                take(model.replica)
            losses += job.train(model, [t], at.rank)
        assert_equal(losses, through[at.rank][1][stop:])
        assert_equal(dumb_copy(take(model.replica)), through[at.rank][2])

    for stop in (4, 0):
        run_replicas(2, partial(body, stop=stop))


def lies_alone(param: Tensor) -> bool:
    return param.storage_offset() == 0 and param.untyped_storage().nbytes() == param.numel() * param.element_size()


def test_before_the_first_update_parameters_lie_on_their_own():
    """Also after a load that was refused, and in their strides: a sum may depend on where its numbers lie."""
    job = replace(JOBS["zoo"], optim_fn=SGD)
    [(snapshots, losses, end)] = run_replicas(1, lambda at: run_through(job, at, 0, 4, [0, 3]))
    strides = {name: param.stride() for name, param in job.model(0).named_parameters()}

    def alone_and_equal(model: DecentralizedDataParallel, saved: Any) -> None:
        for name, param in model.module.named_parameters():
            assert lies_alone(param), name
            assert param.stride() == strides[name]
        assert_equal(dumb_copy(take(model.replica)), saved)

    model = trained(job, 3)
    assert not all(lies_alone(param) for param in model.replica.parameters.params)
    put_back(model.replica, snapshots[0])
    alone_and_equal(model, snapshots[0])
    assert_equal(job.train(model, range(4), 0), losses)
    assert_equal(dumb_copy(take(model.replica)), end)

    fresh = job.wrap(0, InProcessTransport())
    before = dumb_copy(take(fresh.replica))
    with pytest.raises(ValueError, match="the optimizer was Adam"):
        put_back(fresh.replica, {**snapshots[3], "optimizer": "Adam"})
    alone_and_equal(fresh, before)
    assert_equal(job.train(fresh, range(4), 0), losses)


@pytest.mark.parametrize("name", ["sparse", "sparse momentum"])
def test_sparse_tensors_through_a_file(name, tmp_path):
    """Gradients of an open window, coalesced or not, and states."""
    job = JOBS[name]
    stop = 4 if name == "sparse" else 3
    snapshots, losses, end = run_through(job, InProcessTransport(), 0, 6, [stop])
    assert any(tensor.is_sparse for tensor in tensors_in(snapshots[stop]))
    text, tensors = encode(snapshots[stop])
    assert all(tensor.layout is torch.strided for tensor in tensors.values())
    file = write_shard(tmp_path, Record("any", 0, 1, 4, []), HostMemory().copy(tensors).tensors, text)
    with Shard(file, 0) as reader:
        others, other = go_on(job, InProcessTransport(), 0, range(stop, 6), serialization.loaded(reader.tree()))
    assert_equal(others, losses[stop:])
    assert_equal(other, end)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for member in members for tensor in tensors_in(member)]


class Noting(torch.optim.lr_scheduler.LRScheduler):
    """Its state is a list that grows."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.rates.append(0.1 / (1 + len(self.rates)))
        return [self.rates[-1] for _ in self.optimizer.param_groups]


def test_a_snapshot_that_waits_for_the_first_update_is_not_kept():
    """Its owner may write to it at once: to a list of a scheduler's, to a rate, to a tensor."""
    options = {"lr_scheduler_fn": Noting, **MANY}
    job = Job(options, optim_fn=lambda params: torch.optim.Adam([p for _, p in params], lr=torch.tensor(0.05), foreach=False))
    state = trained(job, 3).optim_state_dict()
    ends = []
    for spoilt in (False, True):
        waiting = job.wrap(9, InProcessTransport())
        waiting.load_optim_state_dict(copy.deepcopy(state))
        kept = take(waiting.replica)
        assert kept["order"] is None
        model = job.wrap(9, InProcessTransport())
        put_back(model.replica, kept)
        if spoilt:
            kept["optim"]["schedulers"]["rates"].clear()
            for name, own in kept["optim"]["state"].items():
                own["exp_avg"].fill_(7.0)
                kept["optim"]["param_groups"][name]["lr"].fill_(3.0)
        ends.append((job.train(model, range(3, 6), 0), dumb_copy(take(model.replica))))
        assert len(model.lr_schedulers[-1].rates) == len(state["schedulers"]["rates"]) + 3
    assert_equal(*ends)


def test_a_snapshot_is_not_used_up():
    """A run that resumes from it shares nothing with it."""
    job = Job(
        {"topology": "one-peer-exp", "compression": "int8"},
        optim_fn=partial(torch.optim.AdamW, lr=0.02),
        step=step_in_windows,
    )
    job = replace(job, options={**job.options, "lr_scheduler_fn": Noting})
    saved = run_replicas(2, lambda at: run_through(job, at, at.rank, 4)[2])
    kept = dumb_copy(saved)
    ends = [run_replicas(2, lambda at: go_on(job, at, at.rank, range(4, 9), saved[at.rank])) for _ in range(2)]
    assert_equal(*ends)
    assert_equal(saved, kept)


def test_a_stale_graph_is_noticed():
    """The values that a forward has saved are gone after a load: torch's own error, not a wrong gradient."""
    model = trained(PAIRS, 2)
    saved = dumb_copy(take(model.replica))
    value = loss(model, 2)
    put_back(model.replica, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# -- loads that fail half-way ----------------------------------------------------------------------------------------------


def test_a_load_that_fails_inside_averaged_leaves_the_replicas_own_values():
    right = net(8).state_dict()
    wrong = {**right, "4.weight": torch.zeros(2, 2)}

    def body(at: InProcessTransport) -> None:
        model = trained(PAIRS, 3, at)
        before = values(model.module)
        with model.averaged(), pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(wrong)
        assert_same(values(model.module), before)
        with model.averaged():
            model.load_state_dict(right)
        assert_same(values(model.module), right)

    run_replicas(2, body)


def alone_in_a_round(rank: int, n: int) -> str:
    """The other worker has not begun the round that this one saves after."""
    model = PAIRS.wrap(0)
    PAIRS.train(model, [0], rank)
    if rank:
        hear("the error")
        model.close()
        return ""
    shorten(model.replica.world, 1.0)
    PAIRS.train(model, [1], rank)
    with pytest.raises(PeerTimeoutError, match="worker 1"):
        take(model.replica)
    say("the error")
    return "an error"


def test_a_save_that_waits_for_a_silent_worker_ends_with_an_error(workers):
    assert workers(2, alone_in_a_round) == ["an error", ""]


# -- what compressions keep, parameter by parameter -----------------------------------------------------------------------

SIZES = [700, 0, _BLOCK_ON_CPU + 5, 3]


def test_the_state_of_a_compression_belongs_to_its_tensors():
    drawn = torch.Generator().manual_seed(3)
    values = [torch.randn(size, generator=drawn) * 10.0**-i for i, size in enumerate(SIZES)]

    def made(order: list[int]) -> Compression:
        return COMPRESSIONS["int8"]([FlatTensor(i, SIZES[i]) for i in order], torch.float32, torch.device("cpu"))

    compression = made([0, 1, 2, 3])
    hint, learnt = compression.hint(values), dumb_copy(compression.state())
    assert [len(entries["ranges"]) for entries in learnt] == [1, 0, 2, 1]
    turned = [3, 2, 0, 1]
    other = made(turned)
    other.load_state([learnt[i] for i in turned])
    assert_equal(other.state(), [learnt[i] for i in turned])
    # Each hint is that of what was learnt, and not of the present values.
    assert sorted(other.hint([10 * values[i] for i in turned])) == sorted(hint)


@pytest.mark.parametrize(
    "bad", [None, torch.zeros(1, 4), torch.zeros(3, 4, dtype=torch.float64)], ids=["none", "dtype", "shape"]
)
def test_a_state_of_another_compression_is_left_out(bad):
    """That tensor starts as in a new run, and the others resume."""
    values = [torch.randn(700), torch.randn(3)]

    def made() -> Compression:
        return COMPRESSIONS["int8"]([FlatTensor(0, 700), FlatTensor(1, 3)], torch.float32, torch.device("cpu"))

    compression = made()
    compression.hint(values)
    learnt = dumb_copy(compression.state())
    other = made()
    fresh = dumb_copy(other.state())
    other.load_state([{} if bad is None else {"ranges": bad}, learnt[1]])
    assert_equal(other.state(), [fresh[0], learnt[1]])
