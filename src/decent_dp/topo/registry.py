"""The names under which topologies are found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from .base import Topology

__all__ = ["TopologyReg"]

logger = logging.getLogger(__name__)

Maker = TypeVar("Maker", bound="Callable[[int], Topology]")


class TopologyReg:
    """The registry of topologies: ``topology='ring'`` means ``TopologyReg.registry['ring'](local_world_size)``.

    Attributes:
        registry: name to :class:`Topology` subclass, or to any callable that takes ``local_world_size`` and returns
            a topology. It is a plain dict and may be written to directly.
    """

    registry: ClassVar[dict[str, Callable[[int], Topology]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[Maker], Maker]:
        """Register the decorated class (or function of ``local_world_size``) under ``name``.

        A name that is taken is replaced, with a warning in the log.

        Raises:
            TypeError: ``name`` is not a string, as in a bare ``@TopologyReg.register``; or what is decorated cannot
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
