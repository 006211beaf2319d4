"""The outer optimizer with real workers: against NumPy in float64, and against DiLoCo written with torch's SGD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import take
from decent_dp.rules import Gossip, OuterNesterov
from decent_dp.topo import Topology, TopologyReg, make_topology
from decent_dp.transport import InProcessTransport
from tests.test_law import AdamWTwin, Linear, SgdTwin, Varying, data, gradient, matrix
from tests.test_mix_every import Part, mix_of, parts

N = 4
# lr and momentum of the inner optimizers are those of the twins.
INNER: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "sgd": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), SgdTwin),
    "adamw": (partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1), AdamWTwin),
}


def start() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(5, 3))


def edit(rank: int, t: int) -> np.ndarray:
    """The user's change of the parameters between updates t and t + 1."""
    return np.random.default_rng([9, rank, t]).normal(size=(5, 3)) * 0.1


@dataclass(frozen=True)
class Case:
    """Attributes: ``edited``: parameters are changed between updates; ``factor``: the adaptive one."""

    topology: str
    inner: str = "sgd"
    h: int = 1
    overlap: bool = True
    rule: Any = field(default_factory=partial(OuterNesterov, momentum=0.6))  # more is refused with Varying
    steps: int = 7
    factor: float = 1.0
    edited: bool = False

    def edges(self, t: int, n: int, offset: int = 0) -> Any:
        """The edges of update t of a bucket whose turn begins at ``offset``; None if it does not mix.

        The parts of a composed topology begin with their first round.
        """
        name, at = self.topology, t
        if ":" in name:
            first, last = name.split(",")
            turn = int(first.split(":")[1])
            name, at = (first.split(":")[0], t) if t < turn else (last, t - turn)
        mix = mix_of(at, self.h, offset)
        return None if mix is None else topology_of(name, n).round(mix)


def topology_of(name: str, n: int) -> Topology:
    kind = {"varying": Varying}.get(name) or TopologyReg.registry[name]
    made = kind(1, world_size=n, rank=0)  # type: ignore[call-arg]
    assert isinstance(made, Topology)
    return made


# -- the twin --------------------------------------------------------------------------------------------------------------


def twin(case: Case, n: int) -> np.ndarray:
    """Each worker's parameters at the end, from the definitions alone."""
    lr, mu = case.rule.lr, case.rule.momentum
    inner = INNER[case.inner][1](n)
    x = [start() for _ in range(n)]
    anchors = [start() for _ in range(n)]
    momenta = [np.zeros((5, 3)) for _ in range(n)]
    buckets = parts(case.h)

    def mix(part: Part) -> None:
        w, rows, sent = matrix(case.edges(part.at, n, part.offset), n), part.rows, part.sent
        for i in range(n):
            mixed = sent[i] + case.factor * sum(w[i, j] * (sent[j] - sent[i]) for j in range(n))
            pseudo = anchors[i][rows] - mixed
            momenta[i][rows] = mu * momenta[i][rows] + pseudo
            anchors[i][rows] -= lr * (pseudo + mu * momenta[i][rows])
            # The replica moves to the anchor, plus its own movement since it was sent.
            x[i][rows] = anchors[i][rows] + (x[i][rows] - sent[i])
        part.sent = None

    for t in range(case.steps):
        g = [gradient(x[i], i, t) for i in range(n)]
        mixes = [case.edges(t, n, part.offset) is not None for part in buckets]
        for part, again in zip(buckets, mixes, strict=True):
            if case.overlap and part.sent is not None and (again or t - part.at >= part.time):
                mix(part)
        x = [inner(i, t, x[i], g[i]).copy() for i in range(n)]
        for part, again in zip(buckets, mixes, strict=True):
            if again:
                part.sent, part.at = [xi[part.rows].copy() for xi in x], t
                if not case.overlap:
                    mix(part)
        if case.edited:
            x = [x[i] + edit(i, t) for i in range(n)]
    return np.stack(x)


# -- the same with the library ---------------------------------------------------------------------------------------------


def train(rank: int, case: Case, **options: Any) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """This worker's parameters at the end, and the rule's state after each update, each tensor as 5 × 3."""
    options = {"mix_every": case.h, "overlap": case.overlap, "rule": case.rule, **options}
    model = DecentralizedDataParallel(Linear(), INNER[case.inner][0], topology=case.topology, **options)
    model.set_adaptive_factor(case.factor)
    states = []
    for t in range(case.steps):
        a, b = (torch.from_numpy(array) for array in data(rank, t))
        (model(a) - b).square().mean().backward()
        if case.edited:
            added = torch.from_numpy(edit(rank, t))
            with torch.no_grad():
                model.module.upper.add_(added[:2])
                model.module.lower.add_(added[2:])
        states.append(state_of(model))
    found = torch.cat([p.detach().clone() for p in model.module.parameters()]).numpy()
    model.close()
    return found, states


def state_of(model: DecentralizedDataParallel) -> dict[str, np.ndarray]:
    saved = take(model.replica, settled=False)["rule"]["state"]
    keys = saved["upper"] if saved else ()
    return {key: torch.cat([saved["upper"][key], saved["lower"][key]]).numpy().copy() for key in keys}


def options_of(i: int) -> dict[str, Any]:
    """One bucket or two, of views or of separate tensors."""
    return {"param_as_bucket_view": i % 2 == 0, "bucket_size_in_mb": 25 if i % 4 < 2 else 1e-6}


RULES = [OuterNesterov(momentum=0.6), OuterNesterov(lr=0.4, momentum=0.0), OuterNesterov(lr=1.0, momentum=0.5)]
CASES = [
    *(
        Case(topology, inner, h, overlap, steps=7 if h == 1 else 11)
        for topology in ("complete", "one-peer-exp", "ring", "varying")
        for inner, h, overlap in (("sgd", 1, True), ("adamw", 1, False), ("adamw", 4, True), ("sgd", 4, False))
    ),
    *(Case(topology, "sgd", 2, edited=True, rule=rule) for topology in ("complete", "varying") for rule in RULES),
    Case("ring", "adamw", 2, False, edited=True),
    Case("varying", "adamw", 3, steps=10, factor=0.4),
    Case("ring", "sgd", 1, False, factor=0.0),
    # The second turn starts at an update at which mix_every alone, counted from the start, would not mix.
    Case("complete:3,ring", "adamw", 2, steps=9),
    Case("one-peer-exp:5,complete", "sgd", 3, False, steps=12),
]


def train_each(rank: int, n: int, cases: list[Case]) -> list[Any]:
    TopologyReg.registry["varying"] = Varying
    return [train(rank, case, **options_of(i)) for i, case in enumerate(cases)]


@pytest.mark.parametrize("cases", [CASES[::8], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_four_workers_equal_numpy(workers, cases):
    results = workers(N, train_each, cases)
    for i, case in enumerate(cases):
        want = twin(case, N)
        for rank in range(N):
            found = results[rank][i][0]
            np.testing.assert_allclose(found, want[rank], rtol=0, atol=1e-12, err_msg=f"{case}, worker {rank}")
        assert case.topology == "complete" or np.abs(want - want.mean(0)).max() > 1e-6, "replicas must differ"


def test_one_worker_has_its_own_outer_optimizer():
    for overlap in (True, False):
        case = Case("complete", "adamw", 3, overlap, steps=8)
        found, _ = train(0, case, transport=InProcessTransport())
        np.testing.assert_allclose(found, twin(case, 1)[0], rtol=0, atol=1e-12)


# -- DiLoCo, as its paper has it -------------------------------------------------------------------------------------------


def diloco(case: Case, n: int) -> np.ndarray:
    """Inner steps from the outer parameters; the outer ones step along the mean of the pseudo-gradients. With overlap and a
    mix in each update, a gradient is computed before what the update before it has found is there."""
    buckets = parts(case.h)
    outers = [nn.Parameter(torch.from_numpy(start())[part.rows]) for part in buckets]
    optimizers = [outer_sgd(outer, case.rule) for outer in outers]
    replicas = [nn.Parameter(torch.from_numpy(start())) for _ in range(n)]
    inner = [INNER[case.inner][0]([replica]) for replica in replicas]

    def step_outer(t: int) -> None:
        for part, outer, optimizer in zip(buckets, outers, optimizers, strict=True):
            if case.edges(t, n, part.offset) is None:
                continue
            outer.grad = torch.stack([outer.detach() - replica.detach()[part.rows] for replica in replicas]).mean(0)
            optimizer.step()
            for replica in replicas:
                replica.data[part.rows] = outer.detach()

    for t in range(case.steps):
        for rank, replica in enumerate(replicas):
            a, b = (torch.from_numpy(array) for array in data(rank, t))
            replica.grad = torch.autograd.grad((a @ replica - b).square().mean(), replica)[0]
        if case.overlap and t > 0:
            step_outer(t - 1)
        for one in inner:
            one.step()
        if not case.overlap:
            step_outer(t)
    return torch.stack([replica.detach() for replica in replicas]).numpy()


DILOCO = [
    Case("complete", inner, h, overlap, rule, steps)
    for inner, h, overlap, rule, steps in (
        ("adamw", 1, False, OuterNesterov(), 6),
        ("adamw", 1, True, OuterNesterov(), 6),
        ("sgd", 4, False, OuterNesterov(lr=0.5, momentum=0.8), 13),
        ("adamw", 4, False, OuterNesterov(), 13),
        ("sgd", 1, True, OuterNesterov(lr=1.0, momentum=0.3), 10),
        ("sgd", 3, False, OuterNesterov(lr=0.7, momentum=0.0), 10),
    )
]


def outer_sgd(outer: nn.Parameter, rule: OuterNesterov) -> torch.optim.Optimizer:
    # torch refuses Nesterov momentum of 0.
    return torch.optim.SGD([outer], lr=rule.lr, momentum=rule.momentum, nesterov=rule.momentum > 0)


def noloco(case: Case, n: int) -> np.ndarray:
    """NoLoCo's update of a pair {i, j} (arXiv 2506.10911), with one coefficient for the pull towards the pair's mean step and
    for the pull towards its mean anchor: the step is made of what each has achieved, and not of where it is."""
    lr, mu = case.rule.lr, case.rule.momentum
    inner = INNER[case.inner][1](n)
    phi, v = [start() for _ in range(n)], [np.zeros((5, 3)) for _ in range(n)]
    x = [p.copy() for p in phi]
    for t in range(case.steps):
        x = [inner(i, t, x[i], gradient(x[i], i, t)).copy() for i in range(n)]
        for part in parts(case.h):
            edges, rows = case.edges(t, n, part.offset), part.rows
            for edge in edges or ():
                assert len(edge.ranks) == 2
                assert edge.weight == 0.5
                step = sum(x[j][rows] - phi[j][rows] for j in edge.ranks) / 2
                centre = sum(phi[j][rows] for j in edge.ranks) / 2
                for i in edge.ranks:
                    force = (phi[i][rows] - centre) - step
                    v[i][rows] = mu * v[i][rows] + force
                    phi[i][rows] -= lr * (mu * v[i][rows] + force)
                for i in edge.ranks:
                    x[i][rows] = phi[i][rows]
    return np.stack(x)


NOLOCO = [Case(topology, "adamw", h, False, steps=3 * h + 1) for topology in ("one-peer-exp", "ring") for h in (1, 3)]


def train_all(rank: int, n: int, cases: list[Case]) -> list[np.ndarray]:
    return [train(rank, case, **options_of(i))[0] for i, case in enumerate(cases)]


PUBLISHED = [*((diloco, case) for case in DILOCO), *((noloco, case) for case in NOLOCO)]
SOME_PUBLISHED = [(diloco, DILOCO[i]) for i in (1, 4)] + [(noloco, NOLOCO[2])]


@pytest.mark.parametrize("cases", [SOME_PUBLISHED, pytest.param(PUBLISHED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_it_is_the_published_optimizer(workers, cases):
    """DiLoCo and NoLoCo."""
    results = workers(N, train_all, [case for _, case in cases])
    for i, (published, case) in enumerate(cases):
        want = published(case, N)
        for rank in range(N):
            np.testing.assert_allclose(results[rank][i], want[rank], rtol=0, atol=1e-12, err_msg=f"{case}, worker {rank}")


# -- any topology ----------------------------------------------------------------------------------------------------------

MEANS = [
    Case(topology, inner, h, overlap, rule, 6 * h + 1, edited=h == 2)
    for topology in ("varying", "ring", "random-matching")
    for inner, h, overlap, rule in (
        ("adamw", 1, True, OuterNesterov(momentum=0.6)),
        ("sgd", 2, True, OuterNesterov(lr=0.3, momentum=0.6)),
        ("sgd", 2, False, OuterNesterov(momentum=0.6)),
    )
]


def trace_means(rank: int, n: int, cases: list[Case]) -> list[Any]:
    TopologyReg.registry["varying"] = Varying
    return [train(rank, case, **options_of(i))[1] for i, case in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [MEANS], ids=["all"])
def test_the_mean_of_the_anchors_follows_one_outer_optimizer(workers, cases):
    """On the mean of the replicas, whatever the topology: idle workers, groups and weights that differ."""
    results = workers(N, trace_means, cases)
    for i, case in enumerate(cases):
        mean = {
            key: [np.mean([results[rank][i][t][key] for rank in range(N)], axis=0) for t in range(case.steps)]
            for key in ("anchor", "momentum", "proposal")
        }
        for part in parts(case.h):
            follow(case, mean, part)


def follow(case: Case, mean: dict[str, list[np.ndarray]], part: Part) -> None:
    rows = part.rows
    outer = nn.Parameter(torch.from_numpy(start())[rows])
    optimizer = outer_sgd(outer, case.rule)
    mixes, made = 0, []
    for t in range(case.steps):
        again = mix_of(t, case.h, part.offset) is not None
        # What was proposed in this update, or before, is mixed in by its end.
        due = [at for at in made if again or t - at >= part.time]
        made = [at for at in made if at not in due] + [t] * again
        if not case.overlap:
            due, made = made, []
        for at in due:
            outer.grad = outer.detach() - torch.from_numpy(mean["proposal"][at][rows])
            optimizer.step()
            mixes += 1
        where = f"{case}, {rows}, {t}"
        np.testing.assert_allclose(mean["anchor"][t][rows], outer.detach().numpy(), rtol=0, atol=1e-12, err_msg=where)
        if mixes:
            buffer = optimizer.state[outer]["momentum_buffer"].numpy()
            np.testing.assert_allclose(mean["momentum"][t][rows], buffer, rtol=0, atol=1e-12, err_msg=where)
    assert mixes >= 5


PLAIN = [
    Case(topology, inner, h, overlap, steps=9, factor=factor, edited=edited)
    for topology in ("varying", "complete", "ring", "complete:3,ring")
    for inner, h, overlap, factor, edited in (("adamw", 1, False, 1.0, False), ("sgd", 2, True, 0.4, True))
]


def train_plainly(rank: int, n: int, cases: list[Case]) -> list[list[np.ndarray]]:
    """With plain gossip, and with the outer optimizer that is the same."""
    TopologyReg.registry["varying"] = Varying
    rules: list[Any] = [OuterNesterov(lr=1, momentum=0), Gossip(), None]
    return [[train(rank, case, rule=rule, **options_of(i))[0] for rule in rules] for i, case in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [PLAIN], ids=["all"])
def test_a_rate_of_one_without_momentum_is_plain_gossip(workers, cases):
    for rank, found in enumerate(workers(N, train_plainly, cases)):
        for case, (outer, gossip, default) in zip(cases, found, strict=True):
            np.testing.assert_allclose(outer, gossip, rtol=0, atol=1e-12, err_msg=f"{case}, worker {rank}")
            np.testing.assert_array_equal(gossip, default)


# -- narrower numbers, and wrong arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_state_is_wider_than_narrow_parameters(dtype):
    values = torch.randn(9, generator=torch.Generator().manual_seed(1)).to(dtype)
    rule = OuterNesterov()
    state = rule.state(values)
    assert {key: tensor.dtype for key, tensor in state.items()} == {
        "anchor": torch.promote_types(dtype, torch.float32),
        "momentum": torch.promote_types(dtype, torch.float32),
        "proposal": dtype,
    }
    assert all(tensor.shape == values.shape for tensor in state.values())
    assert len({tensor.data_ptr() for tensor in (values, *state.values())}) == 4, "nothing is shared"


def test_small_steps_are_not_lost_in_bfloat16():
    """Each outer step is less than half a step of bfloat16 at 1, and 40 of them are ten such steps: the anchor has them all."""
    from decent_dp.rules import Round

    values = torch.ones(3, dtype=torch.bfloat16)
    rule = OuterNesterov(lr=0.25, momentum=0.0)
    state = rule.state(values)
    for t in range(40):
        proposal = rule.propose(values, state, Round(t))
        assert proposal.dtype == torch.bfloat16
        rule.apply(values, state, torch.full((3,), -(2.0**-8)), Round(t))
    torch.testing.assert_close(state["anchor"], torch.full((3,), float(state["anchor"][0])))
    assert 1 - 40 * 2.0**-8 < float(state["anchor"][0]) < 1 - 5 * 2.0**-8
    assert (values.float() - state["anchor"]).abs().max() <= 2.0**-8


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": 0}, ValueError, "lr of OuterNesterov must be a positive number, got 0"),
    ({"lr": -1.0}, ValueError, "lr of OuterNesterov must be a positive number, got -1.0"),
    ({"lr": float("nan")}, ValueError, "lr of OuterNesterov must be a positive number, got nan"),
    ({"lr": float("inf")}, ValueError, "lr of OuterNesterov must be a positive number, got inf"),
    ({"lr": "0.7"}, TypeError, "lr of OuterNesterov must be a positive number, got '0.7'"),
    ({"lr": True}, TypeError, "lr of OuterNesterov must be a positive number, got True"),
    ({"momentum": 1}, ValueError, r"momentum of OuterNesterov must be in \[0, 1\), got 1"),
    ({"momentum": -0.1}, ValueError, r"momentum of OuterNesterov must be in \[0, 1\), got -0.1"),
    ({"momentum": float("nan")}, ValueError, r"momentum of OuterNesterov must be in \[0, 1\), got nan"),
    ({"momentum": None}, TypeError, r"momentum of OuterNesterov must be in \[0, 1\), got None"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG)
def test_wrong_settings_are_named(arguments, kind, message):
    with pytest.raises(kind, match=message):
        OuterNesterov(**arguments)


def test_settings_are_numbers_and_cannot_be_changed():
    rule = OuterNesterov(lr=1, momentum=0)
    assert (rule, repr(rule)) == (OuterNesterov(1.0, 0.0), "OuterNesterov(lr=1.0, momentum=0.0)")
    with pytest.raises(AttributeError):
        rule.lr = 0.5  # type: ignore[misc]


def test_the_composed_topologies_have_the_rounds_that_the_twin_assumes():
    for case in CASES:
        if ":" in case.topology:
            made = Topology.every(make_topology(case.topology, local_world_size=1, world_size=N, rank=0), case.h)
            for t in range(case.steps):
                mixing = any(len(edge.ranks) > 1 for edge in made.round(t))
                assert mixing == (case.edges(t, N) is not None), (case, t)
