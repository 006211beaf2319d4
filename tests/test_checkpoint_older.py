"""Checkpoints of format 3, which had the exchange in flight: ``tests/checkpoints/format-3`` is what it wrote."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

import decent_dp
from decent_dp.checkpoint import load, read_parameters
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.serialization import loaded
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import loss, net, values
from tests.resuming import Job, assert_equal

FORMAT_3 = Path(__file__).parent / "checkpoints" / "format-3"
OLDER = "an older version has saved this: what was in flight is dropped"


def saved(what: str) -> list[Any]:
    (step,) = (FORMAT_3 / what).glob("step-*")
    trees = []
    for rank in range(2):
        with Shard(step / shard_name(rank), rank) as shard:
            shard.verify()
            trees.append(loaded(shard.tree())["snapshot"])
    return trees


def gossiping(at: InProcessTransport, compression: str | None = "int8") -> tuple[Any, torch.optim.Optimizer, Any]:
    model = net(9 + at.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, decent_dp.gossip(model, optimizer, transport=at, topology="ring", compression=compression)


def mean_of(parts: list[Any]) -> Any:
    return {name: sum(part[name].double() for part in parts) / len(parts) for name in parts[0]}


def test_a_gossip_resumes(caplog):
    before = saved("gossip")
    assert all(tree["exchange"]["in_flight"] for tree in before), "the fixture has nothing in flight"

    def work(at: InProcessTransport) -> Any:
        model, optimizer, run = gossiping(at)
        assert load(run, FORMAT_3 / "gossip") == {"epoch": 4, "rank": at.rank}
        own = before[at.rank]
        assert (run.stats().rounds, run.stats().updates) == (own["round"], own["steps"]) == (4, 4)
        assert_equal(values(model), own["parameters"])
        momenta = [optimizer.state[param]["momentum_buffer"] for param in model.parameters()]
        assert_equal(momenta, [state["momentum_buffer"] for state in own["optim"]["optimizers"][0]["state"].values()])
        run.flush()
        assert_equal(values(model), own["parameters"])  # nothing is in flight
        optimizer.param_groups[0]["lr"] = 0.0
        for t in range(4, 8):
            optimizer.zero_grad()
            loss(model, t, at.rank).backward()
            optimizer.step()
        run.flush()
        found = values(model), run.consensus_distance()
        run.close()
        return found

    after = run_replicas(2, work)
    assert caplog.text.count(OLDER) == 2
    apart = sum(float((before[0]["parameters"][k] - before[1]["parameters"][k]).square().sum()) for k in values(net())) ** 0.5
    assert after[0][1] < 0.1 * apart
    for name, mean in mean_of([found for found, _ in after]).items():
        torch.testing.assert_close(mean, mean_of([tree["parameters"] for tree in before])[name], rtol=0, atol=1e-6)


def test_a_wrapper_resumes(caplog):
    """Also with what its edges have learned."""
    before = saved("wrapper")
    job = Job({"topology": "ring", "compression": "low-rank:1"}, optim_fn=partial(torch.optim.AdamW, lr=0.02))

    def work(at: InProcessTransport) -> None:
        model, own = job.wrap(9, at), before[at.rank]
        assert load(model, FORMAT_3 / "wrapper") == {"epoch": 4, "rank": at.rank}
        assert_equal(values(model.module), own["parameters"])
        found = model.replica.engine.state_dict()["compression"]
        assert found
        assert_equal(found, own["compression"])
        job.train(model, range(4, 8), at.rank)
        assert model.stats().rejected == 0  # both ends have the same bases
        model.close()

    run_replicas(2, work)
    assert caplog.text.count(OLDER) == 2


def test_parameters_are_read():
    mean = mean_of([tree["parameters"] for tree in saved("gossip")])
    for name, value in read_parameters(FORMAT_3 / "gossip").items():
        torch.testing.assert_close(value.double(), mean[name], rtol=0, atol=1e-6)
