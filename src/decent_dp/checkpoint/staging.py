"""Copies of tensors in memory that is kept from one save to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Staged", "Staging"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Staged:
    """Copies on the CPU, each contiguous.

    Attributes:
        tensors: the copies, by key. They are whole after ``wait``.
    """

    tensors: dict[str, Tensor]
    # What is still being copied from, and the events after which it no longer is.
    _sources: list[Tensor]
    _events: list[Any]

    def wait(self) -> None:
        """Blocks until everything has been copied; any thread may call it."""
        for event in self._events:
            event.synchronize()
        self._sources.clear()


class Staging:
    """Memory for copies of one set of tensors at a time: page-locked for those of a GPU, which is then not waited for.

    New memory costs more than the copy into it, as the system hands it out page by page: so it is kept.
    """

    def __init__(self) -> None:
        self._memory: dict[bool, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copies ``tensors`` (dense, of any dtype and device). What an earlier call returned must not be in use any more."""
        copies: dict[str, Tensor] = {}
        for on_gpu in (False, True):
            group = {key: tensor for key, tensor in tensors.items() if tensor.is_cuda is on_gpu}
            copies.update(self._places(group, pinned=on_gpu))
        sources = [tensor for tensor in tensors.values() if tensor.is_cuda]
        with torch.no_grad():
            for key, tensor in tensors.items():
                copies[key].copy_(tensor, non_blocking=tensor.is_cuda)
        return Staged(copies, sources, _events({tensor.device for tensor in sources}))

    def _places(self, tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
        """A place for each, one behind the other in one block."""
        starts, end = [], 0
        for tensor in tensors.values():
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        memory = self._memory.get(pinned)
        if memory is None or len(memory) < end:
            self._memory.pop(pinned, None)
            del memory  # before the larger one is made: they need not both be there
            memory = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned and end > 0)
            self._memory[pinned] = memory
        places = {}
        for (key, tensor), start in zip(tensors.items(), starts, strict=True):
            place = memory[start : start + tensor.numel() * tensor.element_size()]
            places[key] = place.view(tensor.dtype).view(tensor.shape)
        return places


def _events(devices: set[torch.device]) -> list[Any]:
    """One a device, behind the copies that are queued there."""
    events = []
    for device in devices:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
