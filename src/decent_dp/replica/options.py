"""Comparison of the optimizers' options between workers: most must be equal, and different rates cause a warning."""

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

from decent_dp.replica.registry import user_stacklevel

__all__ = ["Difference", "Options", "first_difference", "options_of", "warn_of_rates"]

# Options that name a group's parameters, or choose between equivalent implementations.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_CLASS = "the class of the optimizer"
# A warning lists the ranks of at most this many workers with one rate.
_RANKS = 8


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
                (rates if _is_rate(option) else alike)[f"{option} of {kind}"] = _plain(value)
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
    warnings.warn(
        f"the workers train with different rates: {differing} is {values}. Pass the same on every worker, unless that is what "
        "you want.",
        stacklevel=user_stacklevel(),
    )


def _compared(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _NOT_COMPARED}
    if optimizer.state and not type(optimizer).__module__.startswith(("torch.optim.", "decent_dp.")):
        # Some optimizers tune their options while they train. Options that differ from their defaults may be such.
        options = {key: value for key, value in options.items() if _plain(value) == _plain(optimizer.defaults.get(key))}
    return options


def _is_rate(option: str) -> bool:
    return option == "lr" or option.endswith("_lr")


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
