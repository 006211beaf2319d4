"""The assignment of workers to replicas, and the workers at one position of all of them, which exchange."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decent_dp.topo import Edge
from decent_dp.transport.interface import ExchangeRequest, Handle, Transport
from decent_dp.transport.neighbours import PeerTable
from decent_dp.transport.votes import ExchangeId

__all__ = ["Peers", "Replicas"]


@dataclass(frozen=True)
class Replicas:
    """The assignment of workers to replicas.

    Workers that join in addition have the ranks after those that began the run; so many as a replica has make the next one.

    Attributes:
        workers: for each replica that began the run, by its number, the ranks of its workers, by position.
    """

    workers: tuple[tuple[int, ...], ...]

    @property
    def shards(self) -> int:
        """Workers of each replica."""
        return len(self.workers[0])

    def workers_of(self, number: int) -> tuple[int, ...]:
        """The ranks of a replica's workers, by position."""
        if number < len(self.workers):
            return self.workers[number]
        return tuple(range(number * self.shards, (number + 1) * self.shards))

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of a worker's replica, and the worker's position in it."""
        if rank >= len(self.workers) * self.shards:
            return divmod(rank, self.shards)
        return next((number, own.index(rank)) for number, own in enumerate(self.workers) if rank in own)

    def peers_on_node(self, rank: int, local_world_size: int) -> int:
        """How many workers at this one's position are on its node, the node size for a topology of replicas."""
        if self.shards == 1:
            return local_world_size
        number, position = self.place_of(rank)
        peers = {own[position] for own in (*self.workers, self.workers_of(number))}  # this one may have joined
        return sum(peer // local_world_size == rank // local_world_size for peer in peers)

    def whole(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The numbers of the replicas of which all workers are among ``ranks``, in ascending order."""
        found = {self.place_of(rank)[0] for rank in ranks}
        return tuple(sorted(number for number in found if set(self.workers_of(number)) <= set(ranks)))


class Peers(PeerTable):
    """The workers at one position of all replicas, with which an engine makes its exchanges.

    Edges, requests and ranks here are numbers of replicas; errors name the ranks of the workers.

    Args:
        ranks: of these workers, by the number of their replica. Those after the first ``world_size`` may join later.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int], world_size: int) -> None:
        self.rank, self.world_size = list(ranks).index(transport.rank), world_size
        self._transport, self._ranks = transport, tuple(ranks)

    def rank_in_all(self, number: int) -> int:
        """The rank of the worker with this number, for messages."""
        return self._ranks[number]

    def prepare(self, edges: Sequence[Edge]) -> None:
        self._transport.prepare([self._in_all(edge) for edge in edges])

    def begin(self, bucket: int) -> None:
        self._transport.begin(bucket)

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        # The request keeps the numbers, which only seed its rounding.
        return self._transport.start(self._in_all(edge), request)

    def usable(self, edge: Edge, exchange_id: ExchangeId) -> bool:
        return self._transport.table.usable(self._in_all(edge), exchange_id)

    def round_of(self, rank: int) -> int:
        return self._transport.table.round_of(self._ranks[rank])

    def living(self) -> list[int]:
        living = set(self._transport.table.living())
        return [number for number, rank in enumerate(self._ranks) if rank in living]

    def has_dropped(self, others: Sequence[int], exchange_id: ExchangeId) -> bool:
        return self._transport.table.has_dropped([self._ranks[number] for number in others], exchange_id)

    def skip(self, edge: Edge, exchange_id: ExchangeId) -> None:
        self._transport.table.skip(self._in_all(edge), exchange_id)

    def _in_all(self, edge: Edge) -> Edge:
        ranks = [self._ranks[number] for number in edge.ranks]
        return edge if ranks == edge.ranks else Edge(ranks, edge.weight)
