"""A part of the workers of a transport, as a transport of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decent_dp.topo import Edge
from decent_dp.transport.base import Control, ExchangeRequest, Handle, Transport

__all__ = ["Peers"]


class Peers(Transport):
    """The workers ``ranks`` of ``whole``, numbered from 0 in this order.

    Edges and requests use these numbers; errors name the ranks of the whole.

    Args:
        get_control: returns the collectives of these workers alone; called each time, because the whole may have been closed.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int], get_control: Callable[[], Control]) -> None:
        super().__init__(list(ranks).index(whole.rank), len(ranks), whole.run_id, whole.timeout, whole.store)
        self._whole, self._ranks, self._get_control = whole, tuple(ranks), get_control

    @property
    def control(self) -> Control:
        return self._get_control()

    def lost(self) -> list[int]:
        lost = self._whole.lost()
        return [number for number, rank in enumerate(self._ranks) if rank in lost]

    def rank_in_all(self, rank: int) -> int:
        return self._ranks[rank]

    def prepare(self, edges: list[Edge]) -> None:
        self._whole.prepare([self._in_whole(edge) for edge in edges])

    def report(self, cause: str) -> None:
        self._whole.report(cause)

    def close(self) -> None:
        self._whole.close()

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        # The request keeps the numbers of this part, which only seed its rounding.
        return self._whole.start(self._in_whole(edge), request)

    def _in_whole(self, edge: Edge) -> Edge:
        return Edge([self._ranks[number] for number in edge.ranks], edge.weight)
