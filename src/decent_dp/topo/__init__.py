"""WHO mixes with whom: edges, rounds, the catalogue and its registry. Needs no torch."""

from __future__ import annotations

from .base import Edge, Topology
from .catalogue import AlternatingExpRingTopology, CompleteTopology, OnePeerExpTopology, RingTopology
from .make import make_topology
from .registry import TopologyReg

__all__ = [
    "AlternatingExpRingTopology",
    "CompleteTopology",
    "Edge",
    "OnePeerExpTopology",
    "RingTopology",
    "Topology",
    "TopologyReg",
    "make_topology",
]
