"""The interface of optimizers with statistics that replicas average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

from torch import Tensor

__all__ = ["SharesStatistics", "drift_lookup"]


class SharesStatistics(ABC):
    """Base class of optimizers that keep statistics of the gradients which replicas average along with the parameters.

    ``gossip`` and ``DecentralizedDataParallel`` call ``set_replicas`` before the first step, and average the tensors of
    ``statistics`` after the steps: in float32, by plain gossip, with the topology and the weights of the parameters.

    Attributes:
        EVERY: the number of rounds from one exchange of the statistics to the next.
    """

    EVERY: ClassVar[int] = 1

    @abstractmethod
    def set_replicas(self, n: int, share: float | None = None) -> None:
        """Sets the number of replicas; 1 when the optimizer is on its own again.

        Args:
            share: of this replica in the weight of all, if ``gossip`` was given weights that differ; otherwise left out.
        """

    @abstractmethod
    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Returns (parameter, statistics) pairs, of float32 tensors that the mix writes to.

        The same parameters and shapes on every call and on every worker. The tensors may be other ones after a load.
        """

    def set_drifts(self, drift_of: Callable[[Tensor], Tensor | None], scale: float) -> None:  # noqa: B027
        """Called if the rule is ``DriftCorrection``; by default does nothing. Holds until ``set_replicas(1)``.

        Args:
            drift_of: returns ``scale`` times the drift of this replica per step, in the shape of the given parameter; None for
                parameters of others. The tensor is the rule's, which saves it and keeps it up to date.
        """


def drift_lookup(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor | None]:
    """A function for ``set_drifts``, from (parameter, drift) pairs."""
    by_param = {id(param): drift for param, drift in pairs}
    return lambda param: by_param.get(id(param))
