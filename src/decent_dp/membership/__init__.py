"""The members of a run: workers that die and come back, epochs, and processes that join."""

from __future__ import annotations

from decent_dp.membership.company import Company
from decent_dp.membership.epochs import Epochs
from decent_dp.membership.joining import join
from decent_dp.membership.line import Epoch, Line

__all__ = ["Company", "Epoch", "Epochs", "Line", "join"]
