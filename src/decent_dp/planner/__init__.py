"""Predicts the time of a step on a cluster, and ranks topologies, compressions and bucket sizes. Needs no torch."""

from __future__ import annotations

from .describe import COMPRESSIONS, Choice, Cluster, Job, Link, Prediction
from .prediction import predict
from .ranking import candidates, left_out, plan, same_rounds

__all__ = [
    "COMPRESSIONS",
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
