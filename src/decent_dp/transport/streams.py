"""Streams of a GPU beside the one that computes, and ranges in the profiler's trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias

import torch
from torch.autograd import profiler

__all__ = ["beside", "on_stream", "profiled", "record"]

_NO_RANGE = contextlib.nullcontext()

Purpose: TypeAlias = Literal["to the CPU", "to the GPU", "flags", "means of groups"]


@contextlib.contextmanager
def beside(device: torch.device, purpose: Purpose, after: Any = None) -> Iterator[Any]:
    """What is queued in this context does not wait for the computation, but for the event ``after``. Yields the stream.

    On other devices than CUDA's, nothing is different.
    """
    if device.type != "cuda":
        yield None
        return
    stream = _stream(device, purpose)
    if after is not None:
        stream.wait_event(after)
    with on_stream(stream):
        yield stream


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """``torch.cuda.stream`` for a thread whose current device may be another one: on its way back that would make a context on
    GPU 0, of some hundred MB, in each worker."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def record(stream: Any) -> Any:
    """An event: what is queued on ``stream`` is done. A thread that waits for it sleeps, and does not spin."""
    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@functools.cache
def _stream(device: torch.device, purpose: Purpose) -> Any:
    """One for each purpose, and not for each exchange: torch has only a few streams, and gives them out in turn, to users too.

    Two for copies, as a GPU copies in both directions at once.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of this name while a profiler runs. Else none: it costs microseconds, and gives the interpreter lock away."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE
