"""What takes the place of the default process group where faults are tolerated and nothing goes over it any more.

gloo listens on a port as long as its group lives, and keeps a descriptor of each stranger that has come and gone.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch.distributed as dist

# Its default arguments would keep the default group that exists when it is loaded, as torch's optimizers do later.
import torch.distributed.nn.functional  # noqa: F401
from torch.distributed.distributed_c10d import _get_default_store

__all__ = ["close_default_group", "own_default_group"]

_NAME = "decent_dp_closed"
# Versions of torch differ in the names of the collectives.
_WORDS = ("all_to_all", "alltoall", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")
_OPERATIONS = [name for name in vars(dist.ProcessGroup) if any(word in name for word in _WORDS)]

# The default groups that this library has made.
_own: weakref.WeakSet[Any] = weakref.WeakSet()


def own_default_group() -> None:
    """The default process group was made by this library, and may be closed."""
    if dist.group.WORLD is not None:
        _own.add(dist.group.WORLD)


def close_default_group() -> None:
    """Replaces the default process group by one that knows its rank and size, and whose operations raise an error.

    Only a group of gloo that this library has made. Its store stays open.
    """
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if group is None or group not in _own or dist.get_backend() != "gloo":
        return
    rank, size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    del group
    dist.destroy_process_group()
    if not hasattr(dist.Backend, _NAME.upper()):
        dist.Backend.register_backend(_NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(_NAME, store=store, rank=rank, world_size=size)


def _make(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return _ClosedGroup(rank, size)  # type: ignore[call-arg]  # the stubs know another constructor


class _ClosedGroup(dist.ProcessGroup):
    def getBackendName(self) -> str:  # noqa: N802
        return _NAME


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "the process group was closed when training began, as faults= tolerates deaths and its collectives do not. Use "
        "replica.gather(value) for metrics; call gossip() for all models, and collectives of your own, before the first step. "
        "To keep the group open, make it yourself: torch.distributed.init_process_group() in place of initialize_dist()."
    )


for _operation in _OPERATIONS:
    setattr(_ClosedGroup, _operation, _refuse)
