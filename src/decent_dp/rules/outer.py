"""An outer optimizer: momentum over the progress of the workers between two mixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decent_dp.rules.momentum import MomentumRule
from decent_dp.rules.rule import Round

__all__ = ["OuterNesterov"]


@dataclass(frozen=True)
class OuterNesterov(MomentumRule):
    """Nesterov momentum on the movement of the replica by its local steps since the last mix.

    Let ``a`` be the anchor (the replica after the last mix), ``q`` the replica after the local steps, ``d`` the mix's
    difference, and ``v`` the momentum. At each mix, with the pseudo-gradient ``g = a - (q + d)``,

        v <- μ v + g          a <- a - lr (g + μ v)          x <- x + (a - q)

    Steps made while the exchange was in flight stay in ``x``, and count in the next pseudo-gradient. With the topology
    'complete' and ``mix_every=h`` this is DiLoCo (arXiv 2311.08105; lr 0.7 and momentum 0.9 are its values), and with pairs
    it is NoLoCo's (arXiv 2506.10911) with one coefficient for its two terms, so that one copy of the parameters is sent. With
    lr 1 and momentum 0 it is plain gossip. On any topology the mean of the anchors moves as under one such optimizer on the
    mean of the replicas. A worker that sits a mix out takes the step with ``d = 0``.

    The state is three more copies of the parameters: anchor and momentum, of at least float32, and proposal.

    Args:
        lr: of the outer step, positive.
        momentum: in [0, 1).

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def state(self, values: Tensor) -> dict[str, Tensor]:
        wide = torch.promote_types(values.dtype, torch.float32)
        anchor = values.to(wide, copy=True)
        return {"anchor": anchor, "momentum": torch.zeros_like(anchor), "proposal": values.clone()}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        return state["proposal"].copy_(values)

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        anchor, momentum, proposal = state["anchor"], state["momentum"], state["proposal"]
        gradient = anchor - proposal
        if difference is not None:
            gradient -= difference
        momentum.mul_(self.momentum).add_(gradient)
        gradient.add_(momentum * self.momentum)
        anchor.sub_(gradient.mul_(self.lr))
        values.add_(anchor - proposal)
