"""Small models and loops that several test files share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport import InProcessTransport

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def batch(t: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + t)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def loss(model: Any, t: int, rank: int = 0) -> Tensor:
    x, y = batch(t, rank)
    result: Tensor = (model(x) - y).square().mean()
    return result


def alone(model: nn.Module, optim_fn: Any = SGD, **options: Any) -> DecentralizedDataParallel:
    """The wrapper of a single worker; no process group is needed."""
    return DecentralizedDataParallel(model, optim_fn, transport=InProcessTransport(), **options)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(a: nn.Module | dict[str, Tensor], b: nn.Module | dict[str, Tensor], tolerance: float = 0.0) -> None:
    a = values(a) if isinstance(a, nn.Module) else a
    b = values(b) if isinstance(b, nn.Module) else b
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def plain(
    model: nn.Module, windows: list[list[int]], optim_fn: Any = SGD, scale: Callable[[int], float] | None = None
) -> nn.Module:
    """Ordinary PyTorch: one optimizer step a window, over the sum of the gradients of its batches."""
    twin = copy.deepcopy(model)
    optimizer = optim_fn(list(twin.named_parameters()))
    for window in windows:
        optimizer.zero_grad()
        for t in window:
            (loss(twin, t) / (scale(len(window)) if scale else 1.0)).backward()
        optimizer.step()
    return twin
