"""Exchanges over connections: pairs swap their messages, groups take the mean chunk by chunk."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from decent_dp.errors import WireError
from decent_dp.topo import Edge
from decent_dp.transport.base import ExchangeId, Exchanger, ExchangeRequest, Handle
from decent_dp.transport.tcp.connection import Receiving, Sending
from decent_dp.transport.tcp.reactor import Reactor
from decent_dp.transport.tcp.reduction_tree import Place, find_place, group_by_node
from decent_dp.transport.waiter import Waiter

__all__ = ["Explain", "TcpExchanger"]

# Turns a broken connection, or a timeout, into an error that names the peer.
Explain = Callable[[Exception, list[int], ExchangeId], RuntimeError]

# Slots of the messages of an exchange: the only one of a pair, the hint, and those of a group, two for each chunk.
_WHOLE, _NOTE, _FIRST = 0, 1, 2

# Bytes that are coded before the reactor's thread moves messages again.
_STRIDE = 2**18

# Bytes of the messages of groups that may wait to be reduced. One chunk of a large group may need more.
_POOL_BYTES = 2**22


@dataclass
class _Timeout:
    """Seconds without any progress after which a wait fails, and when a wait last failed so."""

    seconds: float
    expired_at: float = 0.0


class _TcpHandle(Handle):
    """Counts the messages of one exchange that are not done; counted down in the reactor's thread.

    Args:
        others: the other members.
    """

    def __init__(
        self, request: ExchangeRequest, others: list[int], timeout: _Timeout, reactor: Reactor, explain: Explain
    ) -> None:
        self._exchange_id, self._others, self._explain = request.exchange_id, others, explain
        self._timeout, self._reactor = timeout, reactor
        self._started = time.monotonic()
        self._event = threading.Event()
        self._open: Counter[tuple[int, bool]] = Counter()
        self._error: BaseException | None = None
        self._error_peer = -1
        self._read = threading.Event()
        # Staged exchanges copy the received message to its device here.
        self.finish: Callable[[], None] = lambda: None

    def expect(self, peer: int, first: bool = True) -> None:
        """Adds a message from or to ``peer``. With ``first`` it needs these two workers only, else others, too."""
        self._open[peer, first] += 1
        self._open[peer, not first] += 0  # other threads iterate over the keys: none is added later

    def start_waiting(self, peer: int) -> None:
        """A message of ``peer`` needs these two workers only from now on."""
        self._open[peer, False] -= 1
        self._open[peer, True] += 1

    def arrive(self, peer: int, first: bool = True) -> None:
        """One of the messages from or to ``peer`` is done."""
        self._open[peer, first] -= 1
        if not any(self._open.values()):
            self._event.set()

    def fail(self, peer: int, error: BaseException) -> None:
        if self._error is None:
            self._error, self._error_peer = error, peer
        self._read.set()
        self._event.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def mark_read(self) -> None:
        self._read.set()

    def wait_for_read(self) -> None:
        # A message that waits for a hint must hold the values of the start.
        self._wait_for(self._read)

    def wait(self) -> None:
        self._wait_for(self._event)
        error = self._error
        if isinstance(error, OSError):
            raise self._explain(error, [self._error_peer], self._exchange_id) from error
        if isinstance(error, WireError):
            raise WireError(str(error)) from error
        if error is not None:
            raise RuntimeError(f"{self._exchange_id}: the exchange failed: {error}") from error
        self.finish()

    def _wait_for(self, event: threading.Event) -> None:
        began = time.monotonic()
        while not event.is_set():
            # Bytes that move are progress, however large the message is.
            last = max(began, *(self._reactor.last_progress(peer) for peer in self._others))
            left = last + self._timeout.seconds - time.monotonic()
            if self._started < self._timeout.expired_at:
                left = 0.0  # a worker waits for the whole timeout once, not for each exchange in flight
            if not event.wait(max(left, 0.0)) and left <= 0:
                self._timeout.expired_at = time.monotonic()
                raise self._explain(TimeoutError(), self._missing(), self._exchange_id)

    def _missing(self) -> list[int]:
        """The workers that keep the exchange waiting, as far as this worker can know."""
        hint = (self._exchange_id.round, self._exchange_id.bucket, _NOTE)
        without_hint = [peer for peer in self._others if self._reactor.waits_for_note(peer, hint)]
        waited_for = {(peer, first) for (peer, first), count in self._open.items() if count > 0}
        behind = [peer for peer in self._others if (peer, True) in waited_for]
        # A peer that has begun and sends nothing waits for another worker.
        rest = [peer for peer in self._others if (peer, False) not in waited_for]
        return without_hint or behind or rest or self._others


class TcpExchanger(Exchanger):
    """Pairs and groups over the connections of this worker.

    Args:
        reactor: moves the messages.
        rank: this worker's.
        node_of: the name of each worker's node.
        waiter: its thread waits for GPUs.
        timeout: seconds without any progress after which a wait fails.
    """

    def __init__(
        self, reactor: Reactor, rank: int, node_of: Sequence[str], waiter: Waiter, timeout: float, explain: Explain
    ) -> None:
        self._reactor, self._rank, self._node_of = reactor, rank, node_of
        self._waiter, self._timeout, self._explain = waiter, _Timeout(timeout), explain
        self._pool = _BufferPool()
        self._encodings: deque[Callable[[], bool]] = deque()

    def connect(self, edge: Edge, exchange_id: ExchangeId) -> list[int]:
        """Makes sure that there are connections to the other members; returns them."""
        others = sorted(rank for rank in edge.ranks if rank != self._rank)
        for peer in others:
            try:
                self._reactor.connect(peer)
            except (OSError, RuntimeError) as error:
                raise self._explain(error, [peer], exchange_id) from error
        return others

    def send_hint(self, edge: Edge, exchange_id: ExchangeId, text: bytes) -> None:
        for peer in self.connect(edge, exchange_id):
            self._reactor.send_note(peer, (exchange_id.round, exchange_id.bucket, _NOTE), text)

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        others = self.connect(edge, request.exchange_id)
        handle = _TcpHandle(request, others, self._timeout, self._reactor, self._explain)
        staged = request.sent.device.type != "cpu"
        on_host = _stage(request, handle) if staged else request
        exchange: _PairExchange | _GroupExchange
        if len(others) == 1:
            exchange = _PairExchange(self._reactor, on_host, handle, others[0])
        else:
            nodes = group_by_node(edge.ranks, self._node_of)
            exchange = _GroupExchange(self._reactor, on_host, handle, nodes, self._rank, self._pool)
        handle.bytes_sent = exchange.bytes_sent

        def strides(hints: list[bytes]) -> Iterator[None]:
            last = 0
            for ready in request.encode(hints):
                if not staged and last + _STRIDE <= ready < request.compression.nbytes:
                    exchange.encoded(ready)
                    last = ready
                    yield
            handle.mark_read()
            if staged:
                self._copy_to_host(request, on_host, exchange.encoded, handle)
            else:
                exchange.encoded(request.compression.nbytes)

        def encode(rest: Iterator[None]) -> bool:
            """Codes the next stride; False when all is coded."""
            try:
                with record_function("decent_dp.encode"):
                    next(rest)
                return True
            except StopIteration:
                return False
            except Exception as error:
                handle.fail(-1, error)  # raised by the wait, as this may run in the reactor's thread
                return False

        def schedule(hints: list[bytes]) -> None:
            rest = strides(hints)
            if not staged:
                # Beside the backward, which goes on in the training thread.
                self._reactor.call(lambda: self._encode_in_turn(lambda: encode(rest)))
                return
            while encode(rest):
                pass

        if request.compression.needs_hints:
            key = (request.exchange_id.round, request.exchange_id.bucket, _NOTE)
            self._reactor.when_noted(others, key, _on_this_stream(schedule, request.sent))
        else:
            schedule([])
        return handle

    def _encode_in_turn(self, encode: Callable[[], bool]) -> None:
        """Codes one message after the other, and lets messages move between two strides."""
        self._encodings.append(encode)
        if len(self._encodings) == 1:
            self._encode_next()

    def _encode_next(self) -> None:
        if not self._encodings[0]():
            self._encodings.popleft()
        if self._encodings:
            self._reactor.call(self._encode_next)

    def _copy_to_host(
        self, request: ExchangeRequest, on_host: ExchangeRequest, encoded: Callable[[int], None], handle: _TcpHandle
    ) -> None:
        ready = written(request.sent)

        def copy() -> None:
            try:
                ready()
                on_host.sent.copy_(request.sent)
                encoded(request.compression.nbytes)
            except Exception as error:
                handle.fail(-1, error)

        self._waiter.submit(copy)


def _stage(request: ExchangeRequest, handle: _TcpHandle) -> ExchangeRequest:
    """The same request with messages on the CPU, for tensors on a GPU."""
    pin = request.sent.is_cuda
    sent, received = (
        torch.empty(request.compression.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin) for _ in range(2)
    )

    def finish() -> None:
        handle.flags = request.compression.flag(sent), request.compression.flag(received)
        request.received.copy_(received, non_blocking=pin)

    handle.finish = finish
    return _HostRequest(
        request.compression, request.values, sent, received, request.hint, request.rank, request.exchange_id, request.edge
    )


class _HostRequest(ExchangeRequest):
    def reduce(self, chunk: int, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, part: int) -> None:
        device = self.compression.device
        result = torch.empty(out.shape, dtype=torch.uint8, device=device)
        super().reduce(chunk, [message.to(device) for message in messages], sizes, result, part)
        out.copy_(result)


class _BufferPool:
    """A bounded pool for the messages that groups reduce, given out in the order of requests. Without a bound, a late worker
    would keep all that the others have sent to it. Used by the reactor's thread alone."""

    def __init__(self) -> None:
        self._free = _POOL_BYTES
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        # Buffers by size, kept while any are in use: allocating and freeing all the time fragments the memory.
        self._unused: defaultdict[int, list[Tensor]] = defaultdict(list)

    def reserve(self, size: int, then: Callable[[], None]) -> None:
        """Calls ``then`` when ``size`` bytes may be taken."""
        self._queue.append((size, then))
        self._grant()

    def take(self, size: int) -> Tensor:
        """A buffer, as a part of what was reserved."""
        buffers = self._unused[size]
        return buffers.pop() if buffers else torch.empty(size, dtype=torch.uint8, device="cpu")

    def release(self, size: int, buffers: Sequence[Tensor]) -> None:
        """Gives back all of one reservation, with the buffers taken of it."""
        for buffer in buffers:
            self._unused[buffer.numel()].append(buffer)
        self._free += size
        self._grant()
        if self._free == _POOL_BYTES:
            self._unused.clear()

    def _grant(self) -> None:
        while self._queue and (self._queue[0][0] <= self._free or self._free == _POOL_BYTES):
            size, then = self._queue.popleft()
            self._free -= size
            then()


class _PairExchange:
    """Both members get the other's message."""

    def __init__(self, reactor: Reactor, request: ExchangeRequest, handle: _TcpHandle, peer: int) -> None:
        self._reactor = reactor
        key = (request.exchange_id.round, request.exchange_id.bucket, _WHOLE)
        self.bytes_sent = request.compression.payload(request.compression.chunks)
        handle.expect(peer)
        handle.expect(peer)

        def arrive() -> None:
            handle.arrive(peer)

        def fail(error: BaseException) -> None:
            handle.fail(peer, error)

        received, self._sending = request.received, Sending(peer, key, _bytes(request.sent), arrive, fail)
        reactor.receive(Receiving(peer, key, request.compression.nbytes, lambda: _bytes(received), arrive, fail))
        reactor.send(self._sending)

    def encoded(self, ready: int) -> None:
        self._reactor.advance(self._sending, ready)


class _GroupExchange:
    """All members get the message of the mean. Chunks are reduced in the reactor's thread."""

    def __init__(
        self,
        reactor: Reactor,
        request: ExchangeRequest,
        handle: _TcpHandle,
        nodes: list[list[int]],
        rank: int,
        pool: _BufferPool,
    ) -> None:
        chunks = range(len(request.compression.chunks))
        places = [find_place(nodes, chunk, rank) for chunk in chunks]
        self._reductions = [_ChunkReduction(reactor, request, handle, places[chunk], chunk, pool, rank) for chunk in chunks]
        self._reactor, self._request, self._done = reactor, request, 0
        self.bytes_sent = sum(reduction.bytes_sent for reduction in self._reductions)
        # One more than the messages of the chunks, done when this worker's own message is coded.
        handle.expect(rank)
        self._arrive: Callable[[], None] = lambda: handle.arrive(rank)
        for reduction in self._reductions:
            reactor.call(reduction.begin)

    def encoded(self, ready: int) -> None:
        self._reactor.call(lambda: self._go_on(ready))

    def _go_on(self, ready: int) -> None:
        while self._done < len(self._reductions) and self._request.compression.chunks[self._done].stop <= ready:
            self._reductions[self._done].own_ready()
            self._done += 1
        if ready >= self._request.compression.nbytes:
            self._arrive()


class _ChunkReduction:
    """This worker's part in the tree of one chunk."""

    def __init__(
        self,
        reactor: Reactor,
        request: ExchangeRequest,
        handle: _TcpHandle,
        place: Place,
        number: int,
        pool: _BufferPool,
        rank: int,
    ) -> None:
        self._reactor, self._request, self._handle, self._rank = reactor, request, handle, rank
        self._place, self._number, self._pool = place, number, pool
        chunk = request.compression.chunks[number]
        self._range, self._size = slice(chunk.start, chunk.stop), chunk.stop - chunk.start
        self._up = (request.exchange_id.round, request.exchange_id.bucket, _FIRST + 2 * number)
        self._down = (request.exchange_id.round, request.exchange_id.bucket, _FIRST + 2 * number + 1)
        self._sums: dict[int, Tensor] = {}
        # Bytes that the children's messages need beside the request's own memory, and those reserved of the pool.
        self._needed, self._reserved = self._size * max(len(place.children) - 1, 0), 0
        # Parts that are missing before the sum can be made: the children's and this worker's own.
        self._missing = len(place.children) + 1
        self.bytes_sent = request.compression.payload([chunk]) * (len(place.children) + (place.parent is not None))
        for child, _ in place.children:
            handle.expect(child, first=not self._needed)  # a message that waits for memory was not granted
            handle.expect(child, first=False)
        if place.parent is not None:
            handle.expect(place.parent)
            handle.expect(place.parent, first=False)

    def begin(self) -> None:
        if self._needed:
            self._pool.reserve(self._needed, self._receive_parts)
        else:
            self._receive_parts()
        if self._place.parent is not None:
            self._receive(self._place.parent, self._down, lambda: self._request.received[self._range], self._send_mean)

    def own_ready(self) -> None:
        self._run(self._rank, self._ready)

    def _receive_parts(self) -> None:
        self._reserved = self._needed
        if self._handle.failed:
            self._release()
        for child, _ in self._place.children:
            if self._needed:
                self._handle.start_waiting(child)
            self._receive(child, self._up, lambda child=child: self._memory_for(child), self._ready)  # type: ignore[misc]

    def _memory_for(self, child: int) -> Tensor:
        # The first part is received where the mean will be.
        self._sums[child] = self._pool.take(self._size) if self._sums else self._request.received[self._range]
        return self._sums[child]

    def _ready(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        if self._handle.failed:
            self._release()
            return
        own, mine = self._request.sent[self._range], self._request.received[self._range]
        if self._place.children:
            try:
                self._reduce(own, mine)
            finally:
                self._release(list(self._sums.values())[1:])
                self._sums.clear()
        if self._place.parent is None:
            self._send_mean()
        else:
            # The mean is received in the same place, but not before the parent has all of the sum.
            self._send(self._place.parent, self._up, mine if self._place.children else own)

    def _release(self, buffers: Sequence[Tensor] = ()) -> None:
        reserved, self._reserved = self._reserved, 0
        if reserved:
            self._pool.release(reserved, buffers)

    def _reduce(self, own: Tensor, out: Tensor) -> None:
        # By rank, whatever the root is: so the numbers do not depend on how the bucket is cut into chunks.
        parts = [(self._rank, 1, own), *((child, size, self._sums[child]) for child, size in self._place.children)]
        parts.sort(key=lambda part: part[0])
        messages, sizes = [message for _, _, message in parts], [size for _, size, _ in parts]
        self._request.reduce(self._number, messages, sizes, out, self._place.part)

    def _send_mean(self) -> None:
        for child, _ in self._place.children:
            self._send(child, self._down, self._request.received[self._range])

    def _receive(self, peer: int, key: tuple[int, int, int], into: Callable[[], Tensor], then: Callable[[], None]) -> None:
        def done() -> None:
            self._run(peer, then)
            self._handle.arrive(peer, key == self._up)

        self._reactor.receive(Receiving(peer, key, self._size, lambda: _bytes(into()), done, self._failed(peer)))

    def _send(self, peer: int, key: tuple[int, int, int], data: Tensor) -> None:
        done = lambda: self._handle.arrive(peer, key == self._up)  # noqa: E731
        self._reactor.send(Sending(peer, key, _bytes(data), done, self._failed(peer), ready=self._size))

    def _run(self, peer: int, then: Callable[[], None]) -> None:
        """Runs ``then``: its error fails the exchange and does not end the reactor's thread."""
        try:
            then()
        except Exception as error:
            self._handle.fail(peer, error)

    def _failed(self, peer: int) -> Callable[[BaseException], None]:
        def fail(error: BaseException) -> None:
            self._handle.fail(peer, error)
            self._release()  # the next reservation is granted, and fails in turn

        return fail


def _on_this_stream(call: Callable[[list[bytes]], None], tensor: Tensor) -> Callable[[list[bytes]], None]:
    """``call``, on the device and stream of now, after what is queued there, whichever thread calls it."""
    if not tensor.is_cuda:
        return call
    stream = torch.cuda.current_stream(tensor.device)

    def on_stream(hints: list[bytes]) -> None:
        with torch.cuda.stream(stream):
            call(hints)

    return on_stream


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def written(tensor: Tensor) -> Callable[[], None]:
    """A call that blocks until what is queued on the current stream has been written to ``tensor``."""
    if not tensor.is_cuda:
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    wait: Callable[[], None] = event.synchronize
    return wait
