"""Detection of optimizer state that no state dict contains: in inner optimizers, or in attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_dp.replica.optimizers import params_of

__all__ = ["has_own_state_dict", "refuse_hidden_state"]

# Attributes of torch.optim.Optimizer: they are saved, or hold no state.
_BASE_ATTRIBUTES = ("state", "param_groups", "defaults")


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether the optimizer defines its own ``state_dict``."""
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(optimizer._optimizer_state_dict_post_hooks)


def refuse_hidden_state(optimizer: Optimizer, model: nn.Module, saved: Sequence[Optimizer]) -> None:
    """Checks that an optimizer that has stepped keeps all its state in ``state``.

    Args:
        model: owner of the stepped parameters.
        saved: all optimizers whose state goes into the save.

    Raises:
        ValueError: the state of a parameter is in another attribute; names the parameter and the attribute.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    owners: dict[Any, str] = {
        **names,
        **{name: name for name in names.values()},
    }  # dicts have parameters, their ids or their names as keys
    seen: set[int] = set()
    own = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _BASE_ATTRIBUTES and not key.startswith("_optimizer_")
    }
    found = [leaf for key, value in own.items() for leaf in _leaves(value, key, None, owners, seen)]
    if not found:
        return
    kept = {id(tensor) for one in saved for _, tensor, _ in _leaves(one.state, "", None, owners, set())}
    places = {_place(tensor) for param in model.parameters() for tensor in (param, param.grad) if tensor is not None}
    params = params_of(optimizer)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    without = {names[id(param)]: param for param in params if not optimizer.state.get(param) and id(param) in names}
    for where, leaf, owner in found:
        name = None
        if isinstance(leaf, Optimizer):
            inner = _leaves(leaf.state, "", None, owners, set())
            name = next((of for _, tensor, of in inner if of is not None and id(tensor) not in kept), None)
        elif id(leaf) in kept or _place(leaf) in places:  # saved already, or a parameter or gradient (perhaps detached)
            continue
        elif owner is not None:
            name = owner if leaf.numel() > 1 and (owner in without or leaf.shape == shapes.get(owner)) else None
        elif len(without) == len(params):
            name = _guess_owner(leaf, without)
        if name is not None:
            raise ValueError(
                f"{type(optimizer).__name__} has stepped parameter '{name}' and keeps the state of it in its attribute "
                f"{where}, where no save finds it: a run would resume without it. Of real optimizers inside another, pass the "
                "real ones, gossip(model, [muon, adamw]). Otherwise keep it in self.state[param], or, with gossip(), override "
                "state_dict() and load_state_dict()."
            )


def _leaves(
    value: Any, where: str, owner: str | None, owners: Mapping[Any, str], seen: set[int]
) -> Iterator[tuple[str, Any, str | None]]:
    """Yields (path, tensor or optimizer, name of its parameter according to a key above it) for all in ``value``."""
    if isinstance(value, Tensor):
        yield where, value, owner
    elif isinstance(value, (Mapping, list, tuple, set, frozenset, deque, Optimizer)) and id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Optimizer):
            yield f"{where} ({type(value).__name__})", value, owner
        elif isinstance(value, Mapping):
            for key, member in value.items():
                found = owners.get(id(key)) if isinstance(key, Tensor) else owners.get(key)
                yield from _leaves(member, where, found or owner, owners, seen)
        else:
            for member in value:
                yield from _leaves(member, where, owner, owners, seen)


def _guess_owner(tensor: Tensor, params: Mapping[str, Tensor]) -> str | None:
    """Guesses from its shape to which parameter a tensor of state belongs; the first one if it is as large as all together."""
    if tensor.numel() > 1 and tensor.is_floating_point():
        for name, param in params.items():
            if param.shape == tensor.shape:
                return name
        if tensor.numel() >= sum(param.numel() for param in params.values()):
            return next(iter(params), None)
    return None


def _place(tensor: Tensor) -> Any:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel()
    return tensor.data_ptr() if plain else f"object {id(tensor)}"
