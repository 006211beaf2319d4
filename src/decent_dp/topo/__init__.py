"""Which workers mix in each round: edges, rounds, topologies, their registry and their analysis. Needs no torch."""

from __future__ import annotations

from .abstract import Edge, Topology
from .catalogue import (
    AlternatingExpRingTopology,
    BaseTwoTopology,
    CompleteTopology,
    HierarchicalTopology,
    OnePeerExpTopology,
    RandomMatchingTopology,
    RingTopology,
)
from .compose import EveryTopology, SwitchTopology
from .graph import GraphTopology
from .registry import TopologyReg, make_topology

__all__ = [
    "AlternatingExpRingTopology",
    "BaseTwoTopology",
    "CompleteTopology",
    "Edge",
    "EveryTopology",
    "GraphTopology",
    "HierarchicalTopology",
    "OnePeerExpTopology",
    "RandomMatchingTopology",
    "RingTopology",
    "SwitchTopology",
    "Topology",
    "TopologyReg",
    "make_topology",
]
