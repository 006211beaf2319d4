"""Checks of a saved state against what an optimizer or a scheduler has, before anything of it is loaded.

A state that was saved and is well formed may still have a value of another kind: it would load, and break the training later.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

__all__ = ["check_alike", "check_param_states"]


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
    if not f"{kind.__module__}.".startswith(("torch.optim.", "decent_dp.optim.")) or kind.__name__ in ("LBFGS", "SparseAdam"):
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
