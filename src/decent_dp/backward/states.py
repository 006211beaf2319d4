"""Optimizer state by parameter name, so that it can be loaded into any buckets.

The dict has these entries:

    state          {parameter name: the optimizer's state of that parameter}
    param_groups   {parameter name: the options of its group (lr, betas, …)}
    groups         the options of the first group, the second, …, for groups that have no parameter in some bucket
    schedulers     the entries that all schedulers share, and those by parameter group: ``by_name`` as ``param_groups``,
                   ``by_group`` as ``groups``; None without a scheduler
    scaler         the GradScaler's state, or None
    round          the next round: the number of rounds so far, including those before a restart
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from decent_dp.backward.units import Unit
from decent_dp.replica.optimizer_state import (
    check_alike,
    check_param_states,
    has_own_state_dict,
    is_known,
    load_by_number,
    params_of,
    refuse_other_kind,
)

__all__ = ["check_kinds", "check_optim_state", "collect_optim_state", "kind_of", "load_optim_state"]

# Attributes of schedulers that are lists with one entry per parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")


def collect_optim_state(
    units: Sequence[Unit], scaler: torch.amp.GradScaler | None, round_: int, pending: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the state of all buckets' optimizers and schedulers, by parameter name.

    Args:
        pending: a loaded state that no buckets have taken yet; it is returned in place of theirs.

    Raises:
        ValueError: an optimizer or a scheduler has state that belongs to no parameter; names it.
    """
    common_entries = {"scaler": None if scaler is None else scaler.state_dict(), "round": round_}
    if pending is not None:
        return {**pending, **common_entries}
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    schedulers: dict[str, Any] | None = None
    examples = _examples([unit.optimizer for unit in units])
    for number, unit in enumerate(units):
        names = _names(unit)
        _refuse_nameless(unit.optimizer, names)
        for group in unit.optimizer.param_groups:
            for param in group["params"]:
                name = names[id(param)]
                options[name] = _options(group)
                if param in unit.optimizer.state:
                    state[name] = unit.optimizer.state[param]
        if unit.scheduler is not None:
            common, by_group = _split(unit.scheduler.state_dict())
            schedulers = schedulers or {**common, "by_name": {}, "by_group": [{} for _ in examples]}
            for key, value in common.items():
                if isinstance(value, list) and value != schedulers[key]:
                    raise ValueError(
                        f"{type(unit.scheduler).__name__} keeps '{key}' by parameter group, and how to save that by name "
                        "is not known: save model.lr_schedulers' own state dicts, and load them with the same buckets."
                    )
            for group, own in zip(unit.optimizer.param_groups, by_group, strict=False):
                for param in group["params"]:
                    schedulers["by_name"][names[id(param)]] = own
            for i, own in enumerate(by_group):
                if examples[i] == number:
                    schedulers["by_group"][i] = own
    return {
        "state": state,
        "param_groups": options,
        "groups": [_options(units[number].optimizer.param_groups[i]) for i, number in enumerate(examples)],
        "schedulers": schedulers,
        **common_entries,
    }


def kind_of(objects: Sequence[Any]) -> str | None:
    """Returns the classes of some optimizers or schedulers; None if there are none."""
    return ", ".join(sorted({type(one).__name__ for one in objects})) or None


def check_kinds(units: Sequence[Unit], snapshot: Mapping[str, Any]) -> None:
    """Raises ValueError if the snapshot was saved with other classes of optimizers or schedulers."""
    own = {
        "optimizer": kind_of([unit.optimizer for unit in units]),
        "scheduler": kind_of([unit.scheduler for unit in units if unit.scheduler is not None]),
    }
    for what, kind in own.items():
        refuse_other_kind(what, snapshot[what], kind)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _examples(optimizers: Sequence[Optimizer]) -> list[int]:
    """Returns, for every i, the number of the optimizer whose i-th group represents all i-th groups.

    It is the first one with parameters in that group, or else the first one with that group.
    """
    longest = max((len(optimizer.param_groups) for optimizer in optimizers), default=0)
    found = []
    for i in range(longest):
        candidates = [n for n, optimizer in enumerate(optimizers) if len(optimizer.param_groups) > i]
        found.append(next((n for n in candidates if optimizers[n].param_groups[i]["params"]), candidates[0]))
    return found


def _refuse_nameless(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Raises ValueError if an optimizer has state that belongs to none of these parameters (names by id)."""
    state: Mapping[Any, Any] = optimizer.state
    kept = [key for key, value in state.items() if id(key) not in names and (value or not isinstance(value, Mapping))]
    if has_own_state_dict(optimizer):
        kept += [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]
    if kept:
        what = "a tensor" if isinstance(kept[0], Tensor) else repr(kept[0])
        raise ValueError(
            f"{type(optimizer).__name__} keeps {what}, which belongs to no parameter of its bucket, and its state is saved by "
            "parameter name: keep it in param_groups (each group's options are saved), or in the state of a parameter."
        )


def check_optim_state(state_dict: dict[str, Any], names: Sequence[str]) -> None:
    """Checks that a dict can be loaded into a model with these trainable parameters.

    Raises:
        ValueError: it is no result of ``optim_state_dict``, or one for other parameters; names the first.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "load_optim_state_dict takes what optim_state_dict() returned, a dict with 'state' and 'param_groups' by parameter "
            f"name, got a {type(state_dict).__name__}. The state of one optimizer goes to model.optimizers[i].load_state_dict."
        )
    if isinstance(state_dict["param_groups"], list):
        raise ValueError(
            "this is the state dict of one torch optimizer, by parameter number, and here it is kept by parameter name. An "
            "optimizer state of PyTorch DDP cannot be continued: start with a fresh one."
        )
    round_ = state_dict.get("round", 0)
    if not isinstance(round_, int) or round_ < 0:
        raise ValueError(f"the optimizer state's 'round' must be the number of a round, at least 0, got {round_!r}")
    known, schedulers = state_dict["param_groups"], state_dict.get("schedulers")
    for what, own in {"state": state_dict["state"], "param_groups": known, "schedulers": schedulers or {}}.items():
        if not isinstance(own, dict):
            raise ValueError(f"the optimizer state's '{what}' must be a dict, got {own!r}")
    if schedulers and not (isinstance(schedulers.get("by_name"), dict) and isinstance(schedulers.get("by_group", []), list)):
        raise ValueError("the optimizer state's 'schedulers' is no state of schedulers by parameter name")
    if not known:
        return  # saved before the first update
    for name in names:
        if name not in known:
            raise ValueError(f"the optimizer state holds nothing for parameter '{name}': it was saved from another model")
    own = set(names)
    for name in known:
        if name not in own:
            raise ValueError(f"the optimizer state holds '{name}', which is no trainable parameter of this model")


def load_optim_state(units: Sequence[Unit], state_dict: dict[str, Any], *, exact: bool = False) -> None:
    """Loads a checked dict into the buckets' optimizers and schedulers.

    Args:
        exact: all tensors keep their dtypes (torch's optimizers would cast them to those of their parameters), and the dict is
            not used again. The parameters must have the same shapes and dtypes.

    Raises:
        ValueError: with ``exact``, a tensor does not have the shape that the optimizer needs; names the parameter.
    """
    if not state_dict["param_groups"]:
        return
    for unit in units:
        names, optimizer = _names(unit), unit.optimizer
        if exact:
            members = [names[id(param)] for param in params_of(optimizer)]
            state, groups = state_dict["state"], state_dict["param_groups"]
            check_param_states(optimizer, [(name, state.get(name, {}), groups[name]) for name in members])
            _check_shapes(optimizer, names, state_dict["state"])
        _load_optimizer(optimizer, names, state_dict, exact=exact)
        # Each scheduler gets a copy, because some later write to their loaded state.
        schedulers = copy.deepcopy(state_dict.get("schedulers"))
        if unit.scheduler is not None and schedulers is not None:
            by_name, examples = schedulers.pop("by_name"), schedulers.pop("by_group", [])
            _, by_group = _split(unit.scheduler.state_dict())
            for i, (own, group) in enumerate(zip(by_group, optimizer.param_groups, strict=False)):
                own.update(_of_group(group["params"], i, names, by_name, examples))
            joined = _join(schedulers, by_group)
            check_alike(f"the state of {type(unit.scheduler).__name__}", joined, unit.scheduler.state_dict())
            unit.scheduler.load_state_dict(joined)


def _of_group(
    members: Sequence[Parameter],
    number: int,
    names: Mapping[int, str],
    by_name: Mapping[str, dict[str, Any]],
    examples: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Returns the saved options of a group; for one without members, those of another bucket's group ``number``, if any."""
    if members:
        return by_name[names[id(members[0])]]
    return examples[number] if number < len(examples) else {}


def _load_optimizer(optimizer: Optimizer, names: dict[int, str], state_dict: dict[str, Any], *, exact: bool) -> None:
    groups: list[dict[str, Any]] = []
    number = 0
    for i, group in enumerate(optimizer.param_groups):
        members: list[Parameter] = group["params"]
        saved = _of_group(members, i, names, state_dict["param_groups"], state_dict.get("groups", []))
        for options in [saved, *(state_dict["param_groups"][names[id(param)]] for param in members)]:
            check_alike(f"parameter group {i} of {type(optimizer).__name__}", options, _options(group))
        groups.append({**group, **saved, "params": list(range(number, number + len(members)))})
        number += len(members)
    numbered = enumerate(names[id(param)] for param in params_of(optimizer))
    state = {number: state_dict["state"][name] for number, name in numbered if name in state_dict["state"]}
    load_by_number(optimizer, {"state": state, "param_groups": groups}, state if exact else None)


def _check_shapes(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Checks that saved tensors have the shapes of the optimizer's present ones, if it already has state.

    The state of torch's optimizers and ours is numbers, and tensors of the parameter's shape, possibly reduced to 1 along some
    dimensions. Any other shape is refused for them. The state of other optimizers may have any shape.
    """
    regular = is_known(optimizer)
    for param in params_of(optimizer):
        name = names[id(param)]
        own = dict(_tensors(optimizer.state.get(param, {})))
        for key, tensor in _tensors(saved.get(name, {})):
            like, shape = own.get(key, param), tuple(tensor.shape)
            reduced = len(shape) == like.dim() and all(a in (1, b) for a, b in zip(shape, like.shape, strict=True))
            if (shape != like.shape) if key in own else (regular and tensor.numel() != 1 and not reduced):
                raise ValueError(
                    f"'{key}' in the optimizer state of parameter '{name}' was saved as {shape}, and should be "
                    f"{tuple(like.shape)} for {type(optimizer).__name__}: it is the state of another parameter or optimizer"
                )


def _tensors(value: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a state with their paths."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, (Mapping, list, tuple)):
        for step, member in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(member, f"{key}/{step}" if key else str(step))


def _names(unit: Unit) -> dict[int, str]:
    return {id(param): name for name, param in zip(unit.buffer.names, unit.buffer.params, strict=True)}


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Splits a scheduler's state into the entries common to all buckets, and one dict per parameter group.

    Schedulers of schedulers (SequentialLR, ChainedScheduler) have the states of the inner ones in a list ``_schedulers``. In
    the dicts by group, entries of the i-th have the key ``i/name``.
    """
    common: dict[str, Any] = {}
    by_group: list[dict[str, Any]] = []

    def put(key: str, values: Sequence[Any]) -> None:
        by_group.extend({} for _ in range(len(values) - len(by_group)))
        for own, value in zip(by_group, values, strict=False):
            own[key] = value

    for key, value in state.items():
        if key in _BY_GROUP and isinstance(value, list):
            put(key, value)
        elif key == "_schedulers":
            common[key] = []
            for i, (inner_common, inner) in enumerate(map(_split, value)):
                common[key].append(inner_common)
                for name in inner[0] if inner else ():
                    put(f"{i}/{name}", [own[name] for own in inner])
        else:
            common[key] = value
    return common, by_group


def _join(common: dict[str, Any], by_group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The inverse of ``_split``."""
    state = dict(common)
    if "_schedulers" in state:
        inner = [
            [{k.partition("/")[2]: v for k, v in own.items() if k.partition("/")[0] == str(i)} for own in by_group]
            for i in range(len(state["_schedulers"]))
        ]
        state["_schedulers"] = [_join(s, own) for s, own in zip(state["_schedulers"], inner, strict=True)]
    for key in by_group[0] if by_group else ():
        if key in _BY_GROUP:
            state[key] = [own[key] for own in by_group]
    return state
