"""Replicas with batches of different sizes: the mean that stays, and that everything else means, is the weighted one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decent_dp
from decent_dp.checkpoint import AveragedReplica
from decent_dp.optim import GossipAdamW
from decent_dp.rules import GASLoC, MomentumTracking, OuterNesterov
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Edge, Topology
from decent_dp.transport import run_replicas

SIZES = [3, 8, 1, 5]
SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.8)


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def samples(t: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + t)
    return tuple(torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype) for width in (6, 3))


def loss_of(model: Any, t: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, y = samples(t, rank, size, dtype)
    result: Tensor = (model(x) - y).square().mean()
    return result


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()]).double().numpy()


# -- against DDP -----------------------------------------------------------------------------------------------------------


def beside_ddp(rank: int, n: int, optimizer: Callable[..., Any], window: int) -> float:
    """The largest difference of a parameter from DDP's, whose losses are weighted."""
    ours, theirs = net(), DistributedDataParallel(net())
    of_ours, of_theirs = optimizer(ours.parameters()), optimizer(theirs.parameters())
    gossip = decent_dp.gossip(ours, of_ours, overlap=False, weight=SIZES[rank])
    share, worst = SIZES[rank] * n / sum(SIZES[:n]), 0.0
    for t in range(20):
        of_ours.zero_grad()
        of_theirs.zero_grad()
        for i in range(window):
            (loss_of(ours, 100 * i + t, rank, SIZES[rank]) / window).backward()
            (loss_of(theirs, 100 * i + t, rank, SIZES[rank]) * share / window).backward()
        of_ours.step()
        of_theirs.step()
        worst = max(worst, float(np.abs(flat(ours) - flat(theirs.module)).max()))
    gossip.close()
    return worst


def beside_ddp_in_all_ways(rank: int, n: int) -> list[float]:
    return [beside_ddp(rank, n, optimizer, window) for optimizer in (SGD, MOMENTUM) for window in (1, 3)]


def test_a_pair_is_ddp_with_weighted_losses(workers):
    for found in workers(2, beside_ddp_in_all_ways):
        assert max(found) < 1e-6, found


# -- the mean --------------------------------------------------------------------------------------------------------------


def gradient(values: np.ndarray, t: int, rank: int) -> np.ndarray:
    """Of the loss of ``linear``, in NumPy."""
    x, y = (part.double().numpy() for part in samples(t, rank, SIZES[rank]))
    weight, bias = values[:18].reshape(3, 6), values[18:]
    error = 2 * (x @ weight.T + bias - y) / y.size
    return np.concatenate([(error.T @ x).ravel(), error.sum(0)])


def linear(rank: int, momentum: float = 0.0, **options: Any) -> list[np.ndarray]:
    """A replica's parameters before each step, and at the end."""
    model = nn.Linear(6, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
    optimizer = SGD(model.parameters(), momentum=momentum)
    gossip = decent_dp.gossip(model, optimizer, weight=SIZES[rank], **options)
    found = []
    for t in range(20):
        found.append(flat(model))
        optimizer.zero_grad()
        loss_of(model, t, rank, SIZES[rank]).backward()
        optimizer.step()
    gossip.flush()
    found.append(flat(model))
    gossip.close()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False, "compression": "int8"},
        {},
        {"compression": "low-rank:1"},
        {"mix_every": 3},
        {"topology": "ring", "compression": "bfloat16"},
        {"rule": MomentumTracking(), "momentum": 0.8, "compression": "int8"},
        {"topology": "base-2:7,random-matching", "bucket_size_in_mb": 0},
    ],
    ids=str,
)
def test_the_weighted_mean_moves_by_the_weighted_gradients(options):
    found = np.array(run_replicas(3, lambda transport: linear(transport.rank, transport=transport, **options)))
    assert_mean_moves(found, options.get("momentum", 0.0))


def assert_mean_moves(found: np.ndarray, momentum: float = 0.0) -> None:
    """By the gradients of all samples, in NumPy; ``found`` has (replicas, steps + 1, numbers)."""
    n = len(found)
    shares = np.array(SIZES[:n]) / sum(SIZES[:n])
    speed, moves = np.zeros_like(found[:, 0]), []
    for t in range(20):
        speed = momentum * speed + [gradient(found[rank, t], t, rank) for rank in range(n)]
        moves.append(-0.05 * speed)
        wanted = shares @ found[:, t] + shares @ moves[t]
        np.testing.assert_allclose(shares @ found[:, t + 1], wanted, rtol=0, atol=1e-6, err_msg=f"step {t}")
    # Replicas differ, and the plain mean moves by something else.
    assert np.ptp(found, axis=0).max() > 1e-3
    plain = found.mean(0)
    assert np.abs(plain[1:] - plain[:-1] - np.mean(moves, axis=1)).max() > 1e-3


def tolerant(rank: int, n: int, options: dict[str, Any]) -> list[np.ndarray]:
    return linear(rank, faults=decent_dp.Tolerate(), **options)


@pytest.mark.parametrize("options", [{}, {"mix_every": 2}], ids=str)
def test_the_weighted_mean_moves_so_where_faults_are_tolerated(workers, options):
    assert_mean_moves(np.array(workers(3, tolerant, options)))


# -- everything that is a mean ---------------------------------------------------------------------------------------------


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def means(rank: int, n: int, path: Any, faults: Any) -> dict[str, Any]:
    model = Counted()
    optimizer = SGD(model.parameters())
    gossip = decent_dp.gossip(model, optimizer, weight=SIZES[rank], faults=faults)
    with torch.no_grad():
        model.weight.fill_(10.0**rank)
        model.mean.fill_(rank)
        if faults is not None and rank == 2:
            model.weight[0] = torch.nan
    found: dict[str, Any] = {"distance": gossip.consensus_distance()}
    ema = AveragedReplica(gossip)
    ema.update()
    decent_dp.export(gossip, path)
    with gossip.averaged():
        found["averaged"] = model.weight[1].item(), model.mean[1].item()
    with ema.averaged():
        found["ema"] = model.weight[1].item(), model.mean[1].item()
    gossip.average_()
    found["average_"] = model.weight[1].item(), model.mean[1].item()
    gossip.close()
    return found


@pytest.mark.parametrize("faults", [None, decent_dp.Tolerate(min_workers=1)], ids=["all", "finite ones"])
def test_means_are_weighted(workers, faults, tmp_path):
    path = tmp_path / "mean.pt"
    results = workers(4, means, path, faults)
    counted = [0, 1, 2, 3] if faults is None else [0, 1, 3]
    total = sum(SIZES[rank] for rank in counted)
    mean = sum(SIZES[rank] * 10.0**rank for rank in counted) / total
    wanted = mean, sum(SIZES[rank] * rank for rank in counted) / total
    square = sum(SIZES[rank] * (10.0**rank - mean) ** 2 for rank in counted) / total
    for found in results:
        assert found["distance"] == pytest.approx(math.sqrt(4 * square))
        for name in ("averaged", "ema", "average_"):
            assert found[name] == pytest.approx(wanted), name
    state = torch.load(path)
    assert (state["weight"][1].item(), state["mean"][1].item()) == pytest.approx(wanted)


def in_nodes(rank: int, n: int) -> tuple[list[np.ndarray], float, float]:
    """Two nodes of two workers, of which each has half of a batch of 2 or 6."""
    size, model = (1, 3)[rank // 2], net()
    model.register_buffer("seen", torch.zeros(1))
    optimizer = MOMENTUM(model.parameters())
    # In a node each worker may have its own weight; its gradients are averaged as they are.
    options = {"local_world_size": 2, "replica": "node", "weight": [1.5, 0.5, 3.0, 3.0][rank]}
    gossip, found = decent_dp.gossip(model, optimizer, **options), []
    model.seen.fill_(rank)
    for t in range(10):
        optimizer.zero_grad()
        x, y = (part[rank % 2 * size :][:size] for part in samples(t, rank // 2, 2 * size))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        found.append(flat(model))
    with gossip.averaged():
        seen = float(model.seen)
    distance = gossip.consensus_distance()
    gossip.close()
    return found, distance, seen


def of_one_worker(transport: Any) -> tuple[list[np.ndarray], float]:
    size, model = (2, 6)[transport.rank], net()
    optimizer = MOMENTUM(model.parameters())
    gossip, found = decent_dp.gossip(model, optimizer, weight=size, transport=transport), []
    for t in range(10):
        optimizer.zero_grad()
        loss_of(model, t, transport.rank, size).backward()
        optimizer.step()
        found.append(flat(model))
    distance = gossip.consensus_distance()
    gossip.close()
    return found, distance


def test_a_node_has_the_weight_of_its_workers(workers):
    wanted = run_replicas(2, of_one_worker)
    for rank, (found, distance, seen) in enumerate(workers(4, in_nodes)):
        np.testing.assert_allclose(found, wanted[rank // 2][0], rtol=0, atol=1e-6)
        assert distance == pytest.approx(wanted[0][1], abs=1e-6)
        assert seen == pytest.approx((0 * 1.5 + 1 * 0.5 + 2 * 3 + 3 * 3) / 8)


def tracks(rank: int, seed: int, weights: list[float] | None) -> tuple[Any, Any, Any]:
    """The model, its optimizer, and the replica."""
    model = net(seed)
    optimizer = MOMENTUM(model.parameters())
    given = {} if weights is None else {"weight": weights[rank]}
    return model, optimizer, decent_dp.gossip(model, optimizer, rule=MomentumTracking(), **given)


def momenta(optimizer: Any) -> list[np.ndarray]:
    """The tracked momenta, and this worker's own."""
    states = [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]
    return [
        torch.cat([state[key].flatten() for state in states]).double().numpy() for key in ("momentum_buffer", "own_momentum")
    ]


def saves(rank: int, n: int, path: Any, weights: list[float] | None) -> list[np.ndarray]:
    """The parameters and the momenta of a run that is saved."""
    model, optimizer, gossip = tracks(rank, 0, weights)
    for t in range(6):
        optimizer.zero_grad()
        loss_of(model, t, rank, SIZES[rank]).backward()
        optimizer.step()
    decent_dp.save(gossip, path)
    found = [flat(model), *momenta(optimizer)]
    gossip.close()
    return found


def loads(rank: int, n: int, path: Any, weights: list[float] | None, resize: str | None) -> list[np.ndarray]:
    model, optimizer, gossip = tracks(rank, rank, weights)
    decent_dp.load(gossip, path, resize=resize)
    found = [flat(model), *momenta(optimizer)]
    gossip.close()
    return found


@pytest.mark.parametrize("weights", [None, SIZES], ids=["equal", "unequal"])
def test_a_run_goes_on_with_other_weights_and_from_the_weighted_mean(workers, tmp_path, weights):
    saved = workers(3, saves, tmp_path, weights)
    of_saved, other = None if weights is None else weights[:3], [3.0, 8.0, 2.0]
    values, tracked, own = (np.array(each) for each in zip(*saved, strict=True))
    mean, of_tracked = (np.average(each, axis=0, weights=of_saved) for each in (values, tracked))
    np.testing.assert_allclose(of_tracked, np.average(own, axis=0, weights=of_saved), rtol=0, atol=1e-6)
    assert np.abs(tracked - own).max() > 1e-3
    np.testing.assert_array_equal(workers(3, loads, tmp_path, weights, None), saved)
    # With other weights, though most workers have the same, what mixes had changed would not add up to zero.
    for (params, y, _), found in zip(saved, workers(3, loads, tmp_path, other, None), strict=True):
        np.testing.assert_array_equal(found, [params, y, y])
    for loaded, y, m in workers(2, loads, tmp_path, other, "mean"):
        np.testing.assert_allclose(loaded, mean, rtol=0, atol=1e-7)
        np.testing.assert_allclose(y, of_tracked, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(y, m)


# -- the simulator ---------------------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "compression": "int8"},
    {"compression": "low-rank:2"},
    {"mix_every": 3, "compression": "bfloat16", "topology": "ring"},
    {"rule": OuterNesterov(lr=0.7, momentum=0.5), "mix_every": 2},
    {"rule": GASLoC(momentum=0.3), "mix_every": 2},
    {"rule": MomentumTracking(), "compression": "int8", "mix_every": 2},
    {"optimizer": partial(GossipAdamW, lr=0.01, weight_decay=0.0)},
    {"optimizer": partial(GossipAdamW, lr=0.01, weight_decay=0.0, tracking=True), "overlap": False},
    {"topology": "one-peer-exp:5,base-2", "overlap": False},
]


def in_double(transport: Any, **options: Any) -> tuple[list[np.ndarray], float]:
    optimizer_of, rank = options.pop("optimizer", MOMENTUM), transport.rank
    model = net(dtype=torch.float64)
    optimizer = optimizer_of(model.parameters())
    gossip, found = decent_dp.gossip(model, optimizer, transport=transport, weight=SIZES[rank], **options), []
    for t in range(16):
        optimizer.zero_grad()
        loss_of(model, t, rank, 4, torch.float64).backward()
        optimizer.step()
        found.append(flat(model))
    distance = gossip.consensus_distance()
    gossip.close()
    return found, distance


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_simulator_has_the_same_replicas(options):
    n, given = 4, dict(options)
    real = run_replicas(n, lambda transport: in_double(transport, **options))
    optimizer, topology = given.pop("optimizer", MOMENTUM), given.pop("topology", "base-2")
    cluster = VirtualCluster(
        net(dtype=torch.float64),
        lambda named: optimizer([param for _, param in named]),
        topology,
        n,
        loss_fn=lambda model, x, y: (model(x) - y).square().mean(),
        weights=SIZES,
        **given,
    )
    for t in range(16):
        cluster.step(*map(torch.stack, zip(*(samples(t, rank, 4, torch.float64) for rank in range(n)), strict=True)))
        stacked = np.concatenate([tensor.flatten(1).numpy() for tensor in cluster.parameters.values()], axis=1)
        np.testing.assert_allclose(stacked, [found[t] for found, _ in real], rtol=0, atol=1e-9, err_msg=f"step {t}")
    assert cluster.consensus_distance() == pytest.approx(real[0][1], rel=1e-6, abs=1e-9)
    mean = np.average(stacked, axis=0, weights=SIZES)
    np.testing.assert_allclose(flat(cluster.mean_model()), mean, rtol=0, atol=1e-12)
    shares = np.array(SIZES) / sum(SIZES)
    assert cluster.consensus_distance() == pytest.approx(
        math.sqrt(shares @ np.square(stacked - mean).sum(1)), rel=1e-6, abs=1e-9
    )


# -- the optimizer that estimates noise ------------------------------------------------------------------------------------


def noise(transport: Any, sizes: list[int], signal: float) -> float:
    """The mean second moment that a replica divides by, of gradients that are ``signal`` and noise of variance 1/size."""
    rank, param = transport.rank, nn.Parameter(torch.zeros(96, 96))
    optimizer = GossipAdamW([param], lr=0.0, betas=(0.9, 0.999))
    model = nn.Module()
    model.param = param
    gossip = decent_dp.gossip(model, optimizer, transport=transport, weight=sizes[rank])
    generator = torch.Generator().manual_seed(rank)
    for _ in range(400):
        param.grad = signal + torch.randn(param.shape, generator=generator) / sizes[rank] ** 0.5
        optimizer.step()
    gossip.close()
    return float(optimizer.state[param]["exp_avg_sq"].mean()) / (1 - 0.999**400)


@pytest.mark.parametrize("signal", [0.0, 0.1, 1.0])
def test_the_second_moment_is_that_of_the_weighted_batch(signal):
    sizes = [1, 9, 2]
    for found in run_replicas(3, lambda transport: noise(transport, sizes, signal)):
        assert found == pytest.approx(signal**2 + 1 / sum(sizes), rel=0.2)


# -- arguments -------------------------------------------------------------------------------------------------------------


def refused(transport: Any, weight: Any, **options: Any) -> str:
    model = net()
    with pytest.raises((ValueError, TypeError)) as caught:
        decent_dp.gossip(model, SGD(model.parameters()), transport=transport, weight=weight(transport.rank), **options)
    return str(caught.value)


class Late(Topology):
    """Groups of three, later than anyone looks."""

    def round(self, t: int) -> list[Edge]:
        return [Edge([0, 1, 2], 1 / 3)] if t == 300 else [Edge([0, 1], 0.5), Edge([2], 1.0)]


@pytest.mark.parametrize(
    ("weight", "options", "text"),
    [
        (lambda rank: None if rank == 1 else 4, {}, "given on some workers, and not on others (1)"),
        (lambda rank: 0, {}, "weight must be a positive number of samples or tokens, got 0"),
        (lambda rank: -2.0 if rank == 1 else 1, {}, "got -2.0"),
        (lambda rank: math.inf, {}, "got inf"),
        (lambda rank: math.nan, {}, "got nan"),
        (lambda rank: "8", {}, "got '8'"),
        (lambda rank: True, {}, "got True"),
        (lambda rank: rank + 1, {"topology": "complete"}, "weight needs a topology of pairs"),
        (lambda rank: rank + 1, {"topology": "complete:3,base-2"}, "mixes groups of 3"),
        (lambda rank: rank + 1, {"topology": "complete", "mix_every": 2}, "weight needs a topology of pairs"),
    ],
)
def test_what_is_refused_is_refused_on_all(weight, options, text):
    found = run_replicas(3, lambda transport: refused(transport, weight, **options))
    assert all(text in one for one in found), found
    assert len({one.partition(": ")[2] if one.startswith("worker ") else one for one in found}) == 1, found


def meets_a_group(transport: Any) -> str:
    param = nn.Parameter(torch.zeros(1))
    model = nn.Module()
    model.param = param
    optimizer = SGD([param])
    topology = Late(world_size=3, rank=transport.rank)
    decent_dp.gossip(model, optimizer, transport=transport, topology=topology, weight=transport.rank + 1)
    param.grad = torch.ones(1)
    for _ in range(300):
        optimizer.step()
    with pytest.raises(ValueError, match="weight needs a topology of pairs, and round 300 has the edge") as caught:
        optimizer.step()
    return str(caught.value)


def test_a_group_that_comes_late_is_refused_on_all():
    assert len(set(run_replicas(3, meets_a_group))) == 1


def bits(transport: Any, weight: float | None, **options: Any) -> list[Any]:
    model = net()
    optimizer = MOMENTUM(model.parameters())
    given = {} if weight is None else {"weight": weight}
    gossip, found = decent_dp.gossip(model, optimizer, transport=transport, **given, **options), []
    for t in range(6):
        optimizer.zero_grad()
        loss_of(model, t, transport.rank, 4).backward()
        optimizer.step()
        found.append(flat(model).tobytes())
    found.append(gossip.consensus_distance())
    with gossip.averaged():
        found.append(flat(model).tobytes())
    gossip.close()
    return found


@pytest.mark.parametrize("topology", ["base-2", "complete"])
def test_equal_weights_change_no_bit(topology):
    plain, equal = (run_replicas(3, lambda transport, w=w: bits(transport, w, topology=topology)) for w in (None, 7))
    assert plain == equal


def test_the_simulator_refuses_wrong_weights():
    make = partial(VirtualCluster, net(), lambda named: SGD([p for _, p in named]), n=3)
    with pytest.raises(ValueError, match="a number for each of the 3 workers, got 2"):
        make("base-2", weights=[1, 2])
    with pytest.raises(ValueError, match="weight 1 must be a positive number"):
        make("base-2", weights=[1, 0, 2])
    with pytest.raises(ValueError, match="weight needs a topology of pairs"):
        make("complete", weights=[1, 4, 2])


def test_rules_are_fitted_to_the_weights():
    """A momentum can drive unequal replicas apart that would hold equal ones together."""
    make = partial(VirtualCluster, net(), lambda named: SGD([p for _, p in named]), "random-matching", 8, rule=OuterNesterov())
    make()
    make(mix_every=2)
    with pytest.raises(ValueError, match="drives 8 replicas apart"):
        make(weights=[1, 1000] * 4)
    with pytest.raises(ValueError, match="drives 8 replicas apart"):
        make(weights=[1, 1000] * 4, mix_every=2)
