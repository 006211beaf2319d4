"""Messages and the state of a replica over a connection of their own, which blocks.

A message is its length (8 bytes, little-endian), and JSON. ``null`` says that the sender lives and needs more time. A state is
a message with the tree and the tensors of ``decent_dp.serialization`` (its header), the bytes of the tensors in that order, and
the SHA-256 of all of it. Nothing is executed at the receiver.

If the connection breaks, the receiver names the copy in another one, and how many bytes of tensors it has. It gets the same
header again, the bytes that are missing, and the SHA-256. Another header says that it is another copy, from its first byte on.
The receiver says when it has all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decent_dp.serialization import decode, read_json
from decent_dp.transport.neighbours import Stream

__all__ = ["NotYetError", "PartialState", "StateCopy", "hear", "hear_answer", "receive_state", "say", "send_state"]

# Bytes of the largest message without and with a tree, and of a part of a tensor that is sent or received at once: one must be
# sent within the socket's timeout. The SHA-256 is remembered every so many bytes: hashing GBs again takes longer than receivers
# wait.
_LARGEST, _LARGEST_TREE, _PART, _REMEMBERED = 2**20, 2**30, 2**18, 2**26


class NotYetError(TimeoutError):
    """The other end lives, and needs more time than there was."""


def say(stream: Stream, message: Any) -> None:
    """Sends a message (JSON)."""
    text = json.dumps(message).encode()
    stream.sendall(len(text).to_bytes(8, "little") + text)


def hear(stream: Stream, largest: int = _LARGEST) -> Any:
    """The next message: a dict, or None.

    Raises:
        ConnectionError: the other end has closed the connection, or sent no message.
        TimeoutError: nothing came within the socket's timeout.
    """
    size = int.from_bytes(_receive(stream, 8), "little")
    if size > largest:
        raise ConnectionError(f"a message of {size} bytes, where {largest} are allowed")
    try:
        message = read_json(_receive(stream, size).decode())
    except ValueError as error:
        raise ConnectionError(f"a message that is no JSON: {error}") from error
    if message is not None and not isinstance(message, dict):
        raise ConnectionError(f"a message that is no dict: {str(message)[:100]}")
    return message


def hear_answer(stream: Stream, seconds: float, largest: int = _LARGEST) -> Any:
    """The first message that is not ``null``.

    Raises:
        ConnectionError: as of ``hear``, or the other end has refused.
        NotYetError: there is none within so many seconds.
    """
    deadline, answer = time.monotonic() + seconds, None
    while answer is None:
        if time.monotonic() > deadline:
            raise NotYetError(f"it has not answered within {seconds:g} s")
        answer = hear(stream, largest)
    if "refused" in answer:
        raise ConnectionError(answer["refused"])
    return answer


class StateCopy:
    """A state that is sent, over one connection or several. It does not change.

    Attributes:
        name: a random one. Nobody else has a copy with this name.
        header: the message before the tensors.
        tensors: contiguous, on the CPU.
        size: bytes of the tensors.
        digests: numbers of bytes of the tensors, and the SHA-256 up to there. Any thread that sends appends to them.
    """

    def __init__(self, text: str, tensors: Mapping[str, Tensor]) -> None:
        """``text``, ``tensors``: as ``encode`` returns them; the tensors contiguous and on the CPU."""
        self.name = secrets.token_hex(16)
        entries = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()]
        self.header = {"copy": self.name, "tree": text, "tensors": entries}
        self.tensors = list(tensors.values())
        self.size = sum(tensor.nbytes for tensor in self.tensors)
        self.digests = [(0, _hash_of(self.header))]


def send_state(stream: Stream, copy: StateCopy, begin: int = 0) -> None:
    """Sends a state, without the first ``begin`` bytes of its tensors."""
    say(stream, copy.header)
    known, digest = max((found for found in copy.digests if found[0] <= begin), key=lambda found: found[0])
    digest, position = digest.copy(), known
    for part in _parts(copy.tensors, position):
        digest.update(part)
        if begin < position + len(part):
            stream.sendall(part[max(begin - position, 0) :])
        position += len(part)
        if position >= known + _REMEMBERED:
            copy.digests.append((position, digest.copy()))
            known = position
    stream.sendall(digest.digest())


class PartialState:
    """The part of a state that has been received.

    Args:
        most: the bytes that its tensors may have.

    Attributes:
        filled: bytes of its tensors.
        seconds: in which they came.
    """

    def __init__(self, most: int = _LARGEST_TREE) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forgets it."""
        self.header: Any = None
        self.tensors: dict[str, Tensor] = {}
        self.filled, self.seconds = 0, 0.0

    @property
    def copy(self) -> str | None:
        """The sender's name for it; None before it has begun."""
        return None if self.header is None else str(self.header["copy"])

    @property
    def request(self) -> dict[str, Any]:
        """Asks for what is missing."""
        return {"want": "state", "copy": self.copy, "from": self.filled}

    def begin(self, header: Any) -> None:
        """Another copy begins.

        Raises:
            ConnectionError: it is no header, or this process has not the memory.
        """
        self.clear()
        try:
            blank = {key: _blank(name, shape) for key, name, shape in header["tensors"]}
            if (size := sum(tensor.nbytes for tensor in blank.values())) > self._most:
                raise ValueError(f"its tensors have {size} bytes, and {self._most} are allowed for this model")
            tensors = {key: torch.empty_like(tensor, device="cpu") for key, tensor in blank.items()}
            _ = header["tree"], header["copy"]
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ConnectionError(f"no state can begin like this: {error}") from error
        self.header, self.tensors, self.digest = header, tensors, _hash_of(header)

    def fill(self, stream: Stream) -> None:
        """Receives the bytes that are missing."""
        before = time.monotonic()
        for part in _parts(self.tensors.values(), self.filled):
            while part:
                count = stream.recv_into(part)
                if not count:
                    raise ConnectionError("the other end has closed the connection")
                self.digest.update(part[:count])
                self.filled, part = self.filled + count, part[count:]
                now = time.monotonic()
                self.seconds, before = self.seconds + now - before, now


def receive_state(stream: Stream, seconds: float, partial: PartialState | None = None) -> Any:
    """The tree that the other end sends.

    Args:
        seconds: until it begins.
        partial: has what has come of it before, and keeps what comes if the connection breaks. If the other end sends another
            state, this one replaces it.

    Raises:
        ConnectionError: the other end has closed the connection or refused, or the state was damaged on the way.
        TimeoutError: it has not begun in time, or made no progress within the socket's timeout.
        CheckpointError: it is no tree.
    """
    partial = PartialState() if partial is None else partial
    header = hear_answer(stream, seconds, _LARGEST_TREE)
    if header != partial.header:
        partial.begin(header)
    partial.fill(stream)
    digest = bytes(_receive(stream, partial.digest.digest_size))
    tensors, intact = partial.tensors, digest == partial.digest.digest()
    partial.clear()
    if not intact:
        raise ConnectionError("the state was damaged on the way: its SHA-256 is wrong")
    with contextlib.suppress(OSError):  # then the other end keeps its copy for a while
        say(stream, {"received": header["copy"]})
    return decode(header["tree"], lambda key: tensors[key])


def _hash_of(header: Any) -> Any:
    return hashlib.sha256(json.dumps(header).encode())


def _blank(name: str, shape: list[int]) -> Tensor:
    """Has no memory yet."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}, which the other worker's state has")
    return torch.empty(shape, dtype=dtype, device="meta")


def _parts(tensors: Iterable[Tensor], begin: int) -> Iterator[memoryview]:
    """The bytes of ``tensors`` from byte ``begin`` on, in parts."""
    for tensor in tensors:
        array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(array)
        for start in range(begin, len(view), _PART):
            yield view[start : start + _PART]
        begin = max(begin - len(view), 0)


def _receive(stream: Stream, size: int) -> bytearray:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = stream.recv_into(view)
        if not count:
            raise ConnectionError("the other end has closed the connection")
        view = view[count:]
    return found
