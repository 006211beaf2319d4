"""Edges, rounds and the base class of all topologies.

A topology answers one question: who mixes with whom at update t? Its answer is a *round*: a partition of the workers
into edges. Whatever the edges are, the mixing matrix of a round is block diagonal, symmetric and doubly stochastic, so
that mixing never moves the mean over the workers.
"""

from __future__ import annotations

import hashlib
import sys
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .edges import Edge, PairRounds, Pairs, _checked_round, _integer, _words

__all__ = ["Edge", "Topology", "listing", "worker_scope"]

FINGERPRINT_ROUNDS = 64
_SHOWN_ROUNDS = 16
# Rounds that a topology without a period keeps. Every bucket asks for its round again, and a wire that announces for the
# next one too; they go through a round one after another.
_KEPT_ROUNDS = 4


# Whether it is being asked which topologies fit: those that are tried for the answer do not ask again.
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


def _worker_here(name: str) -> tuple[int, int]:
    """``(world_size, rank)`` of the open :func:`worker_scope`, else of the default process group."""
    scoped = _scope.get()
    if scoped is not None:
        return scoped
    import torch.distributed as dist  # not at the top: a topology can be made, printed and studied without torch

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{name} does not know the workers, as there is no process group: "
            "pass world_size= and rank=, or call decent_dp.utils.initialize_dist() first"
        )
    return dist.get_world_size(), dist.get_rank()


def _worker_if_any() -> tuple[int, int] | None:
    """``(world_size, rank)`` of the open :func:`worker_scope`, else of the default process group, else None."""
    scoped = _scope.get()
    dist = sys.modules.get("torch.distributed")  # where it was never imported there is no process group
    if scoped is None and dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return scoped


def _what_fits(world_size: int, local_world_size: int) -> str:
    """How the refusal of a topology goes on: with the names of others."""
    if listing.get():
        return ""
    from . import names_that_fit  # it makes topologies

    names = ", ".join(map(repr, names_that_fit(world_size, local_world_size))) or "none"
    return f"; registered topologies that fit world_size={world_size} with local_world_size={local_world_size}: {names}"


class TopologyMeta(ABCMeta):
    """Checks the rounds once the whole ``__init__`` of a subclass has run, wherever in it ``super()`` is called."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.round is Topology.round and cls._get_topo_edges is Topology._get_topo_edges:  # type: ignore[attr-defined]
            raise TypeError(
                f"{cls.__name__} does not say who mixes with whom: implement _get_topo_edges(self) -> list[list[Edge]] "
                "(one list a round), or round(self, t) -> list[Edge] if the rounds do not repeat"
            )
        topology = super().__call__(*args, **kwargs)
        if isinstance(topology, Topology):
            topology._check()
        return topology


class Topology(metaclass=TopologyMeta):
    """Who mixes with whom, at each round.

    A subclass implements either the periodic form :meth:`_get_topo_edges`, from ``self._world_size``,
    ``self._local_world_size`` and ``self._n_nodes``, or :meth:`round` when the rounds do not repeat. All rounds of the
    period (of an aperiodic topology, round 0 here and the others when they are looked up) are checked when the object
    is made, after the whole ``__init__`` of the subclass.

    Args:
        local_world_size: workers a node; ranks ``[0, local_world_size)`` are the first node, and so on.
        world_size: number of workers n. Not given: that of the process group.
        rank: this worker. Not given: that of the process group, or 0 when ``world_size`` is given.

    Raises:
        TypeError: an argument is not an integer, or a subclass implements neither method.
        ValueError: an argument is out of range, the topology does not serve this number of workers, or a round is no
            partition of the workers into valid edges.
        RuntimeError: ``world_size`` is not given and there is no process group.
    """

    def __init__(self, local_world_size: int = 1, *, world_size: int | None = None, rank: int | None = None) -> None:
        name = type(self).__name__
        if world_size is None:
            world_size, here = _worker_here(name)
        else:
            scoped = _scope.get()
            here = scoped[1] if scoped is not None and scoped[0] == world_size else 0
        self._local_world_size = _integer(f"{name}: local_world_size", local_world_size, 1)
        self._world_size = _integer(f"{name}: world_size", world_size, 1)
        self._rank = _integer(f"{name}: rank", here if rank is None else rank, 0)
        if self._rank >= self._world_size:
            raise ValueError(f"{name}: rank must be below world_size={self._world_size}, got {self._rank}")
        self._n_nodes = max(1, self._world_size // self._local_world_size)
        self._periodic_rounds: Sequence[list[Edge]] | None = None
        self._own_edges: dict[int, Edge] = {}  # of this rank, by round of the period
        self._looked_up: dict[int, tuple[list[Edge], Edge]] = {}  # rounds without a period, with this rank's edge
        reason = type(self).unfit(self._world_size, self._local_world_size)
        if reason is not None:
            raise ValueError(f"{name} {reason}{_what_fits(self._world_size, self._local_world_size)}")

    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        """Why this topology cannot serve ``world_size`` workers, ``local_world_size`` a node; None: it can.

        The text goes on from the topology's name ('needs a power of two workers, got 6').
        """
        return None

    # --- the two forms: a subclass implements one of them

    def _get_topo_edges(self) -> list[list[Edge]]:
        """All rounds of the period, one list of edges a round. Called once, when the rounds are first needed."""
        raise NotImplementedError(f"{type(self).__name__} has no periodic form")

    def round(self, t: int) -> list[Edge]:
        """The edges of round ``t`` ≥ 0; every rank is in exactly one of them.

        It must depend on ``t`` alone, and give the same on every worker: a random topology draws with a generator made
        from a seed and ``t``.
        """
        rounds = self._checked_period()
        return list(rounds[_integer("round", t, 0) % len(rounds)])

    def _own_rounds(self) -> PairRounds | None:
        """What :meth:`_get_topo_edges` of the same class returns, each round made when it is looked up; None: all at once.

        For rounds that are right by construction: they are not checked. A subclass that overrides :meth:`_get_topo_edges`
        alone is not asked.
        """
        return None

    # --- made from others

    def every(self, h: int) -> Topology:
        """This topology, mixing in every ``h``-th update only: at updates h-1, 2h-1, …; all workers idle in the others.

        The j-th mix makes round j of this topology, so that all of its rounds come up whatever ``h`` is.

        Raises:
            TypeError, ValueError: ``h`` is not an integer of at least 1.
        """
        h = _integer("every: h", h, 1)
        return self if h == 1 else self._every(h)

    def _every(self, h: int) -> Topology:
        from . import EveryTopology  # it builds on this class

        return EveryTopology(self, h)

    @staticmethod
    def from_graph(
        graph: Any,
        *,
        local_world_size: int = 1,
        world_size: int | None = None,
        rank: int | None = None,
        allow_disconnected: bool = False,
    ) -> Topology:
        """The topology in which the neighbours of an undirected graph mix in pairs: see :class:`GraphTopology`."""
        from . import GraphTopology  # it builds on this class

        made = GraphTopology(graph, local_world_size, world_size=world_size, rank=rank, allow_disconnected=allow_disconnected)
        return cast(Topology, made)

    # --- looking up

    # Not plain properties: a subclass may have set attributes of these names to what it likes.
    @cached_property
    def world_size(self) -> int:
        """Number of workers n."""
        return self._world_size

    @cached_property
    def local_world_size(self) -> int:
        """Workers a node."""
        return self._local_world_size

    @property
    def period(self) -> int | None:
        """Number of rounds after which they repeat; None for a topology that overrides :meth:`round`."""
        return None if self._is_aperiodic() else len(self._checked_period())

    def get_edge(self, step: int) -> Edge:
        """This rank's edge of round ``step`` ≥ 0.

        Raises:
            ValueError: ``step`` is negative, or an overridden :meth:`round` gave an invalid round.
        """
        if self._is_aperiodic():
            return self._kept(step)[1]
        rounds = self._checked_period()
        t = _integer("step", step, 0) % len(rounds)
        own = self._own_edges.get(t)
        if own is None:
            if isinstance(rounds, PairRounds):
                own = rounds.edge(t, self._rank)
            else:
                own = next(edge for edge in rounds[t] if self._rank in edge.ranks)
            self._own_edges[t] = own
        return own

    def mixing_matrix(self, t: int) -> npt.NDArray[np.float64]:
        """The mixing matrix of round ``t``, of shape (n, n) and dtype float64.

        Entry ``[i, j]`` is the weight with which worker i takes the value of worker j. It is symmetric and its rows and
        columns sum to 1.
        """
        W = np.zeros((self._world_size, self._world_size))
        for edge in self._checked(t):
            W[np.ix_(edge.ranks, edge.ranks)] = edge.peer_weight
            W[edge.ranks, edge.ranks] = edge.weight
        return W

    def mixes(self, t: int) -> bool:
        """Whether round ``t`` is one for mixing, and not one of those between two mixes."""
        return self._mixes(_integer("round", t, 0))

    def _mixes(self, t: int) -> bool:
        return True

    def _settled(self) -> tuple[Topology, int]:
        """What mixes in the end, and the number of updates from one mix to the next: of compositions their last part."""
        return self, 1

    def edges_ahead(self, limit: int) -> list[Edge]:
        """This rank's edges that are worth connecting before the first round: of the first ``limit`` rounds of the period.

        As many on every worker. None of a topology without a period, whose rounds may be of any edges.
        """
        return self._edges_ahead(limit)

    def _edges_ahead(self, limit: int) -> list[Edge]:
        return [self.get_edge(t) for t in range(min(self.period or 0, limit))]

    def title(self) -> str:
        """What it is called in prints and where workers compare: the class, and what it was made with."""
        return self._title()

    def _title(self) -> str:
        return type(self).__name__

    def fingerprint(self) -> dict[str, str | int]:
        """What workers compare to know that they were given the same topology.

        Returns:
            ``name``: the title; ``n``: the number of workers; ``rounds``: 16 hex digits of the SHA-256 of the period's
            length and the first rounds (the whole period, at most 64), whatever the order of edges and of their ranks.
        """
        return self._fingerprint(FINGERPRINT_ROUNDS)

    def _fingerprint(self, most: int, also: str = "") -> dict[str, str | int]:
        """Of the first ``most`` rounds, and of a text that stands for the others."""
        period = self.period
        digest = hashlib.sha256(f"period {period}{also}".encode())
        rounds = None if self._is_aperiodic() else self._checked_period()
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
        """A table of the rounds: one line a round, the ranks of each edge in parentheses with its weight."""
        period = self.period
        shown = _SHOWN_ROUNDS // 4 if period is None else min(period, _SHOWN_ROUNDS)
        repeats = "rounds do not repeat" if period is None else f"{period} round{'s' * (period > 1)} a period"
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
        """Called by the metaclass when the subclass's ``__init__`` has returned."""
        if "_looked_up" not in vars(self):
            raise TypeError(f"{type(self).__name__}.__init__ must call super().__init__(local_world_size)")
        if not self._is_aperiodic():
            self._checked_period()
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
        t = _integer("round", t, 0)
        if not self._is_aperiodic():
            rounds = self._checked_period()
            return rounds[t % len(rounds)]
        return self._kept(t)[0]

    def _kept(self, t: int) -> tuple[list[Edge], Edge]:
        """Round ``t`` of an overridden :meth:`round`, checked, and this rank's edge; the last few looked up are kept."""
        t = _integer("round", t, 0)
        kept = self._looked_up.get(t)
        if kept is None:
            edges = _checked_round(self.round(t), self._world_size, self._where(t))
            kept = edges, next(edge for edge in edges if self._rank in edge.ranks)
            # A new dict in place of the old one: threads may look rounds up at the same time.
            others = list(self._looked_up.items())[-(_KEPT_ROUNDS - 1) :]
            self._looked_up = dict([*others, (t, kept)])
        return kept

    def _pairs(self, t: int) -> Pairs | None:
        """Round ``t`` as pairs of weight 1/2, all others idle, where it is known as such; else None."""
        rounds = None if self._is_aperiodic() else self._checked_period()
        return rounds.pairs(t % len(rounds)) if isinstance(rounds, PairRounds) else None

    def _checked_period(self) -> Sequence[list[Edge]]:
        """All rounds of the period, made and checked at the first call, or each when it is looked up."""
        if self._periodic_rounds is None:
            owner = next(cls for cls in type(self).__mro__ if "_get_topo_edges" in vars(cls))
            lazy = self._own_rounds() if "_own_rounds" in vars(owner) else None
            self._periodic_rounds = self._all_rounds() if lazy is None else lazy
        return self._periodic_rounds

    def _all_rounds(self) -> list[list[Edge]]:
        rounds: object = self._get_topo_edges()
        name = type(self).__name__
        if not isinstance(rounds, Iterable):
            raise ValueError(f"{name}._get_topo_edges() returned {rounds!r}: return a list of rounds, [[Edge(...)]]")
        checked = [_checked_round(edges, self._world_size, self._where(t)) for t, edges in enumerate(rounds)]
        if not checked:
            raise ValueError(f"{name} has no rounds: _get_topo_edges() must return at least one list of edges")
        return checked
