"""WHO mixes with whom: edges, rounds, the catalogue, its registry and what it is worth. Needs no torch."""

from __future__ import annotations

from .base import Edge, Topology
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
from .make import make_topology, names_that_fit, why_unfit
from .registry import TopologyReg

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
    "names_that_fit",
    "why_unfit",
]
