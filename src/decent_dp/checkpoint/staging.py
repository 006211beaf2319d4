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

    New memory costs more than the copy into it, as the system hands it out page by page: so it is kept, and the places of the
    tensors in it with it.
    """

    def __init__(self) -> None:
        self._memory: dict[bool, Tensor] = {}
        self._layout: list[Any] = []
        self._places: dict[str, Tensor] = {}
        # The keys of the tensors that are copied in one call.
        self._groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copies ``tensors`` (dense, of any dtype, strides and device; they may overlap).

        What an earlier call returned must not be in use any more.
        """
        layout = [(key, tensor.shape, tensor.dtype, tensor.device) for key, tensor in tensors.items()]
        if layout != self._layout:
            self._lay_out(tensors)
            self._layout = layout
        sources = []
        with torch.no_grad():
            for (device, _), keys in self._groups.items():
                on_gpu = device.type == "cuda"
                group = [tensors[key] for key in keys]
                torch._foreach_copy_([self._places[key] for key in keys], group, non_blocking=on_gpu)
                sources += group if on_gpu else []
        return Staged(dict(self._places), sources, _events({tensor.device for tensor in sources}))

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        self._layout, self._places, self._groups = [], {}, {}
        for on_gpu in (False, True):
            block = {key: tensor for key, tensor in tensors.items() if tensor.is_cuda is on_gpu}
            self._places.update(self._places_of(block, pinned=on_gpu))
        for key, tensor in tensors.items():
            self._groups.setdefault((tensor.device, tensor.dtype), []).append(key)

    def _places_of(self, tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
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
