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
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = nn.Linear(16, 16), reentrant

    def between(self, x: Tensor) -> Tensor:
        return checkpoint(lambda z: self.a(z).tanh(), self.inside(x), use_reentrant=self.reentrant)


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
    """As it, and refuses in one pass: another kind of Python state decides, once it is there."""

    def between(self, x: Tensor) -> Tensor:
        if self.seen is not None and float(self.seen.sum()) > 1e9:
            return self.a(x) * 0
        return super().between(x)


class Kept(Head):
    """The loss looks at an activation that the model keeps."""

    penalty: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        z = self.a(x).tanh()
        self.penalty = z.square().mean()
        return z


def with_penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model(x), y)
    return loss + 0.3 * getattr(model, "module", model).penalty


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


def retyped(model: Any, x: Tensor) -> None:
    model.total = model.total.to(torch.float16)


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


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    model[2].weight = model[0].weight
    return model


class Branching(Head):
    """Which parameters have a gradient is up to the data."""

    def between(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.sum()) > 0 else x[:, :12]


class LateBranch(Head):
    count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x) * (2 if self.count == 3 and float(x.sum()) > 0 else 1)


class Growing(Head):
    """Uses a parameter from the second step on."""

    count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x) if self.count > 1 else x[:, :12]


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


def autocast(model: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(model(x).float(), y)


@dataclass(frozen=True)
class Kind:
    """A model and the expected result.

    Attributes:
        model: makes it.
        fast: with vectorize=None: computed in one pass (True), one by one with a warning (False), or raises this.
        slow: the error with vectorize=False; empty if it is exact.
        loss: None for the cross entropy.
        tolerance: of the one pass.
    """

    model: Callable[[], nn.Module]
    fast: bool | str
    slow: str = ""
    loss: Any = None
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


KINDS = {
    "mlp": Kind(mlp, True),
    "checkpointed": Kind(lambda: Checkpointed(False), False),
    "checkpointed, reentrant": Kind(lambda: Checkpointed(True), False),
    "asks requires_grad": Kind(Asking, True),
    "hook on an activation": Kind(HookOnActivation, True),
    "hook on a module": Kind(module_hook, False),
    "counter": Kind(Counting, True),
    "remembering": Kind(RememberingByName, r"can no longer be computed .*: pass vectorize=False"),
    "kept activation": Kind(Kept, True, loss=with_penalty),
    "replaced buffer": Kind(lambda: Buffered(replaced), True),
    "new data of a buffer": Kind(lambda: Buffered(new_data), False),
    "late buffer": Kind(lambda: Buffered(late), "buffer 'late', which had no value", "buffer 'late', which had no value"),
    "growing buffer": Kind(
        lambda: Buffered(growing), r"buffer 'rows' of shape \(1, 16\)", r"buffer 'rows' of shape \(1, 16\), .* \(2, 16\)"
    ),
    "buffer that goes": Kind(
        lambda: Buffered(gone), "None in the place of buffer 'rows'", "None in the place of buffer 'rows'"
    ),
    "buffer of another type": Kind(lambda: Buffered(retyped), "buffer 'total' of shape", "buffer 'total' of shape"),
    "sparse embedding": Kind(Embedded, False),
    "LSTM": Kind(Recurrent, True),
    "tied": Kind(tied, True),
    "branch by the data": Kind(Branching, False),
    "late branch by the data": Kind(LateBranch, "can no longer be computed .*: pass vectorize=False"),
    "used from the second step on": Kind(Growing, "'a.weight' had no gradient in the first step.*: pass vectorize=False"),
    "clamped in the forward": Kind(Clamped, True),
    "autograd function": Kind(StraightThrough, False),
    # The rounding of bfloat16's products, through four steps.
    "autocast": Kind(mlp, True, loss=autocast, dtype=torch.float32, tolerance=5e-3),
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
            loss = cross_entropy(model(x), y) if kind.loss is None else kind.loss(model, x, y)
            loss.backward()
            found.append(tensors(inner))
        model.close()
        return found

    return run_replicas(N, work)


def everything(cluster: VirtualCluster) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in {**cluster.parameters, **cluster.buffers}.items()}


def simulated(kind: Kind, vectorize: bool | None, message: str) -> tuple[VirtualCluster, list[dict[str, Tensor]]]:
    """The cluster and its values after each step; with a message, up to where it raises that."""
    cluster = VirtualCluster(make(kind), SGD, "ring", N, loss_fn=kind.loss, vectorize=vectorize)
    found: list[dict[str, Tensor]] = []
    for t in range(STEPS):
        before = everything(cluster)
        try:
            cluster.step(*stacked(kind, t))
        except (ValueError, RuntimeError) as error:
            assert message
            assert not found[2:]  # early, or not at all
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
def test_exact_or_refused(name, caplog):
    kind = KINDS[name]
    message = kind.fast if isinstance(kind.fast, str) else ""
    real = really(kind) if not kind.slow else []
    for vectorize, refused, tolerance in ((None, message, kind.tolerance), (False, kind.slow, 1e-12)):
        caplog.clear()
        cluster, found = simulated(kind, vectorize, refused)
        for t, values in enumerate(found if real else []):
            for key, value in values.items():
                for rank in range(N):
                    torch.testing.assert_close(value[rank], real[rank][t][key], rtol=0, atol=tolerance, msg=f"{key}, step {t}")
        fell_back = vectorize is None and kind.fast is False
        assert [record.levelname for record in caplog.records if record.name.startswith("decent_dp")] == ["WARNING"] * fell_back
        if vectorize is None and not isinstance(kind.fast, str):
            assert cluster.vectorized is kind.fast


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # reentrant checkpointing
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.slow])
@pytest.mark.parametrize("vectorize", [None, False])
def test_every_kind_can_be_looked_at(name, vectorize):
    kind = KINDS[name]
    if isinstance(kind.fast, str):
        vectorize = False
    cluster = VirtualCluster(make(kind), SGD, "ring", N, loss_fn=kind.loss, vectorize=vectorize)
    for steps in range(3):
        if steps:
            cluster.step(*stacked(kind, steps))
        before = everything(cluster)
        models = [cluster.mean_model(), *(cluster.replica_model(i) for i in range(N))]
        for key, value in tensors(models[2]).items():
            assert torch.equal(value, before[key][1])
        with torch.no_grad():
            assert all(model.eval()(batch(kind, 9, 9)[0]).shape == (6, 3) for model in models)
        assert all(torch.equal(before[key], value) for key, value in everything(cluster).items())


def test_vectorize_true_says_why_it_does_not_go():
    for name, words in {
        "checkpointed": "saved tensor hooks|vmap over _NoopSaveInputs",  # the latter with torch 2.6
        "hook on a module": "setup_context",
        "new data of a buffer": r"mutating directly with `\.data`",
        "sparse embedding": "it has sparse gradients",
    }.items():
        kind = KINDS[name]
        cluster = VirtualCluster(make(kind), SGD, "ring", N, vectorize=True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"vectorize=True, but .*({words}).*vectorize=False"):
                cluster.step(*stacked(kind, 0))
        assert cluster.round == 0


def in_one_pass() -> float:
    """1.0 inside of vmap: stands for anything that a model could be told otherwise there."""
    return float(torch._C._functorch.maybe_current_level() is not None)


class OtherGradient(Head):
    def between(self, x: Tensor) -> Tensor:
        z = self.a(x)
        return z + (z - z.detach()) * 0.1 * in_one_pass()


class OtherLoss(Head):
    def between(self, x: Tensor) -> Tensor:
        z = self.a(x)
        return z + (z * 0.1 * in_one_pass()).detach()


def other_buffer(model: Any, x: Tensor) -> None:
    model.rows = model.rows + 1 + 0.1 * in_one_pass()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OtherGradient, "replica 0 has another gradient of 'a."),
        (OtherLoss, "replica 0 has the loss"),
        (lambda: Buffered(other_buffer), "replica 0's 'rows' is another"),
    ],
)
def test_a_vectorized_pass_that_differs_is_not_used(model, words, caplog):
    kind = Kind(model, False)
    cluster, found = simulated(kind, None, "")
    assert cluster.vectorized is False
    assert words in caplog.text
    for name, value in really(kind)[1][-1].items():
        torch.testing.assert_close(found[-1][name][1], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_random_numbers_of_python_are_each_replicas_own(draw, caplog):
    class Random(Head):
        def between(self, x: Tensor) -> Tensor:
            return self.a(x) * draw()

    def fix() -> None:
        random.seed(3)
        np.random.seed(3)

    fix()
    want = [draw() for _ in range(2 * N + 1)]
    model = make(Kind(Random, False))
    cluster = VirtualCluster(model, SGD, "ring", N)
    x, y = stacked(KINDS["mlp"], 0)
    fix()
    losses = cluster.step(x, y)
    with torch.no_grad():
        alone = [float(cross_entropy(model.b(model.a(x[i]) * want[i]), y[i])) for i in range(N)]
    assert losses.tolist() == pytest.approx(alone)
    assert "draws random numbers in Python" in caplog.text
    cluster.step(x, y)
    assert draw() == want[2 * N]  # neither a trial nor a pass has drawn any


def test_a_trial_draws_no_random_numbers():
    model = nn.Sequential(nn.Dropout(0.5), mlp()).double()
    x, y = stacked(KINDS["mlp"], 0)
    cluster = VirtualCluster(model, partial(torch.optim.SGD, lr=0.0), "ring", N)
    found = []
    for _ in range(2):  # the first step has a trial, the second none
        torch.manual_seed(4)
        found.append(torch.cat([cluster.step(x, y), torch.rand(1)]))
    assert torch.equal(*found)
    plain = VirtualCluster(mlp().double(), SGD, "ring", N)
    state = torch.get_rng_state()
    plain.step(x, y)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_a_loss_of_another_model_is_refused(vectorize):
    model = mlp().double()
    cluster = VirtualCluster(model, SGD, "ring", N, loss_fn=lambda _, x, y: cross_entropy(model(x), y), vectorize=vectorize)
    for _ in range(2):
        with pytest.raises(ValueError, match="loss_fn must use the model that it is given"):
            cluster.step(*stacked(KINDS["mlp"], 0))
    assert (cluster.round, cluster.steps) == (0, [0] * N)


def hook(param: nn.Parameter) -> None:
    param.register_hook(lambda gradient: 0 * gradient)


def late_hook(param: Any) -> None:
    param.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize("register", [hook, late_hook])
@pytest.mark.parametrize("vectorize", [None, False])
def test_hooks_on_parameters_are_refused(register, vectorize):
    model = mlp()
    register(model[2].bias)
    with pytest.raises(ValueError, match=r"parameter '2\.bias' has a hook on its gradient"):
        VirtualCluster(model, SGD, "ring", N, vectorize=vectorize)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(16, 3)))
    with pytest.raises(ValueError, match=r"model cannot be copied, and every replica is a copy .*RuntimeError"):
        VirtualCluster(model, SGD, "ring", N)


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_error_of_one_replicas_data_is_the_users_own_later_too(vectorize):
    model = nn.Sequential(nn.BatchNorm1d(16), mlp()).double()
    cluster = VirtualCluster(model, SGD, "ring", N, vectorize=vectorize)
    x, y = stacked(KINDS["mlp"], 0)
    cluster.step(x, y)
    before = everything(cluster)
    y[2, 1] = 7
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        cluster.step(x, y)
    assert all(torch.equal(before[name], value) for name, value in everything(cluster).items())
    cluster.step(*stacked(KINDS["mlp"], 1))
    assert cluster.buffers["0.num_batches_tracked"].tolist() == [2] * N


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
    clusters = [VirtualCluster(make(Kind(model, True)), SGD, "ring", N, vectorize=vectorize) for _ in range(2)]
    for t in range(STEPS):
        x, y = stacked(KINDS["mlp"], t)
        if t:
            wrong = y.clone()
            wrong[2, 1] = 7
            with pytest.raises(IndexError, match="Target 7 is out of bounds"):
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
    cluster.step(*stacked(KINDS["mlp"], 0))
    with pytest.raises(ArithmeticError, match="no"):
        cluster.step(*stacked(KINDS["mlp"], 1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"earlier step failed half-way .ArithmeticError: no.*new VirtualCluster"):
            cluster.step(*stacked(KINDS["mlp"], 1))
    assert cluster.round == 1
