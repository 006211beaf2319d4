"""How what arrives is used: plain gossip, outer optimizers, and rules that users write.

A rule says what a worker proposes to its neighbours and what it makes of what they proposed, element by element. The engine
calls it over any transport, and the simulator calls the same object on stacked replicas.
"""

from __future__ import annotations

from decent_dp.rules.base import Gossip, Round, Rule, apply_rule, check_rule, group_scale, pull_of, settings_of
from decent_dp.rules.outer import OuterNesterov

__all__ = ["Gossip", "OuterNesterov", "Round", "Rule", "apply_rule", "check_rule", "group_scale", "pull_of", "settings_of"]
