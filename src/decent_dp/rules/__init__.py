"""Rules for the use of received values: gossip, momentum tracking, outer optimizers, and rules that users write.

A rule defines, element by element, the values that a worker proposes to its neighbours and the use of those that they proposed.
The engine calls it over any transport, and the simulator calls the same object on stacked replicas.
"""

from __future__ import annotations

from decent_dp.rules.gasloc import GASLoC
from decent_dp.rules.momentum_tracking import MomentumTracking
from decent_dp.rules.outer import OuterNesterov
from decent_dp.rules.rule import Gossip, Round, Rule

__all__ = ["GASLoC", "Gossip", "MomentumTracking", "OuterNesterov", "Round", "Rule"]
