"""``make learning``: its contenders beside independent computations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import learning
from benchmarks.learning import GradientTracking, Kept, QuasiGlobalMomentum, Run, train
from benchmarks.learning_tasks import make_task

TINY = Run("digits", 2, "DDP", 1e-2, steps=8)


def test_ddp_is_one_model_on_all_batches():
    task = make_task("digits", 2, None, 0)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
    for t in range(TINY.steps):
        # Warm-up over half of so few steps, then a cosine; from the formula of the schedule.
        rate = 0.01 + 0.99 * t / 4 if t < 4 else (1 + math.cos(math.pi * (t - 4) / 4)) / 2
        optimizer.param_groups[0]["lr"] = 1e-2 * rate
        x, y = task.batch(t)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat(list(x))), torch.cat(list(y))).backward()
        optimizer.step()
    loss, _, accuracy = task.evaluate(model)
    found = train(TINY)
    assert found.loss == pytest.approx(loss, rel=1e-3)
    assert found.measure == pytest.approx(accuracy)
    assert found.bytes == 1.0


@pytest.mark.parametrize("kind", [GradientTracking, QuasiGlobalMomentum])
def test_the_baselines_are_plain_optimizers_where_all_replicas_have_the_same_data(kind):
    """Gradient tracking is AdamW then. Quasi-global momentum is SGD whose momentum follows the movement, from its formula."""
    torch.manual_seed(0)
    start, run = torch.randn(3, 2), replace(TINY, lr=0.1)
    params = {"w": nn.Parameter(start.expand(4, 3, 2).clone())}
    method = kind(params, run)
    own = nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([own], lr=0.1, weight_decay=0.01)
    momentum = torch.zeros(3, 2)
    for t in range(6):
        gradient = torch.from_numpy(np.random.default_rng(t).normal(size=(3, 2))).float()
        with torch.no_grad():
            method.step({"w": gradient.expand(4, 3, 2).clone()}, lambda value: value.mean(0, keepdim=True).expand_as(value))
        own.grad = gradient
        if kind is GradientTracking:
            adamw.step()
        else:
            move = 0.1 * (0.9 * momentum + gradient)
            own.data -= move
            momentum = 0.9 * momentum + 0.1 * move / 0.1
    for replica in params["w"].detach():
        torch.testing.assert_close(replica, own.detach(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_every_contender_trains(tmp_path: Path):
    """Also that finished runs are kept, and are not made again."""
    kinds = [*learning.EVEN, *learning.UNEVEN, *learning.MORE]
    runs = [replace(TINY, n=8, contender=kind, steps=4, alpha=0.0) for kind in dict.fromkeys(kinds)]
    kept = Kept(tmp_path / "runs.jsonl")
    for run in runs:
        outcome = train(run)
        assert math.isfinite(outcome.loss)
        assert 0 <= outcome.measure <= 100
        assert (outcome.distance > 1e-6) == (not run.contender.startswith("DDP"))
        assert outcome.last_step > 0
    kept.make(runs[:1], 1)
    assert Kept(tmp_path / "runs.jsonl")[runs[0]] == kept[runs[0]] == train(runs[0])
    kept.make(runs[:1], 1)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_real_workers_learn_as_simulated_ones():
    simulated = train(replace(TINY, contender="GossipAdamW", steps=30))
    real = train(replace(TINY, contender="GossipAdamW", steps=30, real=True))
    # gossip() mixes after the step and the simulator before it, which decoupled decay feels.
    assert real.loss == pytest.approx(simulated.loss, rel=0.02)
    assert real.distance == pytest.approx(simulated.distance, rel=0.05)
    assert real.bytes == pytest.approx(simulated.bytes, rel=0.1)


def test_the_verdict_names_what_was_missed():
    line = {"contender": "GossipAdamW", "task": "digits", "n": 4, "alpha": None, "distance": 2.0, "last_step": 1.0, "lr": 1.0}
    line["real"] = False
    met, missed = ({**line, "loss_ratio": ratio, "gap": 0.0} for ratio in (1.05, 1.06))
    assert [text.partition(":")[0] for text in learning.verdict([met, missed])] == ["met", "missed"]
    uneven = {**line, "alpha": 0.1, "loss_ratio": 9.0, "gap": 1.1, "lr": 0.01}
    assert learning.verdict([uneven]) == []
    assert learning.verdict([{**uneven, "contender": learning.TRACKED}])[0].startswith(
        "missed: GossipAdamW, tracking, digits, 4 workers, α = 0.1, rate 0.01"
    )
    of_tracking = {**uneven, "contender": learning.TRACKED, "gap": 1.0}
    faster = [{**of_tracking, "lr": 0.05, "gap": gap} for gap in (1.4, 1.6)]
    assert [text.partition(":")[0] for text in learning.verdict([of_tracking, *faster])] == ["met", "met", "missed"]
