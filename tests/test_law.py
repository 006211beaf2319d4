"""The law of mixing, of both drivers: against NumPy in float64, PyTorch DDP, and the published outer optimizers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from decent_dp import gossip
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.rules import GASLoC, OuterNesterov
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import RingTopology, SwitchTopology, Topology, TopologyReg
from decent_dp.transport import run_replicas
from tests.helpers import SGD, batch, covering, net, some_and_all
from tests.law_cases import (
    INNER,
    Case,
    Linear,
    N,
    Varying,
    data,
    edit,
    gradient,
    loss_of,
    options_of,
    parts,
    squares,
    start,
    train,
    twin,
    whole,
)

DRIVERS = pytest.mark.parametrize("driver", ["wrapper", "gossip"])
OUTER = OuterNesterov(momentum=0.6)  # more is refused with 'varying'

PLAIN = ["complete", "ring", "one-peer-exp", "base-2", "varying"]
CASES = [
    *(Case(topology, inner, 1, overlap) for topology, inner, overlap in product(PLAIN, INNER, (True, False))),
    *(Case("alternating-exp-ring", inner, 1, overlap, local=2) for inner, overlap in product(INNER, (True, False))),
    *(Case(topology, "adamw", h, overlap, steps=11) for topology, h, overlap in product(PLAIN, (2, 3), (True, False))),
    # The second turn starts at an update at which mix_every alone, counted from the start, would not mix.
    *(Case("complete:4,ring:3,base-2", "adamw", h, h != 3, steps=11) for h in (1, 2, 3)),
    Case("complete:3,ring", "adamw", 2, rule=OUTER, steps=9),
    Case("one-peer-exp:5,complete", "sgd", 3, False, OUTER, steps=12),
    *(
        Case(topology, inner, h, overlap, OUTER, steps=7 if h == 1 else 11)
        for topology in ("complete", "one-peer-exp", "ring", "varying")
        for inner, h, overlap in (("sgd", 1, True), ("adamw", 1, False), ("adamw", 4, True), ("sgd", 4, False))
    ),
    *(
        Case(topology, "sgd", 2, edited=True, rule=rule)
        for topology in ("complete", "varying")
        for rule in (OuterNesterov(lr=0.4, momentum=0.0), OuterNesterov(lr=1.0, momentum=0.5), None)
    ),
    *(
        Case(topology, "sgd", h, overlap, rule, steps=13)
        for topology, rule in (("one-peer-exp", GASLoC()), ("ring", GASLoC(0.6, 0.2)), ("complete", GASLoC(1, 0)))
        for h, overlap in ((1, False), (3, True))
    ),
    Case("base-2", "adamw", 2, k=2),
    *(Case("base-2", "adamw", 2, rule=rule, batches=(4, 9, 6, 0)) for rule in (None, OUTER)),
    *(
        Case("one-peer-exp", "adamw", 1, overlap, rule, skipped=((1, 2), (3, 2), (0, 5)))
        for overlap, rule in ((True, None), (False, None), (True, OUTER))
    ),
]
# The factor is the wrapper's alone.
SLOWED = [Case(topology, inner, 1, overlap, factor=0.4) for topology, inner, overlap in product(PLAIN, INNER, (True, False))]
SLOWED += [Case("varying", "adamw", 3, rule=OUTER, steps=10, factor=0.4), Case("ring", overlap=False, rule=OUTER, factor=0.0)]


def assert_equal(found: Any, case: Case, driver: str) -> None:
    want = twin(case, len(found), driver)
    np.testing.assert_allclose(np.stack(found), want, rtol=0, atol=1e-12, err_msg=f"{case}, {driver}")
    apart = twin(replace(case, factor=0.0), len(found), driver)
    assert case.factor == 0 or not np.allclose(want, apart, atol=1e-6), "mixing must matter"


# With turns a worker that is idle was so in the update before.
IDLE = [Case("varying", "adamw"), Case("varying", "sgd", 1, False)]


@DRIVERS
@pytest.mark.parametrize("cases", [[*covering(CASES), *IDLE], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_four_workers_equal_numpy(driver, cases):
    for i, case in enumerate(cases):
        options = options_of(case, i)
        assert_equal(run_replicas(N, lambda at, c=case, o=options: train(at.rank, c, driver, at, **o)), case, driver)


@some_and_all(SLOWED)
def test_the_adaptive_factor(cases):
    for case in cases:
        assert_equal(run_replicas(N, lambda at, c=case: train(at.rank, c, "wrapper", at)), case, "wrapper")


@some_and_all([case for case in CASES + SLOWED if not (case.batches or case.skipped or case.k > 1)])
def test_the_simulator_equals_numpy(monkeypatch, cases):
    monkeypatch.setitem(TopologyReg.registry, "varying", Varying)
    for case in cases:
        how = {"overlap": case.overlap, "mix_every": case.h, "rule": case.rule, "local_world_size": case.local}
        cluster = VirtualCluster(Linear(), INNER[case.inner][0], case.topology, N, loss_fn=squares, **how)
        cluster.set_adaptive_factor(case.factor)
        for t in range(case.steps):
            columns = zip(*(data(rank, t) for rank in range(N)), strict=True)
            cluster.step(*(torch.from_numpy(np.stack(column)) for column in columns))
            if case.edited:
                added = torch.from_numpy(np.stack([edit(rank, t) for rank in range(N)]))
                cluster.parameters["upper"].add_(added[:, :2])
                cluster.parameters["lower"].add_(added[:, 2:])
        assert_equal(np.concatenate([value.numpy() for value in cluster.parameters.values()], axis=1), case, "wrapper")


OVER_SOCKETS = [
    Case("one-peer-exp", "adamw"),
    Case("varying", "sgd", overlap=False),
    Case("complete:3,ring", "adamw", 2, rule=OUTER, steps=9),
    Case("complete", "sgd", 3),
]


def over_sockets(rank: int, n: int) -> list[np.ndarray]:
    return [train(rank, case, driver) for case in OVER_SOCKETS for driver in ("wrapper", "gossip")]


def test_over_sockets_it_is_the_same(workers):
    results = workers(N, over_sockets)
    for i, (case, driver) in enumerate(product(OVER_SOCKETS, ("wrapper", "gossip"))):
        assert_equal([found[i] for found in results], case, driver)


def test_one_worker_has_its_own_outer_optimizer():
    case = Case("complete", "adamw", 3, rule=OUTER, steps=8)
    [found] = run_replicas(1, lambda at: train(0, case, "wrapper", at))
    np.testing.assert_allclose(found, twin(case, 1)[0], rtol=0, atol=1e-12)


def test_a_part_with_shorter_turns_ends_an_exchange_of_the_part_before():
    """It had four updates to arrive, and its parameters mix again in two."""

    def topology(rank: int) -> Topology:
        ring = RingTopology(world_size=3, rank=rank)
        return SwitchTopology((ring.every(8), 16), ring.every(2))

    def body(at: Any) -> np.ndarray:
        model = DecentralizedDataParallel(Linear(), INNER["adamw"][0], topology=topology(at.rank), transport=at)
        for t in range(20):
            loss_of(model, at.rank, t).backward()
        model.close()
        return whole(model.module)

    cluster = VirtualCluster(Linear(), INNER["adamw"][0], topology(0), 3, loss_fn=squares)
    for t in range(20):
        columns = zip(*(data(rank, t) for rank in range(3)), strict=True)
        cluster.step(*(torch.from_numpy(np.stack(column)) for column in columns))
    found = np.concatenate([value.numpy() for value in cluster.parameters.values()], axis=1)
    np.testing.assert_allclose(np.stack(run_replicas(3, body)), found, rtol=0, atol=1e-12)


# -- both drivers, and PyTorch DDP -----------------------------------------------------------------------------------------

# Without a compression the law says it of both.
BESIDE = [
    *((2, "complete", "int8", True, 1), (2, "ring", "bfloat16", False, 1), (3, "base-2", "int8", False, 2)),
    *((4, "base-2", "bfloat16", True, 1), (4, "one-peer-exp", "int8", True, 3)),
]


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [SGD, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("case", BESIDE, ids=str)
def test_steps_of_gossip_equal_the_wrappers(case, make, steps):
    n, topology, compression, overlap, mix_every = case
    begun = net().double()  # in float32 a lossy compression turns rounding into steps of its own

    def trained(at: Any, driver: str) -> tuple[Any, Any]:
        model = copy.deepcopy(begun)  # threads share torch's random numbers
        optimizer = make(model.parameters())
        options = {"topology": topology, "compression": compression, "overlap": overlap, "mix_every": mix_every}
        wrapped = driver == "wrapper"
        driven = (
            DecentralizedDataParallel(model, make, transport=at, **options)
            if wrapped
            else gossip(model, optimizer, transport=at, **options)
        )
        for t in range(steps):
            x, y = (tensor.double() for tensor in batch(t, at.rank))
            ((driven if wrapped else model)(x) - y).square().mean().backward()
            if not wrapped:
                optimizer.step()
                optimizer.zero_grad()
        stats = driven.stats()
        driven.close()
        return torch.cat([param.detach().flatten() for param in model.parameters()]), stats

    ours, theirs = (run_replicas(n, lambda at, driver=driver: trained(at, driver)) for driver in ("gossip", "wrapper"))
    for (a, got), (b, want) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert (got.updates, got.rounds, got.bytes_sent) == (want.updates, want.rounds, want.bytes_sent)


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def twenty_steps_beside_ddp(rank: int, n: int) -> float:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
    theirs = DistributedDataParallel(mlp())
    optimizer = sgd(theirs.parameters())
    ours = DecentralizedDataParallel(mlp(), sgd, topology="complete", overlap=False, bucket_size_in_mb=0.002)
    torch.manual_seed(rank)
    worst = 0.0
    for _ in range(20):
        x, y = torch.randn(8, 10), torch.randn(8, 4)
        optimizer.zero_grad()
        loss = (theirs(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        other = (ours(x) - y).square().mean()
        other.backward()
        worst = max(worst, abs(float(loss.detach() - other.detach())))
        for a, b in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
            worst = max(worst, float((a.detach() - b.detach()).abs().max()))
    ours.close()
    return worst


def test_complete_synchronous_sgd_equals_pytorch_ddp(workers):
    assert max(workers(3, twenty_steps_beside_ddp)) <= 1e-6


# -- the outer optimizers, as their papers have them -----------------------------------------------------------------------


def diloco(case: Case) -> np.ndarray:
    """Inner steps from the outer parameters; the outer ones step along the mean of the pseudo-gradients. With overlap and a
    mix in each update, a gradient is computed before what the update before it has found is there."""
    lr, mu, buckets = case.rule.lr, case.rule.momentum, parts(case.h)
    outers = [nn.Parameter(torch.from_numpy(start())[part.rows]) for part in buckets]
    # torch refuses Nesterov momentum of 0.
    optimizers = [torch.optim.SGD([outer], lr=lr, momentum=mu, nesterov=mu > 0) for outer in outers]
    replicas = [nn.Parameter(torch.from_numpy(start())) for _ in range(N)]
    inner = [INNER[case.inner][0]([replica]) for replica in replicas]

    def step_outer(t: int) -> None:
        for part, outer, optimizer in zip(buckets, outers, optimizers, strict=True):
            if case.edges(t, N, part.offset) is None:
                continue
            outer.grad = torch.stack([outer.detach() - replica.detach()[part.rows] for replica in replicas]).mean(0)
            optimizer.step()
            for replica in replicas:
                replica.data[part.rows] = outer.detach()

    for t in range(case.steps):
        for rank, replica in enumerate(replicas):
            replica.grad = torch.from_numpy(gradient(replica.detach().numpy(), rank, t))
        if case.overlap and t > 0:
            step_outer(t - 1)
        for one in inner:
            one.step()
        if not case.overlap:
            step_outer(t)
    return torch.stack([replica.detach() for replica in replicas]).numpy()


def noloco(case: Case) -> np.ndarray:
    """NoLoCo's update of a pair {i, j} (arXiv 2506.10911), with one coefficient for the pull towards the pair's mean step and
    for the pull towards its mean anchor: the step is made of what each has achieved, and not of where it is."""
    lr, mu, inner = case.rule.lr, case.rule.momentum, INNER[case.inner][1](N)
    x, phi, v = np.stack([start()] * N), np.stack([start()] * N), np.zeros((N, 5, 3))
    for t in range(case.steps):
        x = np.stack([inner(i, t, x[i], gradient(x[i], i, t)) for i in range(N)])
        for part in parts(case.h):
            for edge in case.edges(t, N, part.offset) or ():
                pair = np.ix_(edge.ranks, range(5)[part.rows])
                assert (len(edge.ranks), edge.weight) == (2, 0.5)
                force = (phi[pair] - phi[pair].mean(0)) - (x[pair] - phi[pair]).mean(0)
                v[pair] = mu * v[pair] + force
                phi[pair] -= lr * (mu * v[pair] + force)
                x[pair] = phi[pair]
    return x


PUBLISHED = [
    (diloco, Case("complete", "adamw", 1, True, OuterNesterov(), 6)),
    (diloco, Case("complete", "adamw", 4, False, OuterNesterov(), 13)),
    (diloco, Case("complete", "sgd", 3, False, OuterNesterov(lr=0.7, momentum=0.0), 10)),
    *((noloco, Case(topology, "adamw", h, False, OUTER, 3 * h + 1)) for topology, h in (("one-peer-exp", 3), ("ring", 1))),
]


@pytest.mark.parametrize(("published", "case"), PUBLISHED)
def test_it_is_the_published_optimizer(published, case):
    found = run_replicas(N, lambda at: train(at.rank, case, "wrapper", at))
    np.testing.assert_allclose(np.stack(found), published(case), rtol=0, atol=1e-12)
