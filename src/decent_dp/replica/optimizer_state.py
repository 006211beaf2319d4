"""The state of optimizers and schedulers by parameter name: for checkpoints, other numbers of workers, and joiners.

Of one optimizer (``saved_optimizer``):

    kind    its class; ``groups``: the options of each parameter group, with names under 'params'
    state   {parameter name: the state of that parameter}; ``other``: the state that belongs to no parameter
    more    further entries of its state dict

Of the wrapper, which has one optimizer per bucket, so that it fits any buckets (``collect_optim_state``):

    state          {parameter name: the state of that parameter}
    param_groups   {parameter name: the options of its group (lr, betas, …)}
    groups         the options of the first group, the second, …, for groups that have no parameter in some bucket
    schedulers     the entries that all schedulers share, and those by parameter group: ``by_name`` as ``param_groups``,
                   ``by_group`` as ``groups``; None without a scheduler
    scaler         the GradScaler's state, or None
    round          the next round: the number of rounds so far, including those before a restart
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from decent_dp.replica.optimizer_guards import check_alike, check_states, params_of
from decent_dp.replica.shards import is_sharded, local, placed

__all__ = [
    "check_optim_state",
    "collect_optim_state",
    "kind_of",
    "load_optim_state",
    "load_optimizer",
    "refuse_other_kind",
    "saved_optimizer",
]

# The key of a DTensor's local part in a saved state.
_PART = "part of a DTensor"
# Attributes of schedulers that are lists with one entry per parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")

# -- one optimizer -----------------------------------------------------------------------------------------------------------


def _names_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    params = params_of(optimizer)
    for number, param in enumerate(params):
        if id(param) not in names:
            raise ValueError(
                f"parameter {number} of {type(optimizer).__name__}, of shape {tuple(param.shape)}, is not one of the model's "
                "any more, or was never (add_param_group after gossip()?): its state cannot be kept by name."
            )
    return [names[id(param)] for param in params]


def saved_optimizer(optimizer: Optimizer, names_by_id: Mapping[int, str]) -> dict[str, Any]:
    """Returns ``optimizer.state_dict()`` with parameter names instead of numbers; the tensors are live.

    Raises:
        ValueError: the state dict lacks torch's keys, or a parameter has no name.
    """
    kind, params, names = type(optimizer).__name__, params_of(optimizer), _names_of(optimizer, names_by_id)
    own = set(map(id, params))
    for key in [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in own]:
        if optimizer.state[key]:
            raise ValueError(_nameless(kind, "a tensor"))
        del optimizer.state[key]  # it was only looked up
    state_dict = optimizer.state_dict()
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"{kind}.state_dict() has {sorted(map(str, state_dict))}, and must have 'state' and 'param_groups', as torch's "
            "optimizers do, to be saved by parameter name."
        )
    state: Mapping[Any, Any] = state_dict["state"]
    return {
        "kind": kind,
        "state": {names[key]: _parts(value, params[key], names[key]) for key, value in state.items() if type(key) is int},
        "other": {key: value for key, value in state.items() if type(key) is not int},
        "groups": [{**group, "params": [names[i] for i in group["params"]]} for group in state_dict["param_groups"]],
        "more": {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
    }


def _nameless(kind: str, what: str) -> str:
    return (
        f"{kind} keeps {what}, which belongs to no parameter of its bucket, and its state is saved by parameter name: keep it "
        "in param_groups (each group's options are saved), or in the state of a parameter."
    )


def load_optimizer(
    optimizer: Optimizer,
    names_by_id: Mapping[int, str],
    saved: Mapping[str, Any],
    undo: contextlib.ExitStack | None,
    *,
    exact: bool = True,
) -> None:
    """Loads the result of ``saved_optimizer``; ``undo`` reverts it, bit for bit.

    Args:
        exact: tensors keep the dtypes in which they were saved; else they get those of their parameters, as in torch.

    Raises:
        ValueError: it was saved from another optimizer; names the difference.
    """
    kind, params, names = type(optimizer).__name__, params_of(optimizer), _names_of(optimizer, names_by_id)
    if not isinstance(saved, Mapping) or not all(
        isinstance(saved.get(key), of) for key, of in {"state": dict, "other": dict, "groups": list, "more": dict}.items()
    ):
        raise ValueError(f"the state of {kind} is not as it was saved: an entry is missing, or of another type")
    refuse_other_kind("optimizer", saved["kind"], kind)
    numbers = {name: number for number, name in enumerate(names)}
    _compare_groups(kind, saved["groups"], _by_group(optimizer, names))
    for number, (theirs, ours) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
        check_alike(f"parameter group {number} of {kind}", theirs, {k: v for k, v in ours.items() if k != "params"})
        if "lr" in ours and "lr" not in theirs:
            raise ValueError(f"parameter group {number} of {kind} was saved without 'lr'")
    check_states(optimizer, names, saved)
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["groups"]]
    state = {numbers[name]: _whole(value, params[numbers[name]]) for name, value in saved["state"].items()}

    def load(state_dict: dict[str, Any], exact: bool = True) -> None:
        optimizer.load_state_dict(copy.deepcopy(state_dict))
        with torch.inference_mode(False), torch.no_grad():
            for number, param in enumerate(params):
                if param in optimizer.state:
                    loaded = optimizer.state[param]
                    optimizer.state[param] = _exact(loaded, state_dict["state"].get(number) if exact else loaded, param)

    if undo is not None:
        undo.callback(load, copy.deepcopy(optimizer.state_dict()))
    try:
        load({**saved["more"], "state": {**state, **saved["other"]}, "param_groups": groups}, exact)
    except Exception as error:
        raise ValueError(
            f"{kind}.load_state_dict does not take what {kind}.state_dict returned when this was saved "
            f"({type(error).__name__}: {error}): use the version that saved it"
        ) from error


def _by_group(optimizer: Optimizer, names: Sequence[str]) -> list[list[str]]:
    rest = iter(names)
    return [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]


def _parts(state: Any, param: Any, name: str) -> Any:
    """A parameter's state, with local parts in place of DTensors, which have to be placed as the parameter."""
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


def _compare_groups(kind: str, saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]]) -> None:
    same = "Make the same groups, with the same parameters in the same order."
    if len(saved) != len(own):
        raise ValueError(f"{kind} had {len(saved)} parameter groups when this was saved, and has {len(own)} now. {same}")
    for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        for place, (before, now) in enumerate(zip_longest(theirs["params"], ours)):
            if before != now:
                was, is_ = (f"'{name}'" if name is not None else "none" for name in (before, now))
                raise ValueError(
                    f"{kind} had other parameters, or in another order, when this was saved: parameter {place} of group "
                    f"{number} was {was}, and is {is_} now. {same}"
                )


def _exact(loaded: Any, saved: Any, param: Tensor) -> Any:
    """Returns ``loaded`` with copies of the saved tensors, which torch casts, and of strings and deques, which it damages."""
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


def refuse_other_kind(what: str, saved: object, own: object) -> None:
    """Raises ValueError if the classes of optimizers or schedulers (``what``) are not those of the save."""
    if saved != own:
        raise ValueError(
            f"the {what} was {saved} when this was saved, and is {own} now: their states do not fit each other. Go on with the "
            "same one, or load the parameters alone (load_state_dict)."
        )


def kind_of(objects: Sequence[Any]) -> str | None:
    """Returns the classes of some optimizers or schedulers; None if there are none."""
    return ", ".join(sorted({type(one).__name__ for one in objects if one is not None})) or None


# -- the optimizers and schedulers of buckets ------------------------------------------------------------------------------


def collect_optim_state(
    optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler | None], names: Mapping[int, str]
) -> dict[str, Any]:
    """Returns the state of all buckets' optimizers and schedulers, without ``scaler`` and ``round``. ``names``: by id.

    Raises:
        ValueError: an optimizer or a scheduler has state that belongs to no parameter; names it.
    """
    found = [saved_optimizer(optimizer, names) for optimizer in optimizers]
    for own in found:
        kept = [key for key, value in own["other"].items() if value or not isinstance(value, Mapping)] + list(own["more"])
        if kept:
            raise ValueError(_nameless(own["kind"], repr(kept[0])))
    groups = [(own, group) for own in found for group in own["groups"]]
    examples = _examples(optimizers)
    return {
        "state": {name: state for own in found for name, state in own["state"].items()},
        "param_groups": {name: _options(group) for _, group in groups for name in group["params"]},
        "groups": [_options(found[number]["groups"][i]) for i, number in enumerate(examples)],
        "schedulers": _collect_schedulers(schedulers, found, examples),
    }


def _collect_schedulers(
    schedulers: Sequence[LRScheduler | None], found: Sequence[Mapping[str, Any]], examples: Sequence[int]
) -> dict[str, Any] | None:
    collected: dict[str, Any] | None = None
    for number, (scheduler, own) in enumerate(zip(schedulers, found, strict=True)):
        if scheduler is None:
            continue
        common, by_group = _split(scheduler.state_dict())
        collected = collected or {**common, "by_name": {}, "by_group": [{} for _ in examples]}
        for key, value in common.items():
            if isinstance(value, list) and value != collected[key]:
                raise ValueError(
                    f"{type(scheduler).__name__} keeps '{key}' by parameter group, and how to save that by name is not "
                    "known: save model.lr_schedulers' own state dicts, and load them with the same buckets."
                )
        for group, entries in zip(own["groups"], by_group, strict=False):
            collected["by_name"] |= dict.fromkeys(group["params"], entries)
        for i, entries in enumerate(by_group):
            if examples[i] == number:
                collected["by_group"][i] = entries
    return collected


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _examples(optimizers: Sequence[Optimizer]) -> list[int]:
    """For every i, the number of the first optimizer with parameters in its i-th group, or else of the first that has one."""
    found = []
    for i in range(max((len(optimizer.param_groups) for optimizer in optimizers), default=0)):
        candidates = [n for n, optimizer in enumerate(optimizers) if len(optimizer.param_groups) > i]
        found.append(next((n for n in candidates if optimizers[n].param_groups[i]["params"]), candidates[0]))
    return found


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
    for name in known.keys() - set(names):
        raise ValueError(f"the optimizer state holds '{name}', which is no trainable parameter of this model")


def load_optim_state(
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[LRScheduler | None],
    names: Mapping[int, str],
    state_dict: dict[str, Any],
    undo: contextlib.ExitStack | None = None,
    *,
    exact: bool = False,
) -> None:
    """Loads a checked dict into the buckets' optimizers and schedulers. ``undo`` reverts what is loaded into the optimizers.

    Raises:
        ValueError: a state is of another kind than the optimizer needs; names the parameter.
    """
    if not state_dict["param_groups"]:
        return
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        own = _names_of(optimizer, names)
        members, groups = _by_group(optimizer, own), []
        for i, (group, those) in enumerate(zip(optimizer.param_groups, members, strict=True)):
            options = _of_group(those, i, state_dict["param_groups"], state_dict.get("groups", []))
            for name in those[1:]:  # the first one's are loaded
                check_alike(f"parameter group {i} of {type(optimizer).__name__}", state_dict["param_groups"][name], group)
            groups.append({**group, **options, "params": those})
        state = {name: state_dict["state"][name] for name in own if name in state_dict["state"]}
        saved = {"kind": type(optimizer).__name__, "groups": groups, "state": state, "other": {}, "more": {}}
        load_optimizer(optimizer, names, saved, undo, exact=exact)
        # Each scheduler gets a copy, because some later write to their loaded state.
        common = copy.deepcopy(state_dict.get("schedulers"))
        if scheduler is not None and common is not None:
            by_name, examples = common.pop("by_name"), common.pop("by_group", [])
            _, by_group = _split(scheduler.state_dict())
            for i, (entries, those) in enumerate(zip(by_group, members, strict=False)):
                entries.update(_of_group(those, i, by_name, examples))
            joined = _join(common, by_group)
            check_alike(f"the state of {type(scheduler).__name__}", joined, scheduler.state_dict())
            scheduler.load_state_dict(joined)


def _of_group(
    members: Sequence[str], number: int, by_name: Mapping[str, dict[str, Any]], examples: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the saved options of a group; for one without members, those of another bucket's group ``number``, if any."""
    if members:
        return by_name[members[0]]
    return examples[number] if number < len(examples) else {}


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
