"""Momentum tracking: its text-book form in NumPy, the mean of the momenta, all drivers and the simulator, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp import gossip
from decent_dp.checkpoint import load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import GossipAdamW
from decent_dp.optim.tracking import Tracking
from decent_dp.replica import replica as replica_module
from decent_dp.replica.snapshot import copied, replace_values, take
from decent_dp.rules import MomentumTracking, OuterNesterov
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import TopologyReg, make_topology
from decent_dp.transport import run_replicas
from tests.helpers import SGD, loss, net, some_in_the_fast_tests
from tests.law_cases import Linear, Varying, data, gradient, loss_of, matrix, squares, whole

N, STEPS = 4, 30
OWN_NOISE = 2.5


class Lion(torch.optim.Optimizer):
    """As its paper has it (arXiv 2302.06675)."""

    makes_new = False

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_((beta1 * momentum + (1 - beta1) * param.grad).sign(), alpha=group["lr"])
                if self.makes_new:
                    self.state[param]["exp_avg"] = beta2 * momentum + (1 - beta2) * param.grad
                else:
                    momentum.lerp_(param.grad, 1 - beta2)
        return loss


# -- the text-book form ----------------------------------------------------------------------------------------------------


class Twin:
    """One worker: its own momentum m, the tracked one y, and how an optimizer steps. All of it in float64.

    y <- y + (m_new - m_old). With ``C = y - m``, which is what mixes have changed, an optimizer that looks at the gradient,
    too, sees ``g + C``, in units of a gradient.
    """

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.n, self.t = kind, n, 0
        self.m = self.y = self.v = np.zeros((5, 3))

    def step(self, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.t += 1
        c = self.y - self.m
        if self.kind in ("sgd", "nesterov"):
            self.m = 0.9 * self.m + g * (1 if self.t == 1 or self.kind == "nesterov" else 0.8)
            self.y = self.m + c
            corrected = g + c * (0.1 / (1 if self.kind == "nesterov" else 0.8))
            direction = corrected + 0.9 * self.y if self.kind == "nesterov" else self.y
            x = x - 0.05 * direction
        elif self.kind == "lion":
            x = x - 0.01 * np.sign(0.9 * self.y + 0.1 * (g + c))
            self.m = 0.99 * self.m + 0.01 * g
        else:
            self.m = 0.8 * self.m + 0.2 * g
            self.y = self.m + c
            left = 0.2 / 1.8 / self.n + OWN_NOISE * 0.2**2 * (1 - 1 / self.n)
            w = (1 / self.n - left) / (1 - left)
            known = 1 - 0.8**self.t
            self.v = 0.95 * self.v + 0.05 * ((1 - w) * (self.y / known) ** 2 + w * (g + c) ** 2)
            x = x * (1 - 0.03 * 0.1) - 0.03 * self.y / known / (np.sqrt(self.v / (1 - 0.95**self.t)) + 1e-8)
        self.y = self.m + c
        return x


def law(kind: str, topology: str, n: int, overlap: bool) -> tuple[np.ndarray, list[Twin]]:
    """Steps; mixes what was sent a round ago; sends. With overlap parameters are sent with their last step once more."""
    TopologyReg.registry["varying"] = Varying
    made = make_topology(topology, local_world_size=1, world_size=n, rank=0)
    x = np.stack([np.random.default_rng(7).normal(size=(5, 3))] * n)
    twins = [Twin(kind, n) for _ in range(n)]
    sent: tuple[np.ndarray, np.ndarray] | None = None

    def mix(t: int) -> None:
        assert sent is not None
        w = matrix(made.round(t), n) - np.eye(n)
        x[:] += np.einsum("ij,jkl->ikl", w, sent[0])
        for worker, difference in zip(twins, np.einsum("ij,jkl->ikl", w, sent[1]), strict=True):
            worker.y = worker.y + difference

    for t in range(STEPS):
        before = x.copy()
        x = np.stack([worker.step(x[i], gradient(x[i], i, t)) for i, worker in enumerate(twins)])
        last = x - before
        if overlap and sent is not None:
            mix(t - 1)
        sent = x + last * overlap, np.stack([worker.y for worker in twins])
        if not overlap:
            mix(t)
        if t % 10 == 0:  # what mixes have changed fades
            for worker in twins:
                worker.m = worker.m + 0.01 * (worker.y - worker.m)
    return x, twins


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: GossipAdamW(params, lr=0.03, betas=(0.8, 0.95), weight_decay=0.1, tracking=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.2),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "lion": lambda params: Lion(params, lr=0.01),
}


def momenta(optimizer: torch.optim.Optimizer, entry: str = "") -> np.ndarray:
    """Of all parameters, on top of each other."""
    key = entry or ("momentum_buffer" if isinstance(optimizer, torch.optim.SGD) else "exp_avg")
    return torch.cat([optimizer.state[param][key] for group in optimizer.param_groups for param in group["params"]]).numpy()


class Job:
    """One worker's training.

    Args:
        make: the name of an optimizer, or what makes one.
        how: options of ``gossip``.
    """

    def __init__(self, at: Any, make: Any = "adamw", model: Any = None, **how: Any) -> None:
        TopologyReg.registry["varying"] = Varying  # also where it runs in another process
        self.rank, self.model = at.rank, Linear() if model is None else model
        self.optimizer = OPTIMIZERS.get(make, make)(self.model.parameters())
        rule = None if isinstance(self.optimizer, GossipAdamW) else MomentumTracking()
        self.replica = gossip(self.model, self.optimizer, transport=at, **{"topology": "base-2", "rule": rule, **how})

    def step(self, t: int, closure: bool = False) -> None:
        def loss() -> Tensor:
            self.optimizer.zero_grad()
            found = loss_of(self.model, self.rank, t)
            found.backward()
            return found

        if closure:
            self.optimizer.step(loss)
        else:
            loss()
            self.optimizer.step()

    def steps(self, first: int, last: int) -> Job:
        for t in range(first, last):
            self.step(t)
        return self

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The tracked momenta and the own ones, of all parameters; also those that are in no optimizer's state yet."""
        return list(self.replica.momenta._tracked[0]._pairs.values())

    def end(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Values, tracked momenta and own ones."""
        tracked, own = (torch.cat(list(tensors)).numpy().copy() for tensors in zip(*self.pairs(), strict=True))
        self.replica.close()
        return whole(self.model), tracked, own


def train(at: Any, *job: Any, closure: bool = False, **how: Any) -> tuple[np.ndarray, ...]:
    job_ = Job(at, *job, **how)
    for t in range(STEPS):
        job_.step(t, closure)
    return job_.end()


def spread(found: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Of all workers: the tracked momenta, and their own."""
    return np.stack([y for _, y, _ in found]), np.stack([m for _, _, m in found])


def assert_mean(found: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the tracked momenta is that of the own ones."""
    tracked, own = spread(found)
    np.testing.assert_allclose(tracked.mean(0), own.mean(0), rtol=0, atol=1e-12)
    return tracked, own


@pytest.mark.parametrize(
    ("kind", "topology", "overlap"),
    some_in_the_fast_tests([*OPTIMIZERS], ["one-peer-exp", "complete", "varying"], [True, False]),
)
@pytest.mark.timeout(120)
def test_training_equals_the_text_book_form_in_numpy(kind, topology, overlap):
    want, twins = law(kind, topology, N, overlap)
    found = run_replicas(N, lambda at: train(at, kind, topology=topology, overlap=overlap))
    for rank in range(N):
        np.testing.assert_allclose(found[rank][0], want[rank], rtol=0, atol=1e-9, err_msg=f"worker {rank}")
        np.testing.assert_allclose(found[rank][1], twins[rank].y, rtol=0, atol=1e-9, err_msg=f"y of worker {rank}")


# -- the mean of the momenta -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "int8", "bfloat16", "low-rank:2", "low-rank:2,int8", "mix_every"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_mean_of_the_tracked_momenta_is_that_of_the_own_ones(kind, compression):
    """Whatever is lost on the way. Each worker's comes close to it: its own is further away."""
    how = {"mix_every": 2} if compression == "mix_every" else {"compression": compression}
    tracked, own = assert_mean(run_replicas(N, lambda at: train(at, kind, **how)))
    mean = tracked.mean(0)
    assert np.abs(tracked - mean).mean() < 0.9 * np.abs(own - mean).mean()


@pytest.mark.parametrize("compression", [None, "int8"])
def test_with_weights_it_is_the_weighted_mean(compression):
    weights = np.array([1.0, 2.0, 4.0, 3.0])
    tracked, own = spread(run_replicas(N, lambda at: train(at, weight=weights[at.rank], compression=compression)))
    shares = weights / weights.sum()
    np.testing.assert_allclose(np.einsum("i,ijk->jk", shares, tracked), np.einsum("i,ijk->jk", shares, own), rtol=0, atol=1e-12)


def test_what_it_sends():
    """Twice the bytes; with int8 half of a float32 copy; beside low-rank messages the momentum is sent in int8."""

    def sent(compression: str | None, rule: Any) -> int:
        def run(at: Any) -> int:
            model = nn.Linear(64, 64)
            job = Job(at, lambda params: torch.optim.SGD(params, 0.01, 0.9), model, rule=rule, compression=compression)
            for _ in range(3):
                model(torch.ones(2, 64)).square().mean().backward()
                job.optimizer.step()
            job.replica.flush()
            found: int = job.replica.stats().bytes_sent
            job.replica.close()
            return found

        return run_replicas(2, run)[0]

    tracking = MomentumTracking()
    assert sent(None, tracking) == 2 * sent(None, None)
    assert sent("int8", tracking) <= 0.55 * sent(None, None)
    assert sent("low-rank:1", tracking) == sent("low-rank:1", None) + sent("int8", None)


@pytest.mark.parametrize(("mix_every", "is_sent_ahead"), [(1, True), (2, False)])
def test_parameters_are_sent_ahead_where_every_step_mixes(mix_every, is_sent_ahead):
    found, plain = (
        run_replicas(
            N,
            lambda at, ahead=ahead: (
                Job(at, "sgd", rule=MomentumTracking(ahead=ahead), mix_every=mix_every).steps(0, 8).end()[0]
            ),
        )
        for ahead in (1, 0)
    )
    assert np.array_equal(found, plain) != is_sent_ahead


def test_a_replica_that_heals_takes_over_no_correction_of_another_one():
    """C of the replica whose values it gets would count twice."""
    saved: dict[str, Any] = {}

    def run(at: Any) -> tuple[np.ndarray, ...]:
        job = Job(at).steps(0, 6)
        snapshot = copied(take(job.replica))
        if at.rank == 0:
            saved.update(snapshot)
        job.replica.gather("saved")
        if at.rank == 1:
            replace_values(job.replica, saved)
        return job.end()

    (_, given, of_other), (_, tracked, own), *_ = run_replicas(N, run)
    np.testing.assert_array_equal(tracked, given)
    np.testing.assert_array_equal(own, tracked)
    assert np.abs(given - of_other).max() > 1e-3


def test_workers_without_batches_have_a_gradient_of_zero_and_the_mean_stays_exact():
    """One worker has a third of the batches, one has none; the momentum of those that wait fades as if they had zeros."""

    def run(at: Any) -> tuple[np.ndarray, ...]:
        job = Job(at)
        with job.replica.join():
            job.steps(0, [18, 18, 6, 0][at.rank])
        job.replica.flush()
        return job.end()

    tracked, own = assert_mean(run_replicas(N, run))
    assert np.abs(own[2]).max() < 0.2 * np.abs(own[0]).max()
    # The last worker's optimizer has made no step: what was mixed is kept for its first one.
    assert np.abs(tracked[3]).max() > 0.1 * np.abs(tracked[0]).max()


def test_a_parameter_whose_first_gradient_comes_late_goes_on_from_what_was_mixed():
    """Without a gradient on one worker, as an expert that nothing was routed to."""

    def run(at: Any) -> tuple[np.ndarray, ...]:
        job = Job(at, "sgd")
        for t in range(12):
            job.optimizer.zero_grad()
            loss_of(job.model, at.rank, t).backward()
            if at.rank == 1 and t < 7:
                job.model.lower.grad = None
            job.optimizer.step()
        job.replica.flush()
        return job.end()

    assert_mean(run_replicas(N, run))


def test_after_a_change_of_the_members_the_mean_is_exact_again():
    """Those of the dead would miss in the sum for good."""
    cluster = simulated("adamw", 5)
    cluster.kill(2)
    step(cluster, 5)
    optimizer = cluster.optimizers[0]
    living = cluster.alive
    for state in (optimizer.state[param] for param in optimizer.param_groups[0]["params"]):
        torch.testing.assert_close(state["exp_avg"][living].mean(0), state["own_momentum"][living].mean(0), rtol=0, atol=1e-12)


def test_what_lossy_groups_have_left_is_forgotten():
    """Groups of three round their means: their differences do not add up to zero, and the sum is forgotten by and by."""
    optimizer = GossipAdamW([param := nn.Parameter(torch.zeros(3))], betas=(0.9, 0.999))
    optimizer.set_replicas(3)
    tracking = Tracking(optimizer)
    param.grad = torch.zeros(3)
    optimizer.step()
    optimizer.state[param]["exp_avg"].add_(1.0)  # nobody has the other half of this
    for _ in range(300):
        optimizer.step()
        tracking.fade()
    assert optimizer.state[param]["exp_avg"].abs().max() < 0.06


# -- the other drivers ---------------------------------------------------------------------------------------------------------


def simulated(kind: str, steps: int, topology: str = "base-2", **how: Any) -> VirtualCluster:
    rule = None if kind == "adamw" else MomentumTracking()
    cluster = VirtualCluster(Linear(), OPTIMIZERS[kind], topology, N, loss_fn=squares, rule=rule, **how)
    for t in range(steps):
        step(cluster, t)
    return cluster


def step(cluster: VirtualCluster, t: int) -> None:
    batches = [[torch.from_numpy(array) for array in data(rank, t)] for rank in range(N)]
    cluster.step(*(torch.stack(column) for column in zip(*batches, strict=True)))


def values_of(cluster: VirtualCluster) -> np.ndarray:
    return np.concatenate([param.numpy() for param in cluster.parameters.values()], axis=1)


@pytest.mark.parametrize(
    ("kind", "vectorize", "how"),
    some_in_the_fast_tests(
        ["sgd", "lion", "nesterov"], [True, False], [{}, {"overlap": False}, {"mix_every": 2}, {"topology": "complete"}]
    ),
)
def test_the_simulator_equals_real_workers(kind, vectorize, how):
    real = run_replicas(N, lambda at: train(at, kind, **how))
    found = values_of(simulated(kind, STEPS, vectorize=vectorize, **how))
    np.testing.assert_allclose(found, np.stack([values for values, *_ in real]), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "how", [{}, {"overlap": False}, pytest.param({"compression": "int8"}, marks=pytest.mark.slow)], ids=str
)
def test_the_simulator_equals_the_wrapper(how):
    def run(at: Any) -> tuple[np.ndarray, int]:
        rule = MomentumTracking()
        model = DecentralizedDataParallel(Linear(), OPTIMIZERS["adamw"], topology="base-2", rule=rule, transport=at, **how)
        for t in range(STEPS):
            loss_of(model, at.rank, t).backward()
        model.close()
        return whole(model.module), model.stats().bytes_sent

    real, sent = zip(*run_replicas(N, run), strict=True)
    cluster = simulated("adamw", STEPS, **how)
    np.testing.assert_allclose(values_of(cluster), real, rtol=0, atol=1e-2 if how.get("compression") else 1e-9)
    assert cluster.bytes_sent <= sum(sent) <= 1.2 * cluster.bytes_sent


def test_with_groups_in_another_order_the_simulator_equals_real_workers():
    """Vectors first, as where they have no decay; each parameter has its turn."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.from_numpy(np.random.default_rng(7).normal(size=(5, 3))))
            self.bias = nn.Parameter(torch.zeros(1, 3, dtype=torch.float64))

        def forward(self, a: Tensor) -> Tensor:
            return a @ self.x + self.bias

    def make(params: Any) -> torch.optim.Optimizer:
        params = [param if isinstance(param, Tensor) else param[1] for param in params]
        groups = [[p for p in params if len(p) == 1], [p for p in params if len(p) > 1]]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.05, momentum=0.9)

    real = [values for values, *_ in run_replicas(N, lambda at: train(at, make, Net(), mix_every=2))]
    cluster = VirtualCluster(Net(), make, "base-2", N, loss_fn=squares, mix_every=2, rule=MomentumTracking())
    for t in range(STEPS):
        step(cluster, t)
    np.testing.assert_allclose(values_of(cluster), np.stack(real), rtol=0, atol=1e-9)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_under_muon_with_an_adam_for_the_rest():
    """Muon takes matrices; both momenta are tracked."""

    def run(at: Any) -> tuple[np.ndarray, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        matrices = [param for param in model.parameters() if param.ndim == 2]
        muon = torch.optim.Muon(matrices, lr=0.02)
        rest = GossipAdamW([param for param in model.parameters() if param.ndim < 2], lr=0.01, tracking=True)
        replica = gossip(model, [muon, rest], transport=at)
        for t in range(STEPS):
            a, b = (torch.from_numpy(array) for array in data(at.rank, t))
            muon.zero_grad()
            rest.zero_grad()
            (model(a) - b).square().mean().backward()
            muon.step()
            rest.step()
        replica.flush()
        found = [
            torch.cat([optimizer.state[param][key].flatten() for param in optimizer.param_groups[0]["params"]]).numpy().copy()
            for optimizer, keys in ((muon, ("momentum_buffer", "own_momentum")), (rest, ("exp_avg", "own_momentum")))
            for key in keys
        ]
        replica.close()
        return tuple(found)

    found = run_replicas(N, run)
    for tracked, own in ((0, 1), (2, 3)):
        y, m = (np.stack([one[place] for one in found]) for place in (tracked, own))
        np.testing.assert_allclose(y.mean(0), m.mean(0), rtol=0, atol=1e-9)
        assert np.abs(y - y.mean(0)).mean() < 0.6 * np.abs(m - m.mean(0)).mean()


# -- the optimizer stays the user's ------------------------------------------------------------------------------------------


def test_gradients_are_the_users_again_after_a_step():
    def run(at: Any) -> None:
        job = Job(at, "sgd", topology="complete")
        params = list(job.model.parameters())
        for t in range(4):
            job.optimizer.zero_grad()
            loss_of(job.model, at.rank, t).backward()
            grads = [param.grad for param in params]
            values = [grad.clone() for grad in grads]
            job.optimizer.step()
            assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
            assert all(torch.equal(grad, value) for grad, value in zip(grads, values, strict=True))
        job.replica.close()
        assert not any("own_momentum" in state for state in job.optimizer.state.values())
        before = whole(job.model)
        job.step(9)  # on its own again
        assert not np.array_equal(before, whole(job.model))

    run_replicas(2, run)


@pytest.mark.parametrize("kind", ["sgd", "lion", "adamw"])
def test_a_step_with_a_closure_is_the_same(kind):
    plain, closed = (run_replicas(2, lambda at, closure=closure: train(at, kind, closure=closure)) for closure in (False, True))
    for one, other in zip(plain, closed, strict=True):
        np.testing.assert_array_equal(one[0], other[0])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_that_a_scaler_skips_changes_no_momentum(kind):
    def run(at: Any) -> None:
        scaler = torch.GradScaler("cpu", init_scale=2.0**7, growth_interval=1000)
        job = Job(at, kind, topology="complete", scaler=scaler)
        for t in range(8):
            job.optimizer.zero_grad()
            scaler.scale(loss_of(job.model, at.rank, t) * (torch.inf if t == 4 else 1.0)).backward()
            before = momenta(job.optimizer, "own_momentum").copy() if t else None
            scaler.step(job.optimizer)
            if t == 4:
                np.testing.assert_array_equal(momenta(job.optimizer, "own_momentum"), before)
            scaler.update()
        job.replica.flush()
        # Gradients of a loss that was scaled would be 128 times as large.
        assert np.abs(momenta(job.optimizer)).max() < 30
        job.replica.close()

    run_replicas(2, run)


class WithUnused(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros_like(self.upper))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, kind):
    """Also with a parameter that nobody uses. And another number of workers goes on with the mean."""

    def run(at: Any, loads: bool) -> tuple[np.ndarray, ...]:
        job = Job(at, kind, WithUnused()).steps(0, 8)
        save(job.replica, tmp_path / str(loads))
        if loads:
            job.steps(50, 53)
            load(job.replica, tmp_path / str(loads))
        return job.steps(8, 14).end()

    def go_on(at: Any) -> tuple[np.ndarray, ...]:
        job = Job(at, kind, WithUnused())
        load(job.replica, tmp_path / "False", resize="mean")
        return job.steps(0, 3).end()

    want, found = (run_replicas(N, lambda at, loads=loads: run(at, loads)) for loads in (False, True))
    for one, other in zip(want, found, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert_mean(run_replicas(6, go_on))
    assert np.isfinite(run_replicas(1, go_on)[0][1]).all()


class Branches(nn.Module):
    """One worker never uses the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        for param in self.parameters():
            nn.init.constant_(param, 0.3)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_parameters_that_had_not_stepped_when_it_was_saved(tmp_path, kind, elsewhere):
    """Their momenta, which mixes have made, are in no optimizer's state."""

    def run(at: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        def train(job: Job, first: int, last: int) -> None:
            for t in range(first, last):
                job.optimizer.zero_grad()
                a = torch.from_numpy(np.random.default_rng((t, at.rank)).normal(size=(4, 3))) + at.rank
                parts = (job.model.first,) if at.rank == 1 else (job.model.first, job.model.second)
                sum((part(a) - 1).square().mean() for part in parts).backward()  # type: ignore[union-attr]
                job.optimizer.step()

        job = Job(at, kind, Branches())
        train(job, 0, 6)
        save(job.replica, tmp_path)
        if elsewhere:
            job.replica.close()
            job = Job(at, kind, Branches())
        else:
            train(job, 6, 9)
        load(job.replica, tmp_path)
        train(job, 6, 10)
        found = [(tracked.numpy().copy(), own.numpy().copy()) for tracked, own in job.pairs()]
        job.replica.close()
        return found

    for pairs in zip(*run_replicas(3, run), strict=True):
        tracked, own = (np.stack(tensors) for tensors in zip(*pairs, strict=True))
        assert np.abs(tracked).max() > 0.01
        np.testing.assert_allclose(tracked.mean(0), own.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_that_of_gossip", [False, True])
def test_the_state_of_one_worker_on_all_starts_anew(with_that_of_gossip):
    """As scripts for DDP save it. Its own momenta would be counted as often as there are workers."""
    saved: dict[str, Any] = {}

    def run(at: Any) -> tuple[np.ndarray, ...]:
        job = Job(at, "sgd").steps(0, 6)
        job.replica.flush()
        found = copy.deepcopy({"optimizer": job.optimizer.state_dict(), "gossip": job.replica.state_dict()})
        if at.rank == 0:
            saved.update(found)
        job.replica.gather("saved")
        job.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        if with_that_of_gossip:
            job.replica.load_state_dict(copy.deepcopy(saved["gossip"]))
        return job.steps(6, 9).end()

    assert_mean(run_replicas(N, run))


class Reassigning(Lion):
    """It makes a new tensor in each step, and clears the gradients in a hook of its own."""

    makes_new = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.01)
        self.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())


@pytest.mark.parametrize("make", [Reassigning, lambda params: type("Sign", (Lion,), {})(params, lr=0.01)])
def test_an_optimizer_of_the_users_names_its_momentum(make):
    """Also one that makes new tensors and clears gradients."""
    want = run_replicas(N, lambda at: train(at, "lion"))
    found = run_replicas(N, lambda at: train(at, make, rule=MomentumTracking("exp_avg")))
    for ours, theirs in zip(found, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def test_a_step_that_raises_leaves_the_users_gradients():
    model = Linear()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    tracking = Tracking(optimizer)
    optimizer.state[model.upper]["momentum_buffer"].add_(1.0)
    failing = optimizer.register_step_post_hook(lambda *_: 1 / 0)
    optimizer._optimizer_step_post_hooks.move_to_end(failing.id, last=False)
    model.upper.grad = torch.ones_like(model.upper)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    failing.remove()
    optimizer.step()  # corrects the user's gradient, not the one that was corrected before
    assert torch.equal(model.upper.grad, torch.ones_like(model.upper))
    tracking.close()


def test_other_arguments_of_a_step_stay():
    got = []

    class Scaled(Lion):
        def step(self, closure: Any = None, scale: float = 1.0) -> Any:
            got.append(scale)
            return super().step(closure)

    param = nn.Parameter(torch.ones(2))
    optimizer = Scaled([param], 0.1)
    Tracking(optimizer, "exp_avg")

    def closure() -> Tensor:
        param.grad = torch.ones(2)
        return param.sum()

    optimizer.step(closure, 3.0)
    optimizer.step(closure=closure, scale=2.0)
    assert got == [3.0, 2.0]


def test_after_close_the_optimizer_is_as_it_was():
    def run(at: Any) -> None:
        job = Job(at, lambda params: GossipAdamW(params, lr=0.01), rule=MomentumTracking())
        job.replica.close()
        assert not job.optimizer.tracking

    run_replicas(1, run)
    assert copy.deepcopy(OPTIMIZERS["adamw"](Linear().parameters())).tracking


@pytest.mark.parametrize("how", ["cleared", "loaded"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_state_that_was_cleared_begins_with_no_momentum(kind, how):
    def run(at: Any) -> tuple[np.ndarray, ...]:
        job = Job(at, kind)
        fresh = copy.deepcopy(job.optimizer.state_dict())
        job.steps(0, 6)
        if how == "cleared":
            job.optimizer.state.clear()
        else:
            job.optimizer.load_state_dict(fresh)
        for param in job.model.parameters():
            param.grad = torch.full_like(param, 1e-6)
        job.optimizer.step()
        return job.end()

    tracked, own = spread(run_replicas(N, run))
    assert np.abs(tracked).max() < 1.1e-6  # of one step
    np.testing.assert_allclose(tracked, own, rtol=0, atol=1e-12)


def test_loaded_momenta_take_the_order_of_memory_of_their_parameters():
    """Buckets mix memory. Worker 0 alone has a momentum, of another order."""

    def run(at: Any) -> list[Tensor]:
        model = nn.Conv2d(2, 2, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        if at.rank == 0:
            optimizer.state[model.weight]["momentum_buffer"] = torch.arange(16.0).view(2, 2, 2, 2)
        replica = gossip(model, optimizer, rule=MomentumTracking(), overlap=False, transport=at)
        replica._mix_only()
        found = [tracked.clone() for _, tracked in replica.momenta._tracked[0].momenta()]
        replica.close()
        return found

    for (found,) in run_replicas(2, run):
        torch.testing.assert_close(found, 0.45 * torch.arange(16.0).view(2, 2, 2, 2))


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "rule", "words"),
    [
        (lambda params: torch.optim.AdamW(params), MomentumTracking(), "Use decent_dp.GossipAdamW"),
        (lambda params: torch.optim.SGD(params), MomentumTracking(), "give it momentum=0.9"),
        (lambda params: torch.optim.Rprop(params), MomentumTracking(), r"MomentumTracking\(momentum='exp_avg'\)"),
        (lambda params: torch.optim.NAdam(params), MomentumTracking("exp_avg"), "Use decent_dp.GossipAdamW"),
        (lambda params: torch.optim.SGD(params, momentum=0.9, dampening=1), MomentumTracking(), "dampening=1"),
        (lambda params: GossipAdamW(params, tracking=True), OuterNesterov(), "leave one of both out"),
    ],
)
def test_what_cannot_be_tracked_is_refused_on_all_workers(make, rule, words):
    def run(at: Any) -> str:
        model = Linear()
        with pytest.raises(ValueError, match=words) as error:
            gossip(model, make(model.parameters()), rule=rule, transport=at)
        return str(error.value)

    assert len(set(run_replicas(2, run))) == 1


def test_the_wrapper_names_the_rule_that_is_missing():
    def run(at: Any) -> None:
        model = DecentralizedDataParallel(Linear(), OPTIMIZERS["adamw"], transport=at)
        a, b = (torch.from_numpy(array) for array in data(at.rank, 0))
        with pytest.raises(ValueError, match=r"rule=MomentumTracking\(\)"):
            (model(a) - b).square().mean().backward()
        model.close()

    run_replicas(2, run)


def test_parameters_of_the_wrapper_may_be_frozen_before_its_optimizers_are_made(tmp_path):
    """Their momenta are tracked all the same, and mix in the turns of their parameters: frozen at the first update, or at a
    load, which makes new optimizers."""

    def run(at: Any) -> None:
        model = DecentralizedDataParallel(net(), SGD, topology="base-2", rule=MomentumTracking(), transport=at)

        def train() -> None:
            for t in range(3):
                loss(model, t, at.rank).backward()

        model.module[0].requires_grad_(False)
        train()
        save(model, tmp_path)
        load(model, tmp_path)
        assert len(model.replica.momenta.specs) == len(list(model.parameters()))
        model.module[0].requires_grad_(True)
        train()
        model.close()

    run_replicas(2, run)


class Sum(Lion):
    """Its momentum is a sum of gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            buffer = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
            param.sub_(buffer.mul_(0.9).add_(param.grad), alpha=0.01)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (Sum, "exp_avg", r"'exp_avg' is the momentum of Sum.*it is a sum of gradients"),
        (type("Sign", (Lion,), {}), "momnetum", r"'momnetum', and its state has \['exp_avg'\]"),
    ],
)
def test_a_wrong_name_of_the_momentum_is_an_error_at_the_first_step(kind, name, words):
    def run(at: Any) -> None:
        job = Job(at, partial(kind, lr=0.01), rule=MomentumTracking(name))
        with pytest.raises(ValueError, match=words):
            job.step(0)
        job.replica.close()

    run_replicas(2, run)


@pytest.mark.parametrize("how", ["catch_up", "gather"])
def test_a_worker_that_leaves_rounds_out_makes_up_for_their_fades(monkeypatch, how):
    monkeypatch.setattr(replica_module, "check_same_call", lambda *of: [1, 25])

    def run(at: Any) -> None:
        job = Job(at, "sgd").steps(0, 1)
        tracked, own = job.pairs()[0]
        tracked.add_(1.0)
        before = (tracked - own).clone()
        # Leaves out the rounds 1 to 24, with those that fade after 10 and 20.
        if how == "catch_up":
            monkeypatch.setattr(replica_module, "round_of_others", lambda engine: 25)
            job.replica.catch_up()
        else:
            job.replica.begin_collective("gather")
        torch.testing.assert_close(tracked - own, before * 0.99**2, rtol=0, atol=1e-12)
        job.replica.close()

    run_replicas(1, run)
