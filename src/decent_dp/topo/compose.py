"""Topologies made of others: one that mixes in some updates only, and one topology after another."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from decent_dp._checks import check_integer

from .abstract import Stage, Topology, Turn
from .edges import Edge

__all__ = ["Composition", "EveryTopology", "SwitchTopology"]


class Composition(Topology):
    """A topology made of others. Its parts check their rounds."""

    @abstractmethod
    def _turn(self, t: int) -> Turn: ...

    @abstractmethod
    def _stages(self) -> list[Stage]: ...

    def round(self, t: int) -> list[Edge]:
        return list(self._checked(t))

    def _checked(self, t: int) -> list[Edge]:
        turn = self._turn(check_integer("round", t, 0))
        return self._seated(turn.topology._checked(turn.round), turn.members) if turn.mixes else self._seated([], ())


class EveryTopology(Composition):
    """Another topology, in every ``h``-th update only: the result of `Topology.every`.

    Update t mixes if t + 1 - offset is a multiple of h, with round ``t // h`` of the other topology: its rounds are counted in
    mixes. (If they were counted in updates, a period that has a factor in common with h would never use some of its rounds.) In
    all other updates every worker is idle.

    Args:
        inner: the topology that mixes.
        h: updates from one mix to the next.
        offset: in [0, h).
        time: updates that an exchange has to arrive, in [1, h].
    """

    def __init__(self, inner: Topology, h: int, offset: int = 0, time: int = 1) -> None:
        _check_part("EveryTopology", inner)
        super().__init__(inner._local_world_size, world_size=inner._world_size, rank=inner._rank)
        self._inner, self._h = inner, check_integer("EveryTopology: h", h, 1)
        self._offset, self._updates, self._replica_weights = offset, time, inner._replica_weights

    @property
    def period(self) -> int | None:
        period = self._inner.period
        return None if period is None else period * self._h

    def _turn(self, t: int) -> Turn:
        turn = self._inner._turn(t // self._h)
        return replace(turn, mixes=turn.mixes and (t + 1 - self._offset) % self._h == 0, updates=self._updates)

    def _stages(self) -> list[Stage]:
        return [replace(stage, updates=self._h * stage.updates) for stage in self._inner._stages()]

    def _spread(self, start: int, stop: int, total: int) -> Topology:
        first, last = self._h * start // total, self._h * stop // total
        offset = min(first, self._h - 1)  # the last part may be empty
        return EveryTopology(self._inner, self._h, offset, max(1, last - offset))

    def _every(self, h: int) -> Topology:
        return EveryTopology(self._inner, self._h * h, self._offset, self._updates)

    def _title(self) -> str:
        return f"{self._inner._title()}, every {self._h} updates"

    def fingerprint(self) -> dict[str, str | int]:
        # Of the parts: the first 64 rounds may all be idle.
        return _composed(self, [(self._h, self._inner)])

    def __repr__(self) -> str:
        return f"{self._inner!r}.every({self._h})"


class SwitchTopology(Composition):
    """One topology after another: ``SwitchTopology((complete, 500), ring)`` is ``complete`` for 500 updates, then ``ring``.

    Each part starts with its round 0. A round depends on the number of the update alone, so a resumed training goes on with
    the right part. By name: ``topology="complete:500,ring"``.

    Args:
        parts: each a pair of a topology and its number of updates; the last a topology alone, which stays in use. All made
            for the same workers.

    Raises:
        TypeError: a part is neither.
        ValueError: a number of updates is less than 1, or too small for a part to mix once, or parts were made for different
            workers.
    """

    def __init__(self, *parts: Any) -> None:
        topologies, lengths = _read_parts(parts)
        last = topologies[-1]
        for part in topologies:
            if (part._world_size, part._rank) != (last._world_size, last._rank):
                raise ValueError(
                    "SwitchTopology: all parts must be made for the same workers, got "
                    f"world_size={part._world_size}, rank={part._rank} and world_size={last._world_size}, rank={last._rank}"
                )
        for part, length in zip(topologies, lengths, strict=False):
            if isinstance(part, EveryTopology) and length < part._h:
                raise ValueError(
                    f"SwitchTopology: {part._title()}, would never mix, as it is in use for {length} "
                    f"update{'s' * (length > 1)} only: give it {part._h} or more, or mix more often"
                )
        # Parts that ignore nodes may have been made without local_world_size.
        local = max(part._local_world_size for part in topologies)
        super().__init__(local, world_size=last._world_size, rank=last._rank)
        self._parts, self._lengths, self._replica_weights = topologies, lengths, last._replica_weights
        self._starts = [sum(lengths[:i]) for i in range(len(topologies))]

    def _turn(self, t: int) -> Turn:
        index = bisect_right(self._starts, t) - 1
        return self._parts[index]._turn(t - self._starts[index])

    def _stages(self) -> list[Stage]:
        return [stage for part in self._parts for stage in part._stages()]

    def _of_each(self, derive: Callable[[Topology], Topology]) -> Topology:
        parts = [derive(part) for part in self._parts]
        return SwitchTopology(*zip(parts, self._lengths, strict=False), parts[-1])

    def _spread(self, start: int, stop: int, total: int) -> Topology:
        return self._of_each(lambda part: part._spread(start, stop, total))

    def _every(self, h: int) -> Topology:
        # Inside the parts, so that their lengths are counted in updates, not in mixes.
        return self._of_each(lambda part: Topology.every(part, h))

    def _title(self) -> str:
        turns = [f"{part._title()} for {k} update{'s' * (k > 1)}" for part, k in zip(self._parts, self._lengths, strict=False)]
        return ", then ".join([*turns, self._parts[-1]._title()])

    def fingerprint(self) -> dict[str, str | int]:
        return _composed(self, list(zip(self._starts, self._parts, strict=True)))

    def __repr__(self) -> str:
        turns = [f"({part!r}, {k})" for part, k in zip(self._parts, self._lengths, strict=False)]
        return f"SwitchTopology({', '.join([*turns, repr(self._parts[-1])])})"


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, Topology):
        hint = " (this is a class: make one)" if isinstance(part, type) else ""
        raise TypeError(f"{name} is made of topologies, got {part!r}{hint}")


def _read_parts(parts: tuple[Any, ...]) -> tuple[list[Topology], list[int]]:
    """All topologies, and the number of updates of each but the last."""
    form = "SwitchTopology((first, updates), ..., last)"
    if len(parts) < 2:
        raise TypeError(f"a switch needs two topologies at least, {form}; got {len(parts)}")
    for part in parts[:-1]:
        if not (isinstance(part, tuple) and len(part) == 2):
            raise TypeError(f"every part but the last is a pair of a topology and its updates, {form}; got {part!r}")
    topologies = [part for part, _ in parts[:-1]] + [parts[-1]]
    for topology in topologies:
        _check_part("SwitchTopology", topology)
    return topologies, [check_integer("SwitchTopology: the updates of a part", k, 1) for _, k in parts[:-1]]


def _composed(whole: Topology, parts: list[tuple[int, Topology]]) -> dict[str, str | int]:
    """The fingerprint of a composed topology: of its parts', each with its number."""
    digest = hashlib.sha256(type(whole).__name__.encode())
    for number, part in parts:
        found = part.fingerprint()
        digest.update(f"{number} {found['name']} {found['rounds']} ".encode())
    return {"name": whole._title(), "n": whole._world_size, "rounds": digest.hexdigest()[:16]}
