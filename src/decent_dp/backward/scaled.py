"""Detection of a GradScaler that scales the loss and was not passed to the wrapper."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from decent_dp.replica.live import live_replicas

__all__ = ["refuse_scaled_loss"]

# Replicas may be threads of one process: what one of them looks at, the collection of another would not free.
_LOOKING = threading.Lock()


def refuse_scaled_loss() -> None:
    """Raises RuntimeError if a GradScaler of this process has scaled a loss and was not passed to a replica."""
    with _LOOKING:
        if not _untouched():
            return
        gc.collect()  # a scaler without references may be part of a cycle
        scales = [scaler.get_scale() for scaler in _untouched()]
    if scales:
        raise RuntimeError(
            f"a GradScaler has scaled a loss, and DecentralizedDataParallel was not given it: gradients would be "
            f"{scales[0]:g} times too large. Pass scaler=, and only scale the loss: the wrapper unscales, steps and "
            "updates. If it scales the loss of another model, pass scaler=torch.amp.GradScaler(enabled=False) here."
        )


def _untouched() -> list[torch.amp.GradScaler]:
    """Returns the enabled scalers that have scaled, were never updated, and belong to no replica."""
    given = [replica.scaler for replica in live_replicas()]
    kinds: set[Any] = {torch.amp.GradScaler}
    while more := {kind for base in kinds for kind in base.__subclasses__()} - kinds:
        kinds |= more
    # Objects refer to their class. isinstance would run code of proxy objects, so types are compared.
    found = [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]
    return [scaler for scaler in found if not any(scaler is own for own in given) and _is_untouched(scaler)]


def _is_untouched(scaler: Any) -> bool:
    scale, tracker = (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker"))
    if not scaler.is_enabled() or scale is None or tracker is None:
        return False
    return bool(scale == scaler._init_scale) and bool(tracker == scaler._init_growth_tracker)
