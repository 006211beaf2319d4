"""Messages and the state of a replica over a connection of their own, which blocks.

A message is its length (8 bytes, little-endian), and JSON. ``null`` says that the sender lives and needs more time. A state is
a message with the tree and the tensors of ``decent_dp.serialization``, the bytes of the tensors in that order, and the SHA-256
of all of it. Nothing is executed at the receiver.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from decent_dp.serialization import decode

__all__ = ["hear", "hear_answer", "receive_state", "say", "send_state"]

# Bytes of the largest message without and with a tree, and of a part of a tensor that is sent or received at once.
_LARGEST, _LARGEST_TREE, _PART = 2**20, 2**30, 2**22


def say(stream: socket.socket, message: Any) -> None:
    """Sends a message (JSON)."""
    text = json.dumps(message).encode()
    stream.sendall(len(text).to_bytes(8, "little") + text)


def hear(stream: socket.socket, largest: int = _LARGEST) -> Any:
    """The next message.

    Raises:
        ConnectionError: the other end has closed the connection, or sent no message.
        TimeoutError: nothing came within the socket's timeout.
    """
    size = int.from_bytes(_receive(stream, 8), "little")
    if size > largest:
        raise ConnectionError(f"a message of {size} bytes, where {largest} are allowed")
    try:
        return json.loads(bytes(_receive(stream, size)))
    except ValueError as error:
        raise ConnectionError(f"a message that is no JSON: {error}") from error


def hear_answer(stream: socket.socket, seconds: float, largest: int = _LARGEST) -> Any:
    """The first message that is not ``null``.

    Raises:
        ConnectionError: as of ``hear``, or the other end has refused.
        TimeoutError: there is none within so many seconds.
    """
    deadline, answer = time.monotonic() + seconds, None
    while answer is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"it has not answered within {seconds:g} s")
        answer = hear(stream, largest)
    if "refused" in answer:
        raise ConnectionError(answer["refused"])
    return answer


def send_state(stream: socket.socket, text: str, tensors: Mapping[str, Tensor]) -> None:
    """Sends a tree.

    Args:
        text, tensors: as ``encode`` returns them; the tensors contiguous and on the CPU.
    """
    entries = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()]
    say(stream, {"tree": text, "tensors": entries})
    digest = hashlib.sha256(json.dumps([text, entries]).encode())
    for tensor in tensors.values():
        raw = _bytes_of(tensor)
        for begin in range(0, len(raw), _PART):
            digest.update(raw[begin : begin + _PART])
            stream.sendall(raw[begin : begin + _PART])
    stream.sendall(digest.digest())


def receive_state(stream: socket.socket, seconds: float) -> Any:
    """The tree that the other end sends. ``seconds``: until it begins.

    Raises:
        ConnectionError: the other end has closed the connection or refused, or the state was damaged on the way.
        TimeoutError: it has not begun in time, or made no progress within the socket's timeout.
        CheckpointError: it is no tree.
    """
    header = hear_answer(stream, seconds, _LARGEST_TREE)
    text, entries = header["tree"], header["tensors"]
    digest, tensors = hashlib.sha256(json.dumps([text, entries]).encode()), {}
    for key, name, shape in entries:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConnectionError(f"this torch has no dtype {name!r}, which the other worker's state has")
        raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        view = _bytes_of(raw)
        for begin in range(0, len(view), _PART):
            _receive_into(stream, view[begin : begin + _PART])
            digest.update(view[begin : begin + _PART])
        tensors[key] = raw.view(dtype).reshape(shape)
    if bytes(_receive(stream, digest.digest_size)) != digest.digest():
        raise ConnectionError("the state was damaged on the way: its SHA-256 is wrong")
    return decode(text, lambda key: tensors[key])


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _receive(stream: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    _receive_into(stream, memoryview(found))
    return found


def _receive_into(stream: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        count = stream.recv_into(view[filled:])
        if not count:
            raise ConnectionError("the other end has closed the connection")
        filled += count
