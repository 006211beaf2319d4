"""Exchanges over connections: pairs swap their messages, groups take the mean chunk by chunk, or swap theirs, too."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decent_dp.topo import Edge
from decent_dp.transport.groups import BufferPool, GroupExchange, bytes_of, group_by_node
from decent_dp.transport.handles import AllNeeded, Policy, WireHandle, key_of
from decent_dp.transport.host_messages import HostMessages
from decent_dp.transport.interface import ExchangeRequest, Explain, Handle
from decent_dp.transport.messages import HINT, WHOLE
from decent_dp.transport.streams import on_stream, profiled
from decent_dp.transport.transfers import Receiving, Sending
from decent_dp.transport.votes import ExchangeId, PairExchange
from decent_dp.transport.waiter import Waiter
from decent_dp.transport.wire import Wire

__all__ = ["WireExchanges"]

# Bytes that are coded at least before the transport's thread moves messages again.
_STRIDE = 2**18
# Seconds after which it does.
_STRIDE_FOR = 1e-3
# Rounds of groups whose chunks are counted: more than are in flight.
_ROUNDS = 256


class WireExchanges:
    """Pairs and groups over the connections of this worker.

    Args:
        wire: moves the messages.
        rank: this worker's.
        node_of: the name of each worker's node.
        waiter: its thread waits for GPUs.
        timeout: seconds without any progress after which a wait fails.

    Attributes:
        policy: what it means if an exchange has no result.
    """

    def __init__(self, wire: Wire, rank: int, node_of: Sequence[str], waiter: Waiter, timeout: float, explain: Explain) -> None:
        self._wire, self._rank, self._node_of = wire, rank, node_of
        self._waiter, self._explain = waiter, explain
        self.policy: Policy = AllNeeded(wire, timeout, explain)
        self._pool = BufferPool()
        # By round and group: the number of the next chunk.
        self._counted: dict[tuple[int, tuple[int, ...]], int] = {}
        self._encodings: deque[Iterator[None]] = deque()
        # By bucket, of tensors on a GPU: an event, when its last message has been copied.
        self._copied: dict[int, Any] = {}

    def connect(self, edges: Sequence[Edge]) -> None:
        """Connects this worker along ``edges``, of the rounds from 0 on, before training."""
        found = [(t, rank) for t, edge in enumerate(edges) for rank in sorted(edge.ranks) if rank != self._rank]
        for _, peer in found:
            self._wire.connect(peer)
        for t, peer in found:
            if not self._wire.is_connected(peer):
                self.policy.end_without(peer, ExchangeId(t, 0))

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        others = sorted(rank for rank in edge.ranks if rank != self._rank)
        self._wire.commands.refuse_failed()
        for peer in others:
            self._wire.connect(peer)
        handle = WireHandle(request.exchange_id, others, self.policy, self._wire, self._explain)
        staging = self._stage(request, handle) if request.sent.device.type != "cpu" else None
        on_host = request if staging is None else staging.on_host
        if len(others) == 1:
            encoded = self._swap(on_host, handle, others[0])
        else:
            nodes = group_by_node(edge.ranks, self._node_of)
            first = self._first_chunk(edge, on_host)
            group = GroupExchange(self._wire, on_host, handle, nodes, self._rank, self._pool, first)
            encoded, handle.bytes_sent = group.encoded, group.bytes_sent

        def encode(hints: list[bytes]) -> None:
            strides = self._encode(request, hints, handle, encoded, staging)
            if staging is None:  # beside the backward, which goes on in the training thread
                self._wire.call(lambda: self._encode_in_turn(strides))
                return
            for _ in strides:
                pass

        if not request.compression.needs_hints:
            encode([])
            return handle
        key, then = key_of(request.exchange_id, HINT), _on_this_stream(encode, request.sent)

        def swap_hints() -> None:
            for peer in others:
                self._wire.hints.send(peer, key, request.hint)
            if not (handle.pair and handle.failed):
                self._wire.hints.when_there(others, key, then)

        self._wire.call(swap_hints)
        return handle

    def _swap(self, request: ExchangeRequest, handle: WireHandle, peer: int) -> Callable[[int], None]:
        """Both members of a pair get the message of the other one. Returns what is called with the bytes that are coded."""
        key, failed, settlement = key_of(request.exchange_id, WHOLE), partial(handle.fail, peer), self._wire.settlement
        sending = Sending(peer, key, bytes_of(request.sent), _nothing, failed)
        receiving = Receiving(peer, key, bytes_of(request.received), _nothing, failed)
        pair = handle.pair = PairExchange(receiving, sending, partial(handle.settle, peer))
        handle.bytes_sent = sum(chunk.payload for chunk in request.compression.chunks)
        handle.expect(1)
        self._wire.call(partial(settlement.open, pair))
        return lambda ready: self._wire.call(partial(settlement.send, pair, ready))

    def _encode(
        self,
        request: ExchangeRequest,
        hints: list[bytes],
        handle: WireHandle,
        encoded: Callable[[int], None],
        staging: HostMessages | None,
    ) -> Iterator[None]:
        """Codes a message, unless nobody waits for it any more; yields where messages may move."""
        steps = request.encode(hints)
        last, until = 0, time.monotonic() + _STRIDE_FOR
        try:
            while not (handle.pair and handle.failed):
                with profiled("decent_dp.encode"):
                    ready = next(steps, None)
                if ready is None:
                    handle.mark_read()
                    if staging is None:
                        encoded(request.compression.nbytes)
                    else:
                        staging.send(self._waiter, encoded, lambda error: handle.fail(-1, error))
                        self._copied[request.exchange_id.bucket] = staging.copied
                    return
                if staging is None and last + _STRIDE <= ready < request.compression.nbytes and time.monotonic() >= until:
                    encoded(ready)
                    last = ready
                    yield
                    until = time.monotonic() + _STRIDE_FOR
        except Exception as error:
            handle.fail(-1, error)  # raised by the wait, as this may run in the transport's thread

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

    def _stage(self, request: ExchangeRequest, handle: WireHandle) -> HostMessages:
        staging = HostMessages(request, self._copied.get(request.exchange_id.bucket))

        def finish() -> tuple[int, int] | None:
            staging.finish()
            return staging.flags

        handle.land, handle.finish = staging.land, finish
        return staging

    def _encode_in_turn(self, strides: Iterator[None]) -> None:
        """Codes one message after the other, and lets messages move between two strides."""
        self._encodings.append(strides)
        if len(self._encodings) == 1:
            self._encode_next()

    def _encode_next(self) -> None:
        for _ in self._encodings[0]:
            break
        else:
            self._encodings.popleft()
        if self._encodings:
            self._wire.call(self._encode_next)


def _nothing() -> None:
    return


def _on_this_stream(call: Callable[[list[bytes]], None], tensor: Tensor) -> Callable[[list[bytes]], None]:
    """``call``, on the device and stream of now, after what is queued there, whichever thread calls it."""
    if not tensor.is_cuda:
        return call
    stream = torch.cuda.current_stream(tensor.device)

    def there(hints: list[bytes]) -> None:
        with on_stream(stream):
            call(hints)

    return there
