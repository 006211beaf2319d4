"""Plain gossip that removes what the steps of one replica have beyond the mean of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decent_dp._checks import check_number
from decent_dp.rules.base import Round, Rule
from decent_dp.topo import Topology

__all__ = ["DriftCorrection"]

# Rounds in which the corrections of replicas that differ must become smaller.
_ROUNDS = 256


@dataclass(frozen=True)
class DriftCorrection(Rule):
    """Gossip with a correction for workers whose data differ: every replica moves as the mean of all does.

    With data of its own kind, a replica drifts in its own direction between two mixes, and the mix pulls it back by the
    difference ``d``. So what the mix does to it, averaged over some rounds, is minus its drift ``c``. At each mix,

        c  <-  decay·c - gain·d          x  <-  x + d - c

    The differences of all replicas add up to zero, and so do their corrections: the mean of the replicas moves by the mean of
    their steps, as under plain gossip. A drift that lasts is cancelled up to its part ``1 - share``. The noise of single steps
    is reduced as well, so that replicas are closer together. This is the control variate of ProxSkip (arXiv 2202.09357) and
    SCAFFOLD (arXiv 1910.06378), without exchanges of its own, and for any optimizer and topology.

    A worker that sits a mix out moves by its correction too. The state is one more copy of the parameters, of at least float32.

    Args:
        gain: in (0, 0.5). The larger, the faster a drift is found. If it takes r rounds until a worker has met all others in
            turn, it must be below 2/r, or the corrections oscillate and grow: with 'base-2' and 'one-peer-exp', r is log2 of
            their number.
        decay: in [0, 1): the part of the correction that is kept at each mix.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    gain: float = 0.2
    decay: float = 0.99

    def __post_init__(self) -> None:
        gain = check_number("gain of DriftCorrection", self.gain, "in (0, 0.5)", above=0.0, below=0.5)
        decay = check_number("decay of DriftCorrection", self.decay, "in [0, 1)", at_least=0.0, below=1.0)
        object.__setattr__(self, "gain", gain)
        object.__setattr__(self, "decay", decay)

    @property
    def share(self) -> float:
        """The part of a constant drift that is cancelled: with c = -gain·d/(1 - decay) and d = c - drift."""
        return self.gain / (self.gain + 1 - self.decay)

    def check(self, topology: Topology) -> None:
        """Raises ValueError if the corrections of replicas that take no steps grow."""
        if self._grows(topology, self.gain):
            smaller = next((gain for gain in (0.1, 0.05, 0.02, 0.01) if not self._grows(topology, gain)), None)
            advice = "another rule" if smaller is None else f"gain={smaller}"
            raise ValueError(
                f"{self!r} does not work with {topology!r}: the corrections of {topology.world_size} replicas oscillate there, "
                f"and grow. Use {advice}."
            )

    def _grows(self, topology: Topology, gain: float) -> bool:
        last = topology._final_part()[0]
        rng = np.random.default_rng(0)
        x, drift = rng.normal(size=(last.world_size, 2)), np.zeros((last.world_size, 2))
        norms = []
        for t in range(_ROUNDS):
            difference = np.zeros_like(x)
            for edge in last.round(t):
                own = x[edge.ranks]
                if len(own) > 1:
                    others = (own.sum(0) - own) / (len(own) - 1)
                    difference[edge.ranks] = (1 - edge.weight) * (others - own)
            drift = self.decay * drift - gain * difference
            x += difference - drift
            norms.append(float(np.linalg.norm(drift)))
        quarter = _ROUNDS // 4
        return max(norms[-quarter:]) > max(norms[quarter : 2 * quarter])

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"drift": torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))}

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        if not round.mixes:
            return
        drift = state["drift"].mul_(self.decay)
        if difference is None:
            values.sub_(drift)
            return
        drift.sub_(difference * self.gain)
        values.add_(difference.sub_(drift))
