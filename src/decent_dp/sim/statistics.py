"""The exchange of the statistics that optimizers share (``SharesStatistics``), after each step."""

from __future__ import annotations

import torch
from torch import Tensor

from decent_dp.rules import Gossip
from decent_dp.sim.exchange import LosslessExchange
from decent_dp.sim.steppers import Stepper
from decent_dp.topo import Topology

__all__ = ["StatisticsExchange"]


class StatisticsExchange:
    """Averages the statistics of all replicas by plain gossip, as they are. Does nothing for optimizers without any.

    Attributes:
        factor: the adaptive factor γ.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.factor = 1.0
        self._tensors: list[Tensor] = []
        self._exchange: LosslessExchange | None = None
        self._sent_before = 0

    @property
    def bytes_sent(self) -> int:
        """By all workers."""
        return self._sent_before + (0 if self._exchange is None else self._exchange.bytes_sent)

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
            topology = Topology.every(self._topology, stepper.every)
            self._exchange = LosslessExchange(_stacked(found), topology, Gossip())
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
