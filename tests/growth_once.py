"""Whether a rule grows on a topology, found out once per process. Imported for this effect by conftest and by workers.

A wrapper with a rule finds it out when it is made, by a thousand mixes: a tenth of a second for each of the many wrappers of
a test. The verdict depends on the rule, the topology and its weights alone.
"""

from __future__ import annotations

import threading
from typing import Any

from decent_dp.rules import Rule, growth, momentum
from decent_dp.topo import Topology
from decent_dp.topo.schedule import weights_of

_found: dict[Any, bool] = {}
# Workers that are threads ask at the same time.
_one_at_a_time = threading.Lock()


def grows(rule: Rule, topology: Topology) -> bool:
    key = (type(rule), repr(rule), type(topology), repr(topology.fingerprint()), weights_of(topology))
    with _one_at_a_time:
        if key not in _found:
            _found[key] = growth.grows(rule, topology)
        return _found[key]


momentum.grows = grows  # type: ignore[attr-defined]
