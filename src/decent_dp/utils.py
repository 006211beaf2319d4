"""The documented path to the launcher's helper."""

from __future__ import annotations

from decent_dp.launch import initialize_dist

__all__ = ["initialize_dist"]
