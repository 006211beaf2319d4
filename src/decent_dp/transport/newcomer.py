"""The transport of a process that joins a run: it is alone until it is a member."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from decent_dp.faults import Tolerate
from decent_dp.topo import Edge
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.in_process import alone
from decent_dp.transport.neighbours import Neighbours
from decent_dp.transport.process_group import ProcessGroupTransport
from decent_dp.transport.rendezvous import Rendezvous

__all__ = ["NewcomerTransport"]

# Seconds between two looks whether connections are there.
_LOOK = 0.01


class NewcomerTransport(ProcessGroupTransport):
    """Connects a process that takes the place of a worker. Until ``enter``, collectives are those of this process alone.

    Args:
        shared: what the workers of the run have in common.
        signature: of their settings, which this process must share (``decent_dp.replica.consistency``).
    """

    def __init__(self, shared: Rendezvous, signature: Mapping[str, Any]) -> None:
        self._process_group = None
        self.signature = signature
        self._meet(shared, None)
        self._members: Collectives | None = None
        self._listen()
        self._control = alone(self.rank)

    @property
    def incarnation(self) -> int:
        return self._rendezvous.incarnation

    def tolerate(self, faults: Tolerate) -> Neighbours:
        neighbours = super().tolerate(faults)
        assert isinstance(self._control, Collectives)
        self._members, self._control = self._control, alone(self.rank)
        return neighbours

    def _gather_at_start(self, text: str) -> dict[int, str]:
        return {self.rank: text}

    def prepare(self, edges: list[Edge]) -> None:
        return  # nobody accepts it before it is a member

    def meet(self, incarnations: Mapping[int, int]) -> None:
        """The other members are these processes."""
        for rank, incarnation in incarnations.items():
            self._wire.renew(rank, incarnation)

    def enter(self, incarnations: Mapping[int, int], calls: int, first: int) -> None:
        """Connects to the other members, and takes part in their collectives from now on.

        Args:
            incarnations: of the other members.
            calls: ``Control.calls`` of one of them.
            first: the first round of this process.
        """
        assert self._members is not None
        assert self._faults is not None
        assert self.neighbours is not None
        self._members.enter(calls, first)
        self.meet(incarnations)
        deadline = time.monotonic() + self._faults.dead_after / 2
        while set(incarnations) - {*self.neighbours.living(), *self.neighbours.lost()} and time.monotonic() < deadline:
            time.sleep(_LOOK)
        self._control = self._members
