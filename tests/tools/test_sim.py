"""The simulator's interface and its refusals. Its numbers are compared with real workers in test_sim_exact."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp.optim import AccumAdam, AccumAdamW, optim_fn_adamw
from decent_dp.tools.sim import VirtualCluster
from decent_dp.tools.sim.steppers import PerReplica, Shared
from decent_dp.topo import Edge, Topology
from tests.law_cases import INNER, Case, Linear, data, squares, twin

SGD = partial(torch.optim.SGD, lr=0.1)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(n: int, t: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([n, t])
    return torch.from_numpy(rng.normal(size=(n, 5, 6))), torch.from_numpy(rng.integers(0, 3, (n, 5)))


def values(cluster: VirtualCluster) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in {**cluster.parameters, **cluster.buffers}.items()}


def trained(model: nn.Module, optim_fn: Any, steps: int = 6, n: int = 4, **options: Any) -> VirtualCluster:
    cluster = VirtualCluster(model, optim_fn, options.pop("topology", "ring"), n, **options)
    for t in range(steps):
        cluster.step(*batch(n, t))
    return cluster


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


# -- the law, on many workers, against NumPy -------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("optimizer", INNER)
@pytest.mark.parametrize(("name", "n", "local"), [("complete", 12, 1), ("ring", 9, 1), ("alternating-exp-ring", 32, 4)])
def test_many_workers_equal_numpy(name, n, local, optimizer, overlap):
    cluster = VirtualCluster(
        Linear(),
        INNER[optimizer][0],
        name,
        n,
        local_world_size=local,
        overlap=overlap,
        loss_fn=squares,
    )
    cluster.set_adaptive_factor(0.7)
    for t in range(5):
        columns = zip(*(data(rank, t) for rank in range(n)), strict=True)
        cluster.step(*(torch.from_numpy(np.stack(column)) for column in columns))
    want = twin(Case(name, optimizer, overlap=overlap, steps=5, factor=0.7, local=local), n)
    got = torch.cat([cluster.parameters["upper"], cluster.parameters["lower"]], 1).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)
    x = want.reshape(n, -1)
    assert cluster.consensus_distance() == pytest.approx(np.sqrt(((x - x.mean(0)) ** 2).sum(1).mean()), rel=1e-9)


class Uneven(Topology):
    """A group of three, a pair and an idle worker."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge([0, 3, 4], 0.5), Edge([1, 5], 0.3), Edge([2], 1.0)]]


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8"])
def test_bytes_are_counted_by_edge(compression):
    cluster = trained(net(), SGD, n=6, topology=Uneven(1, world_size=6, rank=0), compression=compression)
    numel = 6 * 8 + 8 + 8 * 3 + 3
    # A pair sends two messages, a group of three four; int8 has a record of 24 bytes for each of the four parameters.
    message = {None: 8 * numel, "bfloat16": -(-2 * numel // 8) * 8, "int8": -(-(numel + 4 * 24) // 8) * 8}[compression]
    assert cluster.bytes_sent == 6 * (2 + 4) * message


def test_a_pull_of_zero_keeps_an_infinity_away():
    def still(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.0)

    cluster = VirtualCluster(net(), still, Uneven(1, world_size=6, rank=0), 6, overlap=False)
    cluster.set_adaptive_factor(0.0)
    cluster.parameters["0.bias"][1] = float("inf")
    cluster.step(*batch(6))
    assert cluster.parameters["0.bias"][5].isfinite().all()


def test_an_edit_between_steps_lives():
    for vectorize in (True, False):
        cluster = VirtualCluster(net(), partial(torch.optim.SGD, lr=0.0), "ring", 4, vectorize=vectorize)
        for t in range(3):
            cluster.step(*batch(4, t))
            cluster.parameters["0.bias"][2] += 1.0
        # A message of one step is mixed in the next: of three edits the last two rounds have moved the first and the second.
        assert cluster.parameters["0.bias"].sum(0) == pytest.approx((4 * net()[0].bias.detach() + 3).numpy())
        assert float((cluster.parameters["0.bias"][2] - net()[0].bias.detach()).mean()) > 1.0


# -- one pass and the loop -------------------------------------------------------------------------------------------------


class Added(nn.Module):
    """Autograd gives one tensor as the gradient of both parameters, and an expanded one for the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(4))
        self.scalar, self.empty = nn.Parameter(torch.tensor(2.0).double()), nn.Parameter(torch.zeros(0, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * (self.a + self.b) + self.d * self.scalar + self.c.sum() + self.empty.sum()


@pytest.mark.parametrize("options", [{}, {"grad_clip_norm": 0.01}, {"scaler": torch.GradScaler("cpu", init_scale=4.0)}])
def test_gradients_that_share_memory(options):
    optim_fn = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    found = []
    for vectorize in (True, False):
        cluster = trained(Added(), optim_fn, topology="complete", n=1, vectorize=vectorize, **options)
        found.append(values(cluster))
    plain = Added()
    optimizer = optim_fn(plain.parameters())
    for t in range(6):
        x, y = batch(1, t)
        nn.functional.cross_entropy(plain(x[0]), y[0]).backward()
        if "grad_clip_norm" in options:
            nn.utils.clip_grad_norm_(plain.parameters(), options["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
    for name, param in plain.named_parameters():
        for one in found:
            torch.testing.assert_close(one[name][0], param.detach(), rtol=0, atol=1e-12)


def test_replicas_draw_their_own_random_numbers():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    losses = VirtualCluster(model, SGD, "complete", 4).step(*(tensor[:1].repeat_interleave(4, 0) for tensor in batch(4)))
    assert len(set(losses.tolist())) > 1


def test_a_loss_of_ones_own():
    def loss(model: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return weight * (model(x).square().sum() + model[0].weight.square().sum())

    weights = torch.tensor([0.0, 1.0, 2.0, 0.0], dtype=torch.float64)
    cluster = VirtualCluster(net(), SGD, "ring", 4, loss_fn=loss)
    losses = cluster.step(*batch(4), weights)
    want = [
        float((w * (net()(x).square().sum() + net()[0].weight.square().sum())).detach())
        for w, x in zip(weights, batch(4)[0], strict=True)
    ]
    assert losses.tolist() == pytest.approx(want)
    assert losses.requires_grad is False


# -- optimizers ------------------------------------------------------------------------------------------------------------

SHARED = [
    (AccumAdam, {"accum_iter": 2}),
    (AccumAdamW, {"accum_iter": 2, "weight_decay": 0.1}),
    (torch.optim.ASGD, {"lambd": 0.1}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
]


@pytest.mark.parametrize(("kind", "options"), SHARED)
def test_one_optimizer_for_all_equals_one_each(kind, options):
    def groups(named: Any) -> Any:
        assert [tuple(param.shape) for _, param in named] == [(8, 6), (8,), (3, 8), (3,)]
        return kind([{"params": [p for _, p in named[:1]], "lr": 0.03}, {"params": [p for _, p in named[1:]]}], **options)

    together = trained(net(), groups, steps=8)
    apart = trained(net(), groups, steps=8, vectorize=False)
    assert isinstance(together._stepper, Shared)
    assert isinstance(apart._stepper, PerReplica)
    assert_close(values(together), values(apart), 1e-9)
    assert (together.parameters["0.weight"] - net()[0].weight.detach()).abs().max() > 1e-4


def test_other_optimizers_are_made_once_per_replica():
    class Normed(torch.optim.SGD):
        """Steps of one length."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.div_(param.grad.norm())
            return super().step()

    def normalise(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad.div_(param.grad.norm())

    def hooked(named: Any) -> Any:
        optimizer = SGD([p for _, p in named])
        optimizer.register_step_pre_hook(normalise)
        return optimizer

    found = [trained(net(), lambda named, f=f: f(named)) for f in (lambda named: Normed([p for _, p in named], lr=0.1), hooked)]
    assert [len(cluster.optimizers) for cluster in found] == [4, 4]
    assert_close(values(found[0]), values(found[1]), 0.0)
    moved = VirtualCluster(net(), hooked, "complete", 1)
    moved.step(*batch(1))
    assert float((moved.parameters["0.bias"][0] - net()[0].bias.detach()).norm()) == pytest.approx(0.1)
    assert len(trained(net(), optim_fn_adamw).optimizers) == 1  # the hooks of this library's factories are known


def test_a_replica_without_gradients_takes_no_step():
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y) if float(x[0, 0]) > 0 else x.sum() * 0

    cluster = VirtualCluster(
        net(), partial(optim_fn_adamw, lr=0.1), "complete", 3, loss_fn=loss, overlap=False, vectorize=False
    )
    x, y = batch(3)
    x[:, 0, 0] = torch.tensor([1.0, -1.0, 1.0])
    cluster.step(x, y)
    assert cluster.steps == [1, 0, 1]
    assert cluster.consensus_distance() < 1e-12  # the mix goes on
    nothing = VirtualCluster(net(), SGD, "ring", 2, loss_fn=lambda model, x, y: x.sum() * 0)
    nothing.step(*batch(2))
    assert (nothing.vectorized, nothing.steps, nothing.round) == (True, [0, 0], 1)


# -- state and results -----------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def test_models_of_the_mean_and_of_replicas():
    model = normed()
    model[0].bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    cluster = trained(model, SGD, steps=4)
    assert_close(dict(model.state_dict()), dict(before), 0.0)
    replicas = [cluster.replica_model(i).state_dict() for i in range(4)]
    mean = cluster.mean_model()
    for name, value in mean.state_dict().items():
        stacked = torch.stack([replica[name] for replica in replicas])
        if value.is_floating_point():
            torch.testing.assert_close(value, stacked.mean(0), rtol=0, atol=1e-15)
        else:
            assert value == stacked[0] == 4
    assert not replicas[0]["1.running_mean"].equal(replicas[1]["1.running_mean"])
    assert [name for name, p in mean.named_parameters() if not p.requires_grad] == ["0.bias"]
    with torch.no_grad():
        cluster.replica_model(1)[0].weight.zero_()
    assert cluster.parameters["0.weight"][1].abs().max() > 0
    with pytest.raises(IndexError, match="replica 4 is out of range: the replicas are 0 to 3"):
        cluster.replica_model(4)


def test_modes_of_modules_stay():
    model = normed()
    model[1].eval()
    cluster = trained(model, SGD)
    assert cluster.buffers["1.num_batches_tracked"].tolist() == [0] * 4
    cluster.mean_model().eval()
    cluster.step(*batch(4))
    assert cluster.buffers["1.num_batches_tracked"].tolist() == [0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compression", [None, "int8"])
def test_narrow_and_mixed_dtypes(dtype, compression):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(6, 8).double(), nn.Linear(8, 3).to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.narrow(self.wide(x).to(dtype)).float()

    found = trained(
        Mixed(),
        partial(torch.optim.SGD, lr=0.5),
        topology="complete",
        overlap=False,
        compression=compression,
        grad_clip_norm=1.0,
    )
    assert found.parameters["narrow.weight"].dtype == dtype
    spread = found.parameters["narrow.weight"].double().std(0).max()
    assert spread <= (0.02 if compression is None else 0.2)


# -- refusals --------------------------------------------------------------------------------------------------------------


def hooked_optimizer(named: Any) -> Any:
    optimizer = SGD([p for _, p in named])
    optimizer.pre_average_hook = lambda edge, weight: None
    return optimizer


# What the library's own checks find is theirs to test; one of each is here.
REFUSED = [
    ({"n": 2.5}, TypeError, "n, the number of workers, must be a whole number, at least 1, got 2.5"),
    ({"n": 6, "topology": "one-peer-exp"}, ValueError, "needs a power of two workers"),
    ({"mix_every": 0}, ValueError, "mix_every must be a whole number, at least 1, got 0"),
    ({"compression": "int9"}, ValueError, "did you mean 'int8'"),
    ({"grad_clip_norm": -1}, ValueError, "grad_clip_norm must be 0.0 .no clipping. or a positive norm, got -1"),
    ({"scaler": 65536.0}, TypeError, "scaler must be a torch.GradScaler or None, got 65536.0"),
    ({"vectorize": "yes"}, TypeError, "vectorize must be True or False, got 'yes'"),
    ({"topology": Uneven(1, world_size=6, rank=2), "n": 6}, ValueError, "is used with world_size=6, rank=0"),
    ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
    ({"model": net().requires_grad_(False)}, ValueError, "no trainable parameters"),
    ({"optim_fn": lambda named: None}, TypeError, "Is a `return` missing"),
    ({"optim_fn": hooked_optimizer}, TypeError, "pre_average_hook"),
    ({"lr_scheduler_fn": lambda optimizer: None}, TypeError, "lr_scheduler_fn must return .* Is a `return` missing"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused(wrong, error, message):
    right: dict[str, Any] = {"model": net(), "optim_fn": SGD, "topology": "ring", "n": 4}
    with pytest.raises(error, match=message):
        VirtualCluster(**{**right, **wrong})


def test_wrong_batches_are_refused():
    cluster = VirtualCluster(net(), SGD, "ring", 4)
    x, y = batch(4)
    with pytest.raises(ValueError, match=r"tensor 1 of the batch has the shape \(3, 5\), .* number of workers, 4"):
        cluster.step(x, y[:3])
    with pytest.raises(ValueError, match=r"tensor 0 of the batch has the shape \(\)"):
        cluster.step(torch.tensor(1.0), y)
    with pytest.raises(TypeError, match=r"tensor 1 of the batch must be a torch\.Tensor, got list"):
        cluster.step(x, y.tolist())
    with pytest.raises(TypeError, match="needs the batch"):
        cluster.step()
    with pytest.raises(ValueError, match=r"adaptive factor must be in .0, 1., got 2"):
        cluster.set_adaptive_factor(2)
    for wrong in ("a", True, None):
        with pytest.raises(TypeError, match=r"adaptive factor must be a number in .0, 1., got"):
            cluster.set_adaptive_factor(wrong)
    assert cluster.round == 0


@pytest.mark.parametrize("vectorize", [True, False])
def test_wrong_losses_are_refused(vectorize):
    def step(loss_fn: Any) -> None:
        VirtualCluster(net(), SGD, "ring", 4, loss_fn=loss_fn, vectorize=vectorize).step(*batch(4))

    with pytest.raises(ValueError, match=r"one number per replica, got a tensor of shape \(5, 3\)"):
        step(lambda model, x, y: model(x))
    with pytest.raises(TypeError, match="Is a `return` missing"):
        step(lambda model, x, y: None)
