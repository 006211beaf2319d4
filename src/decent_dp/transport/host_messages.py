"""Messages of tensors on a GPU: copies to the CPU and back, on streams of their own, so that they wait for no computation."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from decent_dp.compression import flag_of
from decent_dp.transport.interface import ExchangeRequest
from decent_dp.transport.streams import beside, record
from decent_dp.transport.waiter import Waiter, telling

__all__ = ["HostMessages"]

# Bytes that are copied to the CPU before they may be sent: a fraction of a millisecond.
_PIECE = 2**22


class HostMessages:
    """The messages of one exchange on the CPU, in page-locked memory.

    Args:
        request: of tensors that are not on the CPU.
        before: returned by ``copied`` of the last exchange with the same messages.

    Attributes:
        on_host: the same request, with messages on the CPU.
    """

    def __init__(self, request: ExchangeRequest, before: Any = None) -> None:
        self._request, self._device = request, request.sent.device
        self._on_cuda = request.sent.is_cuda
        lengths = len(request.sent), len(request.received)
        sent, received = (torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=self._on_cuda) for n in lengths)
        self.on_host = dataclasses.replace(request, sent=sent, received=received)
        # Events: the message to send was written, and the received one is on the device.
        self._written: Any = None
        self._landed: Any = None
        self._has_landed = False
        self._landing = threading.Lock()
        # An event: the message was copied to the CPU, and its memory may be written again.
        self.copied: Any = None
        if before is not None:  # the last exchange may have been abandoned before its message was copied
            torch.cuda.current_stream(self._device).wait_event(before)

    def send(self, waiter: Waiter, ready: Callable[[int], None], failed: Callable[[Exception], None]) -> None:
        """Copies the message that was written on the current stream.

        Args:
            waiter: its thread waits for the copy.
            ready: called there with the number of bytes that are on the CPU.
        """
        source, target = self._request.sent, self.on_host.sent
        pieces: list[tuple[int, Any]] = []
        if self._on_cuda:
            self._written = record(torch.cuda.current_stream(self._device))
            with beside(self._device, "to the CPU", self._written) as stream:
                for start in range(0, len(target), _PIECE):
                    target[start : start + _PIECE].copy_(source[start : start + _PIECE], non_blocking=True)
                    pieces.append((min(start + _PIECE, len(target)), record(stream)))
                self.copied = record(stream)

        def wait() -> None:
            for stop, copied in pieces:
                copied.synchronize()
                ready(stop)
            if not self._on_cuda:
                target.copy_(source)
            if not pieces:  # of another device, or an empty message
                ready(len(target))

        waiter.submit(telling(wait, failed))

    def land(self) -> None:
        """Begins to copy the received message to the device, and to compare it with the sent one. Any thread may call it, and
        the first call counts."""
        with self._landing:
            if not self._has_landed:
                self._land()
                self._has_landed = True

    def _land(self) -> None:
        request = self._request
        if not self._on_cuda:
            request.received.copy_(self.on_host.received)
            return
        # What was queued before this exchange may still read the messages of the one before.
        with beside(self._device, "to the GPU", self._written) as stream, torch.no_grad():
            request.received.copy_(self.on_host.received, non_blocking=True)
            if not any(self.flags):
                request.compression.arrive(request.sent, request.received)
            self._landed = record(stream)

    @property
    def flags(self) -> tuple[int, int]:
        """Of the sent and the received messages."""
        return flag_of(self.on_host.sent), flag_of(self.on_host.received)

    def finish(self) -> None:
        """What is queued on the current stream from now on finds the received message."""
        self.land()
        if self._on_cuda:
            torch.cuda.current_stream(self._device).wait_event(self._landed)
