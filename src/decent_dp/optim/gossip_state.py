"""What GossipAdamW and its kernels share: the names of its statistics, its constants, and the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

# Steps in which s takes g⊙g. After ten steps the momentum averages about six gradients.
PLAIN = 10
MEANS, SHARED, GAINS, ROOTS = "means", "shared_means", "gains", "shared_roots"
COUNT, LR = "statistics_step", "statistics_lr"
KEPT = frozenset({MEANS, SHARED, COUNT, LR})
STATISTICS = KEPT | {GAINS, ROOTS}
# The rate below which a drift belongs to higher rates falls by this factor per renewal, more slowly than drifts are forgotten.
FALL = 0.9
# Of the means of g⊙δ, in units of those of g⊙g: they may be larger in one step, and rarely are.
BOUND = 4.0
# F is at least this by n.
SMALLEST = 0.25
# Bounds that keep the gains of rows without a gradient, whose update is zero, finite.
TINY, LARGE = 1e-38, 1e30


class UpdateRow(NamedTuple):
    """A parameter of one update, or a part of one, and its state."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the parameter's shape."""
        found = [self.param, self.grad, self.exp_avg, self.exp_avg_sq]
        return found if self.max_exp_avg_sq is None else [*found, self.max_exp_avg_sq]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], step: Tensor) -> UpdateRow:
        """The inverse of ``tensors``."""
        param, grad, exp_avg, exp_avg_sq, *largest = tensors
        return cls(param, grad, exp_avg, exp_avg_sq, largest[0] if largest else None, step)
