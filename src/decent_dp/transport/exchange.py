"""Exchanges over connections: pairs swap their messages, groups take the mean chunk by chunk, or swap theirs, too."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decent_dp.errors import WireError
from decent_dp.topo import Edge
from decent_dp.transport.base import ExchangeId, ExchangeRequest, Explain, Handle, Verdict
from decent_dp.transport.link import Key, Pair, Receiving, Sending
from decent_dp.transport.liveness import WireNeighbours
from decent_dp.transport.messages import HINT
from decent_dp.transport.neighbours import Neighbours
from decent_dp.transport.profiling import profiled
from decent_dp.transport.reduction_tree import Branch, Place, find_place, group_by_node
from decent_dp.transport.staging import Staging
from decent_dp.transport.streams import on_stream
from decent_dp.transport.waiter import Waiter
from decent_dp.transport.wire import Wire

__all__ = ["WireExchanges"]

# Slots of an exchange: the only message of a pair, the hint (HINT), and the messages of a group, for each chunk one up the tree
# and one down. Messages with an even slot need these two workers only; a mean, which goes down, needs others, too.
_WHOLE, _UP, _DOWN = 0, 2, 3

# Bytes, and seconds, that are coded before the transport's thread moves messages again.
_STRIDE, _STRIDE_FOR = 2**18, 1e-3

# Seconds between two looks at the peer of an exchange, in case that it is gone or silent.
_LOOK_AT_PEERS = 0.25

# Rounds of groups whose chunks are counted: more than are in flight.
_ROUNDS = 256
# Bytes of the messages of groups that may wait to be reduced. One chunk of a large group may need more.
_POOL_BYTES = 2**23


def _key(exchange_id: ExchangeId, slot: int) -> Key:
    return exchange_id.round, exchange_id.bucket, slot


@dataclass
class _Timeout:
    """Seconds without any progress after which a wait fails, and when a wait last failed so."""

    seconds: float
    expired_at: float = 0.0


class _WireHandle(Handle):
    """Waits for the messages of one exchange, which are counted down in the transport's thread.

    Args:
        others: the other members.
    """

    def __init__(self, request: ExchangeRequest, others: list[int], timeout: _Timeout, wire: Wire, explain: Explain) -> None:
        self._exchange_id, self._others, self._explain = request.exchange_id, others, explain
        self._timeout, self._wire = timeout, wire
        self._started = time.monotonic()
        self._messages_left = 0
        self._done, self._read = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._error_peer = -1
        # Staged exchanges copy the received message to its device: from ``land``, in the transport's thread, until ``finish``.
        self.land: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = lambda: None

    def expect(self, messages: int) -> None:
        """Adds messages, before any of them is on its way."""
        self._messages_left += messages

    def arrive(self) -> None:
        """One of the messages has come, or was sent."""
        self._messages_left -= 1
        if not self._messages_left:
            self._complete()

    def _complete(self) -> None:
        try:
            if self._error is None:
                self.land()
        except Exception as error:  # raised by the wait
            self.fail(-1, error)
        self._done.set()

    def fail(self, peer: int, error: BaseException) -> None:
        if self._error is None:
            self._error, self._error_peer = error, peer
        self._read.set()
        self._done.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def mark_read(self) -> None:
        self._read.set()

    def wait_for_read(self) -> None:
        # A message that waits for a hint must hold the values of the start.
        self._wait_for(self._read)

    def wait(self) -> None:
        try:
            self._wait_for(self._done)
            self._raise()
        except BaseException:
            self._forget()  # what comes later must not get into the messages of a later exchange
            raise
        self._finish()

    def _raise(self) -> None:
        error = self._error
        if isinstance(error, OSError):
            raise self._explain(error, [self._error_peer], self._exchange_id) from error
        if isinstance(error, WireError):
            raise WireError(str(error)) from error
        if error is not None:
            raise RuntimeError(f"{self._exchange_id}: the exchange failed: {error}") from error

    def _finish(self) -> None:
        finish = self.finish
        self._forget()
        finish()

    def _forget(self) -> None:
        """Nothing is copied to the device any more. Both calls refer to this handle, and to pinned memory."""
        self.finish = self.land = lambda: None

    def _wait_for(self, event: threading.Event) -> None:
        began = time.monotonic()
        while not event.is_set():
            # Bytes that move are progress, however large the message is.
            last = max(began, *(self._wire.last_progress(peer) for peer in self._others))
            left = last + self._timeout.seconds - time.monotonic()
            if self._started < self._timeout.expired_at:
                left = 0.0  # a worker waits for the whole timeout once, not for each exchange in flight
            if not event.wait(max(left, 0.0)) and left <= 0:
                self._timeout.expired_at = time.monotonic()
                raise self._explain(TimeoutError(), self._missing(), self._exchange_id)

    def _missing(self) -> list[int]:
        """The workers that keep the exchange waiting, as far as this worker can know."""
        hint = _key(self._exchange_id, HINT)
        without_hint = [peer for peer in self._others if self._wire.mailbox.waits_for(peer, hint)]
        slots = {peer: self._wire.open_slots(peer, hint[:2]) for peer in self._others}
        behind = [peer for peer in self._others if any(slot % 2 == 0 for slot in slots[peer])]
        # A peer that has begun and sends no mean waits for another worker.
        rest = [peer for peer in self._others if not slots[peer]]
        return without_hint or behind or rest or self._others


class _SettledHandle(_WireHandle):
    """Waits for the verdict of an exchange of two, where faults are tolerated."""

    def __init__(
        self,
        request: ExchangeRequest,
        others: list[int],
        timeout: _Timeout,
        wire: Wire,
        explain: Explain,
        neighbours: WireNeighbours,
    ) -> None:
        super().__init__(request, others, timeout, wire, explain)
        self.neighbours = neighbours
        [self._peer], self._key = others, _key(request.exchange_id, _WHOLE)
        self.pair: Pair | None = None
        self._settled: Verdict | None = None
        self._in_doubt = False

    def settle(self, verdict: Verdict) -> None:
        self._settled = verdict
        self._wire.mailbox.forget(self._peer, _key(self._exchange_id, HINT))
        self._read.set()
        if verdict is Verdict.NEITHER:
            self._done.set()
        else:
            self._complete()

    @property
    def failed(self) -> bool:
        return self._error is not None or self._settled is not None or self._in_doubt

    @property
    def verdict(self) -> Verdict:  # type: ignore[override]
        return self._settled or Verdict.OPEN

    def wait(self) -> None:
        self._wait_for(self._done)
        self._raise()
        if self._settled is Verdict.NEITHER:
            self._forget()
        else:
            self._finish()

    def _wait_for(self, event: threading.Event) -> None:
        assert self.pair is not None
        # As if the clock stood still while this process was stopped.
        offset = self._wire.now() - self._wire.stopped
        while not (event.is_set() or self._in_doubt):
            now = self._wire.now()  # first: the thread changes it last
            began = min(offset + self._wire.stopped, now)
            lively = self.neighbours.patience(self._peer, began)
            in_time = self.neighbours.expected_end(self.pair, began) - now
            active = max(began, self._wire.last_progress(self._peer)) + self._timeout.seconds - now
            left = min(lively, in_time, active)
            if left > 0:
                event.wait(min(left, _LOOK_AT_PEERS))
            elif self.neighbours.abandon(self._peer, self._key, late=lively > 0 and in_time <= 0) is Verdict.OPEN:
                self._in_doubt = True
        self.neighbours.waited(self.pair, offset + self._wire.stopped)


class WireExchanges:
    """Pairs and groups over the connections of this worker.

    Args:
        wire: moves the messages.
        rank: this worker's.
        node_of: the name of each worker's node.
        waiter: its thread waits for GPUs.
        timeout: seconds without any progress after which a wait fails.
    """

    def __init__(self, wire: Wire, rank: int, node_of: Sequence[str], waiter: Waiter, timeout: float, explain: Explain) -> None:
        self._wire, self._rank, self._node_of = wire, rank, node_of
        self._waiter, self._timeout, self._explain = waiter, _Timeout(timeout), explain
        self._pool = _BufferPool()
        self._neighbours: WireNeighbours | None = None
        # By round and group: the number of the next chunk.
        self._counted: dict[tuple[int, tuple[int, ...]], int] = {}
        self._encodings: deque[Callable[[], bool]] = deque()
        # By bucket, of tensors on a GPU: an event, when its last message has been copied.
        self._copied: dict[int, Any] = {}

    def tolerate(self, dead_after: float, places: int) -> Neighbours:
        """``Wire.tolerate``."""
        self._neighbours = self._wire.tolerate(dead_after, places)
        return self._neighbours

    def connect(self, edge: Edge, exchange_id: ExchangeId, *, ahead: bool = False) -> list[int]:
        """Makes sure that there are connections to the other members; returns them.

        Args:
            ahead: before training, when it may take its time.
        """
        others = sorted(rank for rank in edge.ranks if rank != self._rank)
        for peer in others:
            try:
                self._wire.connect(peer, wait=ahead or self._neighbours is None, ahead=ahead)
            except (OSError, RuntimeError) as error:
                self._wire.refuse_failed()
                raise self._explain(error, [peer], exchange_id) from error
        return others

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        others = self.connect(edge, request.exchange_id)
        arguments = request, others, self._timeout, self._wire, self._explain
        neighbours = self._neighbours
        handle = _WireHandle(*arguments) if neighbours is None else _SettledHandle(*arguments, neighbours)
        staging = self._stage(request, handle) if request.sent.device.type != "cpu" else None
        on_host = request if staging is None else staging.on_host
        exchange: _Swap | _GroupExchange
        if len(others) == 1 or request.compression.gathers:
            exchange = _Swap(self._wire, on_host, handle, others, self._rank)
        else:
            nodes = group_by_node(edge.ranks, self._node_of)
            first = self._first_chunk(edge, on_host)
            exchange = _GroupExchange(self._wire, on_host, handle, nodes, self._rank, self._pool, first)
        handle.bytes_sent = exchange.bytes_sent

        def strides(hints: list[bytes]) -> Iterator[None]:
            last, until = 0, time.monotonic() + _STRIDE_FOR
            for ready in request.encode(hints):
                if staging is None and last + _STRIDE <= ready < request.compression.nbytes and time.monotonic() >= until:
                    exchange.encoded(ready)
                    last = ready
                    yield
                    until = time.monotonic() + _STRIDE_FOR
            handle.mark_read()
            if staging is None:
                exchange.encoded(request.compression.nbytes)
            else:
                self._send_staged(staging, request, exchange.encoded, handle)

        def encode(rest: Iterator[None]) -> bool:
            """Codes the next stride; False when all is coded, or nobody waits for it any more."""
            if isinstance(handle, _SettledHandle) and handle.failed:
                return False
            try:
                with profiled("decent_dp.encode"):
                    next(rest)
                return True
            except StopIteration:
                return False
            except Exception as error:
                handle.fail(-1, error)  # raised by the wait, as this may run in the transport's thread
                return False

        def schedule(hints: list[bytes]) -> None:
            rest = strides(hints)
            if staging is None:
                # Beside the backward, which goes on in the training thread.
                self._wire.call(lambda: self._encode_in_turn(lambda: encode(rest)))
                return
            while encode(rest):
                pass

        if request.compression.needs_hints:
            key = _key(request.exchange_id, HINT)
            for peer in others:
                self._wire.send_hint(peer, key, request.hint)
            self._wire.mailbox.when_hinted(others, key, _on_this_stream(schedule, request.sent))
            if isinstance(handle, _SettledHandle) and handle.failed:  # in the meantime
                self._wire.mailbox.forget(others[0], key)
        else:
            schedule([])
        return handle

    def _first_chunk(self, edge: Edge, request: ExchangeRequest) -> int:
        """The number of an exchange's first chunk among those of its group in this round.

        All buckets' chunks are numbered, so that nodes are roots of equally many.
        """
        key = request.exchange_id.round, tuple(sorted(edge.ranks))
        first = self._counted.get(key, 0)
        self._counted[key] = first + len(request.compression.chunks)
        if len(self._counted) > _ROUNDS:
            del self._counted[next(iter(self._counted))]
        return first

    def _stage(self, request: ExchangeRequest, handle: _WireHandle) -> Staging:
        staging = Staging(request, self._copied.get(request.exchange_id.bucket))

        def finish() -> None:
            handle.flags = staging.flags
            staging.finish()

        handle.land, handle.finish = staging.land, finish
        return staging

    def _send_staged(
        self, staging: Staging, request: ExchangeRequest, encoded: Callable[[int], None], handle: _WireHandle
    ) -> None:
        staging.send(self._waiter, encoded, lambda error: handle.fail(-1, error))
        self._copied[request.exchange_id.bucket] = staging.copied

    def _encode_in_turn(self, encode: Callable[[], bool]) -> None:
        """Codes one message after the other, and lets messages move between two strides."""
        self._encodings.append(encode)
        if len(self._encodings) == 1:
            self._encode_next()

    def _encode_next(self) -> None:
        if not self._encodings[0]():
            self._encodings.popleft()
        if self._encodings:
            self._wire.call(self._encode_next)


class _BufferPool:
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


class _Swap:
    """All members get the messages of the others: those of a pair, or of a group that is not to be summed."""

    def __init__(self, wire: Wire, request: ExchangeRequest, handle: _WireHandle, others: list[int], rank: int) -> None:
        self._wire = wire
        key, sent = _key(request.exchange_id, _WHOLE), _bytes(request.sent)
        self.bytes_sent = len(others) * request.compression.payload(request.compression.chunks)
        handle.expect(2 * len(others))
        self._sendings: list[Sending] = []
        members = sorted([*others, rank])
        for peer, received in zip(others, request.messages(len(others)), strict=True):
            # In each step of a group every member sends to one and receives from one. A pair has no steps.
            distance = members.index(peer) - members.index(rank) if len(members) > 2 else 0
            ahead, behind = distance % len(members), -distance % len(members)
            failed = partial(handle.fail, peer)
            sending = Sending(peer, key, sent, handle.arrive, failed, ahead)
            receiving = Receiving(peer, key, _bytes(received), handle.arrive, failed, behind, sources=len(others))
            self._sendings.append(sending)
            if isinstance(handle, _SettledHandle):
                handle.pair = Pair(receiving, sending, handle.settle)
                handle.neighbours.open(handle.pair)
            else:
                wire.receive(receiving)
                wire.send(sending)

    def encoded(self, ready: int) -> None:
        for sending in self._sendings:
            self._wire.advance(sending, ready)


class _GroupExchange:
    """All members get the message of the mean. Chunks are reduced in the transport's thread."""

    def __init__(
        self,
        wire: Wire,
        request: ExchangeRequest,
        handle: _WireHandle,
        nodes: list[list[int]],
        rank: int,
        pool: _BufferPool,
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

    def __init__(self, group: _GroupExchange, number: int, place: Place) -> None:
        self._group, self._number, self._place = group, number, place
        request, chunk = group.request, group.request.compression.chunks[number]
        there = slice(chunk.start, chunk.stop)
        self._own, self._mean = request.sent[there], request.received[there]
        self._up, self._down = (_key(request.exchange_id, slot + 2 * number) for slot in (_UP, _DOWN))
        # The memory of the children's messages: the first where the mean will be, the others from the pool.
        self._parts: list[Tensor] = []
        self._pooled: list[Tensor] = []
        # Parts that are missing before the sum can be made: the children's and this worker's own.
        self._missing = len(place.children) + 1
        peers = len(place.children) + (place.parent is not None)
        self.bytes_sent = peers * request.compression.payload([chunk])
        group.handle.expect(2 * peers)

    def begin(self) -> None:
        self._group.pool.take(len(self._place.children) - 1, len(self._mean), self._receive_parts)
        if self._place.parent is not None:
            self._receive(self._place.parent, self._place.parent.down, self._down, self._mean, self._send_mean)

    def own_ready(self) -> None:
        self._run(self._group.rank, self._part_ready)

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
            self._run(of.rank, then)
            self._group.handle.arrive()

        failed, sources = self._failed(of.rank), self._group.other_nodes
        self._group.wire.receive(Receiving(of.rank, key, _bytes(into), done, failed, step, sources=sources))

    def _send(self, to: Branch, step: int, key: Key, data: Tensor) -> None:
        failed = self._failed(to.rank)
        sending = Sending(to.rank, key, _bytes(data), self._group.handle.arrive, failed, step, ready=len(data))
        self._group.wire.send(sending)

    def _run(self, peer: int, then: Callable[[], None]) -> None:
        """Runs ``then``: its error fails the exchange and does not end the transport's thread."""
        try:
            then()
        except Exception as error:
            self._group.handle.fail(peer, error)

    def _failed(self, peer: int) -> Callable[[BaseException], None]:
        def fail(error: BaseException) -> None:
            self._group.handle.fail(peer, error)
            self._release(reuse=False)  # the next request is granted, and fails in turn

        return fail


def _on_this_stream(call: Callable[[list[bytes]], None], tensor: Tensor) -> Callable[[list[bytes]], None]:
    """``call``, on the device and stream of now, after what is queued there, whichever thread calls it."""
    if not tensor.is_cuda:
        return call
    stream = torch.cuda.current_stream(tensor.device)

    def there(hints: list[bytes]) -> None:
        with on_stream(stream):
            call(hints)

    return there


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
