"""The topologies that come with the library."""

from __future__ import annotations

from .base import Edge, Topology
from .registry import TopologyReg

__all__ = ["AlternatingExpRingTopology", "CompleteTopology", "OnePeerExpTopology", "RingTopology"]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _average(*ranks: int) -> Edge:
    """The edge in which ``ranks`` take their mean; one rank alone sits the round out."""
    return Edge(sorted(ranks), 1 / len(ranks))


@TopologyReg.register("complete")
class CompleteTopology(Topology):
    """All workers in one group, weight 1/n, every round: an exact average each time. Any n."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[_average(*range(self._world_size))]]


@TopologyReg.register("ring")
class RingTopology(Topology):
    """Pairs along a ring, weight 1/2: a worker mixes with its right and its left neighbour in turn. Any n.

    - n = 1: one idle round. n = 2: one round, the pair.
    - n even: two rounds, (0 1)(2 3)… and (1 2)(3 4)…(n-1 0).
    - n odd: n rounds. In round r worker r sits out and the others pair up along the ring, (r+1 r+2)(r+3 r+4)…; each
      worker is idle once a period.
    """

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        if n <= 2:
            return [[_average(*range(n))]]
        if n % 2 == 0:
            return [[_average(i, (i + 1) % n) for i in range(first, n, 2)] for first in (0, 1)]
        return [[_average(idle)] + [_average((idle + i) % n, (idle + i + 1) % n) for i in range(1, n, 2)] for idle in range(n)]


@TopologyReg.register("one-peer-exp")
class OnePeerExpTopology(Topology):
    """One peer a round at distances 1, 2, 4, …, weight 1/2: an exact average every log2(n) rounds. n a power of two.

    Round k pairs worker i with worker ``i XOR 2^k``, which is 2^k away. After the log2(n) rounds of a period each
    worker holds the mean over all (a butterfly all-reduce, one stage an update). One idle round for n = 1.

    Source: the one-peer exponential graph of Ying et al., "Exponential Graph is Provably Efficient for Decentralized
    Deep Training", NeurIPS 2021, arXiv 2110.13363; with XOR in place of addition modulo n, so that peers are mutual.
    """

    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        if _is_power_of_two(world_size):
            return None
        return f"needs a power of two workers, got world_size={world_size}"

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        if n == 1:
            return [[_average(0)]]
        return [[_average(i, i ^ 1 << k) for i in range(n) if not i >> k & 1] for k in range(n.bit_length() - 1)]


@TopologyReg.register("alternating-exp-ring")
class AlternatingExpRingTopology(Topology):
    """Rounds alternate between groups inside a node and groups of two whole nodes. A power of two nodes.

    Let N = n / local_world_size be the number of nodes. Stage k = 0, 1, …, log2(N) - 1 pairs node a with node
    ``a XOR 2^k`` and takes two rounds. Each pair averages once over the workers of both nodes, which uses the network,
    and once inside each node, which does not. In order of their smaller node, pairs 0, 2, 4, … do first the one and
    then the other; pairs 1, 3, 5, … the other way round. So with four nodes or more half of the pairs use the
    network in every round: it is never idle, and never crowded by all of them at once. (Two nodes are one pair: it uses
    the network in every second round.)

    Weights are 1/len(group). After a period, 2·log2(N) rounds, each worker holds the mean over all. With one worker
    a node, the groups inside a node are idle edges; one node is a single group of all its workers.

    Source: the AER topology of arXiv 2410.11998 (ICLR 2025).
    """

    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        if world_size % local_world_size:
            return f"needs nodes of equal size, but local_world_size={local_world_size} does not divide world_size={world_size}"
        n_nodes = world_size // local_world_size
        if not _is_power_of_two(n_nodes):
            return f"needs a power of two nodes, got {world_size} / {local_world_size} = {n_nodes}"
        return None

    def _get_topo_edges(self) -> list[list[Edge]]:
        local, n_nodes = self._local_world_size, self._n_nodes

        def workers(node: int) -> range:
            return range(node * local, (node + 1) * local)

        if n_nodes == 1:
            return [[_average(*workers(0))]]
        rounds: list[list[Edge]] = []
        for k in range(n_nodes.bit_length() - 1):
            rounds += [[], []]
            pairs = [(node, node ^ 1 << k) for node in range(n_nodes) if not node >> k & 1]
            for index, (a, b) in enumerate(pairs):
                joint, own = rounds[-2:] if index % 2 == 0 else rounds[:-3:-1]
                joint += [_average(*workers(a), *workers(b))]
                own += [_average(*workers(a)), _average(*workers(b))]
        return rounds
