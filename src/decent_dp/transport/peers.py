"""The assignment of workers to replicas, and the workers at one position of all replicas as a transport of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decent_dp.errors import PeerLostError
from decent_dp.faults import Tolerate
from decent_dp.topo import Edge
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.interface import Control, ExchangeRequest, Handle, Neighbours, PeerTable, Transport
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


class Peers(Transport):
    """The workers ``ranks`` of ``whole``, numbered from 0 in this order.

    Edges and requests use these numbers; errors name the ranks of the whole.

    Args:
        ranks: the ones after the first ``world_size`` may join later.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int], world_size: int) -> None:
        super().__init__(list(ranks).index(whole.rank), world_size, whole.run_id, whole.timeout, whole.store)
        self._whole, self._ranks = whole, tuple(ranks)

    @property
    def control(self) -> Control:
        raise TypeError("a part of the workers has the collectives of Control.part")

    def tolerate(self, faults: Tolerate) -> Neighbours:
        neighbours = self._whole.tolerate(faults)
        self.table = _TableOfPeers(neighbours, self._ranks)
        return neighbours

    @property
    def plane(self) -> ControlPlane:
        return self._whole.plane

    def explain_absent(self, ranks: Sequence[int], what: str) -> PeerLostError:
        return self._whole.explain_absent(ranks, what)

    def begin(self, bucket: int) -> None:
        self._whole.begin(bucket)

    def announce(self, round_: int) -> None:
        self._whole.announce(round_)

    def newest_round(self) -> int:
        return self._whole.newest_round()

    def rank_in_all(self, rank: int) -> int:
        return self._ranks[rank]

    def prepare(self, edges: list[Edge]) -> None:
        self._whole.prepare([_renumbered(edge, self._ranks) for edge in edges])

    def report(self, cause: str) -> None:
        self._whole.report(cause)

    def close(self) -> None:
        self._whole.close()

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        # The request keeps the numbers of this part, which only seed its rounding.
        return self._whole.start(_renumbered(edge, self._ranks), request)


class _TableOfPeers(PeerTable):
    """What is known of the workers ``ranks``, which have the numbers from 0 on."""

    def __init__(self, table: PeerTable, ranks: Sequence[int]) -> None:
        self._table, self._ranks = table, ranks

    def usable(self, edge: Edge, exchange_id: ExchangeId) -> bool:
        return self._table.usable(_renumbered(edge, self._ranks), exchange_id)

    def round_of(self, rank: int) -> int:
        return self._table.round_of(self._ranks[rank])

    def living(self) -> list[int]:
        living = set(self._table.living())
        return [number for number, rank in enumerate(self._ranks) if rank in living]

    def has_dropped(self, others: Sequence[int], exchange_id: ExchangeId) -> bool:
        return self._table.has_dropped([self._ranks[number] for number in others], exchange_id)

    def skip(self, edge: Edge, exchange_id: ExchangeId) -> None:
        self._table.skip(_renumbered(edge, self._ranks), exchange_id)


def _renumbered(edge: Edge, ranks: Sequence[int]) -> Edge:
    return Edge([ranks[number] for number in edge.ranks], edge.weight)
