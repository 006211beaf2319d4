"""Everything about one replica, at a step boundary, as one dict; and a replica that goes on from it, bit for bit.

An exchange that is under way is not waited for: a worker keeps what it has sent. Whoever goes on puts it on the wire again,
and so do its neighbours, each its own side. The dict has these entries:

    parameters    {name: tensor}, frozen ones too
    buffers       {name: tensor}, those that a state dict leaves out too
    extra_state   {module name: what its get_extra_state returns}
    optim         optimizers, schedulers and scaler, by parameter name: see ``states``
    optimizer     the kind of the optimizers, None without any; ``scheduler`` likewise
    round, steps, factor      see ``Engine``
    accumulate, window        see ``Schedule``; the window is 'idle' or 'open'
    nested, arrived           whether a backward had another inside, and the first gradients' order until there are buckets
    grads         {name: gradient} of those that are there
    order         names, in the order from which the buckets were planned; None before the first update
    link          what the exchange under way depends on: ``exchange`` is of use where it is the same
    exchange      {"parameters": {name: see ``Bucket.held``}, "disowned": names}; None where nothing can go on
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from decent_dp.errors import OutOfStepError
from decent_dp.handed import Policy
from decent_dp.replica.agree import agree, worker_counts
from decent_dp.replica.building import Builder
from decent_dp.replica.engine import Bucket, Engine
from decent_dp.replica.guard import Guard
from decent_dp.replica.schedule import Schedule, Window
from decent_dp.replica.settings import Settings
from decent_dp.replica.states import check_optim_state, collect_optim_state, load_optim_state
from decent_dp.topo import Topology
from decent_dp.transport import Transport

__all__ = ["Replica", "put_back", "take"]

_ENTRIES = {
    *("parameters", "buffers", "extra_state", "optim", "optimizer", "scheduler", "round", "steps", "factor"),
    *("accumulate", "window", "nested", "arrived", "grads", "order", "link", "exchange"),
}

# Of a GradScaler's state, what counts; the rest are factors.
_WHOLE = ("growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class Replica:
    """What one replica is made of."""

    model: nn.Module
    guard: Guard
    engine: Engine
    schedule: Schedule
    policy: Policy
    builder: Builder
    transport: Transport
    topology: Topology
    settings: Settings

    @cached_property
    def _fixed_link(self) -> dict[str, Any]:
        specs = [[spec.name, list(spec.shape), list(spec.stride), str(spec.dtype)] for spec in self.guard.specs]
        return {
            "rank": self.transport.rank,
            "topology": self.topology.fingerprint(),
            "mix_every": int(self.settings.mix_every),
            "overlap": self.settings.overlap,
            "wire": self.settings.wire,
            "parameters": hashlib.sha256(json.dumps(specs).encode()).hexdigest()[:16],
        }

    def link(self, round_: int) -> dict[str, Any]:
        """What the exchange before round ``round_`` depends on, as JSON can hold it."""
        edge = self.topology.get_edge(round_ - 1) if round_ else None
        return {**self._fixed_link, "edge": None if edge is None else [list(edge.ranks), edge.weight]}


def take(replica: Replica, own: Mapping[int, Tensor]) -> dict[str, Any]:
    """The snapshot of a replica that is at a step boundary. Asks no other worker.

    Args:
        own: values in the place of those of a parameter or a buffer, by its id: where it is the mean just now.

    Returns:
        The entries that the module names. The tensors are the replica's own and change with its next update: whoever keeps
        them has to copy them before.

    Raises:
        ValueError: an optimizer keeps what belongs to no parameter; names it.
    """
    engine, builder, guard, schedule = replica.engine, replica.builder, replica.guard, replica.schedule
    optim = collect_optim_state(engine.buckets, replica.policy.scaler, engine.round, builder.pending)
    grads = {name: param.grad for name, param in zip(guard.names, guard.params, strict=True) if param.grad is not None}
    going = engine.buckets and engine.started == engine.round - 1
    return {
        "parameters": {name: own.get(id(param), param.detach()) for name, param in replica.model.named_parameters()},
        "buffers": {name: own.get(id(buffer), buffer.detach()) for name, buffer in replica.model.named_buffers()},
        "extra_state": {name: module.get_extra_state() for name, module in _with_extra_state(replica.model).items()},
        "optim": optim,
        "optimizer": _kind(builder.optimizers),
        "scheduler": _kind([scheduler for scheduler in builder.schedulers if scheduler is not None]),
        "round": engine.round,
        "steps": engine.steps,
        "factor": engine.factor,
        "accumulate": schedule.accumulate,
        "window": schedule.window.value,
        "nested": schedule.nested,
        "arrived": [guard.names[i] for i in schedule.arrived] if builder.order is None else [],
        "grads": {name: grad.detach() for name, grad in grads.items()},
        "order": None if builder.order is None else [guard.names[i] for i in builder.order],
        "link": replica.link(engine.round),
        "exchange": _exchange(engine.buckets) if going else None,
    }


def _exchange(buckets: Sequence[Bucket]) -> dict[str, Any]:
    held: dict[str, dict[str, Tensor]] = {}
    disowned: list[str] = []
    for bucket in buckets:
        held.update(bucket.held())
        disowned += [
            name for name, param in zip(bucket.block.names, bucket.block.params, strict=True) if id(param) in bucket.disowned
        ]
    return {"parameters": held, "disowned": disowned}


# -- going on --------------------------------------------------------------------------------------------------------------


def put_back(replica: Replica, snapshot: dict[str, Any]) -> None:
    """The replica goes on from a snapshot, which stays as it is. Called by all workers, at a step boundary.

    The buckets are made anew, and with them the optimizers. What is under way now is finished and dropped; the saved exchange
    is put on the wire again if it can go on on every worker, and dropped on all otherwise: then the mean stays, and what the
    neighbours would have got of each other comes with the next exchange.

    Raises:
        ValueError, TypeError, RuntimeError: it does not fit; the same error on all workers, and nothing is changed.
        OutOfStepError: it was saved at different rounds; likewise.
    """
    # Whatever the caller does: what is made here has to train.
    with torch.inference_mode(False), torch.no_grad():
        control = replica.transport.control
        resumed = _compare(replica, snapshot, agree(control, lambda: _check(replica, snapshot)))
        undo = contextlib.ExitStack()
        try:
            buckets, told = agree(control, lambda: _prepare(replica, snapshot, resumed, undo))
        except BaseException:
            undo.close()
            if not replica.engine.buckets:  # otherwise they adopt their parameters again when they are used
                replica.builder.release()
            raise
        with replica.schedule.faults():
            # What was announced of it, and of the round after it, is left where it is: nobody asks for it, as the labels of
            # the new buckets are others, and it goes with the connections.
            replica.engine.wait_all()
            if replica.engine.buckets and not buckets:
                replica.builder.release()
            _write(replica, snapshot)
            _install(replica, snapshot, buckets)
            if resumed:
                _start_again(replica.engine, snapshot, told)


def _prepare(
    replica: Replica, snapshot: dict[str, Any], resumed: bool, undo: contextlib.ExitStack
) -> tuple[list[Bucket], list[bytes | None]]:
    """New buckets, and for each what was announced of its exchange; all that the user's objects may still refuse."""
    order, numbers, topology = snapshot["order"], replica.guard.numbers, replica.topology
    buckets, told = [], []
    if order is not None:
        buckets = replica.builder.lay_out([numbers[name] for name in order])
        _check_kinds(snapshot, buckets)
        load_optim_state(buckets, snapshot["optim"], exact=True)
    if resumed:
        sends = replica.settings.overlap and len(topology.get_edge(snapshot["round"] - 1).ranks) > 1
        if any(bucket.wire.announces for bucket in buckets):
            topology.get_edge(snapshot["round"])  # the edge that is told: if it cannot be made, now
        told = [bucket.hold(snapshot["exchange"]["parameters"], under_way=sends) for bucket in buckets]
    modules = _with_extra_state(replica.model)
    for name, value in snapshot["extra_state"].items():
        undo.callback(modules[name].set_extra_state, copy.deepcopy(modules[name].get_extra_state()))
        modules[name].set_extra_state(copy.deepcopy(value))
    return buckets, told


def _check(replica: Replica, snapshot: dict[str, Any]) -> bool:
    """Looks whether a snapshot can be put into this replica; whether its exchange can go on, as far as this worker knows."""
    missing = _ENTRIES - snapshot.keys()
    if missing:
        raise ValueError(f"this is no snapshot of a replica: it has no entry {', '.join(map(repr, sorted(missing)))}")
    replica.schedule.check()
    replica.guard.check()
    model, names = replica.model, replica.guard.names
    _check_values(snapshot)
    _check_tensors("parameter", snapshot["parameters"], dict(model.named_parameters()))
    _check_tensors("buffer", snapshot["buffers"], dict(model.named_buffers()))
    _check_names("extra state of the module", snapshot["extra_state"], _with_extra_state(model))
    check_optim_state(snapshot["optim"], names)
    _check_gradients(snapshot["grads"], dict(zip(names, replica.guard.params, strict=True)))
    order = snapshot["order"]
    if order is not None and sorted(order) != sorted(names):
        raise ValueError(
            "the order of the parameters in the snapshot does not name each trainable parameter of this model once"
        )
    unknown = [name for name in snapshot["arrived"] if name not in replica.guard.numbers]
    if unknown:
        raise ValueError(f"the snapshot has a gradient of '{unknown[0]}', which is no trainable parameter of this model")
    _check_scaler(replica.policy.scaler, snapshot["optim"].get("scaler"))
    return snapshot["exchange"] is not None and snapshot["link"] == replica.link(snapshot["round"])


def _check_values(snapshot: dict[str, Any]) -> None:
    exchange = snapshot["exchange"]
    for what, fits in {
        "round": type(snapshot["round"]) is int and snapshot["round"] >= 0,
        "steps": type(snapshot["steps"]) is int and snapshot["steps"] >= 0,
        "factor": type(snapshot["factor"]) is float and 0.0 <= snapshot["factor"] <= 1.0,
        "accumulate": type(snapshot["accumulate"]) is bool,
        "window": snapshot["window"] in (Window.IDLE.value, Window.OPEN.value),
        "nested": type(snapshot["nested"]) is bool,
        "arrived": isinstance(snapshot["arrived"], list),
        "exchange": exchange is None or (isinstance(exchange, dict) and exchange.keys() == {"parameters", "disowned"}),
    }.items():
        if not fits:
            raise ValueError(f"this is no snapshot of a replica: its '{what}' is {snapshot[what]!r}")


def _check_gradients(saved: Mapping[str, Any], params: Mapping[str, Parameter]) -> None:
    for name, grad in saved.items():
        if name not in params:
            raise ValueError(f"the snapshot has a gradient of '{name}', which is no trainable parameter of this model")
        param = params[name]
        # Newer versions of torch let gradients have a dtype of their own; None stands for any.
        theirs, ours = _described(grad), _described(param, getattr(param, "grad_dtype", param.dtype) or grad.dtype)
        if theirs != ours:
            raise ValueError(f"the gradient of '{name}' was saved as {theirs}, and is {ours} in this model")


def _check_names(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name in own:
        if name not in saved:
            raise ValueError(f"{what} '{name}' is not in the snapshot: it was saved from another model")
    for name in saved:
        if name not in own:
            raise ValueError(f"the snapshot has the {what} '{name}', and this model has none of that name")


def _check_tensors(what: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    _check_names(what, saved, own)
    for name, tensor in own.items():
        theirs, ours = _described(saved[name]), _described(tensor)
        if theirs != ours:
            raise ValueError(f"{what} '{name}' was saved as {theirs}, and is {ours} in this model")


def _check_scaler(scaler: torch.amp.GradScaler | None, saved: Mapping[str, Any] | None) -> None:
    if (scaler is None) != (not saved):
        here, there = ("has one", "without a GradScaler") if scaler is not None else ("has none", "with a GradScaler")
        raise ValueError(
            f"the snapshot was saved {there}, and this wrapper {here}: pass the same `scaler` as in the run before"
        )
    if scaler is None or saved is None:
        return
    own = scaler.state_dict()
    if saved.keys() != own.keys():
        raise ValueError(f"the GradScaler's state in the snapshot has the entries {sorted(saved)}: it is of another torch")
    for key, value in saved.items():
        if type(value) is not int and (type(value) is not float or key in _WHOLE):
            raise ValueError(f"the GradScaler's '{key}' in the snapshot is {value!r}, and should be a number like {own[key]!r}")


def _check_kinds(snapshot: dict[str, Any], buckets: Sequence[Bucket]) -> None:
    own = {
        "optimizer": _kind([bucket.optimizer for bucket in buckets]),
        "scheduler": _kind([bucket.scheduler for bucket in buckets if bucket.scheduler is not None]),
    }
    for what, kind in own.items():
        if snapshot[what] != kind:
            raise ValueError(
                f"the {what} was {snapshot[what]} when this was saved, and is {kind} now: their states do not fit each other. "
                "Go on with the same one, or load the parameters alone (load_state_dict)."
            )


def _compare(replica: Replica, snapshot: dict[str, Any], fits: bool) -> bool:
    """Compares the workers' snapshots; whether the exchange under way can go on on all of them, as on this one (``fits``)."""
    engine = replica.engine
    order = hashlib.sha256(json.dumps(snapshot["order"]).encode()).hexdigest()
    now = engine.round if engine.buckets else None
    found = replica.transport.control.gather([snapshot["round"], order, fits, now])
    if len({round_ for round_, *_ in found}) > 1:
        counts = worker_counts([round_ for round_, *_ in found])
        raise OutOfStepError(
            f"the workers' snapshots are of different rounds ({counts}): load on every worker what was saved at the same one."
        )
    if len({order for _, order, *_ in found}) > 1:
        raise ValueError("the workers' snapshots have their parameters in different orders: they are not of one run")
    running = [now for *_, now in found]
    if len(set(running)) > 1:
        raise OutOfStepError(
            f"loading needs all workers at the same update, and they have made different numbers ({worker_counts(running)}): "
            "start the workers again, and load then."
        )
    return all(fits for _, _, fits, _ in found)


def _write(replica: Replica, snapshot: dict[str, Any]) -> None:
    """Parameters, buffers and gradients."""
    for values, own in (
        (snapshot["parameters"], replica.model.named_parameters()),
        (snapshot["buffers"], replica.model.named_buffers()),
    ):
        for name, tensor in own:
            tensor.copy_(values[name])
    for name, param in zip(replica.guard.names, replica.guard.params, strict=True):
        grad = snapshot["grads"].get(name)
        param.grad = None if grad is None else _like(grad, param)


def _install(replica: Replica, snapshot: dict[str, Any], buckets: list[Bucket]) -> None:
    engine, builder, numbers = replica.engine, replica.builder, replica.guard.numbers
    order, optim = snapshot["order"], snapshot["optim"]
    builder.install(buckets, None if order is None else [numbers[name] for name in order])
    builder.pending = None
    if order is None and optim["param_groups"]:
        rest = {key: value for key, value in optim.items() if key != "state"}
        builder.pending = {**copy.deepcopy(rest), "state": _copied(optim["state"])}
    engine.round, engine.steps, engine.factor = snapshot["round"], snapshot["steps"], snapshot["factor"]
    schedule = replica.schedule
    schedule.install(buckets)
    schedule.window, schedule.accumulate = Window(snapshot["window"]), snapshot["accumulate"]
    schedule.nested, schedule.arrived = snapshot["nested"], {numbers[name]: None for name in snapshot["arrived"]}
    scaler = replica.policy.scaler
    if scaler is not None:
        scaler.load_state_dict(optim["scaler"])
        # It has its scale from the first loss on, and the gradients that are there had theirs in another run.
        scaler.scale(torch.zeros((), device=replica.guard.params[0].device))


def _start_again(engine: Engine, snapshot: dict[str, Any], told: Sequence[bytes | None]) -> None:
    engine.started = engine.round - 1
    disowned = set(snapshot["exchange"]["disowned"])
    for bucket, text in zip(engine.buckets, told, strict=True):
        if text is not None:
            engine.start_again(bucket, text)
            named = zip(bucket.block.names, bucket.block.params, strict=True)
            bucket.disowned = {id(param) for name, param in named if name in disowned}
    for bucket in engine.buckets:
        engine.announce_again(bucket)


# -- values ----------------------------------------------------------------------------------------------------------------


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


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


def _kind(objects: Sequence[object]) -> str | None:
    return ", ".join(sorted({type(one).__name__ for one in objects})) or None
