"""The optimizers' options, by parameter: what all workers must have alike, and rates, of which they are warned."""

from __future__ import annotations

import json
import math
import numbers
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.replica.living import users_level
from decent_dp.replica.optimizers import brief

__all__ = ["Options", "options_of", "warn_of_rates"]

# These say which parameters a group has, or how it computes what it would compute without them.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
# Of so many workers with one rate a warning has the ranks.
_RANKS = 8


@dataclass(frozen=True)
class Options:
    """Of some optimizers, as JSON can hold it, by what it is and of which parameters.

    Attributes:
        alike: classes, groups and options.
        rates: learning rates, which some want to differ.
    """

    alike: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)


def options_of(optimizers: Sequence[Optimizer], model: nn.Module, schedulers: Sequence[LRScheduler | None] = ()) -> Options:
    """The options of all parameter groups, as they are now; of ``schedulers``, one for each optimizer, the class."""
    names = {id(param): name for name, param in model.named_parameters()}
    kinds: dict[str, str] = {}
    found = Options()
    for i, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        groups = [(group, [names[id(param)] for param in group["params"]]) for group in optimizer.param_groups]
        groups = [(group, members) for group, members in groups if members]
        of_all = _of([name for _, members in groups for name in members])
        kinds[f"the class of the optimizer {of_all}"] = kind
        if i < len(schedulers):
            kinds[f"the class of the scheduler {of_all}"] = type(schedulers[i]).__name__
        found.alike[f"what is in each group of {kind} {of_all}"] = [brief(members) for _, members in groups]
        for group, members in groups:
            for option, value in _compared(optimizer, group).items():
                (found.rates if _is_rate(option) else found.alike)[f"{option} of {kind} {_of(members)}"] = _plain(value)
    # Classes first: where they differ, so does most of the rest.
    return Options({**kinds, **found.alike}, found.rates)


def warn_of_rates(rates: Sequence[Mapping[str, Any]]) -> None:
    """Warns, on every worker alike, of a rate that differs between them.

    Args:
        rates: by rank.
    """
    shared = [key for key in rates[0] if all(key in own for own in rates)]
    differing = [key for key in shared if any(own[key] != rates[0][key] for own in rates)]
    if not differing:
        return
    ranks: dict[Any, list[int]] = {}
    for rank, own in enumerate(rates):
        ranks.setdefault(json.dumps(own[differing[0]]), []).append(rank)
    values = "; ".join(f"{value} on {_workers(those)}" for value, those in ranks.items())
    more = f" (and {len(differing) - 1} more rates)" if len(differing) > 1 else ""
    warnings.warn(
        f"the workers train with different rates: {differing[0]}{more} is {values}. Pass the same on every worker, unless that "
        "is what you want.",
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


def _of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"for '{names[0]}'{more}" if names else "for no parameter"


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
