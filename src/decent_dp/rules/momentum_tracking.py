"""Gossip of the momentum beside the parameters, so that every worker steps along the momentum of all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from decent_dp.rules.rule import Round, Rule
from decent_dp.topo import Topology, schedule

__all__ = ["MomentumTracking"]


@dataclass(frozen=True)
class MomentumTracking(Rule):
    """Every worker steps along an estimate of the momentum of all workers, also if their data differ.

    Let ``m`` be a worker's own momentum, an average of its own gradients. It keeps a tracked momentum ``y``, changes it in
    each step by what its own has changed, and mixes it with its neighbours as the parameters:

        y  <-  y + (m_new - m_old)          y  <-  y + d

    The differences ``d`` of all workers add up to zero, so that the mean of ``y`` over the workers is the mean of their
    momenta, exactly and on any topology, and each ``y`` comes close to it in as many rounds as the topology needs. The
    optimizer's momentum is ``y``; it gets the gradient ``g + (y - m)``, which is the same change (``optim.tracking``). This is
    Momentum Tracking (arXiv 2209.15505), under any optimizer that steps by a function of its momentum.

    With overlap, an exchange ends one update after it began. The parameters are then sent one step ahead: with their last step
    added once more, which is nearly the next one. So replicas are closer together, at the same bytes, and the mean moves as
    without it.

    Twice the bytes are sent. In memory are one more momentum, messages for twice the parameters, and with overlap two copies of
    the parameters.

    Args:
        momentum: the name of the entry in the optimizer's state that is its momentum, an exponential average of the gradients
            (m <- β·m + (1-β)·g). None: known, of ``GossipAdamW``, ``torch.optim.Muon``, ``torch.optim.SGD`` and any ``Lion``.
        ahead: the number of steps that the parameters are sent ahead. 0 is set by itself without overlap or with ``mix_every``.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    momentum: str | None = None
    ahead: int = 1

    acts_alone = False
    is_saved = False

    def __post_init__(self) -> None:
        if not (self.momentum is None or isinstance(self.momentum, str)):
            raise TypeError(f"momentum of MomentumTracking must be the name of an entry of the state, got {self.momentum!r}")
        if self.ahead not in (0, 1):
            raise ValueError(f"ahead of MomentumTracking must be 0 or 1, got {self.ahead!r}")

    def fit(self, topology: Topology, *, lossy: bool, partial: bool) -> MomentumTracking:
        # Between two mixes with mix_every are several steps, which say little of those to come.
        return dataclasses.replace(self, ahead=0) if schedule.longest_turn(topology) > 1 else self

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"before": values.clone(), "proposal": values.clone()} if self.ahead else {}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        if not self.ahead:
            return values
        before, proposal = state["before"], state["proposal"]
        # Not in place of an add with alpha, which is fused in vectors and not in their tails.
        proposal.copy_(values + (values - before))
        before.copy_(values)
        return proposal

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        if difference is not None:
            values.add_(difference)
            if self.ahead:
                state["before"].add_(difference)
