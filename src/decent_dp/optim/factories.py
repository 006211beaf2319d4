"""Optimizers from named parameters, with weight decay where it belongs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .accum import AccumAdam, AccumAdamW

__all__ = ["optim_fn_accum_adam", "optim_fn_accum_adamw", "optim_fn_adam", "optim_fn_adamw"]


def _decays(name: str, param: Tensor) -> bool:
    """Weights decay; vectors and scalars (biases, the scales of norms) and whatever is called 'bias' do not."""
    return param.ndim > 1 and name.rpartition(".")[2] != "bias"


def _param_groups(params: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """The named parameters in their order as at most two groups: with decay, then without. Empty ones are left out."""
    named = list(params)
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(
                "the parameters must be (name, parameter) pairs such as model.named_parameters() gives, "
                f"but one is {type(entry).__name__}"
            )
    groups = [
        {"params": [pair for pair in named if _decays(*pair)], "weight_decay": weight_decay},
        {"params": [pair for pair in named if not _decays(*pair)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def optim_fn_adam(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
) -> torch.optim.Adam:
    """torch's Adam on named parameters; decay (L2, in the gradient) on weights only."""
    return torch.optim.Adam(_param_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_adamw(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """torch's AdamW on named parameters; decay (decoupled) on weights only."""
    return torch.optim.AdamW(_param_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_accum_adam(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1 / 32768,
    accum_iter: int = 4,
) -> AccumAdam:
    """AccumAdam on named parameters; decay (L2, in the gradient) on weights only."""
    groups = _param_groups(params, weight_decay)
    return AccumAdam(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def optim_fn_accum_adamw(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
) -> AccumAdamW:
    """AccumAdamW on named parameters; decay (decoupled) on weights only."""
    groups = _param_groups(params, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)
