"""Plain gossip of where replicas will be when their messages arrive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decent_dp._checks import check_number
from decent_dp.rules.rule import Round, Rule
from decent_dp.topo import Topology

__all__ = ["Anticipation"]


@dataclass(frozen=True)
class Anticipation(Rule):
    """Gossip that sends a replica's parameters plus its last step once more.

    With overlap a message is mixed an update after it was sent. Both replicas have made another step then, and with momentum
    it has nearly the direction of the last one. Let ``x`` be the parameters, ``s`` the last step of the optimizer, and ``d``
    the mix's difference of proposals ``q``. Then

        q = x + steps·s          x <- x + d

    Replicas are closer together, with the same bytes. The mean of the replicas moves as under plain gossip. For
    ``overlap=True`` with a mix in every update; without overlap plain gossip is better.

    The state is two more copies of the parameters.

    Args:
        steps: how far to look ahead, in (0, 2).

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    steps: float = 1.0

    acts_alone = False

    def __post_init__(self) -> None:
        steps = check_number("steps of Anticipation", self.steps, "in (0, 2)", above=0.0, below=2.0)
        object.__setattr__(self, "steps", steps)

    def fit(self, topology: Topology, *, lossy: bool, partial: bool) -> Anticipation:
        """Returns itself.

        Raises:
            ValueError: there are updates without a mix.
        """
        if Topology.longest_turn(topology) > 1:
            raise ValueError(
                f"Anticipation does not work with {topology!r}: the movement between two mixes is that of several steps, and "
                "says little of the next one. Use mix_every=1, or another rule."
            )
        return self

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"before": values.clone(), "proposal": values.clone()}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        before, proposal = state["before"], state["proposal"]
        # Not in place of an add with alpha, which is fused in vectors and not in their tails.
        proposal.copy_(values + (values - before) * self.steps)
        before.copy_(values)
        return proposal

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        if difference is not None:
            values.add_(difference)
            state["before"].add_(difference)
