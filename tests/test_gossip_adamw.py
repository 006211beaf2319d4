"""GossipAdamW: its formula in NumPy, the mix of its statistics in all drivers and in the simulator, loads and refusals."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp import gossip
from decent_dp.checkpoint import load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import NonFiniteError
from decent_dp.optim import GossipAdamW, SharesStatistics
from decent_dp.rules import DriftCorrection
from decent_dp.sim import VirtualCluster
from decent_dp.topo import Edge, Topology, TopologyReg
from decent_dp.transport import LocalHub, run_replicas
from tests.helpers import some_in_the_fast_tests
from tests.test_law import Linear, Varying, data, gradient, matrix

N, STEPS = 4, 75
PLAIN_STEPS, EVERY = 10, 4
OPTIONS = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optim_fn(params: Any) -> GossipAdamW:
    return GossipAdamW(params, **OPTIONS)


# -- the formula, in NumPy ---------------------------------------------------------------------------------------------------


class Matrix:
    """One matrix on one replica: AdamW's moments and the means of v, s and c. All in float64, as the module's text has them."""

    def __init__(self, shape: tuple[int, int], rule: DriftCorrection | None) -> None:
        self.t = 0
        self.rule = rule
        self.m, self.v = np.zeros(shape), np.zeros(shape)
        self.rows, self.columns = (np.zeros((3, size)) for size in shape)  # shared: of v, of s, of c
        self.own = [np.zeros(size) for size in shape]  # of this replica's v

    def shared(self) -> tuple[np.ndarray, ...]:
        return self.rows, self.columns

    def step(self, x: np.ndarray, g: np.ndarray, n: int, drift: np.ndarray) -> np.ndarray:
        (beta1, beta2), lr = OPTIONS["betas"], OPTIONS["lr"]
        if self.t % EVERY == 0:
            signal, by_gradient = g * g, None
            if self.t >= PLAIN_STEPS:
                signal = g * self.m / (1 - beta1**self.t)
                if self.rule is not None:
                    theta = self.rule.gain / (1 - self.rule.decay)
                    by_gradient = g * drift * self.root * (1 + theta) / theta / lr
            kept = beta2 ** (EVERY if self.t else 1)
            for means, own, axis in ((self.rows, self.own[0], 1), (self.columns, self.own[1], 0)):
                means *= kept
                squares, in_common = (g * g).mean(axis), signal.mean(axis)
                if by_gradient is not None:
                    in_common = in_common + np.clip(by_gradient.mean(axis), -4 * squares, 4 * squares)
                means += (1 - kept) * np.stack([squares, signal.mean(axis), in_common])
                own *= kept
                own += (1 - kept) * (g * g).mean(axis)
            both = (self.rows, self.columns)
            f_r, f_c = (np.maximum(np.clip(c / v, 0, 1) + (1 - np.clip(s / v, 0, 1)) / n, 0.25 / n) for v, s, c in both)
            rho_r, rho_c = (np.maximum(means[0] / own, 1 / n) for means, own in zip(both, self.own, strict=True))
            rho = max(self.rows[0].mean() / self.own[0].mean(), 1 / n)
            self.factor = rho_r[:, None] * rho_c / rho * np.sqrt(f_r[:, None] * f_c)
            v_r, v_c = (np.maximum(means[0], own / n) for means, own in zip(both, self.own, strict=True))
            f_r, f_c = (
                np.maximum(np.clip(means[2] / v, 0, 1) + (1 - np.clip(means[1] / v, 0, 1)) / n, 0.25 / n)
                for means, v in ((self.rows, v_r), (self.columns, v_c))
            )
            of_all = np.outer(v_r, v_c) / v_r.mean() * np.sqrt(f_r[:, None] * f_c)
            self.root = np.sqrt(of_all / (1 - beta2 ** (self.t + 1)))
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        root = np.sqrt(self.v / (1 - beta2**self.t))
        if n > 1:
            root = root * np.sqrt(self.factor) if self.rule is None else np.maximum(self.root, root / (2 * n))
        return x * (1 - lr * OPTIONS["weight_decay"]) - lr * self.m / (1 - beta1**self.t) / root


def law(
    topology: Topology, n: int, overlap: bool, factor: float = 1.0, rule: DriftCorrection | None = None
) -> list[np.ndarray]:
    """Steps; mixes parameters and statistics with what was sent a round ago; sends. The model is that of ``test_law``."""
    start = np.random.default_rng(7).normal(size=(5, 3))
    x = [start.copy() for _ in range(n)]
    drifts = [np.zeros_like(start) for _ in range(n)]
    blocks = [[Matrix((2, 3), rule), Matrix((3, 3), rule)] for _ in range(n)]
    sent: list[list[np.ndarray]] = []

    def held(i: int) -> list[np.ndarray]:
        return [x[i], *(means for block in blocks[i] for means in block.shared())]

    def mix(t: int) -> None:
        of_statistics = matrix(topology.round(t // EVERY), n) if t % EVERY == EVERY - 1 else np.eye(n)
        for i in range(n):
            for k, values in enumerate(held(i)):
                w = of_statistics if k else matrix(topology.round(t), n)
                difference = factor * sum(w[i, j] * (sent[j][k] - sent[i][k]) for j in range(n))
                values += difference
                if rule is not None and k == 0:
                    drifts[i] = rule.decay * drifts[i] - rule.gain * difference
                    values -= drifts[i]

    for t in range(STEPS):
        gradients = [gradient(x[i], i, t) for i in range(n)]
        for i, g in enumerate(gradients):
            parts = zip(blocks[i], *(np.split(whole, [2]) for whole in (x[i], g, drifts[i])), strict=True)
            x[i] = np.concatenate([block.step(values, grad, n, drift) for block, values, grad, drift in parts])
        if overlap and t > 0:
            mix(t - 1)
        sent = [[values.copy() for values in held(i)] for i in range(n)]
        if not overlap:
            mix(t)
    return x


def train_gossip(transport: Any, topology: Any, overlap: bool, rule: DriftCorrection | None = None, **how: Any) -> np.ndarray:
    TopologyReg.registry["varying"] = Varying  # also where it runs in another process
    model = Linear()
    optimizer = GossipAdamW(model.parameters(), **{**OPTIONS, **how})
    replica = gossip(model, optimizer, topology=topology, overlap=overlap, rule=rule, transport=transport)
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


def train_wrapper(transport: Any, topology: Any, overlap: bool, **how: Any) -> np.ndarray:
    model = DecentralizedDataParallel(Linear(), optim_fn, topology=topology, overlap=overlap, transport=transport, **how)
    for t in range(STEPS):
        a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
        (model(a) - b).square().mean().backward()
    values = whole(model.module)
    model.close()
    return values


@pytest.mark.parametrize(
    ("overlap", "name", "rule"),
    some_in_the_fast_tests(
        [True, False], ["one-peer-exp", "complete", "varying"], [None, DriftCorrection(gain=0.2, decay=0.9)]
    ),
)
@pytest.mark.timeout(300)
def test_training_equals_the_formula_in_numpy(replicas, name, overlap, rule):
    TopologyReg.registry["varying"] = Varying
    want = law(TopologyReg.registry[name](1, world_size=N, rank=0), N, overlap, rule=rule)
    found = replicas(N, train_gossip, name, overlap, rule)
    for rank in range(N):
        # The statistics are float32.
        np.testing.assert_allclose(found[rank], want[rank], rtol=0, atol=1e-6, err_msg=f"worker {rank}")


def test_neither_kappa_nor_the_shared_means_are_nothing_in_that_comparison():
    """Otherwise the test above would prove nothing: the results with other formulas are far from it."""
    topology = TopologyReg.registry["one-peer-exp"](1, world_size=N, rank=0)
    want = law(topology, N, True)
    alone = [run_alone(rank) for rank in range(N)]
    assert all(np.abs(want[rank] - alone[rank]).max() > 1e-2 for rank in range(N))
    unmixed = law(topology, N, True, factor=0.0)
    assert all(np.abs(want[rank] - unmixed[rank]).max() > 1e-2 for rank in range(N))
    corrected = law(topology, N, True, rule=DriftCorrection(gain=0.2))
    assert all(np.abs(want[rank] - corrected[rank]).max() > 1e-2 for rank in range(N))


def run_alone(rank: int) -> np.ndarray:
    model = Linear()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for t in range(STEPS):
        one_step(model, optimizer, rank, t)
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_size", [25, 1e-6])
def test_the_wrapper_equals_gossip_on_any_buckets(bucket_size):
    """The wrapper steps after the mix and gossip() before it, which decoupled decay feels in second order."""
    ours = run_replicas(N, lambda t: train_wrapper(t, "one-peer-exp", True, bucket_size_in_mb=bucket_size))
    theirs = run_replicas(N, lambda t: train_gossip(t, "one-peer-exp", True))
    for rank in range(N):
        np.testing.assert_allclose(ours[rank], theirs[rank], rtol=0, atol=1e-2)
    with_one = run_replicas(N, lambda t: train_wrapper(t, "one-peer-exp", True))
    for rank in range(N):
        np.testing.assert_allclose(ours[rank], with_one[rank], rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_all_forms_are_equal(how):
    plain = run_replicas(2, lambda t: train_gossip(t, "complete", True))
    found = run_replicas(2, lambda t: train_gossip(t, "complete", True, **how))
    for rank in range(2):
        np.testing.assert_allclose(found[rank], plain[rank], rtol=0, atol=1e-9)


@pytest.mark.parametrize("fused", [True, None])
def test_a_grad_scaler_scales_neither_statistics_nor_a_skipped_step(fused):
    def run(transport: Any, scaled: bool) -> tuple[np.ndarray, list[np.ndarray]]:
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
                before = [tensor.clone() for _, tensor in optimizer.statistics()]
                (scaler.scale(loss) * torch.inf).backward(retain_graph=True)
                scaler.step(optimizer)
                assert all(torch.equal(tensor, was) for (_, tensor), was in zip(optimizer.statistics(), before, strict=True))
                scaler.update(scaler.get_scale() * 1.0)
                optimizer.zero_grad()
                loss = (model(a) - b).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        replica.flush()
        found = [tensor.numpy().copy() for _, tensor in optimizer.statistics()]
        replica.close()
        return whole(model), found

    alone = run(LocalHub(1).transport(0), False), run(LocalHub(1).transport(0), True)
    np.testing.assert_allclose(alone[0][0], alone[1][0], rtol=0, atol=1e-4)
    _, scaled = run_replicas(2, lambda t: run(t, True))[0]
    for values in scaled:
        assert np.isfinite(values).all()
        assert values.max() < 100  # the squares of scaled gradients would be 16,384 times as large


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


def test_vectors_get_the_update_of_adamw():
    model, twin = small(), small()
    optimizer, reference = GossipAdamW(model.parameters(), lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01)
    optimizer.set_replicas(8)
    for _ in range(PLAIN_STEPS + 3):
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            ours.grad = theirs.grad = torch.randn_like(ours)
        optimizer.step()
        reference.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5) == (ours.ndim < 2)


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


def test_channels_last_and_transposed_parameters_train_as_contiguous_ones():
    def train(change: Any) -> list[Tensor]:
        model = change(small())
        optimizer = GossipAdamW(model.parameters(), lr=0.01)
        optimizer.set_replicas(3)
        return [param.detach().contiguous() for param in trained(model, optimizer).parameters()]

    def transposed(model: nn.Module) -> nn.Module:
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
        return model

    for change in (lambda m: m.to(memory_format=torch.channels_last), transposed):
        for ours, theirs in zip(train(change), train(lambda m: m), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_bfloat16_parameters_are_rounded_once_and_their_statistics_stay_float32(tmp_path):
    model = small(torch.bfloat16)
    optimizer = GossipAdamW(model.parameters(), lr=0.01)
    optimizer.set_replicas(4)
    trained(model, optimizer)
    again = GossipAdamW(small(torch.bfloat16).parameters(), lr=0.01)
    again.set_replicas(4)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    pairs = list(zip(optimizer.statistics(), again.statistics(), strict=True))
    assert len(pairs) == 3
    for (_, ours), (_, theirs) in pairs:
        assert ours.dtype == theirs.dtype == torch.float32
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_large_steps_where_gradients_are_noise_and_plain_ones_where_they_are_signal():
    """The gain is √n for noise and 1 for a constant gradient."""
    generator = torch.Generator().manual_seed(0)
    noise, signal = nn.Parameter(torch.zeros(40, 50)), nn.Parameter(torch.zeros(40, 50))
    direction = torch.randn(40, 50, generator=generator)
    twins = [nn.Parameter(torch.zeros(40, 50)) for _ in range(2)]
    ours, theirs = (
        GossipAdamW([noise, signal], lr=1.0, weight_decay=0.0, betas=(0.9, 0.99)),
        torch.optim.AdamW(twins, lr=1.0, weight_decay=0.0, betas=(0.9, 0.99)),
    )
    ours.set_replicas(16)
    for _ in range(400):
        before = [p.detach().clone() for p in (noise, *twins, signal)]
        noise.grad = twins[0].grad = torch.randn(40, 50, generator=generator)
        signal.grad = twins[1].grad = direction.clone()
        ours.step()
        theirs.step()
    moved = [float((p.detach() - was).norm()) for p, was in zip((noise, *twins, signal), before, strict=True)]
    assert moved[0] / moved[1] == pytest.approx(4.0, rel=0.1)
    assert moved[3] / moved[2] == pytest.approx(1.0, rel=0.01)


class Direction(nn.Module):
    """A matrix; the loss is its product with the batch, which is the gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(60, 80))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("common", "topology"),
    [(common, topology) for common in (0.2, 0.5, 1.0) for topology in ("complete", "one-peer-exp")],
)
def test_what_replicas_do_not_have_in_common_is_no_signal(topology, common):
    """Gradients without noise: a share of their squares is equal everywhere, the rest cancels in the mean of four replicas.

    AdamW on the mean gradient moves every entry by the learning rate.
    """
    everywhere, here = torch.randn(2, 60, 80, generator=torch.Generator().manual_seed(3))
    gradients = torch.stack([common**0.5 * everywhere + sign * (1 - common) ** 0.5 * here for sign in (1, 1, -1, -1)])
    lengths = {}
    for rule in (None, DriftCorrection()):
        cluster = VirtualCluster(
            Direction(),
            lambda params: GossipAdamW(params, lr=0.01, weight_decay=0.0, betas=(0.9, 0.99)),
            topology,
            4,
            loss_fn=lambda model, g: (model.weight * g).sum(),
            rule=rule,
        )
        for _ in range(600):
            before = cluster.parameters["weight"].mean(0)
            cluster.step(gradients)
        moved = cluster.parameters["weight"].mean(0) - before
        lengths[rule is None] = float(moved.norm()) / (0.01 * 4800**0.5)
    assert float((moved * -everywhere).sum() / moved.norm() / everywhere.norm()) > 0.95
    assert lengths[False] == pytest.approx(1.0, abs=0.1)
    if common < 1:
        assert lengths[True] < 0.8


def test_an_entry_that_only_one_replica_uses_moves_as_under_ddp():
    """Between two renewals the shared second moment of its row is still zero. DDP's mean gradient has 1/n of it."""
    n, lr = 8, 0.01
    options = {"lr": lr, "weight_decay": 0.0}
    ours, theirs = (nn.Parameter(torch.zeros(3, 4)) for _ in range(2))
    optimizer, reference = GossipAdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    optimizer.set_replicas(n)
    optimizer.set_drifts(lambda _: torch.zeros(3, 4), 0.95)
    for t in range(8):
        gradient = torch.ones(3, 4)
        gradient[0] = 2.0 * (t > 5)
        ours.grad, theirs.grad = gradient, gradient / n
        before = ours.detach()[0].clone(), theirs.detach()[0].clone()
        optimizer.step()
        reference.step()
    moved, wanted = (float((p.detach()[0] - was).mean()) for p, was in zip((ours, theirs), before, strict=True))
    # The mean of n replicas, of which one moves; the shared moment is at least a quarter of DDP's.
    assert 1.0 <= moved / n / wanted <= 2.01


# -- with the rule, in situations that could break it ------------------------------------------------------------------------


def test_a_row_that_one_replica_has_used_once_stays_finite():
    """With overlap, a difference is added to averages that have faded since: the shared v of that row falls below zero."""
    token = torch.zeros(8, 4, dtype=torch.int64)

    def run(rule: DriftCorrection | None) -> VirtualCluster:
        torch.manual_seed(0)
        cluster = VirtualCluster(
            nn.Embedding(20, 8),
            lambda params: GossipAdamW(params, lr=0.01, betas=(0.9, 0.95)),
            "complete",
            8,
            loss_fn=lambda model, x: model(x).square().mean(),
            rule=rule,
        )
        for t in range(40):
            token.fill_(1)
            if t == 1:
                token[0] = 2
            cluster.step(token)
        return cluster

    for rule in (None, DriftCorrection()):
        assert bool(run(rule).parameters["weight"].isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 1e-6])
def test_statistics_outlive_a_pause_of_the_rate(rate):
    """Drifts that were found before it are no drifts of steps at that rate."""
    everywhere, here = torch.randn(2, 60, 80, generator=torch.Generator().manual_seed(3))
    gradients = torch.stack([0.5**0.5 * (everywhere + sign * here) for sign in (1, 1, -1, -1)])
    cluster = VirtualCluster(
        Direction(),
        lambda params: GossipAdamW(params, lr=0.01, weight_decay=0.0, betas=(0.9, 0.99)),
        "one-peer-exp",
        4,
        loss_fn=lambda model, g: (model.weight * g).sum(),
        rule=DriftCorrection(),
    )
    optimizer = cluster._stepper.optimizers[0]

    def common() -> float:
        return float(optimizer.state[optimizer.param_groups[0]["params"][0]]["shared_means"].chunk(3, dim=-1)[2].mean())

    for _ in range(400):
        cluster.step(gradients)
    before = common()
    optimizer.param_groups[0]["lr"] = rate
    for _ in range(400):
        cluster.step(gradients)
        assert 0.5 * before < common() < 1.5 * before
    optimizer.param_groups[0]["lr"] = 0.01
    for _ in range(400):
        at = cluster.parameters["weight"].mean(0)
        cluster.step(gradients)
        assert 0.5 * before < common() < 1.5 * before
    assert float((cluster.parameters["weight"].mean(0) - at).norm()) == pytest.approx(0.01 * 4800**0.5, rel=0.1)


@pytest.mark.parametrize("again", [None, DriftCorrection()])
def test_steps_alone_between_two_runs(again):
    """The statistics of the first run are old by then, and start from the second moment."""
    param = nn.Parameter(torch.zeros(30, 40))
    optimizer = GossipAdamW([param], lr=0.01, weight_decay=0.0)
    direction = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))

    def steps(n: int, count: int) -> float:
        optimizer.set_replicas(n)
        if n > 1 and again is not None:
            optimizer.set_drifts(lambda _: torch.zeros(30, 40), 0.95)
        for _ in range(count):
            before = param.detach().clone()
            param.grad = direction.clone()
            optimizer.step()
        return float((param.detach() - before).norm())

    steps(4, 10)
    alone = steps(1, 200)
    for _ in range(6):
        assert steps(4, 1) == pytest.approx(alone, rel=0.05)


def test_what_belongs_to_another_rule_is_made_anew_at_once():
    """Of a state that was saved with the rule there are no gains, and without it no common second moment."""
    param = nn.Parameter(torch.zeros(30, 40))
    generator = torch.Generator().manual_seed(0)

    def made(with_rule: bool) -> GossipAdamW:
        optimizer = GossipAdamW([param], lr=0.01, weight_decay=0.0)
        optimizer.set_replicas(16)
        if with_rule:
            optimizer.set_drifts(lambda _: torch.zeros(30, 40), 0.95)
        return optimizer

    def step(optimizer: GossipAdamW) -> float:
        before = param.detach().clone()
        param.grad = torch.randn(30, 40, generator=generator)
        optimizer.step()
        return float((param.detach() - before).norm())

    for first in (True, False):
        optimizer = made(first)
        for _ in range(398):  # the next one is no renewal
            last = step(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        assert ("shared_roots" in saved["state"][0], "gains" in saved["state"][0]) == (first, not first)
        other = made(not first)
        other.load_state_dict(saved)
        assert step(other) == pytest.approx(last, rel=0.25)
        assert ("shared_roots" in other.state[param], "gains" in other.state[param]) == (not first, first)
        del saved["state"][0]["statistics_lr"]  # such a state is taken for that of an AdamW
        other.load_state_dict(saved)
        step(other)


def test_drifts_are_those_of_the_present_run():
    """After a run with the rule and close(), another one without it."""
    models = [Linear() for _ in range(2)]
    optimizers = [GossipAdamW(model.parameters(), **OPTIONS) for model in models]

    def run(rule: DriftCorrection | None) -> list[tuple[bool, bool]]:
        def work(transport: Any) -> tuple[bool, bool]:
            model, optimizer = models[transport.rank], optimizers[transport.rank]
            replica = gossip(model, optimizer, topology="complete", rule=rule, transport=transport)
            one_step(model, optimizer, transport.rank, 0)
            replica.close()
            state = optimizer.state[next(model.parameters())]
            return "shared_roots" in state, "gains" in state

        return run_replicas(2, work)

    assert run(DriftCorrection()) == [(True, False)] * 2
    assert run(None) == [(False, True)] * 2


def test_with_amsgrad_drifts_are_not_used():
    found = []
    for drift in (0.0, 1.0):
        param = nn.Parameter(torch.zeros(5, 6))
        optimizer = GossipAdamW([param], amsgrad=True)
        optimizer.set_replicas(3)
        optimizer.set_drifts(lambda _, drift=drift: torch.full((5, 6), drift), 0.95)  # type: ignore[misc]
        for t in range(30):
            param.grad = torch.randn(5, 6, generator=torch.Generator().manual_seed(t))
            optimizer.step()
        found.append(param.detach().clone())
    assert torch.equal(*found)


# -- states -------------------------------------------------------------------------------------------------------------


def test_the_state_of_an_adamw_can_be_loaded_and_fades_out():
    """The second moment that was loaded is divided by as it is; what comes after it gets the gain."""
    model = small()
    reference = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(model, reference)
    optimizer = GossipAdamW(model.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer.set_replicas(9)
    weight, own = model[4].weight, reference.state[model[4].weight]["exp_avg_sq"]
    shared = next(tensor for param, tensor in optimizer.statistics() if param is weight)
    expected = torch.cat([own.mean(1), own.mean(0)])
    torch.testing.assert_close(shared, torch.cat([expected] * 3))
    assert float(optimizer.state[weight]["statistics_step"]) == float(reference.state[weight]["step"]) == 15
    trained(model, optimizer, steps=2)  # the second of them is the first that takes a gradient
    assert int(optimizer.state[weight]["statistics_step"]) == 17
    torch.testing.assert_close(optimizer.state[weight]["gains"], torch.ones(len(expected)), rtol=0, atol=0.02)


def test_a_state_of_other_shapes_is_refused():
    mine = GossipAdamW(nn.Linear(4, 3).parameters())
    mine.set_replicas(2)
    for entry, found, wanted in (("means", (9,), (7,)), ("shared_means", (14,), (21,)), ("exp_avg", (2, 2), (3, 4))):
        wrong = copy.deepcopy(mine.state_dict())
        wrong["state"][0][entry] = torch.zeros(found)
        with pytest.raises(ValueError, match=re.escape(f" {entry} of its state 0 has shape {found}, and should be {wanted}")):
            mine.load_state_dict(wrong)


def test_a_sparse_gradient_is_refused_and_nothing_steps():
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    optimizer = GossipAdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"GossipAdamW does not support sparse gradients.*shape \(4, 3\)"):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_statistics_follow_a_load_of_the_optimizer_in_the_middle_of_a_run():
    """The tensors that are mixed are then those of the loaded state, and the difference in flight is dropped."""

    def run(transport: Any) -> list[np.ndarray]:
        model = Linear()
        optimizer = GossipAdamW(model.parameters(), **OPTIONS)
        replica = gossip(model, optimizer, topology="complete", transport=transport)
        for t in range(4):  # the statistics of the last of these steps are in flight
            one_step(model, optimizer, transport.rank, t)
        loaded = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(loaded)
        replica.flush()
        found = [tensor.numpy().copy() for _, tensor in optimizer.statistics()]
        for state, values in zip(loaded["state"].values(), found, strict=True):
            np.testing.assert_array_equal(state["shared_means"].numpy(), values)
        for t in range(4, 8):
            one_step(model, optimizer, transport.rank, t)
        replica.flush()
        found = [tensor.numpy().copy() for _, tensor in optimizer.statistics()]
        replica.close()
        return found

    found = run_replicas(3, run)
    for one, other in zip(found[0], found[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# -- the simulator ------------------------------------------------------------------------------------------------------


def simulate(topology: str, overlap: bool, vectorize: bool | None, **how: Any) -> tuple[VirtualCluster, np.ndarray]:
    cluster = VirtualCluster(
        Linear(),
        optim_fn,
        topology,
        N,
        loss_fn=lambda model, a, b: (model(a) - b).square().mean(),
        overlap=overlap,
        vectorize=vectorize,
        **how,
    )
    for t in range(STEPS):
        batches = [[torch.from_numpy(array) for array in data(rank, t)] for rank in range(N)]
        cluster.step(*(torch.stack(column) for column in zip(*batches, strict=True)))
    return cluster, np.concatenate([param.numpy() for param in cluster.parameters.values()], axis=1)


@pytest.mark.parametrize(
    ("overlap", "vectorize", "rule"), some_in_the_fast_tests([True, False], [True, False], [None, DriftCorrection()])
)
def test_the_simulator_equals_real_workers(overlap, vectorize, rule):
    cluster, found = simulate("one-peer-exp", overlap, vectorize, rule=rule)
    sent: dict[int, int] = {}

    def run(transport: Any) -> np.ndarray:
        model = DecentralizedDataParallel(
            Linear(), optim_fn, topology="one-peer-exp", overlap=overlap, rule=rule, transport=transport
        )
        for t in range(STEPS):
            a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
            (model(a) - b).square().mean().backward()
        sent[transport.rank] = model.stats().bytes_sent
        values = whole(model.module)
        model.close()
        return values

    real = run_replicas(N, run)
    for rank in range(N):
        np.testing.assert_allclose(found[rank], real[rank], rtol=0, atol=1e-6)
    # Parameters of 8 bytes, and for each of two matrices three vectors of rows and columns, of 4 bytes.
    floats = 3 * (2 + 3) + 3 * (3 + 3)
    assert cluster.bytes_sent == N * (STEPS * 15 * 8 + STEPS // EVERY * floats * 4)
    assert sum(sent.values()) >= cluster.bytes_sent


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"rule": DriftCorrection()}, marks=pytest.mark.slow),
        pytest.param({"rule": DriftCorrection(), "compression": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_vectorized_and_one_by_one_are_equal(how):
    one, other = (simulate("base-2", True, vectorize, **how)[1] for vectorize in (True, False))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


# -- checkpoints --------------------------------------------------------------------------------------------------------


def resumed(
    transport: Any, folder: Path, kind: str, steps: int, stop: int, rule: Any = None, *, loads: bool = True
) -> list[np.ndarray]:
    """Parameters and statistics after some steps, of which a part comes after a save, or after a load of what was saved."""

    def build() -> tuple[Any, Any]:
        model = Linear()
        if kind == "wrapper":
            replica: Any = DecentralizedDataParallel(
                model, optim_fn, topology="one-peer-exp", rule=rule, transport=transport, bucket_size_in_mb=1e-6
            )
            return model, replica
        optimizer = GossipAdamW(model.parameters(), **OPTIONS)
        return model, gossip(model, optimizer, topology="one-peer-exp", rule=rule, transport=transport)

    def step(model: nn.Module, replica: Any, t: int) -> None:
        if kind == "gossip":
            one_step(model, replica.optimizers[0], transport.rank, t)
            return
        a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
        (replica(a) - b).square().mean().backward()

    model, replica = build()
    for t in range(stop):
        step(model, replica, t)
    save(replica, folder)
    if loads:
        for t in range(stop, stop + 3):  # moves on, so that the load has something to undo
            step(model, replica, t)
        load(replica, folder)
    for t in range(stop, steps):
        step(model, replica, t)
    statistics = [
        tensor
        for optimizer in (replica.replica if kind == "wrapper" else replica).optimizers
        for _, tensor in optimizer.statistics()
    ]
    found = [whole(model), *(tensor.numpy().copy() for tensor in statistics)]
    replica.close()
    return found


@pytest.mark.parametrize(("kind", "rule"), some_in_the_fast_tests(["gossip", "wrapper"], [None, DriftCorrection()]))
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, kind, rule):
    want = run_replicas(N, lambda t: resumed(t, tmp_path / "continued", kind, 18, 12, rule, loads=False))
    found = run_replicas(N, lambda t: resumed(t, tmp_path / "saved", kind, 18, 12, rule))
    for rank in range(N):
        assert len(found[rank]) == 3
        for one, other in zip(found[rank], want[rank], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("n", "kind", "rule"), some_in_the_fast_tests([1, 2, 6], ["gossip", "wrapper"], [None, DriftCorrection()])
)
def test_another_number_of_workers_takes_the_mean_of_the_statistics(tmp_path, kind, n, rule):
    run_replicas(N, lambda t: resumed(t, tmp_path, kind, 14, 12, rule))

    def go_on(transport: Any) -> np.ndarray:
        model = Linear()
        if kind == "wrapper":
            replica: Any = DecentralizedDataParallel(model, optim_fn, topology="base-2", rule=rule, transport=transport)
        else:
            optimizer = GossipAdamW(model.parameters(), **OPTIONS)
            replica = gossip(model, optimizer, topology="base-2", rule=rule, transport=transport)
        load(replica, tmp_path, resize="mean")
        if kind == "gossip":
            for t in range(3):
                one_step(model, replica.optimizers[0], transport.rank, t)
        else:
            for t in range(3):
                a, b = (torch.from_numpy(array) for array in data(transport.rank, t))
                (replica(a) - b).square().mean().backward()
        replica.close()
        return whole(model)

    for values in run_replicas(n, go_on):
        assert np.isfinite(values).all()


# -- bad input ----------------------------------------------------------------------------------------------------------


class Islands(Topology):
    """Workers 0 to n - 2 mix, the last one never does."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        last = self._world_size - 1
        return [[Edge(list(range(last)), 1 / last), Edge([last], 1.0)]]


@pytest.mark.parametrize("kind", ["gossip", "wrapper"])
def test_a_worker_that_never_mixes_is_refused_everywhere(kind):
    def run(transport: Any) -> str:
        topology = Islands(1, world_size=3, rank=transport.rank)
        try:
            train = train_gossip if kind == "gossip" else train_wrapper
            train(transport, topology, True)
        except ValueError as error:
            return str(error)
        return "nothing"

    messages = run_replicas(3, run)
    assert len(set(messages)) == 1
    assert "GossipAdamW" in messages[0]
    assert "never mixes replica 2 with the others" in messages[0]


def test_other_optimizers_may_have_a_worker_that_never_mixes():
    def run(transport: Any) -> None:
        model = Linear()
        topology = Islands(1, world_size=3, rank=transport.rank)
        gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), topology=topology, transport=transport).close()

    run_replicas(3, run)


@pytest.mark.parametrize("option", [{"betas": (0.9, 0.99)}, {"eps": 1e-6}, {"weight_decay": 0.3}, {"amsgrad": True}])
def test_workers_with_different_settings_raise_the_same_error(option):
    def run(transport: Any) -> str:
        try:
            train_gossip(transport, "complete", True, **(option if transport.rank == 1 else {}))
        except ValueError as error:
            return str(error)
        return "nothing"

    messages = run_replicas(2, run)
    assert messages[0] == messages[1]
    assert next(iter(option)) in messages[0]


def test_a_plain_adamw_on_one_worker_is_refused_everywhere():
    def run(transport: Any) -> str:
        model = Linear()
        kind = GossipAdamW if transport.rank else torch.optim.AdamW
        try:
            gossip(model, kind(model.parameters()), transport=transport)
        except ValueError as error:
            return str(error)
        return "nothing"

    messages = run_replicas(2, run)
    assert messages[0] == messages[1]
    assert "GossipAdamW" in messages[0]


def test_statistics_that_are_not_finite_stay_on_their_worker_and_end_the_run(caplog):
    """Each worker's own statistics of one matrix; the parameters stay finite."""

    def run(transport: Any) -> tuple[str, bool]:
        model = Linear()
        optimizer = GossipAdamW(model.parameters(), **OPTIONS)
        replica = gossip(model, optimizer, topology="complete", transport=transport)
        one_step(model, optimizer, transport.rank, 0)
        if transport.rank == 1:
            optimizer.statistics()[0][1][0] = torch.nan
        try:
            for t in range(1, 60):
                if transport.rank == 1:
                    for param in model.parameters():
                        param.grad = None
                    for tensor in (tensor for _, tensor in optimizer.statistics()):
                        tensor[0] = torch.nan
                    optimizer.step()
                else:
                    one_step(model, optimizer, transport.rank, t)
        except NonFiniteError as error:
            finite = all(bool(tensor.isfinite().all()) for _, tensor in optimizer.statistics())
            return str(error), finite
        finally:
            replica.close()
        return "nothing", True

    with caplog.at_level(logging.WARNING):
        found = run_replicas(3, run)
    for rank, (message, finite) in enumerate(found):
        assert "that of worker 1" in message
        assert "(statistics)" in message
        assert finite == (rank != 1)


def test_only_the_interface_is_needed_of_an_optimizer_of_the_users():
    """An optimizer that counts: its count is averaged."""

    class Counting(torch.optim.SGD, SharesStatistics):
        replicas = 0

        def set_replicas(self, n: int) -> None:
            self.replicas = n

        def statistics(self) -> list[tuple[Tensor, Tensor]]:
            found = []
            for group in self.param_groups:
                for param in group["params"]:
                    found.append((param, self.state[param].setdefault("count", torch.zeros(1))))
            return found

    def run(transport: Any) -> tuple[int, list[float]]:
        model = Linear()
        optimizer = Counting(model.parameters(), lr=0.1)
        replica = gossip(model, optimizer, topology="complete", overlap=False, transport=transport)
        told = optimizer.replicas
        for _, tensor in optimizer.statistics():
            tensor.fill_(float(transport.rank))
        one_step(model, optimizer, transport.rank, 0)
        found = [float(tensor) for _, tensor in optimizer.statistics()]
        replica.close()
        assert optimizer.replicas == 1
        return told, found

    assert run_replicas(3, run) == [(3, [1.0, 1.0])] * 3


def test_a_state_with_a_parameter_that_had_no_gradient_can_be_loaded():
    def made(n: int) -> tuple[nn.Module, GossipAdamW]:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        optimizer = GossipAdamW(model.parameters(), lr=0.1)
        optimizer.set_replicas(n)
        return model, optimizer

    model, optimizer = made(2)
    for _ in range(3):
        model[0](torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    again, other = made(2)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, by in ((model, optimizer), (again, other)):
        sum(part(torch.ones(4, 3)).square().sum() for part in one).backward()
        by.step()
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)


def test_kernels_get_the_matrices_of_each_device_apart(monkeypatch):
    """One launch knows one device. The second is one without values, as there may be no GPU."""
    kernels = pytest.importorskip("decent_dp.optim.gossip_kernels", reason="needs Triton")
    launched: list[set[torch.device]] = []
    for name in ("renew", "update"):
        record = lambda matrices, *_, **__: launched.append({matrix.param.device for matrix in matrices})  # noqa: E731
        monkeypatch.setattr(kernels.kernels, name, record)
    monkeypatch.setattr(kernels.tables, "usable", lambda device: True)
    monkeypatch.setattr(kernels, "takes", lambda *_: True)
    params = [torch.nn.Parameter(torch.ones(4, 3, device=device)) for device in ("cpu", "meta", "cpu")]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = GossipAdamW(params)
    optimizer.set_replicas(4)
    optimizer.step()
    assert sorted(map(str, launched)) == sorted(map(str, 2 * [{torch.device("cpu")}, {torch.device("meta")}]))
