"""The topologies that come with the library."""

from __future__ import annotations

import numpy as np

from decent_dp._checks import check_integer

from .abstract import Topology
from .edges import Edge, PairRounds
from .registry import TopologyReg

__all__ = [
    "AlternatingExpRingTopology",
    "BaseTwoTopology",
    "CompleteTopology",
    "HierarchicalTopology",
    "OnePeerExpTopology",
    "RandomMatchingTopology",
    "RingTopology",
]

# Rounds in the fingerprint of a random topology, beside its seed.
_FEW_ROUNDS = 4

# The pairs of a round, with the weight with which each takes the other's value. Workers in no pair are idle.
_WeightedPairs = list[tuple[int, int, float]]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _average(*ranks: int) -> Edge:
    """The edge in which ``ranks`` take their mean. One rank alone is idle."""
    return Edge(sorted(ranks), 1 / len(ranks))


def _unequal_nodes(world_size: int, local_world_size: int) -> str:
    return f"needs nodes of equal size, but local_world_size={local_world_size} does not divide world_size={world_size}"


@TopologyReg.register("complete")
class CompleteTopology(Topology):
    """All workers in one group, weight 1/n: an exact average every round. Any n."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[_average(*range(self._world_size))]]


@TopologyReg.register("ring")
class RingTopology(Topology):
    """Pairs along a ring, weight 1/2: a worker mixes with its right and its left neighbour in turn. Any n.

    - n = 1: one idle round. n = 2: one round, the pair.
    - n even: two rounds, (0 1)(2 3)… and (1 2)(3 4)…(n-1 0).
    - n odd: n rounds. In round r worker r is idle and the others pair up along the ring, (r+1 r+2)(r+3 r+4)….
    """

    def _get_topo_edges(self) -> PairRounds:
        n = self._world_size
        period = 1 if n <= 2 else 2 if n % 2 == 0 else n
        return PairRounds(n, period, lambda t: [(i % n, (i + 1) % n) for i in range(t + n % 2, t + n, 2)], idle_first=True)


@TopologyReg.register("one-peer-exp")
class OnePeerExpTopology(Topology):
    """One peer per round at distance 1, 2, 4, …, weight 1/2: an exact average every log2(n) rounds. n a power of two.

    Round k pairs worker i with worker ``i XOR 2^k``, which is 2^k away. After the log2(n) rounds of a period each
    worker holds the mean over all (a butterfly all-reduce, one stage per update). One idle round for n = 1.

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
    and once inside each node, which does not. In order of their smaller node, pairs 0, 2, 4, … first average over both
    nodes, and pairs 1, 3, 5, … first inside each. So with four nodes or more, half of the pairs use the network in every
    round. (Two nodes are one pair, which uses the network in every second round.)

    Weights are 1/len(group). After a period, 2·log2(N) rounds, each worker holds the mean over all. With one worker
    per node, the groups inside a node are idle edges; one node is a single group of all its workers.

    Source: the AER topology of arXiv 2410.11998 (ICLR 2025).
    """

    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        if world_size % local_world_size:
            return _unequal_nodes(world_size, local_world_size)
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


def _simple_base_two(m: int) -> list[_WeightedPairs]:
    """Rounds after which m members hold their mean.

    The sets V_1, V_2, ... have sizes s_1 > s_2 > ..., the powers of two that add up to m. First each averages on its own, as
    a hypercube. Then, one set after another, V_l meets the R members of all later sets, r of them together: as many members
    of V_l take r/(s_l + r) of them and give as much, and the two change places. Now the mean of V_l and the mean of R are
    the mean of both; V_l averages once more while the later sets go on. The last set needs nothing more: its members have
    been alike all the time.

    In the paper the weight is s_l/(s_l + r) and nobody changes places: the same up to the names, but there some take more
    than half of another's value.
    """
    powers = [power for power in reversed(range(m.bit_length())) if m >> power & 1]
    members = list(range(m))
    sets = [[members.pop(0) for _ in range(2**power)] for power in powers]
    rounds: list[_WeightedPairs] = [[] for _ in range(2 * powers[0] + (len(powers) > 1))]

    def average(own: list[int], first: int) -> None:
        for k in range(len(own).bit_length() - 1):
            rounds[first + k] += [(own[i], own[i ^ 1 << k], 0.5) for i in range(len(own)) if not i >> k & 1]

    for own in sets:
        average(own, 0)
    for index, own in enumerate(sets[:-1]):
        meeting = powers[0] + index
        later = [(other, place) for other in sets[index + 1 :] for place in range(len(other))]
        weight = len(later) / (len(own) + len(later))
        for i, (other, place) in enumerate(later):
            rounds[meeting].append((own[i], other[place], weight))
            own[i], other[place] = other[place], own[i]
        average(own, meeting + 1)
    return rounds


def _base_two(n: int) -> list[_WeightedPairs]:
    """Rounds after which n workers hold their mean: of n = 2^e m, m odd, e of a hypercube and then those of m."""
    e = (n & -n).bit_length() - 1
    m = n >> e
    rounds: list[_WeightedPairs] = [[(i, i ^ 1 << k, 0.5) for i in range(n) if not i >> k & 1] for k in range(e)]
    if m > 1:
        rounds += [[(a << e | i, b << e | i, w) for i in range(1 << e) for a, b, w in pairs] for pairs in _simple_base_two(m)]
    return rounds or [[]]


def _unpaired(n: int, pairs: _WeightedPairs) -> list[int]:
    met = {member for a, b, _ in pairs for member in (a, b)}
    return [member for member in range(n) if member not in met]


@TopologyReg.register("base-2")
class BaseTwoTopology(Topology):
    """One peer per round, and an exact average every few rounds for any n; for a power of two it is 'one-peer-exp'.

    Let n = 2^e m with m odd. The first e rounds are those of 'one-peer-exp' over the lowest e bits of a worker's number. If
    m > 1, 2·floor(log2 m) + 1 rounds follow over the other bits, in which weights may be less than 1/2 and some workers are
    idle. After the e, or e + 2·floor(log2 m) + 1, rounds of a period each worker holds the mean over all. One idle round for
    n = 1.

    Source: the Base-(k+1) graph with k = 1 of Takezawa et al., "Beyond Exponential Graph: Communication-Efficient
    Topologies for Decentralized Learning via Finite-time Convergence", NeurIPS 2023, arXiv 2305.11420.
    """

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        return [
            [_average(a, b) if w == 0.5 else Edge(sorted((a, b)), 1 - w) for a, b, w in pairs]
            + [_average(i) for i in _unpaired(n, pairs)]
            for pairs in _base_two(n)
        ]


@TopologyReg.register("random-matching")
class RandomMatchingTopology(Topology):
    """New random pairs every round, weight 1/2. Any n; for an odd n one worker is idle.

    Round t pairs the workers along a permutation that is drawn from ``seed`` and t, the same on all workers. The rounds do
    not repeat, and average exactly only by chance. In expectation a round of an even n shrinks the squared distance to the mean
    by the factor (n - 2)/(2n - 2), a little less than 1/2.

    Args:
        seed: of the permutations, in [0, 2^32).
        local_world_size, world_size, rank: as of `Topology`.

    Raises:
        TypeError, ValueError: ``seed`` is not such an integer.
    """

    def __init__(
        self, local_world_size: int = 1, *, seed: int = 0, world_size: int | None = None, rank: int | None = None
    ) -> None:
        super().__init__(local_world_size, world_size=world_size, rank=rank)
        self._seed = check_integer("RandomMatchingTopology: seed", seed, 0)
        if self._seed >= 2**32:
            raise ValueError(f"RandomMatchingTopology: seed must be below 2^32, got {seed}")

    def round(self, t: int) -> list[Edge]:
        # NumPy has frozen the stream of RandomState. That of Generator may change with NumPy's version, and then workers with
        # different versions would draw different pairs.
        generator = np.random.RandomState([self._seed, check_integer("round", t, 0) % 2**32])
        order = generator.permutation(self._world_size).tolist()
        return [_average(*order[i : i + 2]) for i in range(0, self._world_size, 2)]

    def _title(self) -> str:
        return f"{super()._title()} with seed {self._seed}"

    def fingerprint(self) -> dict[str, str | int]:
        # The seed stands for all rounds, and a few rounds for the way they are drawn from it.
        few = type(self).round is RandomMatchingTopology.round
        return self._fingerprint(f" seed {self._seed}", _FEW_ROUNDS) if few else super().fingerprint()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, seed={self._seed})"


@TopologyReg.register("hierarchical")
class HierarchicalTopology(Topology):
    """All workers inside a node, and one peer node per round: 'base-2' over nodes. Any number of equal nodes.

    Let l be ``local_world_size``. Where two nodes meet in the round of 'base-2' with weight w, their 2l workers are one
    group in which each takes w/l of each other's value, and so keeps 1 - w(2l - 1)/l of its own; for w = 1/2 this is the
    average of the group. An idle node averages inside. So the means of nodes follow 'base-2', and inside a node deviations
    shrink by 1 - 2w each round, to zero in the first round: there w is 1/2 or the node is idle. After the period of 'base-2'
    for n/l nodes each worker holds the mean over all. One node is a single group of its workers; with one worker per node
    this is 'base-2'.

    Every worker sends its share of the group's mean: one copy of the parameters per node, direction and round crosses
    between nodes, instead of the l copies of pairs of workers.
    """

    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        return _unequal_nodes(world_size, local_world_size) if world_size % local_world_size else None

    def _get_topo_edges(self) -> list[list[Edge]]:
        local, n_nodes = self._local_world_size, self._n_nodes

        def workers(*nodes: int) -> list[int]:
            return [rank for node in sorted(nodes) for rank in range(node * local, (node + 1) * local)]

        def meet(a: int, b: int, w: float) -> Edge:
            return _average(*workers(a, b)) if w == 0.5 else Edge(workers(a, b), 1 - w * (2 * local - 1) / local)

        return [
            [meet(*pair) for pair in pairs] + [_average(*workers(node)) for node in _unpaired(n_nodes, pairs)]
            for pairs in _base_two(n_nodes)
        ]
