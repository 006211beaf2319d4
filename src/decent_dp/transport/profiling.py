"""Ranges in the profiler's trace."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

__all__ = ["profiled"]

_NO_RANGE = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of this name while a profiler runs. Else none: it costs microseconds, and gives the interpreter lock away."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE
