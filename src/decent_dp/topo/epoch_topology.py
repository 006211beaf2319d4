"""A topology that is rebuilt when the members change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .abstract import Stage, Topology
from .compose import Composition

__all__ = ["EpochTopology"]

_Change = tuple[int, tuple[int, ...]]


@dataclass
class _Line:
    """The changes: the first round of each, and its members. Shared by a topology and those that are made from it.

    Replaced as a whole, as threads read it.
    """

    changes: tuple[_Change, ...]


class EpochTopology(Composition):
    """From some round on the topology of other workers: one after the other, as the members of a run change.

    Members sit in the topology of as many workers in the order of their ranks. Each part starts with its round 0. All other
    workers are idle.

    Args:
        make: returns the topology of so many workers.
        world_size: of all workers, also of those that may come.
        rank: this worker.
        members: the number of the first ones; None: all.
    """

    def __init__(self, make: Callable[[int], Topology], *, world_size: int, rank: int, members: int | None = None) -> None:
        first = make(world_size if members is None else members)
        Topology.__init__(self, first._local_world_size, world_size=world_size, rank=rank)
        self._make, self._line = make, _Line(((0, tuple(range(first.world_size))),))
        self._changed: Callable[[Stage], Stage] = lambda stage: stage
        # The changes that are known, and the stages of each.
        self._known: tuple[tuple[_Change, ...], dict[_Change, tuple[Stage, ...]]] = ((), {})

    def change(self, start: int, members: Sequence[int], now: int = 0) -> None:
        """From round ``start`` on only ``members`` mix. What no exchange in flight needs in round ``now`` is forgotten."""
        changes, since = self._line.changes, now - 2 * max(stage.every for stage in self._stages())
        kept = [change for change, after in pairwise(changes) if after[0] > since]
        self._line.changes = (*kept, changes[-1], (start, tuple(sorted(members))))

    def restart(self) -> None:
        """The newest members mix in all rounds: their numbers may be earlier ones from now on."""
        self._line.changes = ((0, self._line.changes[-1][1]),)

    def _stages(self) -> tuple[Stage, ...]:
        (changes, made), newest = self._known, self._line.changes
        if changes is not newest:
            made = {change: made.get(change) or self._stages_of(*change) for change in newest}
            self._known = newest, made
        found: list[Stage] = []
        for change in newest:
            found = [stage for stage in found if stage.start < change[0]] + list(made[change])
        return tuple(found)

    def _stages_of(self, start: int, members: tuple[int, ...]) -> tuple[Stage, ...]:
        own = map(self._changed, self._make(len(members))._stages())
        return tuple(replace(stage, start=start + stage.start, members=members) for stage in own)

    def _restaged(self, change: Callable[[Stage], Stage]) -> Topology:
        before, made = self._changed, copy.copy(self)
        made._changed, made._known = lambda stage: change(before(stage)), ((), {})
        return made
