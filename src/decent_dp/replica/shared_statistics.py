"""The statistics of optimizers that replicas average with their parameters (``SharesStatistics``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from decent_dp.engine import Engine
from decent_dp.engine.layout import TensorSpec
from decent_dp.optim.statistics import SharesStatistics, drift_lookup
from decent_dp.replica.parameters import Parameters
from decent_dp.replica.shares import Shares
from decent_dp.rules import DriftCorrection
from decent_dp.topo import Topology

__all__ = ["Statistics", "refuse_isolated", "sharing", "tell_drifts", "tell_replicas"]

# Rounds of a topology without a period in which all workers must be connected.
_ROUNDS = 256


class Statistics:
    """The statistics of some optimizers, by parameter name.

    Args:
        optimizers: all of them; those without statistics are ignored.
        names: of the parameters, by id.

    Attributes:
        tensors: as of the last ``locate``; always the same list.
        specs: of ``tensors``.
        every: the number of the parameters' exchanges to one of the statistics.
        whole: the statistics; ``tensors`` are this worker's shares of them, where a node is a replica.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str], shares: Shares | None = None) -> None:
        self._sharing, self._shares = sharing(optimizers), shares
        found = [pair for optimizer in self._sharing for pair in optimizer.statistics()]
        self.every = min((optimizer.EVERY for optimizer in self._sharing), default=1)
        self.whole = [tensor for _, tensor in found]
        self._names = [f"{names[id(param)]} (statistics)" for param, _ in found]
        self.tensors = self._parts()
        self.specs = [TensorSpec.of(name, tensor) for name, tensor in zip(self._names, self.tensors, strict=True)]

    def locate(self) -> list[str]:
        """Updates ``tensors``, and returns the names of those that were replaced since the last call (by a load)."""
        if not self._sharing:
            return []
        now = [tensor for optimizer in self._sharing for _, tensor in optimizer.statistics()]
        # With another number of parameters (add_param_group) the next round raises.
        replaced = [name for name, old, new in zip(self._names, self.whole, now, strict=False) if old is not new]
        self.whole = now
        self.tensors[:] = self._parts()
        return replaced

    def _parts(self) -> list[Tensor]:
        shares = self._shares
        return self.whole[:] if shares is None else [shares.own("statistics", i, t) for i, t in enumerate(self.whole)]


def sharing(optimizers: Sequence[Optimizer]) -> list[SharesStatistics]:
    """Returns those that share statistics."""
    return [optimizer for optimizer in optimizers if isinstance(optimizer, SharesStatistics)]


def tell_replicas(optimizers: Sequence[Optimizer], n: int, share: float | None = None) -> None:
    """Tells optimizers that share statistics the number of replicas, and the share of this one if their weights differ."""
    for optimizer in sharing(optimizers):
        optimizer.set_replicas(*((n,) if share is None else (n, share)))


def tell_drifts(optimizers: Sequence[Optimizer], parameters: Parameters, engine: Engine) -> None:
    """Gives optimizers that share statistics the drifts that the engine's rule estimates, if it does."""
    rule = engine.rule
    if not isinstance(rule, DriftCorrection):
        return
    states = {name: state for bucket in engine.buckets for name, state in bucket.rule_state().items()}
    params = dict(zip(parameters.names, parameters.params, strict=True))
    drift_of = drift_lookup((params[name], state["drift"]) for name, state in states.items() if name in params)
    for optimizer in sharing(optimizers):
        optimizer.set_drifts(drift_of, rule.scale)


def refuse_isolated(optimizers: Sequence[SharesStatistics], topology: Topology) -> None:
    """Checks that the topology connects all workers, directly or through others, so that averages reach all of them.

    Raises:
        ValueError: there are such optimizers, and it does not; names a worker and those that it reaches.
    """
    if not optimizers:
        return
    topology = topology._final_part()[0]
    rounds = topology.period or _ROUNDS
    groups = [{rank} for rank in range(topology.world_size)]
    for t in range(rounds):
        for edge in topology.round(t):
            joined = set.union(*(groups[rank] for rank in edge.ranks))
            for rank in joined:
                groups[rank] = joined
        if len(groups[0]) == len(groups):
            return
    lonely = min(groups, key=len)
    kind, n = type(optimizers[0]).__name__, len(groups)
    names = ", ".join(map(str, sorted(lonely)[:8])) + (", ..." if len(lonely) > 8 else "")
    raise ValueError(
        f"{kind} divides by the second moment of the mean gradient of all {n} replicas, but {topology!r} never mixes "
        f"replica{'s' if len(lonely) > 1 else ''} {names} with the others (rounds 0 to {rounds - 1}): use a topology "
        "that connects all, such as 'base-2', or torch.optim.AdamW."
    )
