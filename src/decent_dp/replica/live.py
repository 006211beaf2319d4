"""The live replicas of this process: one is started, found by its parameters, and guarded against optimizers of others."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from decent_dp.replica.construction import Agreement, Arguments, connect_replicas
from decent_dp.replica.lifecycle import State
from decent_dp.replica.optimizer_guards import names_by_id, params_of, warn_user
from decent_dp.replica.replica import Replica
from decent_dp.replica.state_receiver import serve_joiners
from decent_dp.transport import NewcomerTransport, Transport

__all__ = ["live_replicas", "running_steps", "start_replica"]

R = TypeVar("R", bound=Replica)

_LOCK = threading.Lock()
_LIVE: weakref.WeakSet[Replica] = weakref.WeakSet()
# Optimizers that were checked since the last replica was registered, and those that have caused a warning.
_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_WARNED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# torch's wrapper around the step of each optimizer class, which calls the hooks.
_HOOKED_STEP = Optimizer.profile_hook_step(lambda *_: None).__code__


def start_replica(
    model: nn.Module, transport: Transport, owned: bool, check: Callable[[], Arguments], make: Callable[[Agreement], R]
) -> R:
    """Starts a replica of ``model``, in place of unused ones. Called by all workers.

    Args:
        transport, check: as of ``connect_replicas``.
        owned: close the transport if this fails.
        make: makes the driver.

    Raises:
        ValueError, TypeError: as of ``connect_replicas``, or a replica in use trains a parameter of ``model``.
        PeerLostError: this process joins a run, and no member has given it its state.
    """
    older: list[Replica] = []

    def check_all() -> Arguments:
        arguments = check()
        older.extend(_find_superseded(model))
        return arguments

    try:
        agreed = connect_replicas(model, transport, owned, check_all)
        for replica in older:
            replica.close()
            replica.life.state = State.SUPERSEDED
        made = make(agreed)
        with _LOCK:
            _LIVE.add(made)
            _CHECKED.clear()  # a known optimizer may be foreign to the new replica
            _look_at_steps()
        serve_joiners(made)
    except BaseException as error:
        # Without an object, no one else could close the transport's threads and sockets.
        if owned or isinstance(transport, NewcomerTransport):
            transport.report(f"{type(error).__name__} while it wrapped its model: {error}")
            transport.close()
        raise
    return made


def live_replicas() -> list[Replica]:
    """Returns the replicas that are neither closed nor garbage-collected."""
    with _LOCK:
        return [replica for replica in _LIVE if not replica.life.closed]


def _find_superseded(model: nn.Module) -> list[Replica]:
    """Returns the unused replicas whose parameters all belong to ``model``; a new replica replaces them.

    Raises:
        ValueError: a replica in use trains a parameter of ``model``; names the parameter.
    """
    names = names_by_id(model)

    def others() -> list[str]:
        found = []
        for replica in live_replicas():
            shared = [names[id(param)] for param in replica.parameters.params if id(param) in names]
            if shared and not (replica._is_unused() and len(shared) == len(replica.parameters.params)):
                found.append(shared[0])
        return found

    if others():
        gc.collect()  # a replica without references is part of a cycle
    for name in others():
        raise ValueError(
            f"parameter '{name}' is trained by another DecentralizedDataParallel or gossip(), and two would step it twice: "
            "close() the other one first."
        )
    return [replica for replica in live_replicas() if any(id(param) in names for param in replica.parameters.params)]


# -- foreign steps ---------------------------------------------------------------------------------------------------------


@functools.cache  # a single hook on the steps of all optimizers
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    # torch.compile cannot trace this check.
    if torch.compiler.is_compiling() or optimizer in _CHECKED:
        return
    _CHECKED.add(optimizer)
    params = params_of(optimizer)
    for replica in live_replicas():
        names = replica.parameters.names_of(params)
        if (
            names
            and optimizer not in _WARNED
            and not any(own is step for own in replica.optimizers for step in (*running_steps(), *_inside(optimizer)))
        ):
            _WARNED.add(optimizer)
            warn_user(f"{type(optimizer).__name__} steps parameter '{names[0]}', which {replica.KIND.foreign_step}")


def _inside(optimizer: Optimizer) -> Iterator[Any]:
    """Yields the attributes of an optimizer and the members of lists and dicts in them: it may step other optimizers."""
    for value in vars(optimizer).values():
        yield value
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()


def running_steps() -> Iterator[Optimizer]:
    """Yields the optimizers whose ``step()`` is on the call stack, from the innermost to the outermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # A compiled wrapper is another code object with the same name and place.
        if (
            code.co_name == _HOOKED_STEP.co_name
            and code.co_firstlineno == _HOOKED_STEP.co_firstlineno
            and code.co_filename == _HOOKED_STEP.co_filename
        ):
            yield frame.f_locals.get("args", (None,))[0]
        frame = frame.f_back
