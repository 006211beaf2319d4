"""Validation of the user's model, factories and scaler, shared by the drivers and the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = [
    "FLOAT_DTYPES",
    "LR_SCHEDULER_FN_TYPE",
    "OPTIM_FN_TYPE",
    "check_factories",
    "check_model",
    "check_scaler",
    "make_optimizer",
    "make_scheduler",
    "refuse_graphs",
]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

OPTIM_FN_TYPE = Callable[[list[tuple[str, Tensor]]], Optimizer]
LR_SCHEDULER_FN_TYPE = Callable[[Optimizer], LRScheduler]


# Other wrappers by class name (importing them would be slow), with the advice for the error.
_WRAPPERS = {
    "DistributedDataParallel": "pass its .module",
    "DecentralizedDataParallel": "pass its .module",
    "DataParallel": "pass its .module, and start one process for each GPU",
    "FullyShardedDataParallel": "its flat shards cannot be mixed: call fully_shard on the model and pass it to gossip()",
    "DeepSpeedEngine": "it averages gradients itself: pass its .module, and train with a plain optimizer",
}

_SHARDED = (
    "sharded replicas train with decent_dp.gossip(model, optimizer), which mixes after the optimizer's step. Here a replica "
    "must fit one device."
)


def refuse_graphs(model: nn.Module) -> None:
    """Refuses a model whose parameters must stay where they are.

    Raises:
        ValueError: a forward is a CUDA graph, which reads the memory that parameters had at its capture; names the module.
    """
    for name, module in model.named_modules():
        # torch puts a function of this origin in the module's place of ``forward``.
        if "make_graphed_callables" in getattr(vars(module).get("forward"), "__qualname__", ""):
            raise ValueError(
                f"the forward of {f'module {name!r}' if name else 'the model'} is a CUDA graph "
                "(torch.cuda.make_graphed_callables), which reads parameters where they were at the capture, and this wrapper "
                "moves them into buckets: pass param_as_bucket_view=False"
            )


def check_model(model: Any, *, shards: bool = False) -> None:
    """Checks that replicas of a model can train and mix.

    Args:
        shards: whether parameters may be DTensors.

    Raises:
        TypeError: ``model`` is not a module, or is wrapped for another kind of training.
        ValueError: no parameter trains, or a tensor cannot be mixed; names the tensor.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        # Checked by module, because gathered parameters are not DTensors.
        if not shards and "FSDPModule" in kinds:
            raise TypeError(f"the model is sharded (fully_shard): {_SHARDED}")
        for kind, advice in _WRAPPERS.items():
            if kind in kinds:
                where = "model is already wrapped in" if module is model else "a part of the model is wrapped in"
                raise TypeError(f"{where} {kind}: {advice}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise ValueError(
                f"'{name}' is a sparse tensor: make it dense, or keep it outside the model's parameters and buffers"
            )
        if not shards and type(tensor).__name__ == "DTensor":
            raise TypeError(f"'{name}' is a DTensor (fully_shard, tensor parallelism): {_SHARDED}")
        if isinstance(tensor, UninitializedParameter) or tensor.is_meta:
            raise ValueError(f"'{name}' has no values yet (lazy or on the meta device): initialise the model first")
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not trained:
        raise ValueError(
            "model has no trainable parameters (none with requires_grad=True): nothing would train or mix. Unfreeze what is "
            "to train first."
        )
    for name, param in trained:
        if param.dtype not in FLOAT_DTYPES:
            instead = (
                "keep torch.view_as_real(it) as the parameter, and torch.view_as_complex() that in forward"
                if param.is_complex()
                else "freeze it (requires_grad=False), or convert it"
            )
            raise ValueError(f"parameter '{name}' is {param.dtype}, and only {FLOAT_DTYPES} are mixed: {instead}")


def check_factories(optim_fn: Any, lr_scheduler_fn: Any) -> None:
    """Raises TypeError unless both are callable; ``lr_scheduler_fn`` may also be None."""
    if optim_fn is None:
        raise TypeError(
            "optim_fn is missing: DecentralizedDataParallel makes the optimizers itself, one for each bucket. Pass a function "
            "that makes one, DecentralizedDataParallel(model, functools.partial(torch.optim.AdamW, lr=1e-3)). With an "
            "optimizer of your own, call decent_dp.gossip(model, optimizer)."
        )
    _check_callable("optim_fn", optim_fn, "a list of (name, parameter) pairs that returns an optimizer")
    if lr_scheduler_fn is not None:
        _check_callable("lr_scheduler_fn", lr_scheduler_fn, "an optimizer that returns a scheduler")


def _check_callable(name: str, value: Any, argument: str) -> None:
    if isinstance(value, Optimizer):
        kind = type(value).__name__
        raise TypeError(
            f"{name} must make an optimizer and is one, {kind}: pass a function of {argument}, such as "
            f"functools.partial(torch.optim.{kind}, lr=...)."
        )
    if not callable(value):
        raise TypeError(f"{name} must be a function of {argument}, got {value!r}")


def make_optimizer(optim_fn: OPTIM_FN_TYPE, named: Sequence[tuple[str, Parameter]]) -> Optimizer:
    """Calls ``optim_fn`` for these parameters and checks the result.

    Raises:
        TypeError, ValueError: the result is not an optimizer of exactly these parameters, each once.
    """
    optimizer: Any = optim_fn([(name, param) for name, param in named])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optim_fn must return a torch.optim.Optimizer, got {optimizer!r}. Is a `return` missing in it?")
    counts = Counter(id(param) for group in optimizer.param_groups for param in group["params"])
    for name, param in named:
        count = counts.pop(id(param), 0)
        if count != 1:
            raise ValueError(
                f"optim_fn {'takes twice' if count else 'leaves out'} parameter '{name}': each of the (name, parameter) pairs "
                "that it is given must be in exactly one parameter group. Freeze parameters that are not to train "
                "(requires_grad_(False)) before wrapping the model."
            )
    if counts:
        raise ValueError(
            f"optim_fn returned an optimizer with {len(counts)} parameters that it was not given: it must take exactly the "
            "(name, parameter) pairs of its argument, and may be called several times."
        )
    return optimizer


def make_scheduler(lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None, optimizer: Optimizer) -> LRScheduler | None:
    """Calls ``lr_scheduler_fn`` for an optimizer and checks the result; None without a factory.

    Raises:
        TypeError: the result is not a scheduler that counts steps.
    """
    if lr_scheduler_fn is None:
        return None
    scheduler: Any = lr_scheduler_fn(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "lr_scheduler_fn returned a ReduceLROnPlateau, which waits for a metric, and schedulers are stepped by the "
            "update. Return one that counts steps, or none and set the rate in .optimizers yourself."
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"lr_scheduler_fn must return a torch.optim.lr_scheduler.LRScheduler, got {scheduler!r}. Is a `return` missing "
            "in it?"
        )
    return scheduler


def check_scaler(scaler: Any) -> torch.amp.GradScaler | None:
    """Returns an enabled scaler, and None for a disabled one or None."""
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.GradScaler or None, got {scaler!r}")
    return scaler if scaler.is_enabled() else None
