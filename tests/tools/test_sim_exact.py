"""The simulator against real workers, step by step: parameters and BatchNorm's buffers of every replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from decent_dp.tools.sim import VirtualCluster
from tests.helpers import covering, some_and_all
from tests.tools.sim_cases import OPTIMIZERS, Case, compare, simulate, train_really

TOPOLOGIES = ["complete", "ring", "one-peer-exp", "alternating-exp-ring", "base-2", "random-matching", "hierarchical"]
LOCAL = {"alternating-exp-ring": 2, "hierarchical": 2}


def real(rank: int, n: int, cases: list[Case]) -> list[Any]:
    return [train_really(rank, n, case) for case in cases]


def hold(workers: Any, n: int, cases: list[Case], **how: Any) -> list[VirtualCluster]:
    """Runs all cases on n real workers, in one launch, and compares; the clusters."""
    found = workers(n, real, cases, timeout=200)
    clusters = []
    for i, case in enumerate(cases):
        results = [worker[i] for worker in found]
        clusters.append(compare(case, n, results, **how))
        if case.dtype == "float64":  # messages of narrower values are padded
            assert clusters[-1].bytes_sent == sum(sent for _, _, sent in results), case
    return clusters


WAYS = [
    ("sgd", "float32", True),
    ("momentum", "float32", False),
    ("sgd", "float64", False),
    ("momentum", "float64", True),
    ("adamw", "float64", True),
    ("accum-adamw", "float64", False),
]


def crossed(names: list[str], models: list[str], ways: int) -> list[Case]:
    """So many of the ways for each model and topology: every topology meets every model, and with two of them every way."""
    cases = []
    for row, topology in enumerate(names):
        for column, model in enumerate(models):
            for way in range(column, len(WAYS), len(models))[:: 3 - ways]:
                optimizer, dtype, overlap = WAYS[(way + row) % len(WAYS)]
                options = {"overlap": overlap != bool((row + column) % 2)}
                cases.append(Case(topology, model, optimizer, dtype, LOCAL.get(topology, 1), options=options))
    return cases


MODELS = ["mlp", "conv", "attention"]
NAMES = [*TOPOLOGIES, "graph", "complete:2,ring", "varying", "unrepeated"]


def test_some_topologies_models_and_optimizers(workers):
    cases = covering(crossed(NAMES, MODELS, 1))
    assert {case.topology for case in cases} == set(NAMES)
    assert all(cluster.vectorized for cluster in hold(workers, 4, cases))


ODD = [
    Case(topology, model, optimizer, local=local, options={"overlap": overlap})
    for topology in ("complete", "ring", "base-2", "random-matching", "hierarchical", "graph")
    for model, optimizer, overlap in (("conv", "momentum", True), ("mlp", "adamw", False))
    for local in ((1, 2, 3) if topology == "hierarchical" else (1,))
]
WIRED = [
    *(
        Case(t, "mlp", "sgd", options={"compression": compression})
        for t in ("ring", "complete", "varying")
        for compression in ("bfloat16", "int8")
    ),
    *(
        Case(t, "conv", "adamw", options={"compression": compression})
        for t in ("varying", "unrepeated")
        for compression in ("bfloat16", "int8")
    ),
    *(
        Case("alternating-exp-ring", "attention", "adamw", local=2, options={"compression": compression})
        for compression in ("bfloat16", "int8")
    ),
    *(
        Case("complete", "wide", "sgd", options={"compression": compression, "overlap": False})
        for compression in ("bfloat16", "int8")
    ),
    Case("ring", "channels-last", "sgd", options={"compression": "int8"}),
    Case("ring", "mlp", "sgd", options={"compression": "int8", "overlap": False}),
    Case("varying", "conv", "adamw", options={"compression": "int8", "mix_every": 3}),
]


EVERY = {
    "all of four": (4, crossed(NAMES, MODELS, 2)),
    "all of eight": (8, crossed(NAMES, MODELS, 1)),
    "six": (6, ODD),
    "five": (5, [case for case in ODD if case.local == 1]),
    "compressed, four": (4, WIRED),
    "compressed, eight": (8, WIRED[::2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_topology_model_optimizer_and_compression(workers, name):
    assert all(cluster.vectorized for cluster in hold(workers, *EVERY[name]))


SPECIAL = [
    Case("ring", "conv", "momentum", options={"grad_clip_norm": 0.3}),
    Case("varying", "mlp", "adamw", scheduled=True, options={"mix_every": 3}),
    Case("one-peer-exp", "conv", "accum-adamw", scheduled=True, options={"overlap": False, "grad_clip_norm": 0.2}),
    Case("one-peer-exp", "mlp", "adamw", scaled=True, inf=(2, 1), scheduled=True),
    Case("complete", "mlp", "momentum", scaled=True, inf=(1, 3), options={"grad_clip_norm": 0.3, "overlap": False}),
    Case("ring", "unused", "momentum"),
    Case("ring", "unused", "accum-adamw", scaled=True, inf=(3, 2)),
    Case("ring", "channels-last", "adamw"),
]


@some_and_all(SPECIAL)
def test_clip_schedule_scaler_and_parameters_without_gradients(workers, cases):
    clusters = hold(workers, 4, cases)
    assert [min(cluster.steps) for cluster in clusters] == [5 - (case.inf is not None) for case in cases]
    assert [max(cluster.steps) for cluster in clusters] == [5] * len(cases)
    assert [len(cluster.optimizers) for cluster in clusters] == [4 if case.scaled else 1 for case in cases]


@pytest.mark.slow
def test_the_loop_over_replicas(workers):
    cases = [
        Case("ring", "branching", "momentum"),
        Case("varying", "branching", "adamw", options={"grad_clip_norm": 0.3, "compression": "int8"}),
        Case("one-peer-exp", "branching", "accum-adamw", scheduled=True, scaled=True, inf=(0, 2)),
        Case("ring", "conv", "adamw", scheduled=True),
    ]
    found = workers(4, real, cases)
    for i, case in enumerate(cases):
        assert compare(case, 4, [worker[i] for worker in found], vectorize=False).vectorized is False


@pytest.mark.parametrize(
    "model", ["mlp", "attention", *(pytest.param(of, marks=pytest.mark.slow) for of in ("conv", "unused", "channels-last"))]
)
def test_one_pass_equals_the_loop(model):
    ways = ({}, {"grad_clip_norm": 0.3, "overlap": False})
    for number, optimizer in enumerate(OPTIMIZERS):
        for options in ways if model == "mlp" else [ways[number % 2]]:
            case = Case("varying", model, optimizer, scheduled=True, options=options)
            _, fast = simulate(5, case, vectorize=True)
            slow_cluster, slow = simulate(5, case, vectorize=False)
            assert len(slow_cluster.optimizers) == 5
            for one, other in zip(fast, slow, strict=True):
                for name in one:
                    # Adam divides by a gradient's size, also where it is a rounding of zero (biases before a norm).
                    tolerance = case.tolerance()
                    np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=f"{case} {name}")
