"""Guards against mistakes with optimizers: which ones are given, what they keep, and how they differ between workers."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import numbers
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "Options",
    "check_alike",
    "check_optimizers",
    "check_states",
    "first_difference",
    "options_of",
    "params_of",
    "refuse_hidden_state",
    "signature_of",
    "warn_of_rates",
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
# A warning lists the ranks of at most this many workers with one rate.
_RANKS = 8


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
    names = {id(param): name for name, param in model.named_parameters()}
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
    names = {id(param): name for name, param in model.named_parameters()}
    # Dicts have parameters, their ids or their names as keys.
    owners: dict[Any, str] = {**names, **{name: name for name in names.values()}}
    for optimizer in optimizers:
        if type(optimizer).state_dict is not Optimizer.state_dict or optimizer._optimizer_state_dict_post_hooks:
            continue
        own = [key for key in vars(optimizer) if key not in _BASE_ATTRIBUTES and not key.startswith("_optimizer_")]
        seen: set[int] = set()
        found = [leaf for key in own for leaf in _leaves(vars(optimizer)[key], key, None, owners, seen)]
        if not found:
            continue
        kept = {id(tensor) for one in optimizers for _, tensor, _ in _leaves(one.state, "", None, owners, set())}
        places = {_place(tensor) for param in model.parameters() for tensor in (param, param.grad) if tensor is not None}
        without = {names[id(param)]: param for param in params_of(optimizer) if not optimizer.state.get(param)}
        shapes = {name: param.shape for name, param in model.named_parameters()}
        for where, leaf, owner in found:
            name = None
            if isinstance(leaf, Optimizer):
                inner = _leaves(leaf.state, "", None, owners, set())
                name = next((of for _, tensor, of in inner if of is not None and id(tensor) not in kept), None)
            elif id(leaf) in kept or _place(leaf) in places:  # saved already, or a parameter or gradient (perhaps detached)
                continue
            elif owner is not None:
                name = owner if leaf.numel() > 1 and (owner in without or leaf.shape == shapes.get(owner)) else None
            elif len(without) == len(params_of(optimizer)):
                name = _guess_owner(leaf, without)
            if name is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} has stepped parameter '{name}' and keeps the state of it in its attribute "
                    f"{where}, where no save finds it: a run would resume without it. Of real optimizers inside another, pass "
                    "the real ones, gossip(model, [muon, adamw]). Otherwise keep it in self.state[param], or, with gossip(), "
                    "override state_dict() and load_state_dict()."
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


# -- options, which most workers have in common ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The options of some optimizers as JSON, by parameter name in registration order.

    Attributes:
        alike: classes and options, which must be equal on all workers.
        rates: learning rates, which may differ.
    """

    alike: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[str, dict[str, Any]] = field(default_factory=dict)


def options_of(optimizers: Sequence[Optimizer], model: nn.Module, schedulers: Sequence[LRScheduler | None] = ()) -> Options:
    """Returns the present options of all parameters, and the classes of ``schedulers`` (one per optimizer).

    The result does not depend on the order and the grouping of parameters.
    """
    of_param: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        # Classes come first, because different classes have different options.
        kinds = {_CLASS: kind}
        if i < len(schedulers):
            kinds["the class of the scheduler"] = type(schedulers[i]).__name__
        for group in optimizer.param_groups:
            alike, rates = dict[str, Any](kinds), dict[str, Any]()
            for option, value in _compared(optimizer, group).items():
                (rates if option == "lr" or option.endswith("_lr") else alike)[f"{option} of {kind}"] = _plain(value)
            of_param.update((id(param), (alike, rates)) for param in group["params"])
    named = [(name, of_param[id(param)]) for name, param in model.named_parameters() if id(param) in of_param]
    return Options({name: alike for name, (alike, _) in named}, {name: rates for name, (_, rates) in named})


def first_difference(theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]) -> Difference | None:
    """Returns the first option that both workers have, with different values; None if there is none."""
    found: dict[tuple[str, str], Difference] = {}
    for name in {**theirs, **ours}:
        # A parameter without an optimizer has no class.
        one, other = theirs.get(name, {_CLASS: None}), ours.get(name, {_CLASS: None})
        key = next((key for key in one if key in other and one[key] != other[key]), None)
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


def warn_of_rates(rates: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Warns of a rate that differs between workers; the warning is the same on all of them.

    Args:
        rates: by rank.
    """
    differing = next(filter(None, (first_difference(rates[0], own) for own in rates)), None)
    if differing is None:
        return
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(rates):
        found = own.get(differing.names[0], {})
        if differing.option in found:  # an option that a tuner may have changed is omitted on its worker
            ranks.setdefault(json.dumps(found[differing.option]), []).append(rank)
    values = "; ".join(f"{value} on {_workers(those)}" for value, those in ranks.items())
    warn_user(
        f"the workers train with different rates: {differing} is {values}. Pass the same on every worker, unless that is what "
        "you want."
    )


def _compared(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _NOT_COMPARED}
    if optimizer.state and not _is_known(optimizer):
        # Some optimizers tune their options while they train. Options that differ from their defaults may be such.
        options = {key: value for key, value in options.items() if _plain(value) == _plain(optimizer.defaults.get(key))}
    return options


def _workers(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_RANKS]))}{more}"


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
    """Checks parameters' states against those that the optimizer has, or, if it has made no step, would make.

    The states of torch's optimizers and ours are numbers, and tensors of the parameter's shape, possibly reduced to 1 along
    some dimensions. Those of other optimizers may have any shape.

    Args:
        names: of its parameters, in its order.
        saved: as ``saved_optimizer`` returns it, for the same groups.

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
            check_alike(what, state, {**example, **optimizer.state.get(param, {})})
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
