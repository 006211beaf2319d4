"""The base class of all topologies.

A topology says which workers mix at update t. Its answer is a *round*: a partition of the workers into edges. The mixing
matrix of a round is block diagonal, symmetric and doubly stochastic, so mixing never moves the mean over the workers.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from decent_dp._checks import check_integer

from .edges import Edge, PairRounds, _checked_round, _words

__all__ = ["Edge", "Stage", "Topology", "worker_scope"]

_FINGERPRINT_ROUNDS = 64
_SHOWN_ROUNDS = 16
# Every bucket of an update asks for the same round, so a few rounds are kept.
_KEPT_ROUNDS = 8

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


@dataclass(frozen=True)
class Stage:
    """A topology that is not made of others, from some update on: what compositions consist of.

    Attributes:
        topology: of which update ``t`` of the stage has round ``t // every``.
        every: updates from one mix to the next.
        start: the first update.
        offset: in [0, every): an update of the stage mixes if ``t + 1 - offset`` is a multiple of ``every``.
        time: updates that an exchange has to arrive, in [1, every].
        members: the workers that are its ranks 0, 1, …; all others are idle. None: all.
    """

    topology: Topology
    every: int = 1
    start: int = 0
    offset: int = 0
    time: int = 1
    members: tuple[int, ...] | None = None


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
        self._recent_rounds: dict[int, list[Edge]] = {}
        reason = type(self).unfit(self._world_size, self._local_world_size)
        if reason is not None:
            raise ValueError(f"{name} {reason}; 'base-2' and 'ring' fit any number")

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
        """The edges of round ``t`` ≥ 0; every rank is in exactly one of them. They depend on ``t`` alone, on all workers."""
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
        return self if h == 1 else self._restaged(lambda stage: replace(stage, every=h * stage.every))

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

        return GraphTopology(graph, local_world_size, world_size=world_size, rank=rank, allow_disconnected=allow_disconnected)

    # --- what compositions override: see decent_dp.topo.schedule

    def _stages(self) -> tuple[Stage, ...]:
        """What is in use from which update on, in this order."""
        return (Stage(self),)

    def _restaged(self, change: Callable[[Stage], Stage]) -> Topology:
        """This topology with changed stages."""
        from . import EveryTopology  # it builds on this class

        stage = change(Stage(self))
        return self if stage.every == 1 else EveryTopology(self, stage.every, stage.offset, stage.time)

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

    @cached_property
    def _rounds_of_edges(self) -> dict[tuple[int, ...], list[int]]:
        """The rounds of the period in which each edge occurs."""
        found: dict[tuple[int, ...], list[int]] = {}
        for t in range(self.period or 0):
            for edge in self._checked(t):
                found.setdefault(tuple(sorted(edge.ranks)), []).append(t)
        return found

    def _title(self) -> str:
        """The name in prints and in the workers' comparison: the class and its settings."""
        return type(self).__name__

    def fingerprint(self) -> dict[str, str | int]:
        """A summary that workers compare to see that they have the same topology.

        Returns:
            ``name``: the title; ``n``: the number of workers; ``rounds``: 16 hex digits of the SHA-256 of the period's
            length and the first rounds (the whole period, at most 64). The order of edges and of ranks does not matter.
        """
        return self._fingerprint()

    def _fingerprint(self, also: str = "", most: int = _FINGERPRINT_ROUNDS) -> dict[str, str | int]:
        """The fingerprint of the first ``most`` rounds, and of a text that stands for the others."""
        period = self.period
        digest = hashlib.sha256(f"period {period}{also}".encode())
        for t in range(min(period or most, most)):
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
        first, again = self._checked(0), self._check_round(0, self.round(0))
        if first != again:
            raise ValueError(
                f"{type(self).__name__}, round 0, asked for twice, was {_words(first)} and then {_words(again)}: round(t) must "
                "depend on t alone; draw with a generator made from a seed and t, such as numpy.random.default_rng([seed, t])"
            )

    def _checked(self, t: int) -> list[Edge]:
        """Round ``t``, checked."""
        t = check_integer("round", t, 0)
        rounds = None if self._is_aperiodic() else self._period_rounds()
        t = t if rounds is None else t % len(rounds)
        edges = self._recent_rounds.get(t)
        if edges is None:
            edges = self._check_round(t, self.round(t)) if rounds is None else rounds[t]
            # A new dict instead of a change: threads may look rounds up at the same time.
            self._recent_rounds = dict([*list(self._recent_rounds.items())[-(_KEPT_ROUNDS - 1) :], (t, edges)])
        return edges

    def _check_round(self, t: int, edges: object) -> list[Edge]:
        return _checked_round(edges, self._world_size, f"{type(self).__name__}, round {t}")

    def _period_rounds(self) -> Sequence[list[Edge]]:
        """All rounds of the period, made and checked at the first call."""
        if self._periodic_rounds is None:
            rounds: Any = self._get_topo_edges()
            if not isinstance(rounds, Iterable):
                raise ValueError(
                    f"{type(self).__name__}._get_topo_edges() returned {rounds!r}: return a list of rounds, [[Edge(...)]]"
                )
            if not isinstance(rounds, PairRounds):  # which are valid by construction
                rounds = list(itertools.starmap(self._check_round, enumerate(rounds)))
            if not rounds:
                raise ValueError(f"{type(self).__name__} has no rounds: _get_topo_edges() must return at least one")
            self._periodic_rounds = rounds
        return self._periodic_rounds
