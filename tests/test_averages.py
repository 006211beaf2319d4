"""Moving averages of the replica, and torch's own."""

from __future__ import annotations

import contextlib
import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from decent_dp.checkpoint import AveragedReplica, calibrate, load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import OutOfStepError
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, loss, net, values
from tests.test_export import ADAMW, batches, everything_of, same

STEPS = 8

# -- a moving average -------------------------------------------------------------------------------------------------


def watched_and_not(rank: int, n: int, decay: float) -> Any:
    return [averages(rank, decay, watched) for watched in (True, False)]


def averages(rank: int, decay: float, watched: bool) -> Any:
    model = DecentralizedDataParallel(net(), ADAMW, topology="one-peer-exp")
    ema, theirs = AveragedReplica(model, decay), AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(decay))
    seen: list[dict[str, Tensor]] = []
    looks: list[dict[str, Tensor]] = []
    for t in range(STEPS):
        loss(model, t, rank).backward()
        ema.update()
        theirs.update_parameters(model.module)
        seen.append(values(model.module))
        if watched and t % 4 == 3:
            with ema.averaged():
                looks.append(values(model.module))
                with model.averaged(), ema.averaged():
                    pass
            with model.averaged():
                mean = values(model.module)
                with ema.averaged():
                    for name, value in values(model.module).items():
                        assert torch.equal(value, looks[-1][name])
                for name, value in values(model.module).items():
                    assert torch.equal(value, mean[name])
            for name, value in values(model.module).items():
                assert torch.equal(value, seen[-1][name])
    for (name, param), own in zip(theirs.module.named_parameters(), ema.state_dict()["average"].values(), strict=True):
        assert torch.equal(param, own), name
    return seen, looks


def test_the_mean_of_the_averages_is_the_average_of_the_mean(workers):
    """Against float64 on the means of the replicas at each step; exchanges in flight are not disturbed."""
    decay = 0.8
    found, unwatched = zip(*workers(4, watched_and_not, decay), strict=True)
    expected: dict[str, Any] = {}
    for t in range(STEPS):
        for name in found[0][0][t]:
            mean = np.mean([seen[t][name].double().numpy() for seen, _ in found], axis=0)
            expected[name] = mean if t == 0 else decay * expected[name] + (1 - decay) * mean
        if t % 4 == 3:
            for _, looks in found:
                for name, value in looks[t // 4].items():
                    np.testing.assert_allclose(value.double().numpy(), expected[name], rtol=2e-6, atol=2e-7, err_msg=name)
                    assert torch.equal(value, found[0][1][t // 4][name])
    for (seen, _), (undisturbed, _) in zip(found, unwatched, strict=True):
        same(seen[-1], undisturbed[-1])


def test_an_average_of_low_precision_moves():
    """In bfloat16 a step of a thousandth would be rounded away."""
    model = alone(nn.Linear(1, 1, bias=False).to(torch.bfloat16), partial(torch.optim.SGD, lr=1.0))
    ema = AveragedReplica(model, 0.999)
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    ema.update()
    with torch.no_grad():
        model.module.weight.fill_(2.0)
    for _ in range(500):
        ema.update()
    with ema.averaged():
        assert model.module.weight.item() == pytest.approx(2 - 0.999**500, abs=4e-3)
    assert ema.state_dict()["average"]["weight"].dtype == torch.float32


def test_an_average_resumes_where_it_was_saved():
    model = alone(net(), ADAMW)
    ema, other = AveragedReplica(model, 0.7), AveragedReplica(alone(net(seed=3)), 0.7)
    for t in range(4):
        loss(model, t).backward()
        ema.update()
    saved = copy.deepcopy(ema.state_dict())
    other.load_state_dict(saved)
    assert other.updates == 4
    same(other.state_dict()["average"], ema.state_dict()["average"])
    loss(model, 4).backward()
    ema.update()
    same(saved["average"], other.state_dict()["average"])  # copied, and the new update is not in it
    again = AveragedReplica(model, 0.7)
    again.load_state_dict(saved)
    again.update()
    same(again.state_dict()["average"], ema.state_dict()["average"])

    del saved["average"]["2.bias"]
    average = ema.state_dict()["average"]
    for state, message in (
        ({"average": {}}, r"has 'updates' and 'average', got \['average'\]"),
        (saved, r"'2\.bias' is a trainable parameter of the model only"),
        (
            {**saved, "average": {**average, "x": torch.ones(1)}},
            "'x' is a trainable parameter of the state",
        ),
        ({**saved, "average": {**average, "2.bias": torch.ones(5)}}, r"'2\.bias' is \(5,\) in the state"),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        same(other.state_dict()["average"], before["average"])


def test_refusals_of_an_average():
    model = alone(net())
    for decay in (1.0, -0.1, float("nan"), 2):
        with pytest.raises(ValueError, match=r"decay must be in \[0, 1\), got"):
            AveragedReplica(model, decay)
    ema = AveragedReplica(model, 0)
    with ema.averaged(), pytest.raises(RuntimeError, match=r"call it outside averaged\(\)"):
        ema.update()
    model.global_avg()
    with pytest.raises(RuntimeError, match=r"call it outside averaged\(\)"):
        ema.update()


def test_a_pending_update_is_made_before_the_average_reads():
    model = alone(net())
    ema = AveragedReplica(model, 0.5)
    model.set_accumulate_grad(True)
    loss(model, 0).backward()
    model.set_accumulate_grad(False)
    ema.update()
    assert model.stats().updates == 1
    same(ema.state_dict()["average"], values(model.module))


def test_an_update_inside_continues_from_the_average():
    def work(transport: Any) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        ema = AveragedReplica(model, 0.5)
        for t in range(3):
            loss(model, t, transport.rank).backward()
            ema.update()
        with ema.averaged():
            there = values(model.module)
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        loaded = values(model.module)
        with ema.averaged():
            loss(model, 3, transport.rank).backward()
        moved = values(model.module)
        return there, loaded, moved

    first, second = run_replicas(2, work)
    for name in first[0]:
        assert torch.equal(first[1][name], first[0][name] + 1)
        # One step of SGD from the common average, each with its own gradient: the exchange of before is dropped.
        step = [there[name] - moved[name] for there, _, moved in (first, second)]
        assert not torch.equal(*step)
        assert max(float(s.abs().max()) for s in step) < 1.0


def with_norm(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("synced", [False, True])
def test_a_save_inside_averaged_has_the_replicas_own_values(tmp_path: Path, nested: bool, synced: bool) -> None:
    """Also of BatchNorm's statistics, where they were estimated anew there."""

    def work(transport: Any) -> Any:
        model = DecentralizedDataParallel(
            with_norm(transport.rank), ADAMW, topology="ring", transport=transport, sync_buffer_in_global_avg=synced
        )
        ema = AveragedReplica(model, 0.5)
        for t in range(4):
            loss(model, t, transport.rank).backward()
            ema.update()
        own = everything_of(model)
        with contextlib.ExitStack() as undone:
            if nested:
                undone.enter_context(model.averaged())
            undone.enter_context(ema.averaged())
            calibrate(model, [batch + 3 for batch in batches(transport.rank)[:1]])
            inside = everything_of(model)
            save(model, tmp_path)
        left = everything_of(model)
        loss(model, 4, transport.rank).backward()
        load(model, tmp_path)
        return own, inside, left, everything_of(model)

    for own, inside, left, loaded in run_replicas(2, work):
        for name in ("0.weight", "1.running_mean", "1.running_var"):
            assert not torch.equal(inside[name], own[name]), name
        params = {name: own[name] for name, _ in with_norm(0).named_parameters()}  # the save has mixed what was in flight
        assert not torch.equal(left["0.weight"], own["0.weight"])
        same({**left, **params, "random": own["random"]}, own)  # threads share torch's random state
        same({**loaded, "random": left["random"]}, left)


def test_a_revert_inside_puts_the_buffers_back_too():
    model = alone(with_norm(0))
    ema = AveragedReplica(model, 0.5)
    for t in range(3):
        loss(model, t).backward()
        ema.update()
    own = everything_of(model)
    for nested in (False, True):
        with model.averaged() if nested else contextlib.nullcontext(), ema.averaged():
            calibrate(model, batches(0))
            assert not torch.equal(everything_of(model)["1.running_mean"], own["1.running_mean"])
            model.revert_global_avg()
            same(everything_of(model), own)
        same(everything_of(model), own)
    # Values loaded inside are the replica's own from then on, also buffers.
    loaded = {name: value + 1 for name, value in model.state_dict().items()}
    with ema.averaged():
        model.load_state_dict(loaded)
    same(dict(model.state_dict()), loaded)


def test_with_uneven_inputs_the_average_is_updated_once_after_each_join():
    """Against the moving average of the means there; inside join() workers make different numbers of updates."""

    def work(transport: Any) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        inside, after = AveragedReplica(model, 0.5), AveragedReplica(model, 0.5)
        seen = []
        for epoch in range(3):
            with model.join():
                for t in range(2 + transport.rank):
                    loss(model, 10 * epoch + t, transport.rank).backward()
                    inside.update()
            after.update()
            seen.append(values(model.module))
        with pytest.raises(OutOfStepError, match=r"uneven inputs.* call it once after each join\(\)"), inside.averaged():
            raise AssertionError
        with after.averaged():
            return seen, values(model.module)

    found = run_replicas(3, work)
    expected: dict[str, Any] = {}
    for epoch in range(3):
        for name in found[0][1]:
            mean = np.mean([seen[epoch][name].double().numpy() for seen, _ in found], axis=0)
            expected[name] = mean if epoch == 0 else 0.5 * expected[name] + 0.5 * mean
    for _, look in found:
        for name, value in look.items():
            np.testing.assert_allclose(value.double().numpy(), expected[name], rtol=2e-6, atol=2e-7, err_msg=name)


# -- torch's own ------------------------------------------------------------------------------------------------------


def with_swa_utils(rank: int, n: int) -> Any:
    model = DecentralizedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
        partial(torch.optim.SGD, lr=0.1),
        partial(SWALR, swa_lr=0.02, anneal_epochs=5),
        topology="ring",
        bucket_size_in_mb=1e-4,
    )
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    flat = AveragedModel(model.module)  # stochastic weight averaging: all equal
    seen, rates = [], []
    for t in range(8):
        loss(model, t, rank).backward()
        averaged.update_parameters(model.module)
        flat.update_parameters(model)
        seen.append(values(model.module))
        rates.append(model.get_lr())
    own = values(model.module)
    update_bn(batches(rank, 3), averaged)
    loss(averaged, 0, rank).backward()  # of the copy: no update, no round
    same(values(model.module), own)
    assert model.stats().rounds == 8
    expected: dict[str, Any] = {}
    for t, step in enumerate(seen):
        for name, value in step.items():
            expected[name] = value.double() if t == 0 else 0.9 * expected[name] + 0.1 * value.double()
    for name, value in averaged.module.named_parameters():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6, check_dtype=False)
        mean = torch.stack([step[name] for step in seen]).mean(0)
        torch.testing.assert_close(flat.module.state_dict()[name], mean, rtol=1e-5, atol=1e-6)
    return rates, len(model.optimizers)


def test_torchs_averages_and_schedule(workers):
    for rates, buckets in workers(2, with_swa_utils):
        assert buckets > 1
        assert rates[-1] == pytest.approx(0.02)
        assert 0.02 < rates[1] < 0.1


def test_construction_sends_only_what_differs_by_its_bits():
    """Over a link of 1 Mbit/s a model of a million parameters takes minutes."""
    models = [net() for _ in range(3)]  # torch.manual_seed is not for threads

    def body(transport):
        sent: list[int] = []
        broadcast = transport.control.broadcast

        def counting(tensor: Tensor) -> None:
            sent.extend([tensor.nbytes] if tensor.is_floating_point() else [])
            broadcast(tensor)

        transport.control.broadcast = counting
        model = models[transport.rank]
        model.register_buffer("nan", torch.full((5,), torch.nan))
        model.register_buffer("zero", torch.tensor(0.0 if transport.rank else -0.0))
        model.register_buffer("conj", torch.zeros(3, dtype=torch.complex64).conj())  # a view that torch has not computed yet
        with torch.no_grad():
            if transport.rank == 2:
                model[0].weight[1, 2] += 1
        DecentralizedDataParallel(model, SGD, transport=transport)
        return sent, values(model), model.zero

    own = net()
    for sent, found, zero in run_replicas(3, body):
        assert sum(sent) == own[0].weight.nbytes + 4
        assert math.copysign(1, zero) == -1
        same(found, values(own))
