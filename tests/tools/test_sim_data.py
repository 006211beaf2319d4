"""Splits of samples, batches, and whole simulated runs."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_adamw
from decent_dp.tools.sim import (
    Batches,
    Experiment,
    Result,
    Simulation,
    VirtualCluster,
    digits,
    dirichlet_split,
    experiment,
    run,
)

# -- the split -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    labels=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=80),
    share=st.floats(0, 1),
    alpha=st.one_of(st.none(), st.just(math.inf), st.floats(1e-8, 1e6), st.floats(5e-324, 1.7e308)),
    seed=st.integers(0, 5),
)
@example(labels=[0, 0, 1, 1, 1, 1, 2, 7, 7], share=0.5, alpha=0.0006, seed=0)  # tiny chances
def test_a_split_is_a_partition(labels, share, alpha, seed):
    n = 1 + int(share * (len(labels) - 1))
    split = dirichlet_split(np.array(labels), n, alpha, seed)
    assert sorted(np.concatenate(split).tolist()) == list(range(len(labels)))
    assert len(split) == n
    sizes = [len(indices) for indices in split]
    assert max(sizes) - min(sizes) <= 1 <= min(sizes)
    again = dirichlet_split(labels, n, alpha, seed)
    assert all(np.array_equal(one, other) for one, other in zip(split, again, strict=True))


def unevenness(alpha: float | None, seed: int = 0) -> float:
    """Mean total variation distance of a worker's classes from all classes."""
    labels = np.repeat(np.arange(10), 400)
    rows = [np.bincount(labels[indices], minlength=10) / len(indices) for indices in dirichlet_split(labels, 20, alpha, seed)]
    return float(np.abs(np.stack(rows) - 0.1).sum(1).mean() / 2)


@pytest.mark.slow
def test_the_smaller_alpha_the_fewer_classes_a_worker_sees():
    found = [unevenness(alpha) for alpha in (0.1, 1.0, 10.0, 1000.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.7
    assert unevenness(None) < 0.1 > unevenness(math.inf)
    # Where no class runs out the mixtures are Dirichlet's: of two classes Beta(α/2, α/2), whose variance is 1/(4 (α + 1)).
    labels = np.repeat([0, 1], 20_000)
    shares = [np.mean(labels[indices]) for seed in range(4) for indices in dirichlet_split(labels, 200, 4.0, seed)]
    assert np.mean(shares) == pytest.approx(0.5, abs=1e-9)
    assert np.var(shares) == pytest.approx(1 / 20, rel=0.15)


def test_the_smallest_and_the_largest_alpha():
    labels = np.repeat(np.arange(5), 20)
    for alpha in (5e-324, 1e-308, 1e-100):
        split = dirichlet_split(labels, 2, alpha, seed=1)
        assert [np.bincount(labels[indices]).max() for indices in split] == [20, 20]  # each has all of a class of its own
    for alpha in (1e15, 1.7e308, 10**400):
        split = dirichlet_split(labels, 5, alpha, seed=1)
        assert all(np.bincount(labels[indices], minlength=5).min() > 0 for indices in split)
    assert [x.tolist() for x in dirichlet_split(labels, 5, 1e-200)] == [x.tolist() for x in dirichlet_split(labels, 5, 5e-324)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "n, the number of workers, must be a whole number, at least 1, got 0"),
        ({"n": 5}, "4 samples are too few for 5 workers"),
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"alpha": math.nan}, "alpha must be positive"),
        ({"labels": np.zeros((2, 2))}, "labels must be 1-D"),
        ({"alpha": "even"}, "alpha must be a positive number, or None for an even split, got 'even'"),
        ({"n": 2.5}, "n, the number of workers, must be a whole number, at least 1, got 2.5"),
        ({"seed": -1}, "seed must be a whole number, at least 0, got -1"),
    ],
)
def test_splits_that_are_refused(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dirichlet_split(**{"labels": [0, 1, 0, 1], "n": 2, "alpha": 1.0, **wrong})


# -- batches ---------------------------------------------------------------------------------------------------------------


def test_batches_come_from_a_workers_own_samples():
    shards = [np.array([3, 5, 8]), np.array([0]), np.array([1, 2, 4, 6, 7])]
    draw = Batches(shards, 16, seed=2)
    drawn = torch.stack([draw(t) for t in range(40)])
    assert drawn.shape == (40, 3, 16)
    for worker, shard in enumerate(shards):
        counts = np.bincount(drawn[:, worker].reshape(-1).numpy(), minlength=9)
        assert set(np.flatnonzero(counts)) == set(shard.tolist())
        assert counts[shard] == pytest.approx(np.full(len(shard), 640 / len(shard)), rel=0.35)
    assert torch.equal(drawn[7], Batches(shards, 16, seed=2)(7))
    assert torch.equal(drawn[7, :2], Batches(shards[:2], 16, seed=2)(7))  # more workers change nobody's draws
    assert not torch.equal(drawn[7], drawn[8])
    assert not torch.equal(drawn[7], Batches(shards, 16, seed=3)(7))
    with pytest.raises(ValueError, match="worker 1 has no samples"):
        Batches([np.array([1]), np.array([], dtype=np.int64)], 4)
    for wrong, message in (
        (([], 4), "there is no worker"),
        ((shards, 0), "size, the samples per batch, must be a whole number, at least 1, got 0"),
        ((shards, -1), "size, the samples per batch, must be a whole number, at least 1, got -1"),
        ((shards, 2.5), "size, the samples per batch, must be a whole number, at least 1, got 2.5"),
        ((shards, 4, -1), "seed must be a whole number, at least 0, got -1"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Batches(*wrong)
    with pytest.raises(ValueError, match="t, the step, must be a whole number, at least 0, got -1"):
        draw(-1)


def test_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.cache_clear()
    with pytest.raises(ImportError, match=r"pip install -e '\.\[sim\]'"):
        run(Simulation())


# -- runs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_every_row_by_hand(optimizer):
    """Each worker's batches from its share, the schedule, the means since the row before: all with this run's one seed."""
    simulation = Simulation(n=4, topology="ring", steps=45, eval_every=20, alpha=0.3, batch=8, seed=3, optimizer=optimizer)
    torch.manual_seed(9)
    result = run(simulation, hidden=(16,))
    # Nobody else's numbers were drawn.
    assert float(torch.rand(1)) == float(torch.rand(1, generator=torch.Generator().manual_seed(9)))
    data = digits()
    torch.manual_seed(3)
    adamw = partial(optim_fn_adamw, lr=2e-3, weight_decay=0.1)
    cluster = VirtualCluster(
        nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        adamw if optimizer == "adamw" else partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        "ring",
        4,
        # 5 % of 45 steps, rounded up.
        lr_scheduler_fn=partial(lr_scheduler_fn_cosine_with_warmup, t_warmup=3, t_max=42),
    )
    shards = dirichlet_split(data.y.numpy(), 4, 0.3, 3)
    batches = Batches(shards, 8, 3)
    rows, losses = [], []
    for step in range(1, 46):
        chosen = batches(step - 1)
        losses.append(float(cluster.step(data.x[chosen], data.y[chosen]).double().mean()))
        if step not in (20, 40, 45):
            continue
        models = [cluster.mean_model(), *(cluster.replica_model(i) for i in range(4))]
        right = [float((model(data.x_test).argmax(1) == data.y_test).double().mean()) for model in models]
        flat = torch.cat([value.reshape(4, -1) for value in cluster.parameters.values()], 1).double()
        distance = float((flat - flat.mean(0)).square().sum(1).mean().sqrt())
        rows.append([step, float(np.mean(losses)), distance, right[0], min(right[1:]), step * 4 * 4 * 2 * flat.shape[1] // 2])
        losses = []
    assert [list(asdict(row).values()) for row in result.rows] == [pytest.approx(row, rel=1e-5) for row in rows]
    assert (result.last, result.parameters) == (result.rows[-1], flat.shape[1])
    assert result.samples == (min(map(len, shards)), max(map(len, shards)))
    assert run(simulation, hidden=(16,)).rows == result.rows


def test_every_setting_has_an_effect():
    base = {"n": 4, "steps": 6, "eval_every": 6, "batch": 8}
    found: dict[str, Result] = {}
    for name, changed in {
        "plain": {},
        "synchronous": {"overlap": False},
        "rarely": {"mix_every": 3},
        "int8": {"compression": "int8"},
        "sgd": {"optimizer": "sgd"},
        "momentum": {"optimizer": "momentum"},
        "tracked": {"optimizer": "momentum", "momentum_tracking": True},
        "accum": {"optimizer": "accum-adamw"},
        "slow": {"lr": 1e-5},
        "skewed": {"alpha": 0.1},
        "nodes": {"topology": "alternating-exp-ring", "local_world_size": 2},
        "switched": {"topology": "complete:3,ring"},
        "seed": {"seed": 1},
    }.items():
        found[name] = run(Simulation(**{**base, **changed}), hidden=(8,))
    losses = [result.last.loss for result in found.values()]
    assert len(set(losses)) == len(losses)
    assert found["rarely"].last.bytes_sent == found["plain"].last.bytes_sent / 3
    assert found["int8"].last.bytes_sent < 0.3 * found["plain"].last.bytes_sent
    assert found["slow"].last.loss > found["plain"].last.loss


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "at least 1, got 0"),
        ({"n": 6}, "needs a power of two workers"),
        ({"n": 2048}, "1437 samples are too few for 2048 workers"),
        ({"batch": 0}, "the samples per batch, must be a whole number, at least 1, got 0"),
        ({"steps": 2.5}, "steps must be a whole number, at least 1, got 2.5"),
        ({"eval_every": 0}, "eval_every must be a whole number, at least 1"),
        ({"mix_every": -1}, "mix_every must be a whole number, at least 1, got -1"),
        ({"topology": "alternating-exp-ring", "local_world_size": 3}, "does not divide"),
        ({"seed": -1}, "seed must be a whole number, at least 0, got -1"),
        ({"overlap": "no"}, "overlap must be True or False, got 'no'"),
        ({"optimizer": "adamv"}, "did you mean 'adamw'?"),
        ({"momentum_tracking": True}, "and it is 'adamw'"),
        ({"compression": "bfloat61"}, "did you mean 'bfloat16'?"),
        ({"alpha": 0}, "alpha must be positive"),
        ({"lr": math.nan}, "lr must be a positive learning rate, got nan"),
        ({"device": "gpu"}, "device must be 'cpu', 'cuda', or a GPU by its number such as 'cuda:1', got 'gpu'"),
        ({"device": "cuda:3"}, "device 'cuda:3' needs a GPU, and torch"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(monkeypatch, wrong, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises((ValueError, TypeError)) as caught:
        Experiment(Simulation(**wrong))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_of_a_small_model_takes_one_thread(monkeypatch):
    seen: list[int] = []
    step = VirtualCluster.step
    monkeypatch.setattr(VirtualCluster, "step", lambda *args: (seen.append(torch.get_num_threads()), step(*args))[1])
    torch.set_num_threads(2)
    try:
        for hidden in ((256, 256), (512, 256)):
            run(Simulation(n=2, steps=1), hidden=hidden)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 2]


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": "gossip-adamw", "momentum_tracking": True},
        {"optimizer": "accum-adamw", "compression": "int8", "mix_every": 2},
        {"optimizer": "momentum", "compression": "bfloat16", "topology": "complete", "overlap": False},
    ],
)
def test_no_tensor_of_a_run_is_on_the_default_device(changed):
    """Where it has no values here: a tensor on it would be an error, as one on the CPU would be in a run on a GPU."""
    settings = Simulation(**{"n": 4, "steps": 4, "eval_every": 2, "batch": 8, **changed})
    expected = run(settings, hidden=(8,))
    digits.cache_clear()
    torch.set_default_device("meta")
    try:
        found = run(settings, hidden=(8,))
    finally:
        torch.set_default_device(None)
    assert found.rows == expected.rows


def test_a_run_puts_all_of_it_on_its_device(monkeypatch):
    """The model, the data and the batches: seen on a device without values, up to the first step."""
    seen: set[str] = set()

    class Cluster:
        def __init__(self, model: nn.Module, *_: Any, **__: Any) -> None:
            self.parameters: dict[str, torch.Tensor] = {}
            seen.update(str(param.device) for param in model.parameters())

        def step(self, *batch: torch.Tensor) -> torch.Tensor:
            seen.update(str(tensor.device) for tensor in batch)
            raise ZeroDivisionError

    monkeypatch.setattr(experiment, "VirtualCluster", Cluster)
    monkeypatch.setattr(experiment, "find_device", lambda name: torch.device("meta"))
    with pytest.raises(ZeroDivisionError):
        run(Simulation(n=2, steps=1, optimizer="sgd", device="cuda:7"))
    assert seen == {"meta"}


@pytest.mark.parametrize("topology", ["base-2", "complete"])
def test_a_thousand_replicas(topology):
    began = time.process_time()
    n = 1024
    cluster = VirtualCluster(nn.Linear(8, 2), partial(optim_fn_adamw, lr=0.05), topology, n, local_world_size=8)
    draw = torch.Generator().manual_seed(0)
    first = last = 0.0
    for t in range(20):
        x = torch.randn(n, 4, 8, generator=draw)
        last = float(cluster.step(x, (x[..., 0] > 0).long()).mean())
        first = first or last
        assert t or last > 0.5
    assert last < 0.8 * first
    x = torch.randn(200, 8, generator=draw)
    assert float((cluster.mean_model()(x).argmax(1) == x[:, 0].gt(0)).float().mean()) > 0.8
    assert time.process_time() - began < 5  # half a second
