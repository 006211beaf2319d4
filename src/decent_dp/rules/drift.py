"""Plain gossip that takes out of a replica's movement what its neighbours pull back again and again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from decent_dp._checks import check_number
from decent_dp.rules.growth import grows
from decent_dp.rules.rule import Round, Rule
from decent_dp.topo import Topology

__all__ = ["DriftCorrection"]

# The gains to choose from.
_GAINS = (0.2, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True)
class DriftCorrection(Rule):
    """Gossip for workers whose data differ: every replica moves nearly as the mean of all does.

    With data of its own kind, a replica drifts in a direction of its own between two mixes, and the mix pulls it back by the
    difference d. The rule estimates the drift D from these pulls, and removes it. In each round,

        D  <-  decay·D - gain·d          x  <-  x + d - D

    The differences of all replicas add up to zero, and so do all D: the mean of the replicas moves by the mean of their steps,
    as under plain gossip. A lasting drift is cancelled up to the part (1 - decay)/(1 - decay + gain). The noise of single
    steps becomes smaller, too, so that replicas are closer together. This is the control variate of ProxSkip (arXiv
    2202.09357) and SCAFFOLD (arXiv 1910.06378), without exchanges of its own, for any optimizer and topology.

    A worker that sits a round out moves by its D, too. The state is one more copy of the parameters, of at least float32. If a
    worker alone loads parameters in the middle of a run, its D starts anew, and the mean moves by what is missing: load on all.

    Args:
        gain: in (0, 0.5). The larger, the faster a drift is found. None: 0.2, or the largest of 0.1, 0.05, 0.02 and 0.01 with
            which D does not oscillate and grow. That depends on the number of rounds r in which a worker meets all others in
            turn: the gain must be below about 2/r.
        decay: in [0, 1): the part of D that is kept in each round.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    gain: float | None = None
    decay: float = 0.99

    def __post_init__(self) -> None:
        if self.gain is not None:
            gain = check_number("gain of DriftCorrection", self.gain, "in (0, 0.5)", above=0.0, below=0.5)
            object.__setattr__(self, "gain", gain)
        decay = check_number("decay of DriftCorrection", self.decay, "in [0, 1)", at_least=0.0, below=1.0)
        object.__setattr__(self, "decay", decay)

    @property
    def scale(self) -> float:
        """The ratio of D to a lasting drift, of a rule that is fitted to a topology."""
        assert self.gain is not None, "the rule is fitted to a topology"
        # From D = -gain·d/(1 - decay) and, in balance, d = D - drift.
        return self.gain / (self.gain + 1 - self.decay)

    def fit(self, topology: Topology, *, lossy: bool, partial: bool) -> DriftCorrection:
        """Returns the rule with a gain for this topology.

        Raises:
            ValueError: D would grow, or it would add up the errors of rounded means.
        """
        if partial:
            raise ValueError(
                "DriftCorrection does not work with compression='low-rank:...': a mix removes the difference in a few "
                "directions only, and the correction in the others grows. Use compression=None, 'bfloat16' or 'int8', or "
                "another rule."
            )
        if Topology.longest_turn(topology) > 1:
            raise ValueError(
                f"DriftCorrection does not work with {topology!r}: it needs a mix in every round, because a correction for "
                "several steps at once is taken for a drift by the next of them, and grows. Use mix_every=1, or another rule."
            )
        if lossy and (largest := Topology.largest_group(topology)) > 2:
            raise ValueError(
                f"DriftCorrection would add up the rounding errors of means: {topology!r} mixes groups of {largest} workers, "
                "and numbers are rounded on the way (compression, or parameters of less than 32 bits). Use compression=None "
                "with float32 parameters, or a topology of pairs, such as 'random-matching'."
            )
        wanted = _GAINS if self.gain is None else (self.gain,)
        gain = next((gain for gain in wanted if not grows(dataclasses.replace(self, gain=gain), topology)), None)
        if gain is not None:
            return dataclasses.replace(self, gain=gain)
        smaller = (gain for gain in _GAINS if self.gain is not None and gain < self.gain)
        works = next((gain for gain in smaller if not grows(dataclasses.replace(self, gain=gain), topology)), None)
        raise ValueError(
            f"{self!r} does not work with {topology!r}: the corrections of {topology.world_size} replicas oscillate there, and "
            f"grow. Use {'another rule' if works is None else f'gain={works}'}."
        )

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"drift": torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))}

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        assert self.gain is not None, "the rule is fitted to a topology"
        drift = state["drift"].mul_(self.decay)
        if difference is None:
            values.sub_(drift)
            return
        drift.sub_(difference * self.gain)
        values.add_(difference.sub_(drift))
