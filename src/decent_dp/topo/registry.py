"""The names of topologies, and how ``topology=`` becomes a topology that fits the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from decent_dp._checks import check_integer, did_you_mean

from .abstract import Topology, worker_scope
from .compose import SwitchTopology

__all__ = ["TopologyReg", "counts_replicas", "make_topology", "names_that_fit", "why_unfit"]

# They tell nodes apart.
_KNOW_NODES = ("hierarchical", "alternating-exp-ring")

logger = logging.getLogger(__name__)

Maker = TypeVar("Maker", bound="Callable[[int], Topology]")


class TopologyReg:
    """The registry of topologies: ``topology='ring'`` means ``TopologyReg.registry['ring'](local_world_size)``.

    Attributes:
        registry: name to `Topology` subclass, or to any callable that takes ``local_world_size`` and returns
            a topology. It is a plain dict and may be written to directly.
    """

    registry: ClassVar[dict[str, Callable[[int], Topology]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[Maker], Maker]:
        """Register the decorated class (or function of ``local_world_size``) under ``name``.

        A name that is registered already is replaced, with a warning in the log.

        Raises:
            TypeError: ``name`` is not a string, as in a bare ``@TopologyReg.register``; or the decorated object cannot
                be called.
        """
        if not isinstance(name, str):
            raise TypeError(f"TopologyReg.register needs a name, as in @TopologyReg.register('my-topology'), got {name!r}")

        def add(maker: Maker) -> Maker:
            if not callable(maker):
                raise TypeError(f"{name!r} must be a Topology subclass or a callable that returns one, got {maker!r}")
            known = cls.registry.get(name)
            if known is not None and known is not maker:
                logger.warning("topology %r was %r and is now %r", name, known, maker)
            cls.registry[name] = maker
            return maker

        return add


def make_topology(topology: str | Topology, *, local_world_size: int, world_size: int, rank: int) -> Topology:
    """The topology that ``topology`` names, made for these workers; an instance is checked and returned.

    Args:
        topology: a name in `TopologyReg.registry`; several, each but the last with its number of updates, such as
            ``"complete:500,base-2"``; or a `Topology`.
        local_world_size: workers per node, the argument of the registered class or function.
        world_size: number of workers in the process group.
        rank: this worker's rank in the process group.

    Raises:
        TypeError: ``topology`` is neither, or the registered function does not return a `Topology`.
        ValueError: a name is unknown, or lacks its number of updates; the topology does not fit so many workers or has an
            invalid round; or it was made for other workers.
    """
    if isinstance(topology, Topology):
        made: Any = topology
        what = f"the topology given, a {type(topology).__name__},"
    elif isinstance(topology, str):
        what = f"topology {topology!r}"
        with worker_scope(world_size, rank):
            # A registered name may contain ':' and ','.
            if topology in TopologyReg.registry or not set(":,") & set(topology):
                made = _by_name(topology, local_world_size)
            else:
                made = _switch(topology, local_world_size)
    else:
        is_class = isinstance(topology, type)  # type: ignore[unreachable]
        hint = "; this is a class, so pass its registered name or make one" if is_class else ""
        raise TypeError(f"topology must be a registered name or a Topology, got {topology!r}{hint}")
    if (made._world_size, made._rank) != (world_size, rank):
        raise ValueError(
            f"{what} was built for world_size={made._world_size}, rank={made._rank}, but is used with "
            f"world_size={world_size}, rank={rank}: make it with these, or leave both out"
        )
    return cast(Topology, made)


def counts_replicas(topology: object) -> bool:
    """Whether a topology means the same for nodes as for workers: those of this package that do not tell nodes apart.

    One that the user has made or registered counts workers, as it was written for them.
    """
    if not isinstance(topology, str):
        return False
    names = [topology] if topology in TopologyReg.registry else [part.split(":")[0].strip() for part in topology.split(",")]
    modules = {name: getattr(TopologyReg.registry.get(name), "__module__", "") for name in names}
    return all(module.startswith("decent_dp.") and name not in _KNOW_NODES for name, module in modules.items())


def why_unfit(name: str, world_size: int, local_world_size: int) -> str | None:
    """The reason why the registered topology ``name`` does not fit so many workers, or None.

    A class is asked (its ``unfit``), and a function is called. An error in either is a reason, too.

    Raises:
        ValueError: the name is unknown, or a number is less than 1.
        TypeError: a number is not an integer.
    """
    world_size = check_integer("world_size", world_size, 1)
    local_world_size = check_integer("local_world_size", local_world_size, 1)
    if name not in TopologyReg.registry:
        raise ValueError(_unknown(name))
    kind: Any = TopologyReg.registry[name]
    try:
        if isinstance(kind, type) and issubclass(kind, Topology):
            return kind.unfit(world_size, local_world_size)
        make_topology(name, local_world_size=local_world_size, world_size=world_size, rank=0)
    except Exception as error:
        reason = error if isinstance(error, (TypeError, ValueError)) else f"{_entry(name)} raised {error!r}"
        return f"cannot be made: {reason}"
    return None


def names_that_fit(world_size: int, local_world_size: int = 1) -> list[str]:
    """The registered topologies that fit ``world_size`` workers with ``local_world_size`` per node.

    Raises:
        TypeError, ValueError: a number is not an integer, or less than 1.
    """
    return [name for name in TopologyReg.registry if why_unfit(name, world_size, local_world_size) is None]


def _by_name(name: str, local_world_size: int, text: str | None = None) -> Topology:
    """The topology of a registered name; ``text`` is the whole text if the name is a part of one."""
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
    """The topology of a text such as "complete:500,base-2"."""
    *before, last = (part.strip() for part in text.split(","))
    parts: list[tuple[Topology, int]] = []
    for part in before:
        name, _, updates = part.rpartition(":")
        if not (name and updates.isdecimal() and int(updates) > 0):
            raise ValueError(
                f"topology {text!r}: {part!r} must be a name and a number of updates, such as 'complete:500'; "
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


def _entry(name: str) -> str:
    return f"TopologyReg.registry[{name!r}]"


def _unknown(name: str, text: str | None = None) -> str:
    names = list(TopologyReg.registry)
    hint = did_you_mean(name, names) or "."
    where = ""
    if text is not None:
        where = f"topology {text!r}: "
        if not name or set(":;") & set(name):
            hint += " Several are written 'complete:500,base-2'."
    return f"{where}unknown topology {name!r}{hint} Registered: {', '.join(map(repr, names))}"
