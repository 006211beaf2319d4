"""From what a user writes as ``topology=`` to a topology that fits the process group."""

from __future__ import annotations

import difflib
from typing import Any, cast

from .base import Topology, worker_scope
from .registry import TopologyReg

__all__ = ["make_topology"]


def make_topology(topology: str | Topology, *, local_world_size: int, world_size: int, rank: int) -> Topology:
    """The topology that ``topology`` names, made for these workers; an instance is checked and returned.

    Args:
        topology: a name in :attr:`TopologyReg.registry`, or a :class:`Topology`.
        local_world_size: workers a node, handed to what the name stands for.
        world_size: number of workers in the process group.
        rank: this worker's rank in the process group.

    Raises:
        TypeError: ``topology`` is neither, or what the name stands for does not return a :class:`Topology`.
        ValueError: the name is unknown, the topology does not serve so many workers or has an invalid round, or it was
            made for other workers.
    """
    if isinstance(topology, Topology):
        made: Any = topology
        what = f"the topology given, a {type(topology).__name__},"
    elif isinstance(topology, str):
        if topology not in TopologyReg.registry:
            raise ValueError(_unknown(topology))
        maker: Any = TopologyReg.registry[topology]
        if not callable(maker):
            raise TypeError(f"{_entry(topology)} must be a Topology subclass or return a Topology, got {maker!r}")
        with worker_scope(world_size, rank):
            made = maker(local_world_size)
        what = f"topology {topology!r}"
        if not isinstance(made, Topology):
            raise TypeError(f"{_entry(topology)} must return a Topology, got {made!r}")
    else:
        raise _neither(topology)
    if (made._world_size, made._rank) != (world_size, rank):
        raise ValueError(
            f"{what} was built for world_size={made._world_size}, rank={made._rank}, but here the process group has "
            f"world_size={world_size}, rank={rank}: make it with these, or leave both out"
        )
    return cast(Topology, made)


def _neither(topology: object) -> TypeError:
    hint = "; this is a class, so pass its registered name or make one" if isinstance(topology, type) else ""
    return TypeError(f"topology must be a registered name or a Topology, got {topology!r}{hint}")


def _entry(name: str) -> str:
    return f"TopologyReg.registry[{name!r}]"


def _unknown(name: str) -> str:
    names = list(TopologyReg.registry)
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    return f"unknown topology {name!r}{hint} Registered: {', '.join(map(repr, names))}"
