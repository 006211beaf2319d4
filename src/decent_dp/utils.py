"""The documented import path of ``initialize_dist``."""

from __future__ import annotations

from decent_dp.launch import initialize_dist

__all__ = ["initialize_dist"]
