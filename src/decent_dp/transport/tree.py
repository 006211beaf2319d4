"""The tree over which the data of a collective go to one worker and back to all."""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport.agreement import PeerView
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.messages import LARGEST_FRAME

__all__ = ["Tree", "spanning_tree"]

# Bytes that go up the tree before the first of them come down: they bound the memory of a worker that is waited for.
_SEGMENT = 2**26


class Tree:
    """Moves data between this worker, its parent and its children. All workers of the tree call the same method.

    Each method raises PeerLostError if one of these is gone, or the collective has failed elsewhere; and PeerTimeoutError.

    Args:
        channel: of the blocks (``Courier``).
        timeout: seconds after which a wait for a living worker fails.
    """

    def __init__(self, plane: ControlPlane, channel: int, timeout: float) -> None:
        self._plane, self._timeout = plane, timeout
        self._courier = plane.courier(channel)
        self._size = 1
        self._parent: int | None = None
        self._children: tuple[int, ...] = ()
        self._has_failed: Callable[[], bool] = lambda: False

    def span(self, ranks: Sequence[int], apart: Collection[frozenset[int]], node_of: Sequence[str]) -> None:
        """It connects these workers from now on. ``apart``, ``node_of``: as of ``spanning_tree``."""
        parents, own = spanning_tree(ranks, apart, node_of), self._plane.rank
        self._size, self._parent = len(ranks), parents[own]
        self._children = tuple(rank for rank in ranks if parents[rank] == own)

    def begin(self, number: int, has_failed: Callable[[], bool]) -> None:
        """The collective of this number begins. ``has_failed``: whether another worker has lost one, or makes another call."""
        self._courier.begin(number)
        self._has_failed = has_failed

    def mean(self, flat: Tensor) -> None:
        """``flat`` becomes its mean over all workers."""
        for segment in torch.split(flat, _SEGMENT // flat.itemsize) if flat.numel() else ():
            self._sum_up(segment)
            self.broadcast(segment.view(torch.uint8))

    def _sum_up(self, flat: Tensor) -> None:
        """``flat`` becomes the mean at the root, and elsewhere the sum of a part of the tree."""
        for part in torch.split(flat, LARGEST_FRAME // flat.itemsize):
            for child in self._children:
                part += torch.frombuffer(bytearray(self._get(child)), dtype=part.dtype)
            if self._parent is None:
                part /= self._size
            else:
                self._put(self._parent, part.view(torch.uint8).numpy())

    def broadcast(self, raw: Tensor) -> None:
        """``raw`` (bytes) becomes that of the root."""
        for part in torch.split(raw, LARGEST_FRAME) if raw.numel() else ():
            if self._parent is not None:
                part.copy_(torch.frombuffer(bytearray(self._get(self._parent)), dtype=torch.uint8))
            for child in self._children:
                self._put(child, part.numpy())

    def gather(self, own: bytes) -> dict[int, bytes]:
        """The bytes of each worker."""
        parts, came = {self._plane.rank: own}, {child: self._get_parts(child) for child in self._children}
        for below in came.values():
            parts.update(below)
        if self._parent is not None:
            self._put_parts(self._parent, parts)
            parts.update(self._get_parts(self._parent))
        for child in self._children:
            self._put_parts(child, {rank: part for rank, part in parts.items() if rank not in came[child]})
        return parts

    def _put_parts(self, peer: int, parts: Mapping[int, bytes]) -> None:
        self._put(peer, json.dumps([(rank, len(part)) for rank, part in parts.items()]).encode())
        for part in parts.values():
            for begin in range(0, len(part), LARGEST_FRAME):
                self._put(peer, memoryview(part)[begin : begin + LARGEST_FRAME])

    def _get_parts(self, peer: int) -> dict[int, bytes]:
        sizes = json.loads(self._get(peer))
        return {rank: b"".join(self._get(peer) for _ in range(0, size, LARGEST_FRAME)) for rank, size in sizes}

    def _put(self, peer: int, block: Any) -> None:
        self._courier.put(peer, bytes(block), partial(self._check, time.monotonic()))

    def _get(self, peer: int) -> bytes:
        return self._courier.get(peer, partial(self._check, time.monotonic()))

    def _check(self, began: float, peer: int) -> None:
        """Raises if a worker is not to be waited for any longer."""
        view = self._plane.view(peer)
        if view is PeerView.LOST:
            raise PeerLostError(f"worker {peer} is gone")
        if view is PeerView.UNKNOWN:
            self._plane.connect(peer)
        if self._has_failed():
            raise PeerLostError("another worker has lost one, or makes another call")
        if time.monotonic() - began > self._timeout:
            raise PeerTimeoutError(
                f"worker {peer} has not sent its part of a collective within the process group's timeout of "
                f"{self._timeout:g} s."
            )


def spanning_tree(ranks: Sequence[int], apart: Collection[frozenset[int]], node_of: Sequence[str]) -> dict[int, int | None]:
    """The parent of each worker in a tree over all of them, whose root is the first; the same on all workers.

    It grows worker by worker (as Prim's algorithm), within a node first, and near the root first. A worker has two children
    where the connections allow it, so that no worker sends much.

    Args:
        apart: pairs of workers that are not connected. One is in the tree if there is no other way.
    """
    parents: dict[int, int | None] = {ranks[0]: None}
    depths, children = {ranks[0]: 0}, Counter[int]()
    for most, anyhow in ((2, False), (len(ranks), False), (len(ranks), True)):
        found: list[tuple[bool, int, int, int]] = []

        def add(rank: int, found: list[tuple[bool, int, int, int]] = found, anyhow: bool = anyhow) -> None:
            for peer in ranks:
                if peer not in parents and (anyhow or frozenset((rank, peer)) not in apart):
                    heapq.heappush(found, (node_of[peer] != node_of[rank], depths[rank], rank, peer))

        for rank in list(parents):
            add(rank)
        while found:
            _, depth, rank, peer = heapq.heappop(found)
            if peer not in parents and children[rank] < most:
                parents[peer], depths[peer] = rank, depth + 1
                children[rank] += 1
                add(peer)
    return parents
