"""The state of a replica in chunks that another worker asks for, and the messages of its requests and their answers.

A message is a line of JSON, and bytes. An answer with ``wait`` says that the worker lives and needs more time. A state is a
header (JSON: the tree and the list of its tensors, as ``decent_dp.serialization`` has them), and the bytes of the tensors in
that order, each part padded so that the next one begins at a multiple of 64. A chunk comes with its place (the name of the
copy, its size, that of the header, where the chunk begins), and the SHA-256 of that and its bytes. Nothing is executed at the
receiver.
"""

from __future__ import annotations

import hashlib
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

from decent_dp.replica.host_copies import ALIGNMENT, Staged
from decent_dp.serialization import decode, read_json

__all__ = ["Donor", "PartialState", "StateCopy", "pack_message", "pull", "unpack_message"]

# Bytes of a chunk: exchanges over the same link wait behind it, and larger ones are no faster (the processors are the limit).
_CHUNK = 2**17
# Chunks that are asked for and have not come: while one is on its way the donor reads the next ones.
_AHEAD = 4
# Seconds between two requests to a donor that needs more time.
_PAUSE = 0.1


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

    def __init__(self, text: str, staged: Staged) -> None:
        """``text``: as ``encode`` returns it; ``staged``: copies of its tensors."""
        self.name = secrets.token_hex(16)
        entries = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in staged.tensors.items()]
        header, raw = json.dumps({"tree": text, "tensors": entries}).encode(), memoryview(staged.raw.numpy())  # type: ignore[arg-type]
        self._header, self._raw = header.ljust(_padded(len(header))), raw
        self.size = len(self._header) + len(raw)

    def chunk(self, begin: int) -> bytes:
        """The answer to a request for the bytes from ``begin`` on."""
        first, end = len(self._header), min(begin + _CHUNK, self.size)
        data = self._header[begin:end] + self._raw[max(begin - first, 0) : max(end - first, 0)]
        place = [self.name, self.size, first, begin]
        return pack_message({"place": place, "sha256": _digest(place, data)}, data)


class PartialState:
    """The part of a state that has been received.

    Attributes:
        name: the donor's for its copy; None before it has begun.
        filled, size: bytes of it that have come, and that there are.
        seconds: in which they came.
    """

    def __init__(self) -> None:
        self.begin(None, 0, 0)

    def begin(self, name: str | None, size: int, header: int) -> None:
        """Another copy begins. ``header``: bytes of its header."""
        if not 0 <= header <= size:
            raise ValueError(f"a header of {header} of {size} bytes")
        self._raw = torch.empty(size, dtype=torch.uint8, device="cpu")  # first: there may not be so much memory
        self.name, self.size, self._header = name, size, header
        self.filled, self.seconds = 0, 0.0

    def add(self, data: memoryview) -> None:
        """The next bytes have come."""
        raw: Any = self._raw.numpy()
        memoryview(raw)[self.filled : self.filled + len(data)] = data
        self.filled += len(data)

    def take(self) -> Any:
        """The tree of the whole state, which is forgotten here.

        Raises:
            ConnectionError, CheckpointError: it is none.
        """
        raw, begin, tensors = self._raw, self._header, dict[str, Tensor]()
        self.begin(None, 0, 0)
        try:
            header = read_json(bytes(raw[:begin].numpy()).decode())
            for key, name, shape in header["tensors"]:
                dtype = getattr(torch, name)  # an older version of torch lacks some
                end = begin + math.prod(shape) * dtype.itemsize
                tensors[key] = raw[begin:end].view(dtype).view(shape).clone()  # a deep copy copies the whole storage
                begin += _padded(end - begin)
            return decode(header["tree"], lambda key: tensors[key])
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ConnectionError(f"no state that this worker can read: {error}") from error


class Donor:
    """Another worker that is asked.

    Args:
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
        """An answer. Raises ConnectionError if the worker cannot be asked, or has refused, and TimeoutError if none comes."""
        if not futures.wait([answer], self._stuck).done:
            raise TimeoutError(f"it has not answered for {self._stuck:g} s")
        head, data = unpack_message(answer.result())
        self.answered = True
        if "refused" in head:
            raise ConnectionError(str(head["refused"]))
        return head, data

    def get(self, request: Mapping[str, Any], seconds: float) -> tuple[dict[str, Any], memoryview]:
        """The answer, once the worker has it. Raises as ``wait``, and TimeoutError if it has none within so many seconds in
        which it makes no memory for a copy."""
        began = time.monotonic()
        while True:
            head, data = self.wait(self.ask(request))
            if "wait" not in head:
                return head, data
            now = time.monotonic()
            if head.get("copies") and now < self._deadline:
                began = now
            elif now > began + seconds:
                raise TimeoutError(f"it has not answered within {now - began:.1f} s: {str(head['wait'])[:200]}")
            time.sleep(_PAUSE)


def pull(donor: Donor, partial: PartialState, seconds: float) -> Any:
    """The tree of a worker's state, which begins within so many ``seconds``.

    Args:
        partial: has what has come of it before, and keeps what comes if the donor is lost. Another copy replaces it.

    Raises:
        ConnectionError, TimeoutError: as of ``Donor.get``, or a chunk was damaged on its way.
        CheckpointError: it is no tree.
    """

    def request(begin: int) -> dict[str, Any]:
        return {"want": "state", "copy": partial.name, "from": begin}

    asked, before = deque[Future[bytes]](), time.monotonic()
    while partial.name is None or partial.filled < partial.size:
        head, data = donor.wait(asked.popleft()) if asked else donor.get(request(partial.filled), seconds)
        if "wait" in head:  # it does not know the copy any more
            asked.clear()
            continue
        try:
            name, size, header, begin = head["place"]
            if head["sha256"] != _digest(head["place"], data):
                raise ConnectionError("the state is damaged on the way: the SHA-256 of a chunk is wrong")
            if name != partial.name and begin == 0:
                asked.clear()
                partial.begin(name, size, header)
                before = time.monotonic()
            if (name, begin) != (partial.name, partial.filled) or not 0 < len(data) <= partial.size - partial.filled:
                raise ValueError(f"{len(data)} bytes from {begin} on of {partial.size}")
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ConnectionError(f"no chunk of a state: {error}") from error
        partial.add(data)
        now = time.monotonic()
        partial.seconds, before = partial.seconds + now - before, now
        while len(asked) < _AHEAD and (following := partial.filled + len(asked) * _CHUNK) < partial.size:
            asked.append(donor.ask(request(following)))
    donor.ask(request(partial.size))  # all of it has come: the donor may drop its copy
    return partial.take()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _digest(place: list[Any], data: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps(place).encode())
    digest.update(data)
    return digest.hexdigest()
