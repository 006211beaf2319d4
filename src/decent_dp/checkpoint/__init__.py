"""Save, resume, export: nothing of a run is lost, and nothing in a file is executed.

``save`` and ``load`` keep all replicas with all that they need to go on exactly. ``Preemption`` brings all workers to one round
to save at when one of them is told to go. ``export``, ``calibrate`` and ``AveragedReplica`` are for the model to keep.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once: a module of the same name would else take the function's place.
from decent_dp.checkpoint.export import calibrate, export

if TYPE_CHECKING:
    from decent_dp.checkpoint.average import AveragedReplica
    from decent_dp.checkpoint.loading import latest, load
    from decent_dp.checkpoint.preempt import Preemption
    from decent_dp.checkpoint.saver import Saving, save

__all__ = ["AveragedReplica", "Preemption", "Saving", "calibrate", "export", "latest", "load", "save"]

# Looked up when they are first asked for (PEP 562): what keeps no tensors works without safetensors.
_HOMES = {
    "AveragedReplica": "average",
    "Preemption": "preempt",
    "Saving": "saver",
    "latest": "loading",
    "load": "loading",
    "save": "saver",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"decent_dp.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
