"""A replica with a NaN or an infinity: no other one gets it, both sides say so, and after ten rounds training stops."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp import errors, gossip
from decent_dp.checkpoint import AveragedReplica, calibrate, export, load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError, NonFiniteError, PeerError
from decent_dp.integrations._survivors import save_again
from decent_dp.rules import OuterNesterov
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import make_topology
from decent_dp.transport import run_replicas
from tests.helpers import SGD, batch, net, some_in_the_fast_tests
from tests.law_cases import matrix

STEPS = 12


class Bag(nn.Module):
    """Two vectors; the loss is their distance to a target, so that the gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3))

    def forward(self, target: Tensor) -> Tensor:
        return (torch.cat([self.first, self.second]) - target).square().sum() / 2


def target(rank: int, t: int) -> np.ndarray:
    return np.random.default_rng([rank, t]).normal(size=7)


def made(driver: str, model: nn.Module, transport: Any, **options: Any) -> tuple[Any, Callable[[Tensor], None]]:
    """A replica, and a call that makes a step with a loss."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    if driver == "wrapper":
        wrapper = DecentralizedDataParallel(model, sgd, transport=transport, **options)
        return wrapper, lambda loss: loss.backward()
    optimizer = sgd(model.parameters())
    replica = gossip(model, optimizer, transport=transport, **options)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return replica, step


def spoilt(transport: Any, driver: str, topology: str, overlap: bool, bad: float, at: tuple[int, int]) -> Any:
    rank, model = transport.rank, Bag()
    replica, step = made(driver, model, transport, topology=topology, overlap=overlap)
    for t in range(STEPS):
        step(model(torch.from_numpy(target(rank, t)).float()) * (bad if (rank, t) == at else 1.0))
    stats = replica.stats()
    assert (stats.rounds, stats.updates) == (STEPS, STEPS)
    found = torch.cat([model.first, model.second]).detach().double().numpy()
    replica.close()
    return found, stats.nonfinite


def law(n: int, driver: str, topology: str, overlap: bool, at: tuple[int, int]) -> tuple[np.ndarray, list[int]]:
    """In float64: the peers of a replica that is not finite do not mix in that round."""
    rounds = make_topology(topology, local_world_size=1, world_size=n, rank=0)
    x, sent, sat_out = np.zeros((n, 7)), None, [0] * n

    def mixed(x: np.ndarray, t: int) -> np.ndarray:
        w, result = matrix(rounds.round(t), n), x.copy()
        for edge in rounds.round(t):
            ranks = edge.ranks
            if np.isfinite(sent[ranks]).all():
                result[ranks] += (w[ranks] - np.eye(n)[ranks])[:, ranks] @ sent[ranks]
            else:
                for rank in ranks:
                    sat_out[rank] += len(ranks) > 1
        return result

    for t in range(STEPS):
        gradient = x - np.stack([target(rank, t) for rank in range(n)])
        if at[1] == t:
            gradient[at[0]] = np.nan
        if overlap and t and driver == "wrapper":
            x = mixed(x, t - 1)
        x = x - 0.1 * gradient
        if overlap and t and driver == "gossip":
            x = mixed(x, t - 1)
        sent = x.copy()
        if not overlap:
            x = mixed(x, t)
    return x, sat_out


@pytest.mark.parametrize(
    ("made_by", "of"),
    some_in_the_fast_tests(
        [("wrapper", True), ("gossip", True), ("wrapper", False), ("gossip", False)],
        [("one-peer-exp", 4), ("ring", 4), ("complete", 3), ("base-2", 3)],
    ),
)
def test_no_other_replica_gets_the_nan(made_by, of):
    (driver, overlap), (topology, n), at = made_by, of, (1, 5)
    for bad in (math.nan, math.inf):
        found = run_replicas(n, lambda transport: spoilt(transport, driver, topology, overlap, bad, at))  # noqa: B023
        expected, sat_out = law(n, driver, topology, overlap, at)
        assert [count for _, count in found] == sat_out
        for rank, (values, _) in enumerate(found):
            if rank == at[0]:
                assert not np.isfinite(values).any()
            else:
                np.testing.assert_allclose(values, expected[rank], rtol=0, atol=1e-6, err_msg=f"worker {rank}")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.name == "decent_dp.engine.outcome"]
    caplog.clear()
    return messages


@pytest.mark.parametrize(("driver", "compression"), some_in_the_fast_tests(["wrapper", "gossip"], [None, "bfloat16", "int8"]))
def test_one_warning_on_both_sides_until_it_is_finite_again(driver, compression, caplog):
    """One tensor in a bucket of its own: the other bucket continues to mix, and a round counts once."""

    def work(transport: Any) -> Any:
        rank, model = transport.rank, Bag()
        replica, step = made(driver, model, transport, topology="ring", compression=compression, bucket_size_in_mb=1e-5)
        seen, good = [], None
        for t in range(20):
            if rank == 2 and t in (4, 14):
                good = {name: value.clone() for name, value in model.state_dict().items()}
                with torch.no_grad():
                    model.second[1] = math.nan
            if rank == 2 and t == 10:
                model.load_state_dict(good)
            step(model(torch.from_numpy(target(rank, t)).float()).nan_to_num(0.0) * 0.0)
            transport.control.gather(None)
            if rank == 0:
                seen.append(logged(caplog))
        counted = replica.stats().nonfinite
        others = [value.isfinite().all().item() for value in (model.first, model.second)]
        replica.close()
        return counted, others, seen

    with caplog.at_level(logging.WARNING):
        found = run_replicas(4, work)
    # On a ring of four, worker 2 meets 3 and 1 in turn.
    assert [found[rank][0] for rank in (0, 2)] == [0, found[1][0] + found[3][0]]
    assert found[2][0] == 6 + 5  # more than ten, and not in a row; the last round was not finished
    assert [finite for _, finite, _ in found] == [[True, True]] * 2 + [[True, False]] + [[True, True]]
    steps = [t for t, messages in enumerate(found[0][2]) for _ in messages]
    messages = [message for messages in found[0][2] for message in messages]
    assert steps == sorted(steps)
    # Worker 2 and whom it meets first, then the other one: each once; and again for the second time.
    assert len(messages) == 6, messages
    for message, number in zip(messages, [4, 4, 5, 14, 14, 15], strict=True):
        assert "worker 2" in message
        assert f"parameter 'second' in round {number}" in message


def stopping(rank: int, n: int, topology: str, driver: str) -> None:
    model = net()
    replica, step = made(driver, model, None, topology=topology)
    try:
        for t in range(40):
            x, y = batch(t, rank)
            step((model(x) - y).square().mean() * (math.nan if (rank, t) == (1, 3) else 1.0))
    finally:
        assert all(p.isfinite().all() for p in model.parameters()) == (rank != 1)
        logging.info("%s", replica.stats())
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("topology", "n", "driver"),
    [("complete", 3, "gossip"), pytest.param("one-peer-exp", 4, "wrapper", marks=pytest.mark.slow)],
)
def test_after_ten_rounds_all_workers_raise(workers, topology, n, driver):
    outcomes = workers.outcomes(n, stopping, topology, driver)
    own = outcomes[1]
    assert own.error == "NonFiniteError"
    assert "each of the last 10 rounds a replica held a NaN or an infinity, that of worker 1 (now parameter" in own.message
    assert "in round 12)" in own.message
    for rank, outcome in enumerate(outcomes):
        if topology == "complete":
            assert (outcome.error, outcome.message) == (own.error, own.message)
        elif rank != 1:
            assert issubclass(getattr(errors, outcome.error), PeerError)
            assert "NonFiniteError: in each of the last 10 rounds" in outcome.message, (rank, outcome.message)
            assert "that of worker 1 " in outcome.message, (rank, outcome.message)


@pytest.mark.parametrize("driver", ["wrapper", "gossip"])
def test_with_a_scaler_only_the_worker_with_the_nan_skips(driver):
    def work(transport: Any) -> int:
        rank, model = transport.rank, Bag()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        replica, step = made(driver, model, transport, topology="ring", scaler=scaler)
        for t in range(10):
            if (rank, t) == (0, 3):
                with torch.no_grad():
                    model.first[0] = math.nan
            loss = scaler.scale(model(torch.from_numpy(target(rank, t)).float()))
            if driver == "wrapper":
                step(loss)
            else:
                [optimizer] = replica.optimizers
                optimizer.zero_grad()
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
        updates = replica.stats().updates
        replica.close()
        return updates

    assert run_replicas(3, work) == [3, 10, 10]


@pytest.mark.parametrize("driver", ["wrapper", "gossip"])
def test_a_mean_is_refused_on_all_workers(driver, tmp_path):
    def work(transport: Any) -> Any:
        model = Bag()
        replica, step = made(driver, model, transport, topology="complete")
        step(model(torch.ones(7)) * (math.nan if transport.rank == 2 else 1.0))
        before = [p.detach().clone() for p in model.parameters()]
        calls: dict[str, Callable[[], Any]] = {
            "averaged": lambda: replica.averaged().__enter__(),
            "export": lambda: export(replica, tmp_path / "model.pt"),
        }
        if driver == "wrapper":
            calls["global_avg"] = replica.global_avg
            calls["global_avg for good"] = lambda: replica.global_avg(will_revert=False)
        else:
            calls["average_"] = replica.average_
        texts = []
        for call in calls.values():
            with pytest.raises(NonFiniteError, match="mean of all replicas, and parameter 'first' of worker 2") as caught:
                call()
            texts.append(str(caught.value))
        assert all(torch.equal(a, b) or transport.rank == 2 for a, b in zip(before, model.parameters(), strict=True))
        replica.close()
        return texts

    found = run_replicas(3, work)
    assert found[0] == found[1] == found[2]
    assert list(tmp_path.iterdir()) == []


def test_all_that_were_not_finite_are_named():
    """In a group a message names one of them."""

    def work(transport: Any) -> str:
        model = Bag()
        replica, step = made("gossip", model, transport, topology="complete")
        with pytest.raises(NonFiniteError) as caught:  # noqa: PT012
            for t in range(30):
                if (transport.rank, t) in ((0, 2), (2, 5)):
                    model.first.data[1] = math.inf
                step(model(torch.zeros(7)))
        replica.close()
        return str(caught.value)

    found = run_replicas(3, work)
    assert found[0] == found[1] == found[2]
    assert "that of worker 0 and worker 2 (now parameter 'first' in round 11)" in found[0]


class Counting(nn.Module):
    """A statistic, as BatchNorm keeps them, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))


def test_statistics_and_moving_averages_that_are_not_finite(tmp_path):
    def work(transport: Any) -> None:
        rank, model = transport.rank, Counting()
        optimizer = SGD([("weight", model.weight)])
        replica = gossip(model, optimizer, transport=transport, topology="complete")
        ema = AveragedReplica(replica, decay=0.5)
        for t in range(3):
            model.weight.square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                kept = model.weight.clone()
                model.weight.fill_(math.nan if (rank, t) == (1, 1) else 1.0)
            ema.update()
            with torch.no_grad():
                model.weight.copy_(kept)
            with replica.averaged():  # the mask is as it is on all workers
                assert model.mask.tolist() == [0.0, -math.inf]
        model.seen[2] = math.inf if rank == 0 else 1.0  # a best loss that only one worker has measured
        with replica.averaged():
            assert model.seen.tolist() == [0.0, 0.0, math.inf]
        for call in (ema.averaged().__enter__, lambda: replica.averaged().__enter__()):
            if rank == 1:
                model.seen[1] = math.nan
            with pytest.raises(NonFiniteError, match=r"(parameter 'weight'|buffer 'seen') of worker 1"):
                call()
        for call in (replica.average_, lambda: export(replica, tmp_path / "model.pt")):
            with pytest.raises(NonFiniteError, match="buffer 'seen' of worker 1 holds a NaN: reset it there"):
                call()
        with replica.averaged(buffers=False):
            assert bool(model.seen.isnan().any()) == (rank == 1)
        with pytest.raises(NonFiniteError, match="buffer 'seen' of worker 1"), replica.averaged(buffers=rank == 1):
            pass
        with replica.averaged(buffers=False), pytest.raises(NonFiniteError, match=r"export needs .* buffer 'seen' of worker 1"):
            export(replica, tmp_path / "model.pt")
        assert bool(model.seen.isnan().any()) == (rank == 1)
        replica.close()

    run_replicas(2, work)
    assert list(tmp_path.iterdir()) == []


def saving(rank: int, n: int, path: str) -> tuple[str, int, Any]:
    model = net()
    for param in model[0].parameters():
        param.requires_grad_(False)
    with torch.no_grad():
        model[0].bias[0] = -math.inf  # a mask
    replica = gossip(model, SGD([named for named in model.named_parameters() if named[1].requires_grad]), topology="ring")
    save(replica, path, {"number": 0}, keep=1)
    if rank == 1:
        model[2].weight.data[0, 0] = math.nan
    error = save(replica, path, {"number": 1}, keep=1).error
    finite = load(replica, path)["number"], bool(model[2].weight.isfinite().all())
    replica.close()
    return f"{type(error).__name__}: {error}", *finite


def test_a_replica_that_is_not_finite_is_not_saved(workers, tmp_path):
    """The checkpoint before it stays the newest."""
    for text, number, finite in workers(2, saving, str(tmp_path)):
        assert text.startswith("CheckpointError: ")
        assert "parameter '2.weight' holds a NaN or an infinity: earlier checkpoints are kept" in text
        assert (number, finite) == (0, True)


@pytest.mark.parametrize(
    ("topology", "rule", "compression"),
    some_in_the_fast_tests(["ring", "complete"], [None, OuterNesterov(lr=0.5, momentum=0.5)], [None, "int8"]),
)
def test_simulated_replicas_sit_out_as_workers_do(topology, rule, compression):
    n, at, steps = 3, (1, 4), 9
    options = {"topology": topology, "rule": rule, "compression": compression}

    start = net()  # not in the threads, which share the generator

    def work(transport: Any) -> list[Tensor]:
        model = copy.deepcopy(start)
        wrapper = DecentralizedDataParallel(model, SGD, transport=transport, **options)
        for t in range(steps):
            if (transport.rank, t) == at:
                with torch.no_grad():
                    model[0].weight[2, 1] = math.nan
            x, y = batch(t, transport.rank)
            (model(x) - y).square().mean().backward()
        values = [p.detach().clone() for p in model.parameters()]
        wrapper.close()
        return values

    found = run_replicas(n, work)
    cluster = VirtualCluster(
        start, SGD, topology, n, rule=rule, compression=compression, loss_fn=lambda model, x, y: (model(x) - y).square().mean()
    )
    for t in range(steps):
        if t == at[1]:
            with torch.no_grad():
                cluster.parameters["0.weight"][at[0], 2, 1] = math.nan
        batches = [batch(t, rank) for rank in range(n)]
        cluster.step(torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches]))
    for rank in range(n):
        for value, stacked in zip(found[rank], cluster.parameters.values(), strict=True):
            assert value.isfinite().all() == (rank != at[0])
            torch.testing.assert_close(value, stacked[rank], rtol=0, atol=2e-5 if compression is None else 2e-2, equal_nan=True)


def test_with_turns_each_turn_counts_its_own_rounds(caplog):
    """A tensor that is never finite ends training, though the turns of the others are; the warning comes once in each turn."""

    def work(transport: Any) -> tuple[str, int]:
        with torch.random.fork_rng():
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossip(model, optimizer, topology="ring", mix_every=4, transport=transport)
        if transport.rank == 1:
            with torch.no_grad():
                model[1].weight[2, 2] = math.inf
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        with pytest.raises(NonFiniteError) as error:  # noqa: PT012
            for _ in range(60):
                optimizer.step()
        found = replica.stats().nonfinite
        replica.close()
        return str(error.value), found

    with caplog.at_level(logging.WARNING):
        results = run_replicas(2, work)
    for message, rounds in results:
        assert "that of worker 1" in message
        assert "parameter '1.weight'" in message
        assert rounds == 10
    assert sum("holds a NaN" in record.message for record in caplog.records) == 2


def calibrates_alone_with_a_nan(transport: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    replica = gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=transport)
    batch = torch.full((8, 3), float("nan") if transport.rank == 1 else 1.0)
    with replica.averaged(), pytest.raises(NonFiniteError) as found:
        calibrate(replica, [batch])
    replica.close()
    return str(found.value)


def test_without_faults_statistics_that_are_not_finite_are_an_error_on_all():
    texts = run_replicas(2, calibrates_alone_with_a_nan)
    assert texts[0] == texts[1]
    assert "on workers [1]" in texts[0]


def saves_where_one_cannot(transport: Any, folder: Path) -> str:
    model = nn.Linear(3, 4)
    replica = gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=transport)
    if transport.rank == 1:
        folder /= "a file"
        folder.touch()
    began = time.monotonic()
    with pytest.raises((OSError, CheckpointError)) as found:
        save_again(replica, lambda: save(replica, folder))
    assert time.monotonic() - began < 10
    replica.close()
    return str(found.value)


def test_a_save_that_one_worker_cannot_write_waits_for_nobody(tmp_path: Path):
    """As the frameworks save, without ``faults=``: the worker with the error goes its own way."""
    assert all(run_replicas(2, lambda transport: saves_where_one_cannot(transport, tmp_path)))
