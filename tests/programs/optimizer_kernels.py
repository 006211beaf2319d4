"""Runs GossipAdamW's kernel for CUDA on Triton's interpreter. Prints for each case how far it is from the readable form, and
the number of tensors that the kernel has updated.

Needs TRITON_INTERPRET=1 before Triton is imported, so that it is a program. Tiles are small, so that small tensors have many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp import _triton
from decent_dp.optim import GossipAdamW, gossip_adamw_triton

gossip_adamw_triton._BLOCK = 64
gossip_adamw_triton.attempt = lambda *_: None  # its launch would be counted

TAKEN: list[int] = []  # the numbers of tensors in launches


def by_kernels(enabled: bool) -> None:
    """Whether tensors of the CPU go to the kernels."""
    _triton.DEVICES = {"cpu"} if enabled else set()
    _triton.load_triton.cache_clear()


def apart(fast: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> float:
    """The largest difference of parameters and states, as a share of each tensor's largest value."""
    worst = 0.0
    for p, q in zip(fast.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert fast.state[p].keys() == plain.state[q].keys()
        pairs = [(p.detach(), q.detach()), *((fast.state[p][key], plain.state[q][key]) for key in plain.state[q])]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            if ours.numel():
                difference = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30)
                worst = max(worst, float(difference) if difference.isfinite() else 1e9)
    return worst


def alike(param: nn.Parameter, draw: torch.Generator) -> Tensor:
    """A gradient in the parameter's order of memory."""
    return torch.empty_like(param).copy_(torch.randn(param.shape, generator=draw))


def with_gaps(param: nn.Parameter, draw: torch.Generator) -> Tensor:
    return torch.randn((*param.shape, 2), generator=draw)[..., 0]


def both(
    make: Callable[[list[nn.Parameter]], GossipAdamW],
    values: list[Tensor],
    steps: int,
    gradient: Callable[[nn.Parameter, torch.Generator], Tensor] = alike,
    silent: int | None = None,
    mixed: int | None = None,
) -> float:
    """Runs an optimizer by kernels and in the readable form, with the same gradients.

    Args:
        silent: the parameter that has no gradient in some steps, so that it has taken fewer.
        mixed: the step before which momenta change, as mixes change those that are tracked.
    """
    made = []
    for kernels in (True, False):
        by_kernels(kernels)
        draw = torch.Generator().manual_seed(1)
        params = [nn.Parameter(value.detach().clone(memory_format=torch.preserve_format)) for value in values]
        optimizer = make(params)
        for t in range(steps):
            optimizer.param_groups[0]["lr"] = 0.01 if t < 16 else 0.001
            for i, param in enumerate(params):
                param.grad = gradient(param, draw)
                if silent == i and t % 3 == 0:
                    param.grad = None
            if t == mixed:
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(-0.5)
            versions = [param._version for param in params]
            optimizer.step()
            moved = [param._version > was for param, was in zip(params, versions, strict=True) if param.grad is not None]
            assert all(moved), "autograd would not see that a parameter has changed"
        made.append(optimizer)
    return apart(*made)


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def cases() -> Iterator[tuple[str, float]]:
    shapes = ((), (0,), (64,), (5, 7), (2, 3, 3, 3), (2, 80))

    def make(n: int, **options: Any) -> Callable[[list[nn.Parameter]], GossipAdamW]:
        def made(params: list[nn.Parameter]) -> GossipAdamW:
            optimizer = GossipAdamW(params, 0.01, (0.9, 0.95), weight_decay=0.1, **options)
            optimizer.set_replicas(n)
            # With 64 replicas the squared gradient has no weight in the second moment.
            assert (optimizer.weights(0.9)[1] > 0) == (n == 4)
            return optimizer

        return made

    for tracking in (False, True):
        for n in (4, 64):
            name = f"GossipAdamW n={n}{' tracking' if tracking else ''}"
            yield name, both(make(n, tracking=tracking), draw(*shapes), 6, silent=3, mixed=2)
            # One step in bfloat16: the interpreter rounds to zero.
            yield f"{name} bfloat16", both(make(n, tracking=tracking), draw(*shapes, dtype=torch.bfloat16), 1)
            yield f"{name} float16", both(make(n, tracking=tracking), draw(*shapes, dtype=torch.float16), 5, mixed=2)
            wide = draw(*shapes, dtype=torch.float64)
            yield f"{name} float64 maximize", both(make(n, tracking=tracking, maximize=True), wide, 6, silent=3, mixed=2)
    odd = [draw((11, 9))[0].t(), draw((131,))[0][1:], draw((2, 3, 4, 5))[0].to(memory_format=torch.channels_last)]
    yield "GossipAdamW layouts", both(make(4, tracking=True), odd, 4, mixed=2)
    yield "GossipAdamW gaps", both(make(4, tracking=True), draw((5, 7)), 4, with_gaps, mixed=2)
    yield "GossipAdamW amsgrad", both(make(4, tracking=True, amsgrad=True), draw((5, 7)), 4, mixed=2)


def main() -> None:
    torch.set_num_threads(1)
    form = gossip_adamw_triton.update
    gossip_adamw_triton.update = lambda rows, *args, **options: (TAKEN.append(len(rows)), form(rows, *args, **options))
    found = {}
    for name, difference in cases():
        found[name] = (difference, sum(TAKEN))
        TAKEN.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
