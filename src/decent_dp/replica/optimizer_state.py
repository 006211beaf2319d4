"""The state of optimizers by parameter name, and checks of a saved state before anything of it is loaded.

A state that was saved and is well formed may still have a value of another kind: it would load, and break the training later.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from decent_dp.replica.shards import is_sharded, local, placed

__all__ = [
    "check_alike",
    "check_param_states",
    "has_own_state_dict",
    "is_known",
    "load_by_number",
    "load_optimizer",
    "names_of",
    "params_of",
    "refuse_other_kind",
    "saved_optimizer",
]

# The key of a DTensor's local part in a saved state.
_PART = "part of a DTensor"


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def names_of(optimizer: Optimizer, model: nn.Module) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    params = params_of(optimizer)
    for number, param in enumerate(params):
        if id(param) not in names:
            raise ValueError(
                f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, is not one of the model's "
                "any more, or was never (add_param_group after gossip()?): its state cannot be kept by name."
            )
    return [names[id(param)] for param in params]


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether the optimizer defines its own ``state_dict``."""
    return type(optimizer).state_dict is not Optimizer.state_dict or bool(optimizer._optimizer_state_dict_post_hooks)


def saved_optimizer(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` with parameter names instead of numbers; the tensors are live.

    Returns:
        kind: the class name; state: {parameter name: state}; other: state that belongs to no parameter; groups: the options
        of each parameter group, with names under 'params'; more: further entries of the state dict.

    Raises:
        ValueError: the state dict lacks torch's keys, or a parameter is not the model's.
    """
    names, params = names_of(optimizer, model), params_of(optimizer)
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
    kind, names = type(optimizer).__name__, names_of(optimizer, model)
    if not isinstance(saved, Mapping) or not all(
        isinstance(saved.get(key), of) for key, of in {"state": dict, "other": dict, "groups": list, "more": dict}.items()
    ):
        raise ValueError(f"the state of {kind} is not as it was saved: an entry is missing, or of another type")
    refuse_other_kind("optimizer", saved["kind"], kind)
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

    def load(state_dict: dict[str, Any]) -> None:
        load_by_number(optimizer, copy.deepcopy(state_dict), state_dict["state"])

    undo.callback(load, copy.deepcopy(optimizer.state_dict()))
    try:
        load({**saved["more"], "state": state, "param_groups": groups})
    except Exception as error:
        raise ValueError(
            f"{kind}.load_state_dict does not take what {kind}.state_dict returned when this was saved "
            f"({type(error).__name__}: {error}): use the version that saved it"
        ) from error


def _parts(state: Any, param: Any, name: str) -> Any:
    """Returns a parameter's state, with local parts in place of DTensors.

    Raises:
        ValueError: a DTensor is not placed as the parameter.
    """
    place = (param.shape, param.placements, param.device_mesh) if is_sharded(param) else None

    def part(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        if (leaf.shape, leaf.placements, leaf.device_mesh) != place:
            raise ValueError(
                f"the state of parameter '{name}' has a DTensor of shape {tuple(leaf.shape)}, {leaf.placements}, which is "
                "not placed as the parameter, and cannot be saved by parts."
            )
        return {_PART: local(leaf)}

    return tree_map(part, state)


def _whole(saved: Any, param: Tensor) -> Any:
    """The inverse of ``_parts``."""

    def is_part(value: Any) -> bool:
        return type(value) is dict and value.keys() == {_PART}

    def whole(leaf: Any) -> Any:
        if not is_part(leaf):
            return leaf
        own, part = local(param), leaf[_PART]
        return placed(torch.empty_like(own, dtype=part.dtype).copy_(part), param)

    return tree_map(whole, saved, is_leaf=is_part)


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


def load_by_number(optimizer: Optimizer, state_dict: dict[str, Any], exact: Mapping[int, Any] | None) -> None:
    """Calls ``optimizer.load_state_dict``, and then gives every tensor the strides that the optimizer would have made.

    Args:
        exact: the state by the numbers of parameters, to restore what torch casts to the parameters' dtypes, and the strings
            and deques that it damages; None to leave them so.
    """
    optimizer.load_state_dict(state_dict)
    with torch.inference_mode(False), torch.no_grad():
        for number, param in enumerate(params_of(optimizer)):
            if param in optimizer.state:
                loaded = optimizer.state[param]
                optimizer.state[param] = _exact(loaded, loaded if exact is None else exact.get(number), param)


def _exact(loaded: Any, saved: Any, param: Tensor) -> Any:
    """Returns ``loaded`` with its tensors replaced by copies of those in ``saved``."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if is_sharded(saved) != is_sharded(param) or saved.layout != torch.strided or saved.shape != param.shape:
            return saved.detach().to(loaded.device, copy=True)
        # Optimizers create state with the parameter's strides.
        return torch.empty_like(param, dtype=saved.dtype, device=loaded.device).copy_(saved)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved[key], param) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple, deque)) and isinstance(saved, (list, tuple, deque)) and len(loaded) == len(saved):
        members = [_exact(a, b, param) for a, b in zip(loaded, saved, strict=True)]
        return deque(members, saved.maxlen) if isinstance(saved, deque) else type(loaded)(members)
    return copy.deepcopy(saved) if type(loaded) is type(saved) and loaded is not saved else loaded


# -- checks ------------------------------------------------------------------------------------------------------------------


def refuse_other_kind(what: str, saved: object, own: object) -> None:
    """Raises ValueError if the classes of optimizers or schedulers (``what``) are not those of the save."""
    if saved != own:
        raise ValueError(
            f"the {what} was {saved} when this was saved, and is {own} now: their states do not fit each other. Go on with the "
            "same one, or load the parameters alone (load_state_dict)."
        )


def is_known(optimizer: Optimizer) -> bool:
    """Whether its class is torch's or of this library."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "decent_dp.optim."))


def check_alike(what: str, saved: Any, own: Any) -> None:
    """Checks that ``saved`` could be another value of ``own``: of the same kind, also inside, where both have a key.

    Where ``own`` is None anything may be, as versions of torch differ in their defaults.

    Raises:
        ValueError: it could not; names the place.
    """
    if isinstance(own, Mapping):
        fits = isinstance(saved, Mapping)
        for key in [key for key in own if key in saved] if fits else ():
            check_alike(f"{what}[{key!r}]", saved[key], own[key])
    elif isinstance(own, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and (isinstance(own, list) or len(saved) == len(own))
        for i, (theirs, ours) in enumerate(zip(saved, own, strict=False)) if fits else ():
            check_alike(f"{what}[{i}]", theirs, ours)
    elif isinstance(own, bool):
        fits = saved is None or isinstance(saved, bool)
    elif _is_number(own):
        fits = _is_number(saved)
    elif isinstance(own, Tensor):
        fits = isinstance(saved, Tensor) or (own.numel() == 1 and _is_number(saved))
    else:
        fits = not isinstance(own, (str, bytes)) or isinstance(saved, type(own))
    if not fits:
        raise ValueError(f"{what} was saved as {_described(saved)}, and is {_described(own)} here")


def check_param_states(optimizer: Optimizer, saved: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> None:
    """Checks parameters' states against those that the optimizer has, or, if it has made no step, would make.

    Args:
        saved: for each parameter, in the optimizer's order: its name, its state, and the options of its group.

    Raises:
        ValueError: a state is of another kind; names the parameter and the key.
    """
    # They depend on the group and the dimensions alone, and each costs a step of a new optimizer.
    examples: dict[tuple[int, int], Mapping[str, Any] | None] = {}
    members = [(number, group, param) for number, group in enumerate(optimizer.param_groups) for param in group["params"]]
    for (number, group, param), (name, state, options) in zip(members, saved, strict=True):
        place = number, param.dim()
        if place not in examples:
            examples[place] = _example(optimizer, group, param)
        what = f"the state of parameter '{name}'"
        if not isinstance(state, Mapping):
            raise ValueError(f"{what} was saved as {_described(state)}, and should be a dict")
        example = (examples[place] if param.is_floating_point() else None) or {}
        for key, ours in (optimizer.state.get(param) or example).items() if state else ():
            if key in state:
                _check_entry(f"{what}['{key}']", state[key], ours)
            elif key in example:  # else the optimizer makes it later, as LBFGS does, or on some options only
                advice = _switched(options, group)
                raise ValueError(f"{what} has no '{key}', which {type(optimizer).__name__} needs{advice}")


def _check_entry(what: str, theirs: Any, ours: Any) -> None:
    if isinstance(ours, Tensor) and ours.dim():
        fits = isinstance(theirs, (Tensor, Mapping))  # a mapping: this worker's part of a DTensor
    else:
        fits = not (isinstance(ours, Tensor) or _is_number(ours)) or _is_number(theirs)
    if not fits:
        raise ValueError(f"{what} was saved as {_described(theirs)}, and is {_described(ours)} here")


def _switched(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The options that are on in one group and off in the other."""
    for key, ours in own.items():
        theirs = saved.get(key)
        if all(isinstance(value, (bool, int, float)) for value in (theirs, ours)) and bool(theirs) != bool(ours):
            return f": it was saved with {key}={theirs}, and has {key}={ours} here. Make the optimizer with {key}={theirs}"
    return ""


def _example(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> Mapping[str, Any] | None:
    """The state that one step of a new optimizer makes for such a parameter; None except for torch's optimizers and ours."""
    kind = type(optimizer)
    if not is_known(optimizer) or kind.__name__ in ("LBFGS", "SparseAdam"):
        return None
    names = set(inspect.signature(kind).parameters)
    # On the CPU and for one number: torch's fused and captured kinds need a GPU.
    options = {k: v for k, v in group.items() if k in names and k not in ("params", "fused", "capturable", "foreach")}
    with torch.enable_grad():
        small = Parameter(torch.zeros([1] * param.dim(), dtype=torch.float32, device="cpu"))
        small.grad = torch.ones_like(small)
        try:
            example = kind([small], **options)
            example.step()
        except Exception:  # an option that only goes with a GPU, say
            return None
    made: Mapping[str, Any] = example.state[small]
    # Entries that are None after a step, and those that only some steps make, may be missing.
    return {key: value for key, value in made.items() if value is not None}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (np.generic, np.ndarray)):
        return value.size == 1 and value.dtype.kind in "iuf"
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
        return f"a {type(value).__name__}"
    return repr(value)[:80]
