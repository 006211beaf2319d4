"""The state of a replica in chunks that another worker asks for, and the messages of its requests and their answers.

A message is a line of JSON, and bytes. An answer with ``wait`` says that the worker lives and needs more time. A state is the
tree and the list of its tensors of ``decent_dp.serialization`` (its header, JSON), and the bytes of the tensors in that order.
A chunk comes with its place (the name of the copy, its size, that of the header, where the chunk begins), and the SHA-256 of
that and its bytes. A damaged one is asked for again. Nothing is executed at the receiver.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from decent_dp.serialization import decode, read_json

__all__ = ["Donor", "NotYetError", "PartialState", "StateCopy", "pack_message", "pull", "unpack_message"]

# Bytes of the smallest and of the largest chunk (a message of the wire has at most 1 MiB), and the seconds that one should
# take: exchanges over the same link wait behind it.
_CHUNKS = (2**17, 2**20 - 2**12)
_SECONDS = 0.01
# Chunks that are asked for and have not come: while one is on its way the donor reads the next ones.
_AHEAD = 4
# Damaged chunks in a row from which on the link, or the donor, is to blame.
_MOST_DAMAGED = 8
# Bytes of the largest header.
_LARGEST_HEADER = 2**30
# Seconds between two requests to a donor that needs more time.
_PAUSE = 0.1
# Bytes per second that a donor copies at least.
_SLOWEST_COPY = 2**26


class NotYetError(TimeoutError):
    """The other worker lives, and needs more time than there was."""


def pack_message(head: Mapping[str, Any], data: bytes = b"") -> bytes:
    return json.dumps(head).encode() + b"\n" + data


def unpack_message(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """The head and the bytes.

    Raises:
        ConnectionError: it is no message.
    """
    end = message.find(b"\n")
    try:
        head = read_json(message[: max(end, 0)].decode())
    except ValueError as error:
        raise ConnectionError(f"a message that is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise ConnectionError(f"a message that is no dict: {str(head)[:100]}")
    return head, memoryview(message)[end + 1 :]


class StateCopy:
    """A state that is given to others. It does not change.

    Attributes:
        name: a random one. Nobody else has a copy with this name.
        size: bytes of the header and the tensors.
    """

    def __init__(self, text: str, tensors: Mapping[str, Tensor]) -> None:
        """``text``, ``tensors``: as ``encode`` returns them; the tensors contiguous and on the CPU."""
        self.name = secrets.token_hex(16)
        entries = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in tensors.items()]
        header = json.dumps({"tree": text, "tensors": entries}).encode()
        self._parts = [memoryview(header), *(_bytes_of(tensor) for tensor in tensors.values() if tensor.nbytes)]
        self._begins = list(itertools.accumulate(map(len, self._parts), initial=0))
        self.size = self._begins[-1]

    def chunk(self, begin: int, size: int = 0) -> bytes:
        """The answer to a request for ``size`` bytes from ``begin`` on, or as many as a chunk has."""
        end, parts = min(begin + _within(size), self.size), list[memoryview]()
        at, part = begin, bisect.bisect_right(self._begins, begin) - 1
        while at < end:
            parts.append(self._parts[part][at - self._begins[part] : end - self._begins[part]])
            at, part = at + len(parts[-1]), part + 1
        place = [self.name, self.size, len(self._parts[0]), begin]
        return b"".join((pack_message({"place": place, "sha256": _digest(place, *parts)}), *parts))


class PartialState:
    """The part of a state that has been received.

    Args:
        most: the bytes that its tensors may have.

    Attributes:
        name: the donor's for its copy; None before it has begun.
        filled, size: bytes of it that have come, and that there are.
        seconds: in which they came.
    """

    def __init__(self, most: int = _LARGEST_HEADER) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forgets it."""
        self.name: str | None = None
        self._header: Any = None
        self._tensors: dict[str, Tensor] = {}
        # Where the next bytes go, the last first.
        self._space: list[memoryview] = []
        self.filled = self.size = 0
        self.seconds = 0.0

    def begin(self, name: str, size: int, header: int) -> None:
        """Another copy begins. ``header``: bytes of its header."""
        self.clear()
        if not 0 < header <= min(size, _LARGEST_HEADER):
            raise ConnectionError(f"no state can begin with a header of {header} bytes")
        self._raw = bytearray(header)
        self.name, self.size, self._space = name, size, [memoryview(self._raw)]

    def add(self, data: memoryview) -> None:
        """The next bytes have come.

        Raises:
            ConnectionError: they are not those of a state, or this process has not the memory.
        """
        self.filled += len(data)
        while data:
            if not self._space:
                raise ConnectionError(f"a state of more than the {self.size} bytes that it was to have")
            space = self._space.pop()
            count = min(len(data), len(space))
            space[:count] = data[:count]
            data = data[count:]
            if count < len(space):
                self._space.append(space[count:])
            elif self._header is None:
                self._begin_tensors()

    def _begin_tensors(self) -> None:
        try:
            self._header = header = read_json(self._raw.decode())
            blank = {key: _blank(name, shape) for key, name, shape in header["tensors"]}
            if (size := sum(tensor.nbytes for tensor in blank.values())) > self._most:
                raise ValueError(f"its tensors have {size} bytes, and {self._most} are allowed for this model")
            if size != self.size - len(self._raw):
                raise ValueError(f"its tensors have {size} bytes, and {self.size - len(self._raw)} are to come")
            self._tensors = {key: torch.empty_like(tensor, device="cpu") for key, tensor in blank.items()}
            _ = header["tree"]
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            self.clear()
            raise ConnectionError(f"no state can begin like this: {error}") from error
        self._space = [_bytes_of(tensor) for tensor in reversed(self._tensors.values()) if tensor.nbytes]

    def take(self) -> Any:
        """The tree of the whole state, which is forgotten here. Raises CheckpointError if it is none."""
        header, tensors = self._header, self._tensors
        self.clear()
        return decode(header["tree"], lambda key: tensors[key])


class Donor:
    """Another worker that is asked.

    Args:
        ask: sends it a request (``Neighbours.ask``).
        stuck: seconds without an answer after which it is given up.
        most: seconds after which ``get`` does not even wait while it copies its state.

    Attributes:
        answered: whether it has answered anything.
    """

    def __init__(self, ask: Callable[[bytes], Future[bytes]], stuck: float, most: float = math.inf) -> None:
        self._ask, self._stuck = ask, stuck
        self._deadline = time.monotonic() + most
        self.answered = False

    def ask(self, request: Mapping[str, Any]) -> Future[bytes]:
        return self._ask(pack_message(request))

    def wait(self, answer: Future[bytes]) -> tuple[dict[str, Any], memoryview]:
        """An answer.

        Raises:
            ConnectionError: the worker cannot be asked, or has refused.
            TimeoutError: none has come.
        """
        if not futures.wait([answer], self._stuck).done:
            raise TimeoutError(f"it has not answered for {self._stuck:g} s")
        head, data = unpack_message(answer.result())
        self.answered = True
        if "refused" in head:
            raise ConnectionError(str(head["refused"]))
        return head, data

    def get(self, request: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], memoryview]:
        """The answer, once the worker has it.

        Raises:
            NotYetError: it has none within so many seconds, and those in which it copies its state.
            ConnectionError, TimeoutError: as of ``wait``.
        """
        began = time.monotonic()
        while True:
            head, data = self.wait(self.ask(request))
            if "wait" not in head:
                return head, data
            size, now = head.get("copies", 0), time.monotonic()
            copies = size / _SLOWEST_COPY if type(size) is int else 0.0
            if now > min(began + seconds + copies, max(began + seconds, self._deadline)):
                raise NotYetError(f"it has not answered within {now - began:.1f} s: {str(head['wait'])[:200]}")
            time.sleep(_PAUSE)


def pull(donor: Donor, partial: PartialState, seconds: float) -> Any:
    """The tree of a worker's state.

    Args:
        partial: has what has come of it before, and keeps what comes if the donor is lost. If this one has another copy, that
            replaces it.
        seconds: until the state begins.

    Raises:
        ConnectionError, TimeoutError: as of ``Donor.get``, or the state is damaged on its way again and again.
        CheckpointError: it is no tree.
    """

    def request(begin: int, size: int = 0) -> dict[str, Any]:
        return {"want": "state", "copy": partial.name, "from": begin, "bytes": size}

    # The ends of the chunks from ``partial.filled`` on that were asked for, and the answers to come.
    asked: deque[tuple[int, Future[bytes]]] = deque()
    damaged, before = 0, time.monotonic()
    # The bytes that have come since the first chunk, and when that came: the bandwidth.
    received, since = 0, 0.0
    while partial.name is None or partial.filled < partial.size:
        if asked:
            end, answer = asked.popleft()
            head, data = donor.wait(answer)
        else:
            end = partial.filled + _within(0)
            head, data = donor.get(request(partial.filled), seconds)
        if "wait" in head:  # it does not know the copy any more
            asked.clear()
            continue
        try:
            name, size, header, begin = head["place"]
            is_intact = head["sha256"] == _digest(head["place"], data)
            if is_intact and name != partial.name and begin == 0:
                asked.clear()
                partial.begin(name, size, header)
                before = time.monotonic()
        except (LookupError, TypeError, ValueError) as error:
            raise ConnectionError(f"no chunk of a state: {error}") from error
        if is_intact and (name, begin) == (partial.name, partial.filled) and data:
            partial.add(data)
            damaged, now = 0, time.monotonic()
            partial.seconds, before = partial.seconds + now - before, now
            received, since = (received + len(data), since) if since else (0, now)
        else:
            damaged += 1
            if damaged > _MOST_DAMAGED:
                raise ConnectionError("the state is damaged on the way: the SHA-256 of a chunk is wrong")
            asked.appendleft((end, donor.ask(request(partial.filled, end - partial.filled))))
        while len(asked) < _AHEAD and (begin := asked[-1][0] if asked else partial.filled) < partial.size:
            size = _within(int(_SECONDS * received / (before - since)) if received else 0)
            asked.append((begin + size, donor.ask(request(begin, size))))
    donor.ask(request(partial.size))  # all of it has come: the donor may drop its copy
    return partial.take()


def _within(size: int) -> int:
    """The bytes of the chunk that has about so many."""
    return min(max(size, _CHUNKS[0]), _CHUNKS[1])


def _digest(place: list[Any], *parts: memoryview) -> str:
    digest = hashlib.sha256(json.dumps(place).encode())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _blank(name: str, shape: list[int]) -> Tensor:
    """Has no memory yet."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}, which the other worker's state has")
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
