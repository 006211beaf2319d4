"""Models of all kinds: the simulator computes the same as the wrapper, or refuses the model by name."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.tools.sim import VirtualCluster
from decent_dp.transport import run_replicas

N, STEPS = 4, 4
SGD = partial(torch.optim.SGD, lr=0.1)
_MAKING = threading.Lock()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))


class Head(nn.Module):
    """Two layers, and the computation of a subclass between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 12), nn.Linear(12, 3)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(x))


class Checkpointed(Head):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16)

    def between(self, x: Tensor) -> Tensor:
        return checkpoint(lambda z: self.a(z).tanh(), self.inside(x), use_reentrant=False)


class Asking(Head):
    def between(self, x: Tensor) -> Tensor:
        z = self.a(x)
        return z * 2 if z.requires_grad else z


class HookOnActivation(Head):
    def between(self, x: Tensor) -> Tensor:
        z = self.a(x)
        if z.requires_grad:
            z.register_hook(lambda gradient: 0.1 * gradient)
        return z


def module_hook() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, inside, outside: tuple(0.5 * g for g in inside))
    return model


class Counting(Head):
    count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x) / self.count


class Remembering(Head):
    """Each replica has what it saw last in a plain attribute."""

    seen: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        x = x if self.seen is None else x + self.seen
        self.seen = x.detach().mean(0)
        return self.a(x)


class RememberingByName(Remembering):
    """As it, and its Python code depends on values once there is such a state."""

    def between(self, x: Tensor) -> Tensor:
        if self.seen is not None and float(self.seen.sum()) > 1e9:
            return self.a(x) * 0
        return super().between(x)


class Buffered(Head):
    def __init__(self, act: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.act = act
        self.register_buffer("late", None)
        self.register_buffer("rows", torch.zeros(1, 16))
        self.register_buffer("total", torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        self.act(self, x.detach())
        return self.a(x + self.total)


def replaced(model: Any, x: Tensor) -> None:
    model.total = model.total + x.mean(0)


def new_data(model: Any, x: Tensor) -> None:
    model.total.data = model.total * 0.5 + x.mean(0)


def late(model: Any, x: Tensor) -> None:
    model.late = x.mean(0)


def growing(model: Any, x: Tensor) -> None:
    model.rows = torch.cat([model.rows, x[:1]])


def gone(model: Any, x: Tensor) -> None:
    model.rows = None


class Clamped(Head):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        return self.a(x)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(Head):
    def between(self, x: Tensor) -> Tensor:
        return Straight.apply(self.a(x))


class Kept(Head):
    """The loss looks at an activation that the model keeps."""

    penalty: Tensor

    def between(self, x: Tensor) -> Tensor:
        z = self.a(x).tanh()
        self.penalty = z.square().mean()
        return z


def with_penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y) + 0.3 * getattr(model, "module", model).penalty


def autocast(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model(x).float(), y)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 16, sparse=True), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x.abs().mul(5).long().clamp(max=19)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x.unflatten(1, (4, 4)))[0][:, -1])


class Branching(Head):
    """Which parameters have a gradient is up to the data."""

    def between(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.sum()) > 0 else x[:, :12]


class Growing(Head):
    """Uses a parameter from the second step on."""

    count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x) if self.count > 1 else x[:, :12]


@dataclass(frozen=True)
class Kind:
    """A model and the expected result.

    Attributes:
        model: makes it.
        fast: the error in one pass; empty if it is exact.
        slow: the error with vectorize=False; empty if it is exact.
        loss: as the simulator's ``loss_fn``.
        tolerance: of the one pass.
    """

    model: Callable[[], nn.Module]
    fast: str = ""
    slow: str = ""
    loss: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, x, y: cross_entropy(model(x), y)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


class Listed(Head):
    """Reads a parameter, or changes a buffer, that it keeps in a list, too."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.what = what
        self.kept = [self.a.weight if what == "parameter" else self.seen]

    def between(self, x: Tensor) -> Tensor:
        if self.what == "buffer":
            self.kept[0].add_(x.detach().mean())
        return self.a(x) * (1 + self.kept[0].square().sum())


def not_at_once(words: str = "") -> str:
    return f"all replicas cannot be computed in one pass .*({words}).*, pass vectorize=False"


KINDS = {
    "parameter in a list": Kind(lambda: Listed("parameter"), not_at_once("a parameter from a list")),
    "buffer in a list": Kind(lambda: Listed("buffer"), not_at_once(r"a buffer beside its name, in Listed\.kept")),
    # The latter with torch 2.6.
    "checkpointed": Kind(Checkpointed, not_at_once("saved tensor hooks|vmap over _NoopSaveInputs")),
    "asks requires_grad": Kind(Asking),
    "hook on an activation": Kind(HookOnActivation),
    "hook on a module": Kind(module_hook, not_at_once("setup_context")),
    "counter": Kind(Counting),
    "remembering": Kind(RememberingByName, not_at_once()),
    "replaced buffer": Kind(lambda: Buffered(replaced)),
    "new data of a buffer": Kind(lambda: Buffered(new_data), not_at_once(r"mutating directly with `\.data`")),
    "late buffer": Kind(lambda: Buffered(late), *["buffer 'late', which had no value"] * 2),
    "growing buffer": Kind(lambda: Buffered(growing), *[r"buffer 'rows' of shape \(1, 16\), .* \(2, 16\)"] * 2),
    "sparse embedding": Kind(Embedded, not_at_once()),
    "LSTM": Kind(Recurrent),
    "branch by the data": Kind(Branching, not_at_once()),
    "used from the second step on": Kind(Growing),
    "kept activation": Kind(Kept, loss=with_penalty),
    "buffer that goes": Kind(lambda: Buffered(gone), *["None in the place of buffer 'rows'"] * 2),
    "clamped in the forward": Kind(Clamped),
    "autograd function": Kind(StraightThrough, not_at_once("setup_context")),
    # The rounding of bfloat16's products, through four steps.
    "autocast": Kind(mlp, loss=autocast, dtype=torch.float32, tolerance=5e-3),
}


def make(kind: Kind) -> nn.Module:
    with _MAKING:  # threads share the seed
        torch.manual_seed(7)
        return kind.model().to(kind.dtype)


def batch(kind: Kind, rank: int, t: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng([rank, t])
    return torch.from_numpy(rng.normal(size=(6, 16))).to(kind.dtype), torch.from_numpy(rng.integers(0, 3, 6))


def stacked(kind: Kind, t: int) -> list[Tensor]:
    return [torch.stack(column) for column in zip(*(batch(kind, rank, t) for rank in range(N)), strict=True)]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def really(kind: Kind) -> list[list[dict[str, Tensor]]]:
    """Each worker's parameters and buffers after each step."""

    def work(transport: Any) -> list[dict[str, Tensor]]:
        inner = make(kind)
        model = DecentralizedDataParallel(inner, SGD, topology="ring", transport=transport)
        found = []
        for t in range(STEPS):
            x, y = batch(kind, transport.rank, t)
            kind.loss(model, x, y).backward()
            found.append(tensors(inner))
        model.close()
        return found

    return run_replicas(N, work)


def everything(cluster: VirtualCluster) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in {**cluster.parameters, **cluster.buffers}.items()}


def simulated(kind: Kind, vectorize: bool, message: str) -> tuple[VirtualCluster, list[dict[str, Tensor]]]:
    """The cluster and its values after each step; with a message, up to where it raises that."""
    cluster = VirtualCluster(make(kind), SGD, "ring", N, loss_fn=kind.loss, vectorize=vectorize)
    found: list[dict[str, Tensor]] = []
    for t in range(STEPS):
        before = everything(cluster)
        try:
            cluster.step(*stacked(kind, t))
        except (ValueError, RuntimeError) as error:
            assert message
            with pytest.raises(type(error), match=message):
                raise
            # Nothing has changed, and it is raised again.
            assert all(torch.equal(before[name], value) for name, value in everything(cluster).items())
            with pytest.raises(type(error), match=message):
                cluster.step(*stacked(kind, t))
            return cluster, found
        found.append(everything(cluster))
    assert not message
    return cluster, found


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # vmap has no rule of its own for clamp_
@pytest.mark.parametrize("name", KINDS)
def test_exact_or_refused(name):
    kind = KINDS[name]
    real = really(kind) if not kind.slow else []
    for vectorize, refused, tolerance in ((True, kind.fast, kind.tolerance), (False, kind.slow, 1e-12)):
        _, found = simulated(kind, vectorize, refused)
        for t, values in enumerate(found if real else []):
            for key, value in values.items():
                for rank in range(N):
                    torch.testing.assert_close(value[rank], real[rank][t][key], rtol=0, atol=tolerance, msg=f"{key}, step {t}")


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_random_numbers_of_python_are_each_replicas_own(draw):
    class Random(Head):
        def between(self, x: Tensor) -> Tensor:
            return self.a(x) * draw()

    def fix() -> None:
        random.seed(3)
        np.random.seed(3)

    fix()
    want = [draw() for _ in range(2 * N + 1)]
    model = make(Kind(Random))
    x, y = stacked(KINDS["counter"], 0)
    fix()
    with pytest.raises(RuntimeError, match=not_at_once("draws random numbers in Python")):
        VirtualCluster(model, SGD, "ring", N).step(x, y)
    cluster = VirtualCluster(model, SGD, "ring", N, vectorize=False)
    losses = cluster.step(x, y)
    with torch.no_grad():
        alone = [float(cross_entropy(model.b(model.a(x[i]) * want[i]), y[i])) for i in range(N)]
    assert losses.tolist() == pytest.approx(alone)
    cluster.step(x, y)
    assert draw() == want[2 * N]  # the refused pass has drawn none


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loss_of_another_model_is_refused(vectorize):
    model = mlp().double()
    cluster = VirtualCluster(model, SGD, "ring", N, loss_fn=lambda _, x, y: cross_entropy(model(x), y), vectorize=vectorize)
    for _ in range(2):
        with pytest.raises(ValueError, match="loss_fn must use the model that it is given"):
            cluster.step(*stacked(KINDS["counter"], 0))
    assert (cluster.round, cluster.steps) == (0, [0] * N)


def hook(param: nn.Parameter) -> None:
    param.register_hook(lambda gradient: 0 * gradient)


def late_hook(param: Any) -> None:
    param.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize("register", [hook, late_hook])
def test_hooks_on_parameters_are_refused(register):
    model = mlp()
    register(model[2].bias)
    with pytest.raises(ValueError, match=r"parameter '2\.bias' has a hook on its gradient"):
        VirtualCluster(model, SGD, "ring", N)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(16, 3)))
    with pytest.raises(ValueError, match=r"model cannot be copied, and every replica is a copy .*RuntimeError"):
        VirtualCluster(model, SGD, "ring", N)


class Stateful(Head):
    """Python state of several kinds takes part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.history, self.options = 0, [0], {"shift": 0}

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        self.history.append(self.count)
        self.options["shift"] += 2
        self.extra = len(self.history)
        return self.a(x) / (self.count + self.extra + self.options["shift"])


@pytest.mark.parametrize(("model", "vectorize"), [(Stateful, True), (Stateful, False), (Remembering, False)])
def test_python_state_of_replicas_after_a_failed_step(model, vectorize):
    """A forward of replicas 0 to 2 has changed their attributes before the loss of replica 2 raises."""
    clusters = [VirtualCluster(make(Kind(model)), SGD, "ring", N, vectorize=vectorize) for _ in range(2)]
    for t in range(STEPS):
        x, y = stacked(KINDS["counter"], t)
        if t:
            wrong = y.clone()
            wrong[2, 1] = 7
            with pytest.raises((IndexError, RuntimeError), match="7 is out of bounds"):
                clusters[0].step(x, wrong)
        losses = [cluster.step(x, y) for cluster in clusters]
        assert torch.equal(*losses)
    assert all(torch.equal(value, everything(clusters[1])[name]) for name, value in everything(clusters[0]).items())


@pytest.mark.parametrize("vectorize", [True, False])
def test_no_further_step_after_one_that_failed_half_way(vectorize):
    class Failing(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Failing.calls += 1
            if Failing.calls == N + 3:  # replica 2 in the second step
                raise ArithmeticError("no")
            return super().step()

    cluster = VirtualCluster(mlp().double(), partial(Failing, lr=0.1), "ring", N, vectorize=vectorize)
    cluster.step(*stacked(KINDS["counter"], 0))
    with pytest.raises(ArithmeticError, match="no"):
        cluster.step(*stacked(KINDS["counter"], 1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"earlier step failed half-way .ArithmeticError: no.*new VirtualCluster"):
            cluster.step(*stacked(KINDS["counter"], 1))
    assert cluster.round == 1
