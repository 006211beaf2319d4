"""The engine: named tensors in buckets, rounds, and exchanges in flight. It knows no autograd, optimizer or module."""

from __future__ import annotations

from decent_dp.engine.bucket import Bucket, Edit
from decent_dp.engine.catching_up import enter, go_to, round_of_others
from decent_dp.engine.engine import Engine, fit_rule
from decent_dp.engine.outcome import Outcome

__all__ = ["Bucket", "Edit", "Engine", "Outcome", "enter", "fit_rule", "go_to", "round_of_others"]
