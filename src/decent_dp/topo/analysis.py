"""What a topology is worth: how fast it draws replicas together, and what it puts on the network.

The consensus error of values x_1, ..., x_n is the root of the mean square of their distance to the mean, relative to what it
was in the beginning. A round multiplies the values by its mixing matrix; P is the product over a period,
W_{T-1} ... W_1 W_0, and J the matrix whose entries are 1/n.

No matrix of n x n numbers is made for more than 128 workers: a round is applied to values as sums over its groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, count, cycle, islice

import numpy as np
import numpy.typing as npt

from .base import Edge, Topology, _integer

__all__ = ["Analysis", "analyse", "consensus_error", "is_doubly_stochastic", "mixing_matrix"]

Array = npt.NDArray[np.float64]

# A topology without a period is judged by so many rounds.
ROUNDS_LOOKED_AT = 64

# Up to so many workers the matrix of a period is made, and the error is that of all starts (the identity matrix); else it is
# that of this many random starts, a fixed draw.
_DENSE, _PROBES = 128, 32
# An error that is nothing but rounding.
_ROUNDING = 1e-12

# Lanczos: steps at most, and how exact the distance of the norm to 0 and to 1 must be.
_STEPS, _RELATIVE = 6000, 1e-4
# Arnoldi: directions at a time, and rounds that are applied to one, about, before it gives up.
_KRYLOV, _APPLICATIONS = 50, 400_000


@dataclass(frozen=True)
class Analysis:
    """What :func:`analyse` finds. Bytes are in units of ``payload``; of a topology without a period, over 64 rounds.

    Attributes:
        name: the topology's title.
        world_size: workers n.
        local_world_size: workers a node.
        period: rounds after which they repeat; None if they do not.
        exact: after a period all workers hold the mean, up to rounding.
        spectral_gap: 1 - ||P - J||, in the 2-norm: 1 for an exact average, 0 if some never hear of each other. None without
            a period.
        rate: the factor by which a round shrinks the consensus error, in the long run; 0.0 for an exact average. With a
            period of T rounds, the T-th root of the spectral radius of P - J.
        rounds_to_epsilon: rounds until the error is at most ``epsilon``; None: more than the limit.
        epsilon: as given.
        degree: different peers that a worker meets, the largest over workers.
        largest_group: workers of the largest edge.
        idle: share of worker-rounds that are sat out.
        sent_by_worker: what a worker sends a round, the mean over workers and rounds.
        sent_by_node: what a node sends to other nodes a round, and receives from them, the mean over nodes and rounds.
        fan_in: the most that enters one node from others in one round.
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


class _Round:
    """A round: for each worker its group, and the weights of itself and of each peer."""

    def __init__(self, edges: Sequence[Edge], n: int) -> None:
        self.n = n
        self.sizes = np.fromiter((len(edge.ranks) for edge in edges), np.int64, len(edges))
        # The workers group by group, and where the groups start.
        self.order = np.fromiter(chain.from_iterable(edge.ranks for edge in edges), np.int64, n)
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.group = np.empty(n, np.int64)
        self.group[self.order] = np.repeat(np.arange(len(edges)), self.sizes)
        own = np.fromiter((edge.weight for edge in edges), np.float64, len(edges))
        peer = np.fromiter((edge.peer_weight for edge in edges), np.float64, len(edges))
        self.peer_weight = peer[self.group][:, None]
        self._kept = (own - peer)[self.group][:, None]  # of the own value, beside the sum over the group
        self.is_idle = len(edges) == n
        self.of_pairs = bool(self.sizes.max() <= 2)
        if self.of_pairs:
            self.partner = np.arange(n)
            pairs = self.starts[self.sizes == 2]
            a, b = self.order[pairs], self.order[pairs + 1]
            self.partner[a], self.partner[b] = b, a
            self._own = own[self.group][:, None]

    def apply(self, x: Array) -> Array:
        """The mixing matrix times ``x`` of shape (n, m)."""
        if self.is_idle:
            return x
        if self.of_pairs:
            return np.asarray(self._own * x + self.peer_weight * x[self.partner])
        sums = np.add.reduceat(x[self.order], self.starts, axis=0)
        return np.asarray(self._kept * x + self.peer_weight * sums[self.group])


def _rounds(topology: Topology) -> Iterator[_Round]:
    """The rounds, one after another, without end."""
    period = topology.period
    # Rounds that are the same object (all of a period when it comes again, the idle ones of `every`) are made once.
    made: dict[int, tuple[list[Edge], _Round]] = {}
    for t in count() if period is None else range(period):
        edges = topology._checked(t)
        known = made.get(id(edges))
        if known is None:
            known = edges, _Round(edges, topology.world_size)
            if period is not None:
                made[id(edges)] = known
        yield known[1]
    yield from cycle([made[id(topology._checked(t))][1] for t in range(period or 0)])


def _apply(rounds: Sequence[_Round], x: Array, *, transposed: bool = False) -> Array:
    """The product of the rounds, W_{T-1} ... W_0, or its transpose, times ``x``. Each round's matrix is symmetric."""
    for round_ in reversed(rounds) if transposed else rounds:
        x = round_.apply(x)
    return x


# -- matrices and errors ---------------------------------------------------------------------------------------------------


def mixing_matrix(topology: Topology, t: int | None = None) -> Array:
    """The mixing matrix of round ``t``, or of a whole period, W_{T-1} ... W_1 W_0: of shape (n, n), float64.

    Raises:
        ValueError: ``t`` is not given and the topology has no period.
    """
    if t is not None:
        return topology.mixing_matrix(t)
    if topology.period is None:
        raise ValueError(f"{topology.title()} has no period: pass t=, the round")
    return _apply(list(islice(_rounds(topology), topology.period)), np.eye(topology.world_size))


def is_doubly_stochastic(matrix: npt.ArrayLike, tolerance: float = 1e-12) -> bool:
    """Whether a matrix is square and not negative, and all its rows and columns sum to 1, up to ``tolerance``."""
    w = np.asarray(matrix, dtype=np.float64)
    if w.ndim != 2 or w.shape[0] != w.shape[1] or not np.isfinite(w).all():
        return False
    sums = np.concatenate([w.sum(axis=0), w.sum(axis=1)])
    return bool((w >= -tolerance).all() and (abs(sums - 1) <= tolerance).all())


def consensus_error(topology: Topology, rounds: int) -> Array:
    """The consensus error after 0, 1, ..., ``rounds`` rounds, relative to that before: of shape (rounds + 1,), float64.

    It is the mean over all starts, ||W_{t-1} ... W_0 - J|| / ||I - J|| in the Frobenius norm, for up to 128 workers; for more,
    the mean over 32 random starts, always the same ones. Of one worker 1 and then 0.
    """
    rounds = _integer("consensus_error: rounds", rounds, 0)
    return np.fromiter(_errors(topology.world_size, _rounds(topology), rounds), np.float64, rounds + 1)


def _start(n: int) -> Array:
    """Values of n workers without a mean, a column a start."""
    x: Array = np.eye(n) if n <= _DENSE else np.random.default_rng(0).standard_normal((n, _PROBES))
    return np.asarray(x - x.mean(axis=0))


def _errors(n: int, rounds: Iterable[_Round], limit: int) -> Iterator[float]:
    """The error after 0, 1, ..., ``limit`` of the rounds."""
    x = _start(n)
    before = float(np.linalg.norm(x))
    error = 1.0
    yield error
    for round_ in islice(rounds, limit):
        if not (round_.is_idle and before):
            x = round_.apply(x)
            error = float(np.linalg.norm(x)) / before if before else 0.0
        yield error


def _is_rounding(n: int, rounds: Sequence[_Round]) -> bool:
    """Whether the rounds leave nothing but rounding of the distance to the mean."""
    start = _start(n)
    return float(np.linalg.norm(_apply(rounds, start))) <= _ROUNDING * float(np.linalg.norm(start))


# -- how fast --------------------------------------------------------------------------------------------------------------


def _largest_eigenvalue(diagonal: Sequence[float], beside: Sequence[float]) -> float:
    """Of the symmetric tridiagonal matrix: by bisection, counting negative pivots (Sturm)."""
    squares = [0.0, *(b * b for b in beside)]
    reach = [abs(b) for b in (0.0, *beside, 0.0)]
    low = max(diagonal)
    high = max(d + left + right for d, left, right in zip(diagonal, reach, reach[1:], strict=False))
    while high - low > 1e-15 * max(abs(low), abs(high)):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        pivot = -1.0
        for d, square in zip(diagonal, squares, strict=False):
            pivot = d - middle - square / pivot
            if pivot >= 0:
                if pivot > 0:
                    break  # some eigenvalue is larger
                pivot = -1e-300
        if pivot > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _norm(n: int, product: Callable[[Array], Array], transposed: Callable[[Array], Array]) -> float:
    """The 2-norm of a matrix on values without a mean, which it keeps so: Lanczos on its square, without n x n entries.

    Orthogonality is lost on the way, which only repeats eigenvalues that were found.
    """
    v = np.random.default_rng(1).standard_normal((n, 1))
    v -= v.mean()
    v /= np.linalg.norm(v)
    last, beta = np.zeros_like(v), 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    found, next_look = math.nan, 8
    for step in range(1, _STEPS + 1):
        w = transposed(product(v))
        w -= w.mean()  # rounding brings the mean back, whose eigenvalue is 1
        alpha = float((v * w).sum())
        diagonal.append(alpha)
        w -= alpha * v + beta * last
        beta = float(np.linalg.norm(w))
        ended = beta < 1e-14 or step in (n - 1, _STEPS)
        if step == next_look or ended:
            before, found = found, _largest_eigenvalue(diagonal, beside)
            within = _RELATIVE * min(abs(found), max(1 - found, _ROUNDING))
            if ended or abs(found - before) <= within:
                break
            next_look = math.ceil(1.4 * step)
        beside.append(beta)
        last, v = v, w / beta
    return math.sqrt(max(found, 0.0))


def _spectral_radius(n: int, rounds: Sequence[_Round]) -> float:
    """Of the product of the rounds on values without a mean: Arnoldi on ever higher powers of it, without n x n entries.

    The power goes up, and the search goes on from the best direction, until what is found is near enough to an eigenvector.
    """
    start = np.random.default_rng(2).standard_normal(n)
    power = 1
    while True:
        basis, image = _krylov(start, list(rounds) * power, min(_KRYLOV, n - 1))
        size = image.shape[1]
        values, vectors = np.linalg.eig(image[:size])
        best = int(np.argmax(abs(values)))
        found, vector = min(float(abs(values[best])), 1.0), vectors[:, best]
        left = float(image[size, size - 1] * abs(vector[-1]))
        power *= 4
        near = left <= _RELATIVE * min(found, max(1 - found, _ROUNDING))
        if near or power * size * len(rounds) > _APPLICATIONS:
            return float(found ** (4 / power))
        start = np.real(vector) @ basis[:size]


def _krylov(start: Array, rounds: Sequence[_Round], size: int) -> tuple[Array, Array]:
    """Orthonormal rows that the product of the rounds spans from ``start``, and what it makes of them in their terms."""
    basis, image = np.zeros((size + 1, len(start))), np.zeros((size + 1, size))
    start = start - start.mean()
    basis[0] = start / np.linalg.norm(start)
    for i in range(size):
        w = _apply(rounds, basis[i][:, None])[:, 0]
        w = w - w.mean()  # rounding brings the mean back, whose eigenvalue is 1
        for _ in range(2):  # again for what rounding left the first time
            along = basis[: i + 1] @ w
            w = w - along @ basis[: i + 1]
            image[: i + 1, i] += along
        length = np.linalg.norm(w)
        if length < 1e-14:  # there are no further directions
            return basis[: i + 2], image[: i + 2, : i + 1]
        image[i + 1, i], basis[i + 1] = length, w / length
    return basis, image


def _gap_and_rate(n: int, rounds: Sequence[_Round]) -> tuple[float, float]:
    """Of a period that is no exact average."""
    period = len(rounds)
    working = [round_ for round_ in rounds if not round_.is_idle]
    if not working:
        return 0.0, 1.0
    if n <= _DENSE:
        rest = _apply(working, np.eye(n)) - 1 / n
        norm, radius = float(np.linalg.norm(rest, 2)), float(abs(np.linalg.eigvals(rest)).max())
    else:
        norm = _norm(n, lambda x: _apply(working, x), lambda x: _apply(working, x, transposed=True))
        radius = _spectral_radius(n, working)
    return _rounded(1 - min(norm, 1.0)), 1 - _rounded(1 - min(radius, 1.0) ** (1 / period))


def _rounded(gap: float) -> float:
    """A gap that is nothing but rounding is none."""
    return gap if gap > _ROUNDING else 0.0


def _decay(errors: Sequence[float]) -> float:
    """The factor a round of errors that go down to rounding, or on to the end."""
    last = next((t for t, error in enumerate(errors) if error <= _ROUNDING), len(errors) - 1)
    return float(errors[last] ** (1 / last)) if last else 1.0


# -- what it costs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """Of some rounds: as in :class:`Analysis`."""

    degree: int
    largest_group: int
    idle: float
    sent_by_worker: float
    sent_by_node: float
    fan_in: float


def _cost(rounds: Sequence[_Round], n: int, local: int) -> _Cost:
    """A group of m workers on k nodes sums and returns its mean along trees, 2(m - 1) messages, 2(k - 1) between nodes.

    They are dealt out evenly over its workers and over its nodes. Of a pair these are the message of each to the other.
    """
    n_nodes = -(-n // local)
    sent = between = fan_in = 0.0
    idle = largest = 0
    # Equal rounds (such as the idle ones of `every`) are looked at once.
    counts: dict[int, int] = {}
    for round_ in rounds:
        counts[id(round_)] = counts.get(id(round_), 0) + 1
    different = list({id(round_): round_ for round_ in rounds}.values())
    for round_ in different:
        times, sizes = counts[id(round_)], round_.sizes
        largest = max(largest, int(sizes.max()))
        idle += times * int((sizes == 1).sum())
        sent += times * 2 * float((sizes - 1).sum())
        # Each pair (group, node) that occurs, once.
        groups, nodes = np.divmod(np.unique(round_.group * n_nodes + np.arange(n) // local), n_nodes)
        spans = np.bincount(groups, minlength=len(sizes))
        crossing = 2 * (spans - 1)
        between += times * float(crossing.sum())
        entering = np.bincount(nodes, weights=(crossing / spans)[groups], minlength=n_nodes)
        fan_in = max(fan_in, float(entering.max()))
    total = len(rounds)
    return _Cost(
        _degree(different, n, largest),
        largest,
        idle / (total * n),
        sent / (total * n),
        between / (total * n_nodes),
        fan_in,
    )


def _degree(rounds: Sequence[_Round], n: int, largest: int) -> int:
    """Different peers of a worker, the most."""
    if largest == n:
        return n - 1
    met = np.zeros((n, n), dtype=bool)
    everyone = np.arange(n)
    for round_ in rounds:
        if round_.of_pairs:
            met[everyone, round_.partner] = True
            continue
        for start, size in zip(round_.starts, round_.sizes, strict=True):
            members = round_.order[start : start + size]
            met[members[:, None], members] = True
    met[everyone, everyone] = False
    return int(met.sum(axis=1).max())


# -- all of it -------------------------------------------------------------------------------------------------------------


def analyse(topology: Topology, *, payload: float = 1.0, epsilon: float = 1e-3, limit: int = 10_000) -> Analysis:
    """What a topology is worth and what it costs, in seconds for some thousand workers.

    Bytes are those of messages as the library's transport moves them: in a pair each sends one payload to the other; in a
    group of m workers each sends 2(m - 1)/m payloads on average, and if they are on k > 1 nodes, 2(k - 1)/k payloads leave
    each of these, and enter it.

    Gap and rate of more than 128 workers are iterated, to three digits or more.

    Args:
        topology: what to look at.
        payload: size of a replica's parameters, in whatever unit: the unit of the results.
        epsilon: of ``rounds_to_epsilon``; in (0, 1).
        limit: rounds at most that are tried for it.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    if not isinstance(topology, Topology):
        raise TypeError(f"analyse takes a Topology, got {topology!r}")
    payload, epsilon = _number("payload", payload), _number("epsilon", epsilon)
    if not 0 <= payload < math.inf:
        raise ValueError(f"payload must be a size, at least 0, got {payload!r}")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be between 0 and 1, got {epsilon!r}")
    limit = _integer("limit", limit, 1)
    n, local, period = topology.world_size, topology.local_world_size, topology.period
    rounds = list(islice(_rounds(topology), ROUNDS_LOOKED_AT if period is None else period))
    cost = _cost(rounds, n, local)
    gap: float | None = None
    rate, hopeless = 0.0, False
    exact = period is not None and _is_rounding(n, rounds)
    if period is None:
        rate = _decay(list(_errors(n, rounds, len(rounds))))
    elif exact:
        gap = 1.0
    else:
        gap, rate = _gap_and_rate(n, rounds)
        # No start's error shrinks faster than the slowest of n - 1 directions: what cannot be reached is not looked for.
        hopeless = rate ** (limit + period) / math.sqrt(max(n - 1, 1)) > 2 * epsilon
    errors = _errors(n, _rounds(topology), limit)
    reached = None if hopeless else next((t for t, error in enumerate(errors) if error <= epsilon), None)
    sizes = {field.name: getattr(cost, field.name) for field in fields(cost)}
    for name in ("sent_by_worker", "sent_by_node", "fan_in"):
        sizes[name] *= payload
    return Analysis(topology.title(), n, local, period, exact, gap, rate, reached, epsilon, **sizes)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)
