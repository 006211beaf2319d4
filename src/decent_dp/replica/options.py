"""The optimizers' options, by parameter: what all workers must have alike, and rates, of which they are warned."""

from __future__ import annotations

import json
import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.replica.living import users_level

__all__ = ["Difference", "Options", "first_difference", "options_of", "warn_of_rates"]

# These say which parameters a group has, or how it computes what it would compute without them.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_CLASS = "the class of the optimizer"
# Of so many workers with one rate a warning has the ranks.
_RANKS = 8


@dataclass(frozen=True)
class Options:
    """Of some optimizers, as JSON can hold it: by parameter name, in registration order, what is set for it.

    Attributes:
        alike: classes and options.
        rates: learning rates, which some want to differ.
    """

    alike: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[str, dict[str, Any]] = field(default_factory=dict)


def options_of(optimizers: Sequence[Optimizer], model: nn.Module, schedulers: Sequence[LRScheduler | None] = ()) -> Options:
    """The options of all parameters, as they are now; of ``schedulers``, one for each optimizer, the class.

    How parameters are ordered and grouped makes no difference.
    """
    of_param: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        # Classes first: where they differ, so does most of the rest.
        kinds = {_CLASS: kind}
        if i < len(schedulers):
            kinds["the class of the scheduler"] = type(schedulers[i]).__name__
        for group in optimizer.param_groups:
            alike, rates = dict[str, Any](kinds), dict[str, Any]()
            for option, value in _compared(optimizer, group).items():
                (rates if _is_rate(option) else alike)[f"{option} of {kind}"] = _plain(value)
            of_param.update((id(param), (alike, rates)) for param in group["params"])
    named = [(name, of_param[id(param)]) for name, param in model.named_parameters() if id(param) in of_param]
    return Options({name: alike for name, (alike, _) in named}, {name: rates for name, (_, rates) in named})


def first_difference(theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]) -> Difference | None:
    """The first option in which two workers' ``alike`` or ``rates`` differ. One that only one of them compares does not."""
    found: dict[tuple[str, str], Difference] = {}
    for name in {**theirs, **ours}:
        # What no optimizer steps there has no class.
        one, other = theirs.get(name, {_CLASS: None}), ours.get(name, {_CLASS: None})
        key = next((key for key in one if key in other and one[key] != other[key]), None)
        if key is not None:
            values = one[key], other[key]
            found.setdefault((key, json.dumps(values)), Difference(key, *values, [])).names.append(name)
    return next(iter(found.values()), None)


class Difference(NamedTuple):
    """An option, its values on two workers, and the parameters for which it has these."""

    option: str
    theirs: Any
    ours: Any
    names: list[str]

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.option} for '{self.names[0]}'{more}"


def warn_of_rates(rates: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Warns, on every worker alike, of a rate that differs between them.

    Args:
        rates: by rank.
    """
    differing = next(filter(None, (first_difference(rates[0], own) for own in rates)), None)
    if differing is None:
        return
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(rates):
        found = own.get(differing.names[0], {})
        if differing.option in found:  # a worker may not compare it
            ranks.setdefault(json.dumps(found[differing.option]), []).append(rank)
    values = "; ".join(f"{value} on {_workers(those)}" for value, those in ranks.items())
    warnings.warn(
        f"the workers train with different rates: {differing} is {values}. Pass the same on every worker, unless that is what "
        "you want.",
        stacklevel=users_level(),
    )


def _compared(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _NOT_COMPARED}
    if optimizer.state and not type(optimizer).__module__.startswith(("torch.optim.", "decent_dp.")):
        # Some tune options as they train, and it has trained: those that have left their defaults may be such.
        options = {key: value for key, value in options.items() if _plain(value) == _plain(optimizer.defaults.get(key))}
    return options


def _is_rate(option: str) -> bool:
    return option == "lr" or option.endswith("_lr")


def _workers(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else ""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_RANKS]))}{more}"


def _plain(value: Any) -> Any:
    """Numbers, strings, None and sequences of them as they are; of anything else the name of its type."""
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
