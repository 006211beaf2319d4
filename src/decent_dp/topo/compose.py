"""Topologies made of others: one that mixes in some updates only, and one topology after another."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from decent_dp._checks import check_integer

from .abstract import Stage, Topology
from .edges import Edge
from .schedule import seated, turn_of

__all__ = ["Composition", "EveryTopology", "SwitchTopology"]


class Composition(Topology):
    """A topology made of others, which check their rounds. It is what its stages say."""

    def __init__(self, stages: Iterable[Stage], like: Topology, local_world_size: int) -> None:
        super().__init__(local_world_size, world_size=like._world_size, rank=like._rank)
        self._replica_weights = like._replica_weights
        self._own_stages = _that_mix(stages)

    def _stages(self) -> tuple[Stage, ...]:
        return self._own_stages

    def _restaged(self, change: Callable[[Stage], Stage]) -> Topology:
        made = copy.copy(self)
        made._own_stages = _that_mix(map(change, self._own_stages))
        return made

    @property
    def period(self) -> int | None:
        (stage, *more) = self._stages()
        period = stage.topology.period
        return None if more or period is None else period * stage.every

    def round(self, t: int) -> list[Edge]:
        return list(self._checked(t))

    def _checked(self, t: int) -> list[Edge]:
        stage, at, mixes = turn_of(self, t)
        return seated(self, stage.topology._checked(at), stage.members) if mixes else seated(self, [], ())

    def fingerprint(self) -> dict[str, str | int]:
        # Of the stages: the first 64 rounds may all be idle.
        stages = self._stages()
        found = [stage.topology.fingerprint()["rounds"] for stage in stages]
        if len(stages) > 1 or stages[0].every > 1:
            parts = [(s.every, s.start, s.start and s.members, part) for s, part in zip(stages, found, strict=True)]
            found = [hashlib.sha256(repr(parts).encode()).hexdigest()[:16]]
        return {"name": self._title(), "n": self._world_size, "rounds": found[0]}

    def _title(self) -> str:
        *turns, last = self._in_words(lambda part: part._title(), ", every {} updates")
        return ", then ".join([*(f"{part} for {k} update{'s' * (k > 1)}" for part, k in turns), last[0]])

    def __repr__(self) -> str:
        *turns, last = self._in_words(repr, ".every({})")
        return f"SwitchTopology({', '.join([*(f'({part}, {k})' for part, k in turns), last[0]])})" if turns else last[0]

    def _in_words(self, name: Callable[[Topology], str], every: str) -> list[tuple[str, int]]:
        """Each stage in words, and its number of updates (0 of the last one)."""
        stages = self._stages()
        words = [name(stage.topology) + (every.format(stage.every) if stage.every > 1 else "") for stage in stages]
        return list(zip(words, [after.start - stage.start for stage, after in pairwise(stages)] + [0], strict=True))


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
        h = check_integer("EveryTopology: h", h, 1)
        stages = [
            replace(stage, every=h * stage.every, start=h * stage.start, offset=offset, time=time) for stage in inner._stages()
        ]
        super().__init__(stages, inner, inner._local_world_size)


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
        form = "SwitchTopology((first, updates), ..., last)"
        if len(parts) < 2:
            raise TypeError(f"a switch needs two topologies at least, {form}; got {len(parts)}")
        *turns, last = parts
        for part in turns:
            if not (isinstance(part, tuple) and len(part) == 2):
                raise TypeError(f"every part but the last is a pair of a topology and its updates, {form}; got {part!r}")
        stages: list[Stage] = []
        start, local = 0, 1
        _check_part("SwitchTopology", last)
        for part, updates in [*turns, (last, None)]:
            _check_part("SwitchTopology", part)
            if (part._world_size, part._rank) != (last._world_size, last._rank):
                raise ValueError(
                    "SwitchTopology: all parts must be made for the same workers, got "
                    f"world_size={part._world_size}, rank={part._rank} and world_size={last._world_size}, rank={last._rank}"
                )
            stages += [replace(stage, start=start + stage.start) for stage in part._stages()]
            local = max(local, part._local_world_size)  # parts that ignore nodes may have been made without it
            if updates is not None:
                start += check_integer("SwitchTopology: the updates of a part", updates, 1)
                stages = [stage for stage in stages if stage.start < start]
        super().__init__(stages, last, local)


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, Topology):
        hint = " (this is a class: make one)" if isinstance(part, type) else ""
        raise TypeError(f"{name} is made of topologies, got {part!r}{hint}")


def _that_mix(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """The stages.

    Raises:
        ValueError: one of them would never mix.
    """
    found = tuple(stages)
    for stage, after in pairwise(found):
        if (length := after.start - stage.start) < stage.every:
            raise ValueError(
                f"SwitchTopology: {stage.topology._title()}, every {stage.every} updates, would never mix, as it is in use for "
                f"{length} update{'s' * (length > 1)} only: give it {stage.every} or more, or mix more often"
            )
    return found
