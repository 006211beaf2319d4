"""Predicts the time of a step on a cluster, and ranks topologies, compressions and bucket sizes. Needs no torch."""

from __future__ import annotations

from .describe import COMPRESSIONS, Choice, Cluster, Job, Link, Prediction
from .prediction import predict
from .ranking import candidates, default_replica, left_out, plan, same_rounds
from .recipe import Recipe, more_steps, recipe

__all__ = [
    "COMPRESSIONS",
    "Choice",
    "Cluster",
    "Job",
    "Link",
    "Prediction",
    "Recipe",
    "candidates",
    "default_replica",
    "left_out",
    "more_steps",
    "plan",
    "predict",
    "recipe",
    "same_rounds",
]
