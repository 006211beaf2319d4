"""From what a user writes as ``topology=`` to a topology that fits the process group."""

from __future__ import annotations

import difflib
from typing import Any, cast

from .base import Topology, listing, worker_scope
from .compose import SwitchTopology
from .edges import _integer
from .registry import TopologyReg

__all__ = ["make_topology", "names_that_fit", "why_unfit"]


def make_topology(topology: str | Topology, *, local_world_size: int, world_size: int, rank: int) -> Topology:
    """The topology that ``topology`` names, made for these workers; an instance is checked and returned.

    Args:
        topology: a name in :attr:`TopologyReg.registry`; several, each but the last with the number of updates that it is in
            use, ``"complete:500,base-2"``; or a :class:`Topology`.
        local_world_size: workers a node, handed to what the name stands for.
        world_size: number of workers in the process group.
        rank: this worker's rank in the process group.

    Raises:
        TypeError: ``topology`` is neither, or what the name stands for does not return a :class:`Topology`.
        ValueError: a name is unknown, or has no number of updates where it needs one; the topology does not serve so many
            workers or has an invalid round; or it was made for other workers.
    """
    if isinstance(topology, Topology):
        made: Any = topology
        what = f"the topology given, a {type(topology).__name__},"
    elif isinstance(topology, str):
        what = f"topology {topology!r}"
        with worker_scope(world_size, rank):
            # A name that is registered as it stands is that name, whatever signs are in it.
            if topology in TopologyReg.registry or not set(":,") & set(topology):
                made = _by_name(topology, local_world_size)
            else:
                made = _switch(topology, local_world_size)
    else:
        raise _neither(topology)
    if (made._world_size, made._rank) != (world_size, rank):
        raise ValueError(
            f"{what} was built for world_size={made._world_size}, rank={made._rank}, but here the process group has "
            f"world_size={world_size}, rank={rank}: make it with these, or leave both out"
        )
    return cast(Topology, made)


def why_unfit(name: str, world_size: int, local_world_size: int) -> str | None:
    """Why the registered topology ``name`` cannot serve so many workers, in words that go on from its name; None: it can.

    What is registered is asked (a class by its ``unfit``) or tried (a function); whatever it raises is a reason.

    Raises:
        ValueError: the name is unknown, or a number is less than 1.
        TypeError: a number is not an integer.
    """
    world_size, local_world_size = _workers(world_size, local_world_size)
    if name not in TopologyReg.registry:
        raise ValueError(_unknown(name))
    kind: Any = TopologyReg.registry[name]
    token = listing.set(True)
    try:
        if isinstance(kind, type) and issubclass(kind, Topology):
            return kind.unfit(world_size, local_world_size)
        make_topology(name, local_world_size=local_world_size, world_size=world_size, rank=0)
    except Exception as error:
        told = error if isinstance(error, (TypeError, ValueError)) else f"{_entry(name)} raised {error!r}"
        return f"cannot be made: {told}"
    finally:
        listing.reset(token)
    return None


def names_that_fit(world_size: int, local_world_size: int = 1) -> list[str]:
    """The registered topologies that serve ``world_size`` workers with ``local_world_size`` a node.

    Raises:
        TypeError, ValueError: a number is not an integer, or less than 1.
    """
    _workers(world_size, local_world_size)
    return [name for name in TopologyReg.registry if why_unfit(name, world_size, local_world_size) is None]


def _workers(world_size: int, local_world_size: int) -> tuple[int, int]:
    return _integer("world_size", world_size, 1), _integer("local_world_size", local_world_size, 1)


def _by_name(name: str, local_world_size: int, text: str | None = None) -> Topology:
    """What a name stands for; ``text`` is all that was written, if the name is a part of it."""
    if name not in TopologyReg.registry:
        raise ValueError(_unknown(name, text))
    maker: Any = TopologyReg.registry[name]
    if not callable(maker):
        raise TypeError(f"{_entry(name)} must be a Topology subclass or return a Topology, got {maker!r}")
    made = maker(local_world_size)
    if not isinstance(made, Topology):
        raise TypeError(f"{_entry(name)} must return a Topology, got {made!r}")
    return made


def _switch(text: str, local_world_size: int) -> Topology:
    """What ``text``, such as "complete:500,base-2", says."""
    *turns, last = (part.strip() for part in text.split(","))
    parts: list[tuple[Topology, int]] = []
    for turn in turns:
        name, _, updates = turn.rpartition(":")
        if not (name and updates.isdecimal() and int(updates) > 0):
            raise ValueError(
                f"topology {text!r}: {turn!r} must be a name and for how many updates, such as 'complete:500'; "
                "the last part is a name alone"
            )
        parts.append((_by_name(name, local_world_size, text), int(updates)))
    if last not in TopologyReg.registry and last.rpartition(":")[2].strip().isdecimal():
        raise ValueError(
            f"topology {text!r}: its last part, {last!r}, goes on for ever: give it without a number of updates, as in "
            "'complete:500,base-2'"
        )
    final = _by_name(last, local_world_size, text)
    return cast(Topology, SwitchTopology(*parts, final)) if parts else final


def _neither(topology: object) -> TypeError:
    hint = "; this is a class, so pass its registered name or make one" if isinstance(topology, type) else ""
    return TypeError(f"topology must be a registered name or a Topology, got {topology!r}{hint}")


def _entry(name: str) -> str:
    return f"TopologyReg.registry[{name!r}]"


def _unknown(name: str, text: str | None = None) -> str:
    names = list(TopologyReg.registry)
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f": did you mean {close[0]!r}?" if close else "."
    where = ""
    if text is not None:
        where = f"topology {text!r}: "
        if not name or set(":;") & set(name):
            hint += " Several are written 'complete:500,base-2'."
    return f"{where}unknown topology {name!r}{hint} Registered: {', '.join(map(repr, names))}"
