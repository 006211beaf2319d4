"""The momenta that replicas mix beside their parameters (``MomentumTracking``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from decent_dp.engine.layout import TensorSpec
from decent_dp.optim import GossipAdamW
from decent_dp.optim.tracking import FADE_EVERY, Tracking
from decent_dp.replica.shares import Shares, parts_of
from decent_dp.rules import MomentumTracking, Rule

__all__ = ["Momenta", "tell_replicas"]


class Momenta:
    """The tracked momenta of some optimizers, by parameter name; none if the rule is another one.

    Args:
        optimizers: all of them.
        names: of the parameters that train, by id, in their order.

    Attributes:
        tensors: as of the last ``follow_loads``, in the order of the parameters; always the same list.
        specs: of ``tensors``.
        whole: the momenta; ``tensors`` are this worker's parts of them.

    Raises:
        ValueError: the momentum of an optimizer is not known.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Mapping[int, str], rule: Rule, shares: Shares | None = None
    ) -> None:
        self._shares, places = shares, {key: number for number, key in enumerate(names)}
        tracks = isinstance(rule, MomentumTracking)
        # Also those of parameters that are frozen at present: the workers have agreed on them.
        self._tracked = [Tracking(optimizer, rule.momentum, places) for optimizer in optimizers] if tracks else []  # type: ignore[attr-defined]
        pairs = [pair for tracking in self._tracked for pair in tracking.momenta()]
        pairs.sort(key=lambda pair: places[id(pair[0])])
        self.whole = [tensor for _, tensor in pairs]
        self._names = {id(param): f"{names[id(param)]} (momentum)" for param, _ in pairs}
        self.tensors = parts_of("momentum", self.whole, shares)
        named = zip(self._names.values(), self.tensors, self.whole, strict=True)
        self.specs = [TensorSpec.of(name, tensor, whole.numel()) for name, tensor, whole in named]

    def follow_loads(self, *, trusted: bool = False) -> list[str]:
        """Follows loads of optimizers (``Tracking.follow_loads``), and returns the names of the momenta that were loaded."""
        loaded = [param for tracking in self._tracked for param in tracking.follow_loads(trusted=trusted)]
        self.tensors[:] = parts_of("momentum", self.whole, self._shares)
        return [self._names[id(param)] for param in loaded if id(param) in self._names]

    def drop_unsaved(self) -> list[str]:
        """After a load of the whole run (``Tracking.drop_unsaved``): the names of those momenta."""
        return sorted(self._names[id(param)] for tracking in self._tracked for param in tracking.drop_unsaved())

    def forget(self) -> list[str]:
        """After a change of the members (``Tracking.forget``). Returns the names of all.

        One replica may have mixed an exchange in flight before it forgets, and the other not: nothing from before may count.
        """
        for tracking in self._tracked:
            tracking.forget()
        return list(self._names.values())

    def fade(self, first: int, last: int) -> None:
        """At the end of the rounds from ``first`` on, before ``last``: every tenth fades (``Tracking.fade``)."""
        times = -(-last // FADE_EVERY) - -(-first // FADE_EVERY)
        for tracking in self._tracked if times > 0 else ():
            tracking.fade(times)

    def rest(self) -> None:
        """A round without a batch (``Tracking.rest``)."""
        for tracking in self._tracked:
            tracking.rest()

    def close(self) -> None:
        """The optimizers are on their own again."""
        for tracking in self._tracked:
            tracking.close()


def tell_replicas(optimizers: Sequence[Optimizer], n: int, share: float | None = None) -> None:
    """Tells GossipAdamW the number of replicas, and the share of this one in the weight of all; None for equal ones."""
    for optimizer in optimizers:
        if isinstance(optimizer, GossipAdamW):
            optimizer.set_replicas(n, share)
