"""The interface of rules, the law that they share, and plain gossip.

Let ``x`` be a replica's parameters, ``q`` the values that it proposed to its neighbours, ``γ`` the adaptive factor and ``w_ij``
the weights of a round. The replica receives the difference

    d_i  =  γ · Σ_j w_ij (q_j - q_i)

On an edge of ``m`` workers with self-weight ``w`` it is ``γ · (1 - w) · (r - q)``, where ``r`` is the mean of the others'
proposals. If ``r`` is the mean of all ``m``, it is ``m/(m - 1)`` times that. Only differences of sent values are used. So the
mean of ``d`` over the workers is zero at any precision on the wire, a replica keeps its own detail, and an edit of ``x`` during
the exchange survives. If the replicas have unequal weights ``a`` (``gossip(weight=...)``), ``d_i`` of a pair is multiplied
by ``2 a_j/(a_i + a_j)``, and it is the weighted mean of ``d`` that is zero.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from decent_dp.topo import Edge, Topology

__all__ = ["Gossip", "Round", "Rule", "apply_rule", "check_rule", "group_scale", "mixing_rate", "rule_settings"]


@dataclass(frozen=True)
class Round:
    """A round, for a rule.

    Attributes:
        number: counted by updates, from 0.
    """

    number: int


class Rule(ABC):
    """Defines the values that a worker proposes to its neighbours, and the use of those that it receives.

    With ``mix_every=h``, every bucket has its own turn, and the updates between its turns are no rounds for the rule.

    A rule works element by element. All its tensors have the same shape, and hold the same elements of a bucket: a part of it,
    or the whole; of one replica, or (in the simulator) of many replicas. How a bucket is cut must not change the numbers.

    The object itself has settings only, which are the same on all workers (a frozen dataclass is the natural form: its
    fields are compared at construction). Memory belongs in the rule's state, which is saved in checkpoints and averaged when a
    run resumes with another number of workers.

    Attributes:
        acts_alone: False: ``apply`` is not called in a round in which nothing was received.
        is_saved: False: between two rounds the state follows from the values, and no checkpoint has it.
    """

    acts_alone: ClassVar[bool] = True
    is_saved: ClassVar[bool] = True

    def state(self, values: Tensor) -> dict[str, Tensor]:
        """The first state, for a bucket with these parameters: named tensors of the shape of ``values``.

        Called again for parameters whose values were loaded in the middle of a run.
        """
        return {}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        """The values for the neighbours: ``values`` itself, or a tensor of the state; of the shape and dtype of ``values``.

        Called in every round, after the optimizer's step. The result is read until ``apply`` is called for this round. If
        this worker sits the round out, scale hints are computed from it.
        """
        return values

    def fit(self, topology: Topology, *, lossy: bool, partial: bool) -> Rule:
        """Returns the rule to use with this topology: by default itself. Called at construction, on all workers.

        Args:
            topology: includes ``mix_every`` and the weights of the replicas.
            lossy: whether values are rounded on the way, so that in groups of more than two the differences add up to zero on
                average only.
            partial: whether ``d`` is a part of the difference, and the rest stays in the replicas.

        Raises:
            ValueError: the rule does not work with it.
        """
        return self

    @abstractmethod
    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        """Changes the parameters; writes ``values`` and the tensors of ``state`` in place.

        Called once for every round, in order: when its exchange has arrived, which with overlap is an update later, or more.
        Not called for parameters whose values were replaced (by a load, say) since ``propose``: their state is made anew.

        Args:
            values: the parameters as they are now.
            difference: ``d`` of the module's text, which plain gossip adds. Of the dtype of ``values`` or a wider one; may be
                written to. None if nothing was received: this worker sat the round out, or the data could not be used.
            round: the round of the call of ``propose``.
        """


class Gossip(Rule):
    """Plain gossip: proposes the parameters, and adds the weighted difference to the neighbours'."""

    acts_alone = False

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        if difference is not None:
            values.add_(difference)


def group_scale(edge: Edge) -> float:
    """The factor from the received to the others' mean: a pair receives that mean, a larger group the mean of all."""
    size = len(edge.ranks)
    return 1.0 if size == 2 else size / (size - 1)


def mixing_rate(edge: Edge, factor: float) -> float:
    """The factor of ``r - q`` on ``edge``, where ``r`` is received: the others' mean in a pair, the mean of all in a group."""
    return factor * (1.0 - edge.weight) * group_scale(edge)


def apply_rule(
    rule: Rule, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, rate: float, round: Round
) -> None:
    """Calls ``rule.apply`` with ``rate · difference``, where ``difference`` is ``r - q`` and is written to."""
    if difference is None or rate == 0.0:  # a rate of zero must not turn a neighbour's infinity into NaN (0 · inf)
        rule.apply(values, state, None, round)
        return
    # A separate pass: an add with alpha is fused in vectors and not in their tails, so that numbers would depend on where a
    # tensor is cut.
    if rate != 1.0:
        difference.mul_(rate)
    rule.apply(values, state, difference, round)


def check_rule(rule: object) -> Rule:
    """``rule`` itself, or plain gossip for None.

    Raises:
        TypeError: it is no rule, or its settings cannot be compared between workers.
    """
    if rule is None:
        return Gossip()
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise TypeError(f"rule must be an object, and {rule.__name__} is a class: pass rule={rule.__name__}(...)")
    if not isinstance(rule, Rule):
        raise TypeError(
            f"rule must be a decent_dp.rules.Rule such as OuterNesterov(lr=0.7), or None for plain gossip, got {rule!r}"
        )
    try:
        json.dumps(rule_settings(rule))
    except TypeError as error:
        raise TypeError(f"the settings of rule {rule!r} must be numbers, strings and lists of them: {error}") from error
    return rule


def rule_settings(rule: Rule) -> dict[str, Any]:
    """The values that must be equal on all workers: the class, and the fields of a dataclass or else the attributes."""
    thing: Any = rule
    if dataclasses.is_dataclass(thing):
        return {"rule": type(rule).__name__, **{field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}}
    return {"rule": type(rule).__name__, **vars(rule)}
