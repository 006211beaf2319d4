"""The argument ``model`` of this package's functions."""

from __future__ import annotations

from typing import Any, TypeAlias

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.replica import Replica

__all__ = ["Trained", "replica_of"]

# The wrapper, or the result of ``decent_dp.gossip``.
Trained: TypeAlias = DecentralizedDataParallel | Replica


def replica_of(model: Any, what: str) -> Replica:
    """The replica of a wrapper or a ``Gossip``; raises TypeError for anything else, in the name of ``what``."""
    if isinstance(model, DecentralizedDataParallel):
        return model.replica
    if not isinstance(model, Replica):
        raise TypeError(
            f"{what} takes the DecentralizedDataParallel that wraps the model, or what decent_dp.gossip() returned, got a "
            f"{type(model).__name__}"
        )
    return model
