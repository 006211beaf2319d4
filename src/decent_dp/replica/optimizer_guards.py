"""Guards against mistakes with optimizers: which ones are given, what they keep, and how they differ between workers."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import numbers
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

__all__ = [
    "check_alike",
    "check_optimizers",
    "check_states",
    "first_difference",
    "names_by_id",
    "options_of",
    "params_of",
    "refuse_hidden_state",
    "signature_of",
    "warn_user",
]

# Optimizers that equalize the workers' parameters in each step, by class name (importing them would be slow).
_EQUALIZING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "ZeROOptimizer", "DistributedFusedAdam")
# Up to so many parameters, a signature lists all names.
_NAMED = 8
# Attributes of torch.optim.Optimizer: they are saved, or hold no state.
_BASE_ATTRIBUTES = ("state", "param_groups", "defaults")
# Options that name a group's parameters, or choose between equivalent implementations.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# The key of the class in the options of a parameter; it reads well in a message.
_CLASS = "the class of the optimizer"


def names_by_id(model: nn.Module) -> dict[int, str]:
    return {id(param): name for name, param in model.named_parameters()}


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_known(optimizer: Optimizer) -> bool:
    """Whether its class is torch's or of this library."""
    return f"{type(optimizer).__module__}.".startswith(("torch.optim.", "decent_dp.optim."))


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
    names = names_by_id(model)
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
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        what = f"the class {kind}" if isinstance(optimizer, type) else f"a {kind}"
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list of them, got {what}: pass the object whose step() trains "
            "the model, gossip(model, optimizer), not its class, parameters or scheduler, nor a function that makes it."
        )
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


def signature_of(optimizers: Sequence[Optimizer], model: nn.Module) -> list[Any]:
    """Returns the properties of the optimizers that must be equal on all workers, as JSON short enough for a message."""
    names = names_by_id(model)
    members = [[names[id(param)] for param in params_of(optimizer)] for optimizer in optimizers]
    return [f"{type(optimizer).__name__} of {_brief(own)}" for optimizer, own in zip(optimizers, members, strict=True)]


def _brief(names: Sequence[str]) -> str:
    """Returns all names, or some and a digest in which any difference shows."""
    if len(names) <= _NAMED:
        return ", ".join(names)
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]
    return f"{len(names)} parameters, {', '.join(names[: _NAMED // 2])}, ..., {names[-1]} ({digest})"


# -- state that no save contains ------------------------------------------------------------------------------------------


def refuse_hidden_state(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Checks that optimizers that have stepped, and whose state goes into a save, keep all of it in ``state``. Those that
    define their own ``state_dict`` may keep it elsewhere.

    Raises:
        ValueError: the state of a parameter is in another attribute; names the parameter and the attribute.
    """
    named, names = dict(model.named_parameters()), names_by_id(model)
    # Saved already, or parameters and gradients, perhaps detached.
    kept = {id(leaf) for one in optimizers for leaf in _tensors_in(dict(one.state))}
    places = {_place(tensor) for param in named.values() for tensor in (param, param.grad) if tensor is not None}
    for optimizer in optimizers:
        if type(optimizer).state_dict is not Optimizer.state_dict or optimizer._optimizer_state_dict_post_hooks:
            continue
        params = {names[id(param)]: param for param in params_of(optimizer) if id(param) in names}
        has_state = any(optimizer.state.get(param) for param in params.values())
        own = [key for key in vars(optimizer) if key not in _BASE_ATTRIBUTES and not key.startswith("_optimizer_")]
        owners = {id(leaf): name for key in own for name, leaf in _by_parameter(vars(optimizer)[key], params)}
        for where, leaf in [(key, leaf) for key in own for leaf in _leaves_of(vars(optimizer)[key])]:
            found, inner = None, ""
            if isinstance(leaf, Optimizer):
                inner = f" ({type(leaf).__name__})"
                hidden = [param for param in leaf.state if any(id(one) not in kept for one in _tensors_in(leaf.state[param]))]
                found = next((names[id(param)] for param in hidden if id(param) in names), None)
            elif isinstance(leaf, Tensor) and id(leaf) not in kept and _place(leaf) not in places:
                found = owners.get(id(leaf)) or (None if has_state else _guess_owner(leaf, params))
            if found is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} has stepped parameter '{found}' and keeps the state of it in its attribute "
                    f"{where}{inner}, where no save finds it: a run would resume without it. Of optimizers in another, pass "
                    "the real ones, gossip(model, [muon, adamw]). Otherwise keep it in self.state[param], or, with "
                    "gossip(), override state_dict() and load_state_dict()."
                )


def _leaves_of(value: Any) -> list[Any]:
    try:
        return tree_leaves(value)
    except RecursionError:  # a container that holds itself is no state
        return []


def _tensors_in(state: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves_of(state) if isinstance(leaf, Tensor)]


def _by_parameter(value: Any, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a dict whose keys are parameters, their ids or names, if they have the shape of theirs."""
    keys = {key: name for name, param in params.items() for key in (name, id(param))}
    for key, member in value.items() if isinstance(value, Mapping) else ():
        name = keys.get(id(key) if isinstance(key, Tensor) else key)
        if name is not None:
            yield from ((name, tensor) for tensor in _tensors_in(member) if tensor.shape == params[name].shape)


def _guess_owner(tensor: Tensor, params: Mapping[str, Tensor]) -> str | None:
    """Guesses from its shape to which parameter a tensor belongs; the first one if it is as large as all together."""
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


# -- options, which most workers have in common ----------------------------------------------------------------------------


def options_of(
    optimizers: Sequence[Optimizer], model: nn.Module, schedulers: Sequence[LRScheduler | None] = ()
) -> dict[str, dict[str, Any]]:
    """The present options of all parameters, and the classes of ``schedulers`` (one per optimizer), as JSON by the parameters'
    names in registration order: it does not depend on their order and grouping.
    """
    of_param: dict[int, dict[str, Any]] = {}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        # Classes come first, because different classes have different options.
        kinds = {_CLASS: kind}
        if i < len(schedulers):
            kinds["the class of the scheduler"] = type(schedulers[i]).__name__
        for group in optimizer.param_groups:
            compared = _compared(optimizer, group)
            options = kinds | {f"{option} of {kind}": _plain(value) for option, value in compared.items()}
            of_param.update((id(param), options) for param in group["params"])
    return {name: of_param[id(param)] for name, param in model.named_parameters() if id(param) in of_param}


def first_difference(
    theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]], *, rates: bool = False
) -> Difference | None:
    """The first option that both workers have, with different values; None if there is none. ``rates``: of learning rates,
    which may differ; else of the others, which must be equal.
    """
    found: dict[tuple[str, str], Difference] = {}
    for name in {**theirs, **ours}:
        # A parameter without an optimizer has no class.
        one, other = theirs.get(name, {_CLASS: None}), ours.get(name, {_CLASS: None})
        both = [key for key in one if key in other and (f"_{key.partition(' ')[0]}".endswith("_lr")) is rates]
        key = next((key for key in both if one[key] != other[key]), None)
        if key is not None:
            values = one[key], other[key]
            found.setdefault((key, json.dumps(values)), Difference(key, *values, [])).names.append(name)
    return next(iter(found.values()), None)


class Difference(NamedTuple):
    """An option, its values on two workers, and the parameters with these values."""

    option: str
    theirs: Any
    ours: Any
    names: list[str]

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.option} for '{self.names[0]}'{more}"


def _compared(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _NOT_COMPARED}
    if optimizer.state and not _is_known(optimizer):
        # Some optimizers tune their options while they train. Options that differ from their defaults may be such.
        options = {key: value for key, value in options.items() if _plain(value) == _plain(optimizer.defaults.get(key))}
    return options


def _plain(value: Any) -> Any:
    """Returns numbers, strings, None and sequences of them unchanged, and the type's name for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return "nan" if math.isnan(value) else float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return type(value).__name__


def warn_user(text: str) -> None:
    """Gives a warning that points to the first line outside torch and this library."""
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "decent_dp"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


# -- saved states, whose values may be of another kind: they would load, and break the training later ------------------------


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
    elif isinstance(own, Tensor) and own.dim():
        fits = isinstance(saved, (Tensor, Mapping))  # a mapping: this worker's part of a DTensor
    elif _is_number(own):
        fits = _is_number(saved)
    else:
        fits = not isinstance(own, (str, bytes)) or isinstance(saved, type(own))
    if not fits:
        raise ValueError(f"{what} was saved as {_seen(saved)}, and is {_seen(own)} here")


def check_states(optimizer: Optimizer, names: Sequence[str], saved: Mapping[str, Any]) -> None:
    """Checks saved states (``saved_optimizer``) against those that the optimizer has, or, if it has made no step, would make.

    The states of torch's optimizers and ours are numbers, and tensors of the parameter's shape, possibly reduced to 1 along
    some dimensions. Those of other optimizers may have any shape.

    Raises:
        ValueError: a state is of another kind or shape; names the parameter and the key.
    """
    kind, rest = type(optimizer).__name__, iter(names)
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        examples: dict[int, Mapping[str, Any]] = {}  # by dimensions: each costs a step of a new optimizer
        for param in group["params"]:
            name = next(rest)
            what, state = f"the state of parameter '{name}'", saved["state"].get(name, {})
            if param.dim() not in examples:
                examples[param.dim()] = _example(optimizer, group, param)
            example = examples[param.dim()] if param.is_floating_point() else {}
            own = {**example, **optimizer.state.get(param, {})}
            check_alike(
                what, state, {key: value for key, value in own.items() if isinstance(value, Tensor) or _is_number(value)}
            )
            if not state:
                continue
            # What is not in the example the optimizer makes later, or on some options only.
            if missing := [key for key in example if key not in state]:
                raise ValueError(f"{what} has no '{missing[0]}', which {kind} needs{_switched(options, group)}")
            for key, value in state.items() if example else ():
                if isinstance(value, Tensor) and not _may_be_state_of(value, param):
                    raise ValueError(
                        f"{what}['{key}'] was saved as {_seen(value)}, and should be {tuple(param.shape)} for {kind}: it is "
                        "the state of another parameter or optimizer"
                    )


def _may_be_state_of(value: Tensor, param: Tensor) -> bool:
    shapes = zip(value.shape, param.shape, strict=False)
    return value.numel() == 1 or (value.dim() == param.dim() and all(a in (1, b) for a, b in shapes))


def _switched(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """The options that are on in one group and off in the other."""
    for key, ours in own.items():
        theirs = saved.get(key)
        if all(isinstance(value, (bool, int, float)) for value in (theirs, ours)) and bool(theirs) != bool(ours):
            return f": it was saved with {key}={theirs}, and has {key}={ours} here. Make the optimizer with {key}={theirs}"
    return ""


def _example(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> Mapping[str, Any]:
    """The state that one step of a new optimizer makes for such a parameter; of torch's optimizers and ours, else empty."""
    kind = type(optimizer)
    if not _is_known(optimizer) or kind.__name__ in ("LBFGS", "SparseAdam"):
        return {}
    names = set(inspect.signature(kind).parameters)
    # On the CPU and for one number: torch's fused and captured kinds need a GPU.
    options = {k: v for k, v in group.items() if k in names and k not in ("params", "fused", "capturable", "foreach")}
    with torch.enable_grad():
        small = nn.Parameter(torch.zeros([1] * param.dim(), dtype=torch.float32, device="cpu"))
        small.grad = torch.ones_like(small)
        try:
            example = kind([small], **options)
            example.step()
        except Exception:  # an option that only goes with a GPU, say
            return {}
    made: Mapping[str, Any] = example.state[small]
    # Entries that are None after a step, and those that only some steps make, may be missing.
    return {key: value for key, value in made.items() if value is not None}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, (np.generic, np.ndarray)):
        return value.size == 1 and value.dtype.kind in "iuf"
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _seen(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
        return f"a {type(value).__name__}"
    return repr(value)[:80]
