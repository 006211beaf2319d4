"""Validation of the user's optimizers, and their state by parameter name."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_dp.replica.shards import is_sharded, local, placed
from decent_dp.replica.state_checks import check_alike, check_param_states

__all__ = [
    "brief",
    "check_optimizers",
    "exact_state",
    "is_like",
    "load_optimizer",
    "params_of",
    "saved_optimizer",
    "signature_of",
]

# Optimizers that equalize the workers' parameters in each step, by class name (importing them would be slow).
_EQUALIZING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "ZeROOptimizer", "DistributedFusedAdam")
# The key of a DTensor's local part in a saved state.
_PART = "part of a DTensor"
# Up to so many parameters, a signature lists all names.
_NAMED = 8


def check_optimizers(given: object, model: nn.Module) -> list[Optimizer]:
    """Returns the optimizers as a list, after checking that each trainable parameter of ``model`` is in exactly one of them.

    Raises:
        TypeError: an entry is not an optimizer whose steps can be followed.
        ValueError: a parameter is in no optimizer, in two, or not the model's; names it.
    """
    one = isinstance(given, (Optimizer, Tensor, nn.Module, Mapping, str)) or not isinstance(given, Iterable)
    found: list[Any] = [given] if one else list(given)  # type: ignore[call-overload]
    if not found:
        raise ValueError("optimizer is an empty list: pass the optimizer that steps the model's parameters, or several.")
    for optimizer in found:
        _check_kind(optimizer)
    names = {id(param): name for name, param in model.named_parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in found:
        for number, param in enumerate(params_of(optimizer)):
            name = names.get(id(param))
            if name is None:
                raise ValueError(
                    f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, is not one of the "
                    "model's: it would train and never be mixed. Make the optimizer from model.parameters(), after the model "
                    "was moved or converted, and put what else trains into the model."
                )
            if id(param) in owners:
                raise ValueError(f"parameter '{name}' is in two optimizers, or twice in one, and would be stepped twice.")
            owners[id(param)] = optimizer
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in owners:
            raise ValueError(
                f"parameter '{name}' is in no optimizer: it would be mixed and never trained. Give it to one, pass all "
                "optimizers as a list, or freeze it (requires_grad_(False)) before gossip()."
            )
    return found


def _check_kind(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, or a list of them, got {_described(optimizer)}")
    kind = type(optimizer).__name__
    if "_optimizer_step_post_hooks" not in vars(optimizer):
        raise TypeError(
            f"{kind} does not tell of its steps, as it was not made by torch.optim.Optimizer.__init__: if it wraps an "
            "optimizer, pass that one (.optimizer)."
        )
    if any(base.__name__ in _EQUALIZING for base in type(optimizer).__mro__):
        raise TypeError(
            f"{kind} makes the parameters of all workers equal in each step, and here replicas differ and are mixed: pass the "
            "optimizer that it is made of, over all of the model's parameters."
        )
    if getattr(optimizer, "pre_average_hook", None) is not None:
        raise TypeError(
            f"{kind} has a pre_average_hook, which only DecentralizedDataParallel calls: use that, or a rule (rule=)."
        )


def _described(thing: Any) -> str:
    """Describes an argument that is not an optimizer, with advice."""
    name = type(thing).__name__
    if isinstance(thing, type):
        return f"the class {thing.__name__}: pass an object of it, {thing.__name__}(model.parameters(), ...)"
    if hasattr(thing, "get_last_lr"):
        return f"a learning-rate scheduler ({name}): pass its optimizer"
    if isinstance(thing, Mapping):
        return f"a {name}: pass list(optimizers.values())"
    if isinstance(thing, Tensor):
        return f"a {name}: pass the optimizer, not its parameters"
    if isinstance(thing, nn.Module):
        return f"a module ({name}): gossip(model, optimizer) takes the model first"
    if callable(thing):
        return f"a function ({getattr(thing, '__name__', name)}): gossip() takes the optimizer itself, not what makes one"
    text = repr(thing)
    return text if len(text) <= 60 else f"a {name}"


def signature_of(optimizers: Sequence[Optimizer], model: nn.Module) -> list[Any]:
    """Returns the properties of the optimizers that must be equal on all workers, as JSON short enough for a message."""
    return [f"{type(optimizer).__name__} of {brief(_names_of(optimizer, model))}" for optimizer in optimizers]


def brief(names: Sequence[str]) -> str:
    """Returns all names, or some and a digest in which any difference shows."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]
    return f"{len(names)} parameters, {', '.join(names[: _NAMED // 2])}, ..., {names[-1]} ({digest})"


# -- state ---------------------------------------------------------------------------------------------------------------


def saved_optimizer(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` with parameter names instead of numbers; the tensors are live.

    Returns:
        kind: the class name; state: {parameter name: state}; other: state that belongs to no parameter; groups: the options
        of each parameter group, with names under 'params'; more: further entries of the state dict.

    Raises:
        ValueError: the state dict lacks torch's keys, or a parameter is not the model's.
    """
    names, params = _names_of(optimizer, model), params_of(optimizer)
    state_dict = optimizer.state_dict()
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"{type(optimizer).__name__}.state_dict() has {sorted(map(str, state_dict))}, and must have 'state' and "
            "'param_groups', as torch's optimizers do, to be saved by parameter name."
        )
    state: Mapping[Any, Any] = state_dict["state"]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state_dict["param_groups"]]
    return {
        "kind": type(optimizer).__name__,
        "state": {names[key]: _parts(value, params[key], names[key]) for key, value in state.items() if type(key) is int},
        "other": {key: value for key, value in state.items() if type(key) is not int},
        "groups": groups,
        "more": {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
    }


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
    """Loads the result of ``saved_optimizer``, bit for bit; ``undo`` reverts it as exactly.

    Raises:
        ValueError: it was saved from another optimizer; names the difference.
    """
    kind, names = type(optimizer).__name__, _names_of(optimizer, model)
    if not isinstance(saved, Mapping) or not all(
        isinstance(saved.get(key), of) for key, of in {"state": dict, "other": dict, "groups": list, "more": dict}.items()
    ):
        raise ValueError(f"the state of {kind} is not as it was saved: an entry is missing, or of another type")
    if saved["kind"] != kind:
        raise ValueError(
            f"the optimizer was {saved['kind']} when this was saved, and is {kind} now: their states do not fit each other. Go "
            "on with the same one, or load the parameters alone (load_state_dict)."
        )
    own = dict(zip(map(id, params_of(optimizer)), names, strict=True))
    _compare_groups(
        kind,
        [group["params"] for group in saved["groups"]],
        [[own[id(param)] for param in group["params"]] for group in optimizer.param_groups],
    )
    for number, (theirs, ours) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
        check_alike(f"parameter group {number} of {kind}", theirs, {k: v for k, v in ours.items() if k != "params"})
        if "lr" in ours and "lr" not in theirs:
            raise ValueError(f"parameter group {number} of {kind} was saved without 'lr'")
    options = [group for group in saved["groups"] for _ in group["params"]]
    check_param_states(optimizer, [(name, saved["state"].get(name, {}), own) for name, own in zip(names, options, strict=True)])
    numbers, params = {name: number for number, name in enumerate(names)}, dict(zip(names, params_of(optimizer), strict=True))
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["groups"]]
    state = {**{numbers[name]: _whole(value, params[name]) for name, value in saved["state"].items()}, **saved["other"]}
    undo.callback(_load, optimizer, copy.deepcopy(optimizer.state_dict()))
    try:
        _load(optimizer, {**saved["more"], "state": state, "param_groups": groups})
    except Exception as error:
        raise ValueError(
            f"{kind}.load_state_dict does not take what {kind}.state_dict returned when this was saved "
            f"({type(error).__name__}: {error}): use the version that saved it"
        ) from error


def _parts(state: Any, param: Tensor, name: str) -> Any:
    """Returns a parameter's state, with local parts in place of DTensors.

    Raises:
        ValueError: a DTensor is not placed as the parameter.
    """
    if is_sharded(state):
        if (state.shape, state.placements, state.device_mesh) != (param.shape, *_place(param)):
            raise ValueError(
                f"the state of parameter '{name}' has a DTensor of shape {tuple(state.shape)}, {state.placements}, which is "
                "not placed as the parameter, and cannot be saved by parts."
            )
        return {_PART: local(state)}
    if type(state) is dict:
        return {key: _parts(value, param, name) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_parts(value, param, name) for value in state)
    if type(state) is deque:
        return deque((_parts(value, param, name) for value in state), state.maxlen)
    return state


def _whole(saved: Any, param: Tensor) -> Any:
    """The inverse of ``_parts``."""
    if type(saved) is dict:
        if saved.keys() == {_PART}:
            part, own = saved[_PART], local(param)
            return placed(torch.empty_like(own, dtype=part.dtype).copy_(part), param)
        return {key: _whole(value, param) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_whole(value, param) for value in saved)
    if type(saved) is deque:
        return deque((_whole(value, param) for value in saved), saved.maxlen)
    return saved


def _place(param: Any) -> tuple[Any, Any]:
    return (param.placements, param.device_mesh) if is_sharded(param) else (None, None)


def _compare_groups(kind: str, saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> None:
    same = "Make the same groups, with the same parameters in the same order."
    if len(saved) != len(own):
        raise ValueError(f"{kind} had {len(saved)} parameter groups when this was saved, and has {len(own)} now. {same}")
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        for place, (before, now) in enumerate(zip_longest(theirs, ours)):
            if before != now:
                was, is_ = (f"'{name}'" if name is not None else "none" for name in (before, now))
                raise ValueError(
                    f"{kind} had other parameters, or in another order, when this was saved: parameter {place} of group "
                    f"{number} was {was}, and is {is_} now. {same}"
                )


def _load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Calls ``optimizer.load_state_dict`` with a copy, and then restores the dtype of every tensor."""
    optimizer.load_state_dict(copy.deepcopy(state_dict))
    for number, param in enumerate(params_of(optimizer)):
        if number in state_dict["state"] and param in optimizer.state:
            optimizer.state[param] = exact_state(optimizer.state[param], state_dict["state"][number], param)


def exact_state(loaded: Any, saved: Any, param: Tensor) -> Any:
    """Returns ``loaded`` with its tensors replaced by copies of those in ``saved``.

    torch's ``load_state_dict`` casts tensors to their parameters' dtype, and damages strings and deques.
    """
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if not is_like(saved, param):
            return saved.detach().to(loaded.device, copy=True)
        # Optimizers create state with the parameter's strides.
        return torch.empty_like(param, dtype=saved.dtype, device=loaded.device).copy_(saved)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: exact_state(value, saved[key], param) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple, deque)) and isinstance(saved, (list, tuple, deque)) and len(loaded) == len(saved):
        members = [exact_state(a, b, param) for a, b in zip(loaded, saved, strict=True)]
        return deque(members, saved.maxlen) if isinstance(saved, deque) else type(loaded)(members)
    if type(loaded) is type(saved):
        return copy.deepcopy(saved)
    return loaded


def is_like(value: Tensor, param: Tensor) -> bool:
    """Whether a tensor of state has the layout of its parameter."""
    alike = is_sharded(value) == is_sharded(param)
    return alike and value.layout == torch.strided and value.shape == param.shape


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _names_of(optimizer: Optimizer, model: nn.Module) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    params = params_of(optimizer)
    for number, param in enumerate(params):
        if id(param) not in names:
            raise ValueError(
                f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, is not one of the model's "
                "any more, or was never (add_param_group after gossip()?): its state cannot be kept by name."
            )
    return [names[id(param)] for param in params]
