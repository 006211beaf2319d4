"""The replicas of this process: which of them trains a parameter, and whether an optimizer that steps it is its own."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from decent_dp.replica.optimizers import params_of

if TYPE_CHECKING:
    from decent_dp.replica.replica import Replica

__all__ = ["enter", "living", "running_steps", "superseded_by", "users_level"]

_LOCK = threading.Lock()
_LIVING: weakref.WeakSet[Replica] = weakref.WeakSet()
# Optimizers that were looked at since the last replica was made, and those that a warning was about.
_LOOKED_AT: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_WARNED_OF: weakref.WeakSet[Optimizer] = weakref.WeakSet()
# The one hook on the steps of all optimizers.
_HOOK: list[Any] = []

# What torch puts around the step of each class of optimizers, and what calls the hooks.
_HOOKED_STEP = Optimizer.profile_hook_step(lambda *_: None).__code__


def enter(replica: Replica) -> None:
    """``replica`` trains from now on, until it is closed or dropped."""
    with _LOCK:
        _LIVING.add(replica)
        _LOOKED_AT.clear()  # an optimizer may be foreign to this one
        if not _HOOK:
            _HOOK.append(register_optimizer_step_pre_hook(_before_step))


def living() -> list[Replica]:
    """Those that were neither closed nor dropped."""
    with _LOCK:
        return [replica for replica in _LIVING if not replica.closed]


def superseded_by(model: nn.Module) -> list[Replica]:
    """The replicas whose parameters are all of ``model``, and which are unused: a new one takes their place.

    Raises:
        ValueError: another one trains a parameter of ``model``; names it.
    """
    names = {id(param): name for name, param in model.named_parameters()}

    def others() -> list[str]:
        found = []
        for replica in living():
            shared = [names[id(param)] for param in replica.parameters.params if id(param) in names]
            if shared and not (replica.unused and len(shared) == len(replica.parameters.params)):
                found.append(shared[0])
        return found

    if others():
        gc.collect()  # one that was dropped is in a cycle
    for name in others():
        raise ValueError(
            f"parameter '{name}' is trained by another DecentralizedDataParallel or gossip(), and two would step it twice: "
            "close() the other one first."
        )
    return [replica for replica in living() if any(id(param) in names for param in replica.parameters.params)]


# -- foreign steps ---------------------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    # Compiled, this is nothing: what is looked at cannot be traced.
    if torch.compiler.is_compiling() or optimizer in _LOOKED_AT:
        return
    _LOOKED_AT.add(optimizer)
    params = params_of(optimizer)
    for replica in living():
        names = replica.parameters.names_of(params)
        if (
            names
            and optimizer not in _WARNED_OF
            and not any(own is step for own in replica.optimizers for step in (*running_steps(), *_inside(optimizer)))
        ):
            _WARNED_OF.add(optimizer)
            warnings.warn(
                f"{type(optimizer).__name__} steps parameter '{names[0]}', which {replica.FOREIGN_STEP}",
                stacklevel=users_level(),
            )


def _inside(optimizer: Optimizer) -> Iterator[Any]:
    """What an optimizer keeps in its attributes, lists and dicts of them: it may step others inside its own step."""
    for value in vars(optimizer).values():
        yield value
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()


def running_steps() -> Iterator[Optimizer]:
    """The optimizers whose ``step()`` has called the caller, directly or not: from the innermost to the outermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Compiled, it is another object of the same origin.
        if (
            code.co_name == _HOOKED_STEP.co_name
            and code.co_firstlineno == _HOOKED_STEP.co_firstlineno
            and code.co_filename == _HOOKED_STEP.co_filename
        ):
            yield frame.f_locals.get("args", (None,))[0]
        frame = frame.f_back


def users_level() -> int:
    """The ``stacklevel`` at which the caller's warning is one of the user's line: the first outside torch and this library."""
    level = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "decent_dp"):
        level, frame = level + 1, frame.f_back
    return level + 1
