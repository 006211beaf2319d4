"""Gossip with momentum on what the workers propose: an outer optimizer that speeds up the averaging over sparse topologies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decent_dp.rules.momentum import MomentumRule
from decent_dp.rules.rule import Round

__all__ = ["GASLoC"]


@dataclass(frozen=True)
class GASLoC(MomentumRule):
    """Accelerated gossip of replicas that make local steps between mixes (arXiv 2606.11081).

    Let ``a`` be the anchor (the replica after the last mix), ``q`` the replica after the local steps, ``d`` the mix's
    difference of proposals, and ``p_last`` the proposal before. A worker proposes ``p``, and then

        p = a + lr (q - a)          a <- p + d + momentum (p - p_last)          x <- x + (a - q)

    The momentum is that of the worker's own proposals, without the neighbours' pull, which is what makes averaging over sparse
    topologies faster. The mean of the replicas moves by lr/(1 - momentum) times their steps, so lower the rate accordingly.
    Steps made while the exchange was in flight stay in ``x``, and count in the next ``q``. With lr 1 and momentum 0 it is plain
    gossip. A worker that sits a mix out takes the step with ``d = 0``.

    The state is three more copies of the parameters: anchor and last proposal, of at least float32, and proposal.

    Args:
        lr: of the outer step, positive.
        momentum: in [0, 1).

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    lr: float = 1.0
    momentum: float = 0.5

    def state(self, values: Tensor) -> dict[str, Tensor]:
        wide = torch.promote_types(values.dtype, torch.float32)
        anchor = values.to(wide, copy=True)
        return {"anchor": anchor, "last": anchor.clone(), "proposal": values.clone()}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        anchor, proposal = state["anchor"], state["proposal"]
        return proposal.copy_(torch.add(anchor, values - anchor, alpha=self.lr))

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        anchor, last, proposal = state["anchor"], state["last"], state["proposal"]
        replica = anchor + (proposal - anchor) / self.lr  # as it was when it proposed
        anchor.copy_(proposal).add_(proposal - last, alpha=self.momentum)
        if difference is not None:
            anchor.add_(difference)
        last.copy_(proposal)
        values.add_(anchor - replica)
