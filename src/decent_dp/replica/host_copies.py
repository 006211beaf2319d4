"""Copies of tensors in memory that is kept from one save to the next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "HostMemory", "Staged"]

# Bytes: every copy begins at a multiple of them, as any dtype needs, and on a cache line of its own.
ALIGNMENT = 64
# Bytes of the system's smallest pages.
_PAGE = 4096


@dataclass(frozen=True)
class Staged:
    """Copies on the CPU, each contiguous, one behind the other.

    Attributes:
        tensors: the copies, by key; complete after ``wait``.
        raw: the bytes of all of them.
    """

    tensors: dict[str, Tensor]
    raw: Tensor
    # The tensors of GPUs that are still copied from, and the events that end this.
    _sources: list[Tensor]
    _events: list[Any]

    def wait(self) -> None:
        """Blocks until everything is copied; any thread may call it."""
        for event in self._events:
            event.synchronize()
        self._sources.clear()


class HostMemory:
    """Memory for copies of one set of tensors at a time; page-locked if some are on a GPU, so that the copy is asynchronous.

    The memory is kept, and so are the views of it for the copies: the system provides new memory page by page, which takes
    longer than the copy.
    """

    def __init__(self) -> None:
        self._memory, self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu"), False
        self._layout: list[Any] = []
        self._views: dict[str, Tensor] = {}

    @staticmethod
    def needed(tensors: Mapping[str, Tensor]) -> tuple[int, bool]:
        """The bytes that copies of ``tensors`` need, and whether they are page-locked."""
        return _places(tensors)[-1], any(tensor.is_cuda for tensor in tensors.values())

    @classmethod
    def reserved(cls, size: int, pinned: bool) -> HostMemory:
        """Has the system provide so many bytes now."""
        made = cls()
        made._make(size, pinned)
        made._memory.numpy()[::_PAGE] = 0  # NumPy lets other threads of Python run meanwhile
        return made

    def _make(self, size: int, pinned: bool) -> None:
        if len(self._memory) < size or pinned > self._pinned:
            self._memory = self._memory[:0].clone()  # before the larger one is made: they need not both exist
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned and size > 0)
            self._pinned = pinned

    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copies ``tensors`` (dense, of any dtype, strides and device; they may overlap).

        The copies of an earlier call must not be in use any more.
        """
        *starts, end = _places(tensors)
        layout = [(key, tensor.shape, tensor.dtype, tensor.device) for key, tensor in tensors.items()]
        if layout != self._layout:
            self._layout, self._views = [], {}
            self._make(*self.needed(tensors))
            for (key, tensor), start in zip(tensors.items(), starts, strict=True):
                own = self._memory[start : start + tensor.nbytes]
                self._views[key] = own.view(tensor.dtype).view(tensor.shape)
            self._layout = layout
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for key, tensor in tensors.items():
            groups.setdefault((tensor.device, tensor.dtype), []).append(key)
        sources = []
        with torch.no_grad():
            for (device, _), keys in groups.items():
                on_gpu = device.type == "cuda"
                group = [tensors[key] for key in keys]
                torch._foreach_copy_([self._views[key] for key in keys], group, non_blocking=on_gpu)
                sources += group if on_gpu else []
        events: list[Any] = []  # one per device, after the copies that are queued there
        for device in {tensor.device for tensor in sources}:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            events[-1].record(torch.cuda.current_stream(device))
        return Staged(dict(self._views), self._memory[:end], sources, events)


def _places(tensors: Mapping[str, Tensor]) -> list[int]:
    """Where the copy of each begins, and the last one ends."""
    sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values())
    return list(itertools.accumulate(sizes, initial=0))
