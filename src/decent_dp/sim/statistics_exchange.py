"""The exchange of the statistics that optimizers share (``SharesStatistics``), after each step."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_dp._sizes import statistics_interval
from decent_dp.rules import Gossip
from decent_dp.sim.absences import Faults
from decent_dp.sim.exchange import LosslessExchange
from decent_dp.sim.steppers import Stepper
from decent_dp.topo import Topology

__all__ = ["StatisticsExchange"]


class StatisticsExchange:
    """Averages the statistics of all replicas by plain gossip, as they are. Does nothing for optimizers without any.

    Args:
        topology: of the parameters.
        message_share: the bytes of an exchange of the parameters as a share of their own.
        faults: who takes part.

    Attributes:
        factor: the adaptive factor γ.
    """

    def __init__(self, topology: Topology, message_share: float, faults: Faults) -> None:
        self._topology, self._message_share, self._faults = topology, message_share, faults
        self.factor = 1.0
        self._tensors: list[Tensor] = []
        self._exchange: LosslessExchange | None = None
        self._sent_before = 0

    @property
    def bytes_sent(self) -> int:
        """By all workers."""
        return self._sent_before + (0 if self._exchange is None else self._exchange.bytes_sent)

    def finish_due(self, t: int) -> None:
        """Mixes with the values in flight, if they have no time until a later update than ``t``."""
        if self._exchange is not None:
            self._exchange.factor = self.factor
            self._exchange.finish_due(t)

    def finish(self) -> None:
        """Mixes with the values in flight, if there are any."""
        if self._exchange is not None:
            self._exchange.factor = self.factor
            self._exchange.finish()

    def start(self, stepper: Stepper, t: int) -> None:
        """Sends the statistics for round t."""
        found = stepper.statistics()
        tensors = [tensor for of_optimizer in found for tensor in of_optimizer]
        if not tensors:
            return
        if [id(tensor) for tensor in tensors] != [id(tensor) for tensor in self._tensors]:
            # The first step, or a state was loaded. The difference in flight belonged to the old ones.
            self._tensors, self._sent_before = tensors, self.bytes_sent
            stacked = _stacked(found)
            interval = statistics_interval(stepper.every, self._message_share)
            topology = self._topology._spread(0, 1, 1)._at_most_every(interval)
            self._exchange = LosslessExchange(stacked, topology, Gossip(), self._faults)
        assert self._exchange is not None
        self._exchange.start(t)


def _stacked(found: list[list[Tensor]]) -> dict[str, Tensor]:
    """The statistics as (n, size), by number. Those of one optimizer per replica become views of stacked tensors."""
    if len(found) == 1:
        return {str(i): tensor for i, tensor in enumerate(found[0])}
    stacked = {}
    for i, of_replicas in enumerate(zip(*found, strict=True)):
        stacked[str(i)] = torch.stack(of_replicas)
        for tensor, row in zip(of_replicas, stacked[str(i)], strict=True):
            tensor.data = row
    return stacked
