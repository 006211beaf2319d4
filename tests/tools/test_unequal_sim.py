"""Workers of unequal speed in virtual time (``benchmarks.unequal_sim``), against computations of a few lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.unequal_sim import BATCH, LR, MOMENTUM, VirtualTime, figures, loss_of_mean, partners_of
from decent_dp.tools.sim import Batches, VirtualCluster, digits, dirichlet_split
from decent_dp.tools.sim.experiment import HIDDEN, make_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def drawn(seconds: np.ndarray) -> Callable[[int], float]:
    """Durations (steps, workers)."""
    counts = [itertools.count() for _ in range(seconds.shape[1])]
    return lambda i: float(seconds[next(counts[i]), i])


@pytest.mark.parametrize("name", ["base-2", "ring", "one-peer-exp"])
def test_waiting_is_a_recurrence(name: str) -> None:
    """An update ends when its worker has computed, and the partner of its last exchange has begun that."""
    steps, n = 50, 8
    seconds = np.random.default_rng(0).lognormal(0.0, 0.5, (steps + 1, n))
    partners = partners_of(name, n)
    run = VirtualTime(partners, drawn(seconds), tolerates=False)
    run.run(seconds.max(1).cumsum()[steps - 1] * 0.4)
    ends = [seconds[0]]
    for t in range(1, steps):
        partner = partners[(t - 1) % len(partners)]
        ends.append(np.maximum(ends[-1] + seconds[t], ends[-1][partner]))
    for i, worker in enumerate(run.workers):
        assert len(worker.updates) > 10
        for t, (round_, end) in enumerate(worker.updates):
            assert round_ == t
            assert end == pytest.approx(ends[t][i])


def test_two_that_wait_go_at_the_pace_of_the_slower_one() -> None:
    for tolerates, pace in ((False, 0.25), (True, 0.9)):
        run = VirtualTime([[1, 0]], lambda i: (0.25, 1.0)[i], tolerates=tolerates)
        run.run(400.0)
        paces = figures(run, 200.0, 400.0)["paces"]
        assert paces == [pytest.approx(pace, abs=0.03), pytest.approx(1.0, abs=0.03)]


def test_equal_speeds_learn_as_the_cluster_does() -> None:
    """Round by round, with what took place: without a hole that is the simulator's own training."""
    n, steps, data = 4, 6, digits()
    run = VirtualTime(partners_of("base-2", n), lambda i: 1.0, tolerates=True)
    run.run(steps + 1.5)  # the last exchange of the window has ended
    model = make_model([data.x.shape[1], *HIDDEN, data.classes], 0)
    cluster = VirtualCluster(model, partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM), "base-2", n, overlap=False)
    batches = Batches(dirichlet_split(data.y.numpy(), n, None, 0), BATCH, 0)
    for t in range(steps):
        cluster.step(data.x[batches(t)], data.y[batches(t)])
    with torch.no_grad():
        expected = float(torch.nn.functional.cross_entropy(cluster.mean_model()(data.x_test), data.y_test))
    assert loss_of_mean(run, 0.0, steps + 0.5, 0) == pytest.approx(expected, rel=1e-4)
    run = VirtualTime(partners_of("base-2", n), lambda i: 1.0 + 2.0 * (i == 3), tolerates=True)
    run.run(60.0)
    assert loss_of_mean(run, 40.0, 46.0, 0) < 2.3
