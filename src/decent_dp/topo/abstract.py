"""The base class of all topologies.

A topology says which workers mix at update t. Its answer is a *round*: a partition of the workers into edges. The mixing
matrix of a round is block diagonal, symmetric and doubly stochastic, so mixing never moves the mean over the workers.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from abc import ABCMeta
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from decent_dp._checks import check_integer

from .edges import _KEPT_ROUNDS, Edge, PairRounds, _checked_round, _words

__all__ = ["Edge", "Topology", "check_pairs", "listing", "worker_scope"]

FINGERPRINT_ROUNDS = 64
_SHOWN_ROUNDS = 16
# Rounds of a topology without a period that are looked at for a property of all.
_SEEN_ROUNDS = 256

# True while topologies are constructed to find out which ones fit: their errors do not list what fits, without end.
listing: ContextVar[bool] = ContextVar("decent_dp_listing", default=False)

_scope: ContextVar[tuple[int, int] | None] = ContextVar("decent_dp_worker", default=None)


@contextmanager
def worker_scope(world_size: int, rank: int) -> Iterator[None]:
    """Topologies made inside take ``world_size`` and ``rank`` from here instead of from the default process group.

    So a subclass whose ``__init__`` knows only ``local_world_size`` works with any process group.
    """
    token = _scope.set((world_size, rank))
    try:
        yield
    finally:
        _scope.reset(token)


def _current_worker() -> tuple[int, int] | None:
    """``(world_size, rank)`` of the open `worker_scope`, else of the default process group, else None."""
    scoped = _scope.get()
    # Not imported here: a topology can be made, printed and studied without torch. A process group needs torch imported.
    dist = sys.modules.get("torch.distributed")
    if scoped is None and dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return scoped


def _fitting(world_size: int, local_world_size: int) -> str:
    """The end of the message that refuses a topology: the names of those that fit."""
    if listing.get():
        return ""
    from decent_dp import topo  # at call time, because the registry imports this module

    names = ", ".join(map(repr, topo.registry.names_that_fit(world_size, local_world_size))) or "none"
    return f"; registered topologies that fit world_size={world_size} with local_world_size={local_world_size}: {names}"


class TopologyMeta(ABCMeta):
    """Checks the rounds after the whole ``__init__`` of a subclass, wherever in it ``super().__init__`` is called."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        topology = super().__call__(*args, **kwargs)
        if isinstance(topology, Topology):
            topology._check()
        return topology


class Topology(metaclass=TopologyMeta):
    """Says which workers mix in each round.

    A subclass implements `_get_topo_edges`, from ``self._world_size``, ``self._local_world_size`` and
    ``self._n_nodes``, or overrides `round` if the rounds do not repeat. The rounds of a period are checked when the
    object is constructed. Of a topology without a period, round 0 is checked then, and the others when they are looked up.

    Args:
        local_world_size: workers per node; ranks ``[0, local_world_size)`` are the first node, and so on.
        world_size: number of workers n. Default: that of the process group.
        rank: this worker. Default: that of the process group, or 0 if ``world_size`` is given.

    Raises:
        TypeError: an argument is not an integer, or a subclass implements neither method.
        ValueError: an argument is out of range, the topology does not fit this number of workers, or a round is no
            partition of the workers into valid edges.
        RuntimeError: ``world_size`` is not given and there is no process group.
    """

    def __init__(self, local_world_size: int = 1, *, world_size: int | None = None, rank: int | None = None) -> None:
        name = type(self).__name__
        if world_size is None:
            current = _current_worker()
            if current is None:
                raise RuntimeError(
                    f"{name} does not know the workers, as there is no process group: "
                    "pass world_size= and rank=, or call decent_dp.utils.initialize_dist() first"
                )
            world_size, here = current
        else:
            scoped = _scope.get()
            here = scoped[1] if scoped is not None and scoped[0] == world_size else 0
        self._local_world_size = check_integer(f"{name}: local_world_size", local_world_size, 1)
        self._world_size = check_integer(f"{name}: world_size", world_size, 1)
        self._rank = check_integer(f"{name}: rank", here if rank is None else rank, 0)
        if self._rank >= self._world_size:
            raise ValueError(f"{name}: rank must be below world_size={self._world_size}, got {self._rank}")
        self._n_nodes = max(1, self._world_size // self._local_world_size)
        self._periodic_rounds: Sequence[list[Edge]] | None = None
        self._recent_rounds: dict[int, list[Edge]] = {}  # of a topology without a period
        reason = type(self).unfit(self._world_size, self._local_world_size)
        if reason is not None:
            raise ValueError(f"{name} {reason}{_fitting(self._world_size, self._local_world_size)}")

    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        """The reason why this topology does not fit so many workers ('needs a power of two workers, got 6'), or None."""
        return None

    # Of the replicas, in the mean that mixing keeps; None: equal ones.
    _replica_weights: tuple[float, ...] | None = None

    # --- a subclass implements one of these two

    def _get_topo_edges(self) -> Sequence[list[Edge]]:
        """All rounds of the period, one list of edges per round. Called once."""
        raise TypeError(
            f"{type(self).__name__} does not say who mixes with whom: implement _get_topo_edges(self) -> list[list[Edge]] "
            "(one list per round), or round(self, t) -> list[Edge] if the rounds do not repeat"
        )

    def round(self, t: int) -> list[Edge]:
        """The edges of round ``t`` ≥ 0; every rank is in exactly one of them.

        The result must depend on ``t`` alone and be the same on every worker. A random topology draws with a generator
        made from a seed and ``t``.
        """
        rounds = self._period_rounds()
        return list(rounds[check_integer("round", t, 0) % len(rounds)])

    # --- made from others

    def every(self, h: int) -> Topology:
        """This topology, mixing in every ``h``-th update only (h-1, 2h-1, …). All workers are idle in the other updates.

        The j-th mix is round j of this topology, so all rounds come up whatever ``h`` is.

        Raises:
            TypeError, ValueError: ``h`` is not an integer of at least 1.
        """
        h = check_integer("every: h", h, 1)
        return self if h == 1 else self._every(h)

    def _every(self, h: int) -> Topology:
        from . import EveryTopology  # it builds on this class

        return EveryTopology(self, h)

    def _weighted(self, weights: Sequence[float]) -> Topology:
        """This topology for replicas of these weights a: mixing keeps their weighted mean Σ a x / Σ a.

        Raises:
            ValueError: an edge has more than two workers.
        """
        check_pairs(self, "weight", "as the messages of a larger group become a plain mean on their way")
        made = copy.copy(self)
        made._replica_weights = tuple(weights)
        return made

    def _pull(self, edge: Edge, rank: int) -> float:
        """The factor of what ``rank`` takes on a pair because of the weights, 2 a_j/(a_i + a_j); 1 if they are equal.

        So an edge of weight 1/2 makes both ends (a_i x_i + a_j x_j)/(a_i + a_j). Any edge reduces their difference as far as
        one of equal weights, and keeps a_i x_i + a_j x_j, as a_i times the factor is the same at both ends.
        """
        if self._replica_weights is None or len(edge.ranks) == 1:
            return 1.0
        (other,) = set(edge.ranks) - {rank}
        return 2 * self._replica_weights[other] / (self._replica_weights[rank] + self._replica_weights[other])

    def _share(self, rank: int, members: Iterable[int]) -> float | None:
        """The share of ``rank`` in the weight of ``members``; None for equal weights."""
        weights = self._replica_weights
        return None if weights is None else weights[rank] / sum(weights[member] for member in members)

    @staticmethod
    def from_graph(
        graph: Any,
        *,
        local_world_size: int = 1,
        world_size: int | None = None,
        rank: int | None = None,
        allow_disconnected: bool = False,
    ) -> Topology:
        """A topology in which the neighbours of an undirected graph mix in pairs: see `GraphTopology`."""
        from . import GraphTopology  # it builds on this class

        made = GraphTopology(graph, local_world_size, world_size=world_size, rank=rank, allow_disconnected=allow_disconnected)
        return cast(Topology, made)

    # --- looking up

    # Not plain properties: a subclass may set attributes of these names.
    @cached_property
    def world_size(self) -> int:
        """Number of workers n."""
        return self._world_size

    @cached_property
    def local_world_size(self) -> int:
        """Workers per node."""
        return self._local_world_size

    @property
    def period(self) -> int | None:
        """Number of rounds after which they repeat; None for a topology that overrides `round`."""
        return None if self._is_aperiodic() else len(self._period_rounds())

    def get_edge(self, step: int) -> Edge:
        """This rank's edge of round ``step`` ≥ 0.

        Raises:
            ValueError: ``step`` is negative, or an overridden `round` gave an invalid round.
        """
        edges = self._checked(check_integer("step", step, 0))
        return next(edge for edge in edges if self._rank in edge.ranks)

    def mixing_matrix(self, t: int) -> npt.NDArray[np.float64]:
        """The mixing matrix of round ``t``, of shape (n, n) and dtype float64.

        Entry ``[i, j]`` is the weight with which worker i takes the value of worker j. The matrix is symmetric, and its
        rows and columns sum to 1.
        """
        W = np.zeros((self._world_size, self._world_size))
        for edge in self._checked(t):
            W[np.ix_(edge.ranks, edge.ranks)] = edge.peer_weight
            W[edge.ranks, edge.ranks] = edge.weight
        return W

    def mixes(self, t: int) -> bool:
        """False in the updates between two mixes of ``every(h)``."""
        return self._mixes(check_integer("round", t, 0))

    def _mixes(self, t: int) -> bool:
        return True

    def _next_mix(self, t: int) -> int:
        """The first update from ``t`` on that mixes."""
        while not self._mixes(t):
            t += 1
        return t

    def _spread(self, start: int, stop: int, total: int) -> Topology:
        """This topology for bytes ``start`` to ``stop`` of the parameters' ``total``.

        With ``every(h)`` each such part has a turn of its own in the ``h`` updates, as long as its share of the bytes.
        """
        return self

    def _time(self, t: int) -> int:
        """The number of updates that an exchange of round ``t`` has to arrive."""
        return 1

    def longest_turn(self) -> int:
        """The most updates from one mix to the next, in any part of a composition."""
        return self._longest_turn()

    def _longest_turn(self) -> int:
        return 1

    def largest_group(self) -> int:
        """The number of workers in the largest edge; of a topology without a period, in its first 256 rounds."""
        return self._largest_group()

    def _largest_group(self) -> int:
        rounds = range(self.period or _SEEN_ROUNDS)
        return max(len(edge.ranks) for t in rounds for edge in self._checked(t))

    def meetings(self, t: int, ranks: Sequence[int]) -> int:
        """In how many rounds before ``t`` these workers are an edge; of a topology without a period, ``t``.

        In a composition since the beginning of its part.
        """
        return self._meetings(check_integer("round", t, 0), tuple(sorted(ranks)))

    def _meetings(self, t: int, ranks: tuple[int, ...]) -> int:
        if self.period is None:
            return t
        periods, at = divmod(t, self.period)
        rounds = self._rounds_of_edges.get(ranks, [])
        return periods * len(rounds) + bisect_left(rounds, at)

    @cached_property
    def _rounds_of_edges(self) -> dict[tuple[int, ...], list[int]]:
        """The rounds of the period in which each edge occurs."""
        found: dict[tuple[int, ...], list[int]] = {}
        for t in range(self.period or 0):
            for edge in self._checked(t):
                found.setdefault(tuple(sorted(edge.ranks)), []).append(t)
        return found

    def _final_part(self) -> tuple[Topology, int]:
        """The last part of a composition, and the number of updates from one of its mixes to the next."""
        return self, 1

    def _edges_ahead(self, limit: int) -> list[Edge]:
        """This rank's edges in the first ``limit`` rounds of the period, to connect before the first round.

        As many on every worker. Empty for a topology without a period.
        """
        return [self.get_edge(t) for t in range(min(self.period or 0, limit))]

    def title(self) -> str:
        """The name in prints and in the workers' comparison: the class and its settings."""
        return self._title()

    def _title(self) -> str:
        return type(self).__name__

    def fingerprint(self) -> dict[str, str | int]:
        """A summary that workers compare to see that they have the same topology.

        Returns:
            ``name``: the title; ``n``: the number of workers; ``rounds``: 16 hex digits of the SHA-256 of the period's
            length and the first rounds (the whole period, at most 64). The order of edges and of ranks does not matter.
        """
        return self._fingerprint(FINGERPRINT_ROUNDS)

    def _fingerprint(self, most: int, also: str = "") -> dict[str, str | int]:
        """The fingerprint of the first ``most`` rounds, and of a text that stands for the others."""
        period = self.period
        digest = hashlib.sha256(f"period {period}{also}".encode())
        rounds = None if self._is_aperiodic() else self._period_rounds()
        for t in range(min(period or most, most)):
            if isinstance(rounds, PairRounds):
                digest.update(rounds.digest(t))
            else:
                digest.update(repr(sorted((sorted(edge.ranks), edge.weight) for edge in self._checked(t))).encode())
        return {"name": self._title(), "n": self._world_size, "rounds": digest.hexdigest()[:16]}

    def __repr__(self) -> str:
        sizes = f"{self._local_world_size}, world_size={self._world_size}, rank={self._rank}"
        return f"{type(self).__name__}({sizes})"

    def __str__(self) -> str:
        """A table with one line per round: the ranks of each edge in parentheses, and its weight."""
        period = self.period
        shown = _SHOWN_ROUNDS // 4 if period is None else min(period, _SHOWN_ROUNDS)
        repeats = "rounds do not repeat" if period is None else f"{period} round{'s' * (period > 1)} per period"
        lines = [f"{self._title()}: {self._world_size} worker{'s' * (self._world_size > 1)}, {repeats}"]
        for t in range(shown):
            lines.append(f"  round {t}: {_words(self._checked(t))}")
        if period is None or period > shown:
            lines.append("  …")
        return "\n".join(lines)

    # --- checks

    def _is_aperiodic(self) -> bool:
        return type(self).round is not Topology.round

    def _check(self) -> None:
        """Called by the metaclass after the subclass's ``__init__``."""
        if "_recent_rounds" not in vars(self):
            raise TypeError(f"{type(self).__name__}.__init__ must call super().__init__(local_world_size)")
        if not self._is_aperiodic():
            self._period_rounds()
            return
        first, again = self._checked(0), _checked_round(self.round(0), self._world_size, self._where(0))
        if first != again:
            raise ValueError(
                f"{self._where(0)}, asked for twice, was {_words(first)} and then {_words(again)}: "
                "round(t) must depend on t alone; "
                "draw with a generator made from a seed and t, such as numpy.random.default_rng([seed, t])"
            )

    def _where(self, t: int) -> str:
        return f"{type(self).__name__}, round {t}"

    def _checked(self, t: int) -> list[Edge]:
        """Round ``t``, checked."""
        t = check_integer("round", t, 0)
        if not self._is_aperiodic():
            rounds = self._period_rounds()
            return rounds[t % len(rounds)]
        edges = self._recent_rounds.get(t)
        if edges is None:
            edges = _checked_round(self.round(t), self._world_size, self._where(t))
            # A new dict instead of a change: threads may look rounds up at the same time.
            self._recent_rounds = dict([*list(self._recent_rounds.items())[-(_KEPT_ROUNDS - 1) :], (t, edges)])
        return edges

    def _period_rounds(self) -> Sequence[list[Edge]]:
        """All rounds of the period, made and checked at the first call."""
        if self._periodic_rounds is None:
            rounds: object = self._get_topo_edges()
            name = type(self).__name__
            if not isinstance(rounds, Iterable):
                raise ValueError(f"{name}._get_topo_edges() returned {rounds!r}: return a list of rounds, [[Edge(...)]]")
            # Pair rounds are valid by construction.
            self._periodic_rounds = (
                rounds
                if isinstance(rounds, PairRounds)
                else [_checked_round(edges, self._world_size, self._where(t)) for t, edges in enumerate(rounds)]
            )
            if not self._periodic_rounds:
                raise ValueError(f"{name} has no rounds: _get_topo_edges() must return at least one list of edges")
        return self._periodic_rounds


def check_pairs(
    topology: Topology, who: str, why: str = "where one that is gone costs its partner one edge and nobody else waits"
) -> None:
    """Refuses a topology with groups.

    Args:
        who: the feature that needs pairs, for the message. ``why``: the reason.

    Raises:
        ValueError: an edge has more than two workers.
    """
    if (largest := Topology.largest_group(topology)) > 2:
        raise ValueError(
            f"{who} needs a topology of pairs, {why}, and {topology!r} mixes groups of {largest}: use 'base-2', "
            "'one-peer-exp', 'ring' or 'random-matching'"
        )
