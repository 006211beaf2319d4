"""How fast a topology brings replicas together, and how much it puts on the network.

The consensus error of values x_1, ..., x_n is the root of the mean square of their distance to the mean, relative to its
start. A round multiplies the values by its mixing matrix. P is the product over a period, W_{T-1} ... W_1 W_0; J is the matrix
whose entries are 1/n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, cycle, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from decent_dp._checks import check_integer, check_number
from decent_dp.topo.abstract import Topology
from decent_dp.topo.edges import Edge
from decent_dp.topo.holes import without
from decent_dp.topo.schedule import edges_of, longest_turn, title_of

__all__ = ["MOST_WORKERS", "Analysis", "analyse", "consensus_error", "is_doubly_stochastic", "mixing_matrix", "without"]

Array = npt.NDArray[np.float64]

# The matrix of a period is dense: its eigenvalues take seconds for 1,024 workers, and eight times as long for 2,048.
MOST_WORKERS = 1024
# A topology without a period is judged by this many rounds in which it mixes.
_ROUNDS = 64
# The error is that of all starts (the identity matrix) for up to 128 workers, else of 32 random starts, always the same ones.
_ALL_STARTS, _RANDOM_STARTS = 128, 32
# An error of this size is rounding.
_ROUNDING = 1e-12
# The error may vanish only after several periods.
_PERIODS = 8
# Workers times rounds of a period that are kept in memory.
_MOST_HELD = 2**24


@dataclass(frozen=True)
class Analysis:
    """The result of `analyse`. Bytes are in units of ``payload``.

    Figures of a topology without a period are those of its first 64 rounds, or of the first 64 h updates if it, or a part of
    it, mixes in every h-th update only. So the figures of a switch are those of its first part. (A period of more than
    2^24 / n rounds counts as none.)

    Attributes:
        name: the topology's title.
        world_size: workers n.
        local_world_size: workers per node.
        period: rounds after which they repeat; None if they do not.
        exact: after a period all workers hold the mean, up to rounding.
        spectral_gap: 1 - ||P - J|| in the 2-norm: 1 for an exact average, 0 if two parts never mix. None without a period.
        rate: the factor by which a round shrinks the consensus error in the long run; 0.0 if the error is zero after some
            periods. With a period of T rounds, the T-th root of the spectral radius of P - J. Without, the mean over the
            rounds.
        rounds_to_epsilon: rounds until the error is at most ``epsilon``; None: more than the limit. For more than 128 workers
            and no period an estimate (see `consensus_error`).
        epsilon: as given.
        degree: different peers of a worker, the maximum over workers.
        largest_group: workers in the largest edge.
        idle: share of (worker, round) in which the worker is idle.
        sent_by_worker: sent by a worker per round, the mean over workers and rounds.
        sent_by_node: sent by a node to other nodes per round, the mean over nodes and rounds. As much is received.
        fan_in: received by a node from other nodes in one round, the maximum over nodes and rounds.
    """

    name: str
    world_size: int
    local_world_size: int
    period: int | None
    exact: bool
    spectral_gap: float | None
    rate: float
    rounds_to_epsilon: int | None
    epsilon: float
    degree: int
    largest_group: int
    idle: float
    sent_by_worker: float
    sent_by_node: float
    fan_in: float


# -- rounds as arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RoundArrays:
    """The edges of a round that have more than one member.

    Attributes:
        members: the members of all edges, edge after edge.
        sizes: of the edges.
        edge_of: for each of ``members``, the number of its edge.
        starts: where each edge starts in ``members``.
        keep, peer: for each of ``members``, its weight less the peer weight, and the peer weight: of shape (members, 1).
    """

    members: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    edge_of: npt.NDArray[np.int64] = field(repr=False)
    starts: npt.NDArray[np.int64] = field(repr=False)
    keep: Array = field(repr=False)
    peer: Array = field(repr=False)

    @classmethod
    def of(cls, edges: Iterable[Edge]) -> RoundArrays:
        edges = [edge for edge in edges if len(edge.ranks) > 1]
        sizes = np.array([len(edge.ranks) for edge in edges], np.int64)
        members = np.fromiter(chain.from_iterable(edge.ranks for edge in edges), np.int64, int(sizes.sum()))
        edge_of = np.repeat(np.arange(len(edges)), sizes)
        peer = np.array([edge.peer_weight for edge in edges])[edge_of, None] if edges else np.zeros((0, 1))
        own = np.array([edge.weight for edge in edges])[edge_of, None] if edges else peer
        return cls(members, sizes, edge_of, np.cumsum(sizes) - sizes, own - peer, peer)

    def mix(self, x: Array) -> None:
        """Multiplies the values of all workers, of shape (n, m), by the mixing matrix, in place."""
        if len(self.members):
            own = x.take(self.members, axis=0)
            sums = np.add.reduceat(own, self.starts, axis=0)
            x[self.members] = self.keep * own + self.peer * sums[self.edge_of]


def all_rounds(topology: Topology) -> Iterator[RoundArrays]:
    """The rounds, one after another, without end. The arrays of a period are made once."""
    if _has_no_period(topology):
        return (RoundArrays.of(edges_of(topology, t)) for t in count())
    return cycle(RoundArrays.of(edges_of(topology, t)) for t in range(topology.period or 0))


def _has_no_period(topology: Topology) -> bool:
    return topology.period is None or topology.period * topology._world_size > _MOST_HELD


# -- matrices and errors ---------------------------------------------------------------------------------------------------


def mixing_matrix(topology: Topology, t: int | None = None) -> Array:
    """The mixing matrix of round ``t``, or of a whole period, W_{T-1} ... W_1 W_0: of shape (n, n), float64.

    Raises:
        ValueError: ``t`` is not given and the topology has no period.
    """
    if t is not None:
        return topology.mixing_matrix(t)
    if topology.period is None:
        raise ValueError(f"{title_of(topology)} has no period: pass t=, the round")
    product: Array = np.eye(topology._world_size)
    for round_ in islice(all_rounds(topology), topology.period):
        round_.mix(product)
    return product


def is_doubly_stochastic(matrix: npt.ArrayLike, tolerance: float = 1e-12) -> bool:
    """Whether a matrix is square and not negative, and all its rows and columns sum to 1, up to ``tolerance``."""
    w = np.asarray(matrix, dtype=np.float64)
    if w.ndim != 2 or w.shape[0] != w.shape[1] or not np.isfinite(w).all():
        return False
    sums = np.concatenate([w.sum(axis=0), w.sum(axis=1)])
    return bool((w >= -tolerance).all() and (abs(sums - 1) <= tolerance).all())


def consensus_error(topology: Topology, rounds: int) -> Array:
    """The consensus error after 0, 1, ..., ``rounds`` rounds, relative to the start: of shape (rounds + 1,), float64.

    For up to 128 workers it is the mean over all starts, ||W_{t-1} ... W_0 - J|| / ||I - J|| in the Frobenius norm. For more it
    is the mean over 32 random starts, always the same ones: an estimate, exact to some percent. Of one worker 1 and then 0.
    """
    rounds = check_integer("consensus_error: rounds", rounds, 0)
    return np.fromiter(_errors(topology._world_size, all_rounds(topology), rounds), np.float64, rounds + 1)


def _errors(n: int, rounds: Iterable[RoundArrays], limit: int) -> Iterator[float]:
    """The error after 0, 1, ..., ``limit`` of the rounds."""
    x = np.eye(n) if n <= _ALL_STARTS else np.random.default_rng(0).standard_normal((n, _RANDOM_STARTS))
    x = x - x.mean(axis=0)
    start = float(np.linalg.norm(x))
    error = 1.0
    yield error
    for round_ in islice(rounds, limit):
        if len(round_.members) or not start:
            round_.mix(x)
            error = float(np.linalg.norm(x)) / start if start else 0.0
        yield error


# -- speed -----------------------------------------------------------------------------------------------------------------


def _vanishes(before: float, after: float) -> bool:
    """Whether an error became zero at once, and not by shrinking on and on."""
    return after <= _ROUNDING and after <= 1e-6 * before


def _gap_and_rate(rest: Array, period: int) -> tuple[float, float]:
    """From P - J. Gaps of the size of rounding are 0."""
    size = math.sqrt(max(float(np.linalg.eigvalsh(rest.T @ rest)[-1]), 0.0))
    gap = 1 - size if 1 - size > _ROUNDING else 0.0
    error, power = float(np.linalg.norm(rest)), rest
    for _ in range(_PERIODS - 1):
        # If P - J is nilpotent, its computed eigenvalues are roots of the rounding error.
        power = power @ rest
        before, error = error, float(np.linalg.norm(power))
        if _vanishes(before, error):
            return gap, 0.0
    radius = min(float(abs(np.linalg.eigvals(rest)).max()), 1.0)
    shrinks = 1 - radius ** (1 / period)
    return gap, 1 - shrinks if shrinks > _ROUNDING else 1.0


def _rounds_to(epsilon: float, rest: Array, rounds: Sequence[RoundArrays], limit: int) -> int | None:
    """Rounds of a periodic topology until the error is ``epsilon``. By powers of P - J, as the error never grows."""
    n, period = len(rest), len(rounds)
    identity: Array = np.eye(n) - 1 / n
    start = float(np.linalg.norm(identity))
    if not start:
        return 1
    powers = [rest]
    while np.linalg.norm(powers[-1]) > epsilon * start:
        if 2 ** len(powers) * period > limit:
            break
        powers.append(powers[-1] @ powers[-1])
    x, t = identity, 0
    for k in reversed(range(len(powers))):
        further = powers[k] @ x
        if np.linalg.norm(further) > epsilon * start:
            x, t = further, t + 2**k * period
    for round_ in rounds:  # the last, broken period
        t += 1
        round_.mix(x)
        if t > limit:
            return None
        if np.linalg.norm(x) <= epsilon * start:
            return t
    return None


def _decay(errors: Sequence[float]) -> float:
    """The mean factor per round of errors, down to rounding."""
    last = next((t for t, error in enumerate(errors) if error <= _ROUNDING), len(errors) - 1)
    if last and _vanishes(errors[last - 1], errors[last]):
        return 0.0
    return float(errors[last] ** (1 / last)) if last else 1.0


# -- cost ------------------------------------------------------------------------------------------------------------------


def _cost(rounds: Sequence[RoundArrays], n: int, local: int) -> dict[str, Any]:
    """The fields of `Analysis` about traffic.

    A group of m workers on k nodes sums and returns its mean along trees: 2(m - 1) messages, 2(k - 1) of them between nodes,
    evenly distributed over its workers and over its nodes. For a pair this is the message of each to the other.
    """
    n_nodes = -(-n // local)
    sent = between = fan_in = 0.0
    busy, largest = 0, 1
    met = np.zeros((n, n), dtype=bool)
    seen: dict[int, tuple[float, float]] = {}  # equal rounds (such as the idle ones of `every`) are computed once
    for round_ in rounds:
        busy += len(round_.members)
        sent += 2 * float((round_.sizes - 1).sum())
        if id(round_) not in seen:
            seen[id(round_)] = _between_nodes(round_, n_nodes, local)
            for size in np.unique(round_.sizes):
                ranks = round_.members[np.repeat(round_.sizes == size, round_.sizes)].reshape(-1, size)
                met[ranks[:, :, None], ranks[:, None, :]] = True
                largest = max(largest, int(size))
        crossing, entering = seen[id(round_)]
        between += crossing
        fan_in = max(fan_in, entering)
    np.fill_diagonal(met, False)
    return {
        "degree": int(met.sum(axis=1).max()),
        "largest_group": largest,
        "idle": 1 - busy / (len(rounds) * n),
        "sent_by_worker": sent / (len(rounds) * n),
        "sent_by_node": between / (len(rounds) * n_nodes),
        "fan_in": fan_in,
    }


def _between_nodes(round_: RoundArrays, n_nodes: int, local: int) -> tuple[float, float]:
    """All that crosses between nodes, and the most that enters one node."""
    if not len(round_.members):
        return 0.0, 0.0
    # Each (edge, node) with a member there, once.
    edges, nodes = np.divmod(np.unique(round_.edge_of * n_nodes + round_.members // local), n_nodes)
    spans = np.bincount(edges, minlength=len(round_.sizes))
    crossing = 2.0 * (spans - 1)
    return float(crossing.sum()), float(np.bincount(nodes, weights=(crossing / spans)[edges]).max())


# -- all of it -------------------------------------------------------------------------------------------------------------


def analyse(topology: Topology, *, payload: float = 1.0, epsilon: float = 1e-3, limit: int = 10_000) -> Analysis:
    """How fast a topology of up to 1,024 workers brings replicas together, and how much it sends.

    Bytes are those of messages as the library's transport moves them. In a pair each sends one payload to the other. In a
    group of m workers each sends 2(m - 1)/m payloads on average, and if the group is on k > 1 nodes, 2(k - 1)/k payloads leave
    and enter each of these nodes.

    Args:
        topology: the topology.
        payload: size of a replica's parameters, in any unit: the unit of the results.
        epsilon: of ``rounds_to_epsilon``; in (0, 1).
        limit: the most rounds that ``rounds_to_epsilon`` considers.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range, or the topology has too many workers.
    """
    if not isinstance(topology, Topology):
        raise TypeError(f"analyse takes a Topology, got {topology!r}")
    n, local, period = topology._world_size, topology._local_world_size, topology.period
    payload = check_number("payload", payload, "a size, at least 0", at_least=0.0)
    epsilon = check_number("epsilon", epsilon, "between 0 and 1", above=0.0, below=1.0)
    limit = check_integer("limit", limit, 1)
    if n > MOST_WORKERS:
        raise ValueError(
            f"{title_of(topology)} has {n} workers: analyse takes at most {MOST_WORKERS}, as its matrices are dense"
        )
    gap: float | None = None
    exact = False
    if period is None or _has_no_period(topology):
        looked_at = _ROUNDS * longest_turn(topology)
        cost = _cost(list(islice(all_rounds(topology), looked_at)), n, local)
        rate = _decay(list(_errors(n, all_rounds(topology), looked_at)))
        errors = enumerate(_errors(n, all_rounds(topology), limit))
        reached = next((t for t, error in errors if error <= epsilon), None)
    else:
        rounds = list(islice(all_rounds(topology), period))
        cost = _cost(rounds, n, local)
        product = np.eye(n)
        for round_ in rounds:
            round_.mix(product)
        rest = product - 1 / n
        exact = float(np.linalg.norm(rest)) <= _ROUNDING * math.sqrt(n)
        gap, rate = (1.0, 0.0) if exact else _gap_and_rate(rest, period)
        reached = _rounds_to(epsilon, rest, rounds, limit)
    found = Analysis(title_of(topology), n, local, period, exact, gap, rate, reached, epsilon, **cost)
    sizes = {name: payload * getattr(found, name) for name in ("sent_by_worker", "sent_by_node", "fan_in")}
    return replace(found, **sizes)
