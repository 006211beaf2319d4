"""A stream of bytes between a process that joins and its host: STATE messages, with as many on the way as the reader lets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from decent_dp.transport.channels import Channel
from decent_dp.transport.messages import STATE, Header, pack

__all__ = ["StateStream"]

# Bytes of a message, and those on the way that the reader has not read.
_PIECE, _AHEAD = 2**17, 2**19
# Flags of a STATE: its first number says how many bytes were read; nothing more will come.
_READ, _END = 1, 2
# Seconds for which a stream that was closed waits for what it has sent to arrive.
_LINGER = 5.0


class StateStream:
    """Used like a connected socket, by one thread.

    Args:
        channel: its connection, which carries nothing else.
        call: runs a function in the transport's thread.
        hang_up: closes the connection.
    """

    def __init__(
        self, channel: Channel, call: Callable[[Callable[[], None]], None], hang_up: Callable[[Channel], None]
    ) -> None:
        self._channel, self._call, self._hang_up = channel, call, hang_up
        self._changed = threading.Condition()
        self._came: deque[memoryview] = deque()
        self._sent = self._read_there = self._read_here = self._told = 0
        self._timeout: float | None = None
        self._ended = self._lost = self._closed = False

    # -- in the transport's thread ------------------------------------------------------------------------------------

    def hear(self, header: Header, body: bytes) -> None:
        with self._changed:
            if header.flags == _READ:
                self._read_there = max(self._read_there, header.first)
            elif header.flags == _END:
                self._ended = True
            elif not self._closed and sum(map(len, self._came)) <= _AHEAD:
                self._came.append(memoryview(body))
            elif not self._closed:  # more than it may send
                self._lost = True
            self._changed.notify_all()

    def lose(self) -> None:
        """The connection has ended."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    # -- in any other ---------------------------------------------------------------------------------------------------

    def settimeout(self, seconds: float | None, /) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Raises ConnectionError if the other end is gone, and TimeoutError if it reads nothing for the timeout."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = bytes(view[start : start + _PIECE])
            with self._changed:
                self._wait(lambda: self._sent - self._read_there < _AHEAD or self._ended)
                if self._lost or self._ended:
                    raise ConnectionResetError("the other end has closed the connection")
                self._sent += len(piece)
            self._send(pack(STATE), piece)

    def recv_into(self, buffer: bytearray | memoryview, /) -> int:
        """The number of bytes that were read; 0 if the other end has closed. Raises TimeoutError."""
        view = memoryview(buffer).cast("B")
        with self._changed:
            self._wait(lambda: bool(self._came) or self._ended)
            if not self._came:
                return 0
            piece = self._came.popleft()
            count = min(len(piece), len(view))
            view[:count] = piece[:count]
            if count < len(piece):
                self._came.appendleft(piece[count:])
            self._read_here += count
            tell = self._read_here - self._told >= _PIECE
            self._told = self._read_here if tell else self._told
        if tell:
            self._send(pack(STATE, flags=_READ, first=self._told))
        return count

    def _wait(self, until: Callable[[], bool]) -> None:
        read = self._read_there
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not (until() or self._lost):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            self._changed.wait(left)
            if self._read_there > read and self._timeout is not None:  # what is read there is progress
                read, deadline = self._read_there, time.monotonic() + self._timeout

    def _send(self, header: bytes, body: bytes = b"") -> None:
        with contextlib.suppress(RuntimeError):  # the transport was closed: the connection is lost
            self._call(lambda: self._channel.send(header, body))

    def close(self) -> None:
        """Says that nothing more will come, and waits for a moment until what was sent has arrived."""
        if not self._closed:
            self._send(pack(STATE, flags=_END))
            with self._changed:
                self._closed = True
                self._came.clear()
                self._changed.wait_for(lambda: self._ended or self._lost, _LINGER)
            with contextlib.suppress(RuntimeError):
                self._call(lambda: self._hang_up(self._channel))

    def __enter__(self) -> StateStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
