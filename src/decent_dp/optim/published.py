"""Optimizer states that decent_dp 0.2 has saved, for the optimizers of the factories.

Its factories made two groups: parameters without 'bn' and 'bias' in their names, and those with. The weight decay was on the
second. torch loads groups by position, so such a state would take the decay off the weights and put it on the biases. It has no
names, but in a bucket with the same parameters their order follows from the names.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["load_by_name"]

_log = logging.getLogger(__name__)


@functools.cache
def _warn_once_of_decay() -> None:
    _log.warning(
        "an optimizer state of decent_dp 0.2 was loaded, whose weight decay is on biases and norms and not on weights. The "
        "moments were loaded by name; weight decay stays as this optimizer was made: on weights only."
    )


def load_by_name(names: Sequence[str], optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict of decent_dp 0.2 with this optimizer's groups and its weight decay; any other as it is.

    A hook before ``load_state_dict``.

    Args:
        names: of the parameters, in the order in which the factory was given them.

    Raises:
        ValueError: it was saved from other parameters.
    """
    old = given["param_groups"]
    if not _is_published(old):
        return given
    parts: tuple[list[str], list[str]] = ([], [])
    for name in names:
        parts["bn" in name or "bias" in name].append(name)
    sizes, own_sizes = [len(group["params"]) for group in old], [len(part) for part in parts]
    if sizes != own_sizes:
        raise ValueError(
            f"this state dict has no names and groups of {sizes} parameters; one of decent_dp 0.2 for the parameters of this "
            f"optimizer has groups of {own_sizes}. It belongs to another bucket or optimizer: start with a fresh state."
        )
    places = {
        name: (key, group)
        for part, group in zip(parts, old, strict=True)
        for name, key in zip(part, group["params"], strict=True)
    }
    numbers, groups, state = itertools.count(), [], {}
    for group in optimizer.param_groups:
        own_names: list[str] = group["param_names"]
        options = _common_options([places[name][1] for name in own_names])
        if any(places[name][1]["weight_decay"] != group["weight_decay"] for name in own_names):
            _warn_once_of_decay()
        members = [next(numbers) for _ in own_names]
        kept = {"weight_decay": group["weight_decay"], "params": members, "param_names": own_names}
        groups.append({**group, **options, **kept})
        for number, name, param in zip(members, own_names, group["params"], strict=True):
            key = places[name][0]
            if key in given["state"]:
                state[number] = _fitting(given["state"][key], name, param)
    return {**given, "state": state, "param_groups": groups}


def _is_published(groups: Any) -> bool:
    """Whether groups look as those of 0.2: two, the first without decay, and no names (which the factories' have today)."""
    return len(groups) == 2 and groups[0].get("weight_decay") == 0 and not any("param_names" in group for group in groups)


def _common_options(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The options of these groups, without the decay."""
    first, *others = ({k: v for k, v in group.items() if k not in ("params", "weight_decay")} for group in groups)
    for other in others:
        key = next((key for key in first if repr(first[key]) != repr(other.get(key))), None)
        if key is not None:
            raise ValueError(
                f"the groups of this state dict of decent_dp 0.2 differ in {key} ({first[key]!r} and {other.get(key)!r}), and "
                "parameters of both are in one group now: start with a fresh state."
            )
    return first


def _fitting(state: dict[str, Any], name: str, param: Tensor) -> dict[str, Any]:
    """Returns ``state``, which must have the shapes of ``param``."""
    for key, value in state.items():
        if key != "step" and isinstance(value, Tensor) and value.shape != param.shape:
            raise ValueError(
                f"{key} of '{name}' in this state dict of decent_dp 0.2 has shape {tuple(value.shape)}, but the parameter has "
                f"{tuple(param.shape)}: it belongs to another bucket. Start with a fresh state."
            )
    return state
