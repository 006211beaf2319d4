"""The law of mixing, on plain tensors: what the wrapper and the simulator share.

Let ``x`` be a replica's parameters, ``q`` what it put on the wire and ``r`` the mean of what the other members of its edge
put there. An edge with self-weight ``w`` and adaptive factor ``γ`` moves the replica by

    x  <-  x + γ · (1 - w) · (r - q)

which is ``x + γ · Σ_j w_ij (q_j - q_i)`` with ``w_ij = (1 - w)/(m - 1)`` for the other ``m - 1`` members. With the mean of all
``m`` in the place of ``r`` it is the same with ``m/(m - 1)`` times the difference. Only differences of what was sent are
added. So the mean over workers stays whatever the wire's precision, a replica keeps its own detail, and an edit of ``x`` made
while the exchange was under way survives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Gossip", "MixRule"]


class MixRule(ABC):
    """What to propose to the neighbours, and what to make of what came.

    The tensors come as lists that agree item by item in shape and device. How a bucket is cut into items does not change the
    numbers.
    """

    @abstractmethod
    def propose(self, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """What goes on the wire for the replica ``own``; may be ``own`` itself. It is read until the exchange is finished."""

    @abstractmethod
    def mix(self, own: Sequence[Tensor], differences: Sequence[Tensor], pull: float) -> None:
        """Updates ``own`` in place.

        Args:
            own: the replica as it is now.
            differences: ``r - q``, of the same dtype or a wider one; used as scratch.
            pull: ``γ · (1 - w)``, in [0, 1] (times ``m/(m - 1)`` where ``r`` is the mean of all ``m`` members).
        """


class Gossip(MixRule):
    """Plain gossip: proposes the parameters and moves towards the neighbours' by their difference."""

    def propose(self, own: Sequence[Tensor]) -> Sequence[Tensor]:
        return own

    def mix(self, own: Sequence[Tensor], differences: Sequence[Tensor], pull: float) -> None:
        # A pull of zero must not turn a neighbour's infinity into NaN (0 · inf).
        if pull == 0.0:
            return
        moves = list(differences)
        # Scaled in a pass of its own: an add with alpha is fused in vectors and not in their tails, so that numbers would
        # depend on where a tensor is cut.
        if pull != 1.0:
            torch._foreach_mul_(moves, pull)
        torch._foreach_add_(list(own), moves)
