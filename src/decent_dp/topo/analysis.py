"""The analysis of topologies, under its documented name: `decent_dp.tools.analysis`."""

from __future__ import annotations

from decent_dp.tools.analysis import *  # noqa: F403
from decent_dp.tools.analysis import __all__ as __all__
