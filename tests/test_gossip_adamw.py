"""GossipAdamW: its formula in NumPy, all drivers and the simulator, loads and refusals. With tracking: test_tracking.py."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from decent_dp import gossip
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import GossipAdamW, rows
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import Topology, TopologyReg
from decent_dp.transport import LocalHub, run_replicas
from tests.helpers import some_in_the_fast_tests
from tests.law_cases import Linear, Varying, data, gradient, matrix

N, STEPS = 4, 40
OPTIONS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optim_fn(params: Any) -> GossipAdamW:
    return GossipAdamW(params, **OPTIONS)


# -- the formula, in NumPy ---------------------------------------------------------------------------------------------------


class Twin:
    """One replica, in float64, as the module's text has it."""

    def __init__(self, n: int) -> None:
        left = (1 - 0.8) / (1 + 0.8)
        self.w, self.t = max(0.0, (1 / n - left) / (1 - left)), 0
        self.m = self.v = np.zeros((5, 3))

    def step(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.t += 1
        self.m = 0.8 * self.m + 0.2 * g
        m = self.m / (1 - 0.8**self.t)
        self.v = 0.95 * self.v + 0.05 * ((1 - self.w) * m * m + self.w * g * g)
        return x * (1 - 0.03 * 0.1) - 0.03 * m / np.sqrt(self.v / (1 - 0.95**self.t))


def law(topology: Topology, n: int, overlap: bool) -> np.ndarray:
    """Steps; mixes with what was sent a round ago; sends. The model is that of ``test_law``."""
    x = np.stack([np.random.default_rng(7).normal(size=(5, 3))] * n)
    twins, sent = [Twin(n) for _ in range(n)], x
    for t in range(STEPS):
        x = np.stack([twin.step(x[i], gradient(x[i], i, t)) for i, twin in enumerate(twins)])
        if overlap and t > 0:
            x = x + np.einsum("ij,jkl->ikl", matrix(topology.round(t - 1), n) - np.eye(n), sent)
        sent = x.copy()
        if not overlap:
            x = np.einsum("ij,jkl->ikl", matrix(topology.round(t), n), x)
    return x


def train_gossip(transport: Any, topology: Any, overlap: bool) -> np.ndarray:
    TopologyReg.registry["varying"] = Varying  # also where it runs in another process
    model = Linear()
    optimizer = GossipAdamW(model.parameters(), **OPTIONS)
    replica = gossip(model, optimizer, topology=topology, overlap=overlap, transport=transport)
    for t in range(STEPS):
        one_step(model, optimizer, transport.rank, t)
    replica.close()
    return whole(model)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, t: int) -> None:
    a, b = (torch.from_numpy(array) for array in data(rank, t))
    optimizer.zero_grad()
    (model(a) - b).square().mean().backward()
    optimizer.step()


def whole(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().clone() for p in model.parameters()]).numpy()


def train_wrapper(transport: Any, topology: Any, overlap: bool) -> np.ndarray:
    model = DecentralizedDataParallel(Linear(), optim_fn, topology=topology, overlap=overlap, transport=transport)
    for t in range(STEPS):
        a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
        (model(a) - b).square().mean().backward()
    values = whole(model.module)
    model.close()
    return values


@pytest.mark.parametrize(("overlap", "name"), some_in_the_fast_tests([True, False], ["one-peer-exp", "complete", "varying"]))
@pytest.mark.timeout(300)
def test_training_equals_the_formula_in_numpy(replicas, name, overlap):
    TopologyReg.registry["varying"] = Varying
    want = law(TopologyReg.registry[name](1, world_size=N, rank=0), N, overlap)
    found = replicas(N, train_gossip, name, overlap)
    for rank in range(N):
        np.testing.assert_allclose(found[rank], want[rank], rtol=0, atol=1e-6, err_msg=f"worker {rank}")


@pytest.mark.parametrize("tracking", [False, True])
def test_parameters_in_blocks_equal_whole_ones(monkeypatch, tracking):
    def train() -> Tensor:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size)) for size in (100, 33, 7)]
        optimizer = GossipAdamW(params, lr=0.1, tracking=tracking)
        optimizer.set_replicas(4)
        for _ in range(5):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        return torch.cat([param.detach() for param in params])

    found = train()
    monkeypatch.setattr(rows, "_BLOCK", 16)
    torch.testing.assert_close(train(), found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [True, None])
def test_a_grad_scaler_scales_no_moment_and_skips_a_step(fused):
    def run(transport: Any, scaled: bool) -> tuple[np.ndarray, float]:
        model = Linear().float()
        optimizer = GossipAdamW(model.parameters(), **OPTIONS, fused=fused)
        scaler = torch.GradScaler("cpu", init_scale=2.0**7, growth_interval=1000) if scaled else None
        replica = gossip(model, optimizer, topology="complete", transport=transport, scaler=scaler)
        for t in range(30):
            a, b = (torch.from_numpy(array).float() for array in data(transport.rank, t))
            optimizer.zero_grad()
            loss = (model(a) - b).square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
                continue
            if t == 20:  # overflows, and is repeated: the first of the two steps is skipped
                before = optimizer.state[model.upper]["exp_avg_sq"].clone()
                (scaler.scale(loss) * torch.inf).backward(retain_graph=True)
                scaler.step(optimizer)
                assert torch.equal(optimizer.state[model.upper]["exp_avg_sq"], before)
                scaler.update(scaler.get_scale() * 1.0)
                optimizer.zero_grad()
                loss = (model(a) - b).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.close()
        return whole(model), float(optimizer.state[model.upper]["exp_avg_sq"].max())

    alone = run(LocalHub(1).transport(0), False), run(LocalHub(1).transport(0), True)
    np.testing.assert_allclose(alone[0][0], alone[1][0], rtol=0, atol=1e-4)
    # The squares of scaled gradients would be 16,384 times as large.
    assert run_replicas(2, lambda t: run(t, True))[0][1] < 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("n", [1, 3])
def test_a_compiled_step_is_the_same(n):
    def train(compiled: bool) -> nn.Module:
        model = small()
        optimizer = GossipAdamW(model.parameters(), lr=0.01)
        optimizer.set_replicas(n)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for t in range(14):
            optimizer.zero_grad()
            model(torch.from_numpy(np.random.default_rng(t).normal(size=(5, 1, 4, 4))).float()).square().mean().backward()
            step()
        return model

    for ours, theirs in zip(train(True).parameters(), train(False).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_step_inside_of_autocast_is_the_same():
    """As that of a wrapper whose backward is called there."""

    def train(enabled: bool) -> nn.Module:
        model = small()
        optimizer = GossipAdamW(model.parameters(), lr=0.01)
        optimizer.set_replicas(4)
        for t in range(6):
            for i, param in enumerate(model.parameters()):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * t + i))
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                optimizer.step()
        return model

    for ours, theirs in zip(train(True).parameters(), train(False).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_descent_and_ascent_are_mirrored():
    def train(sign: float, maximize: bool) -> np.ndarray:
        model = Linear()
        optimizer = GossipAdamW(model.parameters(), **OPTIONS, maximize=maximize)
        optimizer.set_replicas(3)
        for t in range(STEPS):
            a, b = (torch.from_numpy(array) for array in data(0, t))
            optimizer.zero_grad()
            (sign * (model(a) - b).square().mean()).backward()
            optimizer.step()
        return whole(model)

    np.testing.assert_array_equal(train(1.0, False), train(-1.0, True))


# -- alone --------------------------------------------------------------------------------------------------------------


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 15) -> nn.Module:
    for t in range(steps):
        x = torch.from_numpy(np.random.default_rng(t).normal(size=(5, 1, 4, 4))).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("how", "dtype"),
    some_in_the_fast_tests(
        [
            {},
            {"fused": True},
            {"foreach": False},
            {"foreach": True},
            {"amsgrad": True},
            {"maximize": True},
            {"weight_decay": 0.0},
        ],
        [torch.float32, torch.bfloat16, torch.float64],
    ),
)
def test_alone_and_with_one_replica_it_is_adamw_bit_for_bit(how, dtype):
    want = small(dtype)
    reference = torch.optim.AdamW(want.parameters(), lr=0.01, **how)
    trained(want, reference)
    for connected in (False, True):
        model = small(dtype)
        optimizer = GossipAdamW(model.parameters(), lr=0.01, **how)
        if connected:
            replica = gossip(model, optimizer, transport=LocalHub(1).transport(0))
        trained(model, optimizer)
        for name, value in model.state_dict().items():
            assert torch.equal(value, want.state_dict()[name]), name
        assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
        for key, state in optimizer.state_dict()["state"].items():
            assert state.keys() == reference.state_dict()["state"][key].keys()
        if connected:
            replica.close()


def test_closures_and_gradients_that_are_missing():
    model = small()
    optimizer = GossipAdamW(model.parameters(), lr=0.01)
    optimizer.set_replicas(2)
    model[0].requires_grad_(False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1, 4, 4)).square().mean()
        loss.backward()
        return loss

    frozen = model[0].weight.clone()
    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second.item() < first.item()
    assert torch.equal(model[0].weight, frozen)


def test_rows_without_a_gradient_stay_finite():
    """As rows of an embedding whose tokens do not come, and inputs that are always zero."""
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = GossipAdamW([weight], lr=0.1, weight_decay=0.0)
    optimizer.set_replicas(2)
    weight.grad = torch.zeros(4, 3)
    weight.grad[1, 2] = 1e-25  # its square is no float32
    for _ in range(20):
        optimizer.step()
    assert weight.isfinite().all()
    assert torch.equal(weight[0], torch.ones(3))


def test_bfloat16_parameters_are_computed_in_float32():
    """One step differs from that of float32 by the rounding of what is stored."""

    def step(dtype: torch.dtype) -> list[Tensor]:
        param = nn.Parameter(torch.linspace(-1, 1, 300).to(dtype))
        optimizer = GossipAdamW([param], lr=0.01, tracking=True)
        optimizer.set_replicas(4)
        for t in range(3):
            param.grad = torch.randn(300, generator=torch.Generator().manual_seed(t)).to(torch.bfloat16).to(dtype)
            optimizer.step()
        return [param.detach().float(), optimizer.state[param]["exp_avg"].float()]

    for ours, theirs in zip(step(torch.bfloat16), step(torch.float32), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


# -- states -------------------------------------------------------------------------------------------------------------


def test_the_state_of_an_adamw_can_be_loaded_and_read():
    model = small()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, reference)
    optimizer = GossipAdamW(model.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer.set_replicas(9)
    trained(model, optimizer, steps=2)
    assert int(optimizer.state[model[4].weight]["step"]) == 17
    reference.load_state_dict(optimizer.state_dict())
    trained(model, reference, steps=1)


def test_a_sparse_gradient_is_refused_and_nothing_steps():
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    optimizer = GossipAdamW(model.parameters())
    optimizer.set_replicas(2)
    model(torch.tensor([1])).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"GossipAdamW does not support sparse gradients.*shape \(4, 3\)"):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# -- the simulator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "vectorize"), some_in_the_fast_tests([True, False], [True, False]))
def test_the_simulator_equals_wrappers(overlap, vectorize):
    cluster = VirtualCluster(
        *(Linear(), optim_fn, "one-peer-exp", N),
        loss_fn=lambda model, a, b: (model(a) - b).square().mean(),
        overlap=overlap,
        vectorize=vectorize,
    )
    for t in range(STEPS):
        batches = [[torch.from_numpy(array) for array in data(rank, t)] for rank in range(N)]
        cluster.step(*(torch.stack(column) for column in zip(*batches, strict=True)))
    found = np.concatenate([param.numpy() for param in cluster.parameters.values()], axis=1)
    real = run_replicas(N, lambda at: train_wrapper(at, "one-peer-exp", overlap))
    np.testing.assert_allclose(found, np.stack(real), rtol=0, atol=1e-9)


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "kind", "option"), [("betas", GossipAdamW, {"betas": (0.9, 0.99)}), ("GossipAdamW", AdamW, {})]
)
def test_workers_with_other_optimizers_raise_the_same_error(word, kind, option):
    def run(transport: Any) -> str:
        model = Linear()
        optimizer = kind(model.parameters(), **option) if transport.rank else GossipAdamW(model.parameters())
        with pytest.raises(ValueError, match=word) as error:
            gossip(model, optimizer, transport=transport)
        return str(error.value)

    assert len(set(run_replicas(2, run))) == 1


@pytest.mark.parametrize("stacked", [False, True])
def test_vectors_take_more_of_their_own_gradient(stacked):
    """With alternating gradients the momentum is next to nothing, so that the step shows the weight of the gradient."""

    def moved(shape: tuple[int, ...]) -> float:
        param = nn.Parameter(torch.zeros(3, *shape) if stacked else torch.zeros(shape))
        optimizer = GossipAdamW([param], lr=0.01, weight_decay=0.0)
        optimizer.set_replicas(64, stacked=stacked)
        for t in range(40):
            before = param.detach().clone()
            param.grad = torch.full_like(param, 1.0 if t % 2 else -1.0)
            optimizer.step()
        return float((param.detach() - before).abs().max())

    assert moved((4,)) < 0.7 * moved((4, 2))
