"""The members of a run: workers that die and come back, epochs, and processes that join."""

from __future__ import annotations

from decent_dp.membership.epoch_store import Epoch, EpochStore
from decent_dp.membership.epochs import Epochs
from decent_dp.membership.monitor import Members, MembershipMonitor
from decent_dp.membership.runs import join

__all__ = ["Epoch", "EpochStore", "Epochs", "Members", "MembershipMonitor", "join"]
