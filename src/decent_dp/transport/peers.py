"""A part of the workers of a transport, as a transport of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from decent_dp.topo import Edge
from decent_dp.transport.agreement import NO_ROUND
from decent_dp.transport.interface import Control, ExchangeRequest, Handle, Transport

__all__ = ["Peers"]


class Peers(Transport):
    """The workers ``ranks`` of ``whole``, numbered from 0 in this order.

    Edges and requests use these numbers; errors name the ranks of the whole.

    Args:
        control: the collectives of these workers alone.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int], control: Control) -> None:
        super().__init__(list(ranks).index(whole.rank), len(ranks), whole.run_id, whole.timeout, whole.store)
        self._whole, self._ranks, self._control = whole, tuple(ranks), control

    @property
    def control(self) -> Control:
        return self._control

    def agree(
        self, name: str, text: str, what: str = "", *, asks: bool = False, round_: int = NO_ROUND
    ) -> Future[Mapping[int, str]]:
        raise TypeError("all workers agree, and not a part of them")

    def is_asked(self, name: str) -> bool:
        return self._whole.is_asked(name)

    def missing(self, name: str) -> list[int]:
        return self._whole.missing(name)

    def begin(self, bucket: int) -> None:
        self._whole.begin(bucket)

    def announce(self, round_: int) -> None:
        self._whole.announce(round_)

    def newest_round(self) -> int:
        return self._whole.newest_round()

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
