"""Rules as users write them, for tests of their calls and of their state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from decent_dp.rules import Round, Rule


@dataclass(frozen=True)
class MomentumGossip(Rule):
    """Gossip with a momentum of the mixes: replicas come closer with the same bytes."""

    beta: float = 0.3

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"speed": torch.zeros_like(values)}

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        speed = state["speed"].mul_(self.beta)
        if difference is not None:
            speed.add_(difference)
        values.add_(speed)


@dataclass(frozen=True)
class Scaled(Rule):
    """Plain gossip that proposes ``scale`` times the parameters, a power of two: the numbers are those of plain gossip."""

    scale: float = 1024.0

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"scaled": values * self.scale}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        return torch.mul(values, self.scale, out=state["scaled"])

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        if difference is not None:
            values.add_(difference.div_(self.scale))


class Recorder(Rule):
    """Plain gossip that records its calls. Every element has a number, which is in its state.

    Class attributes: the calls in this process. A rule's own attributes are settings.
    """

    # ("propose" or "apply", round, which elements: an index; whether something came)
    log: ClassVar[list[tuple[str, int, Any, bool]]] = []
    numbered: ClassVar[int] = 0

    @classmethod
    def begin(cls) -> None:
        cls.log.clear()
        cls.numbered = 0

    def state(self, values: Tensor) -> dict[str, Tensor]:
        first = Recorder.numbered
        Recorder.numbered += values.numel()
        return {"number": torch.arange(first, Recorder.numbered).view(values.shape)}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        self._note("propose", values, state, round, came=False)
        return values

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        assert difference is None or difference.shape == values.shape
        self._note("apply", values, state, round, came=difference is not None)
        if difference is not None:
            values.add_(difference)

    def _note(self, verb: str, values: Tensor, state: dict[str, Tensor], round: Round, *, came: bool) -> None:
        assert isinstance(round, Round)
        assert state.keys() == {"number"}
        numbers = state["number"].reshape(-1)
        assert state["number"].shape == values.shape
        if len(numbers):
            first, last = int(numbers[0]), int(numbers[-1]) + 1
            there: Any = slice(first, last)
            if last - first != len(numbers) or not bool((numbers.diff() == 1).all()):
                there = numbers.numpy().copy()  # rows of the simulator's
            self.log.append((verb, round.number, there, came))


def settings_of_any_kind() -> Any:
    """A rule with settings of every JSON type."""
    return Versatile(name="a", steps=(1, 2), nested=[[0.5, None], [True]])


@dataclass(frozen=True)
class Versatile(Rule):
    """Plain gossip with settings of many kinds and its own tensor."""

    name: str = ""
    steps: tuple[int, ...] = ()
    nested: Any = None
    # Names that are also settings of the run.
    overlap: bool = True
    compression: str | None = ""
    mix_every: int = 7

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"sum": torch.zeros_like(values)}

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        if difference is not None:
            state["sum"].add_(difference)
            values.add_(difference)
