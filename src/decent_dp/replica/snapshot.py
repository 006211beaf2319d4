"""The state of one replica at a step boundary as a dict (a snapshot), and how a replica resumes from it, bit for bit.

``take`` first finishes what is in flight and mixes it in, so that the run which resumes and the one which continues both begin
their next round with nothing in flight. The dict has these entries, and those of the driver:

    driver        the driver that saved it: 'wrapper' or 'gossip'
    parameters    {name: tensor}, frozen ones too; of DTensors, here and below, this worker's part
    buffers       {name: tensor}, also those that a state dict leaves out
    extra_state   {module name: what its get_extra_state returns}
    grads         {name: gradient} of the parameters that have one
    steps         see ``Replica``
    weight        of the replica in means, if the replicas' weights differ
    round, factor, rule, compression    see ``Engine.state_dict``

Where a node is a replica, only the first of its workers has in its snapshot what all of them have in common (the others get it
from it at a load), and the state of the rule and of the compression is that of each worker's shares.

Those of older versions also have an exchange in flight (``exchange``, ``link``), which is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from decent_dp.engine import Bucket
from decent_dp.errors import OutOfStepError
from decent_dp.replica.consistency import call_on_all, worker_counts
from decent_dp.replica.optimizer_guards import check_alike
from decent_dp.replica.replica import Replica
from decent_dp.replica.shards import local, placed, placement

__all__ = [
    "ENGINE_ENTRIES",
    "begin_load",
    "check_scaler_state",
    "copied",
    "first_loss_scale",
    "put_back",
    "replace_values",
    "restore",
    "settle",
    "take",
]

_log = logging.getLogger(__name__)

# The entries of the engine and its rounds, which ``Gossip.state_dict`` has too.
ENGINE_ENTRIES = frozenset({"driver", "steps", "round", "factor", "rule", "compression"})
_ENTRIES = ENGINE_ENTRIES | {"parameters", "buffers", "extra_state", "grads"}

# What the workers of a node have in common. Gradients are each worker's own while a window is open.
_OF_NODE = ("parameters", "optim", "grads")

_NAMES = {"wrapper": "DecentralizedDataParallel", "gossip": "gossip()"}


def take(replica: Replica, *, settled: bool = True) -> dict[str, Any]:
    """The snapshot of a replica, at a step boundary. Inside ``averaged`` its own values are taken, as they are after it.

    Args:
        settled: what is in flight is mixed in first. False: no exchange is waited for, and what is in flight is left out.

    Returns:
        The entries that the module's docstring names. The tensors are the replica's own: copy them before its next update.

    Raises:
        RuntimeError: inside a backward; after an update that failed; between ``global_avg`` and ``revert_global_avg``;
            after ``close``.
        ValueError: an optimizer's state cannot be saved; names it.
        PeerLostError, PeerTimeoutError: a worker that this one exchanges with is gone or silent.
    """
    replica.life.refuse_closed()
    replica.reach_step_boundary("save")
    replica.parameters.refuse_unreduced("save")
    mean = replica.mean
    if mean.backup is not None and not mean.scoped:
        raise RuntimeError(
            "save was called between global_avg() and revert_global_avg(), while the parameters are the mean: call it "
            "after revert_global_avg(), or average for good with global_avg(will_revert=False), or save inside "
            "`with model.averaged():`, where the replica's own values are saved."
        )
    model = replica.model
    replica.parameters.locate()
    named = list(zip(replica.parameters.names, replica.parameters.params, strict=True))
    for name, param in named:
        if param.grad is not None and placement(param.grad) != placement(param):
            raise RuntimeError(
                f"save was called while the gradient of '{name}' is {placement(param.grad)}, and the parameter "
                f"{placement(param)}: a sum over workers is pending, and would be lost. Call save after optimizer.zero_grad()."
            )
    if settled:
        settle(replica)
    own = {id(tensor): value for tensor, value in mean.backup or ()}
    snapshot = {
        "parameters": {name: own.get(id(param), local(param).detach()) for name, param in model.named_parameters()},
        "buffers": {name: own.get(id(buffer), local(buffer).detach()) for name, buffer in model.named_buffers()},
        "extra_state": {name: module.get_extra_state() for name, module in _with_extra_state(model).items()},
        "grads": {name: local(param.grad).detach() for name, param in named if param.grad is not None},
        "driver": replica.KIND.name,
        "steps": replica.steps,
        **({} if replica.mean.weights is None else {"weight": replica.mean.weights[0]}),
        **replica.engine.state_dict(),
        **replica._saved_entries(),
    }
    if replica.agreed.shares is not None and not replica.agreed.shares.is_first:
        snapshot.update(parameters={}, optim={}, grads=snapshot["grads"] if replica._has_own_gradients() else {})
    return snapshot


def _completed(replica: Replica, snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot with what the first worker of this one's node has for all of them. They call it together."""
    if replica.agreed.shares is None:
        return snapshot
    common = replica.agreed.shares.broadcast({key: snapshot[key] for key in _OF_NODE})
    is_open = any(replica.agreed.shares.group.gather_values(bool(snapshot["grads"]))[1:])
    return {**snapshot, **common, "grads": snapshot["grads"] if is_open else common["grads"], "open": is_open}


def settle(replica: Replica) -> None:
    """Finishes what is in flight and mixes it in now. Inside ``averaged`` that changes the replica's own values.

    It waits for messages of this and earlier rounds, and for no call of the other workers.
    """
    engine = replica.engine
    with replica.life.failing(), torch.inference_mode(False):
        replica._rebind()
        with replica.mean.suspended():
            for bucket in engine.buckets:
                engine.finish(bucket).raise_if_failed()
            replica._share()


# -- resuming --------------------------------------------------------------------------------------------------------------


def begin_load(replica: Replica, what: str = "load") -> None:
    """Makes a pending update, and checks that a state can be loaded now. Called by all workers; ``what`` names the user's call.

    Raises:
        RuntimeError: a worker is inside a backward or ``join``, after ``close``, or its model was changed; on all workers.
    """
    # In join, a worker without data waits for another message than the collectives below.
    replica.life.refuse_in_join(what, "before")
    if replica.life.closed:
        replica.life.refuse_stopped()
    # A pending update first, as others may be waiting for its exchange; inside a backward nothing is pending.
    replica.apply_pending()

    def refuse() -> None:
        replica.life.refuse_inside(what)
        replica.parameters.refuse_unreduced(what)
        replica.life.refuse_stopped()
        replica.parameters.check_unchanged()

    call_on_all(replica.world.control, refuse)


def put_back(replica: Replica, snapshot: dict[str, Any]) -> None:
    """The replica resumes from a snapshot of this or another run, which is not changed. Called by all workers.

    New buckets are made. The exchange in flight is finished and dropped.

    Raises:
        RuntimeError: as `begin_load`.
        ValueError, TypeError, RuntimeError: it does not fit this model, optimizer or scaler; the same error on all workers, and
            nothing is changed.
        OutOfStepError: the workers' snapshots are of different rounds; likewise.
    """
    begin_load(replica)
    whole = _completed(replica, snapshot)
    restore(replica, whole, lambda: _check(replica, whole))
    replica.mean.backup = None


def replace_values(replica: Replica, snapshot: dict[str, Any]) -> None:
    """This replica alone gets the values of another one: parameters, buffers and the state of its optimizers.

    Its buckets, rounds and steps stay. What is in flight is not added to the new values, and the rule's state is reset.

    Raises:
        ValueError, TypeError: the snapshot does not fit.
    """
    with torch.inference_mode(False), torch.no_grad():
        _check(replica, snapshot)
        with contextlib.ExitStack() as undo:
            replica._load_optimizers(snapshot, undo)
            undo.pop_all()
        replica._invalidate()
        _write(replica, snapshot)
        replica._rebind()  # own momenta start from the tracked ones: what mixes had changed was the other one's
        replica.engine.renew()


def restore(replica: Replica, state: dict[str, Any], check: Callable[[], None]) -> None:
    """The replica resumes, at a step boundary of all workers, from a snapshot (``combined``: of several, or a copy of another
    one), or from the entries of the engine and its rounds alone. ``check`` raises if it does not fit.
    """
    # Tensors that are made here have to train, also if the caller is in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        control = replica.world.control
        call_on_all(control, check)
        _compare(replica, state)
        with contextlib.ExitStack() as undo:
            buckets, install = call_on_all(control, lambda: _prepare(replica, state, undo))
            undo.pop_all()
        engine = replica.engine
        with replica.life.failing():
            engine.drop()
            if "parameters" in state:
                _write(replica, state)
            replica.steps = state["steps"]
            install()
            replica._use_buckets(buckets)
            engine.round, engine.factor = state["round"], state["factor"]
            if not state["rule"]["state"]:
                engine.mark_stale()  # the rule's state is reset to these values
                engine.renew()
            for bucket in buckets:
                bucket.load_compression_state(state["compression"])
            weight = None if replica.mean.weights is None else replica.mean.weights[0]
            # What mixes have changed added up to zero over those that saved, by weight. A part without parameters may be one
            # worker's on all.
            is_other = "parameters" not in state or state.get("combined", False) or state.get("weight") != weight
            found = control.gather([is_other, replica.momenta.drop_unsaved()])
            # Momenta that nobody has saved (of parameters that nobody uses) were zeros on all.
            if any(other or unsaved != found[0][1] for other, unsaved in found):
                replica.momenta.forget()
        if "exchange" in state:
            _log.warning("an older version has saved this: what was in flight is dropped, which leaves the mean as it is")


def _prepare(replica: Replica, state: dict[str, Any], undo: contextlib.ExitStack) -> tuple[list[Bucket], Callable[[], None]]:
    """As ``Replica._prepare_load``. The user's objects load their state here, and may refuse it."""
    buckets, install = replica._prepare_load(state, undo)
    for bucket in buckets:
        if state["rule"]["state"]:
            bucket.load_rule_state(state["rule"]["state"])
    modules = _with_extra_state(replica.model)
    for name, value in state.get("extra_state", {}).items():
        undo.callback(modules[name].set_extra_state, copy.deepcopy(modules[name].get_extra_state()))
        modules[name].set_extra_state(copy.deepcopy(value))
    return buckets, install


def _check(replica: Replica, snapshot: dict[str, Any]) -> None:
    """Raises ValueError if the replica cannot resume from the snapshot."""
    kind = snapshot.get("driver")
    if kind is not None and kind != replica.KIND.name:
        raise ValueError(
            f"this was saved by {_NAMES.get(kind, kind)}, and cannot be loaded into {_NAMES[replica.KIND.name]}: use the one "
            "that saved it, or start from the model that export() wrote"
        )
    missing = (_ENTRIES | replica.KIND.entries) - snapshot.keys()
    if missing:
        raise ValueError(f"this is not a snapshot of a replica: it has no entry {', '.join(map(repr, sorted(missing)))}")
    model = replica.model
    check_engine_state(replica, snapshot)
    for what, saved, own in (
        ("parameter", snapshot["parameters"], dict(model.named_parameters())),
        ("buffer", snapshot["buffers"], dict(model.named_buffers())),
        ("extra state of the module", snapshot["extra_state"], _with_extra_state(model)),
    ):
        for name in own:
            if name not in saved:
                raise ValueError(f"{what} '{name}' is not in the snapshot: it was saved from another model")
        for name in saved:
            if name not in own:
                raise ValueError(f"the snapshot has the {what} '{name}', and this model has none of that name")
        for name, tensor in own.items():
            if isinstance(tensor, Tensor):
                _check_described(f"{what} '{name}'", saved[name], _described(local(tensor)))
    params = dict(zip(replica.parameters.names, replica.parameters.params, strict=True))
    for name, grad in snapshot["grads"].items():
        if name not in params:
            raise ValueError(f"the snapshot has a gradient of '{name}', which is not a trainable parameter of this model")
        # Newer versions of torch let gradients have a dtype of their own; None stands for any.
        dtype = getattr(params[name], "grad_dtype", params[name].dtype) or getattr(grad, "dtype", None)
        _check_described(f"the gradient of '{name}'", grad, _described(local(params[name]), dtype))
    replica._check_entries(snapshot)


def check_engine_state(replica: Replica, state: Mapping[str, Any]) -> None:
    """Raises ValueError if ``steps`` or an entry of ``Engine.state_dict`` is malformed, or the rule is another one."""
    rule = state["rule"]
    for what, fits in {
        "steps": type(state["steps"]) is int and 0 <= state["steps"] < 2**62,  # tensors have int64
        "round": type(state["round"]) is int and 0 <= state["round"] < 2**62,
        "factor": type(state["factor"]) is float and 0.0 <= state["factor"] <= 1.0,
        "rule": isinstance(rule, dict) and rule.keys() == {"kind", "state"} and isinstance(rule["state"], dict),
        "compression": isinstance(state["compression"], dict),
    }.items():
        if not fits:
            raise ValueError(f"this is not a snapshot of a replica: its '{what}' is {brief(state[what])}")
    if rule["state"] and rule["kind"] != (kind := type(replica.engine.rule).__name__):
        raise ValueError(
            f"the rule was {rule['kind']} when this was saved, and is {kind} now: its state does not fit. Use the same rule, "
            "or load the parameters alone (load_state_dict)."
        )


def _compare(replica: Replica, state: Mapping[str, Any]) -> None:
    """Compares the workers' states, and where these workers are."""
    engine = replica.engine
    order = hashlib.sha256(json.dumps(state.get("order")).encode()).hexdigest()
    control = replica.world.control
    found = control.gather([state["round"], order, engine.round if engine.buckets else None])
    if len({round_ for round_, *_ in found}) > 1:
        counts = worker_counts([round_ for round_, *_ in found], control.ranks)
        raise OutOfStepError(
            f"the workers' snapshots are of different rounds ({counts}): load on every worker what was saved at the same one."
        )
    if len({order for _, order, *_ in found}) > 1:
        raise ValueError("the workers' snapshots have their parameters in different orders: they are not of one run")
    running = [now for *_, now in found]
    if len(set(running)) > 1:
        raise OutOfStepError(
            "loading needs all workers at the same update, and they have made different numbers "
            f"({worker_counts(running, control.ranks)}): start the workers again, and load then."
        )


def _write(replica: Replica, snapshot: dict[str, Any]) -> None:
    """Parameters, buffers and gradients."""
    for values, own in (
        (snapshot["parameters"], replica.model.named_parameters()),
        (snapshot["buffers"], replica.model.named_buffers()),
    ):
        for name, tensor in own:
            local(tensor).copy_(values[name])
    for name, param in zip(replica.parameters.names, replica.parameters.params, strict=True):
        grad = snapshot["grads"].get(name)
        param.grad = None if grad is None else placed(_like(grad, local(param)), param)


def _check_described(what: str, saved: Any, own: str) -> None:
    if _described(saved) != own:
        raise ValueError(f"{what} was saved as {_described(saved)}, and is {own} in this model")


def check_scaler_state(scaler: torch.amp.GradScaler | None, saved: Mapping[str, Any] | None) -> None:
    """Raises ValueError if a saved GradScaler's state does not fit."""
    if (scaler is None) != (not saved):
        here, there = ("has one", "without a GradScaler") if scaler is not None else ("has none", "with a GradScaler")
        raise ValueError(f"the snapshot was saved {there}, and this run {here}: pass the same `scaler` as in the run before")
    if scaler is None or saved is None:
        return
    own = scaler.state_dict()
    if saved.keys() != own.keys():
        raise ValueError(f"the GradScaler's state in the snapshot has the entries {sorted(saved)}: it is of another torch")
    check_alike("the state of the GradScaler", saved, own)


def first_loss_scale(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Makes a loaded scaler create its scale, as it does for a first loss: the gradients of the snapshot are scaled already."""
    scaler.scale(torch.zeros((), dtype=torch.float32, device=device))


# -- values ----------------------------------------------------------------------------------------------------------------


def copied(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _described(value: Any, dtype: torch.dtype | None = None) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(dtype or value.dtype).removeprefix('torch.')}"


def _like(value: Tensor, param: Tensor) -> Tensor:
    """A copy where ``param`` is, and in its strides, as autograd makes gradients: sums depend on the order of the memory."""
    if value.layout != torch.strided:
        return value.to(param.device, copy=True)
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    named = dict(model.named_modules())
    return {name: module for name, module in named.items() if type(module).get_extra_state is not nn.Module.get_extra_state}
