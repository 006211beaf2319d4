"""``gossip`` in the scripts that people have: every kind of optimizer, of model and of loop.

A script is written once. It runs without ``gossip`` and with it on one worker, which must be equal bit for bit, and on two.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from decent_dp import gossip
from decent_dp.optim import AccumAdamW
from decent_dp.transport import InProcessTransport
from tests.helpers import assert_same, batch, loss, net, seed_cpu
from tests.test_gradients import Branches, CheckpointedTwice, Mixed, Tied

STEPS = 6

# Called by a script where it would call ``gossip``: with the model, its optimizers, and the scaler.
Start = Callable[..., None]
# A script returns its models, and the number of rounds that each must have made.
Ran = Sequence[tuple[nn.Module, int]]
Script = Callable[[Start, int], Ran]


def one(
    make: Callable[[Any], torch.optim.Optimizer],
    model: Callable[[], nn.Module] = net,
    step: Callable[[nn.Module, int, int], Tensor] = loss,
) -> Script:
    """The loop of every tutorial."""

    def script(start: Start, rank: int) -> Ran:
        seed_cpu(0)
        module = model()
        optimizer = make(module.parameters())
        start(module, optimizer)
        for t in range(STEPS):
            optimizer.zero_grad()
            step(module, t, rank).backward()
            optimizer.step()
        return [(module, STEPS)]

    return script


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01)


class Shrinking(torch.optim.SGD):
    """Calls its parent's step, as subclasses do: torch then calls the hooks of both, the parent's once an SGD has been made."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.99)
        return result


def shrinking(params: Any) -> torch.optim.Optimizer:
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return Shrinking(params, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Script] = {
    "sgd": one(SGD),
    "sgd, fused": one(partial(SGD, fused=True)),
    "adam, foreach": one(partial(ADAM, foreach=True, amsgrad=True)),
    "adamw, foreach": one(partial(ADAMW, foreach=True)),
    "adamw, fused": one(partial(ADAMW, fused=True)),
    "adamw, tensor lr": one(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01))),
    "adafactor": one(partial(torch.optim.Adafactor, lr=0.05)),
    "lion": one(partial(Lion, lr=0.01, weight_decay=0.01)),
    "accum-adamw": one(partial(AccumAdamW, lr=0.01, accum_iter=2)),
    "a subclass that calls its parent's step": one(shrinking),
}


# -- loops -------------------------------------------------------------------------------------------------------------


def closures(start: Start, rank: int, **options: Any) -> Ran:
    """LBFGS calls its closure as often as it likes; the others once."""
    found = []
    for make in (
        partial(torch.optim.LBFGS, lr=0.5, max_iter=4),
        partial(torch.optim.LBFGS, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
        SGD,
        Lion,
    ):
        model = net()
        optimizer = make(model.parameters())
        start(model, optimizer)
        for t in range(4):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, t: int = t) -> Tensor:
                optimizer.zero_grad()
                value = loss(model, t, rank)
                value.backward()
                return value

            assert isinstance(optimizer.step(closure), Tensor)
        found.append((model, 4))
    return found


def accumulating(start: Start, rank: int) -> Ran:
    """Windows of three, evaluations in between, forwards without a backward, and a batch that is skipped."""
    model = net()
    optimizer = ADAMW(model.parameters())
    start(model, optimizer)
    for t in range(12):
        if t == 7:
            loss(model, t, rank)
            optimizer.zero_grad()
            continue
        (loss(model, t, rank) / 3).backward()
        model.eval()
        with torch.no_grad():
            model(batch(t)[0])
        with torch.inference_mode():
            model(batch(t)[0])
        model.train()
        if t % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [(model, 4)]


def schedules(start: Start, rank: int) -> Ran:
    """Made before and after the call; stepped by batch, or by a metric."""
    found = []
    for plateau in (False, True):
        for before in (False, True):
            model = net()
            optimizer = SGD(model.parameters())

            def make(plateau: bool = plateau, optimizer: Any = optimizer) -> Any:
                return ReduceLROnPlateau(optimizer, patience=0) if plateau else StepLR(optimizer, 2)

            scheduler = make() if before else None
            start(model, optimizer)
            scheduler = scheduler or make()
            for t in range(STEPS):
                optimizer.zero_grad()
                loss(model, t, rank).backward()
                optimizer.step()
                scheduler.step(1.0) if plateau else scheduler.step()
            assert optimizer.param_groups[0]["lr"] < 0.01
            found.append((model, STEPS))
    return found


def averages_of_weights(start: Start, rank: int) -> Ran:
    """SWA and EMA follow the replica, and are no part of it."""
    found: list[tuple[nn.Module, int]] = []
    for average in (None, get_ema_multi_avg_fn(0.9)):
        seed_cpu(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = SGD(model.parameters())
        start(model, optimizer)
        averaged = AveragedModel(model, multi_avg_fn=average)
        for t in range(STEPS):
            loss(model, t, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(model)
        update_bn([batch(t, rank)[0] for t in range(3)], averaged)
        averaged.load_state_dict(copy.deepcopy(averaged.state_dict()))
        found += [(model, STEPS), (averaged, -1)]
    return found


def in_the_backward(start: Start, rank: int) -> Ran:
    """An optimizer for each parameter, stepped as soon as its gradient is there: the round ends inside the backward."""
    model = net()
    optimizers = {param: SGD([param]) for param in model.parameters()}
    start(model, list(optimizers.values()))

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for t in range(STEPS):
        loss(model, t, rank).backward()
    return [(model, STEPS)]


def networks_that_are_toggled(start: Start, rank: int) -> Ran:
    """A GAN: ``requires_grad`` of each network is off while the other one trains."""
    seed_cpu(0)
    maker, critic = nn.Linear(6, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    pair = nn.ModuleList([maker, critic])
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in pair]
    start(pair, optimizers)
    for t in range(STEPS):
        noise, real = batch(t, rank)
        for chosen, optimizer in enumerate(optimizers):
            for place, part in enumerate(pair):
                part.requires_grad_(place == chosen)
            score = critic(maker(noise)).mean()
            optimizer.zero_grad()
            (-score if chosen == 0 else score - critic(real).mean()).backward()
            optimizer.step()
        pair.requires_grad_(True)
    return [(pair, STEPS)]


def restarts_of_low_rank_factors(start: Start, rank: int) -> Ran:
    """The trained factors are merged into a frozen weight, begin anew, and the optimizer forgets them."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(6, 3).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(3, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.mT @ self.up.mT

    seed_cpu(0)
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    start(model, optimizer)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss(model, t, rank).backward()
        optimizer.step()
        if t == 1:
            with torch.no_grad():
                model.base.weight += model.up @ model.down
                model.up.zero_()
            optimizer.state.clear()
    return [(model, STEPS)]


LOOPS: dict[str, Script] = {
    "networks that are toggled": networks_that_are_toggled,
    "restarts of low-rank factors": restarts_of_low_rank_factors,
    "closures": closures,
    "accumulation": accumulating,
    "schedules": schedules,
    "swa": averages_of_weights,
    "in the backward": in_the_backward,
}


# -- models ------------------------------------------------------------------------------------------------------------


def frozen() -> nn.Module:
    model = net()
    for param in model[0].parameters():
        param.requires_grad_(False)
    return model


def frozen_later(start: Start, rank: int) -> Ran:
    """A layer that was trained, and then not: it continues to mix."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        if t == 3:
            model[0].requires_grad_(False)
        optimizer.zero_grad()
        loss(model, t, rank).backward()
        optimizer.step()
    return [(model, STEPS)]


def branching(model: nn.Module, t: int, rank: int) -> Tensor:
    x, y = batch(t, rank)
    return (model(x, "ab"[(t + rank) % 2]) - y).square().mean()


def language(model: nn.Module, t: int, rank: int) -> Tensor:
    tokens = torch.randint(0, 7, (9,), generator=torch.Generator().manual_seed(100 * rank + t))
    return nn.functional.cross_entropy(model(tokens), tokens)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.embed(tokens))
        return result


def sparse_adam(start: Start, rank: int) -> Ran:
    seed_cpu(0)
    model = Sparse()
    optimizers = [torch.optim.SparseAdam(model.embed.parameters(), lr=0.05), ADAMW(model.head.parameters())]
    start(model, optimizers)
    for t in range(STEPS):
        language(model, t, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [(model, STEPS)]


def autocast(model: nn.Module, t: int, rank: int) -> Tensor:
    x, y = batch(t, rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    return (output.float() - y).square().mean()


MODELS: dict[str, Script] = {
    "tied": one(SGD, Tied, language),
    "frozen": one(SGD, frozen),
    "frozen, and left out": one(lambda params: SGD([p for p in params if p.requires_grad]), frozen),
    "frozen later": frozen_later,
    "unused now and then": one(ADAMW, Branches, branching),
    "sparse, sgd": one(partial(torch.optim.SGD, lr=0.1), Sparse, language),
    "sparse, sparse adam": sparse_adam,
    "mixed dtypes, strides and sizes": one(SGD, Mixed),
    "reentrant checkpointing twice": one(SGD, partial(CheckpointedTwice, True)),
    "autocast, bfloat16": one(SGD, net, autocast),
}


# -- several optimizers ------------------------------------------------------------------------------------------------


def by_layers(start: Start, rank: int) -> Ran:
    """Muon for matrices, AdamW for the rest; given as any iterable."""
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = (torch.optim.Muon(matrices, lr=0.01), ADAMW(rest))
    start(model, (optimizer for optimizer in optimizers))
    for t in range(STEPS):
        loss(model, t, rank).backward()
        for optimizer in optimizers[:: 1 if t % 2 else -1]:
            optimizer.step()
            optimizer.zero_grad()
    return [(model, STEPS)]


def gan(critic_steps: int, apart: bool, scaled: bool) -> Script:
    """The generator's round is made when it steps, after any number of the critic's; ``apart``: each its own ``gossip``."""

    def script(start: Start, rank: int) -> Ran:
        seed_cpu(0)
        model = nn.ModuleDict({"generator": net(), "critic": nn.Linear(3, 1)})
        generator, critic = model["generator"], model["critic"]
        first, second = SGD(generator.parameters()), ADAMW(critic.parameters())
        scaler = torch.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        if apart:
            start(generator, first, scaler=scaler)
            start(critic, second, scaler=scaler)
        else:
            start(model, [first, second], scaler=scaler)

        def step(optimizer: torch.optim.Optimizer, value: Tensor) -> None:
            model.zero_grad()
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()

        for t in range(4):
            for i in range(critic_steps):
                x, real = batch(4 * t + i, rank)
                step(second, (critic(generator(x).detach()) - critic(real)).mean())
            step(first, -critic(generator(batch(t, rank)[0])).mean())
        return [(generator, 4), (critic, 4 * critic_steps)] if apart else [(model, 4)]

    return script


SEVERAL: dict[str, Script] = {
    **({"by layers": by_layers} if hasattr(torch.optim, "Muon") else {}),  # torch 2.6 has none
    "gan, three critic steps": gan(3, apart=False, scaled=False),
    "gan, scaled": gan(3, apart=False, scaled=True),
    "gan, two calls, one scaler": gan(2, apart=True, scaled=True),
}


# -- scalers -----------------------------------------------------------------------------------------------------------


def spoiled(model: nn.Module, t: int, rank: int) -> Tensor:
    """Now and then a loss that is infinite, on some workers only."""
    return loss(model, t, rank) * (math.inf if (t, rank) in ((0, 1), (2, 1), (4, 0), (5, 0), (5, 1)) else 1.0)


def scaled(
    make: Callable[[Any], torch.optim.Optimizer], *, clip: bool = False, by_hand: bool = False, scheduled: bool = False
) -> Script:
    def script(start: Start, rank: int) -> Ran:
        model = net()
        optimizer = make(model.parameters())
        scaler = torch.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        start(model, optimizer, scaler=scaler)
        scheduler = StepLR(optimizer, 2) if scheduled else None
        for t in range(8):
            optimizer.zero_grad()
            scaler.scale(spoiled(model, t, rank)).backward()
            if clip or by_hand:
                scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if not by_hand:
                scaler.step(optimizer)
            elif all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
                optimizer.step()
            before = scaler.get_scale()
            scaler.update()
            if scheduler is not None and scaler.get_scale() >= before:
                scheduler.step()
        return [(model, 8)]

    return script


def scaled_two(start: Start, rank: int) -> Ran:
    """One scaler, two optimizers, of which one may be skipped alone; one ``update``."""
    model = net()
    optimizers = [SGD(model[0].parameters()), ADAMW(model[2:].parameters())]
    scaler = torch.GradScaler("cpu", init_scale=64.0)
    start(model, optimizers, scaler=scaler)
    for t in range(STEPS):
        model.zero_grad()
        spoil = torch.tensor(math.inf if (t, rank) in ((0, 0), (2, 1), (3, 0), (3, 1)) else 0.0)
        hook = model[t % 2 * 2].bias.register_hook(lambda grad, spoil=spoil: grad + spoil)
        scaler.scale(loss(model, t, rank)).backward()
        hook.remove()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return [(model, STEPS)]


def scaled_not_at_all(start: Start, rank: int) -> Ran:
    """A disabled one counts as none, and is never refused as unknown."""
    found = []
    for passed in (True, False):
        model = net()
        optimizer = SGD(model.parameters())
        scaler = torch.GradScaler("cpu", enabled=False)
        start(model, optimizer, scaler=scaler if passed else None)
        for t in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss(model, t, rank)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((model, STEPS))
    return found


SCALERS: dict[str, Script] = {
    "scaled sgd": scaled(SGD),
    "scaled adamw, fused": scaled(partial(ADAMW, fused=True)),
    # Without momentum, which torch's fused SGD reads before it was written if the first step is skipped.
    "scaled sgd, fused, clipped": scaled(partial(torch.optim.SGD, lr=0.1, fused=True), clip=True),
    "scaled sgd, clipped": scaled(SGD, clip=True),
    "scaled, skipped by hand": scaled(SGD, by_hand=True),
    "scaled and scheduled": scaled(SGD, scheduled=True),
    "scaled subclass": scaled(shrinking),
    "two optimizers, one scaler": scaled_two,
    "a disabled scaler": scaled_not_at_all,
}


# -- torch.compile -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Resets the compiler, which may warn."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compiled_step(make: Callable[[Any], torch.optim.Optimizer], backend: str, whole: bool = False) -> Script:
    @compiling()
    def script(start: Start, rank: int) -> Ran:
        model = net()
        optimizer = make(model.parameters())
        start(model, optimizer)

        def iteration(t: int) -> None:
            loss(model, t, rank).backward()
            if whole:
                optimizer.step()

        step = torch.compile(iteration if whole else optimizer.step, backend=backend)
        for t in range(STEPS):
            if whole:
                step(t)
            else:
                iteration(t)
                step()
            optimizer.zero_grad()
        return [(model, STEPS)]

    return script


@compiling()
def compiled_model(start: Start, rank: int) -> Ran:
    """Compiled before the call and given, or after it."""
    found = []
    for before in (True, False):
        model: Any = net()
        run = torch.compile(model, backend="aot_eager")
        optimizer = SGD(model.parameters())
        start(run if before else model, optimizer)
        for t in range(STEPS):
            optimizer.zero_grad()
            loss(run, t, rank).backward()
            optimizer.step()
        found.append((run if before else model, STEPS))
    return found


COMPILED: dict[str, Script] = {
    "compiled model": compiled_model,
    "compiled step": compiled_step(SGD, "eager"),
    "compiled step, adamw": compiled_step(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)), "eager"),
    "compiled step of a subclass": compiled_step(shrinking, "eager"),
    "compiled loop": compiled_step(SGD, "eager", whole=True),
}
# Takes some seconds, once.
INDUCTOR = compiled_step(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)), "inductor")

SCRIPTS = {**OPTIMIZERS, **LOOPS, **MODELS, **SEVERAL, **SCALERS, **COMPILED}


# -- one worker: bit for bit what it was -------------------------------------------------------------------------------


def without(model: nn.Module, optimizers: Any, **options: Any) -> None:
    """In place of ``gossip``."""


def counted(script: Script, rank: int, **options: Any) -> Ran:
    """Runs a script with ``gossip``; each of its models has made the number of rounds that it returns."""
    made: dict[nn.Module, Any] = {}

    def start(model: nn.Module, optimizers: Any, **more: Any) -> None:
        transport = {"transport": InProcessTransport()} if not options else {}
        made[model] = gossip(model, optimizers, **transport, **options, **more)

    found = script(start, rank)
    for model, rounds in found:
        if rounds >= 0:
            assert made.pop(model).stats().rounds == rounds
    assert not made
    return found


# Compilers are slow.
COMPILED = [name for name in SCRIPTS if name.startswith("compiled")]


# A scaler skips other steps with the data of worker 1.
@pytest.mark.parametrize(
    ("name", "rank"),
    [
        *(pytest.param(name, 0, marks=pytest.mark.slow) if name in COMPILED else (name, 0) for name in SCRIPTS),
        *((name, 1) for name in SCALERS),
    ],
)
def test_one_worker_is_plain_training_bit_for_bit(name, rank):
    check_bit_for_bit(SCRIPTS[name], rank)


@pytest.mark.slow
def test_one_worker_with_inductor():
    check_bit_for_bit(INDUCTOR, 0)


def check_bit_for_bit(script: Script, rank: int) -> None:
    for (ours, _), (theirs, _) in zip(counted(script, rank), script(without, rank), strict=True):
        assert_same(ours, theirs)
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or a.grad.is_sparse or torch.equal(a.grad, b.grad)
            assert a.stride() == b.stride()


# -- two workers -------------------------------------------------------------------------------------------------------


def every_script(rank: int, n: int, names: Sequence[str], overlapped: Sequence[str]) -> Any:
    found = {}
    for name in names:
        for overlap in (False, True)[: 2 if name in overlapped else 1]:
            ran = counted(SCRIPTS[name], rank, topology="complete", overlap=overlap)
            found[name, overlap] = [[p.detach().double() for p in model.parameters()] for model, rounds in ran if rounds >= 0]
    return found


# One of most kinds, as far as rounds are concerned: of implementations of an optimizer, of models that differ in their forward.
SOME = [
    *("adamw, fused", "lion", "a subclass that calls its parent's step", "accumulation", "in the backward"),
    *("unused now and then", "mixed dtypes, strides and sizes", "autocast, bfloat16", "gan, two calls, one scaler"),
    *("scaled, skipped by hand", "scaled subclass", "a disabled scaler"),
    *("networks that are toggled", "restarts of low-rank factors"),
]
# Those whose rounds end elsewhere than at the end of a step of one optimizer.
SOME_OVERLAPPED = ["accumulation", "unused now and then", "scaled subclass"]


def test_two_workers_are_one_after_each_round(workers):
    """Mixed at once and wholly, replicas are equal after the last round, and not at the start; overlapped, they differ."""
    first, second = workers(2, every_script, SOME, SOME_OVERLAPPED)
    for case in first:
        distances = []
        for ours, theirs in zip(first[case], second[case], strict=True):
            assert all(p.isfinite().all() for p in ours + theirs), case
            distances.append(max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel()))
        name, overlap = case
        limit = 2e-2 if "mixed" in name else 1e-6  # of bfloat16
        assert all(distance <= limit for distance in distances) != overlap, (case, distances)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_no_updates(fused):
    model = net()
    optimizer = ADAMW(model.parameters(), fused=fused)
    scaler = torch.GradScaler("cpu", init_scale=2.0)
    replica = gossip(model, optimizer, scaler=scaler, transport=InProcessTransport())
    for t in range(5):
        optimizer.zero_grad()
        scaler.scale(spoiled(model, t, 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (replica.stats().updates, replica.stats().rounds) == (3, 5)


def test_one_scaler_of_two_models_is_restored():
    scaler = torch.GradScaler("cpu")
    models = [net(), net()]
    optimizers = [SGD(model.parameters()) for model in models]
    replicas = [
        gossip(model, optimizer, scaler=scaler, transport=InProcessTransport())
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def train() -> list[int]:
        for model, optimizer in zip(models, optimizers, strict=True):
            scaler.scale(loss(model, 0)).backward()
            scaler.step(optimizer=optimizer)
            optimizer.zero_grad()
        scaler.update(new_scale=8.0)
        return [replica.stats().rounds for replica in replicas]

    assert train() == [1, 1]
    with pytest.raises(TypeError, match="ends the rounds of a Gossip"):
        copy.deepcopy(scaler)
    replicas[0].close()
    assert train() == [1, 2]
    replicas[1].close()
    assert train() == [1, 2]
    assert not {"step", "update", "unscale_"} & vars(scaler).keys()
    copy.deepcopy(scaler)


def test_a_scalers_method_that_the_user_has_replaced_stays_replaced():
    scaler, model, calls = torch.GradScaler("cpu"), net(), []
    step = scaler.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs)

    scaler.step = counted
    optimizer = SGD(model.parameters())
    replica = gossip(model, optimizer, scaler=scaler, transport=InProcessTransport())
    for _ in range(2):
        scaler.scale(loss(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        replica.close()
    assert (replica.stats().rounds, len(calls)) == (1, 2)
    assert scaler.step is counted
