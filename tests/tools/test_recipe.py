"""The planner's recipe: the least predicted time to DDP's loss."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

from decent_dp.compression import FlatTensor, check_compression
from decent_dp.engine.layout import TensorSpec
from decent_dp.tools.planner import Choice, Cluster, Job, Link, more_steps, plan, predict, recipe


def cluster(mbit: float, n: int = 8, local: int = 1) -> Cluster:
    return Cluster(n, local, Link(20e-6, mbit * 1e6 / 8), Link(5e-6, 1e10), backend="gloo")


JOB = Job.of_step(1.02e6, 150, width=128)


@functools.cache  # several tests ask for the same ones
def taken(mbit: float, job: Job = JOB, **how: Any) -> Any:
    made = cluster(mbit, **how)
    return recipe(made, job, plan(made, job))


def test_less_is_sent_over_slower_links():
    found = [taken(mbit) for mbit in (0.3, 1, 5, 20, 60, 10_000)]
    bytes_sent = [one.prediction.choice.message_bytes(JOB) / one.prediction.choice.steps_per_mix for one in found[:-1]]
    assert bytes_sent == sorted(bytes_sent)
    assert bytes_sent[0] < bytes_sent[-1] / 40
    assert all(a.to_ddp < 1.01 * b.to_ddp for a, b in itertools.pairwise(found))
    assert found[0].to_ddp < 0.01
    ddp = predict(cluster(5), JOB, Choice("ddp")).step_ms
    assert found[2].to_ddp == pytest.approx(found[2].prediction.step_ms * found[2].steps / ddp)
    assert found[2].steps == more_steps(found[2].prediction.choice, JOB) > 1
    for one in found[1:-1]:
        assert one.prediction.step_ms < 1.6 * JOB.compute_ms
    # A slower link waits, as nothing is known of training with still less.
    assert found[0].prediction.step_ms > 1.6 * JOB.compute_ms
    assert 2 < found[0].steps <= 2.5
    assert found[-1].prediction.choice.kind == "ddp"
    assert (found[-1].steps, found[-1].to_ddp) == (1.0, 1.0)
    assert found[-1].code == "model = torch.nn.parallel.DistributedDataParallel(model)"


def test_the_code_is_what_gossip_takes():
    choice = taken(1).prediction.choice
    assert choice.low_rank
    form = r'decent_dp\.gossip\(model, optimizer, topology="base-2", compression="(low-rank:\d+,int8)", mix_every=(\d+)\)'
    code = taken(0.3).code
    found = re.fullmatch(f"replica = {form}", code)
    assert found is not None, code
    check_compression(found[1])
    assert int(found[2]) > 1
    assert "one-peer-exp" in taken(20).code or "base-2" in taken(20).code


def test_the_step_of_gossip_adamw_is_part_of_the_prediction():
    job = Job.of_step(1.02e6, 150, optimizer_ms=4, width=128)
    found = taken(5, job).prediction
    assert found.step_ms == pytest.approx(predict(cluster(5), job, found.choice).step_ms + 2.5 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(16, 4), (24, 4), (32, 8)])
@pytest.mark.parametrize("mbit", [200, 2000, 20_000])
def test_the_estimate_of_steps_is_used_for_exact_averages_only(nodes, mbit):
    """A ring of 32 workers is quick, and brings them 2 per cent closer per step."""
    n, local = nodes
    made = Cluster(n, local, Link(20e-6, mbit * 1e6 / 8), Link(5e-6, 25e9), backend="nccl")
    job = Job.of_step(25e6, 300)
    found = recipe(made, job, plan(made, job)).prediction
    # Low-rank messages and rarer mixes are tried with 'base-2' alone.
    assert found.choice.kind == "ddp" or found.choice.topology_name == "base-2" or found.mixing < 1e-6


def test_more_steps_for_less():
    numbers = [
        more_steps(Choice("decent_dp", "base-2", compression, mix_every=h), JOB)
        for compression, h in ((None, 1), ("int8", 1), ("low-rank:32", 1), ("low-rank:8,int8", 1), ("low-rank:8,int8", 4))
    ]
    assert numbers[0] == numbers[1]
    assert numbers[1:] == sorted(numbers[1:])
    assert numbers[0] > more_steps(Choice("ddp"), JOB) == 1.0


@pytest.mark.parametrize("compression", ["low-rank:4", "2bit"])
def test_messages_of_pairs_are_not_predicted_for_groups(compression):
    with pytest.raises(ValueError, match="such messages need a topology of pairs, and this one has groups of 8"):
        predict(cluster(5), JOB, Choice("decent_dp", "complete", compression))


def test_without_ddp_there_is_nothing_to_compare_with():
    made = cluster(5)
    with pytest.raises(ValueError, match="predictions must contain one of DDP"):
        recipe(made, JOB, plan(made, JOB, [Choice("decent_dp", "base-2")]))


class Transformer(nn.Module):
    """The parameters of a GPT of hidden size d with its blocks alone."""

    def __init__(self, d: int, blocks: int) -> None:
        super().__init__()
        shapes = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
        norms = [nn.LayerNorm(d) for _ in range(2 * blocks)]
        self.parts = nn.ModuleList([*norms, *(nn.Linear(*shape) for _ in range(blocks) for shape in shapes)])


@pytest.mark.parametrize(("d", "blocks"), [(128, 2), (256, 4), (768, 1)])
@pytest.mark.parametrize("name", ["low-rank:1", "low-rank:8,int8", "low-rank:32,bfloat16", "int8", "1bit", "2bit", "4bit"])
def test_the_estimated_bytes_of_a_transformer(d, blocks, name):
    with torch.device("meta"):
        model = Transformer(d, blocks)
    specs = [TensorSpec.of(key, param) for key, param in model.named_parameters()]
    params = sum(spec.numel for spec in specs)
    tensors = [FlatTensor(i, spec.numel, spec.rows) for i, spec in enumerate(specs)]
    made, sent = check_compression(name)(tensors, torch.float32, torch.device("cpu")), 0
    for meeting in range(2):  # projections of one side and of the other
        made.begin((0, 1), 0, meeting)
        sent += sum(chunk.payload for chunk in made.chunks)
    estimated = Choice("decent_dp", "base-2", name).message_bytes(Job.of_step(params, 1, width=d))
    assert estimated == pytest.approx(sent / 2, rel=0.08)
