"""Optimizers from named parameters, with weight decay where it belongs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .accum import AccumAdam, AccumAdamW
from .published import load_by_name

__all__ = ["optim_fn_accum_adam", "optim_fn_accum_adamw", "optim_fn_adam", "optim_fn_adamw"]

_Made = TypeVar("_Made", bound=torch.optim.Optimizer)


def _decays(name: str, param: Tensor) -> bool:
    """Weights decay. Vectors and scalars (biases, the scales of norms) do not, nor do parameters called 'bias'."""
    return param.ndim > 1 and name.rpartition(".")[2] != "bias"


def _grouped(params: Iterable[tuple[str, Tensor]], weight_decay: float, make: Callable[[list[dict[str, Any]]], _Made]) -> _Made:
    """An optimizer of the named parameters in their order, in at most two groups: with decay, then without; none is empty."""
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
    optimizer = make([group for group in groups if group["params"]] or groups[:1])
    optimizer.register_load_state_dict_pre_hook(functools.partial(load_by_name, [name for name, _ in named]))
    return optimizer


# ------------------------------------------------------------------------------------------------- torch's fused kernels

_FUSED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_Adam = TypeVar("_Adam", bound=torch.optim.Adam)


def _fusible(param: Tensor) -> bool:
    """torch's kernel reads memory as if it had no gaps: it would run over the end of a parameter that is a slice."""
    if type(param) not in (Tensor, torch.nn.Parameter) or param.layout != torch.strided:
        return False
    dense = torch.empty_like(param, device="meta").stride() == param.stride()
    return dense and param.device.type in ("cpu", "cuda") and param.dtype in _FUSED_DTYPES


def _with_fused_kernel(optimizer: _Adam) -> _Adam:
    """The new optimizer, on torch's fused kernels in those groups whose parameters all allow it.

    The kernel walks through memory and ignores strides, which on the CPU gives wrong values without an error; so gradients
    and moments get their parameter's layout first. A loaded state dict does not change the choice of kernel. A GradScaler is
    not told that the kernel can unscale (as torch's constructor would do): it then treats all groups alike.
    """
    for group in optimizer.param_groups:
        if all(_fusible(param) for param in group["params"]):
            group["fused"] = True
    optimizer.register_step_pre_hook(_match_strides)
    optimizer.register_step_post_hook(_mark_changed)
    optimizer.register_load_state_dict_pre_hook(_keep_kernels)
    return optimizer


def _fused_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups if group["fused"] for param in group["params"]]


def _mark_changed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The kernel does not do it on the CPU, and autograd would miss that a saved tensor has changed."""
    torch.autograd.graph.increment_version([param for param in _fused_params(optimizer) if param.grad is not None])


def _match_strides(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Gives gradients and moments the strides of their parameter. Autograd does so; gradients set by hand may differ."""
    for param in _fused_params(optimizer):
        if param.grad is not None:
            param.grad = _laid_out(param.grad, param)
        state = optimizer.state.get(param, {})
        for key in state.keys() - {"step"}:
            state[key] = _laid_out(state[key], param)


def _laid_out(value: Tensor, param: Tensor) -> Tensor:
    if value.layout != torch.strided or value.stride() == param.stride():
        return value
    return torch.empty_strided(value.shape, param.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _keep_kernels(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict from a run on another kernel brings that run's state, not its kernel."""
    given, own = state_dict["param_groups"], optimizer.param_groups
    if len(given) != len(own):
        return state_dict  # torch refuses it
    kept = [{**new, **{key: old[key] for key in ("fused", "foreach")}} for new, old in zip(given, own, strict=True)]
    return {**state_dict, "param_groups": kept}


# ------------------------------------------------------------------------------------------------------- the factories


def optim_fn_adam(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
) -> torch.optim.Adam:
    """torch's Adam on named parameters; decay (L2, in the gradient) on weights only.

    A group whose parameters are all dense, of float16 to float64, on the CPU or CUDA uses torch's fused kernel.
    """
    make = functools.partial(torch.optim.Adam, lr=lr, betas=(beta1, beta2), eps=eps)
    return _with_fused_kernel(_grouped(params, weight_decay, make))


def optim_fn_adamw(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """torch's AdamW on named parameters; decay (decoupled) on weights only, and kernels as in `optim_fn_adam`."""
    make = functools.partial(torch.optim.AdamW, lr=lr, betas=(beta1, beta2), eps=eps)
    return _with_fused_kernel(_grouped(params, weight_decay, make))


def optim_fn_accum_adam(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1 / 32768,
    accum_iter: int = 4,
    *,
    compiled: bool = False,
) -> AccumAdam:
    """AccumAdam on named parameters; decay (L2, in the gradient) on weights only. ``compiled`` as in the class."""
    make = functools.partial(AccumAdam, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter, compiled=compiled)
    return _grouped(params, weight_decay, make)


def optim_fn_accum_adamw(
    params: Iterable[tuple[str, Tensor]],
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
    *,
    compiled: bool = False,
) -> AccumAdamW:
    """AccumAdamW on named parameters; decay (decoupled) on weights only. ``compiled`` as in the class."""
    make = functools.partial(AccumAdamW, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter, compiled=compiled)
    return _grouped(params, weight_decay, make)
