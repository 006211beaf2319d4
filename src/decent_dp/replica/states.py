"""Optimizer state by parameter name, so that it fits whatever the buckets are when it is loaded.

The dict has these entries:

    state          {parameter name: the optimizer's state of that parameter}
    param_groups   {parameter name: the options of its group (lr, betas, …)}
    schedulers     what all schedulers have in common, and under ``by_name`` what is kept by parameter group; None without one
    scaler         the GradScaler's state, or None
    round          the round that comes next: rounds made so far, also those before an earlier restart
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from decent_dp.replica.engine import Bucket

__all__ = ["check_optim_state", "collect_optim_state", "load_optim_state"]

# What a scheduler keeps as one entry a parameter group.
_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums")


def collect_optim_state(
    buckets: Sequence[Bucket], scaler: torch.amp.GradScaler | None, round_: int, pending: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The state of all buckets' optimizers and schedulers, by parameter name; ``pending`` while that waits for buckets."""
    beside = {"scaler": None if scaler is None else scaler.state_dict(), "round": round_}
    if pending is not None:
        return {**pending, **beside}
    state: dict[str, Any] = {}
    options: dict[str, Any] = {}
    schedulers: dict[str, Any] | None = None
    for bucket in buckets:
        names = _names(bucket)
        for group in bucket.optimizer.param_groups:
            for param in group["params"]:
                name = names[id(param)]
                options[name] = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                if param in bucket.optimizer.state:
                    state[name] = bucket.optimizer.state[param]
        if bucket.scheduler is not None:
            common, by_group = _split(bucket.scheduler.state_dict())
            schedulers = schedulers or {**common, "by_name": {}}
            for key, value in common.items():
                if isinstance(value, list) and value != schedulers[key]:
                    raise ValueError(
                        f"{type(bucket.scheduler).__name__} keeps '{key}' by parameter group, and how to save that by name "
                        "is not known: save model.lr_schedulers' own state dicts, and load them with the same buckets."
                    )
            for group, own in zip(bucket.optimizer.param_groups, by_group, strict=False):
                for param in group["params"]:
                    schedulers["by_name"][names[id(param)]] = own
    return {
        "state": state,
        "param_groups": options,
        "schedulers": schedulers,
        **beside,
    }


def check_optim_state(state_dict: dict[str, Any], names: Sequence[str]) -> None:
    """Looks whether a dict can be loaded into a model with these trainable parameters.

    Raises:
        ValueError: it was not made by ``optim_state_dict``, or for other parameters; names the first.
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
    known = state_dict["param_groups"]
    if not known:
        return  # saved before the first update
    for name in names:
        if name not in known:
            raise ValueError(f"the optimizer state holds nothing for parameter '{name}': it was saved from another model")
    own = set(names)
    for name in known:
        if name not in own:
            raise ValueError(f"the optimizer state holds '{name}', which is no trainable parameter of this model")


def load_optim_state(buckets: Sequence[Bucket], state_dict: dict[str, Any], *, exact: bool = False) -> None:
    """Puts a checked dict into the buckets' optimizers and schedulers.

    With ``exact``, which is for parameters of the same dtypes, all tensors keep their dtypes (torch's optimizers would cast
    them to their parameters') and nothing in the dict is used again.
    """
    if not state_dict["param_groups"]:
        return
    for bucket in buckets:
        names = _names(bucket)
        _load_optimizer(bucket.optimizer, names, state_dict)
        saved = state_dict.get("schedulers")
        if exact:
            saved = copy.deepcopy(saved)
            for param, state in bucket.optimizer.state.items():
                bucket.optimizer.state[param] = _exact(state, state_dict["state"].get(names[id(param)]), param)
        if bucket.scheduler is not None and saved is not None:
            _, by_group = _split(bucket.scheduler.state_dict())
            for own, group in zip(by_group, bucket.optimizer.param_groups, strict=False):
                if group["params"]:  # an empty one keeps what it has
                    own.update(saved["by_name"][names[id(group["params"][0])]])
            bucket.scheduler.load_state_dict(_join({k: v for k, v in saved.items() if k != "by_name"}, by_group))


def _load_optimizer(optimizer: Optimizer, names: dict[int, str], state_dict: dict[str, Any]) -> None:
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        members: list[Parameter] = group["params"]
        # What is saved, over what the group has: an empty one keeps its own.
        saved = state_dict["param_groups"][names[id(members[0])]] if members else {}
        groups.append({**group, **saved, "params": list(range(number, number + len(members)))})
        for param in members:
            if names[id(param)] in state_dict["state"]:
                state[number] = state_dict["state"][names[id(param)]]
            number += 1
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _exact(loaded: Any, saved: Any, param: Tensor) -> Any:
    """``loaded``, with copies of the tensors in ``saved``: of their dtypes, where the optimizer has put them."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if saved.layout != torch.strided or saved.shape != param.shape:
            return saved.detach().to(loaded.device, copy=True)
        # In the parameter's strides, as optimizers make them.
        return torch.empty_like(param, dtype=saved.dtype, device=loaded.device).copy_(saved)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {key: _exact(value, saved[key], param) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)) and isinstance(saved, (list, tuple)) and len(loaded) == len(saved):
        return type(loaded)(_exact(a, b, param) for a, b in zip(loaded, saved, strict=True))
    return loaded


def _names(bucket: Bucket) -> dict[int, str]:
    return {id(param): name for name, param in zip(bucket.block.names, bucket.block.params, strict=True)}


def _split(state: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A scheduler's state as what is common to all buckets, and one dict a parameter group.

    Schedulers that hold others (SequentialLR, ChainedScheduler) keep their states in a list ``_schedulers``; entries of the
    i-th have the key ``i/name`` in the dicts by group.
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
