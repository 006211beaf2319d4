"""What a topology is worth: how fast it draws replicas together, and what it puts on the network.

The consensus error of values x_1, ..., x_n is the root of the mean square of their distance to the mean, relative to what it
was in the beginning. A round multiplies the values by its mixing matrix; P is the product over a period,
W_{T-1} ... W_1 W_0, and J the matrix whose entries are 1/n.

For more than 128 workers no matrix of n x n floating-point numbers is made: a round is applied to values as sums over its
groups. (Who has met whom is a table of n x n bytes.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from .base import Topology
from .compose import EveryTopology, SwitchTopology
from .edges import _integer
from .rounds import Array, Round, all_rounds, apply, too_long
from .spectrum import _ROUNDING, norm, spectral_radius

__all__ = ["Analysis", "analyse", "consensus_error", "is_doubly_stochastic", "mixing_matrix"]

# A topology without a period is judged by so many rounds.
ROUNDS_LOOKED_AT = 64

# Up to so many workers the matrix of a period is made, and the error is that of all starts (the identity matrix); else it is
# that of this many random starts, a fixed draw.
_DENSE, _PROBES = 128, 32
# Periods that are gone through to see whether the error comes to nothing all at once, and rounds in them.
_PERIODS, _ROUNDS_OF_PERIODS = 8, 4096


@dataclass(frozen=True)
class Analysis:
    """What :func:`analyse` finds. Bytes are in units of ``payload``.

    Of a topology without a period the figures are of its first 64 rounds; where it, or a part of it, mixes in every h-th
    update only, of the first 64 h. So of a switch they are of what comes first. (A period of more than 2^24 / n rounds is none
    here: the figures are of its first 64 rounds, and there is no gap.)

    Attributes:
        name: the topology's title.
        world_size: workers n.
        local_world_size: workers a node.
        period: rounds after which they repeat; None if they do not.
        exact: after a period all workers hold the mean, up to rounding.
        spectral_gap: 1 - ||P - J||, in the 2-norm: 1 for an exact average, 0 if some never hear of each other. None without
            a period. (For more than 128 workers see :func:`analyse` on how exact it and the rate are.)
        rate: the factor by which a round shrinks the consensus error, in the long run; 0.0 if nothing of it is left after some
            periods. With a period of T rounds, the T-th root of the spectral radius of P - J. Without, the mean over the
            rounds looked at.
        rounds_to_epsilon: rounds until the error is at most ``epsilon``; None: more than the limit. Of more than 128 workers
            an estimate, from 32 random starts (see :func:`consensus_error`).
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


# -- matrices and errors ---------------------------------------------------------------------------------------------------


def mixing_matrix(topology: Topology, t: int | None = None) -> Array:
    """The mixing matrix of round ``t``, or of a whole period, W_{T-1} ... W_1 W_0: of shape (n, n), float64.

    Raises:
        ValueError: ``t`` is not given and the topology has no period.
    """
    if t is not None:
        return topology.mixing_matrix(t)
    if topology.period is None:
        raise ValueError(f"{topology._title()} has no period: pass t=, the round")
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
    """The consensus error after 0, 1, ..., ``rounds`` rounds, relative to that before: of shape (rounds + 1,), float64.

    It is the mean over all starts, ||W_{t-1} ... W_0 - J|| / ||I - J|| in the Frobenius norm, for up to 128 workers; for more,
    the mean over 32 random starts, always the same ones: an estimate, good to some percent. Of one worker 1 and then 0.
    """
    rounds = _integer("consensus_error: rounds", rounds, 0)
    return np.fromiter(_errors(topology._world_size, all_rounds(topology), rounds), np.float64, rounds + 1)


def _start(n: int) -> Array:
    """Values of n workers without a mean, a column a start."""
    x: Array = np.eye(n) if n <= _DENSE else np.random.default_rng(0).standard_normal((n, _PROBES))
    return np.asarray(x - x.mean(axis=0))


def _errors(n: int, rounds: Iterable[Round], limit: int) -> Iterator[float]:
    """The error after 0, 1, ..., ``limit`` of the rounds."""
    x = _start(n)
    before = float(np.linalg.norm(x))
    error = 1.0
    yield error
    for round_ in islice(rounds, limit):
        if not (round_.is_idle and before):
            round_.mix(x)
            error = float(np.linalg.norm(x)) / before if before else 0.0
        yield error


# -- how fast --------------------------------------------------------------------------------------------------------------


def _is_exact(n: int, rounds: Sequence[Round]) -> bool:
    """Whether the rounds leave nothing but rounding of the distance to the mean."""
    start = _start(n)
    # Most do not, and then one start tells.
    return all(
        float(np.linalg.norm(apply(rounds, x))) <= _ROUNDING * float(np.linalg.norm(x)) for x in (start[:, :1].copy(), start)
    )


def _vanishes(before: float, after: float) -> bool:
    """Whether an error has come to nothing all at once, and not by shrinking on and on."""
    return after <= _ROUNDING and after <= 1e-6 * before


def _is_finite_time(n: int, rounds: Sequence[Round]) -> bool:
    """Whether after some periods the rounds leave nothing but rounding: P - J is nilpotent.

    Then its computed eigenvalues are roots of the rounding.
    """
    x = _start(n)
    error = start = float(np.linalg.norm(x))
    for _ in range(min(_PERIODS, _ROUNDS_OF_PERIODS // len(rounds))):
        x = apply(rounds, x)
        before, error = error, float(np.linalg.norm(x))
        if _vanishes(before / start, error / start):
            return True
    return False


def _gap_and_rate(n: int, rounds: Sequence[Round]) -> tuple[float, float]:
    """Of a period that is no exact average."""
    period = len(rounds)
    working = [round_ for round_ in rounds if not round_.is_idle]
    if not working:
        return 0.0, 1.0
    finite = _is_finite_time(n, working)
    if n <= _DENSE:
        rest = apply(working, np.eye(n)) - 1 / n
        size = float(np.linalg.norm(rest, 2))
        radius = 0.0 if finite else float(abs(np.linalg.eigvals(rest)).max())
    else:
        size = norm(n, working)
        radius = 0.0 if finite else spectral_radius(n, working)
    rate = 0.0 if finite else 1 - _rounded(1 - min(radius, 1.0) ** (1 / period))
    return _rounded(1 - min(size, 1.0)), rate


def _rounded(gap: float) -> float:
    """A gap that is nothing but rounding is none."""
    return gap if gap > _ROUNDING else 0.0


def _decay(errors: Sequence[float]) -> float:
    """The factor a round of errors that go down to rounding, or on to the end."""
    last = next((t for t, error in enumerate(errors) if error <= _ROUNDING), len(errors) - 1)
    if last and _vanishes(errors[last - 1], errors[last]):
        return 0.0
    return float(errors[last] ** (1 / last)) if last else 1.0


# -- what it costs ---------------------------------------------------------------------------------------------------------


def _cost(rounds: Iterable[Round], n: int, local: int) -> dict[str, Any]:
    """What rounds cost, as fields of :class:`Analysis`.

    A group of m workers on k nodes sums and returns its mean along trees, 2(m - 1) messages, 2(k - 1) between nodes.

    They are dealt out evenly over its workers and over its nodes. Of a pair these are the message of each to the other.
    """
    n_nodes = -(-n // local)
    sent = between = fan_in = 0.0
    total = busy = 0
    largest = 1
    # Equal rounds (such as the idle ones of `every`) are looked at once.
    counts: dict[int, tuple[Round, int]] = {}
    for round_ in rounds:
        total += 1
        counts[id(round_)] = round_, counts.get(id(round_), (round_, 0))[1] + 1
    for round_, times in counts.values():
        if round_.is_idle:
            continue
        sizes = round_.sizes
        largest = max(largest, int(sizes.max()))
        busy += times * len(round_.order)
        sent += times * 2 * float((sizes - 1).sum())
        crossing, entering = _between(round_, n_nodes, local)
        between += times * crossing
        fan_in = max(fan_in, entering)
    return {
        "degree": _degree([round_ for round_, _ in counts.values()], n, largest),
        "largest_group": largest,
        "idle": 1 - busy / (total * n),
        "sent_by_worker": sent / (total * n),
        "sent_by_node": between / (total * n_nodes),
        "fan_in": fan_in,
    }


def _between(round_: Round, n_nodes: int, local: int) -> tuple[float, float]:
    """What crosses between nodes in all, and the most that enters one."""
    if round_.pairs is not None:
        a, b = (ranks // local for ranks in round_.pairs)
        apart = a != b
        entering = np.bincount(np.concatenate([a[apart], b[apart]]), minlength=1)
        return float(entering.sum()), float(entering.max())
    # Each pair (group, node) that occurs, once.
    groups, nodes = np.divmod(np.unique(round_.group * n_nodes + round_.order // local), n_nodes)
    spans = np.bincount(groups, minlength=len(round_.sizes))
    crossing = 2 * (spans - 1)
    return float(crossing.sum()), float(np.bincount(nodes, weights=(crossing / spans)[groups]).max())


def _degree(rounds: Sequence[Round], n: int, largest: int) -> int:
    """Different peers of a worker, the most."""
    if largest == n:
        return n - 1
    met = np.zeros((n, n), dtype=bool)
    everyone = np.arange(n)
    for round_ in rounds:
        if round_.pairs is not None:
            a, b = round_.pairs
            met[a, b] = met[b, a] = True
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

    Who meets whom, and bytes, are exact. Gap and rate of up to 128 workers are those of the matrix of a period. Of more they
    are iterated, to three digits or more, for which a fixed amount of work is enough with periods of up to some hundred
    rounds. With thousands of rounds it may not be. Then the gap is what was found so far, which is too large, and the rate is
    too small: of an odd ring of 4095 workers both are right, but of a star of 4096, whose rounds mix next to nothing, the true
    gap is some hundred times smaller. ``rounds_to_epsilon`` of more than 128 workers is an estimate, from 32 random starts.

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
    found = _analyse(topology, epsilon, limit)
    sizes = {name: payload * getattr(found, name) for name in ("sent_by_worker", "sent_by_node", "fan_in")}
    return replace(found, **sizes)


def _analyse(topology: Topology, epsilon: float, limit: int) -> Analysis:
    """In units of one payload."""
    if type(topology) is EveryTopology:
        return _spread_out(topology, _analyse(topology._inner, epsilon, limit // topology._h), limit)
    n, local, period = topology._world_size, topology._local_world_size, topology.period
    gap: float | None = None
    rate, hopeless, exact = 0.0, False, False
    if period is None or too_long(topology):
        looked_at = ROUNDS_LOOKED_AT * _updates_a_mix(topology)
        cost = _cost(islice(all_rounds(topology), looked_at), n, local)
        rate = _decay(list(_errors(n, all_rounds(topology), looked_at)))
    else:
        rounds = list(islice(all_rounds(topology), period))
        cost = _cost(rounds, n, local)
        exact = _is_exact(n, rounds)
        gap, rate = (1.0, 0.0) if exact else _gap_and_rate(n, rounds)
        hopeless = _is_hopeless(n, rate, period, epsilon, limit)
    reached = None if hopeless else _reached(topology, epsilon, limit)
    return Analysis(
        topology._title(),
        n,
        local,
        period,
        exact,
        gap,
        rate,
        reached,
        epsilon,
        **cost,
    )


def _spread_out(topology: EveryTopology, inner: Analysis, limit: int) -> Analysis:
    """Of a topology that mixes in every h-th update, from what is known of its mixes."""
    h = topology._h
    reached = inner.rounds_to_epsilon
    if topology._world_size == 1:
        reached = 1
    elif reached is not None:
        reached = reached * h if reached * h <= limit else None
    return replace(
        inner,
        name=topology._title(),
        period=topology.period,
        rate=inner.rate ** (1 / h),
        rounds_to_epsilon=reached,
        idle=1 - (1 - inner.idle) / h,
        sent_by_worker=inner.sent_by_worker / h,
        sent_by_node=inner.sent_by_node / h,
    )


def _updates_a_mix(topology: Topology) -> int:
    """The most updates from one mix to the next of its parts."""
    if type(topology) is EveryTopology:
        return topology._h * _updates_a_mix(topology._inner)
    return max(map(_updates_a_mix, topology._parts)) if type(topology) is SwitchTopology else 1


def _is_hopeless(n: int, rate: float, period: int, epsilon: float, limit: int) -> bool:
    """Whether a rate is too slow for ``epsilon``: not to be looked for.

    The error of all starts shrinks no faster than that of the slowest of n - 1 directions.
    """
    return bool(rate ** (limit + period) / math.sqrt(max(n - 1, 1)) > 2 * epsilon)


def _reached(topology: Topology, epsilon: float, limit: int) -> int | None:
    """Rounds until the error is ``epsilon``."""
    n = topology._world_size
    start, last = (topology._starts[-1], topology._parts[-1]) if type(topology) is SwitchTopology else (0, None)
    period = None if last is None or n <= _DENSE or too_long(last) else last.period
    marks: list[float] = []
    for t, error in enumerate(_errors(n, all_rounds(topology), limit)):
        if error <= epsilon:
            return t
        if period is not None and t >= start and (t - start) % period == 0:
            marks.append(error)
            if _will_not(marks, (limit - t) / period, epsilon):
                return None
    return None


def _will_not(marks: Sequence[float], periods: float, epsilon: float) -> bool:
    """Whether errors, one a period of what stays for good, are on a way that will not come to ``epsilon`` in so many periods.

    Each of its directions shrinks by a factor of its own, so that the error as a whole shrinks ever more slowly: as it went
    lately is the fastest that it can go. Where it did not slow down so far (it may yet fall at once) nothing is said.
    """
    if len(marks) < _PERIODS or len(marks) & (len(marks) - 1):
        return False
    before, middle, now = marks[len(marks) // 2 - 1], marks[3 * len(marks) // 4 - 1], marks[-1]
    slows = middle * middle <= before * now and now < before
    return slows and now * (now / middle) ** (periods * 4 / len(marks)) > 10 * epsilon


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)
