"""Fast forms of inner loops: for CUDA in Triton, which comes with torch's builds for CUDA, and for the CPU in Numba, an extra.

Each has a readable twin in torch, in the room that uses it, which runs where Triton or ``decent-dp[fast]`` is missing.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

__all__ = ["load_numba"]

logger = logging.getLogger(__name__)


@functools.cache
def load_numba(name: str) -> ModuleType | None:
    """Imports ``kernels.<name>``, whose import compiles what it contains or reads it from Numba's cache.

    Returns None where Numba is not installed, is told not to compile (``NUMBA_DISABLE_JIT=1``), or cannot compile.
    """
    # Kernels that are not compiled would be slower than torch by a factor of a thousand, and Numba takes 60 MB to be asked.
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return None
    try:
        from numba import config

        return None if config.DISABLE_JIT else importlib.import_module(f"{__name__}.{name}")
    except Exception as error:  # of any package below Numba: versions that do not fit, no compiler for this machine
        if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
            logger.warning("Numba does not work, so that torch takes its place: %s: %s", type(error).__name__, error)
        return None
