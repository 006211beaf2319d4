"""Which topology, wire and bucket win on a cluster: a model of the time of a step. Needs no torch."""

from __future__ import annotations

from .describe import CODING_NS, WIRE_BYTES, Choice, Cluster, Job, Link, Prediction
from .prediction import predict
from .ranking import candidates, left_out, plan, same_rounds

__all__ = [
    "CODING_NS",
    "WIRE_BYTES",
    "Choice",
    "Cluster",
    "Job",
    "Link",
    "Prediction",
    "candidates",
    "left_out",
    "plan",
    "predict",
    "same_rounds",
]
