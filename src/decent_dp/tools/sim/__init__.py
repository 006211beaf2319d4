"""Many workers in one process: how a model trains with a topology, a compression and a number of workers."""

from __future__ import annotations

from decent_dp.tools.sim.cluster import VirtualCluster
from decent_dp.tools.sim.datasets import Batches, Data, digits, dirichlet_split
from decent_dp.tools.sim.experiment import Experiment, Result, Row, Simulation, run

__all__ = [
    "Batches",
    "Data",
    "Experiment",
    "Result",
    "Row",
    "Simulation",
    "VirtualCluster",
    "digits",
    "dirichlet_split",
    "run",
]
