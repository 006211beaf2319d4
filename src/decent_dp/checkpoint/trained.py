"""Whose replica it is that is saved, loaded or averaged."""

from __future__ import annotations

from typing import Any, TypeAlias

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.replica import Replica

__all__ = ["Trained", "replica_of"]

# What the functions of this package take: the wrapper, or what ``decent_dp.gossip`` returned.
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
