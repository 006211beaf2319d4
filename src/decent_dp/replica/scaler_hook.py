"""Hooks on the methods of a GradScaler, as nothing else shows a step that it skips."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from decent_dp.replica.live import running_steps

__all__ = ["ScalerHook", "is_inner_step", "refuse_other_scaler"]

# Stack frames between a scaler's step and the optimizer's post-hook, including wrappers of schedulers and profilers.
_FRAMES_TO_SCALER = 12


class ScalerHook:
    """Wraps a method of one scaler object, because nothing else shows a step that the scaler skips.

    Hooks of several replicas may be stacked on one method.
    """

    def __init__(self, scaler: torch.amp.GradScaler, name: str, callback: Callable[..., None]) -> None:
        self._scaler, self._name = scaler, name
        self._inner: Callable[..., Any] = getattr(scaler, name)
        self._patched = name in vars(scaler)  # by the user, or by another hook of this class
        self._callback: Callable[..., None] | None = callback
        setattr(scaler, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._inner(*args, **kwargs)
        if self._callback is not None:
            self._callback(*args, **kwargs)
        return result

    def remove(self) -> None:
        self._callback = None
        top = vars(self._scaler).get(self._name)
        while isinstance(top, ScalerHook) and top._callback is None:
            delattr(self._scaler, self._name)
            if top._patched:
                setattr(self._scaler, self._name, top._inner)
            top = vars(self._scaler).get(self._name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("this GradScaler ends the rounds of a Gossip and cannot be copied: load its state_dict() into another.")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("this GradScaler ends the rounds of a Gossip and cannot be pickled: save its state_dict().")


def refuse_other_scaler(given: torch.amp.GradScaler | None) -> None:
    """Raises RuntimeError if the stepping GradScaler was not passed to ``gossip``.

    A step that such a scaler skips on one worker would leave the other workers waiting.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_SCALER):
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and scaler is not given:
            what = "was not given it: pass scaler=" if given is None else "was given another: pass the one that steps it"
            raise RuntimeError(
                f"a GradScaler steps this optimizer, and gossip() {what}, so that a step that it skips on one worker is a "
                "round there, too."
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


def is_inner_step(optimizer: Optimizer) -> bool:
    """Whether the step that has called the hook runs inside another step of ``optimizer``.

    A subclass may call the step of its parent class, and torch hooks both.
    """
    return sum(step is optimizer for step in running_steps()) > 1
