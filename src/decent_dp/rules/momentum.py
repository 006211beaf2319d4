"""What rules of two levels have in common: an outer step with momentum."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from decent_dp._checks import check_number
from decent_dp.rules.growth import grows
from decent_dp.rules.rule import Rule
from decent_dp.topo import Topology

__all__ = ["MomentumRule"]

# Momenta that are recommended.
_SMALLER = (0.7, 0.5, 0.3, 0.1)


@dataclass(frozen=True)
class MomentumRule(Rule):
    """A rule with an outer rate and momentum, which are validated, and refused where they would drive replicas apart."""

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "lr", check_number(f"lr of {name}", self.lr, "a positive number", above=0.0))
        momentum = check_number(f"momentum of {name}", self.momentum, "in [0, 1)", at_least=0.0, below=1.0)
        object.__setattr__(self, "momentum", momentum)

    def fit(self, topology: Topology, *, lossy: bool, partial: bool) -> MomentumRule:
        """Returns itself.

        Raises:
            ValueError: ``lr`` or momentum would drive replicas apart.
        """
        if self.momentum and partial:
            raise ValueError(
                f"{self!r} does not work with a compression that leaves a part of the differences in the replicas "
                "('low-rank:...', '4bit', '2bit' and '1bit'): its momentum repeats a pull that the next mixes do not see, and "
                "replicas are driven apart. Use momentum=0, or compression=None, 'bfloat16' or 'int8'."
            )
        if not grows(self, topology):
            return self
        smaller = (momentum for momentum in (*_SMALLER, 0.0) if momentum < self.momentum)
        works = next((value for value in smaller if not grows(dataclasses.replace(self, momentum=value), topology)), None)
        if works is None:
            raise ValueError(
                f"{self!r} does not work with {topology!r}: its lr moves replicas beyond the mean of their neighbours, and "
                f"drives {topology.world_size} of them apart, whatever the momentum is. Use lr=1 or less."
            )
        raise ValueError(
            f"{self!r} does not work with {topology!r}: its momentum repeats the pull of a neighbour in mixes with others, and "
            f"drives {topology.world_size} replicas apart. Use momentum={works:g}, or topology='complete'."
        )
