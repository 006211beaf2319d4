"""Situations from public trackers: what people have met with PyTorch DDP and beside it, and where they have told of it.

A script is written once. Where all workers have the same data, it must end with the parameters of a plain loop, bit for bit.
Where each has its own, mixed at once and wholly, the replicas must be equal: a parameter that is left out would differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from decent_dp import gossip
from tests.helpers import SGD, batch, loss, net, seed_cpu

STEPS = 4

# Called where the script would call ``gossip``.
Start = Callable[..., None]
# Called with it and the number of the data's worker. Returns the models, each with the number of its rounds.
Script = Callable[[Start, int], list[tuple[nn.Module, int]]]


def looped(model: nn.Module, start: Start, step: Callable[[int], Tensor], optimizer: Any = None) -> list[tuple[nn.Module, int]]:
    """The loop of every tutorial, around ``step``, which returns the loss."""
    optimizer = optimizer or SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        optimizer.zero_grad()
        step(t).backward()
        optimizer.step()
    return [(model, STEPS)]


# -- forwards ----------------------------------------------------------------------------------------------------------


def methods_instead_of_forward(start, rank):
    """The loss comes from methods of the model, and ``forward`` is never called."""

    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.there, self.back = nn.Linear(6, 4), nn.Linear(4, 3)

        def encode(self, x):
            return self.there(x).tanh()

        def distance(self, code, y):
            return (self.back(code) - y).square().mean()

    seed_cpu(0)
    model = Coder()
    return looped(model, start, lambda t: model.distance(model.encode(batch(t, rank)[0]), batch(t, rank)[1]))


def outputs_in_a_dataclass(start, rank):
    """Of which torch's tree functions know nothing."""

    @dataclass
    class Output:
        mean: Tensor
        extra: list[Tensor]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = net(), nn.Linear(2, 2)

        def forward(self, x):
            return Output(self.body(x), [x])

    model = Model()
    return looped(model, start, lambda t: (model(batch(t, rank)[0]).mean - batch(t, rank)[1]).square().mean())


def two_forwards_then_two_backwards(start, rank):
    """Both graphs are alive at once, and the gradients add up."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        first, second = loss(model, t, rank), loss(model, t + 10, rank)
        first.backward()
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(model, STEPS)]


def state_between_forwards(start, rank):
    """Truncated backpropagation: the hidden state of the last chunk, detached, begins the next one."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.hidden = nn.GRUCell(6, 8), nn.Linear(8, 3), torch.zeros(5, 8)

        def forward(self, x):
            self.hidden = self.cell(x, self.hidden.detach())
            return self.head(self.hidden)

    seed_cpu(0)
    model = Recurrent()
    return looped(model, start, lambda t: loss(model, t, rank))


def evaluations_in_inference_mode(start, rank):
    """Between a step and the next forward, with BatchNorm's buffers made under inference mode first."""
    seed_cpu(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    seen = []

    def step(t):
        with torch.inference_mode():
            seen.append(float(loss(model.eval(), t, 7)))
        return loss(model.train(), t, rank)

    return looped(model, start, step)


def layers_that_are_dropped(start, rank):
    """Each worker drops layers of its own: their parameters have no gradient in that step."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 3)

        def forward(self, x, kept):
            for layer, keeps in zip(self.layers, kept, strict=True):
                x = x + layer(x).tanh() if keeps else x
            return self.head(x)

    seed_cpu(0)
    model = Deep()
    random = torch.Generator().manual_seed(rank)

    def step(t):
        x, y = batch(t, rank)
        return (model(x, (torch.rand(4, generator=random) > 0.5).tolist()) - y).square().mean()

    return looped(model, start, step)


def checkpoints_of_several_tasks(start, rank, *, reentrant):
    """Each task runs a checkpointed body anew, and one backward goes through all of them."""
    seed_cpu(0)
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(6, 6), nn.Tanh()), "a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def step(t):
        total = torch.zeros(())
        for place, task in enumerate("ab"):
            x, y = batch(t + 10 * place, rank)
            code = checkpoint(model["body"], x.requires_grad_(), use_reentrant=reentrant)
            total = total + (model[task](code) - y).square().mean()
        return total

    return looped(model, start, step)


def orthogonal_and_cached(start, rank):
    """A parametrized weight is computed once for two forwards."""
    seed_cpu(0)
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))

    def step(t):
        with parametrize.cached():
            return loss(model, t, rank) + loss(model, t + 10, rank)

    return looped(model, start, step)


# -- gradients ---------------------------------------------------------------------------------------------------------


def sharpness_aware(start, rank):
    """Two backwards per step: the parameters are moved uphill between them, and back before the step."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        loss(model, t, rank).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        with torch.no_grad():
            moves = [0.05 * p.grad / norm for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss(model, t, rank).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
    return [(model, STEPS)]


def gradients_of_meta_learning(start, rank):
    """Through an inner step on copies of the parameters; the outer gradients are written to ``grad`` by hand."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        names, params = zip(*model.named_parameters(), strict=True)
        inner = torch.autograd.grad(loss(model, t, rank), params, create_graph=True)
        moved = {name: p - 0.1 * g for name, p, g in zip(names, params, inner, strict=True)}
        outer = loss(partial(torch.func.functional_call, model, moved), t + 10, rank)
        for p, g in zip(params, torch.autograd.grad(outer, params), strict=True):
            p.grad = g
        optimizer.step()
    return [(model, STEPS)]


def gradients_that_are_projected(start, rank):
    """One backward per task through a graph that is kept; conflicting parts are removed before the step."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    params = list(model.parameters())
    for t in range(STEPS):
        x, y = batch(t, rank)
        error = (model(x) - y).square()
        tasks = []
        for column in range(3):
            optimizer.zero_grad()
            error[:, column].mean().backward(retain_graph=column < 2)
            tasks.append(torch.cat([p.grad.flatten() for p in params]))
        total = torch.zeros_like(tasks[0])
        for task in tasks:
            other = tasks[0]
            total += task - min(float(task @ other), 0.0) / float(other @ other) * other
        for p, g in zip(params, total.split([p.numel() for p in params]), strict=True):
            p.grad = g.view_as(p)
        optimizer.step()
    return [(model, STEPS)]


def losses_that_are_not_finite(start, rank):
    """All workers leave the same batch out, after its forward."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        value = loss(model, t, rank) * (math.nan if t == 1 else 1.0)
        if not value.isfinite():
            continue
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return [(model, STEPS - 1)]


def halves_in_turn(start, rank):
    """One half of the model trains while the gradients of the other are dropped, then the other way round."""
    model = net()
    optimizer = SGD(model.parameters())
    start(model, optimizer)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss(model, t, rank).backward()
        for place, p in enumerate(model.parameters()):
            if (place < 3) == (t % 2 == 0):
                p.grad = None
        optimizer.step()
    return [(model, STEPS)]


def networks_that_are_toggled(start, rank):
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


# -- parameters and optimizers -----------------------------------------------------------------------------------------


def numbers_that_are_complex(start, rank):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(3, 6, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.kernel.mT).abs()

    seed_cpu(0)
    model = Model()
    return looped(model, start, lambda t: loss(model, t, rank))


def strides_of_pointwise_convolutions(start, rank):
    """In channels-last layout, with gradients in another one."""
    seed_cpu(0)
    model = nn.Sequential(nn.Conv2d(6, 4, 1), nn.Tanh(), nn.Conv2d(4, 3, 1)).to(memory_format=torch.channels_last)

    def step(t):
        x, y = batch(t, rank)
        images = x.view(1, 5, 1, 6).transpose(1, 3)  # a view, not contiguous
        return (model(images).flatten(2)[0, :, :].mT - y).square().mean()

    return looped(model, start, step)


def elsewhere_and_back(start, rank):
    """The model is converted and back between two steps, as one that leaves the GPU for a while: its storage is new."""
    model = net()

    def step(t):
        if t == 2:
            model.double().float()
        return loss(model, t, rank)

    return looped(model, start, step)


def weights_that_are_clamped(start, rank):
    """After each step, BatchNorm's too."""
    seed_cpu(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
    start(model, optimizer)
    for t in range(STEPS):
        optimizer.zero_grad()
        loss(model, t, rank).backward()
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)
    return [(model, STEPS)]


def an_optimizer_around_an_optimizer(start, rank):
    """Lookahead, which is no torch optimizer and has no ``state``: every second step goes half-way back."""
    model = net()

    class Lookahead:
        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 0
            self.slow = [p.detach().clone() for p in model.parameters()]

        def zero_grad(self):
            self.optimizer.zero_grad()

        @torch.no_grad()
        def step(self):
            self.optimizer.step()
            self.steps += 1
            if self.steps % 2 == 0:
                for slow, p in zip(self.slow, model.parameters(), strict=True):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return looped(model, lambda model, _: start(model, inner), lambda t: loss(model, t, rank), Lookahead(inner))


def restarts_of_low_rank_factors(start, rank):
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


def rates_that_were_zero(start, rank):
    """A backbone is thawed by its group's learning rate."""
    model = net()
    groups = [{"params": model[:2].parameters(), "lr": 0.0}, {"params": model[2:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)

    def step(t):
        if t == 2:
            optimizer.param_groups[0]["lr"] = 0.005
        return loss(model, t, rank)

    return looped(model, start, step, optimizer)


# By the place where it was told of.
SITUATIONS: dict[str, Script] = {
    "pytorch/pytorch#14616": methods_instead_of_forward,
    "pytorch/pytorch#124666": outputs_in_a_dataclass,
    "huggingface/accelerate#1726": two_forwards_then_two_backwards,
    "norse/norse#130": state_between_forwards,
    "Lightning-AI/pytorch-lightning#9431": evaluations_in_inference_mode,
    "huggingface/accelerate#1191, pytorch/vision#7722": layers_that_are_dropped,
    "pytorch/pytorch#121594": partial(checkpoints_of_several_tasks, reentrant=False),
    "microsoft/FocalNet#4": partial(checkpoints_of_several_tasks, reentrant=True),
    "pytorch/pytorch#42243": orthogonal_and_cached,
    "facebookresearch/fairscale#989": sharpness_aware,
    "katerakelly/pytorch-maml#8": gradients_of_meta_learning,
    "median-research-group/LibMTL#16": gradients_that_are_projected,
    "OpenBMB/BMTrain#108": losses_that_are_not_finite,
    "pytorch/pytorch#22049": halves_in_turn,
    "Lightning-AI/pytorch-lightning#20866": networks_that_are_toggled,
    "pytorch/pytorch#47163": strides_of_pointwise_convolutions,
    "pytorch/pytorch#104336": elsewhere_and_back,
    "martinarjovsky/WassersteinGAN#32": weights_that_are_clamped,
    "lonePatient/lookahead_pytorch#3": an_optimizer_around_an_optimizer,
    "Guitaricet/relora#8": restarts_of_low_rank_factors,
    "Lightning-AI/pytorch-lightning#20340": rates_that_were_zero,
}
# And what the error says to do.
REFUSED: dict[str, tuple[Script, str]] = {"pytorch/pytorch#80080": (numbers_that_are_complex, "torch.view_as_real")}


def run(script: Script, rank: int, **options: Any) -> list[dict[str, Tensor]]:
    made = {}

    def start(model: nn.Module, optimizers: Any) -> None:
        made[model] = gossip(model, optimizers, **options)

    ended = script(start, rank)
    for model, rounds in ended:
        replica = made.pop(model)
        replica.flush()
        assert replica.stats().rounds == rounds, replica.stats()
    assert not made
    return [values_of(model) for model, _ in ended]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def every_situation(rank: int, n: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source, script in {**SITUATIONS, **{source: script for source, (script, _) in REFUSED.items()}}.items():
        try:
            plain = [values_of(model) for model, _ in script(lambda *_: None, 0)]
            found[source] = plain, run(script, 0), run(script, rank, topology="complete", overlap=False)
        except Exception as error:
            found[source] = f"{type(error).__name__}: {error}"
    return found


def test_situations(workers):
    failed = {}
    first, second = workers(2, every_situation, group_timeout=20)
    for source, ours in first.items():
        if isinstance(ours, str):
            failed[source] = ours
            continue
        (plain, same, own), (_, _, others) = ours, second[source]
        differing = [name for a, b in zip(plain, same, strict=True) for name in a if not torch.equal(a[name], b[name])]
        apart = [n for a, b in zip(own, others, strict=True) for n in a if not torch.allclose(a[n], b[n], rtol=0, atol=1e-6)]
        if differing or apart:
            failed[source] = f"not those of a plain loop: {differing}; not equal on both workers: {apart}"
    refused = {source: failed.pop(source, "") for source in REFUSED}
    assert not failed
    assert all(advice in refused[source] for source, (_, advice) in REFUSED.items()), refused
