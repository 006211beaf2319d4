"""Starting workers: the process group from a launcher's environment, and workers on this machine without a launcher."""

from __future__ import annotations

from decent_dp.launch.environment import Launch, read_environment
from decent_dp.launch.group import initialize_dist
from decent_dp.launch.spawning import spawn

__all__ = ["Launch", "initialize_dist", "read_environment", "spawn"]
