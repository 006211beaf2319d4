"""Groups: the mean of all members' messages, chunk by chunk, each up a tree to its root and down again.

Each chunk has a tree of its own, with traffic between nodes kept small. It is summed inside each node by one worker, its
leader; the leaders' sums go to one of them, the root; the mean comes back the same way. So a node sends and receives each chunk
once as a leaf of the tree. Leaders and roots take turns by the chunk: over all chunks k nodes send and receive 2 (k - 1)/k
copies each, as the best all-reduce does, and two nodes one copy in each direction.

As many chunks as there are nodes, each with its root on another one, move together. In step d of the 2 (k - 1) that they take
between nodes, each root receives the sum of the node d places after its own; then, in step d, each sends the mean there. So
each node sends to one other and receives from one other in each step, and all links are full.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decent_dp.transport.handles import WireHandle, key_of
from decent_dp.transport.interface import ExchangeRequest
from decent_dp.transport.messages import DOWN, UP, Key
from decent_dp.transport.transfers import Receiving, Sending
from decent_dp.transport.wire import Wire

__all__ = ["Branch", "BufferPool", "GroupExchange", "Place", "bytes_of", "find_place", "group_by_node"]

# Bytes of the messages of groups that may wait to be reduced. One chunk of a large group may need more.
_POOL_BYTES = 2**23


class BufferPool:
    """A bounded pool for the messages that groups reduce, given out in the order of requests. Without a bound, a late worker
    would keep all that the others have sent to it. Used by the transport's thread alone."""

    def __init__(self) -> None:
        self._free = _POOL_BYTES
        self._queue: deque[tuple[int, int, Callable[[list[Tensor]], None]]] = deque()
        # Buffers by size, kept while any are in use: allocating and freeing all the time fragments the memory.
        self._unused: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._giving = False

    def take(self, count: int, size: int, then: Callable[[list[Tensor]], None]) -> None:
        """Calls ``then`` with buffers of ``size`` bytes when there is room for all of them; at once if none are needed."""
        if count <= 0:
            then([])
            return
        self._queue.append((count, size, then))
        self._give()

    def release(self, buffers: Sequence[Tensor], *, reuse: bool) -> None:
        """Gives back all buffers of one request. Without ``reuse`` a connection may still write to them."""
        for buffer in buffers:
            self._free += buffer.numel()
            if reuse:
                self._unused[buffer.numel()].append(buffer)
        self._give()
        if self._free == _POOL_BYTES:
            self._unused.clear()

    def _give(self) -> None:
        if self._giving:  # called by `then`, of an exchange that has failed: a long queue of those would nest too deeply
            return
        self._giving = True
        while self._queue:
            count, size, then = self._queue[0]
            if count * size > self._free < _POOL_BYTES:
                break
            self._queue.popleft()
            self._free -= count * size
            unused = self._unused[size]
            then([unused.pop() if unused else torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(count)])
        self._giving = False


class GroupExchange:
    """All members get the message of the mean. Chunks are reduced in the transport's thread."""

    def __init__(
        self,
        wire: Wire,
        request: ExchangeRequest,
        handle: WireHandle,
        nodes: list[list[int]],
        rank: int,
        pool: BufferPool,
        first: int,
    ) -> None:
        self.wire, self.request, self.handle, self.rank, self.pool = wire, request, handle, rank, pool
        numbers = range(len(request.compression.chunks))
        self._reductions = [_ChunkReduction(self, number, find_place(nodes, first + number, rank)) for number in numbers]
        self.other_nodes = len(nodes) - 1
        self._encoded = 0
        self.bytes_sent = sum(reduction.bytes_sent for reduction in self._reductions)
        handle.expect(1)  # besides the messages of the chunks: this worker's own one, when it is coded
        for reduction in self._reductions:
            wire.call(reduction.begin)

    def encoded(self, ready: int) -> None:
        self.wire.call(lambda: self._go_on(ready))

    def _go_on(self, ready: int) -> None:
        compression = self.request.compression
        while self._encoded < len(self._reductions) and compression.chunks[self._encoded].stop <= ready:
            self._reductions[self._encoded].own_ready()
            self._encoded += 1
        if ready >= compression.nbytes:
            self._reductions = []  # they refer to this object: the garbage collector would free their memory late
            self.handle.arrive()


class _ChunkReduction:
    """This worker's part in the tree of one chunk."""

    def __init__(self, group: GroupExchange, number: int, place: Place) -> None:
        self._group, self._number, self._place = group, number, place
        request, chunk = group.request, group.request.compression.chunks[number]
        there = slice(chunk.start, chunk.stop)
        self._own, self._mean = request.sent[there], request.received[there]
        self._up, self._down = (key_of(request.exchange_id, slot + 2 * number) for slot in (UP, DOWN))
        # The memory of the children's messages: the first where the mean will be, the others from the pool.
        self._parts: list[Tensor] = []
        self._pooled: list[Tensor] = []
        # Parts that are missing before the sum can be made: the children's and this worker's own.
        self._missing = len(place.children) + 1
        peers = len(place.children) + (place.parent is not None)
        self.bytes_sent = peers * chunk.payload
        group.handle.expect(2 * peers)

    def begin(self) -> None:
        self._group.pool.take(len(self._place.children) - 1, len(self._mean), self._receive_parts)
        if self._place.parent is not None:
            self._receive(self._place.parent, self._place.parent.down, self._down, self._mean, self._send_mean)

    def own_ready(self) -> None:
        self._run(self._part_ready)

    def _receive_parts(self, buffers: list[Tensor]) -> None:
        self._parts, self._pooled = [self._mean, *buffers], buffers
        if self._group.handle.failed:
            self._release(reuse=False)
        for child, part in zip(self._place.children, self._parts, strict=False):
            self._receive(child, child.up, self._up, part, self._part_ready)

    def _part_ready(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        if self._group.handle.failed:
            self._release(reuse=False)
            return
        if self._place.children:
            try:
                self._reduce()
            finally:
                self._parts.clear()
                self._release(reuse=True)
        if self._place.parent is None:
            self._send_mean()
        else:
            # The mean is received in the same place, but not before the parent has all of the sum.
            self._send(self._place.parent, self._place.parent.up, self._up, self._mean if self._place.children else self._own)

    def _release(self, *, reuse: bool) -> None:
        buffers, self._pooled = self._pooled, []
        self._group.pool.release(buffers, reuse=reuse)

    def _reduce(self) -> None:
        # By rank, whatever the root is: so the numbers do not depend on how the bucket is cut into chunks.
        children = ((child.rank, child.size, part) for child, part in zip(self._place.children, self._parts, strict=True))
        parts = sorted([(self._group.rank, 1, self._own), *children], key=lambda part: part[0])
        messages, sizes = [message for _, _, message in parts], [size for _, size, _ in parts]
        self._group.request.reduce(self._number, messages, sizes, self._mean, self._place.part)

    def _send_mean(self) -> None:
        for child in self._place.children:
            self._send(child, child.down, self._down, self._mean)

    def _receive(self, of: Branch, step: int, key: Key, into: Tensor, then: Callable[[], None]) -> None:
        def done() -> None:
            self._run(then)
            self._group.handle.arrive()

        failed, sources = self._failed(of.rank), self._group.other_nodes
        receiving = Receiving(of.rank, key, bytes_of(into), done, failed, step, sources=sources)
        self._group.wire.call(partial(self._group.wire.flow.add_receiving, receiving))

    def _send(self, to: Branch, step: int, key: Key, data: Tensor) -> None:
        failed = self._failed(to.rank)
        sending = Sending(to.rank, key, bytes_of(data), self._group.handle.arrive, failed, step, ready=len(data))
        self._group.wire.call(partial(self._group.wire.flow.add_sending, sending))

    def _run(self, then: Callable[[], None]) -> None:
        """Runs ``then``: its error fails the exchange and does not end the transport's thread."""
        try:
            then()
        except Exception as error:
            self._group.handle.fail(-1, error)

    def _failed(self, peer: int) -> Callable[[BaseException], None]:
        def fail(error: BaseException) -> None:
            self._group.handle.fail(peer, error)
            self._release(reuse=False)  # the next request is granted, and fails in turn

        return fail


@dataclass(frozen=True)
class Branch:
    """The link between a worker and its parent, or a child, in the tree of one chunk.

    Attributes:
        rank: the other worker's.
        size: the number of workers that the child stands for.
        up, down: the step of the exchange in which the child's sum moves, and the mean.
    """

    rank: int
    size: int
    up: int
    down: int


@dataclass(frozen=True)
class Place:
    """A worker's place in the tree of one chunk.

    Attributes:
        parent: whom its (part's) sum goes to; None for the root.
        children: whose come to it, in the order of their steps; the mean goes back to them.
        part: 0 for the root, else from 1: which node's sum this worker makes.
    """

    parent: Branch | None
    children: tuple[Branch, ...]
    part: int


def group_by_node(ranks: Sequence[int], node_of: Sequence[str]) -> list[list[int]]:
    """Sorted ranks, dealt out to their nodes, in the order of the nodes' first ranks."""
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(node_of[rank], []).append(rank)
    return list(nodes.values())


def find_place(nodes: Sequence[Sequence[int]], chunk: int, rank: int) -> Place:
    """The place of ``rank`` in the tree of ``chunk``; ``nodes`` as of ``group_by_node``."""
    k, lanes = len(nodes), min(len(node) for node in nodes)
    leaders = [node[chunk % lanes] for node in nodes]
    turn, chosen = divmod(chunk // lanes, k)
    mine = next(i for i, node in enumerate(nodes) if rank in node)

    def branch(other: int, size: int, distance: int = 0) -> Branch:
        return Branch(other, size, 2 * k * turn + distance, 2 * k * turn + k + distance)

    if rank != leaders[mine]:
        return Place(branch(leaders[mine], 1), (), 0)
    local = tuple(branch(other, 1) for other in nodes[mine] if other != rank)
    if mine != chosen:
        parent = branch(leaders[chosen], len(nodes[mine]), (mine - chosen) % k)
        return Place(parent, local, 1 + mine)
    others = tuple(branch(leaders[i], len(nodes[i]), (i - chosen) % k) for i in ((chosen + d) % k for d in range(1, k)))
    return Place(None, local + others, 0)


def bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
