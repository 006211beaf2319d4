"""Copies of tensors in memory that is kept from one save to the next."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostMemory", "Staged"]

# Bytes: every copy begins at a multiple of them, as any dtype needs, and on a cache line of its own.
_ALIGNMENT = 64
# Bytes of the system's smallest pages.
_PAGE = 4096


@dataclass(frozen=True)
class Staged:
    """Copies on the CPU, each contiguous.

    Attributes:
        tensors: the copies, by key; complete after ``wait``.
    """

    tensors: dict[str, Tensor]
    # The tensors of GPUs that are still copied from, and the events that end this.
    _sources: list[Tensor]
    _events: list[Any]

    def wait(self) -> None:
        """Blocks until everything is copied; any thread may call it."""
        for event in self._events:
            event.synchronize()
        self._sources.clear()


class HostMemory:
    """Memory for copies of one set of tensors at a time; page-locked for those of a GPU, so that the copy is asynchronous.

    The memory is kept, and so are the views of it for the copies: the system provides new memory page by page, which takes
    longer than the copy.
    """

    def __init__(self) -> None:
        # By whether it is page-locked.
        self._memory: dict[bool, Tensor] = {}
        self._layout: list[Any] = []
        self._views: dict[str, Tensor] = {}

    @staticmethod
    def sizes(tensors: Mapping[str, Tensor]) -> dict[bool, int]:
        """The bytes that copies of ``tensors`` need: in page-locked memory (True), and in other."""
        return {pinned: _places(_of_kind(tensors, pinned))[1] for pinned in (False, True)}

    @classmethod
    def reserved(cls, sizes: Mapping[bool, int]) -> HostMemory:
        """Has the system provide memory of these ``sizes`` now."""
        made = cls()
        for pinned, size in sizes.items():
            made._memory[pinned] = memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned and size > 0)
            memory.numpy()[::_PAGE] = 0  # NumPy lets other threads of Python run meanwhile
        return made

    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copies ``tensors`` (dense, of any dtype, strides and device; they may overlap).

        The copies of an earlier call must not be in use any more.
        """
        layout = [(key, tensor.shape, tensor.dtype, tensor.device) for key, tensor in tensors.items()]
        if layout != self._layout:
            self._layout, self._views = [], {}
            for pinned in (False, True):
                self._views |= self._views_for(_of_kind(tensors, pinned), pinned)
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
        return Staged(dict(self._views), sources, events)

    def _views_for(self, tensors: Mapping[str, Tensor], pinned: bool) -> dict[str, Tensor]:
        """One view for each, one behind the other in one buffer."""
        starts, end = _places(tensors)
        memory = self._memory.pop(pinned, None)
        if memory is None or len(memory) < end:
            del memory  # before the larger one is made: they need not both exist
            memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned and end > 0)
        self._memory[pinned] = memory
        return {
            key: memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (key, tensor), start in zip(tensors.items(), starts, strict=True)
        }


def _of_kind(tensors: Mapping[str, Tensor], pinned: bool) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if tensor.is_cuda is pinned}


def _places(tensors: Mapping[str, Tensor]) -> tuple[list[int], int]:
    """Where the copy of each begins, and the last one ends."""
    ends = itertools.accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors.values()), initial=0)
    *starts, end = ends
    return starts, end
