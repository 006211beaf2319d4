"""A topology that is rebuilt when the members change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .abstract import Stage, Topology, Turn
from .compose import Composition

__all__ = ["EpochTopology"]


@dataclass
class _Line:
    """The changes: the first round of each, and its members. Shared by a topology and those that are made from it.

    Replaced as a whole, as threads read it.
    """

    changes: tuple[tuple[int, tuple[int, ...]], ...]


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
        super().__init__(first._local_world_size, world_size=world_size, rank=rank)
        self._make, self._line = make, _Line(((0, tuple(range(first.world_size))),))
        self._made = {self._line.changes[0]: first}

    def change(self, start: int, members: Sequence[int], now: int = 0) -> None:
        """From round ``start`` on only ``members`` mix. What no exchange in flight needs in round ``now`` is forgotten."""
        changes, since = self._line.changes, now - 2 * max(stage.updates for stage in self._stages())
        kept = [change for change, after in pairwise(changes) if after[0] > since]
        self._line.changes = (*kept, changes[-1], (start, tuple(sorted(members))))

    def restart(self) -> None:
        """The newest members mix in all rounds: their numbers may be earlier ones from now on."""
        self._line.changes = ((0, self._line.changes[-1][1]),)

    def _from(self, derive: Callable[[Topology], Topology]) -> Topology:
        """Made from this one, part by part, as the parts are that come later."""
        members = len(self._line.changes[0][1])
        made = EpochTopology(lambda n: derive(self._make(n)), world_size=self._world_size, rank=self._rank, members=members)
        made._line = self._line
        return made

    def _at(self, t: int) -> tuple[Topology, int, tuple[int, ...]]:
        """The topology in use in round ``t``, the number of its round, and its members."""
        changes = self._line.changes
        change = next((change for change in reversed(changes) if change[0] <= t), changes[0])
        if change not in self._made:
            kept = {key: made for key, made in self._made.items() if key in changes}
            self._made = {**kept, change: self._make(len(change[1]))}
        return self._made[change], max(t - change[0], 0), change[1]

    @property
    def _last(self) -> Topology:
        return self._at(self._line.changes[-1][0])[0]

    @property
    def period(self) -> int | None:
        return self._last.period if len(self._line.changes) == 1 else None

    def _turn(self, t: int) -> Turn:
        inner, at, members = self._at(t)
        return replace(inner._turn(at), members=members)

    def _stages(self) -> list[Stage]:
        inner, _, members = self._at(self._line.changes[-1][0])
        return [replace(stage, members=members) for stage in inner._stages()]

    def _spread(self, start: int, stop: int, total: int) -> Topology:
        return self._from(lambda topology: topology._spread(start, stop, total))

    def _every(self, h: int) -> Topology:
        return self._from(lambda topology: Topology.every(topology, h))

    def _title(self) -> str:
        return self._last._title()

    def fingerprint(self) -> dict[str, str | int]:
        found = self._last.fingerprint()
        if len(self._line.changes) == 1:
            return found
        digest = hashlib.sha256(f"{self._line.changes} {found['rounds']}".encode())
        return {"name": found["name"], "n": self._world_size, "rounds": digest.hexdigest()[:16]}

    def __repr__(self) -> str:
        return repr(self._last)
