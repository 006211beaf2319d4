"""The simulator, under its documented name: `decent_dp.tools.sim`."""

from __future__ import annotations

from decent_dp.tools.sim import *  # noqa: F403
from decent_dp.tools.sim import __all__ as __all__
