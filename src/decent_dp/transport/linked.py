"""Exchanges over links: pairs swap their messages, groups take the mean chunk by chunk."""

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
from decent_dp.transport.links import Links, Receiving, Sending
from decent_dp.transport.reduction_tree import Place, find_place, group_by_node
from decent_dp.transport.waiter import Waiter

__all__ = ["Explain", "LinkedExchanger"]

# Turns a broken connection, or a timeout, into an error that names the peer.
Explain = Callable[[Exception, list[int], ExchangeId], RuntimeError]

# Slots of an exchange's messages: a pair's only one, and those of a group, which are numbered by the chunk.
_WHOLE, _NOTE, _FIRST = 0, 1, 2

# Bytes that are coded between two looks of the links' thread.
_STRIDE = 2**18

# Bytes of groups' messages that may wait to be reduced. What a large group sends for one chunk may be more.
_ROOM = 2**22


@dataclass
class _Patience:
    """Seconds without any progress after which a wait fails, and when one last did."""

    seconds: float
    lost_at: float = 0.0


class _Delivery(Handle):
    """All messages of one exchange. Counted down in the links' thread.

    Args:
        others: whom the exchange needs.
    """

    def __init__(
        self, request: ExchangeRequest, others: list[int], patience: _Patience, links: Links, explain: Explain
    ) -> None:
        self._exchange_id, self._others, self._explain = request.exchange_id, others, explain
        self._patience, self._links = patience, links
        self._started = time.monotonic()
        self._event = threading.Event()
        self._open: Counter[tuple[int, bool]] = Counter()
        self._error: BaseException | None = None
        self._error_peer = -1
        self._read = threading.Event()
        # Given by staged exchanges: brings what came to where it belongs.
        self.land: Callable[[], None] = lambda: None

    def expect(self, peer: int, first: bool = True) -> None:
        """A message from or to ``peer``, which can go as soon as both have begun (``first``), or when others have, too."""
        self._open[peer, first] += 1
        self._open[peer, not first] += 0  # no key is new once another thread looks

    def has_begun(self, peer: int) -> None:
        """A message that could not go is of the first now."""
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

    def has_been_read(self) -> None:
        self._read.set()

    def wait_for_read(self) -> None:
        # What is coded when another worker's hint comes has to be what was there at the start.
        self._await(self._read)

    def wait(self) -> None:
        self._await(self._event)
        error = self._error
        if isinstance(error, OSError):
            raise self._explain(error, [self._error_peer], self._exchange_id) from error
        if isinstance(error, WireError):
            raise WireError(str(error)) from error
        if error is not None:
            raise RuntimeError(f"{self._exchange_id}: the exchange failed: {error}") from error
        self.land()

    def _await(self, event: threading.Event) -> None:
        began = time.monotonic()
        while not event.is_set():
            # Bytes that move are progress, however large the message is.
            last = max(began, *(self._links.moved(peer) for peer in self._others))
            left = last + self._patience.seconds - time.monotonic()
            if self._started < self._patience.lost_at:
                left = 0.0  # who has waited in vain once does not do so for all that was under way
            if not event.wait(max(left, 0.0)) and left <= 0:
                self._patience.lost_at = time.monotonic()
                raise self._explain(TimeoutError(), self._missing(), self._exchange_id)

    def _missing(self) -> list[int]:
        """Who keeps the exchange waiting, as far as can be told here."""
        note = (self._exchange_id.round, self._exchange_id.bucket, _NOTE)
        unheard = [peer for peer in self._others if self._links.awaits_note(peer, note)]
        waited_for = {(peer, first) for (peer, first), count in self._open.items() if count > 0}
        behind = [peer for peer in self._others if (peer, True) in waited_for]
        # Who has begun and does not answer waits for somebody else.
        rest = [peer for peer in self._others if (peer, False) not in waited_for]
        return unheard or behind or rest or self._others


class LinkedExchanger(Exchanger):
    """Pairs and groups over the connections of this worker.

    Args:
        links: the connections.
        rank: this worker's.
        node_of: the name of each worker's node.
        waiter: waits for GPUs.
        timeout: seconds without any progress after which a wait fails.
    """

    def __init__(
        self, links: Links, rank: int, node_of: Sequence[str], waiter: Waiter, timeout: float, explain: Explain
    ) -> None:
        self._links, self._rank, self._node_of = links, rank, node_of
        self._waiter, self._patience, self._explain = waiter, _Patience(timeout), explain
        self._room = _Room()
        self._encodings: deque[Callable[[], bool]] = deque()

    def connect(self, edge: Edge, exchange_id: ExchangeId) -> list[int]:
        """Makes sure that there are connections to the other members; returns them."""
        others = sorted(rank for rank in edge.ranks if rank != self._rank)
        for peer in others:
            try:
                self._links.connect(peer)
            except (OSError, RuntimeError) as error:
                raise self._explain(error, [peer], exchange_id) from error
        return others

    def send_hint(self, edge: Edge, exchange_id: ExchangeId, text: bytes) -> None:
        for peer in self.connect(edge, exchange_id):
            self._links.note(peer, (exchange_id.round, exchange_id.bucket, _NOTE), text)

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        others = self.connect(edge, request.exchange_id)
        delivery = _Delivery(request, others, self._patience, self._links, self._explain)
        staged = request.sent.device.type != "cpu"
        on_host = _stage(request, delivery) if staged else request
        travel: _Pair | _Group
        if len(others) == 1:
            travel = _Pair(self._links, on_host, delivery, others[0])
        else:
            nodes = group_by_node(edge.ranks, self._node_of)
            travel = _Group(self._links, on_host, delivery, nodes, self._rank, self._room)
        delivery.bytes_sent = travel.bytes_sent

        def strides(hints: list[bytes]) -> Iterator[None]:
            last = 0
            for ready in request.encode(hints):
                if not staged and last + _STRIDE <= ready < request.compression.nbytes:
                    travel.encoded(ready)
                    last = ready
                    yield
            delivery.has_been_read()
            if staged:
                self._copy_to_host(request, on_host, travel.encoded, delivery)
            else:
                travel.encoded(request.compression.nbytes)

        def encode(rest: Iterator[None]) -> bool:
            """Codes the next stride; False when all is coded."""
            try:
                with record_function("decent_dp.encode"):
                    next(rest)
                return True
            except StopIteration:
                return False
            except Exception as error:
                delivery.fail(-1, error)  # raised by the wait, as this may run in the links' thread
                return False

        def schedule(hints: list[bytes]) -> None:
            rest = strides(hints)
            if not staged:
                # Beside the backward, which goes on in the training thread.
                self._links.call(lambda: self._encode_in_turn(lambda: encode(rest)))
                return
            while encode(rest):
                pass

        if request.compression.needs_hints:
            key = (request.exchange_id.round, request.exchange_id.bucket, _NOTE)
            self._links.await_notes(others, key, _where_it_was_started(schedule, request.sent))
        else:
            schedule([])
        return delivery

    def _encode_in_turn(self, encode: Callable[[], bool]) -> None:
        """Codes one message after the other, with a turn of the links between two strides."""
        self._encodings.append(encode)
        if len(self._encodings) == 1:
            self._encode_next()

    def _encode_next(self) -> None:
        if not self._encodings[0]():
            self._encodings.popleft()
        if self._encodings:
            self._links.call(self._encode_next)

    def _copy_to_host(
        self, request: ExchangeRequest, on_host: ExchangeRequest, encoded: Callable[[int], None], delivery: _Delivery
    ) -> None:
        ready = written(request.sent)

        def copy() -> None:
            try:
                ready()
                on_host.sent.copy_(request.sent)
                encoded(request.compression.nbytes)
            except Exception as error:
                delivery.fail(-1, error)

        self._waiter.submit(copy)


def _stage(request: ExchangeRequest, delivery: _Delivery) -> ExchangeRequest:
    """The same request with messages on the CPU, for tensors that sockets cannot read."""
    pin = request.sent.is_cuda
    sent, received = (
        torch.empty(request.compression.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin) for _ in range(2)
    )

    def land() -> None:
        delivery.flags = request.compression.flag(sent), request.compression.flag(received)
        request.received.copy_(received, non_blocking=pin)

    delivery.land = land
    return _OnHost(
        request.compression, request.values, sent, received, request.hint, request.rank, request.exchange_id, request.edge
    )


class _OnHost(ExchangeRequest):
    def reduce(self, chunk: int, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, part: int) -> None:
        device = self.compression.device
        result = torch.empty(out.shape, dtype=torch.uint8, device=device)
        super().reduce(chunk, [message.to(device) for message in messages], sizes, result, part)
        out.copy_(result)


class _Room:
    """Memory for what groups combine, handed out in the order of need. Without a bound, a worker that is late would hold what
    all others have sent to it. Used by the links' thread alone."""

    def __init__(self) -> None:
        self._free = _ROOM
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        # Kept while a round goes on, by size: what is allocated and freed all the time leaves holes.
        self._blocks: defaultdict[int, list[Tensor]] = defaultdict(list)

    def ask(self, size: int, then: Callable[[], None]) -> None:
        """Calls ``then`` when ``size`` bytes may be taken."""
        self._queue.append((size, then))
        self._serve()

    def take(self, size: int) -> Tensor:
        """A part of what was asked for."""
        blocks = self._blocks[size]
        return blocks.pop() if blocks else torch.empty(size, dtype=torch.uint8, device="cpu")

    def give_back(self, size: int, blocks: Sequence[Tensor]) -> None:
        """All of what was asked for once, and what was taken of it and nobody writes to any more."""
        for block in blocks:
            self._blocks[block.numel()].append(block)
        self._free += size
        self._serve()
        if self._free == _ROOM:
            self._blocks.clear()

    def _serve(self) -> None:
        while self._queue and (self._queue[0][0] <= self._free or self._free == _ROOM):
            size, then = self._queue.popleft()
            self._free -= size
            then()


class _Pair:
    """Each gets the other's message."""

    def __init__(self, links: Links, request: ExchangeRequest, delivery: _Delivery, peer: int) -> None:
        self._links = links
        key = (request.exchange_id.round, request.exchange_id.bucket, _WHOLE)
        self.bytes_sent = request.compression.payload(request.compression.chunks)
        delivery.expect(peer)
        delivery.expect(peer)

        def arrive() -> None:
            delivery.arrive(peer)

        def fail(error: BaseException) -> None:
            delivery.fail(peer, error)

        received, self._sending = request.received, Sending(peer, key, _bytes(request.sent), arrive, fail)
        links.receive(Receiving(peer, key, request.compression.nbytes, lambda: _bytes(received), arrive, fail))
        links.send(self._sending)

    def encoded(self, ready: int) -> None:
        self._links.advance(self._sending, ready)


class _Group:
    """All get the message of the mean. What is done with a chunk is done in the links' thread."""

    def __init__(
        self, links: Links, request: ExchangeRequest, delivery: _Delivery, nodes: list[list[int]], rank: int, room: _Room
    ) -> None:
        chunks = range(len(request.compression.chunks))
        places = [find_place(nodes, chunk, rank) for chunk in chunks]
        self._branches = [_Branch(links, request, delivery, places[chunk], chunk, room, rank) for chunk in chunks]
        self._links, self._request, self._done = links, request, 0
        self.bytes_sent = sum(branch.bytes_sent for branch in self._branches)
        # One more than the chunks' messages, until all of this worker's own are coded.
        delivery.expect(rank)
        self._arrive: Callable[[], None] = lambda: delivery.arrive(rank)
        for branch in self._branches:
            links.call(branch.begin)

    def encoded(self, ready: int) -> None:
        self._links.call(lambda: self._go_on(ready))

    def _go_on(self, ready: int) -> None:
        while self._done < len(self._branches) and self._request.compression.chunks[self._done].stop <= ready:
            self._branches[self._done].own_ready()
            self._done += 1
        if ready >= self._request.compression.nbytes:
            self._arrive()


class _Branch:
    """This worker's part in the tree of one chunk."""

    def __init__(
        self, links: Links, request: ExchangeRequest, delivery: _Delivery, place: Place, number: int, room: _Room, rank: int
    ) -> None:
        self._links, self._request, self._delivery, self._rank = links, request, delivery, rank
        self._place, self._number, self._room = place, number, room
        chunk = request.compression.chunks[number]
        self._range, self._size = slice(chunk.start, chunk.stop), chunk.stop - chunk.start
        self._up = (request.exchange_id.round, request.exchange_id.bucket, _FIRST + 2 * number)
        self._down = (request.exchange_id.round, request.exchange_id.bucket, _FIRST + 2 * number + 1)
        self._sums: dict[int, Tensor] = {}
        # Bytes beside the request's own that the children's messages take, while they do.
        self._needed, self._held = self._size * max(len(place.children) - 1, 0), 0
        # What is still needed before the sum can be made: the children's, and this worker's own.
        self._missing = len(place.children) + 1
        self.bytes_sent = request.compression.payload([chunk]) * (len(place.children) + (place.parent is not None))
        for child, _ in place.children:
            delivery.expect(child, first=not self._needed)  # what waits for memory has not been asked for
            delivery.expect(child, first=False)
        if place.parent is not None:
            delivery.expect(place.parent)
            delivery.expect(place.parent, first=False)

    def begin(self) -> None:
        if self._needed:
            self._room.ask(self._needed, self._gather)
        else:
            self._gather()
        if self._place.parent is not None:
            self._receive(self._place.parent, self._down, lambda: self._request.received[self._range], self._spread)

    def own_ready(self) -> None:
        self._guarded(self._rank, self._ready)

    def _gather(self) -> None:
        self._held = self._needed
        if self._delivery.failed:
            self._give_back()
        for child, _ in self._place.children:
            if self._needed:
                self._delivery.has_begun(child)
            self._receive(child, self._up, lambda child=child: self._memory_for(child), self._ready)  # type: ignore[misc]

    def _memory_for(self, child: int) -> Tensor:
        # The first to come lies where the mean will be.
        self._sums[child] = self._room.take(self._size) if self._sums else self._request.received[self._range]
        return self._sums[child]

    def _ready(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        if self._delivery.failed:
            self._give_back()
            return
        own, mine = self._request.sent[self._range], self._request.received[self._range]
        if self._place.children:
            try:
                self._reduce(own, mine)
            finally:
                self._give_back(list(self._sums.values())[1:])
                self._sums.clear()
        if self._place.parent is None:
            self._spread()
        else:
            # The mean comes to the same place, but not before the parent has all of this.
            self._send(self._place.parent, self._up, mine if self._place.children else own)

    def _give_back(self, blocks: Sequence[Tensor] = ()) -> None:
        held, self._held = self._held, 0
        if held:
            self._room.give_back(held, blocks)

    def _reduce(self, own: Tensor, out: Tensor) -> None:
        # By rank, whoever is the root: so the numbers do not depend on how the bucket is cut into chunks.
        parts = [(self._rank, 1, own), *((child, size, self._sums[child]) for child, size in self._place.children)]
        parts.sort(key=lambda part: part[0])
        messages, sizes = [message for _, _, message in parts], [size for _, size, _ in parts]
        self._request.reduce(self._number, messages, sizes, out, self._place.part)

    def _spread(self) -> None:
        for child, _ in self._place.children:
            self._send(child, self._down, self._request.received[self._range])

    def _receive(self, peer: int, key: tuple[int, int, int], into: Callable[[], Tensor], then: Callable[[], None]) -> None:
        def done() -> None:
            self._guarded(peer, then)
            self._delivery.arrive(peer, key == self._up)

        self._links.receive(Receiving(peer, key, self._size, lambda: _bytes(into()), done, self._failed(peer)))

    def _send(self, peer: int, key: tuple[int, int, int], data: Tensor) -> None:
        done = lambda: self._delivery.arrive(peer, key == self._up)  # noqa: E731
        self._links.send(Sending(peer, key, _bytes(data), done, self._failed(peer), ready=self._size))

    def _guarded(self, peer: int, then: Callable[[], None]) -> None:
        """An error of ours must not end the links' thread."""
        try:
            then()
        except Exception as error:
            self._delivery.fail(peer, error)

    def _failed(self, peer: int) -> Callable[[BaseException], None]:
        def fail(error: BaseException) -> None:
            self._delivery.fail(peer, error)
            self._give_back()  # the next in turn fails, too, and says so

        return fail


def _where_it_was_started(call: Callable[[list[bytes]], None], tensor: Tensor) -> Callable[[list[bytes]], None]:
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
