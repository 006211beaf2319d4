"""Rules as users write them, for tests of their calls and of their state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
