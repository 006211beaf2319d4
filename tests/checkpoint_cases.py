"""Runs whose result depends on everything in a checkpoint, for the tests of checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import AccumAdamW
from tests.helpers import SGD, loss, net, values

STEPS, AT = 9, 5


def accum(pairs: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return AccumAdamW(pairs, lr=0.01, accum_iter=4)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def noisy_net(seed: int) -> nn.Module:
    """Draws random numbers and keeps statistics."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    model.register_buffer("unsaved", torch.zeros(2), persistent=False)
    return model


def noisy_loss(model: Any, t: int, rank: int) -> Tensor:
    """Depends on every generator that is saved."""
    model.module.get_buffer("unsaved").add_(1.0)
    factor = 1.0 + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.01 * float(model.module.get_buffer("unsaved")[0])
    return loss(model, t, rank) * factor


# Each with its wrapper's options, and the number of backwards of a window.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "int8": ({"optim_fn": SGD, "compression": "int8"}, 1),
    "clipped": ({"optim_fn": SGD, "grad_clip_norm": 0.5, "bucket_size_in_mb": 0.0002, "topology": "complete"}, 1),
    "accum": ({"optim_fn": accum, "lr_scheduler_fn": decaying, "param_as_bucket_view": False}, 1),
    "open window": ({"optim_fn": accum}, 3),
}


def make(kind: str, seed: int = 0, **options: Any) -> DecentralizedDataParallel:
    return DecentralizedDataParallel(noisy_net(seed), **{"topology": "ring", **KINDS[kind][0], **options})


def on(transport: Any, steps: int = 0, module: nn.Module | None = None, **options: Any) -> DecentralizedDataParallel:
    """A small model, or the one that is given, on a worker that may be a thread; after so many updates."""
    model = DecentralizedDataParallel(module or net(), SGD, transport=transport, **{"topology": "ring", **options})
    for t in range(steps):
        loss(model, t, transport.rank).backward()
    return model


def run(model: DecentralizedDataParallel, kind: str, rank: int, first: int, last: int) -> None:
    for t in range(first, last):
        with model.no_sync() if (t + 1) % KINDS[kind][1] else contextlib.nullcontext():
            noisy_loss(model, t, rank).backward()


def state(model: DecentralizedDataParallel) -> dict[str, Any]:
    """Everything that training has produced, bit for bit."""
    optim = model.optim_state_dict()
    found: dict[str, Any] = {f"parameter {k}": v for k, v in values(model.module).items()}
    found |= {f"buffer {k}": v.clone() for k, v in model.module.named_buffers()}
    found |= {f"grad {k}": p.grad.clone() for k, p in model.module.named_parameters() if p.grad is not None}
    for name, own in optim["state"].items():
        found |= {f"state {name} {k}": torch.as_tensor(v).clone() for k, v in own.items()}
    found["groups"] = json.dumps([optim["param_groups"], optim["schedulers"], model.get_lr()], default=str)
    found["counts"] = (model.stats().rounds, model.stats().updates)
    found["draws"] = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    return {
        k: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() if isinstance(v, Tensor) else v
        for k, v in found.items()
    }


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
